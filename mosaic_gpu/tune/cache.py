"""Per-device tuning caches: `autotune_cache/<device>/<kernel>.json`, shipped with the package and written by `tune run`."""

from __future__ import annotations

import functools
import json
import logging
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
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise CacheInvalid(f"{path} is not JSON ({error}); delete it or run `mosaic-gpu tune run {kernel}`") from error
    if data.get("schema") != SCHEMA or data.get("device") != device or data.get("kernel") != kernel:
        raise CacheInvalid(
            f"{path} says schema {data.get('schema')}, device {data.get('device')}, kernel {data.get('kernel')}; "
            f"expected {SCHEMA}, {device}, {kernel}: run `mosaic-gpu tune run {kernel}`"
        )
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
    """Write a cache file (device and kernel are in the data); returns its path."""
    path = cache_file(data["device"], data["kernel"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    load.cache_clear()
    return path
