"""How a kernel is simulated: one frozen dataclass, and the default that a context manager sets."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from .remarks import Report

Timing = Literal["late", "early"]
Shadow = Literal["regions", "bytes"]
Uninitialized = Literal["nan", "zero"]
CHOICES = {"timing": ("late", "early"), "shadow": ("regions", "bytes"), "uninitialized": ("nan", "zero")}


@dataclasses.dataclass(frozen=True)
class SimulatorParams:
    """timing: when asynchronous work is done.  'late': copies and tcgen05 only when no thread can go on without them, a
    wgmma when it is waited for; 'early': all at once.  A kernel that synchronises as it must gives the same bits both ways.
    seed: a random legal order of threads, copies and products; None or 0: a fixed one.
    shadow: what is remembered for one region that operations address as a whole ('regions'), or for one byte ('bytes',
    slow; the findings are the same).
    checks: look for races.  False: barriers, values and deadlocks only.
    uninitialized: what memory that nobody has written holds.  'nan': NaNs (integers: bytes 0xAB), and reading it raises
    `UninitializedRead`; 'zero': zeros, read without complaint.
    max_steps: a thread that has run so many steps (equations) is taken for one that never ends (`Deadlock`; the limit takes ten
    seconds or so; it is looked at every 512 steps).
    processes: in how many the clusters of a grid run, where the simulator checks for races; the outcome is the same.  None: as
    many as there are processors, if what is left after the first moment takes long enough.
    report: to which simulations add what they notice and is no error: bank conflicts, uncoalesced accesses, copies of nothing,
    outputs that were never written (else a warning, `UnwrittenOutput`).
    """

    timing: Timing = "late"
    seed: int | None = None
    shadow: Shadow = "regions"
    checks: bool = True
    uninitialized: Uninitialized = "nan"
    max_steps: int = 2_000_000
    processes: int | None = None
    report: Report | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"SimulatorParams({name}={getattr(self, name)!r}): one of {', '.join(choices)}")
        if not isinstance(self.checks, bool):
            raise ValueError(f"SimulatorParams(checks={self.checks!r}): True or False")
        if self.report is not None and not isinstance(self.report, Report):
            raise TypeError(f"SimulatorParams(report={self.report!r}): a Report, or None")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"SimulatorParams(seed={self.seed!r}): a number from 0 on, or None")
        for name, optional in (("max_steps", False), ("processes", True)):
            n = getattr(self, name)
            if not (n is None and optional) and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
                raise ValueError(f"SimulatorParams({name}={n!r}): a number from 1 on{', or None' if optional else ''}")


_default: contextvars.ContextVar[SimulatorParams | None] = contextvars.ContextVar("simulator_params", default=None)
# JAX runs a kernel's callback in a thread of its own, where a context variable is not seen.
_of_process: list[SimulatorParams] = []


def current() -> SimulatorParams:
    """The default in force."""
    return _default.get() or (_of_process[-1] if _of_process else SimulatorParams())


@contextlib.contextmanager
def simulator_params(params: SimulatorParams | None = None, **changes: Any) -> Iterator[SimulatorParams]:
    """Kernels that run in the simulator inside this `with` use `params` (default: those in force) with `changes`.

    A kernel with an `interpret=SimulatorParams(...)` of its own keeps that.
    """
    if params is not None and not isinstance(params, SimulatorParams):
        raise TypeError(
            f"simulator_params({params!r}): a SimulatorParams(...), or None and the fields to change by name"
        )
    chosen = dataclasses.replace(params or current(), **changes)
    token = _default.set(chosen)
    _of_process.append(chosen)
    try:
        yield chosen
    finally:
        _of_process.remove(chosen)
        _default.reset(token)
