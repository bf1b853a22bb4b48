"""Products and index arrays in plain `jax.numpy`: `@` in a kernel, embedding rows by their tokens, a histogram.

No tensor-core instruction, fragment, layout, tiling or wait is named.  `matmul` multiplies tiles that TMA brings into shared
memory: each product is a wgmma on Hopper, tcgen05 on Blackwell; so are those of `gelu_mlp`, whose weights stream past; `attend`
multiplies arrays in registers.  Run this file to see each against JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mosaic_gpu as plgpu

F32, BF16 = jnp.float32, jnp.bfloat16


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """(m, k) x (k, n) -> (m, n), bfloat16, in tiles of 128 x 64, 64 of k at a time."""
    (m, k), n = a.shape, b.shape[1]

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        rows, columns = plgpu.ds(lax.axis_index("i") * 128, 128), plgpu.ds(lax.axis_index("j") * 64, 64)

        def step(t: Any, acc: Any) -> Any:
            part = plgpu.ds(t * 64, 64)
            plgpu.copy_gmem_to_smem(a.at[rows, part], a_tile, full)
            plgpu.copy_gmem_to_smem(b.at[part, columns], b_tile, full)
            plgpu.barrier_wait(full)
            return acc + jnp.dot(a_tile[...], b_tile[...], preferred_element_type=F32)

        o[rows, columns] = lax.fori_loop(0, k // 64, step, jnp.zeros((128, 64), F32)).astype(o.dtype)

    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((m, n), BF16),
        grid=(m // 128, n // 64),
        grid_names=("i", "j"),
        scratch_types=[
            plgpu.SMEM((128, 64), BF16),
            plgpu.SMEM((64, 64), BF16),
            plgpu.Barrier(num_arrivals=2),
        ],
        name="plain_matmul",
    )
    result: jax.Array = kernel(a, b)
    return result


def tiles(f: Any, rows: int, out: Any, x: jax.Array, *whole: jax.Array) -> jax.Array:
    """f of tiles of x's rows, one a block, and of the other arrays."""

    def body(x: Any, *refs: Any) -> None:
        mine = plgpu.ds(lax.axis_index("tile") * rows, rows)
        refs[-1][mine] = f(x[mine], *(r[...] for r in refs[:-1]))

    kernel = plgpu.kernel(body, out, grid=(plgpu.cdiv(x.shape[0], rows),), grid_names=("tile",), name=f.__name__)
    result: jax.Array = kernel(x, *whole)
    return result


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """(m, width), (width, hidden), (hidden, width) -> (m, width)."""
    return jax.nn.gelu(x @ up) @ down


def gelu_mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """`mlp` in bfloat16, 64 rows a block and 64 hidden features at a time, which stay in registers.

    width: a multiple of 64 up to 256; hidden: a multiple of 64.
    """
    (m, width), hidden = x.shape, up.shape[1]

    def body(x: Any, up: Any, down: Any, o: Any, rows: Any, full: Any) -> None:
        mine = plgpu.ds(lax.axis_index("tile") * 64, 64)
        plgpu.copy_gmem_to_smem(x.at[mine], rows, full)
        plgpu.barrier_wait(full)

        def step(_: Any, up: Any, down: Any, acc: Any) -> Any:
            inner = jax.nn.gelu(jnp.dot(rows[...], up[...], preferred_element_type=F32))
            return acc + jnp.dot(inner.astype(BF16), down[...], preferred_element_type=F32)

        stream = plgpu.emit_pipeline(
            step,
            grid=hidden // 64,
            in_specs=[
                plgpu.BlockSpec((width, 64), lambda h: (0, h)),
                plgpu.BlockSpec((64, width), lambda h: (h, 0)),
            ],
            max_concurrent_steps=2,
            init_carry=jnp.zeros((64, width), F32),
        )
        o[mine] = stream(up, down).astype(BF16)

    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((m, width), BF16),
        grid=(plgpu.cdiv(m, 64),),
        grid_names=("tile",),
        scratch_types=[plgpu.SMEM((64, width), BF16), plgpu.Barrier()],
        name="gelu_mlp",
    )
    result: jax.Array = kernel(x, up, down)
    return result


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """(queries, d), (keys, d), (keys, d) -> (queries, d): attention of one head."""
    scores = jnp.dot(q, k.T, preferred_element_type=F32) * q.shape[-1] ** -0.5
    return jax.nn.softmax(scores).astype(v.dtype) @ v


def embed(tokens: jax.Array, table: jax.Array) -> jax.Array:
    """(n,), (vocabulary, width) -> (n, width): the rows are read where the tokens say."""

    def body(tokens: Any, table: Any, o: Any) -> None:
        mine = plgpu.ds(lax.axis_index("tile") * 32, 32)
        o[mine] = table[tokens[mine]]

    out = jax.ShapeDtypeStruct((tokens.shape[0], table.shape[1]), table.dtype)
    kernel = plgpu.kernel(body, out, grid=(plgpu.cdiv(len(tokens), 32),), grid_names=("tile",), name="embed")
    result: jax.Array = kernel(tokens, table)
    return result


def histogram(x: jax.Array) -> jax.Array:
    """(rows, n) of numbers from 0 to 15 -> how often each occurs in each row, (rows, 16)."""
    return jax.vmap(lambda row: jnp.zeros(16, jnp.int32).at[row].add(1))(x)


def examples(seed: int = 0) -> dict[str, tuple[Any, Any, list[np.ndarray]]]:
    """By name: the kernel, what it should compute, its arrays."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(BF16)

    def like(x: jax.Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)

    tokens = rng.integers(0, 500, 70).astype(np.int32)
    counts = jax.ShapeDtypeStruct((40, 16), jnp.int32)
    return {
        "matmul": (matmul, jnp.dot, [normal(256, 192), normal(192, 128)]),
        "gelu_mlp": (gelu_mlp, mlp, [normal(70, 64), normal(64, 192), normal(192, 64)]),
        "attend": (
            lambda q, *kv: tiles(attend, 32, like(q), q, *kv),
            attend,
            [normal(*s) for s in ((70, 64), (128, 64), (128, 64))],
        ),
        "embed": (embed, lambda t, table: table[t], [tokens, normal(500, 64)]),
        "histogram": (
            lambda x: tiles(histogram, 8, counts, x),
            histogram,
            [rng.integers(0, 16, (40, 32)).astype(np.int32)],
        ),
    }


def main() -> None:
    for name, (f, reference, arrays) in examples().items():
        found = np.asarray(jax.jit(f)(*arrays), np.float64)
        expected = np.asarray(reference(*map(jnp.asarray, arrays)), np.float64)
        error = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)
        print(f"{name:10} {'x'.join(map(str, arrays[0].shape)):>8}  relative difference from JAX: {error:.1e}")


if __name__ == "__main__":
    main()
