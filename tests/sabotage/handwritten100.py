"""Blackwell kernels written for these tests, beside `handwritten.sm100_tiles`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mosaic_gpu as plgpu
from tests.support import tiled

from .cases import BF16, block_of, f32, maker, random


@maker
def sm100_staged(tiles: int = 2, k_steps: int = 3, handback: str = "barrier") -> Any:
    """Operands of the tensor core written by ordinary stores; the accumulator is handed back by an mbarrier with tcgen05
    fences.  handback='named': by a named barrier, which has none."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, acc: Any, *barriers: Any) -> None:
        full, empty, done, drained, turn = barriers
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            def tile(j: Any, _: None) -> None:
                @plgpu.when(j > 0)
                def _() -> None:
                    if handback == "barrier":
                        plgpu.barrier_wait(drained)
                    else:
                        plgpu.named_barrier_sync(turn)

                @plgpu.warp_map
                def _(warp: Any) -> None:
                    @plgpu.when(warp == 0)
                    def _() -> None:
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
                def step(i: Any, _: None) -> None:
                    count = j * k_steps + i
                    slot = lax.rem(count, 2)
                    rows, k = plgpu.ds(j * 128, 128), plgpu.ds(i * 64, 64)
                    part = plgpu.load(a.at[rows, k], layout=plgpu.Layout.WGMMA)
                    other = plgpu.load(b.at[k], layout=plgpu.Layout.WGMMA)

                    @plgpu.when(count >= 2)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    a_tile[slot] = part
                    b_tile[slot] = other
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(full.at[slot])

                lax.fori_loop(0, k_steps, step, None)
                plgpu.barrier_wait(done)
                o[plgpu.ds(j * 128, 128)] = plgpu.async_load_tmem(acc)
                plgpu.wait_load_tmem()

                @plgpu.when(j < tiles - 1)
                def _() -> None:
                    if handback == "barrier":
                        plgpu.barrier_arrive(drained)
                    else:
                        plgpu.named_barrier_arrive(turn)

            lax.fori_loop(0, tiles, tile, None)

    a, b = random(1, 128 * tiles, 64 * k_steps), random(2, 64 * k_steps, 64)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((128 * tiles, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 128, 64), BF16, transforms=tiled(rows=128)),
            plgpu.SMEM((2, 64, 64), BF16, transforms=tiled(rows=64)),
            plgpu.TMEM((128, 64), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
            plgpu.NamedBarrier(num_warpgroups=2),
        ],
        name="sm100_staged",
        **block_of(2, "sm_100a"),
    )
    names = {f"barriers[{i}]": name for i, name in enumerate(("full", "empty", "done", "drained", "turn"))}
    return kernel, "sm_100a", (a, b), (f32(a) @ f32(b),), names


@maker
def sm100_scratch() -> Any:
    """A warpgroup keeps an array in tensor memory: stored, loaded, and stored again over what was loaded."""

    def body(x: Any, o: Any, t: Any) -> None:
        for i in range(2):
            plgpu.async_store_tmem(t, plgpu.load(x.at[i], layout=plgpu.Layout.TCGEN05_TMEM_NATIVE))
            plgpu.commit_tmem()
            back = plgpu.async_load_tmem(t)
            plgpu.wait_load_tmem()
            o[i] = back

    x = random(1, 2, 128, 32, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[plgpu.TMEM((128, 32), jnp.float32)],
        name="sm100_scratch",
        **block_of(1, "sm_100a"),
    )
    return kernel, "sm_100a", (x,), (x,), {}


@maker
def sm100_sparse(k_steps: int = 5) -> Any:
    """A 2:4 sparse A: its metadata go through a ring of shared memory and of tensor memory.  The accumulator starts from a matrix
    that is copied into it."""

    def body(a: Any, b: Any, meta: Any, c: Any, o: Any, a_tile: Any, b_tile: Any, m_tile: Any, *rest: Any) -> None:
        c_tile, acc, metadata, full, empty, c_full, done = rest
        wg = lax.axis_index("wg")

        def load() -> None:
            plgpu.copy_gmem_to_smem(c, c_tile, c_full)

            def step(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(a.at[:, plgpu.ds(i * 64, 64)], a_tile.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(b.at[plgpu.ds(i * 128, 128)], b_tile.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(meta.at[:, plgpu.ds(i, 1)], m_tile.at[slot], full.at[slot])

            lax.fori_loop(0, k_steps, step, None)

        def multiply() -> None:
            plgpu.barrier_wait(c_full)
            plgpu.async_copy_smem_to_tmem(c_tile, acc)

            def step(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.barrier_wait(full.at[slot])
                plgpu.async_copy_sparse_metadata_to_tmem(m_tile.at[slot], metadata.at[slot])
                plgpu.tcgen05_mma(
                    acc, a_tile.at[slot], b_tile.at[slot], empty.at[slot], a_sparse_metadata=metadata.at[slot]
                )

            lax.fori_loop(0, k_steps, step, None)
            plgpu.tcgen05_commit_arrive(done)

        @plgpu.when(wg == 0)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                plgpu.when(warp == 0)(load)
                plgpu.when(warp == 1)(multiply)

        @plgpu.when(wg == 1)
        def _() -> None:
            plgpu.barrier_wait(done)
            o[...] = plgpu.async_load_tmem(acc)
            plgpu.wait_load_tmem()

    k = 128 * k_steps
    rng = np.random.default_rng(7)
    a, b, c = random(1, 128, k // 2), random(2, k, 64), random(3, 128, 64, dtype=np.float32)
    at = np.sort(rng.permuted(np.tile(np.arange(4), (128, k // 4, 1)), axis=-1)[..., :2], axis=-1)
    dense = np.zeros((128, k // 4, 4))
    np.put_along_axis(dense, at, f32(a).reshape(128, k // 4, 2).astype(np.float64), axis=-1)
    meta = np.asarray(plgpu.format_tcgen05_sparse_metadata(at, BF16))
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((128, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 128, 64), BF16, transforms=tiled(rows=128)),
            plgpu.SMEM((2, 128, 64), BF16, transforms=tiled(rows=128)),
            plgpu.SMEM((2, 1, 1, 128, 16), jnp.uint8),
            plgpu.SMEM(
                (128, 64), jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
            ),
            plgpu.TMEM((128, 64), jnp.float32),
            plgpu.TMEM((2, 128, 16), jnp.uint8, layout=plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT),
            plgpu.Barrier(num_barriers=2, num_arrivals=3),
            plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
            plgpu.Barrier(),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        name="sm100_sparse",
        **block_of(2, "sm_100a"),
    )
    places = ("c_tile", "acc", "metadata", "full", "empty", "c_full", "done")
    names = {f"rest[{i}]": name for i, name in enumerate(places)}
    want = dense.reshape(128, k) @ f32(b).astype(np.float64) + c
    return kernel, "sm_100a", (a, b, meta, c), (want.astype(np.float32),), names


@maker
def sm100_handed_out(places: int = 7) -> Any:
    """Launch control in a pair: a warp of each block reads the answers and tells its block, as in the attention kernel."""

    def body(x: Any, o: Any, answers: Any, come: Any, free: Any, place_of: Any, there: Any, read: Any) -> None:
        def ask(state: Any) -> Any:
            turn, _ = state
            slot = lax.rem(turn, 2)
            plgpu.when(turn >= 2)(lambda: plgpu.barrier_wait(free.at[slot]))
            plgpu.try_cluster_cancel(answers.at[slot], come.at[slot])
            plgpu.barrier_wait(come.at[slot])
            (place,), found = plgpu.query_cluster_cancel(answers.at[slot], "place")
            plgpu.barrier_arrive(free.at[slot])
            plgpu.when(turn >= 2)(lambda: plgpu.barrier_wait(read.at[slot]))
            place_of[slot] = jnp.where(found, place, jnp.int32(-1))
            plgpu.barrier_arrive(there.at[slot])
            return turn + 1, found

        def work(state: Any) -> Any:
            turn, place = state
            at = place, lax.axis_index("pair")
            o[at] = plgpu.load(x.at[at], layout=plgpu.Layout.WG_STRIDED) * 2
            slot = lax.rem(turn, 2)
            plgpu.barrier_wait(there.at[slot])
            place = place_of[slot]
            plgpu.barrier_arrive(read.at[slot])
            return turn + 1, place

        zero, wg = jnp.int32(0), lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            lax.while_loop(lambda s: s[1] >= 0, work, (zero, lax.axis_index("place")))

        @plgpu.when(wg == 1)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                asks = functools.partial(lax.while_loop, lambda s: s[1], ask, (zero, jnp.bool_(True)))
                plgpu.when(warp == 0)(lambda: asks() and None)

    x = random(1, places, 2, 128, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[
            plgpu.TryClusterCancelResult(2),
            plgpu.Barrier(num_barriers=2),
            plgpu.ClusterBarrier(collective_axes="pair", num_barriers=2),
            plgpu.SMEM((2,), jnp.int32),
            *(plgpu.Barrier(num_barriers=2) for _ in range(2)),
        ],
        grid=(places,),
        grid_names=("place",),
        cluster=(2,),
        cluster_names=("pair",),
        name="sm100_handed_out",
        **block_of(2, "sm_100a"),
    )
    return kernel, "sm_100a", (x,), (2 * x,), {}
