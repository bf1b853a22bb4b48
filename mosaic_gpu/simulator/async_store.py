"""Stores to another block's shared memory that a barrier there counts: they land later, as copies do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..errors import Line
from ..ops.async_store import AsyncStore, bytes_sent, elements_together
from . import memory
from .barriers import Arrival, MBarrier
from .clocks import Rows
from .memory import Array, SharedMemory

if TYPE_CHECKING:
    from .thread import Thread


@dataclasses.dataclass
class RemoteStore:
    """Elements on their way.  index, raw: where and what, elements of `size` bytes; nbytes: that the barrier counts."""

    shared: SharedMemory
    index: Array
    size: int
    raw: Array
    barrier: MBarrier
    nbytes: int
    line: Line | None
    released: Rows | None = None

    def deliver(self) -> None:
        self.shared.write(self.index, self.size, self.raw)
        self.barrier.loaded_phase, self.barrier.loaded_line = self.barrier.phase, self.line
        self.barrier.complete_tx(self.nbytes, self.released, self.line)


def start(thread: Thread, plan: AsyncStore, x: Array) -> None:
    """A warpgroup stores: it arrives on the other block's barrier, which then waits for the bytes."""
    view, hazards = plan.access.view, thread.hazards
    buffer, value = thread.plan.buffers[view.ref.id], thread.moved(write=True)
    layout = thread.role.layouts.get(value.id)  # type: ignore[union-attr]
    elements_together(layout, view, buffer.layout)
    assert layout is not None
    owner, slot = thread.block.peer({n: thread.evaluate(i) for n, i in view.peer}), thread.evaluate(plan.barrier.slot)
    barrier, unit = owner.barrier(plan.barrier.array, slot), thread.plan.barriers[plan.barrier.array].unit
    nbytes, starts = bytes_sent(layout, view.dtype), tuple([thread.evaluate(d.start) for d in view.dims])
    index, size = thread.block.cluster.index_of(view, buffer, starts), buffer.layout.itemsize
    barrier.expect_tx(nbytes)
    reached = None if hazards is None else hazards.clock.started()
    barrier.arrive(Arrival(thread.who, thread.line, unit, f"async_store_smem of {nbytes} bytes"), reached)
    released = None
    if hazards is not None:
        assert owner.hazards is not None
        released = hazards.clock.started()
        hazards.async_store(owner.hazards, view, starts, index, size, barrier, thread.line)
    raw = memory.to_raw(x, view.dtype, view.shape)
    thread.block.tma.submit(RemoteStore(owner.shared, index, size, raw, barrier, nbytes, thread.line, released))
