"""Sums of products as the GPU rounds them: once.

Unless a kernel asks for strict_math, the compiler makes one fma of a float32 multiplication and the addition or subtraction
that takes its result, wherever it can see both.  So here: what is only true where a product is rounded (`x * f - x * f` is 0)
is then false here, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ops.elementwise import factors_of
from ..program import Equation, Value
from .memory import Array

Factors = dict[int, tuple[Array, Array]]
"""The factors of each product that a thread has computed, by the id of the value."""


def contract(factors: Factors, e: Equation, args: Sequence[Array]) -> Array | None:
    """The result of an add or sub of a product of float32; None for anything else.  Remembers the factors of products."""
    result = e.results[0]
    if result.dtype != "float32":
        return None
    if (pair := factors_of(e)) is not None:
        factors[result.id] = (args[pair[0]], args[pair[1]])
    if e.op not in ("add", "sub"):
        return None
    for k in (0, 1):
        operand = e.operands[k]
        if isinstance(operand, Value) and operand.id in factors:
            a, b = factors[operand.id]
            product = np.multiply(a, b, dtype=np.float64)  # exact: twice 24 bits are fewer than 53
            other = args[1 - k]
            if e.op == "add":
                return np.asarray(product + other).astype(np.float32)
            return np.asarray(product - other if k == 0 else other - product).astype(np.float32)
    return None
