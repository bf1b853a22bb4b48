"""Stores to another block's shared memory that a barrier there counts: values, order, machine code.  Refusals: tests/refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import BarrierMisuse, Deadlock, Leak, Race, UninitializedRead
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams, simulate

F, BF = np.float32, jnp.bfloat16
PARAMS = [dict(), dict(timing="early"), dict(shadow="bytes"), *(dict(seed=s) for s in range(1, 9))]
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WGMMA = plgpu.Layout.WGMMA


def planned(body, shape, x, scratch, *, arch="sm_90a", cluster=(2,), names=("c",), **options):
    out = jax.ShapeDtypeStruct(shape, x.dtype)
    kernel = plgpu.kernel(body, out, cluster=cluster, cluster_names=names, scratch_types=scratch, **options)
    return build_plan(kernel.program(jax.ShapeDtypeStruct(x.shape, x.dtype)), arch)


def given(*shape, dtype=F):
    return (np.random.default_rng(0).standard_normal(shape) * 100).astype(dtype)


def handed_on(
    *,
    blocks=2,
    rounds=1,
    dtype=F,
    transforms=(),
    layout=WGMMA,
    wait=True,
    free=True,
    arrivals=1,
    arch="sm_90a",
):
    """Each block hands its array on to the next one, `rounds` times, through two slots.  wait: for what comes; free: for the slot
    of the next block, which that block frees when it has loaded it."""

    def body(x, o, slots, full, empty):
        me = lax.axis_index("c")
        value = plgpu.load(x.at[me], layout=layout)
        for i in range(rounds):
            if i >= 2 and free:
                plgpu.barrier_wait(empty.at[i % 2])
            place = slots.at[i % 2, 8:72]
            to = plgpu.rem(me + 1, blocks)
            plgpu.async_store_smem(value, place, full.at[i % 2], cluster_idx=to, cluster_dim="c")
            if wait:
                plgpu.barrier_wait(full.at[i % 2])
            value = plgpu.load(place, layout=layout)
            if i + 2 < rounds and free:
                plgpu.barrier_arrive(empty.at[i % 2])
        o[me] = value

    x = given(blocks, 64, 64, dtype=dtype)
    scratch = [
        plgpu.SMEM((2, 80, 64), dtype, transforms=transforms),
        plgpu.Barrier(num_barriers=2, num_arrivals=arrivals),
        plgpu.ClusterBarrier(collective_axes="c", num_barriers=2),
    ]
    return planned(body, x.shape, x, scratch, cluster=(blocks,), arch=arch), x


CASES = [
    (2, 1, F, (), WGMMA),
    (4, 5, F, (), WGMMA),
    (2, 4, BF, TILE, WGMMA),
    (2, 2, np.float16, (), WGMMA),
    (2, 2, np.int32, (), None),
    (2, 2, BF, (), None),
]


@pytest.mark.parametrize(("blocks", "rounds", "dtype", "transforms", "layout"), CASES, ids=str)
def test_handed_on(blocks, rounds, dtype, transforms, layout):
    options = dict(blocks=blocks, rounds=rounds, dtype=dtype, transforms=transforms, layout=layout)
    plan, x = handed_on(**options)
    for params in PARAMS:
        (got,) = simulate(plan, [x], SimulatorParams(**params))
        np.testing.assert_array_equal(got, np.roll(x, rounds, axis=0))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize(("blocks", "rounds", "dtype", "transforms", "layout"), CASES, ids=str)
def test_machine_code(compiled, arch, blocks, rounds, dtype, transforms, layout):
    """One instruction for each of a thread's neighbouring elements, up to 16 bytes; waits in the cluster's scope."""
    options = dict(blocks=blocks, rounds=rounds, dtype=dtype, transforms=transforms, layout=layout)
    plan, _ = handed_on(**options, arch=arch)
    report = compiled(plan)
    assert report.complaints() == []
    text = emit(plan)
    nbytes = 64 * 64 // 128 * np.dtype(dtype).itemsize
    together = 2 * np.dtype(dtype).itemsize
    assert text.count(f"store_async_{together // 4}(to") == rounds * nbytes // together
    assert report.mnemonics["STAS"] == rounds * nbytes // together
    assert text.count("mbarrier_wait_cluster(smem") >= rounds
    assert text.count(f"mbarrier_expect_cluster(bar, {64 * 64 * np.dtype(dtype).itemsize}, 1)") == rounds


def test_two_axes():
    """Along one of two axes; the index is known when it is traced; a role of two warpgroups each stores half."""

    def body(x, o, mine, full):
        a, b, wg = lax.axis_index("a"), lax.axis_index("b"), lax.axis_index("wg")
        rows = plgpu.ds(64 * wg, 64)
        for other in range(2):

            @plgpu.when(b == 1 - other)
            def _(other=other):
                value = plgpu.load(x.at[a, b, rows], layout=WGMMA)
                plgpu.async_store_smem(value, mine.at[rows], full, cluster_idx=other, cluster_dim="b")

        plgpu.barrier_wait(full)
        o[a, b, rows] = plgpu.load(mine.at[rows], layout=WGMMA)

    x = given(2, 2, 128, 32)
    scratch = [plgpu.SMEM((128, 32), F), plgpu.Barrier(num_arrivals=2)]
    options = dict(cluster=(2, 2), names=("a", "b"), num_threads=2, thread_name="wg")
    plan = planned(body, x.shape, x, scratch, **options)
    for params in PARAMS[:5]:
        (got,) = simulate(plan, [x], SimulatorParams(**params))
        np.testing.assert_array_equal(got, x[:, ::-1])


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize(
    ("options", "errors"),
    [
        (dict(wait=False), (Race, UninitializedRead)),
        (dict(rounds=4, free=False), (Race, BarrierMisuse)),
        (dict(arrivals=2), Deadlock),
    ],
)
def test_order(options, errors, params):
    """Loaded before it has landed; stored before the other block has loaded what was there; one arrival too few."""
    plan, x = handed_on(**options)
    with pytest.raises(errors) as found:
        simulate(plan, [x], SimulatorParams(**params))
    if isinstance(found.value, Race):
        assert "async_store_smem" in str(found.value) and found.value.place.startswith("smem slots")


def copied_out(*, fence, wait=True):
    """What was stored is copied on by TMA."""

    def body(x, o, tile, full):
        me = lax.axis_index("c")
        value = plgpu.load(x.at[me], layout=WGMMA)
        plgpu.async_store_smem(value, tile, full, cluster_idx=1 - me, cluster_dim="c")
        if wait:
            plgpu.barrier_wait(full)
        if fence:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, o.at[me])
        plgpu.wait_smem_to_gmem(0)

    x = given(2, 64, 64, dtype=BF)
    return planned(body, x.shape, x, [plgpu.SMEM((64, 64), BF, transforms=TILE), plgpu.Barrier()]), x


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_read_by_tma(params):
    plan, x = copied_out(fence=True)
    (got,) = simulate(plan, [x], SimulatorParams(**params))
    np.testing.assert_array_equal(got, x[::-1])
    plan, x = copied_out(fence=False)
    with pytest.raises(Race, match=r"copy_smem_to_gmem reads .*async_store_smem") as found:
        simulate(plan, [x], SimulatorParams(**params))
    assert found.value.kind == "missing commit_smem" and "commit_smem() by whoever waits" in found.value.remedy
    plan, x = copied_out(fence=True, wait=False)
    with pytest.raises((Race, UninitializedRead, Leak)):
        simulate(plan, [x], SimulatorParams(**params))


@pytest.mark.parametrize("params", PARAMS[:4], ids=str)
def test_nobody_waits(params):
    def body(x, o, tile, full):
        me = lax.axis_index("c")
        plgpu.async_store_smem(plgpu.load(x.at[me], layout=WGMMA), tile, full, cluster_idx=1 - me, cluster_dim="c")
        o[me] = plgpu.load(x.at[me], layout=WGMMA)

    x = given(2, 64, 64)
    plan = planned(body, x.shape, x, [plgpu.SMEM((64, 64), F), plgpu.Barrier()])
    with pytest.raises(Leak, match="nobody has waited"):
        simulate(plan, [x], SimulatorParams(**params))


@pytest.mark.parametrize("dtype", [F, BF])
def test_rows_of_threads(dtype):
    """An array with a row in each thread keeps its layout: 16 bytes at once."""

    def body(x, o, mine, full):
        me, layout = lax.axis_index("c"), plgpu.Layout.TCGEN05_TMEM_NATIVE
        value = plgpu.load(x.at[me], layout=layout)
        plgpu.async_store_smem(value, mine, full, cluster_idx=1 - me, cluster_dim="c")
        plgpu.barrier_wait(full)
        o[me] = plgpu.load(mine, layout=layout)

    x = given(2, 128, 32, dtype=dtype)
    plan = planned(body, x.shape, x, [plgpu.SMEM((128, 32), dtype), plgpu.Barrier()], arch="sm_100a")
    (got,) = simulate(plan, [x])
    np.testing.assert_array_equal(got, x[::-1])
    assert emit(plan).count("store_async_4(to") == 32 * np.dtype(dtype).itemsize // 16


@pytest.mark.parametrize("dtype", [F, BF])
def test_one_value(dtype):
    """Repeated: it is spread over the threads first."""

    def body(x, o, mine, full):
        me = lax.axis_index("c")
        plgpu.async_store_smem(jnp.full((64, 32), x[me], dtype), mine, full, cluster_idx=1 - me, cluster_dim="c")
        plgpu.barrier_wait(full)
        o[me] = plgpu.load(mine, layout=WGMMA)

    x = given(2, dtype=dtype)
    plan = planned(body, (2, 64, 32), x, [plgpu.SMEM((64, 32), dtype), plgpu.Barrier()])
    (got,) = simulate(plan, [x])
    np.testing.assert_array_equal(got, np.broadcast_to(x[::-1, None, None], got.shape))
    assert "store_async_" in emit(plan)
