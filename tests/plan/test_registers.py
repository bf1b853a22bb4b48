"""Arrays that a thread cannot hold are refused when the plan is made; those that the compiler makes piece by piece are not."""

from __future__ import annotations

import re
import time

import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import RegisterBudgetError, ResourceExceeded

WGMMA = plgpu.Layout.WGMMA
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def copy(x, o):
    o[...] = x[...] + 1  # load


def row_sums(x, o):
    o[:, 0] = jnp.sum(plgpu.load(x, layout=WGMMA), axis=1)  # load


def triangle(o):
    row, column = (plgpu.broadcasted_iota(jnp.int32, o.shape, d) for d in (0, 1))  # load
    o[...] = jnp.where(row >= column, 1.0, 0.0)


@pytest.mark.parametrize("body, columns", [(copy, 512), (copy, 256), (row_sums, 256)])
def test_a_loaded_array(plan, array, assert_at, body, columns):
    with pytest.raises(ResourceExceeded) as e:
        plan(body, array(128, columns), out=array(128, columns))
    assert_at(e.value, body, "load")
    layout = "WG_STRIDED" if body is copy else "WGMMA"
    assert f"float32[128, {columns}] in layout {layout} takes {columns} registers in each of 128 threads" in str(
        e.value
    )
    assert "has 255, one of them the stack pointer. Loop over pieces" in str(e.value)


def test_what_is_close_to_the_limit(plan, array):
    """248 registers of float32, or 256 elements of narrower types, are left to the compiler."""
    plan(row_sums, array(128, 248), out=array(128, 248))
    for dtype in (jnp.bfloat16, jnp.int8):
        plan(copy, array(128, 256, dtype=dtype), out=array(128, 256, dtype=dtype))


def test_thousands_of_registers_are_refused_at_once(plan, array, assert_at):
    """Coordinates need no registers, but there is code for each element: of 4096, NVRTC compiles it for four minutes."""
    plan(triangle, out=array(128, 1024))
    begun = time.monotonic()
    with pytest.raises(
        ResourceExceeded, match="int32.128, 4096. in layout WG_STRIDED of 4096 elements .* at most 1024"
    ) as e:
        plan(triangle, out=array(128, 4096))
    assert_at(e.value, triangle, "load")
    assert time.monotonic() - begun < 1


def loop_of(columns):
    """Two accumulators that every step adds to, and a carried array beside them."""

    def body(x, o, a, b):
        def scope(p, q):
            def step(i, c):
                plgpu.wgmma(p, a, b)
                plgpu.wgmma(q, a, b)
                plgpu.wgmma_wait(0)
                return c * 2.0 + x[i]

            start = plgpu.load(o, layout=WGMMA)
            return lax.fori_loop(0, 4, step, start) + p[...] + q[...]  # loop

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, columns)), plgpu.ACC((64, columns)))

    return body, [
        plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILE),
        plgpu.SMEM((64, columns), jnp.bfloat16, transforms=TILE),
    ]


def test_what_a_loop_carries_together(plan, array, assert_at):
    body, scratch = loop_of(64)
    plan(body, array(4), out=array(64, 64), scratch_types=scratch)
    body, scratch = loop_of(192)
    with pytest.raises(ResourceExceeded, match=r"the loop carries \(.*WGMMA: 96, p .*: 96, q .*: 96\) takes 288") as e:
        plan(body, array(4), out=array(64, 192), scratch_types=scratch)
    assert_at(e.value, body, "loop")


def test_an_accumulator(plan, array):
    def body(o, a, b):
        def scope(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC(o.shape))

    def scratch(m):
        return [
            plgpu.SMEM((m, 64), jnp.bfloat16, transforms=TILE),
            plgpu.SMEM((64, 256), jnp.bfloat16, transforms=TILE),
        ]

    plan(body, out=array(64, 256), scratch_types=scratch(64))
    with pytest.raises(ResourceExceeded, match=r"accumulator acc float32\[128, 256\] takes 256 registers"):
        plan(body, out=array(128, 256), scratch_types=scratch(128))


def accumulators(requests, columns):
    """One role for each warpgroup: its request, (registers, action) or None, and the columns of its accumulator."""

    def body(o, a, b):
        def scope(acc, n):
            plgpu.wgmma(acc, a, b.at[:, plgpu.ds(0, n)])
            return acc[...]

        for i, (request, n) in enumerate(zip(requests, columns, strict=True)):

            @plgpu.when(lax.axis_index("wg") == i)
            def _(i=i, request=request, n=n):
                if request:
                    plgpu.set_max_registers(request[0], action=request[1])
                o[i, :, plgpu.ds(0, n)] = plgpu.run_scoped(lambda acc: scope(acc, n), plgpu.ACC((64, n)))  # product

    scratch = [
        plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILE),
        plgpu.SMEM((64, 256), jnp.bfloat16, transforms=TILE),
    ]
    return body, scratch


UP, DOWN = "increase", "decrease"


@pytest.mark.parametrize(
    "requests, columns, words",
    [
        # The largest increase is below the equal share (168), so the launch is lowered to it, and silent roles with it.
        ([None, None, (104, UP)], [256, 256, 8], "wg0 has 104 .*of the launch.* largest increase, 104 at"),
        ([(128, UP), None], [8, 256], "wg1 has 128 .*of the launch"),
        ([(128, UP), None], [256, 8], r"wg0 has 128 \(set_max_registers\(128\) at"),
        ([(40, DOWN), None], [128, 8], r"wg0 has 40 \(set_max_registers\(40\) at"),
    ],
)
def test_a_role_that_has_too_few_for_its_accumulator(plan, array, assert_at, requests, columns, words):
    """ptxas would drop all budgets (C7507); the plan knows before."""
    body, scratch = accumulators(requests, columns)
    options = dict(scratch_types=scratch, num_threads=len(requests), thread_name="wg")
    with pytest.raises(RegisterBudgetError, match=words) as e:
        plan(body, out=array(8, 64, 256), **options)
    assert "or give the role more registers" in str(e.value)
    assert_at(e.value, body, "product")


@pytest.mark.parametrize(
    "requests, columns", [([None, None, (160, UP)], [256, 256, 256]), ([None, None, (104, UP)], [128, 128, 8])]
)
def test_roles_that_have_enough(plan, array, compiled, requests, columns):
    """The compiler keeps what the plan accepts."""
    body, scratch = accumulators(requests, columns)
    p = plan(body, out=array(8, 64, 256), scratch_types=scratch, num_threads=len(requests), thread_name="wg")
    report = compiled(p)
    assert report.entry_registers == requests[-1][0] and report.local_accesses == 0 and not report.messages


def test_extents_that_threads_cannot_share(plan, array, assert_at):
    """What the way out says is what works, in each direction that it could have said."""
    shapes = ((17, 33), (127, 63), (33, 65), (3, 5, 7, 9), (561,), (8191,), (257, 3), (1, 561), (19, 19, 3), (511, 1))
    for shape in shapes:
        with pytest.raises(ResourceExceeded, match="Threads share powers of two") as e:
            plan(copy, array(*shape), out=array(*shape))
        assert_at(e.value, copy, "load")
        found = re.search(r"pad to \[([\d, ]+)\] \(jnp.pad\), (\d+) in each", str(e.value))
        assert found
        padded = tuple(map(int, found[1].split(",")))
        assert all(n <= m < 2 * n + 8 for n, m in zip(shape, padded, strict=True)), padded
        layouts = plan(copy, array(*padded), out=array(*padded)).roles[0].layouts
        assert max(x.registers for x in layouts.values()) == int(found[2]) <= 64, padded
    with pytest.raises(ResourceExceeded) as e:  # nothing to pad here
        plan(triangle, out=array(128, 4096))
    assert "pad to" not in str(e.value)


def test_more_shared_memory_than_there_is_for_an_exchange(plan, array, assert_at):
    def body(x, o, s):
        s[0] = x[0, 0]
        o[...] = x[...].T  # exchange

    words = r"transpose of float32\[256, 192\] moves elements between threads through 196608 bytes of shared memory; "
    words += r"65536 of the block's 232448 are taken\. Do it on pieces .*, or with smaller buffers\n +65536 bytes"
    with pytest.raises(ResourceExceeded, match=words) as e:
        plan(body, array(256, 192), out=array(192, 256), scratch_types=[plgpu.SMEM((16384,), jnp.float32)])
    assert_at(e.value, body, "exchange")
