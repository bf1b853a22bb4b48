"""The warp of the Blackwell attention kernel that issues every product, for one block or a pair."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.sm100.attention_config import BUFFERS, AttentionConfig


def buffer(c: AttentionConfig, i: Any, count: Any) -> Any:
    """Where the scores of query tile i with the count-th key block are."""
    return i if c.query_tiles == BUFFERS else plgpu.rem(count, BUFFERS)


def multiply(
    c: AttentionConfig, each_tile: Any, operands: Any, scores: Any, probabilities: Any, out: Any, bars: Any
) -> None:
    """Every product: the first scores of a tile, then block by block the next scores and P V.

    each_tile(work): calls work(turn, where, tile, key blocks before it, its key blocks) for every tile; operands: Q, K and V in
    shared memory; scores, probabilities(buffer, columns), out: in tensor memory.
    """
    q_tile, k_tile, v_tile = operands
    tiles, slots, parts = c.query_tiles, c.kv_slots, c.p_parts
    collective: Any = dict(collective_axis="pair") if c.pair else {}

    def score(i: int, count: Any, last_of_tile: Any) -> None:
        """Scores of query tile i and the count-th key block; the last tile's are the last use of the block."""
        slot, at = plgpu.rem(count, slots), buffer(c, i, count)
        k_block = k_tile.at[slot].transpose((1, 0))
        plgpu.tcgen05_mma(scores.at[at], q_tile.at[i], k_block, bars["s_full"].at[at], accumulate=False, **collective)
        if i == tiles - 1:
            plgpu.tcgen05_commit_arrive(bars["k_empty"].at[slot], **collective)
        plgpu.when(last_of_tile)(lambda: plgpu.tcgen05_commit_arrive(bars["q_empty"].at[i], **collective))

    def value(i: int, count: Any, first: Any) -> None:
        """out += P V of query tile i, part by part, once the output has been rescaled."""
        slot, at, size = plgpu.rem(count, slots), buffer(c, i, count), c.tile_k // parts
        plgpu.barrier_wait(bars["o_ready"].at[i])
        for part in range(parts):
            some = plgpu.ds(part * size, size)
            plgpu.barrier_wait(bars["p_full"].at[at * parts + part])
            done = bars["pv_done"].at[i] if part == parts - 1 else None
            old: Any = jnp.logical_not(first) if part == 0 else True
            plgpu.tcgen05_mma(
                out.at[i], probabilities(at, some), v_tile.at[slot, some], done, accumulate=old, **collective
            )
        if i == tiles - 1:
            plgpu.tcgen05_commit_arrive(bars["v_empty"].at[slot], **collective)

    def wait_for(x: str, count: Any) -> None:
        plgpu.barrier_wait(bars[x].at[plgpu.rem(count, slots)])

    def work(turn: Any, where: Any, tile: Any, before: Any, needed: Any) -> None:
        wait_for("k_full", before)
        for i in range(tiles):
            plgpu.barrier_wait(bars["q_full"].at[i])
            score(i, before, needed == 1)

        def step(j: Any, _: None) -> None:
            count = before + j
            if tiles == BUFFERS:
                wait_for("v_full", count)
                wait_for("k_full", count + 1)
                for i in range(tiles):
                    value(i, count, j == 0)
                    plgpu.barrier_wait(bars["pv_done"].at[i])  # the next scores lie over the probabilities
                    score(i, count + 1, j + 2 == needed)
            else:  # the next scores lie over the probabilities of the block before
                wait_for("k_full", count + 1)
                plgpu.when(j > 0)(lambda: plgpu.barrier_wait(bars["pv_done"].at[0]))
                score(0, count + 1, j + 2 == needed)
                wait_for("v_full", count)
                value(0, count, j == 0)

        lax.fori_loop(0, needed - 1, step, None)
        last = before + needed - 1
        wait_for("v_full", last)
        if tiles < BUFFERS:
            plgpu.when(needed > 1)(lambda: plgpu.barrier_wait(bars["pv_done"].at[0]))
        for i in range(tiles):
            value(i, last, needed == 1)
        for i in range(tiles):
            plgpu.barrier_wait(bars["pv_done"].at[i])

    each_tile(work)
