"""Inputs of attention that are hard on a softmax, and what plain attention makes of them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def sampled(seed: int, cases: int = 24) -> Iterator[tuple[str, tuple[jax.Array, ...], dict[str, Any]]]:
    """Gradients to take: (its description; q, k, v and the cotangents of output and LSE; options of attention), the same for the
    same seed."""
    rng = np.random.default_rng(seed)
    for case in range(cases):
        d = int(rng.choice((64, 128, 256)))
        dtype, kind = (jnp.bfloat16, jnp.float16)[int(rng.integers(2))], str(rng.choice(KINDS))
        h_kv, group, b = (int(rng.integers(1, n)) for n in (4, 4, 4))
        s, t = (int(n) for n in rng.integers(1, 400, 2))
        causal, deterministic = MASKS[int(rng.integers(3))], bool(rng.integers(2))
        q, k, v = inputs_of(kind, d, dtype, s, t, h_kv * group, h_kv, b, rng)
        scale = float(d**-0.5 * rng.choice((1.0, 1.0, 0.7, 1.3)))
        lse_counts = float(rng.integers(2))
        d_out = jnp.asarray(rng.standard_normal(q.shape), dtype)
        d_lse = jnp.asarray(lse_counts * rng.standard_normal((b, h_kv * group, s)), jnp.float32)
        shape = f"b{b} s{s} t{t} h{h_kv * group}/{h_kv} d{d}"
        what = f"case {case}: {kind} {jnp.dtype(dtype).name} {shape} {causal=} {deterministic=}"
        yield what, (q, k, v, d_out, d_lse), {"causal": causal, "scale": scale, "deterministic": deterministic}
