"""Which thread and register holds which element: CuTe's layouts of fragments against `RegisterLayout.coordinates`."""

from __future__ import annotations

import numpy as np
import pytest

from mosaic_gpu.codegen.encodings import TRANSFERS
from mosaic_gpu.layouts.registers import Layout, wgmma
from mosaic_gpu.layouts.tmem import TMEMLayout, TmemPart, tmem_part, transfers
from mosaic_gpu.memory import MemorySpace
from mosaic_gpu.program import Affine, Value, View
from mosaic_gpu.simulator.tensor_memory import TensorMemory

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


@pytest.mark.parametrize("m, layout", [(256, None), (128, TMEMLayout.M64_COLLECTIVE_LAYOUT)])
@pytest.mark.parametrize("n", [32, 64, 128, 256])
def test_accumulators_of_a_pair(cute, m, n, layout):
    """Which cell holds which element of a block's rows: CuTe's layout of the accumulator against where the simulator puts it."""
    rows = m // 2
    theirs = cute.pair_product("float16", "float16", False, False, m, n).layouts["accumulator"]
    space = MemorySpace("tmem", collective=True, layout=layout)
    part = tmem_part(View.whole(Value(1, (rows, n), "float32", space)), "it", None)
    memory = TensorMemory(True)
    row, column = np.meshgrid(np.arange(rows), np.arange(n), indexing="ij")
    memory.store(part, 0, (row * n + column).astype(np.float32))
    cell = theirs((row + rows * column), 0, 0)
    np.testing.assert_array_equal(memory.cells[cell >> 16, cell & 0xFFFF].view(np.float32), row * n + column)
    assert memory.written.sum() == rows * n


# Rows, our layout, elements of a cell, the instruction.
TRANSFERRED = [
    (128, Layout.TCGEN05_TMEM_NATIVE, 1, "32x32b"),
    (128, Layout.TCGEN05, 1, "16x256b"),
    (64, Layout.WGMMA, 1, "16x256b"),
    (128, Layout.TCGEN05_TMEM_NATIVE, 2, "32x32b"),
    (128, Layout.TCGEN05, 2, "16x128b"),
    (64, Layout.WGMMA, 2, "16x128b"),
]


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("cells", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("rows, layout, packing, shape", TRANSFERRED)
def test_transfers_of_tensor_memory(cute, cute_blackwell, ptx, rows, layout, packing, shape, cells, store):
    """Every load and store that our plan makes of a part of tensor memory: the same instruction at the same address in each warp,
    and each register of each thread holds the same cell."""
    ours = transfers(TmemPart(0, Affine(0), cells, rows, packing), layout.of((rows, cells * packing)), "it", None)
    (repeats,) = {t.count for t in ours}
    per_thread, covered, _ = TRANSFERS[shape]
    assert {t.shape for t in ours} == {shape}
    compiled = cute_blackwell.tmem_transfer(shape, repeats, rows, cells, store)
    of = compiled.layouts
    thread_value, registers = of["thread and value"], of["registers"]
    assert all(thread_value(*c) == value for c, value in thread_value.samples)
    values, tall, wide = (_size(n) for n in registers.shape)
    assert (values, values * tall * wide) == (repeats * per_thread, ours[-1].register + values)
    height = 64 if _size(of["rows"].shape) == 64 else 128
    # Rows of the accumulator that a thread's registers have in each tile: 16 further for the upper lanes of each warp.
    coordinates = layout.of((rows, cells * packing)).coordinates().reshape(128, -1, packing, 2)
    for t in ours:
        i, j = t.lane // 16, t.column // (covered * repeats)
        for v in range(values):
            place = thread_value(THREADS, v)
            row = of["rows"](place % height) + 16 * i
            column = of["columns"](place // height) + j * covered * repeats
            mine = coordinates[:, t.register + v]
            np.testing.assert_array_equal(mine[:, :, 0], np.stack([row] * packing, 1))
            np.testing.assert_array_equal(mine[:, :, 1], np.stack([column * packing + k for k in range(packing)], 1))
            assert registers(v, i, j) - registers(0, i, j) == v

    name = f"tcgen05.{'st' if store else 'ld'}.sync.aligned.{shape}.x{repeats}.b32"
    for thread in (0, 31, 32, 70, 127):
        uses = ptx.Evaluator(1024, thread).run(compiled.ptx, r"tcgen05\.(ld|st)")
        assert {u.name for u in uses} == {name}
        assert sorted(u.operands[0 if store else 1] for u in uses) == sorted(
            (32 * (thread // 32) + t.lane) << 16 | (cute.TMEM_COLUMN + t.column) for t in ours
        )
