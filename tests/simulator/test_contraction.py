"""float32 sums of products are rounded once, in the simulator and in the machine code; twice with strict_math."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Block, Plan, Step
from mosaic_gpu.simulator import simulate
from mosaic_gpu.simulator.contraction import fma, fma64, sum_of_products

X = np.full(128, -1e30, np.float32)
F = np.float32(0.1275174)
ARRAY = jax.ShapeDtypeStruct((128,), jnp.float32)


def kernel(body: Any, strict: bool = False) -> Any:
    params = plgpu.CompilerParams(strict_math=strict)
    return plgpu.kernel(lambda x, o: o.__setitem__(..., body(x[...])), ARRAY, compiler_params=params)


def residue(x: np.ndarray) -> np.ndarray:
    """x * F - round(x * F), exactly."""
    exact = x.astype(np.float64) * np.float64(F)
    return (exact - exact.astype(np.float32)).astype(np.float32)


@pytest.mark.parametrize(
    "body, sign",
    [
        (lambda x: x * F - jnp.float32(X[0] * F), 1),
        (lambda x: jnp.float32(X[0] * F) - x * F, -1),
        (lambda x: x * F + jnp.float32(-(X[0] * F)), 1),
    ],
)
def test_the_product_is_not_rounded(body: Any, sign: int) -> None:
    """What is left of `LOWEST * f - LOWEST * f` is the rounding error: 1e22, whose exponential is 0 or infinite."""
    assert abs(residue(X)[0]) > 1e20
    np.testing.assert_array_equal(np.asarray(kernel(body)(X)), sign * residue(X))
    np.testing.assert_array_equal(np.asarray(kernel(body, strict=True)(X)), 0 * X)


def carried(x: Any, y: Any) -> Any:
    """A product of the last iteration, which is another value in this one."""
    return lax.fori_loop(0, 9, lambda i, c: (c[0] + c[1], c[1] * F), (y, x))[0]


def branch(x: Any, y: Any) -> Any:
    """The product stands before the branch, the sums in it."""
    product = x * F
    return lax.cond(lax.axis_index("block") > 3, lambda: product + y, lambda: y - product)


# name -> (function, instructions of a thread that has one element: fmas, products, sums; None: at least one)
BODIES: dict[str, tuple[Any, tuple[int | None, int | None, int | None]]] = {
    "c - x*F": (lambda x, y: 0.7 - x * F, (1, 0, 0)),
    "x*F - c": (lambda x, y: x * F - 0.7, (1, 0, 0)),
    "x*F + c": (lambda x, y: x * F + 0.7, (1, 0, 0)),
    "c + x*F": (lambda x, y: 0.7 + x * F, (1, 0, 0)),
    "y - x*y": (lambda x, y: y - x * y, (1, 0, 0)),
    "x*F - y*G": (lambda x, y: x * F - y * 0.3, (1, 1, 0)),
    "square": (lambda x, y: lax.square(x) + y, (1, 0, 0)),
    "two sums": (lambda x, y: jnp.maximum(x * F + y, x * F - 0.7), (2, 0, 0)),
    "one product, two sums": (lambda x, y: (lambda p: jnp.maximum(p + y, 0.7 - p))(x * F), (2, 0, 0)),
    "also read itself": (lambda x, y: (lambda p: jnp.maximum(p + y, p))(x * F), (1, 1, 0)),
    "negated": (lambda x, y: y + -(x * F), (1, 0, 0)),
    "negated twice": (lambda x, y: y - jnp.negative(-(x * F)), (1, 0, 0)),
    "in a loop": (lambda x, y: lax.fori_loop(0, 9, lambda i, c: c * x + y, x), (None, 0, 0)),
    "carried": (carried, (0, None, None)),
    "branch": (branch, (0, 1, None)),
    "none": (lambda x, y: (x + y) * F, (0, 1, 1)),
    "bfloat16": (lambda x, y: (x.astype(jnp.bfloat16) * 0.3 + y.astype(jnp.bfloat16)).astype(jnp.float32), (0, 1, 1)),
}


def plan_of(body: Any, arch: str, strict: bool, size: int = 128, blocks: int = 10) -> Plan:
    """Of two arrays, the same in each block."""
    params = plgpu.CompilerParams(strict_math=strict)
    numbers = jax.ShapeDtypeStruct((size,), jnp.float32)

    def whole(x: Any, y: Any, o: Any) -> None:
        o[...] = body(x[...], y[...])

    f = plgpu.kernel(whole, numbers, compiler_params=params, grid=(blocks,), grid_names=("block",))
    return build_plan(f.program(numbers, numbers), arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", BODIES)
def test_the_machine_code_has_an_fma_where_the_simulator_has_one(name: str, arch: str, compiled: Any) -> None:
    """And nowhere else: the compiler contracts nothing of its own.  With strict_math there is none."""
    body, expected = BODIES[name]
    for strict in (False, True):
        plan = plan_of(body, arch, strict)
        report = compiled(plan)
        found = [report.mnemonics.get(k, 0) for k in ("FFMA", "FMUL", "FADD")]
        planned = sum(s.fma is not None for r in plan.roles for s in steps_of(r.body))
        if strict:
            assert planned == found[0] == 0 and report.complaints() == []
            continue
        for n, wanted in zip(found, expected, strict=True):
            assert n == wanted if wanted is not None else n > 0, found
        assert planned == (1 if expected[0] is None else expected[0])


def steps_of(block: Block) -> Iterator[Step]:
    for s in block.steps:
        yield s
        for r in s.regions:
            yield from steps_of(r)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_sum_over_an_axis_takes_products_unrounded(arch: str, compiled: Any) -> None:
    """Of a thread's eight elements four begin its four partial sums."""

    def body(x: Any, y: Any) -> Any:
        return jnp.broadcast_to(jnp.sum(x * y), x.shape)

    x, y = np.random.default_rng(0).uniform(-1, 1, (2, 1024)).astype(np.float32)
    exact = np.sum(x.astype(np.float64) * y)
    for strict, expected in ((False, (4, 4)), (True, (0, 8))):
        plan = plan_of(body, arch, strict, 1024, blocks=1)
        report = compiled(plan)
        if strict and arch == "sm_100a":
            assert report.mnemonics["FMUL2"] == 4 and "FFMA" not in report.mnemonics
        elif arch == "sm_100a":
            assert (report.mnemonics["FFMA"], report.mnemonics["FMUL2"]) == (4, 2)
        else:
            assert (report.mnemonics.get("FFMA", 0), report.mnemonics["FMUL"]) == expected
        (found,) = simulate(plan, [x, y])
        if strict:
            np.testing.assert_allclose(found, exact, rtol=1e-5)
        else:
            np.testing.assert_array_equal(found, np.full_like(x, exact))


def test_one_rounding() -> None:
    """As the C library's fmaf, also where the middle between two float32 is met, and with numbers of all sizes."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((3, 4000)) * np.exp2(rng.integers(-75, 64, (3, 4000)))).astype(np.float32)
    c[:1000] = -a[:1000] * b[:1000]  # cancels but for the product's rounding
    a[1000:2000], b[1000:2000] = 1 + 2**-12, 1 + 2**-12  # a product of 24 bits and 1, and far below it a third
    c[1000:2000] = np.float32(2.0**-60) * rng.choice([-1, 1], 1000)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, 2**-126], np.float32)
    a[2000:2729], b[2000:2729], c[2000:2729] = (v.reshape(-1) for v in np.meshgrid(special, special, special))
    library = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    library.argtypes, library.restype = [ctypes.c_float] * 3, ctypes.c_float
    expected = np.array([library(*v) for v in zip(a, b, c, strict=True)], np.float32)
    with np.errstate(all="ignore"):
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
    number = ~np.isnan(expected)
    assert (twice != expected)[1000:2000].any()  # float64 alone would not do
    np.testing.assert_array_equal(np.isnan(fma(a, b, c)), ~number)
    assert fma(a, b, c)[number].tobytes() == expected[number].tobytes()
    one = [fma(*v) for v in zip(a[990:1010], b[990:1010], c[990:1010], strict=True)]
    assert np.array(one).tobytes() == expected[990:1010].tobytes()


def test_fma_of_float64():
    """As the C library's fma: random numbers, products that cancel to the last bits, the middle between two, and no numbers."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 6, 500))
    c = -a * b * (1 + rng.integers(-2, 3, a.shape) * 2.0**-52)
    c[1] = rng.standard_normal(500) * np.exp2(rng.integers(-120, 120, 500))
    a[2], b[2], c[2] = 1 + 2.0**-30, 2.0**-53 * (1 - 2.0**-30), 1 + 2.0**-52 * rng.integers(0, 4, 500)
    c[3], a[3] = 2.0**53, 1 + rng.integers(-2, 3, 500) * 2.0**-52
    c[4] = 0
    a[5], b[5], c[5] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], (3, 500))
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("no C library to ask")
    library = ctypes.CDLL(name).fma
    library.restype, library.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    with np.errstate(all="ignore"):
        expected = np.vectorize(library, otypes=[np.float64])(a, b, c)
    np.testing.assert_array_equal(fma64(a, b, c), expected)
    with np.errstate(all="ignore"):
        assert (expected[:5] != (a * b + c)[:5]).any(axis=1).sum() >= 3  # rounding twice would not do

    x, y, start = rng.standard_normal((3, 7)), rng.standard_normal((2, 7)), rng.standard_normal((3, 2))
    total = start
    for k in range(7):
        total = np.vectorize(library, otypes=[np.float64])(x[:, k, None], y[None, :, k], total)
    np.testing.assert_array_equal(sum_of_products(start, x, y), total)
