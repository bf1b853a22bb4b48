"""Products of a 2:4 sparse A and copies into tensor memory as CuTe DSL compiles them. The fixture loads it after cute_kernels.py.

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
from mosaic_gpu_oracle_cute_kernels import DTYPES, TMEM_COLUMN, Compiled, _allocate, _compile

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
