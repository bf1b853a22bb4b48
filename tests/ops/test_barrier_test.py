"""`barrier_test`, `barrier_arrive_and_wait` and `delay`: results, order, endless polling, machine code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Deadlock, Race, UninitializedRead
from mosaic_gpu.simulator import SimulatorParams, simulate

STRIDED = plgpu.Layout.WG_STRIDED
WAYS = [dict(), dict(timing="early"), dict(shadow="bytes"), *(dict(seed=s) for s in range(1, 7))]


def out(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def until(barrier):
    """Poll, letting a little time pass."""

    def again(_):
        plgpu.delay(100)
        return plgpu.barrier_test(barrier)

    lax.while_loop(lambda done: jnp.logical_not(done), again, plgpu.barrier_test(barrier))


def counting(barrier):
    """Poll and count, so that no two iterations start alike."""

    def again(state):
        return plgpu.barrier_test(barrier), state[1] + 1

    lax.while_loop(lambda state: jnp.logical_not(state[0]), again, (plgpu.barrier_test(barrier), jnp.int32(0)))


def ring(scope="warpgroup", polls=until, slots=2):
    """Tiles by TMA into two slots; their arrival is polled for, by a warpgroup or by one of its warps."""

    def body(x, o, s, full, empty):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            def step(i, _):
                slot = lax.rem(i, slots)
                plgpu.when(i >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                plgpu.copy_gmem_to_smem(x.at[i], s.at[slot], full.at[slot])

            lax.fori_loop(0, 5, step, None)

        @plgpu.when(wg == 1)
        def _():
            def step(i, _):
                slot = lax.rem(i, slots)
                if scope == "warp":

                    @plgpu.warp_map
                    def _(warp):
                        polls(full.at[slot])
                elif polls:
                    polls(full.at[slot])
                else:
                    plgpu.barrier_test(full.at[slot])
                o[i] = plgpu.load(s.at[slot], layout=STRIDED) * 2  # use
                plgpu.barrier_arrive(empty.at[slot])

            lax.fori_loop(0, 5, step, None)

    scratch = [
        plgpu.SMEM((slots, 64, 32), np.float32),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_barriers=slots),
    ]
    return body, dict(out=out(5, 64, 32), num_threads=2, thread_name="wg", scratch_types=scratch)


X = np.random.default_rng(0).standard_normal((5, 64, 32)).astype(np.float32)


@pytest.mark.parametrize("scope", ["warpgroup", "warp"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("polls", [until, counting])
def test_polled_ring(plan, scope, polls, way):
    body, options = ring(scope, polls)
    np.testing.assert_array_equal(simulate(plan(body, X, **options), [X], SimulatorParams(**way))[0], 2 * X)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("scope", ["warpgroup", "warp"])
def test_machine_code(plan, compiled, arch, scope):
    body, options = ring(scope)
    report = compiled(plan(body, X, arch=arch, **options))
    assert report.complaints() == []
    assert report.mnemonics.get("NANOSLEEP", 0) >= 1, report.mnemonics


def test_a_test_that_nobody_looks_at_orders_nothing(plan, assert_at):
    """The tile is used whether or not it has come."""
    body, options = ring(polls=None)
    p = plan(body, X, **options)
    for way in (WAYS[0], *WAYS[2:]):
        with pytest.raises((Race, UninitializedRead)) as found:
            simulate(p, [X], SimulatorParams(**way))
    assert_at(found.value, body, "use")


def test_the_answer(plan):
    """False before the arrival, True once after it, then False: the next phase has not ended."""

    def body(o, b):
        answers = [plgpu.barrier_test(b)]
        plgpu.barrier_arrive(b)
        answers += [plgpu.barrier_test(b), plgpu.barrier_test(b)]
        plgpu.barrier_arrive_and_wait(b)
        answers.append(plgpu.barrier_test(b))
        for i, a in enumerate(answers):
            o[i] = a.astype(jnp.int32)

    p = plan(body, out=out(4, dtype=np.int32), scratch_types=[plgpu.Barrier()])
    for way in WAYS:
        assert simulate(p, [], SimulatorParams(**way))[0].tolist() == [0, 1, 0, 0]


def test_polling_for_what_never_comes(plan):
    def body(o, b):
        until(b)
        o[...] = jnp.zeros((128,), jnp.float32)

    with pytest.raises(Deadlock):
        simulate(plan(body, out=out(128), scratch_types=[plgpu.Barrier()]), [], SimulatorParams(max_steps=20_000))


def test_arguments(plan):
    def run(call):
        plan(lambda o, b: (call(b), None)[1], out=out(128), scratch_types=[plgpu.Barrier()])

    with pytest.raises(TypeError, match="nanos is an int32 scalar"):
        run(lambda b: plgpu.delay(1.5))
    with pytest.raises(TypeError, match="barrier_test: barrier must be a Barrier"):
        plan(lambda o: (plgpu.barrier_test(o), None)[1], out=out(128))
