"""Emission of reductions: within the thread, over lanes, over warps, and into the result's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..layouts.registers import RegisterLayout
from ..layouts.shared import PACKED, itemsize, row_major
from ..layouts.spread import crosses_warps
from ..program import Operand, Value
from .emit_moves import MoveEmitter
from .text import c_type, half

Step = Callable[[str, list[str]], None]  # (accumulator's index text, other's variables): combine into the accumulator


class ReductionEmitter(MoveEmitter):
    """`reduce` and `reduce_index`."""

    approx: bool

    def reduce(self, step: Any, axes: tuple[int, ...], combine: str) -> None:
        """In four independent chains within the thread (latency), then over the threads that hold the same result."""
        e = step.equation
        source, result = e.operands[0], e.results[0]
        layout = self.layout(source)
        assert layout is not None
        natural, groups, order = self._groups(layout, axes)
        name, kind = f"r{result.id}", "float" if result.dtype in PACKED else c_type(result.dtype)
        narrow = itemsize(result.dtype) < 4 and result.dtype not in PACKED
        once = combine.count("{1}") == 1 and "&&" not in combine and "||" not in combine
        self.line(f"{kind} {name}[{len(order)}];")
        for k, key in enumerate(order):
            members = groups[key]
            width = min(4, len(members))
            with self.block():
                self.line(" ".join(f"{kind} c{c} = {self.element(source, members[c])};" for c in range(width)))
                texts = [
                    f"c{j % width} = {self._taken(step, m, f'c{j % width}', combine)};"
                    for j, m in enumerate(members)
                    if j >= width
                ]
                for t in range(0, len(texts), 4):
                    self.line(" ".join(texts[t : t + 4]))
                total = "c0"
                if width == 4:
                    total = combine.format(combine.format("c0", "c1"), combine.format("c2", "c3"))
                elif width > 1:
                    for c in range(1, width):
                        total = combine.format(total, f"c{c}")
                self.line(f"{name}[{k}] = {total};")
                for mask in _lane_masks(layout, axes):
                    given = f"(int){name}[{k}]" if narrow else f"{name}[{k}]"
                    other = f"__shfl_xor_sync(~0u, {given}, {mask})"
                    other = f"({kind}){other}" if narrow else other
                    if once:
                        self.line(f"{name}[{k}] = {combine.format(f'{name}[{k}]', other)};")
                    else:  # all lanes shuffle, once, whatever the expression does with it
                        self.line(
                            f"{kind} x{mask} = {other}; {name}[{k}] = {combine.format(f'{name}[{k}]', f'x{mask}')};"
                        )
        if crosses_warps(layout, axes):
            size = max(4, itemsize(result.dtype))
            wide = "float" if result.dtype in PACKED else ("int" if narrow else kind)

            def take(k: int, warp: str) -> None:
                place = f"(({wide}*)(shared + {self.scratch}))[({warp} * {len(order)} + {k}) * 32 + lane]"
                self.line(f"{name}[{k}] = {combine.format(f'{name}[{k}]', f'({kind}){place}')};")

            def give(k: int) -> None:
                self.line(
                    f"(({wide}*)(shared + {self.scratch}))[(warp * {len(order)} + {k}) * 32 + lane] = {name}[{k}];"
                )

            def first(k: int, warp: str) -> None:
                place = f"(({wide}*)(shared + {self.scratch}))[({warp} * {len(order)} + {k}) * 32 + lane]"
                self.line(f"{name}[{k}] = ({kind}){place};")

            assert size
            self._over_warps(layout, axes, len(order), give, first, take)
        self.reduced(result, natural, name)

    def _taken(self, step: Any, member: int, total: str, combine: str) -> str:
        """`total` and one more element of the thread's."""
        if step.fma is not None:
            return self.fma(step.fma, member, total)
        return combine.format(total, self.element(step.equation.operands[0], member))

    def _groups(
        self, layout: RegisterLayout, axes: tuple[int, ...]
    ) -> tuple[RegisterLayout, dict[tuple[int, ...], list[int]], list[tuple[int, ...]]]:
        """(the layout that results have at first, registers by what they become, the results in that layout's order)."""
        kept = [i for i in range(len(layout.shape)) if i not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in range(layout.registers):
            part = layout.register_part(i)
            groups.setdefault(tuple(part[k] for k in kept), []).append(i)
        natural = layout.reduce(axes)
        return natural, groups, [natural.register_part(i) for i in range(natural.registers)]

    def _over_warps(
        self,
        layout: RegisterLayout,
        axes: tuple[int, ...],
        count: int,
        give: Callable[[int], None],
        first: Callable[[int, str], None],
        take: Callable[[int, str], None],
    ) -> None:
        """All warps that hold parts of a result read all of them, in the same order, so that they agree bit by bit."""
        offsets, base, below = [0], "warp", 1
        for d in layout.warp:
            if d.dim in axes and d.size > 1:
                base += f" - warp / {below} % {d.size} * {below}"
                offsets = [o + i * below for i in range(d.size) for o in offsets]
            below *= d.size
        self.met()
        for k in range(count):
            give(k)
        self.met()
        with self.block():
            self.line(f"const int first = {base};")
            for k in range(count):
                for i, o in enumerate(sorted(offsets)):
                    (take if i else first)(k, f"(first + {o})")

    def reduced(self, result: Value, natural: RegisterLayout, name: str) -> None:
        """Results in `name`, distributed as `natural`, become `result`."""
        target = self.layout(result)
        if target is None:
            total = f"{name}[0]"
            if result.dtype in PACKED:
                total = f"from_{half(result.dtype)}(to_{half(result.dtype)}({total}))"
            elif result.dtype == "int32":  # perhaps a count or an index: told to the compiler to be the same everywhere
                total = f"uniform({total})"
            self.define_scalar(result, total)
        elif not target.same_map(natural):
            self.met()
            with self.block():
                for i, p in enumerate(self.positions("at", natural, row_major(natural.shape))):
                    self.write_place(result.dtype, p, f"{name}[{i}]")
            self.met()
            self.from_scratch(result, row_major(result.shape))
        elif result.dtype in PACKED:
            self.declare(result)
            n = target.registers
            for i in range(0, n, 2):
                self.line(
                    f"{self.name(result)}[{i // 2}] = pack_{half(result.dtype)}x2({name}[{i}], {name}[{min(i + 1, n - 1)}]);"
                )
        else:
            self.names[result.id] = name

    def reduce_index(self, step: Any, axes: tuple[int, ...], better: str) -> None:
        """The index along the one axis of the element that goes before all others: pairs (element, index) are reduced."""
        e = step.equation
        source, result = e.operands[0], e.results[0]
        layout = self.layout(source)
        assert layout is not None and len(axes) == 1
        natural, groups, order = self._groups(layout, axes)
        name, size = f"r{result.id}", max(4, itemsize(source.dtype))
        kind = "float" if source.dtype in PACKED else ("int" if itemsize(source.dtype) < 4 else c_type(source.dtype))
        self.line(f"{kind} {name}_x[{len(order)}]; int {name}[{len(order)}];")
        self.line(f"const int {name}_base = {self.thread_part(layout, axes[0])};")

        def merge(k: int, x: str, i: str) -> None:
            test = better.format(x, f"{name}_x[{k}]", i, f"{name}[{k}]")
            self.line(f"if ({test}) {{ {name}_x[{k}] = {x}; {name}[{k}] = {i}; }}")

        for k, key in enumerate(order):
            for j, m in enumerate(groups[key]):
                index = f"{name}_base + {layout.register_part(m)[axes[0]]}"
                if j:
                    with self.block():
                        self.line(f"const {kind} x = {self.element(source, m)}; const int i = {index};")
                        merge(k, "x", "i")
                else:
                    self.line(f"{name}_x[{k}] = {self.element(source, m)}; {name}[{k}] = {index};")
            for mask in _lane_masks(layout, axes):
                with self.block():
                    self.line(f"const {kind} x = __shfl_xor_sync(~0u, {name}_x[{k}], {mask});")
                    self.line(f"const int i = __shfl_xor_sync(~0u, {name}[{k}], {mask});")
                    merge(k, "x", "i")
        if crosses_warps(layout, axes):
            n = len(order)

            def place(k: int, warp: str, index: bool) -> str:
                start = f" + {128 * n * size}" if index else ""
                return (
                    f"(({'int' if index else kind}*)(shared + {self.scratch}{start}))[({warp} * {n} + {k}) * 32 + lane]"
                )

            def give(k: int) -> None:
                self.line(f"{place(k, 'warp', False)} = {name}_x[{k}]; {place(k, 'warp', True)} = {name}[{k}];")

            def first(k: int, warp: str) -> None:
                self.line(f"{name}_x[{k}] = {place(k, warp, False)}; {name}[{k}] = {place(k, warp, True)};")

            def take(k: int, warp: str) -> None:
                with self.block():
                    self.line(f"const {kind} x = {place(k, warp, False)}; const int i = {place(k, warp, True)};")
                    merge(k, "x", "i")

            self._over_warps(layout, axes, n, give, first, take)
        if self.layout(result) is not None and result.dtype != "int32":
            self.line(f"{c_type(result.dtype)} {name}_t[{len(order)}];")
            self.loop(len(order), f"{name}_t[i] = ({c_type(result.dtype)}){name}[i];")
            name += "_t"
        self.reduced(result, natural, name)


def _lane_masks(layout: RegisterLayout, axes: tuple[int, ...]) -> list[int]:
    """Masks of the xor shuffles that bring together the lanes along `axes`."""
    masks, below = [], 1
    for d in layout.lane:
        if d.dim in axes:
            masks += [below << bit for bit in range((d.size - 1).bit_length())]
        below *= d.size
    return masks


__all__ = ["Operand", "ReductionEmitter"]
