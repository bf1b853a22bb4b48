"""Tiles and swizzles of shared memory that nobody has given: which are chosen, when none, and that products are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu import SwizzleTransform, TilingTransform, ds
from mosaic_gpu.cli.targets import programs_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import IllegalInstruction
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.program import walk
from mosaic_gpu.simulator import simulate
from tests.support import out, randoms

BF16, F32 = jnp.bfloat16, jnp.float32


def by_wgmma(a: Any, b: Any) -> Any:
    def scope(acc: Any) -> Any:
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)
        return acc[...]

    return plgpu.run_scoped(scope, plgpu.ACC((64, b.shape[1])))


def by_columns(width: int) -> Callable[[Any, Any], Any]:
    """A K slice of so many elements after the other."""

    def product(a: Any, b: Any) -> Any:
        def scope(acc: Any) -> Any:
            for k in range(0, a.shape[1], width):
                plgpu.wgmma(acc, a.at[:, ds(k, width)], b.at[ds(k, width)])
                plgpu.wgmma_wait(0)
            return acc[...]

        return plgpu.run_scoped(scope, plgpu.ACC((64, b.shape[1])))

    return product


def dot(a: Any, b: Any) -> Any:
    return jnp.dot(a[...], b[...], preferred_element_type=F32)


def plan_of(
    product: Callable[[Any, Any], Any],
    left: tuple[int, ...] = (64, 64),
    right: tuple[int, ...] = (64, 64),
    dtype: Any = BF16,
    transforms: tuple[Any, ...] = (),
    arch: str = "sm_90a",
    result: tuple[int, ...] = (64, 64),
) -> Plan:
    """o = product(a in shared memory, b in shared memory)"""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        plgpu.copy_gmem_to_smem(a, a_tile, full)
        plgpu.copy_gmem_to_smem(b, b_tile, full)
        plgpu.barrier_wait(full)
        o[...] = product(a_tile, b_tile)

    scratch = [plgpu.SMEM(s, dtype, transforms=transforms) for s in (left, right)]
    kernel = plgpu.kernel(body, out(*result), scratch_types=[*scratch, plgpu.Barrier(num_arrivals=2)])
    return build_plan(kernel.program(out(*left, dtype=dtype), out(*right, dtype=dtype)), arch)


def chosen(plan: Plan) -> list[Any]:
    return [v.space.transforms for v in plan.program.scratch if v.space.kind == "smem"]


def operations(plan: Plan) -> set[str]:
    return {s.equation.op for r in plan.roles for s in _steps(r.body)}


def _steps(block: Any) -> Any:
    for s in block.steps:
        yield s
        for r in s.regions:
            yield from _steps(r)


def right(plan: Plan, *shapes: tuple[int, ...], dtype: Any = BF16, turned: bool = False) -> None:
    a, b = (randoms(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes))
    expected = a.astype(np.float64) @ (b.T if turned else b).astype(np.float64)
    (found,) = simulate(plan, [a, b])
    bound = 2**-9 if np.dtype(dtype).itemsize == 4 else 2**-18  # float32 operands are cut off to tf32
    assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected)


def test_an_operand_of_wgmma_is_tiled(compiled):
    """The same program as with these transforms written down."""
    plan = plan_of(by_wgmma, (64, 128), (128, 64))
    assert chosen(plan) == [
        (TilingTransform((64, 64)), SwizzleTransform(128)),
        (TilingTransform((128, 64)), SwizzleTransform(128)),
    ]
    right(plan, (64, 128), (128, 64))
    assert compiled(plan).complaints() == []
    square = plan_of(by_wgmma)
    assert emit(square) == emit(plan_of(by_wgmma, transforms=(TilingTransform((64, 64)), SwizzleTransform(128))))


@pytest.mark.parametrize(("width", "swizzle"), [(64, 128), (32, 64), (16, 32)])
def test_slices_decide_the_swizzle(width, swizzle, compiled):
    plan = plan_of(by_columns(width))
    assert chosen(plan)[0] == (TilingTransform((64, swizzle // 2)), SwizzleTransform(swizzle))
    right(plan, (64, 64), (64, 64))
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize(("columns", "swizzle"), [(96, 64), (48, 32), (32, 64)])
def test_rows_decide_the_swizzle(columns, swizzle, compiled):
    plan = plan_of(by_wgmma, (64, columns), (columns, 64))
    assert chosen(plan)[0] == (TilingTransform((64, swizzle // 2)), SwizzleTransform(swizzle))
    right(plan, (64, columns), (columns, 64))
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("turned", [False, True])
def test_plain_products_reach_the_tensor_core(arch, turned, compiled):
    def product(a: Any, b: Any) -> Any:
        return jnp.dot(a[...], b[...].T if turned else b[...], preferred_element_type=F32)

    plan = plan_of(product, (64, 64), (128, 64) if turned else (64, 128), arch=arch, result=(64, 128))
    assert {"wgmma", "tcgen05_mma"} & operations(plan) and "dot_general" not in operations(plan)
    right(plan, (64, 64), (128, 64) if turned else (64, 128), turned=turned)
    assert compiled(plan).complaints() == []


def test_float32_needs_k_contiguous(compiled):
    """As tf32: B with N contiguous is no operand of wgmma, and goes to mma.sync."""
    plan = plan_of(lambda a, b: jnp.dot(a[...], b[...].T), (64, 64), (64, 64), dtype=F32)
    assert "wgmma" in operations(plan) and chosen(plan)[0] == (TilingTransform((64, 32)), SwizzleTransform(128))
    right(plan, (64, 64), (64, 64), dtype=np.float32, turned=True)
    assert compiled(plan).complaints() == []
    other = plan_of(dot, dtype=F32)
    assert "dot_general" in operations(other)
    right(other, (64, 64), (64, 64), dtype=np.float32)


def test_shapes_that_no_instruction_has_stay_as_they_are():
    plan = plan_of(dot, (32, 64), (64, 64), result=(32, 64))
    assert chosen(plan) == [(), ()] and "dot_general" in operations(plan)


@pytest.mark.parametrize("transforms", [(SwizzleTransform(16),), (TilingTransform((8, 64)),)])
def test_what_is_given_stays(transforms):
    assert chosen(plan_of(dot, transforms=transforms)) == [transforms] * 2
    with pytest.raises(IllegalInstruction, match="must be tiled in two dimensions and swizzled"):
        plan_of(by_wgmma, transforms=transforms)


@pytest.mark.parametrize("product", [by_wgmma, dot])
def test_slices_that_no_swizzle_allows(product):
    """A copy to rows 4 to 63: the buffer stays row by row; wgmma says what it needs, a plain product takes it from registers."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        for k, n in ((0, 4), (4, 60)):
            plgpu.copy_gmem_to_smem(a.at[ds(k, n)], a_tile.at[ds(k, n)], full)
        plgpu.copy_gmem_to_smem(b, b_tile, full)
        plgpu.barrier_wait(full)
        o[...] = product(a_tile, b_tile)

    scratch = [plgpu.SMEM((64, 64), BF16), plgpu.SMEM((64, 64), BF16), plgpu.Barrier(num_arrivals=3)]
    program = plgpu.kernel(body, out(64, 64), scratch_types=scratch).program(*[out(64, 64, dtype=BF16)] * 2)
    if product is by_wgmma:
        with pytest.raises(IllegalInstruction, match="A in shared memory must be tiled in two dimensions and swizzled"):
            build_plan(program, "sm_90a")
        return
    plan = build_plan(program, "sm_90a")
    assert (
        chosen(plan)[0] == () and chosen(plan)[1] and {"wgmma", "layout_cast"} <= operations(plan)
    )  # A from registers
    right(plan, (64, 64), (64, 64))


def test_a_ring_of_a_scope(compiled):
    """Slots of a buffer that run_scoped allocates, filled by ordinary stores and read back by ordinary loads."""

    def body(a: Any, b: Any, o: Any, back: Any) -> None:
        def scope(ring: Any) -> None:
            for slot in range(2):
                ring[slot] = a[...] if slot == 0 else b[...]
            plgpu.commit_smem()
            o[...] = by_wgmma(ring.at[0], ring.at[1])
            back[...] = ring.at[1][...]

        plgpu.run_scoped(scope, plgpu.SMEM((2, 64, 64), BF16))

    kernel = plgpu.kernel(body, (out(64, 64), out(64, 64, dtype=BF16)))
    plan = build_plan(kernel.program(*[out(64, 64, dtype=BF16)] * 2), "sm_90a")
    a, b = (randoms(64, 64, dtype=BF16, seed=i) for i in range(2))
    found, back = simulate(plan, [a, b])
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.linalg.norm(found - expected) <= 2**-18 * np.linalg.norm(expected)
    np.testing.assert_array_equal(back.astype(np.float32), b.astype(np.float32))
    assert compiled(plan).complaints() == []


def test_blocks_of_a_pallas_call(compiled):
    def body(a: Any, b: Any, o: Any) -> None:
        o[...] = dot(a, b)

    call = plgpu.pallas_call(
        body,
        out(128, 128),
        grid=(2, 2),
        in_specs=[plgpu.BlockSpec((64, 64), lambda i, j: (i, 0)), plgpu.BlockSpec((64, 64), lambda i, j: (0, j))],
        out_specs=plgpu.BlockSpec((64, 64), lambda i, j: (i, j)),
    )
    (program,) = programs_of(call, [out(128, 64, dtype=BF16), out(64, 128, dtype=BF16)])
    plan = build_plan(program, "sm_90a")
    assert "wgmma" in operations(plan)
    right(plan, (128, 64), (64, 128))
    assert compiled(plan).complaints() == []


def test_programs_without_products_are_left_alone():
    def body(a: Any, o: Any, tile: Any) -> None:
        tile[...] = a[...]
        plgpu.commit_smem()
        o[...] = tile[...]

    kernel = plgpu.kernel(body, out(64, 64), scratch_types=[plgpu.SMEM((64, 64), F32)])
    program = kernel.program(jax.ShapeDtypeStruct((64, 64), np.float32))
    assert program.scratch[0].space.transforms == () and {e.op for e in walk(program.body)} >= {"get", "swap"}
