"""Blackwell attention: its config.  The kernel is not written yet; the dispatcher says so."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mosaic_gpu.kernels.config import Config

TMEM_COLUMNS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """tile_q: query rows of a block, 128 lanes of TMEM each; tile_k: keys of a block; kv_slots: blocks of K and V in flight;
    softmax_registers, correction_registers: per thread of those warpgroups."""

    generation: ClassVar[str] = "sm100"
    kernel: ClassVar[str] = "attention"
    tile_q: int = 128
    tile_k: int = 128
    kv_slots: int = 3
    softmax_registers: int = 192
    correction_registers: int = 96

    def __post_init__(self) -> None:
        if self.tile_q % 128 or not 128 <= self.tile_q <= 256:
            raise ValueError(f"tile_q={self.tile_q}: 128 or 256, the lanes of one or two accumulators")
        if self.tile_k % 32 or not 32 <= self.tile_k <= 256:
            raise ValueError(f"tile_k={self.tile_k}: a multiple of 32 from 32 to 256")
        if self.kv_slots < 1:
            raise ValueError(f"kv_slots={self.kv_slots}: at least 1")
        for n in (self.softmax_registers, self.correction_registers):
            if n % 8 or not 24 <= n <= 256:
                raise ValueError(f"{n} registers: a multiple of 8 from 24 to 256")
        columns = (self.tile_q // 128) * (self.tile_k + 256)
        if columns > TMEM_COLUMNS:
            raise ValueError(
                f"scores of {self.tile_k} and outputs of up to 256 columns for {self.tile_q} rows take {columns} "
                f"TMEM columns of {TMEM_COLUMNS}"
            )
