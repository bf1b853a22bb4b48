"""Kernels with a mistake in them: the right error, at the right line."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import BarrierMisuse, Deadlock, IllegalInstruction, Leak, OutOfBounds, Race, UninitializedRead
from mosaic_gpu.simulator import UnwrittenOutput, simulate
from tests.support import out, randoms, tiled

BF16 = ml_dtypes.bfloat16


def pipeline(*, arrive: bool = True, wait_empty: bool = True, arrivals: int = 1, wait_full: bool = True):
    """Producer and consumer over one slot, with parts left out.  arrive: False: the consumer would release it for other data."""

    @plgpu.kernel(
        out_type=out(4, 64, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            s=plgpu.SMEM((64, 64), jnp.float32),
            full=plgpu.Barrier(num_arrivals=arrivals),
            empty=plgpu.Barrier(),
        ),
    )
    def kernel(x, y, *, s, full, empty):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def produce():
            for i in range(4):
                plgpu.copy_gmem_to_smem(x.at[i], s, full)  # copy
                if wait_empty and i < 3:
                    plgpu.barrier_wait(empty)  # wait for empty

        @plgpu.when(wg == 1)
        def consume():
            for i in range(4):
                if wait_full:
                    plgpu.barrier_wait(full)  # wait for full
                y[i] = plgpu.load(s, layout=plgpu.Layout.WGMMA)  # read
                plgpu.when(arrive or x[0, 0, 0] > 1e9)(lambda: plgpu.barrier_arrive(empty))

    return kernel


def test_pipeline_of_one_slot(run_both):
    x = randoms(4, 64, 64)
    np.testing.assert_array_equal(run_both(pipeline(), x)[0], x)


def test_deadlock_names_everybody(run, line_of, assert_at):
    """The consumer forgets to release the slot."""
    with pytest.raises(Deadlock) as e:
        run(pipeline(arrive=False), randoms(4, 64, 64))
    text = str(e.value)
    assert_at(e.value, pipeline, "wait for empty")
    assert "2 unfinished threads" in text
    producer, consumer = text.split("\n- ")[1:]
    assert "warpgroup 0" in producer and f":{line_of(pipeline, 'wait for empty')} " in producer
    assert re.search(r"waits for phase 0 of barrier empty\[0\].*missing: 1 arrival of 1", producer)
    assert "arrived: none" in producer
    assert "warpgroup 1" in consumer and f":{line_of(pipeline, 'wait for full')} " in consumer
    assert re.search(r"waits for phase 1 of barrier full\[0\].*missing: 1 arrival of 1", consumer)


def test_deadlock_tells_what_has_arrived(run, line_of):
    """The barrier wants two arrivals and only the copy arrives."""
    with pytest.raises(Deadlock) as e:
        run(pipeline(arrivals=2), randoms(4, 64, 64))
    assert re.search(
        r"missing: 1 arrival of 2\n.*arrived: .*warpgroup 0 \(copy of 16384 bytes\) at .*:\d+", str(e.value)
    )
    assert str(line_of(pipeline, "copy")) in str(e.value)


def test_deadlock_report_is_the_same_every_time(run):
    texts = set()
    kernel = pipeline(arrive=False)
    for _ in range(3):
        with pytest.raises(Deadlock) as e:
            run(kernel, randoms(4, 64, 64))
        texts.add(str(e.value))
    assert len(texts) == 1


def test_producer_does_not_wait(run, assert_at):
    """It announces the second tile while the first is still on its way."""
    with pytest.raises(BarrierMisuse, match="too many arrivals.*still waits for .* bytes") as e:
        run(pipeline(wait_empty=False), randoms(4, 64, 64))
    assert_at(e.value, pipeline, "copy")


def test_nobody_waits_for_the_copy(run, assert_at):
    with pytest.raises((UninitializedRead, Race)) as e:
        run(pipeline(wait_full=False), randoms(4, 64, 64))
    assert_at(e.value, pipeline, "read")


def test_unwritten_shared_memory(run, assert_at):
    @plgpu.kernel(out_type=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(y, s):
        y[...] = plgpu.load(s, layout=plgpu.Layout.WGMMA)  # nothing there

    with pytest.raises(UninitializedRead, match="4096 of 4096") as e:
        run(kernel)
    assert_at(e.value, test_unwritten_shared_memory, "nothing there")
    assert (run(kernel, uninitialized="zero")[0] == 0).all()


@pytest.mark.parametrize("transforms", [(), tiled(np.float32)], ids=["plain", "tiled"])
@pytest.mark.parametrize("checks", ["regions", "bytes"])
def test_half_a_tile(run, assert_at, line_of, transforms, checks):
    """What is missing, and who wrote the rest, in the coordinates of what is read."""

    def body(x, y, s, full):
        plgpu.copy_gmem_to_smem(x.at[:32], s.at[:32], full)  # copy
        plgpu.barrier_wait(full)
        s[40] = x[40]  # store
        plgpu.commit_smem()
        y[...] = s.at[8:][...]  # read

    scratch = [plgpu.SMEM((64, 64), jnp.float32, transforms=transforms), plgpu.Barrier()]
    with pytest.raises(UninitializedRead) as e:
        run(plgpu.kernel(body, out(56, 64), scratch_types=scratch), randoms(64, 64), shadow=checks)
    assert_at(e.value, body, "read")
    text = str(e.value)
    assert "1984 of 3584 elements, [24:56, 0:64], of that 1984 elements" in text
    assert re.search(rf"copy_gmem_to_smem at .*:{line_of(body, 'copy')} in \S*body wrote \[0:24, 0:64\]\n", text), text
    assert re.search(rf"a store at .*:{line_of(body, 'store')} in \S*body wrote \[32:33, 0:64\]\n", text), text


@pytest.mark.parametrize("transforms", [(), tiled(np.float32)])
def test_half_a_tile_leaves(run, assert_at, line_of, transforms):
    """The same of a copy out, whose boxes have other coordinates where the buffer is tiled."""

    def body(x, y, s, full):
        plgpu.copy_gmem_to_smem(x.at[:, 32:], s.at[:, 32:], full)  # copy
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(s, y)  # leaves
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((64, 64), jnp.float32, transforms=transforms), plgpu.Barrier()]
    with pytest.raises(UninitializedRead, match=r"of s:smem .* 2048 of 4096 elements, \[0:64, 0:32\]") as e:
        run(plgpu.kernel(body, out(64, 64), scratch_types=scratch), randoms(64, 64))
    assert_at(e.value, body, "leaves")
    assert re.search(rf"copy_gmem_to_smem at .*:{line_of(body, 'copy')} in \S*body wrote \[0:64, 32:64\]", str(e.value))


def test_unwritten_output(run):
    @plgpu.kernel(out_type=out(64, 64))
    def kernel(x, y):
        y[...] = plgpu.load(y, layout=plgpu.Layout.WGMMA) + plgpu.load(x, layout=plgpu.Layout.WGMMA)

    with pytest.raises(UninitializedRead, match="output 0 is read before it is written"):
        run(kernel, randoms(64, 64))


def test_lapped_barrier(run, assert_at):
    @plgpu.kernel(num_threads=2, thread_name="wg", out_type=out(4), scratch_types=[plgpu.Barrier(num_arrivals=3)])
    def kernel(x, y, b):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def first():
            for _ in range(2):
                plgpu.barrier_arrive(b)

        @plgpu.when(wg == 1)
        def second():
            for _ in range(4):
                plgpu.barrier_arrive(b)
            plgpu.barrier_wait(b)  # lapped

    with pytest.raises(BarrierMisuse, match="waits for phase 0, but 2 phases have completed: it was lapped") as e:
        run(kernel, randoms(4))
    assert_at(e.value, test_lapped_barrier, "lapped")


def test_a_role_that_lags(run):
    """It sees the first phase in time, and no other: nothing is lost here, but the next tile would wait for the wrong phase."""

    @plgpu.kernel(
        num_threads=2, thread_name="wg", out_type=out(4), scratch_types=dict(b=plgpu.Barrier(), c=plgpu.Barrier())
    )
    def kernel(x, y, *, b, c):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def first():
            plgpu.barrier_arrive(b)
            plgpu.barrier_wait(c)
            plgpu.barrier_arrive(b)
            plgpu.barrier_arrive(b)

        @plgpu.when(wg == 1)
        def second():
            plgpu.barrier_wait(b)
            plgpu.barrier_arrive(c)

    with pytest.raises(Leak, match="3 phases have ended, of which warp 0 of .*warpgroup 1 has waited for 1"):
        run(kernel, randoms(4))


def test_index_outside_at_run_time(run, assert_at):
    @plgpu.kernel(out_type=out(4, 64, 64), scratch_types=[plgpu.SMEM((2, 64, 64), jnp.float32)])
    def kernel(x, y, s):
        def step(i, _):
            s[i] = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA)  # outside

        jax.lax.fori_loop(0, 4, step, None)

    with pytest.raises(OutOfBounds, match="index 2 along axis 0") as e:
        run(kernel, randoms(4, 64, 64))
    assert_at(e.value, test_index_outside_at_run_time, "outside")


def test_operand_outside_at_run_time(run, assert_at):
    """A slot past the ring is another buffer's memory."""

    @plgpu.kernel(
        out_type=out(64, 64),
        scratch_types=dict(
            s=plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled(BF16)),
            t=plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiled(BF16)),
            b=plgpu.Barrier(num_arrivals=2),
        ),
    )
    def kernel(p, x, y, *, s, t, b):
        plgpu.copy_gmem_to_smem(x, s, b)
        plgpu.copy_gmem_to_smem(x, t, b)
        plgpu.barrier_wait(b)
        tile = plgpu.load(p, layout=plgpu.Layout.WGMMA)

        def scope(acc):
            def step(i, _):
                plgpu.wgmma(acc, tile, s.at[i])  # outside
                plgpu.wgmma_wait(0)

            jax.lax.fori_loop(0, 3, step, None)
            return acc[...]

        y[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    with pytest.raises(OutOfBounds, match=r"of s:smem .*: index 2 along axis 0") as e:
        run(kernel, randoms(64, 64, dtype=BF16), randoms(2, 64, 64, dtype=BF16))
    assert_at(e.value, test_operand_outside_at_run_time, "outside")


@pytest.mark.parametrize("what", ["copy in", "copy out", "wgmma", "load"])
def test_outside_along_an_inner_axis(run, assert_at, what):
    """What lies behind the end of an inner axis is the next slot, in the same buffer."""

    @plgpu.kernel(
        out_type=out(64, 64, dtype=jnp.bfloat16),
        scratch_types=dict(s=plgpu.SMEM((2, 2, 64, 64), jnp.bfloat16, transforms=tiled(BF16)), b=plgpu.Barrier()),
    )
    def kernel(x, at, y, *, s, b):
        i = at[0]
        plgpu.copy_gmem_to_smem(x, s.at[1, 0], b)
        plgpu.barrier_wait(b)
        if what == "copy in":
            plgpu.copy_gmem_to_smem(x, s.at[0, i], b)  # copy in
            plgpu.barrier_wait(b)
        if what == "copy out":
            plgpu.copy_smem_to_gmem(s.at[0, i], y)  # copy out
            plgpu.wait_smem_to_gmem(0)
        if what == "wgmma":

            def scope(acc):
                plgpu.wgmma(acc, s.at[1, 0], s.at[0, i])  # wgmma
                return plgpu.wgmma_accumulator_load(acc)

            y[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64))).astype(jnp.bfloat16)
        if what == "load":
            y[...] = plgpu.load(s.at[0, i], layout=plgpu.Layout.WGMMA)  # load

    for i, said in ((2, "index 2 along axis 1"), (-1, "index -1 along axis 1")):
        with pytest.raises(OutOfBounds, match=f"of s:smem .*: {said}") as e:
            run(kernel, randoms(64, 64, dtype=BF16), np.array([i], np.int32))
        assert_at(e.value, test_outside_along_an_inner_axis, what)


def test_store_in_flight_at_the_end(run, assert_at):
    @plgpu.kernel(out_type=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(x, y, s):
        s[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s, y)  # not waited for

    with pytest.raises(Leak, match="wait_smem_to_gmem") as e:
        run(kernel, randoms(64, 64))
    assert_at(e.value, test_store_in_flight_at_the_end, "not waited for")


def test_group_of_stores_open_at_the_end(run, assert_at):
    @plgpu.kernel(out_type=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(x, y, s):
        s[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s, y, commit_group=False)  # left open
        plgpu.wait_smem_to_gmem(0)

    with pytest.raises(Leak, match="a group of stores open: .* Leave commit_group=False out there") as e:
        run(kernel, randoms(64, 64))
    assert_at(e.value, test_group_of_stores_open_at_the_end, "left open")


def test_copy_in_flight_at_the_end(run, assert_at):
    @plgpu.kernel(out_type=out(4), scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()])
    def kernel(x, y, s, b):
        plgpu.copy_gmem_to_smem(x, s, b)  # not waited for

    with pytest.raises(Leak, match="nobody has waited") as e:
        run(kernel, randoms(64, 64))
    assert_at(e.value, test_copy_in_flight_at_the_end, "not waited for")


def test_named_barrier_deadlock(run):
    @plgpu.kernel(
        num_threads=2, thread_name="wg", out_type=out(4), scratch_types=[plgpu.NamedBarrier(num_warpgroups=2)]
    )
    def kernel(x, y, n):
        @plgpu.when(jax.lax.axis_index("wg") == 1)
        def one():
            plgpu.named_barrier_sync(n)

    with pytest.raises(Deadlock, match="waits at named_barrier .* for 1 of 2 warpgroups; arrived: .*warpgroup 1"):
        run(kernel, randoms(4))


def missing_fence(store: bool):
    """Ordinary stores, then TMA or the tensor core read the buffer, with no commit_smem() between."""

    @plgpu.kernel(
        out_type=out(64, 64, dtype=jnp.bfloat16),
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(BF16))],
    )
    def kernel(x, y, s):
        v = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        s[...] = v  # ordinary
        if store:
            plgpu.copy_smem_to_gmem(s, y)  # reader
            plgpu.wait_smem_to_gmem(0)
        else:

            def scope(acc):
                plgpu.wgmma(acc, v, s)
                return acc[...]

            y[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64))).astype(jnp.bfloat16)

    return kernel


@pytest.mark.parametrize("store", [True, False])
def test_missing_fence(store, run, line_of, assert_at):
    with pytest.raises(Race, match="commit_smem") as e:
        run(missing_fence(store), randoms(64, 64, dtype=BF16))
    assert e.value.kind == "missing commit_smem"
    assert f":{line_of(missing_fence, 'ordinary')} " in str(e.value)
    if store:
        assert_at(e.value, missing_fence, "reader")


def test_slot_released_before_the_product_is_done(run, line_of, assert_at):
    """The consumer arrives right after issuing its wgmma, so the next tile may overwrite the operand."""

    @plgpu.kernel(
        out_type=out(64, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            s=plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(BF16)), full=plgpu.Barrier(), empty=plgpu.Barrier()
        ),
    )
    def kernel(p, x, y, *, s, full, empty):
        wg = jax.lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def produce():
            plgpu.copy_gmem_to_smem(x.at[0], s, full)
            plgpu.barrier_wait(empty)
            plgpu.copy_gmem_to_smem(x.at[1], s, full)  # refill

        @plgpu.when(wg == 1)
        def consume():
            tile = plgpu.load(p, layout=plgpu.Layout.WGMMA)

            def scope(acc):
                plgpu.barrier_wait(full)
                plgpu.wgmma(acc, tile, s)  # product
                plgpu.barrier_arrive(empty)  # too early
                plgpu.barrier_wait(full)
                plgpu.wgmma(acc, tile, s)
                return acc[...]

            y[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    p, x = randoms(64, 64, dtype=BF16), randoms(2, 64, 64, dtype=BF16, seed=1)
    for timing in ("late", "early"):
        with pytest.raises(Race, match=r"wgmma_wait\(n\) by .*warpgroup 1, then its arrival on a barrier") as e:
            run(kernel, p, x, timing=timing)
        assert_at(e.value, test_slot_released_before_the_product_is_done, "refill")
        assert e.value.kind == "buffer in flight" and e.value.place == "smem s"
        assert e.value.other_line.number == line_of(test_slot_released_before_the_product_is_done, "product")
    # The values show it, too.
    late, early = (run(kernel, p, x, timing=t, checks=False)[0] for t in ("late", "early"))
    np.testing.assert_allclose(early, p.astype(np.float32) @ (x[0].astype(np.float32) + x[1]), rtol=1e-4, atol=1e-3)
    assert not np.allclose(late, early)


def test_buffer_reused_while_its_store_is_in_flight(run, assert_at):
    @plgpu.kernel(out_type=out(2, 64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(x, y, s):
        for i in range(2):
            s[...] = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA)  # reuse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s, y.at[i])
        plgpu.wait_smem_to_gmem(0)

    x = randoms(2, 64, 64)
    for timing in ("late", "early"):
        with pytest.raises(Race, match="wait_smem_to_gmem") as e:
            run(kernel, x, timing=timing)
        assert_at(e.value, test_buffer_reused_while_its_store_is_in_flight, "reuse")
        assert e.value.kind == "buffer in flight"
    np.testing.assert_array_equal(run(kernel, x, timing="early", checks=False)[0], x)
    np.testing.assert_array_equal(run(kernel, x, timing="late", checks=False)[0], np.stack([x[1], x[1]]))


def test_wrong_arguments(plan_of):
    @plgpu.kernel(out_type=out(4))
    def kernel(x, y):
        y[0] = x[0]

    plan = plan_of(kernel, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="takes 1 arrays, not 0"):
        simulate(plan, [])
    with pytest.raises(ValueError, match="traced for float32"):
        simulate(plan, [np.zeros(4, np.int32)])
    # Extents are run-time values.
    with pytest.warns(UnwrittenOutput, match="3 of 4"):
        assert simulate(plan, [np.ones(9, np.float32)])[0][0] == 1


def test_a_multicast_of_different_tiles(plan_of):
    """Each block brings its part of what it names: from two tiles the result would be halves of both."""

    def body(x, o, tile, full):
        block = jax.lax.axis_index("c")
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(block * 64, 64)], tile, full, collective_axes="c")  # copy
        plgpu.barrier_wait(full)
        o[block] = tile[...]

    kernel = plgpu.kernel(
        body,
        out(2, 64, 64),
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
        cluster=(2,),
        cluster_names=("c",),
    )
    x = randoms(128, 64)
    with pytest.raises(IllegalInstruction, match="a multicast along c of different tiles: .* index it by nothing") as e:
        simulate(plan_of(kernel, x), [x])
    assert e.value.line is not None
