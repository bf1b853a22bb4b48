"""Python's collector of cyclic garbage while kernels are traced, planned and emitted."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.garbage import uncollected


@pytest.mark.parametrize("enabled", [True, False])
def test_is_as_before_afterwards(enabled):
    """Also where the body fails, and where somebody has turned it off."""
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="inside"), uncollected():
            assert not gc.isenabled()
            with uncollected():
                raise RuntimeError("inside")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_kernel_is_traced_without_collections():
    seen = []

    def body(x, o):
        seen.append(gc.isenabled())
        o[...] = x[...]

    x = jnp.ones((128,), jnp.float32)
    plgpu.kernel(body, jax.ShapeDtypeStruct((128,), jnp.float32))(x)
    assert seen == [False] and gc.isenabled()
