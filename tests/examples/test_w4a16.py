"""examples/w4a16.py: simulated against float64, called under jax.jit, and compiled for Hopper and Blackwell."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.simulator import simulate
from tests.ops.test_int4 import packed

ROOT = pathlib.Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("examples_w4a16", ROOT / "examples" / "w4a16.py")
assert _spec is not None and _spec.loader is not None
w4a16 = importlib.util.module_from_spec(_spec)
sys.modules["examples_w4a16"] = w4a16
_spec.loader.exec_module(w4a16)

KINDS = [jnp.int4, jnp.uint4]


def right(arrays: list[np.ndarray], found: np.ndarray) -> None:
    """Within the last rounding of sums of exact products, weights rounded once."""
    x, w, scales = arrays
    weights = w.astype(np.float32) * np.repeat(scales, w4a16.GROUP, axis=1)
    expected = x.astype(np.float64) @ weights.astype(jnp.bfloat16).astype(np.float64).T
    assert found.dtype == jnp.bfloat16 and found.shape == expected.shape
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind, arch, kernel_plan, compiled):
    arrays = w4a16.arrays(100, 256, 320, kind)
    x, w, scales = arrays
    plan = kernel_plan(w4a16.w4a16_matmul, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays), arch=arch)
    (found,) = simulate(plan, [x, np.asarray(packed(jnp.asarray(w))), np.ascontiguousarray(scales.T)])
    right(arrays, found)
    assert compiled(plan).complaints() == []
    assert ("wgmma_m64n64k16_f32_bf16_bf16_rs" if arch == "sm_90a" else "tcgen05_mma_f16_ss") in emit(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_xla(kind):
    arrays = w4a16.arrays(70, 128, 128, kind)
    right(arrays, np.asarray(jax.jit(w4a16.w4a16_matmul)(*arrays)))
    got = np.asarray(w4a16.reference(*map(jnp.asarray, arrays)))
    right(arrays, got)
