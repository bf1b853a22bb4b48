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

from ..codegen.encodings import COLUMNS, COPIES, LANES, Instruction, ScaledInstruction, metadata_place
from ..errors import IllegalInstruction, Line, MosaicGpuError, OutOfBounds, UninitializedRead
from ..layouts.operands import SharedOperand
from ..layouts.tmem import TmemPart, lanes_of
from ..ops.elementwise import numpy_dtype
from .barriers import Arrival, MBarrier
from .clocks import Rows
from .memory import UNSIGNED, Array, SharedMemory
from .scheduler import Blocked, Steps
from .tensor_core import copied_bytes, exact, gather, kept, multiply_add, sparse_multiply_add

if TYPE_CHECKING:
    from ..ops.tcgen05 import Tcgen05Plan
    from ..ops.tcgen05_copies import TmemCopy

POISON = 0xFFFFFFFF  # a NaN in every floating type


class TensorMemory:
    """128 lanes x 512 columns of 32 bits.  allocated: columns that the block has."""

    def __init__(self, poison: bool, allocated: int = COLUMNS) -> None:
        self.cells = np.full((LANES, COLUMNS), POISON if poison else 0, np.uint32)
        self.written = np.full((LANES, COLUMNS), not poison, np.bool_)
        self.allocated = allocated
        self.changes = 0  # how often it has been written

    def _place(self, part: TmemPart, column: int) -> Any:
        lanes = np.arange(LANES) if part.folded else lanes_of(part.rows)
        return np.ix_(lanes, self._columns(column, part.columns))

    def _columns(self, column: int, count: int) -> Array:
        end = column + count
        if column < 0 or end > self.allocated:
            raise OutOfBounds(f"columns {column} to {end - 1} of tensor memory; the block has {self.allocated}")
        return np.arange(column, end)

    def copy(self, column: int, rows: Array) -> None:
        """Rows of bytes into columns from one on, 4 bytes each (tcgen05.cp): all lanes, or 32 of them in each quarter."""
        cells = np.ascontiguousarray(rows).view(np.uint32)
        place = np.s_[:, self._columns(column, cells.shape[1])]
        self.cells[place] = np.tile(cells, (LANES // len(rows), 1))
        self.written[place] = True
        self.changes += 1

    def metadata(self, column: int, selector: int, itemsize: int) -> Array:
        """An instruction's sparsity metadata as bytes [row, byte], from the pair of columns that starts at `column`."""
        columns = self._columns(column, 2)
        if itemsize > 1:
            columns = columns[selector : selector + 1]
        if not self.written[:, columns].all():
            raise UninitializedRead(
                f"tcgen05_mma, a_sparse_metadata, is tensor memory that nothing has written: columns {column} to {column + 1}"
            )
        lanes = np.ascontiguousarray(self.cells[:, columns]).view(np.uint8)
        row, byte = np.ix_(np.arange(LANES), np.arange(lanes.shape[1]))
        lane, at = metadata_place(itemsize, row, byte)
        each: Array = lanes[lane, at]
        return each

    def scales(self, column: int, rows: int, first: int, count: int, what: str) -> Array:
        """Factors `first` to `first + count - 1` of the four in a cell, of each of so many rows, as bytes [row, factor]."""
        columns = self._columns(column, rows // 32)
        if not self.written[:, columns].all():
            raise UninitializedRead(
                f"{what} is tensor memory that nothing has written: columns {column} to {columns[-1]}"
            )
        quarter = self.cells[: LANES // 4, columns]  # the others hold the same
        each: Array = np.ascontiguousarray(quarter.T).view(np.uint8).reshape(rows, 4)
        return each[:, first : first + count]

    def load(self, part: TmemPart, column: int, dtype: str, what: str) -> Array:
        """A part, whose first column is given, as (rows, elements)."""
        place = self._place(part, column)
        if not self.written[place].all():
            where = f"columns {column} to {column + part.columns - 1}"
            raise UninitializedRead(f"{what} reads tensor memory that nothing has written: {where}")
        raw = np.ascontiguousarray(self.cells[place])
        if part.halves:
            raw = raw.astype(np.uint16)
        if part.folded:
            raw = np.concatenate([raw[: part.rows], raw[part.rows :]], axis=1)
        return raw.view(numpy_dtype(dtype))

    def store(self, part: TmemPart, column: int, x: Array, warps: Sequence[bool] = (True,) * 4) -> None:
        """(rows, elements) into a part, by those of the four warps that are there."""
        x = np.ascontiguousarray(x)
        raw = (
            x.view(np.uint16) | np.uint32(0xFFFF0000) if part.halves else x.view(np.uint32)
        )  # the rest is not specified
        lanes = np.arange(LANES) if part.folded else lanes_of(part.rows)
        if part.folded:
            raw = np.concatenate(np.split(raw, 2, axis=1), axis=0)
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
    accumulator; blocks: the issuer's, or both of the pair; issuer: the warp (of the block) whose elected lane issues it;
    scales, metadata: where the factors of A and B, and the metadata of a sparse A, start."""

    plan: Tcgen05Plan
    a: int
    b: int
    column: int
    accumulate: bool
    line: Line | None
    blocks: tuple[BlockMemory, ...]
    issuer: int = 0
    names: tuple[str, str] = ("", "")
    scales: tuple[int, int] = (0, 0)
    metadata: int = 0


@dataclasses.dataclass(eq=False)
class Copy:
    """An issued copy into tensor memory.  source: byte of shared memory; column: where to; blocks, issuer: as of `Mma`."""

    plan: TmemCopy
    source: int
    column: int
    line: Line | None
    blocks: tuple[BlockMemory, ...]
    issuer: int
    name: str


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
        self.queue: collections.deque[Mma | Copy | Commit] = collections.deque()

    def submit(self, item: Mma | Copy | Commit) -> None:
        """Take an instruction over from the thread that issues it."""
        if self.early:
            self._execute(item)
        else:
            self.queue.append(item)

    def run(self) -> Steps:
        while True:
            yield Blocked(lambda: bool(self.queue), lambda: "no MMA is queued")
            self._execute(self._next())

    def _next(self) -> Mma | Copy | Commit:
        if self.chance is None:
            return self.queue.popleft()
        issuer = self.chance.choice(sorted({x.issuer for x in self.queue}))
        item = next(x for x in self.queue if x.issuer == issuer)
        self.queue.remove(item)
        return item

    def _execute(self, item: Mma | Copy | Commit) -> None:
        if isinstance(item, Commit):
            for barrier in item.barriers:
                barrier.arrive(item.arrival, item.released)
            return
        try:
            copy(item) if isinstance(item, Copy) else multiply(item)
        except MosaicGpuError as e:
            e.line = e.line or item.line
            raise


def multiply(mma: Mma) -> None:
    """The MMA as its instruction descriptors say (PTX ISA 9.7.16.4.2)."""
    plan, pair = mma.plan, len(mma.blocks)
    i = _instruction(plan)
    rows_a, rows_b = i.m // pair, i.n // pair
    halves = [_gather(block, mma, False, rows_b, i.b_mn) for block in mma.blocks]
    b = np.concatenate(halves, axis=0)
    for block in mma.blocks:  # each has its own rows of A and of D
        if isinstance(plan.a, SharedOperand):
            a = _gather(block, mma, True, rows_a, i.a_mn)
        else:
            raw = block.tensor.load(plan.a, mma.a, i.a_type, "tcgen05_mma, operand A,")
            a = exact(raw.view(UNSIGNED[raw.dtype.itemsize]), i.a_type)
        own_b = b
        if plan.scales is not None:  # of a pair each block has the factors of all of B
            a = a * _factors(block, mma, True, rows_a)
            own_b = b * _factors(block, mma, False, i.n)
        what = "tcgen05_mma(accumulate=True)"
        acc_type = i.acc_type if isinstance(i, Instruction) else "float32"
        acc = block.tensor.load(plan.d, mma.column, acc_type, what) if mma.accumulate else None
        k_step = plan.k_step * a.shape[1] // plan.k
        if plan.metadata is not None:
            d = sparse_multiply_add(acc, a, _kept(block, mma, i.a_type), own_b, k_step, acc_type)
        else:
            d = multiply_add(acc, a, own_b, k_step, acc_type)
        block.tensor.store(plan.d, mma.column, d)


def _kept(block: BlockMemory, mma: Mma, a_type: str) -> Array:
    """Where along K each element [row, kept] of a sparse A is, found as the instruction descriptor of each step says."""
    plan, metadata = mma.plan, mma.plan.metadata
    assert metadata is not None
    steps = []
    for step in range(plan.k // plan.k_step):
        word = Instruction.decode(plan.idesc(step), plan.instruction.kind)
        assert word.sparse
        column = mma.metadata + metadata.cells(step)
        if column % 2:
            raise IllegalInstruction(
                f"tcgen05_mma: a_sparse_metadata starts at column {column} of tensor memory, an odd one"
            )
        steps.append(block.tensor.metadata(column, word.selector, plan.b.itemsize))
    return kept(np.concatenate(steps, axis=1), a_type)


def _instruction(plan: Tcgen05Plan) -> Instruction | ScaledInstruction:
    """What the words say; all steps along K say the same but for the ids of their factors."""
    i: Instruction | ScaledInstruction
    decode = ScaledInstruction.decode if plan.scales is not None else Instruction.decode
    i = decode(plan.idesc(0), plan.instruction.kind)
    if i != plan.instruction or (i.m, i.n) != (plan.m, plan.n):
        raise IllegalInstruction(f"tcgen05.mma: the descriptor says {i}; the plan says {plan.m} x {plan.n}")
    return i


def _gather(block: BlockMemory, mma: Mma, is_a: bool, rows: int, mn_major: bool) -> Array:
    """An operand in shared memory as numbers; bytes of the 4-bit kinds hold two of them, the lower half first."""
    plan = mma.plan
    operand, start, name = (plan.a, mma.a, mma.names[0]) if is_a else (plan.b, mma.b, mma.names[1])
    assert isinstance(operand, SharedOperand)
    element = plan.instruction.a_type if is_a else plan.instruction.b_type
    packed = element == "float4_e2m1fn"
    found = gather(block.shared, operand, start, rows, mn_major, "uint8" if packed else element, True, name)
    if not packed:
        return found
    raw = found.astype(np.uint8)
    halves = np.stack([raw & 15, raw >> 4], axis=-1).reshape(raw.shape[0], -1)
    values: Array = halves.astype(np.uint8).view(numpy_dtype(element)).astype(np.float32)
    return values


def _factors(block: BlockMemory, mma: Mma, is_a: bool, rows: int) -> Array:
    """The factor of each element [row, k], found as the instruction descriptor of each step says."""
    plan = mma.plan
    scales = plan.scales
    assert scales is not None and isinstance(plan.instruction, ScaledInstruction)
    part, start = (scales.a, mma.scales[0]) if is_a else (scales.b, mma.scales[1])
    steps = []
    for step in range(plan.k // plan.k_step):
        word = ScaledInstruction.decode(plan.idesc(step), plan.instruction.kind)
        id = word.a_scale_id if is_a else word.b_scale_id
        what = f"tcgen05_mma, {'a' if is_a else 'b'}_scale,"
        steps.append(block.tensor.scales(start + scales.cells(part, step), part.rows, id, scales.per_step, what))
    raw = np.ascontiguousarray(np.concatenate(steps, axis=1)[:rows])
    each = raw.view(numpy_dtype(plan.instruction.scale_type)).astype(np.float32)
    per_factor = (2 if plan.instruction.kind == "mxf4nvf4" else 1) * plan.k // each.shape[1]
    return np.repeat(each, per_factor, axis=1)


def copy(issued: Copy) -> None:
    """tcgen05.cp as its matrix descriptors say, in each block from its own shared memory."""
    plan = issued.plan
    assert COPIES[plan.form][0] in (LANES, LANES // 4)
    for block in issued.blocks:
        for index, (_, cell) in zip(copied_bytes(plan, issued.source), plan.steps, strict=True):
            block.tensor.copy(issued.column + cell, block.shared.read(index, 1, lambda: f"{plan.op}, {issued.name},"))
