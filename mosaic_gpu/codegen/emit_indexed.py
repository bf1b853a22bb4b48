"""Emission of loads and stores by index arrays."""

from __future__ import annotations

from typing import Any

from ..layouts.shared import PACKED
from ..program import Equation, Operand, Value
from .text import c_type, half, stored_type


def _places(out: Any, access: Any, like: Value, indices: tuple[Operand, ...]) -> list[tuple[str, str]]:
    """(address, whether it lies in the array: '' where that is not asked) of each register of `like`."""
    view = access.view
    name = f"at{out.fresh()}"
    layout = out.layout(like)
    rows = out.coordinates(name, layout)
    found = []
    for i, row in enumerate(rows):
        coordinates = [out.affine(d.start) for d in view.dims]
        for d, (array, along) in zip(view.kept, access.dims, strict=True):
            step, start = view.dims[d].stride, coordinates[d]
            part = f"(int){out.element(indices[array], i)}" if array >= 0 else row[along]
            coordinates[d] = (f"({part}) * {step}" if step != 1 else part) + (f" + {start}" if start != "0" else "")
        if access.kind == "smem":
            buffer = out.plan.buffers[view.ref.id]
            found.append((f"shared + {out.shared_offset(buffer.layout, buffer.offset, coordinates)}", ""))
            continue
        tests = []
        for d, (array, _) in zip(view.kept, access.dims, strict=True):
            c, n = coordinates[d], out.runtime_dim(access.input, d)
            tests.append(f"(u32)({c}) < (u32){n}" if array >= 0 else f"{c} < {n}")
        found.append((f"p{access.input} + {out.global_index(access.input, coordinates)}", " && ".join(tests)))
    return found


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
