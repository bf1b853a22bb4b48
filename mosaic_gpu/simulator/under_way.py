"""Asynchronous copies into memory that is read before they have brought anything: which they are, and which wait settles it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..ops.barriers import BarrierUse
from ..plan.arrivals import ARRIVING
from ..plan.model import Plan, Role, Step
from .async_store import RemoteStore
from .barriers import MBarrier
from .memory import Array, place
from .missing_waits import BarrierInProgram, some
from .tma import Load, box_bytes, chunk_index

if TYPE_CHECKING:
    from .machine import BlockState

LOOPS = ("for", "while")
COPIES = ("copy_gmem_to_smem", "async_store_smem")


def coming(block: BlockState, address: Array, written: Array) -> list[str]:
    """Lines for a report on a read of elements at these addresses in a block's shared memory, not all of which are written."""
    found = [_under_way(*x, address, written) for x in _queued(block)]
    return [text for text in dict.fromkeys(found) if text] or list(dict.fromkeys(_planned(block, address, written)))


def _queued(block: BlockState) -> Iterator[tuple[str, MBarrier, Array]]:
    """Copies into a block that have begun: what they are, the barrier that counts them, and the bytes that they will write."""
    for other in block.cluster.blocks:
        for copy in other.tma.queue:
            if isinstance(copy, Load):
                chunks = chunk_index(copy.address, box_bytes(copy.map), copy.map.swizzle).reshape(-1, 1)
                for shared, barrier in copy.destinations:
                    if shared is block.shared:
                        yield f"copy_gmem_to_smem at {copy.line}", barrier, chunks * 16 + np.arange(16)
            elif isinstance(copy, RemoteStore) and copy.shared is block.shared:
                index = copy.index.reshape(-1, 1) * copy.size
                yield f"async_store_smem at {copy.line}", copy.barrier, index + np.arange(copy.size)


def _under_way(what: str, barrier: MBarrier, touched: Array, address: Array, written: Array) -> str:
    mine = ~written & np.isin(address, touched)
    if not mine.any():
        return ""
    waits = barrier.program.waits if barrier.program is not None else []
    where = f" (there is {some(waits)})" if waits else " (the kernel has no wait for it)"
    return f"{what} is under way into {place(mine)[2:]}: barrier_wait for {barrier.name} before it is read settles it{where}"


def _planned(block: BlockState, address: Array, written: Array) -> Iterator[str]:
    """Of none that is under way: the lines of the program that copy into the buffer, and still may."""
    if block.shared.history is None:
        return
    plan, lowest = block.plan, int(address[~written].min())
    done = {w.line for w in block.shared.history.writers if w is not None}
    inside = (b for b in plan.buffers.values() if b.offset <= lowest < b.offset + b.layout.nbytes)
    buffer = next(inside, None)
    for role, step, use, again in _copies(plan, buffer.value.id) if buffer is not None else ():
        if step.equation.line in done and not again:
            continue
        array, slot = plan.barriers[use.array], use.slot.const if use.slot.static else 0
        name = (array.value.name or f"%{array.value.id}") + (f"[{slot}]" if use.slot.static and array.count > 1 else "")
        yield (
            f"{step.equation.op} at {step.equation.line} ({role.name}) copies into this buffer, and has not begun to here: "
            f"barrier_wait for barrier {name} before it is read settles it{_there(BarrierInProgram(plan, use.array, slot))}"
        )


def _there(barrier: BarrierInProgram | None) -> str:
    waits = barrier.waits if barrier is not None else []
    return f" (there is {some(waits)})" if waits else " (the kernel has no wait for it)"


def _copies(plan: Plan, buffer: int) -> Iterator[tuple[Role, Step, BarrierUse, bool]]:
    """The steps that copy into a buffer of shared memory, with what counts them, and whether they are in a loop."""

    def visit(role: Role, steps: Sequence[Step], again: bool) -> Iterator[tuple[Role, Step, BarrierUse, bool]]:
        for s in steps:
            op = s.equation.op
            use = ARRIVING[op](s) if op in COPIES else None
            if use is not None:
                into = s.data[0].buffer if op == "copy_gmem_to_smem" else s.data.access.view.ref.id
                if into == buffer:
                    yield role, s, use, again
            for r in s.data if op == "warp_map" else ():
                yield from visit(r, r.body.steps, again)
            for region in s.regions:
                yield from visit(role, region.steps, again or op in LOOPS)

    for role in plan.roles:
        yield from visit(role, role.body.steps, len(role.indices) > 1)
