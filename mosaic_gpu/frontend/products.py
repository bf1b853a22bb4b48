"""`dot_general` to products of at most one batch, one contracted and one free dimension of each operand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.interpreters import batching

from ..errors import Line, UnsupportedCall
from ..layouts.shared import ITEM_BITS, instead_of
from ..ops.dot import ACCURATE, HALF, TOGETHER
from ..ops.dot import bit_dot as BIT_DOT
from ..ops.elementwise import FLOAT8, FLOATS, INT4, INTEGERS, SMALL_FLOATS
from ..program import Equation, Literal, Operand, Value
from .primitives import dtype_name, primitive

if TYPE_CHECKING:
    from .trace import Tracer

# As what 4-bit integers, which have a register each, are multiplied: ptxas would unpack them for instructions of 8 bits as well.
INT4_AS = {"int4": "int8", "uint4": "uint8"}
TYPES = (*FLOATS, *FLOAT8, *INTEGERS)
EXACT = ("F32_F32_F32", "F64_F64_F64", "TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9")
# Algorithms by the operand type that they are: the tensor core's own, accumulating in float32.
OWN = {
    "float16": ("F16_F16_F32",),
    "bfloat16": ("BF16_BF16_F32",),
    "float32": ("TF32_TF32_F32",),
    **dict.fromkeys(FLOAT8, ("ANY_F8_ANY_F8_F32",)),
}
# The same, accumulating in float16; of float8 in the type of the result.
OWN_HALF = {"float16": ("F16_F16_F16",), **dict.fromkeys(FLOAT8, ("ANY_F8_ANY_F8_ANY",))}


def _precision(precision: Any, dtype: str, result: str, line: Line | None) -> str:
    """'' for the tensor core's way with a type, 'exact' for float32 products of all bits, 'half' for sums in float16."""
    if precision is None:
        return ""
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        name = precision.name
        if name == "DEFAULT" or name in OWN.get(dtype, ()):
            return ""
        if name in OWN_HALF.get(dtype, ()):
            return HALF if dtype == "float16" or result == "float16" else ""
        if name in EXACT and dtype in ("float32", "float64"):
            return ACCURATE
        known = [*OWN.get(dtype, ()), *OWN_HALF.get(dtype, ()), *(EXACT if dtype in ("float32", "float64") else ())]
        raise UnsupportedCall(
            f"dot_general(precision={name}) of {dtype} operands: there is no such product here; of {dtype} there are "
            f"{', '.join(known) or 'none'} and jax.lax.Precision",
            line,
        )
    both = precision if isinstance(precision, (tuple, list)) else (precision, precision)
    if not all(p is None or isinstance(p, jax.lax.Precision) for p in both):
        raise UnsupportedCall(
            f"dot_general(precision={precision}): a jax.lax.Precision or jax.lax.DotAlgorithmPreset", line
        )
    return "" if all(p in (None, jax.lax.Precision.DEFAULT) for p in both) else ACCURATE


def dot_general(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    x, y = (tr.read(v) for v in e.invars)
    (contract_x, contract_y), (batch_x, batch_y) = e.params["dimension_numbers"]
    result = e.outvars[0].aval
    dtype = dtype_name(result.dtype)
    x, y = (_converted(tr, o, INT4_AS.get(o.dtype, o.dtype), out, line) for o in (x, y))
    common, exact = x.dtype, False
    if x.dtype != y.dtype and {x.dtype, y.dtype} not in TOGETHER:
        common, exact = _common(x.dtype, y.dtype)
        x, y = _converted(tr, x, common, out, line), _converted(tr, y, common, out, line)
    if common not in TYPES:
        way_out = "Convert with astype first (of bool outside of the kernel, or to a float)"
        if common not in ITEM_BITS:
            way_out = f"{instead_of(common)[0].upper()}{instead_of(common)[1:]}"
        raise UnsupportedCall(
            f"dot_general of {common}: products here are of {', '.join((*TYPES, *INT4))}; there is no mma.sync of others. "
            f"{way_out}",
            line,
        )
    precision = _precision(e.params.get("precision"), common, dtype, line)
    if exact and common == "float32":
        precision = ACCURATE  # of as many bits as the integers have
    if 0 in (*x.shape, *y.shape):
        zero = Literal(0 if dtype in (*INTEGERS, *INT4) else 0.0, dtype)
        tr.bind(e.outvars, [tr.full(zero, tuple(result.shape), out, line)])
        return
    left, x = _grouped(tr, x, tuple(batch_x), tuple(contract_x), out, line)
    right, y = _grouped(tr, y, tuple(batch_y), tuple(contract_y), out, line)
    shape = [x.shape[left[0]]] * (left[0] >= 0)
    shape += [o.shape[axes[1]] for o, axes in ((x, left), (y, right)) if axes[1] >= 0]
    # There are no sums in float8 or int4.
    summed = "float32" if dtype in SMALL_FLOATS else "int32" if dtype in INT4 else dtype
    stages = [(tuple(shape), summed)]  # what becomes of the sums: shape, dtype
    if summed != dtype:
        stages.append((tuple(shape), dtype))
    if tuple(shape) != tuple(result.shape):
        stages.append((tuple(result.shape), dtype))
    made = [*(tr.fresh(s, t) for s, t in stages[:-1]), tr.define(e.outvars)[0]]
    params = (("dims", (left, right)), ("precision", precision))
    out.append(Equation("dot_general", (x, y), (made[0],), params, (), line))
    for source, to in itertools.pairwise(made):
        if source.dtype != to.dtype:
            out.append(Equation("convert_element_type", (source,), (to,), (("new_dtype", to.dtype),), (), line))
        else:
            out.append(Equation("reshape", (source,), (to,), (("new_sizes", to.shape),), (), line))


def _each_bit_dot(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple[list[Any], list[int]]:
    """`vmap` of it: one product after the other."""
    some = [jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    def one(mapped: list[Any]) -> Any:
        own = iter(mapped)
        return primitive(BIT_DOT).bind(
            *(x if d is None else next(own) for x, d in zip(args, dims, strict=True)), **params
        )

    return jax.lax.map(one, some), [0]


batching.primitive_batchers[primitive(BIT_DOT)] = _each_bit_dot


def bit_dot(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    x, y = (tr.read(v) for v in e.invars)
    params = (("dims", ((-1, 0, 1), (-1, 1, 0))), ("precision", e.params["bits"]))
    out.append(Equation("dot_general", (x, y), tr.define(e.outvars), params, (), line))


def _common(a: str, b: str) -> tuple[str, bool]:
    """(a type that holds all values of two different ones, as far as there is one; whether that takes all bits of a float32).

    Not JAX's promotion, by which an integer is rounded to the other operand's float; a product of two types is of their values.
    """
    floats, integers = ([x for x in (a, b) if (x in INTEGERS) == whole] for whole in (False, True))
    if "bool" in (a, b) or not floats or not (integers or set(floats) & set(SMALL_FLOATS)):
        return dtype_name(jax.numpy.promote_types(jax.numpy.dtype(a), jax.numpy.dtype(b))), False
    wide = next((x for x in floats if x not in SMALL_FLOATS), "bfloat16")  # which holds 8-bit integers and small floats
    if not integers or integers[0] in ("int8", "uint8"):
        return wide, False
    return ("float64" if wide == "float64" else "float32"), True


def _converted(tr: Tracer, x: Operand, dtype: str, out: list[Equation], line: Line | None) -> Operand:
    if x.dtype == dtype:
        return x
    y = tr.fresh(x.shape, dtype)
    out.append(Equation("convert_element_type", (x,), (y,), (("new_dtype", dtype),), (), line))
    return y


def _grouped(
    tr: Tracer, x: Operand, batch: Sequence[int], contract: Sequence[int], out: list[Equation], line: Line | None
) -> tuple[tuple[int, int, int], Operand]:
    """(axes of batch, free and contracted, -1 for none; the operand with at most one of each)."""
    assert isinstance(x, Value)
    free = [d for d in range(len(x.shape)) if d not in (*batch, *contract)]
    groups = [list(batch), free, list(contract)]
    if all(len(g) <= 1 for g in groups) and contract:
        batch_axis, free_axis, contract_axis = ((*g, -1)[0] for g in groups)
        return (batch_axis, free_axis, contract_axis), x
    order = [d for g in groups for d in g]
    if order != sorted(order):
        turned = tr.fresh([x.shape[d] for d in order], x.dtype)
        out.append(Equation("transpose", (x,), (turned,), (("permutation", tuple(order)),), (), line))
        x = turned
    kept = [g for i, g in enumerate(groups) if g or i == 2]  # without a contracted dimension there is one of extent 1
    sizes, at = [], 0
    for g in kept:
        sizes.append(math.prod(x.shape[at : at + len(g)]))
        at += len(g)
    flat = tr.fresh(sizes, x.dtype)
    out.append(Equation("reshape", (x,), (flat,), (("new_sizes", tuple(sizes)),), (), line))
    axes, position = [], 0
    for i, g in enumerate(groups):
        present = bool(g) or i == 2
        axes.append(position if present else -1)
        position += present
    return (axes[0], axes[1], axes[2]), flat
