"""Which products have a `wgmma.fence`, and sums that begin anew without zeros being written."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.plan import in_flight
from mosaic_gpu.plan.roles import split
from mosaic_gpu.program import walk

F, BF = jnp.float32, jnp.bfloat16
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SQUARE = jax.ShapeDtypeStruct((64, 64), BF)
B = [plgpu.SMEM((2, 64, 64), BF, transforms=TILE)]
ACC = plgpu.ACC((64, 64))


def kernel(scope, accs=1):
    """A body that runs scope(x, o, b, *accumulators)."""

    def body(x, o, b):
        plgpu.run_scoped(functools.partial(scope, x, o, b), *[ACC] * accs)

    return body


@pytest.fixture
def fences(program):
    """fences(scope, accumulators): for each product in order whether it has a fence."""

    def run(scope, accs=1):
        p = program(kernel(scope, accs), SQUARE, out=jax.ShapeDtypeStruct((64, 64), F), scratch_types=B)
        resolved = in_flight.resolve(p.body, in_flight.unused_ids(p.body)).equations
        return [e.param("fence") for e in walk(tuple(resolved)) if e.op == "wgmma"]

    return run


def test_products_behind_each_other_have_one(fences):
    """Of one sum and of two, with addresses computed in between."""

    def scope(x, o, b, one, two):
        tile = plgpu.dim_size(x, 0)
        plgpu.wgmma(one, b.at[0], b.at[0])
        plgpu.wgmma(one, b.at[0], b.at[plgpu.rem(tile, 2)])
        plgpu.wgmma(two, b.at[1], b.at[plgpu.rem(tile + 1, 2)])
        o[...] = one[...] + two[...]

    assert fences(scope, 2) == [True, False, False]


def test_a_fence_after_whatever_may_touch_registers(fences):
    """Reading an accumulator, computing an operand, and waiting, which is a branch."""

    def scope(x, o, b, one, two):
        plgpu.wgmma(one, b.at[0], b.at[0])
        values = one[...]
        plgpu.wgmma(two, values.astype(BF), b.at[1])
        plgpu.wgmma(two, values.astype(BF), b.at[0])
        plgpu.commit_smem()
        plgpu.wgmma(two, b.at[1], b.at[0])
        o[...] = two[...]

    # The second conversion is a value of its own: it may be made between the two.
    assert fences(scope, 2) == [True, True, True, True]


def test_a_fence_after_a_sum_over_registers(fences):
    """Its result is a scalar, as an address is; threads meet for it."""

    def scope(x, o, b, acc):
        values = plgpu.load(x, layout=plgpu.Layout.WGMMA)
        plgpu.wgmma(acc, b.at[0], b.at[0])
        slot = plgpu.rem(jnp.max(values).astype(jnp.int32), 2)
        plgpu.wgmma(acc, b.at[0], b.at[slot])
        o[...] = acc[...]

    assert fences(scope) == [True, True]


def test_loops_and_branches_begin_anew(fences):
    def scope(x, o, b, acc):
        n = plgpu.dim_size(x, 0)
        plgpu.wgmma(acc, b.at[0], b.at[0])

        def step(i, _):
            plgpu.wgmma(acc, b.at[0], b.at[1])
            plgpu.wgmma(acc, b.at[1], b.at[1])
            plgpu.wgmma_wait(1)

        lax.fori_loop(0, n, step, None)
        plgpu.wgmma(acc, b.at[0], b.at[0])
        o[...] = acc[...]

    assert fences(scope) == [True, True, False, True]


def test_a_scope_opens_no_block(fences):
    """An accumulator of its own is no access to registers."""

    def scope(x, o, b, acc):
        plgpu.wgmma(acc, b.at[0], b.at[0])

        def inner(other):
            plgpu.wgmma(other, b.at[1], b.at[0])
            plgpu.wgmma_wait(0)
            o[...] = other[...]

        plgpu.run_scoped(inner, ACC)
        plgpu.wgmma(acc, b.at[1], b.at[1])
        o[...] = acc[...]

    assert fences(scope) == [True, False, True]


def test_the_text_has_as_many(plan):
    def scope(x, o, b, acc):
        plgpu.wgmma(acc, b.at[0], b.at[0])
        plgpu.wgmma(acc, b.at[0], b.at[1])
        o[...] = acc[...]

    text = emit(plan(kernel(scope), SQUARE, out=jax.ShapeDtypeStruct((64, 64), F), scratch_types=B))
    body = text[text.index('extern "C" __global__') :]
    assert body.count("wgmma_fence();") == 1 and body.count("wgmma_commit();") == 2


def sums(x, o, b, acc, *, zeros=lambda: jnp.zeros((64, 64), F), between=lambda acc: None):
    """The squares of two tiles, one after the other in one accumulator."""
    for i in range(2):
        acc[...] = zeros()
        between(acc)
        plgpu.wgmma(acc, b.at[i], b.at[i])
        o[i] = acc[...]


@pytest.fixture
def initial(program):
    """initial(scope): (how products begin, how many stores to an accumulator are left)."""

    def run(scope):
        p = program(kernel(scope), SQUARE, out=jax.ShapeDtypeStruct((2, 64, 64), F), scratch_types=B)
        (role,) = split(p.body, None, 1)
        found = list(walk(in_flight.resolve(role.equations, in_flight.unused_ids(p.body)).equations))
        stores = sum(e.op == "swap" and e.operands[0].space.kind == "acc" for e in found)
        return [e.param("init") for e in found if e.op == "wgmma"], stores

    return run


def test_zeros_in_front_of_a_product_are_not_written(initial):
    assert initial(sums) == (["zero", "zero"], 0)


def test_other_values_are_written(initial):
    assert initial(functools.partial(sums, zeros=lambda: jnp.ones((64, 64), F))) == (["add", "add"], 2)


def test_zeros_that_somebody_reads_are_written(initial):
    def read(acc):
        plgpu.debug_print("{}", jnp.sum(acc[...]))

    assert initial(functools.partial(sums, between=read)) == (["add", "add"], 2)


def test_sums_begin_anew():
    """The second sum has nothing of the first."""
    x = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(BF)

    def body(x, o, b, full):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x.at[i], b.at[i], full.at[i])
            plgpu.barrier_wait(full.at[i])
        plgpu.run_scoped(functools.partial(sums, x, o, b), ACC)

    out = jax.ShapeDtypeStruct((2, 64, 64), F)
    got = plgpu.kernel(body, out, scratch_types=[*B, plgpu.Barrier(num_barriers=2)], interpret=True)(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(got, wide @ wide, rtol=1e-5, atol=1e-4)
