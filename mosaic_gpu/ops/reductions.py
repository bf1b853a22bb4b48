"""Reductions over dimensions of a register array: within a thread, then by shuffles over the lanes that share a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UnsupportedPrimitive
from ..program import Equation
from .elementwise import numpy_dtype
from .registry import op


def _define(name: str, combine: str, approx: str | None, numpy: Callable[..., Any]) -> None:
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
                f"{name} over axes {axes} of {layout} crosses warps; reduce along the rows (axis 1) and combine "
                "through shared memory",
                e.line,
            )
        out.reduce(step, axes, approx if approx and out.approx else combine)

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        x = sim.read(e.operands[0])
        wide = x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iub" else x
        sim.write(e.results[0], numpy(wide, axis=tuple(e.param("axes"))).astype(numpy_dtype(e.results[0].dtype)))


_define("reduce_sum", "({0} + {1})", None, np.sum)
_define("reduce_max", "max_nan({0}, {1})", "fmaxf({0}, {1})", np.max)
_define("reduce_min", "min_nan({0}, {1})", "fminf({0}, {1})", np.min)
_define("reduce_prod", "({0} * {1})", None, np.prod)
