"""Kernels under `jax.shard_map` with JAX's account of what varies along which mesh axis (check_vma=True)."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mosaic_gpu as plgpu

S = jax.ShapeDtypeStruct((3,), jnp.float32)


def body(x, y, o):
    """Uses axes of its own, a loop and a role: what JAX would otherwise check against the mesh around it."""
    wg, i = lax.axis_index("wg"), lax.axis_index("i")

    @plgpu.when(wg == 0)
    def _():
        o[i] = lax.fori_loop(0, 3, lambda j, total: total + x[j], jnp.float32(0)) + y[i]


@pytest.fixture
def kernel():
    """A fresh one each time, since a kernel remembers its traces."""
    return plgpu.kernel(body, S, grid=(3,), grid_names=("i",), num_threads=2, thread_name="wg")


SPLIT = P("d")


def mapped(f, out=SPLIT, kind=AxisType.Auto, devices=1):
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(kind,), devices=jax.devices()[:devices])
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(SPLIT, P()), out_specs=out, check_vma=True)), mesh


X, Y = np.arange(3, dtype=np.float32), np.full(3, 2, np.float32)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_axes_of_a_kernel_are_none_of_the_mesh(kernel, kind):
    f, mesh = mapped(kernel, kind=kind)
    x = jax.device_put(X, jax.sharding.NamedSharding(mesh, SPLIT))
    np.testing.assert_array_equal(np.asarray(f(x, Y)), X.sum() + Y)


def test_a_result_varies_as_its_inputs_do(kernel):
    """So it can be carried by a loop, and is not taken for the same on all devices."""
    looped, _ = mapped(lambda x, y: lax.fori_loop(0, 2, lambda _, c: kernel(c, y), x))
    np.testing.assert_array_equal(np.asarray(looped(X, Y)), 3 * (X.sum() + Y) + Y)
    same, _ = mapped(lambda x, y: kernel(y, y), out=P())
    np.testing.assert_array_equal(np.asarray(same(X, Y)), 4 * Y)
    wrong, _ = mapped(kernel, out=P())
    with pytest.raises(ValueError, match="out_specs"):
        wrong(X, Y)


@pytest.mark.parametrize("x64", [True, False])
def test_x64_reaches_the_trace(x64):
    seen = []

    def wide(x, y, o):
        seen.append(str((plgpu.program_id(0) + np.int64(1)).dtype))
        o[0] = x[0]

    with jax.enable_x64(x64):
        mapped(plgpu.kernel(wide, S, grid=(1,)))[0].lower(X, Y)
    assert seen == ["int64" if x64 else "int32"]


def test_on_two_devices():
    """Each runs the kernel on its part.  In a process of its own, since the devices of this one are there already."""
    code = """
import jax, numpy as np
from test_shard_map import X, Y, P, S, body, mapped
import mosaic_gpu as plgpu
k = plgpu.kernel(body, S, grid=(3,), grid_names=("i",), num_threads=2, thread_name="wg")
f, _ = mapped(lambda x, y: (k(x, y), jax.lax.psum(k(x, y), "d")), out=(P("d"), P()), devices=2)
parts, total = f(np.concatenate([X, X + 1]), Y)
np.testing.assert_array_equal(parts, np.concatenate([X.sum() + Y, X.sum() + 3 + Y]))
np.testing.assert_array_equal(total, 2 * X.sum() + 3 + 2 * Y)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment = os.environ | flags | {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
