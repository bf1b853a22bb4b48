"""Broadcasting, reshaping and iota: results are the operand's registers, renamed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arguments
from ..errors import UnsupportedPrimitive
from ..layouts.registers import LayoutName, checked_layout
from ..program import Equation, Value
from .elementwise import numpy_dtype
from .registry import BOTH, WARP, WARPGROUP, op

broadcast_in_dim = op("broadcast_in_dim")


@broadcast_in_dim.layouts
def _(solver: Any, e: Equation) -> None:
    x, y = e.operands[0], e.results[0]
    if x.shape:
        solver.broadcast(e, x, y, e.param("broadcast_dimensions"))


@broadcast_in_dim.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    e = step.equation
    out.rename(step, e.operands[0], e.param("broadcast_dimensions"))


@broadcast_in_dim.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    x, dims, shape = sim.read(e.operands[0]), e.param("broadcast_dimensions"), e.results[0].shape
    expanded = [1] * len(shape)
    for i, d in enumerate(dims):
        expanded[d] = x.shape[i]
    sim.write(e.results[0], np.broadcast_to(x.reshape(expanded), shape))


def _unit_dims(e: Equation) -> tuple[int, ...]:
    """For a reshape that only adds or drops dimensions of extent 1: where each result dimension > 1 comes from."""
    x, y = e.operands[0], e.results[0]
    if [n for n in x.shape if n != 1] != [n for n in y.shape if n != 1]:
        raise UnsupportedPrimitive(
            f"reshape {x.shape} -> {y.shape} moves elements between threads; only unit dimensions can come and go",
            e.line,
        )
    real = [i for i, n in enumerate(y.shape) if n != 1]
    out, k = [], 0
    for n in x.shape:
        out.append(real[k] if n != 1 else -1)
        k += n != 1
    return tuple(out)


def _reshape_layouts(solver: Any, e: Equation) -> None:
    if e.operands[0].shape:
        solver.unit_reshape(e, e.operands[0], e.results[0], _unit_dims(e))


def _reshape_emit(out: Any, step: Any) -> None:
    _unit_dims(step.equation)
    out.rename(step, step.equation.operands[0], None)


def _reshape_simulate(sim: Any, step: Any) -> None:
    e = step.equation
    sim.write(e.results[0], sim.read(e.operands[0]).reshape(e.results[0].shape))


for _name in ("reshape", "squeeze", "expand_dims"):
    _o = op(_name)
    _o.layouts(_reshape_layouts)
    _o.emit(BOTH, (WARPGROUP, WARP))(_reshape_emit)
    _o.simulate(_reshape_simulate)

slice_ = op("slice")


@slice_.layouts
def _(solver: Any, e: Equation) -> None:
    solver.part(e, e.operands[0], e.results[0])


@slice_.emit()
def _(out: Any, step: Any) -> None:
    e = step.equation
    if any(s != 1 for s in e.param("strides") or ()):
        raise UnsupportedPrimitive("a strided slice of a register array moves elements between threads", e.line)
    out.part(step, e.operands[0], tuple(e.param("start_indices")))


@slice_.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    start, stop = e.param("start_indices"), e.param("limit_indices")
    strides = e.param("strides") or (1,) * len(start)
    index = tuple(slice(a, b, c) for a, b, c in zip(start, stop, strides, strict=True))
    sim.write(e.results[0], sim.read(e.operands[0])[index])


iota = op("iota")
broadcasted_iota_p = op("broadcasted_iota")


@broadcasted_iota_p.abstract
def _(*, dtype: str, shape: tuple[int, ...], dimension: int, layout: Any) -> Any:
    return ((shape, dtype),)


def broadcasted_iota(dtype: Any, shape: tuple[int, ...], dimension: int, *, layout: LayoutName | None = None) -> Any:
    """An integer array of `shape` counting along `dimension`, in register layout `layout` (None: inferred from its use)."""
    from ..frontend.primitives import bind, dtype_name

    where = "broadcasted_iota"
    dims = arguments.whole_numbers(where, "shape", shape, 1)
    return bind(
        broadcasted_iota_p,
        dtype=dtype_name(arguments.dtype(where, "dtype", dtype)),
        shape=dims,
        dimension=arguments.whole(where, "dimension", dimension, 0, len(dims) - 1),
        layout=checked_layout(where, layout),
    )[0]


def _iota_layouts(solver: Any, e: Equation) -> None:
    if e.param("layout") is not None:
        solver.pin(e, e.results[0], e.param("layout"))


def _iota_emit(out: Any, step: Any) -> None:
    e = step.equation
    result: Value = e.results[0]
    out.coordinate(result, e.param("dimension"))


def _iota_simulate(sim: Any, step: Any) -> None:
    e = step.equation
    shape, d = e.results[0].shape, e.param("dimension")
    index = np.arange(shape[d]).reshape([-1 if i == d else 1 for i in range(len(shape))])
    sim.write(e.results[0], np.broadcast_to(index, shape).astype(numpy_dtype(e.results[0].dtype)))


for _o in (iota, broadcasted_iota_p):
    _o.layouts(_iota_layouts)
    _o.emit()(_iota_emit)
    _o.simulate(_iota_simulate)
