"""JAX's transformations of kernels: vmap adds a grid axis, differentiation is refused with the way out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90.matmul import MatmulConfig, matmul

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def rows(x, scale, o, place):
    """One block a row; also says where it ran: its row, the rows, the columns (a run-time number), its warpgroup's axis."""
    row = lax.axis_index("row")
    o[row] = lax.fori_loop(0, plgpu.dim_size(x, 1), lambda i, total: total + x[row, i], jnp.float32(0)) * scale[0]
    place[row, 0] = plgpu.program_id(0)
    place[row, 1] = plgpu.num_programs(0)
    place[row, 2] = plgpu.dim_size(x, 1) + lax.axis_index("wg")


def kernel(**options):
    n = X.shape[1]
    out = [jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((n, 3), jnp.int32)]
    return plgpu.kernel(rows, out, grid=(n,), grid_names=("row",), num_threads=1, thread_name="wg", **options)


PLACE = [[0, 3, 4], [1, 3, 4], [2, 3, 4]]


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
@pytest.mark.parametrize("in_axes, scales", [((0, None), [2, 2]), ((0, 0), [2, 3]), ((2, 0), [2, 3])])
def test_vmap(jit, in_axes, scales):
    x = X if in_axes[0] == 0 else np.moveaxis(X, 0, 2)
    scale = np.array(scales, np.float32)[:, None]
    sums, place = jit(jax.vmap(kernel(), in_axes=in_axes))(x, scale if in_axes[1] == 0 else scale[0])
    np.testing.assert_array_equal(sums, X.sum(2) * scale)
    np.testing.assert_array_equal(place, [PLACE, PLACE])


def test_nested_vmap():
    both = jax.vmap(jax.vmap(kernel(), in_axes=(None, 0)), in_axes=(0, None))
    sums, place = both(X, np.array([[1], [2], [5]], np.float32))
    np.testing.assert_array_equal(sums, X.sum(2)[:, None] * np.array([1, 2, 5], np.float32)[:, None])
    np.testing.assert_array_equal(place, np.broadcast_to(PLACE, (2, 3, 3, 3)))


def test_vmap_of_nothing():
    sums, place = jax.vmap(kernel())(np.ones((0, 3, 4), np.float32), np.ones((0, 1), np.float32))
    assert sums.shape == (0, 3) and place.shape == (0, 3, 3)


@pytest.mark.parametrize("config", [MatmulConfig(), MatmulConfig(cluster_m=2), MatmulConfig(persistent=True)])
def test_vmap_of_matmul(config):
    """TMA, clusters and blocks that take tile after tile: the same bits as one call after the other."""
    a = jax.random.normal(jax.random.key(0), (2, 192, 64), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (64, 136), jnp.bfloat16)
    both = jax.vmap(lambda x: matmul(x, b, config=config))(a)
    for x, y in zip(a, both, strict=True):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(matmul(x, b, config=config)))


def test_vmap_of_attention():
    q = jax.random.normal(jax.random.key(0), (2, 1, 70, 2, 64), jnp.bfloat16)
    out = jax.vmap(lambda x: attention(x, x, x, causal=True))(q)
    np.testing.assert_array_equal(np.asarray(out[:, 0]), np.asarray(attention(q[:, 0], q[:, 0], q[:, 0], causal=True)))


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_no_derivative(transform):
    def loss(x):
        return kernel()(x, jnp.ones(1))[0].sum()

    with pytest.raises(UnsupportedCall, match="kernel rows cannot be differentiated.*jax.custom_vjp") as e:
        transform(loss)(jnp.asarray(X[0]))
    assert e.value.line is not None and e.value.line.function == "rows"


def test_the_ways_out_of_no_derivative():
    @jax.custom_vjp
    def sums(x):
        return kernel()(x, jnp.ones(1))[0]

    sums.defvjp(lambda x: (sums(x), None), lambda _, g: (jnp.broadcast_to(g[:, None], X[0].shape),))
    np.testing.assert_array_equal(jax.grad(lambda x: sums(x).sum())(jnp.asarray(X[0])), np.ones_like(X[0]))
    stopped = jax.grad(lambda x: (kernel()(lax.stop_gradient(x), jnp.ones(1))[0] * x[:, 0]).sum())
    np.testing.assert_array_equal(stopped(jnp.asarray(X[0]))[:, 0], X[0].sum(1))
