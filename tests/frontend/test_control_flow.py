"""Loops, branches, scopes and calls: which equations they become."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import Literal, Value, format_program
from mosaic_gpu.simulator import simulate

F = jnp.float32


def test_static_loop(program, array, equations):
    """fori_loop of Python bounds: literal bounds, the counter is the region's first input, the carry follows."""

    def body(x, o):
        o[0] = lax.fori_loop(2, 7, lambda i, c: c + x[i], jnp.float32(0))

    p = program(body, array(8), out=array(1))
    (loop,) = equations(p, "for")
    lower, upper, init = loop.operands
    assert (lower, upper) == (Literal(2, "int32"), Literal(7, "int32"))
    assert init == Literal(0.0, "float32") and loop.param("unroll") == 1
    index, carry = loop.regions[0].inputs
    assert (index.dtype, carry.dtype) == ("int32", "float32")
    (get,) = equations(loop.regions[0].equations, "get")
    assert [v.id for v, _ in get.operands[0].dims[0].start.terms] == [index.id]
    assert not equations(loop.regions[0].equations, "while")


def test_dynamic_loop_is_counted(program, array, equations):
    """A traced bound gives JAX's `while`; it is recognised, and inside, the bound is the outer value itself."""

    def body(x, o):
        n = plgpu.dim_size(x, 0)
        o[0] = lax.fori_loop(0, n, lambda i, c: c + (n - i).astype(F), jnp.float32(0))

    p = program(body, array(8), out=array(1))
    assert not equations(p, "while")
    (loop,) = equations(p, "for")
    (size,) = equations(p, "dim_size")
    assert loop.operands[1] == size.results[0]
    (sub,) = equations(loop.regions[0].equations, "sub")
    assert sub.operands[0] == size.results[0]
    assert (
        sub.operands[1] == loop.regions[0].inputs[0]
    )  # not behind the conversion that only makes its type a strong one
    assert len(loop.results) == 1


def test_dynamic_loop_without_carry(program, array, equations):
    def body(x, o):
        def step(i, _):
            o[i] = x[i]

        lax.fori_loop(1, plgpu.dim_size(x, 0), step, None)

    (loop,) = equations(program(body, array(8), out=array(8)), "for")
    assert len(loop.operands) == 2 and loop.results == () and loop.regions[0].outputs == ()


@pytest.mark.parametrize(("unroll", "expected"), [(1, 1), (4, 4), (True, 8), (False, 1)])
def test_unroll(program, array, equations, unroll, expected):
    """True is all the way: 8 of 8."""

    def body(x, o):
        o[0] = lax.fori_loop(0, 8, lambda i, c: c + x[i], jnp.float32(0), unroll=unroll)

    loops = equations(program(body, array(8), out=array(1)), "for")
    assert [loop.param("unroll") for loop in loops] == [expected]


def test_counter_of_a_written_out_while_loop(program, array, equations):
    """What a user's own counted while_loop returns: the counter ends at the larger of its bounds, not at the upper one."""

    def body(x, o):
        n = plgpu.dim_size(x, 0)
        i, _, total = lax.while_loop(
            lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], c[2] + 1.0), (jnp.int32(5), n, jnp.float32(0))
        )
        o[0] = total + i.astype(F)

    p = program(body, array(8), out=array(1))
    (loop,) = equations(p, "for")
    (larger,) = equations(p, "max")
    assert set(larger.operands) == {loop.operands[1], Literal(5, "int32")}


def test_while_over_floats_is_not_counted(program, array, equations):
    """c < n with c + 1 in float32 looks like a counter, but an int32 counter would change its arithmetic."""

    def body(x, o):
        c, _ = lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1]), (x[0], x[1]))
        o[0] = c

    p = program(body, array(8), out=array(1))
    assert not equations(p, "for")
    (loop,) = equations(p, "while")
    assert [v.dtype for v in loop.results] == ["float32", "float32"]
    condition, step = loop.regions
    assert condition.outputs[0].dtype == "bool" and len(step.outputs) == 2


def test_scan_counting_in_floats(program, array, equations):
    """A scan whose only carry is x + 1.0 keeps it as a float carry."""

    def body(x, o):
        c, _ = lax.scan(lambda c, _: (c + 1.0, None), jnp.float32(0), None, length=4)
        o[0] = c

    (loop,) = equations(program(body, array(8), out=array(1)), "for")
    assert [v.dtype for v in loop.results] == ["float32"] and len(loop.operands) == 3


def test_while(program, array, equations):
    def body(x, o):
        o[0] = lax.while_loop(lambda c: x[0] > c, lambda c: c * 2, jnp.float32(1))

    (loop,) = equations(program(body, array(8), out=array(1)), "while")
    condition, step = loop.regions
    assert [e.op for e in condition.equations] == ["get", "gt"] and [e.op for e in step.equations] == ["mul"]
    assert loop.operands == (Literal(1.0, "float32"),)


def test_cond_and_switch(program, array, equations):
    """Branches are regions without inputs, that read the values around them; outputs become the results."""

    def body(x, o):
        i = lax.axis_index("g")
        o[0] = lax.cond(i > 1, lambda: x[0], lambda: x[1])
        o[1] = lax.switch(i, [lambda: x[0], lambda: x[1], lambda: 3.0])

    first, second = equations(program(body, array(8), out=array(2), grid=(4,), grid_names=("g",)), "cond")
    assert len(first.regions) == 2 and len(second.regions) == 3
    assert all(r.inputs == () and len(r.outputs) == 1 for r in (*first.regions, *second.regions))
    assert second.regions[2].outputs == (Literal(3.0, "float32"),)
    assert [e.op for e in first.regions[0].equations] == ["get"]


def test_when_on_python_bools(program, array, equations):
    """A Python bool decides while tracing: no equation at all."""

    def body(x, o):
        @plgpu.when(True)
        def _():
            o[0] = x[0]

        @plgpu.when(False)
        def _():
            o[1] = x[1]

    p = program(body, array(8), out=array(2))
    assert not equations(p, "cond") and len(equations(p, "swap")) == 1


def test_refs_pass_through_branches_and_loops(program, array, equations):
    def body(x, o):
        def step(i, _):
            @plgpu.when(i > 1)
            def _():
                o[i] = x[i]

        lax.fori_loop(0, 4, step, None)

    p = program(body, array(8), out=array(8))
    (store,) = equations(p, "swap")
    assert store.operands[0].ref == p.inputs[1]


def test_a_counted_loop_may_synchronise_before_it_counts(program, array, equations):
    """Operations without results may stand anywhere in the body of a while_loop."""

    def body(x, o, b):
        def step(c):
            plgpu.barrier_wait(b)
            return c[0] + 1, c[1]

        lax.while_loop(lambda c: c[0] < c[1], step, (jnp.int32(0), plgpu.dim_size(x, 0)))

    p = program(body, array(8), out=array(1), scratch_types=[plgpu.Barrier()])
    assert len(equations(p, "for")) == 1 and not equations(p, "while")


def test_nested_jit_is_inlined(program, array, equations):
    @jax.jit
    def helper(a, b):
        return jnp.where(a > b, a, b) * 2

    def body(x, o):
        o[0] = helper(x[0], x[1])
        o[1] = helper(x[2], x[3])

    p = program(body, array(8), out=array(2))
    assert [e.op for e in p.body].count("select_n") == 2
    assert not [e for e in p.body if e.op in ("jit", "pjit")]
    ids = [v.id for e in p.body for v in e.results]
    assert len(set(ids)) == len(ids), "a helper inlined twice gets fresh values"


def test_custom_derivatives_are_inlined(program, array):
    @jax.custom_vjp
    def twice(a):
        return a + a

    twice.defvjp(lambda a: (twice(a), None), lambda _, g: (g * 2,))

    def body(x, o):
        o[0] = jax.nn.relu(x[0])
        o[1] = twice(x[0])
        o[2] = jax.checkpoint(lambda a: a * 3.0)(x[0])
        o[3] = lax.stop_gradient(x[1])

    p = program(body, array(8), out=array(4))
    names = [e.op for e in p.body]
    assert "max" in names and "add" in names and "mul" in names
    assert not {n for n in names if "custom" in n or "checkpoint" in n or "remat" in n or n == "stop_gradient"}


def test_add_update(program, array, equations):
    """`ref[...] += x` in its in-place form becomes a read, an addition and a store."""

    def body(o):
        o[0] += 1.0

    p = program(body, out=array(4))
    assert [e.op for e in p.body] == ["get", "add", "swap"]


@pytest.mark.parametrize("form", ["xs", "ys", "reverse"])
def test_scan_over_arrays_is_a_loop(program, array, equations, form):
    """Step i takes a slice of each of xs and updates one of each of ys; nothing of scan is left."""

    def body(x, o):
        xs = plgpu.broadcasted_iota(jnp.int32, (4, 128), 0) if form != "ys" else None
        step = lambda c, y: (c + (0 if y is None else y[0]), c if form == "ys" else None)  # noqa: E731
        o[0] = lax.scan(step, 0, xs, length=4, reverse=form == "reverse")[0]

    p = program(body, array(8), out=array(1, dtype=jnp.int32))
    (loop,) = equations(p, "for")
    inside = [e.op for e in loop.regions[0].equations]
    assert ("dynamic_slice" in inside) == (form != "ys") and ("dynamic_update_slice" in inside) == (form == "ys")
    assert ("sub" in inside) == (form == "reverse")


# ---- scopes -----------------------------------------------------------------------------------------------------------------
def test_nested_scopes_return_arrays(program, array, equations):
    def body(x, o):
        def outer(acc):
            def inner(s, b):
                plgpu.copy_gmem_to_smem(x, s, b)
                return acc[...] * 2, {"y": acc[...]}

            a, d = plgpu.run_scoped(inner, plgpu.SMEM((64, 64), F), plgpu.Barrier())
            return a + d["y"]

        o[...] = plgpu.run_scoped(outer, plgpu.ACC((64, 64)))

    p = program(body, array(64, 64), out=array(64, 64))
    outer, inner = equations(p, "run_scoped")
    assert [v.space.kind for v in outer.regions[0].inputs] == ["acc"]
    assert [v.space.kind for v in inner.regions[0].inputs] == ["smem", "barrier"]
    assert len(inner.results) == 2 and [v.shape for v in outer.results] == [(64, 64)]
    get = equations(inner.regions[0].equations, "get")[0]
    assert get.operands[0].ref == outer.regions[0].inputs[0], "the inner scope sees the outer one's Ref"


def test_scope_by_keyword(program, array, equations):
    def body(x):
        def f(*, s, acc):
            assert s.shape == (8, 8) and acc.shape == (64, 8)

        plgpu.run_scoped(f, s=plgpu.SMEM((8, 8), F), acc=plgpu.ACC((64, 8)), collective_axes="wg")

    (scope,) = equations(program(body, array(8), num_threads=2, thread_name="wg"), "run_scoped")
    assert scope.param("collective_axes") == ("wg",)


@pytest.mark.parametrize("what", ["ref", "view"])
def test_scope_may_not_return_a_ref(program, array, what):
    def body(x):
        plgpu.run_scoped(lambda s: s if what == "ref" else s.at[0], plgpu.SMEM((8, 8), F))

    with pytest.raises(ValueError, match="cannot return a Ref"):
        program(body, array(8))


def test_scope_takes_memory_spaces_only(program, array):
    def body(x):
        plgpu.run_scoped(lambda s: None, jax.ShapeDtypeStruct((8,), F))

    with pytest.raises(TypeError, match=r"run_scoped: s must be a memory space such as SMEM.*not ShapeDtypeStruct"):
        program(body, array(8))


def test_warp_map(program, array, equations):
    def body(b):
        def warps(warp):
            @plgpu.when(warp == 1)
            def _():
                plgpu.barrier_arrive(b)

        plgpu.warp_map(warps)

    (e,) = equations(program(body, scratch_types=[plgpu.Barrier()]), "warp_map")
    (warp,) = e.regions[0].inputs
    assert isinstance(warp, Value) and warp.dtype == "int32" and warp.shape == ()


def test_a_program_prints(program, array):
    """`format_program` shows ops, operands and lines."""

    def body(x, o):
        o[0] = lax.fori_loop(0, 4, lambda i, c: c + x[i], jnp.float32(0))

    text = format_program(program(body, array(8), out=array(1), name="summing"))
    assert text.startswith("kernel summing") and "for(0:int32, 4:int32" in text and "test_control_flow.py:" in text


def mesh_of_warps(names="warp"):
    """The example of Pallas: each warp of the warpgroup is asked for by the name of its axis."""

    def body(b, o):
        @plgpu.core_map(plgpu.WarpMesh(axis_name=names))
        def _():
            warp = lax.axis_index(names)

            @plgpu.when(warp == 1)
            def _():
                plgpu.barrier_arrive(b)

            @plgpu.when(warp == 2)
            def _():
                plgpu.barrier_wait(b)
                lax.fori_loop(0, 2, lambda i, _: o.__setitem__(i, lax.axis_index(names) + i), None)

    return body


def test_a_mesh_of_warps(program, equations):
    """It is a warp_map; the index of its axis is the warp."""

    def by_warp_map(b, o):
        def warps(warp):
            @plgpu.when(warp == 1)
            def _():
                plgpu.barrier_arrive(b)

            @plgpu.when(warp == 2)
            def _():
                plgpu.barrier_wait(b)
                lax.fori_loop(0, 2, lambda i, _: o.__setitem__(i, warp + i), None)

        plgpu.warp_map(warps)

    def texts(body):
        p = program(lambda o, b: body(b, o), out=jax.ShapeDtypeStruct((2,), jnp.int32), scratch_types=[plgpu.Barrier()])
        return [line.split("#")[0].rstrip() for line in format_program(p).splitlines()[1:]], p

    mesh, p = texts(mesh_of_warps())
    plain, _ = texts(by_warp_map)
    assert mesh == plain
    assert not equations(p, "axis_index") and len(equations(p, "warp_map")) == 1
    plan = build_plan(p, "sm_90a")
    assert simulate(plan, [])[0].tolist() == [2, 3]


def test_what_a_mesh_of_warps_refuses(program):
    with pytest.raises(ValueError, match="the kernel has an axis 'g' already"):
        program(lambda b: mesh_of_warps("g")(b, b), grid=(2,), grid_names=("g",), scratch_types=[plgpu.Barrier()])
    with pytest.raises(TypeError, match="core_map: mesh must be a WarpMesh"):
        program(lambda b: plgpu.core_map("warp")(lambda: None), scratch_types=[plgpu.Barrier()])
    with pytest.raises(TypeError, match="WarpMesh: axis_name must be a name"):
        plgpu.WarpMesh(axis_name=3)
    with pytest.raises(UnsupportedCall, match="unbound axis name: warp"):  # it ends with the mesh
        program(lambda b: (mesh_of_warps()(b, b), lax.axis_index("warp"))[:0] or None, scratch_types=[plgpu.Barrier()])
