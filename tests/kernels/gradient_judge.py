"""What error attention's gradients may have, element by element, by the roundings that the algorithm has by definition."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.masks import Causal

NAMES = ("delta", "dq", "dk", "dv")
FALSE_ALARMS = 1e-6  # how often right results are refused, where roundings are as random as the derivation takes them


@dataclasses.dataclass(frozen=True)
class Margin:
    """How much of what is allowed a result took: right are at most 1 each.

    element, where: the one closest to its bound, or beyond it.  total: the root of the mean square over the result.
    """

    name: str
    element: float
    total: float
    where: tuple[int, ...]
    error: float
    allowed: float

    def __str__(self) -> str:
        element = f"element {self.where} is {self.error:.2e} off, allowed {self.allowed:.2e}"
        return f"{self.name}: {element}; all together {self.total:.2f} of what is allowed"


def judge(found: Any, arrays: Any, out: Any, causal: Causal, scale: float, what: str = "") -> None:
    """Fails where `margins` are above 1, which NaN is, too; the message has every result that is."""
    bad = [m for m in margins(found, arrays, out, causal, scale) if not (m.element <= 1 and m.total <= 1)]
    assert not bad, f"{what} {'; '.join(map(str, bad))}"


def margins(found: Any, arrays: Any, out: Any, causal: Causal, scale: float) -> list[Margin]:
    """How near dQ, dK and dV, and before them delta, are to their bounds.

    found: dQ, dK, dV; arrays: q, k, v, d_out, d_lse, shapes as `reference.attention_gradients` has them; out: O, (b, s, h, dv),
    that the forward kernel handed to the backward kernel.  Another kernel's O, rounded otherwise, would not do: see below.

    With u the unit roundoff of the 16-bit type (2^-8 in bfloat16, 2^-11 in float16), an attention on 16-bit tensor cores rounds
    P, O, P again (for dV, and for dS where float32's takes too many registers), dS and its results, and has float32 between:

        O_i = sum_j P_ij V_j         delta_i = dO_i . O_i - d_lse_i     dS_ij = P_ij (dP_ij - delta_i)
        dQ_i = scale sum_j dS_ij K_j     dK_j = scale sum_i dS_ij Q_i       dV_j = sum_i P_ij dO_i

    A rounding error e of x has |e| <= h(x) = max(u |x|, half the smallest subnormal).  To first order the results are sums of
    such errors times what follows, so that their squares add up, at h^2 / 3 each as of uniform errors, to the variances

        dQ_id: scale^2 sum_j (h(dS_ij)^2 + h(P_ij)^2 (dP_ij - delta_i)^2) K_jd^2 / 3 + h(dQ_id)^2 / 3
        dK_jd: the same, summed over queries, with Q_id              dV_jc: sum_i h(P_ij)^2 dO_ic^2 / 3 + h(dV_jc)^2 / 3
        delta_i: sum_c dO_ic^2 (h(O_ic)^2 + sum_j h(P_ij)^2 V_jc^2) / 3

    None of them shrinks where the terms of dS or dQ cancel: the exact dQ is no measure of its error.  Where all keys share a
    large K_jd, as sum_j dS_ij = d_lse_i, that column of dQ is nearly zero and its error is not.  The error of delta, common to
    a row, has all of sum_j P_ij K_j for a factor: dQ, dK and dV are judged beside the float64 gradients from the delta that
    `out` gives, and this delta beside the exact one.

    Uniform errors are sub-Gaussian with their own variance as proxy: of independent ones |error| > lambda sigma has a
    probability of at most 2 exp(-lambda^2 / 2), so lambda = sqrt(2 ln(2 N / p)) for N elements and p = FALSE_ALARMS / 2.
    Also together: of n elements in m independent rows (queries for dQ and delta, keys for dK and dV), the mean of
    (error / sigma)^2 is above 1 + 2 sqrt(x / m) + 2 x / m with a probability of at most e^-x (Hsu, Kakade, Zhang: A tail
    inequality for quadratic forms of subgaussian random vectors, 2012; the trace is 1, no eigenvalue is above 1 / m).  This finds
    a scale that is 1 % off, which in bfloat16 no element shows by itself.

    float32 has a part, too, with g(n) = (n / 16 + 2) 2^-23 the relative error of a sum of n products on tensor cores, by the sum
    of their sizes.  A score is anywhere in g(d) scale |q_i|.|k_j| of where it should be, always the same in forward and backward
    kernels; what is common to a row is in its LSE as well and leaves P as it is.  This is a variance of
    (P_ij g(d) scale |q_i|.|k_j|)^2 / 12 beside that of h(P_ij).  So is the LSE's own rounding.  What float32 loses in dP, delta
    and the sums, common to rows or systematic, is allowed in full, as no chance makes it smaller.
    """
    q, k, v, d_out, d_lse = (np.asarray(x) for x in arrays)
    out = np.asarray(out).astype(np.float64)
    own, _ = reference.attention(q, k, v, causal=causal, scale=scale)
    errors = [np.einsum("bshd,bshd->bhs", d_out.astype(np.float64), out - own)]
    exact = reference.attention_gradients(q, k, v, d_out, d_lse, causal=causal, scale=scale, out=out)
    errors += [np.asarray(x).astype(np.float64) - y for x, y in zip(found, exact, strict=True)]
    variances, lost = _noise(q, k, v, d_out, d_lse, own, out, causal, scale)
    for variance, y in zip(variances[1:], exact, strict=True):
        variance += half_ulp(y, q.dtype) ** 2 / 3
    count = sum(x.size for x in errors)
    deviations = math.sqrt(2 * math.log(2 * count / (FALSE_ALARMS / 2)))
    rows = [x[..., None] if name == "delta" else x for name, x in zip(NAMES, errors, strict=True)]
    return [
        _margin(name, e, np.sqrt(variance.reshape(e.shape)), float32.reshape(e.shape), deviations)
        for name, e, variance, float32 in zip(NAMES, rows, variances, lost, strict=True)
    ]


def half_ulp(x: np.ndarray, dtype: Any) -> np.ndarray:
    """h(x), at most how far x is from the nearest number of a 16-bit type: 0 of 0."""
    info = ml_dtypes.finfo(dtype)
    return np.where(x != 0, np.maximum(float(info.eps) / 2 * np.abs(x), float(info.smallest_subnormal) / 2), 0)


def _margin(name: str, error: np.ndarray, sigma: np.ndarray, float32: np.ndarray, deviations: float) -> Margin:
    """error, sigma, float32 (what it may lose): of rows, in the last dimension."""
    if not error.size:
        return Margin(name, 0.0, 0.0, (), 0.0, 0.0)
    error, allowed = np.abs(error), float32 + deviations * sigma
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(error == 0, 0, error / allowed)  # of an allowed 0: infinite
        squares = np.where(sigma > 0, np.maximum(error - float32, 0) / sigma, 0) ** 2
    where = np.unravel_index(np.argmax(shares), error.shape)  # NaN comes first
    x, m = math.log(2 * len(NAMES) / FALSE_ALARMS), max(int((sigma > 0).any(-1).sum()), 1)
    most = 1 + 2 * math.sqrt(x / m) + 2 * x / m
    total = math.sqrt(squares.sum() / max(int((sigma > 0).sum()), 1) / most)
    return Margin(name, float(shares[where]), total, tuple(map(int, where)), float(error[where]), float(allowed[where]))


def _noise(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    d_lse: np.ndarray,
    exact_out: np.ndarray,
    out: np.ndarray,
    causal: Causal,
    scale: float,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of delta, dQ, dK and dV: the variances, without the rounding of the results, and what float32 may lose besides."""
    dtype = q.dtype
    q, k, v, d_out, d_lse = (x.astype(np.float64) for x in (q, k, v, d_out, d_lse))
    b, s, h, d = q.shape
    t, h_kv, dv = v.shape[1:]
    variances, lost = ([np.zeros(shape) for shape in ((b, h, s), q.shape, k.shape, v.shape)] for _ in range(2))
    group, seen = h // h_kv, reference.visible(s, t, causal)
    in_d, in_dv, over_keys, over_queries = (_steps(n) for n in (d, dv, t, s * group))
    for i, j in np.ndindex(b, h):
        own_q, do, own_k, own_v = q[i, :, j], d_out[i, :, j], k[i, :, j // group], v[i, :, j // group]
        scores = np.where(seen, own_q @ own_k.T * scale, -np.inf)
        top = scores.max(1, keepdims=True)
        p = np.exp(scores - np.where(np.isfinite(top), top, 0))
        p /= np.maximum(p.sum(1, keepdims=True), np.finfo(np.float64).tiny)
        less = do @ own_v.T - ((do * out[i, :, j]).sum(1) - d_lse[i, j])[:, None]
        ds = p * less
        q_size, k_size, v_size, do_size = (np.abs(x) for x in (own_q, own_k, own_v, do))
        sizes = q_size @ k_size.T * scale
        in_lse = 2.0**-22 * ((p * sizes).sum(1, keepdims=True) + np.log(t) + 1)
        from_float32 = (p * in_d * sizes) ** 2 / 12 + (p * in_lse) ** 2 / 3
        from_p = half_ulp(p, dtype) ** 2 / 3 + from_float32
        from_ds = half_ulp(ds, dtype) ** 2 / 3 + from_p * less**2
        from_out = half_ulp(exact_out[i, :, j], dtype) ** 2 / 3 + from_p @ own_v**2
        variances[0][i, j] = (do**2 * from_out).sum(1)
        variances[1][i, :, j] = scale**2 * from_ds @ own_k**2
        variances[2][i, :, j // group] += scale**2 * from_ds.T @ own_q**2
        variances[3][i, :, j // group] += from_p.T @ do**2

        of_delta = (do_size * np.abs(out[i, :, j])).sum(1) + np.abs(d_lse[i, j])
        of_ds = in_dv * p * (do_size @ v_size.T + of_delta[:, None])
        lost[0][i, j] = in_dv * of_delta + over_keys * (do_size * (p @ v_size)).sum(1)
        lost[1][i, :, j] = scale * ((of_ds + over_keys * np.abs(ds)) @ k_size + in_lse * np.abs(ds @ own_k))
        lost[2][i, :, j // group] += scale * (of_ds + over_queries * np.abs(ds)).T @ q_size
        lost[3][i, :, j // group] += over_queries * p.T @ do_size
    return variances, lost


def _steps(terms: int) -> float:
    """g: 16 products at a time are aligned with the sum so far and cut off at its precision; two more for what comes after."""
    return (terms / 16 + 2) * 2.0**-23
