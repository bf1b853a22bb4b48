"""The table of tiles: every tile once, evenly dealt."""

from __future__ import annotations

import numpy as np
import pytest

from mosaic_gpu.kernels.sm90.schedule import TILE_OVERHEAD, _list_schedule, key_tile_table, tile_table

CASES = [
    (4, 16, 16, 4096, 4096, 128, 128, 132),
    (1, 32, 8, 8192, 8192, 128, 128, 132),
    (32, 32, 32, 512, 512, 192, 128, 132),
    (2, 3, 1, 300, 411, 192, 128, 7),
    (1, 1, 1, 1, 1, 128, 128, 1),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("b, h, h_kv, s, t, rows, keys, blocks", CASES)
def test_every_tile_once_and_evenly(b, h, h_kv, s, t, rows, keys, blocks, causal):
    table = tile_table(b, h, h_kv, s, t, 256, rows, keys, 0 if causal else None, blocks)
    tiles = -(-s // rows)
    assert (table[-1, :, 2] == -1).all()
    listed = table[table[..., 2] >= 0]
    wanted = [(i, j, m) for i in range(b) for j in range(h) for m in range(tiles)]
    assert sorted(map(tuple, listed.tolist())) == wanted
    assert all((np.diff((column >= 0).astype(int)) <= 0).all() for column in table[..., 2].T), "-1 ends a list"
    steps = [min(-(-t // keys), -(-(m + 1) * rows // keys)) if causal else -(-t // keys) for m in range(tiles)]
    work = np.array([sum(TILE_OVERHEAD + steps[m] for m in column if m >= 0) for column in table[..., 2].T])
    longest = TILE_OVERHEAD + max(steps)
    assert work.max() - work.min() <= longest, "nobody waits for longer than a tile"


KEY_CASES = [  # batch, KV heads, heads for each, keys, queries, rows of a tile
    (4, 16, 1, 4096, 4096, 128),
    (1, 16, 1, 16384, 16384, 128),
    (2, 8, 4, 8192, 8192, 128),  # one KV head fills the cache, and its longest tile takes a quarter of the time
    (2, 3, 2, 411, 300, 64),
    (1, 1, 1, 1, 1, 128),
]


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("b, h_kv, group, t, s, rows", KEY_CASES)
def test_key_tiles_are_all_there_and_end_evenly(b, h_kv, group, t, s, rows, causal):
    """Started in the order of the table, each where a block is free first, they end within 1 % of the even share of work."""
    behind = {None: None, "top_left": 0, "bottom_right": s - t}[causal]
    table = key_tile_table(b, h_kv, t, s, group * s * 1024, rows, behind, 132)
    tiles = -(-t // rows)
    assert sorted(map(tuple, table.tolist())) == [
        (i, j, n) for i in range(b) for j in range(h_kv) for n in range(tiles)
    ]
    if behind is None:
        return
    cost = [rows + max(s - max(n * rows + behind, 0), 0) for n in range(tiles)]
    end, _ = _list_schedule(np.array(cost)[table[:, 2]], 132)
    assert end <= 1.01 * max(sum(cost) * b * h_kv / 132, max(cost))


def test_key_tiles_of_heads_that_share_the_cache_stay_together():
    """16 heads of 16.8 MB: two at a time but at the end, each pair's longest tiles first."""
    table = key_tile_table(1, 16, 16384, 16384, 16384 * 1024, 128, 0, 132)
    assert table[:256, 1].max() == 1 and (np.diff(table[:256, 2]) >= 0).all()
