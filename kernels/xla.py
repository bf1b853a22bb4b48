"""The same operations written in plain JAX: what the dispatchers run on GPUs for which there is no kernel.

Right for any float dtype and head dim, differentiable, not fast: the scores lie in memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mosaic_gpu.kernels.masks import Causal, last_key_of_query_0


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: Causal,
    scale: float,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    stable: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T + bias) v, in q's dtype, and the natural log-sum-exp, (b, h, s) float32.

    q: (b, s, h, d); k: (b, t, h_kv, d); v: (b, t, h_kv, dv), h a multiple of h_kv; bias, mask: (b, h, s, t), any extent but
    the last may be 1.  Sums are float32.  A query that sees no key: zeros, -inf.  stable: a row's maximum is subtracted before
    the exponentials.
    """
    b, s, h, d = q.shape
    t, h_kv = k.shape[1:3]
    grouped = q.reshape(b, s, h_kv, h // h_kv, d)
    scores = jnp.einsum("bsngd,btnd->bngst", grouped, k, preferred_element_type=jnp.float32) * scale
    by_group = [None if x is None else jnp.broadcast_to(x, (b, h, s, t)).reshape(scores.shape) for x in (bias, mask)]
    scores = scores if by_group[0] is None else scores + by_group[0].astype(jnp.float32)
    scores = scores if by_group[1] is None else jnp.where(by_group[1], scores, -jnp.inf)
    diagonal = last_key_of_query_0(causal, s, t)
    if diagonal is not None:
        scores = jnp.where(jnp.arange(t)[None] <= jnp.arange(s)[:, None] + diagonal, scores, -jnp.inf)
    seen = (scores > -jnp.inf).any(-1, keepdims=True)
    scores = jnp.where(seen, scores, 0.0)  # before the exponentials, whose gradients are then no NaN
    # Divided by their sum, as a logarithm of that beside large scores would be rounded to their size.
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True)) if stable and t else jnp.zeros((), jnp.float32)
    p = jnp.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    vanished = total == 0
    total = jnp.where(vanished, 1.0, total)
    seen = seen & ~vanished
    p = jnp.where(seen, p / total, 0.0)
    lse = jnp.where(seen, jnp.log(total) + top, -jnp.inf)[..., 0]
    out = jnp.einsum("bngst,btnd->bsngd", p.astype(q.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(b, s, h, v.shape[3]), lse.reshape(b, h, s)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in a's dtype; sums are float32."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)
