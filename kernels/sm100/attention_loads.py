"""The warps of the Blackwell attention kernel that load: one Q and K, one V, one a bias."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.sm100.attention_config import ROWS, AttentionConfig
from mosaic_gpu.kernels.sm100.attention_tiles import own_rows, rows_of
from mosaic_gpu.kernels.tiles import head_rows


@dataclasses.dataclass(frozen=True)
class Loads:
    """c: the config; d, dv: columns of a tile of Q and K, and of V; each_tile: `attention_tiles.walk` with all but its work;
    bars: the kernel's barriers."""

    c: AttentionConfig
    d: int
    dv: int
    each_tile: Any
    bars: Any

    def q_and_k(self, q: Any, k: Any, q_tile: Any, k_tile: Any) -> None:
        """Of a pair each block loads half of the rows of both."""
        c, bars = self.c, self.bars

        def work(turn: Any, where: Any, tile: Any, before: Any, needed: Any) -> None:
            batch, head = where()
            kv_head = _kv_head_of(head, q, k)

            def load_k(i: Any) -> None:
                ring = k_tile, bars["k_full"], bars["k_empty"]
                self._refill(k, batch, kv_head, needed - 1 - i, before + i, ring, self.d, 0)

            for i in range(c.query_tiles):
                plgpu.when(turn > 0)(lambda i=i: plgpu.barrier_wait(bars["q_empty"].at[i]))
                rows = plgpu.ds(rows_of(c, tile, i), ROWS * c.blocks)
                source = head_rows(q, batch, rows, head, self.d)
                plgpu.copy_gmem_to_smem(source, q_tile.at[i], bars["q_full"].at[i], **self._halves(0))
                if i == 0:
                    load_k(0)  # what the first product needs comes first
            lax.fori_loop(1, needed, lambda i, _: load_k(i), None)

        self.each_tile(work)

    def v(self, q: Any, k: Any, v: Any, v_tile: Any) -> None:
        """Of a pair each block loads half of the columns."""

        def work(turn: Any, where: Any, tile: Any, before: Any, needed: Any) -> None:
            batch, head = where()
            kv_head = _kv_head_of(head, q, k)

            def step(i: Any, _: None) -> None:
                ring = v_tile, self.bars["v_full"], self.bars["v_empty"]
                self._refill(v, batch, kv_head, needed - 1 - i, before + i, ring, self.dv, 1)

            lax.fori_loop(0, needed, step, None)

        self.each_tile(work)

    def bias(self, bias: Any, bias_tile: Any) -> None:
        """A block of keys for each query tile of this block, the softmax's of the block before being free.

        bias: (b, h, s, t); batch or heads of extent 1 are those of all.
        """
        c, bars = self.c, self.bars

        def work(turn: Any, where: Any, tile: Any, before: Any, needed: Any) -> None:
            own = (jnp.minimum(x, plgpu.dim_size(bias, axis) - 1) for axis, x in enumerate(where()))
            batch, head = own

            def step(j: Any, _: None) -> None:
                some_keys = plgpu.ds((needed - 1 - j) * c.tile_k, c.tile_k)
                for i in range(c.query_tiles):
                    plgpu.when(before + j > 0)(lambda i=i: plgpu.barrier_wait(bars["b_empty"].at[i]))
                    source = bias.at[batch, head, plgpu.ds(own_rows(c, tile, i), ROWS), some_keys]
                    plgpu.copy_gmem_to_smem(source, bias_tile.at[i], bars["b_full"].at[i])

            lax.fori_loop(0, needed, step, None)

        self.each_tile(work)

    def _refill(
        self, x: Any, batch: Any, head: Any, key_block: Any, count: Any, ring: Any, columns: int, axis: int
    ) -> None:
        """The count-th key block of K or V into its ring; axis: the one that a pair shares it along."""
        x_tile, full, empty = ring
        slot = plgpu.rem(count, self.c.kv_slots)

        @plgpu.when(count >= self.c.kv_slots)
        def _() -> None:
            plgpu.barrier_wait(empty.at[slot])

        some_keys = plgpu.ds(key_block * self.c.tile_k, self.c.tile_k)
        source = head_rows(x, batch, some_keys, head, columns)
        plgpu.copy_gmem_to_smem(source, x_tile.at[slot], full.at[slot], **self._halves(axis))

    def _halves(self, axis: int) -> Any:
        """How a pair shares a copy: each block takes its half along an axis."""
        partition = plgpu.CopyPartition.PARTITIONED(axis)
        return dict(collective_axes="pair", leader_tracked=partition) if self.c.pair else {}


def _kv_head_of(head: Any, q: Any, k: Any) -> Any:
    """The head of K and V that a query head sees."""
    return plgpu.div(head, plgpu.div(plgpu.dim_size(q, 2), plgpu.dim_size(k, 2)))
