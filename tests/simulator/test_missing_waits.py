"""What a report says of the wait that is missing: which barrier, which arrivals, which role's wait at which line."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import BarrierMisuse, Leak, MosaicGpuError, UninitializedRead

T = jax.ShapeDtypeStruct((64, 64), jnp.float32)
X = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
SLOTS = plgpu.SMEM((2, 64, 64), jnp.float32)


def two_roles(memory: Any, compute: Any, *scratch: Any) -> Any:
    """A kernel of a role wg0 that runs `memory` and a role wg1 that runs `compute`."""

    def body(x: Any, o: Any, *refs: Any) -> None:
        wg = lax.axis_index("wg")
        plgpu.when(wg == 0)(lambda: memory(x, o, *refs))
        plgpu.when(wg == 1)(lambda: compute(x, o, *refs))

    def kernel(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
        body(x, o, s, full, other)

    types = [SLOTS, *(scratch or (plgpu.Barrier(num_barriers=2), plgpu.Barrier()))]
    return plgpu.kernel(kernel, T, num_threads=2, thread_name="wg", scratch_types=types)


def at(f: Any, mark: str) -> str:
    """A regular expression for the line of a function that ends with a mark, as reports name it."""
    lines, first = inspect.getsourcelines(f)
    (number,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}")]
    return rf"\S*test_missing_waits\.py:{number} in \S+"


def report(kernel: Any, kind: type[MosaicGpuError], **params: Any) -> str:
    with pytest.raises(kind) as e, plgpu.simulator_params(**params):
        kernel(X)
    return str(e.value)


# ---- a barrier that is arrived on again too soon ---------------------------------------------------------------------------
def test_the_wait_of_another_role() -> None:
    def memory(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
        def fill(i: Any, _: Any) -> None:
            plgpu.copy_gmem_to_smem(x, s.at[i % 2], full.at[i % 2])  # copy

        lax.fori_loop(0, 4, fill, None)

    def compute(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
        def step(i: Any, total: Any) -> Any:
            plgpu.barrier_wait(full.at[i % 2])  # wait
            return total + s[i % 2]

        o[...] = lax.fori_loop(0, 4, step, jnp.zeros((64, 64)))

    text = report(two_roles(memory, compute), BarrierMisuse)
    copy, wait = at(memory, "copy"), at(compute, "wait")
    assert re.search(rf"arrived: .*wg0.*\(copy of 16384 bytes\) at {copy}\n  arrives: .*wg0.* at {copy}\n", text)
    assert re.search(
        rf"between the two is missing barrier_wait at {wait} \(wg1\), which nothing makes wg0 wait for\. Let wg1 barrier_arrive "
        rf"on another barrier behind it, and wg0 barrier_wait for that one before it arrives at {copy}\n",
        text,
    )
    assert "num_arrivals" not in text  # turns of one line are phases of their own
    assert re.search(
        r"\n  barrier full\[0\] is a scratch argument of kernel, the kernel at \S*test_missing_waits.py:\d+", text
    )


def test_that_way_out_is_one() -> None:
    """With the barrier and the waits that the report asks for the kernel runs."""

    def memory(x: Any, o: Any, s: Any, full: Any, empty: Any) -> None:
        def fill(i: Any, _: Any) -> None:
            plgpu.when(i >= 2)(lambda: plgpu.barrier_wait(empty.at[i % 2]))
            plgpu.copy_gmem_to_smem(x, s.at[i % 2], full.at[i % 2])

        lax.fori_loop(0, 4, fill, None)

    def compute(x: Any, o: Any, s: Any, full: Any, empty: Any) -> None:
        def step(i: Any, total: Any) -> Any:
            plgpu.barrier_wait(full.at[i % 2])
            total = total + s[i % 2]
            plgpu.barrier_arrive(empty.at[i % 2])
            return total

        o[...] = lax.fori_loop(0, 4, step, jnp.zeros((64, 64)))

    kernel = two_roles(memory, compute, plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2))
    np.testing.assert_array_equal(kernel(X), 4 * X)


def two_copies(num_arrivals: int) -> Any:
    def body(x: Any, o: Any, s: Any, b: Any) -> None:
        plgpu.copy_gmem_to_smem(x, s.at[0], b)  # first
        plgpu.copy_gmem_to_smem(x, s.at[1], b)  # second
        plgpu.barrier_wait(b)  # wait
        o[...] = s[0] + s[1]

    return plgpu.kernel(body, T, scratch_types=[SLOTS, plgpu.Barrier(num_arrivals=num_arrivals)])


def test_two_copies_that_one_wait_is_for() -> None:
    text = report(two_copies(1), BarrierMisuse)
    first, second, wait = (at(two_copies, mark) for mark in ("first", "second", "wait"))
    assert re.search(rf"arrived: .* at {first}\n  arrives: .* at {second}\n", text)
    assert re.search(
        r"if one wait is for both, say Barrier\(num_arrivals=2\); if not, between the two is missing a wait for it: barrier_wait "
        rf"at {wait} \(warpgroup0\) is elsewhere\. Put one before the arrival at {second}\n",
        text,
    )
    np.testing.assert_array_equal(two_copies(2)(X), 2 * X)


def test_no_wait_at_all() -> None:
    def body(x: Any, o: Any) -> None:
        def inner(b: Any, s: Any) -> None:  # scoped
            plgpu.copy_gmem_to_smem(x, s.at[0], b)
            plgpu.copy_gmem_to_smem(x, s.at[1], b)  # second
            o[...] = x[...]

        plgpu.run_scoped(inner, plgpu.Barrier(), SLOTS)  # allocated

    text = report(plgpu.kernel(body, T), BarrierMisuse)
    second = at(body, "second")
    assert re.search(
        rf"a wait for it, of which the kernel has none. Put barrier_wait before the arrival at {second}", text
    )
    assert re.search(rf"\n  barrier b\[0\] is allocated at {at(body, 'allocated')}", text)


def lapping(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
    plgpu.barrier_arrive(other)  # first
    plgpu.barrier_arrive(other)  # second
    o[...] = x[...]


def lapped(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
    plgpu.barrier_wait(other)  # wait


def test_a_phase_that_ends_twice_before_anybody_waits() -> None:
    text = report(two_roles(lapping, lapped), BarrierMisuse)
    first, second, wait = at(lapping, "first"), at(lapping, "second"), at(lapped, "wait")
    assert re.search(
        rf"\n  phase 0 ended with: .*wg0.* at {first}\n  phase 1 ended with: .*wg0.* at {second}\n"
        rf"  between the two is missing barrier_wait at {wait} \(wg1\), which nothing makes wg0 wait for\.",
        text,
    )


def test_a_wait_of_which_no_arrival_knows() -> None:
    def memory(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
        plgpu.copy_gmem_to_smem(x, s.at[0], other)  # first
        plgpu.barrier_wait(other)
        plgpu.copy_gmem_to_smem(x, s.at[0], other)  # second
        plgpu.barrier_wait(other)
        o[...] = s[0]

    def compute(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
        plgpu.barrier_wait(other)  # wait

    text = report(two_roles(memory, compute), BarrierMisuse)
    assert re.search(
        rf"phase 0 ended with: .* at {at(memory, 'first')}\n  phase 1 ends with: .* at {at(memory, 'second')}", text
    )
    assert re.search(
        rf"is missing the wait of .*wg1.* at {at(compute, 'wait')}, which nothing makes wg0 wait for\. Let wg1", text
    )


def test_the_last_copy_was_waited_for_by_nobody() -> None:
    def body(x: Any, o: Any, s: Any, b: Any) -> None:
        plgpu.copy_gmem_to_smem(x, s.at[0], b)
        plgpu.barrier_wait(b)  # wait
        plgpu.copy_gmem_to_smem(x, s.at[1], b)
        o[...] = s[0]

    text = report(plgpu.kernel(body, T, scratch_types=[SLOTS, plgpu.Barrier()]), Leak)
    assert re.search(
        rf"one more wait behind it: of 2 phases 1 were waited for, by barrier_wait at {at(body, 'wait')}", text
    )


# ---- memory that is read before a copy has filled it ---------------------------------------------------------------------
def reads_too_soon(x: Any, o: Any, s: Any, b: Any, c: Any) -> None:
    plgpu.copy_gmem_to_smem(x.at[:32], s.at[0, :32], b)
    plgpu.copy_gmem_to_smem(x.at[32:], s.at[0, 32:], c)  # copy
    plgpu.barrier_wait(b)
    o[...] = s[0]
    plgpu.barrier_wait(c)  # wait


def test_a_copy_under_way() -> None:
    """Seen without checks only: with them the same is a Race, which names the wait, too."""
    kernel = plgpu.kernel(reads_too_soon, T, scratch_types=[SLOTS, plgpu.Barrier(), plgpu.Barrier()])
    text = report(kernel, UninitializedRead, checks=False)
    assert re.search(
        rf"copy_gmem_to_smem at {at(reads_too_soon, 'copy')} is under way into \[32:64, 0:64\]: barrier_wait for barrier c\[0\] "
        rf"of block \(\) before it is read settles it \(there is barrier_wait at {at(reads_too_soon, 'wait')} \(warpgroup0\)\)",
        text,
    )


def test_a_copy_that_has_not_begun() -> None:
    def memory(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
        o[...] = s[1]

    def compute(x: Any, o: Any, s: Any, full: Any, other: Any) -> None:
        plgpu.copy_gmem_to_smem(x, s.at[1], full.at[1])  # copy
        plgpu.barrier_wait(full.at[1])  # wait

    text = report(two_roles(memory, compute), UninitializedRead)
    assert re.search(
        rf"copy_gmem_to_smem at {at(compute, 'copy')} \(wg1\) copies into this buffer, and has not begun to here: barrier_wait "
        rf"for barrier full\[1\] before it is read settles it \(there is barrier_wait at {at(compute, 'wait')} \(wg1\)\)",
        text,
    )


def test_a_copy_that_has_come_elsewhere_is_no_way_out() -> None:
    def body(x: Any, o: Any, s: Any, b: Any) -> None:
        plgpu.copy_gmem_to_smem(x, s.at[0], b)
        plgpu.barrier_wait(b)
        o[...] = s[0] + s[1]

    text = report(plgpu.kernel(body, T, scratch_types=[SLOTS, plgpu.Barrier()]), UninitializedRead)
    assert "settles it" not in text and "under way" not in text
