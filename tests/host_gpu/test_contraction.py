"""Sums of products on Hopper: the C++ itself gives the same bits as the simulator, whatever its compiler makes of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.plan.build import build_plan

SUMS = (
    lambda x, y: 0.7 - x * 0.3,
    lambda x, y: x * 0.3 - 0.7,
    lambda x, y: x * -0.3 + 0.7,
    lambda x, y: y - x * y,
    lambda x, y: x * 0.3 - y * 0.1,
    lambda x, y: x * x - y * y,
    lambda x, y: (lambda p: jnp.where(p > 0, p + y, 0.7 - p))(x * y),
    lambda x, y: lax.fori_loop(0, 5, lambda i, c: (c[0] + c[1] * x, c[1] * y - c[0]), (x, y))[0],
    lambda x, y: lax.square(x) - y,
    lambda x, y: -(x * y) - y,
    lambda x, y: y - -(x * 0.3),
    lambda x, y: y + jnp.negative(-(x * y)),
)


def scalars(x, y):
    """Of numbers that all threads have."""
    return jnp.broadcast_to(x[0, 0] * y[0, 0] - x[1, 1], x.shape)


@pytest.mark.parametrize("strict", [False, True])
def test_the_same_bits(strict, agree):
    def body(a, b, *outs):
        x, y = a[...], b[...]
        for f, o in zip((*SUMS, scalars), outs, strict=True):
            o[...] = f(x, y)

    x, y = np.random.default_rng(0).uniform(-1, 1, (2, 64, 8)).astype(np.float32)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    params = plgpu.CompilerParams(strict_math=strict)
    plan = build_plan(plgpu.kernel(body, [out] * (len(SUMS) + 1), compiler_params=params).program(out, out), "sm_90a")
    agree(plan, [x, y])
    assert ("fmaf(" in emit(plan)) == (not strict)


def test_sums_over_an_axis(agree):
    """A thread adds in another order than the simulator: within rounding."""
    x, y = np.random.default_rng(1).uniform(-1, 1, (2, 16, 512)).astype(np.float32)
    out = jax.ShapeDtypeStruct((16,), jnp.float32)
    t = jax.ShapeDtypeStruct(x.shape, x.dtype)
    f = plgpu.kernel(lambda a, b, o: o.__setitem__(..., jnp.sum(a[...] * b[...], axis=1)), out)
    plan = build_plan(f.program(t, t), "sm_90a")
    assert "fmaf(" in emit(plan)
    (found,) = agree(plan, [x, y], ulps=8, atol=1e-5)
    np.testing.assert_allclose(found, np.sum(x.astype(np.float64) * y, axis=1), rtol=1e-5, atol=1e-5)
