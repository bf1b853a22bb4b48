"""Emission of cumulative operations, of sorting and of the largest elements: elements meet in the warpgroup's scratch."""

from __future__ import annotations

from typing import Any

from ..layouts.shared import PACKED, array_bytes, itemsize, row_major
from ..ops.elementwise import FLOATS
from .emit_reductions import ReductionEmitter
from .text import c_type


class ScanEmitter(ReductionEmitter):
    """`scan`, `sort` and `top_k`."""

    def scan(self, step: Any, axis: int, reverse: bool, combine: str) -> None:
        e = step.equation
        source, result = e.operands[0], e.results[0]
        layout, n = self.layout(result), source.shape[axis]
        assert layout is not None
        kind = "float" if source.dtype in PACKED else c_type(source.dtype)
        wide = kind if itemsize(source.dtype) >= 4 or source.dtype in PACKED else "int"
        name, count = f"s{result.id}", layout.registers
        self.line(f"{kind} {name}[{count}];")
        for i in range(count):
            self.line(f"{name}[{i}] = {self.element(source, i)};")
        positions = self.positions(f"{name}_at", layout, row_major(layout.shape))
        self.line(f"const int {name}_c = {self.thread_part(layout, axis)};")
        stride, distance = row_major(layout.shape)[axis], 1

        def place(p: str) -> str:
            return f"(({wide}*)(shared + {self.scratch}))[{p}]"

        while distance < n:
            self.met()
            for i, p in enumerate(positions):
                self.line(f"{place(p)} = {name}[{i}];")
            self.met()
            for i, p in enumerate(positions):
                c = f"{name}_c + {layout.register_part(i)[axis]}"
                test = f"{c} + {distance} < {n}" if reverse else f"{c} >= {distance}"
                neighbour = f"{p} + {distance * stride}" if reverse else f"{p} - {distance * stride}"
                other = f"({kind}){place(neighbour)}"
                with self.block(f"if ({test})"):
                    self.line(f"const {kind} before = {other};")
                    self.line(f"{name}[{i}] = {combine.format('before', f'{name}[{i}]')};")
            distance *= 2
        self.assign_elements(result, [f"{name}[{i}]" for i in range(count)])

    def sort(self, step: Any) -> None:
        """Each element finds its rank, the number of elements along the dimension that go before it, and goes there."""
        e = step.equation
        d, keys = e.param("dimension"), e.operands[: e.param("num_keys")]
        first = e.operands[0]
        layout, n, stride = self.layout(first), first.shape[d], row_major(first.shape)[d]
        assert layout is not None
        bases = [0]
        for x in e.operands:
            bases.append(bases[-1] + array_bytes(x, align=8))
        name = f"sort{e.results[0].id}"
        positions = self.positions(f"{name}_at", layout, row_major(first.shape))
        self.line(f"const int {name}_c = {self.thread_part(layout, d)};")
        self.met()
        for x, base in zip(e.operands, bases, strict=False):
            self.to_scratch(x, positions, base)
        self.met()
        self.line(f"int {name}[{layout.registers}];")
        for i, p in enumerate(positions):
            with self.block():
                own = layout.register_part(i)[d]
                self.line(f"const int c = {name}_c + {own}, line = {p} - c * {stride}; int rank = 0;")
                for k, x in enumerate(keys):
                    self.line(f"const {c_type(x.dtype)} own{k} = {self.element(x, i)};")
                with self.block(f"for (int j = 0; j < {n}; ++j)"):
                    test = "j < c"
                    for k, x in reversed(list(enumerate(keys))):
                        self.line(
                            f"const {c_type(x.dtype)} k{k} = {self.read_place(x.dtype, f'line + j * {stride}', bases[k])};"
                        )
                        test = f"({_before(x.dtype, f'k{k}', f'own{k}')} || (!{_before(x.dtype, f'own{k}', f'k{k}')} && {test}))"
                    self.line(f"rank += {test};")
                self.line(f"{name}[{i}] = line + rank * {stride};")
        self.met()
        for x, base in zip(e.operands, bases, strict=False):
            for i in range(layout.registers):
                self.move_to_place(x, i, f"{name}[{i}]", base)
        self.met()
        for r, x, base in zip(e.results, e.operands, bases, strict=False):
            self.assign_moved(r, [self.place(x.dtype, p, base) for p in positions])

    def top_k(self, step: Any) -> None:
        """Each element finds its rank (how many are larger, or equal and before it); the first k go there with their indices."""
        e = step.equation
        (x,), (values, indices), d, k = e.operands, e.results, e.param("axis"), e.param("k")
        layout, n, base = self.layout(x), x.shape[d], array_bytes(values, align=8)
        assert layout is not None
        stride, short = row_major(x.shape)[d], row_major(values.shape)
        name, kind = f"top{values.id}", c_type(x.dtype)
        positions = self.positions(f"{name}_at", layout, row_major(x.shape))
        coordinates = self.coordinates(f"{name}_c", layout)
        self.met()
        self.to_scratch(x, positions)
        self.met()
        self.line(f"int {name}[{layout.registers}];")
        for i, (p, c) in enumerate(zip(positions, coordinates, strict=True)):
            with self.block():
                self.line(f"const int c = {c[d]}, line = {p} - c * {stride}; int rank = 0;")
                self.line(f"const {kind} own = {self.element(x, i)};")
                with self.block(f"for (int j = 0; j < {n}; ++j)"):
                    self.line(f"const {kind} other = {self.read_place(x.dtype, f'line + j * {stride}')};")
                    after, equal = _in_order(x.dtype, "own", "other")
                    self.line(f"rank += {after} || ({equal} && j < c);")
                self.line(f"{name}[{i}] = rank;")
        self.met()
        for i, c in enumerate(coordinates):
            at = " + ".join(f"({f'{name}[{i}]' if a == d else c[a]}) * {s}" for a, s in enumerate(short))
            with self.block(f"if ({name}[{i}] < {k})"):
                self.line(f"const int to = {at};")
                self.move_to_place(x, i, "to")
                self.write_place(indices.dtype, "to", c[d], base)
        self.met()
        for r, start in ((values, 0), (indices, base)):
            places = self.positions(f"{name}_to{r.id}", self.layout(r), short)
            self.assign_moved(r, [self.place(r.dtype, p, start) for p in places])


def _in_order(dtype: str, a: str, b: str) -> tuple[str, str]:
    """(whether a is smaller than b, whether they are equal) in total order, as C expressions."""
    if dtype in FLOATS:
        key = "order_key" if dtype == "float64" else "order_keyf"
        a, b = f"{key}({a})", f"{key}({b})"
    return (f"(!{a} && {b})" if dtype == "bool" else f"({a} < {b})"), f"({a} == {b})"


def _before(dtype: str, a: str, b: str) -> str:
    """Whether a is sorted before b: NaNs are equal and last."""
    if dtype in FLOATS:
        return f"({a} < {b} || ({b} != {b} && {a} == {a}))"
    return f"(!{a} && {b})" if dtype == "bool" else f"({a} < {b})"
