"""Cumulative operations, sorting and the largest elements along one dimension, through the scratch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..layouts.registers import RegisterLayout
from ..layouts.shared import array_bytes, itemsize
from ..program import Equation
from .elementwise import FLOATS, INTEGERS, numpy_dtype, widened
from .order import cumulative_maximum, cumulative_minimum, order_key
from .reductions import MAX, MIN, PRODUCT, SUM, Combine
from .registry import op

LOG_SUM_EXP = Combine(
    "logsumexp",
    np.logaddexp,
    "(fmaxf({0}, {1}) == -__int_as_float(0x7f800000) ? {0} : fmaxf({0}, {1}) + log1pf(expf(-fabsf({0} - {1}))))",
)


def _define(name: str, c: Combine, numpy: Callable[..., Any]) -> None:
    """Doubling steps (Hillis and Steele): element i takes in what stands 1, 2, 4... places before it; 16-bit in float32."""
    types = tuple(d for d in (*FLOATS, *INTEGERS) if c.of(d) is not None and (c is not LOG_SUM_EXP or d != "float64"))
    o = op(name, pure=True, whole=True, dtypes=types)

    @o.layouts
    def _(solver: Any, e: Equation) -> None:
        solver.same(e, [*e.operands, *e.results])

    @o.emit()
    def _(out: Any, step: Any) -> None:
        e = step.equation
        out.scan(step, e.param("axis"), bool(e.param("reverse")), c.of(e.operands[0].dtype))

    @o.scratch
    def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
        return array_bytes(e.operands[0]) // itemsize(e.operands[0].dtype) * max(4, itemsize(e.operands[0].dtype))

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        x, axis = widened(sim.read(e.operands[0])), e.param("axis")
        with np.errstate(all="ignore"):
            turned = np.flip(x, axis) if e.param("reverse") else x
            result = numpy(turned, axis=axis)
            result = np.flip(result, axis) if e.param("reverse") else result
        sim.write(e.results[0], result.astype(numpy_dtype(e.results[0].dtype)))


def _keeping_type(ufunc: Any) -> Callable[..., Any]:
    return lambda x, axis: ufunc.accumulate(x, axis=axis, dtype=x.dtype)


_define("cumsum", SUM, _keeping_type(np.add))
_define("cumprod", PRODUCT, _keeping_type(np.multiply))
_define("cummax", MAX, cumulative_maximum)
_define("cummin", MIN, cumulative_minimum)
_define("cumlogsumexp", LOG_SUM_EXP, _keeping_type(np.logaddexp))


# ---- sort ---------------------------------------------------------------------------------------------------------------------
sort = op("sort", pure=True, whole=True, dtypes=(*FLOATS, *INTEGERS, "bool"))


@sort.layouts
def _(solver: Any, e: Equation) -> None:
    solver.same(e, [*e.operands, *e.results])


@sort.emit()
def _(out: Any, step: Any) -> None:
    out.sort(step)


@sort.scratch
def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
    return array_bytes(*e.operands, align=8)


def _order(x: Any) -> Any:
    """A key that NumPy sorts as JAX does: zeros are equal, NaNs are equal and last."""
    x = widened(x)
    if x.dtype.kind != "f":
        return x
    return np.where(x == 0, np.zeros_like(x), x)


@sort.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    xs, d = [sim.read(x) for x in e.operands], e.param("dimension")
    keys = [np.moveaxis(_order(x), d, -1) for x in xs[: e.param("num_keys")]]
    order = np.argsort(keys[-1], -1, kind="stable")
    for k in reversed(keys[:-1]):
        order = np.take_along_axis(order, np.argsort(np.take_along_axis(k, order, -1), -1, kind="stable"), -1)
    order = np.moveaxis(order, -1, d)
    for r, x in zip(e.results, xs, strict=True):
        sim.write(r, np.take_along_axis(x, order, d))


# ---- the k largest ------------------------------------------------------------------------------------------------------------
top_k = op("top_k", pure=True, whole=True, dtypes=(*FLOATS, *INTEGERS, "bool"))


@top_k.emit()
def _(out: Any, step: Any) -> None:
    out.top_k(step)


@top_k.scratch
def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
    return max(array_bytes(e.operands[0]), array_bytes(*e.results, align=8))


@top_k.simulate
def _(sim: Any, step: Any) -> None:
    """In total order (+0 before -0, NaN first); of equal ones the first, hence backwards twice."""
    e = step.equation
    x, d, k = sim.read(e.operands[0]), e.param("axis"), e.param("k")
    order = np.argsort(np.flip(order_key(x), d), d, kind="stable")
    order = np.take(np.flip(x.shape[d] - 1 - order, d), range(k), d)
    sim.write(e.results[0], np.take_along_axis(x, order, d))
    sim.write(e.results[1], order.astype(numpy_dtype(e.results[1].dtype)))
