"""Tuning caches on disk: `<folder>/<device>/<kernel>.json`, one for each kind of GPU and kernel.

Two folders: the user's, which tuning writes, and the repository's, which is shipped.  Files are data: read as JSON, checked
against the schema, never executed.  Writes are atomic and locked, and every write adds to what is on disk at that moment,
so tuners that run at the same time lose nothing, and one that is killed loses at most the trial it was at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import platformdirs

import mosaic_gpu
from mosaic_gpu.errors import CacheInvalid

from . import schema
from .schema import SCHEMA, canonical

ENVIRONMENT_VARIABLE = "MOSAIC_GPU_TUNE_DIR"
LOCK_SECONDS = 60.0
Cache = dict[str, Any]


def user_folder() -> Path:
    """Where tuning writes: MOSAIC_GPU_TUNE_DIR, else a folder of the user's data directory."""
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_data_dir("mosaic_gpu", appauthor=False)) / "autotune_cache"


def repository_folder() -> Path:
    """The shipped caches: beside the installed package, or at the top of the repository for an editable install."""
    package = Path(str(mosaic_gpu.__file__)).parent
    inside = package / "autotune_cache"
    return inside if inside.is_dir() else package.parent / "autotune_cache"


def cache_file(folder: Path, device: str, kernel: str) -> Path:
    """Of a kernel on a device, such as `nvidia_h200/attention.json`."""
    return folder / device / f"{kernel}.json"


def now() -> str:
    """The date, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A file that can be used.  entries: those that keep the schema.  broken: what is wrong with the others."""

    path: Path
    data: Cache
    entries: tuple[Cache, ...]
    broken: tuple[str, ...]

    def provenance(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the best config of an entry was measured with; {} where the header does not have it."""
        found = self.data["header"]["provenances"].get((entry["best"] or {}).get("provenance"), {})
        return found if isinstance(found, dict) else {}


def parsed(text: str) -> Any:
    """JSON, without the NaN and the infinities that Python adds to it: what compares with nothing is no time.  ValueError."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    return json.loads(text, parse_constant=refuse)


def read(path: Path) -> Cache:
    """A file's content if its header is right for its place; CacheInvalid says what is wrong and the way out.

    Entries are as they are: `load` and `schema.problems` judge them.
    """
    device, kernel = path.parent.name, path.stem
    try:
        data: Any = parsed(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise CacheInvalid(f"the tuning cache {path} cannot be read: {error}") from error
    except ValueError as error:
        raise CacheInvalid(
            f"the tuning cache {path} is no JSON, or only a part ({error}): move it away and tune again"
        ) from error
    if not isinstance(data, dict) or "schema" not in data:
        raise CacheInvalid(f"{path} is no tuning cache: it holds no JSON object with a `schema`")
    if data["schema"] != SCHEMA:
        way_out = (
            f"`mosaic-gpu tune merge {path} --out NEW` brings it to {SCHEMA}"
            if data["schema"] == 1
            else "a newer version of mosaic_gpu wrote it"
        )
        raise CacheInvalid(
            f"the tuning cache {path} has schema {data['schema']!r}, this version has {SCHEMA}: {way_out}"
        )
    entries = data.get("entries")
    found = schema.problems({**data, "entries": []} if isinstance(entries, list) else data)
    if found:
        raise CacheInvalid(f"the header of the tuning cache {path} does not keep the schema: {'; '.join(found[:3])}")
    header = data["header"]
    if header["device"]["name"] != device:
        raise CacheInvalid(
            f"the tuning cache {path} was measured on {header['device']['name']}, its folder is {device}'s: "
            "timings of another GPU are not used; move it where it belongs"
        )
    if header["kernel"]["name"] != kernel:
        raise CacheInvalid(
            f"the tuning cache {path} is of the kernel {header['kernel']['name']!r}, its name says {kernel!r}: "
            "if the kernel was renamed, tune it under its new name"
        )
    return data


@functools.lru_cache(maxsize=64)
def _load(path: Path, stamp: tuple[int, int]) -> Loaded:
    data = read(path)
    good, broken = [], []
    for i, entry in enumerate(data["entries"]):
        # Trials are for people and the search: a lookup needs none, and a broken one costs nothing here.
        quick = {**entry, "trials": []} if isinstance(entry, dict) and isinstance(entry.get("trials"), list) else entry
        found = schema.problems(quick, "entry")
        if found:
            broken.append(f"entry {i} of {path} is left out: {'; '.join(found[:3])}")
        else:
            good.append(entry)
    return Loaded(path, data, tuple(good), tuple(broken))


def load(path: Path) -> Loaded | None:
    """A file for lookups, remembered until it changes; None where there is none.  CacheInvalid as for `read`."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _load(path, (status.st_mtime_ns, status.st_size))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)
        lock.acquire()
    except filelock.Timeout as error:
        raise CacheInvalid(f"{path} is locked by another process for more than {LOCK_SECONDS:.0f} s") from error
    except OSError as error:
        raise CacheInvalid(_cannot_write(path, error)) from error
    try:
        yield
    finally:
        lock.release()


def _cannot_write(path: Path, error: OSError) -> str:
    return f"the tuning cache {path} cannot be written: {error.strerror or error}; {ENVIRONMENT_VARIABLE} names another folder"


def write(path: Path, data: Cache) -> None:
    """Replace a file at once: readers see the old one or the new one, never a part.  CacheInvalid where that fails."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".writing")
        with os.fdopen(descriptor, "w") as file:
            file.write(schema.dump(data))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise CacheInvalid(_cannot_write(path, error)) from error
        raise


def update(path: Path, change: Callable[[Cache | None], Cache]) -> Cache:
    """Write what `change` makes of the file's content (None where there is no file), under a lock; returns it.

    A file that cannot be understood is never overwritten: CacheInvalid.
    """
    with _locked(path):
        for left in path.parent.glob(f".{path.stem}-*.writing"):  # of a writer that was killed: the lock is ours now
            with contextlib.suppress(OSError):
                left.unlink()
        data = change(read(path) if path.exists() else None)
        write(path, data)
    return data


# ---- entries ----------------------------------------------------------------------------------------------------------


def provenance_id(provenance: Mapping[str, Any]) -> str:
    """Its short name in a file."""
    return hashlib.sha256(canonical(provenance).encode()).hexdigest()[:10]


def with_best(entry: Cache, flops: float | None, provenance: str | None = None) -> Cache:
    """The entry with its best config found again: the fastest right trial of those that came furthest, of one provenance.

    provenance: whose trials count; None takes that of the newest right trial.
    """
    right = [t for t in entry["trials"] if isinstance(t, dict) and t.get("status") == "ok" and t.get("seconds")]
    if provenance is None and right:
        provenance = max(right, key=lambda t: str(t["date"]))["provenance"]
    right = [t for t in right if t["provenance"] == provenance]
    if not right:
        return entry
    furthest = max(t.get("stage") or 0 for t in right)
    best = min((t for t in right if (t.get("stage") or 0) == furthest), key=lambda t: float(t["seconds"]))
    made = {
        "config": best["config"],
        "seconds": best["seconds"],
        "spread": best.get("spread"),
        "tflops": round(flops / best["seconds"] / 1e12, 1) if flops else None,
        "provenance": best["provenance"],
        "date": best["date"],
    }
    return {**entry, "best": made}


def find_entry(data: Cache | None, key: Mapping[str, Any], workload: Mapping[str, Any]) -> Cache | None:
    """The entry of a workload, None where there is none."""
    wanted = canonical([key, workload])
    found = (e for e in (data or {}).get("entries", []) if isinstance(e, dict))
    return next((e for e in found if canonical([e.get("key"), e.get("workload")]) == wanted), None)


def with_entry(data: Cache, entry: Cache) -> Cache:
    """The content with one entry put in, or in the place of the one of the same key and workload."""
    wanted = canonical([entry["key"], entry["workload"]])
    rest = [
        e for e in data["entries"] if not isinstance(e, dict) or canonical([e.get("key"), e.get("workload")]) != wanted
    ]
    return {**data, "entries": [*rest, entry]}


def with_trial(entry: Cache, trial: Cache) -> Cache:
    """The entry with one trial put in, or in the place of the same config's of the same provenance."""
    wanted = canonical([trial["config"], trial["provenance"]])
    rest = [t for t in entry["trials"] if canonical([t.get("config"), t.get("provenance")]) != wanted]
    return {**entry, "trials": [*rest, trial]}
