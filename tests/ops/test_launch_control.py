"""Cluster launch control: every place of the grid is worked on once, whoever takes it over; mistakes are found; compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import Deadlock, IllegalInstruction, Race, UninitializedRead, UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams, simulate
from tests.support import out

F = np.float32
PARAMS = [dict(), dict(timing="early"), dict(shadow="bytes"), *(dict(seed=s) for s in range(1, 9))]


def planned(body, out, *arrays, arch="sm_100a", **options):
    kernel = plgpu.kernel(body, out, compiler_params=plgpu.CompilerParams(arch="sm_100a"), **options)
    return build_plan(kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)), arch)


def doubled(threads=1, grid=(5,), carry=False):
    """Each place doubles its tile; with a carry, it adds how many this block has had before."""
    names = tuple(f"g{i}" for i in range(len(grid)))

    def body(x, o):
        axis = "wg" if threads > 1 else None

        @plgpu.dynamic_scheduling_loop(names, thread_axis=axis, init_carry=jnp.int32(0) if carry else None)
        def _(info, carry=None):
            at = info.index
            if threads > 1:
                at = (*at, lax.axis_index("wg"))
            y = plgpu.load(x.at[at], layout=plgpu.Layout.WG_STRIDED) * 2
            if carry is not None:
                y = y + (carry - info.local_index).astype(F)
            o[at] = y
            return None if carry is None else carry + 1

    shape = (*grid, *((threads,) if threads > 1 else ()), 128)
    x = np.random.default_rng(0).standard_normal(shape).astype(F)
    return (
        body,
        x,
        dict(grid=grid, grid_names=names, **(dict(num_threads=threads, thread_name="wg") if threads > 1 else {})),
    )


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize(
    ("threads", "grid", "carry"),
    [(1, (5,), False), (2, (7,), False), (3, (2, 3), True), (1, (2, 2, 2), True), (1, (1,), False)],
)
def test_every_place_once(params, threads, grid, carry):
    """Whatever is taken over by whom: all is written, nothing twice (which would be a race), no finding."""
    body, x, options = doubled(threads, grid, carry)
    (got,) = simulate(planned(body, out(*x.shape), x, **options), [x], SimulatorParams(**params))
    np.testing.assert_array_equal(got, 2 * x)


def test_places_are_taken_over():
    """One block works on all of them where nobody else is launched; under some seeds several do."""

    def body(o):
        me = lax.axis_index("g")

        @plgpu.dynamic_scheduling_loop(("g",))
        def _(info):
            o[info.index[0]] = me

    plan = planned(body, out(6, dtype=np.int32), grid=(6,), grid_names=("g",))
    assert simulate(plan, [])[0].tolist() == [0] * 6
    owners = {tuple(simulate(plan, [], SimulatorParams(seed=s))[0].tolist()) for s in range(1, 12)}
    assert len(owners) > 2 and all(list(o) == sorted(o) for o in owners)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("grid", [(5,), (2, 3), (2, 2, 2)])
def test_machine_code(compiled, arch, grid):
    body, x, options = doubled(2, grid)
    plan = planned(body, out(*x.shape), x, arch=arch, **options)
    report = compiled(plan)
    assert report.complaints() == [] and report.mnemonics["UGETNEXTWORKID"] == 1
    assert emit(plan).count("query_cluster_cancel(") == 1 + 1


def by_hand(*, wait=True, empty=True, again=False, answers=2):
    """One warpgroup asks ahead by hand."""

    def body(o, result, full):
        def step(state):
            count, _, index = state
            slot = lax.rem(count, 2)
            plgpu.try_cluster_cancel(result.at[slot], full.at[slot])
            o[index] = count
            if wait:
                plgpu.barrier_wait(full.at[slot])
            (index,), found = plgpu.query_cluster_cancel(result.at[slot], "g")
            return count + 1, found, index

        zero = jnp.int32(0)
        lax.while_loop(lambda s: s[1], step, (zero, jnp.bool_(True), lax.axis_index("g")))
        if again:
            plgpu.try_cluster_cancel(result.at[0], full.at[0])
            plgpu.barrier_wait(full.at[0])

    scratch = [plgpu.TryClusterCancelResult(answers), plgpu.Barrier(num_barriers=2)]
    return planned(body, out(4, dtype=np.int32), grid=(4,), grid_names=("g",), scratch_types=scratch)


def test_by_hand():
    """Each place is computed once; a block counts its places from 0, so no number is there more often than the one below it."""
    for params in PARAMS:
        (places,) = simulate(by_hand(), [], SimulatorParams(**params))
        numbers = np.bincount(places, minlength=4)  # what nobody has written is negative, and raises
        assert numbers.sum() == 4 and (np.diff(numbers) <= 0).all(), places


def test_mistakes():
    with pytest.raises((Race, UninitializedRead), match="query_cluster_cancel"):
        simulate(by_hand(wait=False), [])
    with pytest.raises(IllegalInstruction, match="asks for another place after query_cluster_cancel has said"):
        simulate(by_hand(again=True), [])


def test_one_request_at_a_time():
    def body(o, result, full):
        for slot in range(2):
            plgpu.try_cluster_cancel(result.at[slot], full.at[slot])
        for slot in range(2):
            plgpu.barrier_wait(full.at[slot])
        o[0] = jnp.int32(1)

    scratch = [plgpu.TryClusterCancelResult(2), plgpu.Barrier(num_barriers=2)]
    plan = planned(body, out(1, dtype=np.int32), grid=(4,), grid_names=("g",), scratch_types=scratch)
    with pytest.raises(IllegalInstruction, match="one at a time"):
        simulate(plan, [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(grid_names=1), "grid_names"),
        (dict(grid_names="g", thread_axis=2), "thread_axis"),
        (dict(grid_names="x"), "x"),
        (dict(grid_names="g", cluster_axes=3), "cluster_axes"),
    ],
)
def test_arguments_of_the_loop(options, words):
    def body(o):
        plgpu.dynamic_scheduling_loop(**options)(lambda info: None)

    with pytest.raises((TypeError, UnsupportedCall), match=words):
        planned(body, out(1), grid=(2,), grid_names=("g",))


def test_the_answer_is_overwritten_unread():
    """Two warpgroups, one answer: the first asks anew before the second has read it."""

    def body(o, result, full):
        wg = lax.axis_index("wg")

        def step(state):
            count, _, index = state
            plgpu.when(wg == 0)(lambda: plgpu.try_cluster_cancel(result, full))
            o[index, wg] = count
            plgpu.barrier_wait(full)
            (index,), found = plgpu.query_cluster_cancel(result, "g")
            return count + 1, found, index

        zero = jnp.int32(0)
        lax.while_loop(lambda s: s[1], step, (zero, jnp.bool_(True), lax.axis_index("g")))

    scratch = [plgpu.TryClusterCancelResult(), plgpu.Barrier()]
    options = dict(grid=(4,), grid_names=("g",), num_threads=2, thread_name="wg", scratch_types=scratch)
    plan = planned(body, out(4, 2, dtype=np.int32), **options)
    for params in PARAMS[:3]:
        with pytest.raises((Race, Deadlock, plgpu.errors.BarrierMisuse), match="query_cluster_cancel|full"):
            simulate(plan, [], SimulatorParams(**params))


def in_clusters(*, cluster=(2,), threads=1, named=True, grid=(5,)):
    """As `doubled`, with a tile for each block of the cluster.  named: whether the loop is told of it."""
    names = tuple(f"g{i}" for i in range(len(grid)))
    axes = tuple(f"c{i}" for i in range(len(cluster)))

    def body(x, o):
        axis = "wg" if threads > 1 else None

        @plgpu.dynamic_scheduling_loop(names, thread_axis=axis, cluster_axes=axes if named else ())
        def _(info):
            at = (*info.index, *map(lax.axis_index, axes), *([lax.axis_index("wg")] if threads > 1 else []))
            o[at] = plgpu.load(x.at[at], layout=plgpu.Layout.WG_STRIDED) * 2

    shape = (*grid, *cluster, *((threads,) if threads > 1 else ()), 128)
    x = np.random.default_rng(0).standard_normal(shape).astype(F)
    options = dict(grid=grid, grid_names=names, cluster=cluster, cluster_names=axes)
    return body, x, options | (dict(num_threads=threads, thread_name="wg") if threads > 1 else {})


CLUSTERS = [dict(), dict(threads=2, grid=(7,)), dict(cluster=(2, 2), grid=(2, 3)), dict(cluster=(4,), grid=(1,))]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("how", CLUSTERS, ids=str)
def test_every_place_of_a_cluster_once(params, how):
    """The blocks of a cluster take over the places of another one together."""
    body, x, options = in_clusters(**how)
    (got,) = simulate(planned(body, out(*x.shape), x, **options), [x], SimulatorParams(**params))
    np.testing.assert_array_equal(got, 2 * x)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_other_block_has_not_read_the_answer(params):
    """An answer goes to all blocks, so all must have read the one before: word of the own block is not enough."""
    body, x, options = in_clusters(named=False, grid=(9,))
    with pytest.raises((Race, plgpu.errors.BarrierMisuse, Deadlock)):
        simulate(planned(body, out(*x.shape), x, **options), [x], SimulatorParams(**params))


@pytest.mark.parametrize("first", [True, False])
def test_every_block_of_a_cluster_calls(first):
    """One that does not gets an answer that it does not expect; if it is the first, nobody asks."""

    def body(o, result, full):
        me = lax.axis_index("c")

        @plgpu.when(me == (0 if first else 1))
        def _():
            plgpu.try_cluster_cancel(result, full)
            plgpu.barrier_wait(full)

        o[me] = me

    scratch = [plgpu.TryClusterCancelResult(), plgpu.Barrier()]
    options = dict(grid=(2,), grid_names=("g",), cluster=(2,), cluster_names=("c",), scratch_types=scratch)
    plan = planned(body, out(2, dtype=np.int32), **options)
    with pytest.raises((plgpu.errors.BarrierMisuse, plgpu.errors.Leak) if first else Deadlock):
        simulate(plan, [])


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("how", CLUSTERS[:3], ids=str)
def test_machine_code_of_clusters(compiled, arch, how):
    """One request by the first block, for all; each block expects the answer; arrivals have the cluster's scope."""
    body, x, options = in_clusters(**how)
    plan = planned(body, out(*x.shape), x, arch=arch, **options)
    report = compiled(plan)
    assert report.complaints() == [] and report.mnemonics["UGETNEXTWORKID"] == 1
    kernel = emit(plan).split("kernel.cu")[-1]
    assert kernel.count("if (rank == 0) try_cluster_cancel_all(") == 1 and kernel.count("try_cluster_cancel(") == 0
    assert kernel.count("expect_tx(bar, 16)") == 1 and "mbarrier_arrive_cluster(" not in kernel
    assert "mbarrier_arrive_cluster_release(" in kernel and "mbarrier_wait_cluster(" in kernel
