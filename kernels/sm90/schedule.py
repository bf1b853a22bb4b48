"""Which block computes which attention tiles, in which order: a table made on the host, an input of the kernel.

Tiles go to the block that is free first (list scheduling), causal ones longest first within a group of heads whose keys and
values fit in the L2 cache.  The group is a divisor of the number of heads: a small last group would end on its long tiles.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np

TILE_OVERHEAD = 1.5  # start and end of a tile, in key blocks
L2_SHARE = 32 << 20  # bytes of K and V that stay in L2
NOTICEABLE = 0.997  # a schedule that ends earlier by this factor is better


@functools.lru_cache(maxsize=256)
def tile_table(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_dims: int,
    rows: int,
    block: int,
    diagonal: int | None,
    blocks: int,
) -> np.ndarray:
    """int32 [turn, block, 3]: (batch, head, query tile) of each turn of each of `blocks` thread blocks; tile -1 ends a list.

    head_dims: of K and V together; rows: query rows of a tile; block: keys of a key block; diagonal: the last key that query 0
    sees, None where all see all.
    """
    tiles = -(-queries // rows)
    pairs = batch * heads
    if diagonal is None:  # all cost the same: whoever is free first is the next in turn
        order = np.arange(pairs * tiles, dtype=np.int32)
        blocks_of = order % blocks
        return _table(order // tiles, order % tiles, blocks_of, order // blocks, blocks, heads)
    last = -(-keys // block)
    steps = [min(last, max(-(-((m + 1) * rows + diagonal) // block), 1)) for m in range(tiles)]
    cost = [round(2 * (TILE_OVERHEAD + n)) for n in steps]  # in halves of key blocks
    ideal = max(pairs * sum(cost) / blocks, cost[-1])
    best: tuple[int, np.ndarray, np.ndarray] | None = None
    for group in _groups(pairs, heads // kv_heads, keys * head_dims * 2):
        # (pair, tile), longest first within each group
        order = np.arange(pairs, dtype=np.int32).reshape(-1, 1, group).repeat(tiles, 1).ravel()
        tile = np.tile(np.arange(tiles - 1, -1, -1, dtype=np.int32).repeat(group), pairs // group)
        end, taken = _list_schedule(np.array(cost)[tile], blocks)
        if best is None or end < NOTICEABLE * best[0]:
            best = end, np.stack([order, tile]), taken
        if best[0] * NOTICEABLE <= ideal:
            break
    assert best is not None
    (order, tile), taken = best[1:]
    return _table(order, tile, taken, _turns(taken, blocks), blocks, heads)


def _list_schedule(costs: np.ndarray, blocks: int) -> tuple[int, np.ndarray]:
    """(when the last is done, the block of each) if each in turn goes to the block that is free first, the lowest of them."""
    free = list(range(blocks))  # when and which as one number, time * blocks + block: thousands of them are compared
    taken = []
    for c in (costs * blocks).tolist():
        first = free[0]
        taken.append(first)
        heapq.heapreplace(free, first + c)
    return max(free) // blocks, np.array(taken) % blocks


def _turns(taken: np.ndarray, blocks: int) -> np.ndarray:
    """How many came before on the same block."""
    by_block = np.argsort(taken, kind="stable")
    counts = np.bincount(taken, minlength=blocks)
    turns = np.empty(len(taken), np.int32)
    turns[by_block] = np.arange(len(taken)) - np.repeat(np.cumsum(counts) - counts, counts)
    return turns


def _table(
    pair: np.ndarray, tile: np.ndarray, block: np.ndarray, turn: np.ndarray, blocks: int, heads: int
) -> np.ndarray:
    table = np.full((2 + int(turn.max(initial=-1)), blocks, 3), -1, np.int32)
    table[turn, block] = np.stack([pair // heads, pair % heads, tile], 1)
    table.setflags(write=False)
    return table


def _groups(pairs: int, heads_per_kv: int, bytes_of_head: int) -> list[int]:
    """Numbers of heads to take together."""
    fits = [g for g in range(1, pairs + 1) if pairs % g == 0 and -(-g // heads_per_kv) * bytes_of_head <= L2_SHARE]
    return fits or [1]


@functools.lru_cache(maxsize=256)
def key_tile_table(
    batch: int,
    kv_heads: int,
    keys: int,
    queries: int,
    bytes_of_head: int,
    rows: int,
    behind: int | None,
    blocks: int,
) -> np.ndarray:
    """int32 [block, 3]: (batch, KV head, tile of keys) of each block of the backward kernel, in the order of their start.

    Heads whose bytes (`bytes_of_head`: of the queries of all heads that share one KV head) fit in the L2 cache run side by
    side, causal ones longest first among them: the first keys are seen by most queries.  Where the last such group would end
    on its long tiles, the groups before it are taken in, until that costs nothing.

    rows: keys of a tile; behind: the first query that sees key k is k + behind, None where all see all; blocks: that run at once.
    """
    tiles = -(-keys // rows)
    pairs = [(b, h) for b in range(batch) for h in range(kv_heads)]
    if behind is None:
        order = [(b, h, n) for b, h in pairs for n in range(tiles)]
    else:
        cost = [rows + max(queries - max(n * rows + behind, 0), 0) for n in range(tiles)]
        group = max(_groups(len(pairs), 1, bytes_of_head))
        order = _ending_evenly(pairs, group, cost, blocks)
    table = np.array(order, np.int32).reshape(-1, 3)
    table.setflags(write=False)
    return table


def _ending_evenly(
    pairs: list[tuple[int, int]], group: int, cost: Sequence[int], blocks: int
) -> list[tuple[int, int, int]]:
    """(*pair, tile) by groups of pairs, tile by tile in each; the last group is as large as it takes."""
    ideal = max(len(pairs) * sum(cost) / blocks, max(cost))
    last, best = group, (math.inf, list[tuple[int, int, int]]())
    while True:
        first = len(pairs) - last
        some = [pairs[i : i + group] for i in range(0, first, group)] + [pairs[first:]]
        order = [(b, h, n) for p in some for n in range(len(cost)) for b, h in p]
        end, _ = _list_schedule(np.array([cost[n] for _, _, n in order]), blocks)
        if end < NOTICEABLE * best[0]:
            best = end, order
        if best[0] * NOTICEABLE <= ideal or last == len(pairs):
            return best[1]
        last = min(2 * last, len(pairs))
