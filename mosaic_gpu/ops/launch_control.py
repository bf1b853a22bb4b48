"""Cluster launch control (PTX ISA: clusterlaunchcontrol): a block takes over the place of one not yet launched.

The answer to a request comes asynchronously into shared memory, counted by a barrier; whoever has waited for that may ask what it
says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from .. import arguments
from ..errors import UnsupportedCall
from ..program import Affine, Equation, View
from .barriers import BarrierUse, barrier_use, single
from .registry import SM100, WARP, WARPGROUP, op

INSTEAD = "cluster launch control exists on sm_100a and later; on sm_90a walk a list of tiles, or use a grid of them"
try_cancel_p = op("try_cluster_cancel", issues_only=True, instead=INSTEAD)
query_p = op("query_cluster_cancel", issues_only=True, instead=INSTEAD)
WORDS = 4  # of 32 bits: what the hardware answers


@dataclasses.dataclass(frozen=True)
class ResultPlan:
    """Where an answer lies: buffer and byte in it; axes: those of the grid that are asked for, by position."""

    buffer: int
    start: Affine
    axes: tuple[int, ...] = ()


def TryClusterCancelResult(num_buffers: int | None = None) -> Any:  # noqa: N802 - as in Pallas
    """Shared memory for the answer of `try_cluster_cancel`, or for so many (index them as `result.at[slot]`)."""
    import numpy as np

    from ..frontend.memory import SMEM

    if num_buffers is None:
        return SMEM((WORDS,), np.int32)
    return SMEM((arguments.whole("TryClusterCancelResult", "num_buffers", num_buffers, 1), WORDS), np.int32)


def try_cluster_cancel(result_ref: Any, barrier: Any) -> None:
    """Ask for the place in the grid of a block (or cluster) that has not been launched yet, which then will not be.

    result_ref: a `TryClusterCancelResult()`, or one slot of several.  barrier: counts the answer as a TMA copy, one arrival.  One
    thread asks.  In a cluster every block calls this once a request, with the same slots; the first one asks, and the answer
    comes to each: all of them must have read the answer before (a `ClusterBarrier`).  After an answer of False nobody may ask
    again.
    """
    from ..frontend.primitives import bind

    bind(try_cancel_p, result_ref, single(barrier))


def query_cluster_cancel(result_ref: Any, grid_names: Sequence[str] | str) -> tuple[tuple[Any, ...], Any]:
    """What an answer of `try_cluster_cancel` says: (indices along the named axes of the grid, int32 each; whether there was one).

    To be called after a wait on the request's barrier; without a place the indices mean nothing.
    """
    from ..frontend.primitives import bind

    names = arguments.names("query_cluster_cancel", "grid_names", grid_names)
    *indices, found = bind(query_p, result_ref, grid_names=names)
    return tuple(indices), found


def _check_result(name: str, result_ref: Any) -> None:
    arguments.memory(name, "result_ref", result_ref, "smem")
    if result_ref.shape != (WORDS,) or result_ref.dtype != "int32":
        raise TypeError(
            f"{name}: result_ref is {result_ref.dtype}{list(result_ref.shape)}; it is a TryClusterCancelResult() or a slot of one"
        )


@try_cancel_p.abstract
def _(result_ref: Any, barrier: Any) -> Any:
    _check_result("try_cluster_cancel", result_ref)
    arguments.memory("try_cluster_cancel", "barrier", barrier, "barrier")
    return ()


@query_p.abstract
def _(result_ref: Any, *, grid_names: tuple[str, ...]) -> Any:
    _check_result("query_cluster_cancel", result_ref)
    return (*(((), "int32") for _ in grid_names), ((), "bool"))


def _result(ctx: Any, e: Equation, axes: tuple[int, ...] = ()) -> ResultPlan:
    view = e.operands[0]
    assert isinstance(view, View)
    layout = ctx.buffers[view.ref.id].layout
    whole = view.dims[-1].size == view.ref.shape[-1] == WORDS and all(d.size is None for d in view.dims[:-1])
    if layout.tile or layout.swizzle or not whole:
        raise UnsupportedCall(
            f"{e.op}: result_ref is a TryClusterCancelResult, or one slot of it; this is {view}", e.line
        )
    start = Affine(0)
    for d, digits in zip(view.dims, layout.strides(), strict=True):
        start = start + d.start * digits[0][1]
    return ResultPlan(view.ref.id, start, axes)


@try_cancel_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> tuple[ResultPlan, BarrierUse]:
    return _result(ctx, e), barrier_use(e.operands[1], e)  # type: ignore[arg-type]


@query_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> ResultPlan:
    names, known = e.param("grid_names"), ctx.program.grid_names
    if unknown := [n for n in names if n not in known]:
        raise UnsupportedCall(f"query_cluster_cancel: the grid has axes {known}, not {', '.join(unknown)}", e.line)
    return _result(ctx, e, tuple(known.index(n) for n in names))


@try_cancel_p.emit((SM100,), (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    place, use = step.data
    with out.elected():
        out.line(f"u32 bar = {out.barrier_address(use)};")
        unit = out.plan.barriers[use.array].unit
        expect = "mbarrier_arrive_expect_tx" if unit == 1 else "mbarrier_expect_tx"
        out.line(f"{expect}(bar, {4 * WORDS});")
        if math.prod(out.plan.program.cluster) > 1:
            out.line(f"if (rank == 0) try_cluster_cancel_all({_address(out, place)}, bar);")
        else:
            out.line(f"try_cluster_cancel({_address(out, place)}, bar);")
        if unit > 1:
            out.line(f"mbarrier_arrive_count(bar, {unit});")


@query_p.emit((SM100,), (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    place: ResultPlan = step.data
    *indices, found = step.equation.results
    block = f"t{out.fresh()}"
    out.line(f"int {block}[3];")
    out.define_scalar(found, f"query_cluster_cancel({_address(out, place)}, {block})")
    for value, axis in zip(indices, place.axes, strict=True):
        out.define_scalar(value, out.axis("grid", axis, tuple(f"{block}[{i}]" for i in range(3))))


def _address(out: Any, place: ResultPlan) -> str:
    start = place.start + Affine(out.plan.buffers[place.buffer].offset)
    return f"smem + {out.affine(start)}"


@try_cancel_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.try_cluster_cancel(*step.data)


@query_p.simulate
def _(sim: Any, step: Any) -> None:
    grid, found = sim.query_cluster_cancel(step.data)
    *indices, there = step.equation.results
    for value, axis in zip(indices, step.data.axes, strict=True):
        sim.write(value, grid[axis])
    sim.write(there, found)
