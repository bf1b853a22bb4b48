"""Which register layout each array of a role has: annotations pin some, operations tie the rest.

Elementwise operations and loop carries make classes of values that share one layout (union-find); two pins that disagree
within a class are a `LayoutConflict`.  Reductions, broadcasts, reshapes, slices and casts relate two classes: known layouts
spread along them until nothing changes, and where both sides are known and differ the operation itself converts, through
shared memory if it must.  What is still open takes `default_layout`.

A value whose elements are all equal (a broadcast scalar and what is computed from such) is a *splat*: it has no layout
and fits any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from ..collecting import kept
from ..errors import LayoutConflict, Line, MosaicGpuError
from ..ops import registry
from ..ops.elementwise import PURE
from ..program import Equation, Operand, Value, View, walk
from .registers import Layout, LayoutName, RegisterLayout
from .shared import ITEM_BITS, itemsize
from .spread import default_layout, spread


@dataclasses.dataclass
class _Class:
    members: list[Value]
    layout: RegisterLayout | None = None
    line: Line | None = None  # where the layout comes from
    made: Line | None = None  # where the first of them is computed


@dataclasses.dataclass(frozen=True)
class _Relation:
    """wide.reduce(axes), seen through unit dimensions, is narrow.  kind: 'reduction' or 'broadcast'."""

    equation: Equation
    wide: Value
    narrow: Value
    dims: tuple[int, ...]  # narrow's dimension i is wide's dims[i]


class Solver:
    """Collects constraints while walking a role's equations (ops' layouts rules call its methods), then solves.

    failures: where what is refused goes; None: it is raised.
    """

    def __init__(self, splats: set[int], failures: list[MosaicGpuError] | None = None) -> None:
        self.failures = failures
        self.splats = splats
        self.parent: dict[int, int] = {}
        self.classes: dict[int, _Class] = {}
        self.relations: list[_Relation] = []
        self.reshapes: list[tuple[Equation, Value, Value]] = []
        self.parts: list[tuple[Equation, Value, Value]] = []
        self.preferences: list[tuple[Equation, Value, LayoutName]] = []
        self.casts: list[tuple[Equation, Value, Value]] = []
        self.minors: list[tuple[Equation, Value, Value]] = []
        self.reduced: dict[int, set[int]] = {}
        self.vectors: set[int] = set()

    # ---- called by rules ----------------------------------------------------------------------------------------------
    def same(self, e: Equation, operands: Sequence[Operand]) -> None:
        """All arrays among `operands` share one layout."""
        arrays = [
            o for o in operands if isinstance(o, Value) and o.shape and o.space is None and o.id not in self.splats
        ]
        if arrays:
            c = self._class(arrays[0])
            c.made = c.made or e.line
        for a in arrays[1:]:
            with kept(self.failures, e.line):
                self._join(arrays[0], a, e)

    def pin(self, e: Equation, value: Value, layout: LayoutName) -> None:
        """`value` has this layout."""
        if value.id in self.splats:
            return
        try:
            concrete = layout.of(value.shape)
        except ValueError as error:
            raise LayoutConflict(str(error), e.line) from None
        self._set(value, concrete, e)

    def fix(self, e: Equation, value: Value, layout: RegisterLayout) -> None:
        """As `pin`, for a layout that has no name."""
        if value.id not in self.splats:
            self._set(value, layout, e)

    def prefer(self, e: Equation, value: Value, layout: LayoutName) -> None:
        """As `pin`, unless the value turns out to be a splat (which fits as it is)."""
        self.preferences.append((e, value, layout))

    def broadcast(self, e: Equation, narrow: Operand, wide: Value, dims: tuple[int, ...]) -> None:
        """wide repeats narrow, whose dimension i is wide's dims[i]."""
        if isinstance(narrow, Value) and not self.splats & {narrow.id, wide.id}:
            self.relations.append(_Relation(e, wide, narrow, tuple(dims)))

    def reduction(self, e: Equation, wide: Operand, narrow: Value, axes: tuple[int, ...]) -> None:
        if isinstance(wide, Value) and wide.id not in self.splats:
            self.along(wide, axes)
            if narrow.shape:
                dims = tuple(i for i in range(len(wide.shape)) if i not in axes)
                self.relations.append(_Relation(e, wide, narrow, dims))

    def cast(self, e: Equation, x: Operand, y: Value, layout: LayoutName) -> None:
        """y is x in `layout`; x takes the same where nothing else decides, as that is free."""
        self.pin(e, y, layout)
        if isinstance(x, Value) and not self.splats & {x.id, y.id}:
            self.casts.append((e, x, y))

    def along(self, x: Operand, axes: Sequence[int]) -> None:
        """x is reduced, scanned or sorted along `axes`: lanes share them rather than warps, where nothing else decides."""
        if isinstance(x, Value) and x.id not in self.splats:
            self._class(x)
            self.reduced.setdefault(x.id, set()).update(axes)

    def neighbours(self, x: Operand) -> None:
        """Where nothing else decides, a thread takes neighbours along x's last dimension, as many as an instruction moves."""
        if isinstance(x, Value) and x.shape and x.id not in self.splats:
            self._class(x)
            self.vectors.add(x.id)

    def part(self, e: Equation, whole: Operand, part: Value) -> None:
        """part is a slice of whole: the same named layout for another shape."""
        if isinstance(whole, Value) and not self.splats & {whole.id, part.id}:
            self.parts.append((e, whole, part))

    def reshape(self, e: Equation, x: Operand, y: Operand) -> None:
        """y is x's elements, row by row, in another shape."""
        if isinstance(x, Value) and isinstance(y, Value) and not self.splats & {x.id, y.id}:
            self.reshapes.append((e, x, y))

    def minor(self, e: Equation, whole: Operand, parts: Operand) -> None:
        """parts has a further last dimension, whose elements are with the thread that has whole's."""
        if isinstance(whole, Value) and isinstance(parts, Value) and not self.splats & {whole.id, parts.id}:
            self._class(parts)
            if whole.shape:
                self.minors.append((e, whole, parts))

    # ---- walking --------------------------------------------------------------------------------------------------------
    def region(self, equations: Sequence[Equation]) -> None:
        for e in equations:
            rule = registry.OPS[e.op].layouts_rule if e.op in registry.OPS else None
            if rule is not None:
                with kept(self.failures, e.line):
                    rule(self, e)
            for v in (*e.results, *(x for r in e.regions for x in r.inputs)):
                self.same(e, [v])
            for r in e.regions:
                self.region(r.equations)
            with kept(self.failures, e.line):
                self._carries(e)

    def _carries(self, e: Equation) -> None:
        """Loop carries, branch results and scope results are the same value on the way through."""

        def tie(results: Sequence[Value], *sources: Sequence[Operand]) -> None:
            for i, r in enumerate(results):
                if r.shape and r.space is None:
                    self.same(e, [r, *(s[i] for s in sources)])

        if e.op == "for":
            body = e.regions[0]
            tie(e.results, e.operands[2:], body.inputs[1:], body.outputs)
        elif e.op == "while":
            tie(e.results, e.operands, e.regions[0].inputs, e.regions[1].inputs, e.regions[1].outputs)
        elif e.op in ("cond", "run_scoped"):
            tie(e.results, *(r.outputs for r in e.regions))

    # ---- union-find -----------------------------------------------------------------------------------------------------
    def _class(self, value: Value) -> _Class:
        root = self._root(value)
        return self.classes[root]

    def _root(self, value: Value) -> int:
        if value.id not in self.parent:
            self.parent[value.id] = value.id
            self.classes[value.id] = _Class([value])
        i = value.id
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def _join(self, a: Value, b: Value, e: Equation) -> None:
        ra, rb = self._root(a), self._root(b)
        if ra == rb:
            return
        x, y = self.classes[ra], self.classes[rb]
        if x.layout is not None and y.layout is not None and not x.layout.same_map(y.layout):
            raise _conflict(x.layout, x.line, y.layout, y.line, e)
        del self.classes[rb]
        self.parent[rb] = ra
        x.members += y.members
        if x.layout is None:
            x.layout, x.line = y.layout, y.line

    def _set(self, value: Value, layout: RegisterLayout, e: Equation) -> None:
        c = self._class(value)
        if c.layout is None:
            c.layout, c.line = layout, e.line
        elif not c.layout.same_map(layout):
            raise _conflict(c.layout, c.line, layout, e.line, e)

    # ---- solving --------------------------------------------------------------------------------------------------------
    def solve(self, equations: Sequence[Equation]) -> dict[int, RegisterLayout]:
        """Layouts by value id; values that are splats have none."""
        changed = True
        while changed:
            changed = self._spread()
            if not changed:
                for e, value, layout in self.preferences:
                    if value.id not in self.splats and self._class(value).layout is None:
                        with kept(self.failures, e.line):
                            self.pin(e, value, layout)
                            changed = True
        # The default, to the widest arrays first: what is broadcast into them or reduced from them follows.  Before these to what
        # comes apart, so that parts stay together; of those equally wide first to what is reduced.
        wholes = {self._root(whole) for _, whole, _ in self.minors}

        def rank(root: int) -> tuple[bool, int, bool]:
            members = self.classes[root].members
            return root not in wholes, -math.prod(members[0].shape), not any(m.id in self.reduced for m in members)

        for root in sorted(self.classes, key=rank):
            c = self.classes[root]
            if c.layout is not None:
                continue
            first = c.members[0]
            if first.dtype not in ITEM_BITS:  # which the plan refuses; `check` looks at what is around it
                continue
            axes = frozenset().union(*(self.reduced.get(m.id, ()) for m in c.members))
            lay = spread if any(m.id in self.vectors for m in c.members) else default_layout
            c.layout = lay(first.shape, itemsize(first.dtype), axes)
            while self._spread():
                pass
        return {m.id: c.layout for c in self.classes.values() for m in c.members if c.layout is not None}

    def _spread(self) -> bool:
        """Offer known layouts to what is related; where both sides are known and differ, the operation converts."""
        changed = False
        for r in self.relations:
            wide, narrow = self._class(r.wide), self._class(r.narrow)
            if wide.layout is not None:
                changed |= self._offer(r.narrow, _narrow(wide.layout, r), r.equation)
            elif narrow.layout is not None:
                for candidate in (Layout.WGMMA, Layout.TCGEN05_TMEM_NATIVE):
                    try:
                        layout = candidate.of(r.wide.shape)
                    except ValueError:
                        continue
                    if _narrow(layout, r).same_map(narrow.layout):
                        changed |= self._offer(r.wide, layout, r.equation)
                        break
        for e, x, y in self.casts:
            layout_of_y = self._class(y).layout
            assert layout_of_y is not None
            changed |= self._offer(x, layout_of_y, e)
        for e, x, y in self.reshapes:
            lx, ly = self._class(x).layout, self._class(y).layout
            offered = lx.reshaped(y.shape) if lx is not None else ly and ly.reshaped(x.shape)
            if offered is not None:
                changed |= self._offer(y if lx is not None else x, offered, e)
        for e, whole, parts in self.minors:
            one, several = self._class(whole).layout, self._class(parts).layout
            if one is not None:
                changed |= self._offer(parts, one.with_minor(parts.shape), e)
            elif several is not None:
                changed |= self._offer(whole, several.reduce(len(whole.shape)), e)
        for e, whole, part in self.parts:
            for known, other in ((whole, part), (part, whole)):
                named = self._class(known).layout
                if named is not None and named.name in ("WGMMA", "TCGEN05_TMEM_NATIVE"):
                    with contextlib.suppress(ValueError):  # another shape may have no such layout
                        changed |= self._offer(other, Layout[named.name].of(other.shape), e)
        return changed

    def _offer(self, value: Value, layout: RegisterLayout, e: Equation) -> bool:
        c = self._class(value)
        if c.layout is not None:
            return False
        c.layout, c.line = layout, e.line
        return True


def _narrow(wide: RegisterLayout, r: _Relation) -> RegisterLayout:
    """The layout of the narrow side: dimensions that narrow lacks, or has with extent 1, become replicas."""
    gone = [i for i in range(len(wide.shape)) if i not in r.dims or r.narrow.shape[r.dims.index(i)] != wide.shape[i]]
    reduced = wide.reduce(gone)
    kept = [i for i in range(len(wide.shape)) if i not in gone]
    return reduced.with_unit_dims(r.narrow.shape, [r.dims.index(i) for i in kept])


def _conflict(
    a: RegisterLayout, a_line: Line | None, b: RegisterLayout, b_line: Line | None, e: Equation
) -> LayoutConflict:
    return LayoutConflict(
        f"{e.op} brings two register layouts together: {a} (from {a_line}) and {b} (from {b_line}). "
        f"Load one of them in the other's layout (load(ref, layout=...)), or pin it where it is made with layout_cast",
        e.line,
    )


def _splats(equations: Sequence[Equation]) -> set[int]:
    """Ids of arrays whose elements are all equal.  Loop carries start as splats and lose it when the body says so."""
    made: dict[int, Equation] = {}
    not_splat: set[int] = set()
    arrays: set[int] = set()
    ties: list[tuple[int, list[Operand]]] = []

    def note(v: Value) -> None:
        if v.shape and v.space is None:
            arrays.add(v.id)

    def visit(region: Sequence[Equation]) -> None:
        for e in region:
            for v in e.results:
                note(v)
            if e.op == "for":
                for i, (r, b) in enumerate(zip(e.results, e.regions[0].inputs[1:], strict=True)):
                    note(b)
                    sources: list[Operand] = [e.operands[2 + i], e.regions[0].outputs[i]]
                    ties.extend([(r.id, [b]), (b.id, sources)])
            elif e.op == "while":
                for i, r in enumerate(e.results):
                    c, b = e.regions[0].inputs[i], e.regions[1].inputs[i]
                    note(c)
                    note(b)
                    ties.extend([(r.id, [b]), (c.id, [b]), (b.id, [e.operands[i], e.regions[1].outputs[i]])])
            elif e.op in ("cond", "run_scoped"):
                ties.extend((r.id, [g.outputs[i] for g in e.regions]) for i, r in enumerate(e.results))
            else:
                for r in e.results:
                    made[r.id] = e
            for g in e.regions:
                visit(g.equations)

    visit(equations)
    not_splat |= _needed_whole(equations)
    changed = True
    while changed:
        changed = False

        def is_splat(o: Operand) -> bool:
            return not isinstance(o, Value) or not o.shape or o.id not in not_splat

        for i in arrays - not_splat:
            e = made.get(i)
            if e is None:
                continue
            uniform = e.op in PURE or e.op in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice")
            if not uniform or not all(is_splat(o) for o in e.operands):
                not_splat.add(i)
                changed = True
        for i, sources in ties:
            if i in arrays and i not in not_splat and not all(is_splat(o) for o in sources):
                not_splat.add(i)
                changed = True
    return arrays - not_splat


def _needed_whole(equations: Sequence[Equation]) -> set[int]:
    """Ids of arrays that an operation needs in registers, each element by itself."""
    found: set[int] = set()
    for e in walk(tuple(equations)):
        to_memory = e.op == "swap" and isinstance(e.operands[0], View) and e.operands[0].space.kind != "acc"
        if to_memory or (e.op in registry.OPS and registry.OPS[e.op].whole):
            found |= {o.id for o in e.operands if isinstance(o, Value) and o.shape and o.space is None}
    return found


def infer(equations: Sequence[Equation], failures: list[MosaicGpuError] | None = None) -> dict[int, RegisterLayout]:
    """Register layouts of all arrays of a role, by value id.  Raises LayoutConflict naming both lines; `failures` collects."""
    solver = Solver(_splats(equations), failures)
    solver.region(equations)
    return solver.solve(equations)
