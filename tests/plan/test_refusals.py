"""Calls that a table, an instruction or the launch does not have: refused with the line and what to write instead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import (
    IllegalInstruction,
    UnsupportedCall,
    UnsupportedPrimitive,
)
from mosaic_gpu.plan.build import build_plan

F = jnp.float32


def wgmma_body(a, b):
    plgpu.run_scoped(lambda acc: plgpu.wgmma(acc, a, b), plgpu.ACC((64, 64)))  # product


def tcgen05_body(a, b, t):
    plgpu.tcgen05_mma(t, a, b)  # product


TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def operands(m):
    return [plgpu.SMEM((m, 64), jnp.bfloat16, transforms=TILE), plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILE)]


def test_wgmma_on_blackwell(plan, assert_at):
    """Primitive, table, line, and what to write instead."""
    plan(wgmma_body, scratch_types=operands(64), arch="sm_90a")
    with pytest.raises(
        UnsupportedPrimitive, match="'wgmma' has no rule in the sm100 x warpgroup table; .*use tcgen05_mma"
    ) as e:
        plan(wgmma_body, scratch_types=operands(64), arch="sm_100a")
    assert_at(e.value, wgmma_body, "product")
    assert isinstance(e.value, NotImplementedError)


def test_tcgen05_on_hopper(plan, assert_at):
    scratch = [*operands(128), plgpu.TMEM((128, 64), F)]
    plan(tcgen05_body, scratch_types=scratch, arch="sm_100a")
    with pytest.raises(
        UnsupportedPrimitive, match="'tcgen05_mma' has no rule in the sm90 x warpgroup table; .*use wgmma"
    ) as e:
        plan(tcgen05_body, scratch_types=scratch, arch="sm_90a")
    assert_at(e.value, tcgen05_body, "product")


def test_an_unknown_primitive(plan, array, assert_at):
    def body(x, o):
        o[...] = lax.betainc(x[...], x[...], x[...])  # no rule

    with pytest.raises(
        UnsupportedPrimitive,
        match="'regularized_incomplete_beta' has no rule in the sm90 x warpgroup table; compute it outside of the kernel",
    ) as e:
        plan(body, array(128), out=array(128))
    assert_at(e.value, body, "no rule")


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda x, s: s[...], "'get' of an array|get of an array .* by a single warp: only scalars"),
        (lambda x, s: plgpu.commit_smem(), "'commit_smem' has no rule in the sm90 x warp table; it is in the tables? "),
        (lambda x, s: plgpu.load(s), "'load' has no rule in the sm90 x warp table"),
    ],
)
def test_what_a_single_warp_cannot_do(plan, array, use, words):
    def body(x, s):
        plgpu.warp_map(lambda warp: (use(x, s), None)[1])

    with pytest.raises(UnsupportedPrimitive, match=words):
        plan(body, array(8), scratch_types=[plgpu.SMEM((64, 64), F)])


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda x: plgpu.program_id(1), UnsupportedCall, r"program_id: axis=1, and the grid has 1 dimensions: \(2,\)"),
        (lambda x: plgpu.num_programs(2), UnsupportedCall, r"num_programs: axis=2, and the grid has 1 dimensions"),
    ],
)
def test_axes_that_do_not_exist(plan, array, use, error, words):
    def body(x, o):
        o[0] = use(x).astype(F)

    with pytest.raises(error, match=words):
        plan(body, array(8), out=array(8), grid=(2,))


def test_too_many_warpgroups(plan, array):
    with pytest.raises(UnsupportedCall, match="num_threads=9: a block has 1 to 8 warpgroups"):
        plan(lambda x, o: None, array(8), out=array(8), num_threads=9, thread_name="wg")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: (plgpu.ACC((64, 64)), jnp.int8, jnp.int8, 64, 64),
            "no int8 x int8 -> float32; with A int8, B may be .* accumulator \\('int32',\\)",
        ),
        (
            lambda: (plgpu.ACC((64, 64), jnp.float16), jnp.bfloat16, jnp.bfloat16, 64, 64),
            "no bfloat16 x bfloat16 -> float16",
        ),
        (lambda: (plgpu.ACC((64, 64)), jnp.bfloat16, jnp.float16, 64, 64), "no bfloat16 x float16"),
        (lambda: (plgpu.ACC((32, 64)), jnp.bfloat16, jnp.bfloat16, 32, 64), "m = 32 rows is not a multiple of 64"),
    ],
)
def test_rows_missing_from_the_table_of_wgmma(plan, make, words):
    acc, a_type, b_type, m, k = make()

    def transforms(dtype):
        return (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))

    width = 128 // jnp.dtype(a_type).itemsize

    def body(a, b):
        plgpu.run_scoped(
            lambda c: plgpu.wgmma(c, a, b.transpose((1, 0)) if jnp.dtype(a_type).itemsize == 1 else b), acc
        )

    b_shape = (64, width) if jnp.dtype(a_type).itemsize == 1 else (width, 64)
    scratch = [
        plgpu.SMEM((m, width), a_type, transforms=transforms(a_type)),
        plgpu.SMEM(b_shape, b_type, transforms=transforms(b_type)),
    ]
    with pytest.raises(IllegalInstruction, match=words):
        plan(body, scratch_types=scratch)


@pytest.mark.parametrize("n", [4, 12, 264])
def test_columns_that_wgmma_does_not_have(plan, n):
    def body(a, b):
        plgpu.run_scoped(lambda acc: plgpu.wgmma(acc, a, b.transpose((1, 0))), plgpu.ACC((64, n)))

    rows = -(-n // 8) * 8
    scratch = [
        plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILE),
        plgpu.SMEM((rows, 64), jnp.bfloat16, transforms=TILE),
    ]
    body_n = (
        body
        if rows == n
        else lambda a, b: plgpu.run_scoped(
            lambda acc: plgpu.wgmma(acc, a, b.at[plgpu.ds(0, n)].transpose((1, 0))), plgpu.ACC((64, n))
        )
    )
    with pytest.raises(IllegalInstruction, match=f"n = {n}; legal are 8, 16, ..., 256"):
        plan(body_n, scratch_types=scratch)


def test_shapes_of_a_product_that_do_not_fit(plan):
    def body(a, b):
        plgpu.run_scoped(lambda acc: plgpu.wgmma(acc, a, b), plgpu.ACC((64, 128)))

    words = r"acc \(64, 128\) of acc \+= a \(64, 64\) of a @ b \(64, 64\) of b: shapes do not fit"
    with pytest.raises(IllegalInstruction, match=words):
        plan(body, scratch_types=operands(64))


def test_shapes_of_a_tcgen05_product_that_do_not_fit(plan):
    """The operands by their names in Python, those of slices, too."""

    def body(tile, rhs, total, done):
        plgpu.tcgen05_mma(total, tile.at[:, plgpu.ds(0, 32)], rhs, done, accumulate=False)

    scratch = [*operands(128), plgpu.TMEM((128, 64), jnp.float32), plgpu.Barrier(orders_tensor_core=True)]
    words = r"tcgen05_mma: acc \(128, 64\) of total \+= a \(128, 32\) of tile @ b \(64, 64\) of rhs: shapes do not fit"
    with pytest.raises(IllegalInstruction, match=words) as e:
        plan(body, scratch_types=scratch, arch="sm_100a")
    assert e.value.line.number == body.__code__.co_firstlineno + 1


def test_only_inputs_that_are_touched_become_parameters(plan, array):
    """Addresses, extents and descriptors of what the code uses, nothing else."""
    p = plan(lambda x, y, o: o.__setitem__(0, y[0, 1]), array(8), array(4, 4), out=array(8))
    assert p.pointers == (1, 2) and {(d.input, d.axis) for d in p.dims} == {(1, 0), (1, 1), (2, 0)} and p.maps == ()


def test_a_plan_is_data(plan, array):
    """It pickles, and what comes back is equal."""
    import pickle

    p = plan(lambda x, o: o.__setitem__(0, x[0]), array(8), out=jax.ShapeDtypeStruct((8,), F))
    assert pickle.loads(pickle.dumps(p)) == p and p.threads == 128


def stores_to_its_input(x, o):
    x[...] = o[...]  # store


def test_an_input_is_never_written(plan, array, assert_at):
    with pytest.raises(UnsupportedCall, match="is an input of the kernel and cannot be written") as e:
        plan(stores_to_its_input, array(64, 64), out=array(64, 64))
    assert_at(e.value, stores_to_its_input, "store")


def test_grid_axes_beyond_the_launch_limits(plan):
    """CUDA's y and z carry 65535 blocks; x, the last axis, 2**31 - 1."""
    plan(lambda: None, grid=(2, 70000), grid_names=("a", "b"))
    with pytest.raises(UnsupportedCall, match="only the last axis may have more than 65535"):
        plan(lambda: None, grid=(70000, 2), grid_names=("a", "b"))


def test_an_unknown_architecture():
    with pytest.raises(ValueError, match=r"arch='sm_80'.*'sm_90a', 'sm_100a' or 'sm_103a'"):
        plgpu.CompilerParams(arch="sm_80")


def test_extents_of_more_than_31_bits_are_refused() -> None:
    """Lengths are 32-bit parameters of a kernel."""
    kernel = plgpu.kernel(lambda x, o: o.__setitem__(0, x[0]), jax.ShapeDtypeStruct((1,), jnp.int8))
    program = kernel.program(jax.ShapeDtypeStruct((2**31,), jnp.int8))
    with pytest.raises(UnsupportedCall, match="32-bit numbers in a kernel"):
        build_plan(program, "sm_90a")
