"""How a warpgroup's ordinary loads and stores become instructions: what one thread moves at once.

The emitter writes these instructions, and the simulator counts their bank conflicts and sectors.
"""

from __future__ import annotations

import math

from ..program import View
from .registers import RegisterLayout, wgmma
from .shared import PACKED, SharedLayout, itemsize


def shared_vector(layout: RegisterLayout, view: View, shared: SharedLayout) -> int:
    """How many of a thread's consecutive registers are consecutive and aligned in shared memory."""
    first, last = layout.reg[0] if layout.reg else None, view.dims[-1]
    columns = len(view.ref.shape) - 1
    if first is None or first.dim != len(view.shape) - 1 or first.stride != 1 or view.kept[-1] != columns:
        return 1
    if last.stride != 1:
        return 1
    size = shared.itemsize
    (inner, _), *outer = shared.strides()[columns]
    steps = [stride // size for digits in (*shared.strides()[:columns], outer) for _, stride in digits]
    return math.gcd(first.size, 16 // size, inner, last.start.const, *(f for _, f in last.start.terms), *steps)


def global_vector(layout: RegisterLayout, view: View, dtype: str) -> int:
    """The same in global memory, and so that all or none of them lie inside the array.

    Whether the array's rows are whole numbers of such groups is a remainder of a length that is compiled in.
    """
    first, last, size = layout.reg[0] if layout.reg else None, view.dims[-1], itemsize(dtype)
    columns = len(view.ref.shape) - 1
    if first is None or size not in (2, 4) or (size == 2 and dtype not in PACKED):
        return 1
    if first.dim != len(view.shape) - 1 or first.stride != 1 or view.kept[-1] != columns or last.stride != 1:
        return 1
    return math.gcd(
        first.size, 16 // size, view.ref.shape[columns], last.start.const, *(f for _, f in last.start.terms)
    )


def together(width: int, dtype: str) -> int:
    """How many of `width` such registers one instruction moves: all, or one (types that have no vectors)."""
    return width if (dtype in PACKED and width % 2 == 0) or itemsize(dtype) == 4 else 1


def by_matrix(layout: RegisterLayout, view: View, shared: SharedLayout) -> bool:
    """Whether ldmatrix and stmatrix move this layout: four 8x8 pieces of a 16-bit WGMMA array, lines of 16 bytes.

    The lines are along the array's columns or, of a transposed view, along its rows (`.trans`).  Both reach the block's own
    memory only.
    """
    if view.dtype not in PACKED or len(layout.shape) != 2 or view.peer:
        return False
    m, n = layout.shape
    line = shared.tile[-1] if shared.tile else shared.shape[-1]
    if m % 64 or n % 16 or not layout.same_map(wgmma((m, n))) or line % 8:
        return False
    along = view.kept[0 if view.is_transposed else 1]
    start = view.dims[along].start
    if along != len(view.ref.shape) - 1 or start.const % 8 or any(f % 8 for _, f in start.terms):
        return False
    return all(view.dims[d].stride == 1 for d in view.kept)


def matrix_shifts(view: View, n: int, shared: SharedLayout) -> list[tuple[int, int]] | None:
    """For each 16 of the array's `n` columns, how a thread's address follows from that of the first: (XOR, then plus).

    None where it does not follow.  A thread is at the first of them or 8 further (PTX ISA 9.7.14.5.15, ldmatrix).
    """
    if view.is_transposed:  # a column is a line of its own
        steps = [0] * len(shared.shape)
        steps[view.kept[1]] = 16
        rest, distance = shared.distance(steps)
        return None if any(rest) else [(0, distance * j) for j in range(n // 16)]
    start, digits = view.dims[view.kept[1]].start, shared.strides()[view.kept[1]]
    (inner, step), outer = digits[0], digits[1][1] if len(digits) > 1 else 0
    if len(digits) == 1 and not shared.swizzle:
        return [(0, 16 * j * step) for j in range(n // 16)]
    if start.const % inner or any(f % inner for _, f in start.terms) or (inner > 8 and inner % 16):
        return None
    if shared.swizzle and outer % (8 * shared.swizzle):  # what the swizzle looks at must stay
        return None
    out = []
    for column in range(0, n, 16):
        along, across = column % inner * step, column // inner * outer
        out.append((along, across) if shared.swizzle else (0, along + across))
    return out


def lines_of_product(view: View, shared: SharedLayout, k_axis: int) -> str | None:
    """How ldmatrix reads a 2-D operand of mma.sync where it lies: 'k' (lines of K are contiguous), 'mn' (lines of M or N, which
    it transposes: 16-bit types), or None (it cannot).  k_axis: which of the view's dimensions is K."""
    size, last = shared.itemsize, len(view.ref.shape) - 1
    columns, start = shared.tile[-1] if shared.tile else shared.shape[-1], view.dims[last].start
    if len(view.shape) != 2 or last not in view.kept or any(view.dims[d].stride != 1 for d in view.kept):
        return None
    if columns * size % 16 or any(f * size % 16 for f in (start.const, *(f for _, f in start.terms))):
        return None
    if view.kept[k_axis] == last:
        return "k"
    return "mn" if size == 2 else None
