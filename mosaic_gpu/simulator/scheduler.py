"""One deterministic cooperative scheduler: warpgroups, warps and hardware engines are generators that take turns.

A generator yields a `Blocked` when it cannot go on and is resumed once `ready()` holds; it yields None to give others
a turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass
class Blocked:
    """Why a task cannot go on.  ready: whether it can now; what: the reason, worded when a report needs it."""

    ready: Callable[[], bool]
    what: Callable[[], str]


Turn = Blocked | None
Steps = Iterator[Turn]


@dataclasses.dataclass(eq=False)
class Task:
    """A generator and what it waits for.

    owner: whom it runs (a `Thread`; an engine has None).  background: an engine that serves others; it never finishes
    and may wait for ever.
    """

    steps: Steps
    owner: Any = None
    background: bool = False
    waiting: Turn = None
    finished: bool = False


class Scheduler:
    """Round robin over the tasks of one cluster, in order of their creation.

    on_deadlock: called with the tasks that are stuck; returns the error to raise.
    """

    def __init__(self, on_deadlock: Callable[[list[Task]], Exception]) -> None:
        self.tasks: list[Task] = []
        self.on_deadlock = on_deadlock

    def add(self, steps: Steps, owner: Any = None, *, background: bool = False) -> Task:
        task = Task(steps, owner, background)
        self.tasks.append(task)
        return task

    def run(self) -> None:
        """Until every task that is not in the background has finished and every engine has run out of work."""
        while True:
            progress = False
            for task in list(self.tasks):
                if task.waiting is not None and not task.waiting.ready():
                    continue
                progress = True
                try:
                    task.waiting = next(task.steps)
                except StopIteration:
                    task.finished = True
                    self.tasks.remove(task)
            stuck = [t for t in self.tasks if not t.background]
            if not progress:
                if stuck:
                    raise self.on_deadlock(stuck)
                return
