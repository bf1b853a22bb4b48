"""The memory warpgroup of the Hopper attention kernel: one thread issues every copy, of Q, K, V and, if there is one, a bias."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.masks import Causal, Mask
from mosaic_gpu.kernels.sm90.attention_bias import BiasRing
from mosaic_gpu.kernels.sm90.attention_config import ROWS, AttentionConfig
from mosaic_gpu.kernels.tiles import head_rows


def memory(
    c: AttentionConfig,
    columns: tuple[int, int],
    causal: Causal,
    table: Any,
    arrays: Any,
    tiles: Any,
    barriers: Any,
    ring: BiasRing | None,
) -> None:
    """Every tile of this block, key block by key block, each when its slot is free.

    columns: of a tile of Q and K, and of V; arrays, tiles: Q, K and V in global and in shared memory; barriers: full and empty of
    each of them; ring: of a bias, or None.
    """
    plgpu.set_max_registers(c.memory_registers, action="decrease")
    (d, dv), (q, k, v), (q_tile, k_tile, v_tile) = columns, arrays, tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    keys, stages = c.block_kv, c.num_stages
    heads_per_kv = plgpu.div(plgpu.dim_size(q, 2), plgpu.dim_size(k, 2))

    seen, block = Mask(causal, q, k, keys), lax.axis_index("block")

    def fill(carry: Any) -> Any:
        turn, tile, before = carry
        batch, head, needed = table[turn, block, 0], table[turn, block, 1], seen.blocks_before((tile + 1) * c.rows)
        kv_head = plgpu.div(head, heads_per_kv)

        def refill(x: Any, x_tile: Any, columns: int, full: Any, empty: Any, i: Any) -> None:
            slot = plgpu.rem(before + i, stages)
            some_keys = plgpu.ds((needed - 1 - i) * keys, keys)

            @plgpu.when(before + i >= stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            place = x_tile.at[slot, :, plgpu.ds(0, columns)]
            plgpu.copy_gmem_to_smem(head_rows(x, batch, some_keys, kv_head, columns), place, full.at[slot])

        def load_k(i: Any) -> None:
            refill(k, k_tile, d, k_full, k_empty, i)

        def load_v(i: Any) -> None:
            refill(v, v_tile, dv, v_full, v_empty, i)

        def load_bias(i: Any) -> None:
            if ring is not None:
                ring.refill(batch, head, tile * c.rows, needed - 1 - i, before + i)

        load_k(0)
        for w in range(c.compute_warpgroups):

            @plgpu.when(turn > 0)
            def _(w: int = w) -> None:
                plgpu.barrier_wait(q_empty.at[w])

            rows = plgpu.ds(tile * c.rows + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(head_rows(q, batch, rows, head, d), q_tile.at[w], q_full.at[w])
        load_bias(0)

        def step(i: Any, _: None) -> None:
            load_k(i)
            load_v(i - 1)  # a block's V is needed, and its slot is free, a step later than its K
            load_bias(i)  # last: its slot may only be free when the scores before have been read

        lax.fori_loop(1, needed, step, None)
        load_v(needed - 1)
        return turn + 1, table[turn + 1, block, 2], before + needed

    zero = jnp.int32(0)
    lax.while_loop(lambda carry: carry[1] >= 0, fill, (zero, table[0, block, 2], zero))
