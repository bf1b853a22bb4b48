"""What every operation needs that moves elements of one array to other places, without computing on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..layouts.registers import RegisterLayout
from ..layouts.shared import BELOW_A_BYTE, array_bytes, itemsize, row_major
from ..layouts.spread import register_table
from ..program import Equation, Value
from .elementwise import FLOATS, INT4, INTEGERS, SMALL_FLOATS
from .registry import BOTH, WARP, WARPGROUP, Op

ALL = (*FLOATS, *SMALL_FLOATS, *INTEGERS, *INT4, "bool")
IN_MEMORY = tuple(t for t in ALL if t not in BELOW_A_BYTE)


@dataclasses.dataclass(frozen=True)
class Map:
    """Where each element of the result comes from: operand coordinate k = offset[k] + sum over d of matrix[k][d] * c[d]."""

    shape: tuple[int, ...]  # of the operand
    matrix: tuple[tuple[int, ...], ...]
    offset: tuple[int, ...]

    @staticmethod
    def of_strides(e: Equation, source: Iterable[int], steps: Iterable[int] = (), offset: Iterable[int] = ()) -> Map:
        """Operand dimension k follows the result's dimension source[k] (-1: it stays at its offset) in steps of steps[k]."""
        x, rank = e.operands[0], len(e.results[0].shape)
        source, steps, offset = tuple(source), tuple(steps) or (1,) * len(x.shape), tuple(offset) or (0,) * len(x.shape)
        matrix = tuple(
            tuple(steps[k] if d == s else 0 for d in range(rank))
            for k, s in zip(range(len(x.shape)), source, strict=True)
        )
        return Map(tuple(x.shape), matrix, offset)

    def wanted(self, coordinates: np.ndarray) -> np.ndarray:
        rank = len(self.shape)
        result: np.ndarray = coordinates @ np.array(self.matrix, np.int64).reshape(
            rank, coordinates.shape[-1]
        ).T + np.array(self.offset, np.int64)
        return result

    def strides(self) -> tuple[int, ...]:
        """What a step along each of the result's dimensions adds to the row-major number of the operand's element."""
        columns = len(self.matrix[0]) if self.matrix else 0
        return tuple(
            sum(row[d] * s for row, s in zip(self.matrix, row_major(self.shape), strict=True)) for d in range(columns)
        )

    def start(self) -> int:
        return sum(o * s for o, s in zip(self.offset, row_major(self.shape), strict=True))


@dataclasses.dataclass(frozen=True)
class Reshape:
    """A map that keeps row-major numbers."""

    shape: tuple[int, ...]
    to: tuple[int, ...]

    def wanted(self, coordinates: np.ndarray) -> np.ndarray:
        number = (coordinates * np.array(row_major(self.to), np.int64)).sum(-1)
        parts = [number // s % n for s, n in zip(row_major(self.shape), self.shape, strict=True)]
        return np.stack(parts, -1) if parts else np.zeros((*number.shape, 0), np.int64)

    def strides(self) -> tuple[int, ...]:
        return row_major(self.to)

    def start(self) -> int:
        return 0


AnyMap = Map | Reshape


def define_move(o: Op, map_of: Callable[[Equation], AnyMap], numpy: Callable[[Equation, Any], Any]) -> None:
    """Emit, simulate and scratch rules of an op whose result is its operand's elements by a map known at compile time."""
    o.pure, o.dtypes = True, ALL

    @o.emit(BOTH, (WARPGROUP, WARP))
    def _(out: Any, step: Any) -> None:
        e = step.equation
        m = map_of(e)
        out.moved(e.operands[0], e.results[0], m, m.strides(), str(m.start()), isinstance(m, Reshape))

    @o.scratch
    def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
        x, y = e.operands[0], e.results[0]
        have, layout = layouts.get(x.id) if isinstance(x, Value) else None, layouts.get(y.id)
        if (
            have is None
            or (not y.shape and array_bytes(x) == itemsize(x.dtype))
            or (layout is not None and register_table(have, layout, map_of(e)) is not None)
        ):
            return 0
        return array_bytes(x)

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        sim.write(e.results[0], numpy(e, sim.read(e.operands[0])))
