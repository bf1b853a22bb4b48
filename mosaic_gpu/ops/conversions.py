"""Elementwise operations whose parameters decide the expression: conversions, bitcasts, rounding, powers, neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UnsupportedPrimitive
from ..program import Equation
from .elementwise import C_INTEGERS, FLOAT8, FLOATS, INTEGERS, in_type, numpy_dtype, widened
from .registry import BOTH, WARP, WARPGROUP, Op, op

NARROW = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-(2**15), 2**15 - 1), "uint16": (0, 2**16 - 1)}
HALF = {"bfloat16": "bf16", "float16": "f16"}


def _define(name: str, expression: Callable[[Equation], str], numpy: Callable[..., Any]) -> Op:
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
        x, dtype = numpy(e, *args), numpy_dtype(e.results[0].dtype)
        sim.write(e.results[0], x if x.dtype == dtype else x.astype(dtype))

    return o


# ---- powers, rounding, neighbours -----------------------------------------------------------------------------------------
def _power(e: Equation) -> str:
    y = int(e.param("y"))
    if abs(y) <= 8:
        product = " * ".join(["{0}"] * abs(y)) or "1"
        return f"({product})" if y >= 0 else f"(1.f / ({product}))"
    return f"int_power<{y}>({{0}})" if y >= 0 else f"(1.f / int_power<{-y}>({{0}}))"


_define("integer_pow", _power, lambda e, x: np.power(widened(x), e.param("y"))).dtypes = (*FLOATS, *INTEGERS)


def _away(x: Any) -> Any:
    return np.copysign(np.trunc(np.abs(x) + (np.abs(x) - np.trunc(np.abs(x)) >= 0.5)), x)


def _round(e: Equation) -> str:
    return ("rint" if int(e.param("rounding_method")) else "round") + ("f({0})" if _single(e) else "({0})")


def _single(e: Equation) -> bool:
    return e.operands[0].dtype != "float64"


_define(
    "round", _round, lambda e, x: np.rint(widened(x)) if int(e.param("rounding_method")) else _away(widened(x))
).dtypes = FLOATS


def _neighbour(e: Equation) -> str:
    dtype = e.operands[0].dtype
    if dtype in HALF:
        bits = f"to_{HALF[dtype]}"
        return f"from_{HALF[dtype]}(next_bits({bits}({{0}}), {bits}({{1}}), {{0}}, {{1}}))"
    return "nextafterf({0}, {1})" if dtype == "float32" else "nextafter({0}, {1})"


_define("nextafter", _neighbour, lambda e, x, y: np.nextafter(x, y)).dtypes = FLOATS


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


_define("reduce_precision", _reduce_precision, _reduced).dtypes = ("float32", "float16", "bfloat16")

# ---- conversions ------------------------------------------------------------------------------------------------------------


def _converted(e: Equation, x: Any) -> Any:
    """A float outside an integer type's range becomes its nearest end, NaN zero, as `cvt.rzi` has it (PTX ISA, cvt)."""
    source, to = e.operands[0].dtype, e.results[0].dtype
    dtype = numpy_dtype(to)
    if FLOAT8.keys() & {source, to}:
        x, source = x.astype(np.float32), "float32"
    if source not in FLOATS or to not in INTEGERS:
        return x.astype(dtype)
    ends, wide = np.iinfo(dtype), np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
    inside = np.where((wide >= float(ends.min)) & (wide < float(ends.max) + 1), wide, 0).astype(dtype)
    return np.where(
        wide < 0, np.where(wide < float(ends.min), ends.min, inside), np.where(wide > inside, ends.max, inside)
    )


def _conversion(e: Equation) -> str:
    to, source = e.results[0].dtype, e.operands[0].dtype
    if FLOAT8.keys() & {source, to} and "float64" in (source, to):
        raise UnsupportedPrimitive(
            f"conversion of {source} to {to}: float8 is converted to and from float32; go through astype(jnp.float32)",
            e.line,
        )
    if source in FLOAT8:
        return _conversion_of("float32", to).replace("{0}", f"from_{FLOAT8[source]}({{0}})")
    return _conversion_of(source, to)


def _conversion_of(source: str, to: str) -> str:
    if to in FLOAT8:  # a 32-bit integer that float32 rounds is too large for both
        return f"to_{FLOAT8[to]}((float)({{0}}))"
    if to == "bool":
        return "({0} != 0)"
    if source in FLOATS and to in FLOATS:
        return "(double)({0})" if to == "float64" else "(float)({0})"
    if source in FLOATS and to in NARROW:
        low, high = NARROW[to]  # C leaves open what a narrow type makes of a number too large; 32 bits saturate
        return f"({_c_type(to)})min(max((int)({{0}}), {low}), {high})"
    if to in FLOATS:
        return "(double)({0})" if to == "float64" else "(float)({0})"
    if source in FLOATS and to in ("int64", "uint64"):  # of 64 bits, cvt does not make 0 of NaN
        return f"({{0}} == {{0}} ? ({_c_type(to)})({{0}}) : 0)"
    return f"({_c_type(to)})({{0}})"


def _c_type(dtype: str) -> str:
    from ..codegen.text import c_type

    return c_type(dtype)


_define("convert_element_type", _conversion, _converted).dtypes = (*FLOATS, *FLOAT8, *INTEGERS, "bool")


def _bits(dtype: str) -> int:
    return 8 * numpy_dtype(dtype).itemsize


def _bitcast(e: Equation) -> str:
    source, to = e.operands[0].dtype, e.results[0].dtype
    if _bits(source) != _bits(to):
        raise UnsupportedPrimitive(
            f"bitcast_convert_type of {source} to {to}: elements of another width lie in other registers; only types of the "
            "same width",
            e.line,
        )
    text = "{0}"
    if source in FLOATS:
        text = f"to_{HALF[source]}({text})" if source in HALF else in_type("as_bits({0})", source)
    unsigned = C_INTEGERS[_bits(to)][1]
    if to in HALF:
        return f"from_{HALF[to]}(({unsigned})({text}))"
    if to in FLOATS:
        return f"float_of_bits(({unsigned})({text}))"
    return f"({_c_type(to)})({text})"


_define(
    "bitcast_convert_type",
    _bitcast,
    lambda e, x: np.ascontiguousarray(x).view(numpy_dtype(e.results[0].dtype)).reshape(x.shape),
).dtypes = (
    *FLOATS,
    *FLOAT8,
    *INTEGERS,
)
