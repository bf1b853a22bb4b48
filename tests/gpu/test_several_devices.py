"""Attention on several GPUs of one process: placed by hand, and sharded over the batch."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.runtime.device import default_arch, gpu_devices

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    return [np.asarray(jnp.asarray(rng.standard_normal((4, 333, 2, 128)), jnp.bfloat16)) for _ in range(3)]


def test_on_every_gpu_in_turn() -> None:
    arrays = inputs()
    exact, _ = reference.attention(*arrays)
    call = jax.jit(attention)
    for device in gpu_devices() * 2:
        out = call(*(jax.device_put(x, device) for x in arrays))
        assert out.devices() == {device} and reference.relative_error(out, exact) < 5e-3


@pytest.mark.skipif(len(gpu_devices()) < 2, reason="needs two GPUs")
def test_sharded_over_the_batch() -> None:
    arrays = inputs()
    exact, _ = reference.attention(*arrays)
    mesh = Mesh(np.array(gpu_devices()[:2]), ("data",))
    spec = PartitionSpec("data")
    call = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
    for _ in range(3):
        out = call(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays))
        assert len(out.devices()) == 2 and reference.relative_error(out, exact) < 5e-3
