"""Small edits of a traced program: find an equation by what it does, delete it, move it, change what it names or counts.

A selector is text: an operation, then the name of a Ref that it uses, then which of several: "barrier_wait empty",
"copy_gmem_to_smem b_tile", "wgmma_wait#1", "wgmma_wait#-1" (the last).  "when(barrier_wait empty)" is the `cond` right around
that equation, "for(...)" the loop around it and "for(for(...))" the loop around that.  "barrier_wait full*": all of them, for
methods that take several.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mosaic_gpu.errors import Line
from mosaic_gpu.memory import BarrierInfo
from mosaic_gpu.program import Affine, Equation, Literal, Program, Region, Value, View, scalars_of, substitute_all, walk

Path = tuple[tuple[int, int], ...]
"""Where an equation stands: (index in the body, region in that equation), ..., (index, -1)."""
Edit = Callable[["Editor"], None]
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# What indices and predicates are computed with.
SCALAR = (*COMPARISONS, "add", "sub", "mul", "div", "rem", "max", "min", "convert_element_type")


class NoSuchEquation(LookupError):
    """A selector fits nothing: the kernel has changed, and whatever uses the selector must follow."""


def sites(equations: Sequence[Equation], prefix: Path = ()) -> Iterator[tuple[Path, Equation]]:
    """Every equation and its path, in program order."""
    for i, e in enumerate(equations):
        yield (*prefix, (i, -1)), e
        for r, region in enumerate(e.regions):
            yield from sites(region.equations, (*prefix, (i, r)))


def replace_at(equations: tuple[Equation, ...], path: Path, new: Sequence[Equation]) -> tuple[Equation, ...]:
    """The equations with the one at `path` replaced by several or none."""
    (index, region), rest = path[0], path[1:]
    if not rest:
        return (*equations[:index], *new, *equations[index + 1 :])
    e = equations[index]
    old = e.regions[region]
    inner = Region(old.inputs, replace_at(old.equations, rest, new), old.outputs)
    changed = e.with_(regions=(*e.regions[:region], inner, *e.regions[region + 1 :]))
    return (*equations[:index], changed, *equations[index + 1 :])


def parent(path: Path) -> Path:
    """The path of the equation around one."""
    return (*path[:-2], (path[-2][0], -1))


class Editor:
    """A program under the knife.  names: what selectors call Refs instead of their own names."""

    def __init__(self, program: Program, names: dict[str, str] | None = None) -> None:
        self.program, self.names = program, names or {}
        ids = [v.id for e in walk(program.body) for v in (*e.results, *(i for r in e.regions for i in r.inputs))]
        self._ids = itertools.count(1 + max([0, *ids, *(v.id for v in (*program.inputs, *program.scratch))]))

    # ---- finding ----------------------------------------------------------------------------------------------------
    def name(self, ref: Value) -> str:
        return self.names.get(ref.name, ref.name or f"%{ref.id}")

    def refs(self, e: Equation) -> list[str]:
        return [self.name(o.ref) for o in e.operands if isinstance(o, View)]

    def sites(self) -> list[tuple[Path, Equation]]:
        return list(sites(self.program.body))

    def find(self, selector: str) -> Path:
        """The path of the equation that a selector names."""
        if around := re.fullmatch(r"(when|for)\((.*)\)", selector):
            path = parent(self.find(around[2]))
            while self.at(path).op != {"when": "cond", "for": "for"}[around[1]]:
                path = parent(path)
            return path
        match = re.fullmatch(r"(.*?)(?:#(-?\d+))?", selector)
        assert match is not None
        found, number = self._all(match[1]), int(match[2] or 0)
        if not -len(found) <= number < len(found):
            raise NoSuchEquation(f"{selector!r}: {self.program.name} has {len(found)} such equations")
        return found[number]

    def find_all(self, selector: str) -> list[Path]:
        """All equations that a selector with a star names, or the one of a selector without."""
        found = self._all(selector[:-1]) if selector.endswith("*") else [self.find(selector)]
        if not found:
            raise NoSuchEquation(f"{selector!r}: {self.program.name} has no such equation")
        return found

    def _all(self, selector: str) -> list[Path]:
        op, _, ref = selector.partition(" ")
        return [p for p, e in self.sites() if e.op == op and (not ref or ref in self.refs(e))]

    def at(self, path: Path) -> Equation:
        equations = self.program.body
        for index, region in path[:-1]:
            equations = equations[index].regions[region].equations
        return equations[path[-1][0]]

    def get(self, selector: str) -> Equation:
        return self.at(self.find(selector))

    def line(self, selector: str) -> Line | None:
        return self.get(selector).line

    def definition(self, value: Value) -> Path | None:
        """Where a value is computed; None: it is an input of the kernel or of a region."""
        return next((p for p, e in self.sites() if any(r.id == value.id for r in e.results)), None)

    # ---- changing ---------------------------------------------------------------------------------------------------
    def put(self, path: Path, *new: Equation) -> None:
        """Replace the equation at a path."""
        self.program = dataclasses.replace(self.program, body=replace_at(self.program.body, path, new))

    def delete(self, selector: str) -> None:
        for path in reversed(self.find_all(selector)):
            self.put(path)

    def advance(self, selector: str, op: str) -> None:
        """Do each of several before the nearest operation `op` ahead of it in its region."""
        for n in range(len(self.find_all(f"{selector}*"))):
            path = self._all(selector)[n]
            ahead = [(*path[:-1], (i, -1)) for i in range(path[-1][0])]
            self._put_before(next(self.at(p) for p in reversed(ahead) if self.at(p).op == op), self.at(path))

    def double(self, selector: str) -> None:
        """Do it twice."""
        e = self.get(selector)
        self.put(self.find(selector), e, e)

    def move(self, selector: str, *, before: str = "", after: str = "") -> None:
        """Do it at another place, which may be in another region; what computes its indices comes along."""
        e, place = self.get(selector), self.get(before or after)
        if before:
            self._put_before(place, e)
        else:
            self.put(self._path_of(e))
            self.put(self._path_of(place), place, e)

    def _put_before(self, place: Equation, e: Equation) -> None:
        """Move an equation, and what computes its indices so late, to a place ahead of it."""
        moved, inside = [e], {id(x) for x in walk((e,))}
        for path, x in reversed(self.sites()):
            uses = {v.id for m in moved for y in walk((m,)) for o in y.operands for v in scalars_of(o)}
            late = path > self._path_of(place) and id(x) not in inside
            if late and x.op in SCALAR and any(r.id in uses for r in x.results):
                moved.insert(0, x)
        for x in moved:
            self.put(self._path_of(x))
        self.put(self._path_of(place), *moved, place)

    def _path_of(self, e: Equation) -> Path:
        return next(p for p, x in self.sites() if x is e)

    def copy(self, selector: str, *, before: str = "", after: str = "") -> None:
        """Do it at another place, too."""
        e, path = self.get(selector), self.find(before or after)
        place = self.at(path)
        self.put(path, *((e, place) if before else (place, e)))

    def unguard(self, selector: str) -> None:
        """Do what a `when` guards always."""
        path = self.find(selector)
        self.put(path, *next(r for r in self.at(path).regions if r.equations).equations)

    def set_param(self, selector: str, **params: Any) -> None:
        for path in self.find_all(selector):
            self.put_params(path, **params)

    def put_params(self, path: Path, **params: Any) -> None:
        e = self.at(path)
        assert set(params) <= {k for k, _ in e.params}, (e.op, params)
        self.put(path, e.with_(params=tuple(sorted({**dict(e.params), **params}.items()))))

    def set_operand(self, selector: str, index: int, operand: Any) -> None:
        path = self.find(selector)
        e = self.at(path)
        self.put(path, e.with_(operands=(*e.operands[:index], operand, *e.operands[index + 1 :])))

    def drop_operand(self, selector: str, index: int) -> None:
        path = self.find(selector)
        e = self.at(path)
        self.put(path, e.with_(operands=(*e.operands[:index], *e.operands[index + 1 :])))

    def ref(self, name: str) -> Value:
        """A Ref of the kernel by name."""
        return next(v for v in (*self.program.inputs, *self.program.scratch) if self.name(v) == name)

    def retarget(self, selector: str, old: str, new: str) -> None:
        """Name another Ref of the same shape in an equation."""
        path = self.find(selector)
        e = self.at(path)
        value = self.ref(new)
        self.put(
            path,
            e.with_(
                operands=tuple(
                    dataclasses.replace(o, ref=value) if isinstance(o, View) and self.name(o.ref) == old else o
                    for o in e.operands
                )
            ),
        )

    def shift_slot(self, path: Path, operand: int, dim: int, by: int) -> None:
        """Another slot: the index of a dimension of a view plus `by`, modulo the extent."""
        e = self.at(path)
        view = e.operands[operand]
        assert isinstance(view, View)
        extent, start = view.ref.shape[dim], view.dims[dim].start
        before: list[Equation] = []
        if start.static:
            new = Affine((start.const + by) % extent)
        else:
            value = self._evaluate(start + Affine(by % extent), before, e.line)
            rest = self._emit("rem", (value, Literal(extent, "int32")), before, e.line)
            new = Affine(0, ((rest, 1),))
        dims = list(view.dims)
        dims[dim] = dataclasses.replace(dims[dim], start=new)
        changed = dataclasses.replace(view, dims=tuple(dims))
        self.put(path, *before, e.with_(operands=(*e.operands[:operand], changed, *e.operands[operand + 1 :])))

    def other_slot(self, selector: str, ref: str, by: int = 1) -> None:
        """`shift_slot` for the first dimension of a Ref."""
        for path in reversed(self.find_all(selector)):
            views = enumerate(self.at(path).operands)
            operand = next(i for i, o in views if isinstance(o, View) and self.name(o.ref) == ref)
            self.shift_slot(path, operand, 0, by)

    def shift_start(self, selector: str, ref: str, dim: int, by: int) -> None:
        """Another part of a buffer: the start of a dimension of a view plus `by`, not modulo anything."""
        path = self.find(selector)
        e = self.at(path)
        operands = list(e.operands)
        for i, o in enumerate(operands):
            if isinstance(o, View) and self.name(o.ref) == ref:
                dims = list(o.dims)
                dims[dim] = dataclasses.replace(dims[dim], start=dims[dim].start + Affine(by))
                operands[i] = dataclasses.replace(o, dims=tuple(dims))
        self.put(path, e.with_(operands=tuple(operands)))

    def set_barrier(self, name: str, **info: Any) -> None:
        """Another count or kind of a barrier, wherever it is named."""
        self.put_barrier(self.ref(name), **info)

    def put_barrier(self, ref: Value, **info: Any) -> None:
        assert ref.space is not None and isinstance(ref.space.barrier, BarrierInfo)
        space = dataclasses.replace(ref.space, barrier=dataclasses.replace(ref.space.barrier, **info))
        new = dataclasses.replace(ref, space=space)
        self.program = dataclasses.replace(
            self.program,
            scratch=tuple(new if v.id == ref.id else v for v in self.program.scratch),
            body=substitute_all(self.program.body, {ref.id: new}),
        )

    def comparison(self, value: Any) -> Path | None:
        """Where a predicate (or what is made of it) is compared with a constant."""
        while isinstance(value, Value):
            path = self.definition(value)
            if path is None:
                return None
            e = self.at(path)
            if e.op in COMPARISONS:
                return path if any(isinstance(o, Literal) for o in e.operands) else None
            value = e.operands[0] if e.operands else None
        return None

    def shift_comparison(self, path: Path, by: int) -> None:
        """Compare with another constant."""
        e = self.at(path)
        changed = tuple(
            dataclasses.replace(o, value=int(o.value) + by) if isinstance(o, Literal) else o for o in e.operands
        )
        self.put(path, e.with_(operands=changed))

    def shift_guard(self, selector: str, by: int) -> None:
        """The predicate of a `when`, or of the first-step flag of a tcgen05_mma, compares with another constant."""
        e = self.get(selector)
        path = self.comparison(e.operands[3 if e.op == "tcgen05_mma" else 0])
        assert path is not None, selector
        self.shift_comparison(path, by)

    def shift_bound(self, path: Path, operand: int, by: int) -> None:
        """The lower (0) or upper (1) bound of a loop plus `by`."""
        e = self.at(path)
        bound, before = e.operands[operand], list[Equation]()
        if isinstance(bound, Literal):
            new: Any = dataclasses.replace(bound, value=int(bound.value) + by)
        else:
            new = self._emit("add", (bound, Literal(by, "int32")), before, e.line)
        self.put(path, *before, e.with_(operands=(*e.operands[:operand], new, *e.operands[operand + 1 :])))

    def shift_loop(self, selector: str, *, lower: int = 0, upper: int = 0) -> None:
        for operand, by in ((0, lower), (1, upper)):
            if by:
                self.shift_bound(self.find(selector), operand, by)

    def _emit(self, op: str, operands: tuple[Any, ...], out: list[Equation], line: Line | None) -> Value:
        result = Value(next(self._ids), (), "int32")
        out.append(Equation(op, operands, (result,), (), (), line))
        return result

    def _evaluate(self, a: Affine, out: list[Equation], line: Line | None) -> Any:
        total: Any = Literal(a.const, "int32")
        for value, factor in a.terms:
            if factor != 1:
                value = self._emit("mul", (value, Literal(factor, "int32")), out, line)
            total = self._emit("add", (value, total), out, line)
        return total
