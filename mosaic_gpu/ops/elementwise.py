"""Arithmetic, comparisons, selection and conversion, element by element: JAX's primitives as a table.

A row: C expressions for floats (computed in float32, also for 16-bit types, which are rounded on the way out), for integers
and for bools; the `.approx` form that `approx_math` allows; the NumPy function that the simulator runs.  In an expression of
integers $T is their C type, $U the unsigned and $S (in parentheses) the signed one of the same width, $W the width in bits.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import UnsupportedCall, UnsupportedPrimitive
from ..program import Equation
from .order import maximum, minimum, order_key, signed
from .registry import BOTH, WARP, WARPGROUP, Op, op

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOAT8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
SMALL_FLOATS = {**FLOAT8, "float4_e2m1fn": "e2m1"}  # moved, chosen and converted, not computed with
# Each in a register of its own, its sign extended; computed in 32 bits (the simulator: in 8), and wrapped.
INT4 = {"int4": "s4", "uint4": "u4"}
INT4_OPS = {
    "add",
    "sub",
    "mul",
    "div",
    "rem",
    "max",
    "min",
    "and",
    "or",
    "xor",
    "not",
    "neg",
    "sign",
    "select_n",
    "clamp",
}
INT4_OPS |= {"eq", "ne", "lt", "le", "gt", "ge"}
WRAPPED = {"add", "sub", "mul", "div", "not", "neg"}  # of these what may need more than 4 bits
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
HIGHEST = "highest"  # parameter `accuracy`; else (atol, rtol, ulps), or None
C_INTEGERS = {8: ("signed char", "u8"), 16: ("short", "u16"), 32: ("int", "u32"), 64: ("long long", "u64")}


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a dtype name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def ends(dtype: str) -> tuple[int, int]:
    """The least and the largest number of an integer type."""
    if dtype in INT4:
        return (-8, 7) if dtype == "int4" else (0, 15)
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


_EIGHT_BITS = {np.dtype(ml_dtypes.int4): np.int8, np.dtype(ml_dtypes.uint4): np.uint8}


def widened(x: Any) -> Any:
    """What is computed in a wider type in that: 16-bit floats in float32, 4-bit integers in 8 bits."""
    if x.dtype.kind in "iub":
        return x
    wide = np.float32 if x.dtype.itemsize == 2 else _EIGHT_BITS.get(x.dtype)
    return x if wide is None else x.astype(wide)


def narrowed(x: Any, dtype: np.dtype[Any]) -> Any:
    """Back again: rounded, or wrapped around."""
    if x.dtype == dtype:
        return x
    if dtype in _EIGHT_BITS:
        x = (widened(x).astype(np.int64) & 15).astype(np.uint8)
    return x.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Row:
    """One elementwise operation; None where the operand type has no such operation.

    ulps: error of the float expression, in units in the last place (CUDA programming guide, mathematical functions); error: of
    the approx one, relative and absolute, where it has a bound over the whole range.  Both only where JAX takes an `accuracy`.
    """

    name: str
    numpy: Callable[..., Any]
    float_: str | None = None
    int_: str | None = None
    bool_: str | None = None
    approx: str | None = None
    ulps: float = 0
    error: tuple[float, float] | None = None

    def expression(self, dtype: str, approx: bool) -> str | None:
        if dtype == "bool":
            return self.bool_
        if dtype in SMALL_FLOATS:
            return self.float_ if self.name == "select_n" else None
        if dtype in INT4:
            wrapped = f"wrap_{INT4[dtype]}({self.int_})" if self.name in WRAPPED else self.int_
            return wrapped if self.name in INT4_OPS else None
        if dtype == "float64":
            return None if self.float_ is None else _in_double(self.float_)
        if dtype in FLOATS:
            return self.approx if approx and self.approx else self.float_
        return self.int_ and in_type(self.int_, dtype)

    def dtypes(self) -> tuple[str, ...]:
        """The operand types that the row has an expression for."""
        return tuple(
            d for d in (*FLOATS, *SMALL_FLOATS, *INTEGERS, *INT4, "bool") if self.expression(d, False) is not None
        )


def in_type(expression: str, dtype: str) -> str:
    """An integer expression with the C types and the width of `dtype` filled in."""
    if dtype not in INTEGERS:
        return expression
    bits = int(dtype.lstrip("uint"))
    signed, unsigned = C_INTEGERS[bits]
    own = unsigned if dtype.startswith("u") else signed
    return expression.replace("$T", own).replace("$U", unsigned).replace("$S", f"({signed})").replace("$W", str(bits))


def _in_double(expression: str) -> str:
    """A float32 expression with the functions and constants of float64."""
    expression = expression.replace("__int_as_float(0x7f800000)", "__longlong_as_double(0x7ff0000000000000ll)")
    return re.sub(r"(\d\.)f\b", r"\g<1>0", re.sub(r"\b([a-z]\w*)f\(", r"\1(", expression)).replace(
        "(float)", "(double)"
    )


def _divide(a: Any, b: Any) -> Any:
    """Integers towards zero, as C does: what is left without the rest divides evenly.  By zero, all bits are set, as in JAX."""
    if a.dtype.kind not in "iu":
        return a / b
    by = np.where(b == 0, np.ones_like(b), b)
    return np.where(b == 0, np.array(-1).astype(a.dtype), (a - np.fmod(a, by)) // by)


def _remainder(a: Any, b: Any) -> Any:
    """With the sign of `a`, as in C; of integers by zero it is `a`, as in JAX."""
    if a.dtype.kind not in "iu":
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, np.ones_like(b), b)))


def _special(name: str) -> Callable[[Any], Any]:
    """A function of scipy.special, which JAX itself needs, computed in float64."""

    def call(x: Any) -> Any:
        from scipy import special

        return getattr(special, name)(np.asarray(x, np.float64))

    return call


def _lgamma(x: Any) -> Any:
    return np.where(np.isinf(x), np.inf, _special("gammaln")(x))


def _one_minus_square(x: Any) -> Any:
    from ..simulator.contraction import fma

    return 1 - x * x if x.dtype == np.float64 else fma(-x, x, np.float32(1))


def _unsigned(x: Any) -> Any:
    a = np.asarray(x)
    return a.view(f"u{a.dtype.itemsize}")


def _shift(numpy: Callable[..., Any], beyond: Callable[[Any], Any], logical: bool = False) -> Callable[..., Any]:
    """A shift in which `beyond` says what is left of x when the distance is its width or more (or negative)."""

    def call(x: Any, n: Any) -> Any:
        x, n = np.asarray(x), _unsigned(n)
        bits = 8 * x.dtype.itemsize
        a = _unsigned(x) if logical else x
        return np.where(n < bits, numpy(a, np.minimum(n, bits - 1).astype(a.dtype)), beyond(a)).view(x.dtype)

    return call


def _sign(x: Any) -> Any:
    """Of a zero: itself, with its sign."""
    return np.where(x == 0, x, np.sign(x)).astype(x.dtype)


def _select(which: Any, *cases: Any) -> Any:
    return np.choose(np.asarray(which).astype(np.int32), cases, mode="clip")


def _zero(x: Any) -> Any:
    return np.zeros_like(x)


def _clz(x: Any) -> Any:
    bits = 8 * np.asarray(x).dtype.itemsize
    return np.vectorize(lambda v: bits - int(v).bit_length(), otypes=[np.int64])(_unsigned(x))


# Python's operators where there is one: of NumPy's scalars, of which a kernel's indices are made, they cost a tenth of a ufunc.
ROWS = (
    Row("add", operator.add, "{0} + {1}", "{0} + {1}", "{0} || {1}"),
    Row("sub", operator.sub, "{0} - {1}", "{0} - {1}"),
    Row("mul", operator.mul, "{0} * {1}", "{0} * {1}", "{0} && {1}"),
    Row("div", _divide, "{0} / {1}", "({1} == 0 ? -1 : {0} / {1})", approx="__fdividef({0}, {1})"),
    Row("rem", _remainder, "fmodf({0}, {1})", "({1} == 0 ? {0} : {0} % {1})"),
    Row("max", maximum, "max_nan({0}, {1})", "({0} > {1} ? {0} : {1})", "{0} || {1}", "fmaxf({0}, {1})"),
    Row("min", minimum, "min_nan({0}, {1})", "({0} < {1} ? {0} : {1})", "{0} && {1}", "fminf({0}, {1})"),
    Row("and", operator.and_, None, "{0} & {1}", "{0} && {1}"),
    Row("or", operator.or_, None, "{0} | {1}", "{0} || {1}"),
    Row("xor", operator.xor, None, "{0} ^ {1}", "{0} != {1}"),
    Row("not", np.invert, None, "~{0}", "!{0}"),
    Row("neg", np.negative, "-{0}", "-{0}"),
    Row("abs", np.abs, "fabsf({0})", "({0} < 0 ? -{0} : {0})"),
    Row("sign", _sign, "({0} > 0.f ? 1.f : {0} < 0.f ? -1.f : {0})", "(({0} > 0) - ({0} < 0))"),
    Row("one_minus_square", _one_minus_square, "fmaf(-({0}), {0}, 1.f)"),
    Row("square", np.square, "{0} * {0}", "{0} * {0}"),
    Row("floor", np.floor, "floorf({0})"),
    Row("ceil", np.ceil, "ceilf({0})"),
    Row(
        "exp",
        np.exp,
        "expf({0})",
        approx="exp2_approx({0} * 1.4426950408889634f)",
        ulps=1,
        error=(2**-22.5 + 2**-24 * 128, 0),
    ),
    Row("exp2", np.exp2, "exp2f({0})", approx="exp2_approx({0})", ulps=2, error=(2**-22.5, 0)),
    Row("log", np.log, "logf({0})", approx="(log2_approx({0}) * 0.6931471805599453f)", ulps=1, error=(2**-22, 2**-22)),
    Row("log2", np.log2, "log2f({0})", approx="log2_approx({0})", ulps=1, error=(2**-22, 2**-22)),
    Row("log1p", np.log1p, "log1pf({0})", ulps=1),
    Row("expm1", np.expm1, "expm1f({0})", ulps=1),
    Row("sqrt", np.sqrt, "sqrtf({0})", ulps=0.5),
    Row("rsqrt", lambda x: 1 / np.sqrt(x), "(1.f / sqrtf({0}))", approx="rsqrtf({0})", ulps=2, error=(2**-22, 0)),
    Row("sin", np.sin, "sinf({0})", approx="__sinf({0})", ulps=2),
    Row("cos", np.cos, "cosf({0})", approx="__cosf({0})", ulps=2),
    Row("tanh", np.tanh, "tanhf({0})", approx="tanh_approx({0})", ulps=2, error=(2**-10.987, 0)),
    Row("logistic", lambda x: 1 / (1 + np.exp(-x)), "(1.f / (1.f + expf(-{0})))", ulps=4),
    Row("erf", _special("erf"), "erff({0})"),
    Row("erfc", _special("erfc"), "erfcf({0})"),
    Row("erf_inv", _special("erfinv"), "erfinvf({0})"),
    Row("lgamma", _lgamma, "lgammaf({0})"),
    Row("tan", np.tan, "tanf({0})", approx="__tanf({0})", ulps=4),
    Row("asin", np.arcsin, "asinf({0})"),
    Row("acos", np.arccos, "acosf({0})"),
    Row("atan", np.arctan, "atanf({0})"),
    Row("atan2", np.arctan2, "atan2f({0}, {1})"),
    Row("sinh", np.sinh, "sinhf({0})"),
    Row("cosh", np.cosh, "coshf({0})"),
    Row("asinh", np.arcsinh, "asinhf({0})"),
    Row("acosh", np.arccosh, "acoshf({0})"),
    Row("atanh", np.arctanh, "atanhf({0})"),
    Row("cbrt", np.cbrt, "cbrtf({0})", ulps=1),
    Row("_copysign", np.copysign, "copysignf({0}, {1})"),
    Row("population_count", lambda x: np.bitwise_count(_unsigned(x)), None, "__popcll((u64)($U)({0}))"),
    Row("clz", _clz, None, "(__clzll((long long)($U)({0})) - (64 - $W))"),
    Row("pow", np.power, "powf({0}, {1})"),
    Row("is_finite", np.isfinite, "(fabsf({0}) < __int_as_float(0x7f800000))"),
    Row("eq", operator.eq, "{0} == {1}", "{0} == {1}", "{0} == {1}"),
    Row("ne", operator.ne, "{0} != {1}", "{0} != {1}", "{0} != {1}"),
    Row("lt", operator.lt, "{0} < {1}", "{0} < {1}", "!{0} && {1}"),
    Row("le", operator.le, "{0} <= {1}", "{0} <= {1}", "!{0} || {1}"),
    Row("gt", operator.gt, "{0} > {1}", "{0} > {1}", "{0} && !{1}"),
    Row("ge", operator.ge, "{0} >= {1}", "{0} >= {1}", "{0} || !{1}"),
    # In total order, where NaN equals NaN: of jnp.searchsorted and what is made of it.
    Row(
        "lt_to",
        lambda a, b: order_key(a) < order_key(b),
        "order_keyf({0}) < order_keyf({1})",
        "{0} < {1}",
        "!{0} && {1}",
    ),
    Row(
        "le_to",
        lambda a, b: order_key(a) <= order_key(b),
        "order_keyf({0}) <= order_keyf({1})",
        "{0} <= {1}",
        "!{0} || {1}",
    ),
    # JAX defines shifts by the width and more: nothing, or the sign, is left.
    Row("shift_left", _shift(np.left_shift, _zero), None, "(($U)({1}) < $W ? ($T)(($U)({0}) << ({1})) : ($T)0)"),
    Row(
        "shift_right_arithmetic",
        _shift(lambda x, n: signed(x) >> signed(n), lambda x: signed(x) >> (8 * x.dtype.itemsize - 1)),
        None,
        "($T)($S({0}) >> (($U)({1}) < $W ? (int)({1}) : $W - 1))",
    ),
    Row(
        "shift_right_logical",
        _shift(np.right_shift, _zero, logical=True),
        None,
        "(($U)({1}) < $W ? ($T)(($U)({0}) >> ({1})) : ($T)0)",
    ),
    Row("select_n", _select, "({0} ? {2} : {1})", "({0} ? {2} : {1})", "({0} ? {2} : {1})"),
    Row(
        "clamp",
        lambda lo, x, hi: minimum(maximum(x, lo), hi),
        "min_nan(max_nan({1}, {0}), {2})",
        "({1} > {2} || {0} > {2} ? {2} : {1} < {0} ? {0} : {1})",
    ),
)
ELEMENTWISE = {r.name: r for r in ROWS}
# Elementwise as well, with parameters that decide the expression.
WITH_PARAMETERS = {
    "integer_pow",
    "round",
    "nextafter",
    "convert_element_type",
    "bitcast_convert_type",
    "reduce_precision",
}
PURE = set(ELEMENTWISE) | WITH_PARAMETERS


def _computes_in(e: Equation) -> str:
    """The type that decides the expression: the operands', for select_n the branches'."""
    operand = e.operands[1] if e.op == "select_n" else e.operands[0]
    return operand.dtype


def _define(row: Row) -> None:
    o: Op = op(row.name, issues_only=True)
    o.dtypes = row.dtypes()

    @o.layouts
    def _(solver: Any, e: Equation) -> None:
        solver.same(e, [*e.operands, *e.results])

    @o.emit(BOTH, (WARPGROUP, WARP))
    def _(out: Any, step: Any) -> None:
        e = step.equation
        out.elementwise(step, "(" + expression_of(row, e, out.approx) + ")")

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        args = [sim.read(x) for x in e.operands]
        dtype = numpy_dtype(e.results[0].dtype)
        if dtype.kind not in "iu":
            args = [widened(a) for a in args]
        x = row.numpy(*args) if step.fma is None else sim.fused(step.fma)
        sim.write(e.results[0], narrowed(x, dtype))


def expression_of(row: Row, e: Equation, approx: bool) -> str:
    """The C expression of an equation, whose `accuracy` goes before approx_math (`approx`); raises where there is none."""
    dtype, accuracy = _computes_in(e), e.param("accuracy")
    if accuracy == HIGHEST:
        approx = False
    elif accuracy is not None:
        approx = _within(row, dtype, accuracy, e)
    expression = row.expression(dtype, approx)
    if row.name == "select_n" and e.operands[0].dtype != "bool":
        expression = _chain(len(e.operands) - 1)
    if expression is None:
        raise UnsupportedPrimitive(
            f"{row.name!r} of {dtype} has no instruction here; convert with astype first", e.line
        )
    return expression


def _within(row: Row, dtype: str, tolerance: tuple[float, float, int], e: Equation) -> bool:
    """Whether the approx instruction meets a tolerance (absolute, relative, ulps); refuses what the best does not meet."""
    atol, rtol, ulps = tolerance
    epsilon = EPSILON[dtype]
    rounding = epsilon / 2 if dtype in ("float16", "bfloat16") else 0.0  # computed in float32, rounded once
    allowed = rtol + ulps * epsilon
    if row.error is not None and row.approx and dtype != "float64":
        relative, absolute = row.error
        if relative + rounding <= allowed and absolute <= atol:
            return True
    best = rounding + row.ulps * (epsilon if dtype == "float64" else EPSILON["float32"])
    if best > allowed:
        raise UnsupportedCall(
            f"{row.name}(accuracy=Tolerance(atol={atol:g}, rtol={rtol:g}, ulps={ulps})) of {dtype}: the most accurate one here "
            f"is within a relative error of {best:.2g} ({best / epsilon:.2g} ulps)",
            e.line,
        )
    return False


def _chain(cases: int) -> str:
    """select_n by an integer: the first case where it is 0 or less, the last where it is too large."""
    text = f"{{{cases}}}"
    for k in range(cases - 1, 0, -1):
        text = f"({{0}} <= {k - 1} ? {{{k}}} : {text})"
    return text


for _row in ROWS:
    _define(_row)


def factors_of(e: Equation) -> tuple[int, int] | None:
    """Which operands an equation multiplies: of a product, a square or a second power."""
    if e.op == "mul":
        return 0, 1
    return (0, 0) if e.op == "square" or (e.op == "integer_pow" and e.param("y") == 2) else None
