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

ROWS = pl.Layout.WGMMA  # a row of the block lies in one warp, so that it can be summed


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


def softmax(x: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Softmax of the rows of a float32 (m, n), n up to 256: 64 rows a block, columns beyond n masked."""
    m, n = x.shape
    width = 8 * pl.cdiv(n, 8)

    def body(x_ref: Any, o_ref: Any) -> None:
        row = pl.load(x_ref, layout=ROWS)
        if width > n:
            column = pl.broadcasted_iota(jnp.int32, (64, width), 1, layout=ROWS)
            row = jnp.where(column < n, row, -jnp.inf)
        e = jnp.exp(row - row.max(1)[:, None])
        o_ref[...] = e / e.sum(1)[:, None]

    spec = pl.BlockSpec((64, width), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(m, 64),
        in_specs=[spec],
        out_specs=spec,
        interpret=interpret,
    )(x)


def layer_norm(
    x: jax.Array, scale: jax.Array, shift: jax.Array, *, epsilon: float = 1e-5, interpret: Any = False
) -> jax.Array:
    """Rows of a float32 (m, n) with mean 0 and variance 1, times scale plus shift (n,); n a multiple of 8 up to 256."""
    m, n = x.shape

    def body(x_ref: Any, scale_ref: Any, shift_ref: Any, o_ref: Any) -> None:
        x = pl.load(x_ref, layout=ROWS)
        centred = x - (x.sum(1) * (1 / n))[:, None]
        variance = (centred * centred).sum(1) * (1 / n)
        along = ROWS.reduce(0)
        normal = centred * lax.rsqrt(variance + epsilon)[:, None]
        o_ref[...] = normal * pl.load(scale_ref, layout=along)[None, :] + pl.load(shift_ref, layout=along)[None, :]

    rows, whole = pl.BlockSpec((64, n), lambda i: (i, 0)), pl.BlockSpec((n,), lambda i: (0,))
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(m, 64),
        in_specs=[rows, whole, whole],
        out_specs=rows,
        interpret=interpret,
    )(x, scale, shift)


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


def embedding(tokens: jax.Array, table: jax.Array, *, interpret: Any = False) -> jax.Array:
    """table[tokens] for int32 (n,) and float32 (vocabulary, d), d a multiple of 128: index maps read the tokens."""
    (n,), (_, d) = tokens.shape, table.shape

    def body(tokens_ref: Any, row: Any, o_ref: Any) -> None:
        o_ref[...] = row[...]

    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((n, d), table.dtype),
        grid_spec=pl.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(n,),
            in_specs=[pl.BlockSpec((1, d), lambda i, tokens: (tokens[i], 0))],
            out_specs=pl.BlockSpec((1, d), lambda i, tokens: (i, 0)),
        ),
        interpret=interpret,
    )(tokens, table)
