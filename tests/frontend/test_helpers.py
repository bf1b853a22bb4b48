"""The small functions beside the operations, and the names that Pallas has and this package has not."""

from __future__ import annotations

import functools
import types
import warnings

import jax
import jax.experimental.pallas as stock_pl
import jax.experimental.pallas.mosaic_gpu as stock
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.elsewhere import ELSEWHERE
from mosaic_gpu.errors import IllegalInstruction
from mosaic_gpu.plan.build import build_plan
from tests.support import out, program_of, randoms, tiled


def names_of(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is deprecated says so
        return {n for n in dir(module) if n[0] != "_" and not isinstance(getattr(module, n), types.ModuleType)}


def test_every_name_of_pallas_is_here_or_says_where_to_go():
    theirs = names_of(stock_pl) | names_of(stock)
    assert {n for n in theirs if not hasattr(plgpu, n)} - set(ELSEWHERE) == set()
    assert {n for n in ELSEWHERE if hasattr(plgpu, n)} == set()


def test_a_name_that_is_not_here_says_what_to_use():
    with pytest.raises(AttributeError, match="mosaic_gpu has no InterpretGPUParams: .*SimulatorParams"):
        _ = plgpu.InterpretGPUParams
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = plgpu.nonsense


def test_numbers():
    assert [plgpu.align_to(n, 8) for n in (1, 8, 9)] == [8, 8, 16]
    assert jax.jit(lambda n: plgpu.align_to(n, 8))(9) == 16
    assert [plgpu.next_power_of_2(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert plgpu.multiple_of(24, 8) == plgpu.multiple_of(24, (8, 12)) == 24
    assert plgpu.dslice is plgpu.ds
    with pytest.raises(ValueError, match="next_power_of_2: x=-1"):
        plgpu.next_power_of_2(-1)
    with pytest.raises(ValueError, match="multiple_of: values"):
        plgpu.multiple_of(24, 0)


@pytest.mark.parametrize("bits", [1024, 2048, 512, 768, 256, 128, 384])
def test_swizzles(bits):
    assert plgpu.find_swizzle(bits) == stock.find_swizzle(bits)
    with pytest.raises(ValueError, match="rows of A have 65 bits, which is no multiple of 128"):
        plgpu.find_swizzle(65, "A")


@pytest.mark.parametrize("minor_dim", [0, 1])
@pytest.mark.parametrize("shape, width", [((8, 8), 2), ((6, 10), 4), ((7, 3), 3), ((5, 1), 8)])
def test_a_walk_over_tiles(shape, width, minor_dim):
    steps = np.arange(shape[0] * shape[1], dtype=np.int32)
    mine = jax.vmap(lambda i: jnp.stack(plgpu.planar_snake(i, shape, minor_dim, width)))(steps)
    jaxs = jax.vmap(lambda i: jnp.stack(stock.planar_snake(i, shape, minor_dim, width)))(steps)
    np.testing.assert_array_equal(mine, jaxs)
    assert len({tuple(p) for p in np.asarray(mine)}) == len(steps)
    traced = jax.jit(lambda n, m: jnp.stack(plgpu.planar_snake(steps[3], (n, m), minor_dim, width)))(*shape)
    np.testing.assert_array_equal(traced, mine[3])


def test_wrong_walks():
    with pytest.raises(ValueError, match="minor_dim=2"):
        plgpu.planar_snake(0, (2, 2), 2, 1)
    with pytest.raises(ValueError, match="tile_width=0"):
        plgpu.planar_snake(0, (2, 2), 0, 0)
    with pytest.raises(TypeError, match="shape must be two sizes"):
        plgpu.planar_snake(0, (2, 2, 2), 0, 1)


def product(a, b, o, s, t, bar, *, known=True):
    """In a scope of a decorator, from a start of which only the caller knows that a tile begins there."""

    @plgpu.with_scoped(plgpu.ACC((64, 64)), extra=plgpu.SMEM((64,), jnp.float32))
    def run(factor, acc, extra):
        extra[...] = jnp.full((64,), factor)
        plgpu.commit_smem()
        start = plgpu.dim_size(a, 0) - 64
        start = plgpu.multiple_of(start, 8) if known else start
        plgpu.copy_gmem_to_smem(a, s, bar)
        plgpu.copy_gmem_to_smem(b, t, bar)
        plgpu.barrier_wait(bar)
        plgpu.wgmma(acc, s.at[plgpu.ds(start, 64)], plgpu.transpose_ref(t, (1, 0)))
        return plgpu.wgmma_accumulator_load(acc) * extra[...][None]

    o[...] = run(2.0)


def test_in_a_kernel(compiled):
    a, b = (randoms(*s, seed=i).astype(ml_dtypes.bfloat16) for i, s in enumerate([(72, 64), (64, 64)]))
    scratch = [
        plgpu.SMEM((72, 64), jnp.bfloat16, transforms=tiled()),
        plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiled()),
    ]
    options = dict(scratch_types=[*scratch, plgpu.Barrier(num_arrivals=2)])
    kernel = plgpu.kernel(product, out(64, 64), **options)
    expected = 2 * a[8:].astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(kernel(a, b), expected, atol=1e-4)
    assert "HGMMA" in compiled(build_plan(program_of(kernel, [a, b]), "sm_90a")).mnemonics
    with pytest.raises(IllegalInstruction, match="multiple"):
        plgpu.kernel(functools.partial(product, known=False), out(64, 64), **options)(a, b)


def test_wrong_arguments_in_a_kernel(program):
    def check(f, kind, words):
        with pytest.raises(kind, match=words):
            program(lambda s: f(s), scratch_types=[plgpu.SMEM((8, 64), jnp.float32)])

    check(lambda s: plgpu.transpose_ref(3, (1, 0)), TypeError, "transpose_ref: ref must be a Ref")
    check(lambda s: plgpu.transpose_ref(s, (1, 1)), ValueError, "of a Ref of 2 dimensions")
    check(lambda s: plgpu.wgmma_accumulator_load(3), TypeError, "acc must be an accumulator")
    check(lambda s: plgpu.wgmma_accumulator_load(s, wait_n=-1), ValueError, "wait_n=-1")
    check(lambda s: plgpu.with_scoped(plgpu.SMEM((8,), jnp.float32))(3), TypeError, "with_scoped: the decorated object")
