"""Clusters of a grid in several processes.

Blocks of different clusters are never ordered, so a kernel in which one meets what another did to memory has a race, and one
without such a meeting gives the same bits in whatever process its clusters run.  Each worker runs ranges of clusters and says
which elements of the arrays that the kernel writes they wrote and read; where the ranges overlap, the whole grid is run again
here, one cluster after the other, and ends in that race's report.  A finding inside a cluster is raised as the worker made it,
of several the first in order of the grid.

Workers are processes of their own with no JAX in them and nothing of the user's main module: started as
`python -c`, they are spoken to through pipes, serve any number of simulations and end with this process.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import MosaicGpuError
from ..program import walk
from .memory import Array
from .remarks import Report

if TYPE_CHECKING:
    from .machine import Machine

COLD, WARM = 0.8, 0.1  # seconds that the others must save: to start them, and to hand a simulation over
PROBE = 0.05  # seconds of work here, from which the rest is estimated
CHUNKS = 4  # ranges of clusters for each process: some take longer than others
Bits = npt.NDArray[np.uint8]  # one for each element of an array, packed


@dataclasses.dataclass
class Part:
    """What some clusters did to an array: what they wrote and read, and the values of what they wrote."""

    written: Bits
    read: Bits
    values: Array


@dataclasses.dataclass
class Outcome:
    """What came of a range of clusters.  parts: by array; error: the finding that ended it."""

    parts: dict[int, Part]
    error: MosaicGpuError | None
    report: Report | None


def run_grid(machine: Machine, inputs: list[Array]) -> None:
    """Run all clusters, in several processes where that is asked for or pays."""
    count = len(machine.clusters)
    asked = machine.params.processes
    here, soon = 0, 0
    # Without checks nobody knows who wrote what; sums and outputs that start with an input's values are made in one place.
    alone = (
        not machine.params.checks or machine.added or machine.plan.program.aliases or machine.plan.program.semaphores
    )
    # Clusters that take others' places over must know which are left.
    takes_over = any(e.op == "try_cluster_cancel" for e in walk(machine.plan.program.body))
    if not alone and not takes_over and count > 1 and asked != 1 and sys.executable:
        processes = min(asked or _cores(), count)
        if asked is None:
            here, left = _probe(machine, processes)
            processes = min(processes, count - here)
            saved = left * (1 - 1 / max(1, processes))
            if saved < (WARM if _pool.ready(processes) else COLD):
                processes, soon = 1, processes if saved >= WARM else 0
        if processes > 1 and _spread(machine, inputs, here, processes):
            return
    machine.run(range(here, count))
    _pool.start(soon)  # the next simulation finds them ready


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _probe(machine: Machine, processes: int) -> tuple[int, float]:
    """Run clusters here for a moment; how many, and how many seconds the others may take."""
    done, seconds, count = 0, 0.0, len(machine.clusters)
    begun = time.perf_counter()
    if processes > 1:
        while done < count and time.perf_counter() - begun < PROBE:
            last = time.perf_counter()
            machine.run(range(done, done + 1))
            seconds = time.perf_counter() - last  # of the last one: the first ones fill caches
            done += 1
    return done, seconds * (count - done)


def _spread(machine: Machine, inputs: list[Array], first: int, processes: int) -> bool:
    """Run clusters from `first` on in workers, and take over what they did; False, with nothing done, if they cannot."""
    count = len(machine.clusters)
    size = -(-(count - first) // (CHUNKS * processes))
    ranges = [range(a, min(a + size, count)) for a in range(first, count, size)]
    params = dataclasses.replace(machine.params, report=Report() if machine.report is not None else None)
    try:
        job = pickle.dumps((machine.plan, inputs, params), protocol=5)
    except Exception:  # a plan with something of the user's in it
        return False
    outcomes = _pool.run(job, ranges, processes)
    if outcomes is None:
        return False
    done = {i: Part(*_touched(machine, i), np.empty(0)) for i in machine.written}
    for outcome in outcomes:
        if any(_overlap(done[i], part) for i, part in outcome.parts.items()):
            machine.reset()
            machine.run(range(count))
            return True
        for i, part in outcome.parts.items():
            machine.arrays[i].take(_unpacked(part.written, machine.arrays[i].data.size), part.values)
            done[i].written |= part.written
            done[i].read |= part.read
        if machine.report is not None and outcome.report is not None:
            machine.report.merge(outcome.report)
        if outcome.error is not None:
            raise outcome.error
    return True


def _touched(machine: Machine, i: int) -> tuple[Bits, Bits]:
    shadow = machine.arrays[i].shadow
    assert shadow is not None
    written = np.packbits(shadow.writers.reshape(-1) > 0)
    return written, np.zeros_like(written) if shadow.readers is None else np.packbits(shadow.readers.reshape(-1) > 0)


def _unpacked(bits: Bits, size: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(bits, count=size).view(np.bool_)


def _overlap(a: Part, b: Part) -> bool:
    return bool((b.written & (a.written | a.read)).any() or (b.read & a.written).any())


# ---- the workers, seen from here ------------------------------------------------------------------------------------------
def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(struct.pack("<Q", len(message)))
    stream.write(message)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the other side has ended")
    (size,) = struct.unpack("<Q", head)
    message = stream.read(size)
    if len(message) < size:
        raise EOFError("the other side has ended")
    return message


class _Worker:
    def __init__(self) -> None:
        # The path as it is here, and not `-m`: that would import from the working directory.
        start = f"import sys; sys.path[:] = {sys.path!r}; from mosaic_gpu.simulator.parallel import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which ends the others
        )

    def ask(self, message: bytes) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        _send(self.process.stdin, message)
        return pickle.loads(_receive(self.process.stdout))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Pool:
    """Workers that wait for simulations; one simulation at a time."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.owner = os.getpid()
        self.lock = threading.Lock()

    def ready(self, processes: int) -> bool:
        """Whether so many have been started."""
        return self.owner == os.getpid() and len(self.workers) >= processes

    def run(self, job: bytes, ranges: list[range], processes: int) -> list[Outcome] | None:
        """The outcomes in order, up to the first with an error; None if the workers are busy or one of them failed."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            self._fill(processes)
            return self._run(job, ranges, self.workers[:processes])
        except BaseException:
            self.close()  # also Ctrl-C: what they are at is of no use to anybody
            raise
        finally:
            self.lock.release()

    def start(self, processes: int) -> None:
        """Start so many and do not wait for them."""
        if self.lock.acquire(blocking=False):
            try:
                self._fill(processes)
            finally:
                self.lock.release()

    def _fill(self, processes: int) -> None:
        if self.owner != os.getpid():  # a fork's pipes are its parent's
            self.workers, self.owner = [], os.getpid()
        while len(self.workers) < processes:
            self.workers.append(_Worker())

    def _run(self, job: bytes, ranges: list[range], workers: list[_Worker]) -> list[Outcome] | None:
        found: dict[int, Outcome] = {}
        failed: list[BaseException] = []
        last = [len(ranges)]  # ranges behind one with an error are of no interest
        numbers = iter(range(len(ranges)))
        taking = threading.Lock()

        def next_ones() -> Iterator[int]:
            while not failed:
                with taking:
                    number = next(numbers, last[0])
                if number >= last[0]:
                    return
                yield number

        def attend(worker: _Worker) -> None:
            try:
                if (answer := worker.ask(job)) is not None:
                    raise RuntimeError(answer)
                for number in next_ones():
                    answer = worker.ask(pickle.dumps(ranges[number]))
                    if not isinstance(answer, Outcome):
                        raise RuntimeError(answer)
                    found[number] = answer
                    if answer.error is not None:
                        last[0] = min(last[0], number + 1)
                worker.ask(pickle.dumps(None))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=attend, args=(w,), daemon=True) for w in workers]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failed:  # it is run again here, where the error has its place
            self.close()
            return None
        return [found[i] for i in range(last[0])]

    def close(self) -> None:
        """End the workers."""
        if self.owner == os.getpid():
            for worker in self.workers:
                worker.end()
        self.workers = []


_pool = Pool()
atexit.register(_pool.close)


# ---- the workers, seen from inside ------------------------------------------------------------------------------------------
def _outcome(machine: Machine, clusters: range) -> Outcome:
    machine.reset()
    error: MosaicGpuError | None = None
    try:
        machine.run(clusters)
    except MosaicGpuError as e:
        error = e
    parts = {}
    for i in machine.written:
        written, read = _touched(machine, i)
        flat = machine.arrays[i].data.reshape(-1)
        parts[i] = Part(written, read, flat[_unpacked(written, flat.size)])
    return Outcome(parts, error, machine.report)


def _listen(source: IO[bytes], messages: queue.SimpleQueue[bytes]) -> None:
    """Take messages as they come, and end this process with the other one: also if that was killed while this one is at work."""
    try:
        while True:
            messages.put(_receive(source))
    except (EOFError, OSError):
        os._exit(0)


def serve() -> None:
    """A worker: jobs and ranges come on standard input, outcomes go to standard output."""
    from .machine import Machine, global_memory

    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed does not belong between the messages
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, messages), daemon=True).start()
    machine: Machine | None = None
    reply: Outcome | str | None
    while True:
        message, reply = pickle.loads(messages.get()), None
        try:
            if isinstance(message, range):
                assert machine is not None
                reply = _outcome(machine, message)
            elif message is None:  # the simulation is over
                machine = None
            else:
                plan, inputs, params = message
                machine = Machine(plan, global_memory(plan, inputs, params), params)
        except Exception as error:  # no finding: it will happen again where it can be looked at
            reply = f"{type(error).__name__}: {error}"
        _send(sink, pickle.dumps(reply, protocol=5))
