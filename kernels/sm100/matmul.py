"""Blackwell matmul, the smallest whole one: a TMA warp, an MMA warp, and a warpgroup that carries the result out of TMEM.

Compiled for sm_100a, checked in the disassembly and simulated; no Blackwell GPU has run it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import ResourceExceeded
from mosaic_gpu.kernels.config import Config
from mosaic_gpu.kernels.operands import check_matmul

TMA_WARP, MMA_WARP = 0, 1
ISSUE_WARPGROUP, EPILOGUE_WARPGROUP = 0, 1
ROWS = 128  # lanes of tensor memory
SHARED_LIMIT = 232_448  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig(Config):
    """tile_n: columns of a tile (its rows are the 128 lanes of TMEM), a multiple of 64 up to 256; tile_k: depth of a stage, a
    multiple of 64; num_slots: stages in flight."""

    generation: ClassVar[str] = "sm100"
    kernel: ClassVar[str] = "matmul"
    tile_n: int = 128
    tile_k: int = 64
    num_slots: int = 4

    def __post_init__(self) -> None:
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n}: 64, 128, 192 or 256")
        if self.tile_k % 64 or self.tile_k < 64:
            raise ValueError(f"tile_k={self.tile_k}: a multiple of 64")
        if self.num_slots < 1:
            raise ValueError(f"num_slots={self.num_slots}: at least 1")
        if self.shared_bytes > SHARED_LIMIT:
            raise ResourceExceeded(
                f"{self.num_slots} slots of {self.tile_k} x ({ROWS} + {self.tile_n}) and a tile of {ROWS} x {self.tile_n} "
                f"take {self.shared_bytes} bytes of shared memory, a block has {SHARED_LIMIT}"
            )

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for 16-bit operands."""
        slot = 2 * self.tile_k * (ROWS + self.tile_n)
        return self.num_slots * slot + 2 * ROWS * self.tile_n + 16 * self.num_slots + 16


def matmul(a: jax.Array, b: jax.Array, config: MatmulConfig | None = None) -> jax.Array:
    """a @ b for (m, k) and (k, n) arrays of float16 or bfloat16; the result has their dtype, sums are float32.

    Any m; k and n multiples of 8 (TMA moves rows of 16 bytes).  Raises UnsupportedCall for anything else.
    """
    check_matmul(a, b)
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros((a.shape[0], b.shape[1]), a.dtype)
    result: jax.Array = _kernel(a.shape[0], b.shape[1], jnp.dtype(a.dtype), config or MatmulConfig())(a, b)
    return result


@functools.lru_cache(maxsize=256)
def _kernel(m: int, n: int, dtype: Any, c: MatmulConfig) -> Any:
    def tile(rows: int) -> tuple[Any, Any]:
        return plgpu.TilingTransform((rows, 64)), plgpu.SwizzleTransform(128)

    def steps(a: Any) -> Any:
        return plgpu.cdiv(plgpu.dim_size(a, 1), c.tile_k)

    def copy(a: Any, b: Any, a_tile: Any, b_tile: Any, full: Any, empty: Any) -> None:
        """The TMA warp fills the ring."""
        row, column = lax.axis_index("m") * ROWS, lax.axis_index("n") * c.tile_n

        def step(i: Any, _: None) -> None:
            slot = plgpu.rem(i, c.num_slots)

            @plgpu.when(i >= c.num_slots)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            k = plgpu.ds(i * c.tile_k, c.tile_k)
            plgpu.copy_gmem_to_smem(a.at[plgpu.ds(row, ROWS), k], a_tile.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(b.at[k, plgpu.ds(column, c.tile_n)], b_tile.at[slot], full.at[slot])

        lax.fori_loop(0, steps(a), step, None)

    def multiply(a: Any, acc: Any, a_tile: Any, b_tile: Any, full: Any, empty: Any, done: Any) -> None:
        """The MMA warp; each product frees its slot when it has ended."""

        def step(i: Any, _: None) -> None:
            slot = plgpu.rem(i, c.num_slots)
            plgpu.barrier_wait(full.at[slot])
            plgpu.tcgen05_mma(acc, a_tile.at[slot], b_tile.at[slot], empty.at[slot], accumulate=i > 0)

        lax.fori_loop(0, steps(a), step, None)
        plgpu.tcgen05_commit_arrive(done)

    def body(
        a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, o_tile: Any, acc: Any, full: Any, empty: Any, done: Any
    ) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == ISSUE_WARPGROUP)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                @plgpu.when(warp == TMA_WARP)
                def _() -> None:
                    copy(a, b, a_tile, b_tile, full, empty)

                @plgpu.when(warp == MMA_WARP)
                def _() -> None:
                    multiply(a, acc, a_tile, b_tile, full, empty, done)

        @plgpu.when(wg == EPILOGUE_WARPGROUP)
        def _() -> None:
            plgpu.barrier_wait(done)
            total = plgpu.async_load_tmem(acc)
            plgpu.wait_load_tmem()
            o_tile[...] = total.astype(dtype)
            plgpu.commit_smem()
            rows, columns = (
                plgpu.ds(lax.axis_index("m") * ROWS, ROWS),
                plgpu.ds(lax.axis_index("n") * c.tile_n, c.tile_n),
            )
            plgpu.copy_smem_to_gmem(o_tile, o.at[rows, columns])
            plgpu.wait_smem_to_gmem(0)

    slots = c.num_slots
    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((m, n), dtype),
        scratch_types=[
            plgpu.SMEM((slots, ROWS, c.tile_k), dtype, transforms=tile(ROWS)),
            plgpu.SMEM((slots, c.tile_k, c.tile_n), dtype, transforms=tile(c.tile_k)),
            plgpu.SMEM((ROWS, c.tile_n), dtype, transforms=tile(ROWS)),
            plgpu.TMEM((ROWS, c.tile_n), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        grid=(plgpu.cdiv(n, c.tile_n), plgpu.cdiv(m, ROWS)),
        grid_names=("n", "m"),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_100a", strict=True),
        name="matmul_sm100",
    )
