"""The matmuls of both generations: in the simulator against float64, bad inputs, one cubin for all lengths, machine code."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.sm90.matmul import MatmulConfig, matmul
from mosaic_gpu.kernels.sm100 import matmul as sm100
from tests import support

SMALL = MatmulConfig(block_n=64, num_stages=2)
randoms = functools.partial(support.randoms, dtype=ml_dtypes.bfloat16)


@pytest.fixture
def plan_of(kernel_plan):
    def make(m, n, k, c, dtype=jnp.bfloat16):
        a, b = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
        return kernel_plan(functools.partial(matmul, config=c), a, b)

    return make


@pytest.mark.parametrize(
    ("m", "n", "k", "config", "dtype"),
    [
        (128, 64, 64, SMALL, "bfloat16"),
        (256, 128, 256, SMALL, "float16"),
        (200, 136, 200, SMALL, "bfloat16"),
        (1, 8, 8, SMALL, "bfloat16"),
        (129, 72, 72, MatmulConfig(block_n=64, num_stages=4), "float16"),
        (130, 256, 320, MatmulConfig(block_n=256, num_stages=3), "bfloat16"),
        (128, 192, 256, MatmulConfig(block_n=192, block_k=128, num_stages=2), "bfloat16"),
    ],
)
def test_against_float64(m, n, k, config, dtype):
    """Tiles, tails along every dimension, more stages than steps and more steps than stages, both types."""
    a, b = (
        randoms(m, k, dtype=getattr(ml_dtypes, dtype, dtype)),
        randoms(k, n, dtype=getattr(ml_dtypes, dtype, dtype), seed=1),
    )
    found = np.asarray(matmul(jnp.asarray(a), jnp.asarray(b), config))
    expected = reference.matmul(a, b)
    assert found.shape == (m, n) and found.dtype == a.dtype
    unit = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    assert reference.relative_error(found, expected) < unit, "no more than the rounding of the result"
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2 * unit, atol=1e-3)


def test_under_jit():
    a, b = randoms(128, 64), randoms(64, 64, seed=1)
    found = jax.jit(lambda x, y: matmul(x, y, SMALL))(a, b)
    np.testing.assert_array_equal(found, matmul(jnp.asarray(a), jnp.asarray(b), SMALL))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_nothing_to_multiply(m, n, k):
    out = matmul(jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16))
    assert out.shape == (m, n) and out.dtype == jnp.bfloat16 and not np.asarray(out).any()


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (((8, 8), "bfloat16"), ((16, 8), "bfloat16"), r"matmul of \(8, 8\) and \(16, 8\)"),
        (((8,), "bfloat16"), ((8, 8), "bfloat16"), r"takes \(m, k\) and \(k, n\)"),
        (((8, 8), "bfloat16"), ((8, 8), "float16"), "bfloat16 and float16: both float16 or both bfloat16"),
        (((8, 8), "float32"), ((8, 8), "float32"), "both float16 or both bfloat16"),
        (
            ((8, 12), "bfloat16"),
            ((12, 8), "bfloat16"),
            "multiples of 8 only, since TMA moves rows of 16 bytes; pad them",
        ),
        (((8, 8), "bfloat16"), ((8, 12), "bfloat16"), "k = 8 and n = 12"),
    ],
)
def test_bad_inputs(a, b, words):
    with pytest.raises(UnsupportedCall, match=words):
        matmul(jnp.zeros(*a), jnp.zeros(*b))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(cluster_m=3), ValueError, "cluster_m=3"),
        (dict(block_n=128, cluster_m=4), ValueError, "2 chunks of 64 columns"),
        (dict(block_n=72), ValueError, "block_n=72"),
        (dict(block_n=320), ValueError, "block_n=320"),
        (dict(block_k=96), ValueError, "block_k=96: a multiple of 64"),
        (dict(num_stages=1), ValueError, "at least 2"),
        (dict(compute_registers=240, memory_registers=40), ValueError, "exceed the pool of 3 warpgroups, 504"),
        (dict(num_stages=5), ResourceExceeded, "bytes of shared memory, a block has 232448"),
        (dict(blok=3), TypeError, "blok"),
    ],
)
def test_bad_configs(options, error, words):
    with pytest.raises(error, match=words):
        MatmulConfig(**options)


def test_the_config_knows_its_shared_memory(plan_of):
    """What it says is what the plan takes."""
    c = MatmulConfig(block_n=128, num_stages=3)
    assert plan_of(128, 128, 64, c).shared_bytes == c.shared_bytes


def test_one_source_for_all_shapes(plan_of):
    """Lengths are run-time values: one cubin for a config and a type."""
    shapes = [(128, 64, 64), (4096, 4096, 4096), (129, 72, 8), (1, 8, 100000)]
    assert len({emit(plan_of(*s, SMALL)) for s in shapes}) == 1
    assert len({emit(plan_of(*shapes[0], SMALL, t)) for t in (jnp.bfloat16, jnp.float16)}) == 2


def test_machine_code(plan_of, compiled):
    """The main loop stands once, for both compute warpgroups, with 4 products a stage; nothing spilled, nothing serialised."""
    c = MatmulConfig()
    report = compiled(plan_of(4096, 4096, 4096, c))
    assert report.complaints() == [] and report.stack == 0
    assert [loop.products for loop in report.loops] == [c.block_k // 16]
    assert report.mnemonics["HGMMA"] == c.block_k // 16
    assert {(b.kind, b.requested) for b in report.budgets} == {("increase", 232), ("decrease", 40)}
    assert max(b.needed for b in report.budgets if b.kind == "increase") <= 232
    assert report.mnemonics["UTMALDG"] == 2 and report.mnemonics["UTMASTG"] >= 1


def test_configs_of_the_two_matmuls_do_not_mix():
    data = sm100.MatmulConfig().to_json()
    assert sm100.MatmulConfig.from_json(data) == sm100.MatmulConfig()
    with pytest.raises(ValueError, match="a config of matmul for sm100; MatmulConfig is for matmul on sm90"):
        MatmulConfig.from_json(data)
