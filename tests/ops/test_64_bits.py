"""The 64-bit types, in which JAX computes only when asked: every elementwise row and every operation on registers."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / folder) for folder in ("ops", "host_gpu")]
import test_register_ops as registers  # noqa: E402
from test_elementwise import FLOAT, INTEGER, UNSIGNED  # noqa: E402

TABLES = {"float64": FLOAT, "int64": INTEGER, "uint64": UNSIGNED}
WITHOUT = ("reduce_precision", "exp2")  # reduced precision of f64 is refused; XLA's exp2 of f64 goes through float32


def x64() -> Any:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TABLES)
def test_elementwise(dtype, compiled):
    with x64():
        functions = {n: f for n, f in TABLES[dtype].items() if n not in WITHOUT}
        rng = np.random.default_rng(7)
        whole = rng.integers(0 if dtype == "uint64" else -40, 40, (2, 64, 8))
        x, y = (rng.standard_normal((2, 64, 8)) * 3 if dtype == "float64" else whole).astype(dtype)
        aval = jax.ShapeDtypeStruct((64, 8), dtype)
        outs = [jax.eval_shape(f, aval, aval) for f in functions.values()]

        def body(a: Any, b: Any, *refs: Any) -> None:
            for f, o in zip(functions.values(), refs, strict=True):
                o[...] = f(a[...], b[...])

        plan = build_plan(plgpu.kernel(body, outs).program(aval, aval), "sm_90a")
        for (name, f), found in zip(functions.items(), simulate(plan, [x, y]), strict=True):
            expected = np.asarray(f(jnp.asarray(x), jnp.asarray(y)))
            assert found.dtype == expected.dtype, name
            if found.dtype.kind == "f":
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=name)
            else:
                np.testing.assert_array_equal(found, expected, err_msg=name)
        assert compiled(plan).mnemonics  # one kernel of so many 64-bit results at once may spill


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TABLES)
def test_registers(dtype, compiled):
    with x64():
        functions = registers.MOVES | registers.ALONG | registers.ADDING
        functions |= registers.BITS if dtype != "float64" else {}
        x = registers.numbers(dtype, 24, 12)
        plan = registers.plan_of(functions, x, None)
        registers.right(functions, x, simulate(plan, [x]))
        assert compiled(plan).mnemonics  # one kernel of so many 64-bit results at once may spill
