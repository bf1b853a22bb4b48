"""What the tensor core gathers through a descriptor is what `SharedLayout` says lies there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_gpu.errors import IllegalInstruction, OutOfBounds, UninitializedRead
from mosaic_gpu.layouts.operands import shared_operand
from mosaic_gpu.layouts.shared import SharedLayout, itemsize
from mosaic_gpu.memory import MemorySpace
from mosaic_gpu.ops.elementwise import numpy_dtype
from mosaic_gpu.program import Affine, DimIndex, Value, View
from mosaic_gpu.simulator import memory, tensor_core

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")


def buffer(shape: tuple[int, ...], dtype: str, tile_rows: int, swizzle: int) -> tuple[Value, SharedLayout]:
    layout = SharedLayout(shape, dtype, (tile_rows, swizzle // itemsize(dtype)), swizzle)
    return Value(1, shape, dtype, MemorySpace("smem")), layout


def filled(layout: SharedLayout, offset: int) -> tuple[memory.SharedMemory, np.ndarray]:
    """Shared memory with random small numbers in the buffer, and those numbers."""
    shared = memory.SharedMemory(offset + layout.nbytes, poison=True)
    low = 0 if layout.dtype == "uint8" else -8
    data = np.random.default_rng(0).integers(low, 9, layout.shape).astype(numpy_dtype(layout.dtype))
    index = (layout.byte_offsets() + offset) // layout.itemsize
    shared.write(index, layout.itemsize, memory.to_raw(data, layout.dtype, layout.shape))
    return shared, data


def slice_of(ref: Value, starts: tuple[int, ...], sizes: tuple[int | None, ...], transposed: bool) -> View:
    dims = tuple(DimIndex(Affine(a), n) for a, n in zip(starts, sizes, strict=True))
    return View(ref, dims, (1, 0) if transposed else (0, 1))


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    swizzle=st.sampled_from((32, 64, 128)),
    high_tiles=st.booleans(),
    mn_major=st.booleans(),
    row_tiles=st.integers(1, 3),
    column_tiles=st.integers(1, 3),
    offset=st.sampled_from((0, 1024, 9216)),
    tcgen05=st.booleans(),
    data=st.data(),
)
def test_gather_matches_layout(dtype, swizzle, high_tiles, mn_major, row_tiles, column_tiles, offset, tcgen05, data):
    """A [mn, k] part of a buffer, K along either dimension, from any legal start."""
    mn_major = mn_major and itemsize(dtype) == 2
    chunk = swizzle // itemsize(dtype)
    rows = 64 * row_tiles
    ref, layout = buffer((2, rows, chunk * column_tiles), dtype, rows if high_tiles else 8, swizzle)
    shared, values = filled(layout, offset)
    row = 16 * data.draw(st.integers(0, rows // 16 - 1), "first 16 rows")
    count = 16 * data.draw(st.integers(1, (rows - row) // 16), "16s of rows")
    column = data.draw(st.integers(0, column_tiles - 1), "first chunk")
    width = chunk * data.draw(st.integers(1, column_tiles - column), "chunks")
    slot = data.draw(st.integers(0, 1), "slot")
    view = slice_of(ref, (slot, row, column * chunk), (None, count, width), False)
    operand = shared_operand(view, layout, 0 if mn_major else 1, "A", None)
    assert operand.mn_major == mn_major
    part = values[slot, row : row + count, column * chunk : column * chunk + width]
    want = (part.T if mn_major else part).astype(np.float32)
    got = tensor_core.gather(shared, operand, offset + operand.start.const, operand.rows, mn_major, dtype, tcgen05)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("tile_rows", [8, 128])
def test_rows_of_several_instructions(mn_major, tile_rows):
    """wgmma takes A 64 rows at a time."""
    ref, layout = buffer((128, 128), "bfloat16", tile_rows, 128)
    shared, values = filled(layout, 2048)
    operand = shared_operand(View.whole(ref), layout, 0 if mn_major else 1, "A", None)
    got = tensor_core.gather(shared, operand, 2048, 64, mn_major, "bfloat16", False)
    np.testing.assert_array_equal(got, (values.T if mn_major else values).astype(np.float32))


def test_a_wrong_stride_shows_in_the_numbers():
    ref, layout = buffer((64, 64), "float16", 8, 128)
    shared, values = filled(layout, 0)
    operand = shared_operand(View.whole(ref), layout, 1, "A", None)
    wrong = dataclasses.replace(operand, stride=512)
    assert not np.array_equal(
        tensor_core.gather(shared, wrong, 0, 64, False, "float16", False), values.astype(np.float32)
    )


def test_unwritten_and_outside():
    ref, layout = buffer((64, 64), "float16", 8, 128)
    operand = shared_operand(View.whole(ref), layout, 1, "A", None)
    with pytest.raises(UninitializedRead):
        tensor_core.gather(memory.SharedMemory(layout.nbytes, poison=True), operand, 0, 64, False, "float16", False)
    with pytest.raises(OutOfBounds):
        tensor_core.gather(memory.SharedMemory(layout.nbytes, poison=True), operand, 4096, 64, False, "float16", False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_exact(dtype):
    size = itemsize(dtype)
    raw = np.random.default_rng(1).integers(0, 256, 4096, np.uint8).view(memory.UNSIGNED[size])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        want = raw.view(numpy_dtype(dtype)).astype(np.float64)
        got = tensor_core.exact(raw, dtype).astype(np.float64)
    if dtype == "float32":
        finite = np.isfinite(want) & (np.abs(want) > 1e-30)
        np.testing.assert_allclose(got[finite], want[finite], rtol=2**-10)
        assert ((tensor_core.exact(raw, dtype).view(np.uint32) & 0x1FFF) == 0).all()
    else:
        np.testing.assert_array_equal(got, want)


def test_int32_is_exact_and_wraps():
    a = np.full((64, 32), 127.0)
    got = tensor_core.multiply_add(np.full((64, 64), 2**31 - 1, np.int32), a, a, 32, "int32")
    assert got.dtype == np.int32 and (got == np.int32(2**31 - 1 + 127 * 127 * 32 - 2**32)).all()


def test_float16_accumulator_rounds_after_each_instruction():
    a = np.full((64, 32), 1.0, np.float32)
    b = np.zeros((8, 32), np.float32)
    b[:, 0], b[:, 16] = 2048.0, 1.0
    got = tensor_core.multiply_add(None, a, b, 16, "float16")
    assert got.dtype == np.float16 and (got == 2048).all()  # 2049 is no float16
    b[:, 0], b[:, 1], b[:, 16] = 2048.0, 1.0, 1.0
    assert (tensor_core.multiply_add(None, a, b, 32, "float16") == 2050).all()


def test_descriptor_of_the_wrong_generation_is_refused():
    ref, layout = buffer((64, 64), "float16", 8, 128)
    operand = shared_operand(View.whole(ref), layout, 1, "A", None)
    high = tensor_core.descriptor_high
    try:
        tensor_core.descriptor_high = lambda o, tcgen05: high(o, not tcgen05)
        with pytest.raises(IllegalInstruction, match="version"):
            tensor_core.operand_index.__wrapped__(operand, 0, 64, False, True)
    finally:
        tensor_core.descriptor_high = high
