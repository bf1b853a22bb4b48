"""Emission of loads and stores by index arrays and under masks, and of atomic updates."""

from __future__ import annotations

from typing import Any

from ..layouts.shared import PACKED
from ..program import Affine, Equation, Operand, Value, View
from .text import c_type, half, stored_type


def _places(out: Any, access: Any, like: Value, indices: tuple[Operand, ...]) -> list[tuple[str, str]]:
    """(address, whether it lies in the array: '' where that is not asked) of each register of `like`.

    indices: the arrays of `ops.indexed.Indexed`; (): of a plain view.
    """
    view = access.view
    name = f"at{out.fresh()}"
    layout = out.layout(like)
    rows = out.coordinates(name, layout)
    dims = access.dims if indices else [(-1, k) for k in range(len(view.kept))]
    found = []
    for i, row in enumerate(rows):
        coordinates = [out.affine(d.start) for d in view.dims]
        for d, (array, along) in zip(view.kept, dims, strict=True):
            step, start = view.dims[d].stride, coordinates[d]
            part = row[along] if array < 0 else f"{name}_{i}_{array}"
            if array >= 0:
                index, n = out.element(indices[array], i), _extent(out, access, d)
                wraps = not indices[array].dtype.startswith("u")
                out.line(f"const int {part} = {f'count_from_end((int){index}, {n})' if wraps else f'(int){index}'};")
            coordinates[d] = (f"({part}) * {step}" if step != 1 else part) + (f" + {start}" if start != "0" else "")
        if access.kind == "smem":
            buffer = out.plan.buffers[view.ref.id]
            found.append((f"shared + {out.shared_offset(buffer.layout, buffer.offset, coordinates)}", ""))
            continue
        tests = []
        for d, (array, _) in zip(view.kept, dims, strict=True):
            if array >= 0:
                tests.append(f"(u32){name}_{i}_{array} < (u32){_extent(out, access, d)}")
            if array < 0 or not _is_whole(view, d):
                tests.append(f"{coordinates[d]} < {out.runtime_dim(access.input, d)}")
        found.append((f"p{access.input} + {out.global_index(access.input, coordinates)}", " && ".join(tests)))
    return found


def _is_whole(view: View, d: int) -> bool:
    """Whether a view takes all of dimension d of its buffer."""
    dim = view.dims[d]
    return dim.start == Affine(0) and dim.stride == 1 and dim.size == view.ref.shape[d]


def _extent(out: Any, access: Any, d: int) -> str:
    """How many elements a view has along dimension d of its buffer."""
    if access.kind == "gmem" and _is_whole(access.view, d):
        return str(out.runtime_dim(access.input, d))
    return str(access.view.dims[d].size)


def emit_get(out: Any, e: Equation, access: Any) -> None:
    """access: `ops.indexed.Indexed`."""
    result = e.results[0]
    name, dtype = f"got{result.id}", result.dtype
    places = _places(out, access, result, e.operands[1:])
    for i, (address, test) in enumerate(places):
        raw = f"*({stored_type(dtype)}*)({address})"
        text = f"from_{half(dtype)}({raw})" if dtype in PACKED else raw
        out.line(f"{c_type(dtype)} {name}_{i} = {f'{test} ? {text} : ({c_type(dtype)})0' if test else text};")
    out.assign_elements(result, [f"{name}_{i}" for i in range(len(places))])


def emit_put(out: Any, e: Equation, access: Any) -> None:
    x, *indices = e.operands[1:]
    assert isinstance(x, Value)
    dtype = access.view.dtype
    for i, (address, test) in enumerate(_places(out, access, x, tuple(indices))):
        value = out.element(x, i)
        store = f"*({stored_type(dtype)}*)({address}) = {f'to_{half(dtype)}({value})' if dtype in PACKED else value};"
        out.line(f"if ({test}) {store}" if test else store)


def emit_masked(out: Any, e: Equation, access: Any) -> None:
    """A load (mask, other) or a store (value, mask) of the elements whose mask is set."""
    dtype, load = access.view.dtype, bool(e.results)
    like = e.results[0] if load else e.operands[1]
    mask, other = (e.operands[1], e.operands[2]) if load else (e.operands[2], None)
    assert isinstance(like, Value)
    places = _places(out, access, like, ())
    for i, (address, test) in enumerate(places):
        raw = f"*({stored_type(dtype)}*)({address})"
        there = out.element(mask, i) + (f" && {test}" if test else "")
        if load:
            text = f"from_{half(dtype)}({raw})" if dtype in PACKED else raw
            outside = (
                f"({out.element(mask, i)} ? ({c_type(dtype)})0 : {out.element(other, i)})"  # past the array's end: zero
            )
            out.line(f"{c_type(dtype)} masked{like.id}_{i} = {there} ? {text} : {outside};")
        else:
            x = out.element(like, i)
            out.line(f"if ({there}) {raw} = {f'to_{half(dtype)}({x})' if dtype in PACKED else x};")
    if load:
        out.assign_elements(like, [f"masked{like.id}_{i}" for i in range(len(places))])


def emit_atomic(out: Any, e: Equation, access: Any) -> None:
    """One update of each element, by the first of the threads and registers that hold it."""
    x, dtype = e.operands[1], access.view.dtype
    function = f"red_{e.param('kind')}_{dtype}"

    def value(text: str) -> str:
        return f"to_{half(dtype)}({text})" if dtype in PACKED else text

    if access.scalar:
        place = f"p{access.input} + {out.global_index(access.input, [out.affine(d.start) for d in access.view.dims])}"
        with out.elected():
            out.line(f"{function}({place}, {value(out.scalar(x))});")
        return
    assert isinstance(x, Value)
    layout = out.layout(x)
    first = " && ".join(out.own_elements(layout)) or "true"
    parts = [layout.register_part(i) for i in range(layout.registers)]
    with out.block(f"if ({first})"):
        for i, (address, test) in enumerate(_places(out, access, x, ())):
            if parts.index(parts[i]) == i:
                out.line(f"if ({test}) {function}({address}, {value(out.element(x, i))});")
