"""The tensor-core part of a simulated thread: accumulators in registers, wgmma groups, tcgen05 products and loads."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import IllegalInstruction, Line, MosaicGpuError, OutOfBounds, Race
from ..layouts.operands import SharedOperand
from ..layouts.tmem import Part
from ..ops.barriers import BarrierUse
from ..ops.wgmma import WgmmaPlan
from ..plan.model import Role
from ..program import Value
from . import tensor_core, tma
from .barriers import Arrival, MBarrier
from .core import Core
from .memory import Array
from .scheduler import Steps
from .tensor_core import Accumulator
from .tensor_memory import BlockMemory, Commit, Copy, Mma

if TYPE_CHECKING:
    from ..ops.tcgen05 import CommitPlan, Tcgen05Plan
    from ..ops.tcgen05_copies import TmemCopy
    from ..ops.tmem import TmemAccess
    from .machine import BlockState

Key = tuple[int, int]


@dataclasses.dataclass
class WarpState:
    """What a warp keeps and outlives a `warp_map`: phases waited for; bulk groups of its elected lane, how many of them it
    has committed, and the tcgen05 products and copies that it has issued, and from which line the last."""

    phases: dict[Key, int] = dataclasses.field(default_factory=dict)
    open: list[tma.Store] = dataclasses.field(default_factory=list)
    groups: collections.deque[tma.Group] = dataclasses.field(default_factory=collections.deque)
    committed: int = 0
    products: int = 0
    last_product: Line | None = None


@dataclasses.dataclass
class Wgmma:
    """An issued group.  a: the register tile, or the address of the shared operand; done: it has computed already."""

    plan: WgmmaPlan
    a: Array | int
    b: int
    overwrite: bool
    line: Line | None
    done: bool = False


class ProductThread(Core):
    """What products need of a thread."""

    def __init__(
        self,
        block: BlockState,
        role: Role,
        warpgroup: int,
        warp: int | None = None,
        parent: ProductThread | None = None,
    ) -> None:
        super().__init__(block, role, warpgroup, warp, parent)
        self.accumulators: dict[int, Accumulator] = dict(parent.accumulators) if parent else {}
        self.warps: list[WarpState] = [parent.warps[warp or 0]] if parent else [WarpState() for _ in range(4)]
        self.in_flight: collections.deque[Wgmma] = collections.deque()
        self.owned: collections.Counter[int] = collections.Counter()  # register tiles that groups in flight read
        self.active: Sequence[bool] = (True,) * 4  # warps that are in this branch

    def _barrier(self, use: BarrierUse) -> tuple[MBarrier, int]:
        raise NotImplementedError

    def write(self, value: Value, x: object) -> None:
        if self.owned and value.id in self.owned:
            owner = next(g for g in self.in_flight if g.plan.a == value.id)
            raise Race(
                f"register operand in flight: {value} gets a new value while the wgmma at {owner.line} may still read the old "
                f"one from its registers, in {self.who}: wgmma_wait before it changes",
                kind="register operand in flight",
                between="warpgroup",
                other_line=owner.line,
                who=self.who,
                other=self.who,
                place=str(value),
                remedy="wgmma_wait(n) before it",
            )
        super().write(value, x)

    # ---- accumulators -----------------------------------------------------------------------------------------------
    def allocate(self, ref: Value) -> None:
        """A buffer of `run_scoped`.  Memory of the block has its place in the plan; an accumulator starts anew."""
        if ref.space is not None and ref.space.kind == "acc":
            self.accumulators[ref.id] = tensor_core.accumulator(ref.shape, ref.dtype, self.block.poison)

    def zero_accumulator(self, ref: Value, dynamic: bool) -> None:
        """Zeros into an accumulator; dynamic: only if nothing has written it."""
        acc = self._own_accumulator(ref.id, "written")
        if acc.fresh or not dynamic:
            acc.data, acc.fresh = np.zeros_like(acc.data), False

    def _own_accumulator(self, id: int, what: str) -> Accumulator:
        acc = self.accumulators[id]
        if acc.owners:
            owner = next(g for g in self.in_flight if g.plan.acc == id)
            raise Race(
                f"accumulator %{id} is {what} while the wgmma at {owner.line} may still write it: wgmma_wait first",
                kind="accumulator in flight",
                between="warpgroup",
                other_line=owner.line,
                who=self.who,
                other=self.who,
                place=f"accumulator %{id}",
                remedy="wgmma_wait(n) before it",
            )
        return acc

    # ---- wgmma ------------------------------------------------------------------------------------------------------
    def _operand(self, operand: SharedOperand, rows: int, tcgen05: bool) -> int:
        """Address of an operand, all of which lies in its buffer; rows: of one instruction."""
        buffer = self.plan.buffers[operand.buffer]
        start = self.evaluate(operand.start)
        base = buffer.offset + start
        inside = self.block.cluster.machine.operands_inside
        if (id(operand), base) not in inside:
            end = buffer.offset + buffer.layout.nbytes
            if 0 <= start < buffer.layout.nbytes:
                index = tensor_core.operand_index(operand, base, rows, operand.mn_major, tcgen05)
                last = (int(index.max()) + 1) * operand.itemsize
            if not 0 <= start < buffer.layout.nbytes or last > end:
                raise OutOfBounds(
                    f"an operand of {'tcgen05_mma' if tcgen05 else 'wgmma'} starts at byte {start} of {buffer.value} and "
                    f"reaches beyond its {buffer.layout.nbytes} bytes"
                )
            inside.add((id(operand), base))
        return base

    def _name(self, operand: SharedOperand) -> str:
        return str(self.plan.buffers[operand.buffer].value)

    def wgmma(self, plan: WgmmaPlan) -> None:
        """Issue a group.  It computes at once or when it is waited for: the hardware might do either."""
        a = self.env[plan.a] if isinstance(plan.a, int) else self._operand(plan.a, 64, False)
        acc = self.accumulators[plan.acc]
        overwrite = plan.init == "zero" or (plan.init == "dynamic" and acc.fresh)
        acc.fresh = False
        acc.owners += 1
        group = Wgmma(plan, a, self._operand(plan.b, plan.n, False), overwrite, self.line)
        if self.hazards is not None:
            operands = [(plan.b, group.b, plan.n)]
            if isinstance(plan.a, SharedOperand):
                assert isinstance(a, int)
                operands.append((plan.a, a, 64))
            self.hazards.wgmma(operands, self.line)
        if isinstance(plan.a, int):
            self.owned[plan.a] += 1
        older = any(g.plan.acc == plan.acc and not g.done for g in self.in_flight)
        if self.block.early or (self.block.chance is not None and not older and self.block.chance.random() < 0.5):
            self._multiply(group)
        self.in_flight.append(group)

    def wgmma_wait(self, n: int) -> Steps:
        while len(self.in_flight) > n:
            group = self.in_flight.popleft()
            self.accumulators[group.plan.acc].owners -= 1
            if isinstance(group.plan.a, int):
                self.owned[group.plan.a] -= 1
                if not self.owned[group.plan.a]:
                    del self.owned[group.plan.a]
            if group.done:
                continue
            try:
                self._multiply(group)
            except MosaicGpuError as e:
                e.line = e.line or group.line
                raise
        if self.hazards is not None:
            self.hazards.waited_for_wgmma(len(self.in_flight))
        yield from ()

    def _multiply(self, group: Wgmma) -> None:
        plan, acc = group.plan, self.accumulators[group.plan.acc]
        group.done = True
        shared = self.block.shared
        if isinstance(plan.a, SharedOperand):
            assert isinstance(group.a, int)
            a = tensor_core.gather(shared, plan.a, group.a, 64, plan.a.mn_major, plan.a_type, False, self._name(plan.a))
        else:
            a = tensor_core.register_operand(np.asarray(group.a), plan.a_type)
        b = tensor_core.gather(shared, plan.b, group.b, plan.n, plan.b.mn_major, plan.b_type, False, self._name(plan.b))
        acc.data = tensor_core.multiply_add(None if group.overwrite else acc.data, a, b, plan.k_step, plan.acc_type)

    # ---- tcgen05 ------------------------------------------------------------------------------------------------------
    @property
    def _issuer(self) -> int:
        """Of tcgen05 work: the warp of the block whose elected lane issues it."""
        return 4 * self.warpgroup + (self.warp or 0)

    def _column(self, part: Part) -> int:
        """The first column of a part, all of which lies in its buffer."""
        buffer, start = self.plan.tmem[part.buffer], self.evaluate(part.column)
        if start < 0 or start + part.columns > buffer.columns:
            raise OutOfBounds(
                f"columns {start} to {start + part.columns - 1} (of cells) of {buffer.value}, which has {buffer.columns}"
            )
        return buffer.column + start

    def _pair(self, plan: Tcgen05Plan | TmemCopy) -> list[BlockState]:
        """The blocks that a product (or copy) works in.  The first of a pair issues."""
        if not plan.pair:
            return [self.block]
        blocks = self.block.along(self.program.cluster_names[-1:])
        if self.block is not blocks[0]:
            raise IllegalInstruction(
                f"{self.who} issues a product of a pair of blocks: block 0 of the pair issues for both, so put it under "
                f"plgpu.when(jax.lax.axis_index({self.program.cluster_names[-1]!r}) == 0)"
            )
        return blocks

    def _count_product(self) -> None:
        self.warps[0].products += 1
        self.warps[0].last_product = self.line

    def tcgen05_mma(self, plan: Tcgen05Plan) -> None:
        blocks = self._pair(plan)
        accumulate = bool(self.read(plan.accumulate))
        rows_a, rows_b = plan.rows
        a = self._operand(plan.a, rows_a, True) if isinstance(plan.a, SharedOperand) else self._column(plan.a)
        b, column = self._operand(plan.b, rows_b, True), self._column(plan.d)
        scales = (0, 0) if plan.scales is None else (self._column(plan.scales.a), self._column(plan.scales.b))
        metadata = 0 if plan.metadata is None else self._column(plan.metadata.part)
        self._count_product()
        if self.hazards is not None:
            others, number = [x.hazards for x in blocks if x.hazards is not None], self.warps[0].products
            self.hazards.tcgen05_mma(plan, others, a, b, column, scales, metadata, number, self.line)
        names = (self._name(plan.a) if isinstance(plan.a, SharedOperand) else "", self._name(plan.b))
        memories = tuple(BlockMemory(x.shared, x.tensor_core.memory) for x in blocks)
        mma = Mma(plan, a, b, column, accumulate, self.line, memories, self._issuer, names, scales, metadata)
        self.block.tensor_core.submit(mma)
        if plan.commit is not None:
            self.tcgen05_commit(plan.commit)

    def tmem_copy(self, plan: TmemCopy) -> None:
        blocks = self._pair(plan)
        buffer, start, column = self.plan.buffers[plan.buffer], self.evaluate(plan.start), self._column(plan.part)
        size = buffer.layout.nbytes
        inside = 0 <= start < size
        if not inside or int(tensor_core.copied_bytes(plan, buffer.offset + start).max()) >= buffer.offset + size:
            raise OutOfBounds(f"{plan.op} from byte {start} of {buffer.value} reaches beyond its {size} bytes")
        source = buffer.offset + start
        self._count_product()
        if self.hazards is not None:
            others = [x.hazards for x in blocks if x.hazards is not None]
            self.hazards.tmem_copy(plan, others, source, column, self.warps[0].products, self.line)
        memories = tuple(BlockMemory(x.shared, x.tensor_core.memory) for x in blocks)
        copy = Copy(plan, source, column, self.line, memories, self._issuer, str(buffer.value))
        self.block.tensor_core.submit(copy)

    def tcgen05_commit(self, plan: CommitPlan) -> None:
        use = plan.barrier
        slot = self.evaluate(use.slot)
        unit = self.plan.barriers[use.array].unit
        arrival = Arrival(self.who, self.line, unit, "tcgen05 commit")
        released = self.hazards.commit(self.warps[0].products) if self.hazards is not None else None
        barriers = tuple(b.barrier(use.array, slot) for b in self.block.along(plan.axes))
        self.block.tensor_core.submit(Commit(barriers, arrival, released, self._issuer))

    def tmem_load(self, access: TmemAccess) -> Array:
        first = self._column(access.part)
        if self.hazards is not None:
            self.hazards.tmem_access(first, access, False, self.line)
        return self.block.tensor_core.memory.load(access.part, first, access.dtype, access.what)

    def tmem_store(self, access: TmemAccess, x: Array) -> None:
        first = self._column(access.part)
        if self.hazards is not None:
            self.hazards.tmem_access(first, access, True, self.line)
        self.block.tensor_core.memory.store(access.part, first, x, self.active)

    def wait_load_tmem(self) -> Steps:
        if self.hazards is not None:
            self.hazards.waited_for_tmem(write=False)
        yield from ()

    def commit_tmem(self) -> Steps:
        if self.hazards is not None:
            self.hazards.waited_for_tmem(write=True)
        yield from ()
