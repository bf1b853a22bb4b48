"""Products in flight: the waits that the planner places, how accumulators begin, and tiles that a product still reads."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import InFlightError
from mosaic_gpu.plan import in_flight
from mosaic_gpu.program import walk

F, BF = jnp.float32, jnp.bfloat16
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
B = [plgpu.SMEM((64, 64), BF, transforms=TILE)]
ACC = plgpu.ACC((64, 64))


@pytest.fixture
def resolve(program):
    """resolve(scope, ...): (equations of the accumulator's scope after the pass, notes)."""

    def run(scope, accs=1, **options):
        def body(x, o, b):
            result = plgpu.run_scoped(functools.partial(scope, x, b), *[ACC] * accs)
            if result is not None:
                o[...] = result

        p = program(
            body, jax.ShapeDtypeStruct((64, 64), BF), out=jax.ShapeDtypeStruct((64, 64), F), scratch_types=B, **options
        )
        result = in_flight.resolve(p.body, in_flight.unused_ids(p.body))
        (e,) = [e for e in result.equations if e.op == "run_scoped"]
        return e.regions[0].equations, result.notes

    return run


def waits(equations) -> list[tuple[str, int, bool]]:
    """The products, accesses and waits, in order."""
    out = []
    for e in equations:
        if e.op == "wgmma_wait":
            out.append(("wait", e.param("n"), bool(e.param("implicit"))))
        elif e.op in ("wgmma", "get", "swap", "acc_zero"):
            out.append((e.op, e.param("init"), e.param("dynamic")))
    return out


def ops(equations) -> list[str]:
    return [e.op for e in walk(tuple(equations)) if e.op in ("wgmma", "wgmma_wait", "get", "swap", "acc_zero", "for")]


def test_reading_waits_for_the_product(resolve):
    def scope(x, b, acc):
        plgpu.wgmma(acc, b, b)
        return acc[...]

    equations, _ = resolve(scope)
    assert waits(equations) == [("wgmma", "zero", None), ("wait", 0, True), ("get", None, None)]


def test_an_explicit_wait_is_enough(resolve):
    def scope(x, b, acc):
        plgpu.wgmma(acc, b, b)
        plgpu.wgmma_wait(0)
        return acc[...]

    equations, _ = resolve(scope)
    assert waits(equations) == [("wgmma", "zero", None), ("wait", 0, False), ("get", None, None)]


def test_partial_wait(resolve):
    """Reading the older of two accumulators leaves the younger product in flight: wait 1."""

    def scope(x, b, first, second):
        plgpu.wgmma(first, b, b)
        plgpu.wgmma(second, b, b)
        return first[...] + second[...]

    equations, _ = resolve(scope, accs=2)
    assert waits(equations) == [
        ("wgmma", "zero", None),
        ("wgmma", "zero", None),
        ("wait", 1, True),
        ("get", None, None),
        ("wait", 0, True),
        ("get", None, None),
    ]


def test_an_explicit_wait_counts_groups(resolve):
    """After wait 1 of two, reading the first needs nothing more."""

    def scope(x, b, first, second):
        plgpu.wgmma(first, b, b)
        plgpu.wgmma(second, b, b)
        plgpu.wgmma_wait(1)
        a = first[...]
        return a + second[...]

    equations, _ = resolve(scope, accs=2)
    assert [w for w in waits(equations) if w[0] == "wait"] == [("wait", 1, False), ("wait", 0, True)]


def test_nothing_is_in_flight_when_a_role_or_a_scope_ends(resolve):
    def scope(x, b, acc):
        plgpu.wgmma(acc, b, b)

    equations, _ = resolve(scope)
    assert waits(equations)[-1] == ("wait", 0, True)


def test_writing_an_accumulator_waits(resolve):
    def scope(x, b, acc):
        plgpu.wgmma(acc, b, b)
        acc[...] = acc[...] * 2.0
        plgpu.wgmma(acc, b, b)
        return acc[...]

    equations, _ = resolve(scope)
    assert [w[:2] for w in waits(equations)] == [
        ("wgmma", "zero"),
        ("wait", 0),
        ("get", None),
        ("swap", None),
        ("wgmma", "add"),
        ("wait", 0),
        ("get", None),
    ]


# ---- how an accumulator begins ----------------------------------------------------------------------------------------------
def test_the_first_product_overwrites(resolve):
    def scope(x, b, acc):
        plgpu.wgmma(acc, b, b)
        plgpu.wgmma(acc, b, b)
        return acc[...]

    equations, _ = resolve(scope)
    assert [e.param("init") for e in equations if e.op == "wgmma"] == ["zero", "add"]


def test_a_loop_decides_at_run_time(resolve):
    """A flag says whether a product has run; after the loop, zeros if none has."""

    def scope(x, b, acc):
        def step(i, _):
            plgpu.wgmma(acc, b, b)
            plgpu.wgmma_wait(0)

        lax.fori_loop(0, plgpu.dim_size(x, 0), step, None)
        return acc[...]

    equations, _ = resolve(scope)
    (product,) = [e for e in walk(equations) if e.op == "wgmma"]
    assert product.param("init") == "dynamic"
    assert ("acc_zero", None, True) in waits(equations), "the trip count may be zero"


def test_reading_before_any_product_zeroes(resolve):
    def scope(x, b, acc):
        a = acc[...]
        plgpu.wgmma(acc, b, b)
        return a + acc[...]

    equations, _ = resolve(scope)
    assert waits(equations)[:3] == [("acc_zero", None, False), ("get", None, None), ("wgmma", "add", None)]


def test_reading_without_any_product_zeroes(resolve):
    """An ACC starts as zeros, also in a role that never multiplies."""
    equations, _ = resolve(lambda x, b, acc: acc[...])
    assert waits(equations) == [("acc_zero", None, False), ("get", None, None)]


def test_storing_needs_no_zeros(resolve):
    """A store that nobody reads back starts the accumulator."""

    def scope(x, b, acc):
        acc[...] = jnp.full((64, 64), 2.0, F)
        plgpu.wgmma(acc, b, b)
        return acc[...]

    equations, _ = resolve(scope)
    assert [w[:2] for w in waits(equations) if w[0] in ("wgmma", "acc_zero")][-1] == ("wgmma", "add")


def test_a_loop_that_rescales_begins_with_zeros(resolve):
    def scope(x, b, acc):
        def step(i, _):
            acc[...] = acc[...] * 0.5
            plgpu.wgmma(acc, b, b)
            plgpu.wgmma_wait(0)

        lax.fori_loop(0, 4, step, None)
        return acc[...]

    equations, _ = resolve(scope)
    assert ops(equations)[0] == "acc_zero"
    (product,) = [e for e in walk(equations) if e.op == "wgmma"]
    assert product.param("init") == "add"


def test_accumulators_begin_anew_with_their_scope(resolve, equations):
    """A scope inside a loop: the first product of each iteration overwrites."""

    def scope(x, b, outer):
        def step(i, _):
            def inner(acc):
                plgpu.wgmma(acc, b, b)
                return acc[...]

            outer[...] = outer[...] + plgpu.run_scoped(inner, ACC)

        lax.fori_loop(0, 4, step, None)
        return outer[...]

    found, _ = resolve(scope)
    assert [e.param("init") for e in walk(found) if e.op == "wgmma"] == ["zero"]


# ---- loops and branches -----------------------------------------------------------------------------------------------------
def test_a_product_over_the_back_edge(resolve):
    """wait 1 in the loop: one group stays in flight, is noted, and is waited for when the accumulator is read."""

    def scope(x, b, acc):
        def step(i, _):
            plgpu.wgmma(acc, b, b)
            plgpu.wgmma_wait(1)

        lax.fori_loop(0, 4, step, None)
        return acc[...]

    found, notes = resolve(scope)
    assert any("1 wgmma group(s) stay in flight from one iteration to the next" in n for n in notes)
    assert ("wait", 0, True) in waits(found)


def test_a_loop_that_never_waits(resolve):
    def scope(x, b, acc):
        lax.fori_loop(0, 4, lambda i, _: plgpu.wgmma(acc, b, b), None)
        return acc[...]

    with pytest.raises(InFlightError, match="grows with every iteration of this loop; add wgmma_wait"):
        resolve(scope)


def ends_in_its_last(upper, last, x, b, acc):
    """A loop that reads its accumulator in one of its iterations."""

    def step(i, _):
        plgpu.wgmma(acc, b, b)
        plgpu.wgmma_wait(1)

        @plgpu.when(i == last)
        def _():
            b[...] = acc[...].astype(BF)

        plgpu.commit_smem()

    lax.fori_loop(0, upper, step, None)


def test_the_last_iteration_stands_behind_the_loop(resolve):
    """Else each would wait for its own product, as both paths of the branch must leave it with the same in flight."""
    found, notes = resolve(functools.partial(ends_in_its_last, 4, 3))
    assert any("the last iteration, which reads an accumulator, stands behind the loop" in n for n in notes)
    loop, *behind = [e for e in found if e.op in ("for", "cond", "wgmma", "wgmma_wait", "get", "swap", "commit_smem")]
    assert [e.op for e in loop.regions[0].equations if e.op in ("cond", "wgmma", "wgmma_wait", "commit_smem")] == [
        "wgmma",
        "wgmma_wait",
        "commit_smem",
    ]
    assert loop.operands[1].value == 3
    assert [e.op for e in behind] == ["wgmma", "wgmma_wait", "wgmma_wait", "get", "swap", "commit_smem"]


@pytest.mark.parametrize("upper, last", [(4, 2), (4, 4)])
def test_another_iteration_stays_where_it_is(resolve, upper, last):
    found, _ = resolve(functools.partial(ends_in_its_last, upper, last))
    (loop,) = [e for e in found if e.op == "for"]
    assert loop.operands[1].value == 4 and "cond" in [e.op for e in loop.regions[0].equations]
    assert "wgmma" not in [e.op for e in found]


def test_one_iteration_needs_no_loop(resolve):
    found, _ = resolve(functools.partial(ends_in_its_last, 1, 0))
    assert "for" not in [e.op for e in found] and "get" in [e.op for e in found]


def test_branches_that_differ_drain(resolve):
    """Where one path has a product in flight and the other has not, the first waits before they meet."""

    def scope(x, b, acc):
        @plgpu.when(plgpu.dim_size(x, 0) > 3)
        def _():
            plgpu.wgmma(acc, b, b)

        return acc[...]

    found, _ = resolve(scope)
    (branch,) = [e for e in found if e.op == "cond"]
    bodies = [[e.op for e in r.equations] for r in branch.regions]
    assert ["wgmma", "wgmma_wait"] in bodies
    assert ("acc_zero", None, True) in waits(found), "the other path has not begun the accumulator"


# ---- tiles in registers -----------------------------------------------------------------------------------------------------
def tile_loop(x, b, acc, *, order: str):
    """The tile of the next step is carried; it is made above the wait ('sink'), below ('clean') or used above ('stuck')."""

    def step(i, p):
        plgpu.wgmma(acc, p, b)  # product
        if order == "clean":
            plgpu.wgmma_wait(0)
        new = p * jnp.asarray(2.0, BF)  # next
        if order == "stuck":
            b[...] = new
        if order != "clean":
            plgpu.wgmma_wait(0)
        return new

    lax.fori_loop(0, 4, step, plgpu.load(x, layout=plgpu.Layout.WGMMA))
    return acc[...]


def loop_ops(equations) -> list[str]:
    (loop,) = [e for e in equations if e.op == "for"]
    return [e.op for e in loop.regions[0].equations if e.op in ("wgmma", "wgmma_wait", "mul", "swap")]


def test_the_next_tile_made_below_the_wait(resolve):
    found, notes = resolve(functools.partial(tile_loop, order="clean"))
    assert loop_ops(found) == ["wgmma", "wgmma_wait", "mul"] and not [n for n in notes if "made after" in n]


def test_the_next_tile_is_sunk_below_the_wait(resolve, line_of):
    found, notes = resolve(functools.partial(tile_loop, order="sink"))
    assert loop_ops(found) == ["wgmma", "wgmma_wait", "mul"]
    (note,) = [n for n in notes if "made after the wgmma_wait" in n]
    assert f":{line_of(tile_loop, 'next')}" in note


def test_a_tile_that_cannot_wait_gets_a_second_one(resolve):
    """The next tile is stored while the product still reads the current one: the loop is unrolled over two tiles."""
    found, notes = resolve(functools.partial(tile_loop, order="stuck"))
    assert any("unrolled twice, a tile for each half" in n and "bfloat16[64, 64]" in n for n in notes)
    (loop,) = [e for e in found if e.op == "for"]
    assert [e.op for e in loop.regions[0].equations].count("wgmma") == 2
    assert len([e for e in walk(found) if e.op == "wgmma"]) == 3, "and one for an odd last step"


def test_a_tile_in_a_while_loop_that_cannot_wait(resolve, line_of, assert_at):
    """A while loop is not unrolled: the error names both lines."""

    def scope(x, b, acc):
        def step(c):
            i, p = c
            plgpu.wgmma(acc, p, b)  # product
            new = p * jnp.asarray(2.0, BF)  # next
            b[...] = new
            plgpu.wgmma_wait(0)
            return i + 2, new

        lax.while_loop(lambda c: c[0] < 8, step, (jnp.int32(0), plgpu.load(x, layout=plgpu.Layout.WGMMA)))
        return acc[...]

    with pytest.raises(InFlightError, match="make it after the wgmma_wait that ends this product") as e:
        resolve(scope)
    assert_at(e.value, scope, "next")
    assert f":{line_of(scope, 'product')}" in str(e.value)


def test_a_carried_tile_is_released(resolve):
    """A product that would still read the carried tile at the end of the iteration is waited for there."""

    def scope(x, b, acc):
        def step(i, p):
            plgpu.wgmma(acc, p, b)
            return p * jnp.asarray(2.0, BF)

        lax.fori_loop(0, 4, step, plgpu.load(x, layout=plgpu.Layout.WGMMA))
        return acc[...]

    found, _ = resolve(scope)
    (loop,) = [e for e in found if e.op == "for"]
    body = loop.regions[0].equations
    assert [e.op for e in body if e.op in ("wgmma", "wgmma_wait", "mul")].count("wgmma_wait") == 1
    assert body[-1].op == "wgmma_wait" or body[-2].op == "wgmma_wait"


def test_roles_without_products_are_left_alone(program, array):
    p = program(lambda x, o: o.__setitem__(0, x[0]), array(8), out=array(8))
    assert in_flight.resolve(p.body, in_flight.unused_ids(p.body)).equations == p.body


def test_a_tile_made_anew_in_every_step_waits_for_the_product_that_reads_the_last(resolve):
    """The step's one set of registers: ptxas says nothing when it is written under a product of the step before."""

    def scope(x, b, acc):
        def step(i, _):
            tile = plgpu.load(x, layout=plgpu.Layout.WGMMA) * 2
            plgpu.wgmma(acc, tile, b)
            plgpu.wgmma_wait(1)

        lax.fori_loop(0, 4, step, None)
        return acc[...]

    equations, notes = resolve(scope)
    (loop,) = [e for e in equations if e.op == "for"]
    body = loop.regions[0].equations
    written = next(i for i, e in enumerate(body) if e.op == "mul" and e.results[0].shape)
    assert body[written - 1].op == "wgmma_wait" and body[written - 1].param("n") == 0
    assert any("reads the registers that are written here" in n for n in notes)


def test_a_branchs_value_waits_for_the_product_that_reads_what_it_becomes(resolve):
    """The tile that a loop leaves and the next one, made in a branch while the product is in flight, share registers."""

    def scope(x, b, acc):
        first = plgpu.load(x, layout=plgpu.Layout.WGMMA)

        def outer(carry):
            n, tile = carry

            def again():
                plgpu.wgmma(acc, tile, b)
                new = plgpu.load(x, layout=plgpu.Layout.WGMMA) * 2
                plgpu.wgmma_wait(0)
                return new

            return n + 1, lax.cond(n > 2, again, lambda: tile)

        lax.while_loop(lambda c: c[0] < 4, outer, (jnp.int32(0), first))
        return acc[...]

    equations, _ = resolve(scope)
    order = [e.op for e in walk(tuple(equations)) if e.op in ("wgmma", "wgmma_wait", "mul")]
    assert order.index("wgmma") < order.index("wgmma_wait") < order.index("mul")


def test_new_values_have_ids_of_their_own_in_all_roles(plan):
    """A loop that is unrolled in the first role makes values anew; the second role's, numbered before, keep their names."""

    def body(x, o, y, b):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            scope = functools.partial(tile_loop, x, b, order="stuck")
            o[...] = plgpu.run_scoped(scope, ACC).astype(o.dtype)

        @plgpu.when(wg == 1)
        def _():
            def step(i, total):
                return total + i * i

            y[0] = lax.fori_loop(0, plgpu.dim_size(x, 1), step, jnp.int32(0))

    shape = jax.ShapeDtypeStruct((64, 64), BF)
    p = plan(
        body,
        shape,
        out=[jax.ShapeDtypeStruct((64, 64), F), jax.ShapeDtypeStruct((1,), jnp.int32)],
        scratch_types=B,
        num_threads=2,
        thread_name="wg",
    )
    assert any("unrolled twice" in note for note in p.notes)
    common = {v.id for e in p.program.body for v in e.results}  # outside both branches
    first, second = (ids_of(r.body) for r in p.roles)
    assert not (first & second) - common, "a name of the first role's would stand for a value of the second's"


def ids_of(block):
    """Of everything that is defined in it."""
    found = {v.id for v in block.inputs}
    for step in block.steps:
        found |= {v.id for v in step.equation.results}.union(*map(ids_of, step.regions))
    return found
