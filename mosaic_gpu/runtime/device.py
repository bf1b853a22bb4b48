"""Which GPUs there are and what they can do.  Nothing here raises for want of a GPU."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from mosaic_gpu import errors
from mosaic_gpu.runtime import native

__all__ = [
    "blackwell_arch",
    "compute_capability",
    "default_arch",
    "device_key",
    "driver_version",
    "gpu_devices",
    "multiprocessors",
    "planning_for",
]


H200_MULTIPROCESSORS = 132
_planned: contextvars.ContextVar[tuple[int, str] | None] = contextvars.ContextVar("planned GPU", default=None)


def gpu_devices() -> list[jax.Device]:
    """JAX's NVIDIA GPUs; empty where there are none."""
    try:
        return list(jax.devices("cuda"))
    except RuntimeError:
        return []


def compute_capability(device: jax.Device) -> tuple[int, int] | None:
    """(9, 0) for Hopper, (10, 0) for Blackwell; None for a device that is no NVIDIA GPU."""
    major, dot, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        return None
    return int(major), int(minor)


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the installed driver supports, as (13, 0); None without a driver."""
    try:
        version: int = native.load().mosaic_gpu_driver_version()
    except errors.ToolchainError:
        return None
    return (version // 1000, version % 1000 // 10) if version else None


def default_arch() -> str | None:
    """What the first GPU compiles for: 'sm_90a', 'sm_100a', 'sm_103a', or e.g. 'sm_80' for one we have no kernels for.

    None without a GPU.
    """
    devices = gpu_devices()
    capability = compute_capability(devices[0]) if devices else None
    if capability is None:
        return None
    suffix = "a" if capability in ((9, 0), (10, 0), (10, 3)) else ""
    return f"sm_{capability[0]}{capability[1]}{suffix}"


def device_key() -> str | None:
    """The first GPU's name as a folder name, e.g. 'nvidia_h200'; None without a GPU."""
    devices = gpu_devices()
    return str(devices[0].device_kind).lower().replace(" ", "_") if devices else None


@contextlib.contextmanager
def planning_for(count: int, arch: str) -> Iterator[None]:
    """Kernels that are traced inside are planned for a GPU of so many multiprocessors and this architecture, whatever is here."""
    token = _planned.set((count, arch))
    try:
        yield
    finally:
        _planned.reset(token)


def multiprocessors() -> int:
    """Streaming multiprocessors of the first GPU; without a GPU, those of an H200, for which kernels are then planned."""
    if (planned := _planned.get()) is not None:
        return planned[0]
    devices = gpu_devices()
    return int(getattr(devices[0], "core_count", 0) or H200_MULTIPROCESSORS) if devices else H200_MULTIPROCESSORS


def blackwell_arch() -> str:
    """'sm_100a' or 'sm_103a': what is planned for, else this GPU's; without a Blackwell GPU sm_100a."""
    planned = _planned.get()
    arch = planned[1] if planned is not None else default_arch()
    return arch if arch in ("sm_100a", "sm_103a") else "sm_100a"
