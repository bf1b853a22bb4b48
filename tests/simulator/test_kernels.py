"""Kernels traced by the front end, planned, and run in the simulator."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UninitializedRead
from mosaic_gpu.simulator import UnwrittenOutput, simulate
from tests.support import out, randoms, tiled

BF16 = ml_dtypes.bfloat16


def test_copy_and_scale(run_both):
    @plgpu.kernel(
        out_type=out(200, 256),
        grid=(2, 2),
        grid_names=("m", "n"),
        scratch_types=dict(s=plgpu.SMEM((128, 128), jnp.float32), b=plgpu.Barrier()),
    )
    def kernel(x, y, *, s, b):
        rows = plgpu.ds(jax.lax.axis_index("m") * 128, 128)
        columns = plgpu.ds(jax.lax.axis_index("n") * 128, 128)
        plgpu.copy_gmem_to_smem(x.at[rows, columns], s, b)
        plgpu.barrier_wait(b)
        s[...] = s[...] * 2.0
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s, y.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    x = randoms(200, 256)
    before = x.copy()
    (y,) = run_both(kernel, x)
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_array_equal(x, before)


def test_a_scalar_output(run_both):
    """An array of no dimensions, whose history the simulator keeps like any other's."""

    @plgpu.kernel(out_type=out())
    def kernel(x, y):
        y[...] = x[1] * 2.0

    x = randoms(4)
    (y,) = run_both(kernel, x)
    assert y == 2 * x[1]


def test_softmax_through_registers(run_both):
    """GMEM straight to registers, reductions, and back; rows past the end are clipped."""

    @plgpu.kernel(out_type=out(100, 64), grid=(2,), grid_names=("m",))
    def kernel(x, y):
        rows = plgpu.ds(jax.lax.axis_index("m") * 64, 64)
        v = plgpu.load(x.at[rows], layout=plgpu.Layout.WGMMA)
        top = jnp.max(v, axis=1)
        e = jnp.exp(v - jax.lax.broadcast_in_dim(top, v.shape, (0,)))
        total = jnp.sum(e, axis=1)
        y[rows] = e / jax.lax.broadcast_in_dim(total, v.shape, (0,))

    x = randoms(100, 64)
    (y,) = run_both(kernel, x)
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-6)


def matmul_kernel(m: int, n: int, k: int, dtype: Any, *, b_transposed: bool = False, tile_k: int = 64, stages: int = 3):
    """A producer warpgroup and two consumers of 64 rows each."""
    tile_m, tile_n = 128, 128
    transforms = tiled(dtype)
    b_tile = (tile_n, tile_k) if b_transposed else (tile_k, tile_n)

    @plgpu.kernel(
        out_type=out(m, n),
        grid=(m // tile_m, n // tile_n),
        grid_names=("m", "n"),
        num_threads=3,
        thread_name="wg",
        scratch_types=dict(
            a=plgpu.SMEM((stages, tile_m, tile_k), dtype, transforms=transforms),
            b=plgpu.SMEM((stages, *b_tile), dtype, transforms=transforms),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ),
    )
    def matmul(x, y, z, *, a, b, full, empty):
        i, j, wg = jax.lax.axis_index("m"), jax.lax.axis_index("n"), jax.lax.axis_index("wg")
        rows, columns = plgpu.ds(i * tile_m, tile_m), plgpu.ds(j * tile_n, tile_n)

        @plgpu.when(wg == 2)
        def produce():
            def load(step, _):
                slot = jax.lax.rem(step, stages)
                part = plgpu.ds(step * tile_k, tile_k)

                @plgpu.when(step >= stages)
                def wait():
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(x.at[rows, part], a.at[slot], full.at[slot])
                y_part = y.at[columns, part] if b_transposed else y.at[part, columns]
                plgpu.copy_gmem_to_smem(y_part, b.at[slot], full.at[slot])

            jax.lax.fori_loop(0, k // tile_k, load, None)

        @plgpu.when(wg < 2)
        def consume():
            def scope(acc):
                def step(step, _):
                    slot = jax.lax.rem(step, stages)
                    plgpu.barrier_wait(full.at[slot])
                    b_slot = b.at[slot]
                    b_slot = b_slot.transpose((1, 0)) if b_transposed else b_slot
                    plgpu.wgmma(acc, a.at[slot, plgpu.ds(wg * 64, 64)], b_slot)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                jax.lax.fori_loop(0, k // tile_k, step, None)
                return acc[...]

            z[plgpu.ds(i * tile_m + wg * 64, 64), columns] = plgpu.run_scoped(scope, plgpu.ACC((64, tile_n)))

    return matmul


@pytest.mark.parametrize("b_transposed", [False, True])
def test_matmul(b_transposed, run_both):
    kernel = matmul_kernel(256, 256, 512, jnp.bfloat16, b_transposed=b_transposed)
    x, y = randoms(256, 512, dtype=BF16), randoms(512, 256, dtype=BF16, seed=1)
    (z,) = run_both(kernel, x, np.ascontiguousarray(y.T) if b_transposed else y)
    np.testing.assert_allclose(z, x.astype(np.float32) @ y.astype(np.float32), rtol=1e-4, atol=1e-3)


def test_matmul_fp8(run_both):
    kernel = matmul_kernel(128, 128, 512, jnp.float8_e4m3fn, b_transposed=True, tile_k=128)
    x, y = randoms(128, 512, dtype=ml_dtypes.float8_e4m3fn), randoms(128, 512, dtype=ml_dtypes.float8_e4m3fn, seed=1)
    (z,) = run_both(kernel, x, y)
    np.testing.assert_allclose(z, x.astype(np.float32) @ y.astype(np.float32).T, rtol=1e-4, atol=1e-3)


def test_product_of_registers_and_of_a_transposed_tile(run_both):
    """P from registers times V, as in attention; the accumulator is rescaled between the two products."""

    @plgpu.kernel(
        out_type=out(64, 64),
        scratch_types=dict(v=plgpu.SMEM((2, 64, 64), jnp.float16, transforms=tiled(np.float16)), b=plgpu.Barrier()),
    )
    def kernel(p, v_in, o, *, v, b):
        plgpu.copy_gmem_to_smem(v_in, v, b)
        plgpu.barrier_wait(b)

        def scope(acc):
            tile = plgpu.load(p, layout=plgpu.Layout.WGMMA)
            plgpu.wgmma(acc, tile, v.at[0])
            plgpu.wgmma_wait(0)
            acc[...] = acc[...] * 0.5
            plgpu.wgmma(acc, tile, v.at[1])
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    p, v = randoms(64, 64, dtype=np.float16), randoms(2, 64, 64, dtype=np.float16, seed=1)
    (o,) = run_both(kernel, p, v)
    p32, v32 = p.astype(np.float32), v.astype(np.float32)
    np.testing.assert_allclose(o, p32 @ v32[0] * 0.5 + p32 @ v32[1], rtol=1e-4, atol=1e-3)


def test_named_barrier_hands_shared_memory_over(run_both):
    @plgpu.kernel(
        out_type=out(64, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(s=plgpu.SMEM((64, 64), jnp.float32), n=plgpu.NamedBarrier(num_warpgroups=2)),
    )
    def kernel(x, y, *, s, n):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 1)
        def write():
            s[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA) + 1.0
            plgpu.named_barrier_arrive(n)

        @plgpu.when(wg == 0)
        def read():
            plgpu.named_barrier_sync(n)
            y[...] = plgpu.load(s, layout=plgpu.Layout.WGMMA)

    x = randoms(64, 64)
    np.testing.assert_array_equal(run_both(kernel, x)[0], x + 1)


@pytest.mark.parametrize("stages", [1, 2])
def test_cluster_multicast(stages, run_both):
    """Two blocks share the tile of x: each loads half of it and sends it to both."""

    @plgpu.kernel(
        out_type=out(2, 256, 64),
        grid=(1,),
        grid_names=("g",),
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=dict(
            s=plgpu.SMEM((stages, 64, 64), jnp.float32),
            full=plgpu.Barrier(num_barriers=stages),
            empty=plgpu.ClusterBarrier(collective_axes="c", num_barriers=stages),
        ),
    )
    def kernel(x, y, *, s, full, empty):
        c = jax.lax.axis_index("c")

        def step(i, _):
            slot = jax.lax.rem(i, stages)

            @plgpu.when(i >= stages)
            def wait():
                plgpu.barrier_wait(empty.at[slot])

            rows = plgpu.ds(i * 64, 64)
            plgpu.copy_gmem_to_smem(x.at[rows], s.at[slot], full.at[slot], collective_axes="c")
            plgpu.barrier_wait(full.at[slot])
            v = plgpu.load(s.at[slot], layout=plgpu.Layout.WGMMA)
            y[c, rows] = v * (c + 1).astype(jnp.float32)
            plgpu.barrier_arrive(empty.at[slot])

        jax.lax.fori_loop(0, 4, step, None)

    x = randoms(256, 64)
    (y,) = run_both(kernel, x)
    np.testing.assert_array_equal(y, np.stack([x, 2 * x]))


def tcgen05_kernel(wait_for_mma: bool = True):
    @plgpu.kernel(
        out_type=out(128, 128),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            a=plgpu.SMEM((2, 128, 64), jnp.bfloat16, transforms=tiled(BF16)),
            b=plgpu.SMEM((2, 64, 128), jnp.bfloat16, transforms=tiled(BF16)),
            acc=plgpu.TMEM((128, 128), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    def kernel(x, y, z, *, a, b, acc, full, done):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def produce():
            for i in range(2):
                part = plgpu.ds(i * 64, 64)
                plgpu.copy_gmem_to_smem(x.at[:, part], a.at[i], full.at[i])
                plgpu.copy_gmem_to_smem(y.at[part], b.at[i], full.at[i])
            for i in range(2):
                plgpu.barrier_wait(full.at[i])
                plgpu.tcgen05_mma(acc, a.at[i], b.at[i], accumulate=i > 0)
            plgpu.tcgen05_commit_arrive(done)

        @plgpu.when(wg == 1)
        def finish():
            if wait_for_mma:
                plgpu.barrier_wait(done)
            v = plgpu.async_load_tmem(acc)  # early
            plgpu.wait_load_tmem()
            z[...] = v

    return kernel


def test_tcgen05(run_both):
    x, y = randoms(128, 128, dtype=BF16), randoms(128, 128, dtype=BF16, seed=1)
    (z,) = run_both(tcgen05_kernel(), x, y, arch="sm_100a")
    np.testing.assert_allclose(z, x.astype(np.float32) @ y.astype(np.float32), rtol=1e-4, atol=1e-3)


def test_tmem_is_read_before_the_mma(run, assert_at):
    x = randoms(128, 128, dtype=BF16)
    with pytest.raises(UninitializedRead, match="tensor memory") as e:
        run(tcgen05_kernel(wait_for_mma=False), x, x, arch="sm_100a")
    assert_at(e.value, tcgen05_kernel, "early")


def test_warps_run_side_by_side(run_both):
    """One warp loads, another waits for it and releases the warpgroup."""

    @plgpu.kernel(
        out_type=out(2, 64, 64),
        scratch_types=dict(
            s=plgpu.SMEM((64, 64), jnp.float32), full=plgpu.Barrier(), ready=plgpu.Barrier(), empty=plgpu.Barrier()
        ),
    )
    def kernel(x, y, *, s, full, ready, empty):
        def step(i, _):
            def warps(warp):
                @plgpu.when(warp == 0)
                def load():
                    @plgpu.when(i > 0)
                    def wait():
                        plgpu.barrier_wait(empty)  # the other warps may still read

                    plgpu.copy_gmem_to_smem(x.at[i], s, full)

                @plgpu.when(warp == 1)
                def pass_on():
                    plgpu.barrier_wait(full)
                    plgpu.barrier_arrive(ready)

            plgpu.warp_map(warps)
            plgpu.barrier_wait(ready)
            y[i] = plgpu.load(s, layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(empty)

        jax.lax.fori_loop(0, 2, step, None)

    x = randoms(2, 64, 64)
    np.testing.assert_array_equal(run_both(kernel, x)[0], x)


def test_empty_grid_leaves_outputs_poisoned(run):
    @plgpu.kernel(out_type=[out(4), out(4, dtype=jnp.int32)], grid=(0,), grid_names=("g",))
    def kernel(x, y, z):
        y[0] = x[0]

    with pytest.warns(UnwrittenOutput, match="all elements of output"):
        y, z = run(kernel, randoms(4))
    assert np.isnan(y).all() and (z.view(np.uint8) == 0xAB).all()


def test_without_jax(plan_of, run):
    """A plan travels to a process that has no JAX."""
    kernel = matmul_kernel(128, 128, 256, jnp.bfloat16)
    x, y = randoms(128, 256, dtype=BF16), randoms(256, 128, dtype=BF16)
    code = """if True:
        import pickle, sys
        sys.modules["jax"] = None
        from mosaic_gpu.simulator import simulate
        plan, arrays = pickle.load(sys.stdin.buffer)
        sys.stdout.buffer.write(simulate(plan, arrays)[0].tobytes())
    """
    data = pickle.dumps((plan_of(kernel, x, y), [x, y]))
    done = subprocess.run([sys.executable, "-c", code], input=data, stdout=subprocess.PIPE, check=True)
    assert done.stdout == run(kernel, x, y)[0].tobytes()


def test_is_fast(plan_of):
    x, y = randoms(512, 512, dtype=BF16), randoms(512, 512, dtype=BF16)
    plan = plan_of(matmul_kernel(512, 512, 512, jnp.bfloat16), x, y)
    start = time.process_time()
    simulate(plan, [x, y])
    assert time.process_time() - start < 2


def test_runs_are_alike(run):
    x, y = randoms(128, 256, dtype=BF16), randoms(256, 128, dtype=BF16)
    kernel = matmul_kernel(128, 128, 256, jnp.bfloat16)
    np.testing.assert_array_equal(run(kernel, x, y)[0], run(kernel, x, y)[0])
