"""Layout inference on small programs: what pins reach, what stays a splat, what conflicts."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.errors import LayoutConflict
from mosaic_gpu.layouts.registers import strided, tcgen05_native, wgmma
from mosaic_gpu.layouts.spread import default_layout
from mosaic_gpu.program import walk

F = jnp.float32


@pytest.fixture
def layouts_of(plan):
    """layouts_of(body, ...): the layout of every result of each op name, in program order (None: a splat)."""

    def infer(body, *arguments, **options):
        role = plan(body, *arguments, **options).roles[0]
        found: dict[str, list] = {}

        def visit(block):
            for s in block.steps:
                for r in s.equation.results:
                    if r.shape:
                        found.setdefault(s.equation.op, []).append(role.layouts.get(r.id))
                for inner in s.regions:
                    visit(inner)

        visit(role.body)
        return found

    return infer


def test_pin_spreads_through_elementwise(layouts_of, array):
    """Backwards and forwards, to everything computed with the pinned value."""

    def body(x, y, o):
        a, b = x[...], y[...]
        c = plgpu.layout_cast(a * 2.0 + b, Layout.WGMMA)
        o[...] = c - b

    found = layouts_of(body, array(64, 64), array(64, 64), out=array(64, 64))
    assert all(m.same_map(wgmma((64, 64))) for v in found.values() for m in v)
    assert len(found["get"]) == 2


def test_load_takes_its_layout(layouts_of, array):
    def body(x, o):
        o[...] = plgpu.load(x, layout=Layout.TCGEN05_TMEM_NATIVE) + 1.0

    found = layouts_of(body, array(128, 64), out=array(128, 64))
    assert found["add"][0].same_map(tcgen05_native((128, 64)))


def test_default(layouts_of, array):
    def body(x, o):
        o[...] = x[...] + 1.0

    assert layouts_of(body, array(64, 64), out=array(64, 64))["add"] == [strided((64, 64))]


def test_pin_through_loops_and_branches(layouts_of, array):
    """A pin inside a loop reaches the initial value, the carry, the result, and what a branch gives."""

    def body(x, o):
        def step(i, c):
            c = lax.cond(i > 1, lambda: c * 2.0, lambda: c + x[...])
            return plgpu.layout_cast(c, Layout.WGMMA)

        o[...] = lax.fori_loop(0, 4, step, x[...])

    found = layouts_of(body, array(64, 64), out=array(64, 64))
    assert set(found) >= {"get", "for", "cond", "mul", "add"}
    assert all(m.same_map(wgmma((64, 64))) for v in found.values() for m in v)


def test_pin_through_while(layouts_of, array):
    def body(x, o):
        init = (jnp.int32(0), plgpu.load(x, layout=Layout.WGMMA))
        o[...] = lax.while_loop(lambda c: c[0] * 2 < 7, lambda c: (c[0] + 1, c[1] * 2.0), init)[1]

    found = layouts_of(body, array(64, 64), out=array(64, 64))
    assert found["while"][0].same_map(wgmma((64, 64))) and found["mul"][0].same_map(wgmma((64, 64)))


def test_accumulators_pin(layouts_of, array):
    def body(o):
        o[...] = plgpu.run_scoped(lambda acc: acc[...] * 2.0, plgpu.ACC((64, 64)))

    found = layouts_of(body, out=array(64, 64))
    assert all(m.same_map(wgmma((64, 64))) for v in found.values() for m in v)


def test_reductions_and_broadcasts(layouts_of, array):
    """Row maxima have the reduced layout; broadcast back they have the wide one."""

    def body(x, o):
        a = plgpu.load(x, layout=Layout.WGMMA)
        top = jnp.max(a, axis=1)
        o[...] = a - top[:, None]

    found = layouts_of(body, array(64, 64), out=array(64, 64))
    assert found["reduce_max"][0].same_map(wgmma((64, 64)).reduce(1))
    assert found["broadcast_in_dim"][-1].same_map(wgmma((64, 64)))


def test_a_reduced_layout_finds_its_wide_one(layouts_of, array):
    """A vector in WGMMA.reduce(1), broadcast along columns, makes a WGMMA array."""

    def body(x, o):
        row = plgpu.load(x, layout=Layout.WGMMA.reduce(1))
        o[...] = lax.broadcast_in_dim(row, (64, 32), (0,))

    assert layouts_of(body, array(64), out=array(64, 32))["broadcast_in_dim"][0].same_map(wgmma((64, 32)))


def test_columns_broadcast_to_rows(layouts_of, array):
    def body(x, bias, o):
        b = bias[...]
        o[...] = plgpu.load(x, layout=Layout.WGMMA) + b[None, :]

    found = layouts_of(body, array(64, 32), array(32), out=array(64, 32))
    assert found["get"][0].same_map(wgmma((64, 32)).reduce(0))


@pytest.mark.parametrize(("axis", "n"), [(1, 128), (1, 64), (0, 64), (0, 128)])
def test_nothing_pinned_and_a_bias(layouts_of, array, axis, n):
    """The default goes to the widest array first, so that what is broadcast into it can follow."""
    shape = (64, n) if axis else (n, 64)

    def body(x, bias, o):
        b = bias[...]
        o[...] = x[...] + lax.broadcast_in_dim(b, shape, (axis,))

    found = layouts_of(body, array(*shape), array(n), out=array(*shape))
    assert found["add"] == [strided(shape)]
    assert found["get"][0].same_map(strided(shape).reduce(1 - axis))


# ---- splats -------------------------------------------------------------------------------------------------------------------
def test_splats_have_no_layout(layouts_of, array):
    """jnp.full and what is computed from it: one scalar for all elements, whatever the shape."""

    def body(x, o):
        c = jnp.full((3, 5), x[0])
        c = jnp.exp(c * 2.0)
        o[0] = c[0, 0] if False else x[0]
        plgpu.when(x[1] > 0)(lambda: None)
        o[1] = lax.fori_loop(0, 3, lambda i, v: v + 1.0, c).shape[0] * 1.0

    found = layouts_of(body, array(8), out=array(8))
    assert all(m is None for v in found.values() for m in v)


def test_a_splat_fits_any_layout(layouts_of, array):
    def body(x, o):
        zero = jnp.zeros((64, 64), F)
        o[...] = jnp.maximum(plgpu.load(x, layout=Layout.WGMMA), zero)
        o[...] = jnp.maximum(plgpu.load(x, layout=Layout.WG_STRIDED), zero)

    found = layouts_of(body, array(64, 64), out=array(64, 64))
    assert found["max"][0].same_map(wgmma((64, 64))) and found["max"][1].same_map(strided((64, 64)))


def test_a_carry_that_starts_as_a_splat(layouts_of, array):
    """Zeros outside, an array inside: the carry has the array's layout and the splat fills it."""

    def body(x, o):
        o[...] = lax.fori_loop(0, 3, lambda i, c: c + plgpu.load(x, layout=Layout.WGMMA), jnp.zeros((64, 64), F))

    found = layouts_of(body, array(64, 64), out=array(64, 64))
    assert found["for"][0].same_map(wgmma((64, 64)))
    assert found.get("broadcast_in_dim", [None])[0] is None


def test_a_splat_through_a_branch(layouts_of, array):
    def body(x, o):
        a = lax.cond(x[0, 0] > 0, lambda: jnp.zeros((64, 64), F), lambda: jnp.ones((64, 64), F))
        o[...] = plgpu.load(x, layout=Layout.WGMMA) * a

    assert layouts_of(body, array(64, 64), out=array(64, 64))["cond"] == [None]


def test_storing_to_an_accumulator_prefers_its_layout(layouts_of, array):
    """An unpinned array that goes into an ACC is WGMMA; a splat stays one."""

    def body(x, o):
        def scope(acc):
            acc[...] = x[...]
            a = acc[...]
            acc[...] = jnp.zeros((64, 64), F)
            return a + acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    found = layouts_of(body, array(64, 64), out=array(64, 64))
    assert all(m.same_map(wgmma((64, 64))) for m in found["get"])
    assert found.get("broadcast_in_dim", [None]) == [None]


# ---- conflicts ----------------------------------------------------------------------------------------------------------------
def test_conflict_names_both_lines(plan, array, line_of, assert_at):
    def body(x, o):
        a = plgpu.load(x, layout=Layout.WGMMA)  # first
        b = plgpu.load(x, layout=Layout.WG_STRIDED)  # second
        o[...] = a + b  # meet

    with pytest.raises(LayoutConflict, match="add brings two register layouts together.*layout_cast") as e:
        plan(body, array(64, 64), out=array(64, 64))
    assert_at(e.value, body, "meet")
    for mark in ("first", "second"):
        assert f"{__file__}:{line_of(body, mark)}" in str(e.value)
    assert "WGMMA[64, 64]" in str(e.value) and "WG_STRIDED[64, 64]" in str(e.value)


def test_conflict_through_a_loop(plan, array, line_of):
    def body(x, o):
        def step(i, c):
            return c + plgpu.load(x, layout=Layout.WG_STRIDED)  # second

        o[...] = lax.fori_loop(0, 3, step, plgpu.load(x, layout=Layout.WGMMA))  # first

    with pytest.raises(LayoutConflict) as e:
        plan(body, array(64, 64), out=array(64, 64))
    assert f":{line_of(body, 'first')}" in str(e.value) and f":{line_of(body, 'second')}" in str(e.value)


def test_a_reduction_converts_to_a_pin(plan, array):
    """A row vector in the strided layout against the reduced one: the reduction's result takes the pin's layout."""

    def body(x, v, o):
        a = plgpu.load(x, layout=Layout.WGMMA)
        o[...] = jnp.max(a, axis=1) + plgpu.load(v, layout=Layout.WG_STRIDED)

    p = plan(body, array(128, 64), array(128), out=array(128))
    assert {str(v) for v in p.roles[0].layouts.values()} == {"WGMMA[128, 64]", "WG_STRIDED[128]"}
    assert p.roles[0].scratch_bytes == 128 * 4


def test_a_pin_that_does_not_fit_the_shape(plan, array, assert_at):
    def body(x, o):
        o[...] = plgpu.layout_cast(x[...], Layout.WGMMA)  # pin

    with pytest.raises(LayoutConflict, match="m a multiple of 64 and n of 8; this one is \\(64, 12\\)") as e:
        plan(body, array(64, 12), out=array(64, 12))
    assert_at(e.value, body, "pin")


@pytest.mark.parametrize("shape", [(1,), (48,), (3, 5), (2, 3, 64), (7, 128), (100, 2), (1, 1), (5, 4, 3, 2)], ids=str)
@pytest.mark.parametrize("reduced", [(), (0,), (-1,)], ids=str)
def test_a_default_for_every_shape(shape, reduced):
    """Every element is somewhere, replicas are marked as such, and no thread holds an element twice."""
    layout = default_layout(shape, 4, frozenset(d % len(shape) for d in reduced))
    held = layout.coordinates().reshape(128, layout.registers, len(shape))
    numbers = np.ravel_multi_index(tuple(np.moveaxis(held, -1, 0)), shape)
    assert set(numbers.flat) == set(range(math.prod(shape)))
    assert all(len(set(row)) == len(row) for row in numbers)
    replicas = math.prod(d.size for d in (*layout.lane, *layout.warp) if d.dim is None)
    assert layout.registers * 128 == math.prod(shape) * replicas


def test_every_array_of_a_real_kernel_has_a_layout_or_is_a_splat(plan, array):
    """Nothing is forgotten: ids in the layouts cover all arrays that are not splats."""

    def body(x, o):
        a = plgpu.load(x, layout=Layout.WGMMA)
        seen = plgpu.broadcasted_iota(jnp.int32, (64, 64), 1) < plgpu.dim_size(x, 1)
        a = jnp.where(seen, a, -jnp.inf)
        p = jnp.exp(a - jnp.max(a, axis=1)[:, None])
        o[...] = p / jnp.sum(p, axis=1)[:, None]

    p = plan(body, array(64, 64), out=array(64, 64))
    (role,) = p.roles
    arrays = {r.id for e in walk(p.program.body) for r in e.results if r.shape}
    missing = arrays - set(role.layouts)
    splats = {
        r.id for e in walk(p.program.body) if e.op == "broadcast_in_dim" for r in e.results if not e.operands[0].shape
    }
    dead = {r.id for e in walk(p.program.body) if e.op == "swap" for r in e.results}
    assert missing <= splats | dead, missing


def test_reshapes_hand_layouts_on(layouts_of, array):
    """Both ways, where a layout's digits divide into the other shape."""

    def body(x, y, o, q):
        v = plgpu.load(x, layout=Layout.WGMMA)
        o[...] = v.reshape(64, 8, 8)
        q[...] = plgpu.layout_cast(y[...].reshape(64, 64), Layout.WGMMA)

    found = layouts_of(body, array(64, 64), array(64, 16, 4), out=[array(64, 8, 8), array(64, 64)])
    first, second = found["reshape"]
    assert first.same_map(wgmma((64, 64)).reshaped((64, 8, 8))) and second.same_map(wgmma((64, 64)))
    assert found["get"][0].same_map(wgmma((64, 64)).reshaped((64, 16, 4)))


def test_what_is_reduced_after_a_reshape_comes_so(plan, array):
    """Lanes share the reduced dimension, so nothing goes through shared memory."""

    def body(x, o):
        o[...] = jnp.sum(x[...].reshape(64, 128), axis=1)

    assert plan(body, array(128, 64), out=array(64)).roles[0].scratch_bytes == 0
