"""The judge of attention's gradients: it accepts what any kernel on 16-bit tensor cores gives, and finds what is wrong."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from tests.gpu.inputs import KINDS, inputs_of, sampled
from tests.kernels import gradient_judge
from tests.kernels.gradient_judge import judge, margins

BF, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
ROWS = slice(64, 128)  # a block


@dataclasses.dataclass
class Head:
    """One head's attention and its gradients in float32, with P, O, dS and results rounded to q's type; dS has P unrounded, as
    kernels with registers for it have.  A defect replaces what a method gives."""

    q: Any
    k: Any
    v: Any
    d_out: Any
    d_lse: Any
    causal: Any
    scale: float

    def __post_init__(self) -> None:
        self.type = self.q.dtype
        self.seen = reference.visible(len(self.q), len(self.k), self.causal)
        self.q, self.k, self.v, self.d_out = (x.astype(np.float32) for x in (self.q, self.k, self.v, self.d_out))

    def rounded(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self.type).astype(np.float32)

    def scores(self) -> np.ndarray:
        return self.q @ self.k.T * np.float32(self.scale)

    def probabilities(self) -> np.ndarray:
        scores = np.where(self.seen, self.scores(), -np.inf)
        with np.errstate(invalid="ignore"):  # of a row that sees nothing
            p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return np.where(np.isnan(p), 0, p)

    def out(self) -> np.ndarray:
        return self.rounded(self.rounded(self.probabilities()) @ self.v)

    def delta(self) -> np.ndarray:
        return (self.out() * self.d_out).sum(1) - self.d_lse

    def score_gradients(self) -> np.ndarray:
        return self.rounded(self.probabilities() * (self.d_out @ self.v.T - self.delta()[:, None]))

    def gradients(self) -> list[np.ndarray]:
        ds, scale = self.score_gradients(), np.float32(self.scale)
        results = ds @ self.k * scale, ds.T @ self.q * scale, self.rounded(self.probabilities()).T @ self.d_out
        return [self.rounded(x) for x in results]


class RoundedP(Head):
    """dS has P as rounded, and scores are cut off at float32's precision after every 16 products, as tensor cores do."""

    def scores(self) -> np.ndarray:
        sums = np.zeros((len(self.q), len(self.k)), np.float32)
        for n in range(0, self.q.shape[1], 16):
            some = slice(n, n + 16)
            exact = sums + reference.matmul(self.q[:, some], self.k[:, some].T)
            sums = exact.astype(np.float32)
            sums = np.where(np.abs(sums) > np.abs(exact), np.nextafter(sums, np.float32(0)), sums)
        return sums * np.float32(self.scale)

    def score_gradients(self) -> np.ndarray:
        less = self.d_out @ self.v.T - self.delta()[:, None]
        return self.rounded(self.rounded(self.probabilities()) * less)


class KeysMissing(Head):
    """dQ lacks a block of keys."""

    def gradients(self) -> list[np.ndarray]:
        some = self.score_gradients()[:, ROWS] @ self.k[ROWS] * np.float32(self.scale)
        dq, *others = super().gradients()
        return [self.rounded(dq - some), *others]


class QueriesMissing(Head):
    """dK and dV lack a block of queries."""

    def gradients(self) -> list[np.ndarray]:
        dq, dk, dv = super().gradients()
        dk -= self.score_gradients()[ROWS].T @ self.q[ROWS] * np.float32(self.scale)
        return [dq, self.rounded(dk), self.rounded(dv - self.probabilities()[ROWS].T @ self.d_out[ROWS])]


class CutOff(Head):
    """What is rounded is rounded towards zero."""

    def rounded(self, x: np.ndarray) -> np.ndarray:
        near = super().rounded(x)
        return np.where(np.abs(near) > np.abs(x), np.nextafter(near.astype(self.type), self.type.type(0)), near).astype(
            np.float32
        )


class NoDelta(Head):
    def delta(self) -> np.ndarray:
        return np.zeros_like(self.d_lse)


class NoLseCotangent(Head):
    def delta(self) -> np.ndarray:
        return super().delta() + self.d_lse


class ScaleOfScores(Head):
    """1 % off, in the forward pass as well."""

    def scores(self) -> np.ndarray:
        return super().scores() * np.float32(1.01)


class ScaleOfGradients(Head):
    """1 % off."""

    def gradients(self) -> list[np.ndarray]:
        dq, dk, dv = super().gradients()
        return [self.rounded(dq * np.float32(1.01)), self.rounded(dk * np.float32(1.01)), dv]


class Leak(Head):
    """The backward kernel sees one key that the mask forbids, of a weight of about 1 % in its row."""

    def leaks(self, p: np.ndarray) -> np.ndarray:
        distance = np.where(self.seen, np.inf, np.abs(p - 0.01))
        return distance == distance.min()

    def probabilities(self) -> np.ndarray:
        p = super().probabilities()
        scores = self.scores()
        top = np.where(self.seen, scores, -np.inf).max(1, keepdims=True)
        total = np.where(self.seen, np.exp(scores - top), 0).sum(1, keepdims=True)
        others = np.where(self.seen, 0, np.minimum(np.exp(scores - top) / total, 1))
        return np.where(self.leaks(others), others, p)

    def out(self) -> np.ndarray:
        return self.rounded(self.rounded(Head.probabilities(self)) @ self.v)


class NextKey(Leak):
    """Every query sees one key too many."""

    def leaks(self, p: np.ndarray) -> np.ndarray:
        return np.eye(*p.shape, 1, dtype=bool)


# Of which results, of (delta, dq, dk, dv), the judge must find each wrong.
DEFECTS: dict[type[Head], tuple[str, ...]] = {
    KeysMissing: ("dq",),
    CutOff: ("delta", "dv"),
    QueriesMissing: ("dk", "dv"),
    NoDelta: ("dq", "dk"),
    NoLseCotangent: ("dq", "dk"),
    ScaleOfScores: (),  # of any
    ScaleOfGradients: ("dq", "dk"),
    Leak: ("dv",),
    NextKey: ("dq", "dk", "dv"),
}


def judged(kind: str, dtype: Any, make: Callable[..., Head], s: int = 200, t: int = 190) -> dict[str, Any]:
    """The margins of one head, by name."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    q, k, v = (np.asarray(x) for x in inputs_of(kind, 64, dtype, s, t, 1, 1, 1, rng))
    d_out, d_lse = rng.standard_normal(q.shape).astype(dtype), rng.standard_normal((1, 1, s)).astype(np.float32)
    arrays, causal, scale = (q, k, v, d_out, d_lse), True, 0.1
    head = make(*(x[0, :, 0] for x in arrays[:4]), d_lse[0, 0], causal, scale)
    found, out = [x[None, :, None] for x in head.gradients()], head.out()[None, :, None]
    return {m.name: m for m in margins(found, arrays, out, causal, scale)}


@pytest.mark.parametrize("make", [Head, RoundedP])
@pytest.mark.parametrize("dtype", [BF, F16])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_accepted(kind: str, dtype: Any, make: type[Head]) -> None:
    for s, t in ((200, 190), (130, 70), (5, 9), (1, 64), (64, 1)):
        for m in judged(kind, dtype, make, s, t).values():
            assert m.element < 0.7 and m.total < 0.8, (s, t, m)


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("dtype", [BF, F16])
@pytest.mark.parametrize("kind", KINDS)
def test_defects_are_found(kind: str, dtype: Any, defect: type[Head]) -> None:
    found = judged(kind, dtype, defect)
    beyond = [m.name for m in found.values() if m.element > 1 or m.total > 1]
    assert beyond and set(DEFECTS[defect]) <= set(beyond), list(map(str, found.values()))


# Columns of dQ that cancel: seeds and numbers of `sampled`, of which keys share a large part.
CANCELLING = [(5, 14), (18, 16), (24, 11)]


@functools.lru_cache(maxsize=3)
def gradients_of(seed: int, case: int, deterministic: bool) -> tuple[Any, ...]:
    """(dQ, dK, dV; arrays; O; mask and scale) of a sampled case."""
    *_, (_, arrays, options) = sampled(seed, case + 1)
    options = options | {"deterministic": deterministic}
    f = functools.partial(attention, return_lse=True, **options)
    (out, _), pull = jax.vjp(f, *arrays[:3])
    return pull(arrays[3:]), arrays, out, options["causal"], options["scale"]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("seed", "case"), CANCELLING)
def test_kernels_where_terms_cancel(seed: int, case: int, deterministic: bool) -> None:
    """Column 0 of dQ is exactly zero; what it is rounded to is up to 0.36, with nothing more than 16 bits demand."""
    found, arrays, out, causal, scale = gradients_of(seed, case, deterministic)
    judge(found, arrays, out, causal, scale)
    exact = reference.attention_gradients(*arrays, causal=causal, scale=scale)[0]
    column = np.asarray(found[0], np.float64)[..., 0]
    assert np.abs(exact[..., 0]).max() < 1e-12 and np.abs(column).max() > 0.02


def test_the_o_is_that_of_the_same_call() -> None:
    """Without the LSE attention adds up other probabilities, so that its O is rounded otherwise in places: from this O, plain
    gradients are less than half as far off as the kernel's, which from the right one they meet."""
    found, arrays, out, causal, scale = gradients_of(5, 14, True)
    exact = reference.attention_gradients(*arrays, causal=causal, scale=scale)[0]

    def furthest(dq: Any) -> float:
        return float(np.abs(np.asarray(dq).astype(np.float64) - exact).max())

    def plain(out: Any) -> float:
        return furthest(reference.attention_gradients(*arrays, causal=causal, scale=scale, rounded=True, out=out)[0])

    other = attention(*arrays[:3], causal=causal, scale=scale)
    assert plain(out) == pytest.approx(furthest(found[0]), rel=0.02)
    assert 2 * plain(other) < furthest(found[0])


def test_nan_is_refused_and_zeros_are_exact() -> None:
    found, arrays, out, causal, scale = gradients_of(5, 14, True)
    for n in range(3):
        wrong = [x.at[0, 3, 0, 5].set(jnp.nan) if i == n else x for i, x in enumerate(found)]
        with pytest.raises(AssertionError, match=f"{gradient_judge.NAMES[n + 1]}: element \\(0, 3, 0, 5\\) is nan off"):
            judge(wrong, arrays, out, causal, scale)
    no_queries, keys = np.zeros((1, 0, 2, 64), BF), np.zeros((1, 3, 2, 64), BF)
    arrays = no_queries, keys, keys, no_queries, np.zeros((1, 2, 0), np.float32)
    judge((no_queries, keys, keys), arrays, no_queries, False, 1.0)
    with pytest.raises(AssertionError, match="dv: element"):
        judge((no_queries, keys, keys + BF.type(1e-6)), arrays, no_queries, False, 1.0)
