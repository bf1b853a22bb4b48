"""What the chapters of JAX's Pallas documentation show, in programs of our own; docs/porting.md has the table."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as pl
import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall
from tests.support import out

F = jnp.float32
BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])


def numbers(*shape, seed=0, dtype=F):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


# ---- Quickstart -----------------------------------------------------------------------------------------------------------
@BOTH
def test_arrays_smaller_than_a_warpgroup(interpret):
    x, y = jnp.arange(8), jnp.arange(8) * 3
    f = pl.pallas_call(lambda x, y, o: o.__setitem__(..., x[...] - y[...]), out(8, dtype=x.dtype), interpret=interpret)
    np.testing.assert_array_equal(jax.jit(f)(x, y), x - y)


@BOTH
def test_views_of_views(interpret):
    def outer_sum(x, y, o):
        for i in range(2):
            for k in range(2):
                half = o.at[pl.ds(i * 8, 8)]
                half[pl.ds(k * 4, 4)] = x.at[i * 4 : i * 4 + 4][...] + y.at[k * 4 : k * 4 + 4][...]

    x, y = numbers(8), numbers(8, seed=1)
    halves = [a + b for a in (x[:4], x[4:]) for b in (y[:4], y[4:])]
    got = pl.pallas_call(outer_sum, out(16), interpret=interpret)(x, y)
    np.testing.assert_array_equal(got, jnp.concatenate(halves))


@BOTH
def test_each_program_writes_its_element(interpret):
    def squares(o):
        i = pl.program_id(0)
        o[i] = i * i

    got = pl.pallas_call(squares, out(11, dtype=jnp.int32), grid=(11,), interpret=interpret)()
    np.testing.assert_array_equal(got, np.arange(11) ** 2)


def product(x, y, *, activation, interpret, blocks=2):
    def body(x, y, z, activation):
        z[...] = activation(x[...] @ y[...])

    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        functools.partial(body, activation=activation),
        out(m, n, dtype=x.dtype),
        grid=(blocks, blocks),
        in_specs=[
            pl.BlockSpec((m // blocks, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, n // blocks), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((m // blocks, n // blocks), lambda i, j: (i, j)),
        interpret=interpret,
    )(x, y)


@BOTH
def test_a_product_in_blocks_with_an_activation_and_a_batch(interpret):
    x, y = numbers(2, 128, 64), numbers(2, 64, 128, seed=1)
    f = functools.partial(product, activation=jax.nn.relu, interpret=interpret)
    exact = np.maximum(np.asarray(x, np.float64) @ np.asarray(y, np.float64), 0)
    np.testing.assert_allclose(
        jax.vmap(f)(x, y), exact, rtol=2e-2, atol=5e-2
    )  # operands of 32 bits are rounded to TF32


@BOTH
@pytest.mark.filterwarnings("ignore:.*stays in global memory")
def test_blocks_of_that_chapter(interpret):
    """Halves of 1024 x 1024 floats, for which neither shared memory nor registers have room: tile by tile."""
    x, y = numbers(2, 1024, 1024), numbers(2, 1024, 1024, seed=1)
    f = functools.partial(product, activation=jax.nn.relu, interpret=interpret)
    exact = np.maximum(np.asarray(x, np.float64) @ np.asarray(y, np.float64), 0)
    np.testing.assert_allclose(f(x[0], y[0]), exact[0], rtol=2e-2, atol=0.1)
    np.testing.assert_allclose(jax.vmap(f)(x, y), exact, rtol=2e-2, atol=0.1)


# ---- Grids and BlockSpecs -------------------------------------------------------------------------------------------------
def places(shape, block, grid, index=lambda *ids: ids, **options):
    """Each element: the program that wrote it, its ids as decimal digits."""

    def body(o):
        digits = functools.reduce(lambda a, k: a * 10 + pl.program_id(k), range(len(grid)), 0)
        o[...] = jnp.full(o.shape, digits)

    specs = pl.BlockSpec(block, index)
    return pl.pallas_call(body, out(*shape, dtype=jnp.int32), grid=grid, out_specs=specs, **options)()


def expected_places(shape, block, low=(0, 0)):
    i, j = np.indices(shape)
    return 10 * ((i + low[0]) // block[0]) + (j + low[1]) // block[1]


@BOTH
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 2)])
def test_places(shape, interpret):
    grid = (pl.cdiv(shape[0], 2), pl.cdiv(shape[1], 3))
    np.testing.assert_array_equal(places(shape, (2, 3), grid, interpret=interpret), expected_places(shape, (2, 3)))


@BOTH
def test_the_last_visit_stays(interpret):
    got = places((8, 6), (2, 3), (4, 2, 7), lambda i, j, k: (i, j), interpret=interpret)
    np.testing.assert_array_equal(got, 10 * expected_places((8, 6), (2, 3)) + 6)


@BOTH
@pytest.mark.parametrize("block", [None, (4, 4)])
def test_whole_arrays(block, interpret):
    np.testing.assert_array_equal(places((4, 4), block, (2, 3), None, interpret=interpret), np.full((4, 4), 12))


@BOTH
def test_squeezed(interpret):
    def body(o):
        assert o.shape == (2,)
        o[...] = jnp.full(o.shape, 10 * pl.program_id(1) + pl.program_id(0))

    spec = pl.BlockSpec((None, 2), lambda i, j: (i, j))
    got = pl.pallas_call(body, out(3, 4, dtype=jnp.int32), grid=(3, 2), out_specs=spec, interpret=interpret)()
    i, j = np.indices((3, 4))
    np.testing.assert_array_equal(got, 10 * (j // 2) + i)


@BOTH
@pytest.mark.parametrize("low", [0, 1])
def test_elements(low, interpret):
    block, shape = (pl.Element(2, (low, 0)), pl.Element(4)), (8 - low, 8)
    got = places(shape, block, (4, 2), lambda i, j: (2 * i, 4 * j), interpret=interpret)
    np.testing.assert_array_equal(got, expected_places(shape, (2, 4), (low, 0)))


def test_padding_in_front_of_blocks_that_tma_cannot_move():
    """Three int32 are no multiple of 16 bytes."""
    with pytest.raises(UnsupportedCall, match="rows have 12 bytes.*Pad the array"):
        places((7, 7), (pl.Element(2, (1, 0)), pl.Element(3, (2, 0))), (4, 3), lambda i, j: (2 * i, 3 * j))


# ---- Software pipelining --------------------------------------------------------------------------------------------------
@BOTH
def test_a_sum_over_the_outer_blocks(interpret):
    """Its output's block stays while the grid's axis goes on, and is set to zero at the first step."""

    def add_up(x, o):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += x[...]

    x = numbers(5, 32, 256)
    f = pl.pallas_call(
        add_up,
        out(32, 256),
        grid=(2, 5),
        in_specs=[pl.BlockSpec((None, 32, 128), lambda j, k: (k, 0, j), pipeline_mode=pl.Buffered(3))],
        out_specs=pl.BlockSpec((32, 128), lambda j, k: (0, j)),
        compiler_params=plgpu.CompilerParams(dimension_semantics=("parallel", "sequential")),
        interpret=interpret,
    )
    np.testing.assert_allclose(f(x), np.asarray(x, np.float64).sum(0), rtol=1e-5, atol=1e-5)


# ---- Mosaic GPU: pipelining -----------------------------------------------------------------------------------------------
def test_a_pipeline_inside_a_kernel():
    """wgmma stays in flight for one step, for which `delay_release` keeps its operands."""
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(a, b, o, o_tile):
        pl.run_scoped(functools.partial(scoped, a, b, o, o_tile), plgpu.ACC((64, 64)))

    def scoped(a, b, o, o_tile, acc):
        i, j = pl.program_id(0), jax.lax.axis_index("columns")

        def step(_, a_tile, b_tile):
            plgpu.wgmma(acc, a_tile, b_tile)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step,
            grid=(a.shape[1] // 64,),
            in_specs=[
                plgpu.BlockSpec((64, 64), lambda k: (i, k), transforms=tiles),
                plgpu.BlockSpec((64, 64), lambda k: (k, j), transforms=tiles),
            ],
            max_concurrent_steps=3,
            delay_release=1,
        )(a, b)
        o_tile[...] = acc[...].astype(o.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_tile, o.at[pl.ds(i * 64, 64), pl.ds(j * 64, 64)])
        plgpu.wait_smem_to_gmem(0)

    f = plgpu.kernel(
        body,
        out(128, 192, dtype=jnp.float16),
        scratch_types=dict(o_tile=plgpu.SMEM((64, 64), jnp.float16)),
        grid=(2, 3),
        grid_names=("rows", "columns"),
    )
    a, b = numbers(128, 320, dtype=jnp.float16), numbers(320, 192, seed=1, dtype=jnp.float16)
    np.testing.assert_allclose(f(a, b), np.asarray(a, np.float64) @ np.asarray(b, np.float64), rtol=2e-3, atol=2e-2)
