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
    """A request on its way.  take: the number of a block that will not be launched, or None."""

    address: int
    shared: SharedMemory
    barrier: MBarrier
    take: Callable[[], int | None]
    done: Callable[[], None]
    line: Line | None
    released: Rows | None = None

    def answer(self) -> None:
        """The answer comes: a number and whether there is one, in words of our own (those of the hardware are its secret)."""
        number = self.take()
        self.done()
        words = np.array([number or 0, 0, 0, number is not None], np.int32)
        self.shared.write_chunks(np.array([self.address // 16]), words.view(CHUNK), ("cancel", self.address))
        self.barrier.loaded_phase, self.barrier.loaded_line = self.barrier.phase, self.line
        self.barrier.complete_tx(NBYTES, self.released, self.line)


def _address(thread: Thread, plan: ResultPlan) -> int:
    buffer, start = thread.plan.buffers[plan.buffer], thread.evaluate(plan.start)
    if not 0 <= start <= buffer.layout.nbytes - NBYTES:
        raise OutOfBounds(f"answer {start // NBYTES} of {buffer.value}, which has {buffer.layout.nbytes // NBYTES}")
    return buffer.offset + start


def ask(thread: Thread, plan: ResultPlan, use: BarrierUse) -> None:
    """A thread asks; the answer comes later, as a copy does."""
    block, machine = thread.block, thread.block.cluster.machine
    if block.refused:
        raise IllegalInstruction(
            f"{thread.who} asks for another place after query_cluster_cancel has said that there is none: what comes then is "
            "undefined, so the loop must end"
        )
    if block.asking:
        raise IllegalInstruction(
            f"{thread.who} asks for a place while the answer to the request before is on its way: one at a time, so wait for it"
        )
    block.asking = True
    address = _address(thread, plan)
    array, slot = thread.plan.barriers[use.array], thread.evaluate(use.slot)
    barrier, hazards, started = block.barrier(use.array, slot), thread.hazards, None
    barrier.expect_tx(NBYTES)
    released = None if hazards is None else hazards.clock.release(every=False)
    barrier.arrive(Arrival(f"{thread.who} (try_cluster_cancel)", thread.line, array.unit), released)
    if hazards is not None:
        started = hazards.clock.started()
        hazards.answer(address, NBYTES, barrier, barrier.phase + 1, thread.line)
    block.tma.submit(
        Cancel(
            address, block.shared, barrier, lambda: machine.cancel(block.chance), block.answered, thread.line, started
        )
    )


def query(thread: Thread, plan: ResultPlan) -> tuple[tuple[int, ...], bool]:
    """(the place in the grid, whether there is one)."""
    address = _address(thread, plan)
    if thread.hazards is not None:
        thread.hazards.answer_read(address, NBYTES, thread.line)
    words = thread.block.shared.read(np.arange(WORDS) + address // 4, 4, lambda: "query_cluster_cancel").view(np.int32)
    if not words[3]:
        thread.block.refused = True
    return tuple(map(int, thread.block.cluster.machine.clusters[int(words[0])])), bool(words[3])
