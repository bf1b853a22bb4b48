"""Which GPUs there are and what they can do.  Nothing here raises for want of a GPU."""

from __future__ import annotations

import jax

from mosaic_gpu import errors
from mosaic_gpu.runtime import native

__all__ = ["compute_capability", "driver_version", "gpu_devices"]


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
