"""The split by role: who runs what, what becomes a literal, what is duplicated and what is gone."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.plan.model import Block
from mosaic_gpu.plan.roles import split
from mosaic_gpu.program import Equation, Literal, Value, walk

F = jnp.float32


def names(block: Block) -> list[str]:
    return [s.equation.op for s in block.steps]


def everything(block: Block):
    for s in block.steps:
        yield s.equation
        for r in s.regions:
            yield from everything(r)


def threads(n: int) -> dict:
    return dict(num_threads=n, thread_name="wg")


def test_two_compute_and_one_memory(plan, array):
    """Warpgroups 0 and 1 share one role, in which the index stays a run-time value; 2 has its own."""

    def body(x, o, s, b):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 2)
        def _():
            plgpu.copy_gmem_to_smem(x, s, b)

        @plgpu.when(wg < 2)
        def _():
            plgpu.barrier_wait(b)
            o[wg] = x[wg, 0]

    p = plan(body, array(64, 64), out=array(2), scratch_types=[plgpu.SMEM((64, 64), F), plgpu.Barrier()], **threads(3))
    assert [(r.indices, r.name) for r in p.roles] == [((0, 1), "wg0,1"), ((2,), "wg2")]
    compute, memory = p.roles
    assert names(compute.body) == ["axis_index", "barrier_wait", "get", "swap"], "no branch is left"
    assert names(memory.body) == ["copy_gmem_to_smem"] and memory.single_thread
    store = compute.body.steps[-1].equation.operands[0]
    assert [v.id for v, _ in store.dims[0].start.terms] == [compute.body.steps[0].equation.results[0].id]


def test_one_warpgroup_roles_know_their_index(plan, array):
    """Where a role is one warpgroup, arithmetic on the index is folded."""

    def body(x, o):
        wg = lax.axis_index("wg")
        for i in range(3):

            @plgpu.when(wg == i)
            def _():
                o[wg * 2 + 1] = x[0]

    p = plan(body, array(8), out=array(8), **threads(3))
    assert [r.indices for r in p.roles] == [(0,), (1,), (2,)]
    for i, r in enumerate(p.roles):
        assert names(r.body) == ["get", "swap"]
        (index,) = r.body.steps[-1].equation.operands[0].dims
        assert [v.id for v, _ in index.start.terms] == [] or all(isinstance(v, Value) for v, _ in index.start.terms)
        assert index.start.const == 2 * i + 1 and index.start.static


def test_nested_branches(plan, array):
    """Inside a decided branch, one that the role decides is gone; one that it does not stays at run time, in one copy."""

    def body(x, o):
        wg = lax.axis_index("wg")

        @plgpu.when(wg < 2)
        def _():
            o[0] = x[0]

            @plgpu.when(wg == 1)
            def _():
                o[1] = x[1]

            @plgpu.when(wg == 3)
            def _():
                o[4] = x[4]

            @plgpu.when(wg != 3)
            def _():
                o[5] = x[5]

        @plgpu.when(wg >= 2)
        def _():
            o[2] = x[2]

    p = plan(body, array(8), out=array(8), **threads(4))
    assert [r.indices for r in p.roles] == [(0, 1), (2, 3)]
    stores = [[e.operands[0].dims[0].start.const for e in everything(r.body) if e.op == "swap"] for r in p.roles]
    assert stores == [[0, 1, 5], [2]]
    assert names(p.roles[0].body).count("cond") == 1


def test_switch_on_the_index(plan, array):
    """lax.switch clamps: index 3 of three branches takes the last, with index 2."""

    def body(x, o):
        wg = lax.axis_index("wg")
        lax.switch(wg, [lambda i=i: o.__setitem__(i, x[i]) for i in range(3)])

    p = plan(body, array(8), out=array(8), **threads(4))
    assert [r.indices for r in p.roles] == [(0,), (1,), (2, 3)]


def test_common_code_is_in_every_role(plan, array):
    def body(x, o):
        wg = lax.axis_index("wg")
        start = plgpu.program_id(0) * 2
        value = x[start]

        @plgpu.when(wg == 0)
        def _():
            o[0] = value

        @plgpu.when(wg == 1)
        def _():
            o[1] = value + 1.0

    p = plan(body, array(8), out=array(8), grid=(2,), **threads(2))
    for r in p.roles:
        assert names(r.body)[:2] == ["program_id", "get"], "the product is part of the index"
    assert "add" not in names(p.roles[0].body)


def test_pure_code_nobody_reads_is_dropped(plan, array):
    def body(x, o):
        unused = plgpu.dim_size(x, 0) * 3  # noqa: F841
        jnp.exp(x[0])
        o[0] = x[1]

    p = plan(body, array(8), out=array(8))
    assert names(p.roles[0].body) == ["get", "get", "swap"], "loads are kept, arithmetic is not"
    assert p.roles[0].body.steps[-1].equation.results == (), "nobody wants the old value of a store"


def test_a_branch_on_the_index_inside_a_loop_stays(plan, array):
    """Only outermost branches make roles: the loop is emitted once for both warpgroups."""

    def body(x, o):
        wg = lax.axis_index("wg")

        def step(i, _):
            @plgpu.when(wg == 0)
            def _():
                o[i] = x[i]

        lax.fori_loop(0, 4, step, None)

    p = plan(body, array(8), out=array(8), **threads(2))
    assert [r.indices for r in p.roles] == [(0, 1)]
    (loop,) = [s for s in p.roles[0].body.steps if s.equation.op == "for"]
    assert "cond" in names(loop.regions[0])


def test_branches_inside_a_scope_are_outermost(plan, array):
    def body(x, o):
        wg = lax.axis_index("wg")

        def scope(b):
            @plgpu.when(wg == 0)
            def _():
                plgpu.barrier_arrive(b)

            @plgpu.when(wg == 1)
            def _():
                plgpu.barrier_wait(b)

        plgpu.run_scoped(scope, plgpu.Barrier())

    p = plan(body, array(8), out=array(8), **threads(2))
    assert [[e.op for e in everything(r.body)] for r in p.roles] == [
        ["run_scoped", "barrier_arrive"],
        ["run_scoped", "barrier_wait"],
    ]


def test_a_result_of_a_decided_branch(plan, array):
    """cond with results: the taken branch's values take their place."""

    def body(x, o):
        wg = lax.axis_index("wg")
        i = lax.cond(wg == 0, lambda: jnp.int32(3), lambda: plgpu.program_id(0))
        o[i] = x[0]

    p = plan(body, array(8), out=array(8), grid=(2,), **threads(2))
    zero, one = p.roles
    assert zero.body.steps[-1].equation.operands[0].dims[0].start.const == 3
    assert names(one.body) == ["program_id", "get", "swap"] or names(one.body)[-1] == "swap"


def test_branches_on_data_make_no_roles(plan, array):
    def body(x, o):
        @plgpu.when(x[0] > 0)
        def _():
            o[0] = x[0]

    p = plan(body, array(8), out=array(8), **threads(2))
    assert [r.indices for r in p.roles] == [(0, 1)] and "cond" in names(p.roles[0].body)


def test_arithmetic_on_the_index_is_folded_as_numpy_does(plan, array):
    """rem, comparisons, and/or, select: 4 warpgroups split by parity of (wg + 1)."""

    def body(x, o):
        wg = lax.axis_index("wg")
        odd = (lax.rem(wg + 1, 2) == 1) & ~(wg < 0)

        @plgpu.when(odd)
        def _():
            o[0] = x[0]

        @plgpu.when(~odd)
        def _():
            o[1] = x[1]

    p = plan(body, array(8), out=array(8), **threads(4))
    assert [r.indices for r in p.roles] == [(0, 2), (1, 3)]


def test_without_a_thread_name_there_is_one_role(plan, array):
    p = plan(lambda x, o: o.__setitem__(0, x[0]), array(8), out=array(8))
    assert [(r.indices, r.name) for r in p.roles] == [((0,), "warpgroup0")]


def test_roles_of_warps(plan):
    """Under warp_map the four warps split the same way; each role is planned in the warp's table."""

    def body(b):
        def warps(warp):
            @plgpu.when(warp == 0)
            def _():
                plgpu.barrier_arrive(b.at[0])

            @plgpu.when(warp >= 2)
            def _():
                plgpu.barrier_wait(b.at[0])

        plgpu.warp_map(warps)

    p = plan(body, scratch_types=[plgpu.Barrier(num_barriers=2)])
    (step,) = p.roles[0].body.steps
    assert [(r.indices, names(r.body)) for r in step.data] == [
        ((0,), ["barrier_arrive"]),
        ((1,), []),
        ((2, 3), ["barrier_wait"]),
    ]
    assert all(r.scope.value == "warp" for r in step.data)


def test_split_keeps_every_effect_exactly_where_it_belongs(program, array):
    """For every warpgroup: the stores of its role are those that running the program with its index makes."""

    def body(x, o):
        wg = lax.axis_index("wg")
        for low in range(3):
            for high in range(low + 1, 4):

                @plgpu.when((wg >= low) & (wg < high))
                def _(low=low, high=high):
                    o[low * 4 + high] = x[0]

    p = program(body, array(8), out=array(16), **threads(4))
    for s in split(p.body, "wg", 4):
        stores = {e.operands[0].dims[0].start.const for e in walk(s.equations) if e.op == "swap"}
        for wg in s.indices:
            assert stores == {low * 4 + high for low in range(3) for high in range(low + 1, 4) if low <= wg < high}


def test_nan_constants_do_not_stop_the_split(program, array):
    """A folded NaN is not equal to itself; it must not loop or become another value."""

    def body(x, o):
        o[0] = jnp.float32(jnp.nan) * 2.0

    (s,) = split(program(body, array(8), out=array(8)).body, None, 1)
    assert [e.op for e in s.equations][-1] == "swap"
    assert isinstance(s.equations[-1], Equation) and isinstance(s.equations[-1].operands[1], (Value, Literal))
