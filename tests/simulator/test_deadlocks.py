"""What makes JAX's interpreter hang ends here in a `Deadlock`, at once, with the line and what is missing."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Deadlock
from mosaic_gpu.simulator import simulate

BF = jnp.bfloat16
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
X = np.ones((6, 64, 64), np.float32)
OUT = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def under_arrived(x: Any, y: Any, ready: Any) -> None:
    """The barrier expects two arrivals and gets one, of this data."""
    wg = lax.axis_index("wg")

    @plgpu.when(wg == 0)
    def _() -> None:
        plgpu.barrier_arrive(ready)
        plgpu.when(x[0, 0, 0] < 0)(lambda: plgpu.barrier_arrive(ready))

    @plgpu.when(wg == 1)
    def _() -> None:
        plgpu.barrier_wait(ready)  # stuck
        y[...] = plgpu.load(x.at[0], layout=plgpu.Layout.WGMMA)


def crossed(x: Any, y: Any, a: Any, b: Any) -> None:
    """Each waits for the other before it arrives."""
    wg = lax.axis_index("wg")

    @plgpu.when(wg == 0)
    def _() -> None:
        plgpu.barrier_wait(a)  # stuck
        plgpu.barrier_arrive(b)

    @plgpu.when(wg == 1)
    def _() -> None:
        plgpu.barrier_wait(b)
        plgpu.barrier_arrive(a)


def ring(x: Any, y: Any, tile: Any, full: Any, empty: Any) -> None:
    """The consumer releases one slot less than the producer waits for."""
    wg = lax.axis_index("wg")

    @plgpu.when(wg == 0)
    def _() -> None:
        def step(i: Any, _: None) -> None:
            slot = lax.rem(i, 2)
            plgpu.when(i >= 2)(lambda: plgpu.barrier_wait(empty.at[slot]))  # stuck
            plgpu.copy_gmem_to_smem(x.at[i], tile.at[slot], full.at[slot])

        lax.fori_loop(0, 6, step, None)

    @plgpu.when(wg == 1)
    def _() -> None:
        def step(i: Any, _: None) -> None:
            slot = lax.rem(i, 2)
            plgpu.barrier_wait(full.at[slot])
            y[...] = plgpu.load(tile.at[slot], layout=plgpu.Layout.WGMMA)
            plgpu.when(i < 3)(lambda: plgpu.barrier_arrive(empty.at[slot]))

        lax.fori_loop(0, 6, step, None)


def no_commit(x: Any, y: Any, a: Any, b: Any, t: Any, full: Any, done: Any) -> None:
    """The product's end is not announced, of this data."""
    plgpu.copy_gmem_to_smem(x, a, full)
    plgpu.barrier_wait(full)
    announced = x[0, 0].astype(jnp.float32) < 0

    @plgpu.warp_map
    def _(warp: Any) -> None:
        @plgpu.when(warp == 0)
        def _() -> None:
            plgpu.tcgen05_mma(t, a, b, accumulate=False)
            plgpu.when(announced)(lambda: plgpu.tcgen05_commit_arrive(done))

    plgpu.barrier_wait(done)  # stuck


SMEM_RING = [plgpu.SMEM((2, 64, 64), jnp.float32), plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2)]
TWO = dict(num_threads=2, thread_name="wg")
CASES = {
    "under_arrived": (under_arrived, X, [plgpu.Barrier(num_arrivals=2)], TWO, "missing: 1 arrival of 2"),
    "crossed": (crossed, X, [plgpu.Barrier(), plgpu.Barrier()], TWO, "waits for each other"),
    "ring": (ring, X, SMEM_RING, TWO, "waits for each other"),
    "no_commit": (
        no_commit,
        np.ones((128, 64), BF),
        [
            plgpu.SMEM((128, 64), BF, transforms=TILED),
            plgpu.SMEM((64, 64), BF, transforms=TILED),
            plgpu.TMEM((128, 64), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        {},
        "could come from tcgen05_commit_arrive at",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", [dict(), dict(timing="early"), dict(seed=1), dict(checks=False)], ids=str)
def test_deadlock_at_once(plan_of: Any, assert_at: Any, name: str, way: dict[str, Any]) -> None:
    body, x, scratch, threads, words = CASES[name]
    plan = plan_of(
        plgpu.kernel(body, OUT, scratch_types=scratch, **threads),
        x,
        arch="sm_100a" if name == "no_commit" else "sm_90a",
    )
    if name == "no_commit":
        way = {**way, "uninitialized": "zero"}  # B, which nobody writes here, is another story
    begun = time.perf_counter()
    with pytest.raises(Deadlock, match="none of") as e:
        simulate(plan, [x], **way)
    assert time.perf_counter() - begun < 1
    assert_at(e.value, body, "stuck")
    assert words in e.value.message, e.value.message
