"""Slices of register arrays: a thread's own registers, renamed; or through shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import build
from mosaic_gpu.plan.build import build_plan


def sliced(start: int, size: int, dtype: Any, rows: int = 64, axis: int = 1) -> Any:
    """o = x[:, start : start + size] through registers in the layout of an accumulator."""

    def body(x: Any, o: Any) -> None:
        value = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        o[...] = lax.slice_in_dim(value, start, start + size, axis=axis)

    shape = (rows, size) if axis == 1 else (size, 128)
    return plgpu.kernel(body, jax.ShapeDtypeStruct(shape, dtype), num_threads=1, thread_name="wg")


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize(("start", "size"), ((0, 64), (64, 64), (8, 24), (120, 8)))
def test_columns(start: int, size: int, dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(dtype)
    kernel = sliced(start, size, dtype)
    np.testing.assert_array_equal(np.asarray(kernel(x)), x[:, start : start + size])
    compiled = build.compile_plan(build_plan(kernel.program(jax.ShapeDtypeStruct(x.shape, dtype)), "sm_90a"))
    assert "__shfl" not in build.body_of(compiled.source)  # no element leaves its thread


def test_rows_of_another_64() -> None:
    x = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(sliced(64, 64, jnp.float32, axis=0)(x)), x[64:])


@pytest.mark.parametrize(("start", "size"), ((4, 8), (0, 12), (3, 50)))
def test_what_cuts_through_a_fragment_goes_through_shared_memory(start: int, size: int) -> None:
    kernel = sliced(start, size, jnp.float32)
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(kernel(x)), x[:, start : start + size])
    plan = build_plan(kernel.program(jax.ShapeDtypeStruct((64, 128), jnp.float32)), "sm_90a")
    assert plan.roles[0].scratch_bytes == 64 * 128 * 4
    assert build.compile_plan(plan).source
