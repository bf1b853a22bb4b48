"""Captured arrays: the table in the code has the same elements in the simulator and in the C++, for every type."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.ops.constants import constant
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.support import dtype_of


@pytest.mark.parametrize("dtype", constant.dtypes)
def test_every_type(dtype: str, on_host: Any, compiled: Any) -> None:
    """In a layout of its own, in one that is asked for, as a scalar of a thread, and behind an index."""
    with jax.enable_x64(dtype.endswith("64")):
        rng = np.random.default_rng(0)
        table = (rng.standard_normal((64, 9)) * 6).astype(np.float32)
        if dtype.startswith("float"):
            table[0, :6] = np.inf, -np.inf, np.nan, -0.0, 2.0**-14, 1e4
        with np.errstate(all="ignore"):
            table = (np.abs(table) if dtype[0] == "u" else table).astype(dtype_of(dtype))
        wide = {"float4_e2m1fn": jnp.float32, "int4": jnp.int8, "uint4": jnp.uint8}.get(dtype, dtype_of(dtype))

        def body(index: Any, o: Any, pinned: Any, row: Any, one: Any) -> None:
            o[...] = jnp.asarray(table).astype(wide)
            plgpu.store(pinned, plgpu.layout_cast(jnp.asarray(table[:, :8]), Layout.WGMMA).astype(wide))
            row[...] = jnp.asarray(table)[index[0]].astype(wide)
            one[...] = lax.dynamic_slice(jnp.asarray(table[3]), (index[0],), (1,)).astype(wide)

        outs = [jax.ShapeDtypeStruct(s, wide) for s in ((64, 9), (64, 8), (9,), (1,))]
        index = np.array([5], np.int32)
        plan = build_plan(plgpu.kernel(body, outs).program(jax.ShapeDtypeStruct((1,), np.int32)), "sm_90a")
    right = [x.astype(wide) for x in (table, table[:, :8], table[5], table[3, 5:6])]
    for where, found in (("simulator", simulate(plan, [index])), ("C++", on_host(plan, [index]))):
        for x, y in zip(found, right, strict=True):
            a, b = (z if z.dtype.kind in "iub" else z.astype(np.float64) for z in (x, y))
            np.testing.assert_array_equal(a, b, err_msg=where)
            if a.dtype.kind == "f":
                number = ~np.isnan(a)
                np.testing.assert_array_equal(np.signbit(a)[number], np.signbit(b)[number], err_msg=where)
    compiled(plan)
