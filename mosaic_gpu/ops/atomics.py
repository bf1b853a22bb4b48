"""Atomic updates of global memory that return nothing: `atomic_add(ref, x)` and the like (PTX ISA 9.7.13.6, red).

Each element is updated by itself, relaxed, at the scope of the GPU: in no order, and none among these updates is needed.  With
every other access they need one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arguments
from ..codegen.emit_indexed import emit_atomic
from ..errors import UnsupportedCall
from ..program import Equation, View
from .refs import Access
from .registry import BOTH, WARP, WARPGROUP, op

INTEGERS = ("int32", "uint32", "int64", "uint64")
TYPES = {
    "add": (*INTEGERS, "float32", "float64", "float16", "bfloat16"),
    "max": INTEGERS,
    "min": INTEGERS,
    "and": INTEGERS,
    "or": INTEGERS,
    "xor": INTEGERS,
}
FUNCTIONS = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
atomic_p = op("atomic_store", whole=True, dtypes=TYPES["add"])


def _bind(kind: str, ref: Any, val: Any) -> None:
    from ..frontend.primitives import bind, spread

    bind(atomic_p, ref, spread(f"atomic_{kind}", "val", val, ref), kind=kind)


def atomic_add(ref: Any, val: Any) -> None:
    """Add `val` (an array of the Ref's shape and dtype, or a scalar) to `ref`, a GMEM view, element by element, atomically.

    int32, uint32, int64, uint64, float32, float64, float16, bfloat16; sums of floats differ with the order, from run to run.
    The output must hold numbers before (`kernel(input_output_aliases=...)`, or stores in order before).  What sticks out of the
    array is not updated.  Other threads may update the same elements at the same time; reads and stores need an order.
    Raises TypeError for another memory, UnsupportedCall for another dtype.
    """
    _bind("add", ref, val)


def atomic_max(ref: Any, val: Any) -> None:
    """As `atomic_add`: the larger of the two stays.  int32, uint32, int64, uint64."""
    _bind("max", ref, val)


def atomic_min(ref: Any, val: Any) -> None:
    """As `atomic_add`: the smaller of the two stays.  int32, uint32, int64, uint64."""
    _bind("min", ref, val)


def atomic_and(ref: Any, val: Any) -> None:
    """As `atomic_add`: bits that both have stay.  int32, uint32, int64, uint64."""
    _bind("and", ref, val)


def atomic_or(ref: Any, val: Any) -> None:
    """As `atomic_add`: bits that one has are set.  int32, uint32, int64, uint64."""
    _bind("or", ref, val)


def atomic_xor(ref: Any, val: Any) -> None:
    """As `atomic_add`: bits of `val` are flipped.  int32, uint32, int64, uint64."""
    _bind("xor", ref, val)


@atomic_p.abstract
def _(ref: Any, val: Any, *, kind: str) -> Any:
    arguments.memory(f"atomic_{kind}", "ref", ref, "gmem")
    return ()


@atomic_p.plan()
def _(ctx: Any, e: Equation) -> Access:
    view, kind = e.operands[0], e.param("kind")
    assert isinstance(view, View)
    if view.dtype not in TYPES[kind]:
        raise UnsupportedCall(f"atomic_{kind} of {view.dtype}: it takes {', '.join(TYPES[kind])}", e.line)
    if ctx.scope is WARP and view.shape:
        raise UnsupportedCall(
            f"atomic_{kind} of an array {view.shape} by a single warp: only scalars; do it in the warpgroup's scope",
            e.line,
        )
    ctx.output_index(view.ref, e.line)
    return Access("gmem", view, not view.shape, ctx.pointer(view.ref, e.line))


@atomic_p.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    emit_atomic(out, step.equation, step.data)


@atomic_p.simulate
def _(sim: Any, step: Any) -> None:
    x = sim.read(step.equation.operands[1])
    sim.update(step.data, lambda old: FUNCTIONS[step.equation.param("kind")](old, x).astype(old.dtype))
