"""float32 sums of products are rounded once, as the compiler's fma does it; twice with strict_math."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.plan.build import build_plan

X = np.full(128, -1e30, np.float32)
F = np.float32(0.1275174)
ARRAY = jax.ShapeDtypeStruct((128,), jnp.float32)


def kernel(body: Any, strict: bool = False) -> Any:
    params = plgpu.CompilerParams(strict_math=strict)
    return plgpu.kernel(lambda x, o: o.__setitem__(..., body(x[...])), ARRAY, compiler_params=params)


def residue(x: np.ndarray) -> np.ndarray:
    """x * F - round(x * F), exactly."""
    exact = x.astype(np.float64) * np.float64(F)
    return (exact - exact.astype(np.float32)).astype(np.float32)


@pytest.mark.parametrize(
    "body, sign",
    [
        (lambda x: x * F - jnp.float32(X[0] * F), 1),
        (lambda x: jnp.float32(X[0] * F) - x * F, -1),
        (lambda x: x * F + jnp.float32(-(X[0] * F)), 1),
    ],
)
def test_the_product_is_not_rounded(body: Any, sign: int) -> None:
    """What is left of `LOWEST * f - LOWEST * f` is the rounding error: 1e22, whose exponential is 0 or infinite."""
    assert abs(residue(X)[0]) > 1e20
    np.testing.assert_array_equal(np.asarray(kernel(body)(X)), sign * residue(X))
    np.testing.assert_array_equal(np.asarray(kernel(body, strict=True)(X)), 0 * X)


def test_the_compiler_makes_an_fma() -> None:
    """Of the same program, unless it is strict."""
    for strict in (False, True):
        program = kernel(lambda x: x * F - jnp.float32(3), strict).program(ARRAY)
        ptx = compile_plan(build_plan(program, "sm_90a")).compiled.ptx
        assert ("fma.rn.f32" in ptx) == (not strict)
