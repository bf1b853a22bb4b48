"""What a benchmark is made of: cells, problems, providers, their calls, and the device that they run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol


class Unsupported(Exception):
    """The provider has no kernel for the cell, or is not installed; the text says why."""


class DeviceLost(Exception):
    """The GPU or its context can no longer be used: nothing measured after this would count."""


class Device(Protocol):
    """A GPU with its clocks."""

    def now(self) -> float: ...  # the host's clock, seconds
    def mark(self) -> Any: ...  # an event in the queue of launches
    def seconds(self, begin: Any, end: Any) -> float: ...  # between two events that have passed
    def synchronize(self) -> None: ...
    def hold(self, seconds: float) -> None: ...  # keeps the GPU busy, so that the host gets ahead of it
    def rest(self) -> None: ...  # waits for the idle state from which a kernel alone is measured
    def readings(self, begin: float, end: float) -> dict[str, Any]: ...  # clock, power, temperature between two now()
    def release(self) -> None: ...  # gives back the memory of the last cell
    def describe(self) -> dict[str, Any]: ...  # the machine and the versions


@dataclasses.dataclass(frozen=True)
class Cell:
    """One shape.  data: what the benchmark needs to know of it; bytes: of global memory that must be moved (0: unknown)."""

    name: str
    flops: int
    data: Any = None
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """error: relative norm of the difference to the reference; allowed: how large it may be."""

    error: float
    allowed: float

    @property
    def right(self) -> bool:
        """A NaN is not right."""
        return self.error <= self.allowed


class Problem(Protocol):
    """Inputs of a cell, in several sets, and what the result has to be."""

    def judge(self, output: Any) -> Accuracy: ...  # of the first set


@dataclasses.dataclass
class DeviceCall:
    """enqueue(i) starts a call on the i-th set of inputs (modulo their number); first() is the result for set 0, computed
    into a poisoned buffer where the library allows it."""

    enqueue: Callable[[int], Any]
    first: Callable[[], Any]
    repeatable: Callable[[], bool] | None = None  # whether set 0 still gives the bits of first()
    host_timed = False


@dataclasses.dataclass
class HostCall:
    """For libraries outside PyTorch's stream.  run(n) starts n batches of `calls` calls and waits for them.

    overhead: seconds that a run takes without any work.
    """

    run: Callable[[int], Any]
    calls: int
    first: Callable[[], Any]
    overhead: float = 0.0
    repeatable: Callable[[], bool] | None = None
    host_timed = True


class Provider:
    """A library that can do the operation."""

    name: str
    ours = False
    host_timed = False

    def version(self) -> str:
        """Of the library."""
        return ""

    def prepare(self, cell: Cell, problem: Any) -> DeviceCall | HostCall:
        """Compile, allocate.  Raises Unsupported."""
        raise NotImplementedError

    def config(self, cell: Cell) -> dict[str, Any] | None:
        """The config that a kernel of ours runs a cell with, and where it comes from, as plain data."""
        return None


class Missing(Provider):
    """A library that is not here: a named blank in the table, and why."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why

    def prepare(self, cell: Cell, problem: Any) -> DeviceCall | HostCall:
        """Unsupported."""
        raise Unsupported(self.why)


@dataclasses.dataclass(frozen=True)
class Options:
    """How long to measure."""

    rounds: int = 40
    alone_seconds: float = 1.0
    alone_repeats: int = 7


QUICK = Options(rounds=8, alone_seconds=0.2, alone_repeats=3)


def first_line(error: BaseException) -> str:
    """Of an error's text, cut."""
    return (str(error).strip().splitlines() or [""])[0][:300]
