"""Emission of moves between threads: through the warpgroup's scratch in shared memory, or by renaming registers.

The scratch holds arrays row-major.  Before it is written all threads of the warpgroup meet, as somebody may still be reading
what was there before; they meet again before it is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..layouts.registers import RegisterLayout
from ..layouts.shared import PACKED, row_major
from ..layouts.spread import ElementMap, register_table
from ..program import Literal, Operand, Value
from .emit_memory import MemoryEmitter
from .text import c_type, half, stored_type

Shape = tuple[int, ...]


class MoveEmitter(MemoryEmitter):
    """Needs `role_sync` of the whole emitter, and the role's place in shared memory."""

    scratch = ""  # C expression: bytes from the start of shared memory

    def role_sync(self) -> None:
        raise NotImplementedError

    # ---- pieces -----------------------------------------------------------------------------------------------------------
    def positions(
        self, name: str, layout: RegisterLayout | None, strides: Sequence[int], start: str = "0"
    ) -> list[str]:
        """For each register the number of its element, sum of coordinate * stride, from `start` on; declares a variable."""
        if layout is None:
            return [start]
        terms = [start] if start != "0" else []
        for d, s in enumerate(strides):
            part = self.thread_part(layout, d)
            if s and part != "0":
                terms.append(f"({part}) * {s}" if s != 1 else part)
        self.line(f"const int {name} = {' + '.join(terms) or '0'};")
        out = []
        for i in range(layout.registers):
            shift = sum(p * s for p, s in zip(layout.register_part(i), strides, strict=True))
            out.append(f"{name} + {shift}" if shift > 0 else f"{name} - {-shift}" if shift else name)
        return out

    def coordinates(self, name: str, layout: RegisterLayout) -> list[list[str]]:
        """For each register the coordinates of its element; declares a variable for each dimension."""
        for d in range(len(layout.shape)):
            self.line(f"const int {name}_{d} = {self.thread_part(layout, d)};")
        out = []
        for i in range(layout.registers):
            part = layout.register_part(i)
            out.append([f"{name}_{d} + {p}" if p else f"{name}_{d}" for d, p in enumerate(part)])
        return out

    def place(self, dtype: str, position: str, base: int = 0) -> str:
        """The element at a position of the scratch (in elements of its type, from byte `base` on) as an lvalue."""
        return f"(({stored_type(dtype)}*)(shared + {self.scratch}{f' + {base}' if base else ''}))[{position}]"

    def read_place(self, dtype: str, position: str, base: int = 0) -> str:
        raw = self.place(dtype, position, base)
        return f"from_{half(dtype)}({raw})" if dtype in PACKED else raw

    def write_place(self, dtype: str, position: str, x: str, base: int = 0) -> None:
        self.line(f"{self.place(dtype, position, base)} = {f'to_{half(dtype)}({x})' if dtype in PACKED else x};")

    def to_scratch(self, o: Operand, positions: Sequence[str], base: int = 0) -> None:
        if 0 in o.shape:  # it has registers, of which none is an element, and no place
            return
        for i, p in enumerate(positions):
            self.move_to_place(o, i, p, base)

    def move_to_place(self, o: Operand, index: int, position: str, base: int = 0) -> None:
        """Element `index` of a thread's registers as it is.

        Converted to float32 and back a negative NaN would come out as the positive one, and be another to who compares the
        element in the scratch with the one in the registers.
        """
        self.line(f"{self.place(o.dtype, position, base)} = {self.moved_element(o, index)};")

    def moved_element(self, o: Operand, index: int) -> str:
        """`element` as it is: a 16-bit float, of which two lie in a register, as a u16."""
        if o.dtype not in PACKED:
            return self.element(o, index)
        if self.layout(o) is None:
            return f"to_{half(o.dtype)}({self.scalar(o)})"
        return f"(u16)({self.scalar(o)}[{index // 2}]{' >> 16' if index % 2 else ''})"

    def assign_moved(self, result: Value, texts: Sequence[str]) -> None:
        """`assign_elements` of what `moved_element` gives."""
        if result.dtype not in PACKED:
            self.assign_elements(result, texts)
            return
        if self.layout(result) is None:
            self.define_scalar(result, f"from_{half(result.dtype)}({texts[0]})")
            return
        name, last = self.declare(result), len(texts) - 1
        lines = [
            f"{name}[{i // 2}] = {texts[i]}{f' | (u32){texts[i + 1]} << 16' if i < last else ''};"
            for i in range(0, last + 1, 2)
        ]
        for k in range(0, len(lines), 8):
            self.line(" ".join(lines[k : k + 8]))

    def met(self) -> None:
        self.role_sync()

    # ---- moves --------------------------------------------------------------------------------------------------------------
    def moved(
        self,
        source: Operand,
        result: Value,
        of: ElementMap,
        strides: Sequence[int],
        start: str = "0",
        alias: bool = False,
    ) -> None:
        """result[c] = source at `of.wanted(c)`, whose row-major number is start + sum of c * strides.

        alias: the result may be the operand's own registers, where those are what it wants.
        By renaming where each thread has what it wants; else through the scratch.
        """
        have, layout = self.layout(source), self.layout(result)
        if have is None:  # one value stands for all
            if layout is None:
                self.names[result.id] = self.scalar(source)
            else:
                self.declare(result)
                self.copy(self.name(result), result, source)
            return
        if layout is None and result.shape == () and math.prod(have.shape) == 1:
            self.define_scalar(result, self.element(source, 0))
            return
        if layout is not None and start.lstrip("-").isdigit():
            table = register_table(have, layout, of)
            if table is not None:
                if alias and table == tuple(range(have.registers)):
                    self.names[result.id] = self.scalar(source)
                    return
                self._rename(result, source, table)
                return
        self.met()
        with self.block():
            self.to_scratch(source, self.positions("at", have, row_major(have.shape)))
        self.met()
        self.from_scratch(result, strides, start)

    def _rename(self, result: Value, source: Operand, table: Sequence[int]) -> None:
        """Each register of the result from the one of the source that the table names; whole pairs stay packed."""
        pairs_stay = all(
            a % 2 == 0 and b == a + 1 for a, b in zip(table[::2], (*table[1::2], table[-1] + 1), strict=False)
        )
        if result.dtype not in PACKED or not pairs_stay:
            self.assign_moved(result, [self.moved_element(source, j) for j in table])
            return
        self.declare(result)
        pairs = [f"{self.name(result)}[{i}] = {self.scalar(source)}[{j // 2}];" for i, j in enumerate(table[::2])]
        for k in range(0, len(pairs), 8):
            self.line(" ".join(pairs[k : k + 8]))

    def from_scratch(self, result: Value, strides: Sequence[int], start: str = "0", base: int = 0) -> None:
        name = f"from{result.id}"
        if self.layout(result) is None:
            self.line(f"const int {name} = {start};")
            positions = [name]
        else:
            positions = self.positions(name, self.layout(result), strides, start)
        self.assign_moved(result, [self.place(result.dtype, p, base) for p in positions])

    def clamped(self, o: Operand, most: int) -> str:
        """A start index within 0..most, as JAX clamps it."""
        if isinstance(o, Literal):
            return str(min(max(int(o.value), 0), most))
        if o.dtype in ("uint8", "uint16", "uint32", "uint64"):
            return f"(int)min({self.scalar(o)}, ({c_type(o.dtype)}){most})"
        return f"(int)max(min((long long){self.scalar(o)}, {most}ll), 0ll)"
