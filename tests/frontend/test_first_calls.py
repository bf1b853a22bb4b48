"""What a first user writes, and what JAX refuses in its own words: each error is ours, says what is meant, and where."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall
from tests.frontend.test_arguments import S, Thing

F = jnp.float32


# ---- what a first user writes ---------------------------------------------------------------------------------------------
X = jnp.ones(8)


def copy(x, y, o, *, tile):
    o[...] = x[...] + y[...]


@pytest.mark.parametrize("arguments", [(), (X,), (X, X, X)])
def test_a_wrong_number_of_inputs(arguments):
    k = plgpu.kernel(copy, jax.ShapeDtypeStruct((8,), F), scratch_types={"tile": plgpu.SMEM(8, F)})
    assert list(inspect.signature(k).parameters) == ["x", "y"]
    given = ["no inputs", "1 input", "", "3 inputs"][len(arguments)]
    words = (
        rf"kernel copy\(x, y, o, tile\) gets {given}, 1 output \(out_type\) and 1 scratch buffer .*2 inputs \(x, y\)"
    )
    with pytest.raises(TypeError, match=words) as e:
        k(*arguments)
    assert f"{__file__}:{copy.__code__.co_firstlineno}" in str(e.value)


def test_outputs_or_scratch_that_the_body_does_not_take():
    with pytest.raises(
        TypeError, match=r"gets 2 inputs, no outputs .* no scratch buffers .*change out_type or scratch_types"
    ):
        plgpu.kernel(copy)(X, X)


def test_a_body_of_any_number_is_left_to_itself():
    k = plgpu.kernel(lambda *refs: None, jax.ShapeDtypeStruct((8,), F))
    assert len(k.program(X, X, X).inputs) == 4
    assert "inputs" in inspect.signature(k).parameters


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda k: k(X, y=X), "inputs are given by position, not as y="),
        (lambda k: k(X, "y"), "input 1 must be an array or a number, not 'y'"),
        (lambda k: k(X, Thing()), r"input 1 must be an array or a number, not Thing\(\)"),
        (lambda k: k.program(X, "y"), "input 1 must be an array or a number"),
    ],
)
def test_inputs_that_are_none(call, words):
    k = plgpu.kernel(lambda x, y, o: None, jax.ShapeDtypeStruct((8,), F))
    with pytest.raises(TypeError, match=words):
        call(k)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(scratch_types=plgpu.SMEM(8, F)), r"scratch_types must be a sequence .* not SMEM\(\(8,\), float32\)"),
        (dict(scratch_types=[plgpu.Barrier(), 3]), "scratch_types must be .* not 3"),
        (dict(out_type=(8,)), r"out_type must be jax.ShapeDtypeStruct\(shape, dtype\) or a tree of them, not 8"),
        (dict(interpret="yes"), "interpret must be True, False, None or plgpu.SimulatorParams.*, not 'yes'"),
        (dict(compiler_params={"approx_math": True}), "compiler_params must be plgpu.CompilerParams"),
    ],
)
def test_options_of_another_kind(options, words):
    with pytest.raises(TypeError, match=words):
        plgpu.kernel(copy, **options)


def test_one_axis_needs_no_tuple():
    def body(o):
        o[lax.axis_index("rows")] = 1.0

    k = plgpu.kernel(body, jax.ShapeDtypeStruct((3,), F), grid=3, grid_names="rows")
    p = k.program()
    assert (p.grid, p.grid_names) == ((3,), ("rows",))
    np.testing.assert_array_equal(np.asarray(k()), np.ones(3))


@pytest.mark.parametrize("layout", ["WGMMA", "Layout.WGMMA"])
def test_a_layout_as_text(layout):
    for use in (lambda x: plgpu.load(x, layout=layout), lambda x: plgpu.layout_cast(x[...], layout)):
        with pytest.raises(TypeError, match="layout must be a register layout, plgpu.Layout.WGMMA, not '"):
            plgpu.kernel(lambda x, o, use=use: use(x) and None, S).program(S)


def test_a_traced_number_where_it_must_be_known():
    def body(x, o):
        plgpu.wait_smem_to_gmem(x[0])

    with pytest.raises(TypeError, match="n must be a whole number of at least 0 known when the kernel is traced"):
        plgpu.kernel(body, S).program(jax.ShapeDtypeStruct((8,), jnp.int32))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
@pytest.mark.parametrize(
    "operation",
    [
        lambda: plgpu.program_id(0),
        lambda: plgpu.broadcasted_iota(jnp.int32, (64, 64), 0),
        lambda: plgpu.run_scoped(lambda acc: acc[...], plgpu.ACC((64, 64))),
    ],
)
def test_an_operation_outside_of_a_kernel(jit, operation):
    with pytest.raises(UnsupportedCall, match="is an operation of a kernel: call it in the body of a function"):
        jit(operation)()


@pytest.mark.parametrize("operation", [plgpu.commit_smem, lambda: plgpu.warp_map(lambda w: None)])
def test_an_operation_without_result_outside_of_a_kernel(operation):
    with pytest.raises(UnsupportedCall, match="is an operation of a kernel"):
        operation()


@pytest.mark.parametrize("a, b", [(7, 2), (-7, 2), (7, -2), (-7, -2), (0, 3)])
def test_numbers_and_traced_numbers_divide_alike(a, b):
    assert plgpu.div(a, b) == int(plgpu.div(jnp.int32(a), b))
    assert plgpu.rem(a, b) == int(plgpu.rem(jnp.int32(a), b))


# ---- bodies that JAX refuses in its own words -----------------------------------------------------------------------------
def raised_by(body, out=S, **options):
    with pytest.raises(Exception) as e:  # noqa: B017 - each test says which
        plgpu.kernel(body, out, **options).program(S)
    return e.value, str(e.value) + "".join(getattr(e.value, "__notes__", ()))


def test_an_axis_that_the_kernel_has_not():
    def body(x, o):
        o[lax.axis_index("cols"), 0] = 1.0

    error, text = raised_by(body, grid=2, grid_names="rows", num_threads=1, thread_name="wg")
    assert isinstance(error, UnsupportedCall) and error.line.number == body.__code__.co_firstlineno + 1
    assert "axis name: cols; the kernel body has rows, wg (grid_names, cluster_names, thread_name)" in text


def test_an_if_on_a_traced_value():
    def body(x, o):
        if plgpu.program_id(0) == 0:
            o[...] = x[...]

    error, text = raised_by(body, grid=2)
    assert isinstance(error, UnsupportedCall) and error.line.number == body.__code__.co_firstlineno + 1
    assert "a traced value (bool[])" in text and "@plgpu.when(condition)" in text and "jnp.where" in text
    assert isinstance(error.__cause__, jax.errors.TracerBoolConversionError)


def test_a_store_of_another_dtype():
    def body(x, o):
        o[...] = x[...]

    error, text = raised_by(body, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
    assert isinstance(error, ValueError) and "x.astype(ref.dtype)" in text


def test_a_body_that_returns_its_result():
    error, text = raised_by(lambda x, o: x[...])
    assert isinstance(error, ValueError) and "stored to output Refs: o[...] = x" in text


def test_a_tile_that_does_not_divide_over_the_threads():
    """Threads hold replicas, of which one is stored."""

    def body(x, o):
        o[plgpu.ds(0, 10)] = x[plgpu.ds(0, 10)] * 2

    x = np.arange(640, dtype=np.float32).reshape(64, 10)
    found = plgpu.kernel(body, jax.ShapeDtypeStruct(x.shape, F), interpret=True)(x)
    np.testing.assert_array_equal(found[:10], 2 * x[:10])


def test_an_array_of_keys():
    with pytest.raises(UnsupportedCall, match=r"input 0 is an array of PRNG keys \(key<fry>\).*fold_in"):
        plgpu.kernel(lambda x, o: None, S)(jax.random.key(0))
