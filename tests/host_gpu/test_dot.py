"""Products of register arrays: simulator against NumPy in float64, the emitted C++ on the host against the simulator, NVRTC."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import View
from mosaic_gpu.simulator import simulate
from tests.support import dtype_of

F32 = jnp.float32
HIGHEST = lax.Precision.HIGHEST
EPSILON = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-22, "float64": 2**-50}


def numbers(dtype: str, *shape: int, seed: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype.startswith(("int", "uint")):
        return rng.integers(0 if dtype[0] == "u" else -100, 100, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype_of(dtype))


def plan_of(f: Callable[..., Any], *arrays: np.ndarray, arch: str = "sm_90a", layout: Layout | None = None) -> Any:
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    out = jax.eval_shape(f, *abstract)

    def body(*refs: Any) -> None:
        refs[-1][...] = f(*(plgpu.load(r, layout=layout) for r in refs[:-1]))

    return build_plan(plgpu.kernel(body, out).program(*abstract), arch)


def right(found: np.ndarray, f: Callable[..., Any], *arrays: np.ndarray, tf32: bool = False) -> None:
    """Within the rounding of the result and a few of each sum's terms, against float64 (integers: the same bits)."""
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, np.asarray(f(*map(jnp.asarray, arrays))))
        return
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in arrays]
        exact, size = np.asarray(f(*wide)), np.asarray(f(*map(abs, wide)))
    rounding = EPSILON[found.dtype.name] * np.abs(exact)
    terms = (2**-9 if tf32 else 2**-50 if found.dtype == np.float64 else 2**-20) * size
    assert np.all(np.abs(found.astype(np.float64) - exact) <= rounding + terms)


def dot(*dims: Any, out: Any = None, precision: Any = None) -> Callable[..., Any]:
    def f(x: Any, y: Any) -> Any:
        wanted = None if out is None or x.dtype == jnp.float64 else out
        return lax.dot_general(x, y, dims, preferred_element_type=wanted, precision=precision)

    return f


PLAIN = (((1,), (0,)), ((), ()))
SHAPES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "tiles": (lambda x, y: x @ y, (64, 32), (32, 24)),
    "two_rows_of_tiles": (lambda x, y: x @ y, (128, 32), (32, 8)),
    "one_tile": (lambda x, y: x @ y, (16, 32), (32, 8)),
    "warps_along_columns": (lambda x, y: x @ y, (32, 32), (32, 48)),
    "uneven": (lambda x, y: x @ y, (24, 20), (20, 12)),
    "odd": (lambda x, y: x @ y, (7, 9), (9, 5)),
    "row": (lambda x, y: x @ y, (40,), (40, 24)),
    "column": (lambda x, y: x @ y, (24, 40), (40,)),
    "vectors": (lambda x, y: (x @ y)[None], (100,), (100,)),
    "outer": (lambda x, y: jnp.outer(x, y), (12,), (20,)),
    "a_transposed": (dot(((0,), (0,)), ((), ())), (32, 64), (32, 16)),
    "b_transposed": (dot(((1,), (1,)), ((), ())), (64, 32), (16, 32)),
    "batch": (lambda x, y: x @ y, (3, 16, 32), (3, 32, 8)),
    "batch_last": (dot(((0,), (1,)), ((2,), (2,))), (20, 10, 2), (6, 20, 2)),
    "two_contracted": (lambda x, y: jnp.tensordot(x, y, 2), (16, 4, 8), (4, 8, 8)),
    "two_free": (lambda x, y: jnp.einsum("abk,kcd->acbd", x, y), (4, 4, 32), (32, 2, 4)),
}
TYPES = ("bfloat16", "float16", "float32", "int8", "uint8", "int32", "float64", "int16", "uint64")
FAST = ("tiles", "uneven", "batch")


def cases(types: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(d, n, marks=[] if n in FAST and d in ("bfloat16", "float32", "int8") else [pytest.mark.slow])
        for d in types
        for n in SHAPES
    ]


@pytest.mark.parametrize(("dtype", "name"), cases(TYPES))
def test_shapes_and_types(dtype, name, agree):
    f, left, right_ = SHAPES[name]
    with jax.enable_x64(dtype in ("float64", "uint64")):
        arrays = [numbers(dtype, *left), numbers(dtype, *right_, seed=4)]
        (found,) = agree(plan_of(f, *arrays), arrays, ulps=4, atol=1e-5)
    assert found.dtype == arrays[0].dtype
    right(found, f, *arrays, tf32=dtype == "float32")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float32", "int8", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float16", "int32"))]
)
def test_compiles(dtype, arch, compiled, mnemonics):
    """Every shape, in one type; on the tensor cores where there are some for it."""
    for f, left, right_ in (SHAPES[n] for n in ("tiles", "uneven", "batch", "two_free")):
        arrays = [numbers(dtype, *left), numbers(dtype, *right_, seed=4)]
        plan = plan_of(f, *arrays, arch=arch)
        right(simulate(plan, arrays)[0], f, *arrays, tf32=dtype == "float32")
        assert compiled(plan).complaints() == []
        expected = {"int8": {"IMMA"}, "int32": set()}.get(dtype, {"HMMA"})
        assert mnemonics(plan) & {"HMMA", "IMMA", "DMMA"} == expected


@pytest.mark.parametrize(
    ("dtype", "out"), [("bfloat16", F32), ("float16", F32), ("int8", jnp.int32), ("uint8", jnp.int32), ("int8", F32)]
)
def test_preferred_types(dtype, out, agree):
    f = dot(*PLAIN, out=out)
    arrays = [numbers(dtype, 32, 40), numbers(dtype, 40, 16, seed=4)]
    (found,) = agree(plan_of(f, *arrays), arrays, ulps=4, atol=1e-5)
    assert found.dtype == out
    right(found, f, *arrays)


PRESET = lax.DotAlgorithmPreset


@pytest.mark.parametrize(
    ("a", "b", "out", "precision"),
    [
        ("float8_e4m3fn", "float8_e5m2", F32, None),
        ("float8_e5m2", "float8_e4m3fn", F32, PRESET.ANY_F8_ANY_F8_F32),
        ("float8_e5m2", "float8_e5m2", jnp.float16, PRESET.ANY_F8_ANY_F8_ANY),
        ("float16", "float16", jnp.float16, PRESET.F16_F16_F16),
        ("float16", "float16", F32, PRESET.F16_F16_F16),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_float8_and_float16_sums(a, b, out, precision, whole, agree):
    """The emitted C++ and the simulator, from whole numbers: what differs is where float16 is rounded."""
    rng = np.random.default_rng(7)
    rows, columns = (16, 8) if whole else (24, 12)  # of parts of tiles, what sums start from is added in the end
    arrays = [rng.integers(-7, 8, s).astype(dtype_of(t)) for s, t in (((rows, 80), a), ((80, columns), b))]
    f = dot(*PLAIN, out=out, precision=precision)
    (found,) = agree(plan_of(f, *arrays), arrays)
    assert found.dtype == out
    exact = arrays[0].astype(np.float64) @ arrays[1].astype(np.float64)
    assert np.abs(exact).max() < 2048  # so float16 has them all
    np.testing.assert_array_equal(
        found.astype(np.float64), exact.astype(np.float32).astype(found.dtype).astype(np.float64)
    )
    start = rng.integers(1000, 4000, exact.shape).astype(found.dtype)
    if out == jnp.float16 and precision is not None:  # of which it has not: odd ones above 2048
        (found,) = agree(plan_of(lambda x, y, c: c + f(x, y), *arrays, start), [*arrays, start])
        assert (found.astype(np.float64) != start.astype(np.float64) + exact).any()


def test_float64_is_a_chain_of_fmas(agree, mnemonics):
    """To the last bit, from numbers that cancel; on the tensor cores."""
    rng = np.random.default_rng(8)
    with jax.enable_x64(True):
        arrays = [rng.standard_normal(s) * np.exp2(rng.integers(-20, 20, s)) for s in ((32, 24), (24, 24), (32, 24))]
        plan = plan_of(lambda x, y, c: c + x @ y, *arrays)
        (found,) = agree(plan, arrays)
        assert mnemonics(plan) & {"DMMA", "DFMA"} == {"DMMA"}
    expected = [
        [functools.reduce(fma, zip(x, y, strict=True), c) for y, c in zip(arrays[1].T, row, strict=True)]
        for x, row in zip(arrays[0], arrays[2], strict=True)
    ]
    np.testing.assert_array_equal(found, expected)


def fma(c: float, terms: tuple[float, float]) -> float:
    """Rounded once, by fractions."""
    return float(Fraction(c) + Fraction(terms[0]) * Fraction(terms[1]))


def test_signs_mix(agree):
    f = dot(*PLAIN, out=jnp.int32)
    for types in (("int8", "uint8"), ("uint8", "int8")):
        arrays = [numbers(types[0], 32, 40), numbers(types[1], 40, 16, seed=4)]
        right(agree(plan_of(f, *arrays), arrays)[0], f, *arrays)


def test_precision(agree, mnemonics):
    """float32 at HIGHEST has all its bits, by default those of tf32; 16-bit products are exact either way."""
    arrays = [numbers("float32", 48, 40), numbers("float32", 40, 24, seed=4)]
    for precision in (HIGHEST, lax.Precision.HIGH, lax.DotAlgorithmPreset.F32_F32_F32):
        f = dot(*PLAIN, precision=precision)
        plan = plan_of(f, *arrays)
        right(agree(plan, arrays, ulps=8, atol=1e-5)[0], lambda x, y: x @ y, *arrays)
        assert "HMMA" not in mnemonics(plan)
    (loose,) = agree(plan_of(dot(*PLAIN), *arrays), arrays, ulps=8, atol=1e-5)
    with pytest.raises(AssertionError):  # which is why it can be asked for
        right(loose, lambda x, y: x @ y, *arrays)
    f = dot(*PLAIN, precision=lax.DotAlgorithmPreset.TF32_TF32_F32)
    assert "HMMA" in mnemonics(plan_of(f, *arrays))
    half = [a.astype(ml_dtypes.bfloat16) for a in arrays]
    f = dot(*PLAIN, precision=HIGHEST)
    right(agree(plan_of(f, *half), half)[0], lambda x, y: x @ y, *half)
    with pytest.raises(UnsupportedCall, match="F16_F16_F16"):
        plan_of(dot(*PLAIN, precision=lax.DotAlgorithmPreset.F16_F16_F16), *half)


def test_types_that_differ_meet_in_the_wider(agree):
    arrays = [numbers("bfloat16", 16, 16), numbers("float32", 16, 16, seed=4)]
    f = dot(*PLAIN, precision=HIGHEST)
    right(agree(plan_of(f, *arrays), arrays, ulps=8, atol=1e-5)[0], lambda x, y: x @ y, *arrays)


@pytest.mark.parametrize("layout", [Layout.WGMMA, Layout.WG_STRIDED], ids=str)
def test_layouts_of_operands_and_results(layout, agree):
    """Operands as somebody else wants them, a result that goes on in a loop and meets another layout."""

    def f(x: Any, y: Any) -> Any:
        def step(i: Any, acc: Any) -> Any:
            return acc + jnp.dot(x, y, preferred_element_type=F32)

        total = lax.fori_loop(0, 3, step, jnp.zeros((64, 64), F32))
        return plgpu.layout_cast(total.T, Layout.WGMMA) + total

    arrays = [numbers("bfloat16", 64, 64), numbers("bfloat16", 64, 64, seed=4)]
    (found,) = agree(plan_of(f, *arrays, layout=layout), arrays, ulps=8, atol=1e-4)
    product = np.asarray(arrays[0], np.float64) @ np.asarray(arrays[1], np.float64)
    np.testing.assert_allclose(found, 3 * (product + product.T), rtol=1e-4, atol=1e-3)


def test_rounding_to_tf32(agree):
    """Ties away from zero, infinities and NaN as they are."""
    x = np.zeros((16, 8), np.float32)
    values = [1 + 2**-11, -1 - 2**-11, 1 + 2**-12, np.inf, -np.inf, np.nan, 3.4e38, 1e-40]
    x[:8, 0] = values
    y = np.zeros((8, 8), np.float32)
    y[0, 0] = 1
    (found,) = agree(plan_of(dot(*PLAIN), x, y), [x, y])
    np.testing.assert_array_equal(found[:3, 0], np.float32([1 + 2**-10, -1 - 2**-10, 1]))
    assert found[3, 0] == np.inf and found[4, 0] == -np.inf and np.isnan(found[5, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32", "int8"])
@pytest.mark.parametrize("shape", [(64, 32, 16), (24, 20, 12)])
def test_sums_that_start_somewhere(dtype, shape, agree):
    """c + a @ b for a result in its fragment's layout, one that goes through the scratch, and one element by element."""
    m, k, n = shape
    out = jnp.int32 if "int" in dtype else F32

    def f(x: Any, y: Any, z: Any) -> Any:
        return z + lax.dot(x, y, preferred_element_type=out)

    arrays = [numbers(dtype, m, k), numbers(dtype, k, n, seed=4), numbers(np.dtype(out).name, m, n, seed=5)]
    plan = plan_of(f, *arrays)
    (product,) = [e for r in plan.roles for s in r.body.steps if (e := s.equation).op == "dot_general"]
    assert len(product.operands) == 3
    (found,) = agree(plan, arrays, ulps=8, atol=1e-5)
    exact = np.asarray(arrays[0], np.float64) @ np.asarray(arrays[1], np.float64) + arrays[2]
    np.testing.assert_allclose(
        found, exact, rtol=1e-2 if dtype == "float32" else 1e-5, atol=2e-2 if dtype == "float32" else 1e-4
    )


def transforms(dtype: str, swizzle: int) -> tuple[Any, ...]:
    size = dtype_of(dtype).itemsize
    return () if not swizzle else (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))


IN_PLACE = {
    "plain": (lambda a, b: a[...] @ b[...], (32, 64), (64, 24)),
    "b_transposed": (lambda a, b: a[...] @ b[...].T, (32, 64), (24, 64)),
    "a_transposed": (lambda a, b: a[...].T @ b[...], (64, 48), (64, 24)),
    "both_transposed": (lambda a, b: a[...].T @ b[...].T, (64, 32), (8, 64)),
    "parts": (lambda a, b: a[16:, :32] @ b[32:, 8:24], (64, 64), (64, 24)),
    "one_from_registers": (lambda a, b: (a[...] + a[...]) @ b[...], (64, 64), (64, 40)),
}


@pytest.mark.parametrize(
    ("dtype", "name", "swizzle"),
    [
        pytest.param(d, n, s, marks=[] if s and (d == "bfloat16" or n == "b_transposed") else [pytest.mark.slow])
        for d in ("bfloat16", "float32", "int8")
        for n in IN_PLACE
        for s in (0, 64)
    ],
)
def test_operands_in_shared_memory(dtype, name, swizzle, agree, compiled):
    """ldmatrix reads them where they lie: 16-bit types either way round, others along K."""
    f, *shapes = IN_PLACE[name]
    size = dtype_of(dtype).itemsize
    arrays = [numbers(dtype, *s, seed=k) for k, s in enumerate(shapes)]
    tiled = [transforms(dtype, swizzle if a.shape[1] * size % max(swizzle, 1) == 0 else 0) for a in arrays]
    with jax.default_device(jax.devices("cpu")[0]):
        out = jax.eval_shape(f, *map(jnp.asarray, arrays))

    def body(a: Any, b: Any, o: Any, p: Any, q: Any) -> None:
        p[...] = a[...]
        q[...] = b[...]
        plgpu.commit_smem()
        o[...] = f(p, q)

    scratch = [plgpu.SMEM(a.shape, a.dtype, transforms=t) for a, t in zip(arrays, tiled, strict=True)]
    kernel = plgpu.kernel(body, out, scratch_types=scratch)
    plan = build_plan(kernel.program(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]), "sm_100a")
    (product,) = [e for r in plan.roles for s in r.body.steps if (e := s.equation).op == "dot_general"]
    along_k = ("a_transposed" not in name and "both" not in name, "b_transposed" in name or "both" in name)
    in_place = [size == 2 or k for k in along_k]
    if name == "one_from_registers":
        in_place[0] = False
    elif name == "parts":
        in_place = [isinstance(o, View) for o in product.operands]  # starts must be multiples of 16 bytes
    assert [isinstance(o, View) for o in product.operands] == in_place
    (found,) = agree(plan, arrays, ulps=8, atol=1e-4)
    right(found, lambda a, b: f(a, b), *arrays, tf32=dtype == "float32")
    assert compiled(plan).complaints() == []
