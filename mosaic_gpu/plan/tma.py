"""TMA copies: one GMEM view against one SMEM view -> tensor map, coordinates, and as many instructions as it takes.

The shared-memory side decides.  Its layout is a list of digits by rising byte stride; as long as they are packed, each
becomes one dimension of the box; what is left over is enumerated as separate copies.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..errors import IllegalInstruction, Line, UnsupportedCall
from ..layouts.operands import written_as_multiple
from ..layouts.shared import SharedLayout, shared_layout
from ..memory import MemorySpace
from ..program import Affine, Value, View
from .model import MapDim, TensorMapPlan

MAX_BOX = 256
MAX_RANK = 5
ALIGNMENT = 128  # bytes, of a copy's address in shared memory


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """A tensor-map coordinate: start // step + offset, where step divides start or start is a multiple at run time."""

    start: Affine
    step: int = 1


@dataclasses.dataclass(frozen=True)
class TmaIssue:
    """One TMA instruction.  shared: byte offset from the start of the SMEM view's buffer; coordinates innermost first."""

    shared: Affine
    coordinates: tuple[Coordinate, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """The one run of global memory that a copy is: where it starts along each axis of input `input`, and how many elements of
    the axis it spans."""

    input: int
    starts: tuple[Affine, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TmaCopy:
    """A planned copy.

    buffer: value id of the SMEM buffer; map: index into `Plan.maps`; issues: instructions, all with the same box;
    nbytes: bytes that arrive in this block's shared memory by the whole copy, multicast parts from other blocks included;
    multicast: cluster axes over which each block loads its share and sends it to all (() for none);
    parts: into how many shares the issues are dealt, block r taking issues r * len/parts ...
    run: of an addition that is one run of memory on both sides: then it is one instruction without a tensor map, where it lies in
    the array.
    """

    buffer: int
    map: int
    issues: tuple[TmaIssue, ...]
    nbytes: int
    multicast: tuple[str, ...] = ()
    parts: int = 1
    run: Run | None = None


@dataclasses.dataclass(frozen=True)
class _Digit:
    extent: int
    stride: int
    axis: int
    step: int  # elements along the axis per unit of this digit


def shared_digits(
    view: View, layout: SharedLayout, line: Line | None
) -> tuple[list[tuple[int, int, int, int]], Affine]:
    """(extent, byte stride, kept position, elements per unit) of each digit of the view, and the view's byte offset."""
    digits: list[tuple[int, int, int, int]] = []
    offset = Affine(0)
    strides = layout.strides()
    kept = list(view.kept)
    for d, (index, parts) in enumerate(zip(view.dims, strides, strict=True)):
        if index.stride != 1:
            raise UnsupportedCall(f"a strided slice of shared memory ({index}) cannot be copied by TMA", line)
        inner, inner_stride = parts[0]
        outer = parts[1] if len(parts) > 1 else (1, inner * inner_stride)
        size = 1 if index.size is None else index.size
        if len(parts) == 1 or inner == layout.shape[d]:
            offset = offset + index.start * inner_stride
            if index.size is not None:
                digits.append((size, inner_stride, kept.index(d), 1))
            continue
        whole = all(f % inner == 0 for _, f in index.start.terms) and index.start.const % inner == 0
        if whole and (size % inner == 0 or size < inner):
            start = Affine(index.start.const // inner, tuple((v, f // inner) for v, f in index.start.terms))
            offset = offset + start * outer[1]
        elif index.start.static and index.start.const % inner + size <= inner:
            offset = offset + Affine(index.start.const // inner * outer[1] + index.start.const % inner * inner_stride)
        else:
            raise IllegalInstruction(
                f"the slice {index} of {view.ref} is not made of whole tiles of {inner}"
                + written_as_multiple(index.start, inner),
                line,
            )
        if index.size is not None:
            digits.append((min(size, inner), inner_stride, kept.index(d), 1))
            if size > inner:
                digits.append((size // inner, outer[1], kept.index(d), inner))
    return digits, offset


def plan_copy(
    ctx: Any,
    gmem: View,
    smem: View,
    line: Line | None,
    multicast: tuple[str, ...] = (),
    store: bool = False,
    adds: bool = False,
) -> TmaCopy:
    """Plan a copy between a GMEM view and an SMEM view of the same shape and dtype.  store: to GMEM; adds: to what is there."""
    if gmem.shape != smem.shape or gmem.dtype != smem.dtype:
        raise IllegalInstruction(
            f"copy between {gmem.name}, GMEM {gmem.dtype}{list(gmem.shape)}, and {smem.name}, SMEM "
            f"{smem.dtype}{list(smem.shape)}: shapes and dtypes must match",
            line,
        )
    layout = ctx.buffers[smem.ref.id].layout
    planned = _planned(ctx, gmem, smem, layout, line, multicast, store=store)
    return dataclasses.replace(planned, run=_run(ctx, gmem, smem, layout, line)) if adds else planned


def plan_prefetch(ctx: Any, gmem: View, line: Line | None, shared_by: tuple[str, ...] = ()) -> TmaCopy:
    """Plan a prefetch of a GMEM view: a copy into a row-major buffer that is not there.  shared_by: axes that share it."""
    space = MemorySpace("smem")
    nowhere = View.whole(Value(-1, gmem.shape, gmem.dtype, space))
    return _planned(
        ctx, gmem, nowhere, shared_layout(gmem.shape, gmem.dtype, space, line), line, shared_by, lands=False
    )


def _planned(
    ctx: Any,
    gmem: View,
    smem: View,
    layout: SharedLayout,
    line: Line | None,
    multicast: tuple[str, ...],
    lands: bool = True,
    store: bool = False,
) -> TmaCopy:
    """lands: whether it comes to or from shared memory, where addresses have an alignment."""
    if gmem.is_transposed or smem.is_transposed:
        raise IllegalInstruction(
            f"TMA does not transpose; transpose the operand of the MMA instead (ref.transpose((1, 0))); got {gmem} and {smem}",
            line,
        )
    digits, offset = _digits(gmem, smem, layout, line)
    last_axis = len(gmem.ref.shape) - 1
    if not digits or digits[0].axis != last_axis or digits[0].step != 1 or digits[0].stride != layout.itemsize:
        raise IllegalInstruction(
            f"the innermost dimension of the copy must be the array's last one, contiguous in both; got {gmem} -> {smem}",
            line,
        )
    _check_rank(len(gmem.ref.shape), gmem, line)
    box, loops = _box(digits, gmem)
    inner_bytes = box[0].extent * layout.itemsize
    if inner_bytes % 16:
        raise IllegalInstruction(
            f"TMA moves rows of multiples of 16 bytes; this copy's are {box[0].extent} x {layout.itemsize} = {inner_bytes} "
            f"(between {gmem.name} and {smem.name})",
            line,
        )
    if layout.swizzle and inner_bytes != layout.swizzle:
        raise IllegalInstruction(
            f"a {layout.swizzle}-byte swizzle needs rows of {layout.swizzle} bytes; this copy's have {inner_bytes} "
            f"(between {gmem.name} and {smem.name})",
            line,
        )
    parts = math.prod(ctx.program.cluster[ctx.program.cluster_names.index(a)] for a in multicast) if multicast else 1
    if parts > 1 and not loops:
        box, loops = _deal(box, parts, gmem, line)
    tensor_map, coordinates = _tensor_map(ctx, gmem, box, layout, line)
    _check_strides(tensor_map, gmem, layout.itemsize, line)
    issues = []
    for combination in itertools.product(*(range(d.extent) for d in reversed(loops))):
        shared, shift = offset, [0] * len(gmem.ref.shape)
        for d, i in zip(reversed(loops), combination, strict=True):
            shared = shared + Affine(d.stride * i)
            shift[d.axis] += d.step * i
        coords = tuple(_shifted(c, m, shift[m.axis]) for c, m in zip(coordinates, tensor_map.dims, strict=True))
        issues.append(TmaIssue(shared, coords))
    if lands:
        _check_alignment(issues, smem, line)
    for issue in issues:
        starts = [(c.start.const, [f for _, f in c.start.terms]) for c in issue.coordinates]
        if wrong := wrong_coordinates(starts, layout.itemsize, store):
            raise IllegalInstruction(f"{wrong} (the copy between {gmem} and {smem.name})", line)
    if len(issues) % parts:
        raise IllegalInstruction(
            f"a multicast over {parts} blocks needs its {len(issues)} pieces to be a multiple of that", line
        )
    nbytes = math.prod(d.extent for d in box) * layout.itemsize * len(issues)
    return TmaCopy(smem.ref.id, ctx.tensor_map(tensor_map), tuple(issues), nbytes, multicast, parts)


def _digits(gmem: View, smem: View, layout: SharedLayout, line: Line | None) -> tuple[list[_Digit], Affine]:
    """Of the SMEM view, with the axes of the GMEM view that they go along, by rising stride; and its byte offset."""
    raw, offset = shared_digits(smem, layout, line)
    digits = sorted(
        (_Digit(n, stride, gmem.kept[position], step) for n, stride, position, step in raw if n > 1 or step == 1),
        key=lambda d: (d.stride, d.extent == 1),
    )
    return [d for d in digits if d.extent > 1] or digits[:1], offset


def _run(ctx: Any, gmem: View, smem: View, layout: SharedLayout, line: Line | None) -> Run | None:
    """The run of memory that an addition is on both sides, None where it is not one.

    With a tensor map TMA makes requests row by row, without one as few as there can be: 1 to 2 % of the attention backward
    pass, which adds 16 kB at a time.
    """
    packed, axes = layout.itemsize, []
    for d in _digits(gmem, smem, layout, line)[0]:
        if d.step != 1 or d.stride != packed:
            return None
        packed *= d.extent
        axes.append(d.axis)
    sizes = [1 if d.size is None else d.size for d in gmem.dims]
    outermost = next((axis for axis, n in enumerate(sizes) if n > 1), len(sizes) - 1)
    whole = all(
        d.start == Affine(0) and n == extent
        for d, n, extent in list(zip(gmem.dims, sizes, gmem.ref.shape, strict=True))[outermost + 1 :]
    )
    if layout.swizzle or not whole or axes != sorted(axes, reverse=True):
        return None
    return Run(ctx.pointer(gmem.ref, line), tuple(d.start for d in gmem.dims), tuple(sizes))


def wrong_coordinates(starts: Sequence[tuple[int, Sequence[int]]], itemsize: int, store: bool) -> str | None:
    """Why a copy to or from such coordinates ends the kernel with an illegal instruction (seen on an H200), as far as known.

    starts: of each dimension, innermost first, a constant and the factors of what is added to it and known at run time only.
    """
    const, factors = starts[0]
    if const * itemsize % 16 and all(f * itemsize % 16 == 0 for f in factors):
        return (
            f"TMA moves rows from multiples of 16 bytes on; this copy starts {const * itemsize} bytes past one "
            f"(element {const} of {itemsize} bytes along the last dimension): start it at a multiple of "
            f"{16 // math.gcd(16, itemsize)}, or use load and stores"
        )
    if store and any(c < 0 and not f for c, f in starts):
        where = tuple(c for c, _ in reversed(starts))
        return (
            f"TMA does not store in front of an array, from {where} on (past the end it leaves out what is not there): "
            "store a slice that begins inside, or use stores"
        )
    return None


def _check_rank(rank: int, gmem: View, line: Line | None) -> None:
    if rank > MAX_RANK:
        raise UnsupportedCall(
            f"this copy needs a tensor map of rank {rank}, TMA has {MAX_RANK}: reshape the array of shape "
            f"{gmem.ref.shape} so that the dimensions it does not slice are merged",
            line,
        )


def _check_alignment(issues: list[TmaIssue], smem: View, line: Line | None) -> None:
    for issue in issues:
        if issue.shared.const % ALIGNMENT or any(f % ALIGNMENT for _, f in issue.shared.terms):
            raise IllegalInstruction(
                f"TMA needs shared memory addresses that are multiples of {ALIGNMENT} bytes; a piece of this copy starts "
                f"at byte {issue.shared} of {smem.ref}: pad its rows, or copy another slice",
                line,
            )


def _shifted(c: Coordinate, m: MapDim, elements: int) -> Coordinate:
    """A coordinate of the copy that starts so many elements further along the dimension's axis.

    An axis in two dimensions of the map is shifted by whole chunks: the coordinate inside the chunk stays.
    """
    return c if m.extent is not None else Coordinate(c.start + Affine(elements // m.step), c.step)


def _check_strides(plan: TensorMapPlan, gmem: View, size: int, line: Line | None) -> None:
    """What the driver would refuse at launch is known from the array's shape."""
    shape = gmem.ref.shape
    if 0 in shape:
        raise UnsupportedCall(
            f"a TMA copy from or to {gmem.ref}, which has no elements: leave the call out for such sizes", line
        )
    _, strides = tensor_map_arguments(plan, shape, size)
    for d, stride in zip(plan.dims[1:], strides, strict=True):
        if stride % 16:
            raise UnsupportedCall(
                f"TMA needs strides of multiples of 16 bytes; in {gmem.ref} dimension {d.axis} has {stride}: "
                f"pad the last dimension, {shape[-1]}, to a multiple of {16 // size}, or use load and stores",
                line,
            )


def piece_of(extent: int, stride: int) -> tuple[int, bool]:
    """Into what pieces a dimension of more elements than a box has is cut, and whether each starts where TMA may write; elements
    are `stride` bytes apart."""
    pieces = [k for k in range(1, MAX_BOX + 1) if extent % k == 0]
    found = max(pieces, key=lambda k: (math.gcd(k * stride, ALIGNMENT), k))
    return found, found * stride % ALIGNMENT == 0


def _box(digits: list[_Digit], gmem: View) -> tuple[list[_Digit], list[_Digit]]:
    """Digits that form the box (packed, at most 256 each, rank within 5 with the squeezed axes), and those to enumerate."""
    squeezed = sum(d.size is None for d in gmem.dims)
    axes_seen: set[int] = set()
    box: list[_Digit] = []
    loops: list[_Digit] = []
    packed = digits[0].stride
    for d in digits:
        divides = d.step == 1 or gmem.ref.shape[d.axis] % d.step == 0
        room = len(box) + squeezed + len({x.axis for x in digits} - axes_seen - {d.axis}) < 5
        if loops or d.stride != packed or not divides or not room:
            loops.append(d)
            continue
        extent = d.extent
        if extent > MAX_BOX:
            extent, _ = piece_of(d.extent, packed)
            loops.append(_Digit(d.extent // extent, d.stride * extent, d.axis, d.step * extent))
        box.append(_Digit(extent, d.stride, d.axis, d.step))
        axes_seen.add(d.axis)
        packed *= extent
    return box, loops


def _deal(box: list[_Digit], parts: int, gmem: View, line: Line | None) -> tuple[list[_Digit], list[_Digit]]:
    """Cut the box's outermost dimension into one piece for each block of the multicast."""
    d = box[-1]
    if d.extent % parts:
        raise IllegalInstruction(
            f"a multicast over {parts} blocks cuts the tile's outermost dimension, {d.extent}, into {parts} equal parts",
            line,
        )
    piece = d.extent // parts
    return [*box[:-1], _Digit(piece, d.stride, d.axis, d.step)], [
        _Digit(parts, d.stride * piece, d.axis, d.step * piece)
    ]


def _tensor_map(
    ctx: Any, gmem: View, box: list[_Digit], layout: SharedLayout, line: Line | None
) -> tuple[TensorMapPlan, list[Coordinate]]:
    dims: list[MapDim] = []
    coordinates: list[Coordinate] = []
    extents: list[int] = []
    for position, d in enumerate(box):
        start = gmem.dims[d.axis].start
        outer = next((x for x in box[position + 1 :] if x.axis == d.axis), None)
        if d.step > 1:
            if any(f % d.step for _, f in start.terms) or start.const % d.step:
                raise IllegalInstruction(
                    f"the copy is stored in chunks of {d.step}: its start along axis {d.axis}, {start}, must be "
                    f"written as a multiple of {d.step}",
                    line,
                )
            start = Affine(start.const // d.step, tuple((v, f // d.step) for v, f in start.terms))
            dims.append(MapDim(d.axis, d.step, None))
        elif outer is not None:
            start = Affine(0)
            dims.append(MapDim(d.axis, 1, outer.step))
        else:
            dims.append(MapDim(d.axis))
        coordinates.append(Coordinate(start))
        extents.append(d.extent)
    covered = {d.axis for d in box}
    for axis in reversed(range(len(gmem.dims))):
        index = gmem.dims[axis]
        if index.stride != 1:
            raise UnsupportedCall(f"a strided slice of GMEM ({index}) cannot be copied by TMA", line)
        if axis not in covered:
            dims.append(MapDim(axis))
            coordinates.append(Coordinate(index.start))
            extents.append(1)
    _check_rank(len(dims), gmem, line)
    return TensorMapPlan(
        ctx.input_index(gmem.ref, line), tuple(dims), tuple(extents), layout.swizzle, gmem.dtype
    ), coordinates


def tensor_map_arguments(
    plan: TensorMapPlan, shape: tuple[int, ...], size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(dims in elements, strides in bytes of dims[1:]) for an array of `shape`, row-major, elements of `size` bytes."""
    steps = [size] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        steps[i] = steps[i + 1] * shape[i + 1]
    dims = tuple(d.extent if d.extent is not None else -(-shape[d.axis] // d.step) for d in plan.dims)
    return dims, tuple(steps[d.axis] * d.step for d in plan.dims[1:])
