"""Matrix descriptors: where the tensor core looks for each element, against where the buffer has it."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import IllegalInstruction
from mosaic_gpu.layouts.operands import (
    SharedOperand,
    decode_descriptor,
    descriptor_high,
    descriptor_low,
    shared_operand,
)
from mosaic_gpu.layouts.shared import SharedLayout, itemsize
from mosaic_gpu.memory import MemorySpace
from mosaic_gpu.program import Affine, DimIndex, Value, View

INDEX = Value(99, (), "int32")


def view_of(layout: SharedLayout, *dims: DimIndex, transpose: bool = False) -> View:
    ref = Value(1, layout.shape, layout.dtype, MemorySpace("smem"))
    kept = tuple(range(sum(d.size is not None for d in dims)))
    return View(ref, dims, kept[::-1] if transpose else kept)


def whole(n: int) -> DimIndex:
    return DimIndex(Affine(0), n)


def address(o: SharedOperand, base: int, row: int, k: int, value: int = 0) -> int:
    """Byte address of element (row of M or N, k) as the tensor core computes it from the descriptor of its instruction.

    The rows of the table "LBO/SBO" for swizzled operands: K-major: 8-row groups SBO apart, rows of a swizzle row each;
    MN-major: LBO from one swizzle row of MN to the next, 8 k SBO apart. The XOR acts on the address.
    """
    kk = o.k_per_instruction
    start = o.start.const + sum(f * value for _, f in o.start.terms)
    word = descriptor_high(o, False) << 32 | descriptor_low(o, base + start)
    step, k = divmod(k, kk)
    rows = 64 if not o.mn_major else o.rows
    block, row = divmod(row, rows) if not o.mn_major else (0, row)
    d = decode_descriptor(word + (o.k_offset(step) >> 4) + (o.row_offset(64 * block) >> 4 if block else 0))
    assert d.swizzle == o.swizzle and d.version == 0
    at = d.address
    if o.mn_major:
        per = o.swizzle // o.itemsize
        at += row // per * d.leading + row % per * o.itemsize + k // 8 * d.stride + k % 8 * o.swizzle
    else:
        at += row // 8 * d.stride + row % 8 * o.swizzle + k * o.itemsize
    return at ^ ((at >> 7) & (o.swizzle // 16 - 1)) << 4


def check(layout: SharedLayout, view: View, k_axis: int, base: int = 4096, value: int = 0) -> SharedOperand:
    """Every element of the view, by the descriptor and by the layout."""
    operand = shared_operand(view, layout, k_axis, "B", None)
    offsets = layout.byte_offsets()
    starts = [d.start.const + sum(f * value for _, f in d.start.terms) for d in view.dims]
    index = tuple(s if d.size is None else slice(s, s + d.size) for s, d in zip(starts, view.dims, strict=True))
    part = offsets[index].transpose(view.permutation)
    for i, j in itertools.product(*map(range, view.shape)):
        row, k = (j, i) if k_axis == 0 else (i, j)
        assert address(operand, base, row, k, value) == base + part[i, j], (i, j)
    return operand


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("rows", [8, 64])
def test_k_major(swizzle, dtype, rows):
    """(rows, k) with k contiguous, in tiles of 8 and of all rows."""
    chunk = swizzle // itemsize(dtype)
    layout = SharedLayout((64, 2 * chunk), dtype, (rows, chunk), swizzle)
    operand = check(layout, view_of(layout, whole(64), whole(2 * chunk)), k_axis=1)
    assert not operand.mn_major and operand.stride == (8 * swizzle if rows == 64 else 16 * swizzle)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("rows", [8, 32])
def test_mn_major(swizzle, rows):
    """(k, n) with n contiguous: 16-bit types only."""
    chunk = swizzle // 2
    layout = SharedLayout((32, 2 * chunk), "float16", (rows, chunk), swizzle)
    operand = check(layout, view_of(layout, whole(32), whole(2 * chunk)), k_axis=0)
    assert operand.mn_major and operand.leading == (8 if rows == 8 else 32) * swizzle


@pytest.mark.parametrize("k_axis", [0, 1])
def test_a_transposed_view_swaps_the_majorness(k_axis):
    layout = SharedLayout((64, 64), "bfloat16", (8, 64), 128)
    operand = check(layout, view_of(layout, whole(64), whole(64), transpose=True), k_axis)
    assert operand.mn_major == (k_axis == 1)


@pytest.mark.parametrize("rows", [8, 128])
@pytest.mark.parametrize("start", [0, 8, 64])
def test_slices_of_rows(rows, start):
    """64 of 128 rows; in tiles of all rows, too, every group of 8 can be reached."""
    layout = SharedLayout((128, 64), "bfloat16", (rows, 64), 128)
    check(layout, view_of(layout, DimIndex(Affine(start), 64), whole(64)), 1)


def test_slices_of_columns():
    layout = SharedLayout((64, 256), "bfloat16", (8, 64), 128)
    check(layout, view_of(layout, whole(64), DimIndex(Affine(128), 64)), 1)
    check(layout, view_of(layout, whole(64), DimIndex(Affine(64), 128)), 0)


@pytest.mark.parametrize("slot", [0, 2])
def test_slots(slot):
    """A leading dimension chosen by a static or a run-time index."""
    layout = SharedLayout((3, 64, 64), "bfloat16", (64, 64), 128)
    check(layout, view_of(layout, DimIndex(Affine(slot), None), whole(64), whole(64)), 1)
    view = view_of(layout, DimIndex(Affine(0, ((INDEX, 1),)), None), whole(64), whole(64))
    assert check(layout, view, 1, value=slot).start.terms == ((INDEX, 64 * 128),)


def test_run_time_start_of_rows():
    """wg * 64, known to be a multiple of 64."""
    layout = SharedLayout((2, 128, 64), "bfloat16", (128, 64), 128)
    rows = DimIndex(Affine(0, ((INDEX, 64),)), 64)
    view = view_of(layout, DimIndex(Affine(1), None), rows, whole(64))
    for value in (0, 1):
        check(layout, view, 1, value=value)


@settings(deadline=None, max_examples=40)
@given(
    tiles=st.sampled_from([8, 16, 64]),
    swizzle=st.sampled_from([32, 64, 128]),
    rows=st.sampled_from([(0, 16), (8, 8), (16, 48), (0, 64), (32, 32)]),
    columns=st.sampled_from([(0, 1), (1, 1), (1, 2)]),
    k_axis=st.integers(0, 1),
)
def test_any_slice_that_is_taken_is_right(tiles, swizzle, rows, columns, k_axis):
    """Property: a descriptor that is made finds every element of its view; the rest is refused."""
    chunk = swizzle // 2
    layout = SharedLayout((64, 3 * chunk), "bfloat16", (tiles, chunk), swizzle)
    view = view_of(layout, DimIndex(Affine(rows[0]), rows[1]), DimIndex(Affine(columns[0] * chunk), columns[1] * chunk))
    try:
        shared_operand(view, layout, k_axis, "B", None)
    except IllegalInstruction:
        return
    check(layout, view, k_axis)


def test_constants_of_the_descriptor():
    """K-major, 128-byte swizzle: SBO 1024, swizzle 1 at bit 62; tcgen05 differs in bit 46 only (as compared with CUTLASS)."""
    layout = SharedLayout((64, 64), "bfloat16", (8, 64), 128)
    operand = shared_operand(view_of(layout, whole(64), whole(64)), layout, 1, "A", None)
    low = descriptor_low(operand)
    assert descriptor_high(operand, False) << 32 | low == 0x4000004000010000
    assert descriptor_high(operand, True) << 32 | low == 0x4000404000010000
    d = decode_descriptor(descriptor_high(operand, True) << 32 | descriptor_low(operand, 0x2000))
    assert (d.address, d.leading, d.stride, d.swizzle, d.version) == (0x2000, 16, 1024, 128, 1)


# ---- refusals ---------------------------------------------------------------------------------------------------------------
TILED = SharedLayout((2, 64, 128), "bfloat16", (8, 64), 128)


@pytest.mark.parametrize(
    ("layout", "dims", "k_axis", "words"),
    [
        (
            SharedLayout((64, 64), "bfloat16"),
            (whole(64), whole(64)),
            1,
            r"tiled in two dimensions and swizzled: SMEM\(.*has no tiling",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (8, 64)),
            (whole(64), whole(64)),
            1,
            "tiled in two dimensions and swizzled",
        ),
        (TILED, (DimIndex(Affine(0), 2), DimIndex(Affine(0), None), whole(128)), 1, "two last dimensions"),
        (TILED, (whole(2), whole(64), whole(128)), 1, "is 2-D"),
        (
            SharedLayout((64, 64), "bfloat16", (4, 64), 128),
            (whole(64), whole(64)),
            1,
            "tiles of 4 rows; a swizzle atom has 8",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (8, 64), 128),
            (DimIndex(Affine(4), 8), whole(64)),
            1,
            "starts at row 4.*multiple of 8",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (8, 64), 128),
            (DimIndex(Affine(0, ((INDEX, 4),)), 8), whole(64)),
            1,
            r"multiple of 8; where the start always is a multiple, write plgpu.multiple_of\(start, 8\)",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (8, 64), 128),
            (DimIndex(Affine(0), 32, 2), whole(64)),
            1,
            "strided slices",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (8, 64), 128),
            (whole(64), DimIndex(Affine(16), 32)),
            1,
            "column 16.*multiple of 64",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (16, 64), 128),
            (whole(64), whole(64)),
            1,
            "64 rows in tiles of 16; use tiles of 8 or of all 64",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (16, 64), 128),
            (DimIndex(Affine(8), 16), whole(64)),
            1,
            "straddle tiles of 16",
        ),
        (SharedLayout((64, 128), "int8", (8, 128), 128), (whole(64), whole(128)), 0, "must be contiguous along K"),
        (
            SharedLayout((64, 64), "float32", (8, 32), 128),
            (whole(64), whole(64)),
            0,
            "must be contiguous along K here",
        ),
        (
            SharedLayout((64, 64), "bfloat16", (8, 64), 128),
            (DimIndex(Affine(0), 8), whole(64)),
            0,
            "K = 8 is not a multiple of 16",
        ),
        (
            SharedLayout((40, 128), "int8", (8, 128), 128),
            (whole(40), DimIndex(Affine(0), 16)),
            1,
            "K = 16 is not a multiple of 32",
        ),
    ],
)
def test_refused(layout, dims, k_axis, words):
    with pytest.raises(IllegalInstruction, match=words):
        shared_operand(view_of(layout, *dims), layout, k_axis, "B", None)


def test_refusals_carry_the_line_of_the_product(plan, array, assert_at):
    def body(x, a, b):
        def scope(acc):
            plgpu.wgmma(acc, a, b.at[plgpu.ds(lax.axis_index("g") * 4, 64)])  # product

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    a, b = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tile), plgpu.SMEM((128, 64), jnp.bfloat16, transforms=tile)
    with pytest.raises(IllegalInstruction, match="multiple of 8") as e:
        plan(body, array(8), scratch_types=[a, b], grid=(4,), grid_names=("g",))
    assert_at(e.value, body, "product")
