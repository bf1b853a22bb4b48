"""The table of tiles: every tile once, evenly dealt."""

from __future__ import annotations

import numpy as np
import pytest

from mosaic_gpu.kernels.sm90.schedule import TILE_OVERHEAD, tile_table

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
