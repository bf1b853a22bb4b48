"""Stores to another block's shared memory whose completion a barrier there counts (st.async, PTX ISA 9.7.9.12)."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import arguments
from ..errors import UnsupportedCall
from ..layouts.access import shared_vector, together
from ..layouts.registers import Layout, RegisterLayout
from ..layouts.shared import SharedLayout, itemsize
from ..program import Equation, Value, View
from .barriers import BarrierUse, barrier_use, single
from .refs import Access
from .registry import BOTH, WARPGROUP, op

WHOLE = "a whole warpgroup stores an array (not under warp_map)"
async_store_p = op("async_store_smem", instead=WHOLE, whole=True)


@dataclasses.dataclass(frozen=True)
class AsyncStore:
    """access: where to; barrier: in the block that the view's peer names, as the buffer is."""

    access: Access
    barrier: BarrierUse


def async_store_smem(src: Any, ref: Any, barrier: Any, *, cluster_idx: Any, cluster_dim: str) -> None:
    """Start storing an array to shared memory of another block of the cluster.

    src: an array, of 32-bit elements, float16 or bfloat16, of which threads have neighbouring elements of at least 4 bytes.  ref:
    an SMEM Ref or view of its shape and dtype; barrier: a `Barrier` (or `barrier.at[slot]`).  Both name memory of the block with
    index `cluster_idx` (a number or an int32 scalar) along the cluster axis `cluster_dim`, and are this block's along the others.

    Counts as one arrival there; the phase completes when all bytes have landed.  Whoever has waited for it may load them;
    for TMA and the tensor core to read them `commit_smem` comes between.  Nothing else is in order with the stores: the other
    block must have told (by a `ClusterBarrier`) that its memory is free and the phase before has been waited for.  PTX ISA
    9.7.9.12, st.async.  Raises UnsupportedCall for layouts whose threads have less than 4 bytes together.
    """
    from ..frontend.peers import check_index, cluster_ref
    from ..frontend.primitives import bind, checked_operand

    arguments.memory("async_store_smem", "ref", checked_operand("async_store_smem", "ref", False, ref), "smem")
    check_index("async_store_smem", "cluster_idx", cluster_idx)
    if not isinstance(cluster_dim, str):
        arguments.refuse("async_store_smem", "cluster_dim", cluster_dim, "the name of a cluster axis")
    bind(async_store_p, cluster_ref(ref, {cluster_dim: cluster_idx}), src, single(barrier))


@async_store_p.abstract
def _(ref: Any, src: Any, barrier: Any) -> Any:
    arguments.memory("async_store_smem", "ref", ref, "smem")
    arguments.memory("async_store_smem", "src", src, or_array=True)
    arguments.memory("async_store_smem", "barrier", barrier, "barrier")
    if src.shape != ref.shape or src.dtype != ref.dtype or not src.shape:
        raise TypeError(
            f"async_store_smem: src is {src.dtype}{list(src.shape)}, ref {ref.dtype}{list(ref.shape)}; both are arrays of one "
            "shape and dtype"
        )
    return ()


@async_store_p.layouts
def _(solver: Any, e: Equation) -> None:
    """Fragments have two neighbouring elements in a thread."""
    value = e.operands[1]
    if isinstance(value, Value) and len(value.shape) == 2 and not (value.shape[0] % 64 or value.shape[1] % 8):
        solver.prefer(e, value, Layout.WGMMA)


@async_store_p.plan(BOTH, (WARPGROUP,))
def _(ctx: Any, e: Equation) -> AsyncStore:
    view, _, barrier = e.operands
    assert isinstance(view, View) and isinstance(barrier, View)
    info = barrier.space.barrier
    if info is not None and info.collective_axes:
        raise UnsupportedCall(
            f"async_store_smem: {barrier.ref} is a ClusterBarrier, of which arrivals count in several blocks; it takes a Barrier",
            e.line,
        )
    return AsyncStore(Access("smem", view, False), barrier_use(barrier, e))


def elements_together(layout: RegisterLayout | None, view: View, shared: SharedLayout) -> int:
    """How many of a thread's registers one instruction stores; UnsupportedCall where there is none."""
    size = itemsize(view.dtype)
    width = 0 if layout is None else together(shared_vector(layout, view, shared), view.dtype)
    if not 4 <= width * size <= 16:
        raise UnsupportedCall(
            f"async_store_smem of {view.dtype} in {layout}: a thread stores 4, 8 or 16 bytes at once, of 32-bit types, float16 "
            "or bfloat16; store it with cluster_ref(ref, ...)[...] = x, or give it another layout (layout_cast)"
        )
    return width


def bytes_sent(layout: RegisterLayout, dtype: str) -> int:
    """What all threads of a warpgroup store, elements that several of them hold included."""
    return 128 * layout.registers * itemsize(dtype)


@async_store_p.emit(BOTH, (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    out.async_store(step)


@async_store_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.async_store(step.data, sim.read(step.equation.operands[1]))
