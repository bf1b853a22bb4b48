"""2^x on the FMA units: for kernels whose exponentials are more than the special function units can take."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arguments
from ..program import Equation
from .registry import BOTH, WARPGROUP, gives, like, op

exp2_fma_p = op("exp2_fma", instead="a scalar takes jnp.exp2")
# 2^f for f in [-1/2, 1/2]; also in prelude/math.cuh
POLYNOMIAL = (0.99992814, 0.69326097, 0.24260999, 0.05517109)
ROUNDS = np.float32(1.5 * 2**23)  # added to a float32, it leaves the nearest whole number in the low bits


@gives(like)
def exp2_fma(x: Any) -> Any:
    """2^x of a float32 register array by a polynomial of degree 3, without the special function units.

    Relative error at most 1.1e-4, a fraction of what rounding to 16 bits costs; x at most 127; below -125 it gives 2^-125.
    """
    from ..frontend.primitives import bind

    return bind(exp2_fma_p, x)[0]


@exp2_fma_p.abstract
def _(x: Any) -> Any:
    arguments.memory("exp2_fma", "x", x, or_array=True)
    if x.space is not None or x.dtype != "float32" or not x.shape:
        raise TypeError(f"exp2_fma: x must be a float32 register array, not {x.dtype}{list(x.shape)}")
    return ((x.shape, x.dtype),)


@exp2_fma_p.layouts
def _(solver: Any, e: Equation) -> None:
    solver.same(e, [e.operands[0], e.results[0]])


@exp2_fma_p.emit(BOTH, (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    x, result = step.equation.operands[0], step.equation.results[0]
    if out.in_pairs and out.registers(result) % 2 == 0:
        out.pairwise(result, "exp2_fma_pair", ((x, ""),))
    else:
        out.elementwise(step, "exp2_fma({0})")


@exp2_fma_p.simulate
def _(sim: Any, step: Any) -> None:
    from ..simulator.contraction import fma

    e = step.equation
    x = np.maximum(np.asarray(sim.read(e.operands[0]), np.float32), np.float32(-125))
    shifted = x + ROUNDS
    f = x - (shifted - ROUNDS)
    a, b, c, d = (np.float32(n) for n in POLYNOMIAL)
    fraction = fma(f, fma(f, fma(f, d, c), b), a)
    with np.errstate(over="ignore"):
        bits = np.asarray(fraction).view(np.int32) + (np.asarray(shifted).view(np.int32) << 23)
    sim.write(e.results[0], bits.view(np.float32))
