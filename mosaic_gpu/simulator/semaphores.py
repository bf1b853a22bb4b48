"""Semaphores: which signals a wait can be sure of, and blocks of a whole grid that run at the same time.

A counter is added to atomically, so a wait that finds it high enough comes after every signal that it counts (PTX ISA 8.10,
observation order).  Which those are is a matter of timing where other signals could have made up for one of them: a wait
hands on what a signaller has done only if the counter cannot be high enough without that signal and what comes after it.
This is judged by the signals made until the wait; other orders of events show others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OutOfBounds
from ..ops.semaphores import SemaphoreUse
from .clocks import RUN, Rows
from .memory import Array
from .scheduler import RESTING, Steps

if TYPE_CHECKING:
    from .thread import Thread


@dataclasses.dataclass
class Signal:
    """agent, clock: of the signaller, rows: what it hands on; others: how much the counter can be without it."""

    agent: int
    clock: int
    rows: Rows
    others: int


class Semaphore:
    """What one counter hands on.  taken: (agent, clock, how much) of the waits that took something off it."""

    def __init__(self) -> None:
        self.signals: list[Signal] = []
        self.taken: list[tuple[int, int, int]] = []
        self.total = 0

    def signal(self, agent: int, clock: int, rows: Rows, inc: int) -> None:
        inc = max(inc, 0)
        for s in self.signals:
            if rows[RUN, s.agent] < s.clock:  # this one may come first
                s.others += inc
        self.signals.append(Signal(agent, clock, rows, self.total))
        self.total += inc

    def add(self, inc: int) -> None:
        """What hands nothing on: any wait may have been satisfied by it in a signal's place."""
        for s in self.signals:
            s.others += max(inc, 0)
        self.total += max(inc, 0)

    def acquired(self, value: int, agent: int, known: Rows) -> Rows | None:
        """What a wait for `value` by an agent who knows `known` takes over."""
        needed = value + sum(n for who, clock, n in self.taken if who == agent or known[RUN, who] >= clock)
        sure = [s.rows for s in self.signals if s.others < needed]
        return np.maximum.reduce(sure) if sure else None


def _place(sim: Thread, use: SemaphoreUse) -> tuple[Array, int, str]:
    """(all counters of an array, which one, what reports call it)."""
    array = sim.block.arrays[use.input]
    index = tuple(sim.evaluate(i) for i in use.index)
    name = f"semaphore {array.name}" + (f"[{', '.join(map(str, index))}]" if index else "")
    if any(not 0 <= i < n for i, n in zip(index, array.data.shape, strict=True)):
        raise OutOfBounds(f"{name} of an array of shape {array.data.shape}")
    return array.data.reshape(-1), int(np.ravel_multi_index(index, array.data.shape)) if index else 0, name


def _semaphore(sim: Thread, use: SemaphoreUse, at: int) -> Semaphore:
    return sim.block.cluster.machine.semaphores.setdefault((use.input, at), Semaphore())


def signal(sim: Thread, uses: Sequence[SemaphoreUse], increments: Sequence[int]) -> None:
    agent, clock, rows = 0, 0, None
    if sim.hazards is not None:
        sim.hazards.meet()
        agent, clock = sim.hazards.clock.agent, sim.hazards.clock.now
        rows = sim.hazards.clock.release()
    for use, inc in zip(uses, increments, strict=True):
        counters, at, _ = _place(sim, use)
        counters[at] += np.int32(inc)
        sim.block.arrays[use.input].changes += 1
        if rows is not None:
            _semaphore(sim, use, at).signal(agent, clock, rows, inc)


def wait(sim: Thread, use: SemaphoreUse, value: int, decrement: bool) -> Steps:
    counters, at, name = _place(sim, use)
    from .thread import until

    yield from until(
        lambda: bool(counters[at] >= value), lambda: f"waits until {name} is {value}; it is {counters[at]}", use.array
    )
    if sim.hazards is not None:
        clock = sim.hazards.clock
        semaphore = _semaphore(sim, use, at)
        rows = semaphore.acquired(value, clock.agent, clock.known())
        if rows is not None:
            clock.acquire(rows)
        if decrement:
            semaphore.taken.append((clock.agent, clock.now, value))
            clock.release()  # what follows has another clock
        sim.hazards.meet()
    if decrement:
        counters[at] -= np.int32(value)
        sim.block.arrays[use.input].changes += 1


def read(sim: Thread, use: SemaphoreUse) -> Steps:
    counters, at, _ = _place(sim, use)
    assert sim.step is not None
    sim.write(sim.step.equation.results[0], np.int32(counters[at]))
    yield RESTING


def fetch_add(sim: Thread, use: SemaphoreUse, inc: int) -> Steps:
    counters, at, _ = _place(sim, use)
    assert sim.step is not None
    sim.write(sim.step.equation.results[0], np.int32(counters[at]))
    counters[at] += np.int32(inc)
    sim.block.arrays[use.input].changes += 1
    if sim.hazards is not None:
        _semaphore(sim, use, at).add(inc)
    yield RESTING
