"""What the simulator says about a program: an error with its class and line, a wrong value, or nothing."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import mosaic_gpu.simulator
from mosaic_gpu.errors import Line, MosaicGpuError
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import Program
from mosaic_gpu.simulator import UnwrittenOutput, simulate

from .kernels import Case

SEEDS = 4
TIME_LIMIT = 20.0  # seconds for one simulation; a good one takes some hundredths


class Hang(Exception):
    """A simulation that goes on and on."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """kind: 'refused' (by the planner), 'error' (by the simulator), 'value' (a wrong or unstable result, and no error),
    'crash' (an exception that is no report), 'hang'; how: under which configuration."""

    kind: str
    cls: str = ""
    line: Line | None = None
    message: str = ""
    how: str = ""

    def __str__(self) -> str:
        at = f" at line {self.line.number}" if self.line else ""
        return f"{self.kind} {self.cls}{at} ({self.how})".strip()


@functools.cache
def configurations(seeds: int = SEEDS) -> tuple[tuple[str, Any], ...]:
    """Ways to run a kernel: asynchronous work late, early, and in some random orders where the simulator has them."""
    params = getattr(mosaic_gpu.simulator, "SimulatorParams", None)
    if params is None or "params" not in inspect.signature(simulate).parameters:
        return ("late", {"timing": "late"}), ("early", {"timing": "early"})
    ways = [(timing, {"params": params(timing=timing)}) for timing in ("late", "early")]
    return *ways, *((f"seed {i}", {"params": params(seed=i)}) for i in range(1, seeds + 1))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang(f"no end after {seconds} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def judge(case: Case, program: Program, seeds: int = SEEDS) -> Finding | None:
    """Plan and simulate a program in every configuration; the first error, else a wrong value, else None.

    The program is one that `case.program` was made into, so it should give what that gives.
    """
    try:
        plan = build_plan(program, case.arch)
    except MosaicGpuError as e:
        return Finding("refused", type(e).__name__, e.line, str(e), "plan")
    except Exception as e:  # the planner must refuse, not fall over
        return Finding("crash", type(e).__name__, None, str(e), "plan")
    wrong: Finding | None = None
    first: list[np.ndarray] | None = None
    for how, options in configurations(seeds):
        try:
            with _time_limit(TIME_LIMIT), np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", UnwrittenOutput)  # the comparison shows it, too
                outputs = simulate(plan, case.arrays, **options)
        except MosaicGpuError as e:
            return Finding("error", type(e).__name__, e.line, str(e), how)
        except Hang as e:
            return Finding("hang", "Hang", None, str(e), how)
        except Exception as e:
            return Finding("crash", type(e).__name__, None, str(e), how)
        first = outputs if first is None else first
        if wrong is None and not case.right(outputs):
            wrong = Finding("value", "wrong", None, "differs from the reference", how)
        if wrong is None and any(a.tobytes() != b.tobytes() for a, b in zip(first, outputs, strict=True)):
            wrong = Finding("value", "unstable", None, "differs between configurations", how)
    return wrong
