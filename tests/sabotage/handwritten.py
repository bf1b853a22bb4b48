"""Kernels written for these tests, one for each way to synchronise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mosaic_gpu as plgpu
from tests.support import tiled

from .cases import BF16, block_of, f32, maker, random


@maker
def pipeline(steps: int = 5) -> Any:
    """One warpgroup, double-buffered both ways: TMA in, arithmetic in registers, TMA out."""

    def body(x: Any, y: Any, in_tile: Any, out_tile: Any, full: Any) -> None:
        for i in range(2):
            plgpu.copy_gmem_to_smem(x.at[i], in_tile.at[i], full.at[i])

        def step(i: Any, _: None) -> None:
            slot = lax.rem(i, 2)
            plgpu.barrier_wait(full.at[slot])
            value = plgpu.load(in_tile.at[slot], layout=plgpu.Layout.WGMMA)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read its tile
            out_tile[slot] = value * 2.0 + 1.0
            plgpu.commit_smem()  # all warps have read in_tile and written out_tile
            plgpu.copy_smem_to_gmem(out_tile.at[slot], y.at[i])

            @plgpu.when(i + 2 < steps)
            def _() -> None:
                plgpu.copy_gmem_to_smem(x.at[i + 2], in_tile.at[slot], full.at[slot])

        lax.fori_loop(0, steps, step, None)
        plgpu.wait_smem_to_gmem(0)

    x = random(1, steps, 64, 16, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 64, 16), jnp.float32),
            plgpu.SMEM((2, 64, 16), jnp.float32),
            plgpu.Barrier(num_barriers=2),
        ],
        name="pipeline",
        **block_of(),
    )
    return kernel, "sm_90a", (x,), (x * 2 + 1,), {}


@maker
def cluster(k_steps: int = 5) -> Any:
    """Matmul by a cluster of two: each block loads its rows of A and half of B's tile, which goes to both."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any, empty: Any) -> None:
        wg, block = lax.axis_index("wg"), lax.axis_index("pair")
        rows = plgpu.ds(block * 64, 64)

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])  # both blocks have released it

                k = plgpu.ds(i * 64, 64)
                plgpu.copy_gmem_to_smem(a.at[rows, k], a_tile.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(b.at[k], b_tile.at[slot], full.at[slot], collective_axes="pair")

            lax.fori_loop(0, k_steps, step, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def product(acc: Any) -> Any:
                def step(i: Any, _: None) -> None:
                    slot = lax.rem(i, 2)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, a_tile.at[slot], b_tile.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                lax.fori_loop(0, k_steps, step, None)
                return acc[...]

            o[rows] = plgpu.run_scoped(product, plgpu.ACC((64, 64)))

    a, b = random(1, 128, 64 * k_steps), random(2, 64 * k_steps, 64)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((128, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled(rows=64)),
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled()),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.ClusterBarrier(collective_axes="pair", num_barriers=2),
        ],
        cluster=(2,),
        cluster_names=("pair",),
        name="cluster",
        **block_of(2),
    )
    return kernel, "sm_90a", (a, b), (f32(a) @ f32(b),), {}


@maker
def persistent(tiles: int = 5, k_steps: int = 3, stages: int = 2) -> Any:
    """Matmul where a block walks over several tiles; the ring goes on from tile to tile, one product stays in flight."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, o_tile: Any, full: Any, empty: Any) -> None:
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        own_tiles = lax.div(tiles - block + 1, 2)

        def rows(j: Any) -> Any:
            return plgpu.ds((block + 2 * j) * 64, 64)

        @plgpu.when(wg == 1)
        def _() -> None:
            def tile(j: Any, _: None) -> None:
                def step(i: Any, _: None) -> None:
                    count = j * k_steps + i
                    slot = lax.rem(count, stages)

                    @plgpu.when(count >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    k = plgpu.ds(i * 64, 64)
                    plgpu.copy_gmem_to_smem(a.at[rows(j), k], a_tile.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(b.at[k], b_tile.at[slot], full.at[slot])

                lax.fori_loop(0, k_steps, step, None)

            lax.fori_loop(0, own_tiles, tile, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def tile(j: Any, _: None) -> None:
                def product(acc: Any) -> Any:
                    def step(i: Any, _: None) -> None:
                        count = j * k_steps + i
                        slot = lax.rem(count, stages)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, a_tile.at[slot], b_tile.at[slot])
                        plgpu.wgmma_wait(1)

                        @plgpu.when(i > 0)
                        def _() -> None:
                            plgpu.barrier_arrive(empty.at[lax.rem(count + stages - 1, stages)])

                    lax.fori_loop(0, k_steps, step, None)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[lax.rem(j * k_steps + k_steps - 1, stages)])
                    return acc[...]

                total = plgpu.run_scoped(product, plgpu.ACC((64, 64))).astype(jnp.bfloat16)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_tile[...] = total
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_tile, o.at[rows(j)])

            lax.fori_loop(0, own_tiles, tile, None)
            plgpu.wait_smem_to_gmem(0)

    a, b = random(1, 64 * tiles, 64 * k_steps), random(2, 64 * k_steps, 64)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((64 * tiles, 64), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((stages, 64, 64), jnp.bfloat16, transforms=tiled(rows=64)),
            plgpu.SMEM((stages, 64, 64), jnp.bfloat16, transforms=tiled(rows=64)),
            plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(rows=64)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(2,),
        grid_names=("block",),
        name="persistent",
        **block_of(2),
    )
    return kernel, "sm_90a", (a, b), ((f32(a) @ f32(b)).astype(BF16),), {}


@maker
def handoff(steps: int = 4) -> Any:
    """Named barriers: one warpgroup writes a tile with ordinary stores, another reads it, turn by turn."""

    def body(x: Any, y: Any, tile: Any, ready: Any, free: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                value = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA) * 2.0

                @plgpu.when(i > 0)
                def _() -> None:
                    plgpu.named_barrier_sync(free)

                tile[...] = value
                plgpu.named_barrier_arrive(ready)

            lax.fori_loop(0, steps, step, None)

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                plgpu.named_barrier_sync(ready)
                value = plgpu.load(tile, layout=plgpu.Layout.WGMMA)

                @plgpu.when(i < steps - 1)
                def _() -> None:
                    plgpu.named_barrier_arrive(free)

                y[i] = value + 1.0

            lax.fori_loop(0, steps, step, None)

    x = random(1, steps, 64, 16, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 16), jnp.float32),
            plgpu.NamedBarrier(num_warpgroups=2),
            plgpu.NamedBarrier(num_warpgroups=2),
        ],
        name="handoff",
        **block_of(2),
    )
    return kernel, "sm_90a", (x,), (x * 2 + 1,), {}


@maker
def staged(k_steps: int = 5) -> Any:
    """Operands written by ordinary stores: one warpgroup converts B to bfloat16 in shared memory, another multiplies."""

    def body(a: Any, b: Any, o: Any, b_tile: Any, full: Any, empty: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)
                value = plgpu.load(b.at[plgpu.ds(i * 64, 64)], layout=plgpu.Layout.WGMMA).astype(jnp.bfloat16)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                b_tile[slot] = value
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])

            lax.fori_loop(0, k_steps, step, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def product(acc: Any) -> Any:
                def step(i: Any, _: None) -> None:
                    slot = lax.rem(i, 2)
                    part = plgpu.load(a.at[:, plgpu.ds(i * 64, 64)], layout=plgpu.Layout.WGMMA)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, part, b_tile.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                lax.fori_loop(0, k_steps, step, None)
                return acc[...]

            o[...] = plgpu.run_scoped(product, plgpu.ACC((64, 64)))

    a, b = random(1, 64, 64 * k_steps), random(2, 64 * k_steps, 64, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled(rows=64)),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        name="staged",
        **block_of(2),
    )
    return kernel, "sm_90a", (a, b), (f32(a) @ b,), {}


@maker
def through_memory(steps: int = 3, writer: str = "copy", reader: str = "load") -> Any:
    """One warpgroup leaves tiles in global memory, another takes them from there.

    writer: 'copy' (TMA) or 'store'; reader: 'load' or 'copy'.  What is stored must not be copied: no fence of this
    language makes ordinary stores to global memory visible to TMA.
    """

    def body(x: Any, t: Any, y: Any, out_tile: Any, in_tile: Any, ready: Any, full: Any, free: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                value = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA) * 2.0
                if writer == "store":
                    t[i] = value
                else:
                    out_tile[...] = value
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_tile, t.at[i])
                    plgpu.wait_smem_to_gmem(0)  # written, not only read
                plgpu.barrier_arrive(ready)

                @plgpu.when(i < steps - 1)
                def _() -> None:
                    plgpu.barrier_wait(free)

            lax.fori_loop(0, steps, step, None)

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                plgpu.barrier_wait(ready)
                if reader == "copy":
                    plgpu.copy_gmem_to_smem(t.at[i], in_tile, full)
                    plgpu.barrier_wait(full)
                    value = plgpu.load(in_tile, layout=plgpu.Layout.WGMMA)
                else:
                    value = plgpu.load(t.at[i], layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(free)
                y[i] = value + 1.0

            lax.fori_loop(0, steps, step, None)

    x = random(1, steps, 64, 16, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        [jax.ShapeDtypeStruct(x.shape, jnp.float32)] * 2,
        scratch_types=[
            plgpu.SMEM((64, 16), jnp.float32),
            plgpu.SMEM((64, 16), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
        name="through_memory",
        **block_of(2),
    )
    return kernel, "sm_90a", (x,), (x * 2, x * 2 + 1), {}


@maker
def relay(steps: int = 4) -> Any:
    """Warps on their own: one copies, one waits for the copy and tells the warpgroup, which hands the tile back."""

    def body(x: Any, y: Any, tile: Any, full: Any, ready: Any, free: Any) -> None:
        def step(i: Any, _: None) -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                @plgpu.when(warp == 0)
                def _() -> None:
                    @plgpu.when(i > 0)
                    def _() -> None:
                        plgpu.barrier_wait(free)  # all four warps have read it

                    plgpu.copy_gmem_to_smem(x.at[i], tile, full)

                @plgpu.when(warp == 1)
                def _() -> None:
                    plgpu.barrier_wait(full)
                    plgpu.barrier_arrive(ready)

            plgpu.barrier_wait(ready)
            value = plgpu.load(tile, layout=plgpu.Layout.WGMMA)

            @plgpu.when(i < steps - 1)
            def _() -> None:
                plgpu.barrier_arrive(free)

            y[i] = value + 1.0

        lax.fori_loop(0, steps, step, None)

    x = random(1, steps, 64, 16, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[plgpu.SMEM((64, 16), jnp.float32), plgpu.Barrier(), plgpu.Barrier(), plgpu.Barrier()],
        name="relay",
        **block_of(1),
    )
    return kernel, "sm_90a", (x,), (x + 1,), {}


@maker
def sm100_tiles(tiles: int = 3, k_steps: int = 3) -> Any:
    """Blackwell: one accumulator in tensor memory serves several tiles, so the MMA waits until it has been read."""

    def body(
        a: Any,
        b: Any,
        o: Any,
        a_tile: Any,
        b_tile: Any,
        o_tile: Any,
        acc: Any,
        full: Any,
        empty: Any,
        done: Any,
        drained: Any,
    ) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                @plgpu.when(warp == 0)
                def _() -> None:
                    def tile(j: Any, _: None) -> None:
                        def step(i: Any, _: None) -> None:
                            count = j * k_steps + i
                            slot = lax.rem(count, 2)

                            @plgpu.when(count >= 2)
                            def _() -> None:
                                plgpu.barrier_wait(empty.at[slot])

                            k = plgpu.ds(i * 64, 64)
                            plgpu.copy_gmem_to_smem(a.at[plgpu.ds(j * 128, 128), k], a_tile.at[slot], full.at[slot])
                            plgpu.copy_gmem_to_smem(b.at[k], b_tile.at[slot], full.at[slot])

                        lax.fori_loop(0, k_steps, step, None)

                    lax.fori_loop(0, tiles, tile, None)

                @plgpu.when(warp == 1)
                def _() -> None:
                    def tile(j: Any, _: None) -> None:
                        @plgpu.when(j > 0)
                        def _() -> None:
                            plgpu.barrier_wait(drained)

                        def step(i: Any, _: None) -> None:
                            slot = lax.rem(j * k_steps + i, 2)
                            plgpu.barrier_wait(full.at[slot])
                            plgpu.tcgen05_mma(acc, a_tile.at[slot], b_tile.at[slot], empty.at[slot], accumulate=i > 0)

                        lax.fori_loop(0, k_steps, step, None)
                        plgpu.tcgen05_commit_arrive(done)

                    lax.fori_loop(0, tiles, tile, None)

        @plgpu.when(wg == 1)
        def _() -> None:
            def tile(j: Any, _: None) -> None:
                plgpu.barrier_wait(done)
                total = plgpu.async_load_tmem(acc)
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(drained)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_tile[...] = total.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_tile, o.at[plgpu.ds(j * 128, 128)])

            lax.fori_loop(0, tiles, tile, None)
            plgpu.wait_smem_to_gmem(0)

    a, b = random(1, 128 * tiles, 64 * k_steps), random(2, 64 * k_steps, 64)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((128 * tiles, 64), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((2, 128, 64), jnp.bfloat16, transforms=tiled(rows=128)),
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled(rows=64)),
            plgpu.SMEM((128, 64), jnp.bfloat16, transforms=tiled(rows=128)),
            plgpu.TMEM((128, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        name="sm100_tiles",
        **block_of(2, "sm_100a"),
    )
    return kernel, "sm_100a", (a, b), ((f32(a) @ f32(b)).astype(BF16),), {}
