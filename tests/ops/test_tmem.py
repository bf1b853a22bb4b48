"""Tensor memory in kernels: layouts of loads and stores, packing, views, unions, A out of it; against NumPy, and compiled."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.errors import OutOfBounds
from mosaic_gpu.layouts.registers import Layout
from mosaic_gpu.layouts.tmem import TmemPart, lanes_of, transfers
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import Affine
from mosaic_gpu.simulator import SimulatorParams, simulate

BF, F = ml_dtypes.bfloat16, np.float32
ARCHES = ("sm_100a", "sm_103a")


def random(*shape, dtype=F, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operand(*shape, dtype=BF):
    inner = 128 // np.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(128)))


def run(body, *arrays, out, scratch, arch="sm_100a", compile_for=ARCHES, **options):
    """The results in three orders of events, which must agree; the kernel also compiles."""
    kernel = plgpu.kernel(body, out, scratch_types=scratch, **options)
    program = kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
    for name in compile_for:
        compile_cuda(emit(build_plan(program, name)), arch=name, name="/t.cu")
    plan = build_plan(program, arch)
    first = simulate(plan, arrays)
    for params in (SimulatorParams(timing="early"), SimulatorParams(seed=1)):
        for a, b in zip(first, simulate(plan, arrays, params), strict=True):
            assert a.tobytes() == b.tobytes()
    return first


def transfer_cell(shape: str, lane: int, register: int) -> tuple[int, int]:
    """(tensor memory lane from the first of the transfer, column) that a lane's register holds."""
    t, r = lane, register
    if shape == "32x32b":
        return t, r
    if shape == "16x64b":
        return 8 * (t % 2) + t // 4, t // 2 % 2 + 2 * r
    if shape == "16x128b":
        return t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
    assert shape == "16x256b", shape
    return t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)


@pytest.mark.parametrize(
    ("rows", "layout"), [(128, Layout.TCGEN05_TMEM_NATIVE), (128, Layout.TCGEN05), (64, Layout.WGMMA)]
)
@pytest.mark.parametrize("packing, halves", [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("columns", [8, 24, 128, 200])
def test_transfers_put_every_element_where_its_layout_has_it(rows, layout, packing, halves, columns):
    """The instructions, by the tables of PTX (which lane and column a register is), against the layout's coordinates."""
    part = TmemPart(0, Affine(0), columns // packing, rows, packing, halves)
    each = 2 if halves else packing  # elements of a register
    of = layout.of((rows, columns))
    coordinates, lanes = of.coordinates(), lanes_of(rows)
    seen = set()
    for t, warp, lane in itertools.product(transfers(part, of, "it", None), range(4), range(32)):
        per_repeat = {"32x32b": 1, "16x128b": 2, "16x256b": 4}[t.shape]
        for register in range(t.count * per_repeat):
            own_lane, c = transfer_cell(t.shape, lane, register)
            for half in range(each):
                row, column = coordinates[warp, lane, (t.register + register) * each + half]
                # Of halves a register has two neighbouring columns of cells, else the elements of one.
                there = t.column + 2 * c + half if halves else (t.column + c) * packing + half
                assert (lanes[row], column) == (32 * warp + t.lane + own_lane, there)
                seen.add((row, column))
    assert len(seen) == rows * columns


LAYOUTS = [(128, None), (128, Layout.TCGEN05), (64, None)]


@pytest.mark.parametrize("rows, layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype, packed",
    [
        (F, False),
        (BF, True),
        (np.int32, False),
        (np.float16, False),
        (np.float16, True),
        (np.int16, True),
        (np.uint16, True),
        (np.int8, True),
    ],
)
def test_there_and_back(rows, layout, dtype, packed):
    """What is stored is what is loaded: whole and part of the columns, in each layout, packed too."""

    def body(x, o, whole):
        t = layout or (Layout.WGMMA if rows == 64 else Layout.TCGEN05_TMEM_NATIVE)
        plgpu.async_store_tmem(whole, plgpu.load(x, layout=t))
        plgpu.commit_tmem()
        plgpu.async_store_tmem(whole.at[:, plgpu.ds(16, 16)], plgpu.load(x.at[:, plgpu.ds(0, 16)], layout=t))
        plgpu.commit_tmem()
        back = plgpu.async_load_tmem(whole, layout=layout)
        plgpu.wait_load_tmem()
        o[...] = back

    x = (random(rows, 48) * 100).astype(dtype)
    (got,) = run(
        body, x, out=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch=[plgpu.TMEM((rows, 48), dtype, packed=packed)]
    )
    want = x.copy()
    want[:, 16:32] = x[:, :16]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows, layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype, other, packed",
    [
        (F, np.int32, False),
        (np.uint32, F, False),
        (np.int32, np.uint32, False),
        (BF, np.uint16, True),
        (np.int16, np.float16, True),
        (np.float16, BF, True),
    ],
)
def test_bits_seen_as_another_type(rows, layout, dtype, other, packed):
    """Loads and stores of a view's bitcast, before and behind a slice: what NumPy's `view` gives, nothing is converted."""

    def body(x, y, o, both, whole):
        t = layout or (Layout.WGMMA if rows == 64 else Layout.TCGEN05_TMEM_NATIVE)
        plgpu.async_store_tmem(whole, plgpu.load(x, layout=t))
        plgpu.commit_tmem()
        column = 16 * plgpu.cdiv(plgpu.dim_size(y, 1), 16)  # 16, which only a run knows
        seen = whole.bitcast(other).at[:, plgpu.ds(column, 16)]
        plgpu.async_store_tmem(seen, plgpu.load(y, layout=t))
        plgpu.commit_tmem()
        back = plgpu.async_load_tmem(whole.at[:, plgpu.ds(0, 32)].bitcast(other), layout=layout)
        same = plgpu.async_load_tmem(whole.bitcast(other).bitcast(dtype), layout=layout)
        plgpu.wait_load_tmem()
        o[...] = back
        both[...] = same

    x = np.random.default_rng(0).integers(0, 256, (rows, 48 * np.dtype(dtype).itemsize)).astype(np.uint8).view(dtype)
    y = np.random.default_rng(1).integers(0, 256, (rows, 16 * np.dtype(other).itemsize)).astype(np.uint8).view(other)
    outs = [jax.ShapeDtypeStruct((rows, 32), other), jax.ShapeDtypeStruct((rows, 48), dtype)]
    scratch = [plgpu.TMEM((rows, 48), dtype, packed=packed)]
    found, same = run(body, x, y, out=outs, scratch=scratch)
    want = x.copy()
    want[:, 16:32] = y.view(dtype)
    assert found.tobytes() == np.ascontiguousarray(want[:, :32]).tobytes() and same.tobytes() == want.tobytes()


def test_an_operand_and_an_accumulator_seen_as_another_type():
    """A is written as integers and multiplied as bfloat16; the accumulator is a buffer of integers."""
    m, n, k = 128, 32, 64

    def body(x, y, o, b, packed, acc, full, done, ready):
        plgpu.copy_gmem_to_smem(y, b, full)
        plgpu.async_store_tmem(packed, plgpu.load(x, layout=Layout.TCGEN05_TMEM_NATIVE))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        plgpu.barrier_wait(full)
        plgpu.tcgen05_mma(acc.bitcast(F), packed.bitcast(BF), b.transpose((1, 0)), done, accumulate=False)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(acc.bitcast(F))
        plgpu.wait_load_tmem()

    x, y = random(m, k, dtype=BF), random(n, k, dtype=BF, seed=1)
    (found,) = run(
        body,
        x.view(np.uint16),
        y,
        out=jax.ShapeDtypeStruct((m, n), F),
        scratch=[
            operand(n, k),
            plgpu.TMEM((m, k), np.uint16, packed=True),
            plgpu.TMEM((m, n), np.int32),
            plgpu.Barrier(),
            plgpu.Barrier(orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )
    np.testing.assert_allclose(found, x.astype(F) @ y.astype(F).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a_type", "b_type", "acc_type"),
    [
        ("float16", "float16", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("float32", "float32", "float32"),
        ("float8_e4m3fn", "float8_e5m2", "float32"),
        ("float8_e5m2", "float8_e5m2", "float32"),
        ("float16", "float16", "float16"),
        ("float8_e4m3fn", "float8_e5m2", "float16"),
        ("int8", "uint8", "int32"),
    ],
)
@pytest.mark.parametrize("m", [128, 64])
def test_products_of_every_kind(a_type, b_type, acc_type, m):
    """One product of each kind and M, B as its transpose (K contiguous); integers on sm_100a only."""
    a_t, b_t = (np.dtype(getattr(ml_dtypes, t, t)) for t in (a_type, b_type))
    k, n = 256 // a_t.itemsize, 32

    def body(x, y, o, a, b, acc, full, done):
        plgpu.copy_gmem_to_smem(x, a, full)
        plgpu.copy_gmem_to_smem(y, b, full)
        plgpu.barrier_wait(full)
        plgpu.tcgen05_mma(acc, a, b.transpose((1, 0)), done, accumulate=False)
        plgpu.barrier_wait(done)
        value = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()
        o[...] = value

    x, y = (random(m, k) * 4).astype(a_t), (np.abs(random(n, k, seed=1)) * 4).astype(b_t)
    (got,) = run(
        body,
        x,
        y,
        out=jax.ShapeDtypeStruct((m, n), acc_type),
        scratch=[
            operand(m, k, dtype=a_t),
            operand(n, k, dtype=b_t),
            plgpu.TMEM((m, n), acc_type),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        compile_for=ARCHES if a_type != "int8" else ("sm_100a",),
    )

    def wide(z):
        if z.dtype == F:  # tf32 does not read the low bits
            return (z.view(np.uint32) & np.uint32(0xFFFFE000)).view(F).astype(np.float64)
        return z.astype(np.float64)

    want = wide(x) @ wide(y).T
    if acc_type == "float16":
        steps = k // (32 // a_t.itemsize)
        partial = np.abs(np.cumsum(wide(x)[:, None] * wide(y)[None], axis=-1)).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=steps * 2**-11 * partial)
        assert np.abs(got - want).max() > 2**-14 * partial  # it is rounded
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


def test_float16_accumulator_goes_on():
    """A product adds to what a store put there; columns of a slot from a start known at run time; the text of the moves."""

    def body(x, y, i, c, o, a, b, acc, full, ready, done):
        some = plgpu.ds(32 * i[0], 32)
        plgpu.copy_gmem_to_smem(x, a, full)
        plgpu.copy_gmem_to_smem(y, b, full)
        plgpu.barrier_wait(full)
        plgpu.async_store_tmem(acc.at[1, :, some], plgpu.load(c, layout=Layout.TCGEN05))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        plgpu.tcgen05_mma(acc.at[1, :, some], a, b.transpose((1, 0)), done, accumulate=True)
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(acc.at[1, :, some])
        plgpu.wait_load_tmem()

    x, y, c = random(128, 64, dtype=np.float16), random(32, 64, dtype=np.float16, seed=1), random(128, 32, seed=2)
    c, i = c.astype(np.float16), np.array([1], np.int32)
    scratch = [operand(128, 64, dtype=np.float16), operand(32, 64, dtype=np.float16)]
    scratch += [
        plgpu.TMEM((2, 128, 64), np.float16),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(orders_tensor_core=True),
        plgpu.Barrier(orders_tensor_core=True),
    ]
    out = jax.ShapeDtypeStruct((128, 32), np.float16)
    (got,) = run(body, x, y, i, c, out=out, scratch=scratch)
    want = x.astype(np.float64) @ y.astype(np.float64).T + c
    np.testing.assert_allclose(got, want, rtol=0, atol=5 * 2**-11 * 32)
    program = plgpu.kernel(body, out, scratch_types=scratch).program(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, y, i, c))
    )
    text = emit(build_plan(program, "sm_100a"))
    assert "tcgen05_store_halves_16x128b<4>(" in text and "tcgen05_load_halves_32x32b<16>(" in text


def test_a_out_of_tensor_memory():
    """A product whose A was computed and stored to tensor memory, over the accumulator that it came from (`RefUnion`)."""

    def body(x, y, z, o, a, b, c, union, acc, full, done, ready):
        scores, rounded = union
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @plgpu.when(warp == 0)
                def _():
                    for src, dst in ((x, a), (y, b), (z, c)):
                        plgpu.copy_gmem_to_smem(src, dst, full)
                    plgpu.barrier_wait(full)
                    plgpu.tcgen05_mma(scores, a, b, done, accumulate=False)
                    plgpu.barrier_wait(ready)
                    plgpu.tcgen05_mma(acc, rounded, c, done, accumulate=False)

        @plgpu.when(wg == 1)
        def _():
            plgpu.barrier_wait(done)
            value = plgpu.async_load_tmem(scores)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(rounded, (value * 0.5).astype(BF))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(done)
            value = plgpu.async_load_tmem(acc)
            plgpu.wait_load_tmem()
            o[...] = value

    x, y, z = random(128, 64, dtype=BF), random(64, 64, dtype=BF, seed=1), random(64, 32, dtype=BF, seed=2)
    tensor = plgpu.Barrier(orders_tensor_core=True)
    wide = plgpu.SMEM((64, 32), BF, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64)))
    (got,) = run(
        body,
        x,
        y,
        z,
        out=jax.ShapeDtypeStruct((128, 32), F),
        scratch=[
            operand(128, 64),
            operand(64, 64),
            wide,
            plgpu.RefUnion(plgpu.TMEM((128, 64), F), plgpu.TMEM((128, 64), BF, packed=True)),
            plgpu.TMEM((128, 32), F),
            plgpu.Barrier(num_arrivals=3),
            tensor,
            tensor,
        ],
        num_threads=2,
        thread_name="wg",
    )
    p = ((x.astype(F) @ y.astype(F)) * F(0.5)).astype(BF).astype(F)
    np.testing.assert_allclose(got, p @ z.astype(F), rtol=1e-4, atol=1e-3)


def test_columns_that_are_known_at_run_time():
    """Slots of a buffer, and a slice whose start is traced; beyond the buffer is an error that names it."""

    def body(x, o, t):
        def step(i, _):
            plgpu.async_store_tmem(t.at[i], plgpu.load(x.at[i], layout=Layout.TCGEN05_TMEM_NATIVE))
            plgpu.commit_tmem()

        jax.lax.fori_loop(0, x.shape[0], step, None)

        def back(i, _):
            value = plgpu.async_load_tmem(t.at[1, :, plgpu.ds(i * 8, 8)])
            plgpu.wait_load_tmem()
            o[:, plgpu.ds(i * 8, 8)] = value

        jax.lax.fori_loop(0, 2, back, None)

    x = random(2, 128, 16)
    options = dict(out=jax.ShapeDtypeStruct((128, 16), F), scratch=[plgpu.TMEM((2, 128, 16), F)])
    np.testing.assert_array_equal(run(body, x, **options)[0], x[1])
    with pytest.raises(OutOfBounds, match="index 2 along axis 0"):
        run(body, random(3, 128, 16), **options, compile_for=())


def test_a_branch_of_some_warps_moves_their_lanes_only():
    def body(x, o, t):
        value = plgpu.load(x, layout=Layout.TCGEN05_TMEM_NATIVE)
        plgpu.async_store_tmem(t, value)
        plgpu.commit_tmem()

        @plgpu.when_any_in_warp(jnp.max(value, axis=1) > 10.0)
        def _():
            own = plgpu.async_load_tmem(t)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(t, own * 2.0)
            plgpu.commit_tmem()

        back = plgpu.async_load_tmem(t)
        plgpu.wait_load_tmem()
        o[...] = back

    x = random(128, 16)
    x[40, 3] = 11  # of the second warp
    (got,) = run(body, x, out=jax.ShapeDtypeStruct(x.shape, F), scratch=[plgpu.TMEM((128, 16), F)])
    want = x.copy()
    want[32:64] *= 2
    np.testing.assert_array_equal(got, want)


# ---- loads that reduce -------------------------------------------------------------------------------------------------
REDUCTIONS = {
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(1),
    "absmax": lambda x: np.abs(x).max(1),
    "absmin": lambda x: np.abs(x).min(1),
}


def load_and_reduce(columns, dtype, reduce, start=0):
    def body(x, o, r, t):
        plgpu.async_store_tmem(t, plgpu.load(x, layout=Layout.TCGEN05_TMEM_NATIVE))
        plgpu.commit_tmem()
        value, extremum = plgpu.async_load_tmem(t.at[:, plgpu.ds(start, columns)], reduce=reduce)
        plgpu.wait_load_tmem()
        o[...] = value
        r[...] = extremum

    out = [jax.ShapeDtypeStruct((128, columns), dtype), jax.ShapeDtypeStruct((128,), dtype)]
    return body, out, [plgpu.TMEM((128, 128), dtype)]


@pytest.mark.parametrize(
    ("dtype", "reduce"),
    [(t, r) for t in (F, np.int32, np.uint32) for r in REDUCTIONS if t is F or not r.startswith("abs")],
)
@pytest.mark.parametrize(("columns", "start"), [(2, 6), (32, 0), (86, 2), (128, 0)])
def test_loads_that_reduce(reduce, dtype, columns, start):
    """The array and each row's extremum, of one instruction and of several; NaN gives NaN."""
    x = (random(128, 128) * 1000).astype(dtype)
    if dtype is F:
        x[5, 3 + start % 2] = x[77, start] = np.nan
    body, out, scratch = load_and_reduce(columns, dtype, reduce, start)
    got, extremum = run(body, x, out=out, scratch=scratch, arch="sm_103a", compile_for=("sm_103a",))
    want = x[:, start : start + columns]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(extremum, REDUCTIONS[reduce](want))


def test_loads_that_reduce_as_instructions(compiled):
    """Of 86 columns five loads, each with its extremum; four instructions, or two of three operands, put them together."""
    body, out, scratch = load_and_reduce(86, F, "max")
    program = plgpu.kernel(body, out, scratch_types=scratch).program(jax.ShapeDtypeStruct((128, 128), F))
    report = compiled(build_plan(program, "sm_103a"))
    maxima = [n for name, n in report.mnemonics.items() if name.startswith("FMNMX")]
    assert report.mnemonics["LDTM"] == 5 and 2 <= sum(maxima) <= 4
