"""Functions of `jnp` and `lax` that JAX makes of several operations: in a kernel as outside of one, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

RNG = np.random.default_rng(11)
NUMBERS = (RNG.standard_normal(128) * 2).astype(np.float32)
SORTED = np.sort(RNG.standard_normal(50)).astype(np.float32)
TIES = RNG.integers(-3, 4, 128).astype(np.float32)
SPECIAL = np.tile(np.array([0.0, -0.0, np.nan, 1.0, np.inf, -np.inf, -np.nan, -1.0], np.float32), 4)
WITH_NAN = np.concatenate([SORTED, [np.inf, np.nan, np.nan]]).astype(np.float32)
WHOLE = np.sort(RNG.integers(-20, 20, 40)).astype(np.int32)
MATRIX = RNG.standard_normal((8, 12)).astype(np.float32)
Case = tuple[Callable[..., Any], tuple[np.ndarray, ...]]


def searched(**how: Any) -> Callable[[Any, Any], Any]:
    return lambda a, x: jnp.searchsorted(a, x, **how)


def doubled_until(v: Any) -> Any:
    """Another number of steps for each element."""
    return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + v, c[1] * 2), (jnp.float32(0), v))[1]


def summed_until(v: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < v[0], lambda c: (c[0] + 1, c[1] + v), (jnp.int32(0), v))


CASES: dict[str, Case] = {
    "searchsorted": (searched(), (SORTED, NUMBERS)),
    "searchsorted_right": (searched(side="right"), (np.round(SORTED), TIES)),
    "searchsorted_unrolled": (searched(method="scan_unrolled"), (SORTED, NUMBERS)),
    "searchsorted_sort": (searched(method="sort"), (SORTED, NUMBERS)),
    "searchsorted_compare_all": (searched(method="compare_all"), (SORTED, NUMBERS)),
    "searchsorted_nan": (searched(), (WITH_NAN, SPECIAL)),
    "searchsorted_nan_right": (searched(side="right"), (WITH_NAN, SPECIAL)),
    "searchsorted_integers": (searched(side="right"), (WHOLE, TIES.astype(np.int32))),
    "searchsorted_bfloat16": (searched(), (SORTED.astype(ml_dtypes.bfloat16), NUMBERS.astype(ml_dtypes.bfloat16))),
    "digitize": (lambda x, edges: jnp.digitize(x, edges), (NUMBERS, SORTED)),
    "histogram": (lambda x: jnp.histogram(x, bins=16)[0], (NUMBERS,)),
    "histogram_of_edges": (lambda x, edges: jnp.histogram(x, edges)[0], (NUMBERS, SORTED)),
    "histogram_weighted": (lambda x, w: jnp.histogram(x, bins=8, weights=w)[0], (NUMBERS, TIES)),
    "diag": (jnp.diag, (NUMBERS[:16],)),
    "diag_above": (lambda x: jnp.diag(x, 2), (NUMBERS[:16],)),
    "diag_of": (jnp.diag, (MATRIX,)),
    "diag_below": (lambda x: jnp.diag(x, -3), (MATRIX,)),
    "diagonal": (lambda x: jnp.diagonal(x, 1), (MATRIX,)),
    "top_k": (lambda x: lax.top_k(x, 9)[0], (NUMBERS,)),
    "top_k_ties": (lambda x: lax.top_k(x, 50)[1], (TIES,)),
    "top_k_special": (lambda x: lax.top_k(x, 32)[1], (SPECIAL,)),
    "top_k_of_rows": (lambda x: jnp.concatenate(lax.top_k(x.astype(jnp.int32), 4)), (MATRIX * 9,)),
    "top_k_of_columns": (lambda x: lax.top_k(x, 3, axis=0)[1], (MATRIX,)),
    "top_k_small_odd": (lambda x: jnp.concatenate(lax.top_k(x[:5, :7].astype(jnp.int32), 3)), (MATRIX * 9,)),
    "top_k_of_long_rows": (lambda x: lax.top_k(x.reshape(4, 32), 2)[1], (NUMBERS,)),
    "associative_scan_of_odd_length": (  # whose even half ends in nothing
        lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x), axis=0)[1],
        (np.round(MATRIX[:5] * 2),),
    ),
    "sign_of_zeros": (lambda x: jnp.signbit(jnp.sign(x)), (SPECIAL,)),
    "top_k_all": (lambda x: lax.top_k(x, 12)[0], (MATRIX,)),
    "while_under_vmap": (lambda x: jax.vmap(doubled_until)(jnp.abs(x) + 1), (NUMBERS,)),
    "while_under_two_vmaps": (lambda x: jax.vmap(jax.vmap(doubled_until))(jnp.abs(x) + 1), (MATRIX,)),
    "while_of_rows_under_vmap": (lambda x: jax.vmap(summed_until)(x)[1], (WHOLE.reshape(8, 5),)),
    "fori_of_traced_counts_under_vmap": (
        lambda n, x: jax.vmap(lambda n, v: lax.fori_loop(0, n, lambda i, c: c * 2, v))(n, x),
        (WHOLE % 5, NUMBERS[:40]),
    ),
    "platform_dependent": (
        lambda x: lax.platform_dependent(x, cpu=jnp.floor, cuda=jnp.ceil) + 0 * x,
        (MATRIX,),
    ),
    "platform_default": (lambda x: lax.platform_dependent(x, tpu=jnp.floor, default=jnp.ceil), (MATRIX,)),
}


def expected(name: str) -> np.ndarray:
    """What JAX makes of it on a CPU; of a function that differs by platform, what it makes of it on a GPU."""
    f, arrays = CASES[name]
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(jnp.ceil(MATRIX) if name == "platform_dependent" else f(*map(jnp.asarray, arrays)))


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_against_jax(name: str, arch: str, compiled: Any) -> None:
    f, arrays = CASES[name]
    right = expected(name)

    def body(*refs: Any) -> None:
        refs[-1][...] = f(*(r[...] for r in refs[:-1]))

    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct(right.shape, right.dtype), name=name)
    plan = build_plan(kernel.program(*types), arch)
    np.testing.assert_array_equal(simulate(plan, arrays)[0], right)
    assert compiled(plan).complaints() == []
