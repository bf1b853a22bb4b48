"""Kernels whose blocks reach into each other's shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mosaic_gpu as plgpu

from .cases import block_of, maker, random


@maker
def exchange(steps: int = 5) -> Any:
    """A ring in each of two blocks, filled by the other block's producer; TMA takes the tiles from there.

    The consumer also leaves a row of results, which the other block's third role reads in place.
    """

    def body(x: Any, y: Any, z: Any, tile: Any, row: Any, full: Any, empty: Any, ready: Any, read: Any) -> None:
        wg, me = lax.axis_index("wg"), lax.axis_index("pair")

        @plgpu.when(wg == 1)
        def _() -> None:
            def fill(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                value = plgpu.load(x.at[me, i], layout=plgpu.Layout.WGMMA)
                plgpu.cluster_ref(tile, {"pair": 1 - me})[slot] = value
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])

            lax.fori_loop(0, steps, fill, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def drain(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(full.at[slot])
                plgpu.copy_smem_to_gmem(tile.at[slot], y.at[me, i])

                @plgpu.when(i > 0)
                def _() -> None:
                    plgpu.barrier_wait(read)

                row[...] = plgpu.load(x.at[me, i, 0], layout=plgpu.Layout.WG_STRIDED) * 2.0
                plgpu.barrier_arrive(ready)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(empty.at[slot])

            lax.fori_loop(0, steps, drain, None)

        @plgpu.when(wg == 2)
        def _() -> None:
            def look(i: Any, _: None) -> None:
                plgpu.barrier_wait(ready)
                theirs = plgpu.load(plgpu.cluster_ref(row, {"pair": 1 - me}), layout=plgpu.Layout.WG_STRIDED)
                plgpu.barrier_arrive(read)
                z[me, i] = theirs

            lax.fori_loop(0, steps, look, None)

    x = random(3, 2, steps, 64, 128, dtype=np.float32)
    pairs = [plgpu.ClusterBarrier(collective_axes="pair", num_barriers=n) for n in (2, 2, 1, 1)]
    kernel = plgpu.kernel(
        body,
        (jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct((2, steps, 128), jnp.float32)),
        scratch_types=[plgpu.SMEM((2, 64, 128), jnp.float32), plgpu.SMEM((128,), jnp.float32), *pairs],
        cluster=(2,),
        cluster_names=("pair",),
        name="exchange",
        **block_of(3),
    )
    return kernel, "sm_90a", (x,), (x[::-1], 2 * x[::-1, :, 0]), {}


@maker
def sent(steps: int = 5) -> Any:
    """A ring in each of two blocks, into which the other block's producer stores asynchronously; TMA takes the tiles."""

    def body(x: Any, y: Any, tile: Any, full: Any, empty: Any) -> None:
        wg, me = lax.axis_index("wg"), lax.axis_index("pair")

        @plgpu.when(wg == 1)
        def _() -> None:
            def fill(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)
                value = plgpu.load(x.at[me, i], layout=plgpu.Layout.WGMMA)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.async_store_smem(value, tile.at[slot], full.at[slot], cluster_idx=1 - me, cluster_dim="pair")

            lax.fori_loop(0, steps, fill, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def drain(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(full.at[slot])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tile.at[slot], y.at[me, i])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(empty.at[slot])

            lax.fori_loop(0, steps, drain, None)

    x = random(3, 2, steps, 64, 128, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 64, 128), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            plgpu.ClusterBarrier(collective_axes="pair", num_barriers=2),
        ],
        cluster=(2,),
        cluster_names=("pair",),
        name="sent",
        **block_of(2),
    )
    return kernel, "sm_90a", (x,), (x[::-1],), {}
