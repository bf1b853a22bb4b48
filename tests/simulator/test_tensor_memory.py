"""Tensor memory: products, commits, loads, and the fences that order them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import BarrierMisuse, Leak, OutOfBounds, Race, UninitializedRead
from tests.support import out, randoms, tiled

BF16 = ml_dtypes.bfloat16


def blackwell(
    *,
    commit="after",
    orders=True,
    waits=True,
    wait_load=True,
    frees=True,
    frees_order=True,
    commit_warp=0,
    wide=False,
):
    """Two tiles through one accumulator: warp 0 multiplies, the other warpgroup carries the result out."""

    @plgpu.kernel(
        out_type=out(2, 128, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            a=plgpu.SMEM((128, 64), jnp.bfloat16, transforms=tiled(BF16)),
            b=plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(BF16)),
            acc=plgpu.TMEM((128, 64), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2),
            done=plgpu.Barrier(orders_tensor_core=orders),
            free=plgpu.Barrier(orders_tensor_core=frees_order),
            slot=plgpu.Barrier(),
        ),
    )
    def kernel(x, y, z, *, a, b, acc, full, done, free, slot):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def multiply():
            def warps(warp):
                @plgpu.when(warp == 0)
                def mma():
                    for i in range(2):
                        if i:
                            plgpu.barrier_wait(slot)
                        plgpu.copy_gmem_to_smem(x.at[i], a, full)  # refill
                        plgpu.copy_gmem_to_smem(y.at[i], b, full)
                        plgpu.barrier_wait(full)
                        if i and frees:
                            plgpu.barrier_wait(free)
                        if commit == "before":
                            plgpu.tcgen05_commit_arrive(done)
                        plgpu.tcgen05_mma(acc, a, b, accumulate=False)  # mma
                        if wide:
                            plgpu.tcgen05_mma(acc.at[:, plgpu.ds(0, 32)], a, b.at[:, plgpu.ds(0, 32)], accumulate=False)
                        if commit == "after" and commit_warp == 0:
                            plgpu.tcgen05_commit_arrive(done)
                        if not i:
                            if commit == "no slot":
                                plgpu.barrier_arrive(slot)
                            else:
                                plgpu.tcgen05_commit_arrive(slot)
                        if commit == "no slot":
                            plgpu.tcgen05_commit_arrive(done)

                if commit_warp:

                    @plgpu.when(warp == commit_warp)
                    def other():
                        for _ in range(2):
                            plgpu.tcgen05_commit_arrive(done)

            plgpu.warp_map(warps)

        @plgpu.when(wg == 1)
        def carry():
            for i in range(2):
                if waits:
                    plgpu.barrier_wait(done)
                v = plgpu.async_load_tmem(acc)  # load
                if wait_load:
                    plgpu.wait_load_tmem()
                if not i:
                    plgpu.barrier_arrive(free)
                if not wait_load:
                    plgpu.wait_load_tmem()
                z[i] = v

    return kernel


def tmem_arrays():
    return randoms(2, 128, 64, dtype=BF16), randoms(2, 64, 64, dtype=BF16, seed=1)


def test_blackwell(clean):
    x, y = tmem_arrays()
    (z,) = clean(blackwell(), x, y, arch="sm_100a")
    np.testing.assert_allclose(z, x.astype(np.float32) @ y.astype(np.float32), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "options, kinds, rule",
    [
        (dict(waits=False), ("read/write", "write/write", "buffer in flight"), "F4"),
        (dict(orders=False), ("missing tcgen05 fence",), "F4, F9"),
        (dict(commit="before"), ("read/write", "buffer in flight"), "F12"),
        (dict(commit_warp=1), ("read/write", "buffer in flight"), "F12"),
        (dict(wait_load=False), ("buffer in flight",), "F5, F6"),
        (dict(frees=False), ("buffer in flight",), "F6"),
        (dict(frees_order=False), ("missing tcgen05 fence",), "F6, F9"),
        (dict(commit="no slot"), ("buffer in flight",), "F11"),
        (dict(wide=True), ("write/write",), "F2, F3"),
    ],
    ids=str,
)
def test_tensor_memory(options, kinds, rule, found):
    e = found(blackwell(**options), *tmem_arrays(), arch="sm_100a")
    if isinstance(e, Race):
        assert e.kind in kinds, (rule, str(e))
    else:  # in the fixed order the load comes before anything was written
        assert isinstance(e, (UninitializedRead, BarrierMisuse)) and "F12" in rule or rule == "F4", (rule, str(e))


def test_tensor_memory_is_freed_after_its_loads(found, assert_at):
    """F20"""

    @plgpu.kernel(
        out_type=out(128, 64),
        scratch_types=dict(
            a=plgpu.SMEM((128, 64), jnp.bfloat16, transforms=tiled(BF16)),
            b=plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(BF16)),
            acc=plgpu.TMEM((128, 64), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    def kernel(x, y, z, *, a, b, acc, full, done):
        plgpu.copy_gmem_to_smem(x, a, full)
        plgpu.copy_gmem_to_smem(y, b, full)
        plgpu.barrier_wait(full)
        plgpu.tcgen05_mma(acc, a, b, done, accumulate=False)
        plgpu.barrier_wait(done)
        z[...] = plgpu.async_load_tmem(acc)  # load

    x, y = tmem_arrays()
    e = found(kernel, x[0], y[0], arch="sm_100a")
    assert isinstance(e, Leak) and "wait_load_tmem" in str(e)
    assert_at(e, test_tensor_memory_is_freed_after_its_loads, "load")


@pytest.mark.parametrize("committed", [False, True])
def test_tensor_memory_is_freed_after_its_products(found, assert_at, committed):
    """F20: the last product writes its accumulator, and reads its operands, when the block is gone."""

    @plgpu.kernel(
        out_type=out(128, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            a=plgpu.SMEM((128, 64), jnp.bfloat16, transforms=tiled(BF16)),
            b=plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(BF16)),
            acc=plgpu.TMEM((2, 128, 64), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2),
            done=plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        ),
    )
    def kernel(x, y, z, *, a, b, acc, full, done):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def multiply():
            def warps(warp):
                @plgpu.when(warp == 1)
                def mma():
                    plgpu.copy_gmem_to_smem(x, a, full)
                    plgpu.copy_gmem_to_smem(y, b, full)
                    plgpu.barrier_wait(full)
                    plgpu.tcgen05_mma(acc.at[0], a, b, done.at[0], accumulate=False)
                    last = done.at[1] if committed else None
                    plgpu.tcgen05_mma(acc.at[1], a, b, last, accumulate=False)  # the last one

            plgpu.warp_map(warps)

        @plgpu.when(wg == 1)
        def carry():
            plgpu.barrier_wait(done.at[0])
            v = plgpu.async_load_tmem(acc.at[0])
            plgpu.wait_load_tmem()
            z[...] = v

    x, y = tmem_arrays()
    e = found(kernel, x[0], y[0], arch="sm_100a")
    assert isinstance(e, Leak) and "warpgroup 0, warp 1, in flight" in str(e)
    assert_at(e, test_tensor_memory_is_freed_after_its_products, "the last one")


@pytest.mark.parametrize("what", ["product", "load"])
def test_columns_outside_that_are_another_slots(found, assert_at, what):
    @plgpu.kernel(
        out_type=out(128, 64),
        scratch_types=dict(
            a=plgpu.SMEM((128, 64), jnp.bfloat16, transforms=tiled(BF16)),
            b=plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(BF16)),
            acc=plgpu.TMEM((2, 128, 64), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    def kernel(x, y, at, z, *, a, b, acc, full, done):
        plgpu.copy_gmem_to_smem(x, a, full)
        plgpu.copy_gmem_to_smem(y, b, full)
        plgpu.barrier_wait(full)
        outside = acc.at[0, :, plgpu.ds(at[0], 64)]
        plgpu.tcgen05_mma(outside if what == "product" else acc.at[1], a, b, done, accumulate=False)  # product
        plgpu.barrier_wait(done)
        v = plgpu.async_load_tmem(outside if what == "load" else acc.at[1])  # load
        plgpu.wait_load_tmem()
        z[...] = v

    x, y = tmem_arrays()
    e = found(kernel, x[0], y[0], np.array([64], np.int32), arch="sm_100a")
    assert isinstance(e, OutOfBounds) and "index 127 along axis 2" in str(e)
    assert_at(e, test_columns_outside_that_are_another_slots, what)
