"""Clusters and multicast copies on a GPU; the same kernel runs in the simulator in tests/simulator."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.runtime.device import default_arch

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
TILES = 6


def pair_kernel(columns: int) -> Any:
    """Both blocks of a cluster get every (64, columns) tile of x by multicast; block r writes its copy times r + 1."""

    def body(x: Any, out: Any, tile: Any, full: Any, empty: Any) -> None:
        wg, block = lax.axis_index("wg"), lax.axis_index("pair")

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(
                    x.at[plgpu.ds(i * 64, 64)], tile.at[slot], full.at[slot], collective_axes="pair"
                )

            lax.fori_loop(0, TILES, step, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(full.at[slot])
                value = plgpu.load(tile.at[slot], layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(empty.at[slot])
                out[block, plgpu.ds(i * 64, 64)] = value * (block + 1).astype(jnp.float32)

            lax.fori_loop(0, TILES, step, None)

    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((2, 64 * TILES, columns), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 64, columns), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            plgpu.ClusterBarrier(collective_axes="pair", num_barriers=2),
        ],
        cluster=(2,),
        cluster_names=("pair",),
        num_threads=2,
        thread_name="wg",
        interpret=None,
    )


@pytest.mark.parametrize("columns", (8, 64))
def test_multicast_reaches_both_blocks(columns: int) -> None:
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    x = rng.standard_normal((64 * TILES, columns)).astype(np.float32)
    f, on_gpu = jax.jit(pair_kernel(columns)), jnp.asarray(x)
    for _ in range(2000):  # one in 70 was wrong when arrivals did not wait for the loads before them
        np.testing.assert_array_equal(f(on_gpu), np.stack([x, 2 * x]))


def test_donated_buffers_and_several_calls_in_one_program() -> None:
    f = pair_kernel(64)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = f(x)[0] + 1.0
        return x

    x = np.random.default_rng(1).standard_normal((64 * TILES, 64)).astype(np.float32)
    out = jax.jit(chain, donate_argnums=0)(jnp.asarray(x))
    np.testing.assert_allclose(out, x + 3, rtol=1e-6)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("blocks", [2, 4])
def test_other_blocks_shared_memory(blocks: int, store: bool) -> None:
    """Tiles go around the cluster, stored into the next block's memory or loaded from the one before; TMA takes them out."""

    def body(x: Any, out: Any, tile: Any, met: Any) -> None:
        me = lax.axis_index("c")
        other = plgpu.rem(me + (1 if store else blocks - 1), blocks)

        def meet(slot: int) -> None:
            plgpu.barrier_arrive(met.at[slot])
            plgpu.barrier_wait(met.at[slot])

        def step(i: Any, value: Any) -> Any:
            (plgpu.cluster_ref(tile, {"c": other}) if store else tile)[...] = value
            plgpu.commit_smem()
            meet(0)
            plgpu.copy_smem_to_gmem(tile, out.at[i, me])
            value = plgpu.load(tile if store else plgpu.cluster_ref(tile, {"c": other}), layout=plgpu.Layout.WGMMA)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            meet(1)
            return value

        lax.fori_loop(0, TILES, step, plgpu.load(x.at[me], layout=plgpu.Layout.WGMMA))

    f = jax.jit(
        plgpu.kernel(
            body,
            jax.ShapeDtypeStruct((TILES, blocks, 64, 64), jnp.float32),
            scratch_types=[
                plgpu.SMEM((64, 64), jnp.float32),
                plgpu.ClusterBarrier(collective_axes="c", num_barriers=2),
            ],
            cluster=(blocks,),
            cluster_names=("c",),
            interpret=None,
        )
    )
    x = np.random.default_rng(2).standard_normal((blocks, 64, 64)).astype(np.float32)
    want = np.stack([np.roll(x, i + (1 if store else 0), axis=0) for i in range(TILES)])
    for _ in range(500):
        np.testing.assert_array_equal(f(jnp.asarray(x)), want)
