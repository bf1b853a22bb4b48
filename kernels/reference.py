"""References in float32 or float64, in plain JAX-free NumPy: what the kernels are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np


def matmul(a: Any, b: Any) -> np.ndarray:
    """a @ b in float64."""
    return np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None, dtype: Any = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale q k^T) v and its natural log-sum-exp, in `dtype`.

    q: (b, s, h, d); k, v: (b, t, h_kv, d), h a multiple of h_kv.  causal: query i sees keys 0..i (aligned top left).
    Returns (b, s, h, d) and (b, h, s).  A row that sees no key gives zeros and -inf.
    """
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    b, s, h, d = q.shape
    t, h_kv = k.shape[1], k.shape[2]
    scale = d**-0.5 if scale is None else scale
    group = h // h_kv
    out = np.zeros((b, s, h, v.shape[-1]), dtype)
    lse = np.full((b, h, s), -np.inf, dtype)
    if 0 in (b, s, h, t):
        return out, lse
    seen = np.arange(t)[None] <= np.arange(s)[:, None] if causal else np.ones((s, t), bool)
    for i in range(b):
        for j in range(h):
            scores = np.where(seen, q[i, :, j] @ k[i, :, j // group].T * scale, -np.inf)
            top = scores.max(1, keepdims=True)
            top = np.where(np.isfinite(top), top, 0)
            p = np.exp(scores - top)
            total = p.sum(1, keepdims=True)
            with np.errstate(divide="ignore", invalid="ignore"):
                out[i, :, j] = np.where(total > 0, p @ v[i, :, j // group] / total, 0)
                lse[i, j] = (np.log(total) + top)[:, 0]
    return out, lse


def relative_error(x: Any, reference: np.ndarray) -> float:
    """||x - reference|| / ||reference||; NaN where x has one."""
    difference = np.linalg.norm(np.asarray(x).astype(np.float64) - reference)
    return float(difference / max(np.linalg.norm(reference), np.finfo(np.float64).tiny))
