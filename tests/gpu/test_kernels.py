"""The kernels on a GPU, inside `jax.jit`, against float64: every combination, fresh inputs, poisoned outputs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu.codegen.cubin_cache import compile_count
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90 import matmul as matmul90
from mosaic_gpu.kernels.sm90.attention import AttentionConfig
from mosaic_gpu.runtime.device import default_arch
from tests.kernels.variants import ATTENTION, MATMUL
from tests.support import plain_attention

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


LENGTHS = ((256, 256), (1, 1), (300, 411), (129, 64), (64, 1000))


@pytest.mark.parametrize(
    "dtype,d,causal,heads,lengths",
    list(itertools.product((jnp.bfloat16, jnp.float16), (64, 128, 256), (False, True), ((2, 2), (4, 1)), LENGTHS)),
)
def test_attention_matches_float64(
    random: Callable[..., Any],
    poisoned: Callable[..., Any],
    dtype: Any,
    d: int,
    causal: bool,
    heads: tuple[int, int],
    lengths: tuple[int, int],
) -> None:
    (h, h_kv), (s, t) = heads, lengths
    q, k, v = random(2, s, h, d, dtype=dtype), random(2, t, h_kv, d, dtype=dtype), random(2, t, h_kv, d, dtype=dtype)
    out, lse = poisoned(functools.partial(attention, causal=causal, return_lse=True), q, k, v)
    exact, exact_lse = reference.attention(q, k, v, causal=causal)
    allowed = 2 * max(reference.relative_error(plain_attention(q, k, v, causal), exact), 1e-3)
    assert reference.relative_error(out, exact) <= allowed
    np.testing.assert_allclose(np.asarray(lse), exact_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_a_maximum(
    random: Callable[..., Any], poisoned: Callable[..., Any], dtype: Any, d: int, causal: bool
) -> None:
    """Of scores that are small; and rows whose exponentials float32 does not hold are inf or NaN."""
    q, k, v = random(2, 300, 4, d, dtype=dtype), random(2, 333, 2, d, dtype=dtype), random(2, 333, 2, d, dtype=dtype)
    call = functools.partial(attention, causal=causal, return_lse=True, use_stable_softmax=False)
    out, lse = poisoned(call, q, k, v)
    exact, exact_lse = reference.attention(q, k, v, causal=causal)
    assert reference.relative_error(out, exact) <= 5e-3
    np.testing.assert_allclose(np.asarray(lse), exact_lse, atol=1e-4, rtol=1e-5)
    out, lse = poisoned(
        functools.partial(call, scale=1.0), jnp.full_like(q, 2), jnp.ones_like(k), v
    )  # scores of 128 and more
    assert not np.isfinite(np.asarray(out, np.float32)).any() and not np.isfinite(np.asarray(lse)).any()


def test_attention_without_lse_and_with_batch_dimensions(
    random: Callable[..., Any], poisoned: Callable[..., Any]
) -> None:
    q, k, v = (random(2, 3, 200, 4, 64, dtype=jnp.bfloat16) for _ in range(3))
    out = poisoned(attention, q, k, v)
    exact, _ = reference.attention(*(x.reshape(6, 200, 4, 64) for x in (q, k, v)))
    assert reference.relative_error(np.asarray(out, np.float64).reshape(exact.shape), exact) < 5e-3


def test_two_cubins_serve_every_length_batch_and_head_count(random: Callable[..., Any]) -> None:
    """One for lengths that end with a whole block of keys, one for the others."""

    def run(b: int, s: int, t: int, h: int, h_kv: int) -> None:
        q, k, v = (random(b, n, m, 128, dtype=jnp.bfloat16) for n, m in ((s, h), (t, h_kv), (t, h_kv)))
        # One config: tuned ones differ with the length.
        out = jax.jit(functools.partial(attention, config=AttentionConfig()))(q, k, v)
        assert reference.relative_error(out, reference.attention(q, k, v)[0]) < 5e-3

    run(1, 128, 128, 1, 1)
    run(1, 128, 100, 1, 1)
    before = compile_count()
    for shape in ((2, 300, 77, 4, 2), (1, 1000, 1024, 3, 3), (3, 5, 513, 8, 1)):
        run(*shape)
    assert compile_count() == before


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d,fields", ATTENTION)
def test_every_option_of_attention(
    random: Callable[..., Any], poisoned: Callable[..., Any], d: int, fields: dict[str, Any], causal: bool
) -> None:
    """Several tiles for a block, tails in both lengths, rows that see none of the first key blocks."""
    config = AttentionConfig(**{"block_kv": 64 if d > 128 else 128, **fields})
    q, k, v = random(2, 1333, 8, d, dtype=jnp.bfloat16), *(random(2, 1501, 2, d, dtype=jnp.bfloat16) for _ in range(2))
    out, lse = poisoned(functools.partial(attention, causal=causal, return_lse=True, config=config), q, k, v)
    exact, exact_lse = reference.attention(q, k, v, causal=causal)
    assert reference.relative_error(out, exact) <= 5e-3
    tolerance = 2**-9 if config.sum_by_product else 1e-4  # sums of rounded probabilities
    np.testing.assert_allclose(np.asarray(lse), exact_lse, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "d,dv", ((16, 16), (32, 32), (80, 80), (96, 96), (192, 128), (64, 128), (160, 160), (240, 240))
)
def test_head_dims_of_attention(
    random: Callable[..., Any], poisoned: Callable[..., Any], d: int, dv: int, causal: bool
) -> None:
    q, k, v = (random(2, n, h, m, dtype=jnp.bfloat16) for n, h, m in ((777, 8, d), (901, 2, d), (901, 2, dv)))
    out = poisoned(functools.partial(attention, causal=causal), q, k, v)
    assert reference.relative_error(out, reference.attention(q, k, v, causal=causal)[0]) <= 5e-3


@pytest.mark.parametrize("fields", MATMUL)
@pytest.mark.parametrize("m,n,k", ((4096, 4096, 512), (1000, 520, 72)))
def test_every_option_of_matmul(
    random: Callable[..., Any], poisoned: Callable[..., Any], fields: dict[str, Any], m: int, n: int, k: int
) -> None:
    a, b = random(m, k, dtype=jnp.bfloat16), random(k, n, dtype=jnp.bfloat16)
    out = poisoned(functools.partial(matmul90.matmul, config=matmul90.MatmulConfig(**fields)), a, b)
    exact = reference.matmul(a, b)
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
    assert reference.relative_error(out, exact) <= 2 * reference.relative_error(rounded, exact)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("m,n,k", ((256, 512, 256), (200, 264, 136), (1, 8, 8), (1000, 520, 72), (130, 1024, 4096)))
def test_matmul_matches_float64(
    random: Callable[..., Any], poisoned: Callable[..., Any], dtype: Any, m: int, n: int, k: int
) -> None:
    a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
    out = poisoned(matmul90.matmul, a, b)
    exact = reference.matmul(a, b)
    rounded = np.asarray(jnp.asarray(exact, dtype), np.float64)
    assert reference.relative_error(out, exact) <= 2 * reference.relative_error(rounded, exact)
