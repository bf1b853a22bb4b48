"""Additions to one run of memory go without a tensor map where they lie in the array, with one where they stick out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

ROW, HEADS = 128, 3


def row_kernel(length: int, dtype: Any, add: bool) -> Any:
    """Block (i, j) takes ROW elements of row i of x, doubled, to the output, or adds them there; the last ones stick out."""

    def body(x: Any, before: Any, out: Any, tile: Any, full: Any) -> None:
        del before
        i, some = lax.axis_index("i"), plgpu.ds(lax.axis_index("j") * ROW, ROW)
        plgpu.copy_gmem_to_smem(x.at[i, some], tile.at[0], full)
        plgpu.barrier_wait(full)
        tile[1] = plgpu.load(tile.at[0], layout=plgpu.Layout.WG_STRIDED) * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[1], out.at[i, some], reduction_op="add" if add else None)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((HEADS, length), dtype),
        grid=(HEADS, plgpu.cdiv(length, ROW)),
        grid_names=("i", "j"),
        scratch_types=[plgpu.SMEM((2, ROW), dtype), plgpu.Barrier()],
        input_output_aliases={1: 0},
        name="rows",
    )


CASES = [
    (length, dtype, add)
    for length in (256, 300)
    for dtype, add in ((jnp.float32, False), (jnp.float32, True), (jnp.int32, True))
]


def arguments(length: int, dtype: Any) -> list[np.ndarray]:
    """Numbers whose sums are exact."""
    random = np.random.default_rng(length)
    return [random.integers(-99, 99, (HEADS, length)).astype(dtype) for _ in range(2)]


def expected(x: np.ndarray, before: np.ndarray, add: bool) -> np.ndarray:
    return 2 * x + before if add else 2 * x


@pytest.mark.parametrize(("length", "dtype", "add"), CASES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_rows(length, dtype, add, arch, compiled):
    """Right in the simulator; additions are compiled with both instructions."""
    x, before = arguments(length, dtype)
    abstract = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, before)]
    plan = build_plan(row_kernel(length, dtype, add).program(*abstract), arch)
    (found,) = simulate(plan, [x, before])
    np.testing.assert_array_equal(found, expected(x, before, add))
    report = compiled(plan)
    assert report.complaints() == [] and report.mnemonics["UTMALDG"] == 1
    if add:
        kind = {"float32": "float", "int32": "int"}[np.dtype(dtype).name]
        assert f"DI void bulk_reduce_add({kind}*" in emit(plan)
        assert report.mnemonics["UBLKRED"] == report.mnemonics["UTMAREDG"] == 1
    else:
        assert report.mnemonics["UTMASTG"] == 1 and not {"UBLKRED", "UBLKCP"} & set(report.mnemonics)
