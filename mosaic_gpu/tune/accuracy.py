"""When a result is right.  Of attention: error against float32 at most twice that of plain attention that rounds P to the dtype.

The reference is computed by XLA, in float32 without TF32, head by head: exact enough to judge 16-bit results by, and fast
enough on a GPU to be taken over all heads of every kernel that is timed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FLOOR = 1e-3  # of the output's root mean square


# XLA tries out many matrix products before it takes one, for seconds; the reference runs once.
@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": "0"})
def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool | jax.Array, scale: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T) v in float32, and the same with the probabilities rounded to q's dtype, as tensor cores need.

    q: (b, s, h, d); k: (b, t, h_kv, d); v: (b, t, h_kv, dv).  causal and scale are traced: both masks of a shape are one program.
    """
    b, s, h, d = q.shape
    t, h_kv = k.shape[1:3]
    heads_first = [x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v)]
    seen = (jnp.arange(t)[None] <= jnp.arange(s)[:, None]) | jnp.logical_not(causal)

    def one_head(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        kv = i // (h // h_kv)
        q1, k1, v1 = (
            lax.dynamic_index_in_dim(x, j, keepdims=False).astype(jnp.float32)
            for x, j in zip(heads_first, (i, kv, kv), strict=True)
        )
        scores = jnp.where(seen, jnp.matmul(q1, k1.T, precision=lax.Precision.HIGHEST) * scale, -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1)
        rounded = p.astype(q.dtype).astype(jnp.float32)
        return jnp.matmul(p, v1, precision=lax.Precision.HIGHEST), jnp.matmul(
            rounded, v1, precision=lax.Precision.HIGHEST
        )

    exact, rounded = (x.reshape(b, h, s, -1).transpose(0, 2, 1, 3) for x in lax.map(one_head, jnp.arange(b * h)))
    return exact, rounded


@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": "0"})
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in float32 without TF32."""
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def relative_error(x: Any, reference: jax.Array) -> float:
    """||x - reference|| / ||reference||; NaN where x has one."""
    difference = jnp.linalg.norm((jnp.asarray(x).astype(jnp.float32) - reference).ravel())
    return float(difference / jnp.maximum(jnp.linalg.norm(reference.ravel()), 1e-30))


@dataclasses.dataclass(frozen=True)
class Judge:
    """Knows the right result of one call, and how far from it a kernel's may be."""

    reference: jax.Array
    allowed: float

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, scale: float | None = None) -> Judge:
        """A judge of results for these inputs."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        reference, rounded = plain_attention(q, k, v, causal, scale)
        return cls(reference, max(2 * relative_error(rounded, reference), FLOOR))

    @classmethod
    def of_product(cls, a: jax.Array, b: jax.Array) -> Judge:
        """A judge of a @ b: twice the error of the exact product rounded to the dtype of a."""
        reference = product(a, b)
        return cls(reference, max(2 * relative_error(reference.astype(a.dtype), reference), FLOOR))

    def error(self, out: Any) -> float:
        """The relative error of a result; NaN for one that has a NaN."""
        return relative_error(out, self.reference)

    def accepts(self, error: float) -> bool:
        """Whether an error is small enough; a NaN is not."""
        return error <= self.allowed
