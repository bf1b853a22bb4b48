"""mbarriers and named barriers, counted as the hardware counts (PTX ISA 9.7.13.15 and 9.7.13.1)."""

from __future__ import annotations

import dataclasses

from ..errors import BarrierMisuse, Line


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Who arrived, from which line, and how many hardware arrivals it made."""

    who: str
    line: Line | None
    count: int


@dataclasses.dataclass
class MBarrier:
    """One mbarrier.

    expected: hardware arrivals that complete a phase; unit: how many of them make one of the user's.
    phase: completed phases so far; pending: arrivals still missing; tx: bytes expected and not yet landed (below zero
    when bytes landed before they were announced).
    observed: phases that somebody has waited for; loaded_phase: the last one in which a TMA copy landed, with its line.
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

    def __post_init__(self) -> None:
        self.pending = self.expected

    def arrive(self, arrival: Arrival) -> None:
        if arrival.count > self.pending:
            raise BarrierMisuse(
                f"{self.name}: too many arrivals. Phase {self.phase} takes {self.count(self.expected)}, here already"
                f"{self._bytes_open()}, and {arrival.who} arrives again; so far: {self.describe_arrivals()}",
                arrival.line,
            )
        self.pending -= arrival.count
        self.arrivals.append(arrival)
        self._complete()

    def expect_tx(self, nbytes: int) -> None:
        self.tx += nbytes
        self._complete()

    def complete_tx(self, nbytes: int) -> None:
        self.tx -= nbytes
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            self.arrivals = []

    def _bytes_open(self) -> str:
        return f" (it still waits for {self.tx} bytes)" if self.tx else ""

    def count(self, hardware: int) -> str:
        """A number of hardware arrivals in the user's unit."""
        whole, rest = divmod(hardware, self.unit)
        number = f"{whole}" if not rest else f"{hardware / self.unit:g}"
        return f"{number} arrival{'' if number == '1' else 's'}"

    def describe_arrivals(self) -> str:
        return "; ".join(f"{a.who}" + (f" at {a.line}" if a.line else "") for a in self.arrivals) or "none"

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
    """A hardware barrier of the block.  arrived: warpgroups in this generation, the count of completions so far."""

    name: str
    threads: int
    generation: int = 0
    arrived: list[str] = dataclasses.field(default_factory=list)

    def arrive(self, who: str, line: Line | None) -> int:
        """Count a warpgroup in; returns the generation that it belongs to."""
        if who in self.arrived:
            raise BarrierMisuse(
                f"{self.name}: {who} arrives twice before the barrier has completed; so far: {', '.join(self.arrived)}",
                line,
            )
        mine = self.generation
        self.arrived.append(who)
        if 128 * len(self.arrived) == self.threads:
            self.generation += 1
            self.arrived = []
        return mine
