"""Which thread and register holds which element: CuTe's layouts of fragments against `RegisterLayout.coordinates`."""

from __future__ import annotations

import numpy as np
import pytest

from mosaic_gpu.layouts.registers import tcgen05_native, wgmma

THREADS = np.arange(128)


def _of_threads(layout) -> np.ndarray:
    """Our coordinates as [thread, register, dim]."""
    coordinates = layout.coordinates()
    return coordinates.reshape(128, layout.registers, 2)


def _size(shape) -> int:
    return shape if isinstance(shape, int) else int(np.prod([_size(n) for n in shape]))


def _cute_fragment(thread_value, registers, row_step: int, column_step: int) -> np.ndarray:
    """[thread, register, dim] of a whole fragment: instruction (i, j) covers 64 rows and column_step columns.

    thread_value: (thread, value) -> row + 64 * column in one instruction; registers: (value, i, j) -> register.
    """
    assert all(thread_value(*c) == value for c, value in thread_value.samples), "our reading of the layout is wrong"
    values, tall, wide = (_size(n) for n in registers.shape)
    out = np.full((128, values * tall * wide, 2), -1)
    for v in range(values):
        place = thread_value(THREADS, v)
        for i in range(tall):
            for j in range(wide):
                out[:, registers(v, i, j)] = np.stack(
                    [place % 64 + i * row_step, place // 64 + j * column_step], axis=1
                )
    return out


@pytest.mark.parametrize("n", range(8, 257, 8))
@pytest.mark.parametrize("m", [64, 128])
def test_wgmma_accumulator(cute, m, n):
    layouts = cute.wgmma_fragments("float16", m, n, 16)
    theirs = _cute_fragment(layouts["c"], layouts["c registers"], 64, n)
    np.testing.assert_array_equal(_of_threads(wgmma((m, n))), theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [16, 32, 64, 128, 256])
def test_wgmma_a(cute, dtype, k):
    """The 16-bit A fragment: a tile (64, k) in the accumulator's layout, 8 registers for each step of K."""
    layouts = cute.wgmma_fragments(dtype, 64, 8, k)
    theirs = _cute_fragment(layouts["a"], layouts["a registers"], 64, 16)
    np.testing.assert_array_equal(_of_threads(wgmma((64, k))), theirs)


def test_8_bit_a_is_another_fragment(cute):
    """Why wgmma refuses fp8 in registers in `Layout.WGMMA`."""
    layouts = cute.wgmma_fragments("float8_e4m3fn", 64, 8, 64)
    theirs = _cute_fragment(layouts["a"], layouts["a registers"], 64, 32)
    ours = _of_threads(wgmma((64, 64)))
    assert theirs.shape == ours.shape and not np.array_equal(theirs, ours)


@pytest.mark.parametrize("n, width", [(8, 8), (16, 16), (32, 32), (64, 64), (128, 128), (64, 32), (256, 128), (128, 8)])
def test_tmem_load(cute, ptx, n, width):
    """The copy's layout; and the TMEM addresses that it compiles to: lanes of the warp, one column for each register."""
    compiled = cute.tmem_load(n, width)
    layouts = compiled.layouts
    thread_value = layouts["thread and value"]
    assert all(thread_value(*c) == value for c, value in thread_value.samples)
    registers, rows, columns = layouts["registers"], layouts["rows"], layouts["columns"]
    tiles = _size(registers.shape[2])
    theirs = np.full((128, n, 2), -1)
    for v in range(_size(registers.shape[0])):
        place = thread_value(THREADS, v)
        for tile in range(tiles):
            row, column = rows(place % 128), columns(place // 128) + tile * width
            theirs[:, registers(v, 0, tile)] = np.stack([row, column], axis=1)
    ours = _of_threads(tcgen05_native((128, n)))
    np.testing.assert_array_equal(ours, theirs)

    for thread in (0, 31, 32, 70, 127):
        loads = ptx.Evaluator(1024, thread).run(compiled.ptx, r"tcgen05\.ld")
        assert [u.name for u in loads] == [f"tcgen05.ld.sync.aligned.32x32b.x{width}.b32"] * tiles
        found = []
        for load in loads:
            lane, first = load.operands[1] >> 16, load.operands[1] & 0xFFFF
            assert len(load.operands[0]) == width
            found += [(lane + thread % 32, first - cute.TMEM_COLUMN + r) for r in range(width)]
        np.testing.assert_array_equal(ours[thread], found)
