"""Who owns an accumulator or an operand's registers while a wgmma is in flight, and the waits that give them back.

Walks a role in program order with the list of groups in flight.  Reading or writing an accumulator waits for the groups
that still write it (and for no younger one); a loop carry that a group in flight reads is written only after the wait that
ends it: its definition is sunk below that wait, or the loop is unrolled twice with a tile for each half, or the error names
both lines.  The notes say which was done and what it costs.  Explicit `wgmma_wait`s are kept as they are.

It also decides how an accumulator begins: the first product overwrites (scale-d = 0) where that is known or can be told by
a flag; zeros are written only where something else reads or scales the accumulator first, also those of the program:
`acc[...] = 0` in front of a product begins the next sum.  Last, `fences` has its turn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ..errors import InFlightError, Line
from ..program import Equation, Literal, Operand, Region, Value, View, scalars_of, substitute, walk
from . import fences, last_iteration
from .roles import DEAD_IF_UNUSED as PURE_ON_ARRAYS

ZERO, LIVE, UNKNOWN = "zero", "live", "unknown"


@dataclasses.dataclass(frozen=True)
class Group:
    """One wgmma in flight: the accumulator it writes, the register tile it reads (None: A in shared memory)."""

    acc: int
    tile: int | None
    line: Line | None


@dataclasses.dataclass
class State:
    groups: list[Group]
    accumulators: dict[int, str]
    fresh: Iterator[int]  # ids that no value of the role has
    families: Families
    zeros: frozenset[int]  # arrays that consist of them
    looking: bool = False  # only to see what is in flight where, before anything is moved or waited for

    def copy(self, looking: bool = False) -> State:
        return dataclasses.replace(
            self, groups=list(self.groups), accumulators=dict(self.accumulators), looking=looking or self.looking
        )


class Families:
    """Values that share registers: what a loop carries, through all its iterations, and what a branch or scope returns."""

    def __init__(self, equations: Sequence[Equation]) -> None:
        self.parent: dict[int, int] = {}
        self.add(equations)

    def root(self, i: int) -> int:
        while (up := self.parent.get(i, i)) != i:
            i = up
        return i

    def add(self, equations: Sequence[Equation]) -> None:
        for e in walk(tuple(equations)):
            if e.op in ("for", "while"):
                init = e.operands[2:] if e.op == "for" else e.operands
                body = e.regions[-1]
                inside = body.inputs[1:] if e.op == "for" else body.inputs
                rows: list[tuple[Operand, ...]] = list(zip(e.results, init, inside, body.outputs, strict=True))
            elif e.op in ("cond", "run_scoped"):
                rows = [(r, *(g.outputs[i] for g in e.regions)) for i, r in enumerate(e.results)]
            else:
                continue
            for row in rows:
                arrays = [v.id for v in row if isinstance(v, Value) and v.shape]
                for i in arrays[1:]:
                    self.parent[self.root(i)] = self.root(arrays[0])


@dataclasses.dataclass
class Result:
    """Equations with the waits in place; how each wgmma (by identity of its equation) treats its accumulator; notes."""

    equations: tuple[Equation, ...]
    notes: list[str]


def unused_ids(*equations: Sequence[Equation], values: Sequence[Value] = ()) -> Iterator[int]:
    """For new values: ids that none of these has."""
    known = itertools.chain(values, *(_values(some) for some in equations))
    return itertools.count(1 + max((v.id for v in known), default=0))


def resolve(equations: Sequence[Equation], fresh: Iterator[int]) -> Result:
    """Place waits and accumulator initialisation in a role's equations.  fresh: ids that no role of the kernel has."""
    if not any(_on_accumulator(e) for e in walk(tuple(equations))):
        return Result(tuple(equations), [])
    notes: list[str] = []
    state = State([], {}, fresh, Families(equations), frozenset(_zeros(equations)))
    out = _region(equations, state, notes)
    if state.groups:
        out.append(_wait(0, state.groups[-1].line))
    return Result(fences.place(out), notes)


def _wait(n: int, line: Line | None) -> Equation:
    return Equation("wgmma_wait", (), (), (("implicit", True), ("n", n)), (), line)


def _zero(view: View, dynamic: bool, line: Line | None) -> Equation:
    return Equation("acc_zero", (view,), (), (("dynamic", dynamic),), (), line)


def _on_accumulator(e: Equation) -> bool:
    return any(isinstance(o, View) and o.space.kind == "acc" for o in e.operands)


def _zeros(equations: Sequence[Equation]) -> Iterator[int]:
    for e in walk(tuple(equations)):
        if e.op == "broadcast_in_dim" and isinstance(o := e.operands[0], Literal) and o.value == 0:
            yield e.results[0].id


def _begins_anew(e: Equation, behind: Sequence[Equation], state: State) -> bool:
    """Whether zeros are written that nothing sees but a product, which can overwrite instead."""
    view, value = e.operands[0], e.operands[1]
    if e.results or not isinstance(view, View) or view != View.whole(view.ref):
        return False
    if not isinstance(value, Value) or value.id not in state.zeros:
        return False
    user = next((x for x in behind if _uses(x, view.ref.id)), None)
    return user is not None and user.op == "wgmma"


def _touches(e: Equation, acc: int) -> bool:
    """Whether `e` (or something inside) reads or writes the accumulator other than by wgmma."""
    if e.op in ("get", "swap", "load") and isinstance(e.operands[0], View) and e.operands[0].ref.id == acc:
        return True
    return any(_touches(x, acc) for r in e.regions for x in r.equations)


def _uses(e: Equation, acc: int) -> View | None:
    for x in walk((e,)):
        for o in x.operands:
            if isinstance(o, View) and o.ref.id == acc:
                return View.whole(o.ref)
    return None


def _region(equations: Sequence[Equation], state: State, notes: list[str]) -> list[Equation]:
    out: list[Equation] = []
    for i, e in enumerate(equations):
        if e.op == "wgmma":
            acc, a = e.operands[0], e.operands[1]
            assert isinstance(acc, View)
            status = state.accumulators.get(acc.ref.id, ZERO)
            init = {ZERO: "zero", LIVE: "add", UNKNOWN: "dynamic"}[status]
            state.accumulators[acc.ref.id] = LIVE
            state.groups.append(Group(acc.ref.id, a.id if isinstance(a, Value) else None, e.line))
            out.append(e.with_(params=(*(p for p in e.params if p[0] != "init"), ("init", init))))
        elif e.op == "wgmma_wait":
            n = e.param("n")
            state.groups = (
                state.groups[len(state.groups) - n :] if 0 < n < len(state.groups) else ([] if n == 0 else state.groups)
            )
            out.append(e)
        elif e.op in ("get", "swap", "load") and isinstance(e.operands[0], View) and e.operands[0].space.kind == "acc":
            out += _finish(state, e.operands[0].ref.id, e.line)
            if e.op == "swap" and _begins_anew(e, equations[i + 1 :], state):
                state.accumulators[e.operands[0].ref.id] = ZERO
                continue
            status = state.accumulators.get(e.operands[0].ref.id, ZERO)
            if status != LIVE and (e.op != "swap" or e.results):
                out.append(_zero(e.operands[0], status == UNKNOWN, e.line))
            state.accumulators[e.operands[0].ref.id] = LIVE
            out.append(e)
        elif e.op in ("for", "while"):
            out += _loop(e, state, notes)
        elif e.op == "warp_branch":  # warps part inside, so waits come before
            for view in {x.operands[0] for x in walk(e.regions[0].equations) if x.op in ("get", "swap")}:
                assert isinstance(view, View)
                out += _finish(state, view.ref.id, e.line)
                status = state.accumulators.get(view.ref.id, ZERO)
                if status != LIVE:
                    out.append(_zero(view, status == UNKNOWN, e.line))
                state.accumulators[view.ref.id] = LIVE
            out.append(e)
        elif e.op == "cond":
            out.append(_branches(e, state, notes))
        elif e.op == "run_scoped":
            r = e.regions[0]
            for ref in r.inputs:
                if ref.space is not None and ref.space.kind == "acc":
                    state.accumulators[ref.id] = ZERO
            body = _region(r.equations, state, notes)
            for ref in r.inputs:  # the registers end with the scope
                body += _finish(state, ref.id, e.line)
            out.append(e.with_(regions=(Region(r.inputs, tuple(body), r.outputs),)))
        else:
            out += _before_definition(e, state, notes)
            out.append(e)
    return out


def _before_definition(e: Equation, state: State, notes: list[str]) -> list[Equation]:
    """The wait that must come before registers are written which a product in flight still reads."""
    if state.looking:
        return []
    written = {state.families.root(r.id) for r in e.results if r.shape and r.space is None}
    readers = [i for i, g in enumerate(state.groups) if g.tile is not None and state.families.root(g.tile) in written]
    if not readers:
        return []
    reader = state.groups[readers[-1]]
    younger = len(state.groups) - 1 - readers[-1]
    state.groups = state.groups[readers[-1] + 1 :]
    notes.append(f"{e.line}: waits for the product at {reader.line}, which reads the registers that are written here")
    return [_wait(younger, e.line)]


def _finish(state: State, acc: int, line: Line | None) -> list[Equation]:
    """The wait after which no group in flight writes `acc`."""
    last = max((i for i, g in enumerate(state.groups) if g.acc == acc), default=-1)
    if last < 0:
        return []
    younger = len(state.groups) - 1 - last
    state.groups = state.groups[last + 1 :]
    return [_wait(younger, line)]


def _loop(e: Equation, state: State, notes: list[str]) -> list[Equation]:
    if (parts := last_iteration.apart(e, state.fresh, clone)) is not None:
        notes.append(f"{e.line}: the last iteration, which reads an accumulator, stands behind the loop")
        return _region(parts, state, notes)
    before: list[Equation] = []
    for acc, status in list(state.accumulators.items()):
        view = _uses(e, acc)
        if status == ZERO and view is not None:
            if _touches(e, acc):
                before.append(_zero(view, False, e.line))
                state.accumulators[acc] = LIVE
            else:
                state.accumulators[acc] = UNKNOWN
    body_region = e.regions[-1]
    carried = body_region.inputs[1:] if e.op == "for" else body_region.inputs
    try:
        equations = _sink(body_region, carried, notes, state)
    except InFlightError as error:
        if e.op != "for" or e.param("halves"):
            raise
        return [*before, *_two_tiles(e, state, notes, error)]
    for _ in range(4):  # groups that stay in flight over the back edge are in flight at the top, too
        start = state.copy()
        body = _region(equations, start, [])
        body += _release_carries(start, carried)
        if start.groups == state.groups:
            break
        state.groups = start.groups
    else:
        raise InFlightError(
            "the number of wgmma groups in flight grows with every iteration of this loop; add wgmma_wait to its body",
            e.line,
        )
    notes += (
        [f"{e.line}: {len(state.groups)} wgmma group(s) stay in flight from one iteration to the next"]
        if state.groups
        else []
    )
    inner_notes: list[str] = []
    _region(equations, state.copy(), inner_notes)
    notes += inner_notes
    for acc, status in start.accumulators.items():
        old = state.accumulators.get(acc)
        if old is not None and old != status:
            state.accumulators[acc] = UNKNOWN
    regions = (*e.regions[:-1], Region(body_region.inputs, tuple(body), body_region.outputs))
    return [*before, e.with_(regions=regions)]


def _two_tiles(e: Equation, state: State, notes: list[str], error: InFlightError) -> list[Equation]:
    """The loop unrolled twice, so that each half writes a tile of its own; an odd iteration follows under a branch."""
    lower, upper, *init = e.operands
    body = e.regions[0]
    counter = state.fresh

    def scalar(dtype: str = "int32") -> Value:
        return Value(next(counter), (), dtype)

    def compute(
        op: str, *operands: Operand, dtype: str = "int32", params: tuple[tuple[str, object], ...] = ()
    ) -> tuple[Value, Equation]:
        result = scalar(dtype)
        return result, Equation(op, operands, (result,), params, (), e.line)

    def copy_of_body(index: Operand, carried: Sequence[Operand]) -> Region:
        return clone(body, (index, *carried), counter)

    def literal(n: int) -> Literal:
        return Literal(n, "int32")

    trips, e1 = compute("sub", upper, lower)
    pairs, e2 = compute("div", trips, literal(2))
    pair = scalar()
    carried = tuple(Value(next(counter), v.shape, v.dtype) for v in body.inputs[1:])
    twice, e3 = compute("mul", pair, literal(2))
    first, e4 = compute("add", lower, twice)
    second, e5 = compute("add", first, literal(1))
    one = copy_of_body(first, carried)
    two = copy_of_body(second, one.outputs)
    double = Region((pair, *carried), (e3, e4, e5, *one.equations, *two.equations), two.outputs)
    results = tuple(Value(next(counter), v.shape, v.dtype) for v in e.results)
    loop = Equation("for", (literal(0), pairs, *init), results, (("halves", True), ("unroll", 1)), (double,), e.line)
    odd, e6 = compute("rem", trips, literal(2))
    last, e7 = compute("sub", upper, literal(1))
    rest = copy_of_body(last, results)
    branch = Equation(
        "cond", (odd,), e.results, (), (Region((), (), results), Region((), rest.equations, rest.outputs)), e.line
    )
    state.families.add((loop, branch))
    try:
        out = _region((e1, e2, loop, e6, e7, branch), state, notes)
    except InFlightError:
        raise error from None
    tiles = [v for v in body.inputs[1:] if v.shape and any(_reads_tile(x, v.id) for x in walk(body.equations))]
    cost = ", ".join(f"{v.dtype}{list(v.shape)}" for v in tiles)
    notes.append(
        f"{e.line}: unrolled twice, a tile for each half ({cost} more in registers), as the next value is made "
        "while a product reads the current one"
    )
    return out


def _values(equations: Sequence[Equation]) -> Iterator[Value]:
    for x in walk(tuple(equations)):
        yield from x.results
        for o in x.operands:
            yield from scalars_of(o)
            if isinstance(o, View):
                yield o.ref
        for r in x.regions:
            yield from r.inputs


def clone(region: Region, inputs: Sequence[Operand], counter: Iterator[int]) -> Region:
    """The region with its inputs replaced and every value and Ref that it defines made anew."""
    env: dict[int, Operand] = {v.id: o for v, o in zip(region.inputs, inputs, strict=True)}

    def fresh(values: Sequence[Value]) -> tuple[Value, ...]:
        new = tuple(dataclasses.replace(v, id=next(counter)) for v in values)
        env.update({v.id: n for v, n in zip(values, new, strict=True)})
        return new

    def copy(equations: Sequence[Equation]) -> tuple[Equation, ...]:
        out = []
        for x in equations:
            operands = tuple(substitute(o, env) for o in x.operands)
            regions = []
            for r in x.regions:
                own = fresh(r.inputs)
                regions.append(Region(own, copy(r.equations), tuple(substitute(o, env) for o in r.outputs)))
            out.append(x.with_(operands=operands, regions=tuple(regions), results=fresh(x.results)))
        return tuple(out)

    equations = copy(region.equations)
    return Region((), equations, tuple(substitute(o, env) for o in region.outputs))


def _release_carries(state: State, carried: Sequence[Value]) -> list[Equation]:
    """Wait for groups that read a carried tile: the end of the iteration overwrites it."""
    ids = {v.id for v in carried}
    last = max((i for i, g in enumerate(state.groups) if g.tile in ids), default=-1)
    if last < 0:
        return []
    line = state.groups[last].line
    younger = len(state.groups) - 1 - last
    state.groups = state.groups[last + 1 :]
    return [_wait(younger, line)]


def _sink(region: Region, carried: Sequence[Value], notes: list[str], state: State) -> list[Equation]:
    """Move the definition of a tile's next value below the wait that ends the product reading the current one.

    state: at the start of the region.  Without this ptxas gives both the same registers and serialises every wgmma of the
    kernel (C7513).
    """
    equations = list(region.equations)
    for c, output in zip(carried, region.outputs, strict=True):
        if not c.shape or not isinstance(output, Value) or output.id == c.id:
            continue
        reads = [e for e in walk(tuple(equations)) if _reads_tile(e, c.id)]
        definition = next((i for i, e in enumerate(equations) if any(r.id == output.id for r in e.results)), None)
        if not reads or definition is None:
            continue
        e = equations[definition]
        if e.op in ("run_scoped", "cond"):  # both the product and the next value may be in it
            before = state.copy(looking=True)
            _region(equations[:definition], before, [])
            equations[definition] = _sink_inside(e, c, output, notes, before)
            continue
        busy = _busy_after(equations, c.id, state)
        if definition == 0 or not busy[definition - 1]:
            continue
        end = next((i for i in range(definition, len(equations)) if not busy[i]), None)
        last = len(equations) - 1 if end is None else end
        users = [i for i, x in enumerate(equations) if i != definition and _reads(x, output.id)]
        if e.op not in PURE_ON_ARRAYS or any(i <= last for i in users):
            raise InFlightError(
                f"the next value of a tile is made at {e.line} while the product at {reads[-1].line} still reads "
                "the current one; make it after the wgmma_wait that ends this product",
                e.line,
            )
        below = [e] if end is not None else [_wait(0, e.line), e]
        equations[last + 1 : last + 1] = below
        del equations[definition]
        notes.append(f"{e.line}: made after the wgmma_wait that ends the product reading the previous value")
    return equations


def _sink_inside(e: Equation, c: Value, output: Value, notes: list[str], state: State) -> Equation:
    """The same in a scope or the branches that return the next value."""
    position = [v.id for v in e.results].index(output.id)
    regions = []
    for r in e.regions:
        inner = Region((), r.equations, (r.outputs[position],))
        regions.append(Region(r.inputs, tuple(_sink(inner, (c,), notes, state.copy())), r.outputs))
    return e.with_(regions=tuple(regions))


def _busy_after(equations: Sequence[Equation], tile: int, state: State) -> list[bool]:
    """After each equation: whether a product that reads the tile is in flight."""
    now, out = state.copy(looking=True), []
    for e in equations:
        _region((e,), now, [])
        out.append(any(g.tile == tile for g in now.groups))
    return out


def _reads_tile(e: Equation, tile: int) -> bool:
    return e.op == "wgmma" and isinstance(e.operands[1], Value) and e.operands[1].id == tile


def _reads(e: Equation, value: int) -> bool:
    operands: list[Operand] = list(e.operands) + [o for r in e.regions for o in r.outputs]
    if any(v.id == value for o in operands for v in scalars_of(o)):
        return True
    return any(_reads(x, value) for r in e.regions for x in r.equations)


def _branches(e: Equation, state: State, notes: list[str]) -> Equation:
    ends: list[tuple[list[Equation], State]] = []
    for r in e.regions:
        own = state.copy()
        ends.append((_region(r.equations, own, notes), own))
    if any(s.groups != ends[0][1].groups for _, s in ends):
        # Paths that meet must have the same groups in flight (C7518 otherwise): every branch drains its own.
        for body, s in ends:
            if s.groups:
                body.append(_wait(0, e.line))
        state.groups = []
    else:
        state.groups = ends[0][1].groups
    for acc in {a for _, s in ends for a in s.accumulators}:
        statuses = {s.accumulators.get(acc, ZERO) for _, s in ends}
        state.accumulators[acc] = statuses.pop() if len(statuses) == 1 else UNKNOWN
    return e.with_(
        regions=tuple(Region(r.inputs, tuple(b), r.outputs) for r, (b, _) in zip(e.regions, ends, strict=True))
    )
