"""Buffers and registers that asynchronous work still owns: stores and products; blocks of a cluster and of a grid."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import BarrierMisuse, Deadlock, Race
from mosaic_gpu.plan.model import Block, Plan
from mosaic_gpu.simulator.findings import race
from mosaic_gpu.simulator.shadow import Access
from tests.support import out, randoms, tiled

BF16 = ml_dtypes.bfloat16
WGMMA = plgpu.Layout.WGMMA


def edited(plan: Plan, edit: Any) -> Plan:
    """A plan whose steps are what `edit(step)` gives; None: without it."""

    def block(b: Block) -> Block:
        steps = (edit(dataclasses.replace(s, regions=tuple(map(block, s.regions)))) for s in b.steps)
        return dataclasses.replace(b, steps=tuple(s for s in steps if s is not None))

    return dataclasses.replace(plan, roles=tuple(dataclasses.replace(r, body=block(r.body)) for r in plan.roles))


# ---- stores ---------------------------------------------------------------------------------------------------------
def stores(pending: int = 0, read_only: bool = True, commit: bool = True, again: bool = False):
    """A tile out by TMA; its buffer is written again, or what went out is read."""

    @plgpu.kernel(out_type=[out(64, 64), out(64, 64)], scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(x, y, z, s):
        s[...] = plgpu.load(x, layout=WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s, y, commit_group=commit)  # store
        plgpu.wait_smem_to_gmem(pending, wait_read_only=read_only)
        if again:
            z[...] = plgpu.load(y, layout=WGMMA)  # again
        else:
            s[...] = plgpu.load(x, layout=WGMMA)  # reuse
            z[...] = plgpu.load(s, layout=WGMMA)
        plgpu.wait_smem_to_gmem(0)

    return kernel


def test_stores(clean):
    """D4, B5: after the right wait the buffer is free, and what was stored can be read."""
    x = randoms(64, 64)
    for kernel in (stores(), stores(read_only=False), stores(read_only=False, again=True)):
        y, z = clean(kernel, x)
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(z, x)


@pytest.mark.parametrize("options", [dict(pending=1), dict(commit=False)])
def test_source_of_a_store_in_flight(options, found, line_of, assert_at):
    """D1, D6, D7: the wait leaves the store in flight, or does not count it."""
    e = found(stores(**options), randoms(64, 64))
    assert isinstance(e, Race) and e.kind == "buffer in flight"
    assert_at(e, stores, "reuse")
    assert e.other_line.number == line_of(stores, "store") and "wait_smem_to_gmem" in e.remedy
    assert ("closes the group (commit_group=True)" in e.remedy) == ("commit" in options)


@pytest.mark.parametrize("meets", [True, False])
def test_a_store_that_one_warp_has_waited_for(found, clean, meets):
    """D1: what a warp of a `warp_map` waits for, its warpgroup knows when they have met."""

    @plgpu.kernel(out_type=[out(64, 64)] * 2, scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(x, y, z, s):
        s[...] = plgpu.load(x, layout=WGMMA)
        plgpu.commit_smem()

        @plgpu.warp_map
        def warps(warp):
            @plgpu.when(warp == 1)
            def store():
                plgpu.copy_smem_to_gmem(s, y)
                plgpu.wait_smem_to_gmem(0)

        if meets:
            plgpu.commit_smem()
        s[...] = plgpu.load(x, layout=WGMMA)
        z[...] = plgpu.load(s, layout=WGMMA)

    if meets:
        np.testing.assert_array_equal(clean(kernel, randoms(64, 64))[0], randoms(64, 64))
    else:
        e = found(kernel, randoms(64, 64))
        assert isinstance(e, Race) and e.kind == "buffer in flight"
        assert "by block (), warp1, warpgroup 0, warp 1, then a meeting" in e.remedy and "commit_smem()" in e.remedy


def test_result_of_a_store_in_flight(found, assert_at):
    """D4: wait_read_only says nothing about global memory."""
    e = found(stores(again=True), randoms(64, 64))
    assert isinstance(e, Race) and e.kind == "read/write" and e.place.startswith("gmem")
    assert_at(e, stores, "again")


def test_global_memory_has_no_fence_for_tma(found):
    """B3, D10: ordinary stores to global memory, then a copy of them by TMA."""

    @plgpu.kernel(
        out_type=[out(64, 64), out(64, 64)], scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]
    )
    def kernel(x, y, z, s, b):
        y[...] = plgpu.load(x, layout=WGMMA)
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(y, s, b)
        plgpu.barrier_wait(b)
        z[...] = plgpu.load(s, layout=WGMMA)

    e = found(kernel, randoms(64, 64))
    assert isinstance(e, Race) and "copy_smem_to_gmem" in e.remedy


# ---- wgmma ----------------------------------------------------------------------------------------------------------
def ring(wait: int | None):
    """Two slots; the consumer releases each slot while the newest `wait` products are in flight."""

    @plgpu.kernel(
        out_type=out(64, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            s=plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled(BF16)),
            full=plgpu.Barrier(num_barriers=2),
            empty=plgpu.Barrier(num_barriers=2),
        ),
    )
    def kernel(p, x, y, *, s, full, empty):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def produce():
            for i in range(4):
                if i >= 2:
                    plgpu.barrier_wait(empty.at[i % 2])
                plgpu.copy_gmem_to_smem(x.at[i], s.at[i % 2], full.at[i % 2])  # refill

        @plgpu.when(wg == 1)
        def consume():
            tile = plgpu.load(p, layout=WGMMA)

            def scope(acc):
                for i in range(4):
                    plgpu.barrier_wait(full.at[i % 2])
                    plgpu.wgmma(acc, tile, s.at[i % 2])  # product
                    if wait is not None:
                        plgpu.wgmma_wait(wait)
                    plgpu.barrier_arrive(empty.at[i % 2])
                return acc[...]

            y[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    return kernel


@pytest.mark.parametrize("wait", [0, 1, None])
def test_operand_of_a_product_in_flight(wait, clean, found, line_of, assert_at):
    """E4, C18: only products older than the newest n have ended."""
    p, x = randoms(64, 64, dtype=BF16), randoms(4, 64, 64, dtype=BF16, seed=1)
    if wait == 0:
        clean(ring(0), p, x)
        return
    e = found(ring(wait), p, x)
    assert isinstance(e, Race) and e.kind == "buffer in flight" and e.place.startswith("smem s[")
    assert_at(e, ring, "refill")
    assert e.other_line.number == line_of(ring, "product") and "wgmma_wait" in e.remedy


def chained():
    @plgpu.kernel(
        out_type=out(64, 64),
        scratch_types=dict(v=plgpu.SMEM((2, 64, 64), jnp.float16, transforms=tiled(np.float16)), b=plgpu.Barrier()),
    )
    def kernel(p, v_in, o, *, v, b):
        plgpu.copy_gmem_to_smem(v_in, v, b)
        plgpu.barrier_wait(b)
        tile = plgpu.load(p, layout=WGMMA)

        def scope(acc):
            def step(i, t):
                plgpu.wgmma(acc, t, v.at[i])  # product
                plgpu.wgmma_wait(0)
                return t * 0.5  # next

            jax.lax.fori_loop(0, 2, step, tile)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    return kernel


def one_product():
    @plgpu.kernel(
        out_type=out(64, 64),
        scratch_types=dict(v=plgpu.SMEM((64, 64), jnp.float16, transforms=tiled(np.float16)), b=plgpu.Barrier()),
    )
    def kernel(p, v_in, o, *, v, b):
        plgpu.copy_gmem_to_smem(v_in, v, b)
        plgpu.barrier_wait(b)

        def scope(acc):
            plgpu.wgmma(acc, plgpu.load(p, layout=WGMMA), v)  # product
            return acc[...]  # result

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    return kernel


def without_waits(plan: Plan) -> Plan:
    return edited(plan, lambda s: None if s.equation.op == "wgmma_wait" else dataclasses.replace(s, waits=None))


def test_register_operand_in_flight(clean, found, line_of):
    """E2: the planner sees to it that a tile in flight is not written; taken out of the plan, the simulator finds it."""
    arrays = randoms(64, 64, dtype=np.float16), randoms(2, 64, 64, dtype=np.float16, seed=1)
    clean(chained(), *arrays)
    e = found(chained(), *arrays, change=without_waits)
    assert isinstance(e, Race) and e.kind == "register operand in flight"
    assert e.other_line.number == line_of(chained, "product")


def test_accumulator_in_flight(clean, found, line_of, assert_at):
    """E2, E1: reading an accumulator needs a wait, which the planner puts there."""
    arrays = randoms(64, 64, dtype=np.float16), randoms(64, 64, dtype=np.float16, seed=1)
    clean(one_product(), *arrays)
    e = found(one_product(), *arrays, change=without_waits)
    assert isinstance(e, Race) and e.kind == "accumulator in flight"
    assert_at(e, one_product, "result")
    assert e.other_line.number == line_of(one_product, "product")


# ---- blocks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tma", [False, True])
def test_blocks_of_the_grid_are_not_ordered(tma, found):
    """Two blocks write one tile, or one reads what another writes."""

    @plgpu.kernel(out_type=out(64, 64), grid=(2,), grid_names=("g",), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(x, y, s):
        s[...] = plgpu.load(x, layout=WGMMA)
        plgpu.commit_smem()
        if tma:
            plgpu.copy_smem_to_gmem(s, y)
            plgpu.wait_smem_to_gmem(0)
        else:
            y[...] = plgpu.load(s, layout=WGMMA)

    e = found(kernel, randoms(64, 64))
    assert isinstance(e, Race) and e.kind == "write/write" and e.between == "grid"
    assert "block (0,)" in str(e) and "block (1,)" in str(e)


def test_reading_what_another_block_writes(found):
    @plgpu.kernel(out_type=out(128, 64), grid=(2,), grid_names=("g",))
    def kernel(x, y):
        g = jax.lax.axis_index("g")
        y[plgpu.ds(g * 64, 64)] = plgpu.load(x, layout=WGMMA)

        @plgpu.when(g == 1)
        def read():
            y[plgpu.ds(64, 64)] = plgpu.load(y.at[plgpu.ds(0, 64)], layout=WGMMA)

    e = found(kernel, randoms(64, 64))
    assert isinstance(e, Race) and e.kind == "read/write" and e.between == "grid"


def multicast(all_release: bool, both_load: bool = True):
    @plgpu.kernel(
        out_type=out(2, 128, 64),
        cluster=(2,),
        cluster_names=("c",),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            s=plgpu.SMEM((64, 64), jnp.float32),
            full=plgpu.Barrier(),
            empty=plgpu.ClusterBarrier(collective_axes="c") if all_release else plgpu.Barrier(),
        ),
    )
    def kernel(x, y, *, s, full, empty):
        c, wg = jax.lax.axis_index("c"), jax.lax.axis_index("wg")

        def copies():
            for i in range(2):
                if i:
                    plgpu.barrier_wait(empty)
                plgpu.copy_gmem_to_smem(x.at[plgpu.ds(i * 64, 64)], s, full, collective_axes="c")  # refill

        @plgpu.when(wg == 0)
        def produce():
            copies() if both_load else plgpu.when(c == 0)(copies)

        @plgpu.when(wg == 1)
        def consume():
            for i in range(2):
                plgpu.barrier_wait(full)
                y[c, plgpu.ds(i * 64, 64)] = plgpu.load(s, layout=WGMMA)
                if not i:
                    plgpu.barrier_arrive(empty)

    return kernel


def test_multicast(clean, found, assert_at):
    """D12, G5: a slot is free when all blocks that it goes to have released it."""
    x = randoms(128, 64)
    clean(multicast(True), x)
    e = found(multicast(False), x)
    assert isinstance(e, (Race, BarrierMisuse))
    if isinstance(e, Race):
        assert e.between == "cluster"
        assert_at(e, multicast, "refill")


def test_multicast_that_one_block_does_not_join(found):
    """D12, C10: its half of the tile never comes, and nobody announces the other half."""
    assert isinstance(found(multicast(True, both_load=False), randoms(128, 64)), (Deadlock, BarrierMisuse))


@pytest.mark.parametrize("peers", [False, True], ids=["own", "peer's"])
def test_a_peers_barrier_is_not_what_to_wait_on(peers):
    """A copy into this block that ends at another block's barrier: that one waits, and arrives where both can."""
    of = "(0,)+(1,)" if peers else "(0,)+(0,)"
    cleared = f"barrier_wait(barrier full[0] of block {of})"
    who = "block (0,)+(0,), wg1, warpgroup 1"
    before, after = (Access(1, 1, "async", True, "copy", who, None, cleared_by=c) for c in (cleared, ""))
    text = race(before, after, "order", "smem s[0]").remedy
    if peers:
        assert text.startswith(f"{cleared} by block (0,)+(1,), then its arrival on a ClusterBarrier") and who in text
    else:
        assert text == f"{cleared} by {who} before it"
