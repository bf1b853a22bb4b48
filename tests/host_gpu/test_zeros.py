"""Zeros of both signs in maxima and minima: +0 is the larger one (PTX ISA, max and min), in the simulator and in the C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.ops.order import order_key
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.support import dtype_of

# name: (the function of rows of x, what NumPy makes of keys in total order)
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "max": (lambda x: jnp.maximum(x, lax.rev(x, (1,))), lambda k: np.maximum(k, k[:, ::-1])),
    "min": (lambda x: jnp.minimum(x, lax.rev(x, (1,))), lambda k: np.minimum(k, k[:, ::-1])),
    "relu": (lambda x: jnp.maximum(x, 0), lambda k: np.maximum(k, 0)),
    "max_of_rows": (lambda x: jnp.max(x, 1), lambda k: k.max(1)),
    "min_of_rows": (lambda x: jnp.min(x, 1), lambda k: k.min(1)),
    "max_of_columns": (lambda x: jnp.max(x, 0), lambda k: k.max(0)),
    "min_of_all": (lambda x: jnp.min(x)[None], lambda k: k.min(keepdims=True)[0]),
    "cummax": (lambda x: lax.cummax(x, 1), lambda k: np.maximum.accumulate(k, 1)),
    "cummin_back": (lambda x: lax.cummin(x, 1, reverse=True), lambda k: np.minimum.accumulate(k[:, ::-1], 1)[:, ::-1]),
    "clamp": (lambda x: lax.clamp(x[:, ::-1], x, x[::-1]), lambda k: np.minimum(np.maximum(k, k[:, ::-1]), k[::-1])),
    "clip_low": (lambda x: jnp.clip(x, 0, 2), lambda k: np.maximum(k, 0)),
    "scatter_max": (
        lambda x: x.at[jnp.arange(8) // 2].max(lax.rev(x, (0, 1))),
        lambda k: np.stack(
            [
                np.maximum(np.maximum(k[i], k[::-1, ::-1][2 * i]), k[::-1, ::-1][2 * i + 1]) if i < 4 else k[i]
                for i in range(8)
            ]
        ),
    ),
    "scatter_min": (
        lambda x: x.at[jnp.full((1,), 3)].min(x[:1]),
        lambda k: np.concatenate([k[:3], np.minimum(k[3:4], k[:1]), k[4:]]),
    ),
}


@pytest.mark.parametrize("approx", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_plus_zero_is_larger(dtype: str, approx: bool, on_host: Any, compiled: Any) -> None:
    signs = np.random.default_rng(0).integers(0, 2, (8, 16))
    signs[0], signs[1] = 0, 1  # rows of one sign
    x = np.where(signs, -0.0, 0.0).astype(dtype_of(dtype))
    x[5, ::3], x[6, ::2] = -1, 1
    wide = x if dtype == "float64" else x.astype(np.float32)
    with jax.enable_x64(True):

        def body(x: Any, *outs: Any) -> None:
            for o, (f, _) in zip(outs, CASES.values(), strict=True):
                o[...] = f(x[...])

        right = {n: key(order_key(wide)) for n, (_, key) in CASES.items()}
        outs = [jax.ShapeDtypeStruct(k.shape, x.dtype) for k in right.values()]
        kernel = plgpu.kernel(body, outs, compiler_params=plgpu.CompilerParams(approx_math=approx))
        plan = build_plan(kernel.program(jax.ShapeDtypeStruct(x.shape, x.dtype)), "sm_90a")
    for where, found in (("simulator", simulate(plan, [x])), ("C++", on_host(plan, [x]))):
        for (n, keys), y in zip(right.items(), found, strict=True):
            y = y if dtype == "float64" else y.astype(np.float32)
            np.testing.assert_array_equal(order_key(y), keys, err_msg=f"{n} in the {where}")
    compiled(plan)
