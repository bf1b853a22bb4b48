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


def match_generation(config: Any, arch: str | None) -> None:
    """DeviceMismatch for a config of another generation than the device's.  Without a GPU any runs, in the simulator."""
    generation = {"sm_90": "sm90", "sm_10": "sm100"}.get((arch or "")[:5])
    if arch is not None and config.generation != generation:
        raise DeviceMismatch(
            f"{type(config).__name__} is for {config.generation}, this device is {arch}; leave config out, or "
            "pass that generation's"
        )


def run(
    name: str,
    implementation: Implementation,
    config: Any,
    generations: Mapping[str, bool],
    arch: str | None,
    calls: Mapping[str, Callable[[], Any]],
) -> Any:
    """Call the implementation that takes this call.

    implementation: a name, which then must take it; a sequence, of which the first that can takes it; None: ours, or XLA's on
    a GPU for whose generation there is no kernel (`generations`: those that have one), said once in the log.
    """
    if implementation is None:
        have = {"sm_90": generations.get("sm90"), "sm_10": generations.get("sm100")}.get((arch or "")[:5])
        if arch is None or have or config is not None:
            return calls["mosaic_gpu"]()
        _say_fallback(name, arch)
        return calls["xla"]()
    names = [implementation] if isinstance(implementation, str) else list(implementation)
    if unknown := [n for n in names if n not in IMPLEMENTATIONS] or not names:
        raise ValueError(
            f"{name}: implementation={implementation!r}; it is None, or of {', '.join(IMPLEMENTATIONS)}, not {unknown}"
        )
    if config is not None and "mosaic_gpu" not in names:
        raise ValueError(f"{name}: config is for mosaic_gpu, and implementation={implementation!r} has none")
    reasons = []
    for n in names:
        try:
            return calls[n]()
        except UnsupportedCall as error:
            if len(names) == 1:
                raise
            reasons.append(f"{n}: {error.message}")
    raise UnsupportedCall(f"{name}: none of {', '.join(names)} takes this call: {'; '.join(reasons)}")


def require_kernel(name: str, generations: Mapping[str, bool], arch: str | None) -> None:
    """UnsupportedCall on a GPU for which there is no kernel of ours."""
    have = {"sm_90": generations.get("sm90"), "sm_10": generations.get("sm100")}.get((arch or "")[:5])
    if arch is not None and not have:
        known = ", ".join(g for g, is_there in generations.items() if is_there)
        raise UnsupportedCall(f"{name} has no kernel for {arch}, only for {known}; implementation='xla' runs XLA's")


@functools.cache
def _say_fallback(name: str, arch: str) -> None:
    log.warning(
        "mosaic_gpu: %s has no kernel for %s, XLA's runs instead (implementation='xla' says the same)", name, arch
    )
