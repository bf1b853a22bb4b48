"""Indexing and transposing Refs: which part of the buffer a view is, as exact `DimIndex`es and a permutation."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import OutOfBounds, UnsupportedCall
from mosaic_gpu.program import Affine, DimIndex, View, walk


@pytest.fixture
def view_of(program, array):
    """view_of(select, shape): the view that `select(ref, program id)` makes of an SMEM buffer, and the id's value."""

    def trace(select, shape=(8, 64, 32)) -> tuple[View, int]:
        def body(buffer):
            select(buffer, lax.axis_index("g"))[...]  # a `get` of the view

        p = program(body, scratch_types=[plgpu.SMEM(shape, jnp.float32)], grid=(4,), grid_names=("g",))
        (index,) = [e for e in p.body if e.op == "axis_index"]
        (get,) = [e for e in p.body if e.op == "get"]
        return get.operands[0], index.results[0].id

    return trace


def dims(view: View) -> list[tuple[int, int | None, int]]:
    assert all(d.start.static for d in view.dims)
    return [(d.start.const, d.size, d.stride) for d in view.dims]


def test_whole(view_of):
    view, _ = view_of(lambda r, i: r.at[...])
    assert view == View.whole(view.ref) and view.shape == (8, 64, 32) and not view.is_transposed


def test_static_index_squeezes(view_of):
    """An integer drops its dimension: size None, the permutation counts the kept ones only."""
    view, _ = view_of(lambda r, i: r.at[3])
    assert dims(view) == [(3, None, 1), (0, 64, 1), (0, 32, 1)]
    assert view.permutation == (0, 1) and view.shape == (64, 32) and view.kept == (1, 2)


def test_static_slices(view_of):
    view, _ = view_of(lambda r, i: r.at[2:6, plgpu.ds(16, 8), 4:])
    assert dims(view) == [(2, 4, 1), (16, 8, 1), (4, 28, 1)]


def test_strided_slice(view_of):
    view, _ = view_of(lambda r, i: r.at[:, 1:64:3])
    assert dims(view) == [(0, 8, 1), (1, 21, 3), (0, 32, 1)] and view.shape == (8, 21, 32)


def test_strides_multiply_when_nested(view_of):
    view, _ = view_of(lambda r, i: r.at[:, 1:64:3].at[:, 2:20:2])
    assert dims(view)[1] == (1 + 2 * 3, 9, 6)


def test_traced_start(view_of):
    view, i = view_of(lambda r, i: r.at[i, plgpu.ds(i * 16, 16)])
    assert view.dims[0].size is None and view.dims[1].size == 16
    assert [(v.id, f) for v, f in view.dims[0].start.terms] == [(i, 1)]
    assert [(v.id, f) for v, f in view.dims[1].start.terms] == [(i, 16)]


@pytest.mark.parametrize(
    ("expression", "const", "factor"),
    [
        (lambda i: i * 8 + 8, 8, 8),
        (lambda i: 8 + 8 * i, 8, 8),
        (lambda i: (i + 1) * 8, 8, 8),
        (lambda i: i * 16 - i * 8, 0, 8),
        (lambda i: 56 - i * 8, 56, -8),
        (lambda i: (i * 2 + 1) * 4 + np.int32(4), 8, 8),
        (lambda i: jnp.int32(8) * i, 0, 8),
        (lambda i: (i * jnp.int32(4)).astype(jnp.int32) * 2, 0, 8),
    ],
)
def test_sums_are_known_through_indices(view_of, expression, const, factor):
    """i * 8 + 8 and its like arrive as an affine index, so the planner sees that it is a multiple of 8."""
    view, i = view_of(lambda r, i: r.at[0, plgpu.ds(expression(i), 8)])
    start = view.dims[1].start
    assert start.const == const
    assert {v.id for v, _ in start.terms} == {i} and sum(f for _, f in start.terms) == factor


def test_what_is_no_sum_stays_a_value(view_of):
    """A remainder is opaque, but what is built from it is again a multiple."""
    view, i = view_of(lambda r, i: r.at[0, plgpu.ds(lax.rem(i, 3) * 8, 8)])
    ((value, factor),) = view.dims[1].start.terms
    assert value.id != i and factor == 8


def test_nested_views_add_up(view_of):
    view, i = view_of(lambda r, i: r.at[plgpu.ds(2, 4)].at[1, plgpu.ds(i * 8, 16)].at[plgpu.ds(4, 8), 8:16])
    assert view.dims[0] == DimIndex(Affine(3), None)
    assert view.dims[1].start.const == 4 and view.dims[1].size == 8
    assert view.dims[2] == DimIndex(Affine(8), 8)


def test_transpose(view_of):
    view, _ = view_of(lambda r, i: r.transpose((2, 0, 1)))
    assert view.permutation == (2, 0, 1) and view.shape == (32, 8, 64) and view.is_transposed
    assert dims(view) == [(0, 8, 1), (0, 64, 1), (0, 32, 1)]


def test_transpose_of_a_squeezed_view(view_of):
    view, _ = view_of(lambda r, i: r.at[1].transpose((1, 0)))
    assert view.permutation == (1, 0) and view.kept == (2, 1) and view.shape == (32, 64)


def test_index_of_a_transposed_view(view_of):
    """The index applies to the dimension as the view shows it."""
    view, _ = view_of(lambda r, i: r.transpose((2, 0, 1)).at[plgpu.ds(8, 4), 5])
    assert dims(view) == [(5, None, 1), (0, 64, 1), (8, 4, 1)]
    assert view.kept == (2, 1) and view.permutation == (1, 0)


INDEX = st.one_of(
    st.tuples(st.just("index"), st.floats(0, 0.999)),
    st.tuples(st.just("slice"), st.floats(0, 0.999), st.floats(0, 0.999), st.integers(1, 3)),
)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.one_of(st.tuples(st.just("at"), st.lists(INDEX, min_size=1, max_size=3)), st.just("transpose")), max_size=3
    )
)
def test_any_chain_of_views_selects_what_numpy_selects(view_of_chain, steps):
    """Property: the elements of a chain of static views are those of the same chain on an array."""
    view_of_chain(steps)


@pytest.fixture(scope="module")
def view_of_chain(program):
    shape = (6, 10, 8)
    numbers = np.arange(np.prod(shape)).reshape(shape)

    def check(steps) -> None:
        expected = numbers

        def select(ref):
            nonlocal expected
            for step in steps:
                rank = expected.ndim
                if rank == 0:
                    break
                if step == "transpose":
                    order = tuple(range(1, rank)) + (0,)
                    ref, expected = ref.transpose(order), expected.transpose(order)
                    continue
                index = []
                for n, item in zip(expected.shape, step[1], strict=False):
                    if item[0] == "index":
                        index.append(int(item[1] * n))
                    else:
                        a, b = sorted((int(item[1] * n), int(item[2] * n)))
                        index.append(slice(a, b + 1, item[3]))
                ref, expected = ref.at[tuple(index)], expected[tuple(index)]
            return ref

        def body(buffer):
            view = select(buffer)
            view[...]  # a `get` of the view

        p = program(body, scratch_types=[plgpu.SMEM(shape, jnp.float32)])
        (get,) = [e for e in walk(p.body) if e.op == "get"]
        view = get.operands[0]
        picked = numbers[
            tuple(
                d.start.const
                if d.size is None
                else slice(d.start.const, d.start.const + (d.size - 1) * d.stride + 1, d.stride)
                for d in view.dims
            )
        ].transpose(view.permutation)
        np.testing.assert_array_equal(picked, expected)
        assert view.shape == expected.shape

    return check


# ---- refusals -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "select",
    [
        lambda r: r.at[9],
        lambda r: r.at[-1],
        lambda r: r.at[0, plgpu.ds(60, 8)],
        lambda r: r.at[0, plgpu.ds(64, 1)],
        lambda r: r.at[0, plgpu.ds(0, 32)].at[plgpu.ds(24, 16)],
        lambda r: r.at[0, 0, 32],
    ],
)
def test_static_index_outside_is_refused_at_its_line(program, select, assert_at):
    """JAX accepts some of these and refuses others with an error of its own; all are ours, with the line."""

    def body(buffer):
        select(buffer)[...]  # access

    with pytest.raises(OutOfBounds, match="is outside|Out of bound") as e:
        program(body, scratch_types=[plgpu.SMEM((8, 64, 32), jnp.float32)])
    assert e.value.line.file == __file__
    if "Out of bound" not in str(e.value):  # JAX's error comes where the view is made
        assert_at(e.value, body, "access")
    assert isinstance(e.value, IndexError)


def larger_than_the_array(x, o):
    o[plgpu.ds(0, 64)] = x[plgpu.ds(0, 64)]  # larger


def larger_than_the_view(x, o):
    o[...] = x.at[plgpu.ds(8, 16)][plgpu.ds(0, 40)]  # larger


def an_output(x, o):
    o[plgpu.ds(0, 64)] = jnp.zeros((64, 32))  # larger


def of_some_columns(x, o):
    o[...] = x[:, plgpu.ds(0, 48)][:, :32]  # larger


@pytest.mark.parametrize(
    "body, extent", [(larger_than_the_array, 40), (larger_than_the_view, 16), (an_output, 40), (of_some_columns, 32)]
)
def test_a_slice_from_0_that_is_longer_than_the_array_is_refused(program, array, assert_at, body, extent):
    """JAX 0.10 takes it, 0.12 does not; of a view it would reach into the neighbours."""
    with pytest.raises(OutOfBounds, match=f"{extent}.* only where its start is traced") as e:
        program(body, array(40, 32), out=array(40, 32))
    assert_at(e.value, body, "larger")


def test_a_tile_may_stick_out_of_a_gmem_array(program, array, assert_at):
    """TMA clips it. JAX refuses that for a static start; the error says what to do. An index must lie inside."""

    def tile(x, s, b, *, traced):
        start = lax.axis_index("g") * 64 if traced else 64
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(start, 64)], s, b)  # copy

    options = dict(scratch_types=[plgpu.SMEM((64, 32), jnp.float32), plgpu.Barrier()], grid=(2,), grid_names=("g",))
    program(functools.partial(tile, traced=True), array(100, 32), **options)
    with pytest.raises(OutOfBounds, match="only where its start is traced") as e:
        program(functools.partial(tile, traced=False), array(100, 32), **options)
    assert_at(e.value, tile, "copy")

    def row(x):
        x[100]

    with pytest.raises(OutOfBounds):
        program(row, array(100, 32))


def test_a_negative_start_in_gmem_is_refused(program, array):
    def body(x, s, b):
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(-8, 64)], s, b)

    with pytest.raises(OutOfBounds):
        program(body, array(100, 32), scratch_types=[plgpu.SMEM((64, 32), jnp.float32), plgpu.Barrier()])


def test_other_views_are_refused_by_name(program, assert_at):
    def body(buffer):
        buffer.reshape((64, 4))[...]  # access

    with pytest.raises(UnsupportedCall, match="ReshapeTransform.*indexed and transposed") as e:
        program(body, scratch_types=[plgpu.SMEM((8, 32), jnp.float32)])
    assert_at(e.value, body, "access")


def test_an_array_as_an_index_of_a_copy_is_refused(program, array):
    def body(x, o, tile):
        rows = plgpu.broadcasted_iota(jnp.int32, (128,), 0)
        plgpu.copy_smem_to_gmem(tile, o.at[rows])

    with pytest.raises(UnsupportedCall, match="array as an index"):
        program(body, array(128, 8), out=array(128, 8), scratch_types=[plgpu.SMEM((128, 8), jnp.float32)])
