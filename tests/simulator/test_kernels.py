"""Kernels traced by the front end, planned, and run in the simulator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import BarrierMisuse, Deadlock, Leak, MosaicGpuError, OutOfBounds, Race, UninitializedRead
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

BF16 = ml_dtypes.bfloat16


def run(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a", uninitialized: Any = "nan") -> list[np.ndarray]:
    program = kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
    return simulate(build_plan(program, arch), arrays, uninitialized=uninitialized)


def out(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def randoms(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tiled(dtype: Any, rows: int = 8, swizzle: int = 128) -> tuple[Any, ...]:
    columns = swizzle // np.dtype(dtype).itemsize
    return plgpu.TilingTransform((rows, columns)), plgpu.SwizzleTransform(swizzle)


def line_of(function: Callable[..., Any], mark: str) -> int:
    """Line of the source of `function` (or of this file) that carries the comment `# mark`."""
    with open(__file__) as f:
        lines = [i for i, text in enumerate(f, 1) if re.search(rf"# {mark}\b", text)]
    start = function.__code__.co_firstlineno
    return min(i for i in lines if i >= start)


def assert_at(error: MosaicGpuError, function: Callable[..., Any], mark: str) -> None:
    assert error.line is not None and error.line.file == __file__
    assert error.line.number == line_of(function, mark), str(error)


# ---- what works -----------------------------------------------------------------------------------------------------
def test_copy_and_scale():
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
    (y,) = run(kernel, x)
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_array_equal(x, before)


def test_softmax_through_registers():
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
    (y,) = run(kernel, x)
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
def test_matmul(b_transposed):
    kernel = matmul_kernel(256, 256, 512, jnp.bfloat16, b_transposed=b_transposed)
    x, y = randoms(256, 512, dtype=BF16), randoms(512, 256, dtype=BF16, seed=1)
    (z,) = run(kernel, x, np.ascontiguousarray(y.T) if b_transposed else y)
    np.testing.assert_allclose(z, x.astype(np.float32) @ y.astype(np.float32), rtol=1e-4, atol=1e-3)


def test_matmul_fp8():
    kernel = matmul_kernel(128, 128, 512, jnp.float8_e4m3fn, b_transposed=True, tile_k=128)
    x, y = randoms(128, 512, dtype=ml_dtypes.float8_e4m3fn), randoms(128, 512, dtype=ml_dtypes.float8_e4m3fn, seed=1)
    (z,) = run(kernel, x, y)
    np.testing.assert_allclose(z, x.astype(np.float32) @ y.astype(np.float32).T, rtol=1e-4, atol=1e-3)


def test_product_of_registers_and_of_a_transposed_tile():
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
    (o,) = run(kernel, p, v)
    p32, v32 = p.astype(np.float32), v.astype(np.float32)
    np.testing.assert_allclose(o, p32 @ v32[0] * 0.5 + p32 @ v32[1], rtol=1e-4, atol=1e-3)


def test_named_barrier_hands_shared_memory_over():
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
    np.testing.assert_array_equal(run(kernel, x)[0], x + 1)


@pytest.mark.parametrize("stages", [1, 2])
def test_cluster_multicast(stages):
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
    (y,) = run(kernel, x)
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


def test_tcgen05():
    x, y = randoms(128, 128, dtype=BF16), randoms(128, 128, dtype=BF16, seed=1)
    (z,) = run(tcgen05_kernel(), x, y, arch="sm_100a")
    np.testing.assert_allclose(z, x.astype(np.float32) @ y.astype(np.float32), rtol=1e-4, atol=1e-3)


def test_tmem_is_read_before_the_mma():
    x = randoms(128, 128, dtype=BF16)
    with pytest.raises(UninitializedRead, match="tensor memory") as e:
        run(tcgen05_kernel(wait_for_mma=False), x, x, arch="sm_100a")
    assert_at(e.value, tcgen05_kernel, "early")


def test_warps_run_side_by_side():
    """One warp loads, another waits for it and releases the warpgroup."""

    @plgpu.kernel(
        out_type=out(2, 64, 64),
        scratch_types=dict(s=plgpu.SMEM((64, 64), jnp.float32), full=plgpu.Barrier(), ready=plgpu.Barrier()),
    )
    def kernel(x, y, *, s, full, ready):
        def step(i, _):
            def warps(warp):
                @plgpu.when(warp == 0)
                def load():
                    plgpu.copy_gmem_to_smem(x.at[i], s, full)

                @plgpu.when(warp == 1)
                def pass_on():
                    plgpu.barrier_wait(full)
                    plgpu.barrier_arrive(ready)

            plgpu.warp_map(warps)
            plgpu.barrier_wait(ready)
            y[i] = plgpu.load(s, layout=plgpu.Layout.WGMMA)

        jax.lax.fori_loop(0, 2, step, None)

    x = randoms(2, 64, 64)
    np.testing.assert_array_equal(run(kernel, x)[0], x)


def test_empty_grid_leaves_outputs_poisoned():
    @plgpu.kernel(out_type=[out(4), out(4, dtype=jnp.int32)], grid=(0,), grid_names=("g",))
    def kernel(x, y, z):
        y[0] = x[0]

    y, z = run(kernel, randoms(4))
    assert np.isnan(y).all() and (z.view(np.uint8) == 0xAB).all()


def test_runs_are_alike():
    x, y = randoms(128, 256, dtype=BF16), randoms(256, 128, dtype=BF16)
    kernel = matmul_kernel(128, 128, 256, jnp.bfloat16)
    np.testing.assert_array_equal(run(kernel, x, y)[0], run(kernel, x, y)[0])


# ---- what does not --------------------------------------------------------------------------------------------------
def pipeline(*, arrive: bool = True, wait_empty: bool = True, arrivals: int = 1, wait_full: bool = True):
    """Producer and consumer over one slot, with parts left out."""

    @plgpu.kernel(
        out_type=out(4, 64, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            s=plgpu.SMEM((64, 64), jnp.float32),
            full=plgpu.Barrier(num_arrivals=arrivals),
            empty=plgpu.Barrier(),
        ),
    )
    def kernel(x, y, *, s, full, empty):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def produce():
            for i in range(4):
                plgpu.copy_gmem_to_smem(x.at[i], s, full)  # copy
                if wait_empty and i < 3:
                    plgpu.barrier_wait(empty)  # wait for empty

        @plgpu.when(wg == 1)
        def consume():
            for i in range(4):
                if wait_full:
                    plgpu.barrier_wait(full)  # wait for full
                y[i] = plgpu.load(s, layout=plgpu.Layout.WGMMA)  # read
                if arrive:
                    plgpu.barrier_arrive(empty)

    return kernel


def test_pipeline_of_one_slot():
    x = randoms(4, 64, 64)
    np.testing.assert_array_equal(run(pipeline(), x)[0], x)


def test_deadlock_names_everybody():
    """The consumer forgets to release the slot."""
    with pytest.raises(Deadlock) as e:
        run(pipeline(arrive=False), randoms(4, 64, 64))
    text = str(e.value)
    assert_at(e.value, pipeline, "wait for empty")
    assert "2 unfinished threads" in text
    producer, consumer = text.split("\n- ")[1:]
    assert "warpgroup 0" in producer and f":{line_of(pipeline, 'wait for empty')} " in producer
    assert re.search(r"waits for phase 0 of barrier \(scratch 0, %\d+\)\[0\].*missing: 1 arrival of 1", producer)
    assert "arrived: none" in producer
    assert "warpgroup 1" in consumer and f":{line_of(pipeline, 'wait for full')} " in consumer
    assert re.search(r"waits for phase 1 of barrier \(scratch 1, %\d+\)\[0\].*missing: 1 arrival of 1", consumer)


def test_deadlock_tells_what_has_arrived():
    """The barrier wants two arrivals and only the copy arrives."""
    with pytest.raises(Deadlock) as e:
        run(pipeline(arrivals=2), randoms(4, 64, 64))
    assert re.search(
        r"missing: 1 arrival of 2\n.*arrived: .*warpgroup 0 \(copy of 16384 bytes\) at .*:\d+", str(e.value)
    )
    assert str(line_of(pipeline, "copy")) in str(e.value)


def test_deadlock_report_is_the_same_every_time():
    texts = set()
    kernel = pipeline(arrive=False)
    for _ in range(3):
        with pytest.raises(Deadlock) as e:
            run(kernel, randoms(4, 64, 64))
        texts.add(str(e.value))
    assert len(texts) == 1


def test_producer_does_not_wait():
    """It announces the second tile while the first is still on its way."""
    with pytest.raises(BarrierMisuse, match="too many arrivals.*still waits for .* bytes") as e:
        run(pipeline(wait_empty=False), randoms(4, 64, 64))
    assert_at(e.value, pipeline, "copy")


def test_nobody_waits_for_the_copy():
    with pytest.raises((UninitializedRead, Race)) as e:
        run(pipeline(wait_full=False), randoms(4, 64, 64))
    assert_at(e.value, pipeline, "read")


def test_unwritten_shared_memory():
    @plgpu.kernel(out_type=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(y, s):
        y[...] = plgpu.load(s, layout=plgpu.Layout.WGMMA)  # nothing there

    with pytest.raises(UninitializedRead, match="4096 of 4096") as e:
        run(kernel)
    assert_at(e.value, test_unwritten_shared_memory, "nothing there")
    assert (run(kernel, uninitialized="zero")[0] == 0).all()


def test_unwritten_output():
    @plgpu.kernel(out_type=out(64, 64))
    def kernel(x, y):
        y[...] = plgpu.load(y, layout=plgpu.Layout.WGMMA) + plgpu.load(x, layout=plgpu.Layout.WGMMA)

    with pytest.raises(UninitializedRead, match="output 0 is read before it is written"):
        run(kernel, randoms(64, 64))


def test_lapped_barrier():
    @plgpu.kernel(num_threads=2, thread_name="wg", out_type=out(4), scratch_types=[plgpu.Barrier(num_arrivals=3)])
    def kernel(x, y, b):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def first():
            for _ in range(2):
                plgpu.barrier_arrive(b)

        @plgpu.when(wg == 1)
        def second():
            for _ in range(4):
                plgpu.barrier_arrive(b)
            plgpu.barrier_wait(b)  # lapped

    with pytest.raises(BarrierMisuse, match="waits for phase 0, but 2 phases have completed: it was lapped") as e:
        run(kernel, randoms(4))
    assert_at(e.value, test_lapped_barrier, "lapped")


def test_index_outside_at_run_time():
    @plgpu.kernel(out_type=out(4, 64, 64), scratch_types=[plgpu.SMEM((2, 64, 64), jnp.float32)])
    def kernel(x, y, s):
        def step(i, _):
            s[i] = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA)  # outside

        jax.lax.fori_loop(0, 4, step, None)

    with pytest.raises(OutOfBounds, match="index 2 along axis 0") as e:
        run(kernel, randoms(4, 64, 64))
    assert_at(e.value, test_index_outside_at_run_time, "outside")


def test_store_in_flight_at_the_end():
    @plgpu.kernel(out_type=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(x, y, s):
        s[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s, y)  # not waited for

    with pytest.raises(Leak, match="wait_smem_to_gmem") as e:
        run(kernel, randoms(64, 64))
    assert_at(e.value, test_store_in_flight_at_the_end, "not waited for")


def test_copy_in_flight_at_the_end():
    @plgpu.kernel(out_type=out(4), scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()])
    def kernel(x, y, s, b):
        plgpu.copy_gmem_to_smem(x, s, b)  # not waited for

    with pytest.raises(Leak, match="nobody has waited") as e:
        run(kernel, randoms(64, 64))
    assert_at(e.value, test_copy_in_flight_at_the_end, "not waited for")


def test_named_barrier_deadlock():
    @plgpu.kernel(
        num_threads=2, thread_name="wg", out_type=out(4), scratch_types=[plgpu.NamedBarrier(num_warpgroups=2)]
    )
    def kernel(x, y, n):
        @plgpu.when(jax.lax.axis_index("wg") == 1)
        def one():
            plgpu.named_barrier_sync(n)

    with pytest.raises(Deadlock, match="waits at named_barrier .* for 1 of 2 warpgroups; arrived: .*warpgroup 1"):
        run(kernel, randoms(4))


def test_wrong_arguments():
    @plgpu.kernel(out_type=out(4))
    def kernel(x, y):
        y[0] = x[0]

    program = kernel.program(jax.ShapeDtypeStruct((4,), np.float32))
    plan = build_plan(program, "sm_90a")
    with pytest.raises(ValueError, match="takes 1 arrays, not 0"):
        simulate(plan, [])
    with pytest.raises(ValueError, match="traced for float32"):
        simulate(plan, [np.zeros(4, np.int32)])
    # Extents are run-time values.
    assert simulate(plan, [np.ones(9, np.float32)])[0][0] == 1
