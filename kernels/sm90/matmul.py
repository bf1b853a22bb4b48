"""Hopper matmul: two compute warpgroups of 64 x block_n each, one memory warpgroup, a ring of stages filled by TMA."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels.config import Config

MEMORY_WARPGROUP = 2
SHARED_LIMIT = 232_448  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig(Config):
    """block_m: rows of a tile, 64 for each compute warpgroup, 128; block_n: columns, a multiple of 64 up to 256;
    block_k: depth of a stage, a multiple of 64; num_stages: stages in flight; registers of the two kinds of warpgroup."""

    generation: ClassVar[str] = "sm90"
    kernel: ClassVar[str] = "matmul"
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 3
    compute_registers: int = 232
    memory_registers: int = 40

    def __post_init__(self) -> None:
        if self.block_m != 128:
            raise ValueError(f"block_m={self.block_m}: two compute warpgroups of 64 rows make 128")
        if self.block_n % 64 or not 64 <= self.block_n <= 256:
            raise ValueError(f"block_n={self.block_n}: 64, 128, 192 or 256")
        if self.block_k % 64 or self.block_k < 64:
            raise ValueError(f"block_k={self.block_k}: a multiple of 64")
        if self.num_stages < 2:
            raise ValueError(f"num_stages={self.num_stages}: at least 2")
        if 2 * self.compute_registers + self.memory_registers > 504:
            raise ValueError(
                f"2 x {self.compute_registers} + {self.memory_registers} registers exceed the pool of 3 warpgroups, 504"
            )
        if self.shared_bytes > SHARED_LIMIT:
            raise ResourceExceeded(
                f"{self.num_stages} stages of {self.block_k} x ({self.block_m} + {self.block_n}) and a tile of "
                f"{self.block_m} x {self.block_n} take {self.shared_bytes} bytes of shared memory, a block has {SHARED_LIMIT}"
            )

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory for 16-bit operands."""
        stage = 2 * self.block_k * (self.block_m + self.block_n)
        return self.num_stages * stage + 2 * self.block_m * self.block_n + 16 * self.num_stages


def matmul(a: jax.Array, b: jax.Array, config: MatmulConfig | None = None) -> jax.Array:
    """a @ b for (m, k) and (k, n) arrays of float16 or bfloat16; the result has their dtype, sums are float32.

    Any m; k and n multiples of 8 (TMA moves rows of 16 bytes).  Raises UnsupportedCall for anything else.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise UnsupportedCall(f"matmul of {a.shape} and {b.shape}: it takes (m, k) and (k, n)")
    if a.dtype != b.dtype or a.dtype not in (jnp.float16, jnp.bfloat16):
        raise UnsupportedCall(f"matmul of {a.dtype} and {b.dtype}: both float16 or both bfloat16")
    if a.shape[1] % 8 or b.shape[1] % 8:
        raise UnsupportedCall(
            f"matmul with k = {a.shape[1]} and n = {b.shape[1]}: multiples of 8 only, since TMA moves rows of 16 bytes; pad them"
        )
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros((a.shape[0], b.shape[1]), a.dtype)
    return _kernel(a.shape[0], b.shape[1], jnp.dtype(a.dtype), config or MatmulConfig())(a, b)


@functools.lru_cache(maxsize=256)
def _kernel(m: int, n: int, dtype: Any, c: MatmulConfig) -> Any:
    grid = (plgpu.cdiv(n, c.block_n), plgpu.cdiv(m, c.block_m))
    rows, columns = c.block_m // 2, c.block_n
    swizzle = plgpu.SwizzleTransform(128)

    def tile(r: int) -> tuple[Any, Any]:
        return plgpu.TilingTransform((r, 64)), swizzle

    def memory(a: Any, b: Any, a_tile: Any, b_tile: Any, full: Any, empty: Any) -> None:
        """One thread fills the ring."""
        plgpu.set_max_registers(c.memory_registers, action="decrease")
        column, row = lax.axis_index("n") * c.block_n, lax.axis_index("m") * c.block_m

        def step(i: Any, _: None) -> None:
            slot = plgpu.rem(i, c.num_stages)

            @plgpu.when(i >= c.num_stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            k = plgpu.ds(i * c.block_k, c.block_k)
            plgpu.copy_gmem_to_smem(a.at[plgpu.ds(row, c.block_m), k], a_tile.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(b.at[k, plgpu.ds(column, c.block_n)], b_tile.at[slot], full.at[slot])

        lax.fori_loop(0, plgpu.cdiv(plgpu.dim_size(a, 1), c.block_k), step, None)

    def compute(wg: Any, a: Any, o: Any, a_tile: Any, b_tile: Any, o_tile: Any, full: Any, empty: Any) -> None:
        """64 rows of the tile each; one product stays in flight while the next stage is waited for."""
        plgpu.set_max_registers(c.compute_registers, action="increase")
        own = plgpu.ds(wg * rows, rows)

        def accumulate(acc: Any) -> Any:
            def step(i: Any, _: None) -> None:
                slot = plgpu.rem(i, c.num_stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, a_tile.at[slot, own], b_tile.at[slot])
                plgpu.wgmma_wait(1)  # the previous product has ended: its stage is free

                @plgpu.when(i > 0)
                def _() -> None:
                    plgpu.barrier_arrive(empty.at[plgpu.rem(i + c.num_stages - 1, c.num_stages)])

            lax.fori_loop(0, plgpu.cdiv(plgpu.dim_size(a, 1), c.block_k), step, None)
            return acc[...]

        total = plgpu.run_scoped(accumulate, plgpu.ACC((rows, columns)))
        o_tile[own] = total.astype(dtype)
        plgpu.commit_smem()
        place = (
            plgpu.ds(lax.axis_index("m") * c.block_m + wg * rows, rows),
            plgpu.ds(lax.axis_index("n") * c.block_n, columns),
        )
        plgpu.copy_smem_to_gmem(o_tile.at[own], o.at[place])
        plgpu.wait_smem_to_gmem(0)

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, o_tile: Any, full: Any, empty: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == MEMORY_WARPGROUP)
        def _() -> None:
            memory(a, b, a_tile, b_tile, full, empty)

        @plgpu.when(wg < MEMORY_WARPGROUP)
        def _() -> None:
            compute(wg, a, o, a_tile, b_tile, o_tile, full, empty)

    stages = c.num_stages
    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((m, n), dtype),
        scratch_types=[
            plgpu.SMEM((stages, c.block_m, c.block_k), dtype, transforms=tile(c.block_m)),
            plgpu.SMEM((stages, c.block_k, c.block_n), dtype, transforms=tile(c.block_k)),
            plgpu.SMEM((c.block_m, c.block_n), dtype, transforms=tile(rows)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        grid=grid,
        grid_names=("n", "m"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_90a", strict=True),
        name="matmul_sm90",
    )
