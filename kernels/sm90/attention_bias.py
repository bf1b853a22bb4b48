"""A bias in the Hopper attention kernel: a ring of its tiles, filled by the memory thread and added by the compute warpgroups."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.sm90.attention_config import ROWS, AttentionConfig
from mosaic_gpu.kernels.tiles import tiles_of


def scratch(c: AttentionConfig, slots: int, dtype: Any) -> list[Any]:
    """Tiles of so many key blocks in flight, one for each compute warpgroup, and their barriers: full, empty."""
    count = slots * c.compute_warpgroups
    return [
        tiles_of(count, ROWS, c.block_kv, dtype),
        plgpu.Barrier(num_barriers=count),
        plgpu.Barrier(num_barriers=count),
    ]


@dataclasses.dataclass(frozen=True)
class BiasRing:
    """bias: (b or 1, h or 1, s, t) in global memory; slots: key blocks in flight; tile, full, empty: what `scratch` says.

    Each compute warpgroup has slots of its own: it waits for its own 64 rows only, and hands them back as soon as it has read
    them, whatever the others do.
    """

    c: AttentionConfig
    slots: int
    bias: Any
    tile: Any
    full: Any
    empty: Any

    def _place(self, count: Any, w: Any) -> Any:
        return plgpu.rem(count, self.slots) * self.c.compute_warpgroups + w

    def refill(self, batch: Any, head: Any, first_row: Any, key_block: Any, count: Any) -> None:
        """The memory thread: a key block, the count-th one, for the rows of all compute warpgroups."""
        # Batch or heads of extent 1 are those of all.
        batch, head = (jnp.minimum(x, plgpu.dim_size(self.bias, axis) - 1) for axis, x in enumerate((batch, head)))
        some_keys = plgpu.ds(key_block * self.c.block_kv, self.c.block_kv)
        for w in range(self.c.compute_warpgroups):
            place = self._place(count, w)

            @plgpu.when(count >= self.slots)
            def _(place: Any = place) -> None:
                plgpu.barrier_wait(self.empty.at[place])

            rows = plgpu.ds(first_row + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                self.bias.at[batch, head, rows, some_keys], self.tile.at[place], self.full.at[place]
            )

    def add(self, scores: Any, scale: float, wg: Any, count: Any) -> Any:
        """A compute warpgroup: scores + bias / scale of the count-th key block, whose slot is then free."""
        place = self._place(count, wg)
        plgpu.barrier_wait(self.full.at[place])
        bias = plgpu.load(self.tile.at[place], layout=plgpu.Layout.WGMMA)
        plgpu.barrier_arrive(self.empty.at[place])
        return scores + bias.astype(jnp.float32) * (1 / scale)
