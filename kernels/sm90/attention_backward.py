"""Hopper attention backward: dQ, dK and dV of softmax(scale Q K^T) V.

Three kernels.  `preprocess` makes what every score of a query needs, -LSE and the negative row sums of dO * O (`ndelta`), and
zeros where dQ is summed up.  The main kernel has a block for every 128 keys (64 at large head dims) of a KV head: it walks over
the queries of all heads that share them, so that dK and dV stay in registers.  One thread issues the copies, two warpgroups
compute, a fourth one makes dQ.  Scores are computed transposed, (keys, queries), as their accumulators are then the A operands
of dV += P^T dO and dK += dS^T Q.  dS goes on through shared memory; dQ = dS K is added to global memory in float32 by TMA, in
the order of the registers.  `postprocess` scales and rounds it.  For determinism, and at large head dims, whose blocks would
add too often, a kernel that computes the scores again makes dQ instead.  Each kernel may begin while the one before still runs,
for whose end it waits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.masks import Causal
from mosaic_gpu.kernels.sm90.attention import LOG2_E
from mosaic_gpu.kernels.sm90.attention_backward_compute import both_results, make_dk, make_dv
from mosaic_gpu.kernels.sm90.attention_backward_config import COMPUTES, ROWS, AttentionBackwardConfig
from mosaic_gpu.kernels.sm90.attention_backward_dq import query_gradients
from mosaic_gpu.kernels.sm90.attention_backward_work import Build, Work, make_dq, memory
from mosaic_gpu.kernels.sm90.schedule import key_tile_table
from mosaic_gpu.kernels.tiles import chunk, columns_of, head_rows, tiles_of
from mosaic_gpu.runtime.device import multiprocessors

LANES = 128  # threads of a warpgroup: the width of arrays in the order of registers


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    *,
    config: AttentionBackwardConfig,
    causal: Causal,
    scale: float,
    deterministic: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dQ, dK, dV), for arrays that the dispatcher has checked.  deterministic, or config.split: dQ by a kernel of its own.

    q: (b, s, h, d); k: (b, t, h_kv, d); v: (b, t, h_kv, dv); out, d_out: (b, s, h, dv), all of one 16-bit dtype; lse, d_lse:
    (b, h, s) float32, the natural log-sum-exp of the forward pass and its cotangent (None: zeros).
    """
    b, s, h, d = q.shape
    t, h_kv, dv = v.shape[1:]
    config.check(d, dv)
    dtype = jnp.dtype(q.dtype)
    rows = (lse,) if d_lse is None else (lse, d_lse)
    with_dq = not (deterministic or config.split)
    preprocess = _preprocess(b, s, h, d, dv, config, with_dq, len(rows) == 2)
    nlse, ndelta, *dq_sum = preprocess(out, d_out, *rows)
    build = Build(d, dv, dtype, config, causal, scale, with_dq)
    behind = (s - t if causal == "bottom_right" else 0) if causal else None
    bytes_of_head = h // h_kv * s * (4 * d + 2 * (d + dv))
    table = key_tile_table(b, h_kv, t, s, bytes_of_head, build.keys, behind, multiprocessors())
    again = [table] if config.split else []
    if not with_dq:
        d_v, d_k = _main(b, h_kv, t, len(table), build)(table, q, k, v, d_out, nlse, ndelta, *again)
        d_q = query_gradients(b, s, h, d, dv, dtype, config, causal, scale)(q, k, v, d_out, nlse, ndelta)
        return d_q, d_k, d_v
    main = _main(b, h_kv, t, len(table), build, dq_sum[0].shape)
    d_v, d_k, total = main(table, q, k, v, d_out, nlse, ndelta, *dq_sum, *again)
    return _postprocess(b, s, h, d, dtype, config, scale)(total), d_k, d_v


def _params() -> Any:
    return plgpu.CompilerParams(arch="sm_90a", approx_math=True, strict=True)


@functools.lru_cache(maxsize=256)
def _preprocess(
    b: int, s: int, h: int, d: int, dv: int, c: AttentionBackwardConfig, sums: bool, with_d_lse: bool
) -> Any:
    """(out, d_out, lse, d_lse if there is one) -> (-LSE in base 2, d_lse less the row sums of dO O, zeros), by 64 queries.

    The first two are (b, h, queries) float32, padded to whole blocks: there, and where a query sees no key, P = exp2(-inf).
    sums: whether there are zeros.
    """
    d, dv = columns_of(d), columns_of(dv)  # of tiles
    parts, columns = c.parts(d), c.part_columns(d)
    padded = plgpu.cdiv(s, c.block_q) * c.block_q

    def body(out: Any, d_out: Any, lse: Any, *rest: Any) -> None:
        d_lse, nlse, ndelta, *dq_sum = rest if with_d_lse else (None, *rest)
        batch, head, block = (lax.axis_index(n) for n in ("batch", "head", "block"))
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        rows = plgpu.ds(block * ROWS, ROWS)
        by_row = plgpu.Layout.WGMMA.reduce(1)

        def add_products(i: Any, sums: Any) -> Any:  # some columns at a time, for the registers
            some = [head_rows(x, batch, rows, head, dv).at[:, plgpu.ds(i * chunk(dv), chunk(dv))] for x in (out, d_out)]
            o, do = (plgpu.load(x, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for x in some)
            return sums + jnp.sum(o * do, axis=1)

        products = lax.fori_loop(0, dv // chunk(dv), add_products, jnp.zeros((ROWS,), jnp.float32))
        own = plgpu.load(lse.at[batch, head, rows], layout=by_row)
        if d_lse is not None:
            products = products - plgpu.load(d_lse.at[batch, head, rows], layout=by_row)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row) + block * ROWS
        seen = (row < plgpu.dim_size(lse, 2)) & (own != -jnp.inf)
        nlse[batch, head, rows] = jnp.where(seen, own * -LOG2_E, -jnp.inf)
        ndelta[batch, head, rows] = jnp.where(seen, -products, 0.0)
        place = (batch * plgpu.dim_size(nlse, 1) + head) * plgpu.div(plgpu.dim_size(nlse, 2), ROWS) + block

        def clear(i: Any, _: None) -> None:
            zeros = jnp.zeros((columns * ROWS // LANES, LANES), jnp.float32)
            dq_sum[0][place * parts + i] = plgpu.layout_cast(zeros, plgpu.Layout.WG_STRIDED)

        if sums:
            lax.fori_loop(0, parts, clear, None)

    per_row = jax.ShapeDtypeStruct((b, h, padded), jnp.float32)
    zeros = jax.ShapeDtypeStruct((b * h * padded // ROWS * parts, columns * ROWS // LANES, LANES), jnp.float32)
    return plgpu.kernel(
        body,
        [per_row, per_row, *[zeros] * sums],
        grid=(h, b, padded // ROWS),
        grid_names=("head", "batch", "block"),
        compiler_params=_params(),
        name="attention_backward_preprocess_sm90",
    )


@functools.lru_cache(maxsize=256)
def _postprocess(b: int, s: int, h: int, d: int, dtype: Any, c: AttentionBackwardConfig, scale: float) -> Any:
    """The sums of dQ in the order of registers -> dQ, (b, s, h, d), scaled and rounded."""
    parts, columns, width = c.parts(columns_of(d)), c.part_columns(columns_of(d)), columns_of(d)

    def body(dq_sum: Any, dq: Any, tile: Any) -> None:
        batch, head, block = (lax.axis_index(n) for n in ("batch", "head", "block"))
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        blocks = plgpu.cdiv(plgpu.dim_size(dq, 1), c.block_q) * (c.block_q // ROWS)
        place = (batch * plgpu.dim_size(dq, 2) + head) * blocks + block
        for i in range(parts):
            part = plgpu.from_fragments(dq_sum[place * parts + i], (ROWS, columns))
            tile[0, :, i * columns : (i + 1) * columns] = (part * scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[0], head_rows(dq, batch, plgpu.ds(block * ROWS, ROWS), head, width))
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((b, s, h, d), dtype),
        scratch_types=[tiles_of(1, ROWS, width, dtype)],
        grid=(h, b, plgpu.cdiv(s, ROWS)),
        grid_names=("head", "batch", "block"),
        compiler_params=_params(),
        name="attention_backward_postprocess_sm90",
    )


@functools.lru_cache(maxsize=256)
def _main(b: int, h_kv: int, t: int, blocks: int, build: Build, sums: tuple[int, ...] | None = None) -> Any:
    """The kernel that makes dV and dK, and adds to the sums of dQ (`sums`: their shape; None: it makes no dQ)."""
    c, d, dv, dtype, queries = build.config, build.d, build.dv, build.dtype, build.queries
    stages, ds_stages, key_tiles = c.num_stages, c.ds_stages, build.key_tiles
    columns, with_dq = c.part_columns(d), build.with_dq
    memory_wg, dq_wg = COMPUTES, COMPUTES + 1

    def body(table: Any, q: Any, k: Any, *rest: Any) -> None:
        left = list(rest)

        def take(there: bool = True) -> Any:
            return left.pop(0) if there else None

        v, d_out, nlse, ndelta = (take() for _ in range(4))
        take(with_dq)  # the sums so far; they are the last output, too
        same_table = take() if c.split else table  # under another address, which no register then holds through a loop
        d_v, d_k, dq_sum = take(), take(), take(with_dq)
        tiles = k_tile, *_ = [take() for _ in range(6)]
        barriers = k_full, *_ = [take() for _ in range(6)]
        ds_tile, dq_tile, ds_full, ds_empty = (take(with_dq) for _ in range(4))
        p_tile, p_full, p_empty = (take(c.split) for _ in range(3))
        wg, ds_barriers = lax.axis_index("wg"), (ds_full, ds_empty)

        def work(table: Any = table) -> Work:
            return Work(build, table, q, k)

        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()

        @plgpu.when(wg == memory_wg)
        def _() -> None:
            memory(work(), (q, k, v, d_out, nlse, ndelta), tiles, barriers)

        if c.split:

            @plgpu.when(wg == 0)
            def _() -> None:
                make_dv(build, work(), lambda: work(same_table), d_v, tiles, p_tile, barriers, (p_full, p_empty))

            @plgpu.when(wg == 1)
            def _() -> None:
                make_dk(build, work(), lambda: work(same_table), d_k, tiles, p_tile, barriers, (p_full, p_empty))

        else:

            @plgpu.when(wg < COMPUTES)
            def _() -> None:
                both_results(build, wg, work, (d_v, d_k), tiles, ds_tile, barriers, ds_barriers)

        if with_dq:

            @plgpu.when(wg == dq_wg)
            def _() -> None:
                make_dq(work(), dq_sum, k_tile, ds_tile, dq_tile, k_full, ds_barriers)

    row, keys_full = plgpu.SMEM((stages, queries), jnp.float32), plgpu.Barrier(num_arrivals=key_tiles)
    full = plgpu.Barrier(num_arrivals=2, num_barriers=stages)  # rows, and a number for each
    empty = plgpu.Barrier(num_arrivals=COMPUTES, num_barriers=stages)
    scratch = [tiles_of(key_tiles, ROWS, d, dtype), tiles_of(key_tiles, ROWS, dv, dtype)]
    scratch += [tiles_of(stages, queries, d, dtype), tiles_of(stages, queries, dv, dtype), row, row]
    scratch += [keys_full, keys_full, full, empty, full, empty]
    results = [jax.ShapeDtypeStruct((b, t, h_kv, n), dtype) for n in (build.value_dim, build.head_dim)]
    aliases = None
    if sums is not None:
        scratch += [
            tiles_of(ds_stages * key_tiles, queries, ROWS, dtype),  # dS, no longer transposed
            plgpu.SMEM((c.dq_stages, columns * ROWS // LANES, LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=key_tiles, num_barriers=ds_stages),
            plgpu.Barrier(num_barriers=ds_stages),
        ]
        aliases = {7: len(results)}
        results.append(jax.ShapeDtypeStruct(sums, jnp.float32))
    if c.split:
        scratch += [tiles_of(1, ROWS, queries, dtype), plgpu.Barrier(), plgpu.Barrier()]
    return plgpu.kernel(
        body,
        results,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTES + 1 + with_dq,
        thread_name="wg",
        compiler_params=_params(),
        input_output_aliases=aliases,
        name="attention_backward_sm90",
    )
