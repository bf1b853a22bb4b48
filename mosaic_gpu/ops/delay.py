"""Letting time pass: `delay` (PTX ISA 9.7.19, nanosleep; 10, %globaltimer)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .registry import BOTH, WARP, WARPGROUP, op

delay_p = op("delay", issues_only=True)


def delay(nanos: Any) -> None:
    """Go on after at least `nanos` nanoseconds (an int32 scalar), by the GPU's timer, whose steps may be a microsecond.

    It orders nothing.  The simulator, which has no clock, lets others run first.
    """
    from ..frontend.primitives import bind

    bind(delay_p, nanos)


@delay_p.abstract
def _(nanos: Any) -> Any:
    if nanos.shape or nanos.space is not None or nanos.dtype not in ("int32", "uint32", "int64"):
        raise TypeError(f"delay: nanos is an int32 scalar, not {nanos.dtype}{list(nanos.shape)}")
    return ()


@delay_p.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    out.line(f"delay((int)({out.scalar(step.equation.operands[0])}));")


@delay_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    from ..simulator.scheduler import RESTING

    yield RESTING
