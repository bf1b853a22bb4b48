"""Hopper attention forward: compute warpgroups of 64 query rows each and one memory warpgroup; K and V by TMA in stages.

A step of a compute warpgroup puts the scores of the next key block and P V of the current one in flight together, and takes
the next block's softmax (in base 2) under P V; the last P V of a tile runs under the first scores of the next tile, so the
tensor cores are busy throughout.  The warpgroups take turns on them (named barriers), so that one computes exponentials
while another multiplies.  Key blocks are visited from the last to the first: the blocks that
need a mask, for the tail or the diagonal, come first, and the steady loop has none.  The output is rescaled only by those
warps whose maximum has grown by more than `rescale_threshold`.  Each thread block walks a list of tiles (`schedule.py`).
The memory warpgroup is in `attention_loads.py`; a bias, which it loads and the others add, in `attention_bias.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.masks import Causal, Mask, last_key_of_query_0
from mosaic_gpu.kernels.sm90.attention_bias import BiasRing, scratch
from mosaic_gpu.kernels.sm90.attention_config import ONES, ROWS, AttentionConfig
from mosaic_gpu.kernels.sm90.attention_config import default_config as default_config
from mosaic_gpu.kernels.sm90.attention_loads import memory
from mosaic_gpu.kernels.sm90.schedule import tile_table
from mosaic_gpu.kernels.tiles import chunk, columns_of, head_rows, tiles_of, whole_rows
from mosaic_gpu.runtime.device import multiprocessors

LOWEST = -1e30  # where the running maximum starts: finite, so that a block without a visible key leaves no NaN
LOG2_E = math.log2(math.e)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: AttentionConfig,
    causal: Causal,
    scale: float,
    return_lse: bool,
    stable: bool = True,
) -> tuple[jax.Array, ...]:
    """The kernel itself, for arrays that the dispatcher has checked.

    q: (b, s, h, d); k: (b, t, h_kv, d); v: (b, t, h_kv, dv); bias: (b or 1, h or 1, s, t), of their dtype, or None; returns
    (b, s, h, dv) and, if asked for, the LSE, (b, h, s) float32.  stable: a row's maximum is subtracted before the exponentials.
    """
    (b, s, h, d), dv = q.shape, v.shape[3]
    biases = () if bias is None else (whole_rows(bias),)
    config.check(d, dv, bool(biases))
    tiles = b * h * plgpu.cdiv(s, config.rows)
    blocks = min(tiles, multiprocessors()) if config.persistent else tiles
    diagonal = last_key_of_query_0(causal, s, k.shape[1])
    table = tile_table(b, h, k.shape[2], s, k.shape[1], d + dv, config.rows, config.block_kv, diagonal, blocks)
    tail = k.shape[1] % config.block_kv != 0  # of the length, all that the code depends on
    options = config, causal, tail, scale, return_lse, stable, bool(biases)
    return tuple(_kernel(b, s, h, d, dv, blocks, jnp.dtype(q.dtype), *options)(table, q, k, v, *biases))


@functools.lru_cache(maxsize=256)
def _kernel(
    b: int,
    s: int,
    h: int,
    d: int,
    dv: int,
    blocks: int,
    dtype: Any,
    c: AttentionConfig,
    causal: Causal,
    tail: bool,
    scale: float,
    return_lse: bool,
    stable: bool,
    has_bias: bool = False,
) -> Any:
    keys, stages, computes = c.block_kv, c.num_stages, c.compute_warpgroups
    out_type = [jax.ShapeDtypeStruct((b, s, h, dv), dtype)]
    d, dv = columns_of(d), columns_of(dv)  # of tiles
    piece = c.output_columns(d, dv, has_bias)  # columns of the output in shared memory at a time
    bias_slots = c.bias_slots(d, dv) if has_bias else 0
    wide = dv + ONES if c.sum_by_product else dv  # columns of the accumulator
    factor = scale * LOG2_E  # scores in base 2: exp2(factor * (score - max))

    def compute(
        wg: Any,
        table: Any,
        k: Any,
        out: Any,
        lse: Any,
        tiles: Any,
        o_tile: Any,
        barriers: Any,
        turns: Any,
        ones_written: Any,
        ring: BiasRing | None,
    ) -> None:
        """64 query rows of every tile: online softmax over the key blocks."""
        plgpu.set_max_registers(c.compute_registers, action="increase")
        q_tile, k_tile, v_tile = tiles
        q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
        seen = Mask(causal, out, k, keys, tail)

        def take_turn() -> None:
            if c.take_turns:
                plgpu.named_barrier_sync(turns.at[wg])

        def pass_turn() -> None:
            if c.take_turns:
                plgpu.named_barrier_arrive(turns.at[plgpu.rem(wg + 1, computes)])

        def key_blocks(tile: Any) -> Any:
            return seen.blocks_before((tile + 1) * c.rows)

        def read_scores(s_acc: Any, before: Any, i: Any = 0) -> Any:
            """With the i-th key block after so many, and its bias."""
            return s_acc[...] if ring is None else ring.add(s_acc[...], scale, wg, before + i)

        def mask(scores: Any, key_block: Any, tile: Any) -> Any:
            return seen.apply(scores, key_block, tile * c.rows + wg * ROWS, plgpu.Layout.WGMMA)

        def write_ones() -> None:
            """The columns beside V that sum the rows of P, by the first warpgroup for all."""

            @plgpu.when(wg == 0)
            def _() -> None:
                ones = plgpu.layout_cast(jnp.ones((keys, ONES), dtype), plgpu.Layout.WG_STRIDED)
                for slot in range(stages):
                    v_tile[slot, :, dv:wide] = ones
                plgpu.commit_smem()
                plgpu.barrier_arrive(ones_written)

            plgpu.barrier_wait(ones_written)

        def fold_columns(p: Any) -> Any:
            """Sums of every eighth column: no thread needs another's values, which one reduction per tile adds up."""
            return functools.reduce(jnp.add, (lax.slice_in_dim(p, i, i + 8, axis=1) for i in range(0, keys, 8)))

        def softmax(scores: Any, top: Any, sums: Any) -> Any:
            """(exp2 of the shifted scores, new maximum, new sums, factor by which what was summed so far shrinks).

            sums: of eight columns, or nothing where the product makes them.  Unstable: no shift, maximum nothing, factor None.
            """
            if not stable:
                p = jnp.exp2(scores * factor)
                return p, zero, sums if c.sum_by_product else sums + fold_columns(p), None
            highest = jnp.max(scores, axis=1)
            if c.rescale_threshold:  # an old maximum that is not much too small will do: P just grows beyond 1
                new_top = jnp.where((highest - top) * factor > c.rescale_threshold, highest, top)
            else:
                new_top = jnp.maximum(top, highest)
            # Subtracted before it is scaled: as one FMA, LOWEST * factor - LOWEST * factor would be its rounding error.
            shrink = jnp.exp2((top - new_top) * factor)
            if has_bias:  # of -1e9, say, whose product with the factor rounds by more than an exponent takes
                p = jnp.exp2((scores - new_top[:, None]) * factor)
            else:
                p = jnp.exp2(scores * factor - (new_top * factor)[:, None])
            if not c.sum_by_product:
                sums = sums * shrink[:, None] + fold_columns(p)
            return p, new_top, sums, shrink

        def rescale(acc: Any, shrink: Any) -> None:
            def multiply() -> None:
                acc[...] = acc[...] * shrink[:, None]

            if stable and c.rescale_threshold:
                plgpu.when_any_in_warp(shrink != 1.0)(multiply)
            elif stable:
                multiply()

        def take_q() -> Any:
            """This warpgroup's rows of Q: where products read them from."""
            plgpu.barrier_wait(q_full.at[wg])
            if not c.q_in_registers:
                return q_tile.at[wg]
            own = plgpu.load(q_tile.at[wg], layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(q_empty.at[wg])
            return own

        def start_scores(s_acc: Any, own_q: Any, count: Any) -> None:
            """Q K^T with the count-th key block that was loaded."""
            slot = plgpu.rem(count, stages)
            plgpu.barrier_wait(k_full.at[slot])
            take_turn()
            plgpu.wgmma(s_acc, own_q, k_tile.at[slot].transpose((1, 0)))

        def end_scores(count: Any, last_of_tile: Any, others: int) -> None:
            """Wait for the scores, with `others` products behind them in flight; K, and after its last use Q, is free."""
            plgpu.wgmma_wait(others)
            plgpu.barrier_arrive(k_empty.at[plgpu.rem(count, stages)])
            if not c.q_in_registers:
                plgpu.when(last_of_tile)(lambda: plgpu.barrier_arrive(q_empty.at[wg]))

        def start_values(acc: Any, p: Any, count: Any) -> None:
            """acc += P V with the count-th block."""
            slot = plgpu.rem(count, stages)
            plgpu.barrier_wait(v_full.at[slot])
            plgpu.wgmma(acc, p, v_tile.at[slot, :, plgpu.ds(0, wide)])

        def end_values(count: Any, ahead: Any = None, others: int = 0) -> None:
            """Wait for P V, and before that for the first of `ahead`, so that the softmax runs under it; V is free."""
            plgpu.wgmma_wait(others, after=ahead, first=ahead is not None)
            plgpu.barrier_arrive(v_empty.at[plgpu.rem(count, stages)])

        def first_softmax(scores: Any, tile: Any, needed: Any) -> Any:
            """P, maximum and sums after the first visited block of a tile, which has the tail and the diagonal."""
            sums = zero if c.sum_by_product else jnp.zeros((ROWS, 8), jnp.float32)
            start = jnp.full((ROWS,), LOWEST, jnp.float32) if stable else zero, sums
            p, top, sums, _ = softmax(mask(scores, needed - 1, tile), *start)
            return p, top, sums

        def write_out(acc: Any, turn: Any, tile: Any, top: Any, total: Any) -> None:
            """The end of a tile: normalise and store.  total: the sums of its rows, None if they are in the accumulator."""
            batch, head = table[turn, block, 0], table[turn, block, 1]
            rows = plgpu.ds(tile * c.rows + wg * ROWS, ROWS)
            values = acc[...]
            if total is None:
                total = jnp.max(lax.slice_in_dim(values, dv, wide, axis=1), axis=1)  # of equals
                values = lax.slice_in_dim(values, 0, dv, axis=1)
            o = (values * jnp.where(total > 0, 1 / total, 0.0)[:, None]).astype(dtype)
            if not piece:
                head_rows(out, batch, rows, head, dv)[...] = o
            for first in range(0, dv, piece) if piece else ():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was in the tile before has left
                o_tile[wg] = lax.slice_in_dim(o, first, first + piece, axis=1)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    o_tile.at[wg], head_rows(out, batch, rows, head, dv).at[:, plgpu.ds(first, piece)]
                )
            if lse is not None:
                lse[batch, head, rows] = top * scale + jnp.log(total) if stable else jnp.log(total)

        def attend(acc: Any) -> None:
            def first(s_acc: Any) -> Any:
                own_q = take_q()
                needed = key_blocks(first_tile)
                start_scores(s_acc, own_q, 0)
                pass_turn()
                end_scores(0, needed == 1, 0)
                p, top, sums = first_softmax(read_scores(s_acc, 0), first_tile, needed)
                return carried_q(own_q), p.astype(dtype), top, sums

            def steps(tile: Any, needed: Any, before: Any, own_q: Any, carry: Any) -> Any:
                """All blocks of a tile after its first; its last P V is left to do."""

                def step(masked: bool, i: Any, carry: Any) -> Any:
                    p, top, sums = carry

                    def scope(s_acc: Any) -> Any:
                        start_scores(s_acc, own_q, before + i)
                        start_values(acc, p, before + i - 1)
                        pass_turn()
                        end_scores(before + i, i == needed - 1, 1)
                        scores = read_scores(s_acc, before, i)
                        if masked:
                            scores = mask(scores, needed - 1 - i, tile)
                        new_p, new_top, new_sums, shrink = softmax(scores, top, sums)
                        end_values(before + i - 1, new_top if stable else new_p)
                        packed = new_p.astype(dtype)  # in the shade of the exponentials, ahead of the vote's branch
                        rescale(acc, shrink)
                        return packed, new_top, new_sums

                    return plgpu.run_scoped(scope, plgpu.ACC((ROWS, keys)))

                begin: Any = 1
                # Where the diagonal can cross more blocks than the first:
                if causal and (keys % c.rows or causal is not True):
                    begin = jnp.maximum(needed - seen.whole_blocks(tile * c.rows), 1)
                    carry = lax.fori_loop(1, begin, functools.partial(step, True), carry)
                return lax.fori_loop(begin, needed, functools.partial(step, False), carry)

            def one_tile(carry: Any) -> Any:
                turn, tile, before, old_q, *state = carry
                needed = key_blocks(tile)
                p, top, sums = steps(tile, needed, before, old_q if c.q_in_registers else q_tile.at[wg], tuple(state))
                total = None if c.sum_by_product else jnp.sum(sums, axis=1)
                next_tile, done = table[turn + 1, block, 2], before + needed
                start_values(acc, p, done - 1)

                def go_on() -> Any:
                    """The last P V of this tile, under the wait for the next Q and its first scores."""
                    own_q = take_q()
                    next_needed = key_blocks(next_tile)

                    def scope(s_acc: Any) -> Any:
                        start_scores(s_acc, own_q, done)
                        pass_turn()
                        end_values(done - 1, others=1)
                        end_scores(done, next_needed == 1, 0)
                        new_p, new_top, new_sums = first_softmax(read_scores(s_acc, done), next_tile, next_needed)
                        return new_p.astype(dtype), new_top, new_sums

                    return carried_q(own_q), *plgpu.run_scoped(scope, plgpu.ACC((ROWS, keys)))

                def end() -> Any:
                    end_values(done - 1)
                    return old_q, p, top, sums

                state = lax.cond(next_tile >= 0, go_on, end)
                write_out(acc, turn, tile, top, total)
                acc[...] = jnp.zeros((ROWS, wide), jnp.float32)
                return turn + 1, next_tile, done, *state

            acc[...] = jnp.zeros((ROWS, wide), jnp.float32)
            state = plgpu.run_scoped(first, plgpu.ACC((ROWS, keys)))
            lax.while_loop(lambda carry: carry[1] >= 0, one_tile, (zero, first_tile, zero, *state))

        def carried_q(own_q: Any) -> Any:
            """What a loop carries of Q: its registers, or nothing."""
            return own_q if c.q_in_registers else zero

        zero, block = jnp.int32(0), lax.axis_index("block")
        first_tile = table[0, block, 2]
        if c.take_turns:  # warpgroup 0 goes first

            @plgpu.when(wg == computes - 1)
            def _() -> None:
                plgpu.named_barrier_arrive(turns.at[0])

        if c.sum_by_product:
            write_ones()
        plgpu.run_scoped(attend, plgpu.ACC((ROWS, wide)))
        plgpu.wait_smem_to_gmem(0)

    def with_bias(table: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, *rest: Any) -> None:
        body(table, q, k, v, out, *rest, bias=bias)

    def body(table: Any, q: Any, k: Any, v: Any, out: Any, *rest: Any, bias: Any = None) -> None:
        lse, rest = (rest[0], rest[1:]) if return_lse else (None, rest)
        tiles, barriers, turns, *rest = rest[:3], rest[3:9], rest[9], *rest[10:]
        o_tile, rest = (rest[0], rest[1:]) if piece else (None, rest)
        ones_written, rest = (rest[0], rest[1:]) if c.sum_by_product else (None, rest)
        ring = BiasRing(c, bias_slots, bias, *rest) if has_bias else None
        wg = lax.axis_index("wg")

        @plgpu.when(wg == computes)
        def _() -> None:
            memory(c, (d, dv), causal, table, (q, k, v), tiles, barriers, ring)

        @plgpu.when(wg < computes)
        def _() -> None:
            compute(wg, table, k, out, lse, tiles, o_tile, barriers, turns, ones_written, ring)

    full, empty = plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_arrivals=computes, num_barriers=stages)
    q_type, k_type = tiles_of(computes, ROWS, d, dtype), tiles_of(stages, keys, d, dtype)
    v_type = tiles_of(stages, keys, dv, dtype, chunk(dv) if c.sum_by_product else 0)
    q_full, q_empty = plgpu.Barrier(num_barriers=computes), plgpu.Barrier(num_barriers=computes)
    turns = plgpu.NamedBarrier(num_warpgroups=2, num_barriers=computes)
    return plgpu.kernel(
        with_bias if has_bias else body,
        out_type + ([jax.ShapeDtypeStruct((b, h, s), jnp.float32)] if return_lse else []),
        scratch_types=[q_type, k_type, v_type, q_full, q_empty, full, empty, full, empty, turns]
        + ([tiles_of(computes, ROWS, piece, dtype)] if piece else [])
        + ([plgpu.Barrier()] if c.sum_by_product else [])
        + (scratch(c, bias_slots, dtype) if has_bias else []),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=computes + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_90a", approx_math=True, strict=True),
        name="attention_sm90",
    )
