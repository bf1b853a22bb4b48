"""Asynchronous copies between global and shared memory by TMA (PTX ISA 9.7.9.27, cp.async.bulk.tensor)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from .. import arguments
from ..errors import UnsupportedCall
from ..plan.tma import TmaCopy, plan_copy, plan_prefetch
from ..program import Equation
from .barriers import BarrierUse, barrier_use, single
from .registry import BOTH, SM100, WARP, WARPGROUP, op

SCOPES = (WARPGROUP, WARP)
load_p = op("copy_gmem_to_smem", issues_only=True)
store_p = op("copy_smem_to_gmem", issues_only=True)
store_wait_p = op("wait_smem_to_gmem", issues_only=True)
commit_group_p = op("commit_group", issues_only=True)
commit_smem_p = op("commit_smem")


@dataclasses.dataclass(frozen=True)
class CopyPartition:
    """How a pair of blocks that multiply together shares a tile.  axis: each copies its half along it; None: all of it."""

    axis: int | None
    REPLICATED: ClassVar[CopyPartition]

    @staticmethod
    def PARTITIONED(axis: int) -> CopyPartition:  # noqa: N802 - as in Pallas
        """Each block copies its half of the tile along `axis`."""
        return CopyPartition(arguments.whole("CopyPartition.PARTITIONED", "axis", axis, 0))


CopyPartition.REPLICATED = CopyPartition(None)


def copy_gmem_to_smem(
    src: Any,
    dst: Any,
    barrier: Any,
    *,
    collective_axes: Sequence[str] | str | None = None,
    leader_tracked: CopyPartition | None = None,
) -> None:
    """Start a TMA load of `src` (GMEM view) into `dst` (SMEM view of the same shape and dtype).

    The copy counts as one arrival on `barrier` and completes its phase when all bytes have landed.  Where the tile sticks
    out of the array it is filled with zeros.  collective_axes: cluster axes along which all blocks want the same tile: each
    loads a share and multicasts it; every block's own `barrier` sees the whole tile.
    leader_tracked: CopyPartition.PARTITIONED(axis), for `tcgen05_mma(collective_axis=...)`: `src` is the tile of a pair of
    blocks along collective_axes (the last axis of the cluster), each block copies its half along `axis` into its `dst`, and
    the barrier of block 0, who issues the products, counts both halves as one arrival.  Both blocks must copy; the other
    block's barrier is not touched.  CopyPartition.REPLICATED: the same, but each block copies all of `src`.
    Raises IllegalInstruction where TMA has no such box, ranks, strides or swizzle.
    """
    from ..frontend.primitives import bind

    given = () if collective_axes is None else collective_axes
    axes = arguments.names("copy_gmem_to_smem", "collective_axes", given)
    leader = None
    if leader_tracked is not None:
        if not isinstance(leader_tracked, CopyPartition):
            arguments.refuse(
                "copy_gmem_to_smem",
                "leader_tracked",
                leader_tracked,
                "plgpu.CopyPartition.PARTITIONED(axis), REPLICATED or None",
            )
        if len(axes) != 1:
            raise ValueError(
                f"copy_gmem_to_smem: leader_tracked needs one collective axis, that of the pair; not {axes}"
            )
        if leader_tracked.axis is not None:
            src = _own_half(src, leader_tracked.axis, axes[0])
        leader, axes = axes[0], ()
    bind(load_p, src, dst, single(barrier), collective_axes=axes, leader=leader)


def _own_half(src: Any, axis: int, name: str) -> Any:
    """This block's half of a view along one of its dimensions."""
    from ..frontend.loops import ds
    from ..frontend.primitives import axis_index_of

    if not hasattr(src, "at") or axis >= len(src.shape) or src.shape[axis] % 2:
        raise ValueError(
            f"copy_gmem_to_smem: CopyPartition.PARTITIONED({axis}) halves dimension {axis} of src, of shape "
            f"{tuple(getattr(src, 'shape', ()))}"
        )
    half = src.shape[axis] // 2
    own = ds(axis_index_of(name) * half, half)
    return src.at[tuple(own if i == axis else slice(None) for i in range(len(src.shape)))]


@load_p.abstract
def _(src: Any, dst: Any, barrier: Any, *, collective_axes: tuple[str, ...], leader: str | None) -> Any:
    arguments.memory("copy_gmem_to_smem", "src", src, "gmem")
    arguments.memory("copy_gmem_to_smem", "dst", dst, "smem")
    arguments.memory("copy_gmem_to_smem", "barrier", barrier, "barrier")
    return ()


@load_p.plan()
def _(ctx: Any, e: Equation) -> tuple[TmaCopy, BarrierUse, str | None]:
    """(the copy, the barrier that counts it, the axis of the pair whose block 0 has that barrier)."""
    src, dst, barrier = e.operands
    axes, leader = e.param("collective_axes"), e.param("leader")
    if leader is not None:
        names, sizes = ctx.program.cluster_names, ctx.program.cluster
        if ctx.generation is not SM100 or not names or names[-1] != leader or sizes[-1] != 2:
            raise UnsupportedCall(
                f"copy_gmem_to_smem(leader_tracked=..., collective_axes={leader!r}): a pair of blocks is the last axis of the "
                f"cluster, of 2 blocks, on sm_100a and later; the kernel has cluster {dict(zip(names, sizes, strict=True))}",
                e.line,
            )
    _check_axes(ctx, e)
    return plan_copy(ctx, src, dst, e.line, axes), barrier_use(barrier, e), leader  # type: ignore[arg-type]


def _check_axes(ctx: Any, e: Equation) -> None:
    axes = e.param("collective_axes")
    for a in axes:
        if a not in ctx.program.cluster_names:
            raise UnsupportedCall(
                f"collective_axes={axes}: {a!r} is not a cluster axis; the kernel has {ctx.program.cluster_names}",
                e.line,
            )


@load_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    copy, use, leader = step.data
    bar = out.barrier_address(use)
    if leader is not None:
        out.tma_load_pair(copy, use, leader)
        return
    with out.elected():
        out.line(f"u32 bar = {bar};")
        unit = out.plan.barriers[use.array].unit
        out.line(
            f"mbarrier_arrive_expect_tx(bar, {copy.nbytes});"
            if unit == 1
            else f"mbarrier_expect_tx(bar, {copy.nbytes});"
        )
        out.tma_load(copy, "bar")
        if unit > 1:
            out.line(f"mbarrier_arrive_count(bar, {unit});")


@load_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.tma_load(*step.data)


prefetch_p = op("async_prefetch", issues_only=True)


def async_prefetch(
    ref: Any,
    *,
    collective_axes: Sequence[str] | str | None = None,
    leader_tracked: CopyPartition | None = None,
    predicate: Any = None,
) -> None:
    """Start to bring a GMEM view into the L2 cache (PTX ISA 9.7.9.27.1.3, cp.async.bulk.prefetch.tensor).

    A hint, never waited for.  The view is one that TMA could copy.  collective_axes: blocks along these axes of the cluster
    share the work, each prefetches a part.  leader_tracked: CopyPartition.PARTITIONED(axis): of the view each block of a pair
    prefetches its half.  predicate: a bool scalar; False: nothing is done.
    Raises IllegalInstruction where TMA has no such box, UnsupportedCall where it has no such strides.
    """
    from ..frontend.loops import when
    from ..frontend.primitives import bind

    where = "async_prefetch"
    axes = arguments.names(where, "collective_axes", () if collective_axes is None else collective_axes)
    if leader_tracked is not None and not isinstance(leader_tracked, CopyPartition):
        arguments.refuse(
            where, "leader_tracked", leader_tracked, "plgpu.CopyPartition.PARTITIONED(axis), REPLICATED or None"
        )
    if leader_tracked is not None and len(axes) != 1:
        raise ValueError(f"{where}: leader_tracked needs one collective axis, that of the pair; not {axes}")
    if leader_tracked is not None:
        if leader_tracked.axis is not None:
            ref = _own_half(ref, leader_tracked.axis, axes[0])
        axes = ()

    if predicate is not None and not isinstance(predicate, (bool, np.bool_)) and not hasattr(predicate, "aval"):
        arguments.refuse(where, "predicate", predicate, "a bool scalar or None")

    def issue() -> None:
        bind(prefetch_p, ref, collective_axes=axes)

    if predicate is None:
        issue()
    else:
        when(predicate)(issue)


@prefetch_p.abstract
def _(ref: Any, *, collective_axes: tuple[str, ...]) -> Any:
    arguments.memory("async_prefetch", "ref", ref, "gmem")
    return ()


@prefetch_p.plan()
def _(ctx: Any, e: Equation) -> TmaCopy:
    _check_axes(ctx, e)
    return plan_prefetch(ctx, e.operands[0], e.line, e.param("collective_axes"))  # type: ignore[arg-type]


@prefetch_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    with out.elected():
        out.tma_prefetch(step.data)


@prefetch_p.simulate
def _(sim: Any, step: Any) -> None:
    pass  # a hint: what is read later is what is there then


REDUCTIONS = ("add",)
REDUCED_TYPES = ("float32", "int32", "uint32")


def copy_smem_to_gmem(src: Any, dst: Any, *, commit_group: bool = True, reduction_op: str | None = None) -> None:
    """Start a TMA store of `src` (SMEM view) to `dst` (GMEM view); what sticks out of the array is not written.

    Data written by this role's threads needs `commit_smem()` first.  commit_group: close the bulk group, so that
    `wait_smem_to_gmem` counts it.
    reduction_op: "add" adds `src` to `dst` (float32, int32 or uint32) instead of replacing it.  Additions by such copies are
    atomic and in no particular order, so sums of floats may differ from run to run; with every other access they need an
    order.  `dst` must hold numbers before: an output of `kernel(input_output_aliases=...)` has those of its input.
    Raises UnsupportedCall for another dtype.
    """
    from ..frontend.primitives import bind

    where = "copy_smem_to_gmem"
    if reduction_op is not None and reduction_op not in REDUCTIONS:
        arguments.refuse(where, "reduction_op", reduction_op, '"add" or None')
    bind(store_p, src, dst, commit_group=arguments.flag(where, "commit_group", commit_group), reduction_op=reduction_op)


def copy_block_to_gmem(src: Any, dst: Any, commit_group: bool) -> None:
    """`copy_smem_to_gmem` of an output's block, of which the body may have written a part: the rest is unwritten in the output,
    of which the simulator warns, where it refuses a copy that the user asks for."""
    from ..frontend.primitives import bind

    bind(store_p, src, dst, commit_group=commit_group, reduction_op=None, partial=True)


@store_p.abstract
def _(src: Any, dst: Any, *, commit_group: bool, reduction_op: str | None, partial: bool = False) -> Any:
    arguments.memory("copy_smem_to_gmem", "src", src, "smem")
    arguments.memory("copy_smem_to_gmem", "dst", dst, "gmem")
    return ()


@store_p.plan()
def _(ctx: Any, e: Equation) -> TmaCopy:
    ctx.output_index(e.operands[1].ref, e.line)  # type: ignore[union-attr]
    src, dst = e.operands
    if e.param("reduction_op") is not None and dst.dtype not in REDUCED_TYPES:
        raise UnsupportedCall(
            f"copy_smem_to_gmem(reduction_op='add') of {dst.dtype}: it adds {', '.join(REDUCED_TYPES)}; "
            "add in float32 and convert in a kernel behind this one",
            e.line,
        )
    adds = e.param("reduction_op") is not None
    return plan_copy(ctx, dst, src, e.line, store=True, adds=adds)  # type: ignore[arg-type]


@store_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    with out.elected():
        out.tma_store(step.data, step.equation.param("reduction_op"))
        if step.equation.param("commit_group"):
            out.line("tma_store_commit();")


@store_p.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    sim.tma_store(
        step.data, e.param("commit_group"), e.param("reduction_op") is not None, bool(e.param("partial", False))
    )


def commit_smem_to_gmem_group() -> None:
    """Close the bulk group of the stores started with `commit_group=False`, so that `wait_smem_to_gmem` counts it."""
    from ..frontend.primitives import bind

    bind(commit_group_p)


@commit_group_p.abstract
def _() -> Any:
    return ()


@commit_group_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    with out.elected():
        out.line("tma_store_commit();")


@commit_group_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.commit_group()


def wait_smem_to_gmem(n: int, wait_read_only: bool = False) -> None:
    """Wait until at most `n` of this role's committed stores are pending.

    wait_read_only: only until their sources have been read, so that the buffer may be written again.
    The issuing thread waits; the warpgroup follows it through a barrier.
    """
    from ..frontend.primitives import bind

    pending = arguments.whole("wait_smem_to_gmem", "n", n, 0)
    read_only = arguments.flag("wait_smem_to_gmem", "wait_read_only", wait_read_only)
    bind(store_wait_p, n=pending, wait_read_only=read_only)


@store_wait_p.abstract
def _(*, n: int, wait_read_only: bool) -> Any:
    return ()


@store_wait_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    e = step.equation
    with out.elected():
        out.line(f"tma_store_wait{'_read' if e.param('wait_read_only') else ''}<{e.param('n')}>();")
    out.role_sync()


@store_wait_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    e = step.equation
    yield from sim.tma_store_wait(e.param("n"), e.param("wait_read_only"))


def commit_smem() -> None:
    """Make this warpgroup's writes to shared memory visible to TMA and the tensor core (fence.proxy.async), and meet.

    In kernels that store to other blocks' shared memory: there, too.
    """
    from ..frontend.primitives import bind

    bind(commit_smem_p)


@commit_smem_p.abstract
def _() -> Any:
    return ()


@commit_smem_p.plan()
def _(ctx: Any, e: Equation) -> bool:
    """Whether the fence is for the whole cluster's shared memory."""
    return bool(ctx.reaches_peers)


@commit_smem_p.emit()
def _(out: Any, step: Any) -> None:
    out.line("fence_proxy_async_cluster();" if step.data else "fence_proxy_async_shared();")
    out.role_sync()


@commit_smem_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.commit_smem()
