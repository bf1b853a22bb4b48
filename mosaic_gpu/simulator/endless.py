"""Loops that never end: `while_loop`s whose values come round again, and threads that run for very long.

A loop that starts an iteration with values which it has had before, and has done nothing since but compute and read, does
the same for ever unless memory that it reads changes.  So it waits for that, as for a barrier: if nobody else can go on, it
is a deadlock.  That is a proof.  A counter that nobody stops only runs into `SimulatorParams.max_steps`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import Deadlock
from ..plan.model import Block, Step
from ..program import refs_of
from .memory import Array
from .scheduler import Blocked, Steps

if TYPE_CHECKING:
    from .core import Core


def _walk(body: Block) -> Iterator[Step]:
    for step in body.steps:
        yield step
        for region in step.regions:
            yield from _walk(region)


def _only_reads(step: Step) -> bool:
    """Whether it changes nothing that others, or its own next iteration, could see."""
    e = step.equation
    if step.regions:  # loops, conditions, run_scoped; their steps are looked at one by one
        return e.op != "warp_map"
    return e.op == "delay" or (bool(e.results) and e.op != "swap")


def _reads(step: Step) -> bool:
    """Whether others can change what it makes: it looks into memory."""
    return bool(step.equation.results) and any(True for _ in refs_of(step.equation))


class Loop:
    """One run of a `while_loop`, watched."""

    def __init__(self, thread: Core, step: Step) -> None:
        self.thread, self.step = thread, step
        steps = [s for region in step.regions for s in _walk(region)]
        self.harmless = all(map(_only_reads, steps))
        self.reads = any(map(_reads, steps))
        self.turns, self.kept_at = 0, 1
        self.kept: list[bytes] | None = None
        self.memory: object = None

    def turn(self, values: Sequence[Array]) -> Steps:
        """An iteration starts with these values.  They are compared with those of iteration 1, 2, 4, 8, ..."""
        self.turns += 1
        if not self.harmless:
            return
        now = [x.tobytes() for x in values]
        changes = self.thread.block.changes
        if now == self.kept and changes() != self.memory:
            self.memory = changes()  # what it reads may be different now
        elif now == self.kept:
            why = (
                f"its while_loop does the same for ever: iteration {self.turns} starts with the values of iteration "
                f"{self.kept_at}, and nothing that it does in between changes anything"
            )
            if not self.reads:
                raise Deadlock(f"endless loop: {self.thread.who}: {why}", self.step.equation.line)
            before = self.memory
            self.thread.step = self.step
            yield Blocked(
                lambda: changes() != before, functools.partial(str, f"{why}; only a write by somebody else can end it")
            )
            self.memory = changes()
        if self.turns == 2 * self.kept_at or self.kept is None:
            self.kept_at, self.kept, self.memory = self.turns, now, changes()


def check_steps(thread: Core, limit: int) -> None:
    """The error for a thread that has run more steps than `max_steps`."""
    if thread.steps_run <= limit:
        return
    raise Deadlock(
        f"no end in sight: {thread.who} has run {thread.steps_run} steps. If its loops do end, raise the limit: "
        f"SimulatorParams(max_steps={max(10 * limit, 2 * thread.steps_run)})",
        thread.line,
    )
