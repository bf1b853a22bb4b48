"""emit_pipeline inside kernels: results and findings in the simulator, cubins for Hopper, refusals."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race, UnsupportedCall
from tests.support import out

F = jnp.float32
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(dtype)


def streamed(body, in_specs, out_specs, out_type, grid, *arrays, timing="late", **options):
    """A kernel that is one pipeline, run with loads that land as late (or early) as they may."""

    def kernel(*refs):
        plgpu.emit_pipeline(body, grid=grid, in_specs=in_specs, out_specs=out_specs, **options)(*refs)

    return np.asarray(plgpu.kernel(kernel, out_type, interpret=plgpu.SimulatorParams(timing=timing))(*arrays))


def tiles():
    return plgpu.BlockSpec((32, 128), lambda i, j: (i, j))


@pytest.mark.parametrize("timing", ["late", "early"])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
@pytest.mark.parametrize("shape", [(64, 256), (90, 132)])
def test_tiles_stream_in_and_out(shape, steps, timing):
    """Every tile once, whatever the number of buffers; edges are masked."""
    x = numbers(*shape)

    def body(ids, a, o):
        o[...] = a[...] * 2 + (10 * ids[0] + ids[1]).astype(F)

    grid = (-(-shape[0] // 32), -(-shape[1] // 128))
    y = streamed(body, [tiles()], [tiles()], out(*shape), grid, x, max_concurrent_steps=steps, timing=timing)
    i, j = np.indices(shape)
    np.testing.assert_array_equal(y, x * 2 + 10 * (i // 32) + j // 128)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_output_stays_as_long_as_its_index(steps):
    """Sums along the last axis of the grid, in the output's own block; another output streams beside it."""
    x = numbers(170, 384)

    def body(ids, a, total, o):
        @plgpu.when(ids[1] == 0)
        def _():
            total[...] = a[...] * 0

        total[...] = total[...] + a[...]
        o[...] = a[...] + 1

    def kernel(x, total, o):
        specs = [plgpu.BlockSpec((32, 128), lambda i, j: (i, 0)), tiles()]
        plgpu.emit_pipeline(body, grid=(6, 3), in_specs=[tiles()], out_specs=specs, max_concurrent_steps=steps)(
            x, total, o
        )

    total, o = plgpu.kernel(kernel, [out(170, 128), out(170, 384)], interpret=True)(x)
    np.testing.assert_array_equal(total, x[:, :128] + x[:, 128:256] + x[:, 256:])
    np.testing.assert_array_equal(o, x + 1)


def test_an_index_that_changes_now_and_then():
    """i // 2: two steps on one block, which only run-time comparison can tell."""
    x = numbers(5 * 64, 128)

    def body(ids, a, o):
        @plgpu.when(ids[0] % 2 == 0)
        def _():
            o[...] = a[...] * 0

        o[...] = o[...] + a[...]

    every, pairs = plgpu.BlockSpec((64, 128), lambda i: (i, 0)), plgpu.BlockSpec((64, 128), lambda i: (i // 2, 0))
    y = streamed(body, [every], [pairs], out(192, 128), (5,), x, max_concurrent_steps=3)
    padded = np.concatenate([x, np.zeros((64, 128), np.float32)]).reshape(3, 2, 64, 128)
    np.testing.assert_array_equal(y, padded.sum(1).reshape(192, 128))


def test_one_load_where_the_index_does_not_change():
    x, row = numbers(256, 128), numbers(8, 128, seed=1)

    def body(ids, a, r, o):
        o[...] = a[...] + r[0, :][None, :]

    def kernel(*refs):
        rows = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
        specs = [rows, plgpu.BlockSpec((8, 128), lambda i: (0, 0))]
        plgpu.emit_pipeline(body, grid=(4,), in_specs=specs, out_specs=[rows], max_concurrent_steps=2)(*refs)

    report = plgpu.SimulatorParams()
    y = plgpu.kernel(kernel, out(256, 128), interpret=report)(x, row)
    np.testing.assert_array_equal(y, x + row[0])


def test_carry():
    x = numbers(4, 128)

    def kernel(x, o):
        def body(ids, a, total):
            return total + a[0, :]

        specs = [plgpu.BlockSpec((1, 128), lambda i: (i, 0))]
        zero = plgpu.layout_cast(jnp.zeros((128,), F), plgpu.Layout.WG_STRIDED)
        pipeline = plgpu.emit_pipeline(body, grid=(4,), in_specs=specs, max_concurrent_steps=2, init_carry=zero)
        o[...] = pipeline(x)

    np.testing.assert_array_equal(plgpu.kernel(kernel, out(128), interpret=True)(x), x.sum(0))


def test_run_time_grid_twice_in_a_row():
    """Sizes that a kernel reads; the barriers' phases go on from one pipeline to the next."""
    x, n = numbers(256, 128), np.array([3], np.int32)

    def kernel(x, n, o):
        def body(ids, a, b):
            b[...] = a[...] + 1

        rows = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
        pipeline = plgpu.emit_pipeline(body, grid=(n[0],), in_specs=[rows], out_specs=[rows], max_concurrent_steps=2)
        lax.fori_loop(0, 2, lambda _, c: (pipeline(x, o), c)[1], None)

    y = np.asarray(plgpu.kernel(kernel, out(256, 128), interpret=True)(x, n))
    np.testing.assert_array_equal(y[:192], x[:192] + 1)
    assert np.isnan(y[192:]).all()


@pytest.mark.parametrize("cols", [3, 131])
def test_arrays_that_tma_cannot_move(cols):
    """Rows of 12 and 524 bytes: the body sees the array itself, clipped at its edges."""
    x = numbers(200, cols)

    def body(ids, a, o):
        o[...] = a[...] * 2

    spec, grid = plgpu.BlockSpec((64, 128), lambda i, j: (i, j)), (4, -(-cols // 128))
    y = streamed(body, [spec], [spec], out(200, cols), grid, x, max_concurrent_steps=2)
    np.testing.assert_array_equal(y, x * 2)


def test_element_indices_with_padding():
    """A window of 64 rows every 32, one row of zeros before the array."""
    x = numbers(128, 128)

    def body(ids, a, o):
        o[...] = a[...]

    window = plgpu.BlockSpec((plgpu.Element(64, (1, 0)), 128), lambda i: (32 * i, 0))
    rows = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
    y = streamed(body, [window], [rows], out(192, 128), (3,), x)
    padded = np.concatenate([np.zeros((1, 128), np.float32), x])
    np.testing.assert_array_equal(y, np.concatenate([padded[32 * i : 32 * i + 64] for i in range(3)]))


def test_squeezed_dimensions_and_gmem():
    x = numbers(3, 64, 128)

    def body(ids, a, g, o):
        o[...] = a[...] + g[...]

    one = plgpu.BlockSpec((None, 64, 128), lambda i: (i, 0, 0))
    left = plgpu.BlockSpec((plgpu.squeezed, 64, 128), lambda i: (i, 0, 0), memory_space=plgpu.GMEM)
    np.testing.assert_array_equal(streamed(body, [one, left], [one], out(3, 64, 128), (3,), x, x), 2 * x)


def matmul(delay, pending, steps=3, timing="late"):
    """A product that is left in flight for `pending` steps, whose operands are kept for `delay`."""

    def kernel(a, b, o):
        rows = plgpu.ds(plgpu.program_id(0) * 64, 64)

        def product(acc):
            def body(ids, x, y):
                plgpu.wgmma(acc, x, y)
                plgpu.wgmma_wait(pending)

            specs = [
                plgpu.BlockSpec((64, 64), lambda k: (0, k), transforms=SWIZZLED, delay_release=delay),
                plgpu.BlockSpec((64, 128), lambda k: (k, 0), transforms=SWIZZLED, delay_release=delay),
            ]
            plgpu.emit_pipeline(body, grid=(5,), in_specs=specs, max_concurrent_steps=steps)(a.at[rows], b)
            plgpu.wgmma_wait(0)
            return acc[...]

        o[rows] = plgpu.run_scoped(product, plgpu.ACC((64, 128)))

    return plgpu.kernel(kernel, out(128, 128), grid=(2,), interpret=plgpu.SimulatorParams(timing=timing))


A, B = numbers(128, 320, dtype=jnp.bfloat16), numbers(320, 128, dtype=jnp.bfloat16, seed=1)


@pytest.mark.parametrize("timing", ["late", "early"])
@pytest.mark.parametrize("delay, pending, steps", [(0, 0, 2), (1, 1, 2), (1, 1, 4), (2, 2, 4)])
def test_matmul(delay, pending, steps, timing):
    y = matmul(delay, pending, steps, timing)(A, B)
    np.testing.assert_array_equal(y, A.astype(np.float32) @ B.astype(np.float32))


def test_a_buffer_that_is_given_back_too_early():
    with pytest.raises(Race) as e:
        matmul(0, 1)(A, B)
    assert e.value.kind == "buffer in flight"


def test_compiles_for_hopper(compiled):
    """The products' stages in a ring: wgmma and TMA in the machine code, nothing spilled, nothing serialised."""
    from mosaic_gpu.plan.build import build_plan

    report = compiled(build_plan(matmul(1, 1, 4).program(A, B), "sm_90a"))
    assert not report.complaints()
    assert {"HGMMA", "UTMALDG"} <= set(report.mnemonics)


def plain(rows, **options):
    """Sums of products over the pipeline's steps; no instruction is named."""
    specs = [
        plgpu.BlockSpec((rows, 64), lambda k: (0, k), transforms=SWIZZLED),
        plgpu.BlockSpec((64, 128), lambda k: (k, 0), transforms=SWIZZLED),
    ]
    sums = plgpu.BlockSpec((rows, 128), lambda k: (0, 0))

    def body(ids, a, b, o):
        @plgpu.when(ids[0] == 0)
        def _():
            o[...] = jnp.zeros_like(o)
            plgpu.commit_smem()  # which thread stores what is not the same below

        o[...] += jnp.dot(a[...], b[...], preferred_element_type=F)

    def kernel(a, b, o):
        plgpu.emit_pipeline(body, grid=(5,), in_specs=specs, out_specs=[sums], max_concurrent_steps=3)(a, b, o)

    return plgpu.kernel(kernel, out(rows, 128), **options)


def called(a, b, o):
    @plgpu.when(plgpu.program_id(0) == 0)
    def _():
        o[...] = jnp.zeros_like(o)

    o[...] += jnp.dot(a[...], b[...], preferred_element_type=F)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("rows", [64, 128])
def test_plain_products(rows, arch, compiled):
    """wgmma on Hopper, tcgen05 on Blackwell, in a pipeline and in a `pallas_call`."""
    from mosaic_gpu.pallas import lowering
    from mosaic_gpu.plan.build import build_plan
    from mosaic_gpu.simulator import simulate

    specs = [
        plgpu.BlockSpec((rows, 64), lambda k: (0, k), transforms=SWIZZLED),
        plgpu.BlockSpec((64, 128), lambda k: (k, 0), transforms=SWIZZLED),
    ]
    call = plgpu.pallas_call(called, out(rows, 128), grid=(5,), in_specs=specs)
    a = A[:rows]
    for kernel in (plain(rows), lowering.kernel_of(call.traced(a, B)[0])):
        plan = build_plan(kernel.program(a, B), arch)
        for timing in ("late", "early"):
            y = simulate(plan, [a, B], timing=timing)[0]
            np.testing.assert_array_equal(y, a.astype(np.float32) @ B.astype(np.float32))
        report = compiled(plan)
        assert not report.complaints()
        assert ("HGMMA" if arch == "sm_90a" else "UTCHMMA") in report.mnemonics


def test_refusals(line_of):
    def kernel_of(body=lambda ids, a, b: None, **options):
        def kernel(x, o):
            plgpu.emit_pipeline(body, grid=(2,), **options)(x, o)

        return plgpu.kernel(kernel, out(128, 128), interpret=True)

    x = numbers(128, 128)
    rows = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
    wrong = functools.partial(kernel_of, out_specs=[rows])
    with pytest.raises(TypeError, match="0 in_specs and 1 out_specs, but it is called with 2"):
        wrong()(x)
    with pytest.raises(ValueError, match="index map of input 0 must return 2 values"):
        wrong(in_specs=[plgpu.BlockSpec((64, 128), lambda i: i)])(x)
    with pytest.raises(TypeError, match="positional argument") as e:
        wrong(in_specs=[plgpu.BlockSpec((64, 128), lambda i, j: (i, j))])(x)  # two indices
    assert any("the index map of input 0: it is called with 1 indices" in n for n in e.value.__notes__)
    assert (e.value.line.file, e.value.line.number) == (__file__, line_of(test_refusals, "two indices"))
    for index in (lambda i: (i * 0.5, 0), lambda i: (jnp.stack([i, i]), 0), lambda i: ("i", 0)):
        with pytest.raises(ValueError, match=r"index map of input 0 must return integer scalars. Output\[0\] has type"):
            wrong(in_specs=[plgpu.BlockSpec((64, 128), index)])(x)
    for returned, options in ((3, {}), (None, {"init_carry": 3}), ((1, 2), {"init_carry": 3})):
        with pytest.raises(TypeError, match="emit_pipeline: the body .*; it returned"):
            wrong(lambda *_, r=returned: r, in_specs=[rows], **options)(x)
    with pytest.raises(ValueError, match="same number of dimensions"):
        wrong(in_specs=[plgpu.BlockSpec((64,), lambda i: i)])(x)
    with pytest.raises(ValueError, match="index map of input 0 must return a slice, .*BoundedSlice.* at position 0"):
        wrong(in_specs=[plgpu.BlockSpec((plgpu.BoundedSlice(64), 128), lambda i: (i, 0))])(x)
    with pytest.raises(ValueError, match="index map of input 0 must return 64 integers"):
        wrong(in_specs=[plgpu.BlockSpec((plgpu.Indirect(64), 128), lambda i: (i, 0))])(x)
    with pytest.raises(ValueError, match="index map of input 0 returns a slice for Blocked"):
        wrong(in_specs=[plgpu.BlockSpec((64, 128), lambda i: (plgpu.ds(0, 64), 0))])(x)
    with pytest.raises(UnsupportedCall, match="collective_axes"):
        wrong(in_specs=[plgpu.BlockSpec((64, 128), lambda i: (i, 0), collective_axes=("c",))])(x)
    with pytest.raises(ValueError, match="delay_release=2 must be less than its buffers, 2"):
        wrong(in_specs=[rows], max_concurrent_steps=2, delay_release=2)(x)
    with pytest.raises(TypeError, match="memory_space of input 0"):
        wrong(in_specs=[plgpu.BlockSpec((64, 128), lambda i: (i, 0), memory_space=plgpu.TMEM)])(x)
    with pytest.raises(TypeError, match="input 0 must be a GMEM Ref"):
        plgpu.kernel(
            lambda o, s: plgpu.emit_pipeline(lambda *_: None, grid=(1,), in_specs=[rows], out_specs=[rows])(s, o),
            out(128, 128),
            scratch_types=[plgpu.SMEM((64, 128), F)],
        )()
    with pytest.raises(ValueError, match="a view of shape .* blocks .* do not divide"):

        def part(x, o):
            plgpu.emit_pipeline(lambda *_: None, grid=(1,), in_specs=[rows])(x.at[plgpu.ds(0, 96)])

        plgpu.kernel(part, out(128, 128))(x)
