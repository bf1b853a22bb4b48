"""Bank conflicts that the plan knows: by hand, and the same as the simulator counts when it runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.plan.accesses import shared_accesses
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import Report, SimulatorParams, simulate

F = jax.ShapeDtypeStruct((128, 64), jnp.float32)


def plan_of(layout: Any, transforms: Any, dtype: Any = jnp.float32) -> Any:
    def body(x: Any, o: Any, tile: Any) -> None:
        tile[...] = plgpu.load(x, layout=layout)
        plgpu.commit_smem()

        def half(i: Any, _: Any) -> None:
            rows = plgpu.ds(i * 64, 64)
            o[rows] = plgpu.load(tile.at[rows], layout=plgpu.Layout.WGMMA)

        lax.fori_loop(0, 2, half, None)

    t = jax.ShapeDtypeStruct((128, 64), dtype)
    return build_plan(
        plgpu.kernel(body, t, scratch_types=[plgpu.SMEM((128, 64), dtype, transforms=transforms)]).program(t), "sm_90a"
    )


def test_by_hand():
    """A row a thread: 32 lanes 256 bytes apart meet in the same banks, 8 at a time for 16 bytes each.  Fragments of 8
    bytes in 8 rows of 256: 16 lanes at once are 4 rows in the same banks."""
    store, load = shared_accesses(plan_of(plgpu.Layout.TCGEN05_TMEM_NATIVE, ()))
    assert (store.op, store.buffer, store.instructions) == ("store", "tile", 4 * 64 // 4)
    assert (store.ideal, store.wavefronts) == (64 * 4, 64 * 4 * 8)
    assert store.factor == 8
    assert (load.op, load.instructions, load.ideal, load.wavefronts) == ("load", 4 * 16, 4 * 16 * 2, 4 * 16 * 2 * 4)
    assert load.line is not None and load.line.file == __file__


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("layout", [plgpu.Layout.TCGEN05_TMEM_NATIVE, plgpu.Layout.WGMMA, plgpu.Layout.WG_STRIDED])
@pytest.mark.parametrize("swizzled", [False, True])
def test_the_simulator_counts_the_same(dtype, layout, swizzled):
    size = jnp.dtype(dtype).itemsize
    span = min(128, 64 * size)
    tile = (plgpu.TilingTransform((8, span // size)), plgpu.SwizzleTransform(span)) if swizzled else ()
    plan = plan_of(layout, tile, dtype)
    report = Report()
    x = np.arange(128 * 64).reshape(128, 64).astype(dtype)
    simulate(plan, [x], SimulatorParams(report=report))
    counted = {t.op: (t.instructions, t.actual, t.ideal) for t in report.traffic.values() if t.memory == "smem"}
    planned = {a.op: (a.instructions, a.wavefronts, a.ideal) for a in shared_accesses(plan)}
    planned["load"] = tuple(2 * n for n in planned["load"])  # the loop runs twice
    assert counted == planned


def test_swizzles_are_what_avoids_them():
    tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    plain, swizzled = (shared_accesses(plan_of(plgpu.Layout.WGMMA, t, jnp.bfloat16)) for t in ((), tile))
    assert [a.factor for a in plain] == [8, 8] and [a.factor for a in swizzled] == [1, 1]
