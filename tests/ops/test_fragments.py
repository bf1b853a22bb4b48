"""Arrays in the order of their registers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.errors import LayoutConflict, UnsupportedCall
from mosaic_gpu.plan.build import build_plan

F = jnp.float32
PARAMS = plgpu.CompilerParams(arch="sm_90a")


def through_fragments(x, raw, out):
    """Load in WGMMA's layout, store in the order of the registers, and back."""
    f = plgpu.to_fragments(plgpu.load(x, layout=plgpu.Layout.WGMMA))
    raw[...] = f
    out[...] = plgpu.from_fragments(f, out.shape)


@pytest.mark.parametrize("shape", [(64, 8), (64, 64), (128, 40)])
def test_fragments(shape):
    """Element (m, n) of a warpgroup's accumulator is where the PTX ISA has it: 2 columns, 8 rows further, 8 columns further."""
    x = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    f = plgpu.kernel(
        through_fragments,
        [jax.ShapeDtypeStruct((x.size // 128, 128), F), jax.ShapeDtypeStruct(shape, F)],
        compiler_params=PARAMS,
    )
    raw, back = map(np.asarray, f(x))
    np.testing.assert_array_equal(back, x)
    flat = raw.reshape(-1, 128, 4)  # four registers of each thread
    for thread in (0, 1, 5, 37, 127):
        row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
        expected = [x[row, column], x[row, column + 1], x[row + 8, column], x[row + 8, column + 1]]
        np.testing.assert_array_equal(flat[0, thread], expected)
    plan = build_plan(f.program(x), "sm_90a")
    compile_plan(plan)


def test_fragments_refuse():
    def run(body, shape=(64, 64), dtype=F):
        plgpu.kernel(body, jax.ShapeDtypeStruct(shape, dtype), compiler_params=PARAMS)(np.zeros(shape, dtype))

    with pytest.raises(UnsupportedCall, match="to_fragments"):
        run(lambda x, o: plgpu.to_fragments(x[...]) and None, (60, 64))
    with pytest.raises(UnsupportedCall, match="from_fragments"):
        run(lambda x, o: plgpu.from_fragments(x[...], (64, 8)) and None)
    with pytest.raises(LayoutConflict, match="repeated value"):

        def splat(x, o):
            o[...] = plgpu.from_fragments(plgpu.to_fragments(jnp.zeros((64, 64), F)), (64, 64))

        run(splat)
