"""The examples in plain jax.numpy: simulated against JAX, and compiled for Hopper and Blackwell."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("examples_plain", ROOT / "examples" / "plain.py")
assert _spec is not None and _spec.loader is not None
plain = importlib.util.module_from_spec(_spec)
sys.modules["examples_plain"] = plain
_spec.loader.exec_module(plain)

EXAMPLES = plain.examples()
# Reduced along rows that a warp holds whole: nothing goes through shared memory.
WITHOUT_SCRATCH = ("softmax", "layer_norm", "rms_norm", "gelu_gate", "cross_entropy")


@pytest.mark.parametrize("name", EXAMPLES)
def test_against_jax(name):
    f, tile, whole, arrays = EXAMPLES[name]
    found, expected = plain.rows(f, tile, whole=whole)(*arrays), f(*map(jax.numpy.asarray, arrays))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_compiles(name, arch, kernel_plan, compiled):
    """Without spills, and through shared memory only where elements must cross warps."""
    f, tile, whole, arrays = EXAMPLES[name]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    plan = kernel_plan(plain.rows(f, tile, whole=whole), *avals, arch=arch)
    assert compiled(plan).complaints() == []
    assert (plan.roles[0].scratch_bytes == 0) == (name in WITHOUT_SCRATCH)
