"""Emission of the fifth-generation tensor core: products, commits, and copies, loads and stores of tensor memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..layouts.operands import SharedOperand, descriptor_high
from ..layouts.registers import RegisterLayout
from ..layouts.shared import PACKED
from ..layouts.tmem import Part, TmemPart, Transfer, transfers
from ..ops.tcgen05 import CommitPlan, Tcgen05Plan
from ..ops.tcgen05_copies import TmemCopy
from ..ops.tmem import TmemAccess
from ..program import Affine, Literal, Value
from .emit_memory import MemoryEmitter
from .encodings import descriptor_low, tmem_address
from .text import c_type

FUNCTIONS = {"f16": "f16", "tf32": "tf32", "f8f6f4": "f8", "i8": "i8"}
SCALED = {("mxf8f6f4", 1): "mxf8", ("mxf4nvf4", 2): "mxf4", ("mxf4nvf4", 4): "nvf4"}  # by factors of a row and step
CELL_COLUMNS_PER_STEP = 8  # of A in tensor memory: 32 bytes of K


class Tcgen05Emitter(MemoryEmitter):
    """Needs the descriptors of the whole emitter."""

    def descriptor(self, o: SharedOperand) -> str:
        raise NotImplementedError

    def barrier_address(self, use: Any, slot: str | None = None) -> str:
        raise NotImplementedError

    @property
    def group(self) -> str:
        """The template argument of functions that work for one block, or for a pair."""
        return "<2>" if self.plan.tmem_pair else ""

    def tmem_start(self, part: Part) -> str:
        """Address of a part's first cell."""
        column = part.column.const + self.plan.tmem[part.buffer].column
        return "tmem + " + self.affine(type(part.column)(column, part.column.terms))

    def tcgen05_mma(self, p: Tcgen05Plan) -> None:
        """One instruction for each 32 bytes of K."""
        where = "ts" if isinstance(p.a, TmemPart) else "ss"
        kind = p.instruction.kind
        name = FUNCTIONS[kind] if p.scales is None else SCALED[kind, p.scales.per_step]
        sparse = "" if p.metadata is None else "sparse_"
        function = f"tcgen05_mma_{sparse}{name}_{where}{self.group}"
        first = (
            "1"
            if isinstance(p.accumulate, Literal) and p.accumulate.value
            else f"({self.scalar(p.accumulate)}) ? 1 : 0"
        )
        with self.elected(tcgen05=True):
            start = self.descriptor(p.a) if isinstance(p.a, SharedOperand) else self.tmem_start(p.a)
            self.line(f"u32 a_low = {start}, b_low = {self.descriptor(p.b)};")
            self.line(f"u32 d = {self.tmem_start(p.d)};")
            if p.scales is not None:
                starts = self.tmem_start(p.scales.a), self.tmem_start(p.scales.b)
                self.line(f"u32 a_scale = {starts[0]}, b_scale = {starts[1]};")
            if p.metadata is not None:
                self.line(f"u32 metadata = {self.tmem_start(p.metadata.part)};")
            for step in range(p.k // p.k_step):
                if isinstance(p.a, SharedOperand):
                    a = f"descriptor(a_low + {p.a.k_offset(step) >> 4}, {descriptor_high(p.a, True):#x}u)"
                else:
                    a = f"a_low + {step * CELL_COLUMNS_PER_STEP}"
                b = f"descriptor(b_low + {p.b.k_offset(step) >> 4}, {descriptor_high(p.b, True):#x}u)"
                scales = ""
                if p.scales is not None:  # the id stands in the address, too, as CUTLASS has it
                    id = p.scales.id(step) << 30
                    cells = [p.scales.cells(part, step) | id for part in (p.scales.a, p.scales.b)]
                    scales = f", a_scale + {cells[0]:#x}u, b_scale + {cells[1]:#x}u"
                if p.metadata is not None:
                    scales = f", metadata + {p.metadata.cells(step)}"
                self.line(f"{function}(d, {a}, {b}, {p.idesc(step):#x}u, {'1' if step else first}{scales});")
            if p.commit is not None:
                self.tcgen05_commit(p.commit)

    def tcgen05_commit(self, p: CommitPlan) -> None:
        """By the thread that has issued the work."""
        bar = self.barrier_address(p.barrier)
        if p.axes:
            _, mask = self.multicast(p.axes)
            self.line(f"tcgen05_commit_multicast{self.group}({bar}, {mask});")
        else:
            self.line(f"tcgen05_commit{self.group}({bar});")

    def tmem_copy(self, p: TmemCopy) -> None:
        """Into tensor memory, by the thread that issues products."""
        place = p.start + Affine(self.plan.buffers[p.buffer].offset)
        units = Affine(place.const // 16, tuple((v, f // 16) for v, f in place.terms))
        word = p.descriptor()
        function = f"tcgen05_copy_{p.form.replace('.', '_')}{self.group}"
        with self.elected(tcgen05=True):
            self.line(f"u32 low = smem_units + {self.affine(units)} + {descriptor_low(word.leading):#x}u;")
            self.line(f"u32 to = {self.tmem_start(p.part)};")
            for offset, cell in p.steps:
                source = f"descriptor(low + {offset >> 4}, {word.high():#x}u)"
                self.line(f"{function}(to + {cell}, {source});")

    # ---- loads and stores -----------------------------------------------------------------------------------------------
    def tmem_load(self, access: TmemAccess, result: Value, extremum: Value | None = None) -> None:
        """extremum: of each row, where the load reduces, too; of several instructions the extremum of theirs."""
        self.declare(result)
        moves = self._transfers(access, result)
        name = self.name(result)
        raw = name if result.dtype in PACKED else f"t{self.fresh()}"
        count = self._words(access.part, result)
        if raw != name:
            self.line(f"u32 {raw}[{count}];")
        if extremum is not None:
            self._load_reduced(access, moves, raw, extremum)
        else:
            for t in moves:
                function = f"tcgen05_load_{'halves_' if access.part.halves else ''}{t.shape}<{t.count}>"
                self.line(f"{function}({raw} + {t.register}, {self._place(access.part, t)});")
        if raw != name and access.part.packing > 1:
            for n, word, shift in self._elements(access.part, result):
                self.line(f"{name}[{n}] = ({c_type(result.dtype)})({raw}[{word}] >> {shift});")
        elif raw != name:
            self.loop(count, f"set_bits({name}[i], {raw}[i]);")

    def _load_reduced(self, access: TmemAccess, moves: Sequence[Transfer], raw: str, extremum: Value) -> None:
        assert access.reduce is not None
        magnitude, which = access.reduce.startswith("abs"), access.reduce[-3:]
        form = {"float32": "f32", "int32": "s32", "uint32": "u32"}[access.dtype]
        partial = f"t{self.fresh()}"
        self.line(f"u32 {partial}[{len(moves)}];")
        for i, t in enumerate(moves):
            function = f"tcgen05_load_{'abs' if magnitude else ''}{which}_{form}<{t.count}>"
            self.line(f"{function}({raw} + {t.register}, {partial} + {i}, {self._place(access.part, t)});")
        combine = {"f32": f"{which}_nan", "s32": f"{which}_int", "u32": f"{which}_u32"}[form]
        name = self.declare(extremum)
        self.line(f"set_bits({name}[0], {partial}[0]);")
        for i in range(1, len(moves)):
            other = f"t{self.fresh()}"
            self.line(f"{c_type(access.dtype)} {other}; set_bits({other}, {partial}[{i}]);")
            self.line(f"{name}[0] = {combine}({name}[0], {other});")

    def tmem_store(self, access: TmemAccess, value: Value) -> None:
        moves = self._transfers(access, value)
        name = self.name(value)
        raw, count = name, self._words(access.part, value)
        if value.dtype not in PACKED:
            raw = f"t{self.fresh()}"
            self.line(f"u32 {raw}[{count}];")
            if access.part.packing > 1:
                mask = (1 << 32 // access.part.packing) - 1
                for n, word, shift in self._elements(access.part, value):
                    self.line(f"{raw}[{word}] {'|=' if shift else '='} ((u32){name}[{n}] & {mask}u) << {shift};")
            else:
                self.loop(count, f"{raw}[i] = as_u32({name}[i]);")
        for t in moves:
            function = f"tcgen05_store_{'halves_' if access.part.halves else ''}{t.shape}<{t.count}>"
            self.line(f"{function}({self._place(access.part, t)}, {raw} + {t.register});")

    def _transfers(self, access: TmemAccess, value: Value) -> tuple[Transfer, ...]:
        layout: RegisterLayout | None = self.layout(value)
        assert layout is not None
        return transfers(access.part, layout, access.what, None)

    def _words(self, part: TmemPart, value: Value) -> int:
        layout = self.layout(value)
        assert layout is not None
        return layout.registers // (2 if value.dtype in PACKED else part.packing)

    def _elements(self, part: TmemPart, value: Value) -> Iterator[tuple[int, int, int]]:
        """Of integers that share cells: (element of a thread, its word, its first bit)."""
        for n in range(self._words(part, value) * part.packing):
            yield n, n // part.packing, n % part.packing * (32 // part.packing)

    def _place(self, part: TmemPart, t: Transfer) -> str:
        """Every warp reaches its own 32 lanes only."""
        return f"{self.tmem_start(part)} + {tmem_address(t.lane, t.column)} + (warp << 21)"
