"""A loop over the places of a grid that are handed out while it runs (cluster launch control)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import arguments
from .loops import rem, run_scoped, when
from .memory import Barrier, ClusterBarrier

SLOTS = 2  # answers: the next place is asked for while this one is worked on


@dataclasses.dataclass(frozen=True)
class NDLoopInfo:
    """index: the place in the grid, one int32 for each axis; local_index: how many this block has had before; num_local_steps:
    None, as nobody knows."""

    index: tuple[Any, ...]
    local_index: Any
    num_local_steps: None = None


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
