"""The memory model between warpgroups and proxies: what must be found, by order and not by luck, and what must not be.

Each test names the rules of docs/memory_model.md that it is about.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import BarrierMisuse, Race
from tests.support import out, randoms, tiled

BF16 = ml_dtypes.bfloat16
WGMMA, STRIDED = plgpu.Layout.WGMMA, plgpu.Layout.WG_STRIDED


def roles(*bodies: Any) -> None:
    """bodies[i]() for warpgroup i."""
    wg = jax.lax.axis_index("wg")
    for i, body in enumerate(bodies):
        plgpu.when(wg == i)(body)


def handover(order: str):
    """Warpgroup 0 writes a tile twice, warpgroup 1 reads it each time."""

    @plgpu.kernel(
        out_type=out(2, 64, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(s=plgpu.SMEM((64, 64), jnp.float32), ready=plgpu.Barrier(), free=plgpu.Barrier()),
    )
    def kernel(x, y, *, s, ready, free):
        def write():
            for i in range(2):
                v = plgpu.load(x.at[i], layout=WGMMA)
                if i and order != "does not wait":
                    plgpu.barrier_wait(free)
                if i and order == "release first":
                    plgpu.barrier_arrive(ready)
                s[...] = v  # write
                if not i or order != "release first":
                    plgpu.barrier_arrive(ready)

        def read():
            for i in range(2):
                plgpu.barrier_wait(ready)
                if not i and order == "reads late":
                    plgpu.barrier_arrive(free)
                y[i] = plgpu.load(s, layout=WGMMA)  # read
                if not i and order != "reads late":
                    plgpu.barrier_arrive(free)

        roles(write, read)

    return kernel


def test_handover(clean):
    x = randoms(2, 64, 64)
    np.testing.assert_array_equal(clean(handover("right"), x)[0], x)


@pytest.mark.parametrize("order", ["does not wait", "reads late", "release first"])
def test_handover_out_of_order(order, found, line_of):
    """B2, C7: a store and a load of two warpgroups with no barrier between, in either order."""
    e = found(handover(order), randoms(2, 64, 64))
    if order == "does not wait":  # the second phase ends before the first has been seen, or the tile is overwritten
        assert isinstance(e, (Race, BarrierMisuse))
        return
    assert isinstance(e, Race) and e.kind == "read/write" and e.between == "roles"
    assert {e.line.number, e.other_line.number} == {line_of(handover, "write"), line_of(handover, "read")}
    assert e.place == "smem s" and {"warpgroup 0", "warpgroup 1"} == {e.who[-11:], e.other[-11:]}
    assert "a barrier" in e.remedy and all(str(part) in str(e) for part in (e.line, e.other_line, e.who, e.remedy))


def fenced(where: str, reader: str):
    """Warpgroup 0 writes a tile by ordinary stores; TMA or the tensor core reads it for warpgroup 1."""

    @plgpu.kernel(
        out_type=out(64, 64, dtype=jnp.bfloat16),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(s=plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled(BF16)), ready=plgpu.Barrier()),
    )
    def kernel(x, y, *, s, ready):
        def write():
            s[...] = plgpu.load(x, layout=WGMMA)  # write
            if where == "writer":
                plgpu.commit_smem()
            plgpu.barrier_arrive(ready)
            if where == "after the release":
                plgpu.commit_smem()

        def read():
            v = plgpu.load(x, layout=WGMMA)
            plgpu.barrier_wait(ready)
            if where == "reader":
                plgpu.commit_smem()
            if reader == "tma":
                plgpu.copy_smem_to_gmem(s, y)  # tma
                plgpu.wait_smem_to_gmem(0)
                return

            def scope(acc):
                plgpu.wgmma(acc, v, s)  # wgmma
                return acc[...]

            y[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64))).astype(jnp.bfloat16)

        roles(write, read)

    return kernel


@pytest.mark.parametrize("reader", ["tma", "wgmma"])
def test_the_writer_fences(reader, clean, found, line_of, assert_at):
    """B4, E5: the writer fences, then releases; a fence of the reader, or one too late, does not help."""
    x = randoms(64, 64, dtype=BF16)
    clean(fenced("writer", reader), x)
    for where in ("nowhere", "reader", "after the release"):
        e = found(fenced(where, reader), x)
        assert isinstance(e, Race) and e.kind == "missing commit_smem", where
        assert_at(e, fenced, reader)
        assert e.other_line.number == line_of(fenced, "write")
        assert "commit_smem() by" in e.remedy and "warpgroup 0" in e.remedy


def test_wait_covers_its_own_barrier(found, assert_at):
    """C15: the tile of another barrier has not been waited for."""

    @plgpu.kernel(
        out_type=out(64, 64),
        scratch_types=[plgpu.SMEM((2, 64, 64), jnp.float32), plgpu.Barrier(num_barriers=2)],
    )
    def kernel(x, y, s, b):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x.at[i], s.at[i], b.at[i])
        plgpu.barrier_wait(b.at[1])
        y[...] = plgpu.load(s.at[0], layout=WGMMA)  # other
        plgpu.barrier_wait(b.at[0])

    e = found(kernel, randoms(2, 64, 64))
    assert_at(e, test_wait_covers_its_own_barrier, "other")
    assert isinstance(e, Race) and e.kind == "read/write" and e.place == "smem s[0]"
    assert "barrier_wait(barrier b[0]" in e.remedy


def test_a_copy_releases_what_its_thread_has_done_only(found, assert_at):
    """B7: the arrival of a copy is one thread's; the stores of the other 127 are not behind it."""

    @plgpu.kernel(
        out_type=out(2, 64, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(s=plgpu.SMEM((2, 64, 64), jnp.float32), full=plgpu.Barrier()),
    )
    def kernel(x, y, *, s, full):
        def write():
            s[0] = plgpu.load(x, layout=WGMMA)
            plgpu.copy_gmem_to_smem(x, s.at[1], full)

        def read():
            plgpu.barrier_wait(full)
            y[1] = plgpu.load(s.at[1], layout=WGMMA)
            y[0] = plgpu.load(s.at[0], layout=WGMMA)  # not behind the barrier

        roles(write, read)

    e = found(kernel, randoms(64, 64))
    assert_at(e, test_a_copy_releases_what_its_thread_has_done_only, "not behind the barrier")
    assert isinstance(e, Race) and e.between == "roles" and e.place == "smem s[0]"


def test_two_copies_into_one_place(found):
    """D7, I: copies are not ordered with each other."""

    @plgpu.kernel(
        out_type=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier(num_barriers=2)]
    )
    def kernel(x, y, s, b):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x.at[i], s, b.at[i])
        for i in range(2):
            plgpu.barrier_wait(b.at[i])
        y[...] = plgpu.load(s, layout=WGMMA)

    e = found(kernel, randoms(2, 64, 64))
    assert isinstance(e, Race) and e.kind == "write/write"


def test_copy_over_what_other_warps_still_read(found, clean, assert_at):
    """B2 inside a warpgroup: one thread issues the copy, the other warps may be behind."""

    def make(meet: bool):
        @plgpu.kernel(out_type=out(2, 64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()])
        def kernel(x, y, s, b):
            for i in range(2):
                plgpu.copy_gmem_to_smem(x.at[i], s, b)  # refill
                plgpu.barrier_wait(b)
                y[i] = plgpu.load(s, layout=WGMMA)
                if meet:
                    plgpu.commit_smem()

        return kernel

    x = randoms(2, 64, 64)
    clean(make(True), x)
    e = found(make(False), x)
    assert_at(e, test_copy_over_what_other_warps_still_read, "refill")
    assert isinstance(e, Race) and e.between == "warpgroup"


@pytest.mark.parametrize("other, meet", [(True, False), (True, True), (False, False)])
def test_threads_of_a_warpgroup(other, meet, found, clean):
    """B2 inside a warpgroup: another layout means other threads' elements, which needs a meeting."""

    @plgpu.kernel(out_type=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def kernel(x, y, s):
        s[...] = plgpu.load(x, layout=WGMMA)
        if meet:
            plgpu.commit_smem()
        y[...] = plgpu.load(s, layout=STRIDED if other else WGMMA)

    x = randoms(64, 64)
    if meet or not other:
        np.testing.assert_array_equal(clean(kernel, x)[0], x)
        return
    e = found(kernel, x)
    assert isinstance(e, Race) and e.between == "warpgroup" and "commit_smem()" in e.remedy


def test_parts_of_a_tile_in_the_same_threads(clean, found):
    """B2 inside a warpgroup: two halves written, the whole read; WGMMA's rows repeat every 64, those of halves of 32 do not."""

    def make(layout, half):
        @plgpu.kernel(out_type=out(128, 64), scratch_types=[plgpu.SMEM((128, 64), jnp.float32)])
        def kernel(x, y, s):
            for i in range(128 // half):
                part = plgpu.ds(i * half, half)
                s[part] = plgpu.load(x.at[part], layout=layout)
            y[...] = plgpu.load(s, layout=layout)

        return kernel

    x = randoms(128, 64)
    np.testing.assert_array_equal(clean(make(WGMMA, 64), x)[0], x)
    np.testing.assert_array_equal(clean(make(STRIDED, 64), x)[0], x)

    @plgpu.kernel(out_type=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    def moved(x, y, s):
        s[...] = plgpu.load(x, layout=WGMMA)
        y[plgpu.ds(0, 64), plgpu.ds(0, 32)] = plgpu.load(s.at[:, plgpu.ds(32, 32)], layout=STRIDED)
        y[plgpu.ds(0, 64), plgpu.ds(32, 32)] = plgpu.load(s.at[:, plgpu.ds(0, 32)], layout=STRIDED)

    e = found(moved, randoms(64, 64))
    assert isinstance(e, Race) and e.between == "warpgroup"


@pytest.mark.parametrize("meet", [False, True])
def test_scalar_store_is_one_threads(meet, found, clean):
    """B2 inside a warpgroup: one thread stores a scalar, all read it."""

    @plgpu.kernel(out_type=out(64, 64), scratch_types=[plgpu.SMEM((4,), jnp.float32)])
    def kernel(x, y, s):
        s[0] = x[0, 0]
        if meet:
            plgpu.commit_smem()
        y[...] = plgpu.load(x, layout=WGMMA) * s[0]

    if meet:
        clean(kernel, randoms(64, 64))
    else:
        e = found(kernel, randoms(64, 64))
        assert isinstance(e, Race) and e.between == "warpgroup"


def test_a_warps_wait_is_its_own(found, clean):
    """C19: one warp waits, the others read without having synchronised with it."""

    def make(told: bool):
        @plgpu.kernel(
            out_type=out(64, 64),
            scratch_types=dict(s=plgpu.SMEM((64, 64), jnp.float32), full=plgpu.Barrier(), told_all=plgpu.Barrier()),
        )
        def kernel(x, y, *, s, full, told_all):
            def warps(warp):
                @plgpu.when(warp == 0)
                def copy():
                    plgpu.copy_gmem_to_smem(x, s, full)

                @plgpu.when(warp == 1)
                def wait():
                    plgpu.barrier_wait(full)
                    plgpu.barrier_arrive(told_all)

            plgpu.warp_map(warps)
            if told:
                plgpu.barrier_wait(told_all)
            y[...] = plgpu.load(s, layout=WGMMA)

        return kernel

    x = randoms(64, 64)
    clean(make(True), x)
    e = found(make(False), x)
    assert isinstance(e, Race) and e.kind == "read/write"


def test_phases_by_order(found, assert_at):
    """C6: the second phase may end before the first has been seen, whatever the schedule of this run."""

    @plgpu.kernel(
        out_type=out(4), num_threads=3, thread_name="wg", scratch_types=dict(b=plgpu.Barrier(), d=plgpu.Barrier())
    )
    def kernel(x, y, *, b, d):
        def first():
            plgpu.barrier_arrive(b)
            plgpu.barrier_wait(d)
            plgpu.barrier_arrive(b)  # too soon

        def second():
            plgpu.barrier_wait(b)
            plgpu.barrier_wait(b)

        roles(first, second, lambda: plgpu.barrier_arrive(d))

    e = found(kernel, randoms(4))
    assert isinstance(e, BarrierMisuse)


def test_named_barrier_twice_by_order(found):
    """G2: nothing says that the others have come before the second arrival."""

    @plgpu.kernel(
        out_type=out(4),
        num_threads=3,
        thread_name="wg",
        scratch_types=dict(n=plgpu.NamedBarrier(num_warpgroups=2), d=plgpu.Barrier()),
    )
    def kernel(x, y, *, n, d):
        def first():
            plgpu.named_barrier_arrive(n)
            plgpu.barrier_wait(d)
            plgpu.named_barrier_arrive(n)

        def second():
            for _ in range(2):
                plgpu.named_barrier_sync(n)

        roles(first, second, lambda: plgpu.barrier_arrive(d))

    e = found(kernel, randoms(4))
    assert isinstance(e, BarrierMisuse) and "twice" in str(e)


def test_named_barrier_does_not_wait_for_copies(found):
    """G3: a barrier of threads orders no asynchronous work."""

    @plgpu.kernel(
        out_type=out(64, 64),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            s=plgpu.SMEM((64, 64), jnp.float32), full=plgpu.Barrier(), n=plgpu.NamedBarrier(num_warpgroups=2)
        ),
    )
    def kernel(x, y, *, s, full, n):
        def copy():
            plgpu.copy_gmem_to_smem(x, s, full)
            plgpu.named_barrier_sync(n)
            plgpu.barrier_wait(full)

        def read():
            plgpu.named_barrier_sync(n)
            y[...] = plgpu.load(s, layout=WGMMA)

        roles(copy, read)

    e = found(kernel, randoms(64, 64))
    assert isinstance(e, Race) and e.kind == "read/write" and "barrier_wait" in e.remedy
