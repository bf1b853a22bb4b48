"""Loops over the places of a grid: dealt out in turn, or handed out while it runs (cluster launch control)."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import arguments
from .loops import div, rem, run_scoped, when
from .memory import Barrier, ClusterBarrier

SLOTS = 2  # answers: the next place is asked for while this one is worked on


@dataclasses.dataclass(frozen=True)
class NDLoopInfo:
    """index: the place in the grid, one int32 for each axis; local_index: how many this block has had before; num_local_steps:
    how many it has in all (int32), None where nobody knows."""

    index: tuple[Any, ...]
    local_index: Any
    num_local_steps: Any = None


def nd_loop(
    grid: Sequence[Any],
    *,
    collective_axes: Sequence[str] | str,
    tiling: Sequence[int] | None = None,
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: call the function for every n-th place of `grid`, for n blocks (warpgroups) that take turns.

    grid: sizes, ints or int32 scalars; the last axis is the fastest.  collective_axes: axes of the kernel (grid, cluster,
    warpgroups), over whose members the places are dealt, the last axis the fastest.  tiling: sizes that divide the grid's; the
    places of one such tile come before those of the next.  The function takes an `NDLoopInfo`, with init_carry also `carry=`, and
    returns the next carry; the decorated name is the last one.  Raises ValueError for a tiling that does not fit.
    """
    where = "nd_loop"
    names = arguments.names(where, "collective_axes", collective_axes)
    sizes = list(grid)
    for i, n in enumerate(sizes):
        if not (hasattr(n, "dtype") and not n.shape and jnp.issubdtype(n.dtype, jnp.integer)):
            sizes[i] = arguments.whole(where, f"grid[{i}]", n, 0)
    tiles = None if tiling is None else arguments.whole_numbers(where, "tiling", tiling, 1)
    if tiles is not None:
        if len(tiles) != len(sizes):
            raise ValueError(f"nd_loop: tiling={tiles} has {len(tiles)} sizes, grid={tuple(grid)} {len(sizes)}")
        for n, t in zip(sizes, tiles, strict=True):
            if isinstance(n, int) and n % t:
                raise ValueError(f"nd_loop: tiling={tiles} does not divide grid={tuple(grid)}: {n} % {t} = {n % t}")
        sizes = [*(div(n, t) for n, t in zip(sizes, tiles, strict=True)), *tiles]

    def run(body: Callable[..., Any]) -> Any:
        arguments.function(where, "the decorated object", body)
        first, members = jnp.int32(0), 1
        for name in names:
            size = jax.lax.axis_size(name)
            first, members = first * size + jax.lax.axis_index(name), members * size
        total = jnp.asarray(functools.reduce(operator.mul, sizes, 1), jnp.int32)
        steps = jnp.where(first < total, div(total - first + (members - 1), members), 0)

        def step(i: Any, carry: Any) -> Any:
            left, index = i * members + first, []
            for n in reversed(sizes):
                index.append(rem(left, n))
                left = div(left, n)
            index.reverse()
            if tiles is not None:
                outer, inner = index[: len(tiles)], index[len(tiles) :]
                index = [o * t + k for o, t, k in zip(outer, tiles, inner, strict=True)]
            info = NDLoopInfo(tuple(index), i, steps)
            return body(info) if init_carry is None else body(info, carry=carry)

        return jax.lax.fori_loop(jnp.int32(0), steps, step, init_carry)

    return run


def dynamic_scheduling_loop(
    grid_names: Sequence[str],
    thread_axis: str | None = None,
    cluster_axes: Sequence[str] | str = (),
    init_carry: Any = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: call the function for this block's place in the grid, then for one not yet launched after the other.

    grid_names: axes of the grid, all of them.  thread_axis: the warpgroups' axis where the kernel has several: all of them run
    the loop together, the first asks.  cluster_axes: all axes of the cluster where it has more than one block: its blocks take
    over the places of another cluster, together.  The function takes an `NDLoopInfo`, with init_carry also `carry=`, and returns
    the next carry; the decorated name is the last one.  sm_100a and later (PTX ISA: clusterlaunchcontrol).
    """
    from ..ops.barriers import barrier_arrive, barrier_wait
    from ..ops.launch_control import TryClusterCancelResult, query_cluster_cancel, try_cluster_cancel

    names = arguments.names("dynamic_scheduling_loop", "grid_names", grid_names)
    if thread_axis is not None and not isinstance(thread_axis, str):
        arguments.refuse(
            "dynamic_scheduling_loop", "thread_axis", thread_axis, "the name of the warpgroups' axis or None"
        )
    cluster = arguments.names("dynamic_scheduling_loop", "cluster_axes", cluster_axes)
    threads = 1 if thread_axis is None else jax.lax.axis_size(thread_axis)

    def run(body: Callable[..., Any]) -> Any:
        arguments.function("dynamic_scheduling_loop", "the decorated object", body)

        def scope(answers: Any, full: Any, empty: Any) -> Any:
            def ask(count: Any, slot: Any) -> None:
                when(count >= SLOTS)(lambda: barrier_wait(empty.at[slot]))
                try_cluster_cancel(answers.at[slot], full.at[slot])

            def step(state: Any) -> Any:
                count, _, index, carry = state
                slot = rem(count, SLOTS)
                if thread_axis is None:
                    ask(count, slot)
                else:
                    when(jax.lax.axis_index(thread_axis) == 0)(lambda: ask(count, slot))
                info = NDLoopInfo(index, count)
                carry = body(info) if init_carry is None else body(info, carry=carry)
                barrier_wait(full.at[slot])
                index, found = query_cluster_cancel(answers.at[slot], names)
                barrier_arrive(empty.at[slot])
                return count + 1, found, index, carry

            first = tuple(jax.lax.axis_index(n) for n in names)
            state = jnp.int32(0), jnp.bool_(True), first, init_carry
            return jax.lax.while_loop(lambda s: s[1], step, state)[3]

        axes = () if thread_axis is None else thread_axis
        return run_scoped(
            scope,
            TryClusterCancelResult(SLOTS),
            Barrier(num_barriers=SLOTS),
            ClusterBarrier(collective_axes=cluster, num_arrivals=threads, num_barriers=SLOTS)
            if cluster
            else Barrier(num_arrivals=threads, num_barriers=SLOTS),
            collective_axes=axes,
        )

    return run
