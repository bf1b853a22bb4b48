"""mbarriers and named barriers, counted as the hardware counts (PTX ISA 9.7.13.15 and 9.7.13.1)."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..errors import BarrierMisuse, Line
from .clocks import ORDER, RUN, Rows
from .missing_waits import BarrierInProgram, between, role_of, some

KEPT = 8  # phases of which a barrier remembers who ended them


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Who arrived, from which line, and how many hardware arrivals it made.  what: by which operation, if not barrier_arrive."""

    who: str
    line: Line | None
    count: int
    what: str = ""

    def __str__(self) -> str:
        what = f" ({self.what})" if self.what else ""
        return f"{self.who}{what}" + (f" at {self.line}" if self.line else "")


@dataclasses.dataclass(frozen=True)
class Sight:
    """A thread (by agent and clock) that has seen some number of phases, or has arrived."""

    agent: int
    clock: int
    who: str
    line: Line | None
    phase: int = 0


@dataclasses.dataclass
class MBarrier:
    """One mbarrier.

    expected: hardware arrivals that complete a phase; unit: how many of them make one of the user's.
    phase: completed phases so far; pending: arrivals still missing; tx: bytes expected and not yet landed (below zero
    when bytes landed before they were announced).
    arrivals, previous: in this phase, and in the one before; completed: in phases that nobody has waited for, the first of them.
    program: what the program does with it, for errors.
    observed: phases that somebody has waited for; loaded_phase: the last one in which a TMA copy landed, with its line.
    agent: of the copies that it counts, -1 where no clocks are kept; gathered: what arrivals of this phase hand on; clock:
    what completed phases have; sights: who has seen how many phases.
    """

    name: str
    expected: int
    unit: int = 1
    phase: int = 0
    pending: int = 0
    tx: int = 0
    observed: int = 0
    loaded_phase: int = -1
    loaded_line: Line | None = None
    arrivals: list[Arrival] = dataclasses.field(default_factory=list)
    previous: list[Arrival] = dataclasses.field(default_factory=list)
    completed: dict[int, list[Arrival]] = dataclasses.field(default_factory=dict)
    program: BarrierInProgram | None = None
    agent: int = -1
    gathered: Rows | None = None
    clock: Rows | None = None
    sights: dict[int, Sight] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = self.expected

    def arrive(self, arrival: Arrival, released: Rows | None = None) -> None:
        """Count an arrival; released: what it hands on."""
        if arrival.count > self.pending:
            raise self._too_many(arrival)
        self.pending -= arrival.count
        self.arrivals.append(arrival)
        self._gather(released)
        self._complete(arrival.line)

    def _too_many(self, arrival: Arrival) -> BarrierMisuse:
        takes, lines = self.count(self.expected), [a.line for a in self.arrivals]
        way_out = f"between the two is missing {between(self.program, arrival.who, arrival.line)}"
        if arrival.line not in lines:  # from one line they are turns of a loop, which belong to phases of their own
            both = f"Barrier(num_arrivals={self.expected // self.unit + 1})"
            way_out = f"if one wait is for both, say {both}; if not, {way_out}"
        return BarrierMisuse(
            f"{self.name}: too many arrivals. Phase {self.phase} takes {takes}, which it has{self._bytes_open()}, and it has not "
            f"ended\n  arrived: {self.describe_arrivals()}\n  arrives: {arrival}\n  {way_out}{self._made()}",
            arrival.line,
        )

    def lapped(self, who: str, line: Line | None, seen: int) -> BarrierMisuse:
        """The error for a wait, by `who` for the phase after `seen` ones, where the one behind that has ended, too."""
        first, second = self.completed.get(seen), self.completed.get(seen + 1)
        if first and second:
            ended = f"  phase {seen} ended with: {first[-1]}\n  phase {seen + 1} ended with: {second[-1]}"
            ended += f"\n  between the two is missing {between(self.program, second[-1].who, second[-1].line)}"
        else:
            ended = f"  phase {self.phase - 1} ended with: {self.describe_arrivals(previous=True)}"
        return BarrierMisuse(
            f"{self.name}: {who} waits for phase {seen}, but {self.phase} phases have completed: it was lapped. A wait sees the "
            "parity of one phase only, so on the GPU this one would hang or pass at the wrong time; nobody may arrive for phase "
            f"{seen + 1} before every waiter has seen phase {seen}\n{ended}{self._made()}",
            line,
        )

    def no_wait(self) -> str:
        """For the end of the kernel: which waits there are, none of which was for the last phase."""
        waits = self.program.waits if self.program is not None else []
        if not waits:
            return ": no line of the kernel waits for it. Put barrier_wait behind the copy"
        seen = f"of {self.phase} phases {self.observed} were waited for"
        return f". Missing is one more wait behind it: {seen}, by {some(waits)}"

    def _made(self) -> str:
        return f"\n  {self.name.partition(' of ')[0]} is {self.program.made}" if self.program is not None else ""

    def expect_tx(self, nbytes: int) -> None:
        self.tx += nbytes
        self._complete(None)

    def complete_tx(self, nbytes: int, released: Rows | None = None, line: Line | None = None) -> None:
        """Bytes have landed; released: what the copy hands on."""
        self.tx -= nbytes
        self._gather(released)
        self._complete(line)

    def _gather(self, released: Rows | None) -> None:
        if released is None:
            return
        if self.gathered is None:
            self.gathered = released.copy()
        else:
            np.maximum(self.gathered, released, out=self.gathered)

    def _complete(self, line: Line | None) -> None:
        if self.pending == 0 and self.tx == 0:
            if self.gathered is not None:
                self._check_seen(self.gathered, line)
                if self.clock is not None:
                    np.maximum(self.gathered, self.clock, out=self.gathered)
                self.clock, self.gathered = self.gathered, None
                self.clock[ORDER, self.agent] = self.phase + 1
            if len(self.completed) < KEPT:
                self.completed[self.phase] = self.arrivals
            self.phase += 1
            self.pending = self.expected
            self.previous, self.arrivals = self.arrivals, []

    def _check_seen(self, gathered: Rows, line: Line | None) -> None:
        """Everybody who waited for the phase before this one has seen it: by order, not by luck (PTX ISA 9.7.13.15.4)."""
        for sight in self.sights.values():
            if sight.phase == self.phase and gathered[RUN, sight.agent] < sight.clock:
                who = role_of(self.arrivals[-1].who) if self.arrivals else "whoever arrives"
                raise BarrierMisuse(
                    f"{self.name}: phase {self.phase} can end before {sight.who} has seen the end of phase "
                    f"{self.phase - 1}, for which it waits at {sight.line}: no arrival of phase {self.phase} comes after "
                    "that wait. A wait sees the parity of one phase only, so it would hang or pass at the wrong time\n"
                    f"  phase {self.phase - 1} ended with: {self.describe_arrivals(previous=True)}\n"
                    f"  phase {self.phase} ends with: {self.describe_arrivals()}\n"
                    f"  between the two is missing the wait of {sight.who} at {sight.line}, which nothing makes {who} wait for. "
                    f"Let {role_of(sight.who)} barrier_arrive on another barrier behind it, and {who} barrier_wait for that one "
                    f"before it arrives{self._made()}",
                    line,
                )

    def see(self, sight: Sight) -> None:
        """A thread has waited for all phases before `sight.phase`."""
        self.observed = max(self.observed, sight.phase)
        for phase in [p for p in self.completed if p < sight.phase - 1]:
            del self.completed[phase]
        self.sights[sight.agent] = sight

    def _bytes_open(self) -> str:
        return f" (it still waits for {self.tx} bytes)" if self.tx else ""

    def count(self, hardware: int) -> str:
        """A number of hardware arrivals in the user's unit."""
        whole, rest = divmod(hardware, self.unit)
        number = f"{whole}" if not rest else f"{hardware / self.unit:g}"
        return f"{number} arrival{'' if number == '1' else 's'}"

    def describe_arrivals(self, previous: bool = False) -> str:
        """Who has arrived in this phase, or had in the one before."""
        arrivals = self.previous if previous else self.arrivals
        return "; ".join(map(str, arrivals)) or "none"

    def missing(self) -> str:
        """What the current phase still needs."""
        parts = []
        if self.pending:
            parts.append(f"{self.count(self.pending)} of {self.expected // self.unit}")
        if self.tx > 0:
            parts.append(f"{self.tx} bytes")
        if self.tx < 0:
            parts.append(f"an announcement of {-self.tx} bytes that landed without one")
        return " and ".join(parts) or "nothing"


@dataclasses.dataclass
class NamedBarrier:
    """A hardware barrier of the block.

    arrived: warpgroups in this generation, which is the count of completions so far; gathered: what their arrivals hand on;
    clocks: that of completed generations; sights: who arrived in each generation.
    """

    name: str
    threads: int
    generation: int = 0
    arrived: list[str] = dataclasses.field(default_factory=list)
    gathered: Rows | None = None
    clocks: dict[int, Rows] = dataclasses.field(default_factory=dict)
    sights: dict[int, list[Sight]] = dataclasses.field(default_factory=dict)

    def arrive(self, who: str, line: Line | None, released: Rows | None = None, agent: int = -1, clock: int = 0) -> int:
        """Count a warpgroup in; returns the generation that it belongs to."""
        if who in self.arrived:
            raise BarrierMisuse(
                f"{self.name}: {who} arrives twice before the barrier has completed; so far: {', '.join(self.arrived)}",
                line,
            )
        mine = self.generation
        if released is not None:
            self._check_completed(who, line, released, agent)
        self.arrived.append(who)
        if released is not None:
            self.sights.setdefault(mine, []).append(Sight(agent, clock, who, line, mine))
            self.gathered = released if self.gathered is None else np.maximum(self.gathered, released)
        if 128 * len(self.arrived) == self.threads:
            if self.gathered is not None:
                self.clocks[mine], self.gathered = self.gathered, None
                for old in [g for g in self.clocks if g < mine - 4]:
                    del self.clocks[old]
                    self.sights.pop(old, None)
            self.generation += 1
            self.arrived = []
        return mine

    def _check_completed(self, who: str, line: Line | None, released: Rows, agent: int) -> None:
        """Whoever arrives again knows that its last generation has completed (PTX ISA 9.7.13.1)."""
        took_part = [g for g, sights in self.sights.items() if any(s.agent == agent for s in sights)]
        for other in self.sights[max(took_part)] if took_part else ():
            if released[RUN, other.agent] < other.clock:
                raise BarrierMisuse(
                    f"{self.name}: {who} may arrive twice before {other.who} has come once: nothing orders this arrival "
                    f"after that of {other.who} at {other.line}. Let it wait (named_barrier_sync, or another barrier) first",
                    line,
                )
