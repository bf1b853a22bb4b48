"""Loads and stores of the elements that a mask names: `load(ref, mask=m, other=o)`, `store(ref, x, mask=m)`.

The other elements are not touched: not read, not written, and no thread waits for who writes them.  Each element is moved by
itself, since its neighbours may not be.
"""

from __future__ import annotations

from typing import Any

from ..codegen.emit_indexed import emit_masked
from ..errors import UnsupportedCall
from ..program import Equation, View
from .moves import IN_MEMORY
from .refs import Access
from .registry import WARPGROUP, op

INSTEAD = "masks are a warpgroup's; do it outside of warp_map, or under plgpu.when"
masked_load_p = op("masked_load", whole=True, dtypes=IN_MEMORY, instead=INSTEAD)
masked_store_p = op("masked_store", whole=True, dtypes=IN_MEMORY, instead=INSTEAD)


@masked_load_p.abstract
def _(ref: Any, mask: Any, other: Any, *, layout: Any) -> Any:
    return ((ref.shape, ref.dtype),)


@masked_store_p.abstract
def _(ref: Any, x: Any, mask: Any) -> Any:
    return ()


def _plan(ctx: Any, e: Equation) -> Access:
    view = e.operands[0]
    assert isinstance(view, View)
    kind = view.space.kind
    if kind not in ("smem", "gmem") or not view.shape or view.peer:
        raise UnsupportedCall(
            f"{'load' if e.results else 'store'}(mask=...) of {view}: masks are for arrays in GMEM and in the block's own SMEM; "
            "a scalar goes under plgpu.when(mask)",
            e.line,
        )
    if kind == "gmem" and not e.results:
        ctx.output_index(view.ref, e.line)
    return Access(kind, view, False, ctx.pointer(view.ref, e.line) if kind == "gmem" else -1)


for _o in (masked_load_p, masked_store_p):
    _o.plan(scopes=(WARPGROUP,))(_plan)


@masked_load_p.layouts
def _(solver: Any, e: Equation) -> None:
    solver.same(e, [*e.operands[1:], *e.results])
    if e.param("layout") is not None:
        solver.pin(e, e.results[0], e.param("layout"))


@masked_store_p.layouts
def _(solver: Any, e: Equation) -> None:
    solver.same(e, e.operands[1:])


@masked_load_p.emit()
def _(out: Any, step: Any) -> None:
    emit_masked(out, step.equation, step.data)


@masked_store_p.emit()
def _(out: Any, step: Any) -> None:
    emit_masked(out, step.equation, step.data)


@masked_load_p.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    sim.write(e.results[0], sim.load_masked(step.data, sim.read(e.operands[1]), sim.read(e.operands[2])))


@masked_store_p.simulate
def _(sim: Any, step: Any) -> None:
    x, mask = (sim.read(o) for o in step.equation.operands[1:])
    sim.store_masked(step.data, x, mask)
