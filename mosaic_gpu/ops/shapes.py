"""Shapes: broadcast, reshape, slice, transpose, reverse, and iota.  Registers are renamed where each thread has what it needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arguments
from ..layouts.registers import LayoutName, checked_layout
from ..program import Equation, Value
from .elementwise import FLOATS, INTEGERS, numpy_dtype
from .moves import Map, Reshape, define_move
from .registry import op

broadcast_in_dim = op("broadcast_in_dim")


@broadcast_in_dim.layouts
def _(solver: Any, e: Equation) -> None:
    x, y = e.operands[0], e.results[0]
    if x.shape:
        solver.broadcast(e, x, y, e.param("broadcast_dimensions"))


def _broadcast_map(e: Equation) -> Map:
    x, dims = e.operands[0], e.param("broadcast_dimensions")
    shape = e.results[0].shape
    return Map.of_strides(e, [d if x.shape[k] == shape[d] else -1 for k, d in enumerate(dims)])


def _broadcast(e: Equation, x: Any) -> Any:
    shape, expanded = e.results[0].shape, [1] * len(e.results[0].shape)
    for i, d in enumerate(e.param("broadcast_dimensions")):
        expanded[d] = x.shape[i]
    return np.broadcast_to(x.reshape(expanded), shape)


define_move(broadcast_in_dim, _broadcast_map, _broadcast)


def _reshape_layouts(solver: Any, e: Equation) -> None:
    if e.operands[0].shape and e.results[0].shape:
        solver.reshape(e, e.operands[0], e.results[0])


for _name in ("reshape", "squeeze", "expand_dims"):
    _o = op(_name)
    _o.layouts(_reshape_layouts)
    define_move(
        _o,
        lambda e: Reshape(tuple(e.operands[0].shape), tuple(e.results[0].shape)),
        lambda e, x: x.reshape(e.results[0].shape),
    )

slice_ = op("slice")


@slice_.layouts
def _(solver: Any, e: Equation) -> None:
    if all(s == 1 for s in e.param("strides") or ()):
        solver.part(e, e.operands[0], e.results[0])


def _slices(e: Equation) -> tuple[slice, ...]:
    start, stop = e.param("start_indices"), e.param("limit_indices")
    strides = e.param("strides") or (1,) * len(start)
    return tuple(slice(a, b, c) for a, b, c in zip(start, stop, strides, strict=True))


define_move(
    slice_,
    lambda e: Map.of_strides(
        e, range(len(e.results[0].shape)), e.param("strides") or (), tuple(e.param("start_indices"))
    ),
    lambda e, x: x[_slices(e)],
)

transpose = op("transpose", whole=True)
define_move(
    transpose,
    lambda e: Map.of_strides(e, [e.param("permutation").index(k) for k in range(len(e.operands[0].shape))]),
    lambda e, x: np.transpose(x, e.param("permutation")),
)

rev = op("rev", whole=True)


def _rev_map(e: Equation) -> Map:
    shape, dims = e.operands[0].shape, e.param("dimensions")
    turned = [d in dims for d in range(len(shape))]
    return Map.of_strides(
        e,
        range(len(shape)),
        [-1 if t else 1 for t in turned],
        [n - 1 if t else 0 for n, t in zip(shape, turned, strict=True)],
    )


define_move(rev, _rev_map, lambda e, x: np.flip(x, e.param("dimensions")))

iota = op("iota", dtypes=(*FLOATS, *INTEGERS))
broadcasted_iota_p = op("broadcasted_iota", dtypes=(*FLOATS, *INTEGERS))


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
