"""Eight kernels in plain `jax.numpy`: no layout, no barrier, no tensor core is named.

`rows(f)` makes a kernel of a function on a tile of rows: a block of 128 threads loads the tile, computes, stores.  Layouts,
shuffles and exchanges through shared memory are the compiler's.  Run this file to see each against JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mosaic_gpu as plgpu


def rows(f: Callable[..., Any], tile: int, *, whole: int = 0) -> Callable[..., Any]:
    """A function on arrays that runs `f` on tiles of `tile` rows, one a block; the last `whole` arguments go whole to each.

    The arrays are (n, ...); n need not be a multiple of `tile`.  Results of f are tiles of as many rows.
    """

    def call(*arrays: jax.Array) -> Any:
        tiled = len(arrays) - whole
        n = arrays[0].shape[0]
        parts = [jax.ShapeDtypeStruct((tile, *a.shape[1:]), a.dtype) for a in arrays[:tiled]]
        results = jax.eval_shape(f, *parts, *arrays[tiled:])
        outs = [jax.ShapeDtypeStruct((n, *r.shape[1:]), r.dtype) for r in jax.tree.leaves(results)]

        def body(*refs: Any) -> None:
            mine = plgpu.ds(lax.axis_index("tile") * tile, tile)
            inputs = [r[mine] for r in refs[:tiled]] + [r[...] for r in refs[tiled : len(arrays)]]
            for o, x in zip(refs[len(arrays) :], jax.tree.leaves(f(*inputs)), strict=True):
                o[mine] = x

        kernel = plgpu.kernel(body, outs, grid=(plgpu.cdiv(n, tile),), grid_names=("tile",), name=f.__name__)
        found = kernel(*arrays)
        return jax.tree.unflatten(jax.tree.structure(results), jax.tree.leaves(found))

    return call


def softmax(x: jax.Array) -> jax.Array:
    """(rows, columns) -> the same, along columns."""
    e = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    return e / jnp.sum(e, axis=1, keepdims=True)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """(rows, columns), (columns,), (columns,) -> (rows, columns)."""
    mean = jnp.mean(x, axis=1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """(rows, columns), (columns,) -> (rows, columns)."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) * scale


def rotary(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotary embedding.  (rows, d), (rows,) positions as float32 -> (rows, d); halves are the pairs."""
    half = x.shape[1] // 2
    frequency = jnp.exp(jnp.arange(half, dtype=jnp.float32) * (-np.log(10000.0) / half))
    angle = position[:, None] * frequency
    a, b = x[:, :half], x[:, half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], axis=1)


def gelu_gate(x: jax.Array, gate: jax.Array) -> jax.Array:
    """What stands between the products of a gated GELU MLP.  (rows, columns) twice -> (rows, columns)."""
    return jax.nn.gelu(gate) * x


def top_k(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(rows, columns) -> the 4 largest of each row, falling, and where they were (int32)."""
    where = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    keys, order = lax.sort((-x, where), num_keys=1)
    return -keys[:, :4], order[:, :4]


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """(rows, classes), (rows,) int32 -> (rows,) losses."""
    top = jnp.max(logits, axis=1)
    total = jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=1)) + top
    mine = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == label[:, None]
    return total - jnp.sum(jnp.where(mine, logits, 0.0), axis=1)


def prefix_sum(x: jax.Array) -> jax.Array:
    """(rows, columns) -> sums up to and with each element, along columns."""
    return jnp.cumsum(x, axis=1)


def examples(seed: int = 0) -> dict[str, tuple[Callable[..., Any], int, int, list[np.ndarray]]]:
    """By name: function, rows of a tile, how many arguments go whole, arguments."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "softmax": (softmax, 16, 0, [normal(40, 256)]),
        "layer_norm": (layer_norm, 16, 2, [normal(40, 256), normal(256), normal(256)]),
        "rms_norm": (rms_norm, 16, 1, [normal(40, 256), normal(256)]),
        "rotary": (rotary, 32, 0, [normal(70, 64), np.arange(70, dtype=np.float32)]),
        "gelu_gate": (gelu_gate, 16, 0, [normal(40, 256), normal(40, 256)]),
        "top_k": (top_k, 16, 0, [normal(40, 32)]),
        "cross_entropy": (cross_entropy, 16, 0, [normal(40, 1000), rng.integers(0, 1000, 40).astype(np.int32)]),
        "prefix_sum": (prefix_sum, 8, 0, [normal(20, 96)]),
    }


def main() -> None:
    for name, (f, tile, whole, arrays) in examples().items():
        found, expected = rows(f, tile, whole=whole)(*arrays), f(*arrays)
        error = max(
            float(jnp.max(jnp.abs(a - b)))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        )
        print(f"{name:14} {'x'.join(map(str, arrays[0].shape)):>8}  largest difference from JAX: {error:.1e}")


if __name__ == "__main__":
    main()
