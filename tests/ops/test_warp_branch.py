"""when_any_in_warp: which warps run, what may stand in it, and the waits that come before it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import build
from mosaic_gpu.errors import UnsupportedPrimitive
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import walk

F32 = jnp.float32
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def rescale(inside: Any = None) -> Any:
    """o = x, rows times f and plus one in every warp that holds an f other than 1."""

    def body(x: Any, f: Any, o: Any, full: Any) -> None:
        def scope(acc: Any) -> None:
            acc[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)
            s = plgpu.load(f, layout=plgpu.Layout.WGMMA.reduce(1))

            @plgpu.when_any_in_warp(s != 1.0)
            def _() -> None:
                acc[...] = acc[...] * s[:, None] + 1.0
                if inside is not None:
                    inside(full)

            o[...] = acc[...]

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    out = jax.ShapeDtypeStruct((64, 64), F32)
    return plgpu.kernel(body, out, scratch_types=[plgpu.Barrier()], num_threads=1, thread_name="wg")


@pytest.mark.parametrize("rows", ((), (20,), (0, 63), (16, 17, 40)))
def test_warps_with_a_true_element_run_whole(rows: tuple[int, ...]) -> None:
    """A warp holds 16 rows: all of them are updated, or none."""
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    f = np.ones(64, np.float32)
    f[list(rows)] = 3.0
    expected = x.copy()
    for warp in {r // 16 for r in rows}:
        own = slice(16 * warp, 16 * warp + 16)
        expected[own] = x[own].astype(np.float64) * f[own, None] + 1  # an fma: rounded once
    np.testing.assert_array_equal(np.asarray(rescale()(x, f)), expected)


def test_one_vote_in_the_code() -> None:
    program = rescale().program(jax.ShapeDtypeStruct((64, 64), F32), jax.ShapeDtypeStruct((64,), F32))
    source = build.body_of(build.compile_plan(build_plan(program, "sm_90a")).source)
    assert source.count("__any_sync") == 1


def test_what_all_warps_do_together_is_refused() -> None:
    with pytest.raises(UnsupportedPrimitive, match="barrier_arrive.*under when_any_in_warp") as e:
        rescale(plgpu.barrier_arrive)(np.zeros((64, 64), np.float32), np.ones(64, np.float32))
    assert e.value.line is not None


def test_products_in_flight_are_waited_for_before_the_branch() -> None:
    """Warps part inside, and a wait is for the whole warpgroup."""

    def body(f: Any, o: Any, tile: Any) -> None:
        def scope(acc: Any) -> None:
            plgpu.wgmma(acc, tile, tile)
            s = plgpu.load(f, layout=plgpu.Layout.WGMMA.reduce(1))

            @plgpu.when_any_in_warp(s != 1.0)
            def _() -> None:
                acc[...] = acc[...] * s[:, None]

            o[...] = acc[...]

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    out = jax.ShapeDtypeStruct((64, 64), F32)
    scratch = [plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILE)]
    kernel = plgpu.kernel(body, out, scratch_types=scratch, num_threads=1, thread_name="wg")
    plan = build_plan(kernel.program(jax.ShapeDtypeStruct((64,), F32)), "sm_90a")
    ops = [s.equation.op for s in plan.roles[0].body.steps[0].regions[0].steps]
    assert ops.index("wgmma") < ops.index("wgmma_wait") < ops.index("warp_branch")
    branch = next(s for s in plan.roles[0].body.steps[0].regions[0].steps if s.equation.op == "warp_branch")
    assert not any(e.op == "wgmma_wait" for e in walk(branch.equation.regions[0].equations))
