"""Which float32 sums take a product unrounded: decided here, once, for emitter and simulator.

What a compiler contracts depends on how it has rearranged the code: NVVM makes an fma of `x * f - c` and none of `c - x * f`.
So the emitter writes the fmas out, everything is compiled with --fmad=false, and the simulator knows what the GPU rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..ops.elementwise import factors_of
from ..program import Equation, Operand, Value


@dataclasses.dataclass(frozen=True)
class Fma:
    """What a step computes with one rounding: ± a * b ± c, element by element.

    c None: of a sum over axes, which adds to what it has summed so far.  minus: whether the product's and c's signs are negative.
    """

    a: Operand
    b: Operand
    c: Operand | None = None
    minus: tuple[bool, bool] = (False, False)


Products = dict[int, tuple[Operand, Operand, bool]]
"""The factors, and whether the sign is negative, of the float32 products of a region so far, by the id of the value."""


def _fused(e: Equation, products: Products) -> Fma | None:
    """The fma that `e` becomes: an add, sub or reduce_sum of float32 that takes one of `products`."""
    if e.op not in ("add", "sub", "reduce_sum") or e.results[0].dtype != "float32":
        return None
    for k, operand in enumerate(e.operands):
        if isinstance(operand, Value) and operand.id in products:
            a, b, minus = products[operand.id]
            if e.op == "reduce_sum":
                return Fma(a, b, minus=(minus, False))
            minus_second = e.op == "sub"
            signs = (minus, minus_second) if k == 0 else (minus != minus_second, False)
            return Fma(a, b, e.operands[1 - k], signs)
    return None


def _product(e: Equation, products: Products) -> tuple[Operand, Operand, bool] | None:
    """The factors of what `e` computes, where that is a product or one with the other sign."""
    if e.op == "neg" and isinstance(e.operands[0], Value) and e.operands[0].id in products:
        a, b, minus = products[e.operands[0].id]
        return a, b, not minus
    pair = factors_of(e)
    if pair is None or e.results[0].dtype != "float32":
        return None
    return e.operands[pair[0]], e.operands[pair[1]], False


def fmas(equations: Sequence[Equation]) -> list[Fma | None]:
    """For each equation of a region, what it becomes.

    Product and sum must stand in the same region: behind a branch or a loop the factors would take registers in the product's
    place until there, and a loop's next iteration has other ones.
    """
    products: Products = {}
    out = []
    for e in equations:
        out.append(_fused(e, products))
        if (product := _product(e, products)) is not None:
            products[e.results[0].id] = product
    return out
