"""`lax.bitcast_convert_type`: bits of one type seen as another.

Of the same width: an elementwise operation.  Of another width: `split_bits` and `join_bits`, which the front end makes of it.  An
element of w bits is an array of w / n elements of n bits along a further last dimension, the lowest bits first.  Such
parts stay with the thread that has the whole, where nothing else decides: each is a shift and a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..layouts.registers import RegisterLayout
from ..layouts.shared import array_bytes, row_major, width
from ..layouts.spread import register_table
from ..program import Equation, Value
from .conversions import HALF, define
from .elementwise import C_INTEGERS, FLOATS, INT4, INTEGERS, SMALL_FLOATS, in_type, numpy_dtype
from .moves import Map
from .registry import op

TYPES = (*FLOATS, *SMALL_FLOATS, *INTEGERS, *INT4)


# ---- one element, in C and in NumPy -----------------------------------------------------------------------------------
def _unsigned(dtype: str) -> str:
    """The C type that holds the bits."""
    return C_INTEGERS[max(8, width(dtype))][1]


def to_bits(dtype: str, x: str) -> str:
    """The bits of an element as an unsigned number."""
    if dtype in INT4:
        return f"(u8)({x} & 15)"
    if dtype in HALF:
        return f"to_{HALF[dtype]}({x})"
    return f"({_unsigned(dtype)})({in_type(f'as_bits({x})', dtype) if dtype in FLOATS else x})"


def from_bits(dtype: str, bits: str) -> str:
    """The element of which these are the lowest bits; what is above them does not count."""
    if dtype in INT4:
        return f"wrap_{INT4[dtype]}((int)({bits}))"
    if dtype in HALF:
        return f"from_{HALF[dtype]}((u16)({bits}))"
    if dtype in FLOATS:
        return f"float_of_bits(({_unsigned(dtype)})({bits}))"
    if width(dtype) == 4:
        return f"(u8)(({bits}) & 15)"
    from ..codegen.text import c_type

    return f"({c_type(dtype)})({bits})"


def bits_of(x: Any, dtype: str) -> Any:
    """The same of a NumPy array."""
    if dtype in INT4:
        return x.astype(np.int8).view(np.uint8) & np.uint8(15)
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)


def of_bits(bits: Any, dtype: str) -> Any:
    to = numpy_dtype(dtype)
    if width(dtype) == 4:
        bits = (bits & np.asarray(15, bits.dtype)).astype(np.uint8)
        return bits.astype(to) if dtype in INT4 else bits.view(to)
    return np.ascontiguousarray(bits.astype(f"u{to.itemsize}")).view(to).reshape(bits.shape)


define(
    "bitcast_convert_type",
    lambda e: from_bits(e.results[0].dtype, to_bits(e.operands[0].dtype, "{0}")),
    lambda e, x: of_bits(bits_of(x, e.operands[0].dtype), e.results[0].dtype),
).dtypes = TYPES

# ---- of another width ---------------------------------------------------------------------------------------------------
INSTEAD = "a bitcast_convert_type to another width takes a whole warpgroup; do it outside of warp_map"
split_bits = op("split_bits", pure=True, whole=True, dtypes=TYPES, instead=INSTEAD)
join_bits = op("join_bits", pure=True, whole=True, dtypes=TYPES, instead=INSTEAD)


@split_bits.layouts
def _(solver: Any, e: Equation) -> None:
    solver.minor(e, e.operands[0], e.results[0])


@join_bits.layouts
def _(solver: Any, e: Equation) -> None:
    solver.minor(e, e.results[0], e.operands[0])


def _whole_of_part(e: Equation) -> Map:
    """Which element of the operand the parts are of."""
    return Map.of_strides(e, range(len(e.operands[0].shape)))


def _part_of_whole(e: Equation, part: int) -> Map:
    """Which element of the operand a part of the result is."""
    rank = len(e.results[0].shape)
    return Map.of_strides(e, (*range(rank), -1), (), (*[0] * rank, part))


def _maps(e: Equation) -> list[Map]:
    return (
        [_whole_of_part(e)] if e.op == "split_bits" else [_part_of_whole(e, j) for j in range(e.operands[0].shape[-1])]
    )


@split_bits.scratch
@join_bits.scratch
def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
    x, have = e.operands[0], layouts.get(e.operands[0].id) if isinstance(e.operands[0], Value) else None
    layout = layouts.get(e.results[0].id)
    if have is None or (layout is not None and all(register_table(have, layout, m) is not None for m in _maps(e))):
        return 0
    return array_bytes(x)


def _elements(out: Any, e: Equation) -> list[list[str]]:
    """For each map and each register of the result an element of the operand: the thread's own, else through the scratch."""
    x, result = e.operands[0], e.results[0]
    have, layout = out.layout(x), out.layout(result)
    maps, count = _maps(e), 1 if layout is None else layout.registers
    if have is None:
        return [[out.scalar(x)] * count for _ in maps]
    tables = [register_table(have, layout, m) if layout is not None else None for m in maps]
    if all(t is not None for t in tables):
        return [[out.element(x, r) for r in t or ()] for t in tables]
    out.met()
    with out.block():
        out.to_scratch(x, out.positions("at", have, row_major(x.shape)))
    out.met()
    found = []
    for k, m in enumerate(maps):
        name = f"from{result.id}_{k}"
        if layout is None:
            out.line(f"const int {name} = {m.start()};")
        places = [name] if layout is None else out.positions(name, layout, m.strides(), str(m.start()))
        found.append([out.read_place(x.dtype, p) for p in places])
    return found


@split_bits.emit()
def _(out: Any, step: Any) -> None:
    e = step.equation
    x, result, layout = e.operands[0], e.results[0], out.layout(e.results[0])
    (wholes,), bits, last = _elements(out, e), width(result.dtype), len(result.shape) - 1
    thread = out.thread_part(layout, last)
    texts = []
    for i, whole in enumerate(wholes):
        part = layout.register_part(i)[last]
        shift = str(part * bits) if thread == "0" else f"({thread} + {part}) * {bits}"
        texts.append(from_bits(result.dtype, f"{to_bits(x.dtype, whole)} >> {shift}"))
    out.assign_elements(result, texts)


@join_bits.emit()
def _(out: Any, step: Any) -> None:
    e = step.equation
    x, result = e.operands[0], e.results[0]
    bits, wide = width(x.dtype), _unsigned(result.dtype)
    parts = zip(*_elements(out, e), strict=True)
    joined = [" | ".join(f"({wide})({to_bits(x.dtype, p)}) << {j * bits}" for j, p in enumerate(ps)) for ps in parts]
    out.assign_elements(result, [from_bits(result.dtype, j) for j in joined])


@split_bits.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    x, result = e.operands[0], e.results[0]
    bits = bits_of(np.asarray(sim.read(x)), x.dtype)
    shifts = (np.arange(result.shape[-1]) * width(result.dtype)).astype(bits.dtype)
    sim.write(result, of_bits(bits[..., None] >> shifts, result.dtype))


@join_bits.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    x, result = e.operands[0], e.results[0]
    wide = np.dtype(f"u{numpy_dtype(result.dtype).itemsize}")
    parts = bits_of(np.asarray(sim.read(x)), x.dtype).astype(wide)
    shifts = (np.arange(x.shape[-1]) * width(x.dtype)).astype(wide)
    sim.write(result, of_bits(np.bitwise_or.reduce(parts << shifts, axis=-1), result.dtype))
