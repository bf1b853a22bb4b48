"""Emission of loads, stores and TMA copies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..layouts.access import by_matrix, global_vector, matrix_shifts, shared_vector, together
from ..layouts.registers import RegisterLayout, wgmma
from ..layouts.shared import PACKED, SharedLayout, itemsize
from ..ops.async_store import AsyncStore, bytes_sent, elements_together
from ..plan.model import Plan
from ..plan.tma import Run, TmaCopy
from ..program import Affine, Operand, Value, View
from .emit_values import ValueEmitter
from .text import c_type, half, stored_type

GlobalMove = Callable[[Value, int, int, str, str], None]


class MemoryEmitter(ValueEmitter):
    """Needs `plan` and the axis helpers of the whole emitter."""

    plan: Plan
    single_thread: bool
    overtakes = False  # whether the role has wgmma, behind which a load may wait longer than an arrival does

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[int, str]] = []  # (depth of their block, sum) of ldmatrix since an arrival

    def after_loads(self, depth: int = 0) -> None:
        """Nothing that comes after is done before ldmatrix, in blocks as deep as this, has brought its values.

        An arrival says that the slot may be written again.  PTX orders it behind the loads (ISA 8.9), but ptxas emits no wait for
        them, and an H200 gave other bits from run to run where ldmatrix came behind a wgmma under way and the slot's refill
        was already waiting (docs/performance.md).
        """
        for at, values in self.loaded:
            if at >= depth:
                self.line(f"order_after({values} + 1.f, smem);")
        self.loaded = [
            x for x in self.loaded if x[0] < self.depth
        ]  # another branch, or what follows, may arrive without this

    def note_loads(self, registers: Sequence[str]) -> None:
        """What ldmatrix has been asked for, or what was computed of it: something of every instruction."""
        if self.overtakes:
            self.loaded.append((self.depth, " + ".join(f"__uint_as_float(as_u32({r}))" for r in registers)))

    # ---- get, load, swap ------------------------------------------------------------------------------------------------
    def load(self, step: Any) -> None:
        access, result = step.data, step.equation.results[0]
        if access.kind == "acc":
            self.declare(result)
            self._expect_acc(access.view.ref, result)
            self.loop(self.registers(result), f"{self.name(result)}[i] = {self.name(access.view.ref)}[i];")
        elif access.scalar:
            place = self._scalar_place(access)
            raw = f"*({stored_type(result.dtype)}*)({place})"
            if result.dtype == "int32" and not self.single_thread:  # an index, mostly: it then needs no vector register
                raw = f"uniform({raw})"
            self.define_scalar(result, f"from_{half(result.dtype)}({raw})" if result.dtype in PACKED else raw)
        elif access.kind == "smem":
            self.declare(result)
            self._shared_array(access.view, result, store=False)
        else:
            self.declare(result)
            self.global_array(access, result, store=False)

    def store(self, step: Any) -> None:
        access, x = step.data, step.equation.operands[1]
        if access.kind == "acc":
            ref = access.view.ref
            target = self.name(ref)
            if self.layout(x) is not None:
                self._expect_acc(ref, x)
                self.loop(self._acc_registers(ref), f"{target}[i] = {self.scalar(x)}[i];")
            else:
                v = self.scalar(x)
                self.loop(
                    self._acc_registers(ref),
                    f"{target}[i] = {f'pack_{half(ref.dtype)}x2({v}, {v})' if ref.dtype in PACKED else v};",
                )
            self.line(f"{target}_live = 1;")
        elif access.scalar:
            place, dtype = self._scalar_place(access), access.view.dtype
            v = self.scalar(x)
            text = f"*({stored_type(dtype)}*)({place}) = {f'to_{half(dtype)}({v})' if dtype in PACKED else v};"
            with self.elected():
                self.line(text)
        elif access.kind == "smem":
            self._shared_array(access.view, x, store=True)
        else:
            self.global_array(access, x, store=True)

    def elected(self, tcgen05: bool = False) -> Any:
        raise NotImplementedError

    def _acc_registers(self, ref: Value) -> int:
        n = math.prod(ref.shape) // 128
        return n // 2 if ref.dtype in PACKED else n

    def _expect_acc(self, ref: Value, x: Operand) -> None:
        self.expect_layout(x, wgmma((ref.shape[0], ref.shape[1])), f"accumulator {ref}")

    def _scalar_place(self, access: Any) -> str:
        view: View = access.view
        if access.kind == "smem":
            buffer = self.plan.buffers[view.ref.id]
            offset = self.shared_offset(buffer.layout, buffer.offset, [self.affine(d.start) for d in view.dims])
            return f"{self._shared_base(view)} + {offset}"
        return f"p{access.input} + {self.global_index(access.input, [self.affine(d.start) for d in view.dims])}"

    # ---- shared memory ----------------------------------------------------------------------------------------------------
    def _shared_base(self, view: View) -> str:
        """Where a block's shared memory starts: this one's, or that of the peer whose view it is."""
        if not view.peer or math.prod(self.plan.program.cluster) == 1:
            return "shared"
        return f"shared_of_block(shared, {self._rank(view)})"

    def _rank(self, view: View) -> str:
        """Of the block whose memory a view is of, in the cluster."""
        program = self.plan.program
        peer, rank = dict(view.peer), "0"
        for i, (name, size) in enumerate(zip(program.cluster_names, program.cluster, strict=True)):
            place = f"({self.affine(peer[name])})" if name in peer else f"cluster_{i}"
            rank = f"({rank}) * {size} + {place}" if rank != "0" else place
        return rank

    def shared_offset(self, layout: SharedLayout, base: int, coordinates: list[str]) -> str:
        """Byte offset of an element, swizzled, as a C expression."""
        terms = [str(base)] if base else []
        for c, digits in zip(coordinates, layout.places(), strict=True):
            if c == "0":
                continue
            if len(digits) == 1:
                terms.append(f"({c}) * {digits[0][1]}")
            else:
                (inner, stride), (_, outer) = digits
                terms.append(f"({c}) / {inner} * {outer} + ({c}) % {inner} * {stride}")
        offset = " + ".join(terms) or "0"
        return f"swizzle<{layout.swizzle}>({offset})" if layout.swizzle else f"({offset})"

    def _shared_array(self, view: View, x: Operand, store: bool) -> None:
        buffer = self.plan.buffers[view.ref.id]
        layout = self.layout(x)
        assert layout is not None  # what goes to memory is never one value for all elements
        shared: SharedLayout = buffer.layout
        if self._matrices(view, x, layout, shared, buffer.offset, store):
            return
        width = shared_vector(layout, view, shared)
        name = f"o{self.fresh()}"
        base = self._shared_base(view)
        if view.peer:
            self.line(f"unsigned char* {name}_p = {base};")
            base = f"{name}_p"
        for i, offset in self._shared_places(view, layout, width):
            self._move(f"{base} + {offset}", x, i, width, store)

    def _shared_places(self, view: View, layout: RegisterLayout, width: int) -> Iterator[tuple[int, str]]:
        """(first register, its byte offset in shared memory) of each `width` registers of a thread.

        An offset is that of one of few registers, which is computed, and a constant, which the instruction takes.
        """
        buffer = self.plan.buffers[view.ref.id]
        name = f"o{self.fresh()}"
        bases = {d: f"{name}_{k}" for k, d in enumerate(view.kept)}
        self._thread_coordinates(name, layout, view, "u32")
        computed: dict[tuple[int, ...], str] = {}
        for i in range(0, layout.registers, width):
            part = layout.register_part(i)
            shifts = [part[view.kept.index(d)] * x.stride if d in bases else 0 for d, x in enumerate(view.dims)]
            rest, distance = buffer.layout.distance(shifts)
            if rest not in computed:
                computed[rest] = f"{name}_at{len(computed)}"
                coordinates = [
                    (f"{bases[d]} + {rest[d]}" if rest[d] else bases[d]) if d in bases else self.affine(index.start)
                    for d, index in enumerate(view.dims)
                ]
                offset = self.shared_offset(buffer.layout, buffer.offset, coordinates)
                self.line(f"u32 {computed[rest]} = {offset};")
            yield i, f"{computed[rest]} + {distance}" if distance else computed[rest]

    def async_store(self, step: Any) -> None:
        """One thread announces the bytes to the other block's barrier, by one of the user's arrivals; all of them store."""
        plan: AsyncStore = step.data
        view, x = plan.access.view, step.equation.operands[1]
        layout = self.layout(x)
        width = elements_together(layout, view, self.plan.buffers[view.ref.id].layout)
        assert layout is not None
        words, packed = width * itemsize(view.dtype) // 4, view.dtype in PACKED
        unit = self.plan.barriers[plan.barrier.array].unit
        with self.block():
            self.line(f"u32 rank_to = {self._rank(view)}, to = cluster_address(smem, rank_to);")
            self.line(f"u32 bar = cluster_address({self.barrier_address(plan.barrier)}, rank_to);")
            with self.elected():
                self.line(f"mbarrier_expect_cluster(bar, {bytes_sent(layout, view.dtype)}, {unit});")
            for i, offset in self._shared_places(view, layout, width):
                first = i // 2 if packed else i
                values = ", ".join(f"as_u32({self.name(x)}[{first + k}])" for k in range(words))
                self.line(f"store_async_{words}(to + {offset}, bar, {values});")

    def _thread_coordinates(self, name: str, layout: RegisterLayout, view: View, kind: str = "int") -> None:
        """Where this thread's first register lies along each kept dimension of the buffer; kind: the variables' type."""
        for k, d in enumerate(view.kept):
            start, stride = self.affine(view.dims[d].start), view.dims[d].stride
            part = self.thread_part(layout, k)
            self.line(
                f"{kind} {name}_{k} = "
                + (part if stride == 1 else f"({part}) * {stride}")
                + (f" + {start}" if start != "0" else "")
                + ";"
            )

    def _move(self, place: str, x: Operand, i: int, width: int, store: bool) -> None:
        """Move `width` registers of `x` from index i on to or from memory."""
        assert isinstance(x, Value)
        size, name = itemsize(x.dtype), self.name(x)
        if together(width, x.dtype) == 1:
            for k in range(width):
                at = f"{place} + {k * size}" if k else place
                raw = f"*({stored_type(x.dtype)}*)({at})"
                if store:
                    v = self.element(x, i + k)
                    self.line(f"{raw} = {f'to_{half(x.dtype)}({v})' if x.dtype in PACKED else v};")
                elif x.dtype in PACKED:
                    self.line(f"set_half({name}[{(i + k) // 2}], {(i + k) % 2}, {raw});")
                else:
                    self.line(f"{name}[{i + k}] = {raw};")
            return
        words, first = width * size // 4, i // 2 if x.dtype in PACKED else i
        kind = {1: "u32", 2: "uint2", 4: "uint4"}[words]
        registers = [f"{name}[{first + k}]" for k in range(words)]
        if words == 1:
            self.line(f"*(u32*)({place}) = {registers[0]};" if store else f"{registers[0]} = *(u32*)({place});")
            return
        fields = "xyzw"[:words]
        if store:
            values = ", ".join(f"as_u32({r})" for r in registers)
            self.line(f"*({kind}*)({place}) = {kind}{{{values}}};")
        else:
            moves = " ".join(f"set_bits({r}, w.{f});" for r, f in zip(registers, fields, strict=True))
            self.line(f"{{ {kind} w = *({kind}*)({place}); {moves} }}")

    def _matrices(
        self, view: View, x: Operand, layout: RegisterLayout, shared: SharedLayout, base: int, store: bool
    ) -> bool:
        """A 16-bit WGMMA array from or to shared memory: ldmatrix and stmatrix move four 8x8 pieces at once."""
        if not isinstance(x, Value) or x.dtype != view.dtype or not by_matrix(layout, view, shared):
            return False
        m, n = layout.shape
        rows, columns = view.kept
        name, packed, trans = f"o{self.fresh()}", self.name(x), "_trans" if view.is_transposed else ""
        row, column = "here(lane) % 16", "here(lane) / 16 * 8"  # where a lane's line of 8 elements begins
        if trans:
            row, column = "here(lane) / 8 % 2 * 8", "here(lane) % 8 + here(lane) / 16 * 8"
        self.line(f"u32 {name}_r = here(warp) * 16 + {row} + {self.affine(view.dims[rows].start)};")
        self.line(f"u32 {name}_c = {column} + {self.affine(view.dims[columns].start)};")

        def address(row: int, column: int) -> str:
            coordinates = [self.affine(d.start) for d in view.dims]
            coordinates[rows] = f"{name}_r + {row}" if row else f"{name}_r"
            coordinates[columns] = f"{name}_c + {column}" if column else f"{name}_c"
            return f"smem + {self.shared_offset(shared, base, coordinates)}"

        shifts = matrix_shifts(view, n, shared)
        for mi in range(m // 64):
            if shifts is not None:
                self.line(f"u32 {name}_{mi} = {address(64 * mi, 0)};")
            for j in range(n // 16):
                if shifts is None:
                    place = address(64 * mi, 16 * j)
                else:
                    flips, distance = shifts[j]
                    place = f"({name}_{mi} ^ {flips}) + {distance}" if flips else f"{name}_{mi} + {distance}"
                first = mi * (n // 4) + 4 * j
                registers = ", ".join(f"{packed}[{first + k}]" for k in range(4))
                self.line(
                    f"stmatrix_x4{trans}({place}, {registers});"
                    if store
                    else f"ldmatrix_x4{trans}({registers}, {place});"
                )
        if not store:
            self.note_loads([f"{packed}[{i}]" for i in range(0, self.registers(x), 4)])
        return True

    # ---- global memory ----------------------------------------------------------------------------------------------------
    def global_index(self, input_: int, coordinates: list[str]) -> str:
        """Element index in a row-major array whose extents are parameters."""
        text = "0ll"
        for axis, c in enumerate(coordinates):
            text = f"({text} * {self.runtime_dim(input_, axis)} + ({c}))" if axis else f"(long long)({c})"
        return text

    def runtime_dim(self, input_: int, axis: int) -> str:
        return f"n{input_}_{axis}"

    def own_elements(self, layout: RegisterLayout) -> list[str]:
        """What holds, all of it, in the thread whose elements are the first of several replicas, as C expressions."""
        return [
            f"{index} / {below} % {d.size} == 0"
            for index, digits in (("lane", layout.lane), ("warp", layout.warp))
            for below, d in _with_below(digits)
            if d.dim is None and d.size > 1
        ]

    def global_array(
        self, access: Any, x: Operand, store: bool, base: str = "p", move: GlobalMove | None = None
    ) -> None:
        """Move an array's registers to or from global memory.

        base: with the input's number, the parameter that holds its address.  move: emits what moves some neighbours (value, first
        register, how many, address, whether they lie inside the array); None: a load or a store.
        """
        move = move or functools.partial(self._global_move, store=store)
        view: View = access.view
        layout = self.layout(x)
        assert layout is not None  # what goes to memory is never one value for all elements
        assert isinstance(x, Value)
        name = f"g{self.fresh()}"
        self._thread_coordinates(name, layout, view)
        width = global_vector(layout, view, x.dtype)
        last = len(view.dims) - 1
        along = view.kept.index(last) if last in view.kept else None  # neighbours in memory
        if along is not None:
            self.line(f"int {name}_left = {self.runtime_dim(access.input, last)} - {name}_{along};")
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in range(0, layout.registers, width):
            part = layout.register_part(i)
            groups.setdefault(tuple(0 if k == along else n for k, n in enumerate(part)), []).append(i)
        # One address and one test for all registers that lie along the last dimension: the rest are constants.
        for number, (part, registers) in enumerate(groups.items()):
            coordinates, inside = [], self.own_elements(layout) if store else []
            for d, index in enumerate(view.dims):
                if d not in view.kept:
                    coordinates.append(self.affine(index.start))
                    continue
                k = view.kept.index(d)
                coordinates.append(f"{name}_{k} + {part[k] * index.stride}" if part[k] else f"{name}_{k}")
                if k != along:
                    inside.append(f"{coordinates[-1]} < {self.runtime_dim(access.input, d)}")
            pointer, test = f"{name}_p{number}", f"{name}_in{number}"
            start = f"{base}{access.input} + {self.global_index(access.input, coordinates)}"
            self.line(f"{stored_type(x.dtype)}* {pointer} = {start}; bool {test} = {' && '.join(inside) or 'true'};")
            for i in registers:
                shift = layout.register_part(i)[along] * view.dims[last].stride if along is not None else 0
                there = test if along is None else f"{test} && {shift} < {name}_left"
                move(x, i, width, f"{pointer} + {shift}", there)

    def _global_move(self, x: Value, i: int, width: int, place: str, test: str, store: bool) -> None:
        """Move `width` registers of `x` from index i on, where `test` says that they lie inside the array; else load zeros."""
        raw, name = f"*({stored_type(x.dtype)}*)({place})", self.name(x)
        if width > 1:
            with self.block(f"if ({test})"):
                self._move(place, x, i, width, store)
            if not store:
                words = width // 2 if x.dtype in PACKED else width
                first = i // 2 if x.dtype in PACKED else i
                self.line("else { " + " ".join(f"{name}[{first + k}] = 0;" for k in range(words)) + " }")
        elif store:
            v = self.element(x, i)
            self.line(f"if ({test}) {raw} = {f'to_{half(x.dtype)}({v})' if x.dtype in PACKED else v};")
        elif x.dtype in PACKED:
            self.line(f"set_half({name}[{i // 2}], {i % 2}, {test} ? {raw} : (u16)0);")
        else:
            self.line(f"{name}[{i}] = {test} ? {raw} : ({c_type(x.dtype)})0;")

    # ---- TMA --------------------------------------------------------------------------------------------------------------
    def tma_load(self, copy: TmaCopy, bar: str) -> None:
        rank = len(self.plan.maps[copy.map].dims)
        share = len(copy.issues) // copy.parts
        if copy.parts == 1:
            for issue in copy.issues:
                shared = self._shared_address(copy, issue.shared)
                self.line(f"tma_load_{rank}d({shared}, &map{copy.map}, {bar}, {self._coordinates(issue)});")
            return
        part, mask = self.multicast(copy.multicast)
        for r in range(copy.parts):
            with self.block(f"{'else ' if r else ''}if ({part} == {r})"):
                for issue in copy.issues[r * share : (r + 1) * share]:
                    address, where = self._shared_address(copy, issue.shared), self._coordinates(issue)
                    self.line(f"tma_load_multicast_{rank}d({address}, &map{copy.map}, {bar}, {where}, {mask});")

    def tma_prefetch(self, copy: TmaCopy) -> None:
        rank, share = len(self.plan.maps[copy.map].dims), len(copy.issues) // copy.parts
        part = self.multicast(copy.multicast)[0] if copy.parts > 1 else ""
        for r in range(copy.parts):
            with self.block(f"if ({part} == {r})" if part else ""):
                for issue in copy.issues[r * share : (r + 1) * share]:
                    self.line(f"tma_prefetch_{rank}d(&map{copy.map}, {self._coordinates(issue)});")

    def tma_load_pair(self, copy: TmaCopy, use: Any, leader: str) -> None:
        """A block's half of a pair's tile; the barrier of the pair's first block expects both halves."""
        rank, unit = len(self.plan.maps[copy.map].dims), self.plan.barriers[use.array].unit
        with self.elected():
            self.line(f"u32 bar = {self.barrier_address(use)};")
            position, _ = self.multicast((leader,))
            with self.block(f"if ({position} == 0)"):
                self.line(f"mbarrier_expect_tx(bar, {2 * copy.nbytes}); mbarrier_arrive_count(bar, {unit});")
            for issue in copy.issues:
                address, where = self._shared_address(copy, issue.shared), self._coordinates(issue)
                self.line(f"tma_load_pair_{rank}d({address}, &map{copy.map}, bar, {where});")

    def barrier_address(self, use: Any, slot: str | None = None) -> str:
        raise NotImplementedError

    def multicast(self, axes: tuple[str, ...]) -> tuple[str, str]:
        raise NotImplementedError

    def fresh(self) -> int:
        raise NotImplementedError

    def tma_store(self, copy: TmaCopy, reduction: str | None) -> None:
        rank = len(self.plan.maps[copy.map].dims)
        verb = "store" if reduction is None else f"reduce_{reduction}"
        run = copy.run
        if run is not None:
            shared = self._shared_address(copy, copy.issues[0].shared)
            place = f"p{run.input} + {self.global_index(run.input, [self.affine(s) for s in run.starts])}"
            self.line(f"if ({self._inside(run)}) bulk_{verb}({place}, {shared}, {copy.nbytes});")
        with self.block("else" if run is not None else ""):
            for issue in copy.issues:
                shared = self._shared_address(copy, issue.shared)
                self.line(f"tma_{verb}_{rank}d(&map{copy.map}, {shared}, {self._coordinates(issue)});")

    def _inside(self, run: Run) -> str:
        """Whether a run lies in its array: past its ends a tensor map leaves out what is not there."""
        tests = []
        for axis, (start, n) in enumerate(zip(run.starts, run.sizes, strict=True)):
            at, extent = self.affine(start), self.runtime_dim(run.input, axis)
            if start == Affine(0) and n == self.plan.program.inputs[run.input].shape[axis]:
                continue
            tests.append(f"(u32)({at}) < (u32){extent}" if n == 1 else f"{at} >= 0 && {at} + {n} <= {extent}")
        return " && ".join(tests) or "true"

    def _shared_address(self, copy: TmaCopy, offset: Affine) -> str:
        return f"smem + {self.affine(offset + Affine(self.plan.buffers[copy.buffer].offset))}"

    def _coordinates(self, issue: Any) -> str:
        return ", ".join(self.affine(c.start) for c in issue.coordinates)


def _with_below(digits: Any) -> list[tuple[int, Any]]:
    out, below = [], 1
    for d in digits:
        out.append((below, d))
        below *= d.size
    return out
