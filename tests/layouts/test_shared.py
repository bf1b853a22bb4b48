"""Shared memory: byte offsets of tiled and swizzled buffers against a formula element by element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_gpu.errors import IllegalInstruction
from mosaic_gpu.layouts.shared import SharedLayout, itemsize, shared_layout
from mosaic_gpu.memory import MemorySpace, SwizzleTransform, TilingTransform


def offset(index: tuple[int, ...], shape: tuple[int, ...], tile: tuple[int, ...], size: int, swizzle: int) -> int:
    """Where an element lies: its tile in the row-major grid of tiles, its place in the tile, then the XOR of the chunk."""
    lead = len(shape) - len(tile)
    grid = [*shape[:lead], *(n // t for n, t in zip(shape[lead:], tile, strict=True))]
    cell = [*index[:lead], *(i // t for i, t in zip(index[lead:], tile, strict=True))]
    inside = [i % t for i, t in zip(index[lead:], tile, strict=True)]
    number = 0
    for i, n in zip([*cell, *inside], [*grid, *tile], strict=True):
        number = number * n + i
    address = number * size
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    return address ^ ((address >> 7) & ((1 << bits) - 1)) << 4


CASES = [
    ((8, 64), "bfloat16", (8, 64), 128),
    ((64, 128), "bfloat16", (8, 64), 128),
    ((64, 128), "bfloat16", (64, 64), 128),
    ((2, 64, 128), "float16", (32, 64), 128),
    ((16, 64), "bfloat16", (8, 32), 64),
    ((16, 64), "bfloat16", (8, 16), 32),
    ((16, 64), "float32", (8, 32), 128),
    ((16, 256), "int8", (8, 128), 128),
    ((3, 5, 7), "float32", (), 0),
    ((4, 6), "uint8", (2, 3), 0),
    ((16, 64), "bfloat16", (), 128),
    ((256,), "float32", (32,), 128),
]


@pytest.mark.parametrize(("shape", "dtype", "tile", "swizzle"), CASES)
def test_offsets(shape, dtype, tile, swizzle):
    layout = SharedLayout(shape, dtype, tile, swizzle)
    found = layout.byte_offsets()
    for index in itertools.product(*map(range, shape)):
        assert found[index] == offset(index, shape, tile, itemsize(dtype), swizzle), index
    assert layout.nbytes == math.prod(shape) * itemsize(dtype)
    assert sorted(found.reshape(-1)) == list(range(0, layout.nbytes, itemsize(dtype))), (
        "each byte belongs to one element"
    )


@settings(deadline=None, max_examples=60)
@given(
    grid=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    rows=st.sampled_from([1, 2, 8, 16]),
    swizzle=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(["int8", "bfloat16", "float32", "float64"]),
    lead=st.lists(st.integers(1, 2), max_size=2),
)
def test_swizzled_buffers_are_permutations_of_16_byte_chunks(grid, rows, swizzle, dtype, lead):
    """Property: chunks stay whole and in their 128-byte line, whatever the tiles."""
    columns = swizzle // itemsize(dtype)
    layout = SharedLayout((*lead, grid[0] * rows, grid[1] * columns), dtype, (rows, columns), swizzle)
    plain = SharedLayout(layout.shape, dtype, layout.tile, 0)
    a, b = layout.byte_offsets().reshape(-1), plain.byte_offsets().reshape(-1)
    np.testing.assert_array_equal(a % 16, b % 16)
    np.testing.assert_array_equal(a // 128, b // 128)
    assert len(set(a)) == len(a)


def test_eight_rows_of_a_128_byte_swizzle():
    """Row r of a tile has its chunk c at chunk c ^ (r % 8)."""
    found = SharedLayout((16, 64), "bfloat16", (8, 64), 128).byte_offsets()
    for r, c in itertools.product(range(16), range(8)):
        assert found[r, 8 * c] == r * 128 + (c ^ r % 8) * 16


def space(*transforms):
    return MemorySpace("smem", transforms)


def test_transforms_make_the_layout():
    t = space(TilingTransform((8, 64)), SwizzleTransform(128))
    assert shared_layout((64, 128), "bfloat16", t, None) == SharedLayout((64, 128), "bfloat16", (8, 64), 128)
    assert shared_layout((64, 128), "bfloat16", space(), None) == SharedLayout((64, 128), "bfloat16", (), 0)


@pytest.mark.parametrize(
    ("shape", "transforms", "words"),
    [
        ((64,), (TilingTransform((8, 64)),), "more dimensions than the buffer"),
        ((60, 64), (TilingTransform((8, 64)),), r"does not divide the buffer \(60, 64\): 60 % 8 = 4"),
        ((64, 64), (TilingTransform((0, 64)),), "does not divide"),
        (
            (64, 64),
            (TilingTransform((8, 32)), SwizzleTransform(128)),
            r"needs rows of 128 bytes.*has 64.*TilingTransform\(\(rows, 64\)\)",
        ),
        ((64, 256), (SwizzleTransform(128),), "needs rows of 128 bytes.*has 512"),
        ((64, 64), (TilingTransform((8, 64)), SwizzleTransform(64)), "needs rows of 64 bytes"),
    ],
)
def test_transforms_that_do_not_fit(shape, transforms, words):
    with pytest.raises(IllegalInstruction, match=words):
        shared_layout(shape, "bfloat16", space(*transforms), None)
