"""Named sabotages: a defect of a good kernel, the rule that it breaks, the error that must come out and the lines it may name.

The rules are those of the hardware's memory model, by the ids that docs/sabotage.md explains.  `expect` names the classes
of error that are right, `at` selectors of the equations whose line the error may have: of a race either end, of a deadlock
any of the waits that never end.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

from mosaic_gpu.errors import Line
from mosaic_gpu.program import Affine, Equation, Literal, Value, View

from .kernels import case
from .rewrite import Edit, Editor
from .verdict import SEEDS, Finding, judge


@dataclasses.dataclass(frozen=True)
class Sabotage:
    """name: unique in its kernel; rule: id of the rule that it breaks; edit: how the program is spoilt."""

    kernel: str
    name: str
    rule: str
    edit: Edit
    expect: tuple[str, ...]
    at: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def lines(self) -> list[Line | None]:
        """The lines that an error may name."""
        c = case(self.kernel)
        editor = Editor(c.program, c.names)
        return [editor.at(path).line for selector in self.at for path in editor.find_all(selector)]


@dataclasses.dataclass(frozen=True)
class Benign:
    """A change that breaks nothing: whatever the simulator says about it is a false alarm.  why: the rule that holds."""

    kernel: str
    name: str
    why: str
    edit: Edit

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"


# ---- edits ----------------------------------------------------------------------------------------------------------
def delete(*selectors: str) -> Edit:
    return lambda x: [x.delete(s) for s in selectors] and None


def double(selector: str) -> Edit:
    return lambda x: x.double(selector)


def move(selector: str, *, before: str = "", after: str = "") -> Edit:
    return lambda x: x.move(selector, before=before, after=after)


def advance(selector: str, op: str) -> Edit:
    return lambda x: x.advance(selector, op)


def one_more_in_flight(x: Editor) -> None:
    """Every wgmma_wait leaves one group more."""
    for path in x.find_all("wgmma_wait*"):
        x.put_params(path, n=x.at(path).param("n") + 1)


def copy(selector: str, *, before: str = "", after: str = "") -> Edit:
    return lambda x: x.copy(selector, before=before, after=after)


def param(selector: str, **params: object) -> Edit:
    return lambda x: x.set_param(selector, **params)


def slot(selector: str, ref: str, by: int = 1) -> Edit:
    return lambda x: x.other_slot(selector, ref, by)


def barrier(name: str, **info: object) -> Edit:
    return lambda x: x.set_barrier(name, **info)


def guard(selector: str, by: int) -> Edit:
    return lambda x: x.shift_guard(selector, by)


def unguard(selector: str) -> Edit:
    return lambda x: x.unguard(selector)


def loop(selector: str, *, lower: int = 0, upper: int = 0) -> Edit:
    return lambda x: x.shift_loop(selector, lower=lower, upper=upper)


def retarget(selector: str, old: str, new: str) -> Edit:
    return lambda x: x.retarget(selector, old, new)


def variant(**options: object) -> Edit:
    """The kernel as its maker makes it with other options."""

    def edit(x: Editor) -> None:
        x.program = case(x.program.name, **options).program

    return edit


def all_of(*edits: Edit) -> Edit:
    def edit(x: Editor) -> None:
        for e in edits:
            e(x)

    return edit


def first_slot(selectors: Iterable[str], ref: str) -> Edit:
    """Slot 0 instead of the ring's."""

    def edit(x: Editor) -> None:
        for s in selectors:
            e = x.get(s)
            i = next(i for i, o in enumerate(e.operands) if isinstance(o, View) and x.name(o.ref) == ref)
            view = e.operands[i]
            assert isinstance(view, View)
            start = dataclasses.replace(view.dims[0], start=Affine(0))
            x.set_operand(s, i, dataclasses.replace(view, dims=(start, *view.dims[1:])))

    return edit


def _loop_counter(x: Editor, selector: str) -> Value:
    return x.get(f"for({selector})").regions[0].inputs[0]


def restart_ring(selector: str) -> Edit:
    """The slot of a barrier comes from the inner loop's counter alone: the ring starts anew with every tile."""

    def edit(x: Editor) -> None:
        view = x.get(selector).operands[0]
        assert isinstance(view, View)
        path = x.definition(view.dims[0].start.terms[0][0])
        assert path is not None
        e = x.at(path)
        assert e.op == "rem"
        x.put(path, e.with_(operands=(_loop_counter(x, selector), e.operands[1])))

    return edit


def restart_guard(selector: str) -> Edit:
    """A `when` that asks the inner loop's counter instead of the ring's."""

    def edit(x: Editor) -> None:
        path = x.comparison(x.get(f"when({selector})").operands[0])
        assert path is not None
        e = x.at(path)
        x.put(path, e.with_(operands=(_loop_counter(x, selector), e.operands[1])))

    return edit


def arrive_instead_of_commit(x: Editor) -> None:
    """The MMA warp releases the slot with an ordinary arrival behind the MMA."""
    mma = x.get("tcgen05_mma")
    x.drop_operand("tcgen05_mma", 4)
    path = x.find("tcgen05_mma")
    x.put(path, x.at(path), Equation("barrier_arrive", (mma.operands[4],), (), (), (), mma.line))


def always_accumulate(x: Editor) -> None:
    x.set_operand("tcgen05_mma", 3, Literal(True, "bool"))


def accumulate_by_count(x: Editor) -> None:
    """The first-step flag asks the ring's counter, so that only the first tile starts from zero."""
    view = x.get("barrier_wait full").operands[0]
    assert isinstance(view, View)
    path = x.definition(view.dims[0].start.terms[0][0])
    assert path is not None
    count = x.at(path).operands[0]
    place = x.comparison(x.get("tcgen05_mma").operands[3])
    assert place is not None
    e = x.at(place)
    x.put(place, e.with_(operands=(count, e.operands[1])))


# ---- running --------------------------------------------------------------------------------------------------------
@functools.cache
def _finding(kernel: str, edit: Edit, seeds: int) -> Finding | None:
    c = case(kernel)
    editor = Editor(c.program, c.names)
    edit(editor)
    return judge(c, editor.program, seeds)


def run_sabotage(s: Sabotage | Benign, seeds: int = SEEDS) -> Finding | None:
    """What planner and simulator say about it."""
    return _finding(s.kernel, s.edit, seeds)


def verdict(s: Sabotage, finding: Finding | None) -> str:
    """'' if the finding is the right error at a right line, else what is wrong with it."""
    if finding is None:
        return "nothing found"
    if finding.cls not in s.expect:
        return f"{finding} instead of {' or '.join(s.expect)}"
    if s.at and finding.line not in s.lines():
        return f"{finding}, not at {' or '.join(s.at)}"
    if finding.cls == "Race" and len(re.findall(r"\.py:\d+", finding.message)) < 2:
        return f"{finding}, which names one of the two accesses only"
    return ""
