"""Copies of matrices from shared memory to tensor memory: loaded back, multiplied from, added to; and compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import OutOfBounds, Race, UninitializedRead
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams, simulate

BF, E4, F = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32
ORDERS = (dict(), dict(timing="early"), dict(seed=1), dict(shadow="bytes"))


def operand(*shape, dtype=BF, swizzle=128):
    inner = swizzle // np.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(swizzle)))


def program_of(body, arrays, out, scratch, **options):
    kernel = plgpu.kernel(body, out, scratch_types=scratch, **options)
    return kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))


def tensor_memory(shape, dtype, **options):
    return plgpu.TMEM(shape, dtype, packed=np.dtype(dtype).itemsize < 4, **options)


def bits(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype) if dtype is not np.int8 else rng.integers(-128, 128, shape, np.int8)


def copying(x, dtype, swizzle, *, wait=True):
    """Two slots of shared memory, the second one's columns 64 to 127, to columns 8 to 71 of the second slot of tensor memory."""
    some = plgpu.ds(64, 64)

    def body(x, o, tile, t, full, done):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x.at[i], tile.at[i], full.at[i])
            plgpu.barrier_wait(full.at[i])
            plgpu.async_copy_smem_to_tmem(tile.at[i, :, some], t.at[i, :, plgpu.ds(8, 64)])
            plgpu.tcgen05_commit_arrive(done.at[i])
            if wait:
                plgpu.barrier_wait(done.at[i])
            o[i] = plgpu.async_load_tmem(t.at[i, :, plgpu.ds(8, 64)])
            plgpu.wait_load_tmem()
            if not wait:
                plgpu.barrier_wait(done.at[i])

    scratch = [
        operand(2, 128, 128, dtype=dtype, swizzle=swizzle),
        tensor_memory((2, 128, 72), dtype),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
    ]
    return program_of(body, (x,), jax.ShapeDtypeStruct((2, 128, 64), dtype), scratch)


@pytest.mark.parametrize("dtype", [F, BF, np.int32], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_there_and_back(compiled, dtype, swizzle):
    x = (np.random.default_rng(0).standard_normal((2, 128, 128)) * 100).astype(dtype)
    program = copying(x, dtype, swizzle)
    plan = build_plan(program, "sm_100a")
    for params in ORDERS:
        (got,) = simulate(plan, (x,), SimulatorParams(**params))
        np.testing.assert_array_equal(got, x[:, :, 64:])
    report = compiled(plan)
    assert report.complaints() == []
    assert report.mnemonics["UTCCP"] == 2 * 64 * np.dtype(dtype).itemsize // 32


def multiplying(arrays, acc_type, *, pair=False, from_tmem=True, start=True, wait=True, refill=False):
    """acc = c + a @ b, c and a copied to tensor memory first (start, from_tmem).  refill: a is copied again behind the product,
    after a commit (wait) or not."""
    a, b, _ = arrays
    k, n, share = a.shape[1], b.shape[0], 2 if pair else 1
    axis = dict(collective_axis="pair") if pair else {}
    split = dict(collective_axes="pair", leader_tracked=plgpu.CopyPartition.PARTITIONED(0)) if pair else {}

    def body(a, b, c, o, a_s, b_s, c_s, acc, a_t, full, free, done):
        me = lax.axis_index("pair") if pair else 0

        def load():
            for source, target in ((a, a_s), (b, b_s), (c, c_s)):
                plgpu.copy_gmem_to_smem(source, target, full, **split)

        def multiply():
            plgpu.barrier_wait(full)
            if start:
                plgpu.async_copy_smem_to_tmem(c_s, acc, **axis)
            if from_tmem:
                plgpu.async_copy_smem_to_tmem(a_s, a_t, **axis)
            plgpu.tcgen05_mma(acc, a_t if from_tmem else a_s, b_s.transpose((1, 0)), accumulate=True, **axis)
            if refill:
                if wait:
                    plgpu.tcgen05_commit_arrive(free)
                    plgpu.barrier_wait(free)
                plgpu.async_copy_smem_to_tmem(a_s, a_t, **axis)
            plgpu.tcgen05_commit_arrive(done, **axis)

        @plgpu.warp_map
        def _(warp):
            plgpu.when(warp == 0)(load)
            plgpu.when((warp == 1) & (me == 0))(multiply)

        plgpu.barrier_wait(done)
        o[plgpu.ds(me * 128, 128)] = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()

    scratch = [
        operand(128, k, dtype=a.dtype),
        operand(n // share, k, dtype=b.dtype),
        operand(128, n, dtype=acc_type),
        plgpu.TMEM((128, n), acc_type, collective=pair),
        tensor_memory((128, k), a.dtype, collective=pair),
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(orders_tensor_core=True),
        plgpu.Barrier(orders_tensor_core=True),
    ]
    cluster = dict(cluster=(2,), cluster_names=("pair",)) if pair else {}
    return program_of(body, arrays, jax.ShapeDtypeStruct((128 * share, n), acc_type), scratch, **cluster)


def operands(dtype, acc_type, m, n=64, k=128):
    rng = np.random.default_rng(1)
    a, b = bits(rng, (m, k), dtype), bits(rng, (n, k), dtype)
    c = rng.integers(-1000, 1000, (m, n)).astype(acc_type)
    return (a, b, c), a.astype(np.float64) @ b.astype(np.float64).T + c


@pytest.mark.parametrize("dtype, acc_type", [(BF, F), (E4, F), (np.int8, np.int32)], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("m", [128, 256])
def test_products_of_what_was_copied(compiled, dtype, acc_type, m):
    """The product that its thread issues next reads it, as operand A and as the accumulator, without a wait."""
    arrays, want = operands(dtype, acc_type, m)
    plan = build_plan(multiplying(arrays, acc_type, pair=m == 256, refill=True), "sm_100a")
    for params in ORDERS:
        (got,) = simulate(plan, arrays, SimulatorParams(**params))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    assert compiled(plan).complaints() == []
    assert f"tcgen05_copy_128x256b{'<2>' if m == 256 else ''}(" in emit(plan)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(
    ("options", "errors", "message"),
    [
        (dict(refill=True, wait=False), Race, "async_copy_smem_to_tmem.*tcgen05_mma .operand A."),
        (dict(start=False), UninitializedRead, "accumulate=True"),
    ],
)
def test_mistakes(options, errors, message, pair):
    arrays, _ = operands(BF, F, 256 if pair else 128)
    plan = build_plan(multiplying(arrays, F, pair=pair, **options), "sm_100a")
    for params in ORDERS:
        with pytest.raises(errors, match=message):
            simulate(plan, arrays, SimulatorParams(**params))


def test_loaded_before_the_copy_is_done():
    x = np.zeros((2, 128, 128), F)
    for params in ORDERS:
        with pytest.raises((Race, UninitializedRead)):
            simulate(build_plan(copying(x, F, 128, wait=False), "sm_100a"), (x,), SimulatorParams(**params))


def test_beyond_the_buffer():
    def body(x, i, o, tile, t, full, done):
        plgpu.copy_gmem_to_smem(x, tile.at[0], full)
        plgpu.barrier_wait(full)
        plgpu.async_copy_smem_to_tmem(tile.at[i[0]], t)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(t)
        plgpu.wait_load_tmem()

    x, i = np.zeros((128, 32), F), np.array([1], np.int32)
    scratch = [operand(1, 128, 32, dtype=F), plgpu.TMEM((128, 32), F), plgpu.Barrier()]
    scratch += [plgpu.Barrier(orders_tensor_core=True)]
    plan = build_plan(program_of(body, (x, i), jax.ShapeDtypeStruct(x.shape, jnp.float32), scratch), "sm_100a")
    with pytest.raises(OutOfBounds):
        simulate(plan, (x, i))
