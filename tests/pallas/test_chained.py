"""Pipelines that run into each other: `emit_pipeline_warp_specialized(pipeline_state=)`, buffers of the caller's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import PipelinePipeline as State
from mosaic_gpu.errors import MosaicGpuError, UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.support import out, program_of, randoms, tiled

PARTS, STEPS = 4, 3
STATES = [State.START, State.STEADY, State.STEADY, State.STOP]


def chained(kind: str, computing: int = 1, depth: int = 2, states: Any = STATES, **options: Any) -> Any:
    """Twice x, in PARTS pipelines of STEPS blocks; of each block every compute warpgroup takes its rows."""
    rows = 32 * computing

    def body(ids: Any, a: Any, o: Any, *consumed: Any) -> None:
        mine = plgpu.ds(lax.axis_index("wg") * 32, 32)
        o[mine] = 2 * a[mine]
        for barrier in consumed:
            plgpu.barrier_arrive(barrier)

    def pipeline(part: Any, state: Any) -> Any:
        spec = plgpu.BlockSpec((rows, 128), lambda i: (i + STEPS * part, 0))
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(STEPS,),
            memory_registers=40,
            in_specs=[spec],
            out_specs=[spec],
            max_concurrent_steps=depth,
            wg_axis="wg",
            num_compute_wgs=computing,
            pipeline_state=state,
            **options,
        )

    def kernel(x: Any, o: Any) -> None:
        def all_of_them(buffers: Any) -> None:
            def one(part: Any, state: Any) -> None:
                pipeline(part, state)(x, o, allocations=buffers)

            if kind == "traced":
                loop = lambda i, _: one(i, jnp.where(i == 0, 0, jnp.where(i == PARTS - 1, 2, 1)))  # noqa: E731
                lax.fori_loop(0, PARTS, loop, None)
            elif kind == "loop":
                one(0, State.START)
                lax.fori_loop(1, PARTS - 1, lambda i, _: one(i, State.STEADY), None)
                one(PARTS - 1, State.STOP)
            else:
                for part, state in enumerate(states):
                    one(part, state)

        plgpu.run_scoped(all_of_them, pipeline(0, State.START).get_allocations(x, o), collective_axes="wg")

    shape = out(rows * STEPS * PARTS, 128)
    return plgpu.kernel(kernel, shape, num_threads=computing + 1, thread_name="wg"), randoms(*shape.shape)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("unrolled", {}),
        ("unrolled", dict(depth=3)),
        ("unrolled", dict(depth=1)),
        ("unrolled", dict(computing=2)),
        ("unrolled", dict(manual_consumed_barriers=True)),
        ("unrolled", dict(states=[State.START, State.STOP] * 2)),  # two chains in the same buffers
        ("unrolled", dict(states=[None, State.START, State.STOP, None])),
        ("loop", {}),
        ("loop", dict(computing=2, depth=3)),
        ("traced", {}),
        ("traced", dict(computing=2, manual_consumed_barriers=True)),
    ],
)
def test_chains(kind, options, compiled):
    kernel, x = chained(kind, **options)
    plan = build_plan(program_of(kernel, [x]), "sm_90a")
    for timing in ("late", "early"):
        np.testing.assert_array_equal(simulate(plan, [x], timing=timing)[0], 2 * x)
    np.testing.assert_array_equal(simulate(plan, [x], seed=3)[0], 2 * x)
    assert not compiled(plan).complaints()


@pytest.mark.parametrize("states", [[State.START] * 4, [State.START, State.STOP, State.START, State.START]])
def test_a_start_does_not_look_whether_buffers_are_free(states):
    """Which a STOP before it has seen to."""
    kernel, x = chained("unrolled", states=states)
    with pytest.raises(MosaicGpuError):
        simulate(build_plan(program_of(kernel, [x]), "sm_90a"), [x], timing="early")


@pytest.mark.parametrize("consumed", [False, True])
def test_the_body_waits_for_each_input_by_itself(consumed, compiled):
    """Products of tiles: the second is waited for behind a use of the first."""

    def kernel(a: Any, b: Any, o: Any) -> None:
        def context(pipeline: Any) -> None:
            def multiply(acc: Any) -> Any:
                pipeline(acc)
                return acc[...]

            o[...] = plgpu.run_scoped(multiply, plgpu.ACC((64, 64)))

        def body(ids: Any, x: Any, y: Any, *rest: Any) -> Any:
            has_x, has_y, *free, acc = rest
            plgpu.barrier_wait(has_x)
            plgpu.barrier_wait(has_y)
            plgpu.wgmma(acc, x, y)
            plgpu.wgmma_wait(0)
            for barrier in free:
                plgpu.barrier_arrive(barrier)
            return acc

        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(5,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((64, 64), lambda k: (0, k), transforms=tiled()),
                plgpu.BlockSpec((64, 64), lambda k: (k, 0), transforms=tiled()),
            ],
            max_concurrent_steps=2,
            wg_axis="wg",
            num_compute_wgs=1,
            manual_produced_barriers=True,
            manual_consumed_barriers=consumed,
            compute_context=context,
        )(a, b)

    a, b = (randoms(*s, seed=i).astype(ml_dtypes.bfloat16) for i, s in enumerate([(64, 320), (320, 64)]))
    plan = build_plan(program_of(plgpu.kernel(kernel, out(64, 64), num_threads=2, thread_name="wg"), [a, b]), "sm_90a")
    expected = a.astype(np.float64) @ b.astype(np.float64)
    for timing in ("late", "early"):
        np.testing.assert_allclose(simulate(plan, [a, b], timing=timing)[0], expected, atol=1e-3)
    assert not compiled(plan).complaints()


ROWS = plgpu.BlockSpec((32, 128), lambda i: (i, 0))
SAME = plgpu.BlockSpec((32, 128), lambda i: (0, 0))
CHAIN = dict(pipeline_state=State.START)


@pytest.mark.parametrize(
    ("options", "allocated", "error", "message"),
    [
        (CHAIN, None, UnsupportedCall, "share their buffers: run_scoped"),
        (dict(pipeline_state="START"), "own", TypeError, "pipeline_state must be a PipelinePipeline"),
        (CHAIN | dict(in_specs=[SAME]), "own", UnsupportedCall, "input 0, whose block is the same in every step"),
        (CHAIN | dict(grid="traced"), "own", UnsupportedCall, "a grid that is known at run time only"),
        (
            CHAIN | dict(in_specs=[plgpu.BlockSpec((32, 128), lambda i: (i, 0), delay_release=1)]),
            "own",
            UnsupportedCall,
            "input 0 with delay_release=1",
        ),
        (CHAIN, "others", ValueError, "3 buffers and barriers, and it takes 3, of other shapes or types"),
        (
            dict(manual_produced_barriers=True, in_specs=[SAME]),
            None,
            UnsupportedCall,
            "input 0 is the same in every step, so it comes once",
        ),
        (dict(manual_produced_barriers=1), None, TypeError, "manual_produced_barriers"),
    ],
)
def test_refusals(options, allocated, error, message):
    def kernel(x: Any) -> None:
        grid = (plgpu.dim_size(x, 0) // 32,) if options.get("grid") == "traced" else (4,)
        given = dict(memory_registers=40, in_specs=[ROWS], wg_axis="wg", num_compute_wgs=1) | options | dict(grid=grid)
        pipeline = plgpu.emit_pipeline_warp_specialized(lambda ids, *rest: None, **given)
        if allocated is None:
            return pipeline(x)
        types = pipeline.get_allocations(x)
        if allocated == "others":
            halves = [plgpu.BlockSpec((16, 128), lambda i: (i, 0))]
            types = plgpu.emit_pipeline_warp_specialized(
                lambda ids, *rest: None, **given | dict(in_specs=halves)
            ).get_allocations(x)
        plgpu.run_scoped(lambda a: pipeline(x, allocations=a), types, collective_axes="wg")

    with pytest.raises(error, match=message):
        plgpu.kernel(kernel, (), num_threads=2, thread_name="wg").program(jax.ShapeDtypeStruct((128, 128), jnp.float32))
