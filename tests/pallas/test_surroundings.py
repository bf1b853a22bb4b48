"""pallas_call under x64, under shard_map, with every dtype that registers hold, and with nothing to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.pallas import lowering
from mosaic_gpu.plan.build import build_plan

F = jnp.float32
BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
TILES = plgpu.BlockSpec((32, 128), lambda i, j: (i, j))
X = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)


def call(body, dtype=F, **options):
    return plgpu.pallas_call(
        body, jax.ShapeDtypeStruct(X.shape, dtype), grid=(2, 2), in_specs=[TILES], out_specs=TILES, **options
    )


def double(x, o):
    o[...] = x[...] * 2


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int32", "float16", "bfloat16", "float32"])
@BOTH
def test_dtypes(dtype, interpret):
    x = np.random.default_rng(0).integers(0, 2, X.shape).astype(jnp.dtype(dtype))
    y = call(lambda x, o: o.__setitem__(..., x[...]), x.dtype, interpret=interpret)(x)
    np.testing.assert_array_equal(np.asarray(y), x)


@BOTH
def test_64_bit_types_leave_indices_alone(interpret):
    with jax.enable_x64(True):
        f = call(double, interpret=interpret)
        np.testing.assert_array_equal(f(X), 2 * X)
        np.testing.assert_array_equal(jax.vmap(f)(np.stack([X, X + 1])), np.stack([2 * X, 2 * X + 2]))
        program = lowering.kernel_of(f.traced(X)[0]).program(X)
    assert "long long" not in body_of(emit(build_plan(program, "sm_90a")))


@BOTH
def test_shard_map(interpret):
    """check_vma=True: results vary along the mesh as the inputs do.  One device is enough for JAX to keep account."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(call(double, interpret=interpret), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_array_equal(jax.jit(f)(X), 2 * X)


@BOTH
def test_nothing_to_do(interpret):
    rows = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
    empty = jax.ShapeDtypeStruct((0, 128), F)
    f = plgpu.pallas_call(double, empty, grid=0, in_specs=[rows], out_specs=rows, interpret=interpret)
    assert f(np.zeros((0, 128), np.float32)).shape == (0, 128)


@BOTH
def test_no_inputs(interpret):
    def body(o):
        o[...] = plgpu.broadcasted_iota(jnp.int32, (32, 128), 1) + 1000 * plgpu.program_id(0)

    f = plgpu.pallas_call(
        body,
        jax.ShapeDtypeStruct((64, 128), jnp.int32),
        grid=2,
        out_specs=plgpu.BlockSpec((32, 128), lambda i: (i, 0)),
        interpret=interpret,
    )
    i, j = np.indices((64, 128))
    np.testing.assert_array_equal(f(), 1000 * (i // 32) + j)


def test_debug_prints_mapping_and_program(capsys):
    call(double, debug=True)(X)
    said = capsys.readouterr().out
    assert "args[0]: float32[64, 256] in blocks" in said and "copy_gmem_to_smem" in said
