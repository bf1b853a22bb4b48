"""`nd_loop` and `run_state`: names and meanings of Pallas's Mosaic GPU, simulated and compiled for Hopper."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

I32, F32, BF16 = jnp.int32, jnp.float32, jnp.bfloat16
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def order(grid: tuple[int, ...], tiling: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    if tiling is None:
        return list(itertools.product(*map(range, grid)))
    outer = itertools.product(*(range(n // t) for n, t in zip(grid, tiling, strict=True)))
    return [
        tuple(o * t + i for o, t, i in zip(at, tiling, inner, strict=True))
        for at in outer
        for inner in itertools.product(*map(range, tiling))
    ]


@pytest.mark.parametrize(
    ("grid", "tiling", "blocks"),
    [
        ((2, 3), None, 4),
        ((4, 6), (2, 3), 5),
        ((4, 6), (1, 2), 1),
        ((1, 1), None, 3),
        ((0, 5), None, 2),
        ((7,), None, 2),
    ],
)
def test_places_are_dealt_in_turn(grid, tiling, blocks, compiled):
    """Each place once, by the block and at the step that the order says; blocks that get none run none."""
    cells = int(np.prod(grid))

    def body(o: Any) -> None:
        block = lax.axis_index("b")

        @plgpu.nd_loop(grid, collective_axes="b", tiling=tiling, init_carry=jnp.int32(0))
        def count(info: Any, carry: Any) -> Any:
            place = jnp.int32(0)
            for i, n in zip(info.index, grid, strict=True):
                place = place * n + i
            o[place, 0] = block
            o[place, 1] = info.local_index
            o[place, 2] = info.num_local_steps
            o[place, 3] = carry
            return carry + 2

        for column in range(4):
            o[cells + block, column] = count

    out = jax.ShapeDtypeStruct((cells + blocks, 4), I32)
    plan = build_plan(plgpu.kernel(body, out, grid=(blocks,), grid_names=("b",)).program(), "sm_90a")
    found = simulate(plan, [])[0]
    places = order(grid, tiling)
    totals = [len(places[b::blocks]) for b in range(blocks)]
    for k, place in enumerate(places):
        at, block = int(np.ravel_multi_index(place, grid)), k % blocks
        np.testing.assert_array_equal(found[at], [block, k // blocks, totals[block], 2 * (k // blocks)])
    np.testing.assert_array_equal(found[cells:, 0], 2 * np.array(totals))
    assert compiled(plan).complaints() == []


def test_several_axes_and_sizes_known_at_run_time():
    """Warpgroups of several blocks take turns; the grid's size is read from memory."""

    def body(n: Any, o: Any) -> None:
        @plgpu.nd_loop((n[0], 2), collective_axes=("b", "wg"))
        def _(info: Any) -> None:
            o[info.index[0], info.index[1]] = 10 * lax.axis_index("b") + lax.axis_index("wg")

    kernel = plgpu.kernel(
        body, jax.ShapeDtypeStruct((5, 2), I32), grid=(2,), grid_names=("b",), num_threads=2, thread_name="wg"
    )
    n = np.array([5], np.int32)
    found = simulate(build_plan(kernel.program(n), "sm_90a"), [n])[0]
    np.testing.assert_array_equal(found.reshape(-1), [(10 * (k % 4 // 2) + k % 2) for k in range(10)])


@pytest.mark.parametrize(
    ("grid", "options", "error", "message"),
    [
        ((4, 6), dict(tiling=(3, 2)), ValueError, r"tiling=\(3, 2\) does not divide grid=\(4, 6\): 4 % 3 = 1"),
        ((4, 6), dict(tiling=(2,)), ValueError, "has 1 sizes, grid=.* 2"),
        ((4, "x"), {}, TypeError, r"nd_loop: grid\[1\]"),
        ((4,), dict(collective_axes=3), TypeError, "collective_axes"),
        ((4,), dict(collective_axes="z"), NameError, "z"),
    ],
)
def test_loops_that_are_refused(grid, options, error, message):
    def body(o: Any) -> None:
        plgpu.nd_loop(grid, **{"collective_axes": "b", **options})(lambda info: None)

    with pytest.raises(error, match=message):
        plgpu.kernel(body, jax.ShapeDtypeStruct((1,), I32), grid=(2,), grid_names=("b",)).program()


def product(zeros: bool) -> Any:
    """x + a @ b, and what is left of a second accumulator; a loop over k inside."""

    def body(a: Any, b: Any, x: Any, o: Any, p: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        def multiply(refs: Any) -> None:
            acc, other = refs["sum"], refs["rest"][0]

            def step(i: Any, _: None) -> None:
                k = plgpu.ds(i * 64, 64)
                plgpu.copy_gmem_to_smem(a.at[:, k], a_tile, full)
                plgpu.copy_gmem_to_smem(b.at[k], b_tile, full)
                plgpu.barrier_wait(full)
                plgpu.wgmma(acc, a_tile, b_tile)
                plgpu.wgmma_wait(0)

            lax.fori_loop(0, 3, step, None)
            other[...] = other[...] * 2

        start = jnp.zeros((64, 64), F32) if zeros else plgpu.load(x, layout=plgpu.Layout.WGMMA)
        init = {"sum": plgpu.ACC.init(start), "rest": [plgpu.ACC.init(plgpu.load(x, layout=plgpu.Layout.WGMMA))]}
        found = plgpu.run_state(multiply)(init)
        o[...], p[...] = found["sum"], found["rest"][0]

    out = jax.ShapeDtypeStruct((64, 64), F32)
    tiles = plgpu.SMEM((64, 64), BF16, transforms=TILE)
    return plgpu.kernel(body, [out, out], scratch_types=[tiles, tiles, plgpu.Barrier(num_arrivals=2)])


@pytest.mark.parametrize("zeros", [False, True])
def test_accumulators_with_a_start(zeros, compiled):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 192)).astype(BF16), rng.standard_normal((192, 64)).astype(BF16)
    x = rng.standard_normal((64, 64)).astype(np.float32)
    plan = build_plan(product(zeros).program(a, b, x), "sm_90a")
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64) + (0 if zeros else x)
    for timing in ("late", "early"):
        o, p = simulate(plan, [a, b, x], timing=timing)
        np.testing.assert_allclose(o, exact, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(p, 2 * x)
    report = compiled(plan)
    assert report.complaints() == [] and "HGMMA" in report.mnemonics


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (lambda x: x, r"run_state: initial value 0 must be ACC.init\(array\)"),
        (lambda x: plgpu.ACC((64, 64)), r"run_state: initial value 0 must be ACC.init\(array\)"),
        (lambda x: (plgpu.ACC.init(x), None), "run_state: initial value 1"),
        (lambda x: plgpu.ACC.init(3.0), "ACC.init: array"),
    ],
)
def test_states_that_are_refused(init, message):
    def body(x: Any, o: Any) -> None:
        plgpu.run_state(lambda refs: None)(init(x[...]))

    with pytest.raises(TypeError, match=message):
        plgpu.kernel(body, jax.ShapeDtypeStruct((64, 64), F32)).program(np.zeros((64, 64), np.float32))
