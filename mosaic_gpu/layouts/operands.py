"""MMA operands in shared memory: from a view of a buffer to matrix descriptors (PTX ISA 9.7.15.5.1.2 and 9.7.16.4.1).

The descriptor of wgmma and of tcgen05 differ in bit 46 only (for swizzled, relative tiles); both are made here, and decoded
by the simulator.
"""

from __future__ import annotations

import dataclasses

from ..codegen import encodings
from ..codegen.encodings import TCGEN05_VERSION, Descriptor
from ..errors import IllegalInstruction, Line
from ..program import Affine, View
from .shared import SharedLayout


@dataclasses.dataclass(frozen=True)
class SharedOperand:
    """One matrix operand: A (rows = M) or B (rows = N), K the contraction.

    buffer: value id; start: byte offset of its first element in the buffer; mn_major: contiguous along M/N instead of K;
    leading, stride: LBO and SBO in bytes; swizzle: bytes; mn_step(i), k_step(i): byte offset of the i-th 64 rows (A) and of
    the i-th instruction's K.
    """

    buffer: int
    start: Affine
    mn_major: bool
    leading: int
    stride: int
    swizzle: int
    itemsize: int
    rows: int
    k: int
    chunk: int  # elements of the contiguous dimension in one swizzle row
    chunk_bytes: int  # distance of one chunk to the next
    group_bytes: int  # distance of 8 rows of the strided dimension to the next 8
    k_bytes: int = 32  # of K for each instruction: of B beside a sparse A twice as many

    @property
    def k_per_instruction(self) -> int:
        return self.k_bytes // self.itemsize

    def k_offset(self, step: int) -> int:
        """Bytes to add for the step-th MMA along K."""
        kk = step * self.k_per_instruction
        if self.mn_major:
            return kk // 8 * self.group_bytes
        return kk // self.chunk * self.chunk_bytes + kk % self.chunk * self.itemsize

    def row_offset(self, row: int) -> int:
        """Bytes to add to start at M/N index `row` (a multiple of 8, of a chunk when mn_major)."""
        if self.mn_major:
            return row // self.chunk * self.chunk_bytes + row % self.chunk * self.itemsize
        return row // 8 * self.group_bytes


def shared_operand(
    view: View, layout: SharedLayout, k_axis: int, what: str, line: Line | None, transposable: tuple[int, ...] = (2,)
) -> SharedOperand:
    """The operand that a 2-D view of a buffer makes; k_axis: which of its dimensions is K (0 or 1).

    transposable: element sizes that may be contiguous along M or N (wgmma: 2 bytes; tcgen05: also 1).

    Raises IllegalInstruction for a layout that descriptors cannot describe, with the transforms that would do.
    """
    size = layout.itemsize
    if len(view.shape) != 2:
        raise IllegalInstruction(f"{what} of an MMA is 2-D; {view} has shape {view.shape}", line)
    k_step = SharedOperand.k_bytes // size
    if view.shape[k_axis] % k_step:  # first: no transforms would do
        raise IllegalInstruction(
            f"{what}: K = {view.shape[k_axis]} is not a multiple of {k_step} ({layout.dtype}), of which an instruction takes 32 "
            "bytes: fill up with zeros",
            line,
        )
    want = f"SMEM(..., transforms=(TilingTransform((8, {128 // size})), SwizzleTransform(128)))"
    if not layout.swizzle or len(layout.tile) != 2:
        raise IllegalInstruction(
            f"{what} in shared memory must be tiled in two dimensions and swizzled: {want}; {view.ref} has "
            f"{layout.tile or 'no tiling'}",
            line,
        )
    row_dim, col_dim = len(layout.shape) - 2, len(layout.shape) - 1
    kept = view.kept
    if set(kept) != {row_dim, col_dim}:
        raise IllegalInstruction(f"{what} must be the two last dimensions of its buffer; {view} keeps {kept}", line)
    mn_major = kept[k_axis] == row_dim
    rows_in_tile, chunk = layout.tile
    if rows_in_tile % 8:
        raise IllegalInstruction(f"{what}: tiles of {rows_in_tile} rows; a swizzle atom has 8", line)
    strides = layout.strides()
    (_, row_stride), (_, row_tile_stride) = strides[row_dim]
    (_, _), (_, chunk_bytes) = strides[col_dim]
    row_index, col_index = view.dims[row_dim], view.dims[col_dim]
    n_rows, n_cols = int(row_index.size or 0), int(col_index.size or 0)
    if row_index.stride != 1 or col_index.stride != 1:
        raise IllegalInstruction(f"{what}: strided slices cannot be described ({view})", line)
    group_bytes = row_tile_stride if rows_in_tile == 8 else 8 * row_stride
    one_tile = rows_in_tile == layout.shape[row_dim]  # then every group of 8 rows is group_bytes behind the one before
    row_tile, row_tile_bytes = (8, group_bytes) if one_tile else (rows_in_tile, row_tile_stride)
    start = _along(row_index.start, 8, group_bytes, row_tile, row_tile_bytes, what, "row", line)
    if rows_in_tile > 8 and n_rows > rows_in_tile:
        raise IllegalInstruction(
            f"{what}: {n_rows} rows in tiles of {rows_in_tile}; use tiles of 8 or of all {n_rows} rows", line
        )
    if rows_in_tile > 8 and row_index.start.static and row_index.start.const % rows_in_tile + n_rows > rows_in_tile:
        raise IllegalInstruction(f"{what}: rows {row_index} straddle tiles of {rows_in_tile}", line)
    start = start + _along(col_index.start, chunk, chunk_bytes, chunk, chunk_bytes, what, "column", line)
    for d in range(row_dim):
        start = start + view.dims[d].start * strides[d][0][1]
    k = n_rows if mn_major else n_cols
    mn = n_cols if mn_major else n_rows
    if mn_major and size not in transposable:
        raise IllegalInstruction(
            f"{what}: {layout.dtype} must be contiguous along K here; it is contiguous along M or N", line
        )
    leading, stride = (chunk_bytes, group_bytes) if mn_major else (16, group_bytes)
    operand = SharedOperand(
        view.ref.id, start, mn_major, leading, stride, layout.swizzle, size, mn, k, chunk, chunk_bytes, group_bytes
    )
    for value, name in ((leading, "leading"), (stride, "stride")):
        if value >= 1 << 18:
            raise IllegalInstruction(f"{what}: {name} byte offset {value} does not fit a descriptor (< 262144)", line)
    return operand


def written_as_multiple(start: Affine, unit: int) -> str:
    """For messages, behind "must be a multiple": what to write where only a run knows the start."""
    return "" if start.static else f"; where the start always is a multiple, write plgpu.multiple_of(start, {unit})"


def _along(
    start: Affine, unit: int, unit_bytes: int, tile: int, tile_bytes: int, what: str, name: str, line: Line | None
) -> Affine:
    """Byte offset of a start index that is a multiple of `unit` inside tiles of `tile`."""
    if any(f % unit for _, f in start.terms) or start.const % unit:
        raise IllegalInstruction(
            f"{what}: it starts at {name} {start}, which must be a multiple of {unit}{written_as_multiple(start, unit)}",
            line,
        )
    if tile == unit:
        return Affine(start.const // unit * unit_bytes, tuple((v, f // unit * unit_bytes) for v, f in start.terms))
    if any(f % tile for _, f in start.terms):
        raise IllegalInstruction(
            f"{what}: it starts at {name} {start}, which must be a multiple of the tile, {tile}"
            + written_as_multiple(start, tile),
            line,
        )
    const = start.const // tile * tile_bytes + start.const % tile // unit * unit_bytes
    return Affine(const, tuple((v, f // tile * tile_bytes) for v, f in start.terms))


def matrix_descriptor(operand: SharedOperand, tcgen05: bool, address: int = 0) -> Descriptor:
    """The descriptor of an instruction's part of an operand that starts at a byte address of shared memory."""
    version = TCGEN05_VERSION if tcgen05 else 0
    return Descriptor(address, operand.leading, operand.stride, operand.swizzle, version)


def descriptor_high(operand: SharedOperand, tcgen05: bool) -> int:
    """Upper 32 bits: SBO, version, swizzle.  Constant for the operand."""
    return matrix_descriptor(operand, tcgen05).high()


def descriptor_low(operand: SharedOperand, address: int = 0) -> int:
    """Lower 32 bits for a byte address in shared memory: start address and LBO."""
    return encodings.descriptor_low(operand.leading, address)


def decode_descriptor(word: int) -> Descriptor:
    """The fields of a 64-bit matrix descriptor, as the tensor core reads them."""
    return Descriptor.decode(word)
