"""float8 values in registers: converted as JAX does, moved and chosen bit by bit; what computes with them is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import UnsupportedPrimitive
from mosaic_gpu.simulator import simulate

KINDS = ["float8_e4m3fn", "float8_e5m2"]
OTHERS = ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "bool", *KINDS]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def all_values(kind):
    return np.arange(256, dtype=np.uint8).view(dtype_of(kind))


def hard_values(kind):
    """Numbers halfway between neighbours, just beside, too large, subnormal, infinite and none."""
    values = np.unique(all_values(kind).astype(np.float32))
    values = values[np.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    beside = np.concatenate([np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))])
    top = values.max()
    step = top - values[-2]
    edge = np.array(
        [top + step / 2, np.nextafter(top + step / 2, np.float32(np.inf)), top + step, 2 * top, 1e30], np.float32
    )
    rest = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30], np.float32)
    found = np.concatenate([values, middle, beside, edge, -edge, rest]).astype(np.float32)
    return np.concatenate([found, np.zeros(-len(found) % 128, np.float32)])


def same(got, want):
    """The same numbers with the same signs; NaN is NaN."""
    assert got.dtype == want.dtype
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
        return
    a, b = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    keep = ~np.isnan(a)
    np.testing.assert_array_equal(a[keep], b[keep])
    np.testing.assert_array_equal(np.signbit(a[keep]), np.signbit(b[keep]))


def converted(plan, x, to, arch="sm_90a"):
    def body(x, o):
        o[...] = x[...].astype(to)

    return plan(body, x, out=jax.ShapeDtypeStruct(x.shape, dtype_of(to)), arch=arch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", OTHERS)
def test_from_every_value(plan, kind, to):
    x = all_values(kind)
    if to in ("int8", "uint8", "int32"):  # JAX leaves open what numbers outside become
        x = np.where(np.abs(x.astype(np.float32)) < 100, x, np.zeros_like(x))
        x = np.abs(x.astype(np.float32)).astype(x.dtype)
    (got,) = simulate(converted(plan, x, to), [x])
    same(got, np.asarray(lax.convert_element_type(x, dtype_of(to))))


@pytest.mark.parametrize("kind", KINDS)
def test_rounding(plan, kind):
    """float32 to the nearest, ties to even; too large: NaN, or infinity where there is one. As JAX and as ml_dtypes."""
    x = hard_values(kind)
    (got,) = simulate(converted(plan, x, kind), [x])
    same(got, x.astype(dtype_of(kind)))
    same(got, np.asarray(lax.convert_element_type(x, dtype_of(kind))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "int8", "uint8", "int16", "int32", "uint32", "bool"])
def test_from_other_types(plan, kind, source):
    """Through float32, which holds them, or whose rounding is of numbers that are too large anyway."""
    if source in ("float16", "bfloat16"):
        x = hard_values(kind).astype(dtype_of(source))
    elif source == "bool":
        x = np.arange(128) % 3 == 0
    else:
        info = np.iinfo(source)
        x = np.linspace(info.min, info.max, 256).astype(source)
        small = np.arange(min(info.max, 1000), max(info.min, -1000), -1)[:1024].astype(source)
        x = np.concatenate([x, small[: len(small) // 128 * 128]])
    (got,) = simulate(converted(plan, x, kind), [x])
    same(got, x.astype(np.float64).astype(np.float32).astype(dtype_of(kind)))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", OTHERS)
def test_conversions_compile(plan, compiled, arch, kind, other):
    for a, b in ((kind, other), (other, kind)):
        p = converted(plan, np.zeros((64, 64), dtype_of(a)), b, arch)
        report = compiled(p)
        assert report.complaints() == []
        if a == "float32":
            assert any(name.startswith(("F2FP", "F2F")) for name in report.mnemonics), report.mnemonics


def moves(x, y, m, o):
    """Loaded in two layouts, taken apart, put together, chosen from, repeated, turned round: all of it bit by bit."""
    a, b = plgpu.load(x, layout=plgpu.Layout.WGMMA), y[...]
    c = jnp.where(m[...], a, b)
    c = jnp.concatenate([c[:, 32:], c[:, :32]], 1)
    c = lax.rev(c.T, (0,)).T
    c = c.reshape(32, 2, 64).reshape(64, 64)
    row = jnp.broadcast_to(b[3][None], (64, 64))
    c = jnp.where(lax.broadcasted_iota(jnp.int32, (64, 64), 0) < 8, row, c)
    c = jnp.where(lax.broadcasted_iota(jnp.int32, (64, 64), 1) == 5, jnp.asarray(1.5, c.dtype), c)
    c = lax.fori_loop(0, 2, lambda i, v: jnp.where(m[...], v, lax.rev(v, (1,))), c)
    o[...] = c


def moved(x, y, m):
    c = np.where(m, x, y)
    c = np.concatenate([c[:, 32:], c[:, :32]], 1)[:, ::-1]
    c = np.where(np.arange(64)[:, None] < 8, y[3][None], c)
    c = np.where(np.arange(64)[None] == 5, np.asarray(1.5).astype(c.dtype), c)
    for _ in range(2):
        c = np.where(m, c, c[:, ::-1])
    return c


@pytest.mark.parametrize("kind", KINDS)
def test_moves(plan, compiled, kind):
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 256, (64, 64)).astype(np.uint8).view(dtype_of(kind)) for _ in range(2))
    m = rng.random((64, 64)) < 0.5
    out = jax.ShapeDtypeStruct((64, 64), x.dtype)
    for arch in ("sm_90a", "sm_100a"):
        p = plan(moves, x, y, m, out=out, arch=arch)
        (got,) = simulate(p, [x, y, m])
        np.testing.assert_array_equal(got.view(np.uint8), moved(x, y, m).view(np.uint8))
        assert compiled(p).complaints() == []


@pytest.mark.parametrize("kind", KINDS)
def test_scalars_masks_indices_and_bits(plan, compiled, kind):
    def body(x, o, bits, s):
        s[...] = x[...]
        plgpu.commit_smem()
        v = plgpu.load(s, mask=lax.iota(jnp.int32, 256) % 2 == 0, other=2)
        v = jnp.where(lax.iota(jnp.int32, 256) < 128, v, jnp.take(v, lax.rev(lax.iota(jnp.int32, 256), (0,))))
        o[...] = v
        plgpu.commit_smem()
        o[7] = x[9]
        o[8] = x[9].astype(jnp.float32).astype(x.dtype)
        bits[...] = lax.bitcast_convert_type(x[...], jnp.uint8)

    x = all_values(kind)
    out = [jax.ShapeDtypeStruct((256,), x.dtype), jax.ShapeDtypeStruct((256,), np.uint8)]
    p = plan(body, x, out=out, scratch_types=[plgpu.SMEM((256,), x.dtype)])
    got, bits = simulate(p, [x])
    want = np.where(np.arange(256) % 2 == 0, x, np.asarray(2).astype(x.dtype))
    want = np.where(np.arange(256) < 128, want, want[::-1])
    want[7] = want[8] = x[9]
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    np.testing.assert_array_equal(bits, np.arange(256))
    assert compiled(p).complaints() == []


def test_quantised_product():
    """What it is for: a tile is scaled, rounded to float8, multiplied as such, and scaled back."""
    tile = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
    kind = jnp.float8_e4m3fn

    def body(x, y, o, a, b):
        largest = jnp.max(jnp.abs(x[...]))
        a[...] = (x[...] * (448.0 / largest)).astype(kind)
        b[...] = y[...]
        plgpu.commit_smem()

        def product(acc):
            plgpu.wgmma(acc, a, b.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return acc[...]

        o[...] = plgpu.run_scoped(product, plgpu.ACC((64, 64))) * (largest / 448.0)

    rng = np.random.default_rng(2)
    x = rng.standard_normal((64, 128)).astype(np.float32)
    y = rng.standard_normal((64, 128)).astype(ml_dtypes.float8_e4m3fn)
    scratch = [plgpu.SMEM((64, 128), kind, transforms=tile)] * 2
    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct((64, 64), np.float32), scratch_types=scratch, interpret=True)
    scale = np.float32(448) / np.abs(x).max()
    rounded = (x * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    want = rounded @ y.astype(np.float64).T / scale
    np.testing.assert_allclose(np.asarray(kernel(x, y)), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + x,
        lambda x: -x,
        lambda x: jnp.exp(x),
        lambda x: jnp.maximum(x, x),
        lambda x: jnp.where(x > x[::-1], x, x),
        lambda x: lax.sort(x),
        lambda x: jnp.broadcast_to(lax.reduce_max(x, (0,)), (128,)),
        lambda x: lax.cummax(x),
        lambda x: x.at[lax.iota(jnp.int32, 4)].set(x[:4]),
        lambda x: lax.iota(x.dtype, 128),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_computing_is_refused(plan, compute, kind, assert_at):
    """By name, at the line, with the conversion to write: no operation takes the bits for numbers."""

    def body(x, o):
        o[...] = compute(x[...])

    x = np.zeros(128, dtype_of(kind))
    with pytest.raises(UnsupportedPrimitive, match=rf"{kind}.*convert.*float32"):
        plan(body, x, out=jax.ShapeDtypeStruct((128,), x.dtype))


def test_double_is_refused(plan):
    with jax.enable_x64(True), pytest.raises(UnsupportedPrimitive, match=r"go through astype\(jnp.float32\)"):
        emit(converted(plan, np.zeros(128, np.float64), "float8_e5m2"))
