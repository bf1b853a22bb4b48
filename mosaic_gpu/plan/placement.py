"""Where buffers lie one behind the other, and those of a `RefUnion` over each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..program import Value


@dataclasses.dataclass
class Piece:
    """One buffer to place: its size and what its start must be a multiple of, in bytes or columns."""

    ref: Value
    size: int
    alignment: int = 1


@dataclasses.dataclass
class _Group:
    """What is placed as a whole: one buffer, or a union.  starts: (piece, its start from the group's)."""

    starts: list[tuple[Piece, int]]
    size: int
    alignment: int


def place(pieces: Iterable[Piece]) -> tuple[dict[int, int], int]:
    """(start of each buffer by value id, what they take together); the largest alignments come first."""
    starts: dict[int, int] = {}
    at = 0
    for group in sorted(_groups(pieces), key=lambda g: -g.alignment):
        at = _aligned(at, group.alignment)
        for piece, start in group.starts:
            starts[piece.ref.id] = at + start
        at += group.size
    return starts, at


def _groups(pieces: Iterable[Piece]) -> list[_Group]:
    out: list[_Group] = []
    unions: dict[int, tuple[_Group, dict[int, int]]] = {}  # of each group of a union how much is taken
    for piece in pieces:
        union = piece.ref.space.union if piece.ref.space is not None else None
        if union is None:
            out.append(_Group([(piece, 0)], piece.size, piece.alignment))
            continue
        number, which = union
        if number not in unions:
            out.append(_Group([], 0, 1))
            unions[number] = (out[-1], {})
        group, taken = unions[number]
        start = _aligned(taken.get(which, 0), piece.alignment)
        taken[which] = start + piece.size
        group.starts.append((piece, start))
        group.size, group.alignment = max(group.size, taken[which]), max(group.alignment, piece.alignment)
    return out


def _aligned(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
