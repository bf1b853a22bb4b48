"""A thread of the simulated kernel, the `sim` of simulate rules: a warpgroup of a block, or a warp under `warp_map`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BarrierMisuse, IllegalInstruction, Leak, OutOfBounds, UninitializedRead
from ..layouts.registers import RegisterLayout
from ..layouts.shared import SharedLayout
from ..ops.async_store import AsyncStore
from ..ops.barriers import BarrierUse
from ..ops.elementwise import numpy_dtype
from ..ops.indexed import Indexed
from ..ops.launch_control import ResultPlan
from ..ops.refs import Access
from ..plan.model import Role
from ..plan.tma import TmaCopy, TmaIssue
from ..program import Operand, Value, View
from . import async_store, indexed, launch_control, masked, memory, tma
from .barriers import Arrival, MBarrier, NamedBarrier, Sight
from .hazards import Hazards, view_bytes
from .memory import Array, GlobalArray, Note
from .products import ProductThread
from .scheduler import RESTING, Blocked, Steps

if TYPE_CHECKING:
    from .machine import BlockState


TMEM_WAITS = (("async_load_tmem", "wait_load_tmem"), ("async_store_tmem", "commit_tmem"))


class Thread(ProductThread):
    """What the simulate rules call `sim`."""

    def __init__(
        self, block: BlockState, role: Role, warpgroup: int, warp: int | None = None, parent: Thread | None = None
    ) -> None:
        super().__init__(block, role, warpgroup, warp, parent)
        self.meter = block.cluster.machine.meter
        self.multicasts: dict[int, int] = {}  # how often each multicast was made, by step
        if block.hazards is not None:
            self.hazards = Hazards(
                block.hazards, role, self.who, warpgroup, warp, parent.hazards if parent is not None else None
            )

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
        for write, (op, wait) in enumerate(TMEM_WAITS if self.hazards is not None else ()):
            assert self.hazards is not None
            if self.hazards.transfers[write] > self.hazards.clock.moved[write]:
                raise Leak(
                    f"{self.who} ends without having waited for its {op}: call {wait}(), since tensor memory is freed at "
                    "the end",
                    self.hazards.last_transfer[write],
                )
        for state in self.warps if self.warp is None else ():
            left = [s for g in state.groups if not g.released for s in g.stores]
            if not left and state.open:
                raise Leak(
                    f"{self.who} ends with a group of stores open: its last copy_smem_to_gmem has commit_group=False, and "
                    "wait_smem_to_gmem counts closed groups only. Leave commit_group=False out there, then call "
                    "wait_smem_to_gmem(0)",
                    state.open[-1].line,
                )
            if left:
                raise Leak(
                    f"{self.who} ends without having waited for its copy_smem_to_gmem: call wait_smem_to_gmem(0)",
                    left[0].line,
                )

    def check_phases(self) -> None:
        """At the end: one phase more than it has waited for may have ended on a barrier, not two."""
        for warp, state in enumerate(self.warps):
            for (array, slot), seen in state.phases.items():
                barrier = self.block.barrier(array, slot)
                if barrier.phase > seen + 1:
                    line = next((s.line for s in barrier.sights.values() if s.phase == seen), self.line)
                    raise Leak(
                        f"{barrier.name}: {barrier.phase} phases have ended, of which warp {warp} of {self.who} has waited "
                        f"for {seen}. It lags by {barrier.phase - seen}: waiting again, as the next tile of a persistent kernel "
                        "would, it could not tell one phase from another. Wait for every phase, or arrive less often",
                        line,
                    )

    def check_products(self, cluster: Sequence[Hazards]) -> None:
        """At the end: somebody in the cluster has waited for a commit behind each tcgen05 product and copy."""
        for warp, state in enumerate(self.warps if self.hazards is not None else ()):
            assert self.hazards is not None
            if state.products > self.hazards.products_seen(warp, cluster):
                raise Leak(
                    f"{self.block.name} ends with tcgen05 work of warpgroup {self.warpgroup}, warp {warp}, in flight: nobody has "
                    "waited for a commit behind it, and tensor memory is freed at the end. Let tcgen05_commit_arrive, or "
                    "tcgen05_mma(..., barrier), arrive on a barrier, and wait for that",
                    state.last_product,
                )

    def run_warps(self, roles: Iterable[Role]) -> Steps:
        """Run the roles of a `warp_map` side by side; go on when all have ended."""
        self.children = []
        threads: dict[int, Thread] = {}
        for role in roles:
            for warp in role.indices:
                child = threads[warp] = Thread(self.block, role, self.warpgroup, warp, self)
                self.children.append(self.block.scheduler.add(child.main(), child))
        yield Blocked(lambda: all(c.finished for c in self.children), lambda: "waits for its warps")
        self.children = []
        if self.hazards is not None:
            self.hazards.join_warps({w: t.hazards for w, t in threads.items() if t.hazards is not None})

    # ---- Refs ---------------------------------------------------------------------------------------------------------
    def load(self, access: Access) -> Array:
        view = access.view
        if access.kind == "acc":
            acc = self._own_accumulator(view.ref.id, "read")
            if acc.fresh and self.block.poison:
                raise UninitializedRead(f"accumulator {view.ref} is read before anything has written it")
            return acc.data
        if access.kind == "gmem":
            array = self.block.array_of(view)
            self._count_global(array, access, write=False)
            return array.load(view, self.evaluate, self._global_note(array, access, write=False))
        layout, index = self._shared_index(access, write=False)
        raw = self._owner(view).shared.read(index, layout.itemsize, lambda: memory.describe(view))
        return memory.from_raw(raw, view.dtype)

    def store(self, access: Access, x: Array) -> None:
        view = access.view
        if access.kind == "acc":
            acc = self._own_accumulator(view.ref.id, "written")
            acc.data = np.broadcast_to(x, view.shape).astype(numpy_dtype(view.dtype))
            acc.fresh = False
        elif access.kind == "gmem":
            array = self.block.array_of(view)
            self._count_global(array, access, write=True)
            array.store(view, self.evaluate, x, self._global_note(array, access, write=True))
        else:
            layout, index = self._shared_index(access, write=True)
            self._owner(view).shared.write(index, layout.itemsize, memory.to_raw(x, view.dtype, view.shape))

    def async_store(self, plan: AsyncStore, x: Array) -> None:
        async_store.start(self, plan, x)

    def load_indexed(self, access: Indexed, shape: tuple[int, ...], indices: Sequence[Array]) -> Array:
        return indexed.load(self, access, shape, indices)

    def store_indexed(self, access: Indexed, x: Array, indices: Sequence[Array]) -> None:
        indexed.store(self, access, x, indices)

    def load_masked(self, access: Access, mask: Array, other: Array) -> Array:
        return masked.load(self, access, mask, other)

    def store_masked(self, access: Access, x: Array, mask: Array) -> None:
        masked.store(self, access, x, mask)

    def update(self, access: Access, function: Callable[[Array], Array]) -> None:
        masked.update(self, access, function)

    def load_view(self, view: View) -> Array:
        return indexed.load_view(self, view)

    def _owner(self, view: View) -> BlockState:
        """The block whose shared memory a view is of."""
        return self.block.peer({n: self.evaluate(i) for n, i in view.peer}) if view.peer else self.block

    def _shared_index(self, access: Access, write: bool) -> tuple[SharedLayout, Array]:
        view = access.view
        buffer = self.plan.buffers[view.ref.id]
        starts = tuple([self.evaluate(d.start) for d in view.dims])
        index = self.block.cluster.index_of(view, buffer, starts)
        if self.hazards is not None:
            assert self.step is not None
            size, owner = buffer.layout.itemsize, self._owner(view).hazards
            assert owner is not None
            self.hazards.shared(
                owner, self.step, access, self.moved(write), starts, write, lambda: view_bytes(index, size)
            )
        layout = self._layout(access, write)
        if layout is not None and not view.peer:
            assert self.meter is not None
            self.meter.shared(self.line, view, layout, buffer, index, write)
        return buffer.layout, index

    def _layout(self, access: Access, write: bool) -> RegisterLayout | None:
        """Of what this step loads or stores, where accesses are counted; None for scalars, which take one of everything."""
        value = self.moved(write)
        if self.meter is None or access.scalar or not isinstance(value, Value):
            return None
        return self.role.layouts.get(value.id)

    def _count_global(self, array: GlobalArray, access: Access, write: bool) -> None:
        layout = self._layout(access, write)
        if layout is not None:
            assert self.meter is not None
            starts = tuple([self.evaluate(d.start) for d in access.view.dims])
            self.meter.global_memory(self.line, access.view, layout, array.data.shape, starts, write)

    def _count_outside(self, op: str, boxes: Sequence[tma.TmaBox]) -> None:
        """Note a copy of boxes that have nothing of their array in them."""
        if self.meter is None:
            return
        array = self.block.arrays[boxes[0].map.input]
        if all(tma.box_place(array, box.map, box.coordinates) is None for box in boxes):
            self.meter.report.add_outside(self.line, op, array.name)

    def _global_note(self, array: GlobalArray, access: Access, write: bool) -> Note | None:
        if self.hazards is None or array.shadow is None:
            return None
        assert self.step is not None
        starts = tuple([self.evaluate(d.start) for d in access.view.dims])
        return self.hazards.global_note(array, self.step, access, self.moved(write), starts, write)

    def moved(self, write: bool) -> Operand:
        """What this step loads or stores."""
        assert self.step is not None
        e = self.step.equation
        return e.operands[1] if write else e.results[0]

    # ---- barriers ---------------------------------------------------------------------------------------------------
    def _barrier(self, use: BarrierUse) -> tuple[MBarrier, int]:
        slot = self.evaluate(use.slot)
        return self.block.barrier(use.array, slot), slot

    def arrive(self, use: BarrierUse) -> None:
        array = self.plan.barriers[use.array]
        slot = self.evaluate(use.slot)
        released = None
        if self.hazards is not None:
            clock = self.hazards.clock
            if array.info.orders_tensor_core:
                clock.fence_before()
            if array.unit == 1:
                self.hazards.meet()  # its elected thread arrives for all
            released = clock.release()
        for block in self.block.along(array.info.collective_axes):
            block.barrier(use.array, slot).arrive(Arrival(self.who, self.line, array.unit), released)

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
            yield Blocked(lambda: barrier.phase > mine, lambda: describe_wait(barrier, mine), use.array)
        if barrier.phase > mine + 1:
            raise barrier.lapped(self.who, self.line, mine)
        for w in self.warps:
            w.phases[key] = mine + 1
        if self.hazards is None:
            barrier.observed = max(barrier.observed, mine + 1)
            return
        clock = self.hazards.clock
        barrier.see(Sight(clock.agent, clock.now, self.who, self.line, mine + 1))
        if barrier.clock is not None:
            clock.acquire(barrier.clock)
        if self.plan.barriers[use.array].info.orders_tensor_core:
            clock.fence_after()

    def test(self, use: BarrierUse) -> Steps:
        """This step's result is whether the phase that the role waits for next has ended, which is then seen, as by `wait`."""
        assert self.step is not None
        barrier, slot = self._barrier(use)
        done = all(barrier.phase > w.phases.get((use.array, slot), 0) for w in self.warps)
        self.write(self.step.equation.results[0], done)
        yield from self.wait(use) if done else (RESTING,)

    def _named(self, use: BarrierUse) -> NamedBarrier:
        array, slot = self.plan.named_barriers[use.array], self.evaluate(use.slot)
        if not 0 <= slot < array.count:
            raise OutOfBounds(f"named barrier {slot} of an array of {array.count}")
        return self.block.named[array.id + slot]

    def named_arrive(self, use: BarrierUse) -> None:
        self._named_arrive(self._named(use))

    def _named_arrive(self, barrier: NamedBarrier) -> int:
        if self.hazards is None:
            return barrier.arrive(self.who, self.line)
        clock = self.hazards.clock
        now = clock.now
        return barrier.arrive(self.who, self.line, clock.release(), clock.agent, now)

    def named_sync(self, use: BarrierUse) -> Steps:
        barrier = self._named(use)
        mine = self._named_arrive(barrier)
        yield from until(lambda: barrier.generation > mine, lambda: describe_named(barrier), use.array)
        if self.hazards is not None:
            self.hazards.clock.acquire(barrier.clocks[mine])
            self.hazards.meet()

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

    def try_cluster_cancel(self, plan: ResultPlan, use: BarrierUse) -> None:
        launch_control.ask(self, plan, use)

    def query_cluster_cancel(self, plan: ResultPlan) -> tuple[tuple[int, ...], bool]:
        return launch_control.query(self, plan)

    def tma_load(self, copy: TmaCopy, use: BarrierUse, leader: str | None = None) -> None:
        """leader: the axis of a pair of blocks; the barrier of its first block counts what both copy."""
        array, slot = self.plan.barriers[use.array], self.evaluate(use.slot)
        group = self.block.along(copy.multicast)
        share = len(copy.issues) // copy.parts
        rank = group.index(self.block)
        pair = [self.block] if leader is None else self.block.along((leader,))
        barriers = [b.barrier(use.array, slot) for b in (group if leader is None else pair[:1])]
        barrier, hazards, started = barriers[group.index(self.block) if leader is None else 0], self.hazards, None
        if self.block is pair[0]:
            nbytes = copy.nbytes * len(pair)
            barrier.expect_tx(nbytes)
            released = None if hazards is None else hazards.clock.release(every=False)
            barrier.arrive(Arrival(self.who, self.line, array.unit, f"copy of {nbytes} bytes"), released)
        m = self.plan.maps[copy.map]
        if copy.multicast:
            self._same_tile(copy, group)
        boxes = [tma.TmaBox(m, *self._issue(copy, i)) for i in copy.issues[rank * share : (rank + 1) * share]]
        self._count_outside("copy_gmem_to_smem", boxes)
        if hazards is not None:
            started = hazards.clock.started()
            targets = [
                (b.hazards, x, x.phase + 1) for b, x in zip(group, barriers, strict=True) if b.hazards is not None
            ]
            targets.sort(key=lambda t: t[0] is not self.block.hazards)  # its own first
            for box in boxes:
                hazards.tma_load(box, self.block.arrays[m.input], targets, self.line)
        destinations = tuple((b.shared, x) for b, x in zip(group, barriers, strict=True))
        for box in boxes:
            self.block.tma.submit(tma.Load(m, box.coordinates, box.address, destinations, self.line, started))

    def _same_tile(self, copy: TmaCopy, group: Sequence[BlockState]) -> None:
        """A multicast loads one tile, of which each block brings a part: all must name the same."""
        step = id(self.step)
        turn = self.multicasts[step] = self.multicasts.get(step, -1) + 1
        tile = tuple(self.evaluate(c.start) for issue in copy.issues[:1] for c in issue.coordinates)
        key = (step, turn, tuple(b.position for b in group))
        first, who = self.block.cluster.multicasts.setdefault(key, (tile, self.who))
        if first != tile:
            raise IllegalInstruction(
                f"a multicast along {', '.join(copy.multicast)} of different tiles: {who} starts at {first} (in the order of "
                f"the tensor map, columns first), {self.who} at {tile}. Each block brings a part of one tile that all of "
                "them get: index it by nothing that differs between them, or copy without collective_axes"
            )

    def tma_store(self, copy: TmaCopy, commit_group: bool, add: bool, partial: bool) -> None:
        state, m = self.warps[0], self.plan.maps[copy.map]
        boxes = [tma.TmaBox(m, *self._issue(copy, issue)) for issue in copy.issues]
        self._count_outside("copy_smem_to_gmem", boxes)
        source = self._source(copy)
        for box in boxes:
            if self.hazards is not None:
                self.hazards.tma_store(
                    box, self.block.arrays[m.input], state.committed + 1, self.line, add, commit_group
                )
            store = tma.Store(m, box.coordinates, box.address, self.line, source, add, partial)
            state.open.append(store)
            self.block.tma.submit(store)
        if commit_group:
            self.commit_group()

    def _source(self, copy: TmaCopy) -> tuple[str, Callable[[], Array]]:
        """What the store that it is at copies, for `tma.Store`."""
        assert self.step is not None
        view = next(x for x in self.step.equation.operands if isinstance(x, View) and x.ref.id == copy.buffer)
        starts, buffer = tuple(self.evaluate(d.start) for d in view.dims), self.plan.buffers[copy.buffer]
        what = f"copy_smem_to_gmem by {self.who}, {memory.describe(view)}"
        return what, lambda: self.block.cluster.index_of(view, buffer, starts)

    def commit_group(self) -> None:
        """What its elected thread has stored since the last one is a bulk group."""
        state = self.warps[0]
        state.groups.append(tma.Group(state.open))
        state.open = []
        state.committed += 1

    def tma_store_wait(self, n: int, read_only: bool) -> Steps:
        state = self.warps[0]
        for group in list(state.groups)[: max(0, len(state.groups) - n)]:
            yield from until(lambda: group.finished(read_only), lambda: f"waits until {n} stores are left")  # noqa: B023
            group.released = True
            if not read_only:
                state.groups.popleft()
        if self.hazards is not None:
            self.hazards.waited_for_stores(max(0, state.committed - n), read_only)

    def commit_smem(self) -> None:
        """What this warpgroup has written is visible to TMA and the tensor core from now on."""
        if self.hazards is not None:
            self.hazards.commit_smem()


def until(ready: Callable[[], bool], what: Callable[[], str], barrier: int = -1) -> Steps:
    if not ready():
        yield Blocked(ready, what, barrier)


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
