"""A bundle as a file: cubins, launch data, constants, configs and versions in one zip archive, with hashes checked on load.

    manifest.json       what it is for and was made by, and its entries
    specs/<n>.bin       how to launch an entry, without the cubin (runtime.launch_spec)
    cubins/<hash>.cubin machine code; entries whose lengths differ share it
    constants/<hash>.npy arrays that go into a launch as they are (lists of tiles), or that are expected of it; of types that
                        NumPy has no name for as unsigned integers, in <hash>.<type>.npy
    SHA256SUMS          of every file above; its own hash names the bundle

No JAX here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import MosaicGpuError, UnsupportedCall
from ..runtime.launch_spec import LaunchSpec, deserialize, serialize

FORMAT, VERSION = "mosaic-gpu bundle", 1
SUMS, MANIFEST = "SHA256SUMS", "manifest.json"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One launch.  case: what `cases` makes inputs and judges of; operands: of the kernel in order, the number of an input, or
    an array; outputs: (shape, dtype); aliases: (operand, output); source: hash of the CUDA C++; spills: bytes; expected: of the
    first outputs, where something has computed them already."""

    name: str
    case: Mapping[str, Any]
    spec: LaunchSpec
    operands: tuple[int | np.ndarray, ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    aliases: tuple[tuple[int, int], ...]
    source: str
    registers: int
    spills: int
    expected: tuple[np.ndarray, ...] = ()


@dataclasses.dataclass(frozen=True)
class Bundle:
    """identity: hash of all it holds; arch: what it runs on; versions: of what made it; multiprocessors: it was planned for."""

    arch: str
    multiprocessors: int
    versions: Mapping[str, Any]
    date: str
    entries: tuple[Entry, ...]
    identity: str = ""


def write(bundle: Bundle, path: Path) -> str:
    """Write a bundle; returns its identity.  The same content gives the same bytes."""
    files: dict[str, bytes] = {}
    entries = []
    for n, e in enumerate(bundle.entries):
        cubin = f"cubins/{_hash(e.spec.cubin)}.cubin"
        files[cubin] = e.spec.cubin
        files[f"specs/{n}.bin"] = serialize(dataclasses.replace(e.spec, cubin=b""))
        operands = [o if isinstance(o, int) else _constant(o, files) for o in e.operands]
        fields = {f: getattr(e, f) for f in ("name", "case", "outputs", "aliases", "source", "registers", "spills")}
        expected = [_constant(x, files) for x in e.expected]
        parts = {"spec": f"specs/{n}.bin", "cubin": cubin, "operands": operands}
        entries.append({**fields, **parts, **({"expected": expected} if expected else {})})
    head = {"format": FORMAT, "version": VERSION}
    head |= {f: getattr(bundle, f) for f in ("arch", "multiprocessors", "versions", "date")}
    files[MANIFEST] = (json.dumps({**head, "entries": entries}, indent=1, sort_keys=True) + "\n").encode()
    sums = "".join(f"{_hash(data)}  {name}\n" for name, data in sorted(files.items())).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in (*sorted(files.items()), (SUMS, sums)):
            out.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return _hash(sums)


def _constant(array: np.ndarray, files: dict[str, bytes]) -> str:
    raw, kind = io.BytesIO(), ""
    if hasattr(ml_dtypes, str(array.dtype)):
        kind = f".{array.dtype}"
        array = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.itemsize}")
    np.save(raw, array, allow_pickle=False)
    name = f"constants/{_hash(raw.getvalue())}{kind}.npy"
    files[name] = raw.getvalue()
    return name


def _array(name: str, files: Mapping[str, bytes]) -> np.ndarray:
    array: np.ndarray = np.load(io.BytesIO(files[name]), allow_pickle=False)
    _, *kind, _ = name.split(".")
    return array.view(np.dtype(getattr(ml_dtypes, kind[0]))) if kind else array


def load(path: Path) -> Bundle:
    """Read a bundle and check every hash in it; UnsupportedCall for what is none, is damaged, or of another version."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedCall(f"{path} is no bundle: {error}") from error
    sums = files.pop(SUMS, b"")
    lines = [line.partition("  ") for line in sums.decode(errors="replace").splitlines()]
    listed = {name: digest for digest, _, name in lines}
    if MANIFEST not in files or set(listed) != set(files):
        odd = sorted(set(listed) ^ set(files)) or [MANIFEST]
        raise UnsupportedCall(f"{path} is no whole bundle: {', '.join(odd[:4])} is missing or is not in {SUMS}")
    damaged = [name for name, data in files.items() if _hash(data) != listed[name]]
    if damaged:
        raise UnsupportedCall(
            f"{path} is damaged: {', '.join(sorted(damaged)[:4])} does not have the hash that {SUMS} says"
        )
    manifest = json.loads(files[MANIFEST])
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise UnsupportedCall(
            f"{path} is a {manifest.get('format')} of version {manifest.get('version')}; this mosaic_gpu reads {FORMAT} of "
            f"version {VERSION}"
        )
    try:
        entries = tuple(_entry(e, files) for e in manifest["entries"])
        head = {f: manifest[f] for f in ("arch", "multiprocessors", "versions", "date")}
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, MosaicGpuError):
            raise
        raise UnsupportedCall(f"{path}: {MANIFEST} lacks something or has it in another form: {error!r}") from error
    return Bundle(**head, entries=entries, identity=_hash(sums))


def _entry(e: Mapping[str, Any], files: Mapping[str, bytes]) -> Entry:
    spec = dataclasses.replace(deserialize(files[e["spec"]]), cubin=files[e["cubin"]])
    operands = tuple(o if isinstance(o, int) else _array(o, files) for o in e["operands"])
    expected = tuple(_array(x, files) for x in e.get("expected", ()))
    outputs = tuple((tuple(shape), str(dtype)) for shape, dtype in e["outputs"])
    aliases = tuple((int(a), int(b)) for a, b in e["aliases"])
    built = (e["source"], e["registers"], e["spills"])
    return Entry(e["name"], e["case"], spec, operands, outputs, aliases, *built, expected)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def describe(entries: Sequence[Entry]) -> dict[str, int]:
    """How many entries, and how many different cubins."""
    return {"entries": len(entries), "cubins": len({e.spec.cubin for e in entries})}
