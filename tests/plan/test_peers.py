"""Arrivals and waits have the cluster's scope where, and only where, ordinary accesses of several blocks meet."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.kernels.sm90 import matmul
from mosaic_gpu.plan.build import build_plan


def text(body: Any, *arrays: Any, scratch: Any, outs: Any, cluster: int = 2) -> str:
    kernel = plgpu.kernel(
        body, outs, scratch_types=scratch, cluster=(cluster,), cluster_names=("pair",), num_threads=2, thread_name="wg"
    )
    return emit(build_plan(kernel.program(*arrays), "sm_90a"))


def filled_by_multicast(read: bool, collective: bool = True) -> str:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def body(x: Any, out: Any, tile: Any, full: Any, empty: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 1)
        def _() -> None:
            axes = "pair" if collective else None
            plgpu.copy_gmem_to_smem(x.at[plgpu.ds(0, 64)], tile, full.at[0], collective_axes=axes)
            plgpu.barrier_wait(empty.at[0])

        @plgpu.when(wg == 0)
        def _() -> None:
            plgpu.barrier_wait(full.at[0])
            if read:
                out[...] = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(empty.at[0])

    scratch = [
        plgpu.SMEM((64, 64), jnp.float32),
        plgpu.Barrier(num_barriers=1),
        plgpu.ClusterBarrier(collective_axes="pair", num_barriers=1),
    ]
    return text(body, x, scratch=scratch, outs=jax.ShapeDtypeStruct((64, 64), jnp.float32))


@pytest.mark.parametrize(
    ("read", "collective", "released"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_tile_that_a_peer_refills(read: bool, collective: bool, released: bool) -> None:
    """Loads have to be over when the other block is told that it may write; without loads or multicast nothing has to."""
    source = filled_by_multicast(read, collective)
    assert ("mbarrier_arrive_cluster_release(smem" in source) is released
    assert ("mbarrier_arrive_cluster(smem" in source) is not released
    assert "mbarrier_wait_cluster(smem" not in source  # the role that refills reads nothing itself


def test_global_memory_that_one_block_writes_and_the_other_reads() -> None:
    def body(out: Any, ready: Any) -> None:
        @plgpu.when(lax.axis_index("wg") == 0)
        def _() -> None:
            block = lax.axis_index("pair")
            out[block, 0:64] = jnp.full((64,), 1.0, jnp.float32)
            plgpu.barrier_arrive(ready.at[0])
            plgpu.barrier_wait(ready.at[0])
            out[block, 64:128] = plgpu.load(out.at[1 - block, plgpu.ds(0, 64)])

    scratch = [plgpu.ClusterBarrier(collective_axes="pair", num_barriers=1)]
    source = text(body, scratch=scratch, outs=jax.ShapeDtypeStruct((2, 128), jnp.float32))
    assert "mbarrier_arrive_cluster_release(smem" in source and "mbarrier_wait_cluster(smem" in source


@pytest.mark.parametrize("outside", [False, True])
def test_warps_that_read_nothing_pay_nothing(outside: bool) -> None:
    """Of the warps of a warpgroup only the one that reads what peers refill; all of them where the warpgroup read it before."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def body(x: Any, out: Any, tile: Any, full: Any, empty: Any, other: Any) -> None:
        @plgpu.when(lax.axis_index("wg") == 0)
        def _() -> None:
            if outside:
                out[...] = plgpu.load(tile, layout=plgpu.Layout.WGMMA)

            @plgpu.warp_map
            def _(warp: Any) -> None:
                @plgpu.when(warp == 0)
                def _() -> None:
                    plgpu.copy_gmem_to_smem(x.at[plgpu.ds(0, 64)], tile, full.at[0], collective_axes="pair")
                    plgpu.barrier_wait(full.at[0])
                    out[0, 0] = tile[0, 0]
                    plgpu.barrier_arrive(empty.at[0])

                @plgpu.when(warp == 1)
                def _() -> None:
                    plgpu.barrier_arrive(other.at[0])
                    plgpu.barrier_wait(other.at[0])

    scratch = [
        plgpu.SMEM((64, 64), jnp.float32),
        plgpu.Barrier(num_barriers=1),
        *(plgpu.ClusterBarrier(collective_axes="pair", num_barriers=1) for _ in range(2)),
    ]
    source = text(body, x, scratch=scratch, outs=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    kinds = ("arrive_cluster_release", "arrive_cluster", "wait_cluster")
    counts = [source.count(f"mbarrier_{kind}(smem") for kind in kinds]
    assert counts == ([4, 0, 1] if outside else [2, 2, 0])


def test_the_matmul_pays_nothing() -> None:
    """Its tiles are read by wgmma alone: a membar in its loop would cost it the cluster's gain."""
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    config = matmul.MatmulConfig(cluster_m=2)
    kernel = matmul._kernel(512, 512, jnp.dtype(jnp.bfloat16), config)
    source = emit(build_plan(kernel.program(x, x), "sm_90a"))
    assert "mbarrier_arrive_cluster(smem" in source
    assert "mbarrier_arrive_cluster_release(smem" not in source and "mbarrier_wait_cluster(smem" not in source
