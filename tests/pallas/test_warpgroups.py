"""`pallas_call` with several compute warpgroups and one that loads: simulated against references, compiled for Hopper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race, RegisterBudgetError, UnsupportedCall
from mosaic_gpu.pallas import lowering
from mosaic_gpu.pallas.specialized import _Pipeline
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import walk
from tests.pallas.test_symbols import CHECKS

F, BF16 = jnp.float32, jnp.bfloat16
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
ORDERS = [plgpu.SimulatorParams(timing="late"), plgpu.SimulatorParams(timing="early"), plgpu.SimulatorParams(seed=5)]


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(dtype)


def out(*shape: int, dtype: Any = F) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def several(n: int, **more: Any) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(num_compute_wgs=n, **more)


@pytest.fixture(params=[2, 132], ids=["dealt", "a block each"])
def multiprocessors(request, monkeypatch):
    """Few of them, so that each block takes several iterations of the parallel axes; or enough."""
    monkeypatch.setattr(lowering, "multiprocessors", lambda: request.param)
    return request.param


def program(call: Any, *args: Any) -> Any:
    (e,) = [e for e in jax.make_jaxpr(call)(*args).jaxpr.eqns if e.primitive.name == "pallas_call"]
    return lowering.kernel_of(e.params["call"]).program(*args)


def matmul(n: int, interpret: Any = False, *, steps: int = 3, delay: int = 1, **more: Any) -> Any:
    """Each warpgroup multiplies 64 rows of a tile, one product in flight."""

    def body(a: Any, b: Any, o: Any, acc: Any) -> None:
        own = plgpu.ds(lax.axis_index("wg") * 64, 64)
        plgpu.wgmma(acc, a.at[own], b)
        plgpu.wgmma_wait(1)

        @plgpu.when(plgpu.program_id(2) == plgpu.num_programs(2) - 1)
        def _() -> None:
            o[own] = acc[...]

    def call(x: Any, y: Any) -> Any:
        tile = 64 * n
        kinds = dict(transforms=SWIZZLED, delay_release=delay)
        return plgpu.pallas_call(
            body,
            out(x.shape[0], y.shape[1]),
            grid=(plgpu.cdiv(x.shape[0], tile), plgpu.cdiv(y.shape[1], 64), plgpu.cdiv(x.shape[1], 64)),
            in_specs=[
                plgpu.BlockSpec((tile, 64), lambda i, j, k: (i, k), **kinds),
                plgpu.BlockSpec((64, 64), lambda i, j, k: (k, j), **kinds),
            ],
            out_specs=plgpu.BlockSpec((tile, 64), lambda i, j, k: (i, j)),
            scratch_shapes=[plgpu.ACC((64, 64))],
            compiler_params=several(n, max_concurrent_steps=steps, **more),
            interpret=interpret,
        )(x, y)

    return call


A, B = numbers(200, 192, dtype=BF16), numbers(192, 136, dtype=BF16, seed=1)
AB = A.astype(np.float32) @ B.astype(np.float32)


@pytest.mark.parametrize("n, steps", [(1, 2), (2, 3), (3, 4)])
def test_products(n, steps, multiprocessors, compiled):
    """Accumulators start anew in each tile, though the pipeline runs on; nothing spilled, nothing serialised."""
    for interpret in (*ORDERS, True):
        np.testing.assert_array_equal(matmul(n, interpret, steps=steps)(A, B), AB)
    traced = program(matmul(n, steps=steps), A, B)
    assert traced.num_threads == n + 1
    tiles = -(-A.shape[0] // (64 * n)) * 3
    assert traced.grid == ((multiprocessors,) if tiles > multiprocessors else (tiles // 3, 3))
    report = compiled(build_plan(traced, "sm_90a"))
    assert report.complaints() == [] and {"HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"} <= set(report.mnemonics)


def test_a_block_that_is_given_back_too_early(multiprocessors):
    """Products in flight, and no delay_release."""
    with pytest.raises(Race):
        matmul(2, plgpu.SimulatorParams(), delay=0, steps=2)(A, B)


@pytest.mark.parametrize("meets", [0, 1], ids=["before the store", "behind it"])
def test_sabotage_warpgroups_that_do_not_meet(meets, monkeypatch):
    """An output's block leaves once all have written it, and is written again once it has left.

    The ring is as long as two tiles: else the loads, which wait for both warpgroups, would order what they do not.
    """
    monkeypatch.setattr(lowering, "multiprocessors", lambda: 2)
    meet, count = _Pipeline._meet, iter(range(100))
    monkeypatch.setattr(_Pipeline, "_meet", lambda self: None if next(count) == meets else meet(self))
    with pytest.raises(Race):
        matmul(2, plgpu.SimulatorParams(), steps=6)(A, B)


def test_registers():
    with pytest.raises(RegisterBudgetError, match="set_max_registers"):
        matmul(2, memory_registers=100)(A, B)
    traced = program(matmul(2, memory_registers=24), A, B)
    assert [e.param("registers") for e in walk(traced.body) if e.op == "set_max_registers"] in ([24, 240], [240, 24])


@pytest.mark.parametrize("interpret", [*ORDERS, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_outputs_of_every_step(n, interpret, multiprocessors):
    """No sequential axis; an input that stays; a body that names its axis otherwise."""
    x, shift = numbers(100, 256), numbers(128, seed=2)

    def body(x: Any, shift: Any, y: Any, z: Any) -> None:
        own = plgpu.ds(lax.axis_index("part") * 8, 8)
        assert lax.axis_size("part") == n
        y[own] = x[own] + shift[...][None]
        z[own] = x[own] * 2

    block = plgpu.BlockSpec((8 * n, 128), lambda i, j: (i, j))
    y, z = plgpu.pallas_call(
        body,
        (out(100, 256), out(100, 256)),
        grid=(plgpu.cdiv(100, 8 * n), 2),
        in_specs=[block, plgpu.BlockSpec((128,), lambda i, j: (0,))],
        out_specs=(block, block),
        compiler_params=several(n, wg_axis="part"),
        interpret=interpret,
    )(x, shift)
    np.testing.assert_array_equal(y, x + np.tile(shift, 2))
    np.testing.assert_array_equal(z, x * 2)


def sums(x: Any, rows: Any, interpret: Any = False, **more: Any) -> Any:
    """Sums of columns in a block that stays, what it was at each step, and how many steps a block of the grid has seen."""

    def body(x: Any, total: Any, so_far: Any, seen: Any, steps: Any) -> None:
        wg = lax.axis_index("wg")
        own = plgpu.ds(wg * 64, 64)

        @plgpu.when(plgpu.program_id(1) == 0)
        def _() -> None:
            total[own] = x[0, own] * 0
            steps[wg] = 0

        total[own] += x[...].sum(0)[0:64] * 0 + x[0, own] + x[1, own]
        so_far[own] = total[own]
        steps[wg] += 1
        seen[wg, plgpu.ds(0, 128)] = plgpu.broadcasted_iota(jnp.int32, (128,), 0) * 0 + steps[wg]

    steps = x.shape[0] // 2
    return plgpu.pallas_call(
        body,
        (out(x.shape[1]), out(steps, x.shape[1]), out(x.shape[1] // 128, 2, 128, dtype=jnp.int32)),
        grid=(x.shape[1] // 128, rows),
        in_specs=[plgpu.BlockSpec((2, 128), lambda j, i: (i, j))],
        out_specs=(
            plgpu.BlockSpec((128,), lambda j, i: (j,)),
            plgpu.BlockSpec((None, 128), lambda j, i: (i, j)),
            plgpu.BlockSpec((None, 2, 128), lambda j, i: (j, 0, 0)),
        ),
        scratch_shapes=[plgpu.SMEM((2,), jnp.int32)],
        compiler_params=several(2, dimension_semantics=("parallel", "sequential"), **more),
        interpret=interpret,
    )(x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("interpret", [*ORDERS, True])
def test_outputs_that_stay(interpret, dynamic, multiprocessors):
    """Beside one of every step; shared memory of the call's own; a sequential axis whose size is an operand."""
    x = numbers(10, 5 * 128)
    f = jax.jit(lambda x, n: sums(x, n, interpret)) if dynamic else lambda x, n: sums(x, 5, interpret)
    total, so_far, seen = f(x, jnp.int32(5))
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(so_far, x.reshape(5, 2, -1).sum(1).cumsum(0))
    np.testing.assert_array_equal(seen, 5)


def scaled(n: Any = None, interpret: Any = False) -> Any:
    def body(x: Any, y: Any) -> None:
        own = plgpu.ds(lax.axis_index("wg") * 4, 4)
        y[own] = jnp.tanh(x[own])

    block = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
    return lambda x: plgpu.pallas_call(
        body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=plgpu.cdiv(x.shape[0], 8) if n is None else n,
        in_specs=[block],
        out_specs=block,
        compiler_params=several(2),
        interpret=interpret,
    )(x)


@pytest.mark.parametrize("interpret", [False, True])
def test_transformed(interpret, multiprocessors):
    """vmap, derivatives, a parallel axis of a size that only the device knows, and export with symbols."""
    x, t = np.random.default_rng(0).standard_normal((2, 40, 128)).astype(np.float32)
    f = scaled(interpret=interpret)
    np.testing.assert_array_equal(jax.vmap(f)(np.stack([x, t])), np.stack([f(x), f(t)]))
    y, dy = jax.jvp(f, (x,), (t,))
    np.testing.assert_allclose(y, np.tanh(x), atol=1e-6)
    np.testing.assert_allclose(dy, t / np.cosh(x) ** 2, atol=1e-5)
    np.testing.assert_array_equal(jax.jit(lambda x, n: scaled(n, interpret)(x))(x, jnp.int32(5)), f(x))
    (rows,) = export.symbolic_shape("rows")
    exported = export.export(jax.jit(f), disabled_checks=CHECKS)(jax.ShapeDtypeStruct((rows, 128), F))
    np.testing.assert_array_equal(exported.call(x), f(x))


def test_blackwell(compiled):
    assert compiled(build_plan(program(scaled(), numbers(40, 128)), "sm_100a")).complaints() == []


def test_warpgroups_that_write_the_same_are_a_race():
    def body(x: Any, y: Any) -> None:
        y[...] = x[...]

    with pytest.raises(Race):
        plgpu.pallas_call(body, out(8, 128), compiler_params=several(2))(numbers(8, 128))


def test_refusals():
    x = numbers(64, 128)

    def body(x: Any, y: Any) -> None:
        y[...] = x[...]

    irregular = plgpu.BlockSpec((plgpu.BoundedSlice(8), 128), lambda i: (plgpu.ds(i * 8, 8), 0))
    plain = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
    with pytest.raises(UnsupportedCall, match=r"num_compute_wgs=2\): args\[0\]: threads copy blocks with BoundedSlice"):
        plgpu.pallas_call(
            body, out(64, 128), grid=8, in_specs=[irregular], out_specs=plain, compiler_params=several(2)
        )(x)
    with pytest.raises(ValueError, match="'wg' is an axis of the grid; give CompilerParams another wg_axis"):
        plgpu.pallas_call(
            body, out(64, 128), grid=(("wg", 8),), in_specs=[plain], out_specs=plain, compiler_params=several(2)
        )(x)
    with pytest.raises(ValueError, match="compiler_params has num_compute_wgs=2, which is for pallas_call"):
        plgpu.kernel(body, out(64, 128), compiler_params=several(2))
    with pytest.raises(ValueError, match="num_compute_wgs"):
        several(8)
