"""Tensor memory: which cell of the 128 lanes x 512 columns of 32 bits holds which element of a buffer (PTX ISA 9.7.16.10.5).

A buffer is (rows, columns), or (n, rows, columns) for n of them side by side.  Rows are lanes: 128 rows take all, 64 rows the
lower half of each warp's 32 (layout F of the tables, that of an accumulator of M = 64).  A column of the buffer is a column
of cells, of whose 32 bits a float16 has the lower ones; `packed` ones of 16 or 8 bits share a cell, low bits first.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

from ..codegen.encodings import LANES, TRANSFERS
from ..errors import Line, UnsupportedCall
from ..program import Affine, Value, View
from .registers import Layout, RegisterLayout
from .shared import itemsize

ROWS = (128, 64)
# Of one load or store.  There are wider ones, up to 128: ptxas refuses those that do not fit the registers of the launch (C7602),
# whatever set_max_registers says, and in pieces arithmetic on the first can begin before the last has come.
MOST_REGISTERS = 32


SCALE_ROWS = 128  # scale factors come in blocks of so many rows, each 4 factors wide
SCALE_TYPES = ("float8_e8m0fnu", "float8_e4m3fn")


class TMEMLayout(enum.Enum):
    """Layouts of tensor memory that are no matrix of rows and columns, for `TMEM(..., layout=)`.

    SCALES_LAYOUT: scale factors of a block-scaled operand, (rows, factors of a row) (PTX ISA 9.7.16.10.7): row m is lane m % 32,
    in each of the four quarters; factor s is byte s % 4 of column rows / 32 * (s / 4) + m / 32.

    SPARSE_METADATA_LAYOUT: which elements of a 2:4 sparse A are kept (9.7.16.10.8), (128, bytes of a row) of uint8, bytes a
    multiple of 16: 2 bits for each kept element of 8 or 16 bits, 4 for each float32, in the order in which
    `format_tcgen05_sparse_metadata` puts them.

    M64_COLLECTIVE_LAYOUT: the accumulator of a pair of blocks of 64 rows each, M = 128 together (9.7.16.10.5, layout B),
    (64, columns) and collective: row m is lane m, for the right half of the columns lane 64 + m, so it takes half as many
    columns of cells.
    """

    SCALES_LAYOUT = "SCALES_LAYOUT"
    SPARSE_METADATA_LAYOUT = "SPARSE_METADATA_LAYOUT"
    M64_COLLECTIVE_LAYOUT = "M64_COLLECTIVE_LAYOUT"

    def __str__(self) -> str:
        return f"plgpu.TMEMLayout.{self.name}"


def seen_as(view: View, dtype: str, line: Line | None) -> View:
    """The view, of tensor memory, with its bits seen as elements of another dtype of the same width (`ref.bitcast`)."""
    wide, size = itemsize(dtype), itemsize(view.ref.dtype)
    if view.space.layout in OPAQUE:
        raise UnsupportedCall(f"bitcast of {view.ref}, which holds {OPAQUE[view.space.layout]}", line)
    if wide != size or not (size == 4 or view.space.packed):
        raise UnsupportedCall(
            f"bitcast of tensor memory {view.ref} to {dtype}: its {8 * size}-bit elements are seen as others of {8 * size} bits, "
            "if those are 32 bits or packed; for another width put a buffer of each type into a RefUnion",
            line,
        )
    return dataclasses.replace(view, as_type="" if dtype == view.ref.dtype else dtype)


@dataclasses.dataclass(frozen=True)
class TmemLayout:
    """How a buffer lies: rows; columns: cells of one (rows, columns) slice; packing: elements of a cell; slices: how many;
    alignment: of its first column; folded: the right half of the columns lies in the upper 64 lanes."""

    rows: int
    columns: int
    packing: int
    slices: int
    alignment: int = 1
    folded: bool = False

    @property
    def total(self) -> int:
        """Columns that the buffer takes."""
        return self.columns * self.slices


def tmem_layout(ref: Value, line: Line | None) -> TmemLayout:
    """The layout of a TMEM buffer; UnsupportedCall for what has none."""
    assert ref.space is not None
    size, shape = itemsize(ref.dtype), ref.shape
    if ref.space.layout is TMEMLayout.SCALES_LAYOUT:
        return _scales_layout(ref, line)
    if ref.space.layout is TMEMLayout.SPARSE_METADATA_LAYOUT:
        return _metadata_layout(ref, line)
    if ref.space.layout is TMEMLayout.M64_COLLECTIVE_LAYOUT:
        return _folded_layout(ref, line)
    packing = 4 // size if ref.space.packed and size < 4 else 1
    if len(shape) not in (2, 3) or shape[-2] not in ROWS or size > 4 or 0 in shape:
        raise UnsupportedCall(
            f"TMEM {ref.dtype}{list(shape)}: (rows, columns) or (n, rows, columns) with 128 or 64 rows, of elements of at "
            "most 32 bits",
            line,
        )
    if size < 4 and not ref.space.packed and ref.dtype != "float16":
        raise UnsupportedCall(
            f"TMEM {ref.dtype}{list(shape)}: say packed=True, so that {4 // size} elements share a cell of 32 bits, as an "
            "operand does (one a cell are accumulators, of float16, float32 and int32)",
            line,
        )
    if shape[-1] % packing:
        raise UnsupportedCall(
            f"TMEM {ref.dtype}{list(shape)}: {packing} elements share a cell, which {shape[-1]} columns do not fill",
            line,
        )
    if ref.space.layout is not None:
        raise UnsupportedCall(f"TMEM(layout={ref.space.layout}): layout is left out; the shape decides", line)
    return TmemLayout(shape[-2], shape[-1] // packing, packing, math.prod(shape[:-2]))


def _scales_layout(ref: Value, line: Line | None) -> TmemLayout:
    shape = ref.shape
    fits = len(shape) in (2, 3) and shape[-2] in (SCALE_ROWS, 2 * SCALE_ROWS) and shape[-1] % 4 == 0 and 0 not in shape
    if not fits or ref.dtype not in SCALE_TYPES:
        raise UnsupportedCall(
            f"TMEM {ref.dtype}{list(shape)} in {TMEMLayout.SCALES_LAYOUT}: (rows, n) or (slots, rows, n) with {SCALE_ROWS} or "
            f"{2 * SCALE_ROWS} rows and n a multiple of 4, of {' or '.join(SCALE_TYPES)}",
            line,
        )
    return TmemLayout(shape[-2], shape[-2] // 32 * (shape[-1] // 4), 4, math.prod(shape[:-2]))


def _folded_layout(ref: Value, line: Line | None) -> TmemLayout:
    shape, space = ref.shape, ref.space
    assert space is not None
    fits = len(shape) in (2, 3) and shape[-2] == LANES // 2 and shape[-1] % 16 == 0 and 0 not in shape
    accumulates = ref.dtype in ("float32", "int32", "float16") and not space.packed
    if not fits or not accumulates or not space.collective:
        raise UnsupportedCall(
            f"TMEM {ref.dtype}{list(shape)} in {TMEMLayout.M64_COLLECTIVE_LAYOUT}: (64, n) or (slots, 64, n), n a multiple of "
            "16, of float32, int32 or float16, collective and not packed: an accumulator of a pair of blocks",
            line,
        )
    return TmemLayout(shape[-2], shape[-1] // 2, 1, math.prod(shape[:-2]), folded=True)


METADATA_TILE = 16  # bytes of a row that one copy brings: 4 columns
METADATA_PAIR = 2  # columns: an instruction has either one of a pair, which its selector names, or both


def _metadata_layout(ref: Value, line: Line | None) -> TmemLayout:
    shape = ref.shape
    fits = len(shape) in (2, 3) and shape[-2] == LANES and shape[-1] % METADATA_TILE == 0 and 0 not in shape
    if not fits or ref.dtype != "uint8":
        raise UnsupportedCall(
            f"TMEM {ref.dtype}{list(shape)} in {TMEMLayout.SPARSE_METADATA_LAYOUT}: ({LANES}, n) or (slots, {LANES}, n) of "
            f"uint8, n, the bytes of a row, a multiple of {METADATA_TILE}: K / 8 for elements of 8 or 16 bits, K / 4 for float32",
            line,
        )
    return TmemLayout(LANES, shape[-1] // 4, 4, math.prod(shape[:-2]), METADATA_PAIR)


def lanes_of(rows: int) -> np.ndarray:
    """The lane of each row."""
    row = np.arange(rows)
    return row if rows == LANES else 32 * (row // 16) + row % 16


@dataclasses.dataclass(frozen=True)
class TmemPart:
    """Part of a buffer that an operation touches.

    buffer: value id; column: its first one, in cells from the buffer's first; columns: cells; rows, packing: of the layout;
    halves: an element is the lower half of its cell; folded: the right half of the elements of a row is 64 lanes further.
    """

    buffer: int
    column: Affine
    columns: int
    rows: int
    packing: int
    halves: bool = False
    folded: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and elements of each."""
        return self.rows, self.columns * self.packing * (2 if self.folded else 1)


def tmem_part(view: View, what: str, line: Line | None) -> TmemPart:
    """The part that a 2-D view selects: all rows, and a range of whole cells."""
    layout = tmem_layout(view.ref, line)
    if view.space.layout in OPAQUE:
        raise UnsupportedCall(f"{what}: {view.ref} holds {OPAQUE[view.space.layout]}", line)
    *lead, rows, columns = view.dims
    if layout.folded and columns.size != view.ref.shape[-1]:
        raise UnsupportedCall(
            f"{what}: a view of tensor memory in {TMEMLayout.M64_COLLECTIVE_LAYOUT} takes all columns, whose halves lie in "
            f"different lanes (acc.at[slot]); this is {view}",
            line,
        )
    ranges = rows.size == layout.rows and columns.size is not None and columns.stride == 1
    if view.is_transposed or not ranges or any(d.size is not None for d in lead):
        raise UnsupportedCall(
            f"{what}: a view of tensor memory takes all {layout.rows} rows and a range of columns of one buffer (acc.at[slot], "
            f"acc.at[:, plgpu.ds(start, n)]); this is {view}",
            line,
        )
    start, size = columns.start, int(columns.size or 0)
    if start.const % layout.packing or any(f % layout.packing for _, f in start.terms) or size % layout.packing:
        raise UnsupportedCall(
            f"{what}: {layout.packing} elements share a cell of tensor memory; columns {columns} of {view.ref} cut one",
            line,
        )
    packed = Affine(start.const // layout.packing, tuple((v, f // layout.packing) for v, f in start.terms))
    for d in lead:
        packed = packed + d.start * layout.columns
    halves = layout.packing == 1 and itemsize(view.dtype) == 2
    columns_of_cells = layout.columns if layout.folded else size // layout.packing
    return TmemPart(view.ref.id, packed, columns_of_cells, layout.rows, layout.packing, halves, layout.folded)


@dataclasses.dataclass(frozen=True)
class ScalesPart:
    """One (rows, n) slice of scale factors.  column: its first cell, from the buffer's first; columns: how many cells."""

    buffer: int
    column: Affine
    rows: int
    per_row: int

    @property
    def columns(self) -> int:
        return self.group * (self.per_row // 4)

    @property
    def group(self) -> int:
        """Cells for 4 factors of each row."""
        return self.rows // 32


OPAQUE = {
    TMEMLayout.SCALES_LAYOUT: "scale factors; async_copy_scales_to_tmem writes them, tcgen05_mma reads them as a_scale or "
    "b_scale",
    TMEMLayout.SPARSE_METADATA_LAYOUT: "sparsity metadata; async_copy_sparse_metadata_to_tmem writes it, tcgen05_mma reads it as "
    "a_sparse_metadata",
}


def _opaque(view: View, layout: TMEMLayout, what: str, line: Line | None) -> tuple[TmemLayout, Affine]:
    """The layout of a view's buffer, which must be `layout`, and the first cell of the slot that is selected."""
    if view.space.layout is not layout:
        raise UnsupportedCall(f"{what} is TMEM(..., layout={layout}); {view.ref} is not", line)
    of, first = tmem_layout(view.ref, line), Affine(0)
    for d in view.dims[:-2]:
        first = first + d.start * of.columns
    return of, first


def scales_part(view: View, what: str, line: Line | None) -> ScalesPart:
    """The scale factors that a view selects: all rows and factors of one slot."""
    _, first = _opaque(view, TMEMLayout.SCALES_LAYOUT, what, line)
    *lead, rows, factors = view.dims
    whole = (rows.size, factors.size) == view.ref.shape[-2:] and rows.stride == factors.stride == 1
    if view.is_transposed or not whole or any(d.size is not None for d in lead):
        raise UnsupportedCall(
            f"{what}: a view of scale factors takes all rows and factors of one slot (scales.at[slot]); this is {view}",
            line,
        )
    return ScalesPart(view.ref.id, first, rows.size or 0, factors.size or 0)


@dataclasses.dataclass(frozen=True)
class MetadataPart:
    """Sparsity metadata of 128 rows.  column: its first cell, from the buffer's first; columns: how many cells."""

    buffer: int
    column: Affine
    columns: int


def metadata_part(view: View, what: str, line: Line | None) -> MetadataPart:
    """The metadata that a view selects: all rows, and bytes of a slot from one multiple of 16 to another."""
    _, first = _opaque(view, TMEMLayout.SPARSE_METADATA_LAYOUT, what, line)
    *lead, rows, some = view.dims
    start, size = some.start, some.size or 0
    whole = rows.size == LANES and some.stride == 1 and size % METADATA_TILE == 0
    tiles = start.const % METADATA_TILE == 0 and not any(f % METADATA_TILE for _, f in start.terms)
    if view.is_transposed or not whole or not tiles or any(d.size is not None for d in lead):
        raise UnsupportedCall(
            f"{what}: a view of sparsity metadata takes all rows and bytes from a multiple of {METADATA_TILE} to another, of one "
            f"slot; this is {view}",
            line,
        )
    cells = Affine(start.const // 4, tuple((v, f // 4) for v, f in start.terms))
    return MetadataPart(view.ref.id, first + cells, size // 4)


Part = TmemPart | ScalesPart | MetadataPart


# ---- loads and stores -----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Transfer:
    """One tcgen05.ld or .st of a warp.  shape, count: `16x256b`.x`count`; lane: first, from the warp's 32 lanes on; column:
    first, in cells from the part's; register: the first of 32 bits."""

    shape: str
    count: int
    lane: int
    column: int
    register: int


def transfers(part: TmemPart, layout: RegisterLayout, what: str, line: Line | None) -> tuple[Transfer, ...]:
    """The instructions that move a part between tensor memory and registers in `layout`; UnsupportedCall for others."""
    delivered = DELIVERED["folded" if part.folded else part.rows]
    for name in delivered:
        if layout.same_map(name.of(part.shape)):
            break
    else:
        names, in_pair = " or ".join(str(n) for n in delivered), " in a pair of blocks" if part.folded else ""
        raise UnsupportedCall(
            f"{what}: tensor memory of {part.rows} rows{in_pair} moves to and from {names}; the array is in {layout}",
            line,
        )
    pairs = part.halves or part.packing > 1  # a register has more than one element
    kind = "32x32b" if "NATIVE" in name.value else ("16x128b" if pairs else "16x256b")
    per_thread, columns, lanes = TRANSFERS[kind]
    columns *= 2 if part.halves else 1
    halves = 1 if (part.rows == 64 and not part.folded) or lanes == 32 else 2
    if part.columns % columns:  # the layouts of fragments hold multiples of 8 elements
        raise UnsupportedCall(
            f"{what}: {part.columns} columns of float16, one a cell: an even number of them moves at once", line
        )
    out, register = [], 0
    for half in range(halves):
        left, at = part.columns // columns, 0
        while left:
            count = min(1 << (left.bit_length() - 1), MOST_REGISTERS // per_thread)
            out.append(Transfer(kind, count, lanes * half, at, register))
            at, left, register = at + count * columns, left - count, register + count * per_thread
    return tuple(out)


DELIVERED: dict[int | str, tuple[Layout, ...]] = {
    128: (Layout.TCGEN05_TMEM_NATIVE, Layout.TCGEN05),
    64: (Layout.WGMMA,),
    "folded": (Layout.TCGEN05_M64_COLLECTIVE_NATIVE, Layout.TCGEN05_M64_COLLECTIVE),
}


def default_layout(rows: int, folded: bool = False) -> Layout:
    """What a load delivers when nothing is asked for."""
    return DELIVERED["folded" if folded else rows][0]
