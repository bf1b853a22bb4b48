"""`emit_pipeline_warp_specialized`: one warpgroup loads, others compute; in the simulator, and compiled for Hopper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import (
    BarrierMisuse,
    BarrierNeverCompletes,
    Leak,
    Race,
    UninitializedRead,
    UnsupportedCall,
)
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.ops.test_products import without

F, BF16 = jnp.float32, jnp.bfloat16
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(dtype)


def out(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F)


def matmul(
    computing: int,
    *,
    steps: int = 3,
    delay: int = 0,
    manual: bool = False,
    memory: int | None = None,
    arrive: bool = True,
) -> Any:
    """Each compute warpgroup multiplies 64 rows; a ring of `steps` blocks, given back `delay` steps later."""
    rows = 64 * computing

    def kernel(a: Any, b: Any, o: Any) -> None:
        wg = lax.axis_index("wg")
        mine = wg - 1 if memory == 0 else wg
        part = plgpu.ds(mine * 64, 64)

        def body(ids: Any, x: Any, y: Any, *rest: Any) -> Any:
            *consumed, acc = rest
            plgpu.wgmma(acc, x.at[part], y)
            plgpu.wgmma_wait(delay)
            if arrive:
                for barrier in consumed:
                    plgpu.barrier_arrive(barrier)
            return acc

        def context(pipeline: Any) -> None:
            def multiply(acc: Any) -> Any:
                pipeline(acc)
                return acc[...]

            o[part] = plgpu.run_scoped(multiply, plgpu.ACC((64, 128)))

        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(5,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((rows, 64), lambda k: (0, k), transforms=SWIZZLED, delay_release=delay),
                plgpu.BlockSpec((64, 128), lambda k: (k, 0), transforms=SWIZZLED, delay_release=delay),
            ],
            max_concurrent_steps=steps,
            wg_axis="wg",
            num_compute_wgs=computing,
            memory_thread_idx=memory,
            manual_consumed_barriers=manual,
            compute_context=context,
        )(a, b)

    return plgpu.kernel(kernel, out(rows, 128), num_threads=computing + 1, thread_name="wg")


A, B = numbers(192, 320, dtype=BF16), numbers(320, 128, dtype=BF16, seed=1)


@pytest.mark.parametrize(
    ("computing", "options"),
    [
        (1, {}),
        (2, dict(steps=1)),
        (2, dict(steps=2, memory=0)),
        (2, dict(steps=8, memory=2)),
        (2, dict(delay=1)),
        (2, dict(manual=True)),
        (3, dict(steps=2)),
    ],
)
def test_matmul(computing, options, compiled):
    """An accumulator is the carry; nothing spilled, nothing serialised."""
    a = A[: 64 * computing]
    plan = build_plan(matmul(computing, **options).program(a, B), "sm_90a")
    exact = a.astype(np.float32) @ B.astype(np.float32)
    for timing in ("late", "early"):
        np.testing.assert_array_equal(simulate(plan, [a, B], timing=timing)[0], exact)
    np.testing.assert_array_equal(simulate(plan, [a, B], seed=3)[0], exact)
    report = compiled(plan)
    assert report.complaints() == [] and {"HGMMA", "UTMALDG", "USETMAXREG"} <= set(report.mnemonics)


def test_a_block_that_is_not_given_back():
    with pytest.raises(BarrierNeverCompletes, match="barrier consumed.*no line of the kernel arrives on it"):
        build_plan(matmul(2, steps=2, manual=True, arrive=False).program(A[:128], B), "sm_90a")


def test_a_block_that_is_given_back_too_early():
    """Products in flight, and no delay_release."""

    def body(ids: Any, x: Any, y: Any, acc: Any) -> Any:
        plgpu.wgmma(acc, x, y)
        plgpu.wgmma_wait(1)
        return acc

    def kernel(a: Any, b: Any, o: Any) -> None:
        def context(pipeline: Any) -> None:
            def multiply(acc: Any) -> Any:
                pipeline(acc)
                return acc[...]

            o[...] = plgpu.run_scoped(multiply, plgpu.ACC((64, 128)))

        specs = [
            plgpu.BlockSpec((64, 64), lambda k: (0, k), transforms=SWIZZLED),
            plgpu.BlockSpec((64, 128), lambda k: (k, 0), transforms=SWIZZLED),
        ]
        options = dict(grid=(5,), memory_registers=40, wg_axis="wg", num_compute_wgs=1, compute_context=context)
        plgpu.emit_pipeline_warp_specialized(body, in_specs=specs, **options)(a, b)

    plan = build_plan(plgpu.kernel(kernel, out(64, 128), num_threads=2, thread_name="wg").program(A[:64], B), "sm_90a")
    with pytest.raises(Race):
        simulate(plan, [A[:64], B])


def streamed(computing: int, steps: int, shape: tuple[int, int]) -> Any:
    """Outputs of every step, of every row of blocks, and one for all; an input that never changes; an array as the carry."""
    grid = (-(-shape[0] // (32 * computing)), -(-shape[1] // 128))

    def kernel(x: Any, bias: Any, y: Any, sums: Any, total: Any, left: Any) -> None:
        mine = plgpu.ds(lax.axis_index("wg") * 32, 32)

        def body(ids: Any, block: Any, shift: Any, o: Any, row: Any, all_of: Any, carry: Any) -> Any:
            found = block[mine] * 2 + shift[mine]
            o[mine] = found

            @plgpu.when(ids[1] == 0)
            def _() -> None:
                row[mine] = jnp.zeros((32, 128), F)
                plgpu.commit_smem()

            @plgpu.when(ids[0] + ids[1] == 0)
            def _() -> None:
                all_of[mine] = jnp.zeros((32, 128), F)
                plgpu.commit_smem()

            row[mine] += found
            all_of[mine] += found
            return carry + jnp.sum(found)

        def context(pipeline: Any) -> None:
            left[lax.axis_index("wg")] = pipeline(jnp.float32(1))

        tile = (32 * computing, 128)
        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=grid,
            memory_registers=40,
            in_specs=[plgpu.BlockSpec(tile, lambda i, j: (i, j)), plgpu.BlockSpec(tile, lambda i, j: (0, 0))],
            out_specs=[
                plgpu.BlockSpec(tile, lambda i, j: (i, j)),
                plgpu.BlockSpec(tile, lambda i, j: (i, 0)),
                plgpu.BlockSpec(tile, lambda i, j: (0, 0)),
            ],
            max_concurrent_steps=steps,
            wg_axis="wg",
            num_compute_wgs=computing,
            compute_context=context,
        )(x, bias, y, sums, total)

    outs = [out(*shape), out(shape[0], 128), out(32 * computing, 128), out(computing)]
    return plgpu.kernel(kernel, outs, num_threads=computing + 1, thread_name="wg")


@pytest.mark.parametrize("shape", [(192, 384), (150, 260)])
@pytest.mark.parametrize(("computing", "steps"), [(1, 3), (2, 1), (2, 2)])
def test_outputs(computing, steps, shape, compiled):
    x, bias = numbers(*shape), numbers(32 * computing, 128, seed=1)
    plan = build_plan(streamed(computing, steps, shape).program(x, bias), "sm_90a")
    rows, columns = -(-shape[0] // (32 * computing)), -(-shape[1] // 128)
    padded = np.zeros((rows * 32 * computing, columns * 128), np.float32)
    padded[: shape[0], : shape[1]] = x
    tiles = 2 * padded.reshape(rows, 32 * computing, columns, 128) + bias[None, :, None]
    for timing in ("late", "early"):
        y, sums, total, left = simulate(plan, [x, bias], timing=timing)
        np.testing.assert_array_equal(y, tiles.reshape(padded.shape)[: shape[0], : shape[1]])
        np.testing.assert_array_equal(sums, tiles.sum(2).reshape(-1, 128)[: shape[0]])
        np.testing.assert_array_equal(total, tiles.sum((0, 2)))
        np.testing.assert_array_equal(left, 1 + tiles.reshape(rows, computing, 32, -1).sum((0, 2, 3)))
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("op", ["named_barrier_sync", "wait_smem_to_gmem", "barrier_wait", "commit_smem"])
def test_what_it_puts_in_is_needed(op):
    """Each kind of wait, taken out of the plan, is found."""
    x, bias = numbers(192, 384), numbers(64, 128, seed=1)
    plan = build_plan(streamed(2, 2, (192, 384)).program(x, bias), "sm_90a")
    with pytest.raises((Race, Leak, UninitializedRead)):
        simulate(without(plan, op), [x, bias])


def test_the_memory_warpgroup_waits_for_the_others():
    plan, a = build_plan(matmul(2, steps=2).program(A[:128], B), "sm_90a"), A[:128]
    given_back = {i for i, b in plan.barriers.items() if b.value.name.startswith("consumed")}
    broken = without(plan, "barrier_wait", lambda e: e.operands[0].ref.id in given_back)
    for timing in ("late", "early"):
        with pytest.raises((Race, BarrierMisuse)):
            simulate(broken, [a, B], timing=timing)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(pipeline_state=1), TypeError, "pipeline_state"),
        (dict(num_compute_wgs=2), ValueError, "make 3 warpgroups; the kernel has num_threads=2"),
        (dict(memory_thread_idx=2), ValueError, "memory_thread_idx"),
        (dict(memory_registers=8), ValueError, "memory_registers"),
        (dict(wg_axis=1), TypeError, "wg_axis"),
        (dict(compute_context=3), TypeError, "compute_context"),
        (dict(in_specs=[]), TypeError, "0 in_specs and 0 out_specs, but it is called with 1 Refs"),
        (
            dict(manual_consumed_barriers=True, in_specs=[plgpu.BlockSpec((64, 128), memory_space=plgpu.GMEM)]),
            UnsupportedCall,
            "input 0 stays in global memory",
        ),
        (
            dict(compute_context=lambda pipeline: pipeline((jnp.float32(0),))),
            TypeError,
            "the body got the carry",
        ),
    ],
)
def test_refusals(options, error, message):
    rows = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
    known = dict(grid=(2,), memory_registers=40, in_specs=[rows], wg_axis="wg", num_compute_wgs=1)

    def kernel(x: Any, o: Any) -> None:
        plgpu.emit_pipeline_warp_specialized(lambda *blocks: None, **{**known, **options})(x)

    with pytest.raises(error, match=message):
        plgpu.kernel(kernel, out(128, 128), num_threads=2, thread_name="wg").program(numbers(128, 128))
