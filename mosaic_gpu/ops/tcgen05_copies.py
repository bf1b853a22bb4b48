"""From shared memory to tensor memory by the tensor core (tcgen05.cp, PTX ISA 9.7.16.9): matrices, scale factors, metadata.

Asynchronous, issued by one thread.  A product that the same thread issues later has them; nothing else is in order by itself,
so that what a product may still read is overwritten only after a commit behind it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import arguments
from ..codegen.encodings import TCGEN05_VERSION, CopyForm, Descriptor
from ..errors import IllegalInstruction, UnsupportedCall
from ..layouts.operands import shared_operand
from ..layouts.tmem import METADATA_TILE, SCALE_ROWS, Part, metadata_part, scales_part, tmem_part
from ..program import Affine, Equation, View
from .registry import SM100, WARP, WARPGROUP, op
from .tcgen05 import ON_SM90, is_pair

copy_scales_p = op("async_copy_scales_to_tmem", issues_only=True, instead=ON_SM90)
copy_metadata_p = op("async_copy_sparse_metadata_to_tmem", issues_only=True, instead=ON_SM90)
copy_matrix_p = op("async_copy_smem_to_tmem", issues_only=True, instead=ON_SM90)
SCALES_TILE = (32, 16)  # rows x bytes that one instruction copies: 4 factors of each of 128 rows
MATRIX_ROWS, MATRIX_BYTES = 128, 32  # the same of a matrix


@dataclasses.dataclass(frozen=True)
class TmemCopy:
    """op: what it is called; form: of tcgen05.cp; buffer: value id of the shared memory; start: byte in it; part: where to;
    steps: (byte of shared memory from the start, cell from the part's first) of each instruction; leading, stride, swizzle: of
    their matrix descriptors; pair: in both blocks of a pair."""

    op: str
    form: CopyForm
    buffer: int
    start: Affine
    part: Part
    steps: tuple[tuple[int, int], ...]
    pair: bool
    leading: int = 16
    stride: int = 128
    swizzle: int = 0

    def descriptor(self, address: int = 0) -> Descriptor:
        """Of an instruction's source that starts at a byte of shared memory."""
        return Descriptor(address, self.leading, self.stride, self.swizzle, TCGEN05_VERSION)


def _bind(p: Any, smem_ref: Any, tmem_ref: Any, collective_axis: str | None) -> None:
    from ..frontend.primitives import bind

    if collective_axis is not None and not isinstance(collective_axis, str):
        arguments.refuse(p.name, "collective_axis", collective_axis, "the name of a cluster axis or None")
    bind(p, smem_ref, tmem_ref, collective_axis=collective_axis)


def async_copy_scales_to_tmem(smem_ref: Any, tmem_ref: Any, collective_axis: str | None = None) -> None:
    """Start copying the scale factors of a block-scaled operand from shared memory to tensor memory.

    tmem_ref: (rows, n) TMEM Ref in TMEMLayout.SCALES_LAYOUT, rows 128 or 256.  smem_ref: (rows // 128, n // 4, 32, 16) SMEM Ref
    of its dtype without transforms: element [i, j, r, 4 q + s] is factor 4 j + s of row 128 i + 32 q + r, as
    `scales.reshape(rows // 128, 4, 32, n // 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows // 128, n // 4, 32, 16)` makes it.
    collective_axis: of a pair of blocks; block 0 issues, each block copies out of its own shared memory into its own tensor
    memory.  Products that this thread issues later read the new factors; for the shared memory to be free, and for factors that
    a product may still read to be overwritten, wait for a commit.  PTX ISA 9.7.16.9.2, tcgen05.cp.32x128b.warpx4.
    """
    _bind(copy_scales_p, smem_ref, tmem_ref, collective_axis)


def async_copy_sparse_metadata_to_tmem(smem_ref: Any, tmem_ref: Any, collective_axis: str | None = None) -> None:
    """Start copying which elements a 2:4 sparse A keeps from shared memory to tensor memory.

    tmem_ref: (128, n) TMEM Ref in TMEMLayout.SPARSE_METADATA_LAYOUT.  smem_ref: (1, n // 16, 128, 16) SMEM Ref of uint8 without
    transforms, which holds what `format_tcgen05_sparse_metadata` makes.  collective_axis, and what comes in order: as of
    `async_copy_scales_to_tmem`; each block of a pair has the metadata of its own rows.  PTX ISA 9.7.16.9.2,
    tcgen05.cp.128x128b.
    """
    _bind(copy_metadata_p, smem_ref, tmem_ref, collective_axis)


def async_copy_smem_to_tmem(smem_ref: Any, tmem_ref: Any, collective_axis: str | None = None) -> None:
    """Start copying a matrix from shared memory to tensor memory: an accumulator to start from, or an operand A.

    smem_ref: (128, n) SMEM Ref, tiled by (8, swizzle / itemsize) and swizzled as an operand; tmem_ref: (128, n) TMEM Ref of its
    dtype, packed=True for elements of less than 32 bits; a row of n has a multiple of 32 bytes.  collective_axis, and what
    comes in order: as of `async_copy_scales_to_tmem`; a load or store of the same cells waits for a commit.  Raises
    IllegalInstruction for layouts that the copy cannot read.  PTX ISA 9.7.16.9.2, tcgen05.cp.128x256b.
    """
    _bind(copy_matrix_p, smem_ref, tmem_ref, collective_axis)


@copy_scales_p.abstract
def _(smem_ref: Any, tmem_ref: Any, *, collective_axis: str | None = None) -> Any:
    arguments.memory("async_copy_scales_to_tmem", "smem_ref", smem_ref, "smem")
    arguments.memory("async_copy_scales_to_tmem", "tmem_ref", tmem_ref, "tmem")
    if len(tmem_ref.shape) == 2:
        rows, n = tmem_ref.shape
        if smem_ref.shape == (rows // SCALE_ROWS, n // 4, *SCALES_TILE) and smem_ref.dtype == tmem_ref.dtype:
            return ()
    raise ValueError(
        f"async_copy_scales_to_tmem: smem_ref {smem_ref.dtype}{list(smem_ref.shape)}, tmem_ref {tmem_ref.dtype}"
        f"{list(tmem_ref.shape)}: (rows // {SCALE_ROWS}, n // 4, {SCALES_TILE[0]}, {SCALES_TILE[1]}) goes to (rows, n), of one "
        "dtype"
    )


@copy_metadata_p.abstract
def _(smem_ref: Any, tmem_ref: Any, *, collective_axis: str | None = None) -> Any:
    arguments.memory("async_copy_sparse_metadata_to_tmem", "smem_ref", smem_ref, "smem")
    arguments.memory("async_copy_sparse_metadata_to_tmem", "tmem_ref", tmem_ref, "tmem")
    if len(tmem_ref.shape) == 2 and smem_ref.dtype == tmem_ref.dtype == "uint8":
        rows, n = tmem_ref.shape
        if smem_ref.shape == (1, n // METADATA_TILE, rows, METADATA_TILE):
            return ()
    raise ValueError(
        f"async_copy_sparse_metadata_to_tmem: smem_ref {smem_ref.dtype}{list(smem_ref.shape)}, tmem_ref {tmem_ref.dtype}"
        f"{list(tmem_ref.shape)}: (1, n // {METADATA_TILE}, 128, {METADATA_TILE}) goes to (128, n), both uint8"
    )


@copy_matrix_p.abstract
def _(smem_ref: Any, tmem_ref: Any, *, collective_axis: str | None = None) -> Any:
    arguments.memory("async_copy_smem_to_tmem", "smem_ref", smem_ref, "smem")
    arguments.memory("async_copy_smem_to_tmem", "tmem_ref", tmem_ref, "tmem")
    if len(smem_ref.shape) != 2 or smem_ref.shape != tmem_ref.shape or smem_ref.dtype != tmem_ref.dtype:
        raise ValueError(
            f"async_copy_smem_to_tmem: smem_ref is {smem_ref.dtype}{list(smem_ref.shape)}, tmem_ref {tmem_ref.dtype}"
            f"{list(tmem_ref.shape)}; both are (128, n) of one dtype"
        )
    return ()


def _whole_tiles(ctx: Any, e: Equation, source: View) -> Affine:
    """Where the tiles of one slot of a plain buffer start."""
    layout = ctx.buffers[source.ref.id].layout
    dense = all(d.size == n for d, n in zip(source.dims[-4:], source.ref.shape[-4:], strict=True))
    if layout.tile or layout.swizzle or source.is_transposed or not dense or any(d.size for d in source.dims[:-4]):
        raise UnsupportedCall(
            f"{e.op}: smem_ref is SMEM without transforms, all of it or of one slot (ref.at[slot]); this is {source}",
            e.line,
        )
    start = Affine(0)
    for d, digits in zip(source.dims, layout.strides(), strict=True):
        start = start + d.start * digits[0][1]
    return start


def scales_copy(buffer: int, start: Affine, part: Any, pair: bool) -> TmemCopy:
    """An instruction for each 4 factors of 128 rows."""
    groups, nbytes = part.per_row // 4, SCALES_TILE[0] * SCALES_TILE[1]
    blocks = range(part.rows // SCALE_ROWS)
    steps = tuple(((i * groups + j) * nbytes, j * part.group + 4 * i) for i in blocks for j in range(groups))
    return TmemCopy(copy_scales_p.name, "32x128b.warpx4", buffer, start, part, steps, pair)


@copy_scales_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> TmemCopy:
    source, target = e.operands
    assert isinstance(source, View) and isinstance(target, View)
    part = scales_part(target, "async_copy_scales_to_tmem, tmem_ref,", e.line)
    return scales_copy(source.ref.id, _whole_tiles(ctx, e, source), part, is_pair(ctx, target, e))


@copy_metadata_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> TmemCopy:
    source, target = e.operands
    assert isinstance(source, View) and isinstance(target, View)
    part = metadata_part(target, "async_copy_sparse_metadata_to_tmem, tmem_ref,", e.line)
    columns = METADATA_TILE // 4
    steps = tuple((i * MATRIX_ROWS * METADATA_TILE, i * columns) for i in range(part.columns // columns))
    start = _whole_tiles(ctx, e, source)
    return TmemCopy(e.op, "128x128b", source.ref.id, start, part, steps, is_pair(ctx, target, e))


@copy_matrix_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> TmemCopy:
    source, target = e.operands
    assert isinstance(source, View) and isinstance(target, View)
    part = tmem_part(target, "async_copy_smem_to_tmem, tmem_ref,", e.line)
    layout = ctx.buffers[source.ref.id].layout
    if part.rows != MATRIX_ROWS or part.packing * layout.itemsize != 4 or part.columns * 4 % MATRIX_BYTES:
        raise IllegalInstruction(
            f"async_copy_smem_to_tmem: {source.dtype}{list(source.shape)}: it copies {MATRIX_ROWS} rows of multiples of "
            f"{MATRIX_BYTES} bytes, to tensor memory that is packed where elements have less than 32 bits",
            e.line,
        )
    if source.is_transposed:
        raise IllegalInstruction(f"async_copy_smem_to_tmem: rows of smem_ref are contiguous; this is {source}", e.line)
    o = shared_operand(source, layout, 1, "async_copy_smem_to_tmem: smem_ref", e.line)
    columns = MATRIX_BYTES // 4
    steps = tuple((o.k_offset(i), i * columns) for i in range(part.columns // columns))
    pair = is_pair(ctx, target, e)
    return TmemCopy(e.op, "128x256b", source.ref.id, o.start, part, steps, pair, o.leading, o.stride, o.swizzle)


for _op in (copy_scales_p, copy_metadata_p, copy_matrix_p):

    @_op.emit((SM100,), (WARPGROUP, WARP))
    def _(out: Any, step: Any) -> None:
        out.tmem_copy(step.data)

    @_op.simulate
    def _(sim: Any, step: Any) -> None:
        sim.tmem_copy(step.data)
