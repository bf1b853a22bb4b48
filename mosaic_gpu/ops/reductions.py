"""Reductions of a register array along any dimensions: within a thread, over lanes by shuffles, over warps through scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..layouts.registers import RegisterLayout
from ..layouts.shared import itemsize
from ..layouts.spread import crosses_warps
from ..program import Equation, Value
from .elementwise import FLOATS, INTEGERS, numpy_dtype, widened
from .order import largest, least
from .registry import Op, op


@dataclasses.dataclass(frozen=True)
class Combine:
    """How two elements become one, as C expressions of {0} and {1}; None where a type has no such reduction.

    floats: of float32, in which 16-bit types are computed too, and of float64.
    """

    name: str
    numpy: Callable[..., Any]
    floats: str | None = None
    integers: str | None = None
    bools: str | None = None
    approx: str | None = None

    def of(self, dtype: str, approx: bool = False) -> str | None:
        if dtype == "bool":
            return self.bools
        if dtype in FLOATS:
            return self.approx if approx and self.approx and dtype != "float64" else self.floats
        return self.integers

    def dtypes(self) -> tuple[str, ...]:
        return tuple(d for d in (*FLOATS, *INTEGERS, "bool") if self.of(d))


SUM = Combine("reduce_sum", np.sum, "({0} + {1})", "({0} + {1})")
PRODUCT = Combine("reduce_prod", np.prod, "({0} * {1})", "({0} * {1})")
MAX = Combine("reduce_max", largest, "max_nan({0}, {1})", "({0} > {1} ? {0} : {1})", "({0} || {1})", "fmaxf({0}, {1})")
MIN = Combine("reduce_min", least, "min_nan({0}, {1})", "({0} < {1} ? {0} : {1})", "({0} && {1})", "fminf({0}, {1})")
AND = Combine("reduce_and", np.bitwise_and.reduce, None, "({0} & {1})", "({0} && {1})")
OR = Combine("reduce_or", np.bitwise_or.reduce, None, "({0} | {1})", "({0} || {1})")
XOR = Combine("reduce_xor", np.bitwise_xor.reduce, None, "({0} ^ {1})", "({0} != {1})")


def exchange_bytes(layouts: Mapping[int, RegisterLayout], e: Equation, result: Value, size: int) -> int:
    """Scratch of a reduction's results of `size` bytes: for the warps, and for a layout of the result that differs."""
    x = e.operands[0]
    wide = layouts.get(x.id) if isinstance(x, Value) else None
    if wide is None:
        return 0
    natural = wide.reduce(tuple(e.param("axes")))
    across = 128 * natural.registers * size if crosses_warps(wide, e.param("axes")) else 0
    have = layouts.get(result.id)
    moves = have is not None and not have.same_map(natural)
    return max(across, int(np.prod(result.shape, dtype=np.int64)) * size if moves else 0)


def _along_axes(solver: Any, e: Equation) -> None:
    solver.reduction(e, e.operands[0], e.results[0], tuple(e.param("axes")))


def _define(c: Combine) -> Op:
    o = op(c.name, pure=True, whole=True, dtypes=c.dtypes())

    o.layouts(_along_axes)

    @o.emit()
    def _(out: Any, step: Any) -> None:
        e = step.equation
        out.reduce(step, tuple(e.param("axes")), c.of(e.operands[0].dtype, out.approx))

    @o.scratch
    def _(layouts: Any, e: Equation) -> int:
        return exchange_bytes(layouts, e, e.results[0], max(4, itemsize(e.results[0].dtype)))

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        x = sim.read(e.operands[0])
        wide = widened(x) if step.fma is None else np.broadcast_to(sim.fused(step.fma), x.shape)
        with np.errstate(all="ignore"):
            result = c.numpy(wide, axis=tuple(e.param("axes")))
        sim.write(e.results[0], np.asarray(result).astype(numpy_dtype(e.results[0].dtype)))

    return o


for _c in (SUM, PRODUCT, MAX, MIN, AND, OR, XOR):
    _define(_c)


def _better(dtype: str, order: str) -> str:
    """Whether {0} at index {2} goes before {1} at index {3}: NaN first, then what is larger (smaller), then the lower index."""
    tie = "({0} == {1} && {2} < {3})"
    if dtype not in FLOATS:
        return f"({{0}} {order} {{1}} || {tie})"
    nan = "({0} != {0} && ({1} == {1} || {2} < {3}))"
    return f"({nan} || ({{1}} == {{1}} && ({{0}} {order} {{1}} || {tie})))"


def _define_arg(name: str, order: str, numpy: Callable[..., Any]) -> None:
    o = op(name, pure=True, whole=True, dtypes=(*FLOATS, *INTEGERS))

    o.layouts(_along_axes)

    @o.emit()
    def _(out: Any, step: Any) -> None:
        e = step.equation
        out.reduce_index(step, tuple(e.param("axes")), _better(e.operands[0].dtype, order))

    @o.scratch
    def _(layouts: Any, e: Equation) -> int:
        return exchange_bytes(layouts, e, e.results[0], 8 + max(4, itemsize(e.operands[0].dtype)))

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        x = sim.read(e.operands[0])
        wide = widened(x)
        sim.write(e.results[0], numpy(wide, axis=e.param("axes")[0]).astype(numpy_dtype(e.results[0].dtype)))


_define_arg("argmax", ">", np.argmax)
_define_arg("argmin", "<", np.argmin)
