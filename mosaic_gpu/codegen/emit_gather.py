"""Emission of gathers and scatters by index arrays that lie in the scratch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..layouts.shared import PACKED, array_bytes, row_major
from ..program import Equation
from .text import c_type


def _sum(terms: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"({c}) * {s}" for c, s in terms if c != "0") or "0"


def _to_scratch(out: Any, first: Any, indices: Any) -> int:
    """Both arrays; returns where the indices start, in bytes."""
    base = array_bytes(first, align=16)
    out.met()
    for o, start in ((first, 0), (indices, base)):
        with out.block():
            out.to_scratch(o, out.positions("at", out.layout(o), row_major(o.shape)), start)
    out.met()
    return base


def emit_gather(out: Any, e: Equation, w: Any) -> None:
    """w: `ops.gather.Windows`."""
    x, indices, fill = e.operands
    result = e.results[0]
    base = _to_scratch(out, x, indices)
    name, layout = f"take{result.id}", out.layout(result)
    strides, index_strides = row_major(x.shape), row_major(indices.shape)
    rows = out.coordinates(f"{name}_c", layout) if layout is not None else [[]]
    for i, row in enumerate(rows):
        out.line(f"{c_type(result.dtype)} {name}_{i};")
        with out.block():
            batch = [row[k] for k in w.outer]
            starts, tests = ["0"] * len(w.shape), []
            for j, d in enumerate(w.start_map):
                at = _sum([*zip(batch, index_strides[:-1], strict=True), (str(j), 1)])
                out.line(f"const int i{j} = {out.read_place('int32', at, base)};")
                starts[d] = f"max(min(i{j}, {w.limit(d)}), 0)"
                tests.append(f"i{j} >= 0 && i{j} <= {w.limit(d)}")
            for d, b in w.batching:
                starts[d] = batch[b]
            terms = list(zip(starts, strides, strict=True))
            terms += [(row[o], strides[d]) for d, o in enumerate(w.offsets) if o >= 0]
            text = out.read_place(x.dtype, _sum(terms))
            if e.param("fill"):
                text = f"{' && '.join(tests) or 'true'} ? {text} : {out.scalar(fill)}"
            out.line(f"{name}_{i} = {text};")
    out.assign_elements(result, [f"{name}_{i}" for i in range(len(rows))])


def emit_scatter(out: Any, e: Equation, w: Any, combine: str) -> None:
    """w: `ops.gather.Windows`; combine: C expression of {0}, what is there, and {1}, what comes."""
    x, indices, updates = e.operands
    result = e.results[0]
    base = _to_scratch(out, updates, indices)
    name, layout = f"put{result.id}", out.layout(result)
    kind = "float" if x.dtype in PACKED else c_type(x.dtype)
    rows = out.coordinates(f"{name}_c", layout) if layout is not None else [[]]
    for i in range(len(rows)):
        out.line(f"{kind} {name}_{i} = {out.element(x, i)};")
    strides, parts = row_major(updates.shape), indices.shape[-1]
    with out.block(f"for (int t = 0; t < {math.prod(w.batch)}; ++t)"):
        batch = [f"t / {s} % {n}" for s, n in zip(row_major(w.batch), w.batch, strict=True)]
        tests = []
        starts = ["0"] * len(w.shape)
        for j, d in enumerate(w.start_map):
            read = out.read_place("int32", f"t * {parts} + {j}", base)
            if e.param("clip"):
                read = f"max(min({read}, {w.limit(d)}), 0)"
            out.line(f"const int i{j} = {read};")
            starts[d] = f"i{j}"
            if not e.param("clip"):
                tests.append(f"i{j} >= 0 && i{j} <= {w.limit(d)}")
        for d, b in w.batching:
            starts[d] = batch[b]
        out.line(f"const int first = {_sum([(c, strides[k]) for c, k in zip(batch, w.outer, strict=True)])};")
        with out.block(f"if ({' && '.join(tests) or 'true'})"):
            for i, row in enumerate(rows):
                hits, terms = [], [("first", 1)]
                for d, (c, start, o) in enumerate(zip(row, starts, w.offsets, strict=True)):
                    if o < 0:
                        hits.append(f"{c} == {start}")
                        continue
                    offset = f"{c} - {start}" if start != "0" else c
                    if w.window[d] != w.shape[d]:
                        hits.append(f"(u32)({offset}) < {w.window[d]}u")
                    terms.append((offset, strides[o]))
                new = out.read_place(updates.dtype, _sum(terms))
                with out.block(f"if ({' && '.join(hits) or 'true'})"):
                    out.line(f"const {kind} update = {new};")
                    out.line(f"{name}_{i} = ({kind})({combine.format(f'{name}_{i}', 'update')});")
    out.assign_elements(result, [f"{name}_{i}" for i in range(len(rows))])
