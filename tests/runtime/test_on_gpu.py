"""Real launches: `pytest -m gpu` on a machine with a Hopper or Blackwell GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu import errors
from mosaic_gpu.runtime import device, jax_ffi

pytestmark = pytest.mark.gpu

BLOCKS = 4
OUT = jax.ShapeDtypeStruct((8 * BLOCKS, 32), jnp.float32)


@pytest.fixture
def arch() -> str:
    devices = device.gpu_devices()
    assert devices, "marked gpu, but JAX sees no NVIDIA GPU"
    major, minor = device.compute_capability(devices[0])
    return f"sm_{major * 10 + minor}a"


def numbers(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(OUT.shape, dtype=np.float32))


def launch(spec, x: jax.Array, **options) -> jax.Array:
    return jax_ffi.launch_call(spec, [x], [OUT], **options)[0]


def test_the_machine_is_described(arch):
    assert device.driver_version() >= (12, 8)


def test_results_are_right(arch, scale_tiles):
    spec = scale_tiles(arch, BLOCKS, 3.0, cluster=2)
    call = jax.jit(lambda x: launch(spec, x))
    for seed in range(20):
        x = numbers(seed)
        np.testing.assert_array_equal(call(x), np.asarray(x) * np.float32(3))


def test_chains_of_launches_with_changing_buffers(arch, scale_tiles):
    double, triple = scale_tiles(arch, BLOCKS, 2.0), scale_tiles(arch, BLOCKS, 3.0)

    @jax.jit
    def chain(x):
        return jax.lax.fori_loop(0, 10, lambda _, y: launch(triple, launch(double, y) + 1.0) / 6.0, x)

    x = numbers(1)
    expected = np.asarray(x)
    for _ in range(10):
        expected = (expected * np.float32(2) + np.float32(1)) * np.float32(3) / np.float32(6)
    np.testing.assert_allclose(chain(x), expected, rtol=1e-5)


def test_an_output_on_its_donated_input(arch, scale_tiles):
    spec = scale_tiles(arch, BLOCKS, 0.5)
    x = numbers(2)
    expected = np.asarray(x) / 2
    place = x.unsafe_buffer_pointer()
    call = jax.jit(lambda x: launch(spec, x, input_output_aliases={0: 0}), donate_argnums=0)
    result = jax.block_until_ready(call(x))
    assert result.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(result, expected)


def test_every_gpu(arch, scale_tiles):
    spec = scale_tiles(arch, BLOCKS, 3.0)
    call = jax.jit(lambda x: launch(spec, x))
    for gpu in device.gpu_devices():
        x = jax.device_put(numbers(3), gpu)
        np.testing.assert_array_equal(call(x), np.asarray(x) * np.float32(3))


def test_an_empty_grid_leaves_the_device_alone(arch, scale_tiles):
    spec = scale_tiles(arch, BLOCKS, 3.0, grid=(0, 1, 1))
    jax.block_until_ready(jax.jit(lambda x: launch(spec, x))(numbers(4)))


@pytest.mark.parametrize("kind", ["generation", "damaged", "parameters", "entry"])
def test_refusals(arch, scale_tiles, kind):
    spec = {
        "generation": lambda: scale_tiles("sm_100a" if arch == "sm_90a" else "sm_90a", BLOCKS, 1.0),
        "damaged": lambda: scale_tiles(arch, BLOCKS, 1.0, cubin=b"\x7fELF".ljust(64, b"\0")),
        "parameters": lambda: scale_tiles(arch, BLOCKS, 1.0, parameters=()),
        "entry": lambda: scale_tiles(arch, BLOCKS, 1.0, entry="not_there"),
    }[kind]()
    error, message = {
        "generation": (errors.DeviceMismatch, "was compiled for"),
        "damaged": (errors.ToolchainError, "driver for CUDA"),
        "parameters": (errors.MosaicGpuError, "has more parameters"),
        "entry": (errors.ToolchainError, "not_there"),
    }[kind]
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(jax.jit(lambda x: launch(spec, x))(numbers(5)))
    ours = jax_ffi.translate_error(caught.value)
    assert type(ours) is error and message in str(ours)


def test_in_command_buffers(arch):
    """The same results when XLA records the launches in CUDA graphs and replays them."""
    if os.environ.get("MOSAIC_GPU_TEST_GRAPHS"):
        pytest.skip("this is the inner run")
    flags = "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    names = "right or chains or donated"
    inner = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-k", names, __file__],
        env=os.environ | {"XLA_FLAGS": flags, "MOSAIC_GPU_TEST_GRAPHS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
    )
    assert inner.returncode == 0, inner.stdout + inner.stderr
