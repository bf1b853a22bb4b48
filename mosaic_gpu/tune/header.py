"""Where measurements come from: the device, the toolchain and the kernel's revision, as cache headers record them."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from .cache import now
from .schema import SCHEMA
from .tunable import Tunable


def device_here() -> dict[str, Any]:
    """The first GPU as JAX sees it, and what nvidia-smi adds; what is not to be had is null."""
    from ..runtime.device import compute_capability, device_key, gpu_devices, multiprocessors

    gpu = gpu_devices()[0]
    capability = compute_capability(gpu)
    memory, power, _ = smi()
    return {
        "name": device_key(),
        "compute_capability": "{}.{}".format(*capability) if capability else "0.0",
        "multiprocessors": multiprocessors(),
        "memory_bytes": memory,
        "power_limit_watts": power,
    }


def smi() -> tuple[int | None, float | None, str | None]:
    """(memory in bytes, power limit in watts, driver version) of the first visible GPU by nvidia-smi; None where it has none."""
    if shutil.which("nvidia-smi") is None:
        return None, None, None
    query = ["nvidia-smi", "--query-gpu=memory.total,power.limit,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        memory, power, driver = (x.strip() for x in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None, None, None
    return _number(memory, 1 << 20), _number(power), driver or None


def _number(text: str, factor: int = 1) -> Any:
    try:
        return int(float(text) * factor) if factor > 1 else float(text)
    except ValueError:  # "[N/A]"
        return None


def toolchain_here() -> dict[str, Any]:
    """Versions of all that turns a kernel into machine code and runs it."""
    import mosaic_gpu

    from ..codegen.nvrtc import driver_version, find_nvrtc
    from ..errors import ToolchainError

    try:
        nvrtc = find_nvrtc().toolchain
    except ToolchainError:
        nvrtc = None
    cuda = driver_version()
    return {
        "driver": smi()[2],
        "cuda": "{}.{}".format(*cuda) if cuda else None,
        "nvrtc": nvrtc,
        "mosaic_gpu": mosaic_gpu.__version__,
        "jax": importlib.metadata.version("jax"),
    }


def provenance(tunable: Tunable, toolchain: Mapping[str, Any], protocol: Mapping[str, Any]) -> dict[str, Any]:
    """What trials of one kind share: only they are compared with each other."""
    return {"toolchain": dict(toolchain), "source": tunable.source_hash, "protocol": dict(protocol)}


def empty_cache(tunable: Tunable, device: Mapping[str, Any]) -> dict[str, Any]:
    """A cache without entries."""
    return {
        "schema": SCHEMA,
        "header": {
            "device": dict(device),
            "kernel": {"name": tunable.name, "generation": tunable.generation, "space": tunable.space_hash},
            "provenances": {},
            "date": now(),
        },
        "entries": [],
    }
