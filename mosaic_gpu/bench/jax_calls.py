"""Kernels inside JAX, timed by the host's clock: for the tuner, and for `mosaic-gpu bench` where there is no PyTorch.

A call takes its inputs from several sets in turn, together more than twice the second-level cache, so that no timing
profits from what the call before left there.  All sets are one compiled program: launches follow each other on the GPU without
waiting for Python.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from .gpu import REST_SECONDS, commit, package_version
from .model import HostCall


class JaxDevice:
    """JAX's first GPU, or its CPU, by the host's clock.  Every call of a `HostCall` has ended when it returns."""

    def __init__(self, rest_seconds: float = REST_SECONDS) -> None:
        self._rest = rest_seconds

    def now(self) -> float:
        """The host's clock, in seconds."""
        return time.perf_counter()

    def mark(self) -> float:
        """The host's clock, as nothing is queued between calls."""
        return self.now()

    def seconds(self, begin: float, end: float) -> float:
        """Between two marks."""
        return end - begin

    def synchronize(self) -> None:
        """Nothing is queued between calls."""

    def hold(self, seconds: float) -> None:
        """The host is never behind: there are no device-timed calls here."""

    def rest(self) -> None:
        """Until the clock has fallen from its highest state."""
        time.sleep(self._rest)

    def readings(self, begin: float, end: float) -> dict[str, Any]:
        """No sensors."""
        return {}

    def release(self) -> None:
        """Drop what is no longer referred to."""
        gc.collect()

    def describe(self) -> dict[str, Any]:
        """The machine and the versions, for the head of a result file."""
        import jax

        return {
            "device": str(jax.devices()[0].device_kind),
            "jax": package_version("jax"),
            "mosaic_gpu": commit(),
            "clock": "host",
        }


def program_of_sets(call: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Callable[[Any], list[Any]]:
    """One compiled program with a call for each set; returns their results."""
    import jax

    compiled = jax.jit(lambda sets: [call(*inputs) for inputs in sets]).lower(sets).compile()

    def run(sets: Any) -> list[Any]:
        return list(compiled(sets))

    return run


def host_call(
    program: Callable[[Any], list[Any]],
    sets: Sequence[Sequence[Any]],
    same: Callable[[Any, Any], bool],
    overhead: float = 0.0,
) -> HostCall:
    """A program of sets for the protocols.

    same: whether two results for the same inputs are as they must be.  overhead: what an empty program takes, of which a
    timing must be a hundredfold.
    """
    import jax

    def run(loops: int) -> None:
        for _ in range(loops):
            result = program(sets)  # an older result is dropped at once: the same memory serves the next call
        jax.block_until_ready(result)

    def first() -> Any:
        return jax.block_until_ready(program(sets))[0]

    kept: list[Any] = []

    def repeatable() -> bool:
        if not kept:
            kept.append(first())
        return same(kept[0], first())

    return HostCall(run, len(sets), first, overhead, repeatable)
