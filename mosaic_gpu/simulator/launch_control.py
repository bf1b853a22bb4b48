"""Cluster launch control: requests of blocks for the place of one that has not been launched, and the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import IllegalInstruction, Line, OutOfBounds
from ..ops.barriers import BarrierUse
from ..ops.launch_control import WORDS, ResultPlan
from .barriers import Arrival, MBarrier
from .clocks import Rows
from .memory import CHUNK, SharedMemory

if TYPE_CHECKING:
    from .thread import Thread

NBYTES = 4 * WORDS


@dataclasses.dataclass
class Cancel:
    """A request on its way.  targets: where the answer goes, and which barriers count it; take: the number of a cluster (of one
    block or more) that will not be launched, or None."""

    address: int
    targets: tuple[tuple[SharedMemory, MBarrier], ...]
    take: Callable[[], int | None]
    done: Callable[[], None]
    line: Line | None
    released: Rows | None = None

    def deliver(self) -> None:
        """The answer comes: a number and whether there is one, in words of our own (those of the hardware are its secret)."""
        number = self.take()
        self.done()
        words = np.array([number or 0, 0, 0, number is not None], np.int32)
        for shared, barrier in self.targets:
            shared.write_chunks(np.array([self.address // 16]), words.view(CHUNK), ("cancel", self.address))
            barrier.loaded_phase, barrier.loaded_line = barrier.phase, self.line
            barrier.complete_tx(NBYTES, self.released, self.line)


def _address(thread: Thread, plan: ResultPlan) -> int:
    buffer, start = thread.plan.buffers[plan.buffer], thread.evaluate(plan.start)
    if not 0 <= start <= buffer.layout.nbytes - NBYTES:
        raise OutOfBounds(f"answer {start // NBYTES} of {buffer.value}, which has {buffer.layout.nbytes // NBYTES}")
    return buffer.offset + start


def ask(thread: Thread, plan: ResultPlan, use: BarrierUse) -> None:
    """A thread asks; the answer comes later, as a copy does.  Of a cluster, the first block does; each expects the answer."""
    block, machine, blocks = thread.block, thread.block.cluster.machine, thread.block.cluster.blocks
    if block.refused:
        raise IllegalInstruction(
            f"{thread.who} asks for another place after query_cluster_cancel has said that there is none: what comes then is "
            "undefined, so the loop must end"
        )
    if block.asking:
        raise IllegalInstruction(
            f"{thread.who} asks for a place while the answer to the request before is on its way: one at a time, so wait for it"
        )
    block.asking = block is blocks[0]
    address = _address(thread, plan)
    array, slot = thread.plan.barriers[use.array], thread.evaluate(use.slot)
    barrier, hazards, started = block.barrier(use.array, slot), thread.hazards, None
    barrier.expect_tx(NBYTES)
    released = None if hazards is None else hazards.clock.release(every=False)
    barrier.arrive(Arrival(thread.who, thread.line, array.unit, "try_cluster_cancel"), released)
    if not block.asking:
        return
    barriers = [b.barrier(use.array, slot) for b in blocks]
    if hazards is not None:
        started = hazards.clock.started()
        for b, counts in zip(blocks, barriers, strict=True):
            assert b.hazards is not None
            hazards.answer(b.hazards, address, NBYTES, counts, counts.phase + 1, thread.line)
    targets = tuple((b.shared, counts) for b, counts in zip(blocks, barriers, strict=True))
    request = Cancel(address, targets, lambda: machine.cancel(block.chance), block.answered, thread.line, started)
    block.tma.submit(request)


def query(thread: Thread, plan: ResultPlan) -> tuple[tuple[int, ...], bool]:
    """(the place in the grid, whether there is one)."""
    address = _address(thread, plan)
    if thread.hazards is not None:
        thread.hazards.answer_read(address, NBYTES, thread.line)
    words = thread.block.shared.read(np.arange(WORDS) + address // 4, 4, lambda: "query_cluster_cancel").view(np.int32)
    if not words[3]:
        thread.block.refused = True
    return tuple(map(int, thread.block.cluster.machine.clusters[int(words[0])])), bool(words[3])
