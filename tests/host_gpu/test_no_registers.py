"""Arrays of no elements in an instruction's layout, of which a thread has no registers: nothing is declared, nothing is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.plan.build import build_plan
from tests.support import dtype_of

Function = Callable[[Any], Any]
OF_COLUMNS: dict[str, Function] = {  # x has columns, x[:, :0] none
    "concatenate": lambda x: jnp.concatenate([x, x[:, :0], x], 1),
    "concatenate_first": lambda x: jnp.concatenate([x[:, :0], lax.rev(x, (1,))], 1),
    "pad": lambda x: lax.pad(x[:, :0], jnp.asarray(3, x.dtype), ((0, 0, 0), (1, 2, 0))),
    "sum": lambda x: jnp.sum(x[:, :0], 1) + x[:, 0],
    "sum_of_a_product": lambda x: jnp.sum(x[:, :0] * x[:, :0], 1, keepdims=True) + x,
    "max": lambda x: jnp.max(x[:, :0], 1, initial=3) + x[:, 0],
    "any": lambda x: jnp.any(x[:, :0] > 0, 1),
    "cumsum": lambda x: jnp.concatenate([lax.cumsum(x[:, :0], 1), x], 1),
    "sort": lambda x: jnp.concatenate([lax.sort(x[:, :0], dimension=1), x], 1),
    "argsort": lambda x: jnp.concatenate([jnp.argsort(x[:, :0], 1), jnp.argsort(x, 1)], 1),
    "transpose": lambda x: jnp.concatenate([x[:, :0].T, x.T]),
    "update": lambda x: lax.dynamic_update_slice(x, x[:, :0] + 1, (jnp.int32(0), jnp.int32(2))),
    "loop": lambda x: jnp.concatenate([*lax.fori_loop(0, 3, lambda i, c: (c[0] * 2, c[1] + 1), (x[:, :0], x))], 1),
    "swapped in a loop": lambda x: jnp.concatenate(
        [*lax.fori_loop(0, 3, lambda i, c: (c[1], c[0], c[2] + 1), (x[:, :0], x[:, :0] + 1, x))], 1
    ),
    "branch": lambda x: jnp.concatenate([lax.cond(x[0, 0] > 0, lambda: x[:, :0], lambda: x[:, :0] + 1), x], 1),
    "where": lambda x: jnp.concatenate([jnp.where(x[:, :0] > 0, x[:, :0], -x[:, :0]), x], 1),
    "convert": lambda x: jnp.concatenate([x[:, :0].astype(jnp.float32), x.astype(jnp.float32)], 1),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "int16", "float32"])
@pytest.mark.parametrize("layout", [Layout.WGMMA, Layout.TCGEN05_TMEM_NATIVE, None], ids=str)
def test_columns(layout: Any, dtype: str, agree: Any) -> None:
    x = np.random.default_rng(0).integers(-3, 4, (128, 8)).astype(dtype_of(dtype))
    outs = [jax.eval_shape(f, jax.ShapeDtypeStruct(x.shape, x.dtype)) for f in OF_COLUMNS.values()]

    def body(a: Any, *refs: Any) -> None:
        for f, o in zip(OF_COLUMNS.values(), refs, strict=True):
            o[...] = f(plgpu.load(a, layout=layout))

    plan = build_plan(plgpu.kernel(body, outs).program(jax.ShapeDtypeStruct(x.shape, x.dtype)), "sm_90a")
    for (name, f), found in zip(OF_COLUMNS.items(), agree(plan, [x]), strict=True):
        np.testing.assert_array_equal(found.astype(np.float32), np.asarray(f(x)).astype(np.float32), err_msg=name)
    assert "declare" not in compile_cuda(emit(plan), arch=plan.arch, name="/t.cu").log
