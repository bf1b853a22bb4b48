"""Products and index arrays in plain jax.numpy: simulated against JAX, and compiled for Hopper and Blackwell."""

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

ROOT = pathlib.Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("examples_products", ROOT / "examples" / "products.py")
assert _spec is not None and _spec.loader is not None
products = importlib.util.module_from_spec(_spec)
sys.modules["examples_products"] = products
_spec.loader.exec_module(products)

EXAMPLES = products.examples()
INSTRUCTION = {
    "matmul": ("wgmma_m64", "tcgen05_mma_f16_ss"),
    "gelu_mlp": ("wgmma_m64", "tcgen05_mma_f16_ss"),
    "attend": ("mma_bf16",) * 2,
}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_against_jax(name, arch, kernel_plan):
    f, reference, arrays = EXAMPLES[name]
    plan = kernel_plan(f, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays), arch=arch)
    (found,) = simulate(plan, arrays)
    expected = np.asarray(reference(*map(jnp.asarray, arrays)))
    assert found.dtype == expected.dtype
    a, b = found.astype(np.float64), expected.astype(np.float64)
    bound = {"matmul": 2**-8, "gelu_mlp": 2**-6, "attend": 2**-6}.get(name, 0)  # of the norm; some are rounded twice
    assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_compiles(name, arch, kernel_plan, compiled):
    f, _, arrays = EXAMPLES[name]
    plan = kernel_plan(f, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays), arch=arch)
    assert compiled(plan).complaints() == []
    if name in INSTRUCTION:
        assert f"{INSTRUCTION[name][arch == 'sm_100a']}" in emit(plan)


@pytest.mark.parametrize("width", [128, 256])
def test_gelu_mlp(width, kernel_plan, compiled):
    """At widths that fill a thread's registers: no spills, and within the rounding of its two bfloat16 steps of float64."""
    rng = np.random.default_rng(1)
    shapes = (100, width), (width, 128), (128, width)
    arrays = [rng.standard_normal(s).astype(jnp.bfloat16) for s in shapes]
    plan = kernel_plan(products.gelu_mlp, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
    assert compiled(plan).complaints() == []
    x, up, down = (a.astype(np.float64) for a in arrays)
    inner = x @ up
    expected = inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))) / 2 @ down
    (found,) = simulate(plan, arrays)
    assert np.linalg.norm(found.astype(np.float64) - expected) <= 2**-8 * np.linalg.norm(expected)
