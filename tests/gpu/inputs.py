"""Inputs of attention that are hard on a softmax, and what plain attention makes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.masks import Causal

MASKS: tuple[Causal, ...] = (False, True, "bottom_right")
KINDS = ("normal", "outliers", "correlated", "below", "above", "peaked")


def inputs_of(kind: str, d: int, dtype: Any, s: int, t: int, h: int, h_kv: int, b: int, rng: Any) -> list[jax.Array]:
    """q, k and v of a kind that is hard on a softmax, or normal ones."""
    q, k, v = (rng.standard_normal((b, n, m, d)) for n, m in ((s, h), (t, h_kv), (t, h_kv)))
    if kind == "outliers":  # a few rows that see one key as good as alone, a few huge values
        q[:, ::17] *= 12
        v[:, ::13] *= 30
    elif kind == "correlated":
        k += 2 * rng.standard_normal((1, 1, 1, d))
        v += 3
    elif kind in ("below", "above"):  # logits around -120 and 300: exp(-LSE) alone over- or underflows
        q[..., 0], k[..., 0] = 16, {"below": -120, "above": 300}[kind] / 16 * d**0.5
    elif kind == "peaked":
        q *= 8
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: Causal) -> np.ndarray:
    """Attention in float32 from the same rounded inputs, P and the result rounded: a kernel may be twice as far off."""
    group = q.shape[2] // k.shape[2]
    dtype = q.dtype
    qf, kf, vf = (np.asarray(x, np.float32) for x in (q, k, v))
    kf, vf = (np.repeat(x, group, 2).transpose(0, 2, 1, 3) for x in (kf, vf))
    s = qf.transpose(0, 2, 1, 3) @ kf.transpose(0, 1, 3, 2) * np.float32(q.shape[-1] ** -0.5)
    s = np.where(reference.visible(q.shape[1], k.shape[1], causal), s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    o = p.astype(dtype).astype(np.float32) @ vf / np.maximum(p.sum(-1, keepdims=True), 1e-30)
    return o.transpose(0, 2, 1, 3).astype(dtype).astype(np.float32)
