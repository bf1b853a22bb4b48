"""Attention on a Hopper GPU, far and wide: sampled shapes, inputs that are hard on a softmax, the same bits every time."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.masks import Causal
from mosaic_gpu.runtime.device import default_arch
from tests.gpu.inputs import KINDS, MASKS, inputs_of
from tests.support import plain_attention

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

BF, F16 = jnp.bfloat16, jnp.float16


def judge(found: Any, q: Any, k: Any, v: Any, causal: Causal) -> str:
    """Empty, or what is wrong: twice the error of plain attention that rounds P is allowed; of the log-sum-exp, 1e-4."""
    out, lse = found if isinstance(found, tuple) else (found, None)
    exact, exact_lse = reference.attention(q, k, v, causal=causal)
    error, plain = (reference.relative_error(x, exact) for x in (out, plain_attention(q, k, v, causal)))
    if not error <= 2 * max(plain, 1e-3):
        return f"error {error:.2e}, plain attention {plain:.2e}"
    if lse is not None and not np.allclose(np.asarray(lse), exact_lse, atol=1e-4, rtol=1e-5):
        return f"log-sum-exp {np.nanmax(np.abs(np.asarray(lse) - exact_lse)):.2e} off"
    return ""


@pytest.mark.parametrize("seed", range(25))
def test_sampled(poisoned: Callable[..., Any], seed: int) -> None:
    """24 cases each over lengths, heads, head dims, dtypes, masks and kinds of inputs; the same for the same seed."""
    rng = np.random.default_rng(seed)
    failures = []
    for case in range(24):
        d = int(rng.choice((64, 64, 128, 128, 256, 96, 32, 80, 72, 120)))
        dtype, kind = (BF, F16)[int(rng.integers(2))], str(rng.choice(KINDS))
        h_kv, group, b = (int(rng.integers(1, n)) for n in (4, 5, 4))
        s, t = (int(n) for n in rng.integers(1, int(rng.choice((70, 400, 1400))), 2))
        causal, lse = MASKS[int(rng.integers(3))], bool(rng.integers(2))
        q, k, v = inputs_of(kind, d, dtype, s, t, h_kv * group, h_kv, b, rng)
        found = poisoned(functools.partial(attention, causal=causal, return_lse=lse), q, k, v)
        if wrong := judge(found, q, k, v, causal):
            what = f"b{b} s{s} t{t} h{h_kv * group}/{h_kv} d{d} {jnp.dtype(dtype).name} {kind} {causal=} {lse=}"
            failures.append(f"case {case}: {what}: {wrong}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("kind", KINDS)
def test_hard_inputs(poisoned: Callable[..., Any], kind: str, d: int, causal: bool) -> None:
    """Many tiles for a multiprocessor; one query row; one key."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    for s, t in ((1333, 1290), (1, 700), (700, 1)):
        q, k, v = inputs_of(kind, d, BF, s, t, 16, 4, 2, rng)
        found = poisoned(functools.partial(attention, causal=causal, return_lse=True), q, k, v)
        assert not (wrong := judge(found, q, k, v, causal)), f"s{s} t{t}: {wrong}"


@pytest.mark.parametrize("lse", (False, True))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "b,s,h,d", ((32, 512, 16, 128), (32, 512, 32, 64), (2, 4096, 16, 128), (2, 777, 8, 256), (4, 2048, 8, 96))
)
def test_the_same_bits_under_load(b: int, s: int, h: int, d: int, causal: bool, lse: bool) -> None:
    """200 runs while another thread keeps the GPU busy with products."""
    q, k, v = (jax.random.normal(key, (b, s, h, d), BF) for key in jax.random.split(jax.random.key(s), 3))
    f = jax.jit(functools.partial(attention, causal=causal, return_lse=lse))
    differ = jax.jit(lambda x, y: jnp.sum(x != y))
    first = jax.tree.leaves(jax.block_until_ready(f(q, k, v)))
    stop = threading.Event()

    def load() -> None:
        a = jnp.ones((2048, 2048), BF)
        product = jax.jit(jnp.matmul)
        while not stop.is_set():
            product(a, a).block_until_ready()

    busy = threading.Thread(target=load)
    busy.start()
    try:
        counts = [differ(x, y) for _ in range(200) for x, y in zip(first, jax.tree.leaves(f(q, k, v)), strict=True)]
        assert int(sum(counts)) == 0
    finally:
        stop.set()
        busy.join()
