"""Inputs of attention that are hard on a softmax, and what plain attention makes of them."""

from typing import Any

import jax
import jax.numpy as jnp

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
