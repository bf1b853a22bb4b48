"""JAX's transformations of kernels: vmap adds a grid axis, differentiation is refused with the way out."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.cli.targets import programs_of
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.ptxas_log import parse_log
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.frontend import transforms
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90.matmul import MatmulConfig, matmul
from mosaic_gpu.plan.build import build_plan

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def rows(x, scale, o, place):
    """One block a row; also says where it ran: its row, the rows, the columns (a run-time number), its warpgroup's axis."""
    row = lax.axis_index("row")
    o[row] = lax.fori_loop(0, plgpu.dim_size(x, 1), lambda i, total: total + x[row, i], jnp.float32(0)) * scale[0]
    place[row, 0] = plgpu.program_id(0)
    place[row, 1] = plgpu.num_programs(0)
    place[row, 2] = plgpu.dim_size(x, 1) + lax.axis_index("wg")


def kernel(**options):
    n = X.shape[1]
    out = [jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((n, 3), jnp.int32)]
    return plgpu.kernel(rows, out, grid=(n,), grid_names=("row",), num_threads=1, thread_name="wg", **options)


PLACE = [[0, 3, 4], [1, 3, 4], [2, 3, 4]]


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
@pytest.mark.parametrize("in_axes, scales", [((0, None), [2, 2]), ((0, 0), [2, 3]), ((2, 0), [2, 3])])
def test_vmap(jit, in_axes, scales):
    x = X if in_axes[0] == 0 else np.moveaxis(X, 0, 2)
    scale = np.array(scales, np.float32)[:, None]
    sums, place = jit(jax.vmap(kernel(), in_axes=in_axes))(x, scale if in_axes[1] == 0 else scale[0])
    np.testing.assert_array_equal(sums, X.sum(2) * scale)
    np.testing.assert_array_equal(place, [PLACE, PLACE])


def test_nested_vmap():
    both = jax.vmap(jax.vmap(kernel(), in_axes=(None, 0)), in_axes=(0, None))
    sums, place = both(X, np.array([[1], [2], [5]], np.float32))
    np.testing.assert_array_equal(sums, X.sum(2)[:, None] * np.array([1, 2, 5], np.float32)[:, None])
    np.testing.assert_array_equal(place, np.broadcast_to(PLACE, (2, 3, 3, 3)))


SIZES = (2, 3, 2)  # of three vmaps, from the outermost one


@pytest.mark.parametrize("seed", range(6))
def test_any_axes_of_three_vmaps(seed):
    """Each input has some of the axes: where a block reads it is computed from the one axis that they have become."""
    rng = np.random.default_rng(seed)
    has = rng.integers(0, 2, (3, 2)).astype(bool)
    has[~has.any(axis=1), rng.integers(0, 2)] = True  # vmap wants one
    x, scale = (
        rng.integers(-9, 10, (*(n for n, h in zip(SIZES, has[:, i], strict=True) if h), *shape)).astype(np.float32)
        for i, shape in enumerate(((3, 4), (1,)))
    )
    mapped = kernel()
    for level in reversed(range(3)):
        mapped = jax.vmap(mapped, in_axes=tuple(0 if h else None for h in has[level]))
    sums, place = jax.jit(mapped)(x, scale)
    whole_x = np.broadcast_to(np.expand_dims(x, [i for i in range(3) if not has[i, 0]]), (*SIZES, 3, 4))
    whole_scale = np.broadcast_to(np.expand_dims(scale, [i for i in range(3) if not has[i, 1]]), (*SIZES, 1))
    np.testing.assert_array_equal(sums, whole_x.sum(-1) * whole_scale)
    np.testing.assert_array_equal(place, np.broadcast_to(PLACE, (*SIZES, 3, 3)))


def test_nested_vmaps_of_an_aliased_input():
    """An input that an output takes the place of gets all axes of the output."""

    def adds(x, y, o):
        o[0] = o[0] + y[0]

    k = plgpu.kernel(adds, jax.ShapeDtypeStruct((1,), jnp.float32), input_output_aliases={0: 0})
    x, y = np.float32([[7.0]]), np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    found = jax.vmap(jax.vmap(k, in_axes=(None, 0)), in_axes=(None, 0))(x[0], y)
    np.testing.assert_array_equal(found, 7 + y)


def test_vmaps_of_more_than_an_axis_of_the_grid_takes_stay_apart(monkeypatch):
    monkeypatch.setattr(transforms, "MOST_BLOCKS", 5)
    grids = {n: programs_of(jax.vmap(jax.vmap(kernel())), [f32(2, n, 3, 4), f32(2, n, 1)])[0].grid for n in (2, 3)}
    assert grids == {2: (4, 3), 3: (2, 3, 3)}
    sums, _ = jax.vmap(jax.vmap(kernel(), (0, None)), (0, None))(np.stack([X, X, X]), np.ones(1, np.float32))
    np.testing.assert_array_equal(sums, np.stack([X, X, X]).sum(-1))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_vmap_of_nothing():
    sums, place = jax.vmap(kernel())(np.ones((0, 3, 4), np.float32), np.ones((0, 1), np.float32))
    assert sums.shape == (0, 3) and place.shape == (0, 3, 3)


def test_vmap_of_no_attention():
    """TMA has no descriptors of arrays without elements."""
    q = jnp.zeros((0, 8, 1, 64), jnp.bfloat16)
    assert jax.vmap(attention)(q, q, q).shape == q.shape


@pytest.mark.parametrize("config", [MatmulConfig(), MatmulConfig(cluster_m=2), MatmulConfig(persistent=True)])
def test_vmap_of_matmul(config):
    """TMA, clusters and blocks that take tile after tile: the same bits as one call after the other."""
    a = jax.random.normal(jax.random.key(0), (2, 192, 64), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (64, 136), jnp.bfloat16)
    both = jax.vmap(lambda x: matmul(x, b, config=config))(a)
    for x, y in zip(a, both, strict=True):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(matmul(x, b, config=config)))


def test_vmap_of_attention():
    q = jax.random.normal(jax.random.key(0), (2, 1, 70, 2, 64), jnp.bfloat16)
    out = jax.vmap(lambda x: attention(x, x, x, causal=True))(q)
    np.testing.assert_array_equal(np.asarray(out[:, 0]), np.asarray(attention(q[:, 0], q[:, 0], q[:, 0], causal=True)))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_nested_vmaps_of_attention(arch, monkeypatch):
    """One grid and arrays of five dimensions, which is what TMA has: no copies, the bits of a call with batch dimensions."""
    dispatcher = importlib.import_module("mosaic_gpu.kernels.attention")  # the package's attribute may be the function
    monkeypatch.setattr(dispatcher, "default_arch", lambda: arch)
    q, k, v = (
        jax.random.normal(key, (2, 3, 1, 70, 2, 64), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3)
    )

    def call(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True)

    nested = jax.vmap(jax.vmap(call, (0, 0, None)))
    out, lse = nested(q, k, v[:, 0])
    expected, expected_lse = call(q, k, jnp.broadcast_to(v[:, :1], v.shape))
    np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(expected_lse))
    names = set(primitives(jax.make_jaxpr(nested)(q, k, v[:, 0]).jaxpr))
    assert "mosaic_gpu_kernel" in names and not names & {
        "transpose",
        "copy",
        "broadcast_in_dim",
        "concatenate",
        "gather",
    }
    (program,) = programs_of(nested, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v[:, 0])])
    assert program.grid[0] == 6 and max(len(x.shape) for x in program.inputs) == 5
    compiled = compile_plan(build_plan(program, arch)).compiled
    usage = parse_log(compiled.log, compiled.ptx).entry(None)
    assert usage.spill_stores == usage.spill_loads == 0


def primitives(jaxpr):
    for e in jaxpr.eqns:
        yield e.primitive.name
        for value in jax.tree.leaves(list(e.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from primitives(getattr(value, "jaxpr", value))


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_no_derivative(transform):
    def loss(x):
        return kernel()(x, jnp.ones(1))[0].sum()

    with pytest.raises(UnsupportedCall, match="kernel rows cannot be differentiated.*jax.custom_vjp") as e:
        transform(loss)(jnp.asarray(X[0]))
    assert e.value.line is not None and e.value.line.function == "rows"


def test_the_ways_out_of_no_derivative():
    @jax.custom_vjp
    def sums(x):
        return kernel()(x, jnp.ones(1))[0]

    sums.defvjp(lambda x: (sums(x), None), lambda _, g: (jnp.broadcast_to(g[:, None], X[0].shape),))
    np.testing.assert_array_equal(jax.grad(lambda x: sums(x).sum())(jnp.asarray(X[0])), np.ones_like(X[0]))
    stopped = jax.grad(lambda x: (kernel()(lax.stop_gradient(x), jnp.ones(1))[0] * x[:, 0]).sum())
    np.testing.assert_array_equal(stopped(jnp.asarray(X[0]))[:, 0], X[0].sum(1))
