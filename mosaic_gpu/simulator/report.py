"""The text of a deadlock: who is stuck where, on which barrier, what that barrier still needs, and who could give it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import Deadlock, Line
from ..plan.arrivals import ARRIVING
from ..plan.model import Plan, Role, Step
from .scheduler import Blocked, Task

if TYPE_CHECKING:
    from .thread import Thread

SHOWN = 4  # lines with an arrival, for one barrier
OTHERS: dict[str, Callable[[Step], tuple[Any, ...]]] = {  # besides those on mbarriers
    "named_barrier_arrive": lambda s: (s.data,),
    "named_barrier_sync": lambda s: (s.data,),
    "semaphore_signal": lambda s: tuple(s.data),
}


def deadlock(stuck: list[Task], waiting: int = 0, at_once: int = 0) -> Deadlock:
    """The error for tasks none of which can go on.

    waiting: clusters that are not running yet, where only so many run at once.
    """
    threads: list[Thread] = [t.owner for t in stuck]
    lines = [f"deadlock: none of {len(stuck)} unfinished threads can go on."]
    waits_for: dict[int, list[int]] = {}
    for i, (task, thread) in enumerate(zip(stuck, threads, strict=True)):
        assert isinstance(task.waiting, Blocked)
        lines.append(f"- {thread.who}: {_where(thread)}")
        lines += [f"    {part}" for part in task.waiting.what().split("\n")]
        waits_for[i] = []
        if task.waiting.barrier >= 0:
            text, waits_for[i] = _sources(thread, task.waiting.barrier, threads)
            lines += [f"    {part}" for part in text]
    if waiting:
        lines.append(
            f"{waiting} clusters more have not begun: {at_once} run at once, a block on each multiprocessor, and those must not "
            "wait for others. Use a smaller grid in which each block does several blocks' work"
        )
    circle = _circle(waits_for)
    if circle:
        lines.append("waits for each other: " + " -> ".join(threads[i].who for i in (*circle, circle[0])))
    # The line of the error: a thread that waits for a barrier, not one that waits for its own warps.
    first = next((t for t in threads if not t.children), threads[0])
    return Deadlock("\n".join(lines), first.step.equation.line if first.step is not None else None)


def _where(thread: Thread) -> str:
    equation = thread.step.equation if thread.step is not None else None
    return f"{equation.op} at {equation.line}" if equation is not None else "its start"


def _sources(thread: Thread, barrier: int, threads: list[Thread]) -> tuple[list[str], list[int]]:
    """Where the program arrives on a barrier, with what has become of that role; and which stuck threads could arrive."""
    out: list[str] = []
    others: list[int] = []
    named = barrier in thread.plan.named_barriers
    for role, line, op in arrivals(thread.plan, barrier):
        here = [i for i, t in enumerate(threads) if t.role is role and (t.block is thread.block or not named)]
        here = [i for i in here if threads[i] is not thread or op != "named_barrier_sync"]
        if op == "named_barrier_sync" and not here and role is thread.role and len(role.indices) == 1:
            continue
        state = f"stuck, see {threads[here[0]].who}" if here else "has ended"
        if (
            op == "semaphore_signal" and len(here) > 1
        ):  # which block's it would be, the slot decides: no edge of a circle
            state += f" and {len(here) - 1} more"
        else:
            others += [i for i in here if i not in others]
        if len(out) < SHOWN:
            out.append(f"could come from {op} at {line} ({role.name}: {state})")
    return out or ["no line of the kernel arrives on it"], others


def arrivals(plan: Plan, barrier: int) -> list[tuple[Role, Line | None, str]]:
    """Every line that arrives on a barrier array, by role."""

    def visit(role: Role, steps: tuple[Step, ...]) -> Iterator[tuple[Role, Line | None, str]]:
        for s in steps:
            op = s.equation.op
            uses = OTHERS[op](s) if op in OTHERS else (ARRIVING[op](s),) if op in ARRIVING else ()
            if any(use is not None and use.array == barrier for use in uses):
                yield role, s.equation.line, op
            if op == "warp_map":
                for r in s.data:
                    yield from visit(r, r.body.steps)
            for region in s.regions:
                yield from visit(role, region.steps)

    found = [x for role in plan.roles for x in visit(role, role.body.steps)]
    return [x for i, x in enumerate(found) if not any(y[0] is x[0] and y[1:] == x[1:] for y in found[:i])]


def _circle(waits_for: dict[int, list[int]]) -> list[int]:
    """Threads of which each waits for the next, and the last for the first."""
    for start in waits_for:
        path = [start]
        while True:
            following = next((j for j in waits_for[path[-1]] if j != path[-1]), None)
            if following is None:
                break
            if following in path:
                return path[path.index(following) :]
            path.append(following)
    return []
