"""BoundedSlice and Indirect dimensions: only what the index map names is read and written, in every mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race, UninitializedRead, UnsupportedCall
from mosaic_gpu.pallas import lowering
from mosaic_gpu.plan.build import build_plan
from tests.support import out, randoms, tiled

F = jnp.float32
BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
ENDS = np.array([0, 5, 5, 14, 46, 50], np.int32)  # of five parts: one is empty, one full, none aligned


def part(ends, i):
    return plgpu.ds(ends[i], ends[i + 1] - ends[i])


def rows_of(size, columns=128):
    return plgpu.BlockSpec((plgpu.BoundedSlice(size), columns), lambda i, ends: (part(ends, i), 0))


def prefetched(body, shape, grid, ins, outs, interpret=False, count=1, **options):
    spec = plgpu.PrefetchScalarGridSpec(count, grid, ins, outs)
    return plgpu.pallas_call(body, shape, grid_spec=spec, interpret=interpret, **options)


def doubled(ends, x, o):
    o[...] = 2 * x[...]


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.bool_])
def test_ragged_rows(dtype, interpret):
    x = randoms(50, 128).astype(dtype) if dtype != np.bool_ else randoms(50, 128) > 0
    f = prefetched(
        lambda ends, x, o: o.__setitem__(..., x[...]),
        out(50, 128, dtype=dtype),
        (5,),
        [rows_of(32)],
        rows_of(32),
        interpret,
    )
    np.testing.assert_array_equal(f(ENDS, x), x)


@BOTH
def test_zeros_are_read_behind_the_slice_and_nothing_is_written_there(interpret):
    """In place: each step adds one, and a row that were touched twice would show."""

    def body(ends, x, o, sums):
        sums[...] = jnp.sum(x[...], axis=0)[None]
        o[...] = x[...] + 1

    x, ends = randoms(50, 128), np.array([3, 5, 5, 14, 46, 60], np.int32)  # the last slice reaches over the end
    f = prefetched(
        body,
        (out(50, 128), out(5, 128)),
        (5,),
        [rows_of(32)],
        [rows_of(32), plgpu.BlockSpec((1, 128), lambda i, ends: (i, 0))],
        interpret,
        input_output_aliases={1: 0},
    )
    o, sums = f(ends, x)
    expected = x.copy()
    expected[3:] += 1
    np.testing.assert_array_equal(o, expected)
    parts = [x[a:b].astype(np.float64).sum(0) for a, b in zip(ends, ends[1:], strict=False)]
    np.testing.assert_allclose(sums, np.stack(parts), atol=1e-5)


@BOTH
def test_elements_of_a_vector(interpret):
    """Starts and sizes that no TMA copy has."""
    x, ends = randoms(301), np.array([1, 4, 131, 132, 301], np.int32)
    spec = plgpu.BlockSpec((plgpu.BoundedSlice(256),), lambda i, ends: part(ends, i))
    y = prefetched(doubled, out(301), (4,), [spec], spec, interpret, input_output_aliases={1: 0})(ends, x)
    np.testing.assert_array_equal(y, np.concatenate([x[:1], 2 * x[1:]]))


@BOTH
@pytest.mark.parametrize("size", [40, -3])
def test_a_size_over_the_block_counts_as_the_block_and_one_below_zero_as_none(size, interpret):
    x = randoms(64, 128)
    spec = plgpu.BlockSpec((plgpu.BoundedSlice(32), 128), lambda i, n: (plgpu.ds(8, n[0]), 0))
    y = prefetched(doubled, out(64, 128), (1,), [spec], spec, interpret, input_output_aliases={1: 0})(
        np.array([size], np.int32), x
    )
    expected = x.copy()
    expected[8 : 8 + max(0, min(size, 32))] *= 2
    np.testing.assert_array_equal(y, expected)


@BOTH
def test_a_static_slice(interpret):
    x = randoms(60, 128)
    spec = plgpu.BlockSpec((plgpu.BoundedSlice(16), 128), lambda i: (plgpu.ds(i * 15, 15), 0))
    f = plgpu.pallas_call(
        lambda x, o: o.__setitem__(..., x[...]),
        out(60, 128),
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        interpret=interpret,
    )
    np.testing.assert_array_equal(f(x), x)


PICKED = np.random.default_rng(1).permutation(40).astype(np.int32)[:24]


def picked(columns=128):
    return plgpu.BlockSpec((plgpu.Indirect(8), columns), lambda i, index: (index[plgpu.ds(8 * i, 8)], 0))


@BOTH
def test_gather_and_scatter(interpret):
    x, blocked = randoms(40, 200), plgpu.BlockSpec((8, 200), lambda i, _: (i, 0))
    rows = prefetched(doubled, out(24, 200), (3,), [picked(200)], blocked, interpret)(PICKED, x)
    np.testing.assert_array_equal(rows, 2 * x[PICKED])
    y = prefetched(lambda index, old, x, o: o.__setitem__(..., x[...]), out(40, 200), (3,), [picked(200), blocked],
                   picked(200), interpret, input_output_aliases={1: 0})(PICKED, x, rows)  # fmt: skip
    expected = x.copy()
    expected[PICKED] *= 2
    np.testing.assert_array_equal(y, expected)


@BOTH
def test_indices_outside_read_zeros_and_are_not_written(interpret):
    x, index = randoms(40, 128), np.array([3, -1, 40, 39, 10**6, -(2**31), 0, 7], np.int32)
    inside = (index >= 0) & (index < 40)
    found = prefetched(
        doubled, out(8, 128), (1,), [picked()], plgpu.BlockSpec((8, 128), lambda i, _: (i, 0)), interpret
    )(index, x)
    np.testing.assert_array_equal(found, np.where(inside[:, None], 2 * x[index * inside], 0))
    y = prefetched(doubled, out(40, 128), (1,), [picked()], picked(), interpret, input_output_aliases={1: 0})(index, x)
    expected = x.copy()
    expected[index[inside]] *= 2
    np.testing.assert_array_equal(y, expected)


@BOTH
@pytest.mark.parametrize("between", [(), (6,)], ids=["side by side", "one between"])
def test_two_of_them_and_a_squeezed_dimension(between, interpret):
    x = randoms(3, 40, *between, 70)
    index, sizes = PICKED, np.array([0, 70, 33], np.int32)
    spec = plgpu.BlockSpec(
        (None, plgpu.Indirect(8), *between, plgpu.BoundedSlice(64)),
        lambda i, index, sizes: (i, index[plgpu.ds(8 * i, 8)], *[0] * len(between), plgpu.ds(4, sizes[i])),
    )
    f = prefetched(
        lambda index, sizes, x, o: o.__setitem__(..., 2 * x[...]),
        out(*x.shape),
        (3,),
        [spec],
        spec,
        interpret,
        2,
        input_output_aliases={2: 0},
    )
    expected = x.copy()
    for i in range(3):
        expected[i, index[8 * i : 8 * i + 8], ..., 4 : 4 + min(64, sizes[i])] *= 2
    np.testing.assert_array_equal(f(index, sizes, x), expected)


@BOTH
def test_the_other_dimensions_are_blocked_or_start_at_elements(interpret):
    """Blocks along the columns stick out."""
    x, ends = randoms(50, 150), ENDS
    spec = plgpu.BlockSpec((plgpu.BoundedSlice(32), 64), lambda i, j, ends: (part(ends, i), j))
    np.testing.assert_array_equal(prefetched(doubled, out(50, 150), (5, 3), [spec], spec, interpret)(ends, x), 2 * x)
    front = plgpu.BlockSpec(
        (plgpu.BoundedSlice(32), plgpu.Element(64)), lambda i, j, ends: (part(ends, i), 100 - 50 * j)
    )
    back = plgpu.BlockSpec((plgpu.BoundedSlice(32), 64), lambda i, j, ends: (part(ends, i), j))
    y = prefetched(doubled, out(50, 192), (5, 3), [front], back, interpret)(ends, x)
    expected = np.concatenate([np.pad(x[:, s : s + 64], ((0, 0), (0, max(0, s + 64 - 150)))) for s in (100, 50, 0)], 1)
    np.testing.assert_array_equal(y, 2 * expected)


@BOTH
def test_an_output_stays_as_long_as_its_slice_does(interpret):
    """Sums over a sequential axis, in blocks of ragged rows."""

    def body(ends, x, o):
        @plgpu.when(plgpu.program_id(1) == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += x[...]

    x = randoms(50, 256)
    spec = plgpu.BlockSpec((plgpu.BoundedSlice(32), 128), lambda i, j, ends: (part(ends, i), j))
    sums = plgpu.BlockSpec((plgpu.BoundedSlice(32), 128), lambda i, j, ends: (part(ends, i), 0))
    f = prefetched(
        body, out(50, 128), (5, 2), [spec], sums, interpret,
        compiler_params=plgpu.CompilerParams(dimension_semantics=("sequential", "sequential")),
    )  # fmt: skip
    np.testing.assert_array_equal(f(ENDS, x), x[:, :128] + x[:, 128:])


@BOTH
def test_vmap(interpret):
    x = randoms(3, 50, 128)
    f = prefetched(doubled, out(50, 128), (5,), [rows_of(32)], rows_of(32), interpret)
    np.testing.assert_array_equal(jax.vmap(f, (None, 0))(ENDS, x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(f, (None, 1), 2)(ENDS, x.swapaxes(0, 1)), 2 * np.moveaxis(x, 0, 2))
    twice = jax.vmap(jax.vmap(f, (None, 0)), (None, 0))
    np.testing.assert_array_equal(twice(ENDS, x[None]), 2 * x[None])
    ends = np.stack([ENDS, ENDS[-1] - ENDS[::-1]])  # a loop over calls
    np.testing.assert_array_equal(jax.vmap(f)(ends, x[:2]), 2 * x[:2])
    spec = plgpu.BlockSpec((8, plgpu.Indirect(8)), lambda i, index: (0, index[plgpu.ds(8 * i, 8)]))
    columns = prefetched(doubled, out(8, 24), (3,), [spec], plgpu.BlockSpec((8, 8), lambda i, _: (0, i)), interpret)
    np.testing.assert_array_equal(jax.vmap(columns, (None, 0))(PICKED, x[:, :8]), 2 * x[:, :8, PICKED])


@BOTH
def test_forward_mode(interpret):
    def body(ends, x, o):
        o[...] = jnp.sin(x[...]) * x[...]

    x, t = randoms(50, 128), randoms(50, 128, seed=1)
    f = prefetched(body, out(50, 128), (5,), [rows_of(32)], rows_of(32), interpret)
    y, dy = jax.jvp(lambda x: f(ENDS, x), (x,), (t,))
    a, b = x.astype(np.float64), t.astype(np.float64)
    np.testing.assert_allclose(y, np.sin(a) * a, atol=1e-5)
    np.testing.assert_allclose(dy, (np.cos(a) * a + np.sin(a)) * b, atol=1e-5)


def test_a_symbolic_length():
    from jax import export

    (n,) = export.symbolic_shape("n")
    f = lambda ends, x: prefetched(doubled, out(*x.shape), (5,), [rows_of(32)], rows_of(32), input_output_aliases={1: 0})(ends, x)  # fmt: skip # noqa: E731,E501
    exported = export.export(
        jax.jit(f), disabled_checks=[export.DisabledSafetyCheck.custom_call("mosaic_gpu_simulate_late")]
    )(out(6, dtype=np.int32), out(n, 128))
    for rows in (50, 53):
        x = randoms(rows, 128)
        np.testing.assert_array_equal(exported.call(ENDS, x), np.concatenate([2 * x[:50], x[50:]]))


def grouped_product(dtype=ml_dtypes.bfloat16, **options):
    """Rows of a group times the group's matrix: gathered, multiplied by wgmma, scattered."""
    tile = tiled(dtype)

    def body(index, x, w, o):
        o[...] = (x[...] @ w[...]).astype(o.dtype)

    rows = plgpu.BlockSpec((plgpu.Indirect(64), 64), lambda i, index: (index[plgpu.ds(64 * i, 64)], 0), transforms=tile)
    w = plgpu.BlockSpec((None, 64, 64), lambda i, _: (i, 0, 0), transforms=tile)
    scattered = plgpu.BlockSpec((plgpu.Indirect(64), 64), lambda i, index: (index[plgpu.ds(64 * i, 64)], 0))
    return prefetched(body, out(128, 64, dtype=dtype), (2,), [rows, w], scattered, **options)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_products_of_gathered_rows(arch, compiled):
    x, w = (randoms(*s, seed=i).astype(ml_dtypes.bfloat16) for i, s in enumerate([(128, 64), (2, 64, 64)]))
    index = np.random.default_rng(2).permutation(128).astype(np.int32)
    call = grouped_product(compiler_params=plgpu.CompilerParams(arch=arch))
    y = np.asarray(call(index, x, w)).astype(np.float64)
    expected = np.empty((128, 64))
    for i in range(2):
        of = index[64 * i : 64 * i + 64]
        expected[of] = x[of].astype(np.float64) @ w[i].astype(np.float64)
    np.testing.assert_allclose(y, expected, atol=2**-8 * np.abs(expected).max())
    report = compiled(planned(call, index, x, w, arch=arch))
    assert not report.complaints() and ("HGMMA" if arch == "sm_90a" else "UTCHMMA") in report.mnemonics


def planned(call, *arrays, arch="sm_90a"):
    return build_plan(lowering.kernel_of(call.traced(*arrays)[0]).program(*arrays), arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kind", ["rows", "vector", "two", "bools", "picked"])
def test_they_compile(kind, arch, compiled):
    if kind == "two":
        spec = plgpu.BlockSpec(
            (None, plgpu.Indirect(8), 6, plgpu.BoundedSlice(64)),
            lambda i, n: (i, n[plgpu.ds(8 * i, 8)], 0, plgpu.ds(4, n[i])),
        )
        n, x = PICKED, randoms(3, 40, 6, 70)
    elif kind == "vector":
        spec, n, x = plgpu.BlockSpec((plgpu.BoundedSlice(256),), lambda i, n: part(n, i)), ENDS, randoms(301)
    else:
        spec, n, x = (picked(), PICKED, randoms(40, 128)) if kind == "picked" else (rows_of(32), ENDS, randoms(50, 128))
    x = x > 0 if kind == "bools" else x
    call = prefetched(lambda n, x, o: o.__setitem__(..., x[...]), out(*x.shape, dtype=x.dtype), (3,), [spec], spec)
    report = compiled(planned(call, n, x, arch=arch))
    assert not report.complaints()


def test_the_slice_is_written_and_nothing_else_of_the_block_need_be():
    x = randoms(50, 128)
    spec = plgpu.BlockSpec((plgpu.BoundedSlice(32), 128), lambda i: (plgpu.ds(10 * i, 10), 0))

    def rows(n):
        def body(x, o):
            o[:n] = x[:n]

        return plgpu.pallas_call(body, out(50, 128), grid=(5,), in_specs=[spec], out_specs=spec)

    np.testing.assert_array_equal(rows(10)(x), x)
    with pytest.raises(UninitializedRead):
        rows(8)(x)


def test_parts_that_overlap_are_a_race():
    x, ends = randoms(50, 128), np.array([0, 12, 10, 20], np.int32)
    spec = plgpu.BlockSpec(
        (plgpu.BoundedSlice(32), 128), lambda i, ends: (plgpu.ds(ends[2 * i], ends[2 * i + 1] - ends[2 * i]), 0)
    )
    f = prefetched(doubled, out(50, 128), (2,), [spec], spec)
    f(np.array([0, 10, 10, 20], np.int32), x)
    with pytest.raises(Race):
        f(ends, x)
    with pytest.raises(Race, match="2 times"):
        prefetched(doubled, out(40, 128), (1,), [picked()], picked())(
            np.array([1, 2, 3, 4, 5, 6, 7, 2], np.int32), x[:40]
        )


def called(spec, where="in", **options):
    blocked = plgpu.BlockSpec((64, 128), lambda *_: (0, 0))
    specs = dict(in_specs=[spec], out_specs=blocked) if where == "in" else dict(in_specs=[blocked], out_specs=spec)
    return plgpu.pallas_call(lambda x, o: None, out(64, 128), grid=(1,), **specs, **options)(randoms(64, 128))


BOUNDED, INDIRECT = (plgpu.BoundedSlice(64), 128), (plgpu.Indirect(64), 128)
WRONG = {
    "no slice": (
        BOUNDED,
        lambda i: (i, 0),
        {},
        ValueError,
        r"args\[0\] must return a slice, .* position 0; it returns int32",
    ),
    "no index map": (BOUNDED, None, {}, ValueError, r"must return a slice, .* it returns int \(0\)"),
    "a stride": (BOUNDED, lambda i: (type(plgpu.ds(0, 1))(0, 8, 2), 0), {}, ValueError, "a slice of stride 2"),
    "more than the block": (BOUNDED, lambda i: (plgpu.ds(0, 65), 0), {}, ValueError, "a slice of 65 elements for .*64"),
    "a scalar": (INDIRECT, lambda i: (i, 0), {}, ValueError, r"must return 64 integers, .* it returns int32"),
    "too few": (INDIRECT, lambda i: (jnp.arange(8), 0), {}, ValueError, r"shape \(64,\), .* it returns int32\[8\]"),
    "floats": (INDIRECT, lambda i: (jnp.arange(64.0), 0), {}, ValueError, r"64 integers, .* it returns float32\[64\]"),
    "a slice elsewhere": (
        (64, 128),
        lambda i: (plgpu.ds(0, 64), 0),
        {},
        ValueError,
        "returns a slice for .*Blocked.*64.* position 0",
    ),
    "captured": (
        INDIRECT,
        lambda i: (jnp.asarray(np.arange(64)), 0),
        {},
        ValueError,
        "capture constants.*scalar-prefetch",
    ),
    "in GMEM": (
        BOUNDED,
        lambda i: (plgpu.ds(0, 64), 0),
        dict(memory_space=plgpu.GMEM),
        UnsupportedCall,
        "a BoundedSlice dimension is copied to shared memory.*leave memory_space out",
    ),
    "size": (
        (plgpu.Indirect(0), 128),
        lambda i: (0, 0),
        {},
        ValueError,
        r"block_shape\[0\] of .* must be a whole number",
    ),
}


@pytest.mark.parametrize("where", ["in", "out"])
@pytest.mark.parametrize("wrong", WRONG)
def test_refusals(wrong, where):
    shape, index_map, options, kind, words = WRONG[wrong]
    words = words if where == "in" else words.replace(r"args\[0\]", "outputs")
    with pytest.raises(kind, match=f"(?s){words}"):
        called(plgpu.BlockSpec(shape, index_map, **options), where)


@pytest.mark.filterwarnings("ignore:pallas_call through Triton")
def test_other_loaders_refuse_them():
    spec = plgpu.BlockSpec(BOUNDED, lambda i: (plgpu.ds(0, 64), 0))
    with pytest.raises(UnsupportedCall, match="Triton has no such block dimensions"):
        jax.jit(lambda x: plgpu.pallas_call(
            lambda x, o: None, out(64, 128), grid=(1,), in_specs=[spec], out_specs=spec,
            compiler_params=plgpu.TritonCompilerParams(),
        )(x)).trace(randoms(64, 128)).lower(lowering_platforms=("cuda",))  # fmt: skip

    def kernel(x, o):
        plgpu.emit_pipeline_warp_specialized(
            lambda ids, a: None, grid=(2,), memory_registers=40, in_specs=[spec], wg_axis="wg", num_compute_wgs=1
        )(x)

    with pytest.raises(UnsupportedCall, match="input 0: threads copy blocks with BoundedSlice or Indirect"):
        plgpu.kernel(kernel, out(64, 128), num_threads=2, thread_name="wg", interpret=True)(randoms(64, 128))


def test_a_slice_of_a_ref_has_a_known_size():
    def body(n, x, o):
        o[...] = x[plgpu.ds(0, n[0])]

    with pytest.raises(TypeError, match="ds: size"):
        prefetched(body, out(8, 128), (1,), plgpu.no_block_spec, plgpu.no_block_spec)(
            np.array([8], np.int32), randoms(8, 128)
        )
