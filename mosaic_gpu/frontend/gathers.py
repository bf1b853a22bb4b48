"""`gather` and the scatters: their dimension numbers as plain parameters, the fill value as an operand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..errors import Line, UnsupportedCall
from ..ops.elementwise import ends
from ..program import Equation, Literal, Operand
from .composed import applied
from .primitives import dtype_name, literal

if TYPE_CHECKING:
    from .trace import Tracer

Mode = jax.lax.GatherScatterMode
SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


def _indices(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> Operand:
    indices = tr.read(e.invars[1])
    if indices.dtype == "int32":
        return indices
    narrow = tr.fresh(indices.shape, "int32")
    out.append(Equation("convert_element_type", (indices,), (narrow,), (("new_dtype", "int32"),), (), line))
    return narrow


def _fill(value: Any, dtype: Any) -> Literal:
    """What JAX takes where no value is given: NaN, the smallest signed or the largest unsigned number, True."""
    if value is None:
        if jax.numpy.issubdtype(dtype, jax.numpy.inexact):
            value = np.nan
        elif dtype == np.bool_:
            value = True
        else:
            least, most = ends(dtype_name(dtype))
            value = least if least < 0 else most
    return literal(value, dtype)


def _gather(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    p, d = e.params, e.params["dimension_numbers"]
    mode = Mode.from_any(p["mode"])
    if mode not in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS):
        raise UnsupportedCall(f"gather(mode={mode.name}): 'clip', 'fill' and 'promise_in_bounds'", line)
    params = (
        ("batching", (tuple(d.operand_batching_dims), tuple(d.start_indices_batching_dims))),
        ("collapsed", tuple(d.collapsed_slice_dims)),
        ("fill", mode is Mode.FILL_OR_DROP),
        ("offset_dims", tuple(d.offset_dims)),
        ("slice_sizes", tuple(int(n) for n in p["slice_sizes"])),
        ("start_map", tuple(d.start_index_map)),
    )
    operands = (tr.read(e.invars[0]), _indices(tr, e, out, line), _fill(p["fill_value"], e.invars[0].aval.dtype))
    out.append(Equation("gather", operands, tr.define(e.outvars), params, (), line))


def _scatter(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    p, d = e.params, e.params["dimension_numbers"]
    if e.primitive.name == "scatter" and p["update_jaxpr"] is not None:
        operands = (tr.read(e.invars[0]), _indices(tr, e, out, line), tr.read(e.invars[2]))
        tr.bind(e.outvars, tr.inlined(applied(p), operands, out, line))
        return
    mode = Mode.from_any(p["mode"])
    params = (
        ("batching", (tuple(d.operand_batching_dims), tuple(d.scatter_indices_batching_dims))),
        ("clip", mode is Mode.CLIP),
        ("inserted", tuple(d.inserted_window_dims)),
        ("start_map", tuple(d.scatter_dims_to_operand_dims)),
        ("window_dims", tuple(d.update_window_dims)),
    )
    operands = (tr.read(e.invars[0]), _indices(tr, e, out, line), tr.read(e.invars[2]))
    out.append(Equation(e.primitive.name, operands, tr.define(e.outvars), params, (), line))


GATHERS = {"gather": _gather, **dict.fromkeys(SCATTERS, _scatter)}
