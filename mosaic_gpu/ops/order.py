"""The order of floats: IEEE 754's total order as integers, and maxima and minima of zeros of both signs as PTX has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def signed(x: Any) -> Any:
    """The bits of an array as signed integers."""
    a = np.asarray(x)
    return a.view(f"i{a.dtype.itemsize}")


def order_key(x: Any) -> Any:
    """Integers in the order in which XLA sorts and compares: of floats IEEE 754's total order."""
    if x.dtype.kind in "iub":
        return x
    bits = signed(x)
    return bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & np.iinfo(bits.dtype).max)


def _zeros_apart(numpy: Callable[..., Any]) -> Callable[..., Any]:
    """A maximum or minimum of NumPy's, to which +0 and -0 are equal, where +0 is the larger one (PTX ISA, max and min)."""

    def call(*arrays: Any, **how: Any) -> Any:
        y = numpy(*arrays, **how)
        if y.dtype.kind != "f" or y.all():
            return y
        below = numpy(*(order_key(a) for a in arrays), **how) < 0  # of what is no zero it says nothing that is used
        return np.where(y == 0, np.where(below, y.dtype.type(-0.0), y.dtype.type(0.0)), y)[()]

    return call


maximum, minimum = _zeros_apart(np.maximum), _zeros_apart(np.minimum)
largest, least = _zeros_apart(np.max), _zeros_apart(np.min)
cumulative_maximum, cumulative_minimum = _zeros_apart(np.maximum.accumulate), _zeros_apart(np.minimum.accumulate)
