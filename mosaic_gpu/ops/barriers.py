"""mbarriers (PTX ISA 9.7.13.15) and the block's named barriers (9.7.13.1).

A wait names no phase: each role keeps one bit per barrier for the phase it waits for next, starting at 0.  An arrival by a
warpgroup is made warp by warp after a `__syncwarp` (so that no lane's reads can be overtaken), which is why the hardware
count may be four times the user's (`BarrierArray.unit`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .. import arguments
from ..errors import IllegalInstruction, UnsupportedCall
from ..program import Affine, Equation, View
from .registry import BOTH, WARP, WARPGROUP, Op, gives, op

SCOPES = (WARPGROUP, WARP)
barrier_arrive_p = op("barrier_arrive", issues_only=True)
barrier_wait_p = op("barrier_wait", issues_only=True)
barrier_test_p = op("barrier_test", issues_only=True)
named_barrier_arrive_p = op("named_barrier_arrive")
named_barrier_sync_p = op("named_barrier_sync")


@dataclasses.dataclass(frozen=True)
class BarrierUse:
    """Which barrier: the array's value id and the slot in it.

    cluster: whether an arrival or a wait orders the role's own accesses with those of other blocks (`plan.peers`).
    """

    array: int
    slot: Affine
    cluster: bool = False


def barrier_use(view: View, e: Equation) -> BarrierUse:
    """The one barrier that a view selects; an error when it is a slice of several."""
    if view.shape:
        raise UnsupportedCall(
            f"{e.op}: {view.ref} holds {view.ref.shape} barriers; select one with barrier.at[slot]", e.line
        )
    slot = Affine(0)
    for d, n in zip(view.dims, view.ref.shape, strict=True):
        slot = slot * n + d.start
    return BarrierUse(view.ref.id, slot)


def single(barrier: Any) -> Any:
    """`barrier` itself, or its only element: `Barrier()` without num_barriers needs no index."""
    if hasattr(barrier, "shape") and tuple(barrier.shape) and all(n == 1 for n in barrier.shape):
        return barrier.at[tuple(0 for _ in barrier.shape)]
    return barrier


def barrier_arrive(barrier: Any) -> None:
    """One arrival of this warpgroup (under `warp_map`: of this warp) on an mbarrier; earlier reads and writes come first."""
    from ..frontend.primitives import bind

    bind(barrier_arrive_p, single(barrier))


def barrier_wait(barrier: Any) -> None:
    """Wait until the next phase of an mbarrier, as this role counts them, has completed."""
    from ..frontend.primitives import bind

    bind(barrier_wait_p, single(barrier))


def barrier_arrive_and_wait(barrier: Any) -> None:
    """`barrier_arrive`, then `barrier_wait`."""
    barrier_arrive(barrier)
    barrier_wait(barrier)


@gives(lambda barrier: ((), "bool"))
def barrier_test(barrier: Any) -> Any:
    """Whether the next phase of an mbarrier, as this role counts them, has completed: a bool, without waiting.

    True stands for a `barrier_wait`: what came before the phase's arrivals may be used, and the next call asks for the phase
    after.  All threads of the warpgroup get the same answer.
    """
    from ..frontend.primitives import bind

    return bind(barrier_test_p, single(barrier))[0]


def _mbarrier(o: Op, results: Any = ()) -> None:
    @o.abstract
    def _(barrier: Any) -> Any:
        arguments.memory(o.name, "barrier", barrier, "barrier")
        return results

    @o.plan()
    def _(ctx: Any, e: Equation) -> BarrierUse:
        use = barrier_use(e.operands[0], e)  # type: ignore[arg-type]
        info = e.operands[0].space.barrier  # type: ignore[union-attr]
        met = bool(info and info.collective_axes) and ctx.meets_peers
        return dataclasses.replace(use, cluster=met or use.array in ctx.filled_by_peers)


_mbarrier(barrier_arrive_p)
_mbarrier(barrier_wait_p)
_mbarrier(barrier_test_p, (((), "bool"),))


def is_arrival_of_warps(out: Any, step: Any) -> bool:
    """Whether a step is an arrival that one lane of each warp makes for itself: it needs nobody else of its warpgroup."""
    if step.equation.op != barrier_arrive_p.name or step.waits is not None or out.single_thread:
        return False
    array = out.plan.barriers[step.data.array]
    return array.unit == 4 and not array.info.collective_axes and not array.info.orders_tensor_core


@barrier_arrive_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    use: BarrierUse = step.data
    array = out.plan.barriers[use.array]
    bar = out.barrier_address(use)
    out.after_loads()
    if array.info.orders_tensor_core:
        out.line("tcgen05_fence_before();")
    if array.info.collective_axes:
        out.arrive_cluster(array, bar, use.cluster)
    elif out.single_thread:
        out.line(f"mbarrier_arrive_count({bar}, {array.unit});" if array.unit > 1 else f"mbarrier_arrive({bar});")
    elif array.unit == 4:  # each warp of a warpgroup is one of the four; a warp by itself is all of them
        arrive = (
            f"mbarrier_arrive({bar});" if out.scope is WARPGROUP else f"mbarrier_arrive_count({bar}, {array.unit});"
        )
        out.line(f"__syncwarp(); if (lane == 0{out.condition}) {arrive}")
    else:
        out.elected_after_sync(f"mbarrier_arrive({bar});")


@barrier_arrive_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.arrive(step.data)


@barrier_wait_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    use: BarrierUse = step.data
    phases, first = out.phase(use.array)
    wait = "mbarrier_wait_cluster" if use.cluster else "mbarrier_wait"
    if use.slot.static:
        bit = first + use.slot.const
        out.line(f"{wait}({out.barrier_address(use)}, ({phases} >> {bit}) & 1); {phases} ^= {1 << bit}u;")
    else:
        with out.block():
            out.line(f"u32 slot = {out.affine(use.slot)}, mine = {1 << first}u << slot;")
            out.line(f"{wait}({out.barrier_address(use, 'slot')}, ({phases} & mine) != 0); {phases} ^= mine;")
    if out.plan.barriers[use.array].info.orders_tensor_core:
        out.line("tcgen05_fence_after();")


@barrier_wait_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    yield from sim.wait(step.data)


@barrier_test_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    use: BarrierUse = step.data
    phases, first = out.phase(use.array)
    test = "mbarrier_test_cluster" if use.cluster else "mbarrier_test"
    result = step.equation.results[0]
    mine = f"mine{result.id}"
    out.line(f"const u32 {mine} = {1 << first}u << {out.affine(use.slot)};")
    found = out.any_of_role(f"{test}({out.barrier_address(use)}, ({phases} & {mine}) != 0)")
    out.define_scalar(result, found)
    out.line(f"if ({out.name(result)}) {phases} ^= {mine};")
    if out.plan.barriers[use.array].info.orders_tensor_core:
        out.line("tcgen05_fence_after();")


@barrier_test_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    yield from sim.test(step.data)


def named_barrier_arrive(barrier: Any) -> None:
    """Count this warpgroup in on a named barrier and go on without waiting."""
    from ..frontend.primitives import bind

    bind(named_barrier_arrive_p, single(barrier))


def named_barrier_sync(barrier: Any) -> None:
    """Wait on a named barrier until all its warpgroups have arrived or wait too."""
    from ..frontend.primitives import bind

    bind(named_barrier_sync_p, single(barrier))


def _named(o: Op, function: str) -> None:
    @o.abstract
    def _(barrier: Any) -> Any:
        arguments.memory(o.name, "barrier", barrier, "named_barrier")
        return ()

    @o.plan(BOTH, (WARPGROUP,))
    def _(ctx: Any, e: Equation) -> BarrierUse:
        use = barrier_use(e.operands[0], e)  # type: ignore[arg-type]
        array = ctx.named_barriers[use.array]
        if array.threads > 128 * ctx.program.num_threads:
            raise IllegalInstruction(
                f"a named barrier of {array.threads // 128} warpgroups in a block of {ctx.program.num_threads}: "
                "it could never complete",
                e.line,
            )
        return use

    @o.emit(BOTH, (WARPGROUP,))
    def _(out: Any, step: Any) -> None:
        use: BarrierUse = step.data
        array = out.plan.named_barriers[use.array]
        out.line(f"{function}({out.affine(use.slot + Affine(array.id))}, {array.threads});")


_named(named_barrier_arrive_p, "named_barrier_arrive")
_named(named_barrier_sync_p, "named_barrier_sync")


@named_barrier_arrive_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.named_arrive(step.data)


@named_barrier_sync_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    yield from sim.named_sync(step.data)
