"""Primitives that are written with others: as in JAX, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import MosaicGpuError, UnsupportedCall, UnsupportedPrimitive
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

RNG = np.random.default_rng(5)
X = RNG.standard_normal((8, 16)).astype(np.float32)
IMAGE = RNG.standard_normal((2, 4, 7, 9)).astype(np.float32)
FILTERS = RNG.standard_normal((6, 4, 3, 2)).astype(np.float32)
LARGE = RNG.integers(-120, 120, (8, 16))  # whose products no 8 bits hold
WHOLE = RNG.integers(-9, 9, (8, 16)).astype(np.int32)
Case = tuple[Callable[..., Any], tuple[np.ndarray, ...]]


def window(init: Any, combine: Any, *args: Any, **more: Any) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(x, np.asarray(init, x.dtype), combine, *args, **more)


def convolved(*args: Any, **more: Any) -> Callable[[Any, Any], Any]:
    return lambda x, w: lax.conv_general_dilated(x, w, *args, precision=lax.Precision.HIGHEST, **more)


def first_of_largest(a: Any, b: Any) -> Any:
    """Of pairs (value, index)."""
    take = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(take, a[0], b[0]), jnp.where(take, a[1], b[1])


CASES: dict[str, Case] = {
    "apply": (lambda x: x.at[2].apply(jnp.sin), (X,)),
    "apply_to_a_slice": (lambda x: x.at[2:5, 1::2].apply(lambda z: z * 3), (X,)),
    "apply_twice": (lambda x: x.at[jnp.array([1, 3, 1, 1])].apply(lambda z: z * 2 + 1), (X,)),
    "apply_unique": (lambda x: x.at[jnp.array([1, 3])].apply(jnp.exp, unique_indices=True), (X,)),
    "apply_outside": (lambda x: x.at[jnp.array([1, 30, -1])].apply(jnp.negative, mode="drop"), (X,)),
    "apply_to_integers": (lambda x, i: x.at[i[0] % 8].apply(lambda z: z // 2), (WHOLE, WHOLE)),
    "max_pool": (window(-np.inf, lax.max, (2, 3), (2, 1), "SAME"), (X,)),
    "min_pool": (window(np.inf, lax.min, (3, 1), (1, 1), "VALID"), (X,)),
    "sum_pool": (window(0, lax.add, (2, 2), (2, 2), "VALID"), (X,)),
    "sum_pool_of_halves": (window(0, lax.add, (3, 3), (1, 1), "SAME"), (X.astype(jnp.bfloat16),)),
    "max_pool_of_integers": (window(np.iinfo(np.int32).min, lax.max, (2, 2), (1, 2), "SAME"), (WHOLE,)),
    "dilated_windows": (
        window(0, lax.add, (3, 2), (1, 2), ((2, 1), (0, 3)), base_dilation=(2, 1), window_dilation=(1, 3)),
        (X,),
    ),
    "windows_from_a_traced_start": (
        lambda x: lax.reduce_window(x, x[0, 0] * 0, lax.add, (1, 3), (1, 2), "SAME"),
        (X,),
    ),
    "windows_by_any_function": (
        lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b, (2, 2), (1, 1), "VALID"),
        (X,),
    ),
    "convolve": (lambda a, b: jnp.convolve(a, b, precision="highest"), (X[0], X[1, :5])),
    "convolve_same": (lambda a, b: jnp.convolve(a, b, mode="same", precision="highest"), (X[0], X[1, :4])),
    "correlate": (lambda a, b: jnp.correlate(a, b, precision="highest"), (X[0], X[1, :5])),
    "polymul": (jnp.polymul, (X[0, :5], X[1, :3])),
    "convolve_integers": (jnp.convolve, (WHOLE[0], WHOLE[1, :3])),
    "convolution": (convolved((1, 1), "SAME"), (IMAGE, FILTERS)),
    "strided": (convolved((2, 3), "VALID"), (IMAGE, FILTERS)),
    "dilated": (convolved((1, 2), ((2, 1), (0, 3)), lhs_dilation=(1, 2), rhs_dilation=(2, 1)), (IMAGE, FILTERS)),
    "grouped": (convolved((1, 1), "SAME", feature_group_count=2), (IMAGE, FILTERS[:, :2])),
    "depthwise": (
        convolved((1, 1), "SAME", feature_group_count=4),
        (IMAGE, FILTERS[:4, :1].repeat(2, 0)),
    ),
    "channels_last": (
        convolved((1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (IMAGE.transpose(0, 2, 3, 1), FILTERS.transpose(2, 3, 1, 0)),
    ),
    **{
        f"{a}_into_{b}": (
            convolved((1,), "SAME", preferred_element_type=jnp.dtype(b)),
            (LARGE[None, :4].astype(a), LARGE[:8, :12].reshape(8, 4, 3).astype(a)),
        )
        for a, b in (
            ("int8", "int32"),
            ("uint8", "int32"),
            ("int16", "int32"),
            ("int8", "int8"),
            ("bfloat16", "float32"),
        )
    },
    "one_channel_of_int8": (
        convolved((1,), "SAME", preferred_element_type=jnp.dtype("int32")),
        (LARGE[None, :1].astype(np.int8), LARGE[:1, :3].reshape(1, 1, 3).astype(np.int8)),
    ),
    "sum_over_a_mapped_axis": (lambda x: jax.vmap(lambda a: a / lax.psum(a, "i"), axis_name="i")(x), (abs(X) + 1,)),
    "largest_over_a_mapped_axis": (
        lambda x: jax.vmap(lambda a: a - lax.pmax(a, "i") + lax.pmin(a, "i"), axis_name="i")(x),
        (X,),
    ),
    "small_integers_over_a_mapped_axis": (
        lambda x: jax.vmap(lambda a: a + lax.psum(a, "i"), axis_name="i")(x),
        (LARGE.astype(np.int8),),
    ),
    "reduce": (lambda x: lax.reduce(x, 0.0, lambda a, b: a + b - a * b, (1,)), (X / 4,)),
    "reduce_odd": (lambda x: lax.reduce(x[:7, :13], 1.0, lambda a, b: a * b, (0, 1))[None], (X,)),
    "reduce_pairs": (
        lambda x: lax.reduce((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), (-jnp.inf, 99), first_of_largest, (1,)),
        (X,),
    ),
    "reduce_nothing": (lambda x: lax.reduce(x[:, :0], 3.0, lambda a, b: a + b - a * b, (1,)), (X,)),
    "approx_max_k": (lambda x: lax.approx_max_k(x, 4), (X,)),
    "approx_min_k": (lambda x: lax.approx_min_k(x, 3, reduction_dimension=0), (X,)),
}


@pytest.mark.parametrize("name", CASES)
def test_against_jax(name: str, compiled: Any) -> None:
    f, arrays = CASES[name]
    right = jax.tree.leaves(f(*map(jnp.asarray, arrays)))
    if name == "sum_pool_of_halves":  # XLA rounds each of its sums on a CPU; here there is one rounding
        right = [f(jnp.asarray(arrays[0], jnp.float32)).astype(jnp.bfloat16)]

    def body(*refs: Any) -> None:
        for o, y in zip(refs[len(arrays) :], jax.tree.leaves(f(*(r[...] for r in refs[: len(arrays)]))), strict=True):
            o[...] = y

    outs = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in right]
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    plan = build_plan(plgpu.kernel(body, outs).program(*types), "sm_90a")
    for found, y in zip(simulate(plan, arrays), right, strict=True):
        rounding = 2**-8 if y.dtype == jnp.bfloat16 else 2e-6
        x, y = (np.asarray(a).astype(np.float64) for a in (found, y))
        np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding)
    compiled(plan)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a long window": (window(0.0, lax.add, (1, 65), (1, 1), "SAME"), "at most 64 elements along an axis"),
    "a large filter": (
        lambda x: lax.conv(x[None, None], jnp.zeros((1, 1, 7, 10)), (1, 1), "SAME"),
        "at most 64 places",
    ),
    "groups of a batch": (
        lambda x: lax.conv_general_dilated(x[:, None, :], x[:2, None, :3], (1,), "SAME", batch_group_count=2),
        "convolve each group by itself",
    ),
    "windows of pairs": (
        lambda x: lax.reduce_window(
            (x, x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (2, 2), (1, 1), "SAME"
        )[0],
        "of each by itself",
    ),
    "parts of the largest": (lambda x: lax.approx_max_k(x, 4, aggregate_to_topk=False)[0], "leave it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    f, words = REFUSED[name]

    def body(x: Any, o: Any) -> None:
        o[...] = jnp.sum(f(x[...])) + jnp.zeros(o.shape)

    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with pytest.raises(UnsupportedCall, match=words) as e:
        plgpu.kernel(body, x).program(x)
    assert e.value.line is not None and e.value.line.file == __file__


@pytest.mark.parametrize(
    ("axis", "kind", "words"),
    [("g", UnsupportedPrimitive, "under jax.shard_map"), ("device", UnsupportedCall, "unbound")],
)
def test_collectives_over_other_axes_are_refused(axis: str, kind: type[MosaicGpuError], words: str) -> None:
    """Of the grid, and of none."""

    def body(x: Any, o: Any) -> None:
        o[...] = lax.psum(x[...], axis)

    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with pytest.raises(kind, match=words) as e:
        build_plan(plgpu.kernel(body, x, grid=(2,), grid_names=("g",)).program(x), "sm_90a")
    assert e.value.line is not None and e.value.line.file == __file__


@pytest.mark.parametrize(
    "index",
    [lambda x: x[:, 0] > 0, lambda x: np.array([True, False] * 4), lambda x: x[:, 0]],
    ids=["mask", "NumPy", "floats"],
)
def test_masks_are_no_indices_of_refs(index: Callable[[Any], Any]) -> None:
    """They were taken as 0 and 1."""

    def body(x: Any, o: Any) -> None:
        o[...] = x[index(x[...])]

    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with pytest.raises(UnsupportedCall, match="an index is a whole number") as e:
        plgpu.kernel(body, x).program(x)
    assert e.value.line is not None and e.value.line.file == __file__


def test_numpys_own_errors_have_the_users_line():
    """JAX asks NumPy about a type of 4 bits, which it does not know."""

    def body(x: Any, o: Any) -> None:
        o[...] = jnp.sum(lax.bitcast_convert_type(x[...], jnp.int4), 2).astype(jnp.int32)

    with pytest.raises(ValueError, match="integer data type") as e:
        plgpu.kernel(body, jax.ShapeDtypeStruct((8, 32), jnp.int32)).program(jax.ShapeDtypeStruct((8, 32), jnp.int8))
    assert e.value.line.file == __file__
