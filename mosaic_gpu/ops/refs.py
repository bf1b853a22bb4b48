"""Reading and writing Refs: `ref[...]`, `ref[...] = x`, `load`.

SMEM and GMEM: every thread moves the elements that its register layout gives it.  GMEM accesses are clipped as TMA's are: a
tile may stick out of the array at its end; what is outside reads as zero and is not written.  ACC: the accumulator's
registers; the planner waits for the MMAs that still write them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import arguments
from ..errors import UnsupportedCall, UnsupportedPrimitive
from ..layouts.registers import Layout, LayoutName, checked_layout
from ..program import Equation, Literal, View
from .registry import BOTH, WARP, WARPGROUP, gives, like, op

get_p = op("get", issues_only=True)
swap_p = op("swap", issues_only=True)
load_p = op("load")


OTHERWISE = {"tmem": "use async_load_tmem", "semaphore": "use semaphore_read, semaphore_signal and semaphore_wait"}


@dataclasses.dataclass(frozen=True)
class Access:
    """kind: 'acc', 'smem' or 'gmem'; view: what; start: element (gmem) or byte (smem) where it starts; scalar: one element."""

    kind: str
    view: View
    scalar: bool
    input: int = -1


@gives(like)
def load(ref: Any, *, layout: LayoutName | None = None, mask: Any = None, other: Any = None) -> Any:
    """`ref[...]` (SMEM or GMEM) in register layout `layout`.

    mask: bools that broadcast to the Ref's shape; elements whose mask is False are not read, and are those of `other` (an array
    or a scalar, zero where none is given).  In GMEM what lies past the array's end is zero, whatever `other` is.
    """
    from ..frontend.primitives import bind, spread

    if mask is not None:
        from .masked import masked_load_p

        where = "load(mask=...)"
        chosen, rest = (
            spread(where, "mask", mask, ref, "bool"),
            spread(where, "other", False if other is None else other, ref),
        )
        return bind(masked_load_p, ref, chosen, rest, layout=checked_layout("load", layout))[0]
    if other is not None:
        raise ValueError("load: other= stands for elements whose mask is False; give mask=, too")
    return bind(load_p, ref, layout=checked_layout("load", layout))[0]


def store(ref: Any, value: Any, *, mask: Any = None) -> None:
    """`ref[...] = value` (SMEM or GMEM).  mask: bools that broadcast to the Ref's shape; where it is False nothing is written."""
    from ..frontend.primitives import bind, is_ref, spread

    if not is_ref(ref):
        arguments.refuse("store", "ref", ref, "a Ref or a view of one")
    if mask is None:
        ref[...] = spread("store", "value", value, ref)
        return
    from .masked import masked_store_p

    where = "store(mask=...)"
    bind(masked_store_p, ref, spread(where, "value", value, ref), spread(where, "mask", mask, ref, "bool"))


@load_p.abstract
def _(ref: Any, *, layout: Any) -> Any:
    if ref.space is None:
        arguments.memory("load", "ref", ref, "smem", "gmem")
    return ((ref.shape, ref.dtype),)


def _access(ctx: Any, e: Equation) -> Access:
    view = e.operands[0]
    assert isinstance(view, View)
    kind = view.space.kind
    if kind not in ("acc", "smem", "gmem"):
        raise UnsupportedCall(
            f"{e.op} on a {kind.upper()} Ref: " + OTHERWISE.get(kind, "barriers are waited on, not read"),
            e.line,
        )
    if kind == "acc" and (view.shape != view.ref.shape or view.is_transposed):
        raise UnsupportedCall(f"an accumulator is read and written whole; {view} is a part", e.line)
    if ctx.scope is WARP and view.shape:
        raise UnsupportedPrimitive(
            f"{e.op} of an array {view.shape} by a single warp: only scalars; do it in the warpgroup's scope", e.line
        )
    if kind == "gmem" and e.op == "swap":
        ctx.output_index(view.ref, e.line)
    return Access(kind, view, not view.shape, ctx.pointer(view.ref, e.line) if kind == "gmem" else -1)


def _layouts(solver: Any, e: Equation) -> None:
    view = e.operands[0]
    assert isinstance(view, View)
    value: Any = e.operands[1] if e.op == "swap" else e.results[0]
    if not view.shape or isinstance(value, Literal):
        return
    if view.space.kind == "acc":
        if e.op == "swap":
            solver.prefer(e, value, Layout.WGMMA)
        else:
            solver.pin(e, value, Layout.WGMMA)
    elif e.op == "load" and e.param("layout") is not None:
        solver.pin(e, value, e.param("layout"))


for _o in (get_p, swap_p, load_p):
    _o.layouts(_layouts)
    _o.plan()(_access)


@get_p.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    out.load(step)


@load_p.emit()
def _(out: Any, step: Any) -> None:
    out.load(step)


@swap_p.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    if step.equation.results:
        out.load(step)
    out.store(step)


@get_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.write(step.equation.results[0], sim.load(step.data))


@load_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.write(step.equation.results[0], sim.load(step.data))


@swap_p.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    if e.results:
        sim.write(e.results[0], sim.load(step.data))
    sim.store(step.data, sim.read(e.operands[1]))
