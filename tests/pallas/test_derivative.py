"""jax.jvp of a pallas_call against JAX's derivative of the same function; what has none is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall

F = jnp.float32
BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
ROWS = plgpu.BlockSpec((None, 8, 128), lambda i: (i, 0, 0))


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), F)


def call(body, **options):
    return plgpu.pallas_call(
        body,
        jax.ShapeDtypeStruct((2, 8, 128), F),
        grid=2,
        in_specs=[ROWS] * options.pop("inputs", 1),
        out_specs=ROWS,
        **options,
    )


def branches_and_loops(x, o):
    o[...] = jnp.sin(x[...]) * x[...]

    @plgpu.loop(0, 3)
    def _(i):
        o[...] += jnp.exp(x[...]) * i.astype(F)

    @plgpu.when(plgpu.program_id(0) == 1)
    def _():
        o[...] *= 2

    def step(state):
        n, y = state
        return n + 1, y * x[...]

    o[...] += jax.lax.while_loop(lambda s: s[0] < 2, step, (0, jnp.cos(x[...])))[1]


def the_same(x):
    y = jnp.sin(x) * x + 3 * jnp.exp(x)
    return jnp.where(jnp.arange(2)[:, None, None] == 1, 2 * y, y) + jnp.cos(x) * x * x


@BOTH
def test_against_jax(interpret):
    x, t = numbers(2, 8, 128), numbers(2, 8, 128, seed=1)
    f = call(branches_and_loops, interpret=interpret)
    for mine, jaxs in zip(jax.jvp(f, (x,), (t,)), jax.jvp(the_same, (x,), (t,)), strict=True):
        np.testing.assert_allclose(mine, jaxs, rtol=2e-5, atol=2e-5)


def test_second_order_under_vmap_and_jit():
    x, t = numbers(3, 2, 8, 128), numbers(2, 8, 128, seed=1)

    def second(f):
        return jax.vmap(lambda x: jax.jvp(lambda y: jax.jvp(f, (y,), (t,))[1], (x,), (t,))[1])

    f = call(branches_and_loops, interpret=True)
    np.testing.assert_allclose(jax.jit(second(f))(x), second(the_same)(x), rtol=1e-4, atol=1e-4)


def scaled(f, x):
    """A function of two numbers."""
    return lambda v: f(x * v[0] + v[1])


@BOTH
def test_jacobians(interpret):
    """jax.jacfwd is a vmap over tangents that asks for results without the batch."""
    x, v = numbers(2, 8, 128), jnp.asarray([0.3, -0.2], F)
    mine = scaled(call(branches_and_loops, interpret=interpret), x)
    jaxs = scaled(the_same, x)
    found = jax.jit(jax.jacfwd(mine))(v)
    assert found.shape == (2, 8, 128, 2)
    np.testing.assert_allclose(found, jax.jacfwd(jaxs)(v), rtol=1e-4, atol=1e-4)
    y, found = jax.vmap(lambda t: jax.jvp(mine, (v,), (t,)), out_axes=(None, 0))(jnp.eye(2))
    np.testing.assert_allclose(y, jaxs(v), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found, np.moveaxis(jax.jacfwd(jaxs)(v), -1, 0), rtol=1e-4, atol=1e-4)


def test_jacobians_of_jacobians_and_batches_of_them():
    x, v = numbers(2, 8, 128), jnp.asarray([[0.3, -0.2], [0.1, 0.5], [1.0, 0.2]], F)
    mine = scaled(call(lambda x, o: o.__setitem__(..., jnp.sin(x[...]) * x[...])), x)
    jaxs = scaled(lambda x: jnp.sin(x) * x, x)
    for of in (
        lambda f: jax.jacfwd(jax.jacfwd(f))(v[0]),
        lambda f: jax.vmap(jax.jacfwd(f))(v),
        lambda f: jax.jacfwd(jax.vmap(f))(v),
        lambda f: jax.jacfwd(lambda s: jax.vmap(lambda v: jax.jvp(f, (v,), (v * s,)))(v))(0.5),
    ):
        for a, b in zip(jax.tree.leaves(of(mine)), jax.tree.leaves(of(jaxs)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)

    def of_each(f):
        """The inner batch is of values and tangents, the outer of tangents."""
        return jax.vmap(lambda t: jax.vmap(lambda v: jax.jvp(f, (v,), (t,)))(v), out_axes=(None, 0))(jnp.eye(2))

    for a, b in zip(of_each(mine), of_each(jaxs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@BOTH
def test_an_input_without_a_tangent_and_one_that_is_the_output(interpret):
    """d(x y + s) in x, s constant; x's buffer becomes the output's."""
    x, y, t = numbers(2, 8, 128), numbers(2, 8, 128, seed=1), numbers(2, 8, 128, seed=2)
    f = call(
        lambda x, y, o: o.__setitem__(..., x[...] * y[...]),
        inputs=2,
        input_output_aliases={0: 0},
        interpret=interpret,
    )
    value, tangent = jax.jvp(lambda x: f(x, y), (x,), (t,))
    np.testing.assert_array_equal(value, x * y)
    np.testing.assert_array_equal(tangent, t * y)
    value, tangent = jax.jvp(lambda y: f(x, y), (y,), (t,))
    np.testing.assert_array_equal(tangent, x * t)


@BOTH
def test_scratch_integers_and_a_rule_of_the_users(interpret):
    @jax.custom_jvp
    def tripled(x):
        return x

    tripled.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))

    def body(x, n, o, s):
        s[...] = tripled(x[...])
        o[...] = s[...] * n[...].astype(F)

    n = jnp.arange(2 * 8 * 128, dtype=jnp.int32).reshape(2, 8, 128)
    f = call(body, inputs=2, scratch_shapes=[plgpu.SMEM((8, 128), F)], interpret=interpret)
    x, t = numbers(2, 8, 128), numbers(2, 8, 128, seed=1)
    value, tangent = jax.jvp(lambda x: f(x, n), (x,), (t,))
    np.testing.assert_array_equal(value, x * n)
    np.testing.assert_allclose(tangent, 3 * t * n, rtol=1e-6)


def test_reverse_mode_is_refused():
    f = call(branches_and_loops, name="kernel")
    with pytest.raises(UnsupportedCall, match="pallas_call kernel has no reverse-mode.*jax.custom_vjp"):
        jax.grad(lambda x: f(x).sum())(numbers(2, 8, 128))


def test_operations_without_a_derivative_are_refused():
    def body(x, o):
        o[...] = plgpu.layout_cast(x[...], plgpu.Layout.WGMMA)

    with pytest.raises(UnsupportedCall, match="layout_cast has no derivative here.*jax.custom_jvp"):
        jax.jvp(call(body), (numbers(2, 8, 128),), (numbers(2, 8, 128),))


def test_prefetch_operands_have_no_tangents():
    f = plgpu.pallas_call(
        lambda s, x, o: o.__setitem__(..., x[...] * s[0]),
        jax.ShapeDtypeStruct((8, 128), F),
        grid_spec=plgpu.PrefetchScalarGridSpec(1, grid=(1,)),
    )
    with pytest.raises(UnsupportedCall, match="scalar-prefetch operands have no tangents"):
        jax.jvp(lambda s: f(s, numbers(8, 128)), (jnp.ones(1),), (jnp.ones(1),))
