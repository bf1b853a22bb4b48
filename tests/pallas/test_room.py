"""Blocks that shared memory has no room for stay in global memory, and say so; outputs of which a body writes a part."""

from __future__ import annotations

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import ResourceExceeded, UninitializedRead
from mosaic_gpu.pallas import lowering
from mosaic_gpu.simulator.remarks import UnwrittenOutput

F = jnp.float32
BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])


def out(*shape, dtype=F):
    return jax.ShapeDtypeStruct(shape, dtype)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def product(x, y, o):
    """Blocks of (64, 512) and (512, 64): 128 KiB each."""

    def step(i, acc):
        k = plgpu.ds(i * 32, 32)
        return acc + jnp.dot(x[:, k], y[k, :], preferred_element_type=F)

    o[...] = jax.lax.fori_loop(0, 16, step, jnp.zeros(o.shape, F))


def call(x_space=None, y_space=None, **options):
    return plgpu.pallas_call(
        product,
        out(128, 128),
        grid=(2, 2),
        in_specs=[
            plgpu.BlockSpec((64, 512), lambda i, j: (i, 0), memory_space=x_space),
            plgpu.BlockSpec((512, 64), lambda i, j: (0, j), memory_space=y_space),
        ],
        out_specs=plgpu.BlockSpec((64, 64), lambda i, j: (i, j)),
        **options,
    )


X, Y = numbers(128, 512), numbers(512, 128, seed=1)


@BOTH
def test_the_largest_input_gives_way(interpret):
    f = call(interpret=interpret)
    with pytest.warns(
        UserWarning, match=r"args\[0\] stays in global memory.*131072 bytes.*278528 bytes.*232448"
    ) as told:
        got = f(X, Y)
    assert [str(w.message).split(": ")[1] for w in told if "stays" in str(w.message)] == [
        "args[0] stays in global memory, and the kernel works on it there"
    ]
    assert told[0].filename == __file__  # the spec's line
    np.testing.assert_allclose(got, X.astype(np.float64) @ Y.astype(np.float64), rtol=2e-2, atol=0.2)  # TF32
    assert [b.staged for b in f.traced(X, Y)[0].mapping.blocks] == [False, True, True]


def test_it_compiles_without_spills(compiled):
    from mosaic_gpu.plan.build import build_plan

    with pytest.warns(UserWarning, match="stays in global memory"):
        f = call()
        program = lowering.kernel_of(f.traced(X, Y)[0]).program(X, Y)
    report = compiled(build_plan(program, "sm_90a"))
    assert not report.complaints() and "UTMALDG" in report.mnemonics


def test_what_the_spec_says_holds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not call(x_space=plgpu.GMEM).traced(X, Y)[0].mapping.blocks[0].staged
    with pytest.warns(UserWarning, match=r"args\[1\] stays"):
        assert call(x_space=plgpu.SMEM).traced(X, Y)[0].mapping.blocks[0].staged


def test_the_error_points_at_the_largest_block():
    """Nothing moves where that would not help."""
    with warnings.catch_warnings(), pytest.raises(ResourceExceeded, match="shared memory") as found:
        warnings.simplefilter("error")
        call(plgpu.SMEM, plgpu.SMEM)(X, Y)
    lines, first = inspect.getsourcelines(call)
    assert found.value.line.file == __file__
    assert "BlockSpec((64, 512)" in lines[found.value.line.number - first]


def test_rings_that_do_not_fit_point_at_the_kernel():
    """One buffer would fit: that is the caller's to choose, and nothing moves."""

    def copy(x, o):
        o[...] = x[...]

    spec = plgpu.BlockSpec((128, 128), lambda i: (i, 0))
    params = plgpu.CompilerParams(dimension_semantics=("sequential",), max_concurrent_steps=3)
    f = plgpu.pallas_call(copy, out(512, 128), grid=4, in_specs=[spec], out_specs=spec, compiler_params=params)
    with warnings.catch_warnings(), pytest.raises(ResourceExceeded, match="shared memory") as found:
        warnings.simplefilter("error")
        f(numbers(512, 128))
    assert found.value.line.file == __file__


@BOTH
def test_outputs_give_way_last(interpret):
    def rows(x, o):
        def one(i, _):
            o[plgpu.ds(i * 8, 8)] = 2 * x[plgpu.ds(i * 8, 8)]

        jax.lax.fori_loop(0, 64, one, None)

    x = numbers(512, 128)
    with pytest.warns(UserWarning, match="outputs stays in global memory"):
        got = plgpu.pallas_call(rows, out(512, 128), interpret=interpret)(x)
    np.testing.assert_array_equal(got, 2 * x)


@BOTH
def test_tangents_need_room_too(interpret):
    def square(x, o):
        def one(i, _):
            part = x[plgpu.ds(i * 8, 8)]
            o[plgpu.ds(i * 8, 8)] = part * part

        jax.lax.fori_loop(0, 16, one, None)

    x, t = numbers(128, 128), numbers(128, 128, seed=1)
    f = plgpu.pallas_call(square, out(128, 128), interpret=interpret)
    with pytest.warns(UserWarning, match="square_jvp: .* stays in global memory"):
        y, dy = jax.jvp(f, (x,), (t,))
    np.testing.assert_array_equal(y, x * x)
    np.testing.assert_allclose(dy, 2.0 * x.astype(np.float64) * t, rtol=1e-6, atol=1e-7)


# ---- outputs of which a body writes a part --------------------------------------------------------------------------------
def half(x, o):
    o[plgpu.ds(0, 4)] = x[plgpu.ds(0, 4)]


def test_what_is_left_out_is_unwritten():
    x = numbers(8, 128)
    with pytest.warns(UnwrittenOutput, match="512 of 1024 elements of output 0"):
        got = plgpu.pallas_call(half, out(8, 128))(x)
    np.testing.assert_array_equal(got[:4], x[:4])
    assert np.isnan(got[4:]).all()


def test_a_later_step_completes_it():
    """Each step leaves a block half written; nothing of a block that was whole becomes unwritten."""
    x = numbers(16, 128)

    def body(x, o):
        half(x, o)
        plgpu.when(plgpu.program_id(0) == 1)(lambda: o.__setitem__(plgpu.ds(4, 4), x[plgpu.ds(4, 4)]))

    spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
    with pytest.warns(UnwrittenOutput, match="512 of 2048 elements"):
        got = plgpu.pallas_call(body, out(16, 128), grid=2, in_specs=[spec], out_specs=spec)(x)
    np.testing.assert_array_equal(got[8:], x[8:])


def test_a_copy_of_ones_own_is_still_refused():
    def body(o, tile):
        plgpu.copy_smem_to_gmem(tile, o)
        plgpu.wait_smem_to_gmem(0)

    f = plgpu.kernel(body, out(8, 128), scratch_types=[plgpu.SMEM((8, 128), F)])
    with pytest.raises(UninitializedRead, match="nothing has written"):
        f()


@BOTH
def test_a_list_of_outputs_comes_back_as_a_tuple(interpret):
    x = numbers(8, 128)
    f = plgpu.pallas_call(lambda x, o, p: (o.__setitem__(..., x[...]), p.__setitem__(..., -x[...])) and None,
                          [out(8, 128)] * 2, interpret=interpret)  # fmt: skip
    got = f(x)
    assert isinstance(got, tuple)
    np.testing.assert_array_equal(got[1], -x)


# ---- blocks that TMA cannot cut into boxes --------------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize(
    "shape, staged",
    [((300,), False), ((4, 300), False), ((520,), False), ((300, 4), False), ((3, 264), False)]
    + [((264, 4), True), ((320,), True), ((2, 384), True), ((300, 8), True), ((288,), True)],
)
def test_more_elements_than_a_box_has(shape, staged, interpret):
    """They are cut where a copy may start, at multiples of 128 bytes, or stay in place."""
    x = numbers(*shape)
    f = plgpu.pallas_call(lambda x, o: o.__setitem__(..., x[...] + 1), out(*shape), interpret=interpret)
    np.testing.assert_array_equal(f(x), x + 1)
    assert [b.staged for b in f.traced(x)[0].mapping.blocks] == [staged] * 2
