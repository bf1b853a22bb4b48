"""A thread of the simulated kernel, the `sim` of simulate rules: a warpgroup of a block, or a warp under `warp_map`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import (
    BarrierMisuse,
    Leak,
    Line,
    MosaicGpuError,
    OutOfBounds,
    Race,
    UninitializedRead,
)
from ..layouts.operands import SharedOperand
from ..layouts.shared import SharedLayout
from ..ops.barriers import BarrierUse
from ..ops.elementwise import numpy_dtype
from ..ops.refs import Access
from ..ops.wgmma import WgmmaPlan
from ..plan.model import Role
from ..plan.tma import TmaCopy, TmaIssue
from ..program import Value, View
from . import memory, tensor_core, tma
from .barriers import Arrival, MBarrier, NamedBarrier
from .core import Core
from .memory import Array
from .scheduler import Blocked, Steps
from .tensor_core import Accumulator

if TYPE_CHECKING:
    from ..ops.tcgen05 import Tcgen05Plan
    from .machine import BlockState

Key = tuple[int, int]
TURN_EVERY = 512  # steps after which a thread lets the others go on, so that polling cannot lock them out


@dataclasses.dataclass
class WarpState:
    """What a warp keeps and outlives a `warp_map`: phases waited for, bulk groups of its elected lane."""

    phases: dict[Key, int] = dataclasses.field(default_factory=dict)
    open: list[tma.Store] = dataclasses.field(default_factory=list)
    groups: collections.deque[tma.Group] = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass
class Wgmma:
    """An issued group.  a: the register tile, or the address of the shared operand."""

    plan: WgmmaPlan
    a: Array | int
    b: int
    overwrite: bool
    line: Line | None


class Thread(Core):
    """What the simulate rules call `sim`."""

    def __init__(
        self, block: BlockState, role: Role, warpgroup: int, warp: int | None = None, parent: Thread | None = None
    ) -> None:
        super().__init__(block, role, warpgroup, warp, parent)
        self.accumulators: dict[int, Accumulator] = dict(parent.accumulators) if parent else {}
        self.warps: list[WarpState] = [parent.warps[warp or 0]] if parent else [WarpState() for _ in range(4)]
        self.in_flight: collections.deque[Wgmma] = collections.deque()

    def main(self) -> Steps:
        """The whole role, then what must hold at its end."""
        for value in self.role.body.inputs:
            self.write(value, self.warp if self.warp is not None else self.warpgroup)
        yield from self.run(self.role.body.steps)
        if self.in_flight:
            raise Leak(
                f"{self.who} ends with {len(self.in_flight)} wgmma in flight: call wgmma_wait(0)",
                self.in_flight[0].line,
            )
        for state in self.warps if self.warp is None else ():
            left = [*(s for g in state.groups for s in g.stores), *state.open]
            if left:
                raise Leak(
                    f"{self.who} ends without having waited for its copy_smem_to_gmem: call wait_smem_to_gmem(0)",
                    left[0].line,
                )

    def run_warps(self, roles: Iterable[Role]) -> Steps:
        """Run the roles of a `warp_map` side by side; go on when all have ended."""
        self.children = []
        for role in roles:
            for warp in role.indices:
                child = Thread(self.block, role, self.warpgroup, warp, self)
                self.children.append(self.block.scheduler.add(child.main(), child))
        yield Blocked(lambda: all(c.finished for c in self.children), lambda: "waits for its warps")
        self.children = []

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

    # ---- Refs -------------------------------------------------------------------------------------------------------
    def load(self, access: Access) -> Array:
        view = access.view
        if access.kind == "acc":
            acc = self._own_accumulator(view.ref.id, "read")
            if acc.fresh and self.block.poison:
                raise UninitializedRead(f"accumulator {view.ref} is read before anything has written it")
            return acc.data
        if access.kind == "gmem":
            return self.block.array_of(view).load(view, self.evaluate)
        layout, index = self._shared_index(view)
        raw = self.block.shared.read(index, layout.itemsize, lambda: memory.describe(view))
        return memory.from_raw(raw, view.dtype)

    def store(self, access: Access, x: Array) -> None:
        view = access.view
        if access.kind == "acc":
            acc = self._own_accumulator(view.ref.id, "written")
            acc.data = np.broadcast_to(x, view.shape).astype(numpy_dtype(view.dtype))
            acc.fresh = False
        elif access.kind == "gmem":
            self.block.array_of(view).store(view, self.evaluate, x)
        else:
            layout, index = self._shared_index(view)
            shared = self.block.shared
            shared.write(index, layout.itemsize, memory.to_raw(x, view.dtype, view.shape))
            shared.mark_unfenced(index * layout.itemsize // 16, self.warpgroup, memory.Writer(self.who, self.line))

    def _shared_index(self, view: View) -> tuple[SharedLayout, Array]:
        buffer = self.plan.buffers[view.ref.id]
        return buffer.layout, memory.shared_index(view, buffer.layout, buffer.offset, self.evaluate)

    def _own_accumulator(self, id: int, what: str) -> Accumulator:
        acc = self.accumulators[id]
        if acc.owners:
            owner = next(g for g in self.in_flight if g.plan.acc == id)
            raise Race(
                f"accumulator %{id} is {what} while the wgmma at {owner.line} may still write it: wgmma_wait first",
                kind="accumulator in flight",
            )
        return acc

    # ---- barriers ---------------------------------------------------------------------------------------------------
    def _barrier(self, use: BarrierUse) -> tuple[MBarrier, int]:
        slot = self.evaluate(use.slot)
        return self.block.barrier(use.array, slot), slot

    def arrive(self, use: BarrierUse) -> None:
        array = self.plan.barriers[use.array]
        slot = self.evaluate(use.slot)
        for block in self.block.along(array.info.collective_axes):
            block.barrier(use.array, slot).arrive(Arrival(self.who, self.line, array.unit))

    def wait(self, use: BarrierUse) -> Steps:
        barrier, slot = self._barrier(use)
        key = (use.array, slot)
        seen = {w.phases.get(key, 0) for w in self.warps}
        if len(seen) > 1:
            raise BarrierMisuse(
                f"{barrier.name}: the warps of {self.who} have waited for it {sorted(seen)} times; "
                "a wait by the warpgroup needs them to agree"
            )
        mine = seen.pop()
        if barrier.phase <= mine:
            yield Blocked(lambda: barrier.phase > mine, lambda: describe_wait(barrier, mine))
        if barrier.phase > mine + 1:
            raise BarrierMisuse(
                f"{barrier.name}: {self.who} waits for phase {mine}, but {barrier.phase} phases have completed: "
                f"it was lapped. A wait sees the parity of one phase only, so on the GPU this one would hang or pass "
                f"at the wrong time; nobody may arrive for phase {mine + 1} before every waiter has seen phase {mine}"
            )
        barrier.observed = max(barrier.observed, mine + 1)
        for w in self.warps:
            w.phases[key] = mine + 1

    def _named(self, use: BarrierUse) -> NamedBarrier:
        array, slot = self.plan.named_barriers[use.array], self.evaluate(use.slot)
        if not 0 <= slot < array.count:
            raise OutOfBounds(f"named barrier {slot} of an array of {array.count}")
        return self.block.named[array.id + slot]

    def named_arrive(self, use: BarrierUse) -> None:
        self._named(use).arrive(self.who, self.line)

    def named_sync(self, use: BarrierUse) -> Steps:
        barrier = self._named(use)
        mine = barrier.arrive(self.who, self.line)
        yield from until(lambda: barrier.generation > mine, lambda: describe_named(barrier))

    # ---- copies -----------------------------------------------------------------------------------------------------
    def _issue(self, copy: TmaCopy, issue: TmaIssue) -> tuple[tuple[int, ...], int]:
        """(coordinates, shared address) of one TMA instruction."""
        buffer = self.plan.buffers[copy.buffer]
        start, nbytes = self.evaluate(issue.shared), tma.box_bytes(self.plan.maps[copy.map])
        if start < 0 or start + nbytes > buffer.layout.nbytes:
            raise OutOfBounds(
                f"a copy touches bytes {start} to {start + nbytes - 1} of {buffer.value}, "
                f"which has {buffer.layout.nbytes}"
            )
        return tuple(self.evaluate(c.start) // c.step for c in issue.coordinates), buffer.offset + start

    def tma_load(self, copy: TmaCopy, use: BarrierUse) -> None:
        array, slot = self.plan.barriers[use.array], self.evaluate(use.slot)
        group = self.block.along(copy.multicast)
        share = len(copy.issues) // copy.parts
        rank = group.index(self.block)
        barrier = self.block.barrier(use.array, slot)
        barrier.expect_tx(copy.nbytes)
        barrier.arrive(Arrival(f"{self.who} (copy of {copy.nbytes} bytes)", self.line, array.unit))
        destinations = tuple((b.shared, b.barrier(use.array, slot)) for b in group)
        for issue in copy.issues[rank * share : (rank + 1) * share]:
            box, address = self._issue(copy, issue)
            self.block.tma.submit(tma.Load(self.plan.maps[copy.map], box, address, destinations, self.line))

    def tma_store(self, copy: TmaCopy, commit_group: bool) -> None:
        state = self.warps[0]
        for issue in copy.issues:
            coordinates, address = self._issue(copy, issue)
            store = tma.Store(self.plan.maps[copy.map], coordinates, address, self.line)
            state.open.append(store)
            self.block.tma.submit(store)
        if commit_group:
            state.groups.append(tma.Group(state.open))
            state.open = []

    def tma_store_wait(self, n: int, read_only: bool) -> Steps:
        groups = self.warps[0].groups
        while len(groups) > n:
            oldest = groups[0]
            yield from until(lambda: oldest.finished(read_only), lambda: f"waits for {len(groups) - n} stores")  # noqa: B023
            groups.popleft()

    def commit_smem(self) -> None:
        """What this warpgroup has written is visible to TMA and the tensor core from now on."""
        self.block.shared.fence(self.warpgroup)

    # ---- wgmma ------------------------------------------------------------------------------------------------------
    def _operand(self, operand: SharedOperand) -> int:
        return self.plan.buffers[operand.buffer].offset + self.evaluate(operand.start)

    def wgmma(self, plan: WgmmaPlan) -> None:
        """Issue a group.  It computes at once or when it is waited for: the hardware might do either."""
        a = self.env[plan.a] if isinstance(plan.a, int) else self._operand(plan.a)
        acc = self.accumulators[plan.acc]
        overwrite = plan.init == "zero" or (plan.init == "dynamic" and acc.fresh)
        acc.fresh = False
        acc.owners += 1
        group = Wgmma(plan, a, self._operand(plan.b), overwrite, self.line)
        if self.block.early:
            self._multiply(group)
        self.in_flight.append(group)

    def wgmma_wait(self, n: int) -> Steps:
        while len(self.in_flight) > n:
            group = self.in_flight.popleft()
            self.accumulators[group.plan.acc].owners -= 1
            if self.block.early:
                continue
            try:
                self._multiply(group)
            except MosaicGpuError as e:
                e.line = e.line or group.line
                raise
        yield from ()

    def _multiply(self, group: Wgmma) -> None:
        plan, acc = group.plan, self.accumulators[group.plan.acc]
        shared = self.block.shared
        if isinstance(plan.a, SharedOperand):
            assert isinstance(group.a, int)
            a = tensor_core.gather(shared, plan.a, group.a, 64, plan.a.mn_major, plan.a_type, False)
        else:
            a = tensor_core.register_operand(np.asarray(group.a), plan.a_type)
        b = tensor_core.gather(shared, plan.b, group.b, plan.n, plan.b.mn_major, plan.b_type, False)
        acc.data = tensor_core.multiply_add(None if group.overwrite else acc.data, a, b, plan.k_step, plan.acc_type)

    # ---- tcgen05 ----------------------------------------------------------------------------------------------------
    def tcgen05_mma(self, plan: Tcgen05Plan) -> None:
        accumulate = bool(self.read(plan.accumulate))
        column = self.plan.tmem[plan.d].column + plan.d_column
        mma = tensor_core.Mma(plan, self._operand(plan.a), self._operand(plan.b), column, accumulate, self.line)
        self.block.tensor_core.submit(mma)
        if plan.barrier is not None:
            self.tcgen05_commit(plan.barrier)

    def tcgen05_commit(self, use: BarrierUse) -> None:
        barrier, _ = self._barrier(use)
        unit = self.plan.barriers[use.array].unit
        arrival = Arrival(f"{self.who} (tcgen05 commit)", self.line, unit)
        self.block.tensor_core.submit(tensor_core.Commit(barrier, arrival))

    def tmem_load(self, d: int, column: int, columns: int) -> Array:
        return self.block.tensor_core.memory.load(self.plan.tmem[d].column + column, columns)

    def wait_load_tmem(self) -> Steps:
        yield from ()


def until(ready: Callable[[], bool], what: Callable[[], str]) -> Steps:
    if not ready():
        yield Blocked(ready, what)


def describe_wait(barrier: MBarrier, phase: int) -> str:
    """A wait on an mbarrier for reports: which phase, what has arrived and what is missing."""
    return (
        f"waits for phase {phase} of {barrier.name}; missing: {barrier.missing()}\n"
        f"arrived: {barrier.describe_arrivals()}"
    )


def describe_named(barrier: NamedBarrier) -> str:
    count = barrier.threads // 128
    missing = count - len(barrier.arrived)
    return f"waits at {barrier.name} for {missing} of {count} warpgroups; arrived: {', '.join(barrier.arrived)}"
