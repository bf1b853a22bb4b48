"""Special functions that CUDA has not: how far they are from SciPy's float64, beside JAX's own, and at the ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import special

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.support import dtype_of


def grid(*axes: Any) -> tuple[np.ndarray, ...]:
    return tuple(a.reshape(-1).astype(np.float32) for a in np.meshgrid(*axes))


LINE = np.concatenate([np.linspace(-50, 50, 6001), np.geomspace(1e-6, 1e6, 2001)]).astype(np.float32)
# name: (SciPy's, arguments, relative and absolute error)
CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], float, float]] = {
    "bessel_i0e": (special.i0e, (LINE,), 6e-7, 0),
    "bessel_i1e": (special.i1e, (LINE,), 1e-6, 1e-38),
    "digamma": (special.digamma, (LINE[(LINE > 0.49) | (LINE < -1e-3)],), 4e-6, 1e-6),
    "zeta": (special.zeta, grid(np.linspace(1.01, 12, 90), np.geomspace(0.05, 100, 90)), 2e-6, 0),
    "polygamma": (
        lambda m, x: special.polygamma(m.astype(int), x),
        grid(np.arange(9), np.geomspace(0.3, 50, 500)),
        2e-5,
        1e-6,
    ),
    "igamma": (special.gammainc, grid(np.geomspace(0.05, 50, 64), np.geomspace(0.01, 100, 64)), 2e-5, 2e-6),
    "igammac": (special.gammaincc, grid(np.geomspace(0.05, 50, 64), np.geomspace(0.01, 60, 64)), 5e-5, 2e-6),
}
NAN, INF = np.nan, np.inf
ENDS: dict[str, list[tuple[float, ...]]] = {
    "bessel_i0e": [(0.0,), (INF,), (-INF,), (NAN,), (1e30,), (8.0,)],
    "bessel_i1e": [(0.0,), (INF,), (-INF,), (NAN,), (-1e30,), (1e-30,)],
    "digamma": [(-1.0,), (-2.0,), (INF,), (-INF,), (NAN,), (1e30,), (-0.5,)],
    "zeta": [
        (1, 2),
        (0.5, 2),
        (2, 0),
        (2, -1),
        (2, -0.5),
        (2.5, -0.5),
        (NAN, 1),
        (1.0001, 3),
        (50, 0.5),
        (100, 3),
        (2, 1e30),
    ],
    "polygamma": [(0, 2), (0.5, 1), (-1, 2), (3, -0.5), (2, 0.5), (1, NAN)],
    "igamma": [(0, 0), (1, 0), (0, 1), (-1, 1), (1, -1), (NAN, 1), (1, NAN), (2, INF), (1e-6, 1)],
    "igammac": [
        (0, 0),
        (1, 0),
        (0, 1),
        (-1, 1),
        (1, -1),
        (NAN, 1),
        (1, NAN),
        (2, INF),
        (1e-6, 1),
    ],
}


def plan_of(name: str, arrays: tuple[np.ndarray, ...], step: int = 0) -> Any:
    """Of all elements, or a loop over pieces of `step`."""

    def body(*refs: Any) -> None:
        *ins, o = refs
        if not step:
            o[...] = getattr(lax, name)(*(r[...] for r in ins))
            return

        def piece(i: Any, _: Any) -> None:
            at = plgpu.ds(i * step, step)
            o[at] = getattr(lax, name)(*(r[at] for r in ins))

        lax.fori_loop(0, arrays[0].size // step, piece, None)

    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    return build_plan(plgpu.kernel(body, types[0]).program(*types), "sm_90a")


@pytest.mark.parametrize("name", CASES)
def test_accuracy(name: str, compiled: Any) -> None:
    """Within its bound, and nowhere worse than JAX's own by more than that."""
    exact, arrays, relative, absolute = CASES[name]
    pad = -len(arrays[0]) % 1024
    arrays = tuple(np.concatenate([a, a[:pad]]) for a in arrays)
    plan = plan_of(name, arrays, 1024)
    found = simulate(plan, arrays)[0].astype(np.float64)
    right = exact(*(a.astype(np.float64) for a in arrays))
    normal = np.abs(right) > 2.0**-126  # in igammac and the like nothing smaller is promised
    np.testing.assert_allclose(found[normal], right[normal], rtol=relative, atol=absolute)
    own = np.asarray(getattr(lax, name)(*arrays), np.float64)

    def worst(y: np.ndarray) -> float:
        return float(np.max((np.abs(y - right) / (absolute + relative * np.abs(right)))[normal]))

    assert worst(found) <= max(1.0, worst(own))
    compiled(plan)


@pytest.mark.parametrize("name", ENDS)
def test_ends(name: str) -> None:
    arrays = tuple(np.array(a, np.float32) for a in zip(*ENDS[name], strict=True))
    right = np.asarray(getattr(lax, name)(*arrays))
    np.testing.assert_allclose(simulate(plan_of(name, arrays), arrays)[0], right, rtol=4e-6, atol=CASES[name][3])


NEWER = {  # as JAX 0.11 has it; 0.10 gives NaN, or 1
    "digamma": ([(0.0,), (-0.0,)], [-INF, -INF]),
    "igamma": ([(INF, 0), (INF, 1), (INF, INF)], [0, 0, NAN]),
    "igammac": ([(INF, 0), (INF, 1), (INF, INF)], [1, 1, NAN]),
}


@pytest.mark.parametrize("name", NEWER)
def test_ends_that_jax_has_changed(name: str) -> None:
    points, right = NEWER[name]
    arrays = tuple(np.array(a, np.float32) for a in zip(*points, strict=True))
    np.testing.assert_array_equal(simulate(plan_of(name, arrays), arrays)[0], right)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_rounded_once(dtype: str) -> None:
    x = np.linspace(0.5, 9, 128).astype(dtype_of(dtype))
    for name in ("bessel_i0e", "digamma"):
        wide = np.asarray(getattr(lax, name)(x.astype(np.float32)))
        (found,) = simulate(plan_of(name, (x,)), [x])
        unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        np.testing.assert_allclose(found.astype(np.float32), wide, rtol=1.01 * unit, atol=1e-6)


def test_as_scalars_and_through_derivatives(compiled: Any) -> None:
    """Of a number, and where JAX's own rules need them: the derivative of lgamma is digamma."""

    def body(x: Any, o: Any) -> None:
        v = x[...]
        o[...] = jax.grad(lambda v: jnp.sum(lax.lgamma(v) + jnp.i0(v)))(v) + lax.igamma(x[3], jnp.float32(2))

    x = np.linspace(0.5, 5, 128).astype(np.float32)
    t = jax.ShapeDtypeStruct(x.shape, x.dtype)
    plan = build_plan(plgpu.kernel(body, t).program(t), "sm_90a")
    wide = x.astype(np.float64)
    right = special.digamma(wide) + special.i1(wide) + special.gammainc(wide[3], 2)
    np.testing.assert_allclose(simulate(plan, [x])[0], right, rtol=4e-6, atol=2e-6)
    compiled(plan)


def test_float64_is_refused() -> None:
    def body(x: Any, o: Any) -> None:
        o[...] = lax.digamma(x[...])

    with jax.enable_x64(True):
        t = jax.ShapeDtypeStruct((128,), np.float64)
        with pytest.raises(UnsupportedCall, match=r"digamma of float64: .*x.astype\(jnp.float32\)") as e:
            plgpu.kernel(body, t).program(t)
    assert e.value.line is not None and e.value.line.file == __file__
