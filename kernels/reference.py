"""References in float32 or float64, in plain NumPy: what the kernels are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from mosaic_gpu.kernels.masks import Causal, last_key_of_query_0


def matmul(a: Any, b: Any) -> np.ndarray:
    """a @ b in float64."""
    return np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)


def visible(s: int, t: int, causal: Causal) -> np.ndarray:
    """Which of t keys each of s queries sees, (s, t) bool."""
    diagonal = last_key_of_query_0(causal, s, t)
    return np.tri(s, t, t if diagonal is None else diagonal, dtype=bool)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    scale: float | None = None,
    dtype: Any = np.float64,
    bias: Any = None,
    mask: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale q k^T + bias) v and its natural log-sum-exp, in `dtype`.

    q: (b, s, h, d); k, v: (b, t, h_kv, d), h a multiple of h_kv.  causal, bias, mask: as `mosaic_gpu.kernels.attention.attention`
    takes them.
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
    seen = np.broadcast_to(visible(s, t, causal), (b, h, s, t))
    seen = seen if mask is None else seen & np.asarray(mask)
    more = np.broadcast_to(np.zeros((), dtype) if bias is None else np.asarray(bias).astype(dtype), (b, h, s, t))
    for i in range(b):
        for j in range(h):
            scores = np.where(seen[i, j], q[i, :, j] @ k[i, :, j // group].T * scale + more[i, j], -np.inf)
            top = scores.max(1, keepdims=True)
            top = np.where(np.isfinite(top), top, 0)
            p = np.exp(scores - top)
            total = p.sum(1, keepdims=True)
            with np.errstate(divide="ignore", invalid="ignore"):
                out[i, :, j] = np.where(total > 0, p @ v[i, :, j // group] / total, 0)
                lse[i, j] = (np.log(total) + top)[:, 0]
    return out, lse


def attention_gradients(
    q: Any,
    k: Any,
    v: Any,
    d_out: Any,
    d_lse: Any,
    *,
    causal: Causal,
    scale: float,
    rounded: bool = False,
    out: Any = None,
    absolute: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ, dK and dV of softmax(scale q k^T) v, in float64.

    q: (b, s, h, d); k: (b, t, h_kv, d); v: (b, t, h_kv, dv); d_out: (b, s, h, dv) and d_lse: (b, h, s), the cotangents of the
    output and of its natural log-sum-exp.
    rounded: in float32 instead, with O, P, dS and the results rounded to q's dtype, as any kernel on 16-bit tensor cores must.
    out: O as a forward kernel has rounded it, (b, s, h, dv), from which a backward kernel starts: where large terms of dS cancel,
    that rounding is most of the error, and one's own would be another.
    absolute: sums of the absolute values of all terms instead, of which float32 may lose 2^-24 in each sum.
    """
    real = np.float32 if rounded else np.float64
    dtype = np.asarray(q).dtype
    q, k, v, d_out, d_lse = (np.asarray(x).astype(real) for x in (q, k, v, d_out, d_lse))

    def to_type(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(real) if rounded else x

    b, s, h, _ = q.shape
    t, group = k.shape[1], h // k.shape[2]
    seen = visible(s, t, causal)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(b):
        for j in range(h):
            own_k, own_v, do = k[i, :, j // group], v[i, :, j // group], d_out[i, :, j]
            scores = np.where(seen, q[i, :, j] @ own_k.T * real(scale), -np.inf)
            top = scores.max(1, keepdims=True)
            p = np.exp(scores - np.where(np.isfinite(top), top, 0))
            p /= np.maximum(p.sum(1, keepdims=True), np.finfo(real).tiny)  # a row that sees no key is zeros
            own_out = to_type(to_type(p) @ own_v) if out is None else np.asarray(out)[i, :, j].astype(real)
            if absolute:
                q_, own_k, own_v, do, own_out = (np.abs(x) for x in (q[i, :, j], own_k, own_v, do, own_out))
                ds = p * (do @ own_v.T + (own_out * do).sum(1, keepdims=True) + np.abs(d_lse[i, j])[:, None])
            else:
                q_, delta = q[i, :, j], (own_out * do).sum(1, keepdims=True) - d_lse[i, j][:, None]
                ds = to_type(p * (do @ own_v.T - delta))
            dq[i, :, j] = real(scale) * ds @ own_k
            dk[i, :, j // group] += real(scale) * ds.T @ q_
            dv[i, :, j // group] += to_type(p).T @ do
    return to_type(dq), to_type(dk), to_type(dv)


def gradient_errors(found: Any, exact: Any, plain: Any) -> list[tuple[float, float]]:
    """(rms error, allowed rms error) of each gradient: twice that of `plain`, at least 1e-3 of the gradient's rms.

    exact: `attention_gradients(...)`; plain: the same, rounded.  An error is NaN where a gradient has one.
    """

    def rms(x: np.ndarray) -> float:
        return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0

    found = [np.asarray(x).astype(np.float64) for x in found]
    return [
        (rms(x - y), max(2 * rms(z.astype(np.float64) - y), 1e-3 * rms(y)))
        for x, y, z in zip(found, exact, plain, strict=True)
    ]


def relative_error(x: Any, reference: np.ndarray) -> float:
    """||x - reference|| / ||reference||; NaN where x has one."""
    difference = np.linalg.norm(np.asarray(x).astype(np.float64) - reference)
    return float(difference / max(np.linalg.norm(reference), np.finfo(np.float64).tiny))
