"""Elementwise operations whose parameters decide the expression: conversions, rounding, powers, neighbours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UnsupportedPrimitive
from ..program import Equation
from .elementwise import FLOATS, INT4, INTEGERS, SMALL_FLOATS, ends, narrowed, numpy_dtype, widened
from .registry import BOTH, WARP, WARPGROUP, Op, op

NARROW = ("int8", "uint8", "int16", "uint16", *INT4)
HALF = {"bfloat16": "bf16", "float16": "f16"}


def define(name: str, expression: Callable[[Equation], str], numpy: Callable[..., Any]) -> Op:
    """An op of one file: how its equation reads in C, and what it computes of NumPy arrays."""
    o = op(name, issues_only=True)

    @o.layouts
    def _(solver: Any, e: Equation) -> None:
        solver.same(e, [*e.operands, *e.results])

    @o.emit(BOTH, (WARPGROUP, WARP))
    def _(out: Any, step: Any) -> None:
        out.elementwise(step, expression(step.equation))

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e, args = step.equation, [sim.read(x) for x in step.equation.operands]
        sim.write(e.results[0], narrowed(numpy(e, *args), numpy_dtype(e.results[0].dtype)))

    return o


# ---- powers, rounding, neighbours -----------------------------------------------------------------------------------------
WRITTEN_OUT = 8  # up to this power the factors stand in a row; above it is squared


def _power(e: Equation) -> str:
    y = int(e.param("y"))
    if abs(y) <= WRITTEN_OUT:
        product = " * ".join(["{0}"] * abs(y)) or "1"
        return f"({product})" if y >= 0 else f"(1.f / ({product}))"
    return f"int_power<{y}>({{0}})" if y >= 0 else f"(1.f / int_power<{-y}>({{0}}))"


def _squares(x: Any, n: int) -> Any:
    """`int_power` of the prelude."""
    if n == 1:
        return x
    half = _squares(x, n // 2)
    return np.multiply(x, _squares(x, n - 1)) if n % 2 else np.multiply(half, half)


def _powers(x: Any, y: int) -> Any:
    """Multiplied in the order of the C++, as each product is rounded."""
    n = abs(y)
    with np.errstate(all="ignore"):
        product = functools.reduce(np.multiply, [x] * n, np.ones_like(x)) if n <= WRITTEN_OUT else _squares(x, n)
        return product if y >= 0 else np.divide(np.ones_like(x), product)


define("integer_pow", _power, lambda e, x: _powers(widened(x), int(e.param("y")))).dtypes = (*FLOATS, *INTEGERS)


def _away(x: Any) -> Any:
    return np.copysign(np.trunc(np.abs(x) + (np.abs(x) - np.trunc(np.abs(x)) >= 0.5)), x)


def _round(e: Equation) -> str:
    return ("rint" if int(e.param("rounding_method")) else "round") + ("f({0})" if _single(e) else "({0})")


def _single(e: Equation) -> bool:
    return e.operands[0].dtype != "float64"


define(
    "round", _round, lambda e, x: np.rint(widened(x)) if int(e.param("rounding_method")) else _away(widened(x))
).dtypes = FLOATS


def _neighbour(e: Equation) -> str:
    dtype = e.operands[0].dtype
    if dtype in HALF:
        bits = f"to_{HALF[dtype]}"
        return f"from_{HALF[dtype]}(next_bits({bits}({{0}}), {bits}({{1}}), {{0}}, {{1}}))"
    return "nextafterf({0}, {1})" if dtype == "float32" else "nextafter({0}, {1})"


define("nextafter", _neighbour, lambda e, x, y: np.nextafter(x, y)).dtypes = FLOATS


_PRECISIONS = {(5, 10): "float16", (8, 7): "bfloat16", (8, 23): "float32"}


def _precision(e: Equation) -> str:
    """The type whose values a reduced precision has."""
    wanted = (e.param("exponent_bits"), e.param("mantissa_bits"))
    if wanted not in _PRECISIONS:
        raise UnsupportedPrimitive(
            f"reduce_precision to {wanted[0]} exponent and {wanted[1]} mantissa bits: only {', '.join(_PRECISIONS.values())} "
            "have a conversion",
            e.line,
        )
    return _PRECISIONS[wanted]


def _reduce_precision(e: Equation) -> str:
    to = _precision(e)
    return f"from_{HALF[to]}(to_{HALF[to]}({{0}}))" if to in HALF else "(float)({0})"


def _reduced(e: Equation, x: Any) -> Any:
    return x.astype(numpy_dtype(_precision(e))).astype(x.dtype)


define("reduce_precision", _reduce_precision, _reduced).dtypes = ("float32", "float16", "bfloat16")

# ---- conversions ------------------------------------------------------------------------------------------------------------


def _converted(e: Equation, x: Any) -> Any:
    """A float outside an integer type's range becomes its nearest end, NaN zero, as `cvt.rzi` has it (PTX ISA, cvt)."""
    source, to = e.operands[0].dtype, e.results[0].dtype
    dtype = numpy_dtype(to)
    if SMALL_FLOATS.keys() & {source, to}:
        x, source = widened(x).astype(np.float32), "float32"
        if to == "float4_e2m1fn":  # has no NaN; XLA makes it -0, of either sign
            x = np.where(np.isnan(x), np.float32(-0.0), x)
    if source not in FLOATS or to not in (*INTEGERS, *INT4):
        return narrowed(widened(x) if source in INT4 else x, dtype)
    (least, most), wide = ends(to), np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
    inside = np.where((wide >= float(least)) & (wide < float(most) + 1), wide, 0)
    inside = inside.astype(np.int8 if to == "int4" else np.uint8 if to == "uint4" else dtype)
    return np.where(wide < 0, np.where(wide < float(least), least, inside), np.where(wide > inside, most, inside))


def _conversion(e: Equation) -> str:
    to, source = e.results[0].dtype, e.operands[0].dtype
    if SMALL_FLOATS.keys() & {source, to} and "float64" in (source, to):
        raise UnsupportedPrimitive(
            f"conversion of {source} to {to}: floats of 8 and 4 bits are converted to and from float32; go through "
            "astype(jnp.float32)",
            e.line,
        )
    if source in SMALL_FLOATS:
        return _conversion_of("float32", to).replace("{0}", f"from_{SMALL_FLOATS[source]}({{0}})")
    if source in INT4 and (to in FLOATS or to in SMALL_FLOATS):
        return _conversion_of("float32", to).replace("{0}", f"float_of_{INT4[source]}({{0}})")
    return _conversion_of(source, to)


def _conversion_of(source: str, to: str) -> str:
    if to in SMALL_FLOATS:  # a 32-bit integer that float32 rounds is too large for all
        return f"to_{SMALL_FLOATS[to]}((float)({{0}}))"
    if to == "bool":
        return "({0} != 0)"
    if source in FLOATS and to in FLOATS:
        return "(double)({0})" if to == "float64" else "(float)({0})"
    if source in FLOATS and to in NARROW:
        low, high = ends(to)  # C leaves open what a narrow type makes of a number too large; 32 bits saturate
        return f"({_c_type(to)})min(max((int)({{0}}), {low}), {high})"
    if to in INT4:
        return f"wrap_{INT4[to]}((int)({{0}}))"
    if to in FLOATS:
        return "(double)({0})" if to == "float64" else "(float)({0})"
    if source in FLOATS and to in ("int64", "uint64"):  # of 64 bits, cvt does not make 0 of NaN
        return f"({{0}} == {{0}} ? ({_c_type(to)})({{0}}) : 0)"
    return f"({_c_type(to)})({{0}})"


def _c_type(dtype: str) -> str:
    from ..codegen.text import c_type

    return c_type(dtype)


define("convert_element_type", _conversion, _converted).dtypes = (*FLOATS, *SMALL_FLOATS, *INTEGERS, *INT4, "bool")
