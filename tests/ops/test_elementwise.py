"""Every elementwise operation and type: in the simulator against JAX, and the emitted C++ through NVRTC.

One kernel holds all operations of a type, once on WGMMA arrays and once on scalars.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import UnsupportedPrimitive
from mosaic_gpu.ops.elementwise import ELEMENTWISE, ROWS, in_type
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import walk
from mosaic_gpu.simulator import simulate
from tests.support import dtype_of

M, N = 64, 8
COMPARISONS: dict[str, Callable[..., Any]] = {n: getattr(lax, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")}
COMPARISONS |= {"lt_to": lax.lt_to_p.bind, "le_to": lax.le_to_p.bind}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lambda x, y: lax.div(x, jnp.where(y == 0, jnp.ones_like(y), y)),
    "rem": lambda x, y: lax.rem(x, jnp.where(y == 0, jnp.ones_like(y), y)),
    "max": lax.max,
    "min": lax.min,
    "neg": lambda x, y: lax.neg(x),
    "abs": lambda x, y: lax.abs(x),
    "sign": lambda x, y: lax.sign(x),
    "square": lambda x, y: lax.square(x),
    "cube": lambda x, y: lax.integer_pow(x, 3),
    "select_n": lambda x, y: jnp.where(x > y, x, y + y),
    "clamp": lambda x, y: lax.clamp(jnp.asarray(-1, x.dtype), x, jnp.asarray(2, x.dtype)),
}
FLOAT: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    **COMPARISONS,
    "floor": lambda x, y: lax.floor(x),
    "ceil": lambda x, y: lax.ceil(x),
    "exp": lambda x, y: lax.exp(x),
    "exp2": lambda x, y: lax.exp2(x),
    "log": lambda x, y: lax.log(lax.abs(x)),
    "log2": lambda x, y: jnp.log2(lax.abs(x)),
    "log1p": lambda x, y: lax.log1p(lax.abs(x)),
    "expm1": lambda x, y: lax.expm1(x),
    "sqrt": lambda x, y: lax.sqrt(lax.abs(x)),
    "rsqrt": lambda x, y: lax.rsqrt(lax.abs(x) + jnp.ones_like(x)),
    "sin": lambda x, y: lax.sin(x),
    "cos": lambda x, y: lax.cos(x),
    "tanh": lambda x, y: lax.tanh(x),
    "logistic": lambda x, y: lax.logistic(x),
    "erf": lambda x, y: lax.erf(x),
    "pow": lambda x, y: lax.pow(lax.abs(x), y),
    "is_finite": lambda x, y: lax.is_finite(lax.log(x)),
    "erfc": lambda x, y: lax.erfc(x),
    "erf_inv": lambda x, y: lax.erf_inv(lax.tanh(x) * jnp.asarray(0.9, x.dtype)),
    "lgamma": lambda x, y: lax.lgamma(lax.abs(x) + jnp.ones_like(x)),
    "tan": lambda x, y: lax.tan(x * jnp.asarray(0.25, x.dtype)),
    "asin": lambda x, y: lax.asin(lax.tanh(x) * jnp.asarray(0.9, x.dtype)),
    "acos": lambda x, y: lax.acos(lax.tanh(x) * jnp.asarray(0.9, x.dtype)),
    "atan": lambda x, y: lax.atan(x),
    "atan2": lambda x, y: lax.atan2(x, y),
    "sinh": lambda x, y: lax.sinh(x),
    "cosh": lambda x, y: lax.cosh(x),
    "asinh": lambda x, y: lax.asinh(x),
    "acosh": lambda x, y: lax.acosh(lax.max(lax.abs(x), jnp.ones_like(x))),
    "atanh": lambda x, y: lax.atanh(lax.tanh(x) * jnp.asarray(0.9, x.dtype)),
    "cbrt": lambda x, y: lax.cbrt(x),
    "copysign": lambda x, y: jnp.copysign(x, y),
    "nextafter": lambda x, y: lax.nextafter(x, y),
    "round_even": lambda x, y: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_away": lambda x, y: lax.round(x * 2, lax.RoundingMethod.AWAY_FROM_ZERO),
    "to_power_11": lambda x, y: lax.integer_pow(x * jnp.asarray(0.5, x.dtype), 11),
    "whole_power": lambda x, y: lax.pow(x, jnp.asarray(3, jnp.int32)),
    "reduce_precision": lambda x, y: lax.reduce_precision(x, 8, 7) if x.dtype != jnp.float16 else x,
    "select_of_four": lambda x, y: lax.select_n(lax.convert_element_type(jnp.abs(x), jnp.int32), x, y, x + y, x - y),
    "reciprocal": lambda x, y: lax.integer_pow(lax.abs(x) + jnp.ones_like(x), -2),
}
INTEGER: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    **COMPARISONS,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lambda x, y: lax.bitwise_not(x),
    "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
    "population_count": lambda x, y: lax.population_count(x),
    "clz": lambda x, y: lax.clz(x),
    "to_power_10": lambda x, y: lax.integer_pow(x, 10),
    "select_of_four": lambda x, y: lax.select_n(lax.convert_element_type(y, jnp.int32), x, y, x + y, x - y),
}
UNSIGNED = {n: f for n, f in INTEGER.items() if n not in ("neg", "abs", "clamp")}
BOOL: dict[str, Callable[..., Any]] = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lambda x, y: lax.bitwise_not(x),
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "lt_to": lax.lt_to_p.bind,
    "le_to": lax.le_to_p.bind,
    "max": lax.max,
    "min": lax.min,
    "select_n": lambda x, y: jnp.where(x, y, ~y),
}
TYPES: dict[str, dict[str, Callable[..., Any]]] = {
    "float32": FLOAT,
    "bfloat16": FLOAT,
    "float16": FLOAT,
    "int32": INTEGER,
    "uint32": UNSIGNED,
    "int8": INTEGER,
    "uint8": UNSIGNED,
    "int16": INTEGER,
    "uint16": UNSIGNED,
    "bool": BOOL,
}


SLOW = ("int16", "uint8", "uint16")  # much as int8 and int32
CASES = [pytest.param(n, False, marks=[pytest.mark.slow] if n in SLOW else []) for n in TYPES]
CASES += [pytest.param(n, True) for n in ("float32", "bfloat16", "int32", "bool")]


# XLA's own forms of these round to the narrow type in between; ours are computed in float32.
ROUNDED_BETWEEN = ("exp2", "acosh", "asinh", "to_power_11")


def inputs(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((2, M, N)) * 3
    if name == "bool":
        return x > 0, y > 0
    if dtype_of(name).kind in "iu":
        low = 0 if dtype_of(name).kind == "u" else -40
        return rng.integers(low, 40, (M, N)).astype(name), rng.integers(low, 40, (M, N)).astype(name)
    x[0, :4], y[0, :4] = (0.0, -0.0, 1.0, 2.0), (1.0, 2.0, 1.0, 2.0)
    return x.astype(dtype_of(name)), y.astype(dtype_of(name))


def stored(value: Any) -> Any:
    return value.astype(jnp.int32) if value.dtype in (jnp.bool_, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16) else value


def result_type(f: Callable[..., Any], name: str) -> Any:
    x = jax.ShapeDtypeStruct((), dtype_of(name))
    return jax.eval_shape(lambda a, b: stored(f(a, b)), x, x).dtype


def kernel_of(name: str, scalar: bool, **params: Any) -> Any:
    """All operations of a type: one output each."""
    functions = TYPES[name]

    def body(x: Any, y: Any, *outs: Any) -> None:
        if scalar:
            a, b = x[1, 2], y[1, 2]
        else:
            a, b = plgpu.load(x, layout=plgpu.Layout.WGMMA), plgpu.load(y, layout=plgpu.Layout.WGMMA)
        for f, o in zip(functions.values(), outs, strict=True):
            if scalar:
                o[0] = stored(f(a, b))
            else:
                o[...] = stored(f(a, b))

    shape = (1,) if scalar else (M, N)
    outs = [jax.ShapeDtypeStruct(shape, result_type(f, name)) for f in functions.values()]
    return plgpu.kernel(body, outs, compiler_params=plgpu.CompilerParams(**params), name=f"{name}_operations")


def plan_of(kernel: Any, name: str) -> Any:
    x = jax.ShapeDtypeStruct((M, N), dtype_of(name))
    return build_plan(kernel.program(x, x), "sm_90a")


def tolerance(name: str, op: str) -> dict[str, float]:
    if dtype_of(name).kind in "iub":
        return dict(rtol=0, atol=0)
    if (
        op == "lgamma"
    ):  # XLA's is up to 2e-6 off near 1 and 2, where it is 0 (scipy's float64, which ours is, as the judge)
        return dict(rtol=tolerance(name, "")["rtol"], atol=3e-6)
    # XLA and NumPy differ by a few units in the last place of float32; narrow types by one of theirs.
    return {
        "float32": dict(rtol=3e-6, atol=1e-6),
        "bfloat16": dict(rtol=2**-7, atol=1e-6),
        "float16": dict(rtol=2**-9, atol=1e-6),
    }[name]


@pytest.mark.parametrize(("name", "scalar"), CASES)
def test_in_the_simulator(name, scalar):
    """Values and dtypes are JAX's."""
    x, y = inputs(name)
    results = simulate(plan_of(kernel_of(name, scalar), name), [x, y])
    a, b = (jnp.asarray(v[1, 2] if scalar else v) for v in (x, y))
    for (op, f), found in zip(TYPES[name].items(), results, strict=True):
        expected = np.asarray(stored(f(a, b)))
        if op in ROUNDED_BETWEEN and expected.dtype.itemsize == 2:
            expected = np.asarray(f(a.astype(jnp.float32), b.astype(jnp.float32)).astype(a.dtype))
        assert found.dtype == expected.dtype, op
        np.testing.assert_allclose(
            found.reshape(expected.shape).astype(np.float64),
            expected.astype(np.float64),
            err_msg=op,
            **tolerance(name, op),
        )


@pytest.mark.parametrize(("name", "scalar"), CASES)
def test_through_nvrtc(name, scalar, compiled):
    """The emitted C++ compiles for sm_90a, without spills and without a word from ptxas."""
    report = compiled(plan_of(kernel_of(name, scalar), name))
    assert report.complaints() == [] and report.stack == 0


def test_approximations_through_nvrtc(compiled):
    """approx_math takes the `.approx` instruction of every row that has one."""
    plan = plan_of(kernel_of("float32", False, approx_math=True), "float32")
    source = body_of(emit(plan))
    for text in ("__fdividef(", "exp2_approx(", "log2_approx(", "rsqrtf(", "__sinf(", "tanh_approx("):
        assert text in source, text
    assert compiled(plan).complaints() == []


def test_every_row_is_tested():
    """The table has no row that no test of a type reaches."""
    reached: set[str] = set()
    for name in TYPES:
        x = jax.ShapeDtypeStruct((M, N), dtype_of(name))
        reached |= {e.op for e in walk(kernel_of(name, False).program(x, x).body)}
    missing = set(ELEMENTWISE) - reached
    assert missing <= {"log2", "square", "_copysign", "one_minus_square"}, (
        f"{missing}: older versions of JAX have no such primitives, others must be reached"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_what_a_type_lacks_is_refused_by_name(row):
    """A row without an expression for a type is an error that says so, not C++ that does something else."""
    types = {"float32": row.float_, "int32": row.int_, "bool": row.bool_}
    for dtype, expression in types.items():
        assert row.expression(dtype, False) == (expression and in_type(expression, dtype))
    assert row.expression("bfloat16", False) == row.float_


def test_refusal(plan, array, assert_at):
    """A precision that no conversion has."""

    def body(x, o):
        o[...] = lax.reduce_precision(x[...], 6, 9)  # here

    p = plan(body, array(128), out=array(128))
    with pytest.raises(UnsupportedPrimitive, match="6 exponent and 9 mantissa bits") as e:
        emit(p)
    assert_at(e.value, body, "here")


# ---- what the C++ means, where types and special values bite ------------------------------------------------------------------
def test_special_values_in_the_simulator():
    """NaN goes through max, min, clamp and sign; -0.0 keeps its sign; as in JAX."""
    functions = [
        lax.max,
        lax.min,
        lambda x, y: lax.clamp(-jnp.ones_like(x), x, jnp.ones_like(x)),
        lambda x, y: lax.clamp(y, x, jnp.ones_like(x)),  # ends that cross, and that are NaN
        lambda x, y: lax.clamp(-jnp.ones_like(x), x, y),
        lambda x, y: lax.sign(x),
        lax.rem,
        lambda x, y: lax.lt_to_p.bind(x, y).astype(jnp.float32),  # -0.0 below 0.0, NaN above all, -NaN below
        lambda x, y: lax.le_to_p.bind(x, jnp.where(y == y, -y, y)).astype(jnp.float32),  # not -NaN, whose sign is open
    ]
    x = np.tile(np.array([np.nan, 1.0, -0.0, np.inf, -np.inf, 0.0, 0.25, 3.0], np.float32), (M, 1))
    y = np.tile(np.array([1.0, np.nan, 0.0, 2.0, 5.0, -0.0, 1.0, -2.0], np.float32), (M, 1))

    def body(a, b, *outs):
        for f, o in zip(functions, outs, strict=True):
            o[...] = f(plgpu.load(a, layout=plgpu.Layout.WGMMA), plgpu.load(b, layout=plgpu.Layout.WGMMA))

    kernel = plgpu.kernel(body, [jax.ShapeDtypeStruct((M, N), jnp.float32)] * len(functions))
    for found, f in zip(simulate(plan_of(kernel, "float32"), [x, y]), functions, strict=True):
        np.testing.assert_array_equal(found, np.asarray(f(jnp.asarray(x), jnp.asarray(y))))


def evaluate(expression: str, *args: float) -> float:
    """A C expression of comparisons and ?: on floats, in Python."""
    text = (
        expression.format(*(f"a[{i}]" for i in range(len(args))))
        .replace("1.f", "1.0")
        .replace("||", "or")
        .replace("0.f", "0.0")
    )
    condition = r"([^?:()]+)\?([^?:()]+):([^?:()]+)"
    text = text.strip("()")
    parts = re.split(r"\s*[?:]\s*", text)
    assert len(parts) == 5 and re.search(condition, text), text
    return eval(f"({parts[1]}) if ({parts[0]}) else ({parts[3]}) if ({parts[2]}) else ({parts[4]})", {"a": args})


@pytest.mark.parametrize("x", [math.nan, -2.0, -0.0, 0.0, 0.5, 3.0, math.inf, -math.inf])
def test_emitted_sign_carries_nans(x):
    """JAX's sign returns a NaN for a NaN, and keeps -0.0; so does the expression that is emitted."""
    sign = evaluate({r.name: r.float_ for r in ROWS}["sign"], x)
    np.testing.assert_array_equal(sign, np.float32(lax.sign(x)))
    assert math.copysign(1, sign) == math.copysign(1, np.float32(lax.sign(x))) or math.isnan(x)


def test_float64_is_computed_in_double(compiled):
    """expf and its like would round to float on the way; in double every function has its own name."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():

        def body(x, o):
            a = plgpu.load(x, layout=plgpu.Layout.WGMMA)
            o[...] = lax.max(lax.exp(a) + lax.floor(a) - lax.sign(a), lax.rsqrt(lax.abs(a)))

        kernel = plgpu.kernel(body, jax.ShapeDtypeStruct((M, N), jnp.float64))
        plan = build_plan(kernel.program(jax.ShapeDtypeStruct((M, N), jnp.float64)), "sm_90a")
    source = body_of(emit(plan))
    for single in ("expf(", "floorf(", "fabsf(", "sqrtf("):
        assert single not in source
    assert "(float)" not in source and "float " not in source  # of max_nan there are two
    assert compiled(plan).complaints() == []


CONVERSIONS = ["float32", "bfloat16", "float16", "int32", "uint32", "int16", "int8", "uint8", "bool"]


def test_conversions(compiled):
    """Every pair of types: values as in JAX (in range), and the C++ compiles."""
    pairs = [(a, b) for a in CONVERSIONS for b in CONVERSIONS if a != b]
    rng = np.random.default_rng(3)
    whole = rng.integers(0, 100, (M, N))

    def body(*refs):
        ins, outs = dict(zip(CONVERSIONS, refs, strict=False)), refs[len(CONVERSIONS) :]
        values = {n: plgpu.load(r, layout=plgpu.Layout.WGMMA) for n, r in ins.items()}
        for (a, b), o in zip(pairs, outs, strict=True):
            o[...] = values[a].astype(dtype_of(b))

    kernel = plgpu.kernel(body, [jax.ShapeDtypeStruct((M, N), dtype_of(b)) for _, b in pairs])
    arrays = [(whole % 2 == 0) if n == "bool" else whole.astype(dtype_of(n)) for n in CONVERSIONS]
    plan = build_plan(kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)), "sm_90a")
    for (a, b), found in zip(pairs, simulate(plan, arrays), strict=True):
        expected = np.asarray(jnp.asarray(arrays[CONVERSIONS.index(a)]).astype(dtype_of(b)))
        np.testing.assert_array_equal(found, expected, err_msg=f"{a} to {b}")
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("values", [(-(2**31), 2), (-(2**31), -3), (-7, 2), (7, -2), (2**31 - 1, -1)])
def test_integer_division_rounds_towards_zero(values):
    """Also of the smallest integer, whose absolute value does not exist."""

    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((2,), jnp.int32))
    def kernel(x, y):
        y[0] = lax.div(x[0], x[1])
        y[1] = lax.rem(x[0], x[1])

    x = np.array(values, np.int32)
    values_of = jax.ShapeDtypeStruct((2,), jnp.int32)
    (y,) = simulate(build_plan(kernel.program(values_of), "sm_90a"), [x])
    np.testing.assert_array_equal(y, [lax.div(x[0], x[1]), lax.rem(x[0], x[1])])


@pytest.mark.parametrize("to", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_floats_outside_an_integer_types_range(to):
    """They become the nearest end, NaN zero, in the simulator and in JAX; the narrow ones by a clamp in the C++."""
    x = np.array([np.nan, np.inf, -np.inf, 1e10, -1e10, 300.7, -5.5, 2.5], np.float32)

    @plgpu.kernel(out_type=jax.ShapeDtypeStruct(x.shape, jnp.dtype(to)))
    def kernel(a, b):
        for i in range(len(x)):
            b[i] = a[i].astype(to)

    plan = build_plan(kernel.program(jax.ShapeDtypeStruct(x.shape, x.dtype)), "sm_90a")
    (found,) = simulate(plan, [x])
    assert found.tolist() == jnp.asarray(x).astype(to).tolist()
    assert ("min(max((int)" in emit(plan)) == (not to.endswith("32"))
