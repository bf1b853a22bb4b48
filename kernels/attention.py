"""Attention: checks the call, chooses the kernel by the type of its config, and has no kernel of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mosaic_gpu.errors import CacheInvalid, DeviceMismatch, UnsupportedCall
from mosaic_gpu.kernels import attention_gradient
from mosaic_gpu.kernels.sm90 import attention as sm90
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig
from mosaic_gpu.kernels.sm100.attention import AttentionConfig as Sm100Config
from mosaic_gpu.runtime.device import default_arch
from mosaic_gpu.tune.cache import lookup

AttentionConfig = sm90.AttentionConfig | Sm100Config


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    config: AttentionConfig | None = None,
    deterministic: bool = False,
    backward_config: AttentionBackwardConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T) v.

    q: (..., s, h, d); k: (..., t, h_kv, d); v: (..., t, h_kv, dv); returns (..., s, h, dv).  All of one dtype, float16 or
    bfloat16; d and dv multiples of 16 up to 256; h a multiple of h_kv (grouped heads); any s and t; any number of equal
    leading batch dimensions.
    causal: query i sees keys 0 to i.  scale: positive, default d ** -0.5.
    return_lse: also return the natural log-sum-exp of the scaled scores, (..., h, s) float32.
    A query that sees no key gives zeros, and an LSE of -inf.
    config: None takes the tuned one for this device and shape, else the default of the device's generation.
    deterministic: gradients are the same bits in every run; else dQ is summed up in any order, which is faster.
    backward_config: of the kernels that make the gradients; None takes the default.

    Differentiable once, in reverse mode: dQ, dK and dV come from kernels of their own; the cotangent of a returned LSE counts.
    Output and LSE are what the backward pass keeps besides q, k and v; checkpoint policies know them as "attention_out"
    and "attention_lse".  Forward mode and second derivatives raise UnsupportedCall (a forward mode over a jit around
    attention: JAX's own TypeError).

    Raises UnsupportedCall for shapes and dtypes it does not have, DeviceMismatch for a config of another generation.
    """
    _check(q, k, v, scale)
    *batch, s, h, d = q.shape
    t, h_kv = k.shape[-3:-1]
    scale = d**-0.5 if scale is None else float(scale)
    if 0 in q.shape or t == 0:
        out = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        return (out, jnp.full((*batch, h, s), -jnp.inf, jnp.float32)) if return_lse else out
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    config = config or choose_config(q, k, v, causal)
    arch = default_arch()
    if isinstance(config, sm90.AttentionConfig):
        _match(config, arch, "sm_90")
        call = attention_gradient.Call(config, backward_config, causal, scale, return_lse, deterministic)
        results = attention_gradient.attend(call, q, k, v)
    elif isinstance(config, Sm100Config):
        _match(config, arch, "sm_10")
        raise UnsupportedCall(
            "attention has no Blackwell kernel yet; on sm_100a there is mosaic_gpu.kernels.sm100.matmul"
        )
    else:
        raise TypeError(f"config is an AttentionConfig of one of the generations, not {type(config).__name__}")
    out = results[0].reshape(*batch, s, h, v.shape[-1])
    return (out, results[1].reshape(*batch, h, s)) if return_lse else out


def choose_config(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> AttentionConfig:
    """The tuned config for this device and call if there is one, else the generation's default.

    Raises CacheInvalid if what the cache holds is no config of today's kernel.
    """
    arch = default_arch()
    blackwell = arch is not None and arch.startswith("sm_10")
    found = lookup("attention", tuning_key(q.shape, v.shape, str(q.dtype), causal))
    if found is None:
        return Sm100Config() if blackwell else sm90.default_config(q.shape[-1], v.shape[-1])
    try:
        if blackwell:
            return Sm100Config.from_json(found)
        config = sm90.AttentionConfig.from_json(found)
        config.check(q.shape[-1], v.shape[-1])
        return config
    except (TypeError, ValueError) as error:
        raise CacheInvalid(
            f"the tuning cache has an attention config that does not fit ({error}); run `mosaic-gpu tune run attention`"
        ) from error


def tuning_key(q_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: str, causal: bool) -> str:
    """What a tuned config depends on: head dims, dtype, mask, and the lengths by powers of two; not batch and heads."""

    def bucket(n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()

    dims = f"d{q_shape[-1]}" + (f"/{v_shape[-1]}" if v_shape[-1] != q_shape[-1] else "")
    return f"{dims} {dtype} {'causal' if causal else 'full'} s{bucket(q_shape[-3])} t{bucket(v_shape[-3])}"


def _match(config: AttentionConfig, arch: str | None, prefix: str) -> None:
    if arch is not None and not arch.startswith(prefix):
        raise DeviceMismatch(
            f"{type(config).__name__} is for {config.generation}, this device is {arch}; leave config out, or "
            "pass that generation's"
        )


def _check(q: jax.Array, k: jax.Array, v: jax.Array, scale: float | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3:
            raise UnsupportedCall(f"attention: {name} has shape {x.shape}; it takes (..., length, heads, head dim)")
    if q.dtype not in (jnp.float16, jnp.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise UnsupportedCall(f"attention of q {q.dtype}, k {k.dtype}, v {v.dtype}: all float16 or all bfloat16")
    if k.shape[:-1] != v.shape[:-1] or q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        raise UnsupportedCall(
            f"attention: q {q.shape}, k {k.shape}, v {v.shape}: k and v must be alike but for the head dim, and share batch "
            "dimensions, k also its head dim with q"
        )
    if not {q.shape[-1], v.shape[-1]} <= set(sm90.HEAD_DIMS):
        raise UnsupportedCall(
            f"attention: head dims {q.shape[-1]} and {v.shape[-1]}; this version has multiples of {sm90.HEAD_DIMS.step} from "
            f"{sm90.HEAD_DIMS[0]} to {sm90.HEAD_DIMS[-1]}; pad q, k and v with zeros and pass scale"
        )
    h, h_kv = q.shape[-2], k.shape[-2]
    if h_kv == 0 or h % h_kv:
        raise UnsupportedCall(f"attention: {h} query heads over {h_kv} KV heads: {h} is not a multiple of {h_kv}")
    if scale is not None and not scale > 0:
        raise UnsupportedCall(f"attention: scale={scale}; it must be positive")
