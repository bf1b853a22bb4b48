"""Between tensor memory and registers (PTX ISA 9.7.16.8): loads and stores by a warpgroup, each warp its own 32 lanes.

Both are asynchronous: a load's cells may be written again after `wait_load_tmem`, what was stored may be used after
`commit_tmem`; by another role after a barrier with orders_tensor_core, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import arguments
from ..errors import IllegalInstruction, UnsupportedCall
from ..layouts.registers import Layout, LayoutName, checked_layout
from ..layouts.tmem import TmemPart, default_layout, tmem_layout, tmem_part
from ..program import Equation, Literal, Value, View
from .order import largest, least
from .registry import SM100, WARPGROUP, gives, op
from .tcgen05_rules import features_of

WHOLE = "tensor memory exists on sm_100a and later, and a whole warpgroup moves it (not under warp_map)"
load_p = op("async_load_tmem", instead=WHOLE)
store_p = op("async_store_tmem", instead=WHOLE)
wait_load_p = op("wait_load_tmem", instead=WHOLE)
commit_tmem_p = op("commit_tmem", instead=WHOLE)
OPS = ("async_load_tmem", "async_store_tmem", "wait_load_tmem", "commit_tmem")


@dataclasses.dataclass(frozen=True)
class TmemAccess:
    """A part of tensor memory that a warpgroup loads or stores; dtype: of the elements; what: the operation, for messages;
    reduce: with what a load reduces each row, too."""

    part: TmemPart
    dtype: str
    what: str
    reduce: str | None = None


REDUCTIONS = {"max": largest, "min": least, "absmax": largest, "absmin": least}


@gives(lambda src, *, layout=None: (src.shape, src.dtype))  # with reduce= there are two results
def async_load_tmem(src: Any, *, layout: LayoutName | None = None, reduce: str | None = None) -> Any:
    """Start loading a TMEM Ref into registers.

    src: (128, n) or (64, n).  layout: of 128 rows Layout.TCGEN05_TMEM_NATIVE (a row in each thread, the default) or
    Layout.TCGEN05 (as wgmma's fragments; n a multiple of 8), of 64 rows Layout.WGMMA, in TMEMLayout.M64_COLLECTIVE_LAYOUT
    Layout.TCGEN05_M64_COLLECTIVE_NATIVE or TCGEN05_M64_COLLECTIVE.  Returns an array of src's shape and dtype.
    `wait_load_tmem` before an MMA or a store may write the cells again.

    reduce: 'max', 'min', 'absmax' or 'absmin' (of magnitudes): on sm_103a the load also reduces each row; returns (array, of each
    row the extremum, in `Layout.TCGEN05_TMEM_NATIVE.reduce(1)`), to be used after `wait_load_tmem`.  float32, where a NaN gives
    NaN, and 32-bit integers (no magnitudes); 128 rows in TCGEN05_TMEM_NATIVE, an even number of columns.  PTX ISA 9.7.16.8.2,
    tcgen05.ld.red.  Raises IllegalInstruction on other chips.
    """
    from ..frontend.primitives import bind

    if reduce is not None and reduce not in REDUCTIONS:
        arguments.refuse("async_load_tmem", "reduce", reduce, f"one of {', '.join(REDUCTIONS)} or None")
    results = bind(load_p, src, layout=checked_layout("async_load_tmem", layout), reduce=reduce)
    return results[0] if reduce is None else tuple(results)


@load_p.abstract
def _(src: Any, *, layout: Any, reduce: str | None = None) -> Any:
    arguments.memory("async_load_tmem", "src", src, "tmem")
    return ((src.shape, src.dtype),) if reduce is None else ((src.shape, src.dtype), (src.shape[:1], src.dtype))


def _delivered(view: View, e: Equation) -> Layout:
    """What a load of the buffer delivers; also asked for before the plan has looked at the view."""
    of = tmem_layout(view.ref, e.line)
    return default_layout(of.rows, of.folded)


@load_p.layouts
def _(solver: Any, e: Equation) -> None:
    src = e.operands[0]
    assert isinstance(src, View)
    layout = e.param("layout") or _delivered(src, e)
    solver.pin(e, e.results[0], layout)
    if e.param("reduce") is not None:
        solver.pin(e, e.results[1], Layout.TCGEN05_TMEM_NATIVE.reduce(1))


def _access(e: Equation) -> TmemAccess:
    view = e.operands[0]
    assert isinstance(view, View)
    return TmemAccess(tmem_part(view, e.op, e.line), view.dtype, e.op)


@load_p.plan((SM100,), (WARPGROUP,))
def _(ctx: Any, e: Equation) -> TmemAccess:
    access, reduce = _access(e), e.param("reduce")
    if reduce is None:
        return access
    if not features_of(ctx.arch).load_reduction:
        raise IllegalInstruction(
            f"async_load_tmem(reduce={reduce!r}): {ctx.arch} has no load with a reduction (sm_103a has); reduce the array that "
            "was loaded",
            e.line,
        )
    wanted = e.param("layout") or default_layout(access.part.rows, access.part.folded)
    native = wanted is Layout.TCGEN05_TMEM_NATIVE
    integers = access.dtype in ("int32", "uint32")
    if (
        not native
        or not (access.dtype == "float32" or integers)
        or access.part.columns % 2
        or (integers and reduce[:3] == "abs")
    ):
        raise IllegalInstruction(
            f"async_load_tmem(reduce={reduce!r}) of {access.dtype} with {access.part.columns} columns: there are float32, and "
            "without magnitudes int32 and uint32, of 128 rows in Layout.TCGEN05_TMEM_NATIVE, with an even number of columns",
            e.line,
        )
    return dataclasses.replace(access, reduce=reduce)


@load_p.emit((SM100,), (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    out.tmem_load(step.data, *step.equation.results)


@load_p.simulate
def _(sim: Any, step: Any) -> None:
    access: TmemAccess = step.data
    value = sim.tmem_load(access)
    sim.write(step.equation.results[0], value)
    if access.reduce is not None:
        sim.write(step.equation.results[1], reduced(value, access.reduce))


def reduced(x: np.ndarray, reduce: str) -> np.ndarray:
    """What a load with a reduction gives for each row; a NaN gives NaN."""
    with np.errstate(invalid="ignore"):
        result: np.ndarray = REDUCTIONS[reduce](np.abs(x) if reduce.startswith("abs") else x, axis=1)
    return result


def async_store_tmem(dst: Any, value: Any) -> None:
    """Start storing an array to a TMEM Ref of its shape and dtype; the layouts are those of `async_load_tmem`.

    `commit_tmem` before it may be loaded or multiplied; for another role's MMA also a barrier with orders_tensor_core.
    """
    from ..frontend.primitives import bind

    bind(store_p, dst, value)


@store_p.abstract
def _(dst: Any, value: Any) -> Any:
    arguments.memory("async_store_tmem", "dst", dst, "tmem")
    arguments.memory("async_store_tmem", "value", value, or_array=True)
    if value.shape != dst.shape or value.dtype != dst.dtype:
        raise TypeError(
            f"async_store_tmem: dst is {dst.dtype}{list(dst.shape)}, value {value.dtype}{list(value.shape)}; both must agree"
        )
    return ()


@store_p.layouts
def _(solver: Any, e: Equation) -> None:
    dst, value = e.operands
    assert isinstance(dst, View)
    if isinstance(value, Value):
        solver.prefer(e, value, _delivered(dst, e))


@store_p.plan((SM100,), (WARPGROUP,))
def _(ctx: Any, e: Equation) -> TmemAccess:
    return _access(e)


@store_p.emit((SM100,), (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    value = step.equation.operands[1]
    if isinstance(value, Literal) or out.layout(value) is None:
        raise UnsupportedCall(
            "async_store_tmem of one repeated value: give it a layout with layout_cast, so that each thread has its part"
        )
    out.tmem_store(step.data, value)


@store_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.tmem_store(step.data, sim.read(step.equation.operands[1]))


def wait_load_tmem() -> None:
    """Wait until this warpgroup's `async_load_tmem`s have finished."""
    from ..frontend.primitives import bind

    bind(wait_load_p)


def commit_tmem() -> None:
    """Wait until this warpgroup's `async_store_tmem`s have finished."""
    from ..frontend.primitives import bind

    bind(commit_tmem_p)


@wait_load_p.abstract
def _() -> Any:
    return ()


@commit_tmem_p.abstract
def _() -> Any:
    return ()


@wait_load_p.emit((SM100,), (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    out.line("tcgen05_wait_load();")


@commit_tmem_p.emit((SM100,), (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    out.line("tcgen05_wait_store();")


@wait_load_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    yield from sim.wait_load_tmem()


@commit_tmem_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    yield from sim.commit_tmem()
