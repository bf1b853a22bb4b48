"""Accumulators of a pair of blocks of 64 rows each (M = 128 together): simulated against NumPy, compiled, mistakes found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import Deadlock, LayoutConflict, Race, UninitializedRead, UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams, simulate

F, BF, F16, E4 = np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
FOLDED = plgpu.TMEMLayout.M64_COLLECTIVE_LAYOUT
NATIVE, FRAGMENTS = plgpu.Layout.TCGEN05_M64_COLLECTIVE_NATIVE, plgpu.Layout.TCGEN05_M64_COLLECTIVE
PARAMS = [dict(), dict(timing="early"), dict(shadow="bytes"), *(dict(seed=s) for s in range(1, 5))]


def tiles(dtype):
    return plgpu.TilingTransform((8, 128 // np.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def pair(dtype=BF, acc_type=F, n=128, k=128, layout=None, start=False, slots=2, fence=True, waits=True, told=True):
    """Two products of a pair, one into each accumulator; the second may start from what the blocks have stored there.  Each block
    gives its rows of both, and the largest of each row of the first."""

    def body(x, y, c, o, top, a, b, acc, full, done, stored):
        me, wg = lax.axis_index("pair"), lax.axis_index("wg")

        def issue():
            plgpu.barrier_wait(full)
            plgpu.tcgen05_mma(acc.at[0], a, b.transpose((1, 0)), accumulate=False, collective_axis="pair")
            if start:
                plgpu.barrier_wait(stored)
            plgpu.tcgen05_mma(acc.at[1], a, b.transpose((1, 0)), accumulate=start, collective_axis="pair")
            plgpu.tcgen05_commit_arrive(done, collective_axis="pair" if told else None)

        @plgpu.when(wg == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @plgpu.when(warp == 0)
                def _():
                    halves = [
                        dict(collective_axes="pair", leader_tracked=plgpu.CopyPartition.PARTITIONED(0))
                        for _ in range(2)
                    ]
                    plgpu.copy_gmem_to_smem(x, a, full, **halves[0])
                    plgpu.copy_gmem_to_smem(y, b, full, **halves[1])
                    plgpu.when(me == 0)(issue)

        @plgpu.when(wg == 1)
        def _():
            own = plgpu.ds(me * 64, 64)
            if start:
                plgpu.async_store_tmem(acc.at[1], plgpu.load(c.at[own], layout=layout or NATIVE))
                plgpu.commit_tmem()
                plgpu.barrier_arrive(stored)
            if waits:
                plgpu.barrier_wait(done)
            for slot in range(slots):
                value = plgpu.async_load_tmem(acc.at[slot], layout=layout)
                plgpu.wait_load_tmem()
                o[slot, own] = value
                if slot == 0:
                    top[own] = jnp.max(value, axis=1)

    size = np.dtype(dtype).itemsize
    assert k * size % 128 == 0
    kernel = plgpu.kernel(
        body,
        (jax.ShapeDtypeStruct((2, 128, n), acc_type), jax.ShapeDtypeStruct((128,), acc_type)),
        scratch_types=[
            plgpu.SMEM((64, k), dtype, transforms=tiles(dtype)),
            plgpu.SMEM((n // 2, k), dtype, transforms=tiles(dtype)),
            plgpu.TMEM((2, 64, n), acc_type, layout=FOLDED, collective=True),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=fence),
            plgpu.ClusterBarrier(collective_axes="pair", orders_tensor_core=True),
        ],
        cluster=(2,),
        cluster_names=("pair",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_100a"),
    )
    shapes = ((128, k), dtype), ((n, k), dtype), ((128, n), acc_type)
    return kernel, [jax.ShapeDtypeStruct(s, t) for s, t in shapes]


def arrays(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-4, 5, s.shape).astype(s.dtype) for s in shapes]


def wanted(x, y, c, start):
    product = x.astype(np.float64) @ y.astype(np.float64).T
    return np.stack([product, product + start * c.astype(np.float64)]), product.max(axis=1)


KINDS = [(BF, F), (F16, F16), (np.float32, F), (E4, F), (E4, F16), (np.int8, np.int32)]


@pytest.mark.parametrize("layout", [None, FRAGMENTS], ids=str)
@pytest.mark.parametrize("dtype, acc_type", KINDS, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("n", [32, 128, 224, 256])
def test_products(dtype, acc_type, n, layout):
    """Every kind, the narrowest and the widest, in both layouts, from nothing and from what was stored; rows are reduced."""
    kernel, shapes = pair(dtype, acc_type, n, layout=layout, start=True)
    given = arrays(shapes, n)
    got, top = simulate(build_plan(kernel.program(*shapes), "sm_100a"), given)
    want, largest = wanted(*given, True)
    np.testing.assert_array_equal(got.astype(np.float64), want)  # small integers: exact in float16, too
    np.testing.assert_array_equal(top.astype(np.float64), largest)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_every_schedule(params):
    kernel, shapes = pair(start=True)
    given = arrays(shapes)
    got, _ = simulate(build_plan(kernel.program(*shapes), "sm_100a"), given, SimulatorParams(**params))
    np.testing.assert_array_equal(got, wanted(*given, True)[0])


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(waits=False), "async_load_tmem"),
        (dict(fence=False), "orders_tensor_core"),
    ],
    ids=str,
)
def test_mistakes(options, words):
    kernel, shapes = pair(**options)
    with pytest.raises((Race, UninitializedRead), match=words):
        simulate(build_plan(kernel.program(*shapes), "sm_100a"), arrays(shapes))


def test_the_other_block_is_not_told():
    kernel, shapes = pair(told=False)
    with pytest.raises(Deadlock, match="done"):
        simulate(build_plan(kernel.program(*shapes), "sm_100a"), arrays(shapes))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("layout", [None, FRAGMENTS], ids=str)
def test_machine_code(compiled, arch, layout):
    """Half as many columns as elements of a row, which two transfers of 32 registers move in either layout."""
    kernel, shapes = pair(layout=layout, start=True)
    plan = build_plan(kernel.program(*shapes), arch)
    report = compiled(plan)
    assert report.complaints() == [] and report.stack == 0
    assert plan.tmem_columns == 128 and [b.columns for b in plan.tmem.values()] == [2 * 128 // 2]
    assert [report.mnemonics[name] for name in ("UTCHMMA", "LDTM", "STTM")] == [16, 4, 2]
    assert emit(plan).count("tcgen05_mma_f16_ss<2>(") >= 16


def test_a_layout_of_its_own():
    """What 64 rows of one block give is in another layout."""
    kernel, shapes = pair(layout=plgpu.Layout.WGMMA)
    with pytest.raises((UnsupportedCall, LayoutConflict), match="64 rows in a pair of blocks moves to and from"):
        emit(build_plan(kernel.program(*shapes), "sm_100a"))
