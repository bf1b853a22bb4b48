"""One deterministic cooperative scheduler: warpgroups, warps and hardware engines are generators that take turns.

A generator yields a `Blocked` when it cannot go on and is resumed once `ready()` holds; it yields None to give others
a turn.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass
class Blocked:
    """Why a task cannot go on.  ready: whether it can now; what: the reason, worded when a report needs it; barrier: value id
    of the barrier array that it waits on, -1 for anything else."""

    ready: Callable[[], bool]
    what: Callable[[], str]
    barrier: int = -1


class Rest:
    """It could go on, but would only look again: let all others do what they can, engines, too."""


RESTING = Rest()
Turn = Blocked | Rest | None
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

    def ready(self) -> bool:
        return self.waiting is None or (isinstance(self.waiting, Blocked) and self.waiting.ready())


ENGINE_CHANCE = 0.25  # how likely an engine's turn comes while threads could go on


class Scheduler:
    """Round robin over the tasks of one cluster, in order of their creation; engines only when no thread can go on.

    So asynchronous work is done as late as it can be, and a thread that does not wait for it sees that it is not done.
    chance: any task that can go on, instead.
    on_deadlock: called with the tasks that are stuck; returns the error to raise.
    """

    def __init__(self, on_deadlock: Callable[[list[Task]], Exception], chance: random.Random | None = None) -> None:
        self.tasks: list[Task] = []
        self.on_deadlock, self.chance = on_deadlock, chance

    def add(self, steps: Steps, owner: Any = None, *, background: bool = False) -> Task:
        task = Task(steps, owner, background)
        self.tasks.append(task)
        return task

    def run(self) -> None:
        """Until every task that is not in the background has finished and every engine has run out of work."""
        turns = self._turns if self.chance is None else self._random_turn
        while True:
            while turns(background=False):
                pass
            moved = turns(background=True)
            for task in self.tasks:
                if task.waiting is RESTING:
                    task.waiting, moved = None, True
            if not moved:
                stuck = [t for t in self.tasks if not t.background]
                if stuck:
                    raise self.on_deadlock(stuck)
                return

    def _turns(self, background: bool) -> bool:
        """One turn for every task of a kind that can go on; whether there was one."""
        progress = False
        for task in list(self.tasks):
            if task.background is not background or not task.ready():
                continue
            progress = True
            self._turn(task)
        return progress

    def _random_turn(self, background: bool) -> bool:
        """A turn for some task that can go on; whether there was one."""
        assert self.chance is not None
        ready = [t for t in self.tasks if t.waiting is RESTING or t.ready()]
        threads = [t for t in ready if not t.background]
        engines = [t for t in ready if t.background]
        if not ready:
            return False
        late = threads and self.chance.random() >= ENGINE_CHANCE
        self._turn(self.chance.choice(threads if late or not engines else engines))
        return True

    def _turn(self, task: Task) -> None:
        try:
            task.waiting = next(task.steps)
        except StopIteration:
            task.finished = True
            self.tasks.remove(task)
