"""Tensor memory of a block, and the tensor core that works on it (PTX ISA 9.7.16): cells, products, commits.

Operands and shapes are read from the words that the emitted kernel holds: the instruction descriptor, the matrix descriptors.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codegen.encodings import COLUMNS, LANES, Instruction
from ..errors import IllegalInstruction, Line, MosaicGpuError, OutOfBounds, UninitializedRead
from ..layouts.operands import SharedOperand
from ..layouts.tmem import TmemPart, lanes_of
from ..ops.elementwise import numpy_dtype
from .barriers import Arrival, MBarrier
from .clocks import Rows
from .memory import UNSIGNED, Array, SharedMemory
from .scheduler import Blocked, Steps
from .tensor_core import exact, gather, multiply_add

if TYPE_CHECKING:
    from ..ops.tcgen05 import Tcgen05Plan

POISON = 0xFFFFFFFF  # a NaN in every floating type


class TensorMemory:
    """128 lanes x 512 columns of 32 bits.  allocated: columns that the block has."""

    def __init__(self, poison: bool, allocated: int = COLUMNS) -> None:
        self.cells = np.full((LANES, COLUMNS), POISON if poison else 0, np.uint32)
        self.written = np.full((LANES, COLUMNS), not poison, np.bool_)
        self.allocated = allocated
        self.changes = 0  # how often it has been written

    def _place(self, part: TmemPart, column: int) -> Any:
        end = column + part.columns
        if column < 0 or end > self.allocated:
            raise OutOfBounds(f"columns {column} to {end - 1} of tensor memory; the block has {self.allocated}")
        return np.ix_(lanes_of(part.rows), np.arange(column, end))

    def load(self, part: TmemPart, column: int, dtype: str, what: str) -> Array:
        """A part, whose first column is given, as (rows, elements)."""
        place = self._place(part, column)
        if not self.written[place].all():
            where = f"columns {column} to {column + part.columns - 1}"
            raise UninitializedRead(f"{what} reads tensor memory that nothing has written: {where}")
        raw = np.ascontiguousarray(self.cells[place])
        return raw.view(numpy_dtype(dtype))

    def store(self, part: TmemPart, column: int, x: Array, warps: Sequence[bool] = (True,) * 4) -> None:
        """(rows, elements) into a part, by those of the four warps that are there."""
        raw = np.ascontiguousarray(x).view(np.uint32)
        lanes = lanes_of(part.rows)
        there = np.repeat(np.asarray(warps, bool), LANES // 4)[lanes]
        self._place(part, column)
        place = np.ix_(lanes[there], np.arange(column, column + part.columns))
        self.cells[place] = raw[there]
        self.written[place] = True
        self.changes += 1


@dataclasses.dataclass(frozen=True)
class BlockMemory:
    """What an MMA reaches of a block."""

    shared: SharedMemory
    tensor: TensorMemory


@dataclasses.dataclass(eq=False)
class Mma:
    """An issued tcgen05.mma.  a, b: where the operands start, byte of shared memory or column of tensor memory; column: of the
    accumulator; blocks: the issuer's, or both of the pair; issuer: the warp (of the block) whose elected lane issues it."""

    plan: Tcgen05Plan
    a: int
    b: int
    column: int
    accumulate: bool
    line: Line | None
    blocks: tuple[BlockMemory, ...]
    issuer: int = 0
    names: tuple[str, str] = ("", "")


@dataclasses.dataclass(eq=False)
class Commit:
    """Arrives on every barrier once all that its issuer has issued before it is done; released: what that hands on."""

    barriers: tuple[MBarrier, ...]
    arrival: Arrival
    released: Rows | None = None
    issuer: int = 0


class TensorCore:
    """The fifth-generation tensor core of a block: one MMA or commit at each of its turns, in order of issue.

    early: at once.  chance: whose turn it is, where several warps have issued work.
    """

    def __init__(
        self, poison: bool, early: bool = False, chance: random.Random | None = None, allocated: int = COLUMNS
    ) -> None:
        self.early, self.chance = early, chance
        self.memory = TensorMemory(poison, allocated)
        self.queue: collections.deque[Mma | Commit] = collections.deque()

    def submit(self, item: Mma | Commit) -> None:
        """Take an instruction over from the thread that issues it."""
        if self.early:
            self._execute(item)
        else:
            self.queue.append(item)

    def run(self) -> Steps:
        while True:
            yield Blocked(lambda: bool(self.queue), lambda: "no MMA is queued")
            self._execute(self._next())

    def _next(self) -> Mma | Commit:
        if self.chance is None:
            return self.queue.popleft()
        issuer = self.chance.choice(sorted({x.issuer for x in self.queue}))
        item = next(x for x in self.queue if x.issuer == issuer)
        self.queue.remove(item)
        return item

    def _execute(self, item: Mma | Commit) -> None:
        if isinstance(item, Commit):
            for barrier in item.barriers:
                barrier.arrive(item.arrival, item.released)
            return
        try:
            multiply(item)
        except MosaicGpuError as e:
            e.line = e.line or item.line
            raise


def multiply(mma: Mma) -> None:
    """The MMA as its instruction descriptor says (PTX ISA 9.7.16.4.2)."""
    plan, pair = mma.plan, len(mma.blocks)
    i = Instruction.decode(plan.idesc, plan.instruction.kind)
    if i != plan.instruction or (i.m, i.n) != (plan.m, plan.n):
        raise IllegalInstruction(f"tcgen05.mma: the descriptor says {i}; the plan says {plan.m} x {plan.n}")
    rows_a, rows_b = i.m // pair, i.n // pair
    halves = [gather(block.shared, plan.b, mma.b, rows_b, i.b_mn, i.b_type, True, mma.names[1]) for block in mma.blocks]
    b = np.concatenate(halves, axis=0)
    for block in mma.blocks:  # each has its own rows of A and of D
        if isinstance(plan.a, SharedOperand):
            a = gather(block.shared, plan.a, mma.a, rows_a, i.a_mn, i.a_type, True, mma.names[0])
        else:
            raw = block.tensor.load(plan.a, mma.a, i.a_type, "tcgen05_mma, operand A,")
            a = exact(raw.view(UNSIGNED[raw.dtype.itemsize]), i.a_type)
        what = "tcgen05_mma(accumulate=True)"
        acc = block.tensor.load(plan.d, mma.column, i.acc_type, what) if mma.accumulate else None
        block.tensor.store(plan.d, mma.column, multiply_add(acc, a, b, plan.k_step, i.acc_type))
