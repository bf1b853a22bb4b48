"""Copies that add to global memory, and outputs that start with an input's values: what they do, and what they race with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import body_of, compile_plan
from mosaic_gpu.errors import Leak, Race, UninitializedRead, UnsupportedCall
from mosaic_gpu.plan.build import build_plan

F = jnp.float32
PARAMS = plgpu.CompilerParams(arch="sm_90a")


def adder(body, aliases=True, blocks=3, dtype=F, rows=64):
    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((rows, 128), dtype),
        scratch_types=[plgpu.SMEM((64, 128), dtype)],
        grid=(blocks,),
        grid_names=("g",),
        compiler_params=PARAMS,
        input_output_aliases={1: 0} if aliases else None,
    )


def add(x, start, out, tile, wait=True, read_only=False):
    tile[...] = plgpu.load(x.at[lax.axis_index("g")], layout=plgpu.Layout.WG_STRIDED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out, reduction_op="add")
    if wait:
        plgpu.wait_smem_to_gmem(0, wait_read_only=read_only)


X = np.random.default_rng(0).integers(-9, 9, (3, 64, 128))
START = np.random.default_rng(1).integers(-9, 9, (64, 128))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("params", [{}, {"seed": 5}, {"timing": "early"}, {"processes": 2}])
def test_every_block_adds_to_one_tile(dtype, params):
    """Blocks are not ordered, and need no order: nothing is lost, nothing is a race; the input's values are the start."""
    with plgpu.simulator_params(**params):
        found = adder(add, dtype=dtype)(X.astype(dtype), START.astype(dtype))
    np.testing.assert_array_equal(np.asarray(found), START + X.sum(0))


def test_under_jit_and_vmap():
    """The input is not changed, and an unmapped one is every element's start."""
    f = adder(add)
    start = jnp.asarray(START, F)
    both = jnp.stack([jnp.asarray(X, F), 2 * jnp.asarray(X, F)])
    found = jax.jit(jax.vmap(f, in_axes=(0, None)))(both, start)
    np.testing.assert_array_equal(np.asarray(found), START + np.stack([X, 2 * X]).sum(1))
    np.testing.assert_array_equal(np.asarray(start), START)


def test_clipped():
    """What sticks out of the array is not added."""

    def body(x, start, out, tile):
        tile[...] = plgpu.load(x.at[0], layout=plgpu.Layout.WG_STRIDED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out.at[plgpu.ds(lax.axis_index("g") * 64, 64)], reduction_op="add")
        plgpu.wait_smem_to_gmem(0)

    found = adder(body, blocks=2, rows=100)(X.astype(np.float32), np.zeros((100, 128), np.float32))
    np.testing.assert_array_equal(np.asarray(found), np.concatenate([X[0], X[0, :36]]))


def test_nothing_to_add_to():
    with pytest.raises(UninitializedRead):
        adder(add, aliases=False)(X.astype(np.float32), START.astype(np.float32))


def test_a_wait_is_needed():
    with pytest.raises(Leak):
        adder(functools.partial(add, wait=False))(X.astype(np.float32), START.astype(np.float32))


@pytest.mark.parametrize("order", ["store, add", "add, store", "add, read", "read, add"])
def test_additions_race_with_everything_else(order):
    """Another block's plain store or load is in no order with the addition, whichever comes first here."""

    def body(x, start, out, tile):
        @plgpu.when(lax.axis_index("g") == (0 if order.endswith("add") else 1))
        def _():
            if "store" in order:
                out[...] = plgpu.load(x.at[0], layout=plgpu.Layout.WG_STRIDED)
            else:
                tile[...] = plgpu.load(out, layout=plgpu.Layout.WG_STRIDED)

        @plgpu.when(lax.axis_index("g") == (1 if order.endswith("add") else 0))
        def _():
            add(x, start, out, tile)

    with pytest.raises(Race) as found:
        adder(body, blocks=2)(X.astype(np.float32), START.astype(np.float32))
    assert found.value.between == "grid"


def then_load(x, start, out, tile, full):
    add(x, start, out, tile, read_only=not full)
    tile[...] = plgpu.load(out, layout=plgpu.Layout.WG_STRIDED)


def test_a_read_wait_is_not_a_completion():
    """After `wait_read_only` the source is free, and the sum may not be there."""
    with pytest.raises(Race):
        adder(functools.partial(then_load, full=False), blocks=1)(X.astype(np.float32), START.astype(np.float32))
    adder(functools.partial(then_load, full=True), blocks=1)(X.astype(np.float32), START.astype(np.float32))


def test_the_source_is_in_flight():
    def body(x, start, out, tile):
        add(x, start, out, tile, wait=False)
        tile[...] = plgpu.load(x.at[0], layout=plgpu.Layout.WG_STRIDED)
        plgpu.wait_smem_to_gmem(0)

    with pytest.raises(Race) as found:
        adder(body)(X.astype(np.float32), START.astype(np.float32))
    assert found.value.kind == "buffer in flight"


def test_emitted():
    built = compile_plan(build_plan(adder(add).program(X.astype(np.float32), START.astype(np.float32)), "sm_90a"))
    assert "tma_reduce_add_2d" in body_of(built.source)


# ---- refusals -----------------------------------------------------------------------------------------------------------
def test_refusals():
    with pytest.raises(TypeError, match="reduction_op"):
        adder(lambda x, s, o, t: plgpu.copy_smem_to_gmem(t, o, reduction_op="max"), dtype=np.int32)(
            X.astype(np.int32), START.astype(np.int32)
        )
    with pytest.raises(UnsupportedCall, match="adds float32"):
        adder(add, dtype=jnp.bfloat16)(X.astype(jnp.bfloat16), START.astype(jnp.bfloat16))


def test_aliases_must_fit():
    with pytest.raises(TypeError, match="alike"):
        adder(add, dtype=np.int32)(X.astype(np.int32), START.astype(np.float32))
    with pytest.raises(TypeError, match="input 7"):
        plgpu.kernel(
            add,
            jax.ShapeDtypeStruct((64, 128), F),
            input_output_aliases={7: 0},
            scratch_types=[plgpu.SMEM((64, 128), F)],
        )(X, START)
    with pytest.raises(ValueError, match="one input only"):
        plgpu.kernel(add, jax.ShapeDtypeStruct((64, 128), F), input_output_aliases={0: 0, 1: 0})
    with pytest.raises(TypeError, match="a dict"):
        plgpu.kernel(add, jax.ShapeDtypeStruct((64, 128), F), input_output_aliases=[(0, 0)])


def test_both_names_are_one_array():
    """What blocks store by one name and load by the other is a race."""

    def body(x, start, out, tile):
        out[...] = plgpu.load(start, layout=plgpu.Layout.WG_STRIDED) + 1.0

    with pytest.raises(Race, match="a load reads gmem input 1, which a store writes"):
        adder(body)(X.astype(np.float32), START.astype(np.float32))
