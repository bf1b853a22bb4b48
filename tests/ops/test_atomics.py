"""Atomic updates of global memory: results, order with other accesses, machine code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race, UninitializedRead
from mosaic_gpu.simulator import SimulatorParams, simulate

STRIDED, WGMMA = plgpu.Layout.WG_STRIDED, plgpu.Layout.WGMMA
FUNCTIONS = {
    "add": (plgpu.atomic_add, np.add),
    "max": (plgpu.atomic_max, np.maximum),
    "min": (plgpu.atomic_min, np.minimum),
    "and": (plgpu.atomic_and, np.bitwise_and),
    "or": (plgpu.atomic_or, np.bitwise_or),
    "xor": (plgpu.atomic_xor, np.bitwise_xor),
}
BLOCKS = 3
CASES = [(k, t) for k in FUNCTIONS for t in ("int32", "uint32")]
CASES += [("add", "float32"), ("add", "float16"), ("add", "bfloat16")]


def every_block(kind, shape=(64, 24)):
    def body(start, x, o):
        FUNCTIONS[kind][0](o, plgpu.load(x.at[lax.axis_index("b")]))

    return body, dict(grid=(BLOCKS,), grid_names=("b",), input_output_aliases={0: 0})


def numbers(dtype, *shape, seed=0):
    rng = np.random.default_rng(seed)
    if dtype in ("int32", "uint32"):
        return rng.integers(-(2**30), 2**30, shape).astype(dtype)
    return rng.integers(-8, 8, shape).astype(getattr(ml_dtypes, dtype, dtype))  # sums are exact


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_every_block_updates_one_tile(plan, kind, dtype):
    """Whatever the order of the blocks' updates, as NumPy does them one after the other."""
    body, options = every_block(kind)
    start, x = numbers(dtype, 64, 24), numbers(dtype, BLOCKS, 64, 24, seed=1)
    p = plan(body, start, x, out=jax.ShapeDtypeStruct(start.shape, start.dtype), **options)
    want = start
    for part in x:
        want = FUNCTIONS[kind][1](want, part)
    for seed in (0, 1, 2):
        (got,) = simulate(p, [start, x], SimulatorParams(seed=seed))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_machine_code(plan, compiled, arch, kind, dtype):
    body, options = every_block(kind)
    types = [
        np.zeros((64, 24), getattr(ml_dtypes, dtype, dtype)),
        np.zeros((BLOCKS, 64, 24), getattr(ml_dtypes, dtype, dtype)),
    ]
    report = compiled(plan(body, *types, out=jax.ShapeDtypeStruct((64, 24), types[0].dtype), arch=arch, **options))
    assert report.complaints() == []
    assert sum(n for name, n in report.mnemonics.items() if name in ("RED", "REDG", "REDUX", "ATOMG")) == 12, (
        report.mnemonics
    )


@pytest.mark.parametrize(("kind", "dtype"), [("add", "int64"), ("max", "uint64"), ("xor", "int64"), ("add", "float64")])
def test_64_bits(plan, compiled, kind, dtype):
    with jax.enable_x64(True):
        body, options = every_block(kind)
        start, x = np.arange(1536).reshape(64, 24).astype(dtype), np.ones((BLOCKS, 64, 24), dtype)
        p = plan(body, start, x, out=jax.ShapeDtypeStruct(start.shape, start.dtype), **options)
        want = start
        for part in x:
            want = FUNCTIONS[kind][1](want, part)
        np.testing.assert_array_equal(simulate(p, [start, x])[0], want)
        compiled(p)


def test_each_element_once(plan, compiled):
    """A layout in which several threads hold an element, a tile that sticks out, and a scalar."""

    def body(start, o):
        plgpu.atomic_add(o.at[plgpu.ds(30 + 0 * lax.axis_index("b"), 8)], jnp.ones((8,), jnp.int32))
        plgpu.atomic_add(o.at[3], 5)

    start = np.zeros(33, np.int32)
    p = plan(
        body,
        start,
        out=jax.ShapeDtypeStruct((33,), np.int32),
        input_output_aliases={0: 0},
        grid=(2,),
        grid_names=("b",),
    )
    (got,) = simulate(p, [start])
    want = start.copy()
    want[30:] = 2
    want[3] = 10
    np.testing.assert_array_equal(got, want)
    compiled(p)


def test_reads_need_an_order(plan, assert_at):
    """Updates commute with each other, and with nothing else: a block that reads what others update is a race."""

    def body(start, o, seen):
        plgpu.atomic_add(o, jnp.ones((128,), jnp.int32))  # update
        b = lax.axis_index("b")
        seen[b] = plgpu.load(o, layout=STRIDED)  # read

    types = [jax.ShapeDtypeStruct((128,), np.int32), jax.ShapeDtypeStruct((2, 128), np.int32)]
    start = np.zeros(128, np.int32)
    p = plan(body, start, out=types, input_output_aliases={0: 0}, grid=(2,), grid_names=("b",))
    with pytest.raises(Race) as found:
        simulate(p, [start])
    assert found.value.between == "grid" and "atomic update" in str(found.value)


def test_of_what_nobody_has_written(plan):
    def body(o):
        plgpu.atomic_add(o, jnp.ones((128,), jnp.int32))

    with pytest.raises(UninitializedRead):
        simulate(plan(body, out=jax.ShapeDtypeStruct((128,), np.int32)), [])
