"""Attention with a bias and a mask on a Hopper GPU, inside `jax.jit`, against float64: every form, hard inputs, every option."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.masks import Causal
from mosaic_gpu.kernels.sm90.attention import AttentionConfig, default_config
from mosaic_gpu.runtime.device import default_arch
from tests.gpu.inputs import KINDS, MASKS, inputs_of
from tests.kernels.variants import BIASED
from tests.support import plain_attention

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

BF, F16 = jnp.bfloat16, jnp.float16
# Which extents (batch, heads, queries) a bias and a mask have; None: there is none.
EVERY, OF_KEYS = (True, True, True), (False, False, False)
FORMS = (
    (EVERY, None),
    ((False, True, True), OF_KEYS),
    (None, (True, False, True)),
    ((True, False, False), (False, True, True)),
    (OF_KEYS, None),
    (None, EVERY),
)


def biases_of(q: Any, k: Any, forms: Any, rng: np.random.Generator) -> dict[str, jax.Array]:
    """A bias and a mask of these forms; where it depends on the query, some queries see no key at all."""
    (b, s, h, _), t = q.shape, k.shape[1]
    shapes = [
        None if f is None else [n if own else 1 for n, own in zip((b, h, s), f, strict=True)] + [t] for f in forms
    ]
    found: dict[str, jax.Array] = {}
    if shapes[0] is not None:
        found["bias"] = jnp.asarray(2 * rng.standard_normal(shapes[0]), jnp.float32)
    if shapes[1] is not None:
        mask = rng.random(shapes[1]) < 0.7
        if shapes[1][2] > 3:
            mask[:, :, 3::50] = False
        found["mask"] = jnp.asarray(mask)
    return found


def judge(found: Any, q: Any, k: Any, v: Any, causal: Causal, more: dict[str, jax.Array], lse_off: float = 1e-4) -> str:
    """Empty, or what is wrong: twice the error of plain attention that rounds P is allowed; of the log-sum-exp, 1e-4."""
    out, lse = (np.asarray(x) for x in found)
    exactly: dict[str, Any] = dict(more)
    if "bias" in more:
        exactly["bias"] = more["bias"].astype(q.dtype)  # as the kernel has it
    exact, exact_lse = reference.attention(q, k, v, causal=causal, **exactly)
    plain = reference.relative_error(plain_attention(q, k, v, causal, **exactly), exact)
    hidden = ~np.isfinite(exact_lse)
    if not (error := reference.relative_error(out, exact)) <= 2 * max(plain, 1e-3):
        return f"error {error:.2e}, plain attention {plain:.2e}"
    if np.isfinite(lse[hidden]).any() or out.transpose(0, 2, 1, 3)[hidden].any():
        return "a query that sees no key gives zeros and -inf"
    if not np.allclose(lse[~hidden], exact_lse[~hidden], atol=lse_off, rtol=1e-5):
        return f"log-sum-exp {np.nanmax(np.abs(lse[~hidden] - exact_lse[~hidden])):.2e} off"
    return ""


def run(poisoned: Callable[..., Any], q: Any, k: Any, v: Any, more: dict[str, jax.Array], **options: Any) -> Any:
    """(output, log-sum-exp)."""
    names = tuple(more)

    def call(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return attention(q, k, v, **dict(zip(names, rest, strict=True)), **{"return_lse": True, **options})

    return poisoned(call, q, k, v, *more.values())


@pytest.mark.parametrize("dtype", [BF, F16])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", MASKS)
def test_every_form(poisoned: Callable[..., Any], dtype: Any, d: int, causal: Causal) -> None:
    rng = np.random.default_rng()
    for forms in FORMS:
        for s, t in ((256, 256), (1, 1), (300, 411), (129, 64), (64, 1000)):
            q, k, v = inputs_of("normal", d, dtype, s, t, 4, 2, 2, rng)
            more = biases_of(q, k, forms, rng)
            found = run(poisoned, q, k, v, more, causal=causal)
            assert not (wrong := judge(found, q, k, v, causal, more)), f"{forms} s{s} t{t}: {wrong}"


@pytest.mark.parametrize("seed", range(16))
def test_sampled(poisoned: Callable[..., Any], seed: int) -> None:
    """16 cases each over lengths, heads, head dims, dtypes, masks, forms and kinds of inputs; the same for the same seed."""
    rng = np.random.default_rng(seed)
    failures = []
    for case in range(16):
        d = int(rng.choice((64, 128, 256, 96, 32, 80, 72, 120)))
        dtype, kind = (BF, F16)[int(rng.integers(2))], str(rng.choice(KINDS))
        h_kv, group, b = (int(rng.integers(1, n)) for n in (4, 4, 4))
        s, t = (int(n) for n in rng.integers(1, int(rng.choice((70, 400, 1400))), 2))
        causal, forms = MASKS[int(rng.integers(3))], FORMS[int(rng.integers(len(FORMS)))]
        q, k, v = inputs_of(kind, d, dtype, s, t, h_kv * group, h_kv, b, rng)
        more = biases_of(q, k, forms, rng)
        if wrong := judge(run(poisoned, q, k, v, more, causal=causal), q, k, v, causal, more):
            what = f"b{b} s{s} t{t} h{h_kv * group}/{h_kv} d{d} {jnp.dtype(dtype).name} {kind} {causal=} {forms}"
            failures.append(f"case {case}: {what}: {wrong}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d,fields", BIASED)
def test_every_option(poisoned: Callable[..., Any], d: int, fields: dict[str, Any], causal: bool) -> None:
    """Several tiles for a block, tails in both lengths, rows that see none of the first key blocks."""
    rng = np.random.default_rng()
    config = AttentionConfig(**fields) if fields else default_config(d, bias=True)
    q, k, v = inputs_of("normal", d, BF, 1333, 1501, 8, 2, 2, rng)
    more = biases_of(q, k, ((False, True, True), (True, False, False)), rng)
    found = run(poisoned, q, k, v, more, causal=causal, config=config)
    lse_off = 2**-8 if config.sum_by_product else 1e-4  # a rounding of the largest probability
    assert not (wrong := judge(found, q, k, v, causal, more, lse_off)), wrong


@pytest.mark.parametrize("low", [-1e4, -1e9, -3e38, -np.inf])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_large_negative_values_hide_keys(poisoned: Callable[..., Any], low: float, d: int) -> None:
    """A block of keys behind the end, the first that is visited, and single ones; rows of nothing but such values are no NaN."""
    rng = np.random.default_rng()
    q, k, v = inputs_of("normal", d, BF, 700, 900, 2, 2, 1, rng)
    hidden = np.zeros((1, 1, 700, 900), bool)
    hidden[..., 600:] = True
    hidden[:, :, ::3, 7:90] = True
    hidden[:, :, 5] = True
    out, lse = run(poisoned, q, k, v, {"bias": jnp.asarray(np.where(hidden, np.float32(low), 0))})
    exact, exact_lse = reference.attention(q, k, v, mask=~hidden)
    seen = ~hidden[0, 0].all(1)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert reference.relative_error(np.asarray(out)[:, seen], exact[:, seen]) <= 5e-3
    np.testing.assert_allclose(np.asarray(lse)[..., seen], exact_lse[..., seen], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_the_same_bits_every_time(d: int, causal: bool) -> None:
    """Many tiles for a multiprocessor, 100 runs; without the log-sum-exp, so that the default sums by products."""
    rng = np.random.default_rng(d)
    q, k, v = inputs_of("normal", d, BF, 2048, 2048, 16, 16, 2, rng)
    bias = jnp.asarray(rng.standard_normal((1, 16, 2048, 2048)), BF)
    f = jax.jit(lambda q, k, v, bias: attention(q, k, v, bias=bias, causal=causal))
    first = f(q, k, v, bias)
    differ = jax.jit(lambda x, y: jnp.sum(x != y))
    assert int(sum(differ(first, f(q, k, v, bias)) for _ in range(100))) == 0
    part = slice(None), slice(0, 2048), slice(0, 1)
    exact, _ = reference.attention(*(x[part] for x in (q, k, v)), causal=causal, bias=bias[:, :1])
    assert reference.relative_error(first[part], exact) <= 5e-3


@pytest.mark.parametrize("d", (64, 128))
def test_without_a_maximum(poisoned: Callable[..., Any], d: int) -> None:
    """Of scores that are small; hidden keys stay hidden."""
    rng = np.random.default_rng()
    q, k, v = inputs_of("normal", d, BF, 300, 333, 4, 2, 2, rng)
    more = biases_of(q, k, ((False, True, True), (True, False, True)), rng)
    found = run(poisoned, q, k, v, more, causal=True, use_stable_softmax=False)
    assert not (wrong := judge(found, q, k, v, True, more)), wrong


def test_vmap(poisoned: Callable[..., Any]) -> None:
    """Of everything, and of a bias that all share."""
    rng = np.random.default_rng()
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, n, 2, 64)), BF) for n in (200, 300, 300))
    bias = jnp.asarray(rng.standard_normal((3, 1, 2, 200, 300)), jnp.float32)
    call = functools.partial(attention, return_lse=True)
    for x, axis in ((bias, 0), (bias[0], None)):
        over = jax.vmap(lambda q, k, v, bias: call(q, k, v, bias=bias), in_axes=(0, 0, 0, axis))
        out, lse = poisoned(over, q, k, v, x)
        for i in range(3):
            more = {"bias": x[i] if axis == 0 else x}
            assert not (wrong := judge((out[i], lse[i]), q[i], k[i], v[i], False, more)), wrong
