"""Kernels written with `pallas_call`: a body over blocks, a grid, and where each block lies.

Each function takes and returns JAX arrays, works under jit and vmap, runs on a GPU of the Hopper generation and, where there is
none, in the simulator.  `interpret=True` runs it as XLA operations.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as pl


def matmul(
    a: jax.Array, b: jax.Array, *, block_m: int = 64, block_n: int = 128, steps: int = 4, interpret: Any = False
) -> jax.Array:
    """a @ b for 16-bit (m, k) and (k, n): tiles of block_m x block_n, sums in float32, k streamed in steps of 64."""
    (m, k), n = a.shape, b.shape[1]
    depth = pl.cdiv(k, 64)

    def body(a_ref: Any, b_ref: Any, o_ref: Any, acc: Any) -> None:
        pl.wgmma(acc, a_ref, b_ref)
        pl.wgmma_wait(1)  # the product before this one has ended: its blocks may be filled again

        @pl.when(pl.program_id(2) == depth - 1)
        def _() -> None:
            o_ref[...] = acc[...].astype(o_ref.dtype)

    swizzled = (pl.TilingTransform((8, 64)), pl.SwizzleTransform(128))
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(pl.cdiv(m, block_m), pl.cdiv(n, block_n), depth),
        in_specs=[
            pl.BlockSpec((block_m, 64), lambda i, j, k: (i, k), transforms=swizzled, delay_release=1),
            pl.BlockSpec((64, block_n), lambda i, j, k: (k, j), transforms=swizzled, delay_release=1),
        ],
        out_specs=pl.BlockSpec((block_m, block_n), lambda i, j, k: (i, j), transforms=swizzled),
        scratch_shapes=[pl.ACC((block_m, block_n))],
        compiler_params=pl.CompilerParams(max_concurrent_steps=steps),
        interpret=interpret,
    )(a, b)


def matmul_warpgroups(
    a: jax.Array, b: jax.Array, *, block_n: int = 256, steps: int = 4, group: int = 8, interpret: Any = False
) -> jax.Array:
    """The same, as fast as it gets: two warpgroups multiply 64 x block_n each, a third loads the blocks.

    group: rows of tiles that are visited together, column by column, for the sake of the L2 cache.  block_n: a multiple of 64.
    """
    (m, k), n = a.shape, b.shape[1]
    depth, rows = pl.cdiv(k, 64), pl.cdiv(m, 128)
    group = math.gcd(rows, group)

    def body(a_ref: Any, b_ref: Any, o_ref: Any, acc: Any, chunks: Any) -> None:
        wg = lax.axis_index("wg")
        own = pl.ds(wg * 64, 64)
        pl.wgmma(acc, a_ref.at[own], b_ref)
        pl.wgmma_wait(1)

        @pl.when(pl.program_id(3) == depth - 1)
        def _() -> None:
            # The whole tile would take the shared memory of a step: it leaves in chunks of 64 columns, through two buffers.
            result = acc[...].astype(o_ref.dtype)
            for i in range(block_n // 64):
                pl.wait_smem_to_gmem(1, wait_read_only=True)
                chunks[wg, i % 2] = lax.slice_in_dim(result, 64 * i, 64 * (i + 1), axis=1)
                pl.commit_smem()
                pl.copy_smem_to_gmem(chunks.at[wg, i % 2], o_ref.at[own, pl.ds(64 * i, 64)])
            pl.wait_smem_to_gmem(0, wait_read_only=True)

    swizzled = (pl.TilingTransform((8, 64)), pl.SwizzleTransform(128))
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(rows // group, pl.cdiv(n, block_n), group, depth),
        in_specs=[
            pl.BlockSpec((128, 64), lambda g, j, i, k: (g * group + i, k), transforms=swizzled, delay_release=1),
            pl.BlockSpec((64, block_n), lambda g, j, i, k: (k, j), transforms=swizzled, delay_release=1),
        ],
        out_specs=pl.BlockSpec((128, block_n), lambda g, j, i, k: (g * group + i, j), memory_space=pl.GMEM),
        scratch_shapes=[pl.ACC((64, block_n)), pl.SMEM((2, 2, 64, 64), a.dtype, transforms=swizzled)],
        compiler_params=pl.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "sequential"),
            num_compute_wgs=2,
            max_concurrent_steps=steps,
        ),
        interpret=interpret,
    )(a, b)


def softmax(x: jax.Array, *, rows: int = 16, interpret: Any = False) -> jax.Array:
    """Softmax of the rows of a float32 (m, n), n up to 512; columns beyond n masked.

    rows: of a block.  Few, so that several blocks share a multiprocessor: one loads while another computes.
    """
    m, n = x.shape
    width = 8 * pl.cdiv(n, 8)

    def body(x_ref: Any, o_ref: Any) -> None:
        x = x_ref[...]
        if width > n:
            x = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < n, x, -jnp.inf)
        e = jnp.exp(x - x.max(1)[:, None])
        o_ref[...] = e * (1 / e.sum(1))[:, None]

    spec = pl.BlockSpec((rows, width), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(m, rows),
        in_specs=[spec],
        out_specs=spec,
        interpret=interpret,
    )(x)


def layer_norm(
    x: jax.Array, scale: jax.Array, shift: jax.Array, *, epsilon: float = 1e-5, rows: int = 16, interpret: Any = False
) -> jax.Array:
    """Rows of a float32 (m, n) with mean 0 and variance 1, times scale plus shift (n,); n a multiple of 8 up to 512.

    rows: of a block, as in `softmax`.
    """
    m, n = x.shape

    def body(x_ref: Any, scale_ref: Any, shift_ref: Any, o_ref: Any) -> None:
        x = x_ref[...]
        centred = x - (x.sum(1) * (1 / n))[:, None]
        variance = (centred * centred).sum(1) * (1 / n)
        normal = centred * lax.rsqrt(variance + epsilon)[:, None]
        o_ref[...] = normal * scale_ref[...] + shift_ref[...]

    block, whole = pl.BlockSpec((rows, n), lambda i: (i, 0)), pl.BlockSpec((n,), lambda i: (0,))
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(m, rows),
        in_specs=[block, whole, whole],
        out_specs=block,
        interpret=interpret,
    )(x, scale, shift)


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    block_k: int = 64,
    steps: int = 2,
    interpret: Any = False,
) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v of each head, for 16-bit q (heads, queries, d), k and v (heads, keys, d), d 64 or 128.

    Heads and blocks of 64 queries in parallel, blocks of block_k keys one after the other: the largest score of each query so
    far, the sum of its exponentials and its sum of values stay between steps.  causal: query i sees keys 0 ... i.
    steps: buffers for keys and values each.
    """
    (heads, queries, d), keys = q.shape, k.shape[1]
    last = pl.cdiv(keys, block_k) - 1

    def body(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, top: Any, total: Any, acc: Any) -> None:
        i, step = pl.program_id(1), pl.program_id(2)

        @pl.when(step == 0)
        def _() -> None:
            top[...] = jnp.full(top.shape, -jnp.inf, top.dtype)
            total[...] = jnp.zeros(total.shape, total.dtype)
            acc[...] = jnp.zeros(acc.shape, acc.dtype)

        @pl.when(step * block_k < (i + 1) * 64 if causal else True)
        def _() -> None:
            scores = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32) * d**-0.5
            key = step * block_k + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            if keys % block_k:
                scores = jnp.where(key < keys, scores, -jnp.inf)
            if causal:
                query = i * 64 + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
                scores = jnp.where(key <= query, scores, -jnp.inf)
            before, now = top[...], jnp.maximum(top[...], scores.max(1))
            p, shrink = jnp.exp(scores - now[:, None]), jnp.exp(before - now)
            top[...] = now
            total[...] = total[...] * shrink + p.sum(1)
            values = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
            acc[...] = acc[...] * shrink[:, None] + values

        @pl.when(step == last)
        def _() -> None:
            o_ref[...] = (acc[...] * (1 / total[...])[:, None]).astype(o_ref.dtype)

    swizzled = (pl.TilingTransform((8, 64)), pl.SwizzleTransform(128))
    own = pl.BlockSpec((None, 64, d), lambda h, i, j: (h, i, 0), transforms=swizzled)
    streamed = pl.BlockSpec((None, block_k, d), lambda h, i, j: (h, j, 0), transforms=swizzled)
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, pl.cdiv(queries, 64), last + 1),
        in_specs=[own, streamed, streamed],
        out_specs=own,
        scratch_shapes=[pl.SMEM((64,), jnp.float32), pl.SMEM((64,), jnp.float32), pl.ACC((64, d))],
        compiler_params=pl.CompilerParams(max_concurrent_steps=steps, approx_math=True),
        interpret=interpret,
    )(q, k, v)


def linear_scan(a: jax.Array, x: jax.Array, *, interpret: Any = False) -> jax.Array:
    """h[t] = a[t] * h[t - 1] + x[t] along the first axis of float32 (time, channels), from h = 0.

    Channels in parallel, 128 a block; time sequential, 8 rows a step; the state stays in shared memory between steps.
    """
    time, channels = x.shape

    def body(a_ref: Any, x_ref: Any, h_ref: Any, state: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            state[...] = x_ref[0] * 0

        def step(t: Any, h: Any) -> Any:
            h = a_ref[t] * h + x_ref[t]
            h_ref[t] = h
            return h

        state[...] = lax.fori_loop(0, 8, step, state[...])

    spec = pl.BlockSpec((8, 128), lambda c, t: (t, c))
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(channels, 128), pl.cdiv(time, 8)),
        in_specs=[spec, spec],
        out_specs=spec,
        scratch_shapes=[pl.SMEM((128,), jnp.float32)],
        compiler_params=pl.CompilerParams(dimension_semantics=("parallel", "sequential")),
        interpret=interpret,
    )(a, x)


def histogram(x: jax.Array, bins: int = 128, *, interpret: Any = False) -> jax.Array:
    """How often each of 0 ... bins - 1 occurs in an int32 (n,); bins a multiple of 128.

    The counts are one block that stays in shared memory while the data stream past; values that are no bin are not counted, so
    that the masked end of the array (zeros) must be left out by its index.
    """
    (n,) = x.shape
    block = 128

    def body(x_ref: Any, o_ref: Any) -> None:
        number = pl.broadcasted_iota(jnp.int32, (bins,), 0)
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _() -> None:
            o_ref[...] = number * 0

        def count(i: Any, counts: Any) -> Any:
            return counts + (number == x_ref[i]).astype(jnp.int32)

        o_ref[...] = lax.fori_loop(0, jnp.minimum(block, n - step * block), count, o_ref[...])

    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((bins,), jnp.int32),
        grid=pl.cdiv(n, block),
        in_specs=[pl.BlockSpec((block,), lambda i: (i,))],
        out_specs=pl.BlockSpec((bins,), lambda i: (0,)),
        interpret=interpret,
    )(x)


def embedding(tokens: jax.Array, table: jax.Array, *, rows: int = 16, interpret: Any = False) -> jax.Array:
    """table[tokens] for int32 (n,) and float32 (vocabulary, d), d a multiple of 8.

    The table stays where it is; a block reads the `rows` rows that its tokens, prefetched scalars, name.
    """
    (n,), (_, d) = tokens.shape, table.shape

    def body(tokens_ref: Any, table_ref: Any, o_ref: Any) -> None:
        o_ref[...] = table_ref[tokens_ref[pl.ds(pl.program_id(0) * rows, rows)]]

    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((n, d), table.dtype),
        grid_spec=pl.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=pl.cdiv(n, rows),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((rows, d), lambda i, tokens: (i, 0)),
        ),
        interpret=interpret,
    )(jnp.pad(tokens, (0, -n % rows)), table)
