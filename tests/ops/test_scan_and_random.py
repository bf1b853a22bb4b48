"""scan over arrays, jax.random, and what JAX wraps functions in: values against JAX, C++ through NVRTC."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate


def ran(f: Any, *arrays: np.ndarray, compiled: Any = None) -> list[np.ndarray]:
    """f in a kernel, on whole arrays."""
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    outs = jax.tree.leaves(jax.eval_shape(f, *avals))

    def body(*refs: Any) -> None:
        results = jax.tree.leaves(f(*(r[...] for r in refs[: len(arrays)])))
        for r, o in zip(results, refs[len(arrays) :], strict=True):
            o[...] = r

    plan = build_plan(plgpu.kernel(body, outs).program(*avals), "sm_90a")
    if compiled is not None:
        assert compiled(plan).complaints() == []
    return simulate(plan, list(arrays))


def step(c: Any, y: Any) -> Any:
    return c + y, (c * y, c[0])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_scan(dtype, reverse, compiled):
    """Carry, two ys and an xs, in both directions."""
    x = np.asarray(jnp.asarray(np.random.default_rng(0).integers(-4, 5, (6, 16)), dtype))

    def f(a: Any) -> Any:
        return lax.scan(step, jnp.ones((16,), a.dtype), a, reverse=reverse)

    for found, expected in zip(ran(f, x, compiled=compiled), jax.tree.leaves(f(jnp.asarray(x))), strict=True):
        np.testing.assert_array_equal(found, np.asarray(expected))


def test_scan_of_scalars():
    x = np.arange(8, dtype=np.float32)

    def f(a: Any) -> Any:
        return lax.scan(lambda c, y: (c + y, c), jnp.float32(0), a)[1]

    np.testing.assert_array_equal(ran(f, x)[0], np.asarray(f(jnp.asarray(x))))


DRAWS: dict[str, Any] = {
    "bits32": lambda k: jax.random.bits(k, (24, 10), "uint32"),
    "bits16": lambda k: jax.random.bits(k, (130,), "uint16"),
    "uniform": lambda k: jax.random.uniform(k, (24, 10)),
    "normal": lambda k: jax.random.normal(jax.random.fold_in(k, 7), (64, 4)),
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (40,)).astype(jnp.int32),
    "randint": lambda k: jax.random.randint(k, (24, 10), -5, 1000),
    "split": lambda k: jax.random.bits(jax.random.split(k, 5)[3], (40,)),
    "some_of_a_split": lambda k: jax.random.bits(jax.random.split(k, 6)[1:5:2][1], (40,)),
    "every_key": lambda k: sum(jax.random.bits(own, (8,)) for own in jax.random.split(k, 3)),
    "permutation": lambda k: jax.random.permutation(k, 48),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_random(draw, compiled):
    """The same numbers as outside of a kernel, from a seed that is read at run time and from a key closed over."""
    seed = np.array([1234], np.int32)
    expected = np.asarray(draw(jax.random.key(1234)))
    (found,) = ran(lambda s: draw(jax.random.key(s[0])), seed, compiled=compiled)
    closed = jax.random.key(1234)
    (again,) = ran(lambda s: draw(closed), seed)
    for a in (found, again):
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, expected, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, expected)


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defjvp(lambda p, t: (2 * p[0], 2 * t[0]))


@jax.custom_vjp
def tripled(x: Any) -> Any:
    return 3 * x


tripled.defvjp(lambda x: (3 * x, None), lambda _, g: (3 * g,))


WRAPPED: dict[str, Any] = {
    "jit": jax.jit(lambda a: a + 1),
    "custom_jvp": doubled,
    "custom_vjp": tripled,
    "checkpoint": jax.checkpoint(jnp.sin),
    "grad": jax.grad(lambda a: jnp.sum(jnp.tanh(a) * a)),
    "vmap": jax.vmap(lambda a: a * a),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "logsumexp": jax.nn.logsumexp,
    "log_softmax": jax.nn.log_softmax,
    "cumsum": lambda a: jnp.cumsum(jnp.abs(a)),  # no cancellation: the order of the sums differs
    "sort": jnp.sort,
    "argsort": jnp.argsort,
    "optimization_barrier": lambda a: lax.optimization_barrier(a),
    "norm": lambda a: jnp.linalg.norm(a),
    "variance": lambda a: jnp.var(a) + jnp.mean(a),
}


def test_wrapped_functions():
    """jit, custom_jvp, custom_vjp, checkpoint, derivatives and jax.nn's functions are their insides."""
    x = np.linspace(-2, 2, 48, dtype=np.float32)
    for name, f in WRAPPED.items():
        (found,) = ran(lambda a, f=f: jnp.atleast_1d(f(a)), x)
        right = np.asarray(jnp.atleast_1d(f(jnp.asarray(x))))
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-6, err_msg=name)
