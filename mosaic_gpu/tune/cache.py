"""Per-device tuning caches: `autotune_cache/<device>/<kernel>.json`, shipped with the package and written by `tune run`."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

import mosaic_gpu
from mosaic_gpu.errors import CacheInvalid
from mosaic_gpu.runtime.device import device_key

SCHEMA = 1
log = logging.getLogger("mosaic_gpu")


def cache_folder() -> Path:
    """The shipped caches: beside the installed package, or at the top of the repository for an editable install."""
    package = Path(str(mosaic_gpu.__file__)).parent
    inside = package / "autotune_cache"
    return inside if inside.is_dir() else package.parent / "autotune_cache"


def cache_file(device: str, kernel: str) -> Path:
    return cache_folder() / device / f"{kernel}.json"


@functools.lru_cache(maxsize=16)
def load(device: str, kernel: str) -> dict[str, Any]:
    """The cache of a kernel on a device; {} where there is none.  CacheInvalid for a file of another schema or device."""
    path = cache_file(device, kernel)
    if not path.exists():
        return {}
    way_out = f"delete it and run `mosaic-gpu tune run {kernel}`"
    try:
        data: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CacheInvalid(f"{path} cannot be read as JSON ({error}); {way_out}") from error
    if not isinstance(data, dict):
        raise CacheInvalid(f"{path} holds no JSON object; {way_out}")
    if data.get("schema") != SCHEMA or data.get("device") != device or data.get("kernel") != kernel:
        raise CacheInvalid(
            f"{path} says schema {data.get('schema')}, device {data.get('device')}, kernel {data.get('kernel')}; "
            f"expected {SCHEMA}, {device}, {kernel}: {way_out}"
        )
    best = data.get("best", {})
    damaged = not isinstance(best, dict) or any(
        not isinstance(entry, dict) or not isinstance(entry.get("config"), dict) for entry in best.values()
    )
    if damaged:
        raise CacheInvalid(f"{path}: `best` must map each key to an object with a `config`; {way_out}")
    return data


def load_for_update(device: str, kernel: str) -> dict[str, Any]:
    """A copy of the cache that may be changed and stored; one without entries where there is no file."""
    data = copy.deepcopy(load(device, kernel)) or {"schema": SCHEMA, "device": device, "kernel": kernel}
    data.setdefault("best", {})
    data.setdefault("trials", {})
    return data


def lookup(kernel: str, key: str) -> dict[str, Any] | None:
    """The best config for a key on this machine's GPU, as JSON; None without a GPU, a cache or an entry."""
    device = device_key()
    if device is None:
        return None
    entry = load(device, kernel).get("best", {}).get(key)
    log.debug("tuning cache %s %s: %s", device, key, "hit" if entry else "miss")
    return entry["config"] if entry else None


def store(data: dict[str, Any]) -> Path:
    """Write a cache file (device and kernel are in the data); returns its path.

    Readers see the old file or the new one, never a part: a search that is stopped while it writes loses nothing.
    """
    path = cache_file(data["device"], data["kernel"])
    temporary = path.with_suffix(f".{os.getpid()}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CacheInvalid(f"the tuning cache {path} cannot be written: {error}") from error
    load.cache_clear()
    return path
