"""Packed float32 arithmetic of Blackwell: the same bits as the simulator, in the C++ itself; how many instructions it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.plan.build import build_plan

LAYOUT = plgpu.Layout.WGMMA
SHAPE = (64, 32)  # 16 elements a thread
PAIRS = SHAPE[0] * SHAPE[1] // 128 // 2


def plan_of(f, x, y, arch="sm_100a", layout=LAYOUT, **params):
    def body(a, b, o):
        o[...] = f(plgpu.load(a, layout=layout), plgpu.load(b, layout=layout))

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = plgpu.kernel(body, out, compiler_params=plgpu.CompilerParams(arch="sm_100a", **params))
    return build_plan(kernel.program(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, y))), arch)


def numbers(shape=SHAPE):
    """Of all sizes, denormal ones, infinite ones and NaN among them."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, shape)) for _ in range(2))
    x, y = x.astype(np.float32), y.astype(np.float32)
    for v, shift in ((x, 0), (y, 1)):
        flat = v.reshape(-1)
        flat[shift : 7 + shift] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-41, -3e-45]
        flat[100:200] *= np.float32(1e-30)
    return x, y


def scaled_rows(x, y):
    top = jnp.max(x, axis=1)
    return x * 0.3 - (top * 0.3)[:, None]


# name -> (function, what stands for it: calls of pairs.cuh for each pair of elements)
CASES = {
    "sum": (lambda x, y: x + y, ["add"]),
    "difference": (lambda x, y: x - y, ["sub"]),
    "product": (lambda x, y: x * y, ["mul"]),
    "of a number": (lambda x, y: 3.0 - x, ["sub"]),
    "negative numbers": (lambda x, y: -2.5 - (x + -1.25), ["add", "sub"]),
    "product plus": (lambda x, y: x * y + x, ["mul", "fma"]),
    "plus product": (lambda x, y: x + x * y, ["mul", "fma"]),
    "product minus": (lambda x, y: x * y - y, ["mul", "fma"]),
    "minus product": (lambda x, y: y - x * y, ["mul", "fma"]),
    "minus a product of a number": (lambda x, y: 1.5 - x * -0.1, ["mul", "fma"]),
    "a product of a number minus": (lambda x, y: -0.1 * x - -1.5, ["mul", "fma"]),
    "two products": (lambda x, y: x * x - y * y, ["mul", "mul", "fma"]),
    "a product of a whole number": (lambda x, y: x * 7, ["mul"]),
    "a polynomial": (lambda x, y: ((x * 0.3 + 0.1) * x + 0.7) * x + 1, ["mul", "fma"] * 3),
    "rows": (scaled_rows, None),
    "a square": (lambda x, y: lax.square(x) + y, ["mul", "fma"]),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name, strict, agree):
    """Products that are summed are rounded once, with strict_math twice, as the simulator says."""
    function, calls = CASES[name]
    plan = plan_of(function, *numbers(), strict_math=strict)
    agree(plan, list(numbers()))
    kernel = emit(plan).split("kernel.cu")[-1]
    if calls is None:
        assert kernel.count("fma_pair(") == (0 if strict else PAIRS)
        return
    if strict and "fma" in calls:
        assert "fma_pair(" not in kernel
        return
    for call in ("add", "sub", "mul", "fma"):
        assert kernel.count(f"{call}_pair(") == PAIRS * calls.count(call), call


def test_a_loop_carries_factors(agree):
    """Of a product in the body, whatever the values that the loop carries are called."""

    def f(x, y):
        def step(i, carry):
            a, b = carry
            p = a * b
            return p + a, b - p

        a, b = lax.fori_loop(0, 5, step, (x, y))
        return a * 0.5 - b

    x, y = np.random.default_rng(1).uniform(-1, 1, (2, *SHAPE)).astype(np.float32)
    agree(plan_of(f, x, y), [x, y])


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(
    ("name", "strict"), [(n, s) for n in ("product plus", "two products", "sum") for s in (False, True)]
)
def test_machine_code(name, strict, arch, compiled):
    """One instruction a pair; a product that only an fma takes is gone; nothing is fused where .rn says so."""
    function, calls = CASES[name]
    report = compiled(plan_of(function, *numbers(), arch=arch, strict_math=strict))
    found = {k: report.mnemonics.get(k, 0) for k in ("FADD2", "FMUL2", "FFMA2", "FADD", "FMUL", "FFMA")}
    products, fused = calls.count("mul"), calls.count("fma") * (not strict)
    expected = {
        "FFMA2": PAIRS * fused,
        "FMUL2": PAIRS * (products - fused),
        "FADD2": PAIRS * (calls.count("add") + calls.count("fma") - fused),
    }
    assert found == {**dict.fromkeys(found, 0), **expected} and report.complaints() == []


def test_where_there_are_no_pairs():
    """On Hopper, in 16-bit types, and where a thread has one element."""
    x, y = numbers()
    assert "_pair(" not in emit(plan_of(CASES["product plus"][0], x, y, arch="sm_90a"))
    half = x.astype(jnp.bfloat16)
    assert "_pair(" not in emit(plan_of(CASES["product plus"][0], half, half))
    one = np.zeros(128, np.float32)
    assert "_pair(" not in emit(plan_of(CASES["sum"][0], one, one, layout=plgpu.Layout.WG_STRIDED))
