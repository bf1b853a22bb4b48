"""The kernels of examples/pallas_kernels.py against JAX, run as XLA operations, in the simulator, and under vmap."""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.plan.build import build_plan

PATH = pathlib.Path(__file__).parents[2] / "examples" / "pallas_kernels.py"
spec = importlib.util.spec_from_file_location("pallas_kernels", PATH)
examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(examples)

RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def linear_scan(a, x):
    def step(h, t):
        h = t[0] * h + t[1]
        return h, h

    return jax.lax.scan(step, jnp.zeros(x.shape[1]), (a, x))[1]


def layer_norm(x, scale, shift):
    return (x - x.mean(1)[:, None]) * jax.lax.rsqrt(x.var(1) + 1e-5)[:, None] * scale + shift


def product(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


# name: (arguments, JAX's way, relative and absolute tolerance)
CASES = {
    "matmul": ((normal(100, 192, dtype=jnp.bfloat16), normal(192, 200, dtype=jnp.bfloat16)), product, 1e-2),
    "matmul_warpgroups": ((normal(300, 192, dtype=jnp.bfloat16), normal(192, 264, dtype=jnp.bfloat16)), product, 1e-2),
    "softmax": ((normal(70, 100),), lambda x: jax.nn.softmax(x, 1), 1e-6),
    "layer_norm": ((normal(100, 128), normal(128), normal(128)), layer_norm, 1e-5),
    "linear_scan": ((RNG.uniform(0, 1, (20, 160)).astype(np.float32), normal(20, 160)), linear_scan, 1e-5),
    "histogram": ((RNG.integers(0, 128, 300).astype(np.int32),), lambda x: jnp.bincount(x, length=128), 0),
    "embedding": ((RNG.integers(0, 50, 9).astype(np.int32), normal(50, 128)), lambda i, t: t[i], 0),
}


@pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
@pytest.mark.parametrize("name", CASES)
def test_against_jax(name, interpret):
    args, reference, tolerance = CASES[name]
    got = getattr(examples, name)(*args, interpret=interpret)
    expected = np.asarray(reference(*map(jnp.asarray, args)), np.float32)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("timing", ["early", "late"])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_any_order(name, seed, timing):
    """Random legal orders of threads and copies."""
    args, _, _ = CASES[name]
    f = getattr(examples, name)
    np.testing.assert_array_equal(
        np.asarray(f(*args, interpret=plgpu.SimulatorParams(seed=seed, timing=timing))), np.asarray(f(*args))
    )


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_vmap_is_a_python_loop(name, axes):
    """The first argument that is no table of integers gets batch axes; the grid grows, bits stay."""
    args, _, _ = CASES[name]
    f = functools.partial(getattr(examples, name))
    which = 1 if name == "embedding" else 0
    batch = np.stack([np.roll(args[which], i, 0) for i in range(2)])
    expected = np.stack([np.asarray(f(*args[:which], x, *args[which + 1 :])) for x in batch])
    in_axes = tuple(0 if i == which else None for i in range(len(args)))
    mapped = jax.vmap(f, in_axes=in_axes)
    if axes == 2:
        batch, expected = np.stack([batch, batch[::-1]]), np.stack([expected, expected[::-1]])
        mapped = jax.vmap(mapped, in_axes=in_axes)
    given = (*args[:which], batch, *args[which + 1 :])
    np.testing.assert_array_equal(np.asarray(mapped(*given)), expected)
    (eqn,) = [e for e in jax.make_jaxpr(mapped)(*given).jaxpr.eqns if e.primitive.name == "pallas_call"]
    assert eqn.params["call"].mapping.vmapped == tuple(range(axes))


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper(name, kernel_plan, compiled):
    args, _, _ = CASES[name]
    report = compiled(build_plan(_program(getattr(examples, name), *args), "sm_90a"))
    assert not report.complaints()


def _program(f, *args):
    from mosaic_gpu.pallas import lowering

    eqns = jax.make_jaxpr(f)(*args).jaxpr.eqns
    (call,) = [e.params["call"] for e in eqns if e.primitive.name == "pallas_call"]
    return lowering.kernel_of(call).program(*args)
