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
        if ((total.view(np.int64) & BELOW) == MIDDLE).any() or not np.abs(total).min() >= SMALLEST_NORMAL:
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
