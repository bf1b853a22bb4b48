"""What the dispatchers share: which implementation takes a call, and with which config."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mosaic_gpu.errors import DeviceMismatch, UnsupportedCall
from mosaic_gpu.runtime import device
from mosaic_gpu.tune.lookup import explain
from mosaic_gpu.tune.space import generation_of
from mosaic_gpu.tune.tunable import find_tunable

log = logging.getLogger("mosaic_gpu")
IMPLEMENTATIONS = ("mosaic_gpu", "xla")
Implementation = str | Sequence[str] | None


def choose_config(kernel: str, arch: str | None, *args: Any, **kwargs: Any) -> Any:
    """The config of a call that passes none: overridden, tuned for this device, or the heuristic of its generation.

    The arguments are those of the kernel's function.  On a machine without a GPU the generation is sm90.
    """
    tunable = find_tunable(kernel, generation_of(arch) if arch else "sm90")
    return explain(tunable, tunable.workload_of(*args, **kwargs), device=device.device_key()).config


def generation(arch: str | None) -> str | None:
    """Which kernels of ours a GPU takes; None for one that takes none, and without a GPU."""
    return {"sm_90": "sm90", "sm_10": "sm100"}.get((arch or "")[:5])


def match_generation(config: Any, arch: str | None) -> None:
    """DeviceMismatch for a config of another generation than the device's.  Without a GPU any runs, in the simulator."""
    if arch is not None and config.generation != generation(arch):
        raise DeviceMismatch(
            f"{type(config).__name__} is for {config.generation}, this device is {arch}; leave config out, or "
            "pass that generation's"
        )


def run(
    name: str,
    implementation: Implementation,
    config: Any,
    arch: str | None,
    calls: Mapping[str, Callable[[], Any]],
) -> Any:
    """Call the implementation that takes this call.

    implementation: a name, which then must take it; a sequence, of which the first that can takes it; None: ours, or XLA's on
    a GPU for which there is no kernel, said once in the log.  config: any that the caller passed.
    """
    if implementation is None:
        if arch is None or generation(arch) or config is not None:
            return calls["mosaic_gpu"]()
        _say_fallback(name, arch)
        return calls["xla"]()
    names = [implementation] if isinstance(implementation, str) else implementation
    names = list(names) if isinstance(names, (list, tuple)) else []
    if not names or not set(names) <= set(IMPLEMENTATIONS):
        raise ValueError(f"{name}: implementation={implementation!r}; it is None, or of {', '.join(IMPLEMENTATIONS)}")
    if config is not None and "mosaic_gpu" not in names:
        raise ValueError(
            f"{name}: {type(config).__name__}: a config is for mosaic_gpu, and implementation={implementation!r} has none"
        )
    reasons = []
    for n in names:
        try:
            return calls[n]()
        except UnsupportedCall as error:
            if len(names) == 1:
                raise
            reasons.append(f"{n}: {error.message}")
    raise UnsupportedCall(f"{name}: none of {', '.join(names)} takes this call: {'; '.join(reasons)}")


def require_kernel(name: str, arch: str | None) -> None:
    """UnsupportedCall on a GPU for which there is no kernel of ours."""
    if arch is not None and not generation(arch):
        raise UnsupportedCall(f"{name} has no kernel for {arch}, only for sm90, sm100; implementation='xla' runs XLA's")


@functools.cache
def _say_fallback(name: str, arch: str) -> None:
    log.warning(
        "mosaic_gpu: %s has no kernel for %s, XLA's runs instead (implementation='xla' says the same)", name, arch
    )
