"""16-bit arrays, two elements to a register: what is moved by renaming starts in either half and may end in a lone one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.plan.build import build_plan
from tests.support import dtype_of

Function = Callable[[Any], Any]
# shape, layout: elements of a thread lie along the last dimension, or along the first, where no instruction says so
SHAPES = {
    "three of a thread": ((8, 4, 3), None),
    "five of a thread": ((4, 8, 5), None),
    "planes": ((3, 8, 16), None),
    "strided": ((4, 8, 8), Layout.WG_STRIDED),
    "accumulator": ((64, 24), Layout.WGMMA),
    "rows": ((128, 7), Layout.TCGEN05_TMEM_NATIVE),
}


def parts(axis: int, n: int) -> dict[str, Function]:
    """Every part of one element, of two and of three, each from an even and from an odd start."""
    slices = [(k, k + m) for m in (1, 2, 3) for k in range(n - m + 1)][:12]
    return {
        **{f"{a}:{b}": lambda x, a=a, b=b: lax.slice_in_dim(x, a, b, axis=axis) for a, b in slices},
        **{f"index {k}": lambda x, k=k: lax.index_in_dim(x, k, axis, keepdims=False) for k in range(min(n, 3))},
        "backwards": lambda x: lax.rev(x, (axis,)),
        "every other": lambda x: lax.slice_in_dim(x, 1, None, 2, axis=axis),
        "last first": lambda x: jnp.concatenate([lax.slice_in_dim(x, n - 1, n, axis=axis), x], axis=axis),
    }


def plan_of(functions: dict[str, Function], x: np.ndarray, layout: Layout | None) -> Any:
    aval = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def body(a: Any, *refs: Any) -> None:
        for f, o in zip(functions.values(), refs, strict=True):
            o[...] = f(plgpu.load(a, layout=layout))

    outs = [jax.eval_shape(f, aval) for f in functions.values()]
    return build_plan(plgpu.kernel(body, outs).program(aval), "sm_90a")


def numbers(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Finite numbers of different bits, so that no element passes for another."""
    bits = np.random.default_rng(0).permutation(0x7B00)[: math.prod(shape)].astype(np.uint16)
    return bits.view(dtype_of(dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("where", SHAPES)
def test_parts(where: str, dtype: str, agree: Any) -> None:
    shape, layout = SHAPES[where]
    axis = 0 if where == "planes" else len(shape) - 1
    functions = parts(axis, shape[axis])
    x = numbers(dtype, shape)
    for (name, f), found in zip(functions.items(), agree(plan_of(functions, x, layout), [x]), strict=True):
        np.testing.assert_array_equal(found.view(np.uint16), np.asarray(f(x)).view(np.uint16), err_msg=name)
