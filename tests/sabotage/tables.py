"""What the tables of sabotages are made of: classes of findings that are expected, and the two lists."""

from __future__ import annotations

from collections.abc import Callable

from .rewrite import Edit
from .sabotages import Benign, Sabotage

RACE = ("Race",)
UNREAD = ("Race", "UninitializedRead")  # what is read before it is there may never have been written
OVERRUN = ("Race", "BarrierMisuse")  # a producer that does not wait overwrites data and announces too many copies
DEADLOCK = ("Deadlock",)
NEVER = ("BarrierNeverCompletes",)  # nothing at all arrives: refused by the planner
MISUSE = ("BarrierMisuse",)
LEAK = ("Leak",)
GROWS = ("InFlightError",)  # the planner sees that products pile up
SABOTAGES: list[Sabotage] = []
BENIGN: list[Benign] = []


def of(kernel: str) -> Callable[..., None]:
    """sabotage(name, rule, edit, classes, *lines) for one kernel."""

    def add(name: str, rule: str, edit: Edit, expect: tuple[str, ...], *at: str) -> None:
        SABOTAGES.append(Sabotage(kernel, name, rule, edit, expect, at))

    return add


def fine(kernel: str, name: str, why: str, edit: Edit) -> None:
    BENIGN.append(Benign(kernel, name, why, edit))
