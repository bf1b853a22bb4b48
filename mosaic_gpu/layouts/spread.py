"""Register layouts for arrays that no instruction constrains: any shape, whatever its extents divide by."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from .registers import Digit, RegisterLayout, Shape, strided

LANES, WARPS = 32, 4


@functools.lru_cache(maxsize=1024)
def default_layout(shape: Shape, itemsize: int, reduced: frozenset[int] = frozenset()) -> RegisterLayout:
    """Where an array of `shape` goes whose uses say nothing: round robin where it divides, else `spread`.

    reduced: dimensions that it is reduced (scanned, sorted) along; lanes share them rather than warps, whose exchange needs
    shared memory.
    """
    if not reduced:
        try:
            return strided(shape)
        except ValueError:
            pass
    return spread(shape, itemsize, reduced)


def spread(shape: Shape, itemsize: int, reduced: frozenset[int] = frozenset()) -> RegisterLayout:
    """Lanes along the last dimensions, warps along dimensions that are not `reduced`, powers of two only.

    What is left of each dimension is in registers, what is left of the threads are replicas.  A thread takes up to 16 bytes
    in a row where the last dimension has enough of them.
    """
    rank = len(shape)
    remaining, stride = list(shape), [1] * rank
    groups: dict[str, list[Digit]] = {"vector": [], "lane": [], "warp": [], "reg": []}

    def take(group: str, dim: int, most: int) -> int:
        size = math.gcd(most, remaining[dim]) if group != "reg" else remaining[dim]
        if size > 1:
            groups[group].append(Digit(size, dim, stride[dim]))
            remaining[dim] //= size
            stride[dim] *= size
        return size

    backwards = list(reversed(range(rank)))
    if rank:
        vector = 16 // itemsize
        while vector > 1 and (shape[-1] % (vector * LANES) or math.prod(shape) % (vector * LANES * WARPS)):
            vector //= 2
        if vector > 1:
            take("vector", rank - 1, vector)
    left = LANES
    for d in backwards:
        left //= take("lane", d, left)
    groups["lane"] += [Digit(left, None)] if left > 1 or not groups["lane"] else []
    left = WARPS
    for d in [*(d for d in backwards if d not in reduced), *(d for d in backwards if d in reduced)]:
        left //= take("warp", d, left)
    groups["warp"] += [Digit(left, None)] if left > 1 or not groups["warp"] else []
    for d in backwards:
        take("reg", d, 0)
    return RegisterLayout(
        "WG_SPREAD", shape, (*groups["vector"], *groups["reg"]), tuple(groups["lane"]), tuple(groups["warp"])
    )


# ---- what a move of elements between two layouts needs ----------------------------------------------------------------------
def linear(coordinates: np.ndarray, shape: Shape) -> np.ndarray:
    """Row-major element numbers of coordinates [..., dim]."""
    strides = np.array([math.prod(shape[d + 1 :]) for d in range(len(shape))], np.int64)
    result: np.ndarray = (coordinates * strides).sum(-1)
    return result


class ElementMap(Hashable, Protocol):
    """Which element of an operand each element of a result is.  Hashable: equal maps are worked out once."""

    def wanted(self, coordinates: np.ndarray) -> np.ndarray:
        """Coordinates [..., dim] of the result -> coordinates of the operand."""
        ...


@functools.lru_cache(maxsize=4096)
def register_table(have: RegisterLayout, layout: RegisterLayout, source: ElementMap) -> tuple[int, ...] | None:
    """For each register of `layout` the register of `have` that holds what it wants, if that is the same in every thread."""
    held = linear(have.coordinates(), have.shape)
    needed = linear(source.wanted(layout.coordinates()), have.shape)
    first = {int(n): r for r, n in reversed(list(enumerate(held[0, 0])))}
    table = []
    for i in range(layout.registers):
        r = first.get(int(needed[0, 0, i]))
        if r is None or not np.array_equal(held[:, :, r], needed[:, :, i]):
            return None
        table.append(r)
    return tuple(table)


def crosses_warps(layout: RegisterLayout, axes: Sequence[int]) -> bool:
    """Whether elements along `axes` are held by several warps."""
    return any(d.dim in axes and d.size > 1 for d in layout.warp)
