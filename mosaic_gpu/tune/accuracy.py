"""When a result is right.  Of attention: error against float32 at most twice that of plain attention that rounds P to the dtype.

The reference is computed by XLA, in float32 without TF32, head by head: exact enough to judge 16-bit results by, and fast
enough on a GPU to be taken over all heads of every kernel that is timed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FLOOR = 1e-3  # of the output's root mean square


# XLA tries out many matrix products before it takes one, for seconds; the reference runs once.
@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": "0"})
def plain_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool | jax.Array,
    scale: float | jax.Array,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale q k^T + bias) v in float32, and the same with the probabilities rounded to q's dtype, as tensor cores need.

    q: (b, s, h, d); k: (b, t, h_kv, d); v: (b, t, h_kv, dv); bias: (b or 1, h, s, t).  causal and scale are traced: both masks of
    a shape are one program.
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
        scores = jnp.matmul(q1, k1.T, precision=lax.Precision.HIGHEST) * scale
        if bias is not None:
            one = lax.dynamic_index_in_dim(bias.reshape(-1, s, t), i % (bias.shape[0] * h), keepdims=False)
            scores = scores + one.astype(jnp.float32)
        scores = jnp.where(seen, scores, -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1)
        rounded = _rounded(p, q.dtype)
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
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        scale: float | None = None,
        bias: jax.Array | None = None,
    ) -> Judge:
        """A judge of results for these inputs."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        reference, rounded = plain_attention(q, k, v, causal, scale, bias)
        return cls(reference, max(2 * relative_error(rounded, reference), FLOOR))

    @classmethod
    def of_product(cls, a: Any, b: Any, out: Any = None) -> Judge:
        """A judge of a @ b: twice the error of the exact product rounded to the dtype `out`, that of a by default."""
        reference = product(a, b)
        rounded = reference.astype(a.dtype if out is None else out)
        return cls(reference, max(2 * relative_error(rounded, reference), FLOOR))

    def same(self, first: Any, again: Any) -> bool:
        """Whether two results for the same inputs are the same, as they must be: in every bit."""
        return bool(jnp.array_equal(first, again))

    def error(self, out: Any) -> float:
        """The relative error of a result; NaN for one that has a NaN."""
        return relative_error(out, self.reference)

    def accepts(self, error: float) -> bool:
        """Whether an error is small enough; a NaN is not."""
        return error <= self.allowed


@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": "0"})
def plain_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool | jax.Array, scale: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output of attention, (b, s, h, dv), rounded to q's dtype, and its natural log-sum-exp, (b, h, s) float32."""

    def one_head(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.where(seen, _exact(q, k.T) * scale, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        return _exact(jnp.exp(scores - lse[:, None]), v), lse

    out, lse = _by_head(one_head, (q,), (k, v), causal)
    return out.transpose(0, 2, 1, 3).astype(q.dtype), lse


@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": "0"})
def plain_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, causal: bool | jax.Array, scale: float | jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """(dQ, dK, dV) in float32, and the same with the output, P and dS rounded to q's dtype."""

    def one_head(q: jax.Array, d_out: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> tuple[jax.Array, ...]:
        p = jax.nn.softmax(jnp.where(seen, _exact(q, k.T) * scale, -jnp.inf), axis=-1)
        dp = _exact(d_out, v.T)

        def of(round_: Any) -> tuple[jax.Array, ...]:
            delta = jnp.sum(round_(_exact(round_(p), v)) * d_out, axis=-1, keepdims=True)
            ds = round_(p * (dp - delta))
            return _exact(ds, k) * scale, _exact(ds.T, q) * scale, _exact(round_(p).T, d_out)

        return *of(lambda x: x), *of(lambda x: _rounded(x, dtype))

    dtype = q.dtype
    found = _by_head(one_head, (q, d_out), (k, v), causal)

    def in_order(x: jax.Array, heads: int) -> jax.Array:  # (b, h, n, d); KV heads: the sum over those that share one
        summed = x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2)
        return summed.transpose(0, 2, 1, 3)

    heads = (q.shape[2], k.shape[2], k.shape[2])
    six = [in_order(x, n) for x, n in zip(found, (*heads, *heads), strict=True)]
    return tuple(six[:3]), tuple(_rounded(x, dtype) for x in six[3:])


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """To the precision of a dtype, and kept in x's: there and back by conversions is a no-op to XLA on a GPU."""
    info: Any = jnp.finfo
    return lax.reduce_precision(x, info(dtype).nexp, info(dtype).nmant)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _by_head(f: Any, of_queries: Sequence[jax.Array], of_keys: Sequence[jax.Array], causal: bool | jax.Array) -> Any:
    """f of one head's arrays in float32, (length, head dim) each, and of the mask; its results as (b, h, ...)."""
    b, s, h, _ = of_queries[0].shape
    t, h_kv = of_keys[0].shape[1:3]
    seen = (jnp.arange(t)[None] <= jnp.arange(s)[:, None]) | jnp.logical_not(causal)

    def one(i: jax.Array) -> Any:
        batch, head = i // h, i % h
        own = [x[batch, :, head].astype(jnp.float32) for x in of_queries]
        shared = [x[batch, :, head // (h // h_kv)].astype(jnp.float32) for x in of_keys]
        return f(*own, *shared, seen)

    return jax.tree.map(lambda x: x.reshape(b, h, *x.shape[1:]), lax.map(one, jnp.arange(b * h)))


@dataclasses.dataclass(frozen=True)
class GradientJudge:
    """Knows (dQ, dK, dV) of one call, and how far from them a kernel's may be.

    limits: the relative error that each may have; errors are given as the worst one's share of its limit, times `allowed`.
    """

    reference: tuple[jax.Array, ...]
    limits: tuple[float, ...]

    @classmethod
    def of(
        cls, q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, *, causal: bool, scale: float | None = None
    ) -> GradientJudge:
        """A judge of results for these inputs: twice the error of plain gradients, rounded as tensor cores need it."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        exact, rounded = plain_gradients(q, k, v, d_out, causal, scale)
        limits = (max(2 * relative_error(x, y), FLOOR) for x, y in zip(rounded, exact, strict=True))
        return cls(exact, tuple(limits))

    @property
    def allowed(self) -> float:
        """The largest of the limits."""
        return max(self.limits)

    def same(self, first: Any, again: Any) -> bool:
        """Whether dK and dV are the same bits; dQ is summed up in any order."""
        return all(bool(jnp.array_equal(x, y)) for x, y in zip(first[1:], again[1:], strict=True))

    def error(self, out: Any) -> float:
        """Of the gradient that is worst in proportion to its limit, scaled so that `allowed` is the limit of all."""
        shares = [relative_error(x, y) / n for x, y, n in zip(out, self.reference, self.limits, strict=True)]
        return float("nan") if any(x != x for x in shares) else max(shares) * self.allowed

    def accepts(self, error: float) -> bool:
        """Whether an error is small enough; a NaN is not."""
        return error <= self.allowed
