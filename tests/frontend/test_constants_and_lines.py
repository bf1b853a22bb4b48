"""What a kernel body may capture and return, and which lines its equations carry."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.program import Literal, walk
from mosaic_gpu.simulator import simulate


@pytest.mark.parametrize("where", ["top", "loop", "branch", "jit"])
@pytest.mark.parametrize("make", [np.arange, jnp.arange], ids=["numpy", "jax"])
def test_captured_arrays_are_tables(plan, array, make, where):
    """Wherever in the body they are used."""
    captured = make(4, dtype=np.float32)

    def use():
        return jnp.sum(jnp.asarray(captured) * 2)

    def body(x, o):
        o[0] = {
            "top": use,
            "loop": lambda: lax.fori_loop(0, 3, lambda i, c: c + use(), jnp.float32(0)),
            "branch": lambda: lax.cond(x[0] == 0, use, lambda: jnp.float32(0)),
            "jit": jax.jit(use),
        }[where]()

    (found,) = simulate(plan(body, array(8), out=array(1)), [np.zeros(8, np.float32)])
    assert found[0] == 12 * (3 if where == "loop" else 1)


def test_large_captured_arrays_are_refused(program, array, assert_at):
    captured = np.arange(1025, dtype=np.float32)

    def body(x, o):
        y = x[0] + 1
        o[0] = y + jnp.sum(captured)  # used

    with pytest.raises(
        UnsupportedCall, match=r"captures an array constant of shape \(1025,\).*pass it as an input"
    ) as e:
        program(body, array(8), out=array(1))
    assert_at(e.value, body, "used")


def test_captured_arrays_that_are_traced_are_refused(array):
    def call(x):
        def body(y, o):
            o[...] = y[...] + x

        return plgpu.kernel(body, array(8))(x)

    with pytest.raises(UnsupportedCall, match=r"captures float32\[8\], which is traced.*pass it as an input"):
        jax.jit(call)(np.zeros(8, np.float32))


def test_a_captured_jax_scalar_is_a_literal(program, array):
    captured = jnp.float32(2) + 0

    def body(x, o):
        o[0] = x[0] * captured

    (mul,) = [e for e in program(body, array(8), out=array(1)).body if e.op == "mul"]
    assert mul.operands[1] == Literal(2.0, "float32")


def test_captured_arrays_of_one_value_are_no_tables(program, array):
    captured = np.full((8,), 2.5, np.float32)

    def body(x, o):
        o[...] = x[...] * captured

    assert not [e for e in program(body, array(8), out=array(8)).body if e.op == "constant"]


@pytest.mark.parametrize(
    ("captured", "expected"),
    [
        (2.5, Literal(2.5, "float32")),
        (np.float32(2.5), Literal(2.5, "float32")),
        (3, Literal(3.0, "float32")),
        (np.int32(3), Literal(3.0, "float32")),
    ],
)
def test_captured_scalars_are_literals(program, array, captured, expected):
    def body(x, o):
        o[0] = x[0] * captured

    (mul,) = [e for e in program(body, array(8), out=array(1)).body if e.op == "mul"]
    assert mul.operands[1] == expected


def test_literals_of_narrow_types_are_rounded(program, array):
    """A bfloat16 literal holds the float32 that it rounds to."""

    def body(x, o):
        o[0] = x[0] * 0.1

    (mul,) = [
        e for e in program(body, array(8, dtype=jnp.bfloat16), out=array(1, dtype=jnp.bfloat16)).body if e.op == "mul"
    ]
    assert mul.operands[1] == Literal(float(ml_dtypes.bfloat16(0.1)), "bfloat16")


@pytest.mark.parametrize("value", [0, "x", (1,)])
def test_body_returns_none(program, array, value):
    def body(x):
        return value

    with pytest.raises(
        ValueError, match="the kernel body at .*test_constants_and_lines.py:.* should return None; it returned"
    ):
        program(body, array(8))


# ---- lines ------------------------------------------------------------------------------------------------------------------
def line(e) -> tuple[str, int]:
    assert e.line is not None
    return e.line.file, e.line.number


def test_line_of_an_equation(program, array, line_of):
    def body(x, o):
        value = x[0]  # read
        o[0] = value + 1.0  # add

    p = program(body, array(8), out=array(1))
    assert [line(e) for e in p.body] == [(__file__, line_of(body, "read"))] + 2 * [(__file__, line_of(body, "add"))]
    assert p.body[0].line.function.endswith("body")


def helper(x):
    return x * 3.0  # in the helper


@jax.jit
def jitted_helper(x):
    return x - 1.0  # in the jitted helper


def test_line_in_a_helper(program, array, line_of):
    """A helper's equation carries the helper's own line, also when JAX has cached its trace."""

    def body(x, o):
        o[0] = helper(x[0])
        o[1] = jitted_helper(x[0])
        o[2] = jitted_helper(x[1])

    p = program(body, array(8), out=array(3))
    (mul,) = [e for e in p.body if e.op == "mul"]
    subs = [e for e in p.body if e.op == "sub"]
    assert line(mul)[1] == line_of(helper, "in the helper")
    assert [line(s)[1] for s in subs] == 2 * [line_of(jitted_helper.__wrapped__, "in the jitted helper")]


def test_line_of_cached_jnp_functions(program, array, line_of):
    """The body of jnp.where is traced once for all; its equations get the line of each call."""

    def body(x, o):
        o[0] = jnp.where(x[0] > 0, x[0], 0.0)  # first
        o[1] = jnp.where(x[1] > 0, x[1], 0.0)  # second

    selects = [e for e in program(body, array(8), out=array(2)).body if e.op == "select_n"]
    assert [line(s) for s in selects] == [(__file__, line_of(body, mark)) for mark in ("first", "second")]


def test_lines_inside_a_jnp_function_that_a_derivative_traced_first(program, array):
    """JAX keeps the trace of `jnp.where` with lines in it: behind a derivative, that of the call whose derivative it was."""
    source = "def body(x, o):\n    y = x[...]\n\n    o[...] = jnp.where(y > 1.5, y, 0.0)\n"

    def body_in(file):
        scope = {"jnp": jnp}
        exec(compile(source, file, "exec"), scope)
        return scope["body"]

    jax.clear_caches()
    gradient = plgpu.kernel(body_in("/tmp/first.py"), array(8, 24))

    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (f(x), x), lambda x, _: (gradient(x),))
    jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(np.ones((8, 24), np.float32))
    lines = {e.line for e in walk(program(body_in("/tmp/second.py"), array(8, 24), out=array(8, 24)).body)}
    assert {(line.file, line.number) for line in lines} == {("/tmp/second.py", 2), ("/tmp/second.py", 4)}


def test_line_of_our_own_helpers(program, array, line_of):
    """cdiv and ds are ours: the line is that of their caller."""

    def body(x, o):
        n = plgpu.cdiv(plgpu.dim_size(x, 0), 3)  # cdiv
        o[0] = n

    p = program(body, array(8), out=array(1, dtype=jnp.int32))
    assert {line(e)[1] for e in p.body if e.op in ("dim_size", "add", "div")} == {line_of(body, "cdiv")}


def test_lines_in_regions(program, array, line_of, equations):
    def body(x, o):
        def step(i, c):
            return c + x[i]  # inside

        o[0] = lax.fori_loop(0, 4, step, jnp.float32(0))  # loop

    (loop,) = equations(program(body, array(8), out=array(1)), "for")
    assert line(loop)[1] == line_of(body, "loop")
    assert {line(e)[1] for e in loop.regions[0].equations if e.op == "get"} == {line_of(body, "inside")}


def test_line_of_the_kernel(program, array):
    def body(x):
        pass

    p = program(functools.partial(body), array(8))
    assert p.line.file == __file__ and p.line.number == body.__code__.co_firstlineno


# ---- traces are not shared ----------------------------------------------------------------------------------------------------
def module_level_step(i, c):
    return jnp.exp(c)


def test_a_cached_trace_holds_no_choice_of_a_kernel(plan, array):
    """JAX caches the trace of a module-level loop body; parameters of the kernel that was first must not stay in it."""

    def body(x, o):
        o[0] = lax.fori_loop(0, 4, module_level_step, x[0])

    def source(**params):
        p = plan(body, array(8), out=array(1), compiler_params=plgpu.CompilerParams(**params), arch=params["arch"])
        assert p.program.params.arch == params["arch"]
        return body_of(emit(p))

    exact, approximate = (source(arch="sm_90a", approx_math=a) for a in (False, True))
    assert "expf(" in exact and "exp2_approx(" not in exact
    assert "exp2_approx(" in approximate
    assert source(arch="sm_100a", approx_math=False) == exact
