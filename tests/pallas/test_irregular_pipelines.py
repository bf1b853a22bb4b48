"""BoundedSlice and Indirect dimensions in `emit_pipeline`: beside loads that run ahead, in views, with products in flight."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race
from tests.pallas.test_irregular import ENDS, part
from tests.support import out, randoms, tiled

F = jnp.float32


def in_a_kernel(body, grid, ins, outs, shape, **options):
    def kernel(*refs):
        plgpu.emit_pipeline(body, grid=grid, in_specs=ins(refs[0]), out_specs=outs(refs[0]), **options)(*refs[1:])

    return plgpu.kernel(kernel, shape, interpret=plgpu.SimulatorParams(timing="late"))


def test_in_emit_pipeline():
    """The index maps close over Refs.  Beside an input that TMA loads ahead."""
    x, y = randoms(50, 128), randoms(160, 128, seed=1)

    def body(ids, a, b, o):
        o[...] = a[...] + b[...]

    def rows(ends):
        return plgpu.BlockSpec((plgpu.BoundedSlice(32), 128), lambda i: (part(ends, i), 0))

    f = in_a_kernel(
        body,
        (5,),
        lambda ends: [rows(ends), plgpu.BlockSpec((32, 128), lambda i: (i, 0))],
        lambda ends: [rows(ends)],
        out(50, 128),
        max_concurrent_steps=3,
    )
    expected = x.copy()
    for i in range(5):
        expected[ENDS[i] : ENDS[i + 1]] += y[32 * i : 32 * i + ENDS[i + 1] - ENDS[i]]
    np.testing.assert_array_equal(f(ENDS, x, y), expected)


def test_a_block_is_not_written_again_before_it_has_been_sent():
    """The body stores in another layout than the copy loads in, so other threads write what some still read."""

    def body(ids, a, o):
        o[...] = plgpu.layout_cast(a[...], plgpu.Layout.WGMMA)

    x = randoms(128, 64)
    f = in_a_kernel(
        body,
        (2,),
        lambda ends: [plgpu.BlockSpec((64, 64), lambda i: (i, 0))],
        lambda ends: [plgpu.BlockSpec((plgpu.BoundedSlice(64), 64), lambda i: (part(ends, i), 0))],
        out(128, 64),
    )
    np.testing.assert_array_equal(f(np.array([0, 64, 128], np.int32), x), x)


def test_a_view_s_neighbours_are_outside():
    x, index = randoms(40, 128), np.array([0, 9, 10, -1, 3, 5, 20, -(2**31)], np.int32)

    def kernel(index, x, o):
        spec = plgpu.BlockSpec((plgpu.Indirect(8), 128), lambda i: (index[...], 0))
        plgpu.emit_pipeline(
            lambda ids, a, o: o.__setitem__(..., a[...]),
            grid=(1,),
            in_specs=[spec],
            out_specs=[plgpu.BlockSpec((8, 128), lambda i: (0, 0))],
        )(x.at[plgpu.ds(16, 10)], o)

    y = plgpu.kernel(kernel, out(8, 128), interpret=True)(index, x)
    inside = (index >= 0) & (index < 10)
    np.testing.assert_array_equal(y, np.where(inside[:, None], x[16 + index * inside], 0))


@pytest.mark.parametrize("delay", [0, 1])
def test_products_in_flight_keep_their_rows_where_the_release_is_delayed(delay):
    """wgmma_wait(1) leaves a product on the rows of the step before."""
    tile = tiled()
    x, w = (randoms(*s, seed=i).astype(ml_dtypes.bfloat16) for i, s in enumerate([(40, 256), (256, 64)]))
    index = np.random.default_rng(3).integers(0, 40, 64).astype(np.int32)

    def kernel(index, x, w, o, staged):
        def compute(acc):
            def body(ids, a, b):
                plgpu.wgmma(acc, a, b)
                plgpu.wgmma_wait(in_flight)

            plgpu.emit_pipeline(
                body,
                grid=(4,),
                in_specs=[
                    plgpu.BlockSpec((plgpu.Indirect(64), 64), lambda k: (index[...], k), transforms=tile),
                    plgpu.BlockSpec((64, 64), lambda k: (k, 0), transforms=tile),
                ],
                max_concurrent_steps=2,
                delay_release=delay,
            )(x, w)
            plgpu.wgmma_wait(0)
            return acc[...]

        staged[...] = plgpu.run_scoped(compute, plgpu.ACC((64, 64)))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, o)
        plgpu.wait_smem_to_gmem(0)

    def call():
        return plgpu.kernel(
            kernel, out(64, 64), scratch_types=[plgpu.SMEM((64, 64), F)], interpret=plgpu.SimulatorParams(timing="late")
        )(index, x, w)

    in_flight = delay
    expected = x[index].astype(np.float64) @ w.astype(np.float64)
    np.testing.assert_allclose(call(), expected, atol=1e-4)
    if not delay:
        in_flight = 1
        with pytest.raises(Race):
            call()
