"""Waits that no run could end are refused when the plan is made; what only a run tells is left to the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import BarrierNeverCompletes
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.check import check_program
from tests.support import out

X = jax.ShapeDtypeStruct((128,), jnp.int32)
TWO = dict(num_threads=2, thread_name="wg")
CLUSTER = dict(cluster=(2,), cluster_names=("c",))
Body = Callable[..., None]


def program(body: Body, barrier: Any, **options: Any) -> Any:
    return plgpu.kernel(body, out(128, dtype=np.int32), scratch_types=[barrier], **options).program(X)


def body_of(arrive: Callable[[Any, Any], None], slot: Any = 0) -> Body:
    """arrive(x, barrier), then a wait."""

    def body(x: Any, y: Any, barrier: Any) -> None:
        arrive(x, barrier)
        plgpu.barrier_wait(barrier.at[slot if not callable(slot) else slot(x)])  # wait
        y[...] = x[...]

    return body


def once(x: Any, b: Any) -> None:
    plgpu.barrier_arrive(b.at[0])  # first


def never(x: Any, b: Any) -> None:
    pass


def twice(x: Any, b: Any) -> None:
    once(x, b)
    plgpu.when(x[0] > 0)(lambda: plgpu.barrier_arrive(b.at[0]))  # second


def loop(n: Any) -> Callable[[Any, Any], None]:
    """Arrives n times (None: as often as the data says)."""

    def arrive(x: Any, b: Any) -> None:
        def step(i: Any, _: None) -> None:
            plgpu.barrier_arrive(b.at[0])  # in the loop

        lax.fori_loop(0, x[0] if n is None else n, step, None)

    return arrive


def warps(x: Any, b: Any) -> None:
    """Every warp arrives for itself."""

    @plgpu.warp_map
    def _(warp: Any) -> None:
        plgpu.barrier_arrive(b.at[0])


def some_slot(x: Any, b: Any) -> None:
    plgpu.barrier_arrive(b.at[x[0]])


def other_slot(x: Any, b: Any) -> None:
    plgpu.barrier_arrive(b.at[1])  # elsewhere


def by_one_role(x: Any, b: Any) -> None:
    plgpu.when(lax.axis_index("wg") == 0)(lambda: plgpu.barrier_arrive(b.at[0]))


# name: arrivals, num_arrivals, num_barriers, options, the slot waited for, at most so many (None: taken)
CASES: dict[str, tuple[Callable[[Any, Any], None], int, int, dict[str, Any], Any, int | None]] = {
    "never": (never, 1, 1, {}, 0, 0),
    "never, any slot": (never, 1, 4, {}, lambda x: x[0], 0),
    "once": (once, 1, 1, {}, 0, None),
    "once of two": (once, 2, 1, {}, 0, 1),
    "in a branch": (twice, 2, 1, {}, 0, None),
    "in a branch, of three": (twice, 3, 1, {}, 0, 2),
    "three times in a loop": (loop(3), 4, 1, {}, 0, 3),
    "four times in a loop": (loop(4), 4, 1, {}, 0, None),
    "no time in a loop": (loop(0), 1, 1, {}, 0, 0),
    "a loop as long as the data says": (loop(None), 64, 1, {}, 0, None),
    "each warpgroup": (once, 2, 1, TWO, 0, None),
    "each warpgroup, of three": (once, 3, 1, TWO, 0, 2),
    "one warpgroup of two": (by_one_role, 2, 1, TWO, 0, 1),
    "each warp": (warps, 4, 1, {}, 0, None),
    "each warp, of five": (warps, 5, 1, {}, 0, 4),
    "a slot that only a run knows": (some_slot, 1, 2, {}, 0, None),
    "a slot that only a run knows, of two": (some_slot, 2, 2, {}, 1, 1),
    "another slot": (other_slot, 1, 2, {}, 0, 0),
    "another slot, and any is waited for": (other_slot, 1, 2, {}, lambda x: x[0], None),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, assert_at: Any) -> None:
    arrive, needed, count, options, slot, most = CASES[name]
    body = body_of(arrive, slot)
    made = program(body, plgpu.Barrier(num_arrivals=needed, num_barriers=count), **options)
    if most is None:
        build_plan(made, "sm_90a")
        return
    with pytest.raises(BarrierNeverCompletes) as e:
        build_plan(made, "sm_90a")
    assert_at(e.value, body_of, "wait")
    assert f"num_arrivals={needed}" in e.value.message and "barrier" in e.value.message
    if most:
        assert f"there are at most {most} arrivals on it" in e.value.message
        assert f"Say num_arrivals={most}" in e.value.message
    (found,) = check_program(made, "sm_90a").errors
    assert found.message == e.value.message


def test_every_line_that_arrives_is_named(line_of: Any) -> None:
    with pytest.raises(BarrierNeverCompletes) as e:
        build_plan(program(body_of(twice), plgpu.Barrier(num_arrivals=5)), "sm_90a")
    for f, marker in ((once, "first"), (twice, "second")):
        assert f":{line_of(f, marker)} in" in e.value.message
    with pytest.raises(BarrierNeverCompletes, match=r"barrier_arrive at .* in other_slot .*once: another slot") as e:
        build_plan(program(body_of(other_slot), plgpu.Barrier(num_barriers=2)), "sm_90a")
    assert f":{line_of(other_slot, 'elsewhere')} in" in e.value.message


@pytest.mark.parametrize(("needed", "most"), [(2, None), (3, 2)])
def test_blocks_of_a_cluster_arrive_on_each_others(needed: int, most: int | None) -> None:
    barrier = plgpu.ClusterBarrier(collective_axes=("c",), num_arrivals=needed)
    made = program(body_of(once), barrier, **CLUSTER)
    if most is None:
        build_plan(made, "sm_90a")
        return
    with pytest.raises(
        BarrierNeverCompletes, match="at most 2 arrivals on it in all of the kernel, in 2 blocks of a cluster"
    ):
        build_plan(made, "sm_90a")


@pytest.mark.parametrize(("needed", "refused"), [(2, False), (3, True)])
def test_copies_arrive(needed: int, refused: bool) -> None:
    def body(x: Any, y: Any, tile: Any, full: Any) -> None:
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(0, 64)], tile.at[plgpu.ds(0, 64)], full)
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(64, 64)], tile.at[plgpu.ds(64, 64)], full)
        plgpu.barrier_wait(full)
        y[...] = tile[...]

    scratch = [plgpu.SMEM((128,), jnp.int32), plgpu.Barrier(num_arrivals=needed)]
    made = plgpu.kernel(body, out(128, dtype=np.int32), scratch_types=scratch).program(X)
    if not refused:
        build_plan(made, "sm_90a")
        return
    with pytest.raises(
        BarrierNeverCompletes, match="(?s)at most 2 arrivals.*copy_gmem_to_smem at.*copy_gmem_to_smem at"
    ):
        build_plan(made, "sm_90a")


@pytest.mark.parametrize("announced", [False, True])
def test_commits_arrive(announced: bool) -> None:
    def body(x: Any, y: Any, a: Any, b: Any, t: Any, done: Any) -> None:
        @plgpu.warp_map
        def _(warp: Any) -> None:
            plgpu.when(warp == 0)(lambda: plgpu.tcgen05_mma(t, a, b, *([done] * announced), accumulate=False))

        plgpu.barrier_wait(done)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = [
        plgpu.SMEM((128, 64), jnp.bfloat16, transforms=tiled),
        plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled),
        plgpu.TMEM((128, 64), jnp.float32),
        plgpu.Barrier(orders_tensor_core=True),
    ]
    made = plgpu.kernel(body, out(128, dtype=np.int32), scratch_types=scratch).program(X)
    if announced:
        build_plan(made, "sm_100a")
        return
    with pytest.raises(BarrierNeverCompletes, match="no line of the kernel arrives on it"):
        build_plan(made, "sm_100a")


def test_a_wait_that_is_never_reached_by_its_role_is_none() -> None:
    """Branches that the roles decide are gone; a test of a barrier is no wait."""

    def body(x: Any, y: Any, b: Any) -> None:
        plgpu.when(lax.axis_index("wg") == 5)(lambda: plgpu.barrier_wait(b))
        y[...] = jnp.where(plgpu.barrier_test(b), x[...], 0)

    build_plan(program(body, plgpu.Barrier(), **TWO), "sm_90a")
