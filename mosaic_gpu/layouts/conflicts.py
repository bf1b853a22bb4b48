"""Bank conflicts of ordinary accesses to shared memory, from their layouts.

A warp's instruction goes through 32 banks of 4-byte words.  In one wavefront every bank gives one word, to all lanes that want
it; lanes that move 8 or 16 bytes take turns, 16 or 8 of them at once, and so do the 8 rows of each piece of an ldmatrix or
stmatrix.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ..program import View
from .access import by_matrix, shared_vector, together
from .registers import RegisterLayout
from .shared import SharedLayout

Array = npt.NDArray[Any]
Cost = tuple[int, int, int]  # instructions of warps; wavefronts (or sectors); as few of them as can be
BANKS, WORD = 32, 4


def wavefronts(addresses: Array, nbytes: int) -> Cost:
    """addresses: [instruction, lane], in bytes; nbytes: that each lane moves."""
    words = max(1, nbytes // WORD)
    lanes = 32 // words  # at once
    parts = addresses.reshape(-1, lanes)[:, :, None] // WORD + np.arange(words)
    parts = np.sort(parts.reshape(len(parts), -1), axis=1)
    fresh = np.ones(parts.shape, np.bool_)
    fresh[:, 1:] = parts[:, 1:] != parts[:, :-1]
    turn, place = np.nonzero(fresh)
    count = np.zeros((len(parts), BANKS), np.int64)
    np.add.at(count, (turn, parts[turn, place] % BANKS), 1)
    return len(addresses), int(count.max(axis=1).sum()), len(parts)


def shared_cost(view: View, layout: RegisterLayout, shared: SharedLayout, index: Array, store: bool) -> Cost:
    """What a warpgroup's load or store of a view takes.  index: of each element of the view, in elements."""
    size = shared.itemsize
    if by_matrix(layout, view, shared):
        m, n = layout.shape
        lane, warp = np.arange(32), np.arange(4)
        row, column = lane % 16, lane // 16 * 8
        if view.is_transposed:
            row, column = lane // 8 % 2 * 8, lane % 8 + lane // 16 * 8
        rows = (np.arange(m // 64) * 64)[:, None, None, None] + (warp * 16)[:, None] + row
        columns = (np.arange(n // 16) * 16)[:, None, None] + column
        return wavefronts(index[np.broadcast_arrays(rows, columns)[0], columns].reshape(-1, 32) * size, 16)
    width = together(shared_vector(layout, view, shared), view.dtype)
    elements = tuple(np.moveaxis(layout.coordinates()[:, :, ::width], -1, 0))
    return wavefronts(np.moveaxis(index[elements], 1, 2).reshape(-1, 32) * size, width * size)


@functools.lru_cache(maxsize=512)
def planned_cost(view: View, layout: RegisterLayout, shared: SharedLayout, store: bool) -> Cost:
    """The same where the view's run-time indices are 0."""
    where: list[int | slice] = []
    for d, n in zip(view.dims, shared.shape, strict=True):
        span = ((d.size or 1) - 1) * d.stride + 1
        start = max(0, min(d.start.const, n - span))  # of a start at run time the constant part, where that is inside
        where.append(start if d.size is None else slice(start, start + span, d.stride))
    offsets = np.asarray(shared.byte_offsets()[tuple(where)]).transpose(view.permutation)
    return shared_cost(view, layout, shared, offsets // shared.itemsize, store)
