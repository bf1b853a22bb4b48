"""Emission of stores to, and reductions over, the memory of several devices (prelude/multimem.cuh)."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import UnsupportedCall
from ..layouts.shared import PACKED, itemsize
from ..program import Equation, Value
from .text import c_type

BASE = "multicast"  # of the parameters that hold addresses


def emit_multimem(out: Any, e: Equation, access: Any) -> None:
    view, store = access.view, not e.results
    x = e.operands[1] if store else e.results[0]
    function = "multimem_store" if store else f"multimem_{e.param('reduction_op')}_{view.dtype}"
    if not access.scalar:
        if not store:
            out.declare(x)
        out.global_array(access, x, store, BASE, functools.partial(_move, out, e.op, function, store))
        return
    place = f"{BASE}{access.input} + {out.global_index(access.input, [out.affine(d.start) for d in view.dims])}"
    if store:
        with out.elected():
            out.line(f"{function}({place}, {_word(view.dtype, out.scalar(x))});")
    else:
        out.define_scalar(x, f"({c_type(x.dtype)})0")
        out.line(f"{function}({out.name(x)}, {place});")


def _word(dtype: str, text: str) -> str:
    """A register as the bits that are stored."""
    if itemsize(dtype) == 8:
        return f"(u64)__double_as_longlong({text})" if dtype == "float64" else f"(u64)({text})"
    return f"as_u32({text})"


def _move(out: Any, op: str, function: str, store: bool, x: Value, i: int, width: int, place: str, test: str) -> None:
    """`width` neighbours from register i on, by as few instructions as there are: reductions of integers have no vectors."""
    name, dtype = out.name(x), x.dtype
    if dtype in PACKED and width % 2:
        raise UnsupportedCall(
            f"{op} of {dtype}, of which a thread has single elements ({out.layout(x)}): it moves at least 32 bits. Take a layout "
            "with neighbours in a thread (layout_cast(x, plgpu.Layout.WGMMA)), rows and starts of an even length"
        )
    per_word = 2 if dtype in PACKED else 1
    first, words = i // per_word, width // per_word
    together = 1 if not store and "int" in dtype else words
    with out.block(f"if ({test})"):
        for k in range(0, words, together):
            registers = [f"{name}[{first + k + n}]" for n in range(together)]
            at = f"{place} + {k}" if k else place
            if store:
                out.line(f"{function}({at}, {', '.join(_word(dtype, r) for r in registers)});")
            else:
                out.line(f"{function}({', '.join(registers)}, {at});")
    if not store:
        with out.block("else"):
            out.line(" ".join(f"{name}[{first + k}] = 0;" for k in range(words)))
