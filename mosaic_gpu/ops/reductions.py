"""Reductions over dimensions of a register array: within a thread, then by shuffles over the lanes that share a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UnsupportedPrimitive
from ..program import Equation
from .elementwise import FLOATS, numpy_dtype
from .registry import op


def _define(name: str, combine: str, numpy: Callable[..., Any], integer: str = "", approx: str = "") -> None:
    """combine: of floats, computed in float32; integer, approx: where they are computed otherwise."""
    o = op(name)

    @o.layouts
    def _(solver: Any, e: Equation) -> None:
        solver.reduction(e, e.operands[0], e.results[0], tuple(e.param("axes")))

    @o.emit()
    def _(out: Any, step: Any) -> None:
        e = step.equation
        axes = tuple(e.param("axes"))
        layout = out.layout(e.operands[0])
        if layout is None:
            raise UnsupportedPrimitive(
                f"{name} of an array whose elements are all equal: multiply or use the scalar itself", e.line
            )
        if any(d.dim in axes and d.size > 1 for d in layout.warp):
            raise UnsupportedPrimitive(
                f"{name} over axes {axes} of {layout} crosses warps. Rows of an array loaded with load(ref, layout=Layout.WGMMA) "
                "can be reduced (axis 1); combine the rest through shared memory",
                e.line,
            )
        dtype = e.operands[0].dtype
        if dtype == "float64" and integer:
            raise UnsupportedPrimitive(f"{name} of float64: convert to float32 first", e.line)
        expression = approx if approx and out.approx else combine
        out.reduce(step, axes, integer if integer and dtype not in FLOATS else expression)

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        x = sim.read(e.operands[0])
        wide = x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iub" else x
        sim.write(e.results[0], numpy(wide, axis=tuple(e.param("axes"))).astype(numpy_dtype(e.results[0].dtype)))


_define("reduce_sum", "({0} + {1})", np.sum)
_define("reduce_max", "max_nan({0}, {1})", np.max, "max({0}, {1})", "fmaxf({0}, {1})")
_define("reduce_min", "min_nan({0}, {1})", np.min, "min({0}, {1})", "fminf({0}, {1})")
_define("reduce_prod", "({0} * {1})", np.prod)
