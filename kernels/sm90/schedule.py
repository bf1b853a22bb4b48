"""Which block computes which attention tiles, in which order: a table made on the host, an input of the kernel.

Tiles go to the block that is free first (list scheduling), causal ones longest first within a group of heads whose keys and
values fit in the L2 cache.  The group is a divisor of the number of heads: a small last group would end on its long tiles.
"""

from __future__ import annotations

import functools
import heapq

import numpy as np

TILE_OVERHEAD = 1.5  # start and end of a tile, in key blocks
L2_SHARE = 32 << 20  # bytes of K and V that stay in L2


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
    causal: bool,
    blocks: int,
) -> np.ndarray:
    """int32 [turn, block, 3]: (batch, head, query tile) of each turn of each of `blocks` thread blocks; tile -1 ends a list.

    head_dims: of K and V together; rows: query rows of a tile; block: keys of a key block.
    """
    tiles = -(-queries // rows)
    all_blocks = -(-keys // block)
    cost = [
        TILE_OVERHEAD + (min(all_blocks, -(-(m + 1) * rows // block)) if causal else all_blocks) for m in range(tiles)
    ]
    pairs = [(b, h) for b in range(batch) for h in range(heads)]
    best: tuple[float, list[list[tuple[int, int, int]]]] | None = None
    for group in _groups(len(pairs), heads // kv_heads, keys * head_dims * 2, causal):
        free = [(0.0, i) for i in range(blocks)]
        lists: list[list[tuple[int, int, int]]] = [[] for _ in free]
        for first in range(0, len(pairs), group):
            some = pairs[first : first + group]
            order = (
                [(m, p) for m in reversed(range(tiles)) for p in some]
                if causal
                else [(m, p) for p in some for m in range(tiles)]
            )
            for m, (b, h) in order:
                time, i = heapq.heappop(free)
                lists[i].append((b, h, m))
                heapq.heappush(free, (time + cost[m], i))
        end = max(free)[0]
        if best is None or end < 0.997 * best[0]:
            best = end, lists
    assert best is not None
    table = np.full((1 + max(map(len, best[1])), blocks, 3), -1, np.int32)
    for i, tile_list in enumerate(best[1]):
        for turn, tile in enumerate(tile_list):
            table[turn, i] = tile
    table.setflags(write=False)
    return table


def _groups(pairs: int, heads_per_kv: int, bytes_of_head: int, causal: bool) -> list[int]:
    """Numbers of heads to take together."""
    if not causal:
        return [1]
    fits = [g for g in range(1, pairs + 1) if pairs % g == 0 and -(-g // heads_per_kv) * bytes_of_head <= L2_SHARE]
    return fits or [1]


@functools.lru_cache(maxsize=256)
def key_tile_table(batch: int, kv_heads: int, keys: int, bytes_of_head: int, rows: int, causal: bool) -> np.ndarray:
    """int32 [block, 3]: (batch, KV head, tile of keys) of each block of the backward kernel.

    Heads whose bytes (`bytes_of_head`: of the queries of all heads that share one KV head) fit in the L2 cache run side by
    side, causal ones longest first among them: the first keys are seen by most queries.  rows: keys of a tile.
    """
    tiles = -(-keys // rows)
    pairs = [(b, h) for b in range(batch) for h in range(kv_heads)]
    group = max(_groups(len(pairs), 1, bytes_of_head, causal))
    some = [pairs[i : i + group] for i in range(0, len(pairs), group)]
    table = np.array([(b, h, n) for p in some for n in range(tiles) for b, h in p], np.int32).reshape(-1, 3)
    table.setflags(write=False)
    return table
