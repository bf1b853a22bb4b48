"""Shared memory of the cluster's other blocks: values against NumPy, order, machine code, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import OutOfBounds, Race, UninitializedRead, UnsupportedCall
from mosaic_gpu.plan.accesses import shared_accesses
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams, simulate
from tests.support import out

F, BF = np.float32, jnp.bfloat16
PARAMS = [dict(), dict(timing="early"), dict(shadow="bytes"), *(dict(seed=s) for s in range(1, 9))]
ROWS = 64
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def planned(body, out, *arrays, arch="sm_90a", cluster=(2,), names=("c",), **options):
    kernel = plgpu.kernel(body, out, cluster=cluster, cluster_names=names, **options)
    return build_plan(kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)), arch)


def given(*shape, dtype=F):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def barriers(n=2):
    return plgpu.ClusterBarrier(collective_axes="c", num_barriers=n)


def meet(barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def exchanged(store, *, blocks=2, rounds=1, dtype=F, transforms=(), layout=plgpu.Layout.WGMMA, filled=True, left=True):
    """Each block hands its tile on to the next one, `rounds` times: it stores there, or loads from the one before.

    filled, left: whether all meet before anybody takes what was stored, and before anybody overwrites it.
    """

    def body(x, o, mine, met):
        me = lax.axis_index("c")
        other = plgpu.rem(me + (1 if store else blocks - 1), blocks)
        value = plgpu.load(x.at[me], layout=layout)
        for _ in range(rounds):
            if store:
                plgpu.cluster_ref(mine, {"c": other})[...] = value
            else:
                mine[...] = value
            if filled:
                meet(met.at[0])
            source = mine if store else plgpu.cluster_ref(mine, {"c": other})
            value = plgpu.load(source, layout=layout)
            if left:
                meet(met.at[1])
        o[me] = value

    x = given(blocks, ROWS, 64, dtype=dtype)
    scratch = [plgpu.SMEM((ROWS, 64), dtype, transforms=transforms), barriers()]
    return planned(body, out(*x.shape, dtype=dtype), x, cluster=(blocks,), scratch_types=scratch), x


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(
    ("blocks", "rounds", "dtype", "transforms"), [(2, 1, F, ()), (4, 3, F, ()), (2, 2, BF, TILE)], ids=str
)
def test_handed_on(store, blocks, rounds, dtype, transforms, params):
    plan, x = exchanged(store, blocks=blocks, rounds=rounds, dtype=dtype, transforms=transforms)
    (got,) = simulate(plan, [x], SimulatorParams(**params))
    np.testing.assert_array_equal(got, np.roll(x, rounds, axis=0))


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(("filled", "left"), [(False, True), (True, False)])
def test_order(store, filled, left, params):
    """Without either of the two meetings there is a race between the blocks, whatever the timing; or nothing is there yet."""
    plan, x = exchanged(store, rounds=2, filled=filled, left=left)
    with pytest.raises((Race, UninitializedRead) if left else Race) as found:
        simulate(plan, [x], SimulatorParams(**params))
    if isinstance(found.value, Race):
        assert found.value.between == "cluster" and found.value.place == "smem mine"


def two_axes(b0=None):
    """Along two axes of a cluster, one of them left out; scalars; a slice and a transposed view."""

    def body(x, o, mine, sums, met):
        a, b = lax.axis_index("a"), lax.axis_index("b")
        mine[...] = plgpu.load(x.at[a, b], layout=plgpu.Layout.WGMMA)
        sums[0] = (10 * a + b).astype(F)
        meet(met)
        across = plgpu.cluster_ref(mine.at[0:64], {"b": 1 - b if b0 is None else b0})
        opposite = plgpu.cluster_ref(sums, {"b": 1 - b, "a": 1 - a})
        o[a, b] = plgpu.load(across.transpose((1, 0)), layout=plgpu.Layout.WGMMA) + opposite[0]
        meet(met)

    x = given(2, 2, 64, 64)
    scratch = [plgpu.SMEM((64, 64), F), plgpu.SMEM((4,), F), plgpu.ClusterBarrier(collective_axes=("a", "b"))]
    return planned(body, out(*x.shape), x, cluster=(2, 2), names=("a", "b"), scratch_types=scratch), x


@pytest.mark.parametrize("params", PARAMS[:5], ids=str)
def test_two_axes(params):
    plan, x = two_axes()
    (got,) = simulate(plan, [x], SimulatorParams(**params))
    opposite = np.array([[11, 10], [1, 0]], F)[..., None, None]
    np.testing.assert_array_equal(got, x[:, ::-1].transpose(0, 1, 3, 2) + opposite)


def read_by_tma(fence=True, arch="sm_90a"):
    """A block stores into the other one's memory, which copies that out."""

    def body(x, o, tile, met):
        me = lax.axis_index("c")
        plgpu.cluster_ref(tile, {"c": 1 - me})[...] = plgpu.load(x.at[me], layout=plgpu.Layout.WGMMA)
        if fence:
            plgpu.commit_smem()
        meet(met)
        plgpu.copy_smem_to_gmem(tile, o.at[me])
        plgpu.wait_smem_to_gmem(0)

    x = given(2, 64, 64)
    plan = planned(
        body,
        out(*x.shape),
        x,
        arch=arch,
        scratch_types=[plgpu.SMEM((64, 64), F), plgpu.ClusterBarrier(collective_axes="c")],
    )
    return plan, x


@pytest.mark.parametrize("params", PARAMS[:5], ids=str)
def test_what_tma_reads_is_fenced_by_the_block_that_stored_it(params):
    plan, x = read_by_tma()
    np.testing.assert_array_equal(simulate(plan, [x], SimulatorParams(**params))[0], x[::-1])
    plan, x = read_by_tma(fence=False)
    with pytest.raises(Race, match="missing commit_smem"):
        simulate(plan, [x], SimulatorParams(**params))


def products(fence=True):
    """A tile that one block stores and another one's wgmma reads; the barrier is passed on by a role that touches nothing."""

    def body(x, o, tile, met, local):
        wg, me = lax.axis_index("wg"), lax.axis_index("c")

        @plgpu.when(wg == 1)
        def _():
            plgpu.cluster_ref(tile, {"c": 1 - me})[...] = plgpu.load(x.at[me], layout=plgpu.Layout.WGMMA)
            if fence:
                plgpu.commit_smem()
            plgpu.barrier_arrive(met)

        @plgpu.when(wg == 2)
        def _():
            plgpu.barrier_wait(met)
            plgpu.barrier_arrive(local)

        @plgpu.when(wg == 0)
        def _():
            plgpu.barrier_wait(local)

            def compute(acc):
                plgpu.wgmma(acc, tile, tile.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return acc[...]

            o[me] = plgpu.run_scoped(compute, plgpu.ACC((64, 64)))

    x = given(2, 64, 64, dtype=BF)
    scratch = [
        plgpu.SMEM((64, 64), BF, transforms=TILE),
        plgpu.ClusterBarrier(collective_axes="c"),
        plgpu.Barrier(),
    ]
    return planned(body, out(2, 64, 64), x, num_threads=3, thread_name="wg", scratch_types=scratch), x


@pytest.mark.parametrize("params", PARAMS[:5], ids=str)
def test_products_of_what_a_peer_stored(params):
    plan, x = products()
    (got,) = simulate(plan, [x], SimulatorParams(**params))
    wide = x[::-1].astype(np.float64)
    np.testing.assert_allclose(got, wide @ wide.transpose(0, 2, 1), rtol=1e-5, atol=1e-4)
    with pytest.raises(Race, match="missing commit_smem"):
        simulate(products(fence=False)[0], [x], SimulatorParams(**params))


def test_scopes_and_fences():
    """Arrivals, waits and fences reach the cluster, in roles that pass the word on, too; the epilogue keeps peers alive."""
    text = emit(products()[0])
    assert "mbarrier_arrive_cluster_release(smem" in text and "mbarrier_arrive_cluster(smem" not in text
    assert "mbarrier_wait_cluster(smem" in text
    assert "fence_proxy_async_cluster();" in text and "fence_proxy_async_shared();" not in text
    assert text.rstrip().removesuffix("}").rstrip().endswith("cluster_arrive(); cluster_wait();")
    alone = emit(read_by_tma()[0]).replace("shared_of_block", "")
    assert "fence_proxy_async_cluster();" in alone


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize(
    "make", [lambda: exchanged(True)[0], lambda: exchanged(False, dtype=BF, transforms=TILE)[0], lambda: two_axes()[0]]
)
def test_machine_code(compiled, arch, make):
    plan = make()
    plan = build_plan(plan.program, arch)
    assert compiled(plan).complaints() == []
    text = emit(plan)
    assert text.count("shared_of_block(shared, ") >= 1


def test_matrix_instructions_stay_at_home():
    """ldmatrix and stmatrix reach the block's own memory only."""
    text = emit(exchanged(True, dtype=BF, transforms=TILE)[0])
    kernel = text.split("kernel.cu")[-1]
    assert "ldmatrix_x4(" in kernel and "stmatrix_x4(" not in kernel
    assert [a.op for a in shared_accesses(exchanged(True)[0])] == ["load"]  # conflicts are counted of a block's own


def refused(body, *, cluster=(2,), scratch=None):
    x = given(64, 64)
    scratch = scratch or [plgpu.SMEM((64, 64), F), plgpu.Barrier(), barriers()]
    return planned(body, out(64, 64), x, cluster=cluster, scratch_types=scratch)


def test_where_a_peers_memory_cannot_be():
    def copied(x, o, tile, full, met):
        plgpu.copy_gmem_to_smem(x, plgpu.cluster_ref(tile, {"c": 0}), full)

    def stored(x, o, tile, full, met):
        plgpu.copy_smem_to_gmem(plgpu.cluster_ref(tile, {"c": 0}), o)

    def by_index(x, o, tile, full, met):
        rows = plgpu.load(plgpu.cluster_ref(tile, {"c": 0})[jnp.zeros(64, jnp.int32)])
        o[...] = rows

    for body, op in ((copied, "copy_gmem_to_smem"), (stored, "copy_smem_to_gmem")):
        with pytest.raises(UnsupportedCall, match=f"{op} of .*another block's shared memory.*let that block do it"):
            refused(body)
    with pytest.raises((UnsupportedCall, TypeError)):
        refused(by_index)


@pytest.mark.parametrize(
    ("block_id", "error", "words"),
    [
        ({"d": 0}, UnsupportedCall, r"axes \('c',\), not d"),
        ({"c": 2}, OutOfBounds, "block 2 along c, which has 2"),
        ({"c": -1}, OutOfBounds, "block -1 along c"),
        ({}, TypeError, "block_id"),
        (1, TypeError, "block_id"),
        ({0: 1}, TypeError, "block_id"),
        ({"c": 0.5}, TypeError, "block_id"),
        ({"c": "x"}, TypeError, "block_id"),
    ],
    ids=str,
)
def test_arguments(block_id, error, words):
    def body(x, o, tile, full, met):
        plgpu.cluster_ref(tile, block_id)[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)

    with pytest.raises(error, match=words):
        refused(body)


def test_arguments_that_are_no_shared_memory():
    with pytest.raises(TypeError, match="cluster_ref: ref must be"):
        refused(lambda x, *_: plgpu.cluster_ref(x, {"c": 0}))
    with pytest.raises(TypeError, match="cluster_ref: ref must be"):
        refused(lambda x, o, tile, full, met: plgpu.cluster_ref(full, {"c": 0}))
    with pytest.raises(UnsupportedCall, match="a peer's already"):
        refused(
            lambda x, o, t, *_: plgpu.debug_print(
                "{}", plgpu.cluster_ref(plgpu.cluster_ref(t, {"c": 0}), {"c": 1})[0, 0]
            )
        )


def test_an_index_that_is_known_late():
    with pytest.raises(OutOfBounds, match="block 2 along c, which has 2"):

        def body(x, o, tile, full, met):
            me = lax.axis_index("c")
            plgpu.cluster_ref(tile, {"c": me + 1})[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)

        simulate(refused(body), [given(64, 64)])


def test_a_cluster_of_one(compiled):
    plan, x = exchanged(True, blocks=1)
    np.testing.assert_array_equal(simulate(plan, [x])[0], x)
    assert compiled(plan).complaints() == []
    assert "shared_of_block" not in emit(plan)
