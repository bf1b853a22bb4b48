"""Which wait is missing where a barrier is misused: the lines that wait for it, and what would make them come in time."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from ..errors import Line
from ..plan.model import Plan, Role, Step
from ..program import Equation, walk

WAITING = ("barrier_wait", "barrier_test")
SHOWN = 4  # lines that wait for one barrier


@dataclasses.dataclass(frozen=True)
class WaitLine:
    """A line of the program that waits for a barrier, and whose it is."""

    role: str
    op: str
    line: Line | None

    def __str__(self) -> str:
        return f"{self.op} at {self.line} ({self.role})"


@dataclasses.dataclass(frozen=True)
class BarrierInProgram:
    """One slot of a barrier array as the program has it.  id: of its Ref."""

    plan: Plan
    id: int
    slot: int

    @functools.cached_property
    def waits(self) -> list[WaitLine]:
        """Every line that waits for it, in the order of the program."""

        def visit(role: Role, steps: Sequence[Step]) -> Iterator[WaitLine]:
            for s in steps:
                if s.equation.op in WAITING and s.data.array == self.id and s.data.slot.const in self._may_be(s):
                    yield WaitLine(role.name, s.equation.op, s.equation.line)
                for r in s.data if s.equation.op == "warp_map" else ():
                    yield from visit(r, r.body.steps)
                for region in s.regions:
                    yield from visit(role, region.steps)

        return list(dict.fromkeys(w for role in self.plan.roles for w in visit(role, role.body.steps)))

    def _may_be(self, s: Step) -> tuple[int, ...]:
        slot = s.data.slot
        return (self.slot,) if slot.static else (slot.const,)

    @property
    def made(self) -> str:
        """Where the user has asked for it."""
        program = self.plan.program
        if any(v.id == self.id for v in program.scratch):
            return f"a scratch argument of {program.name}, the kernel at {program.line}"
        allocated: Equation | None = next(
            (e for e in walk(program.body) for r in e.regions if any(v.id == self.id for v in r.inputs)), None
        )
        return f"allocated at {allocated.line}" if allocated is not None else f"of the kernel {program.name}"


def between(program: BarrierInProgram | None, who: str, line: Line | None) -> str:
    """Which wait ought to come before the arrival of `who` (a thread of the simulator) at `line`, and what makes it do so."""
    waits = program.waits if program is not None else []
    role = role_of(who)
    own = [w for w in waits if w.role == role]
    others = [w for w in waits if w not in own]
    if not waits:
        return f"a wait for it, of which the kernel has none. Put barrier_wait before the arrival at {line}"
    if not others:
        return f"a wait for it: {some(own)} is elsewhere. Put one before the arrival at {line}"
    return (
        f"{some(others)}, which nothing makes {role} wait for. Let {others[0].role} barrier_arrive on another barrier behind "
        f"it, and {role} barrier_wait for that one before it arrives at {line}"
    )


def role_of(who: str) -> str:
    """The role of a thread, of which `Thread.who` says more."""
    found = re.search(r"(?:^|, )(\S+), warpgroup \d+", who)
    return found[1] if found else who


def some(waits: Sequence[WaitLine]) -> str:
    """The first of them, for messages."""
    more = f" or {len(waits) - SHOWN} others" if len(waits) > SHOWN else ""
    return " or ".join(str(w) for w in waits[:SHOWN]) + more
