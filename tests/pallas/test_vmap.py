"""vmap of pallas_call grows the grid; the three ways around that; derivatives are refused."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from tests.support import out

F = jnp.float32
BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32)


def kernel(x, y, o):
    @plgpu.when(plgpu.program_id(1) == 0)
    def _():
        o[...] = x[...] * 0 + (10 * plgpu.program_id(0) + plgpu.num_programs(1)).astype(F)

    o[...] += x[...] * y[...]


def call(interpret=False, **options):
    """Sums of two tiles side by side; needs to know where it is in its own grid."""
    tiles = plgpu.BlockSpec((16, 128), lambda i, j: (i, j))
    return plgpu.pallas_call(
        kernel,
        out(32, 128),
        grid=(2, 2),
        in_specs=[tiles, tiles],
        out_specs=plgpu.BlockSpec((16, 128), lambda i, j: (i, 0)),
        interpret=interpret,
        **options,
    )


def equations(f, *args):
    """All equations of a function's jaxpr, loops' bodies too."""

    def visit(jaxpr):
        for e in jaxpr.eqns:
            yield e
            for v in e.params.values():
                inner = getattr(v, "jaxpr", None)
                if inner is not None:
                    yield from visit(inner)

    return list(visit(jax.make_jaxpr(f)(*args).jaxpr))


def names(f, *args):
    return [e.primitive.name for e in equations(f, *args)]


def mapping(f, *args):
    (found,) = [e.params["call"].mapping for e in equations(f, *args) if e.primitive.name == "pallas_call"]
    return found


@BOTH
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 0), (2, 2), (-1, 1)])
def test_one_axis(in_axes, interpret):
    x, y = (numbers(32, 256, seed=i) if d is None else numbers(3, 32, 256, seed=i) for i, d in enumerate(in_axes))
    moved = [a if d is None else np.moveaxis(a, 0, d) for a, d in zip((x, y), in_axes, strict=True)]
    f = jax.vmap(call(interpret), in_axes=in_axes)
    one_by_one = [
        call(interpret)(*(a if d is None else a[i] for a, d in zip((x, y), in_axes, strict=True))) for i in range(3)
    ]
    np.testing.assert_array_equal(f(*moved), np.stack(one_by_one))
    m = mapping(f, *moved)
    assert m.grid == (3, 2, 2) and m.vmapped == (0,)
    assert not {"while", "scan"} & set(names(f, *moved))


@BOTH
def test_two_axes(interpret):
    x, y = numbers(2, 3, 32, 256), numbers(3, 32, 256, seed=1)
    f = jax.vmap(jax.vmap(call(interpret)), in_axes=(0, None))
    expected = [[call(interpret)(x[i, j], y[j]) for j in range(3)] for i in range(2)]
    np.testing.assert_array_equal(f(x, y), np.array(expected))
    m = mapping(f, x, y)
    assert m.grid == (2, 3, 2, 2) and m.vmapped == (0, 1)
    np.testing.assert_array_equal(jax.vmap(call(interpret), out_axes=1)(x[0], y), np.array(expected[0]).swapaxes(0, 1))


def test_nothing_batched_is_the_same_call():
    x, y, z = numbers(32, 256), numbers(32, 256), numbers(3)
    f = jax.vmap(lambda z: call()(x, y), in_axes=0, out_axes=None)
    assert mapping(f, z).grid == (2, 2)


@BOTH
def test_an_empty_batch(interpret):
    x = np.zeros((3, 0, 32, 256), np.float32)
    y = jax.vmap(jax.vmap(call(interpret), (0, None)), (0, None))(x, x[0, :0].sum(0))
    assert y.shape == (3, 0, 32, 128)

    def chosen(n, x, o):
        o[...] = x[...]

    one = plgpu.BlockSpec((16, 128), lambda i, n: (n[i], 0))
    spec = plgpu.PrefetchScalarGridSpec(1, grid=2, in_specs=[one], out_specs=one)
    f = plgpu.pallas_call(chosen, out(32, 128), grid_spec=spec, interpret=interpret)
    assert jax.vmap(f, (0, None))(np.zeros((0, 2), np.int32), np.zeros((32, 128), np.float32)).shape == (0, 32, 128)


def test_a_batch_of_one_is_squeezed():
    x, y = numbers(1, 32, 256), numbers(32, 256)
    f = jax.vmap(call(), in_axes=(0, None))
    assert mapping(f, x, y).grid == (2, 2)
    np.testing.assert_array_equal(f(x, y)[0], call()(x[0], y))


def gather(n, index, x):
    row = plgpu.BlockSpec((1, 128), lambda i, index: (index[i], 0))
    return plgpu.pallas_call(
        lambda index, x, o: o.__setitem__(..., x[...]),
        out(4, 128),
        grid_spec=plgpu.PrefetchScalarGridSpec(1, (n,), [row], plgpu.BlockSpec((1, 128), lambda i, _: (i, 0))),
    )(index, x)


def test_prefetch_operands_that_differ_take_a_loop():
    index, x = np.array([[3, 1, 1, 0], [2, 2, 0, 3]], np.int32), numbers(4, 128)
    f = jax.vmap(functools.partial(gather, 4), in_axes=(0, None))
    np.testing.assert_array_equal(f(index, x), x[index])
    assert mapping(f, index, x).grid == (4,)
    assert {"scan", "dynamic_slice", "dynamic_update_slice"} <= set(names(f, index, x))


def test_prefetch_operands_alike_do_not():
    index, x = np.array([3, 1, 1, 0], np.int32), numbers(2, 4, 128)
    f = jax.vmap(functools.partial(gather, 4), in_axes=(None, 0))
    np.testing.assert_array_equal(f(index, x), x[:, index])
    assert mapping(f, index, x).grid == (2, 4)


def test_bounds_that_differ_take_a_loop():
    index, x, n = np.array([3, 1, 1, 0], np.int32), numbers(4, 128), np.array([4, 2], np.int32)
    got = np.asarray(jax.jit(jax.vmap(gather, in_axes=(0, None, None)))(n, index, x))
    np.testing.assert_array_equal(got[0], x[index])
    np.testing.assert_array_equal(got[1][:2], x[index][:2])
    assert "scan" in names(jax.vmap(gather, in_axes=(0, None, None)), n, index, x)


def test_cost_estimates_grow():
    x = numbers(3, 32, 256)
    f = jax.vmap(call(cost_estimate=plgpu.CostEstimate(10, 1, 100)))
    (e,) = [e for e in equations(f, x, x) if e.primitive.name == "pallas_call"]
    assert e.params["call"].cost == plgpu.CostEstimate(30, 3, 300)


def test_costs_and_metadata_reach_xla():
    """As attributes of the instruction: lowered for a GPU, in XLA's optimized module; vmap multiplies."""
    x = numbers(3, 32, 256)
    f = jax.vmap(call(cost_estimate=plgpu.CostEstimate(10, 1, 100), metadata={"who": "me"}))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_launch")]
    lowered = str(jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=unchecked)(x, x).mlir_module())
    optimized = jax.jit(f).lower(x, x).compile().as_text()
    for text, said in ((lowered, '{} = "{}"'), (optimized, '{}="{}"')):
        attributes = re.findall(r"frontend_attributes *= *\{([^}]*\}?[^}]*)\}", text)
        wanted = [
            said.format(f"cost_{n}", v) for n, v in (("flops", 30), ("transcendentals", 3), ("bytes_accessed", 300))
        ]
        assert any(all(w in a for w in wanted) and "kernel_metadata" in a and "who" in a for a in attributes), (
            attributes
        )


@BOTH
def test_aliases(interpret):
    """An input that is one for all gets a buffer for each."""
    x = numbers(32, 128)
    rows = plgpu.BlockSpec((16, 128), lambda i: (i, 0))
    f = plgpu.pallas_call(
        lambda x, y, o: o.__setitem__(..., x[...] + y[...]),
        out(32, 128),
        grid=1,
        in_specs=[rows, rows],
        out_specs=rows,
        input_output_aliases={0: 0},
        interpret=interpret,
    )
    y = numbers(2, 32, 128, seed=1)
    expected = np.stack([np.concatenate([(x + y[i])[:16], x[16:]]) for i in range(2)])
    np.testing.assert_array_equal(jax.vmap(f, in_axes=(None, 0))(x, y), expected)
