"""What CuTe DSL says: kernels compiled to PTX, layouts of shared memory and of fragments, instruction descriptors.

Imported by the fixture `cute`, after it has set CuTe DSL's environment. No `from __future__ import annotations`: CuTe DSL
reads the annotations.

A side of a product is (mn_major, swizzle, small): small is True for tiles of 8 rows in row-major order, the way of
``TilingTransform((8, chunk))``, False for ``TilingTransform((rows, chunk))``, chunks one behind the other.
"""

import dataclasses
import math
import re
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as primitives
from cutlass.cute.nvgpu import tcgen05, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers, blockscaled_layout
from numpy import ndarray

DTYPES = {
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.TFloat32,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
}
SLOT = 1  # of the two that each buffer has
TMEM_COLUMN = 64
Nested = int | tuple["Nested", ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A CuTe layout, with what CuTe says at some coordinates, to check our reading of it.

    swizzle: (bits, base, shift), of byte addresses; None for none.
    """

    shape: Nested
    stride: Nested
    swizzle: tuple[int, int, int] | None = None
    samples: tuple[tuple[tuple[int, ...], int], ...] = ()

    def __call__(self, *coordinates: Any) -> Any:
        """The value, before the swizzle, at one coordinate for each mode, or one for the whole; ints or arrays."""
        if len(coordinates) == 1:
            return _along(self.shape, self.stride, coordinates[0])
        assert isinstance(self.shape, tuple) and len(coordinates) == len(self.shape)
        return sum(_along(n, d, c) for n, d, c in zip(self.shape, self.stride, coordinates, strict=True))

    def swizzled(self, byte_offsets: ndarray) -> ndarray:
        """XOR of address bits: `bits` of them from base + shift on, into those from base on."""
        assert self.swizzle is not None
        bits, base, shift = self.swizzle
        return byte_offsets ^ ((byte_offsets & (((1 << bits) - 1) << (base + shift))) >> shift)


def _along(shape: Nested, stride: Nested, coordinate: Any) -> Any:
    """A mode's share: its coordinate runs through the inner modes, the first fastest."""
    if isinstance(shape, int):
        return coordinate % shape * stride
    total = 0
    for n, d in zip(shape, stride, strict=True):
        total = total + _along(n, d, coordinate)
        coordinate = coordinate // _size(n)
    return total


def _size(shape: Nested) -> int:
    return shape if isinstance(shape, int) else math.prod(_size(n) for n in shape)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """PTX of a kernel, and the layouts in it by name."""

    ptx: str
    layouts: dict[str, Layout]


_traced: dict[str, Any] = {}  # what the functions below leave behind while CuTe DSL traces them


def _compile(arch: str, function: Any, *arguments: Any) -> Compiled:
    _traced.clear()
    compiled = cute.compile(function, make_fake_stream(), *arguments, options=f"--gpu-arch {arch}")
    return Compiled(compiled.__ptx__, dict(_traced))


def _note(name: str, layout: Any, coordinates: tuple[tuple[int, ...], ...] = ()) -> None:
    swizzle = None
    if isinstance(layout, cute.ComposedLayout):
        bits, base, shift = (int(x) for x in re.findall(r"\d+", str(layout.inner)))
        swizzle, layout = (bits, base, shift), layout.outer
    samples = tuple((c, int(layout(c))) for c in coordinates)
    _traced[name] = Layout(layout.shape, layout.stride, swizzle, samples)


# ---- products out of shared memory ----------------------------------------------------------------------------------
def _major(mn_major: bool) -> OperandMajorMode:
    return OperandMajorMode.MN if mn_major else OperandMajorMode.K


def _tiled_mma(
    arch: str, a_type: Any, b_type: Any, a_mn: bool, b_mn: bool, m: int, n: int, from_registers: bool = False
):
    majors = (_major(a_mn), _major(b_mn))
    if arch == "sm_90a":
        source = warpgroup.OperandSource.RMEM if from_registers else warpgroup.OperandSource.SMEM
        if a_type.width == 16:
            op = warpgroup.MmaF16BF16Op(a_type, cutlass.Float32, (64, n, 16), source, *majors)
        elif a_type in (cutlass.Int8, cutlass.Uint8):
            op = warpgroup.MmaI8Op(a_type, b_type, cutlass.Int32, (64, n, 32), source, *majors)
        else:
            op = warpgroup.MmaF8Op(a_type, b_type, cutlass.Float32, (64, n, 32), source, *majors)
    else:
        where = (tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, *majors)
        if a_type.width == 16:
            op = tcgen05.MmaF16BF16Op(a_type, cutlass.Float32, (m, n, 16), *where)
        elif a_type.width == 32:
            op = tcgen05.MmaTF32Op((m, n, 8), *where)
        else:
            op = tcgen05.MmaF8F6F4Op(a_type, b_type, cutlass.Float32, (m, n, 32), *where)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def _shared_layout(arch: str, dtype: Any, side: tuple, mn: int, k: int) -> Any:
    """(mn, k, slot) -> elements, before the swizzle."""
    mn_major, swizzle, small = side
    family = warpgroup if arch == "sm_90a" else tcgen05
    kind = getattr(family.SmemLayoutAtomKind, f"{'MN' if mn_major else 'K'}_SW{swizzle}")
    contiguous_first = bool(mn_major) == bool(small)  # whether the atom's neighbour is the next along M/N
    order = (0, 1, 2) if contiguous_first else (1, 0, 2)
    return cute.tile_to_shape(family.make_smem_layout_atom(kind, dtype), (mn, k, 2), order)


def _allocate(memory: SmemAllocator, dtype: Any, layout: Any) -> Any:
    """A buffer at the next multiple of 1024 bytes of dynamic shared memory."""
    return memory.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)


@cute.kernel
def _product_kernel(
    arch: cutlass.Constexpr,
    a_type: cutlass.Constexpr,
    b_type: cutlass.Constexpr,
    a_side: cutlass.Constexpr,
    b_side: cutlass.Constexpr,
    mnk: cutlass.Constexpr,
):
    m, n, k = mnk
    mma = _tiled_mma(arch, a_type, b_type, bool(a_side[0]), bool(b_side[0]), m, n)
    a_layout = _shared_layout(arch, a_type, a_side, m, k)
    b_layout = _shared_layout(arch, b_type, b_side, n, k)
    _note("a", a_layout)
    _note("b", b_layout)
    memory = SmemAllocator()
    a = _allocate(memory, a_type, a_layout)
    b = _allocate(memory, b_type, b_layout)
    mine = mma.get_slice(0)
    a_fragment = mma.make_fragment_A(mine.partition_A(a))
    b_fragment = mma.make_fragment_B(mine.partition_B(b))
    acc = mma.make_fragment_C(mma.partition_shape_C((m, n)))
    if cutlass.const_expr(arch == "sm_90a"):
        acc.fill(0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
    else:
        pointer = cute.make_ptr(cutlass.Float32, TMEM_COLUMN, cute.AddressSpace.tmem, assumed_align=16)
        acc = cute.make_tensor(pointer, acc.layout)
        mma.set(tcgen05.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(cute.size(a_fragment, mode=[2])):
        cute.gemm(mma, acc, a_fragment[None, None, step, SLOT], b_fragment[None, None, step, SLOT], acc)
    if cutlass.const_expr(arch == "sm_90a"):
        warpgroup.commit_group()
        warpgroup.wait_group(0)


@cute.jit
def _product(
    stream,
    arch: cutlass.Constexpr,
    a_type: cutlass.Constexpr,
    b_type: cutlass.Constexpr,
    a_side: cutlass.Constexpr,
    b_side: cutlass.Constexpr,
    mnk: cutlass.Constexpr,
):
    _product_kernel(arch, a_type, b_type, a_side, b_side, mnk).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def product(arch: str, a_type: str, b_type: str, a_side: tuple, b_side: tuple, mnk: tuple[int, int, int]) -> Compiled:
    """A kernel of one product m x n x k from slot SLOT of two buffers of two slots; layouts "a", "b": (mn, k, slot).

    One instruction after the other, for each 32 bytes of K, and in those for each 64 rows (wgmma).
    """
    return _compile(arch, _product, arch, DTYPES[a_type], DTYPES[b_type], a_side, b_side, mnk)


@cute.kernel
def _stores_kernel(
    arch: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    side: cutlass.Constexpr,
    mn: cutlass.Constexpr,
    k: cutlass.Constexpr,
    places: cutlass.Constexpr,
):
    layout = _shared_layout(arch, dtype, side, mn, k)
    _note("a", layout)
    a = _allocate(SmemAllocator(), dtype, layout)
    for place in places:
        a[place] = dtype(1.0)


@cute.jit
def _stores(
    stream,
    arch: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    side: cutlass.Constexpr,
    mn: cutlass.Constexpr,
    k: cutlass.Constexpr,
    places: cutlass.Constexpr,
):
    kernel = _stores_kernel(arch, dtype, side, mn, k, places)
    kernel.launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def stores(arch: str, dtype: str, side: tuple, mn: int, k: int, places: tuple[tuple[int, int, int], ...]) -> Compiled:
    """A kernel that writes the elements (mn, k, slot) `places` of a buffer at the start of shared memory."""
    return _compile(arch, _stores, arch, DTYPES[dtype], side, mn, k, places)


# ---- fragments ------------------------------------------------------------------------------------------------------
SAMPLES = tuple((thread, register) for thread in (0, 1, 5, 31, 32, 77, 127) for register in range(4))


@cute.jit
def _wgmma_fragments(
    stream, dtype: cutlass.Constexpr, m: cutlass.Constexpr, n: cutlass.Constexpr, k: cutlass.Constexpr
):
    mma = _tiled_mma("sm_90a", dtype, dtype, False, False, 64, n, from_registers=True)
    _note("c", mma.tv_layout_C, SAMPLES)
    _note("a", mma.tv_layout_A, SAMPLES)
    _note("c registers", mma.make_fragment_C(mma.partition_shape_C((m, n))).layout)
    _note("a registers", mma.make_fragment_A(mma.partition_shape_A((m, k))).layout)


def wgmma_fragments(dtype: str, m: int, n: int, k: int) -> dict[str, Layout]:
    """Of wgmma with A from registers, for a product m x n x k.

    "c", "a": (thread, value) -> row + 64 * column of one instruction; "c registers", "a registers": (value, m, n or k)
    -> register of the whole.
    """
    return _compile("sm_90a", _wgmma_fragments, DTYPES[dtype], m, n, k).layouts


def instruction_descriptor(
    a_type: str,
    b_type: str,
    m: int,
    n: int,
    a_mn_major: bool,
    b_mn_major: bool,
    acc_type: str = "float32",
    **fields: int,
) -> int:
    """By CuTe DSL's own builder, without compiling."""
    types = {**DTYPES, "float32": cutlass.Float32}
    accumulators = {"float32": cutlass.Float32, "float16": cutlass.Float16, "int32": cutlass.Int32}
    descriptor = primitives.Tcgen05InstrDesc.build(
        c_dtype=accumulators[acc_type],
        a_dtype=types[a_type],
        b_dtype=types[b_type],
        a_major=int(a_mn_major),
        b_major=int(b_mn_major),
        n_dim=n,
        m_dim=m,
        **fields,
    )
    return int(descriptor.value) & 0xFFFFFFFF


NARROW = {
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "float6_e2m3fn": cutlass.Float6E2M3FN,
    "float6_e3m2fn": cutlass.Float6E3M2FN,
    "float4_e2m1fn": cutlass.Float4E2M1FN,
}


def scaled_descriptor(kind: str, of: Any) -> int:
    """The descriptor of a block-scaled kind with the fields of `of`, by CuTe DSL's builders."""
    builder = primitives.Tcgen05MxInstrDesc if kind == "mxf8f6f4" else primitives.Tcgen05MxOmmaInstrDesc
    extra = {} if kind == "mxf8f6f4" else {"sparsity_version": 0}
    descriptor = builder.build(
        sparse_flag=int(of.sparse),
        a_sf_id=of.a_scale_id,
        b_sf_id=of.b_scale_id,
        a_dtype=NARROW[of.a_type],
        b_dtype=NARROW[of.b_type],
        scale_format=int(of.scale_type == "float8_e8m0fnu"),
        a_negate=int(of.a_negate),
        b_negate=int(of.b_negate),
        a_major=int(of.a_mn),
        b_major=int(of.b_mn),
        n_dim=of.n,
        m_dim=of.m,
        k_dim=int(of.wide_k),
        **extra,
    )
    return int(descriptor.value) & 0xFFFFFFFF


# ---- products of a pair of blocks -----------------------------------------------------------------------------------
@cute.kernel
def _pair_kernel(
    a_type: cutlass.Constexpr,
    b_type: cutlass.Constexpr,
    majors: cutlass.Constexpr,
    mn: cutlass.Constexpr,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
):
    mma = _pair_mma(a_type, b_type, majors, mn)
    memory = SmemAllocator()
    a, b = _allocate(memory, a_type, a_layout), _allocate(memory, b_type, b_layout)
    a_fragment, b_fragment = mma.make_fragment_A(a), mma.make_fragment_B(b)
    acc = mma.make_fragment_C(mma.partition_shape_C(mn))
    _note("accumulator", acc.layout)
    pointer = cute.make_ptr(cutlass.Float32, TMEM_COLUMN, cute.AddressSpace.tmem, assumed_align=16)
    acc = cute.make_tensor(pointer, acc.layout)
    mma.set(tcgen05.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(cute.size(a_fragment, mode=[2])):
        cute.gemm(mma, acc, a_fragment[None, None, step, 0], b_fragment[None, None, step, 0], acc)


def _pair_mma(a_type: Any, b_type: Any, majors: tuple, mn: tuple):
    where = (tcgen05.CtaGroup.TWO, tcgen05.OperandSource.SMEM, *(_major(bool(m)) for m in majors))
    if a_type.width == 16:
        op = tcgen05.MmaF16BF16Op(a_type, cutlass.Float32, (*mn, 16), *where)
    elif a_type.width == 32:
        op = tcgen05.MmaTF32Op((*mn, 8), *where)
    else:
        op = tcgen05.MmaF8F6F4Op(a_type, b_type, cutlass.Float32, (*mn, 32), *where)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


@cute.jit
def _pair(
    stream,
    a_type: cutlass.Constexpr,
    b_type: cutlass.Constexpr,
    majors: cutlass.Constexpr,
    mn: cutlass.Constexpr,
):
    mma = _pair_mma(a_type, b_type, majors, mn)
    tile = (*mn, 128 * 8 // a_type.width)
    a_layout = blackwell_helpers.make_smem_layout_a(mma, tile, a_type, 1)
    b_layout = blackwell_helpers.make_smem_layout_b(mma, tile, b_type, 1)
    kernel = _pair_kernel(a_type, b_type, majors, mn, a_layout, b_layout)
    kernel.launch(grid=[2, 1, 1], block=[32, 1, 1], cluster=[2, 1, 1], stream=stream)


def pair_product(a_type: str, b_type: str, a_mn: bool, b_mn: bool, m: int, n: int) -> Compiled:
    """A kernel of one product over 128 bytes of K, M of 256 or 128, from buffers as CuTe DSL itself lays them out for a pair.

    Layouts: "accumulator": of a block's part, (row, column) -> cell.
    """
    return _compile("sm_100a", _pair, DTYPES[a_type], DTYPES[b_type], (int(a_mn), int(b_mn)), (m, n))


# ---- block-scaled products ------------------------------------------------------------------------------------------
SCALE_COLUMNS = (256, 320)  # of tensor memory, where the factors of A and of B begin
SCALES = {"float8_e8m0fnu": cutlass.Float8E8M0FNU, "float8_e4m3fn": cutlass.Float8E4M3FN}


@cute.kernel
def _scaled_kernel(
    types: cutlass.Constexpr,
    block: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    mnk: cutlass.Constexpr,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
):
    mma = _scaled_mma(types, block, blocks, mnk)
    memory = SmemAllocator()
    a, b = _allocate(memory, types[0], a_layout), _allocate(memory, types[1], b_layout)
    a_fragment, b_fragment = mma.make_fragment_A(a), mma.make_fragment_B(b)
    acc = mma.make_fragment_C(mma.partition_shape_C(mnk[:2]))
    acc = cute.make_tensor(
        cute.make_ptr(cutlass.Float32, TMEM_COLUMN, cute.AddressSpace.tmem, assumed_align=16), acc.layout
    )
    group = tcgen05.CtaGroup.TWO if blocks == 2 else tcgen05.CtaGroup.ONE
    scales = []
    for side in cutlass.range_constexpr(2):
        shared = (blockscaled_layout.make_smem_layout_sfa, blockscaled_layout.make_smem_layout_sfb)[side]
        tensor = (blockscaled_layout.make_tmem_layout_sfa, blockscaled_layout.make_tmem_layout_sfb)[side]
        layout = shared(mma, mnk, block, 1)
        source = memory.allocate_tensor(types[2], layout, 1024)
        place = cute.make_ptr(types[2], SCALE_COLUMNS[side], cute.AddressSpace.tmem, assumed_align=16)
        target = cute.make_tensor(place, tensor(mma, mnk, block, cute.slice_(layout, (None, None, None, 0))))
        source_c, target_c = cute.filter_zeros(source), cute.filter_zeros(target)
        copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(group), types[2]), target_c)
        mine = copy.get_slice(0)
        words = tcgen05.get_s2t_smem_desc_tensor(copy, mine.partition_S(source_c))
        cute.copy(copy, words[None, None, None, None, 0], mine.partition_D(target_c))
        scales.append(target)
    mma.set(tcgen05.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(cute.size(a_fragment, mode=[2])):
        mma.set(tcgen05.Field.SFA, scales[0][None, None, step].iterator)
        mma.set(tcgen05.Field.SFB, scales[1][None, None, step].iterator)
        cute.gemm(mma, acc, a_fragment[None, None, step, 0], b_fragment[None, None, step, 0], acc)


def _scaled_mma(types: tuple, block: int, blocks: int, mnk: tuple):
    group = tcgen05.CtaGroup.TWO if blocks == 2 else tcgen05.CtaGroup.ONE
    majors = (OperandMajorMode.K, OperandMajorMode.K)
    return blackwell_helpers.make_blockscaled_trivial_tiled_mma(
        types[0], types[1], *majors, types[2], block, group, mnk[:2]
    )


@cute.jit
def _scaled(
    stream,
    types: cutlass.Constexpr,
    block: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    mnk: cutlass.Constexpr,
):
    mma = _scaled_mma(types, block, blocks, mnk)
    a_layout = blackwell_helpers.make_smem_layout_a(mma, mnk, types[0], 1)
    b_layout = blackwell_helpers.make_smem_layout_b(mma, mnk, types[1], 1)
    kernel = _scaled_kernel(types, block, blocks, mnk, a_layout, b_layout)
    kernel.launch(grid=[blocks, 1, 1], block=[32, 1, 1], cluster=[blocks, 1, 1], stream=stream)


def scaled_product(a_type: str, b_type: str, scale_type: str, block: int, m: int, n: int, k: int) -> Compiled:
    """A kernel that copies the factors of A and B to tensor memory and multiplies m x n x k, K contiguous; m = 256: of a pair.

    Each buffer starts at a multiple of 1024 bytes: A, B, the factors of A, those of B.
    """
    types = (NARROW[a_type], NARROW[b_type], SCALES[scale_type])
    return _compile("sm_100a", _scaled, types, block, m // 128, (m, n, k))
