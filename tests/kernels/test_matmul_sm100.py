"""The Blackwell matmul: in the simulator against float64, under several schedules, one and two blocks, float8, and its SASS.

No Blackwell GPU has run it.
"""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.sm100 import matmul as module
from mosaic_gpu.kernels.sm100.matmul import MatmulConfig, matmul, scaled_matmul
from tests import support
from tests.kernels import closed_forms

BF, F16, E4, E5 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
SMALL = MatmulConfig(tile_n=64, num_slots=2)
PAIR = MatmulConfig(tile_n=128, num_slots=2, pair=True)
SCHEDULES = (
    dict(),
    dict(timing="early"),
    dict(shadow="bytes"),
    dict(seed=1),
    dict(seed=2),
    dict(timing="early", seed=3),
)
randoms = functools.partial(support.randoms, dtype=BF)


@pytest.fixture(autouse=True)
def four_multiprocessors():
    """So that a block walks over several tiles, and both accumulators come round again."""
    with mock.patch.object(module, "multiprocessors", lambda: 4):
        yield


def check(a, b, config):
    found = np.asarray(matmul(jnp.asarray(a), jnp.asarray(b), config))
    expected = reference.matmul(a, b)
    unit = 2**-11 if found.dtype == F16 else 2**-8
    assert found.shape == expected.shape and found.dtype == (BF if a.dtype.itemsize == 1 else a.dtype)
    assert reference.relative_error(found, expected) < unit, "no more than the rounding of the result"
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2 * unit, atol=1e-2)
    return found


@pytest.mark.parametrize(
    ("m", "n", "k", "config", "a_type", "b_type"),
    [
        (128, 128, 64, MatmulConfig(), BF, BF),
        (200, 136, 328, SMALL, F16, F16),
        (129, 256, 64, MatmulConfig(tile_n=256, num_slots=1), BF, BF),
        (700, 520, 200, MatmulConfig(tile_n=192, num_slots=3, group=2), BF, BF),
        (1000, 72, 72, MatmulConfig(tile_n=64, tile_k=256, num_slots=2), BF, BF),
        (1, 8, 8, SMALL, BF, BF),
        (300, 200, 100 * 8, MatmulConfig(tile_n=128, persistent=False), F16, F16),
        (256, 128, 64, PAIR, BF, BF),
        (900, 704, 392, MatmulConfig(tile_n=256, num_slots=2, pair=True), BF, BF),
        (300, 264, 136, MatmulConfig(tile_n=128, num_slots=3, pair=True, persistent=False), F16, F16),
        (300, 400, 416, MatmulConfig(tile_n=128, num_slots=2), E4, E5),
        (600, 400, 416, MatmulConfig(tile_n=256, num_slots=2, pair=True), E5, E4),
    ],
)
def test_against_float64(m, n, k, config, a_type, b_type):
    """Tails along every dimension, more stages than steps and the other way round, walks of several tiles, pairs, float8."""
    check(randoms(m, k, dtype=a_type), randoms(k, n, dtype=b_type, seed=1), config)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("config", [SMALL, PAIR], ids=["block", "pair"])
def test_every_schedule_gives_the_same(schedule, config):
    a, b = randoms(1100, 200), randoms(200, 264, seed=1)
    first = check(a, b, config)
    with plgpu.simulator_params(plgpu.SimulatorParams(**schedule)):
        np.testing.assert_array_equal(check(a, b, config), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 101))
def test_a_hundred_schedules(seed):
    a, b = randoms(1100, 200), randoms(200, 264, seed=1)
    with plgpu.simulator_params(plgpu.SimulatorParams(seed=seed)):
        check(a, b, PAIR if seed % 2 else SMALL)


@pytest.mark.parametrize(
    ("a", "b", "config", "words"),
    [
        (((8, 8), BF), ((16, 8), BF), None, r"matmul of \(8, 8\) and \(16, 8\)"),
        (((8, 16), E4), ((8, 16), E4), None, r"matmul of \(8, 16\) and \(8, 16\)"),
        (((8, 24), E4), ((24, 16), E4), None, "multiples of 16 only"),
        (((8, 16), E4), ((16, 16), BF), None, "float8_e4m3fn and bfloat16"),
        (((8, 16), E4), ((16, 16), E4), SMALL, "a block needs 128 columns of B"),
    ],
)
def test_bad_inputs(a, b, config, words):
    with pytest.raises(UnsupportedCall, match=words):
        matmul(jnp.zeros(*a), jnp.zeros(*b), config)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(tile_n=96), ValueError, "tile_n=96: 64, 128, 192 or 256"),
        (dict(tile_n=192, pair=True), ValueError, "128 or 256"),
        (dict(tile_k=64), ValueError, "a multiple of 128 bytes"),
        (dict(num_slots=0), ValueError, "num_slots=0: at least 1"),
        (dict(group=0), ValueError, "group=0: at least 1"),
        (dict(tile_n=256, num_slots=5), ResourceExceeded, "bytes of shared memory, a block has 232448"),
    ],
)
def test_bad_configs(options, error, words):
    with pytest.raises(error, match=words):
        MatmulConfig(**options)


def test_nothing_to_multiply():
    for m, n, k in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
        out = matmul(jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16))
        assert out.shape == (m, n) and not np.asarray(out).any()


# ---- what the compiler makes of it -------------------------------------------------------------------------------------
@pytest.fixture
def plan_of(kernel_plan):
    def make(m, n, k, c, dtype=jnp.bfloat16, arch="sm_100a"):
        a, b = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
        return kernel_plan(functools.partial(matmul, config=c), a, b, arch=arch)

    return make


CONFIGS = {
    "default": (MatmulConfig(), jnp.bfloat16),
    "wide": (MatmulConfig(tile_n=256, num_slots=4), jnp.float16),
    "deep": (MatmulConfig(tile_n=64, tile_k=256, num_slots=4), jnp.bfloat16),
    "pair": (MatmulConfig(tile_n=256, num_slots=6, pair=True), jnp.bfloat16),
    "float8": (MatmulConfig(tile_n=128, num_slots=6), jnp.float8_e4m3fn),
    "float8 pair": (MatmulConfig(tile_n=256, num_slots=6, pair=True), jnp.float8_e5m2),
}


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("name", CONFIGS)
def test_machine_code(plan_of, arch, name):
    """No spill; products, transfers and copies as the config says, in all and loop by loop; commits multicast to the pair."""
    c, dtype = CONFIGS[name]
    plan = plan_of(4096, 4096, 4096, c, dtype, arch)
    product = "UTCHMMA" if jnp.dtype(dtype).itemsize == 2 else "UTCQMMA"
    closed_forms.check_code(plan, *closed_forms.matmul(c, product))
    source = emit(plan).rpartition('#line 1 "/mosaic_gpu/kernel.cu"')[2]
    assert ("tcgen05_commit_multicast<2>" in source) == ("tma_load_pair_2d" in source) == c.pair
    assert plan.tmem_pair is c.pair and plan.shared_bytes == c.shared_bytes


# ---- block-scaled operands ---------------------------------------------------------------------------------------------
E8, F4 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
SCALED = {
    "mxfp8": (E4, E5, E8, 32),
    "mxfp4": (F4, F4, E8, 32),
    "mxfp4 in 16": (F4, F4, E8, 16),
    "nvfp4": (F4, F4, E4, 16),
}
WIDE_PAIR = MatmulConfig(tile_n=256, num_slots=2, pair=True)


def scaled_operands(kind, m, n, k, seed=0):
    a_type, b_type, scale_type, block = SCALED[kind]
    rng = np.random.default_rng(seed)

    def factors(rows):
        if scale_type is E8:
            return rng.integers(122, 132, (rows, k // block)).astype(np.uint8).view(E8)
        return rng.uniform(0.25, 8, (rows, k // block)).astype(scale_type)

    a, b = rng.uniform(-4, 4, (m, k)).astype(a_type), rng.uniform(-4, 4, (n, k)).astype(b_type)
    return a, b, factors(m), factors(n)


def check_scaled(arrays, block, config):
    found = np.asarray(scaled_matmul(*map(jnp.asarray, arrays), config=config))
    a, b = (
        x.astype(np.float64) * np.repeat(s.astype(np.float64), block, axis=1)
        for x, s in zip(arrays[:2], arrays[2:], strict=True)
    )
    want = a @ b.T
    assert found.dtype == BF and reference.relative_error(found, want) < 2**-8
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=2**-7, atol=1e-4 * np.abs(want).max())
    return found


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (128, 128, 128, MatmulConfig()),
        (200, 136, 384, MatmulConfig(num_slots=2)),
        (300, 520, 640, WIDE_PAIR),
        (500, 304, 128, MatmulConfig(tile_n=256, num_slots=3)),
        (700, 264, 768, MatmulConfig(pair=True, num_slots=3, tile_k=256)),
    ],
)
def test_scaled_against_float64(kind, m, n, k, config):
    """Every kind; tails of rows, columns and K; one accumulator and two; pairs; several tiles a block."""
    check_scaled(scaled_operands(kind, m, n, k), SCALED[kind][3], config)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("config", [MatmulConfig(num_slots=2), WIDE_PAIR], ids=["block", "pair"])
def test_scaled_every_schedule_gives_the_same(schedule, config):
    arrays = scaled_operands("nvfp4", 1100, 300 + 4, 640)
    first = check_scaled(arrays, 16, config)
    with plgpu.simulator_params(plgpu.SimulatorParams(**schedule)):
        np.testing.assert_array_equal(check_scaled(arrays, 16, config), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 101))
def test_scaled_under_a_hundred_schedules(seed):
    kind = sorted(SCALED)[seed % len(SCALED)]
    with plgpu.simulator_params(plgpu.SimulatorParams(seed=seed)):
        config = WIDE_PAIR if seed // 4 % 2 else MatmulConfig(num_slots=2)
        check_scaled(scaled_operands(kind, 700, 300 + 4, 640, seed), SCALED[kind][3], config)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize(
    "config", [MatmulConfig(num_slots=4), MatmulConfig(tile_n=256, num_slots=4, pair=True)], ids=["block", "pair"]
)
def test_scaled_machine_code(kernel_plan, arch, kind, config):
    """No spill; besides products, transfers and loads a copy for each four factors of 128 rows in the loop over K."""
    a_type, _, scale_type, block = SCALED[kind]
    k, per_row = 4096, config.tile_k * (2 if a_type is F4 else 1) // block
    arrays = [
        jax.ShapeDtypeStruct((4096, n), t) for n, t in ((k, a_type), (k, a_type), *[(k // block, scale_type)] * 2)
    ]
    plan = kernel_plan(functools.partial(scaled_matmul, config=config), *arrays, arch=arch)
    product = "UTCOMMA" if a_type is F4 else "UTCQMMA"
    closed_forms.check_code(plan, *closed_forms.matmul(config, product, per_row))
    assert plan.tmem_pair is config.pair and max(b.column + b.columns for b in plan.tmem.values()) <= 512


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda a, b, s, t: (a, b[:, :128], s, t), UnsupportedCall, r"it takes \(m, k\), \(n, k\), \(m, k / block\)"),
        (lambda a, b, s, t: (a, b, s[:, :4], t[:, :4]), UnsupportedCall, "with 4 factors float8_e8m0fnu"),
        (lambda a, b, s, t: (a, b.astype(BF), s, t), UnsupportedCall, "of float8_e4m3fn and bfloat16"),
        (
            lambda a, b, s, t: (a[:, :96], b[:, :96], s[:, :3], t[:, :3]),
            UnsupportedCall,
            "k is a multiple of 128, n of 8",
        ),
    ],
)
def test_scaled_bad_inputs(change, error, words):
    with pytest.raises(error, match=words):
        scaled_matmul(*change(*map(jnp.asarray, scaled_operands("mxfp8", 64, 64, 256))))


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (MatmulConfig(tile_n=192, num_slots=2), UnsupportedCall, "factors come for 128 columns"),
        (MatmulConfig(tile_n=256, num_slots=4, tile_k=128), ResourceExceeded, "slots with their factors take"),
        (MatmulConfig(tile_n=256, num_slots=6, pair=True), ResourceExceeded, "columns of tensor memory, which has 512"),
    ],
)
def test_scaled_bad_configs(config, error, words):
    with pytest.raises(error, match=words):
        scaled_matmul(*map(jnp.asarray, scaled_operands("nvfp4", 64, 64, 256)), config=config)


def test_one_source_for_all_shapes(plan_of):
    """Lengths and the number of blocks are run-time values: one cubin for a config and a type."""
    shapes = [(128, 64, 64), (4096, 4096, 4096), (129, 72, 8), (1, 8, 100000)]
    for c in (SMALL, PAIR):
        assert len({emit(plan_of(*s, c)) for s in shapes}) == 1
