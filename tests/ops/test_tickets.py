"""Numbers that a semaphore hands out: tiles by ticket, for a warpgroup, a thread and a warp; what a ticket does not order."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race
from mosaic_gpu.simulator import SimulatorParams, simulate
from tests.ops.test_semaphores import SEMAPHORE, STRIDED, WAYS, found
from tests.support import out
from tests.support import randoms as numbers

TILES = 11


def by_ticket(who):
    """Blocks that take their next tile from a counter.  who: a warpgroup, a thread that hands the number on, or a warp."""

    def body(x, o, blocks, s, tile, full, empty):
        b, wg = lax.axis_index("b"), lax.axis_index("wg")

        def work(t):
            o[t] = plgpu.load(x.at[t], layout=STRIDED) * 2
            blocks[t] = b

        def ask(t):
            return plgpu.semaphore_fetch_add(s)

        def step(t):
            work(t)
            return ask(t)

        if who == "warpgroup":
            plgpu.when(wg == 0)(lambda: lax.while_loop(lambda t: t < TILES, step, ask(0)))
            return

        def hand_on(carry):
            i, _ = carry
            plgpu.when(i > 0)(lambda: plgpu.barrier_wait(empty))
            t = ask(0)
            tile[0] = t
            plgpu.barrier_arrive(full)
            return i + 1, t

        def asking():
            lax.while_loop(lambda c: c[1] < TILES, hand_on, (jnp.int32(0), jnp.int32(-1)))

        @plgpu.when(wg == 1)
        def _():
            if who == "warp":
                plgpu.warp_map(lambda w: plgpu.when(w == 2)(asking))
            else:
                asking()

        @plgpu.when(wg == 0)
        def _():
            def take(t):
                plgpu.barrier_wait(full)
                t = tile[0]
                plgpu.barrier_arrive(empty)
                plgpu.when(t < TILES)(lambda: work(t))
                return t

            lax.while_loop(lambda t: t < TILES, take, jnp.int32(-1))

    scratch = [SEMAPHORE, plgpu.SMEM((1,), np.int32), plgpu.Barrier(), plgpu.Barrier()]
    grid = dict(grid=(3,), grid_names=("b",), num_threads=2, thread_name="wg")
    return body, dict(grid, scratch_types=scratch, out=[out(TILES, 128), out(TILES, dtype=np.int32)])


@pytest.mark.parametrize("who", ["warpgroup", "thread", "warp"])
def test_tiles_by_ticket(plan, who):
    """Every tile once, whoever comes first."""
    body, options = by_ticket(who)
    x = numbers(TILES, 128)
    p = plan(body, x, **options)
    shares = set()
    for way in WAYS:
        o, blocks = simulate(p, [x], SimulatorParams(**way))
        np.testing.assert_array_equal(o, 2 * x)
        shares.add(tuple(np.bincount(blocks, minlength=3)))
    assert len(shares) > 1  # the order of events decides


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("who", ["warpgroup", "thread", "warp"])
def test_ticket_compiles(plan, compiled, who, arch):
    body, options = by_ticket(who)
    report = compiled(plan(body, numbers(TILES, 128), arch=arch, **options))
    assert report.complaints() == [] and any(m.startswith("ATOMG") or m == "ATOM" for m in report.mnemonics)


def test_a_ticket_orders_nothing(plan, line_of):
    """What was written before another block's ticket is not there for whoever takes the next."""

    def body(start, parts, o, s):
        b = lax.axis_index("b")

        @plgpu.when(b == 0)
        def _():
            parts[...] = jnp.ones((128,), jnp.float32)  # written
            plgpu.semaphore_fetch_add(s)

        @plgpu.when(b == 1)
        def _():
            lax.while_loop(lambda t: t < 1, lambda t: plgpu.semaphore_fetch_add(s, 0), jnp.int32(0))
            o[...] = plgpu.load(parts, layout=STRIDED)  # looked at

    grid = dict(grid=(2,), grid_names=("b",), scratch_types=[SEMAPHORE], input_output_aliases={0: 0})
    error = found(plan(body, numbers(128), out=[out(128), out(128)], **grid), [numbers(128)], Race)
    lines = {error.line.number, error.other_line.number}
    assert lines == {line_of(body, "written"), line_of(body, "looked at")}
