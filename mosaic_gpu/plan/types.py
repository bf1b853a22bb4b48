"""Types that a kernel does not have, refused by name before anything is laid out: in Refs, in values, in constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import Line, UnsupportedCall, UnsupportedPrimitive
from ..layouts.shared import BELOW_A_BYTE, ITEM_BITS, instead_of, way_out_below_a_byte
from ..ops import registry
from ..ops.elementwise import FLOATS, INT4, INTEGERS, SMALL_FLOATS
from ..ops.ways_out import WAYS_OUT
from ..program import Equation, Literal, Value, View, scalars_of, walk

# Operations that hand values of any type on, and products, whose own rule says where float8 is multiplied.
ON_ANY_VALUE = {
    "get",
    "swap",
    "load",
    "for",
    "while",
    "cond",
    "run_scoped",
    "layout_cast",
    "print_layout",
    "dot_general",
    "wgmma",
}
IN_MEMORY = ("gmem", "smem", "tmem", "acc")
IN_REGISTERS = ITEM_BITS.keys() - {"float8_e8m0fnu"}  # which is copied only: factors of tcgen05_mma
PLAIN = IN_REGISTERS - set(SMALL_FLOATS) - set(INT4)  # which every operation computes with, or refuses by its own rule


def refuse_ref(ref: Value, line: Line | None) -> None:
    """UnsupportedCall for a Ref of a type that memory here has no elements of."""
    if ref.space is None or ref.space.kind not in IN_MEMORY:
        return
    if ref.dtype in BELOW_A_BYTE:
        raise UnsupportedCall(f"{ref}: there are no Refs of {ref.dtype}, as {way_out_below_a_byte(ref.dtype)}", line)
    if ref.dtype not in ITEM_BITS:
        raise UnsupportedCall(f"{ref}: there are no Refs of {ref.dtype}: {instead_of(ref.dtype)}", line)


def made_for(equations: Sequence[Equation]) -> dict[int, Equation]:
    """By the id of a complex value, the operation that needs it and has a way out of its own.

    `jnp.fft.fft` of a real array converts it first.  Who wrote it has asked for a transform, and nothing about complex numbers.
    """
    users = [e for e in equations if e.op == "fft"]
    return {v.id: e for e in users for o in e.operands for v in scalars_of(o) if v.dtype.startswith("complex")}


def refuse_types(e: Equation, needed: Mapping[int, Equation]) -> None:
    """UnsupportedPrimitive for values of types that a kernel has no registers for, or does not compute with.

    needed: `made_for` the equations among which `e` is.
    """
    if e.op == "fft" or (e.op == "convert_element_type" and e.results[0].id in needed):
        e = needed.get(e.results[0].id, e)
        raise UnsupportedPrimitive(f"{e.op!r} is no operation of a kernel: {WAYS_OUT['fft']}", e.line)
    for ref in (v for r in e.regions for v in r.inputs if v.space is not None):
        refuse_ref(ref, e.line)
    if all(isinstance(o, View) or o.dtype in PLAIN for o in (*e.results, *e.operands)):
        return
    known = ", ".join((*FLOATS, *INTEGERS, *INT4, "bool"))
    values: list[tuple[str, Value | Literal]] = [("makes", v) for v in e.results]
    values += [("takes", o) for o in e.operands if not isinstance(o, View)]
    for verb, v in values:
        in_memory = isinstance(v, Value) and v.space is not None
        if not in_memory and v.dtype not in IN_REGISTERS and not v.dtype.startswith("key<"):
            raise UnsupportedPrimitive(
                f"{e.op} {verb} {v.dtype} values: a kernel computes in {known}; {WAYS_OUT.get(e.op) or instead_of(v.dtype)}",
                e.line,
            )
    types = [o.dtype for o in (*e.results, *e.operands) if not isinstance(o, View)]
    small = next((t for t in types if t in SMALL_FLOATS or t in INT4), None)
    known_op = registry.OPS.get(e.op)
    if small is not None and e.op not in ON_ANY_VALUE and known_op is not None and small not in known_op.dtypes:
        what, wide = "moved, chosen from and converted, not computed with", "float32"
        if small in INT4:
            what, wide = "moved, chosen from, converted, compared, added, subtracted, multiplied and divided", "int8"
        raise UnsupportedPrimitive(
            f"{e.op} of {small}: these are {what}; convert to {wide} first (x.astype(jnp.{wide})) and back", e.line
        )


def has_unsized_refs(equations: Iterable[Equation]) -> bool:
    """Whether a Ref here is of a type without a size, so that nothing can be placed."""
    refs = (v for e in walk(tuple(equations)) for r in e.regions for v in r.inputs if v.space is not None)
    return any(v.dtype not in ITEM_BITS for v in refs if v.space is not None and v.space.kind in IN_MEMORY)


def has_unsized_products(equations: Iterable[Equation]) -> bool:
    """Whether a product gives such a type, so that no instruction can be chosen."""
    return any(v.dtype not in ITEM_BITS for e in walk(tuple(equations)) if e.op == "dot_general" for v in e.results)
