"""Random programs of what shapes, combines and pins register arrays: each finds its layouts and computes what JAX does."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.layouts.inference import infer
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

SIZES = (1, 3, 8, 16, 64, 128)
MOST = 64 * 128


def program(seed: int, pins: bool) -> Any:
    """A function of one array, as a list of choices that depend on shapes only; `pins`: with layout casts in it."""

    def f(x: Any, in_kernel: bool) -> Any:
        rng = np.random.default_rng(seed)
        pool = [x]
        for _ in range(int(rng.integers(3, 12))):
            a = pool[rng.integers(len(pool))]
            choice = int(rng.integers(11))
            axis = int(rng.integers(a.ndim)) if a.ndim else 0
            if choice == 0:
                b = jnp.abs(a) + 1
            elif choice == 1:
                partners = [p for p in pool if p.shape == a.shape]
                b = jnp.maximum(a, partners[rng.integers(len(partners))] - 1)
            elif choice == 2 and a.ndim:
                b = jnp.max(a, axis=axis, keepdims=bool(rng.integers(2)))
            elif choice == 3 and a.ndim:
                b = a - jnp.min(a, axis=axis, keepdims=True)
            elif choice == 4 and a.ndim == 2:
                b = a.T
            elif choice == 5 and a.ndim == 2:
                b = a.reshape(a.shape[1], a.shape[0])
            elif choice == 6 and a.ndim:
                b = lax.rev(a, (axis,))
            elif choice == 7 and a.ndim == 1:
                n = int(rng.choice(SIZES))
                b = jnp.broadcast_to(a[:, None], (a.shape[0], n)) if a.shape[0] * n <= MOST else a
            elif choice == 8 and a.ndim == 1:
                n = int(rng.choice(SIZES))
                b = jnp.broadcast_to(a, (n, a.shape[0])) if a.shape[0] * n <= MOST else a
            elif choice == 9 and a.ndim and a.shape[axis] > 2:
                b = lax.slice_in_dim(a, a.shape[axis] // 2 - 1, a.shape[axis] - 1, axis=axis)
            elif choice == 10 and pins and a.ndim == 2 and not a.shape[0] % 64 and not a.shape[1] % 8:
                b = plgpu.layout_cast(a, Layout.WGMMA) if in_kernel else a
            else:
                b = a * 2
            pool.append(b)
        return [p for p in pool[-3:] if p.ndim]

    return f


def check(seed: int) -> float:
    """Plan, emit and simulate one; seconds that layout inference took."""
    rng = np.random.default_rng(1000 + seed)
    shape = tuple(int(rng.choice(SIZES)) for _ in range(2))
    x = rng.integers(-9, 10, shape).astype(np.float32)
    f = program(seed, pins=seed % 2 == 0)
    expected = f(jnp.asarray(x), False)

    def body(a: Any, *refs: Any) -> None:
        for o, r in zip(refs, f(a[...], True), strict=True):
            o[...] = r

    outs = [jax.ShapeDtypeStruct(e.shape, e.dtype) for e in expected]
    plan = build_plan(plgpu.kernel(body, outs).program(jax.ShapeDtypeStruct(shape, np.float32)), "sm_90a")
    emit(plan)
    start = time.perf_counter()
    for r in plan.roles:
        infer([s.equation for s in r.body.steps])
    took = time.perf_counter() - start
    for found, e in zip(simulate(plan, [x]), expected, strict=True):
        np.testing.assert_array_equal(found, np.asarray(e), err_msg=f"seed {seed}")
    return took


def test_random_programs():
    """Twenty-five of them; inference takes milliseconds (the bound is generous: machines are shared)."""
    times = [check(seed) for seed in range(25)]
    assert sorted(times)[len(times) // 2] < 0.05


@pytest.mark.slow
def test_five_hundred_random_programs():
    times = [check(seed) for seed in range(500)]
    assert sorted(times)[-5] < 0.05, max(times)
