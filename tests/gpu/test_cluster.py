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
