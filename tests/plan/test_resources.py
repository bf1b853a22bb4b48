"""Register budgets, shared memory, barriers, tensor memory: what fits, and what the refusal says."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import (
    IllegalInstruction,
    RegisterBudgetError,
    ResourceExceeded,
    UnsupportedCall,
    UnsupportedPrimitive,
)
from mosaic_gpu.plan.resources import SHARED_LIMIT, entry_registers

F = jnp.float32


# ---- registers --------------------------------------------------------------------------------------------------------------
def budget_body(requests, x, o):
    """One role for each request (count of warpgroups, registers or None, action)."""
    wg = lax.axis_index("wg")
    first = 0
    for count, registers, action in requests:

        @plgpu.when((wg >= first) & (wg < first + count))
        def _(registers=registers, action=action, first=first):
            if registers is not None:
                plgpu.set_max_registers(registers, action=action)  # budget
            o[first] = x[first]

        first += count


def planned(plan, array, *requests):
    n = sum(r[0] for r in requests)
    return plan(functools.partial(budget_body, requests), array(8), out=array(8), num_threads=n, thread_name="wg")


UP, DOWN = "increase", "decrease"


@pytest.mark.parametrize(
    "requests",
    [
        ((2, 240, UP), (1, 24, DOWN)),
        ((2, 232, UP), (1, 40, DOWN)),
        ((2, 168, UP), (1, 168, DOWN)),
        ((1, 232, UP), (1, 40, DOWN)),
        ((1, 240, UP), (1, 24, DOWN)),
        ((3, 160, UP), (1, 32, DOWN)),
        ((1, 40, DOWN), (2, None, "")),
        ((2, 128, UP), (2, 128, DOWN)),
    ],
)
def test_budgets_that_fit(plan, array, compiled, requests):
    """The sum is within entry x warpgroups; ptxas launches the block with the entry that the plan assumes."""
    p = planned(plan, array, *requests)
    assert [r.registers for r in p.roles] == [r[1] for r in requests]
    up = [n for _, n, action in requests if action == UP]
    assert compiled(p).entry_registers == entry_registers(p.program.num_threads, max(up, default=None))


def test_over_the_pool(plan, array, assert_at):
    """240 + 240 + 32 is within the 64 K registers but not within 3 x 168; the report lists roles and lines."""
    with pytest.raises(RegisterBudgetError) as e:
        planned(plan, array, (2, 240, UP), (1, 32, DOWN))
    text = str(e.value)
    assert "add up to 512" in text and "168 x 3 warpgroups = 504" in text and "wait for ever" in text
    assert "Lower them by 8" in text
    assert "240 x 2 warpgroup(s)  wg0,1" in text and "32 x 1 warpgroup(s)  wg2" in text and text.count(__file__) >= 2
    assert_at(e.value, budget_body, "budget")


def test_a_silent_warpgroup_keeps_its_share(plan, array):
    with pytest.raises(
        RegisterBudgetError, match=r"(?s)add up to 520.*168 x 1 warpgroup\(s\)  wg2  \(keeps what it is launched with\)"
    ):
        planned(plan, array, (2, 176, UP), (1, None, ""))


@pytest.mark.parametrize("n", [23, 100, 16, 264])
def test_not_a_multiple_of_eight(plan, array, n, assert_at):
    with pytest.raises(
        RegisterBudgetError, match=rf"set_max_registers\({n}\): .*multiples of 8 from 24 to 256; \d+ is the nearest"
    ) as e:
        planned(plan, array, (1, n, DOWN), (1, None, ""))
    assert_at(e.value, budget_body, "budget")


def test_wrong_direction(plan, array):
    with pytest.raises(
        RegisterBudgetError, match="160, action='increase'.*is below the 168 registers.*write 'decrease'"
    ):
        planned(plan, array, (1, 232, UP), (1, 160, UP), (1, 24, DOWN))
    with pytest.raises(
        RegisterBudgetError, match="200, action='decrease'.*is above the 168 registers.*write 'increase'"
    ):
        planned(plan, array, (2, 200, DOWN), (1, 24, DOWN))


@pytest.mark.parametrize("where", ["loop", "branch"])
def test_not_reached_on_every_path(plan, array, where, assert_at):
    def body(x, o):
        def ask():
            plgpu.set_max_registers(232, action="increase")  # ask

        if where == "loop":
            lax.fori_loop(0, 2, lambda i, _: ask(), None)
        else:
            plgpu.when(x[0] > 0)(ask)

    with pytest.raises(RegisterBudgetError, match="must be reached on every path") as e:
        plan(body, array(8), out=array(8))
    assert_at(e.value, body, "ask")


def test_the_last_request_of_a_role_counts(plan, array):
    def body(x, o):
        plgpu.set_max_registers(40, action="decrease")
        plgpu.run_scoped(lambda acc: plgpu.set_max_registers(232, action="decrease"), plgpu.ACC((64, 8)))

    assert plan(body, array(8), out=array(8)).roles[0].registers == 232


def test_under_warp_map_there_is_no_budget(plan):
    def body():
        plgpu.warp_map(lambda warp: plgpu.set_max_registers(40, action="decrease"))

    with pytest.raises(
        UnsupportedPrimitive, match="'set_max_registers' has no rule in the sm90 x warp table.*outside warp_map"
    ):
        plan(body)


# ---- shared memory ------------------------------------------------------------------------------------------------------------
def test_layout_of_shared_memory(plan):
    """Swizzled buffers start on 1024 bytes, plain ones on 128, barriers on 8 behind them; nothing overlaps."""
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = [
        plgpu.SMEM((3,), F),
        plgpu.SMEM((8, 64), jnp.bfloat16, transforms=swizzled),
        plgpu.Barrier(num_barriers=3),
        plgpu.SMEM((5, 7), jnp.int8),
        plgpu.SMEM((16, 64), jnp.bfloat16, transforms=swizzled),
        plgpu.Barrier(),
    ]
    p = plan(lambda *refs: None, scratch_types=scratch)
    ranges = [(b.offset, b.layout.nbytes) for b in p.buffers.values()] + [
        (b.offset, 8 * b.count) for b in p.barriers.values()
    ]
    ranges.sort()
    assert all(a + n <= b for (a, n), (b, _) in zip(ranges, ranges[1:], strict=False))
    for b in p.buffers.values():
        assert b.offset % (1024 if b.layout.swizzle else 128) == 0
    assert all(b.offset % 8 == 0 for b in p.barriers.values())
    assert p.shared_bytes == max(a + n for a, n in ranges)


def test_too_much_shared_memory(plan):
    """The breakdown names each buffer with its bytes."""

    def body(first, second, b):
        pass

    with pytest.raises(ResourceExceeded) as e:
        plan(body, scratch_types=[plgpu.SMEM((200, 256), F), plgpu.SMEM((100, 256), F), plgpu.Barrier()])
    text = str(e.value)
    total = 300 * 1024 + 8
    assert f"needs {total} bytes of shared memory, {total - SHARED_LIMIT} more than the {SHARED_LIMIT}" in text
    assert "204800 bytes  first" in text and "102400 bytes  second" in text
    assert e.value.line.file == __file__


def test_as_much_as_there_is(plan):
    plan(lambda s: None, scratch_types=[plgpu.SMEM((SHARED_LIMIT,), jnp.int8)])
    with pytest.raises(ResourceExceeded):
        plan(lambda s: None, scratch_types=[plgpu.SMEM((SHARED_LIMIT + 1,), jnp.int8)])


def test_scoped_memory_of_a_role_of_several_warpgroups(plan, array, assert_at):
    """It belongs to the block; the user says that it is shared."""

    def body(x, o, *, axes):
        def scope(s):
            o[0] = x[0]

        plgpu.run_scoped(scope, plgpu.SMEM((64,), F), collective_axes=axes)  # scope

    options = dict(out=array(8), num_threads=2, thread_name="wg")
    with pytest.raises(UnsupportedCall, match="role of 2 warpgroups.*collective_axes='wg'"):

        def in_a_role(x, o):
            @plgpu.when(lax.axis_index("wg") < 2)
            def _():
                body(x, o, axes=())

            @plgpu.when(lax.axis_index("wg") == 2)
            def _():
                o[1] = x[1]

        plan(in_a_role, array(8), out=array(8), num_threads=3, thread_name="wg")
    plan(functools.partial(body, axes=("wg",)), array(8), **options)
    plan(functools.partial(body, axes=()), array(8), **options), "at the top, all warpgroups open the scope"


# ---- barriers -----------------------------------------------------------------------------------------------------------------
def test_33_barriers(plan):
    plan(lambda b: None, scratch_types=[plgpu.Barrier(num_barriers=32)])
    with pytest.raises(ResourceExceeded, match="an array of 33 barriers.*32 at most; use two arrays"):
        plan(lambda b: None, scratch_types=[plgpu.Barrier(num_barriers=33)])


def test_named_barriers(plan):
    """Numbered from 1 on; 14 fit beside the block's own and the one to meet at, the table shows who has which."""
    p = plan(
        lambda a, b: None,
        scratch_types=[plgpu.NamedBarrier(num_warpgroups=1, num_barriers=2), plgpu.NamedBarrier(num_warpgroups=1)],
    )
    assert [(n.id, n.count, n.threads) for n in p.named_barriers.values()] == [(1, 2, 128), (3, 1, 128)]
    with pytest.raises(
        ResourceExceeded, match="16 named barriers; a block has 16, of which 0 is the whole block.*1-8.*9-16"
    ):
        eight = plgpu.NamedBarrier(num_warpgroups=1, num_barriers=8)
        plan(lambda a, b: None, scratch_types=[eight, eight])


def test_a_named_barrier_that_cannot_complete(plan, assert_at):
    def body(b):
        plgpu.named_barrier_sync(b)  # sync

    with pytest.raises(IllegalInstruction, match="3 warpgroups in a block of 2: it could never complete") as e:
        plan(body, scratch_types=[plgpu.NamedBarrier(num_warpgroups=3)], num_threads=2, thread_name="wg")
    assert_at(e.value, body, "sync")


def test_a_slice_of_barriers_is_no_barrier(plan, assert_at):
    def body(b):
        plgpu.barrier_wait(b)  # wait

    with pytest.raises(UnsupportedCall, match=r"holds \(2,\) barriers; select one with barrier.at\[slot\]") as e:
        plan(body, scratch_types=[plgpu.Barrier(num_barriers=2)])
    assert_at(e.value, body, "wait")


@pytest.mark.parametrize(
    ("arriver", "unit", "expected"),
    [("thread", 1, 3), ("warpgroup", 4, 12), ("warp", 1, 3), ("both", 4, 12), ("none", 1, 3)],
)
def test_units_of_arrival(plan, array, arriver, unit, expected):
    """A warpgroup arrives warp by warp (4 hardware arrivals); one thread, a copy or a warp for itself counts once."""

    def body(x, o, s, b):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            if arriver in ("thread", "both"):
                plgpu.barrier_arrive(b)
            plgpu.copy_gmem_to_smem(x, s, b)

        @plgpu.when(wg == 1)
        def _():
            if arriver == "warp":
                plgpu.warp_map(lambda warp: plgpu.barrier_arrive(b))
            o[...] = plgpu.load(s, layout=plgpu.Layout.WGMMA)
            if arriver in ("warpgroup", "both"):
                plgpu.barrier_arrive(b)

    scratch = [plgpu.SMEM((64, 64), F), plgpu.Barrier(num_arrivals=3)]
    p = plan(body, array(64, 64), out=array(64, 64), scratch_types=scratch, num_threads=2, thread_name="wg")
    (b,) = p.barriers.values()
    assert (b.unit, b.expected) == (unit, expected)


def test_cluster_barriers_count_every_block(plan, array):
    def body(b):
        plgpu.barrier_arrive(b)

    scratch = [plgpu.ClusterBarrier(collective_axes=("c", "d"), num_arrivals=2)]
    p = plan(body, scratch_types=scratch, cluster=(2, 3), cluster_names=("c", "d"))
    (b,) = p.barriers.values()
    assert (b.unit, b.expected) == (1, 12)


def test_a_cluster_barrier_along_no_axis(plan):
    with pytest.raises(
        UnsupportedCall,
        match=r"ClusterBarrier\(collective_axes=\('x',\)\): 'x' is not a cluster axis; the kernel has \('c',\)",
    ):
        plan(
            lambda b: None,
            scratch_types=[plgpu.ClusterBarrier(collective_axes="x")],
            cluster=(2,),
            cluster_names=("c",),
        )


def test_a_copy_collective_along_no_axis(plan, array, assert_at):
    def body(x, s, b):
        plgpu.copy_gmem_to_smem(x, s, b, collective_axes="x")  # copy

    with pytest.raises(UnsupportedCall, match="'x' is not a cluster axis") as e:
        plan(body, array(64, 64), scratch_types=[plgpu.SMEM((64, 64), F), plgpu.Barrier()])
    assert_at(e.value, body, "copy")


# ---- tensor memory ------------------------------------------------------------------------------------------------------------
def tmem(*columns):
    return [plgpu.TMEM((128, n), F) for n in columns]


@pytest.mark.parametrize(("columns", "allocated"), [((8,), 32), ((64, 32), 128), ((256, 256), 512), ((100,), 128)])
def test_tmem_columns(plan, columns, allocated):
    """One allocation for all buffers, a power of two from 32 on."""
    p = plan(lambda *t: None, scratch_types=tmem(*columns), arch="sm_100a")
    assert p.tmem_columns == allocated
    starts = [0]
    for n in columns[:-1]:
        starts.append(starts[-1] + n)
    assert [(t.column, t.columns) for t in p.tmem.values()] == list(zip(starts, columns, strict=True))
    assert p.tmem_address_offset + 4 <= p.shared_bytes


def test_too_many_tmem_columns(plan):
    def body(first, second):
        pass

    with pytest.raises(
        ResourceExceeded,
        match=r"(?s)520 TMEM columns; an SM has 512.*512 columns from    0  first.*8 columns from  512  second",
    ):
        plan(body, scratch_types=tmem(512, 8), arch="sm_100a")


def test_a_union_takes_as_much_as_its_largest_group(plan, array):
    """Scores over probabilities and statistics; what is beside the union comes behind it.  In shared memory likewise."""
    BF = jnp.bfloat16
    union = plgpu.RefUnion(
        plgpu.TMEM((128, 128), F), [plgpu.TMEM((128, 128), BF, packed=True), plgpu.TMEM((128, 8), F)]
    )
    p = plan(
        lambda o, u, after: None,
        scratch_types=[plgpu.TMEM((2, 128, 32), F), union, plgpu.TMEM((64, 64), F)],
        arch="sm_100a",
    )
    assert [(t.column, t.columns) for t in p.tmem.values()] == [(0, 64), (64, 128), (64, 64), (128, 8), (192, 64)]
    assert p.tmem_columns == 256
    shared = plgpu.RefUnion(plgpu.SMEM((64, 64), F), [plgpu.SMEM((32, 64), BF), plgpu.SMEM((64, 32), F)])
    p = plan(lambda s, after: None, scratch_types=[shared, plgpu.SMEM((128,), F)])
    assert sorted(b.offset for b in p.buffers.values()) == [0, 0, 4096, 16384]


def test_unions_that_cannot_be():
    smem, tmem = plgpu.SMEM((8, 8), F), plgpu.TMEM((128, 8), F)
    for groups in ((smem,), (smem, tmem), (plgpu.RefUnion(smem, smem), smem)):
        with pytest.raises((ValueError, TypeError), match="RefUnion"):
            plgpu.RefUnion(*groups)
    with pytest.raises(TypeError, match="an SMEM or TMEM buffer"):
        plgpu.RefUnion(smem, plgpu.Barrier())


@pytest.mark.parametrize(
    ("type_of", "words"),
    [
        (lambda: plgpu.TMEM((32, 64), F), "128 or 64 rows"),
        (lambda: plgpu.TMEM((128,), F), r"\(rows, columns\) or \(n, rows, columns\)"),
        (lambda: plgpu.TMEM((128, 64), jnp.bfloat16), "say packed=True, so that 2 elements share a cell"),
        (lambda: plgpu.TMEM((128, 63), jnp.bfloat16, packed=True), "which 63 columns do not fill"),
        (lambda: plgpu.TMEM((128, 64), F, layout=plgpu.Layout.WGMMA), "layout is left out"),
    ],
)
def test_tmem_shapes(plan, type_of, words):
    with pytest.raises(UnsupportedCall, match=words):
        plan(lambda t: None, scratch_types=[type_of()], arch="sm_100a")


def test_pairs_of_blocks(plan):
    """Tensor memory is that of a pair throughout, and the pair is the last axis of the cluster."""
    pair, single = plgpu.TMEM((128, 64), F, collective=True), plgpu.TMEM((128, 64), F)
    cluster = dict(cluster=(2,), cluster_names=("c",), arch="sm_100a")
    assert plan(lambda a, b: None, scratch_types=[pair, pair], **cluster).tmem_pair
    with pytest.raises(UnsupportedCall, match=r"is collective and .* is not"):
        plan(lambda a, b: None, scratch_types=[pair, single], **cluster)
    with pytest.raises(UnsupportedCall, match=r"the last axis of the cluster, which must have 2 blocks"):
        plan(lambda a: None, scratch_types=[pair], arch="sm_100a")


def test_tmem_on_hopper(plan):
    """No tcgen05 call is needed for the refusal: Hopper has no tensor memory to allocate."""
    with pytest.raises(UnsupportedCall, match="tensor memory exists on sm_100a and later"):
        plan(lambda t: None, scratch_types=tmem(64), arch="sm_90a")
