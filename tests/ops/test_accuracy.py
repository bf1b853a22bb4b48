"""accuracy= of exp, log, sin, ... and CompilerParams(approx_math=True): which instruction is taken, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

HIGHEST, DEFAULT = lax.AccuracyMode.HIGHEST, lax.AccuracyMode.DEFAULT
# operation -> (full, approx) in the emitted code; '' where there is no instruction for it
WITH = {
    "exp": ("expf(", "exp2_approx("),
    "exp2": ("exp2f(", "exp2_approx("),
    "log": ("logf(", "log2_approx("),
    "rsqrt": ("sqrtf(", "rsqrtf("),
    "sin": ("sinf(", "__sinf("),
    "cos": ("cosf(", "__cosf("),
    "tan": ("tanf(", "__tanf("),
    "tanh": ("tanhf(", "tanh_approx("),
    "log1p": ("log1pf(", ""),
    "expm1": ("expm1f(", ""),
    "cbrt": ("cbrtf(", ""),
    "sqrt": ("sqrtf(", ""),
    "logistic": ("expf(", ""),
}
BOUNDED = ("exp", "exp2", "log", "rsqrt", "tanh")  # whose approximation has a bound over the whole range


def plan_of(name: str, accuracy: Any, approx_math: bool = False, dtype: Any = jnp.float32, arch: str = "sm_90a") -> Any:
    f = getattr(lax, name)
    t = jax.ShapeDtypeStruct((64, 8), dtype)

    def body(x: Any, o: Any) -> None:
        o[...] = f(x[...], accuracy=accuracy)

    params = plgpu.CompilerParams(approx_math=approx_math)
    return build_plan(plgpu.kernel(body, t, compiler_params=params).program(t), arch)


def is_approx(name: str, *args: Any, **options: Any) -> bool:
    text = body_of(emit(plan_of(name, *args, **options)))
    full, approx = WITH[name]
    found = bool(approx) and approx in text
    assert found or full in text
    return found


@pytest.mark.parametrize("name", WITH)
def test_modes(name):
    """By default approx_math decides; HIGHEST is the full function whatever it says."""
    has = bool(WITH[name][1])
    for accuracy in (None, DEFAULT):
        assert not is_approx(name, accuracy)
        assert is_approx(name, accuracy, approx_math=True) == has
    for approx_math in (False, True):
        assert not is_approx(name, HIGHEST, approx_math=approx_math)


@pytest.mark.parametrize("name", WITH)
def test_tolerances(name):
    """The cheapest instruction that is within the tolerance, approx_math or not."""
    loose, tight = lax.Tolerance(atol=1e-2, rtol=1e-2, ulps=0), lax.Tolerance(atol=0, rtol=0, ulps=4)
    for approx_math in (False, True):
        assert is_approx(name, loose, approx_math=approx_math) == (name in BOUNDED)
        assert is_approx(name, tight, approx_math=approx_math) == (name in ("exp2", "rsqrt"))


def test_what_no_function_meets():
    with pytest.raises(
        UnsupportedCall, match=r"tan\(accuracy=Tolerance\(atol=0, rtol=0, ulps=1\)\) of float32: .*4 ulps"
    ) as e:
        emit(plan_of("tan", lax.Tolerance(atol=0, rtol=0, ulps=1)))
    assert e.value.line.file == __file__
    assert not is_approx("tan", lax.Tolerance(atol=0, rtol=0, ulps=1), dtype=jnp.bfloat16)  # rounded to fewer bits


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype):
    assert is_approx("tanh", lax.Tolerance(atol=0, rtol=0, ulps=1), dtype=dtype) == (dtype == jnp.bfloat16)
    assert is_approx("exp", lax.Tolerance(atol=0, rtol=0, ulps=1), dtype=dtype)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_compiled_and_simulated(arch, compiled):
    x = np.linspace(0.1, 3, 512, dtype=np.float32).reshape(64, 8)
    for name in WITH:
        plan = plan_of(name, HIGHEST, True, arch=arch)
        expected = np.asarray(getattr(lax, name)(jnp.asarray(x)))
        np.testing.assert_allclose(simulate(plan, [x])[0], expected, rtol=2e-6)
        assert compiled(plan).complaints() == []
