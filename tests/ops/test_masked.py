"""Loads and stores under masks: what is moved, what is not touched, order, machine code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UninitializedRead
from mosaic_gpu.simulator import SimulatorParams, simulate

DTYPES = ["float32", "bfloat16", "float16", "int8", "uint16", "int32", "bool"]


def numbers(dtype, *shape, seed=0):
    x = np.random.default_rng(seed).integers(0, 100, shape)
    return (x % 2 == 0) if dtype == "bool" else x.astype(getattr(ml_dtypes, dtype, dtype))


def body(x, m, o, s):
    """Through shared memory, both ways under the mask."""
    mask = m[...]
    v = plgpu.load(x, mask=mask, other=True)
    plgpu.store(s, v, mask=jnp.logical_not(mask))
    plgpu.store(s, jnp.zeros_like(v), mask=mask)
    plgpu.store(o, plgpu.load(s, mask=jnp.logical_not(mask)), mask=jnp.logical_not(mask))
    plgpu.store(o, v, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_where(plan, compiled, dtype):
    x, m = numbers(dtype, 64, 48), np.random.default_rng(1).random((64, 48)) < 0.4
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    p = plan(body, x, m, out=out, scratch_types=[plgpu.SMEM(x.shape, x.dtype)])
    for params in (dict(), dict(shadow="bytes"), dict(seed=3)):
        np.testing.assert_array_equal(
            simulate(p, [x, m], SimulatorParams(**params))[0], np.where(m, x, np.ones_like(x))
        )
    assert compiled(p).complaints() == []


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_machine_code(plan, compiled, arch):
    x, m = numbers("float32", 128, 64), np.zeros((128, 64), bool)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    assert (
        compiled(plan(body, x, m, out=out, arch=arch, scratch_types=[plgpu.SMEM(x.shape, x.dtype)])).complaints() == []
    )


def test_tails(plan, compiled):
    """A mask by index, as Triton's kernels have them; past the end of the array there is zero anyway."""

    def tail(x, o):
        i = plgpu.program_id(0)
        where = i * 128 + jax.lax.iota(jnp.int32, 128)
        v = plgpu.load(x.at[plgpu.ds(i * 128, 128)], mask=where < 200, other=-7.0)
        plgpu.store(o.at[plgpu.ds(i * 128, 128)], v, mask=where < 250)

    x = numbers("float32", 256)
    p = plan(tail, x, out=jax.ShapeDtypeStruct((256,), np.float32), grid=(2,))
    (got,) = simulate(p, [x], SimulatorParams(uninitialized="zero"))
    np.testing.assert_array_equal(got, np.concatenate([x[:200], np.full(50, -7), np.zeros(6)]))
    compiled(p)


def test_what_is_not_asked_for_is_not_read(plan):
    """Half of a buffer is written; a masked load of that half is fine, one of more is found."""

    def half(o, s, *, whole):
        left = jax.lax.broadcasted_iota(jnp.int32, (128, 8), 1) < 4
        plgpu.store(s, jnp.ones((128, 8), jnp.float32), mask=left)
        o[...] = plgpu.load(s, mask=jnp.logical_or(left, whole), other=2)

    out = jax.ShapeDtypeStruct((128, 8), np.float32)
    for whole in (False, True):

        def kernel(o, s, whole=whole):
            half(o, s, whole=whole)

        p = plan(kernel, out=out, scratch_types=[plgpu.SMEM((128, 8), jnp.float32)])
        if whole:
            with pytest.raises(UninitializedRead):
                simulate(p, [])
        else:
            np.testing.assert_array_equal(simulate(p, [])[0], np.repeat([[1, 1, 1, 1, 2, 2, 2, 2]], 128, 0))


def test_elements_that_others_write(plan):
    """Two warpgroups store to the elements of their own mask of one array; no race, since neither touches the other's."""

    def both(o):
        wg = jax.lax.axis_index("wg")
        mine = jax.lax.iota(jnp.int32, 256) % 2 == wg
        plgpu.store(o, jnp.full((256,), wg, jnp.int32), mask=mine)

    out = jax.ShapeDtypeStruct((256,), np.int32)
    p = plan(both, out=out, num_threads=2, thread_name="wg")
    np.testing.assert_array_equal(simulate(p, [])[0], np.arange(256) % 2)


def test_store_without_a_mask(plan):
    def plain(x, o):
        plgpu.store(o, plgpu.load(x))

    x = numbers("float32", 64, 8)
    np.testing.assert_array_equal(simulate(plan(plain, x, out=jax.ShapeDtypeStruct(x.shape, x.dtype)), [x])[0], x)
