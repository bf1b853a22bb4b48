"""tcgen05.cp of matrices: every word of every instruction, as CuTe DSL compiles it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.ops.tcgen05_copies import TmemCopy


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8"])
def test_as_compiled(cute, cute_blackwell, ptx, plan_step, dtype, swizzle, pair):
    columns, size = 256, jnp.dtype(dtype).itemsize
    compiled = cute_blackwell.matrix_copy(dtype, columns, swizzle, pair)
    uses = ptx.Evaluator(1024).run(compiled.ptx, "tcgen05.cp")
    tiles = (plgpu.TilingTransform((128, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    axis = dict(collective_axis="pair") if pair else {}

    def body(o, source, target):
        plgpu.async_copy_smem_to_tmem(source, target, **axis)

    kernel = plgpu.kernel(
        body,
        plgpu.GMEM((8,), jnp.float32),
        scratch_types=[
            plgpu.SMEM((128, columns), dtype, transforms=tiles),
            plgpu.TMEM((128, columns), dtype, packed=size < 4, collective=pair),
        ],
        **(dict(cluster=(2,), cluster_names=("pair",)) if pair else {}),
    )
    plan = plan_step(kernel, TmemCopy)
    assert {use.name for use in uses} == {f"tcgen05.cp.cta_group::{1 + pair}.{plan.form}"}
    assert [use.operands for use in uses] == [
        (cute.TMEM_COLUMN + cell, plan.descriptor(1024 + offset).encode()) for offset, cell in plan.steps
    ]
