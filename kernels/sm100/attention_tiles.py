"""Which tiles a block of the Blackwell attention kernel works on: of a list, or places of the grid handed out as it runs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.masks import Mask
from mosaic_gpu.kernels.sm100.attention_config import ROWS, AttentionConfig

ANSWERS = 2  # of cluster launch control: the next place is asked for while this one is worked on


def rows_of(c: AttentionConfig, tile: Any, i: Any) -> Any:
    """The first row of query tile i: of a pair, of both blocks."""
    return tile * c.rows + i * (ROWS * c.blocks)


def own_rows(c: AttentionConfig, tile: Any, i: Any) -> Any:
    """The first row of this block's query tile i."""
    return rows_of(c, tile, i) + lax.axis_index("pair") * ROWS if c.pair else rows_of(c, tile, i)


def walk(c: AttentionConfig, seen: Mask, table: Any, places: Any, work: Any) -> None:
    """work(turn, where, tile, key blocks before this tile, its key blocks) for every tile of this block; where(): batch and head.

    table: int32 [turn, block, (batch, head, tile)]; with c.dynamic one turn, its columns the places of the grid.
    places: with c.dynamic (places that were handed out, barriers of those that are there, barriers of those that all have read).
    """
    block, zero = lax.axis_index("block"), jnp.int32(0)

    def do(turn: Any, row: Any, column: Any, tile: Any, before: Any) -> Any:
        """The key blocks done when this tile is."""
        needed = seen.blocks_before((tile + 1) * c.rows)
        work(turn, lambda: (table[row, column, 0], table[row, column, 1]), tile, before, needed)
        return before + needed

    def listed(carry: Any) -> Any:
        turn, tile, before = carry
        before = do(turn, turn, block, tile, before)
        return turn + 1, table[turn + 1, block, 2], before

    def handed_out(carry: Any) -> Any:
        turn, place, before = carry
        before = do(turn, 0, place, table[0, place, 2], before)
        place_of, there, read = places
        slot = plgpu.rem(turn, ANSWERS)
        plgpu.barrier_wait(there.at[slot])
        place = place_of[slot]
        plgpu.barrier_arrive(read.at[slot])
        return turn + 1, place, before

    if c.dynamic:
        lax.while_loop(lambda carry: carry[1] >= 0, handed_out, (zero, block, zero))
    else:
        lax.while_loop(lambda carry: carry[1] >= 0, listed, (zero, table[0, block, 2], zero))


def ask_ahead(answers: Any, places: Any) -> None:
    """The warp that asks for the next place while all others work on this one, and tells them of it: a number, or -1.

    Of a pair there is one in each block: the answer goes to both, and only these two warps must have read it before the next one
    is asked for.  Were it read by all, each of their arrivals would wait for what they have under way in the whole cluster.
    answers: (of launch control, barriers of those that have come, barriers of those that both blocks have read).
    """
    results, come, free = answers
    place_of, there, read = places

    def step(carry: Any) -> Any:
        turn, _ = carry
        slot = plgpu.rem(turn, ANSWERS)
        plgpu.when(turn >= ANSWERS)(lambda: plgpu.barrier_wait(free.at[slot]))
        plgpu.try_cluster_cancel(results.at[slot], come.at[slot])
        plgpu.barrier_wait(come.at[slot])
        (place,), found = plgpu.query_cluster_cancel(results.at[slot], "block")
        plgpu.barrier_arrive(free.at[slot])
        plgpu.when(turn >= ANSWERS)(lambda: plgpu.barrier_wait(read.at[slot]))
        place_of[slot] = jnp.where(found, place, jnp.int32(-1))
        plgpu.barrier_arrive(there.at[slot])
        return turn + 1, found

    lax.while_loop(lambda carry: carry[1], step, (jnp.int32(0), jnp.bool_(True)))
