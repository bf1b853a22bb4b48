"""Loops that never end are reported, at once where that can be proven."""

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

X = np.zeros((64, 64), np.float32)


def kernel_of(loop: Any, scratch: tuple[Any, ...] = (), **options: Any) -> Any:
    def body(x: Any, y: Any, *rest: Any) -> None:
        loop(*rest)
        y[...] = plgpu.load(x, layout=plgpu.Layout.WGMMA)

    return plgpu.kernel(body, jax.ShapeDtypeStruct(X.shape, X.dtype), scratch_types=scratch, **options)


def stays() -> None:
    lax.while_loop(lambda i: i < 10, lambda i: i * 1, jnp.int32(0))  # stays


def alternates() -> None:
    lax.while_loop(lambda i: i < 10, lambda i: 5 - i, jnp.int32(2))  # alternates


def late_cycle() -> None:
    lax.while_loop(lambda i: i < 100, lambda i: lax.rem(i + 1, 20), jnp.int32(-3))  # late_cycle


@pytest.mark.parametrize("loop", (stays, alternates, late_cycle))
@pytest.mark.parametrize("way", (dict(), dict(seed=3), dict(checks=False)))
def test_values_that_come_round_again(run: Any, assert_at: Any, loop: Any, way: Any) -> None:
    begun = time.perf_counter()
    with pytest.raises(Deadlock, match=r"endless loop: .*does the same for ever") as e:
        run(kernel_of(loop), X, **way)
    assert_at(e.value, loop, loop.__name__)
    assert time.perf_counter() - begun < 5  # with the trace


def counts() -> None:
    lax.while_loop(lambda i: i >= 0, lambda i: lax.rem(i + 1, jnp.int32(2**30)), jnp.int32(0))  # counts


def test_a_counter_that_nobody_stops(run: Any, assert_at: Any) -> None:
    with pytest.raises(Deadlock, match=r"no end in sight: .* SimulatorParams\(max_steps=50000\)") as e:
        run(kernel_of(counts), X, max_steps=5000)
    assert_at(e.value, counts, "counts")


def test_a_limit_below_a_turn_is_met_at_the_next_one(run: Any) -> None:
    """What the message says to set is more than was run."""
    with pytest.raises(Deadlock, match=r"has run 512 steps.* SimulatorParams\(max_steps=1024\)"):
        run(kernel_of(counts), X, max_steps=5)


def test_a_loop_that_ends_is_none(run: Any) -> None:
    def loop() -> None:
        lax.while_loop(lambda i: i < 3000, lambda i: i + 1, jnp.int32(0))

    (y,) = run(kernel_of(loop), X)
    assert (y == X).all()
    with pytest.raises(Deadlock, match="no end in sight"):  # unless the limit says so
        run(kernel_of(loop), X, max_steps=1000)


def polling(stop: Any) -> Any:
    """Warpgroup 0 polls a flag in shared memory; `stop` is what warpgroup 1 does."""

    def loop(flag: Any, start: Any, done: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            flag[0] = jnp.int32(0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(start)
            lax.while_loop(lambda seen: seen == 0, lambda _: flag[0], jnp.int32(0))  # polls
            plgpu.barrier_arrive(done)

        @plgpu.when(wg == 1)
        def _() -> None:
            plgpu.barrier_wait(start)
            stop(flag, done)

    scratch = (plgpu.SMEM((8,), jnp.int32), plgpu.Barrier(), plgpu.Barrier())
    return kernel_of(loop, scratch, num_threads=2, thread_name="wg")


def test_polling_a_flag_that_comes(run: Any) -> None:
    """It is a race, and without checks it ends."""

    def stop(flag: Any, done: Any) -> None:
        flag[0] = jnp.int32(1)

    run(polling(stop), X, checks=False)
    run(polling(stop), X, checks=False, seed=5)


def test_polling_a_flag_that_never_comes(run: Any, assert_at: Any) -> None:
    def stop(flag: Any, done: Any) -> None:
        plgpu.barrier_wait(done)

    with pytest.raises(Deadlock, match="none of 2 unfinished threads") as e:
        run(polling(stop), X)
    assert_at(e.value, polling, "polls")
    assert "only a write by somebody else can end it" in e.value.message
    assert "missing: " in e.value.message
