"""Bodies on arrays that no warpgroup can hold: tile by tile where any tile can be computed by itself, else refused as before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import ResourceExceeded
from mosaic_gpu.pallas import lowering
from mosaic_gpu.plan.build import build_plan
from tests.support import out, randoms

BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
pytestmark = pytest.mark.filterwarnings("ignore:.*stays in global memory")
X, Y, ROW = randoms(256, 384), randoms(384, 192, seed=1), randoms(1, 384, seed=2)
BF16 = jnp.bfloat16


def elementwise(x, y, row, o):
    o[...] = jnp.where(x[...] > 0, jnp.exp(x[...]), row[...]) ** 2


def coordinates(x, y, row, o):
    i, j = (jax.lax.broadcasted_iota(jnp.int32, o.shape, k) for k in (0, 1))
    o[...] = x[...].T + (1000 * i + j).astype(jnp.float32)


def product(x, y, row, o):
    scale = row[0, 3]
    o[...] = jax.nn.relu((x[...] * scale) @ y[...])


def turned(x, y, row, o):
    o[...] = jnp.dot(y[...].T, x[...].T, precision=jax.lax.Precision.HIGHEST)


def halves(x, y, row, o):
    for part in (slice(0, 128), slice(128, 256)):
        o[part] = x[part] + jnp.tanh(row[...])


def twice(x, y, row, o):
    o[...] = x[...] + 1
    o[...] = o[...] * o[...]
    o[...] += x[...]


# name: (body, shape of the output, what it is in float64, tolerance)
CASES = {
    "elementwise": (elementwise, (256, 384), lambda x, y, r: np.where(x > 0, np.exp(x), r) ** 2, 1e-5),
    "coordinates": (
        coordinates,
        (384, 256),
        lambda x, y, r: x.T + 1000 * np.arange(384)[:, None] + np.arange(256),
        1e-4,
    ),
    "product": (product, (256, 192), lambda x, y, r: np.maximum(x * r[0, 3] @ y, 0), 0.1),
    "turned": (turned, (192, 256), lambda x, y, r: y.T @ x.T, 1e-4),
    "halves": (halves, (256, 384), lambda x, y, r: x + np.tanh(r), 1e-5),
    "twice": (twice, (256, 384), lambda x, y, r: (x + 1) ** 2 + x, 1e-5),
}


def call(body, shape, interpret=False, dtype=np.float32, **options):
    return plgpu.pallas_call(body, out(*shape, dtype=dtype), interpret=interpret, **options)


def in_place(f, *args):
    """Whether a call's body is the user's as it is."""
    return not {"scan", "while"} & {e.primitive.name for e in f.traced(*args)[0].jaxpr.jaxpr.eqns}


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, interpret):
    body, shape, exact, tolerance = CASES[name]
    f = call(body, shape, interpret)
    assert not in_place(f, X, Y, ROW)
    expected = exact(*(a.astype(np.float64) for a in (X, Y, ROW)))
    np.testing.assert_allclose(f(X, Y, ROW), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(name, compiled):
    body, shape, _, _ = CASES[name]
    plan = build_plan(lowering.kernel_of(call(body, shape).traced(X, Y, ROW)[0]).program(X, Y, ROW), "sm_90a")
    assert not compiled(plan).complaints()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_any_order(name, seed):
    body, shape, _, _ = CASES[name]
    other = call(body, shape, plgpu.SimulatorParams(seed=seed))(X, Y, ROW)
    np.testing.assert_array_equal(np.asarray(call(body, shape)(X, Y, ROW)), np.asarray(other))


@BOTH
def test_16_bit_products_are_summed_in_float32(interpret):
    """Sums of 1024 ones and of numbers too small to be added to them one by one."""
    x = np.concatenate([np.ones((256, 1024)), np.full((256, 1024), 2**-9)], 1).astype(BF16)
    y = np.ones((2048, 64), BF16)
    got = call(lambda x, y, o: o.__setitem__(..., x[...] @ y[...]), (256, 64), interpret, BF16)(x, y)
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.full((256, 64), 1024.0))  # 1026, rounded
    got = call(lambda x, y, o: o.__setitem__(..., x[...] @ y[...]), (256, 64), interpret, BF16)(
        4 * x[:, 1024:], y[:1024]
    )
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.full((256, 64), 8.0))


@BOTH
def test_integers(interpret):
    x, y = (np.random.default_rng(i).integers(-9, 9, (512, 512)).astype(np.int8) for i in range(2))
    f = call(
        lambda x, y, o: o.__setitem__(..., jnp.dot(x[...], y[...], preferred_element_type=jnp.int32)),
        (512, 512),
        interpret,
        np.int32,
    )
    np.testing.assert_array_equal(f(x, y), x.astype(np.int64) @ y.astype(np.int64))


@BOTH
def test_an_output_that_is_the_input(interpret):
    f = call(lambda x, o: o.__setitem__(..., x[...] * x[...] + 1), X.shape, interpret, input_output_aliases={0: 0})
    assert not in_place(f, X)
    np.testing.assert_allclose(f(X), X.astype(np.float64) ** 2 + 1, rtol=1e-6)


@BOTH
def test_a_grid_and_a_batch(interpret):
    """Blocks of 256 x 256, of which the second one's last tiles lie behind the array; the grid grows."""
    x = randoms(2, 400, 256)
    spec = plgpu.BlockSpec((256, 256), lambda i: (i, 0))
    f = call(
        lambda x, o: o.__setitem__(..., x[...] + plgpu.program_id(0).astype(jnp.float32)),
        (400, 256),
        interpret,
        grid=2,
        in_specs=[spec],
        out_specs=spec,
    )
    np.testing.assert_allclose(jax.vmap(f)(x), x + (np.arange(400) // 256)[:, None], rtol=1e-6)


def test_forward_derivative():
    f = call(lambda x, o: o.__setitem__(..., jnp.sin(x[...])), X.shape)
    got, along = jax.jvp(f, (X,), (2 * X,))
    np.testing.assert_allclose(got, np.sin(X.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(along, np.cos(X.astype(np.float64)) * 2 * X, atol=1e-5)


def transposed_in_place(x, o):
    o[...] = x[...].T


def shifted_in_place(x, o):
    o[0:255] = x[1:256]


def read_before(x, o):
    before = x[...]
    o[...] = before + 1
    o[...] = before * 2


def of_sums(x, o):
    o[...] = x[...] - x[...].sum(1)[:, None]


def of_products(x, o):
    o[...] = (x[...] @ x[...]) @ x[...]


@pytest.mark.parametrize("body", [transposed_in_place, shifted_in_place, read_before, of_sums, of_products])
def test_what_has_no_tiles_of_its_own_is_refused(body):
    """The output is the input's buffer: another tile would have been written by then."""
    x = randoms(1024, 1024)
    f = call(body, x.shape, input_output_aliases={0: 0})
    assert in_place(f, x)
    with pytest.raises(ResourceExceeded):
        f(x)


def test_random_numbers_are_left_alone():
    """Keys have no size in bytes."""
    f = call(lambda o: o.__setitem__(..., jax.random.uniform(jax.random.key(3), o.shape)), (64, 64))
    assert in_place(f)
    np.testing.assert_array_equal(f(), jax.random.uniform(jax.random.key(3), (64, 64)))


def test_what_fits_is_left_alone():
    x = randoms(128, 128)
    f = call(lambda x, o: o.__setitem__(..., x[...] @ x[...]), x.shape)
    assert in_place(f, x)
    wide = randoms(64, 1536).astype(BF16)  # 192 KiB in shared memory, where wgmma reads them
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    f = call(
        lambda x, o: o.__setitem__(..., jnp.dot(x[...], x[...].T, preferred_element_type=jnp.float32)),
        (64, 64),
        in_specs=[plgpu.BlockSpec(transforms=tiles)],
        out_specs=plgpu.BlockSpec(),
    )
    assert in_place(f, wide)
