"""Emission of values: scalars, register arrays, elementwise loops, renamings, reductions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import LayoutConflict, UnsupportedPrimitive
from ..layouts.registers import Digit, RegisterLayout
from ..layouts.shared import PACKED
from ..ops.elementwise import factors_of
from ..plan.contraction import Fma
from ..program import Affine, Literal, Operand, Value
from .text import Text, c_type, half, literal


class ValueEmitter(Text):
    """State: `names` (value id -> C expression or array name) and the current role's layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.layouts: dict[int, RegisterLayout] = {}
        self.in_pairs = False  # whether the machine has packed float32 arithmetic

    # ---- names --------------------------------------------------------------------------------------------------------
    def name(self, v: Value) -> str:
        return self.names.setdefault(v.id, f"v{v.id}")

    def layout(self, o: Operand) -> RegisterLayout | None:
        """The register layout of an array; None for scalars and splats."""
        return self.layouts.get(o.id) if isinstance(o, Value) else None

    def scalar(self, o: Operand) -> str:
        """A scalar or a splat as a C expression."""
        if isinstance(o, Literal):
            return literal(o)
        assert isinstance(o, Value)
        return self.name(o)

    def affine(self, a: Affine) -> str:
        parts = [self.name(v) if f == 1 else f"{self.name(v)} * {f}" for v, f in a.terms]
        if a.const or not parts:
            parts.append(str(a.const))
        return parts[0] if len(parts) == 1 and "*" not in parts[0] and "-" not in parts[0] else f"({' + '.join(parts)})"

    def element(self, o: Operand, index: int) -> str:
        """Element `index` of a thread's registers as an arithmetic expression."""
        if isinstance(o, Literal) or self.layout(o) is None:
            return self.scalar(o)
        assert isinstance(o, Value)
        if o.dtype in PACKED:
            return f"unpack_{half(o.dtype)}_{'high' if index % 2 else 'low'}({self.name(o)}[{index // 2}])"
        return f"{self.name(o)}[{index}]"

    def elements(self, o: Operand, count: int) -> list[str]:
        """The first so many, as `element` writes each."""
        if isinstance(o, Literal) or self.layout(o) is None:
            return [self.scalar(o)] * count
        assert isinstance(o, Value)
        if o.dtype in PACKED:
            return [self.element(o, i) for i in range(count)]
        name = self.name(o)
        return [f"{name}[{i}]" for i in range(count)]

    # ---- declarations ---------------------------------------------------------------------------------------------------
    def registers(self, v: Value) -> int:
        """C array length that holds the thread's part of `v`."""
        layout = self.layout(v)
        assert layout is not None
        return (layout.registers + 1) // 2 if v.dtype in PACKED else layout.registers

    def declare(self, v: Value) -> str:
        n = self.name(v)
        if self.layout(v) is None:
            self.line(f"{c_type(v.dtype)} {n};")
        else:
            self.line(f"{'u32' if v.dtype in PACKED else c_type(v.dtype)} {n}[{self.registers(v)}];")
        return n

    def define_scalar(self, v: Value, expression: str) -> None:
        self.line(f"{c_type(v.dtype)} {self.name(v)} = {expression};")

    def declare_all(self, values: Sequence[Value]) -> None:
        for v in values:
            self.declare(v)

    def define_all(self, values: Sequence[Value], operands: Sequence[Operand]) -> None:
        self.declare_all(values)
        for v, o in zip(values, operands, strict=True):
            self.copy(self.name(v), v, o)

    def assign_all(self, targets: Sequence[Value], sources: Sequence[Operand]) -> None:
        """Parallel assignment: sources are read before any target is written."""
        pairs = [
            (t, s)
            for t, s in zip(targets, sources, strict=True)
            if not (isinstance(s, Value) and self.name(s) == self.name(t))
        ]
        written = {self.name(t) for t, _ in pairs}
        late: list[tuple[Value, str]] = []
        for t, s in pairs:
            if isinstance(s, Value) and self.name(s) in written:
                temporary = f"{self.name(t)}_next"
                length = "" if self.layout(t) is None else f"[{self.registers(t)}]"
                self.line(f"{'u32' if t.dtype in PACKED and length else c_type(t.dtype)} {temporary}{length};")
                self.copy(temporary, t, s)
                late.append((t, temporary))
        for t, s in pairs:
            if not any(t is x for x, _ in late):
                self.copy(self.name(t), t, s)
        for t, temporary in late:
            if self.layout(t) is None:
                self.line(f"{self.name(t)} = {temporary};")
            else:
                self.loop(self.registers(t), f"{self.name(t)}[i] = {temporary}[i];")

    def alias_all(self, values: Sequence[Value], sources: Sequence[Operand]) -> None:
        for v, s in zip(values, sources, strict=True):
            self.names[v.id] = self.scalar(s)

    def copy(self, target: str, like: Value, source: Operand) -> None:
        """target (declared like `like`) = source; a splat fills an array."""
        layout = self.layout(like)
        if layout is None:
            self.line(f"{target} = {self.scalar(source)};")
        elif self.layout(source) is None:
            x = self.scalar(source)
            self.loop(
                self.registers(like),
                f"{target}[i] = {f'pack_{half(like.dtype)}x2({x}, {x})' if like.dtype in PACKED else x};",
            )
        else:
            self.expect_layout(source, layout, like)
            self.loop(self.registers(like), f"{target}[i] = {self.scalar(source)}[i];")

    def loop(self, count: int, body: str) -> None:
        """`body` for i = 0 ... count - 1, written out: NVVM takes a fifth longer to unroll it itself."""
        pieces = re.split(r"\bi\b", body)
        texts = [str(i).join(pieces) for i in range(count)]
        for k in range(0, count, 8):
            self.line(" ".join(texts[k : k + 8]))

    def tie(self, o: Operand, first: bool) -> None:
        """Nothing that comes after is done before `o`, a float32 array, has been computed; first: its first element."""
        if isinstance(o, Value):
            elements = [self.element(o, i) for i in range(1 if first else self.registers(o))]
            total = " + ".join([*elements, elements[0]])  # a sum even of one: it makes every NaN the same
            self.line(f"order_after({total}, smem);")

    def expect_layout(self, o: Operand, layout: RegisterLayout, what: Any) -> None:
        have = self.layout(o)
        if have is None or not have.same_map(layout):
            raise LayoutConflict(f"{what}: {have} where {layout} is needed; pin it with layout_cast where it is made")

    # ---- elementwise ------------------------------------------------------------------------------------------------------
    def elementwise(self, step: Any, expression: str) -> None:
        """result = expression of the operands ({0}, {1}, ...), or the step's fma, element by element."""
        e = step.equation
        result: Value = e.results[0]
        layout = self.layout(result)
        if layout is None:
            text = expression.format(*(self.scalar(o) for o in e.operands))
            if step.fma is not None:
                text = self.fma(step.fma, 0)
            if result.dtype in PACKED:
                text = f"from_{half(result.dtype)}(to_{half(result.dtype)}({text}))"
            self.define_scalar(result, text)
            return
        for o in e.operands:
            if self.layout(o) is not None:
                self.expect_layout(o, layout, e.op)
        pairs = self.in_pairs and result.dtype == "float32" and layout.registers % 2 == 0
        factors = factors_of(e)
        if pairs and step.fma is not None:  # a Blackwell SM adds, subtracts, multiplies and fuses two float32 at once
            self.pairwise(result, "fma_pair", _signed(step.fma, self.layout(step.fma.b) is None))
        elif pairs and factors is not None:
            self.pairwise(result, "mul_pair", [(e.operands[k], "") for k in factors])
        elif pairs and e.op in ("add", "sub"):
            self.pairwise(result, f"{e.op}_pair", [(o, "") for o in e.operands])
        elif step.fma is not None:
            terms = [
                [f"-({x})" for x in texts] if sign else texts
                for o, sign in _signed(step.fma, False)
                for texts in (self.elements(o, layout.registers),)
            ]
            self.assign_elements(result, [f"fmaf({', '.join(x)})" for x in zip(*terms, strict=True)])
        else:
            operands = [self.elements(o, layout.registers) for o in e.operands]
            rows = zip(*operands, strict=True) if operands else [()] * layout.registers
            texts = [expression.format(*x) for x in rows]
            self.assign_elements(result, texts)

    def fma(self, fma: Fma, index: int, c: str | None = None) -> str:
        """Element `index` of a fused sum of a product; c: what is added, where that is no operand."""
        terms = [f"-({x})" if sign else x for o, sign in _signed(fma, False) for x in (self.element(o, index),)]
        return f"fmaf({', '.join(terms if c is None else (*terms, c))})"

    def pairwise(self, result: Value, function: str, operands: Sequence[tuple[Operand, str]]) -> None:
        """Declares `result` and computes its registers two by two: `function` of both results, then pairs of operands."""
        name = self.declare(result)
        texts = []
        for i in range(0, self.registers(result), 2):
            pairs = (
                f"-({x})" if sign else x for o, sign in operands for k in (i, i + 1) for x in (self.element(o, k),)
            )
            texts.append(f"{function}({name}[{i}], {name}[{i + 1}], {', '.join(pairs)});")
        for k in range(0, len(texts), 4):
            self.line(" ".join(texts[k : k + 4]))

    def assign_elements(self, result: Value, texts: Sequence[str]) -> None:
        """Declares `result` and gives each of its registers (a scalar: its one) the value of an expression."""
        if self.layout(result) is None:
            self.define_scalar(result, texts[0])
            return
        self.declare(result)
        name = self.name(result)
        if result.dtype in PACKED:
            pack, last = f"pack_{half(result.dtype)}x2", len(texts) - 1
            lines = [
                f"{name}[{i // 2}] = {pack}({texts[i]}, {texts[min(i + 1, last)]});" for i in range(0, last + 1, 2)
            ]
        else:
            lines = [f"{name}[{i}] = {t};" for i, t in enumerate(texts)]
        for k in range(0, len(lines), 8):
            self.line(" ".join(lines[k : k + 8]))

    # ---- coordinates ------------------------------------------------------------------------------------------------------
    def thread_part(self, layout: RegisterLayout, dim: int) -> str:
        """What this thread's lane and warp add to coordinate `dim`, as a C expression."""
        terms = self._digits("here(lane)", layout.lane, 32, dim) + self._digits("here(warp)", layout.warp, 4, dim)
        return " + ".join(terms) or "0"

    @staticmethod
    def _digits(index: str, digits: tuple[Digit, ...], total: int, dim: int) -> list[str]:
        terms, below = [], 1
        for d in digits:
            if d.dim == dim and d.size > 1:
                value = index if below == 1 else f"{index} / {below}"
                if below * d.size < total:
                    value = f"({value}) % {d.size}"
                terms.append(f"({value})" + (f" * {d.stride}" if d.stride != 1 else ""))
            below *= d.size
        return terms

    def coordinate(self, result: Value, dim: int) -> None:
        """An iota: every register gets its coordinate along `dim`."""
        layout = self.layout(result)
        if layout is None:
            raise UnsupportedPrimitive("an iota needs a register layout; pin it with layout_cast")
        name, ctype = self.name(result), c_type(result.dtype)
        self.line(f"int {name}_base = {self.thread_part(layout, dim)};")
        texts = []
        for i in range(layout.registers):
            shift = layout.register_part(i)[dim]
            texts.append(f"({ctype})({name}_base + {shift})")
        self.assign_elements(result, texts)


def _signed(fma: Fma, swap: bool) -> list[tuple[Operand, str]]:
    """An fma's operands with their signs; swap: the product's sign goes to its second factor."""
    a, b = (fma.b, fma.a) if swap else (fma.a, fma.b)
    signs = ["-" if minus else "" for minus in fma.minus]
    rest = [] if fma.c is None else [(fma.c, signs[1])]
    return [(a, signs[0]), (b, ""), *rest]
