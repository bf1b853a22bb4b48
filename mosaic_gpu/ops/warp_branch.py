"""A branch taken warp by warp: those warps of a warpgroup run the body in which some element of a condition holds.

For register updates that most warps can skip, such as rescaling an accumulator.  Warps diverge inside, so the body may only
compute on register arrays and read and write accumulators; what all warps must do together is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import arguments
from ..errors import UnsupportedPrimitive
from ..layouts.registers import Layout
from ..program import Equation, Value, View, walk
from .elementwise import PURE
from .refs import Access
from .registry import BOTH, WARPGROUP, op

TMEM = ("async_load_tmem", "wait_load_tmem", "async_store_tmem", "commit_tmem")  # each warp moves its own lanes
ALLOWED = PURE | {
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "expand_dims",
    "broadcasted_iota",
    "iota",
    "constant",
    "layout_cast",
    "slice",
    *TMEM,
}
warp_branch = op("warp_branch", instead="under warp_map a warp branches with `when` on a scalar")


def when_any_in_warp(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Decorator: each warp runs the function if any element of `condition` that its lanes hold is true (one vote a warp).

    condition: bool array with a register layout, e.g. one value per row of Layout.WGMMA.  The function may compute on register
    arrays, read and write accumulators that no product in flight writes, and move tensor memory; it returns nothing.
    Raises UnsupportedPrimitive for anything in it that the warps of a warpgroup must do together.
    """

    if not (hasattr(condition, "dtype") and hasattr(condition, "shape")):
        arguments.refuse(
            "when_any_in_warp", "condition", condition, "a bool array, such as one element per row of a tile"
        )

    def run(body: Callable[[], None]) -> None:
        arguments.function("when_any_in_warp", "the decorated object", body)
        from ..frontend.loops import bind_warp_branch

        bind_warp_branch(condition, body)

    return run


def accumulators(e: Equation) -> list[View]:
    """Accumulators that the body writes."""
    return [x.operands[0] for x in walk(e.regions[0].equations) if x.op == "swap" and isinstance(x.operands[0], View)]


@warp_branch.plan(BOTH, (WARPGROUP,))
def _(ctx: Any, e: Equation) -> None:
    condition = e.operands[0]
    if not isinstance(condition, Value) or condition.dtype != "bool" or not condition.shape:
        raise UnsupportedPrimitive(
            "when_any_in_warp takes a bool array, one element per row or per element of a tile", e.line
        )
    for x in walk(e.regions[0].equations):
        on_accumulator = (
            x.op in ("get", "swap") and isinstance(x.operands[0], View) and x.operands[0].space.kind == "acc"
        )
        if x.op not in ALLOWED and not on_accumulator:
            raise UnsupportedPrimitive(
                f"{x.op!r} under when_any_in_warp: the warps of a warpgroup part there, and this is for all of them together; "
                "move it out",
                x.line,
            )


@warp_branch.emit()
def _(out: Any, step: Any) -> None:
    condition = step.equation.operands[0]
    layout = out.layout(condition)
    votes = [out.element(condition, i) for i in range(layout.registers)] if layout else [out.scalar(condition)]
    with out.block(f"if (__any_sync(~0u, {' || '.join(votes)}))"):
        out.steps(step.regions[0].steps)


@warp_branch.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    e = step.equation
    condition = sim.read(e.operands[0])
    layout = sim.role.layouts.get(e.operands[0].id)
    warps = warps_with_a_true_element(np.asarray(condition), layout)
    views = accumulators(e)
    before = [np.array(sim.load(Access("acc", v, False))) for v in views]
    sim.active = warps
    yield from sim.run(step.regions[0].steps)
    sim.active = (True,) * 4
    for v, old in zip(views, before, strict=True):
        # An element belongs to the warp that holds it: a warp that did not vote keeps what it had.
        held = Layout.WGMMA.of(v.shape).coordinates()
        stays = np.zeros(v.shape, bool)
        for w in range(4):
            if not warps[w]:
                rows, columns = held[w].reshape(-1, 2).T
                stays[rows, columns] = True
        sim.store(Access("acc", v, False), np.where(stays, old, sim.load(Access("acc", v, False))))


def warps_with_a_true_element(condition: np.ndarray, layout: Any) -> Sequence[bool]:
    """Which of the four warps hold a true element."""
    if layout is None:
        return [bool(condition.any())] * 4
    held = layout.coordinates()
    return [bool(condition[tuple(held[w].reshape(-1, condition.ndim).T)].any()) for w in range(4)]
