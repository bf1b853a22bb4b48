"""Attention: checks the call, chooses the kernel by the type of its config, and has no kernel of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.frontend.tracebacks import located_at_its_call
from mosaic_gpu.kernels import attention_gradient, dispatch, xla
from mosaic_gpu.kernels.attention_gradient import NO_BIAS_GRADIENTS, NO_GRADIENTS
from mosaic_gpu.kernels.masks import Causal
from mosaic_gpu.kernels.sm90 import attention as sm90
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig
from mosaic_gpu.kernels.sm100 import attention as sm100
from mosaic_gpu.kernels.tiles import check_head_dims
from mosaic_gpu.runtime.device import default_arch

Sm100Config = sm100.AttentionConfig
AttentionConfig = sm90.AttentionConfig | Sm100Config


@located_at_its_call
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: Causal = False,
    scale: float | None = None,
    return_lse: bool = False,
    config: AttentionConfig | None = None,
    implementation: str | Sequence[str] | None = None,
    deterministic: bool = False,
    backward_config: AttentionBackwardConfig | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    use_stable_softmax: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T + bias) v.

    q: (..., s, h, d); k: (..., t, h_kv, d); v: (..., t, h_kv, dv); returns (..., s, h, dv).  All of one dtype, float16 or
    bfloat16; d and dv multiples of 8 up to 256; h a multiple of h_kv (grouped heads); any s and t; any number of equal
    leading batch dimensions.
    causal: query i sees keys 0 to i; "bottom_right": the last query sees all keys, each before it one less (query i the keys
    0 to i + t - s), as FlashAttention has it.  scale: positive, default d ** -0.5.
    bias: (..., h, s, t), added to the scaled scores; mask: bool, of that shape: False keys are not seen.  Any extent of either
    but the last may be 1, which stands for all.  Our kernels round a bias to q's dtype and take a mask as one of -inf; both are
    written out for every query, and where t is no multiple of 8 copied.
    return_lse: also return the natural log-sum-exp of the scaled scores, with the bias, (..., h, s) float32.
    A query that sees no key gives zeros, and an LSE of -inf.  Scaled scores must stay below 2^28 in magnitude: beyond, the
    exponential of a float32 rounding error over- or underflows (so hide keys by -inf or a mask; of a query all of whose keys have
    a bias of -1e30 or finfo.min, the result is undefined).  Gradients compute the probabilities again from a float32 LSE, so with
    scores of 2^n they are 2^(n - 23) off, and dS takes its row sum from the rounded output, as FlashAttention does: where a
    softmax is peaked or sees few keys, dQ and dK cancel to less than their own rounding errors.
    use_stable_softmax: False leaves a row's maximum where it is: exp(scale q k^T) in float32 as it comes, with less work for each
    score.  For a caller who knows that the scaled scores are small.  Hopper's kernel rounds these exponentials to q's dtype:
    above 88 (float16: 11) they are infinite, and so the row's results are inf or NaN, as its LSE may be; far below zero
    (float16: -9) they lose digits, and a row of which all vanish gives zeros and an LSE of -inf.  'xla' divides by their sum
    first.  Blackwell's kernel has no such variant: UnsupportedCall.  Gradients are those of the LSE, so as good as it is.
    config: None takes the tuned one for this device and shape, else the default of the device's generation
    (`mosaic_gpu.explain_config("attention", q, k, v, causal=..., bias=..., mask=...)` says which).  With a bias or a mask: one
    that was tuned with a bias, else the default that has room for one.  `use_stable_softmax` makes no difference.
    implementation: 'mosaic_gpu' or 'xla' (plain JAX: any float dtype and head dim), which must then take the call; a sequence
    of these: the first that takes it; None: ours, and XLA's on GPUs for which there is no kernel, said once in the log.
    deterministic: gradients are the same bits in every run; else dQ is summed up in any order at head dims to 128, where that
    is faster.
    backward_config: of the kernels that make the gradients; None takes the tuned one or the default, as `config` does
    (`mosaic_gpu.explain_config("attention_backward", q, k, v, causal=...)`).

    On Hopper differentiable once, in reverse mode: dQ, dK and dV come from kernels of their own; the cotangent of a returned LSE
    counts.  With a bias or a mask, and on Blackwell, not yet: UnsupportedCall names implementation='xla', which is.
    Output and LSE are what the backward pass keeps besides q, k and v; checkpoint policies know them as "attention_out"
    and "attention_lse".  Forward mode and second derivatives raise UnsupportedCall (a forward mode over a jit around
    attention: JAX's own TypeError); implementation='xla' has both.

    Raises UnsupportedCall for shapes and dtypes it does not have, DeviceMismatch for a config of another generation.
    """
    flags = {"return_lse": return_lse, "deterministic": deterministic, "use_stable_softmax": use_stable_softmax}
    _check(q, k, v, scale, causal, flags, backward_config)
    for name, x in (("bias", bias), ("mask", mask)):
        _check_like_scores(name, x, q, k)
    *batch, s, h, d = q.shape
    t = k.shape[-3]
    scale = d**-0.5 if scale is None else float(scale)
    arch = default_arch()

    def empty() -> tuple[jax.Array, ...]:
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), jnp.full((*batch, h, s), -jnp.inf, jnp.float32)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[-3:])

    def of_scores(x: jax.Array | None) -> jax.Array | None:
        """A bias or mask of four dimensions."""
        if x is None:
            return None
        leads = x.shape[:-3]
        if any(n != 1 for n in leads):
            x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    def ours() -> tuple[jax.Array, ...]:
        if config is None:
            dispatch.require_kernel("attention", arch)
        _check_supported(q, v)
        if 0 in q.shape or t == 0:
            return empty()
        arrays = flat(q), flat(k), flat(v)
        biased = bias is not None or mask is not None
        c = choose_config(*arrays, causal, biased) if config is None else config
        biases = [as_bias(of_scores(bias), of_scores(mask), s, q.dtype)] if biased else []
        if isinstance(c, sm90.AttentionConfig):
            dispatch.match_generation(c, arch)
            if biased and backward_config is not None:
                raise UnsupportedCall(f"attention: backward_config with a bias or a mask: {NO_BIAS_GRADIENTS}")
            call = attention_gradient.Call(
                c, backward_config, causal, scale, return_lse, deterministic, config is None, use_stable_softmax
            )
            return attention_gradient.attend(call, *arrays, *biases)
        if isinstance(c, Sm100Config):
            dispatch.match_generation(c, arch)
            if backward_config is not None:
                raise UnsupportedCall(f"attention: backward_config with a config of {c.generation}: {NO_GRADIENTS}")
            if not use_stable_softmax:
                raise UnsupportedCall(
                    "attention: use_stable_softmax=False: Blackwell's kernel always subtracts the row's maximum; leave it out, "
                    "or take implementation='xla'"
                )
            call100 = functools.partial(sm100.attention, config=c, causal=causal, scale=scale, return_lse=return_lse)
            return attention_gradient.without_gradients(call100, NO_GRADIENTS, *arrays, *biases)
        raise TypeError(f"config is an AttentionConfig of one of the generations, not {type(c).__name__}")

    def xlas() -> tuple[jax.Array, ...]:
        if 0 in q.shape or t == 0:
            return empty()
        more: dict[str, Any] = dict(bias=of_scores(bias), mask=of_scores(mask), stable=use_stable_softmax)
        return xla.attention(flat(q), flat(k), flat(v), causal=causal, scale=scale, **more)

    calls = {"mosaic_gpu": ours, "xla": xlas}
    given = backward_config if config is None else config
    results = dispatch.run("attention", implementation, given, arch, calls)
    out = results[0].reshape(*q.shape[:-1], v.shape[-1])
    return (out, results[1].reshape(*batch, h, s)) if return_lse else out


def choose_config(q: jax.Array, k: jax.Array, v: jax.Array, causal: Causal, biased: bool = False) -> AttentionConfig:
    """The overridden or tuned config for this device and call if there is one, else the generation's default."""
    mask = True if biased else None
    found: AttentionConfig = dispatch.choose_config("attention", default_arch(), q, k, v, causal=causal, mask=mask)
    return found


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float | None,
    causal: Causal,
    flags: dict[str, bool],
    backward_config: AttentionBackwardConfig | None,
) -> None:
    for name, value in (("causal", causal), ("scale", scale)):
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"attention: {name} decides which kernel is compiled: under jit name it in static_argnames")
    if not isinstance(causal, bool) and causal != "bottom_right":
        raise TypeError(f"attention: causal={causal!r} is neither a bool nor 'bottom_right'")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"attention: {name}={flag!r} is no bool")
    if backward_config is not None and not isinstance(backward_config, AttentionBackwardConfig):
        raise TypeError(
            f"attention: backward_config is an AttentionBackwardConfig, not {type(backward_config).__name__}"
        )
    if scale is not None and not (isinstance(scale, (int, float)) or getattr(scale, "shape", None) == ()):
        raise TypeError(f"attention: scale={scale!r} is no number")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "ndim"):
            raise TypeError(f"attention: {name} is an array, not {x!r:.60}")
        if x.ndim < 3:
            raise UnsupportedCall(f"attention: {name} has shape {x.shape}; it takes (..., length, heads, head dim)")
    if not jnp.issubdtype(q.dtype, jnp.floating) or not q.dtype == k.dtype == v.dtype:
        raise UnsupportedCall(f"attention of q {q.dtype}, k {k.dtype}, v {v.dtype}: all float16 or all bfloat16")
    if k.shape[:-1] != v.shape[:-1] or q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        raise UnsupportedCall(
            f"attention: q {q.shape}, k {k.shape}, v {v.shape}: k and v must be alike but for the head dim, and share batch "
            "dimensions, k also its head dim with q"
        )
    h, h_kv = q.shape[-2], k.shape[-2]
    if h_kv == 0 or h % h_kv:
        raise UnsupportedCall(f"attention: {h} query heads over {h_kv} KV heads: {h} is not a multiple of {h_kv}")
    if q.shape[-1] == 0:
        raise UnsupportedCall("attention: head dim 0: q and k have no columns to make scores of")
    if scale is not None and not 0 < scale < math.inf:
        raise UnsupportedCall(f"attention: scale={scale}; it must be positive and finite")


def _check_like_scores(name: str, x: jax.Array | None, q: jax.Array, k: jax.Array) -> None:
    if x is None:
        return
    *batch, s, h, _ = q.shape
    shape = (*batch, h, s, k.shape[-3])
    wanted, kind = ("bool", jnp.bool_) if name == "mask" else ("floating", jnp.floating)
    if not hasattr(x, "ndim"):
        raise TypeError(f"attention: {name} is an array, not {x!r:.60}")
    fits = x.ndim == len(shape) and x.shape[-1] == shape[-1]
    if not fits or any(n not in (1, m) for n, m in zip(x.shape, shape, strict=True)):
        raise UnsupportedCall(
            f"attention: {name} has shape {x.shape}; it takes {shape}, of which any extent but the last may be 1"
        )
    if not (x.dtype == kind if name == "mask" else jnp.issubdtype(x.dtype, kind)):
        raise UnsupportedCall(f"attention: {name} is {x.dtype}; it takes a {wanted} array")


def as_bias(bias: jax.Array | None, mask: jax.Array | None, queries: int, dtype: Any) -> jax.Array:
    """Both as one bias, (b or 1, h or 1, queries, t), of a dtype."""
    x = jnp.zeros((), dtype) if bias is None else bias.astype(dtype)
    x = x if mask is None else jnp.where(mask, x, -jnp.inf)
    return jnp.broadcast_to(x, (*x.shape[:2], queries, x.shape[3])).astype(dtype)


def _check_supported(q: jax.Array, v: jax.Array) -> None:
    """What our kernels ask for beyond that."""
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        raise UnsupportedCall(
            f"attention of {q.dtype}: all float16 or all bfloat16; implementation='xla' takes any float"
        )
    check_head_dims(q.shape[-1], v.shape[-1])
