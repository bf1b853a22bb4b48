"""What the search and its timers say to each other.  No JAX here: a search with another timer runs without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What came of one config.  ok: right, and timed if it has seconds; wrong: the result is not right; refused: it does not
    compile or run."""

    status: Literal["ok", "wrong", "refused"]
    seconds: float | None = None
    error: float | None = None
    allowed: float | None = None
    message: str = ""


class Timer(Protocol):
    """What the search asks about the configs of one workload."""

    def check(self, config: Any) -> Measurement:
        """Compile and judge; status ok has no seconds yet."""

    def samples(self, config: Any, repeats: int, stop_above: float) -> list[float]:
        """Seconds of a call of a config that was checked, repeatedly; the first alone if it is above `stop_above`."""

    def interleaved(self, configs: Sequence[Any], rounds: int) -> list[list[float]]:
        """Seconds of each config, round by round, the configs taking turns."""

    def forget(self, config: Any) -> None:
        """It is out of the race: free what it holds."""
