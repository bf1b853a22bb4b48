"""wgmma_wait(after=): the wait comes behind what was meant to run under the product, in the machine code too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.plan.build import build_plan

F32 = jnp.float32
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
OUT = jax.ShapeDtypeStruct((64, 64), F32)


def kernel(tied: bool, after: Any = None, first: bool = False) -> Any:
    """o = t^T t + exp2 of x, the exponentials (and their sums) under the product."""

    def body(x: Any, o: Any, tile: Any) -> None:
        tile[...] = jnp.ones((64, 64), jnp.bfloat16) + plgpu.layout_cast(
            jnp.zeros((64, 64), jnp.bfloat16), plgpu.Layout.WGMMA
        )
        plgpu.commit_smem()

        def scope(acc: Any) -> None:
            values = plgpu.load(x, layout=plgpu.Layout.WGMMA)
            plgpu.wgmma(acc, tile, tile)
            powers = jnp.exp2(values)
            sums = jnp.sum(powers, axis=1)
            plgpu.wgmma_wait(0, after=after if after is not None else sums if tied else None, first=first)
            o[...] = acc[...] + powers * (1 / sums)[:, None]

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    scratch = [plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILE)]
    params = plgpu.CompilerParams(approx_math=True)
    return plgpu.kernel(body, OUT, scratch_types=scratch, num_threads=1, thread_name="wg", compiler_params=params)


def test_it_changes_no_result() -> None:
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    expected = 64 + np.exp2(x) / np.exp2(x).sum(1, keepdims=True)
    for tied, first in ((False, False), (True, False), (True, True)):
        np.testing.assert_allclose(np.asarray(kernel(tied, first=first)(x)), expected, rtol=1e-5)


def exponentials_before_the_wait(tied: bool, first: bool = False) -> int:
    plan = build_plan(kernel(tied, first=first).program(OUT), "sm_90a")
    (function,) = sass.read_cubin(compile_plan(plan).compiled.cubin)
    names = [i.mnemonic for i in function.instructions]
    waits = [k for k, i in enumerate(function.instructions) if i.opcode.startswith("WARPGROUP.DEPBAR")]
    return sum(name == "MUFU" for name in names[: waits[-1]])


def test_the_values_are_computed_before_the_wait() -> None:
    """None of a thread's 32 exponentials is left for after the wait; without `after` ptxas leaves some."""
    assert exponentials_before_the_wait(False) < 32 <= exponentials_before_the_wait(True)


def test_of_the_first_row_only() -> None:
    """first=True: the 16 exponentials of a thread's first row come before the wait, some of the other row's after it."""
    assert 16 <= exponentials_before_the_wait(True, first=True) < 32


def test_the_first_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="Give after=, too"):
        kernel(False, first=True).program(OUT)


@pytest.mark.parametrize("after", [jnp.int32(3), "x"])
def test_what_is_no_float32_array_is_refused(after: Any) -> None:
    with pytest.raises(TypeError, match=r"wgmma_wait.*after"):
        kernel(True, after).program(OUT)
