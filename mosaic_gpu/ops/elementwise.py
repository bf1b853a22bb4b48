"""Arithmetic, comparisons, selection and conversion, element by element: JAX's primitives as a table.

A row: C expressions for floats (computed in float32, also for 16-bit types, which are rounded on the way out), for integers
and for bools; the `.approx` form that `approx_math` allows; the NumPy function that the simulator runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import UnsupportedPrimitive
from ..program import Equation
from .registry import BOTH, WARP, WARPGROUP, Op, op

FLOATS = ("float32", "float16", "bfloat16", "float64")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a dtype name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class Row:
    """One elementwise operation; None where the operand type has no such operation."""

    name: str
    numpy: Callable[..., Any]
    float_: str | None = None
    int_: str | None = None
    bool_: str | None = None
    approx: str | None = None

    def expression(self, dtype: str, approx: bool) -> str | None:
        if dtype == "bool":
            return self.bool_
        if dtype == "float64":
            return None if self.float_ is None else _in_double(self.float_)
        if dtype in FLOATS:
            return self.approx if approx and self.approx else self.float_
        return self.int_


def _in_double(expression: str) -> str:
    """A float32 expression with the functions and constants of float64."""
    for name, order in (("max_nan", ">"), ("min_nan", "<")):
        expression = expression.replace(name + "({0}, {1})", f"({{0}} != {{0}} || {{0}} {order} {{1}} ? {{0}} : {{1}})")
    expression = expression.replace("__int_as_float(0x7f800000)", "__longlong_as_double(0x7ff0000000000000ll)")
    return re.sub(r"(\d\.)f\b", r"\g<1>0", re.sub(r"\b([a-z]\w*)f\(", r"\1(", expression)).replace(
        "(float)", "(double)"
    )


def _divide(a: Any, b: Any) -> Any:
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        with np.errstate(all="ignore"):
            # Rounded down; towards zero is one more where there is a rest and the signs differ.
            down = np.floor_divide(a, b)
            return (down + ((np.remainder(a, b) != 0) & ((a < 0) != (b < 0)))).astype(np.asarray(a).dtype)
    return a / b


def _erf(x: Any) -> Any:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(np.asarray(x, np.float64))


ROWS = (
    Row("add", np.add, "{0} + {1}", "{0} + {1}", "{0} || {1}"),
    Row("sub", np.subtract, "{0} - {1}", "{0} - {1}"),
    Row("mul", np.multiply, "{0} * {1}", "{0} * {1}", "{0} && {1}"),
    Row("div", _divide, "{0} / {1}", "{0} / {1}", approx="__fdividef({0}, {1})"),
    Row("rem", np.fmod, "fmodf({0}, {1})", "{0} % {1}"),
    Row("max", np.maximum, "max_nan({0}, {1})", "({0} > {1} ? {0} : {1})", "{0} || {1}", "fmaxf({0}, {1})"),
    Row("min", np.minimum, "min_nan({0}, {1})", "({0} < {1} ? {0} : {1})", "{0} && {1}", "fminf({0}, {1})"),
    Row("and", np.bitwise_and, None, "{0} & {1}", "{0} && {1}"),
    Row("or", np.bitwise_or, None, "{0} | {1}", "{0} || {1}"),
    Row("xor", np.bitwise_xor, None, "{0} ^ {1}", "{0} != {1}"),
    Row("not", np.invert, None, "~{0}", "!{0}"),
    Row("neg", np.negative, "-{0}", "-{0}"),
    Row("abs", np.abs, "fabsf({0})", "({0} < 0 ? -{0} : {0})"),
    Row("sign", np.sign, "({0} > 0.f ? 1.f : {0} < 0.f ? -1.f : {0})", "(({0} > 0) - ({0} < 0))"),
    Row("square", np.square, "{0} * {0}", "{0} * {0}"),
    Row("floor", np.floor, "floorf({0})"),
    Row("ceil", np.ceil, "ceilf({0})"),
    Row("exp", np.exp, "expf({0})", approx="exp2_approx({0} * 1.4426950408889634f)"),
    Row("exp2", np.exp2, "exp2f({0})", approx="exp2_approx({0})"),
    Row("log", np.log, "logf({0})", approx="(log2_approx({0}) * 0.6931471805599453f)"),
    Row("log2", np.log2, "log2f({0})", approx="log2_approx({0})"),
    Row("log1p", np.log1p, "log1pf({0})"),
    Row("expm1", np.expm1, "expm1f({0})"),
    Row("sqrt", np.sqrt, "sqrtf({0})"),
    Row("rsqrt", lambda x: 1 / np.sqrt(x), "(1.f / sqrtf({0}))", approx="rsqrtf({0})"),
    Row("sin", np.sin, "sinf({0})", approx="__sinf({0})"),
    Row("cos", np.cos, "cosf({0})", approx="__cosf({0})"),
    Row("tanh", np.tanh, "tanhf({0})", approx="tanh_approx({0})"),
    Row("logistic", lambda x: 1 / (1 + np.exp(-x)), "(1.f / (1.f + expf(-{0})))"),
    Row("erf", _erf, "erff({0})"),
    Row("pow", np.power, "powf({0}, {1})"),
    Row("is_finite", np.isfinite, "(fabsf({0}) < __int_as_float(0x7f800000))"),
    Row("eq", np.equal, "{0} == {1}", "{0} == {1}", "{0} == {1}"),
    Row("ne", np.not_equal, "{0} != {1}", "{0} != {1}", "{0} != {1}"),
    Row("lt", np.less, "{0} < {1}", "{0} < {1}"),
    Row("le", np.less_equal, "{0} <= {1}", "{0} <= {1}"),
    Row("gt", np.greater, "{0} > {1}", "{0} > {1}"),
    Row("ge", np.greater_equal, "{0} >= {1}", "{0} >= {1}"),
    Row("shift_left", np.left_shift, None, "{0} << {1}"),
    Row("shift_right_arithmetic", np.right_shift, None, "{0} >> {1}"),
    Row("select_n", lambda c, f, t: np.where(c, t, f), "({0} ? {2} : {1})", "({0} ? {2} : {1})", "({0} ? {2} : {1})"),
    Row(
        "clamp",
        lambda lo, x, hi: np.minimum(np.maximum(x, lo), hi),
        "({1} < {0} ? {0} : {1} > {2} ? {2} : {1})",
        "({1} < {0} ? {0} : {1} > {2} ? {2} : {1})",
    ),
)
ELEMENTWISE = {r.name: r for r in ROWS}
PURE = set(ELEMENTWISE) | {"integer_pow", "convert_element_type", "bitcast_convert_type"}


def _computes_in(e: Equation) -> str:
    """The type that decides the expression: the operands', for select_n the branches'."""
    operand = e.operands[1] if e.op == "select_n" else e.operands[0]
    return operand.dtype


def _define(row: Row) -> None:
    o: Op = op(row.name, issues_only=True)

    @o.layouts
    def _(solver: Any, e: Equation) -> None:
        solver.same(e, [*e.operands, *e.results])

    @o.emit(BOTH, (WARPGROUP, WARP))
    def _(out: Any, step: Any) -> None:
        e = step.equation
        expression = row.expression(_computes_in(e), out.approx)
        if expression is None:
            raise UnsupportedPrimitive(
                f"{row.name!r} of {_computes_in(e)} has no instruction here; convert with astype first", e.line
            )
        out.elementwise(step, "(" + expression + ")")

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        args = [sim.read(x) for x in e.operands]
        dtype = numpy_dtype(e.results[0].dtype)
        if dtype.itemsize == 2 and dtype.kind not in "iub":  # 16-bit floats: computed in float32, rounded once
            args = [a.astype(np.float32) if a.dtype == dtype else a for a in args]
        with np.errstate(all="ignore"):
            fused = sim.contracted(args)
            sim.write(e.results[0], np.asarray(row.numpy(*args)).astype(dtype) if fused is None else fused)


for _row in ROWS:
    _define(_row)

integer_pow = op("integer_pow", issues_only=True)


@integer_pow.layouts
def _(solver: Any, e: Equation) -> None:
    solver.same(e, [*e.operands, *e.results])


@integer_pow.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    y = int(step.equation.param("y"))
    product = " * ".join(["{0}"] * abs(y)) or "1"
    out.elementwise(step, f"({product})" if y >= 0 else f"(1.f / ({product}))")


@integer_pow.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    sim.write(e.results[0], np.power(sim.read(e.operands[0]), e.param("y")).astype(numpy_dtype(e.results[0].dtype)))


NARROW = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-(2**15), 2**15 - 1), "uint16": (0, 2**16 - 1)}

convert = op("convert_element_type", issues_only=True)


def _converted(x: Any, source: str, to: str) -> Any:
    """A float outside an integer type's range becomes its nearest end, NaN zero, as `cvt.rzi` has it (PTX ISA, cvt)."""
    dtype = numpy_dtype(to)
    if source not in FLOATS or to not in (*NARROW, "int32", "uint32"):
        return x.astype(dtype)
    ends = np.iinfo(dtype)
    return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0), ends.min, ends.max).astype(dtype)


@convert.layouts
def _(solver: Any, e: Equation) -> None:
    solver.same(e, [*e.operands, *e.results])


@convert.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    e = step.equation
    to, source = e.results[0].dtype, e.operands[0].dtype
    if to == "bool":
        out.elementwise(step, "({0} != 0)")
    elif source in FLOATS and to in FLOATS:
        out.elementwise(step, "(double)({0})" if to == "float64" else "(float)({0})")
    elif source in FLOATS and to in NARROW:
        low, high = NARROW[to]  # C leaves open what a narrow type makes of a number too large; 32 bits saturate
        out.elementwise(step, f"({out.c_type(to)})min(max((int)({{0}}), {low}), {high})")
    elif source in FLOATS and not to.startswith("float8"):
        out.elementwise(step, f"({out.c_type(to)})({{0}})")
    elif to in FLOATS:
        out.elementwise(step, "(float)({0})")
    else:
        out.elementwise(step, f"({out.c_type(to)})({{0}})")


@convert.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    with np.errstate(all="ignore"):
        sim.write(e.results[0], _converted(sim.read(e.operands[0]), e.operands[0].dtype, e.results[0].dtype))
