"""What threads tell the shadow memories: each operation as accesses by an agent, and what it learns or hands on.

`BlockHazards` is what a block remembers, `Hazards` what a thread knows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Line
from ..layouts.operands import SharedOperand
from ..ops.refs import Access as RefAccess
from ..plan.model import Role, Step
from ..program import Operand, Value, View
from .clocks import ORDER, RUN, TMEM, Rows, ThreadClock
from .findings import race
from .global_shadow import ADDITION, ATOMIC, UPDATE, GlobalShadow, Part
from .memory import Array, GlobalArray, Note
from .shadow import ASYNC, COPIED, GENERIC, LOADED, READ, STORED, TENSOR, Access, ShadowMemory
from .tables import Tables
from .tensor_core import copied_bytes, operand_index
from .tma import TmaBox, box_bytes, box_shadow, chunk_index

if TYPE_CHECKING:
    from ..ops.tcgen05 import Tcgen05Plan
    from ..ops.tcgen05_copies import TmemCopy
    from ..ops.tmem import TmemAccess
    from .barriers import MBarrier

BULK_READ, BULK_WRITE, PRODUCTS = 1, 2, 3  # kinds of `Agents.issuer`
OPEN_GROUP = ", behind a copy that closes the group (commit_group=True), since a wait counts closed groups only,"


class BlockHazards:
    """The shadow memories of a block.  cluster: which one of the grid it is in; index: of the block in the cluster."""

    def __init__(self, tables: Tables, cluster: int, index: int) -> None:
        self.tables, self.cluster, self.index = tables, cluster, index
        self.smem = ShadowMemory(tables.smem, lambda a, b, why, r: race(a, b, why, tables.shared_place(r)))
        self.tmem = ShadowMemory(tables.tmem, lambda a, b, why, r: race(a, b, why, tables.tmem_place(r)))

    def close(self) -> None:
        self.smem.close()
        self.tmem.close()


class Hazards:
    """One thread's part: its clock, and its accesses."""

    def __init__(
        self, block: BlockHazards, role: Role, who: str, warpgroup: int, warp: int | None, parent: Hazards | None
    ) -> None:
        self.block, self.tables, self.role, self.who = block, block.tables, role, who
        self.warpgroup, self.warp = warpgroup, warp
        self.place = (block.index, warpgroup)
        agents = self.tables.agents
        agent = agents.thread(block.index, warpgroup, warp)
        rows: Rows
        if parent is None:
            rows = np.zeros((4, agents.total), np.int64)
        else:
            rows = parent.clock.rows[(warp or 0) % len(parent.clock.rows)].copy()
        tensor = bool(self.tables.plan.tmem)
        transfers = agents.tmem(block.index, warpgroup) if tensor and warp is None else None
        self.clock: ThreadClock = ThreadClock(agent, rows, role.single_thread or warp is not None, tensor, transfers)
        if parent is not None:  # its warp has done its own part of what the warpgroup did
            rows[RUN, parent.clock.agent] = parent.clock.now
            self.clock.now = int(max(rows[ORDER, agent], rows[RUN, agent])) + 1
            rows[ORDER, agent] = self.clock.now
            self.clock.offered, self.clock.handed = parent.clock.offered.copy(), parent.clock.handed.copy()
        self.single = self.clock.single
        self.elected_warp = warp or 0
        self.groups = 0  # wgmma groups issued
        self.transfers = [0, 0]  # loads from and stores to tensor memory that were started
        self.last_transfer: list[Line | None] = [None, None]

    def join_warps(self, children: dict[int, Hazards]) -> None:
        """After a `warp_map` each warp knows what it has learnt; they have not met."""
        old = self.clock.rows
        rows = [children[w].clock.rows[0] if w in children else old[w % len(old)].copy() for w in range(4)]
        self.clock.rows = rows
        for w, child in children.items():
            rows[w][RUN, child.clock.agent] = child.clock.now
            np.maximum(self.clock.offered, child.clock.offered, out=self.clock.offered)
            np.maximum(self.clock.handed, child.clock.handed, out=self.clock.handed)

    # ---- threads meet ---------------------------------------------------------------------------------------------------
    def meet(self) -> None:
        """The warpgroup's own barrier, where the emitted code has one."""
        if not self.single:
            self.clock.meet()

    def commit_smem(self) -> None:
        agents = self.tables.agents
        warps = range(4) if agents.warps == 4 else ()
        own = [agents.thread(self.block.index, self.warpgroup, w) for w in warps]
        self.clock.fence_async([*own, *agents.barriers(self.block.index)])  # and what barriers have counted
        self.meet()

    # ---- generic accesses -------------------------------------------------------------------------------------------------
    def _generic(self, step: Step, write: bool, same: Hashable) -> Access:
        e = step.equation
        op = "a store" if write else "a load"
        agent, now, apart = self.clock.agent, self.clock.now, self.tables.apart
        return Access(agent, now, GENERIC, write, op, self.who, e.line, same, "", self.place, apart)

    def shared(
        self,
        owner: BlockHazards,
        step: Step,
        access: RefAccess,
        value: Operand,
        starts: tuple[int, ...],
        write: bool,
        bytes_of: Callable[[], Array],
        key: Hashable = None,
    ) -> None:
        """An ordinary load or store in the shared memory of `owner`.

        key: stands for its bytes, if they are not all of the view.
        """
        regions = self.tables.smem.footprint((id(access.view), starts) if key is None else key, bytes_of)
        same = self.tables.thread_map(self.role, step, access, value, starts, write)
        note = owner.smem.write if write else owner.smem.read
        note(regions, self._generic(step, write, same), self.clock.known())

    def global_note(
        self, array: GlobalArray, step: Step, access: RefAccess, value: Operand, starts: tuple[int, ...], write: bool
    ) -> Note | None:
        """To be called with the part of the array's shadow that an ordinary load or store touches."""
        if array.shadow is None:
            return None
        same = self.tables.thread_map(self.role, step, access, value, starts, write)
        own = self._generic(step, write, same)
        return lambda shadow, writers, readers: self._global(shadow, writers, readers, own, self.clock.known(), array)

    def atomic_note(
        self, array: GlobalArray, step: Step, access: RefAccess, value: Operand, starts: tuple[int, ...]
    ) -> Note | None:
        """As `global_note`, for an update that is atomic."""
        if array.shadow is None:
            return None
        own = self._generic(step, True, self.tables.thread_map(self.role, step, access, value, starts, True))
        own.op = UPDATE
        return lambda shadow, writers, readers: self._global(shadow, writers, readers, own, self.clock.known(), array)

    def _global(
        self, shadow: GlobalShadow, writers: Part, readers: Part | None, own: Access, known: Rows, array: GlobalArray
    ) -> None:
        check = shadow.add if own.op in ATOMIC else shadow.write if own.write else shadow.read
        check(writers, readers, own, self.block.cluster, known, lambda a, b, why: race(a, b, why, f"gmem {array.name}"))

    def indexed(self, step: Step, value: Operand, key: Hashable, write: bool, bytes_of: Callable[[], Array]) -> None:
        """A load or store in shared memory by index arrays.  value: what is moved; key: stands for where each element lies."""
        regions = self.tables.smem.footprint(("indexed", key), bytes_of)
        note = self.block.smem.write if write else self.block.smem.read
        note(regions, self._anywhere(step, value, key, write), self.clock.known())

    def global_indexed(
        self, array: GlobalArray, step: Step, value: Operand, where: tuple[Array, ...], write: bool
    ) -> None:
        """The same in global memory, where: indices along each dimension."""
        shadow = array.shadow
        if shadow is None:
            return
        writers = shadow.writers[where]
        readers = None if shadow.readers is None else shadow.readers[where]
        own = self._anywhere(step, value, tuple(p.tobytes() for p in where), write)
        self._global(shadow, writers, readers, own, self.clock.known(), array)
        shadow.writers[where] = writers
        if shadow.readers is not None and readers is not None:
            shadow.readers[where] = readers

    def _anywhere(self, step: Step, value: Operand, key: Hashable, write: bool) -> Access:
        """Only the same indices in the same layout are known to be the same thread's."""
        layout = self.role.layouts.get(value.id) if isinstance(value, Value) else None
        own = self._generic(step, write, (layout, key))
        own.apart = None
        return own

    # ---- TMA --------------------------------------------------------------------------------------------------------------
    def tma_load(
        self, box: TmaBox, array: GlobalArray, targets: list[tuple[BlockHazards, MBarrier, int]], line: Line | None
    ) -> None:
        """A copy into shared memory; targets: blocks, the barrier that counts the bytes there, and the phase they end."""
        known = self.clock.elected()
        op = "copy_gmem_to_smem"
        regions = self._box(box)
        for block, barrier, phase in targets:
            clears = f"barrier_wait({barrier.name})"
            write = Access(barrier.agent, phase, ASYNC, True, op, self.who, line, None, clears, self.place)
            block.smem.write(regions, write, known)
        if array.shadow is not None:
            _, barrier, phase = targets[0]
            clears = f"barrier_wait({barrier.name})"
            read = Access(barrier.agent, phase, ASYNC, False, op, self.who, line, None, clears, self.place)
            self._box_global(box, array, read, known)

    def tma_store(
        self, box: TmaBox, array: GlobalArray, group: int, line: Line | None, add: bool, closes: bool = True
    ) -> None:
        """A copy out of shared memory, in the issuer's bulk group number `group`, which it closes or leaves open."""
        known = self.clock.elected()
        op = ADDITION if add else "copy_smem_to_gmem"
        agent = self._issuer(BULK_READ)
        clears = "wait_smem_to_gmem(n, wait_read_only=True)" + OPEN_GROUP * (not closes)
        read = Access(agent, group, ASYNC, False, op, self.who, line, None, clears, self.place)
        self.block.smem.read(self._box(box), read, known)
        if array.shadow is not None:
            agent, clears = self._issuer(BULK_WRITE), "wait_smem_to_gmem(n)" + OPEN_GROUP * (not closes)
            write = Access(agent, group, ASYNC, True, op, self.who, line, None, clears, self.place)
            self._box_global(box, array, write, known)

    def answer(
        self, owner: BlockHazards, address: int, nbytes: int, barrier: MBarrier, phase: int, line: Line | None
    ) -> None:
        """A request whose answer will be written to the shared memory of `owner`."""
        op, clears = "try_cluster_cancel", f"barrier_wait({barrier.name})"
        write = Access(barrier.agent, phase, ASYNC, True, op, self.who, line, None, clears, self.place)
        owner.smem.write(self._answer(address, nbytes), write, self.clock.elected())

    def answer_read(self, address: int, nbytes: int, line: Line | None) -> None:
        """Every thread reads an answer."""
        op, now = "query_cluster_cancel", self.clock.now
        read = Access(self.clock.agent, now, GENERIC, False, op, self.who, line, None, "", self.place)
        self.block.smem.read(self._answer(address, nbytes), read, self.clock.known())

    def async_store(
        self,
        owner: BlockHazards,
        view: View,
        starts: tuple[int, ...],
        index: Array,
        size: int,
        barrier: MBarrier,
        line: Line | None,
    ) -> None:
        """A store to the shared memory of `owner` that its barrier counts.  The ISA does not say by which proxy the data go: an
        ordinary access after the wait is in order, another proxy's after a fence behind it."""
        regions = self.tables.smem.footprint((id(view), starts), lambda: view_bytes(index, size))
        op, clears = "async_store_smem", f"barrier_wait({barrier.name})"
        write = Access(barrier.agent, barrier.phase + 1, GENERIC, True, op, self.who, line, None, clears, self.place)
        owner.smem.write(regions, write, self.clock.known())

    def _answer(self, address: int, nbytes: int) -> list[int]:
        return self.tables.smem.footprint(("answer", address), lambda: np.arange(address, address + nbytes))

    def _box(self, box: TmaBox) -> list[int]:
        m = box.map

        def touched() -> Array:
            chunks = chunk_index(box.address, box_bytes(m), m.swizzle)
            return (chunks.reshape(-1, 1) * 16 + np.arange(16)).reshape(-1)

        return self.tables.smem.footprint(("box", box.address, box_bytes(m), m.swizzle), touched)

    def _box_global(self, box: TmaBox, array: GlobalArray, own: Access, known: Rows) -> None:
        found = box_shadow(array, box)
        if found is not None:
            self._global(*found, own, known, array)

    def waited_for_stores(self, finished: int, read_only: bool) -> None:
        """The elected thread has waited for its bulk groups up to number `finished`; the others follow it."""
        rows = self.clock.elected()
        for kind in (BULK_READ,) if read_only else (BULK_READ, BULK_WRITE):
            agent = self._issuer(kind)
            rows[:TMEM, agent] = np.maximum(rows[:TMEM, agent], finished)
        self.meet()

    def _issuer(self, kind: int) -> int:
        return self.tables.agents.issuer(self.block.index, self.warpgroup, self.elected_warp, kind)

    # ---- tensor cores -----------------------------------------------------------------------------------------------------
    def _operand(self, operand: SharedOperand, base: int, rows: int, tcgen05: bool) -> list[int]:
        def touched() -> Array:
            index = operand_index(operand, base, rows, operand.mn_major, tcgen05)
            return (index.reshape(-1, 1) * operand.itemsize + np.arange(operand.itemsize)).reshape(-1)

        return self.tables.smem.footprint((id(operand), base), touched)

    def wgmma(self, operands: list[tuple[SharedOperand, int, int]], line: Line | None) -> None:
        """A group that reads operands (where each starts, rows of one instruction) from shared memory."""
        self.groups += 1
        agent = self.tables.agents.wgmma(self.block.index, self.warpgroup)
        read = Access(agent, self.groups, ASYNC, False, "wgmma", self.who, line, None, "wgmma_wait(n)", self.place)
        known = self.clock.known()
        for operand, base, rows in operands:
            self.block.smem.read(self._operand(operand, base, rows, False), read, known)

    def waited_for_wgmma(self, in_flight: int) -> None:
        self.clock.observe(self.tables.agents.wgmma(self.block.index, self.warpgroup), self.groups - in_flight)

    def tcgen05_mma(
        self,
        plan: Tcgen05Plan,
        blocks: Sequence[BlockHazards],
        a: int,
        b: int,
        column: int,
        scales: tuple[int, int],
        metadata: int,
        number: int,
        line: Line | None,
    ) -> None:
        """The issuer's product with this number, in its block or in both of a pair."""
        known, agent = self.clock.elected(), self._issuer(PRODUCTS)
        clears = "barrier_wait, for a tcgen05 commit that follows it,"
        rows_a, rows_b = plan.rows
        operands = [(plan.b, b, rows_b)]
        if isinstance(plan.a, SharedOperand):
            operands.insert(0, (plan.a, a, rows_a))
        pipeline = (column, plan.m, plan.n)  # products of one shape on one accumulator follow each other
        for block in blocks:
            read = Access(agent, number, ASYNC, False, "tcgen05_mma", self.who, line, None, clears, self.place)
            for operand, base, rows in operands:
                block.smem.read(self._operand(operand, base, rows, True), read, known)
            for what, part, first in plan.reads_of_tmem(a, scales, metadata):
                what = f"tcgen05_mma ({what})"
                own = Access(agent, number, TENSOR, False, what, self.who, line, READ, clears, self.place)
                block.tmem.read(self._columns(first, part.columns), own, known)
            write = Access(agent, number, TENSOR, True, "tcgen05_mma", self.who, line, pipeline, clears, self.place)
            block.tmem.write(self._columns(column, plan.d.columns), write, known)

    def tmem_copy(
        self,
        plan: TmemCopy,
        blocks: Sequence[BlockHazards],
        source: int,
        column: int,
        number: int,
        line: Line | None,
    ) -> None:
        """The issuer's copy into tensor memory with this number: its products behind it are in order, nothing else."""
        known, agent = self.clock.elected(), self._issuer(PRODUCTS)
        clears = "barrier_wait, for a tcgen05 commit that follows it,"
        for block in blocks:
            read = Access(agent, number, ASYNC, False, plan.op, self.who, line, None, clears, self.place)
            touched = self.tables.smem.footprint(
                ("copy", id(plan), source), lambda: copied_bytes(plan, source).reshape(-1)
            )
            block.smem.read(touched, read, known)
            write = Access(agent, number, TENSOR, True, plan.op, self.who, line, (COPIED, number), clears, self.place)
            block.tmem.write(self._columns(column, plan.part.columns), write, known)

    def _columns(self, column: int, columns: int) -> list[int]:
        return self.tables.tmem.footprint((column, columns), lambda: np.arange(column, column + columns))

    def commit(self, number: int) -> Rows:
        """What the completion of the issuer's products up to a number hands on."""
        out = self.clock.started()
        agent = self._issuer(PRODUCTS)
        out[ORDER, agent] = out[TMEM, agent] = number
        return out

    def products_seen(self, warp: int, by: Sequence[Hazards]) -> int:
        """How many of the products that a warp of this warpgroup has issued somebody knows to have ended."""
        agent = self.tables.agents.issuer(self.block.index, self.warpgroup, warp, PRODUCTS)
        return max(int(rows[ORDER, agent]) for other in by for rows in other.clock.rows)

    def tmem_access(self, column: int, access: TmemAccess, write: bool, line: Line | None) -> None:
        """A load from tensor memory, or a store to it, by every warp in its own lanes."""
        assert self.clock.transfers is not None
        self.transfers[write] += 1
        self.last_transfer[write] = line
        agent, clears = self.clock.transfers[write], STORED if write else LOADED
        own = Access(agent, self.transfers[write], TENSOR, write, access.what, self.who, line, None, clears, self.place)
        note = self.block.tmem.write if write else self.block.tmem.read
        note(self._columns(column, access.part.columns), own, self.clock.known_of_own_lanes())

    def waited_for_tmem(self, write: bool) -> None:
        self.clock.moved[write] = self.transfers[write]


def view_bytes(index: Array, size: int) -> Array:
    """Every byte of the elements at some indices."""
    flat = np.asarray(index).reshape(-1, 1)
    return (flat * size + np.arange(size)).reshape(-1)
