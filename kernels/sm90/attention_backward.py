"""Hopper attention backward: dQ, dK and dV of softmax(scale Q K^T) V.

Three kernels.  `preprocess` makes what every score of a query needs, -LSE and the row sums of dO * O, and zeros where dQ is
summed up.  The main kernel has a block for every 128 keys of a KV head: it walks over the queries of all heads that share
them, so that dK and dV stay in registers.  One thread issues the copies, two warpgroups compute 64 keys each, a fourth one
makes dQ.  Scores are computed transposed, (keys, queries), as their accumulators are then the A operands of dV += P^T dO and
dK += dS^T Q.  dS goes on through shared memory; dQ = dS K is added to global memory in float32 by TMA, in the order of the
registers.  `postprocess` scales and rounds it.  A step of a compute warpgroup: dP^T = V dO^T with dV in flight together; then
the next scores S^T = K Q^T with dK, under which P^T of the next queries is computed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.sm90.attention import LOG2_E
from mosaic_gpu.kernels.sm90.attention_backward_config import COMPUTES, KEYS, ROWS, AttentionBackwardConfig, tiles_of
from mosaic_gpu.kernels.sm90.attention_backward_dq import query_gradients
from mosaic_gpu.kernels.sm90.attention_config import chunk
from mosaic_gpu.kernels.sm90.schedule import key_tile_table

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
    causal: bool,
    scale: float,
    deterministic: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dQ, dK, dV), for arrays that the dispatcher has checked.  deterministic: dQ by a kernel of its own.

    q: (b, s, h, d); k: (b, t, h_kv, d); v: (b, t, h_kv, dv); out, d_out: (b, s, h, dv), all of one 16-bit dtype; lse, d_lse:
    (b, h, s) float32, the natural log-sum-exp of the forward pass and its cotangent (None: zeros).
    """
    b, s, h, d = q.shape
    t, h_kv, dv = v.shape[1:]
    config.check(d, dv)
    dtype = jnp.dtype(q.dtype)
    rows = (lse,) if d_lse is None else (lse, d_lse)
    preprocess = _preprocess(b, s, h, d, dv, dtype, config, not deterministic, len(rows) == 2)
    nlse, delta, *dq_sum = preprocess(out, d_out, *rows)
    table = key_tile_table(b, h_kv, t, h // h_kv * s * (4 * d + 2 * (d + dv)), KEYS, causal)
    call = functools.partial(_main, b, h_kv, t, d, dv, len(table), dtype, config, causal, scale)
    sums = None if deterministic else dq_sum[0].shape
    d_v = call(True, False)(table, q, k, d_out, nlse) if config.split else []
    results = call(not config.split, True, sums)(table, q, k, v, d_out, nlse, delta, *dq_sum)
    if deterministic:
        d_q = query_gradients(b, s, h, d, dv, dtype, config, causal, scale)(q, k, v, d_out, nlse, delta)
    else:
        *results, total = results
        d_q = _postprocess(b, s, h, d, dtype, config, scale)(total)
    d_v, d_k = *d_v, *results
    return d_q, d_k, d_v


def pieces(columns: int) -> list[slice]:
    """Columns of accumulators: one of more than 192 has more registers than the block is launched with."""
    n = 1 if columns <= 192 else 2
    size = -(-columns // n // 64) * 64 if n > 1 else columns
    return [slice(i, min(i + size, columns)) for i in range(0, columns, size)]


def _params() -> Any:
    return plgpu.CompilerParams(arch="sm_90a", approx_math=True, strict=True)


@functools.lru_cache(maxsize=256)
def _preprocess(
    b: int, s: int, h: int, d: int, dv: int, dtype: Any, c: AttentionBackwardConfig, sums: bool, with_d_lse: bool
) -> Any:
    """(out, d_out, lse, d_lse if there is one) -> (-LSE in base 2, row sums of dO O less d_lse, zeros), by blocks of 64 queries.

    The first two are (b, h, queries) float32, padded to whole blocks: there, and where a query sees no key, P = exp2(-inf).
    sums: whether there are zeros.
    """
    parts, columns = c.parts(d), c.part_columns(d)
    padded = plgpu.cdiv(s, c.block_q) * c.block_q

    def body(out: Any, d_out: Any, lse: Any, *rest: Any) -> None:
        d_lse, nlse, delta, *dq_sum = rest if with_d_lse else (None, *rest)
        batch, head, block = (lax.axis_index(n) for n in ("batch", "head", "block"))
        rows = plgpu.ds(block * ROWS, ROWS)
        by_row = plgpu.Layout.WGMMA.reduce(1)

        def add_products(i: Any, sums: Any) -> Any:  # some columns at a time, for the registers
            some = batch, rows, head, plgpu.ds(i * chunk(dv), chunk(dv))
            o, do = (plgpu.load(x.at[some], layout=plgpu.Layout.WGMMA).astype(jnp.float32) for x in (out, d_out))
            return sums + jnp.sum(o * do, axis=1)

        products = lax.fori_loop(0, dv // chunk(dv), add_products, jnp.zeros((ROWS,), jnp.float32))
        own = plgpu.load(lse.at[batch, head, rows], layout=by_row)
        if d_lse is not None:
            products = products - plgpu.load(d_lse.at[batch, head, rows], layout=by_row)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row) + block * ROWS
        seen = (row < plgpu.dim_size(lse, 2)) & (own != -jnp.inf)
        nlse[batch, head, rows] = jnp.where(seen, own * -LOG2_E, -jnp.inf)
        delta[batch, head, rows] = jnp.where(seen, products, 0.0)
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
    parts, columns = c.parts(d), c.part_columns(d)

    def body(dq_sum: Any, dq: Any, tile: Any) -> None:
        batch, head, block = (lax.axis_index(n) for n in ("batch", "head", "block"))
        blocks = plgpu.cdiv(plgpu.dim_size(dq, 1), c.block_q) * (c.block_q // ROWS)
        place = (batch * plgpu.dim_size(dq, 2) + head) * blocks + block
        for i in range(parts):
            part = plgpu.from_fragments(dq_sum[place * parts + i], (ROWS, columns))
            tile[0, :, i * columns : (i + 1) * columns] = (part * scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[0], dq.at[batch, plgpu.ds(block * ROWS, ROWS), head])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((b, s, h, d), dtype),
        scratch_types=[tiles_of(1, ROWS, d, dtype)],
        grid=(h, b, plgpu.cdiv(s, ROWS)),
        grid_names=("head", "batch", "block"),
        compiler_params=_params(),
        name="attention_backward_postprocess_sm90",
    )


@functools.lru_cache(maxsize=256)
def _main(
    b: int,
    h_kv: int,
    t: int,
    d: int,
    dv: int,
    blocks: int,
    dtype: Any,
    c: AttentionBackwardConfig,
    causal: bool,
    scale: float,
    with_dv: bool,
    with_dk: bool,
    sums: tuple[int, ...] | None = None,
) -> Any:
    """The kernel that makes dV, or dK and the sums of dQ (`sums`: their shape; None: it makes no dQ), or all."""
    queries, stages, ds_stages = c.block_q, c.num_stages, c.ds_stages
    parts, columns = c.parts(d), c.part_columns(d)
    with_dq = sums is not None
    factor = scale * LOG2_E  # scores in base 2
    memory_wg, dq_wg = COMPUTES, COMPUTES + 1

    class Work:
        """What a block does, as each role sees it: which keys, and which queries by the step's number."""

        def __init__(self, table: Any, q: Any, k: Any) -> None:
            block = lax.axis_index("block")
            self.batch, self.kv_head, self.tile = (table[block, i] for i in range(3))
            self.heads = plgpu.dim_size(q, 2)
            self.group = plgpu.div(self.heads, plgpu.dim_size(k, 2))
            self.all_blocks = plgpu.cdiv(plgpu.dim_size(q, 1), queries)
            self.first = plgpu.div(self.tile * KEYS, queries) if causal else jnp.int32(0)
            self.keys = plgpu.dim_size(k, 1)
            self.steps = jnp.maximum(self.all_blocks - self.first, 0) * self.group

        def place(self, step: Any) -> tuple[Any, Any]:
            """(query block, head): all heads of the group for one block, then the next block."""
            return self.first + plgpu.div(step, self.group), self.kv_head * self.group + plgpu.rem(step, self.group)

        def masked(self) -> Any:
            """How many steps, from the first on, need a mask: those on the diagonal, and all where keys end."""
            diagonal = plgpu.cdiv(KEYS, queries) * self.group if causal else 0
            return jnp.where((self.tile + 1) * KEYS > self.keys, self.steps, jnp.minimum(diagonal, self.steps))

    def memory(work: Any, arrays: Any, tiles: Any, barriers: Any) -> None:
        """One thread issues every copy."""
        plgpu.set_max_registers(c.memory_registers, action="decrease")
        q, k, v, d_out, nlse, delta = arrays
        k_tile, v_tile, q_tile, do_tile, nlse_tile, delta_tile = tiles
        k_full, v_full, q_full, q_empty, do_full, do_empty = barriers

        def load_keys(x: Any, tile: Any, full: Any) -> None:
            for w in range(COMPUTES):
                rows = plgpu.ds(work.tile * KEYS + w * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(x.at[work.batch, rows, work.kv_head], tile.at[w], full)

        def load_queries(step: Any, x: Any, tile: Any, row: Any, row_tile: Any, full: Any, empty: Any) -> None:
            slot, (block, head) = plgpu.rem(step, stages), work.place(step)

            @plgpu.when(step >= stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            rows = plgpu.ds(block * queries, queries)
            plgpu.copy_gmem_to_smem(x.at[work.batch, rows, head], tile.at[slot], full.at[slot])
            if row is not None:
                plgpu.copy_gmem_to_smem(row.at[work.batch, head, rows], row_tile.at[slot], full.at[slot])

        def step(i: Any, _: None) -> None:
            plgpu.when(i == 0)(lambda: load_keys(k, k_tile, k_full))
            load_queries(i, q, q_tile, nlse, nlse_tile, q_full, q_empty)
            if with_dk:
                plgpu.when(i == 0)(lambda: load_keys(v, v_tile, v_full))
            load_queries(i, d_out, do_tile, delta, delta_tile, do_full, do_empty)

        lax.fori_loop(0, work.steps, step, None)

    def compute(wg: Any, look_up: Any, results: Any, tiles: Any, ds_tile: Any, barriers: Any, ds_barriers: Any) -> None:
        """64 keys: their rows of dK and dV."""
        work = look_up()
        plgpu.set_max_registers(c.compute_registers, action="increase")
        k_tile, v_tile, q_tile, do_tile, nlse_tile, delta_tile = tiles
        k_full, v_full, q_full, q_empty, do_full, do_empty = barriers
        first_key = work.tile * KEYS + wg * ROWS
        by_column = plgpu.Layout.WGMMA.reduce(0)

        def mask(scores: Any, first_query: Any) -> Any:
            """-inf where a key does not exist or, causal, lies behind the query."""
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1)) + first_key
            least = jnp.where(key < work.keys, key - first_query if causal else 0, queries)
            query = plgpu.broadcasted_iota(jnp.int32, (ROWS, queries), 1, layout=plgpu.Layout.WGMMA)
            return jnp.where(query >= least[:, None], scores, -jnp.inf)

        def start_scores(s_acc: Any, step: Any) -> None:
            slot = plgpu.rem(step, stages)
            plgpu.barrier_wait(q_full.at[slot])
            plgpu.wgmma(s_acc, k_tile.at[wg], q_tile.at[slot].transpose((1, 0)))

        def first_query(step: Any) -> Any:
            return work.place(step)[0] * queries

        def probabilities(scores: Any, step: Any, masked_from: Any = None) -> Any:
            """P^T, as the forward pass had it.  masked_from: the first query of the block, where it needs a mask."""
            if masked_from is not None:
                scores = mask(scores, masked_from)
            nlse = plgpu.load(nlse_tile.at[plgpu.rem(step, stages)], layout=by_column)
            return jnp.exp2(scores * factor + nlse[None, :]).astype(dtype)

        def first_probabilities(s_acc: Any) -> Any:
            start_scores(s_acc, 0)
            plgpu.wgmma_wait(0)
            return probabilities(s_acc[...], 0, first_query(0))

        def add(accs: Any, pieces: list[slice], a: Any, b: Any) -> None:
            for acc, some in zip(accs, pieces, strict=True):
                plgpu.wgmma(acc, a, b.at[:, some])

        def score_gradients(dv_acc: Any, step: Any, p: Any) -> Any:
            """dS^T of a block, on its way to the dQ warpgroup too; dV is up to date."""
            slot, ds_slot = plgpu.rem(step, stages), plgpu.rem(step, ds_stages)
            plgpu.barrier_wait(do_full.at[slot])
            if not with_dk:
                add(dv_acc, dv_pieces, p, do_tile.at[slot])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(do_empty.at[slot])
                return None

            def scope(dp_acc: Any) -> Any:
                plgpu.wgmma(dp_acc, v_tile.at[wg], do_tile.at[slot].transpose((1, 0)))
                add(dv_acc, dv_pieces, p, do_tile.at[slot])
                if with_dq:

                    @plgpu.when(step >= ds_stages)
                    def _() -> None:
                        plgpu.barrier_wait(ds_barriers[1].at[ds_slot])

                plgpu.wgmma_wait(0)
                delta = plgpu.load(delta_tile.at[slot], layout=by_column)
                return ((dp_acc[...] - delta[None, :]) * p.astype(jnp.float32)).astype(dtype)

            ds = plgpu.run_scoped(scope, plgpu.ACC((ROWS, queries)))
            if with_dq:
                ds_tile[ds_slot * COMPUTES + wg] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_barriers[0].at[ds_slot])
            plgpu.barrier_arrive(do_empty.at[slot])
            return ds

        def add_keys(dk_acc: Any, step: Any, ds: Any) -> None:
            add(dk_acc, dk_pieces, ds, q_tile.at[plgpu.rem(step, stages)])

        def sweep(dk_acc: Any, dv_acc: Any) -> None:
            def one(masked: bool, i: Any, p: Any) -> Any:
                """All of block i - 1 but its scores, with the scores of block i."""
                masked_from = first_query(i) if masked else None  # a division: while there are registers
                ds = score_gradients(dv_acc, i - 1, p)
                if stages == 1:  # the next Q takes the place of this one
                    add_keys(dk_acc, i - 1, ds)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_empty.at[0])

                def scope(s_acc: Any) -> Any:
                    start_scores(s_acc, i)
                    if stages > 1:
                        add_keys(dk_acc, i - 1, ds)
                    plgpu.wgmma_wait(len(dk_pieces) if stages > 1 else 0)
                    new_p = probabilities(s_acc[...], i, masked_from)
                    if stages > 1:
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(q_empty.at[plgpu.rem(i - 1, stages)])
                    return new_p

                return plgpu.run_scoped(scope, plgpu.ACC((ROWS, queries)))

            plgpu.barrier_wait(k_full)
            p = plgpu.run_scoped(first_probabilities, plgpu.ACC((ROWS, queries)))
            if with_dk:
                plgpu.barrier_wait(v_full)
            begin = jnp.maximum(work.masked(), 1)
            p = lax.fori_loop(1, begin, functools.partial(one, True), p)
            p = lax.fori_loop(begin, work.steps, functools.partial(one, False), p)
            last = work.steps - 1
            ds = score_gradients(dv_acc, last, p)
            add_keys(dk_acc, last, ds)
            plgpu.wgmma_wait(0)

        def write(values: list[tuple[slice, Any]], result: Any, through_tile: bool) -> None:
            """A result in pieces of columns, through this warpgroup's own rows of V, which nobody else reads."""
            own = look_up()  # again: no register holds it through the loop
            rows = result.at[own.batch, plgpu.ds(own.tile * KEYS + wg * ROWS, ROWS), own.kv_head]
            if not through_tile:
                for some, x in values:
                    rows[:, some] = x
                return
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for some, x in values:
                v_tile[wg, :, some] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_tile.at[wg], rows)

        def accumulate(*accs: Any) -> None:
            """accs: pieces of dK, then of dV, as far as they are made."""
            dk_acc, dv_acc = accs[: len(dk_pieces)], accs[len(dk_pieces) :]
            for acc in accs:
                acc[...] = jnp.zeros(acc.shape, jnp.float32)
            plgpu.when(work.steps > 0)(lambda: sweep(dk_acc, dv_acc))
            d_v, d_k = results
            if with_dv:
                write(
                    [(some, acc[...].astype(dtype)) for some, acc in zip(dv_pieces, dv_acc, strict=True)], d_v, with_dk
                )
            if with_dk:
                write(
                    [(some, (acc[...] * scale).astype(dtype)) for some, acc in zip(dk_pieces, dk_acc, strict=True)],
                    d_k,
                    d == dv,
                )
            plgpu.wait_smem_to_gmem(0)

        dk_pieces, dv_pieces = pieces(d) if with_dk else [], pieces(dv) if with_dv else []
        plgpu.run_scoped(accumulate, *[plgpu.ACC((ROWS, some.stop - some.start)) for some in dk_pieces + dv_pieces])

    def make_dq(work: Any, dq_sum: Any, k_tile: Any, ds_tile: Any, dq_tile: Any, k_full: Any, ds_barriers: Any) -> None:
        """dQ = dS K, 64 queries and some columns at a time, added to what the blocks of other keys make of it."""
        plgpu.set_max_registers(c.dq_registers, action="decrease")
        ds_full, ds_empty = ds_barriers
        per_block = queries // ROWS * parts
        plgpu.when(work.steps > 0)(lambda: plgpu.barrier_wait(k_full))

        def step(i: Any, _: None) -> None:
            ds_slot, (block, head) = plgpu.rem(i, ds_stages), work.place(i)
            place = ((work.batch * work.heads + head) * work.all_blocks + block) * per_block
            plgpu.barrier_wait(ds_full.at[ds_slot])

            def part(j: Any, _: None) -> None:
                def product(dq_acc: Any) -> Any:
                    rows, some = (
                        plgpu.ds(plgpu.div(j, parts) * ROWS, ROWS),
                        plgpu.ds(plgpu.rem(j, parts) * columns, columns),
                    )
                    for w in range(COMPUTES):
                        ds = ds_tile.at[ds_slot * COMPUTES + w, :, rows].transpose((1, 0))
                        plgpu.wgmma(dq_acc, ds, k_tile.at[w, :, some])
                    plgpu.wgmma_wait(0)
                    return dq_acc[...]

                values = plgpu.run_scoped(product, plgpu.ACC((ROWS, columns)))

                @plgpu.when(j == per_block - 1)
                def _() -> None:
                    plgpu.barrier_arrive(ds_empty.at[ds_slot])

                slot = plgpu.rem(i * per_block + j, c.dq_stages)
                plgpu.wait_smem_to_gmem(c.dq_stages - 1, wait_read_only=True)
                dq_tile[slot] = plgpu.to_fragments(values)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(dq_tile.at[slot], dq_sum.at[place + j], reduction_op="add")

            lax.fori_loop(0, per_block, part, None)

        lax.fori_loop(0, work.steps, step, None)
        plgpu.wait_smem_to_gmem(0)

    def body(table: Any, q: Any, k: Any, *rest: Any) -> None:
        left = list(rest)

        def take(there: bool) -> Any:
            return left.pop(0) if there else None

        v, d_out, nlse, delta = take(with_dk), take(True), take(True), take(with_dk)
        take(with_dq)  # the sums so far; they are the last output, too
        d_v, d_k, dq_sum = take(with_dv), take(with_dk), take(with_dq)
        k_tile, v_tile, q_tile, do_tile = take(True), take(with_dk), take(True), take(True)
        tiles = k_tile, v_tile, q_tile, do_tile, take(True), take(with_dk)
        k_full = take(True)
        barriers = k_full, take(with_dk), *(take(True) for _ in range(4))
        ds_tile, dq_tile, ds_full, ds_empty = (take(with_dq) for _ in range(4))
        wg, ds_barriers = lax.axis_index("wg"), (ds_full, ds_empty)

        @plgpu.when(wg == memory_wg)
        def _() -> None:
            memory(Work(table, q, k), (q, k, v, d_out, nlse, delta), tiles, barriers)

        @plgpu.when(wg < COMPUTES)
        def _() -> None:
            compute(wg, lambda: Work(table, q, k), (d_v, d_k), tiles, ds_tile, barriers, ds_barriers)

        if with_dq:

            @plgpu.when(wg == dq_wg)
            def _() -> None:
                make_dq(Work(table, q, k), dq_sum, k_tile, ds_tile, dq_tile, k_full, ds_barriers)

    row, keys_full = plgpu.SMEM((stages, queries), jnp.float32), plgpu.Barrier(num_arrivals=COMPUTES)
    full = plgpu.Barrier(num_arrivals=2, num_barriers=stages)  # rows, and a number for each
    rows_full = full if with_dk else plgpu.Barrier(num_barriers=stages)
    empty = plgpu.Barrier(num_arrivals=COMPUTES, num_barriers=stages)
    scratch = [tiles_of(COMPUTES, ROWS, d, dtype)] + [tiles_of(COMPUTES, ROWS, dv, dtype)] * with_dk
    scratch += [tiles_of(stages, queries, d, dtype), tiles_of(stages, queries, dv, dtype), row] + [row] * with_dk
    scratch += [keys_full] * (1 + with_dk) + [full, empty, rows_full, empty]
    results = [jax.ShapeDtypeStruct((b, t, h_kv, dv), dtype)] * with_dv
    results += [jax.ShapeDtypeStruct((b, t, h_kv, d), dtype)] * with_dk
    aliases = None
    if sums is not None:
        scratch += [
            tiles_of(ds_stages * COMPUTES, ROWS, queries, dtype),
            plgpu.SMEM((c.dq_stages, columns * ROWS // LANES, LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=COMPUTES, num_barriers=ds_stages),
            plgpu.Barrier(num_barriers=ds_stages),
        ]
        aliases = {7: len(results)}
        results.append(jax.ShapeDtypeStruct(sums, jnp.float32))
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
