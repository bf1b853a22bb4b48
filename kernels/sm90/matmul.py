"""Hopper matmul: two compute warpgroups of 64 x block_n each, one memory warpgroup, a ring of stages filled by TMA.

Blocks of a cluster take tiles above each other, which share B: each loads a part of it and multicasts that to the others.
Persistent blocks walk over tiles, so that the memory warpgroup fills the ring for the next tile during an epilogue; the
result leaves in chunks of columns through two buffers for each warpgroup.
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
from mosaic_gpu.plan.resources import SHARED_LIMIT
from mosaic_gpu.runtime.device import multiprocessors

ROWS = 64  # of a compute warpgroup
MEMORY_WARPGROUP = 2
CHUNK = 64  # columns of the result that leave together
BUFFERS = 2  # of the result, for each compute warpgroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig(Config):
    """block_n: columns of a tile, a multiple of 64 up to 256 (its rows are 128, 64 for each compute warpgroup).
    block_k: depth of a stage, a multiple of 64.  num_stages: stages in flight.
    cluster_m: blocks above each other that share B, 1, 2 or 4.  group_m: rows of tiles (of clusters) that are visited
    together, column by column, for the sake of the L2 cache.  persistent: one block per multiprocessor walks over tiles.
    compute_registers, memory_registers: per thread, 2 x compute + memory at most 504."""

    generation: ClassVar[str] = "sm90"
    kernel: ClassVar[str] = "matmul"
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 4
    cluster_m: int = 1
    group_m: int = 8
    persistent: bool = True
    compute_registers: int = 232
    memory_registers: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_n % 64 or not 64 <= self.block_n <= 256:
            raise ValueError(f"block_n={self.block_n}: 64, 128, 192 or 256")
        if self.block_k % 64 or self.block_k < 64:
            raise ValueError(f"block_k={self.block_k}: a multiple of 64")
        if self.num_stages < 2:
            raise ValueError(f"num_stages={self.num_stages}: at least 2")
        if self.cluster_m not in (1, 2, 4) or self.group_m < 1:
            raise ValueError(f"cluster_m={self.cluster_m}, group_m={self.group_m}: 1, 2 or 4, and at least 1")
        if self.block_n // 64 % self.cluster_m:
            raise ValueError(
                f"block_n={self.block_n} has {self.block_n // 64} chunks of 64 columns to deal to {self.cluster_m} blocks"
            )
        if 2 * self.compute_registers + self.memory_registers > 504:
            raise ValueError(
                f"2 x {self.compute_registers} + {self.memory_registers} registers exceed the pool of 3 warpgroups, 504"
            )
        if self.shared_bytes > SHARED_LIMIT:
            raise ResourceExceeded(
                f"{self.num_stages} stages of {self.block_k} x ({2 * ROWS} + {self.block_n}) and {2 * BUFFERS} pieces of "
                f"{ROWS} x {CHUNK} take {self.shared_bytes} bytes of shared memory, a block has {SHARED_LIMIT}"
            )

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for 16-bit operands."""
        stage = 2 * self.block_k * (2 * ROWS + self.block_n)
        return self.num_stages * stage + 2 * 2 * BUFFERS * ROWS * CHUNK + 16 * self.num_stages


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
    stages, columns, tile_rows = c.num_stages, c.block_n, 2 * ROWS * c.cluster_m
    tiles = plgpu.cdiv(m, tile_rows) * plgpu.cdiv(n, columns)
    clusters = min(tiles, multiprocessors() // c.cluster_m) if c.persistent else tiles
    share = "block" if c.cluster_m > 1 else None

    def walk_tiles(o: Any, visit: Any) -> None:
        """visit(tile's first row, first column, stages filled before) for each tile of this cluster."""
        rows_of_tiles = plgpu.cdiv(plgpu.dim_size(o, 0), tile_rows)
        columns_of_tiles = plgpu.cdiv(plgpu.dim_size(o, 1), columns)
        start, step = plgpu.program_id(0), plgpu.num_programs(0)
        in_group = c.group_m * columns_of_tiles

        def body(t: Any, before: Any) -> Any:
            tile = start + t * step
            group = plgpu.div(tile, in_group)
            rest = plgpu.rem(tile, in_group)
            height = jnp.minimum(rows_of_tiles - group * c.group_m, c.group_m)  # the last group may be lower
            row = group * c.group_m + plgpu.rem(rest, height)
            return visit(row * tile_rows, plgpu.div(rest, height) * columns, before)

        lax.fori_loop(0, plgpu.cdiv(rows_of_tiles * columns_of_tiles - start, step), body, jnp.int32(0))

    def own_row(row: Any) -> Any:
        """First row of this block's part of the cluster's tile."""
        return row + lax.axis_index("block") * (2 * ROWS) if share else row

    def memory(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any, empty: Any) -> None:
        """One thread fills the ring."""
        plgpu.set_max_registers(c.memory_registers, action="decrease")
        depth = plgpu.cdiv(plgpu.dim_size(a, 1), c.block_k)

        def visit(row: Any, column: Any, before: Any) -> Any:
            def step(i: Any, _: None) -> None:
                slot = plgpu.rem(before + i, stages)

                @plgpu.when(before + i >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                k = plgpu.ds(i * c.block_k, c.block_k)
                plgpu.copy_gmem_to_smem(a.at[plgpu.ds(own_row(row), 2 * ROWS), k], a_tile.at[slot], full.at[slot])
                b_part = b.at[k, plgpu.ds(column, columns)]
                plgpu.copy_gmem_to_smem(b_part, b_tile.at[slot], full.at[slot], collective_axes=share)

            lax.fori_loop(0, depth, step, None)
            return before + depth

        walk_tiles(o, visit)

    def compute(wg: Any, a: Any, o: Any, a_tile: Any, b_tile: Any, o_tile: Any, full: Any, empty: Any) -> None:
        """64 rows of the tile each; one product stays in flight while the next stage is waited for."""
        plgpu.set_max_registers(c.compute_registers, action="increase")
        depth = plgpu.cdiv(plgpu.dim_size(a, 1), c.block_k)
        own = plgpu.ds(wg * ROWS, ROWS)

        def visit(row: Any, column: Any, before: Any) -> Any:
            def accumulate(acc: Any) -> Any:
                def step(i: Any, _: None) -> None:
                    slot = plgpu.rem(before + i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, a_tile.at[slot, own], b_tile.at[slot])
                    plgpu.wgmma_wait(1)  # the previous product has ended: its stage is free

                    @plgpu.when(i > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(empty.at[plgpu.rem(before + i - 1, stages)])

                lax.fori_loop(0, depth, step, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[plgpu.rem(before + depth - 1, stages)])
                return acc[...]

            total = plgpu.run_scoped(accumulate, plgpu.ACC((ROWS, columns)))
            rows = plgpu.ds(own_row(row) + wg * ROWS, ROWS)
            for chunk in range(columns // CHUNK):
                buffer = o_tile.at[wg, chunk % BUFFERS]
                plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)  # what was in it has left
                buffer[...] = lax.slice_in_dim(total, chunk * CHUNK, (chunk + 1) * CHUNK, axis=1).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, o.at[rows, plgpu.ds(column + chunk * CHUNK, CHUNK)])
            return before + depth

        walk_tiles(o, visit)
        plgpu.wait_smem_to_gmem(0)

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, o_tile: Any, full: Any, empty: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == MEMORY_WARPGROUP)
        def _() -> None:
            memory(a, b, o, a_tile, b_tile, full, empty)

        @plgpu.when(wg < MEMORY_WARPGROUP)
        def _() -> None:
            compute(wg, a, o, a_tile, b_tile, o_tile, full, empty)

    def tile(r: int) -> tuple[Any, Any]:
        return plgpu.TilingTransform((r, 64)), plgpu.SwizzleTransform(128)

    released = functools.partial(plgpu.ClusterBarrier, collective_axes=share) if share else plgpu.Barrier
    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((m, n), dtype),
        scratch_types=[
            plgpu.SMEM((stages, 2 * ROWS, c.block_k), dtype, transforms=tile(2 * ROWS)),
            plgpu.SMEM((stages, c.block_k, columns), dtype, transforms=tile(c.block_k)),
            plgpu.SMEM((2, BUFFERS, ROWS, CHUNK), dtype, transforms=tile(ROWS)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            released(num_arrivals=2, num_barriers=stages),
        ],
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(c.cluster_m,) if share else (),
        cluster_names=(share,) if share else (),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_90a", strict=True),
        name="matmul_sm90",
    )
