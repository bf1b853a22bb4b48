"""Arrays of no elements: in a kernel as outside of one, compiled; what JAX refuses itself, it refuses in a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

ROWS, NONE, SOME = (4, 0), (0,), (4, 8)
CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "sum": (jnp.sum, ROWS),
    "sum_to_rows": (lambda x: jnp.sum(x, 1), ROWS),
    "sum_to_nothing": (lambda x: jnp.sum(x, 0), ROWS),
    "sum_of_1d": (jnp.sum, NONE),
    "sum_keepdims": (lambda x: jnp.sum(x, 1, keepdims=True), ROWS),
    "sum_of_a_product": (lambda x: jnp.sum(x * x, 1), ROWS),
    "sum_of_a_slice": (lambda x: jnp.sum(x[:, :0], 1), SOME),
    "sum_of_a_gather": (lambda x: x[jnp.zeros((0,), jnp.int32)].sum(0), SOME),
    "prod": (lambda x: jnp.prod(x, 1), ROWS),
    "mean": (lambda x: jnp.mean(x, 1), ROWS),
    "max_to_nothing": (lambda x: jnp.max(x, 0), ROWS),
    "max_initial": (lambda x: jnp.max(x, 1, initial=3), ROWS),
    "argmax_to_nothing": (lambda x: jnp.argmax(x, 0), ROWS),
    "any": (lambda x: jnp.any(x > 0), ROWS),
    "all": (lambda x: jnp.all(x > 0, 1), ROWS),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, 1), ROWS),
    "softmax": (lambda x: jax.nn.softmax(x, 1), ROWS),
    "cumsum": (lambda x: jnp.cumsum(x, 1), ROWS),
    "sort": (lambda x: jnp.sort(x, 1), ROWS),
    "pad": (lambda x: jnp.pad(x, ((0, 1), (1, 2)), constant_values=5), ROWS),
    "concatenate": (lambda x: jnp.concatenate([x[:, :0], x, x[:, 4:4]], 1), SOME),
    "scatter_of_nothing": (lambda x: x.at[jnp.zeros((0,), jnp.int32)].add(jnp.zeros((0, 8))), SOME),
    "product": (lambda x: x @ x.T, ROWS),
    "product_exact": (lambda x: jnp.einsum("ij,ik->jk", x.T.astype(jnp.int32), x.T.astype(jnp.int32)), ROWS),
    "scan": (lambda x: lax.scan(lambda c, y: (c + y, c * y), x[0, 0], x[0, :0]), SOME),
    "random": (lambda x: x + jax.random.normal(jax.random.key(0), (0, 3)).sum(), SOME),
}


def plan_of(f: Callable[[Any], Any], x: np.ndarray) -> tuple[Any, list[Any]]:
    right = jax.tree.leaves(jax.jit(f)(x))

    def body(x: Any, *outs: Any) -> None:
        for o, y in zip(outs, jax.tree.leaves(f(x[...])), strict=True):
            o[...] = y

    outs = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in right]
    return build_plan(plgpu.kernel(body, outs).program(jax.ShapeDtypeStruct(x.shape, x.dtype)), "sm_90a"), right


@pytest.mark.parametrize("name", CASES)
def test_as_in_jax(name: str, compiled: Any) -> None:
    f, shape = CASES[name]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    plan, right = plan_of(f, x)
    for found, y in zip(simulate(plan, [x]), right, strict=True):
        np.testing.assert_allclose(found, y, rtol=1e-6)
    assert compiled(plan).complaints() == []


OF_FLOATS = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
OF_BITS = ("reduce_and", "reduce_or", "reduce_xor")
TYPES = ("float32", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "bool")


@pytest.mark.parametrize("dtype", TYPES)
def test_identities(dtype: str, compiled: Any) -> None:
    """Of each reduction, as an array and as a scalar."""
    names = [n for n in OF_FLOATS + OF_BITS if not (n in OF_BITS and "float" in dtype)]
    names = [n for n in names if not (dtype == "bool" and n in ("reduce_sum", "reduce_prod"))]
    x = np.zeros((4, 0), jnp.dtype(dtype))
    plan, right = plan_of(lambda x: [getattr(lax, n)(x, axes) for n in names for axes in ((1,), (0, 1))], x)
    for found, y in zip(simulate(plan, [x]), right, strict=True):
        np.testing.assert_array_equal(found, np.asarray(y))
    assert "__shfl" not in body_of(emit(plan))
    compiled(plan)


@pytest.mark.parametrize("f", [lambda x: jnp.max(x, 1), lambda x: jnp.argmin(x, 1)])
def test_refused_by_jax_itself(f: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="zero-size|empty"):
        plgpu.kernel(lambda x, o: o.__setitem__(..., f(x[...])), jax.ShapeDtypeStruct((4,), np.float32)).program(
            jax.ShapeDtypeStruct((4, 0), np.float32)
        )
