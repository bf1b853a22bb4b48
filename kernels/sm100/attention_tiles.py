"""Which tiles a block of the Blackwell attention kernel works on: of a list, or places of the grid handed out as it runs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.masks import Mask
from mosaic_gpu.kernels.sm100.attention_config import AttentionConfig

ANSWERS = 2  # of cluster launch control: the next place is asked for while this one is worked on


def walk(c: AttentionConfig, seen: Mask, table: Any, answers: Any, work: Any) -> None:
    """work(turn, where, tile, key blocks before this tile, its key blocks) for every tile of this block; where(): batch and head.

    table: int32 [turn, block, (batch, head, tile)]; with c.dynamic one turn, its columns the places of the grid.
    answers: with c.dynamic (answers, barriers of those that have come, barriers of those that all have read).
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
        turn, _, place, before = carry
        before = do(turn, 0, place, table[0, place, 2], before)
        found, place = read_answer(turn, answers)
        plgpu.barrier_arrive(answers[2].at[plgpu.rem(turn, ANSWERS)])
        return turn + 1, found, place, before

    if c.dynamic:
        lax.while_loop(lambda carry: carry[1], handed_out, (zero, jnp.bool_(True), block, zero))
    else:
        lax.while_loop(lambda carry: carry[1] >= 0, listed, (zero, table[0, block, 2], zero))


def read_answer(turn: Any, answers: Any) -> Any:
    """(whether there is another place, which) after a turn."""
    results, come, _ = answers
    slot = plgpu.rem(turn, ANSWERS)
    plgpu.barrier_wait(come.at[slot])
    (place,), found = plgpu.query_cluster_cancel(results.at[slot], "block")
    return found, place


def ask_ahead(answers: Any) -> None:
    """The warp that asks for the next place while all others work on this one."""
    results, come, read = answers

    def step(carry: Any) -> Any:
        turn, _ = carry
        slot = plgpu.rem(turn, ANSWERS)
        plgpu.when(turn >= ANSWERS)(lambda: plgpu.barrier_wait(read.at[slot]))
        plgpu.try_cluster_cancel(results.at[slot], come.at[slot])
        found, _ = read_answer(turn, answers)
        return turn + 1, found

    lax.while_loop(lambda carry: carry[1], step, (jnp.int32(0), jnp.bool_(True)))
