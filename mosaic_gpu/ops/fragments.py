"""A WGMMA array's registers as an array of their own, and back: which thread holds what stays, so neither costs anything.

Scratch that only kernels of ours read need not lie row by row.  In the order of the registers a warpgroup moves it in
16-byte pieces without bank conflicts, and whoever reads it gets the fragments back as they were.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arguments
from ..errors import LayoutConflict, UnsupportedCall
from ..layouts.registers import RegisterLayout, strided, wgmma
from ..program import Equation, Value
from .registry import WARPGROUP, op

to_fragments_p = op("to_fragments")
from_fragments_p = op("from_fragments")
VECTOR = 4  # registers that one thread moves at once


def to_fragments(x: Any) -> Any:
    """The registers of `x`, a 32-bit array (m, n) in Layout.WGMMA, as an array (m * n / 128, 128).

    Row-major, its elements are those of thread 0's first four registers, thread 1's first four, ..., then the next four of
    each.  Raises UnsupportedCall for other shapes and dtypes.
    """
    from ..frontend.primitives import bind

    return bind(to_fragments_p, x)[0]


def from_fragments(x: Any, shape: tuple[int, int]) -> Any:
    """What `to_fragments` made of an array of `shape`, as that array, in Layout.WGMMA."""
    from ..frontend.primitives import bind

    return bind(from_fragments_p, x, shape=arguments.whole_numbers("from_fragments", "shape", shape, 1))[0]


def _register_array(where: str, x: Any) -> None:
    arguments.memory(where, "x", x, or_array=True)
    if not x.shape or x.space is not None:
        raise TypeError(f"{where}: x must be a register array, not {'a Ref' if x.space else f'a scalar ({x.dtype})'}")


def _check(where: str, shape: tuple[int, ...], dtype: str) -> None:
    if len(shape) != 2 or shape[0] % 64 or shape[1] % 8 or dtype not in ("float32", "int32", "uint32"):
        raise UnsupportedCall(
            f"{where}: {dtype}{list(shape)}; it takes 32-bit arrays (m, n) with m a multiple of 64 and n of 8"
        )


@to_fragments_p.abstract
def _(x: Any) -> Any:
    _register_array("to_fragments", x)
    _check("to_fragments", x.shape, x.dtype)
    return (((x.shape[0] * x.shape[1] // 128, 128), x.dtype),)


@from_fragments_p.abstract
def _(x: Any, *, shape: tuple[int, ...]) -> Any:
    _register_array("from_fragments", x)
    _check("from_fragments", shape, x.dtype)
    if x.shape != (shape[0] * shape[1] // 128, 128):
        raise UnsupportedCall(
            f"from_fragments: {x.shape} holds no array of shape {shape}, which takes {shape[0] * shape[1] // 128} x 128"
        )
    return ((shape, x.dtype),)


def _pair(e: Equation) -> tuple[Any, Value, tuple[RegisterLayout, RegisterLayout]]:
    """(operand, result, their layouts)."""
    x, y = e.operands[0], e.results[0]
    assert not isinstance(x, int)
    matrix = x.shape if e.op == "to_fragments" else y.shape
    both = wgmma(matrix), strided((matrix[0] * matrix[1] // 128, 128), VECTOR)
    return x, y, both if e.op == "to_fragments" else both[::-1]


def _layouts(solver: Any, e: Equation) -> None:
    x, y, (before, after) = _pair(e)
    if isinstance(x, Value):
        solver.fix(e, x, before)
    solver.fix(e, y, after)


def _emit(out: Any, step: Any) -> None:
    x, y, (before, _) = _pair(step.equation)
    if not isinstance(x, Value) or out.layout(x) is None:
        raise LayoutConflict(
            f"{step.equation.op} of one repeated value: give it a layout with layout_cast, so that each thread has its registers"
        )
    out.declare(y)
    out.loop(before.registers, f"{out.name(y)}[i] = {out.name(x)}[i];")


def _simulate(sim: Any, step: Any) -> None:
    x, y, (before, after) = _pair(step.equation)
    data = np.broadcast_to(sim.read(x), before.shape)
    result = np.empty(after.shape, data.dtype)
    result[tuple(np.moveaxis(after.coordinates(), -1, 0))] = data[tuple(np.moveaxis(before.coordinates(), -1, 0))]
    sim.write(y, result)


for _o in (to_fragments_p, from_fragments_p):
    _o.layouts(_layouts)
    _o.emit(scopes=(WARPGROUP,))(_emit)
    _o.simulate(_simulate)
