"""What a simulation noticed that is no error: slow accesses, copies of nothing, outputs that nobody wrote."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

from ..collecting import calling
from ..errors import Line
from ..program import Program


class UnwrittenOutput(UserWarning):
    """A kernel left elements of an output unwritten.  In the simulator they are NaN (integers: bytes 0xAB)."""


_said: collections.defaultdict[str, dict[Any, Any]] = collections.defaultdict(
    dict
)  # Python's own notes of what was shown
UNITS = {"smem": "wavefronts", "gmem": "sectors"}


@dataclasses.dataclass
class Traffic:
    """What the ordinary loads or stores of one line in one buffer cost.

    op: 'load' or 'store'; memory: 'smem' or 'gmem'; instructions: of single warps.
    actual, ideal: wavefronts (smem; each of the 32 banks gives one 4-byte word in one) or sectors (gmem; 32 bytes), as they
    are, and as few as the same bytes can take.
    """

    line: Line | None
    op: str
    memory: str
    place: str
    instructions: int = 0
    actual: int = 0
    ideal: int = 0

    @property
    def factor(self) -> float:
        """How many times the ideal."""
        return self.actual / self.ideal if self.ideal else 1.0

    def __str__(self) -> str:
        what = "bank conflicts" if self.memory == "smem" else "uncoalesced"
        return (
            f"{what}: each {self.op} of {self.memory} {self.place} takes {self.factor:.3g} times the {UNITS[self.memory]} "
            f"that it must ({self.actual} instead of {self.ideal})"
        )


@dataclasses.dataclass
class Outside:
    """What lies outside of an array, which is legal: zeros come in and nothing goes out.

    op: a copy by TMA all of which is outside, or 'load by index arrays' and 'store by index arrays'; count: of such copies, or of
    elements whose index is beyond both ends.
    """

    line: Line | None
    op: str
    array: str
    count: int = 0

    def __str__(self) -> str:
        if self.op.endswith("index arrays"):
            what = "read as zero" if self.op.startswith("load") else "are not written"
            return f"outside: {self.count} elements of a {self.op} have an index outside {self.array} and {what}"
        what = "fills the tile with zeros" if self.op == "copy_gmem_to_smem" else "writes nothing"
        return f"outside: {self.op} lies wholly outside {self.array} ({self.count} times) and {what}"


@dataclasses.dataclass
class Unwritten:
    """An output of which `count` elements of `size` were never written."""

    output: str
    count: int
    size: int

    def __str__(self) -> str:
        what = "all" if self.count == self.size else f"{self.count} of {self.size}"
        return f"unwritten: {what} elements of {self.output}; on a GPU they hold what was in memory before"

    def warn(self, program: Program) -> None:
        """A warning at the user's line that calls the kernel; where no frame of the user's is left, at the kernel's own."""
        at = calling() or program.line or Line("unknown", 0)
        text = f"{program.name}: {self}" + (
            f" (the kernel is at {program.line})" if program.line not in (None, at) else ""
        )
        warnings.warn_explicit(text, UnwrittenOutput, at.file, at.number, registry=_said[at.file])


class Report:
    """To be given as `SimulatorParams(report=...)`: every simulation with it adds what it noticed.

    traffic: of every line with an ordinary load or store of an array; outside, unwritten: where there are any.
    """

    def __init__(self) -> None:
        self.traffic: dict[tuple[Any, ...], Traffic] = {}
        self.outside: dict[tuple[Any, ...], Outside] = {}
        self.unwritten: dict[str, Unwritten] = {}

    def add_traffic(self, line: Line | None, op: str, memory: str, place: str, cost: tuple[int, int, int]) -> None:
        """cost: instructions, actual and ideal of one access by a warpgroup."""
        found = self.traffic.setdefault((line, op, memory, place), Traffic(line, op, memory, place))
        found.instructions += cost[0]
        found.actual += cost[1]
        found.ideal += cost[2]

    def add_outside(self, line: Line | None, op: str, array: str, count: int = 1) -> None:
        """A copy, or so many elements, outside an array."""
        self.outside.setdefault((line, op, array), Outside(line, op, array)).count += count

    def merge(self, other: Report) -> None:
        """Add what another simulation noticed."""
        for t in other.traffic.values():
            self.add_traffic(t.line, t.op, t.memory, t.place, (t.instructions, t.actual, t.ideal))
        for o in other.outside.values():
            self.add_outside(o.line, o.op, o.array, o.count)
        self.unwritten.update(other.unwritten)

    def slow(self) -> list[Traffic]:
        """Accesses that cost more than they must, the worst first."""
        return sorted((t for t in self.traffic.values() if t.actual > t.ideal), key=lambda t: t.ideal - t.actual)

    def remarks(self) -> Iterator[Traffic | Outside | Unwritten]:
        """Everything that is worth a look."""
        yield from self.unwritten.values()
        yield from self.outside.values()
        yield from self.slow()

    def to_json(self) -> dict[str, Any]:
        """As plain data."""

        def plain(x: Any) -> dict[str, Any]:
            data = dataclasses.asdict(x)
            if "line" in data:
                data["file"], data["line"] = (x.line.file, x.line.number) if x.line else (None, None)
            return data

        return {
            "traffic": [{**plain(t), "factor": t.factor} for t in self.traffic.values()],
            "outside": [plain(o) for o in self.outside.values()],
            "unwritten": [plain(u) for u in self.unwritten.values()],
        }
