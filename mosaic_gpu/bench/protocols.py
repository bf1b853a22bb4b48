"""The two protocols of timing: interleaved and alone.

Interleaved: many rounds in one of which every provider has a turn of a few launches, so that all meet the same clocks and
temperatures.  Alone: each by itself for about a second from idle, so that nobody profits or suffers from the power that
others draw.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .model import Device, DeviceCall, HostCall

L2_BYTES = 60_000_000
MOST_SETS = 32
WARM_UP_ROUNDS = 3
TURN_LAUNCHES = 3
HOST_SECONDS = 0.03  # of a turn that the host's clock measures
LONG_TURN = 32  # launches of a turn of the alone protocol, where the host is slower than the GPU


def sets_for(size: int) -> int:
    """How many sets of inputs of so many bytes exceed twice the second-level cache; at least two."""
    return min(max(2, 2 * L2_BYTES // max(size, 1) + 1), MOST_SETS)


@dataclasses.dataclass
class Timed:
    """A call with what calibration found.  seconds: of a call, roughly; enqueue: host seconds to start one."""

    call: Any
    seconds: float = 0.0
    enqueue: float = 0.0
    loops: int = 1


class Session:
    """Measures the prepared calls of one cell."""

    def __init__(self, device: Device, calls: Mapping[str, DeviceCall | HostCall]) -> None:
        self.device = device
        self.sets: Iterator[int] = itertools.count()  # goes on across providers: none finds its inputs in L2
        self.timed = {name: self._calibrate(call) for name, call in calls.items()}
        ours = [t for t in self.timed.values() if not t.call.host_timed]
        # The same for all: where one library's host code is slower than the kernels, everybody gets the head start.
        self.host_bound = any(t.enqueue > 0.8 * t.seconds for t in ours)
        self.lead = 1.5 * max((t.enqueue for t in ours), default=0.0)

    def _calibrate(self, call: Any) -> Timed:
        device = self.device
        if call.host_timed:
            call.run(1)  # compiles, perhaps
            device.synchronize()
            begin = device.now()
            call.run(1)
            batch = max(device.now() - begin, 1e-9)
            # Long enough, and so long that what a run costs without work stays under 1 %.
            loops = math.ceil(max(HOST_SECONDS, 100 * call.overhead) / batch)
            return Timed(call, batch / call.calls, 0.0, loops)
        for _ in range(2):
            call.enqueue(next(self.sets))
        device.synchronize()
        begin = device.now()
        for _ in range(TURN_LAUNCHES):
            call.enqueue(next(self.sets))
        enqueue = (device.now() - begin) / TURN_LAUNCHES
        device.synchronize()
        timed = Timed(call, 0.0, enqueue)
        marks = self._launch(timed, TURN_LAUNCHES, 1.5 * enqueue * (TURN_LAUNCHES + 1))
        device.synchronize()
        timed.seconds = max(device.seconds(*marks), 1e-9) / TURN_LAUNCHES
        return timed

    def _launch(self, timed: Timed, launches: int, hold: float) -> tuple[Any, Any]:
        """Enqueue some calls between two events, after one that is not counted: it separates them from what ran before."""
        if hold:
            self.device.hold(hold)
        timed.call.enqueue(next(self.sets))
        begin = self.device.mark()
        for _ in range(launches):
            timed.call.enqueue(next(self.sets))
        return begin, self.device.mark()

    def _by_host(self, timed: Timed, loops: int) -> float:
        self.device.synchronize()
        begin = self.device.now()
        timed.call.run(loops)
        return float((self.device.now() - begin) / (loops * timed.call.calls))

    def interleaved(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of a call in every round."""
        samples: dict[str, list[float]] = {name: [] for name in self.timed}
        for r in range(-WARM_UP_ROUNDS, rounds):
            measured: dict[str, Any] = {}
            ahead = False  # whether the GPU has work queued, so that an event does not wait for the host
            for name in turns(list(self.timed), r):
                timed = self.timed[name]
                if timed.call.host_timed:
                    measured[name] = self._by_host(timed, timed.loops)
                    ahead = False
                    continue
                hold = 0.0 if ahead and not self.host_bound else self.lead * (TURN_LAUNCHES + 1)
                measured[name] = self._launch(timed, TURN_LAUNCHES, hold)
                ahead = True
            self.device.synchronize()
            if r < 0:
                continue
            for name, x in measured.items():
                samples[name].append(x if isinstance(x, float) else self.device.seconds(*x) / TURN_LAUNCHES)
        return samples

    def alone(
        self, names: Sequence[str], seconds: float, repeats: int
    ) -> tuple[dict[str, list[float]], dict[str, list[dict[str, Any]]]]:
        """Seconds of a call in every repeat, and the sensors' readings of each."""
        samples: dict[str, list[float]] = {name: [] for name in names}
        readings: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        device_timed = [t for t in (self.timed[name] for name in names) if not t.call.host_timed]
        # Pauses for the host let the GPU cool, and its clock rise: where one kernel needs them, all compared with it get them.
        paused = any(t.enqueue > 0.8 * t.seconds for t in device_timed)
        enqueue = max((t.enqueue for t in device_timed), default=0.0)
        chance = random.Random(0)
        for _ in range(repeats):
            for name in chance.sample(list(names), len(names)):
                self.device.rest()
                begin = self.device.now()
                samples[name].append(self._one_alone(self.timed[name], seconds, paused, enqueue))
                readings[name].append(self.device.readings(begin, self.device.now()))
        return samples, readings

    def _one_alone(self, timed: Timed, seconds: float, paused: bool, enqueue: float) -> float:
        """paused: in pieces, each with a head start for a host that takes `enqueue` seconds for a call; else in one go."""
        calls = max(TURN_LAUNCHES, math.ceil(seconds / timed.seconds))
        if timed.call.host_timed:
            return self._by_host(timed, max(timed.loops, math.ceil(calls / timed.call.calls)))
        size = min(calls, LONG_TURN) if paused else calls
        hold = 1.5 * enqueue * (min(size, LONG_TURN) + 1)
        marks = []
        for _ in range(math.ceil(calls / size)):
            marks.append(self._launch(timed, size, hold))
            if paused:
                self.device.synchronize()  # else the host would have to be ahead of ever longer queues
        self.device.synchronize()
        return sum(self.device.seconds(*m) for m in marks) / (size * len(marks))


def turns(names: list[str], r: int) -> list[str]:
    """The order of a round: rotating, and backwards in every second cycle, so that neighbours change too."""
    n = len(names)
    start = r % n
    order = names[start:] + names[:start]
    return order[::-1] if (r // n) % 2 else order
