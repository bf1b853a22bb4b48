"""Register budgets and layout pins."""

from __future__ import annotations

from typing import Any

from .. import arguments
from ..errors import RegisterBudgetError
from ..layouts.registers import LayoutName, checked_layout
from ..program import Equation
from .moves import Map, define_move
from .registry import BOTH, WARPGROUP, gives, like, op

set_max_registers_p = op(
    "set_max_registers", issues_only=True, instead="call it in the warpgroup's role, outside warp_map"
)
layout_cast_p = op("layout_cast")


def set_max_registers(n: int, *, action: str) -> None:
    """Set this warpgroup's register budget (PTX ISA 9.7.19.5, setmaxnreg).

    n: registers per thread, a multiple of 8 in 24..256.  action: 'increase' or 'decrease', against the number the kernel
    is launched with.  Raises RegisterBudgetError when the plan is made if the budgets of all warpgroups do not fit.
    """
    from ..frontend.primitives import bind

    if action not in ("increase", "decrease"):
        raise ValueError(f"set_max_registers: action must be 'increase' or 'decrease', not {arguments.shown(action)}")
    bind(set_max_registers_p, registers=arguments.whole("set_max_registers", "n", n), action=action)


@set_max_registers_p.abstract
def _(*, registers: int, action: str) -> Any:
    return ()


@set_max_registers_p.plan(BOTH, (WARPGROUP,))
def _(ctx: Any, e: Equation) -> None:
    n = e.param("registers")
    if n % 8 or not 24 <= n <= 256:
        near = min(max((n + 4) // 8 * 8, 24), 256)
        raise RegisterBudgetError(
            f"set_max_registers({n}): the hardware takes multiples of 8 from 24 to 256; {near} is the nearest", e.line
        )


@set_max_registers_p.emit(BOTH, (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    e = step.equation
    out.whole_warpgroup(f"set_max_registers_{e.param('action')}<{e.param('registers')}>();")


@set_max_registers_p.simulate
def _(sim: Any, step: Any) -> None:
    pass  # the plan has checked the sum: there is always room


@gives(like)
def layout_cast(x: Any, layout: LayoutName) -> Any:
    """Pin the register layout of `x`; what computes it is laid out to match where that is free."""
    from ..frontend.primitives import bind

    if layout is None:
        arguments.refuse("layout_cast", "layout", layout, "a register layout such as plgpu.Layout.WGMMA")
    return bind(layout_cast_p, x, layout=checked_layout("layout_cast", layout))[0]


@layout_cast_p.abstract
def _(x: Any, *, layout: Any) -> Any:
    arguments.memory("layout_cast", "x", x, or_array=True)
    if not x.shape:
        raise TypeError(f"layout_cast: x must be a register array; a scalar ({x.dtype}) has no layout")
    return ((x.shape, x.dtype),)


@layout_cast_p.layouts
def _(solver: Any, e: Equation) -> None:
    solver.cast(e, e.operands[0], e.results[0], e.param("layout"))


define_move(layout_cast_p, lambda e: Map.of_strides(e, range(len(e.results[0].shape))), lambda e, x: x)
