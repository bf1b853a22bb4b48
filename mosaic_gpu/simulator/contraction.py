"""Sums of products as an fma rounds them: once.  Which ones those are says the plan (`plan/contraction.py`).

What is only true where a product is rounded (`x * f - x * f` is 0) is then false here, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory import Array

SMALLEST_NORMAL = 2.0**-126
BELOW = (1 << 29) - 1  # bits of a float64's mantissa that a float32 has no room for
MIDDLE = 1 << 28


def exact_product(a: Any, b: Any) -> Array:
    """a * b of float32, as float64: twice 24 bits are fewer than 53."""
    return np.asarray(np.multiply(a, b, dtype=np.float64))


def fma(a: Any, b: Any, c: Any) -> Array:
    """a * b + c of float32, rounded once."""
    with np.errstate(all="ignore"):
        product = exact_product(a, b)
        total = np.asarray(product + np.asarray(c, np.float64))
        if ((total.view(np.int64) & BELOW) == MIDDLE).any() or not (np.abs(total) >= SMALLEST_NORMAL).all():
            total = _to_odd(total, product, c)
        return total.astype(np.float32)


def _to_odd(total: Array, product: Array, c: Any) -> Array:
    """A sum of float64 whose last bit says whether anything was cut off, so that rounding it again goes the right way.

    Round to odd: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE Transactions on Computers 57 (2008).
    """
    part = total - product
    rest = (product - (total - part)) + (c - part)  # exactly what rounding left out: Knuth's two-sum
    bits = total.view(np.int64)
    wrong = (rest != 0) & np.isfinite(total) & (bits % 2 == 0)
    return np.asarray(bits + wrong * np.where((rest > 0) == (total > 0), 1, -1)).view(np.float64)


# ---- float64 --------------------------------------------------------------------------------------------------------
SPLITTER = 2.0**27 + 1
LEAST, MOST = 2.0**-480, 2.0**480  # of |a|, |b| and |c|: between them nothing that is left out is lost or overflows


def fma64(a: Any, b: Any, c: Any) -> Array:
    """a * b + c of float64, rounded once (numbers outside of `LEAST` to `MOST`, but 0: the product rounded before).

    The product without error: Dekker, "A floating-point technique for extending the available precision", Numerische Mathematik
    18 (1971); its sum with c: Boldo and Melquiond, as above.
    """
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (a, b, c)))
    with np.errstate(all="ignore"):
        high = a * b
        (a1, a2), (b1, b2) = _halves(a), _halves(b)
        low = a2 * b2 - (((high - a1 * b1) - a2 * b1) - a1 * b2)
        part, part_rest = _two_sum(c, low)
        total, total_rest = _two_sum(high, part)
        exact = total + _odd_sum(part_rest, total_rest)
        sizes = [np.abs(x) for x in (a, b, c)]
        inside = np.all([(s == 0) | ((s > LEAST) & (s < MOST)) for s in sizes], axis=0)
        return np.where(inside & (high != 0), exact, high + c)


def sum_of_products(start: Array | None, a: Array, b: Array) -> Array:
    """start + a @ b.T of float64, [m, k] and [n, k], one fma after the other along K."""
    total = np.zeros((a.shape[0], b.shape[0])) if start is None else start
    for k in range(a.shape[1]):
        total = fma64(a[:, k, None], b[None, :, k], total)
    return total


def _halves(x: Array) -> tuple[Array, Array]:
    """x as a sum of two numbers of 26 bits."""
    scaled = x * SPLITTER
    high = scaled - (scaled - x)
    return high, x - high


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and what rounding left out (Knuth)."""
    total = np.asarray(a + b)
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _odd_sum(a: Array, b: Array) -> Array:
    """a + b, where it is not exact with a last bit of 1."""
    total, rest = _two_sum(a, b)
    bits = total.view(np.int64)
    wrong = (rest != 0) & np.isfinite(total) & (bits % 2 == 0)
    return np.asarray(bits + wrong * np.where((rest > 0) == (total > 0), 1, -1)).view(np.float64)
