"""How a warpgroup's ordinary loads and stores become instructions: what one thread moves at once.

The emitter writes these instructions, and the simulator counts their bank conflicts and sectors.
"""

from __future__ import annotations

import math

from ..program import View
from .registers import RegisterLayout, wgmma
from .shared import SharedLayout, itemsize

PAIRED = ("float16", "bfloat16")  # two of them share a register


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
    if first is None or size not in (2, 4) or (size == 2 and dtype not in PAIRED):
        return 1
    if first.dim != len(view.shape) - 1 or first.stride != 1 or view.kept[-1] != columns or last.stride != 1:
        return 1
    return math.gcd(
        first.size, 16 // size, view.ref.shape[columns], last.start.const, *(f for _, f in last.start.terms)
    )


def together(width: int, dtype: str) -> int:
    """How many of `width` such registers one instruction moves: all, or one (types that have no vectors)."""
    return width if (dtype in PAIRED and width % 2 == 0) or itemsize(dtype) == 4 else 1


def by_stmatrix(layout: RegisterLayout, view: View, shared: SharedLayout) -> bool:
    """Whether stores of this layout go out as stmatrix: four 8x8 pieces of a 16-bit WGMMA array, rows of 16 bytes."""
    if view.dtype not in PAIRED or len(layout.shape) != 2 or view.is_transposed:
        return False
    m, n = layout.shape
    tile_columns = shared.tile[-1] if shared.tile else shared.shape[-1]
    if m % 64 or n % 16 or not layout.same_map(wgmma((m, n))) or tile_columns % 8:
        return False
    _, columns = view.kept
    start = view.dims[columns].start
    if columns != len(view.ref.shape) - 1 or start.const % 8 or any(f % 8 for _, f in start.terms):
        return False
    return all(view.dims[d].stride == 1 for d in view.kept)
