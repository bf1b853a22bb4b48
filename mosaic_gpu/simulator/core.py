"""The core of a simulated thread: running the steps of its role, and the values they pass on.

A value is a whole logical array per warpgroup: how its elements spread over registers was checked by the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Line, MosaicGpuError, UnsupportedPrimitive
from ..ops.elementwise import numpy_dtype
from ..ops.registry import OPS
from ..plan.contraction import Fma
from ..plan.model import Role, Step
from ..program import Affine, Equation, Literal, Operand, Value, View
from .contraction import exact_product, fma
from .endless import Loop, check_steps
from .memory import Array, last_index
from .scheduler import Steps, Task

if TYPE_CHECKING:
    from .hazards import Hazards
    from .machine import BlockState

TURN_EVERY = 512  # steps after which a thread lets the others go on, so that polling cannot lock them out
BUFFERS = ("smem", "tmem")
TURN_CHANCE = 0.2  # how likely it does so after each step, where the order of threads is random


def literal(x: Literal) -> Array:
    """A constant as an array of its shape, or a scalar."""
    value: Array = np.asarray(x.value).astype(numpy_dtype(x.dtype))
    return np.broadcast_to(value, x.shape) if x.shape else value[()]


Starts = tuple[tuple[View, int], ...]


def run_time_starts(equation: Equation) -> Starts:
    """(view, axis) of an operation's views of shared and tensor memory, where only a run knows at which index it begins."""
    views = [x for x in equation.operands if isinstance(x, View) and x.space.kind in BUFFERS]
    return tuple((v, axis) for v in views for axis, d in enumerate(v.dims) if not d.start.static)


class Core:
    """One warpgroup or warp at work on a role."""

    def __init__(
        self, block: BlockState, role: Role, warpgroup: int, warp: int | None = None, parent: Core | None = None
    ) -> None:
        self.block, self.role, self.warpgroup, self.warp = block, role, warpgroup, warp
        self.plan, self.program = block.plan, block.plan.program
        self.env: dict[int, Array] = dict(parent.env) if parent else {}
        self.hazards: Hazards | None = None
        self.step: Step | None = None
        self.children: list[Task] = []
        self.steps_run = 0
        self.who = f"{block.name}, {role.name}, warpgroup {warpgroup}" + ("" if warp is None else f", warp {warp}")

    @property  # of the step that it is at
    def line(self) -> Line | None:
        return self.step.equation.line if self.step is not None else None

    # ---- running ----------------------------------------------------------------------------------------------------
    def run(self, steps: Iterable[Step]) -> Steps:
        """Run steps in order; an error that has no line yet gets that of its step."""
        for step in steps:
            self.step = step
            self.steps_run += 1
            chance = self.block.chance
            if self.steps_run % TURN_EVERY == 0 or (chance is not None and chance.random() < TURN_CHANCE):
                check_steps(self, self.block.max_steps)
                yield None
            equation = step.equation
            try:
                if step.waits is not None:
                    yield from self.wgmma_wait(step.waits)
                self._check_views(equation)
                op = OPS.get(equation.op)
                if op is None or op.simulate_rule is None:
                    raise UnsupportedPrimitive(f"{equation.op!r} has no rule in the simulator", equation.line)
                more = op.simulate_rule(self, step)
                if more is not None:
                    yield from more
            except MosaicGpuError as e:
                if e.line is None:
                    e.line = equation.line
                    e.message += f"\n  in {self.who}"
                raise
            except Exception as e:
                if not hasattr(e, "__notes__"):
                    e.add_note(f"while simulating {equation.op} at {equation.line} in {self.who}")
                raise

    def _check_views(self, equation: Equation) -> None:
        """What an operation names of shared and tensor memory lies in its buffer along each axis: behind the end of one axis but
        the first comes not the end of the buffer, but another slot."""
        known = self.block.starts
        found = known.get(id(equation))
        if found is None:
            found = known[id(equation)] = run_time_starts(equation)
        for view, axis in found:
            last_index(view, axis, self.evaluate(view.dims[axis].start))

    def wgmma_wait(self, n: int) -> Steps:
        raise NotImplementedError

    def watch(self, loop: Step) -> Loop:
        """To be told of each iteration of a `while` loop."""
        return Loop(self, loop)

    # ---- values -----------------------------------------------------------------------------------------------------
    def read(self, operand: Operand) -> Array:
        if isinstance(operand, Value):
            return self.env[operand.id]
        assert isinstance(operand, Literal)
        constants = self.block.constants
        found = constants.get(id(operand))
        if found is None:
            found = constants[id(operand)] = literal(operand)
        return found

    def fused(self, step_fma: Fma) -> Array:
        """A sum of a product, rounded once; of a sum over axes the products, exactly."""
        minus_product, minus_c = step_fma.minus
        a, b = self.read(step_fma.a), self.read(step_fma.b)
        a = -a if minus_product else a
        if step_fma.c is None:
            return exact_product(a, b)
        c = self.read(step_fma.c)
        return fma(a, b, -c if minus_c else c)

    def read_as(self, operand: Operand, like: Value) -> Array:
        """An operand in the shape and dtype of another value: a constant may stand for a whole array."""
        x = self.read(operand)
        if x.dtype != numpy_dtype(like.dtype):
            x = x.astype(numpy_dtype(like.dtype))
        return x if x.shape == like.shape else np.broadcast_to(x, like.shape)

    def write(self, value: Value, x: Any) -> None:
        known = isinstance(x, (np.ndarray, np.generic))
        self.env[value.id] = x if known else numpy_dtype(value.dtype).type(x)

    def evaluate(self, a: Affine) -> int:
        total = a.const
        for v, f in a.terms:
            total += int(self.env[v.id]) * f
        return total

    def axis(self, kind: str, axis: int) -> np.int32:
        if kind == "thread":
            return np.int32(self.warpgroup)
        return np.int32((self.block.grid if kind == "grid" else self.block.position)[axis])

    def runtime_dim(self, input: int, axis: int) -> np.int32:
        return np.int32(self.block.arrays[input].data.shape[axis])
