"""A 2:4 sparse A, copies into tensor memory, loads and stores of it, as CuTe DSL compiles them. The fixture loads it after
cute_kernels.py.

No `from __future__ import annotations`: CuTe DSL reads the annotations.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute import core
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.nvgpu.tcgen05.helpers import make_sparse_smem_layout_atom
from cutlass.cute.nvgpu.warp.mma import SparseMetadataFormat
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers
from mosaic_gpu_oracle_cute_kernels import (
    DTYPES,
    SAMPLES,
    TMEM_COLUMN,
    Compiled,
    _allocate,
    _compile,
    _note,
    _tiled_mma,
)

METADATA_COLUMN = 256


def _sparse_mma(dtype: Any, mn: tuple):
    group = tcgen05.CtaGroup.TWO if mn[0] == 256 else tcgen05.CtaGroup.ONE
    majors = (OperandMajorMode.K, OperandMajorMode.K)
    make = tcgen05.MmaF16BF16SparseOp if dtype.width == 16 else tcgen05.MmaFP8SparseOp
    shape = (*mn, 512 // dtype.width)
    op = make(dtype, cutlass.Float32, shape, group, tcgen05.OperandSource.SMEM, *majors, SparseMetadataFormat.TID)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


@cute.kernel
def _sparse_kernel(dtype: cutlass.Constexpr, mnk: cutlass.Constexpr, b_layout: cute.ComposedLayout):
    mma = _sparse_mma(dtype, mnk[:2])
    atom = make_sparse_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, dtype)
    shape = mma.partition_shape_A((mnk[0], mnk[2]))
    a_layout = tcgen05.tile_to_mma_shape(atom, cute.append(shape, 1))
    memory = SmemAllocator()
    stored = memory.allocate_tensor(dtype, cute.make_layout(128 * mnk[2] // 2), 1024)
    pairs = core.get_sparse_elem_type(2, 1, dtype.mlir_type)
    a = cute.make_tensor(cute.recast_ptr(stored.iterator, a_layout.inner, dtype=pairs), a_layout.outer)
    b = _allocate(memory, dtype, b_layout)
    a_fragment, b_fragment = mma.make_fragment_A(a), mma.make_fragment_B(b)
    acc = mma.make_fragment_C(mma.partition_shape_C(mnk[:2]))
    pointer = cute.make_ptr(cutlass.Float32, TMEM_COLUMN, cute.AddressSpace.tmem, assumed_align=16)
    acc = cute.make_tensor(pointer, acc.layout)
    mma.set(tcgen05.Field.ACCUMULATE, True)
    columns = 1 if dtype.width == 16 else 2  # for each instruction
    for step in cutlass.range_constexpr(cute.size(a_fragment, mode=[2])):
        place = METADATA_COLUMN + columns * step
        metadata = cute.make_ptr(cutlass.Uint8, place, cute.AddressSpace.tmem, assumed_align=8)
        mma.set(tcgen05.Field.METADATA, metadata)
        cute.gemm(mma, acc, a_fragment[None, None, step, 0], b_fragment[None, None, step, 0], acc)


@cute.jit
def _sparse(stream, dtype: cutlass.Constexpr, mnk: cutlass.Constexpr):
    b_layout = blackwell_helpers.make_smem_layout_b(_sparse_mma(dtype, mnk[:2]), mnk, dtype, 1)
    blocks = mnk[0] // 128
    kernel = _sparse_kernel(dtype, mnk, b_layout)
    kernel.launch(grid=[blocks, 1, 1], block=[32, 1, 1], cluster=[blocks, 1, 1], stream=stream)


def sparse_product(dtype: str, m: int, n: int, k: int) -> Compiled:
    """A kernel of one product, K contiguous and swizzled by 128 bytes; m = 256: of a pair. A, then B, from a multiple of 1024
    bytes on; metadata from METADATA_COLUMN on, whose places the compiler takes from addresses."""
    return _compile("sm_100a", _sparse, DTYPES[dtype], (m, n, k))


# ---- copies into tensor memory --------------------------------------------------------------------------------------
@cute.kernel
def _copy_kernel(
    dtype: cutlass.Constexpr, columns: cutlass.Constexpr, swizzle: cutlass.Constexpr, group: cutlass.Constexpr
):
    atom = tcgen05.make_smem_layout_atom(getattr(tcgen05.SmemLayoutAtomKind, f"K_SW{swizzle}"), dtype)
    source = _allocate(SmemAllocator(), dtype, cute.tile_to_shape(atom, (128, columns), order=(0, 1)))
    lanes = cute.make_layout((128, columns), stride=(65536 * 32 // dtype.width, 1))
    place = cute.make_ptr(dtype, TMEM_COLUMN, cute.AddressSpace.tmem, assumed_align=16)
    target = cute.make_tensor(place, lanes)
    copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp128x256bOp(group), dtype), target)
    mine = copy.get_slice(0)
    words = tcgen05.get_s2t_smem_desc_tensor(copy, mine.partition_S(source))
    cute.copy(copy, words, mine.partition_D(target))


@cute.jit
def _copy(
    stream,
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    swizzle: cutlass.Constexpr,
    group: cutlass.Constexpr,
):
    blocks = 2 if group == tcgen05.CtaGroup.TWO else 1
    kernel = _copy_kernel(dtype, columns, swizzle, group)
    kernel.launch(grid=[blocks, 1, 1], block=[32, 1, 1], cluster=[blocks, 1, 1], stream=stream)


def matrix_copy(dtype: str, columns: int, swizzle: int, pair: bool) -> Compiled:
    """A kernel that copies 128 rows from shared memory, chunks of `swizzle` bytes one behind the other, to TMEM_COLUMN."""
    dtypes = {**DTYPES, "float32": cutlass.Float32}
    group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    return _compile("sm_100a", _copy, dtypes[dtype], columns, swizzle, group)


# ---- loads and stores of tensor memory ------------------------------------------------------------------------------
@cute.kernel
def _transfer_kernel(
    operation: cutlass.Constexpr, mn: cutlass.Constexpr, store: cutlass.Constexpr, memory: cute.Pointer
):
    mma = _tiled_mma("sm_100a", cutlass.Float16, cutlass.Float16, False, False, *mn)
    acc = mma.make_fragment_C(mma.partition_shape_C(mn))
    _note("accumulator", acc.layout)
    pointer = cute.make_ptr(cutlass.Float32, TMEM_COLUMN, cute.AddressSpace.tmem, assumed_align=16)
    cells = cute.make_tensor(pointer, acc.layout)[(None, None), 0, 0]
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(operation, cutlass.Float32), cells)
    mine, elements = copy.get_slice(cute.arch.thread_idx()[0]), cute.make_identity_tensor(mn)
    shape = mine.partition_S(elements).shape if cutlass.const_expr(store) else mine.partition_D(elements).shape
    registers = cute.make_rmem_tensor(shape, cutlass.Float32)
    _note("registers", registers.layout)
    of_registers = copy.layout_src_tv_tiled if cutlass.const_expr(store) else copy.layout_dst_tv_tiled
    _note("thread and value", of_registers, SAMPLES[::4])
    for i, name in enumerate(("rows", "columns")):
        _note(name, copy.tiler_mn[i])
    one = cute.make_tensor(memory, cute.make_layout(1))
    if cutlass.const_expr(store):
        registers.fill(one[0])
        cute.copy(copy, registers, mine.partition_D(cells))
    else:
        cute.copy(copy, mine.partition_S(cells), registers)
        one[0] = registers.load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0), 0)  # so that the loads are kept


@cute.jit
def _transfer(
    stream,
    operation: cutlass.Constexpr,
    mn: cutlass.Constexpr,
    store: cutlass.Constexpr,
    memory: cute.Pointer,
):
    _transfer_kernel(operation, mn, store, memory).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def tmem_transfer(shape: str, repeats: int, m: int, n: int, store: bool) -> Compiled:
    """A kernel that loads or stores an accumulator (m, n) of 32-bit cells at column TMEM_COLUMN by tcgen05.ld or .st.`shape`.

    Layouts: "thread and value" -> position in a tile; "rows", "columns": the tile's indices; "registers": (value, tile of rows,
    tile of columns); "accumulator": its cells.
    """
    operation = getattr(tcgen05, f"{'St' if store else 'Ld'}{shape[:-1]}bOp")(tcgen05.Repetition(repeats))
    memory = cute.runtime.make_ptr(cutlass.Float32, 16, cute.AddressSpace.gmem)
    return _compile("sm_100a", _transfer, operation, (m, n), store, memory)
