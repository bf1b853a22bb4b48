"""The text of a deadlock: who is stuck where, on which barrier, and what that barrier still needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import Deadlock
from .scheduler import Task

if TYPE_CHECKING:
    from .thread import Thread


def deadlock(stuck: list[Task]) -> Deadlock:
    """The error for tasks none of which can go on."""
    threads: list[Thread] = [t.owner for t in stuck]
    lines = [f"deadlock: none of {len(stuck)} unfinished threads can go on."]
    for task, thread in zip(stuck, threads, strict=True):
        assert task.waiting is not None
        equation = thread.step.equation if thread.step is not None else None
        where = f"{equation.op} at {equation.line}" if equation is not None else "its start"
        lines.append(f"- {thread.who}: {where}")
        lines += [f"    {part}" for part in task.waiting.what().split("\n")]
    # The line of the error: a thread that waits for a barrier, not one that waits for its own warps.
    first = next((t for t in threads if not t.children), threads[0])
    return Deadlock("\n".join(lines), first.step.equation.line if first.step is not None else None)
