"""Operations on arrays of no elements: their results are known when the kernel is traced, and are those of JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ops.elementwise import INTEGERS, ends
from ..program import Literal, Operand, Value


def of_nothing(name: str, inputs: Sequence[Operand], results: Sequence[Value]) -> list[Operand] | None:
    """For each result, the scalar that all of its elements are; None: that is to be computed.

    Reductions of nothing have their identity (of argmax nothing is left: JAX refuses an axis of extent 0 itself), what is padded
    is all padding, and where the results have no elements either nobody asks which.
    """
    if results and all(0 in r.shape for r in results):
        return [Literal(False if r.dtype == "bool" else 0, r.dtype) for r in results]
    if not inputs or 0 not in inputs[0].shape:
        return None
    if name == "pad":
        return [inputs[1]]
    return [Literal(_identity(name, results[0].dtype), results[0].dtype)] if name.startswith("reduce_") else None


def _identity(name: str, dtype: str) -> bool | int | float:
    if dtype == "bool":
        return name in ("reduce_and", "reduce_min")
    whole = dtype in INTEGERS
    if name in ("reduce_max", "reduce_min"):
        low, high = ends(dtype) if whole else (-math.inf, math.inf)
        return low if name == "reduce_max" else high
    if name == "reduce_and":
        return -1 if dtype.startswith("int") else ends(dtype)[1]
    one = name == "reduce_prod"
    return int(one) if whole else float(one)
