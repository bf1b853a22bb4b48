"""Searches on all GPUs of a host: one worker process for each GPU, one workload at a time for each worker.

A worker that dies (a kernel that takes the GPU with it) or says nothing for long (one that never ends) costs one config: its
trial is recorded as crashed, and a new worker goes on with the workload.  The process that starts workers uses no GPU.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ..errors import MosaicGpuError
from .search import Event, Outcome, Settings, Store, search
from .space import generation_of
from .tunable import find_object, find_tunable

HANG_SECONDS = 90.0  # a reference of a long sequence takes some
MOST_CRASHES = 8  # of one workload; after that something else is wrong


@dataclasses.dataclass(frozen=True)
class Machine:
    """A host to measure on.  device: as cache headers record it; gpus: their numbers, for CUDA_VISIBLE_DEVICES.

    timer: FILE.py:NAME of a function (tunable, workload, arch, seed) that makes another timer; tests have one.
    """

    arch: str
    device: dict[str, Any]
    toolchain: dict[str, Any]
    gpus: tuple[str, ...]
    timer: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """One workload.  kernel: the reference of its Tunable; only: configs to measure instead of the space."""

    kernel: str
    workload: dict[str, Any]
    folder: str
    settings: Settings
    seed: int = 0
    fresh: bool = False
    only: tuple[dict[str, Any], ...] | None = None


def store_of(job: Job, machine: Machine) -> Store:
    """Where a job's trials go."""
    tunable = find_tunable(job.kernel, generation_of(machine.arch))
    return Store(
        Path(job.folder),
        tunable,
        tunable.workload(job.workload),
        machine.device,
        machine.toolchain,
        {**_protocol(job, machine), "stages": str(list(job.settings.stages)), "rounds": job.settings.rounds},
    )


def _protocol(job: Job, machine: Machine) -> dict[str, Any]:
    if machine.timer:
        return {"timer": "made up"}
    from .measure import protocol

    return protocol(job.seed)


def run_job(
    job: Job, machine: Machine, budget: float, on_event: Callable[[Event], None], executor: Any = None
) -> Outcome:
    """Search one workload on this process's GPU.  executor: compiles ahead; None compiles here."""
    from ..cli.ahead import Ahead

    store = store_of(job, machine)
    tunable, w = store.tunable, store.workload
    only = None if job.only is None else [tunable.from_json(c) for c in job.only]

    def make_timer() -> Any:
        if machine.timer:
            return find_object(machine.timer)(tunable, w, machine.arch, job.seed)
        from .measure import GpuTimer

        return GpuTimer(tunable, w, job.seed)

    ahead = Ahead(tunable, w, machine.arch, executor)
    options = {"settings": job.settings, "budget": budget, "fresh": job.fresh, "only": only}
    return search(store, make_timer, ahead, arch=machine.arch, on_event=on_event, **options)  # type: ignore[arg-type]


def _work(pipe: Any, machine: Machine, processes: int) -> None:
    """A worker: jobs come in through the pipe, events and outcomes go out."""
    from ..cli.ahead import compile_pool

    try:
        with contextlib.nullcontext() if machine.timer else compile_pool(processes) as pool:
            while (received := pipe.recv()) is not None:
                job, budget = received

                def tell(event: Event) -> None:
                    pipe.send(("event", event))

                try:
                    pipe.send(("outcome", run_job(job, machine, budget, tell, pool)))
                except MosaicGpuError as error:
                    pipe.send(("error", error))
    except (KeyboardInterrupt, EOFError, BrokenPipeError, ConnectionResetError):
        pass  # whoever asked is gone, or wants it to end


class _Worker:
    def __init__(self, gpu: str, machine: Machine, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.gpu = gpu
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, machine, processes))
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=gpu) if gpu else contextlib.nullcontext():
            self.process.start()
        theirs.close()
        self.job: int | None = None
        self.config: Any = None
        self.heard = time.monotonic()

    def begin(self, number: int, job: Job, budget: float) -> None:
        self.job, self.config, self.heard = number, None, time.monotonic()
        self.pipe.send((job, budget))

    def end(self) -> None:
        """Ask it to; make it, if it does not."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(0.0 if self.job is not None else 5.0)
        for stop in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                stop()
                self.process.join(5.0)
        self.pipe.close()


WORTH_GOING_ON = 0.05  # of the budget: with less left, what was stopped is not taken up again


def run_all(
    jobs: Sequence[Job],
    machine: Machine,
    *,
    budget: float,
    on_event: Callable[[int, Event], None] = lambda number, event: None,
    hang_seconds: float = HANG_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[int, Outcome | MosaicGpuError]]:
    """Search all workloads, as many at a time as there are GPUs; yields (number of the job, what came of it) as they end.

    Each job gets its share of the time that is left when it begins; what one leaves over goes to the others, at last to those
    that had to stop before they had tried everything: these are yielded again.
    """
    waiting, stopped = collections.deque(range(len(jobs))), dict[int, Outcome]()
    end, crashes, before = clock() + budget, collections.Counter[int](), dict[int, Outcome]()
    number_of_workers = min(len(machine.gpus), len(jobs))
    processes = max((os.cpu_count() or 1) // max(number_of_workers, 1), 1)
    workers: list[_Worker] = []

    def share() -> float:
        at_once = max(number_of_workers, 1)
        return max(end - clock(), 0.0) * min(1.0, at_once / (len(waiting) + 1))

    try:
        for gpu in machine.gpus[:number_of_workers]:
            workers.append(_Worker(gpu, machine, processes))
        while waiting or stopped or any(w.job is not None for w in workers):
            if stopped and not waiting and clock() < end - WORTH_GOING_ON * budget:
                jobs = [dataclasses.replace(j, fresh=j.fresh and i not in stopped) for i, j in enumerate(jobs)]
                waiting.extend(stopped)
                before, stopped = before | stopped, {}
            elif not waiting and all(w.job is None for w in workers):
                break
            for w in workers:
                if w.job is None and waiting:
                    number = waiting.popleft()
                    w.begin(number, jobs[number], share())
            ready = multiprocessing.connection.wait([w.pipe for w in workers if w.job is not None], timeout=1.0)
            for i, w in enumerate(workers):
                if w.job is None:
                    continue
                hung = w.pipe not in ready and time.monotonic() - w.heard > hang_seconds and w.config is not None
                if w.pipe in ready:
                    w.heard = time.monotonic()
                    try:
                        kind, value = w.pipe.recv()
                    except (EOFError, ConnectionResetError):
                        w.process.join(10.0)
                    else:
                        if kind == "event":
                            if value.what in ("trying", "waiting", "trial"):  # what the GPU is at, if anything
                                w.config = value.config if value.what == "trying" else None
                            on_event(w.job, value)
                        else:
                            number, w.job, w.config = w.job, None, None
                            if isinstance(value, Outcome):
                                if number in before:
                                    first = before[number]
                                    new = first.left - value.left
                                    value = dataclasses.replace(value, measured=first.measured + new, known=first.known)
                                elif value.left and math.isfinite(budget) and not jobs[number].settings.guided:
                                    stopped[number] = value
                            yield number, value
                        continue
                elif not hung:
                    continue
                number, config, exit_code = w.job, w.config, None if hung else w.process.exitcode
                crashes[number] += 1
                _record_crash(jobs[number], machine, config, exit_code)
                on_event(number, Event("crashed", config=config))
                w.end()
                workers[i] = _Worker(w.gpu, machine, processes)
                if config is None or crashes[number] >= MOST_CRASHES:
                    yield number, MosaicGpuError(_gave_up(jobs[number], crashes[number], exit_code))
                else:
                    waiting.appendleft(number)
                    jobs = [*jobs[:number], dataclasses.replace(jobs[number], fresh=False), *jobs[number + 1 :]]
    finally:
        for w in workers:
            w.end()


def _record_crash(job: Job, machine: Machine, config: Any, exit_code: int | None) -> None:
    if config is not None:
        how = "did not end" if exit_code is None else f"took its process with it (exit code {exit_code})"
        store_of(job, machine).add([{"config": config.to_json(), "status": "crashed", "message": f"the kernel {how}"}])


def _gave_up(job: Job, times: int, exit_code: int | None) -> str:
    return (
        f"tuning {job.kernel} {job.workload}: the worker process ended {times} times, the last with exit code "
        f"{exit_code}; what was measured is kept, `mosaic-gpu doctor` may know more"
    )


def machine_here(timer: str = "") -> Machine:
    """This host, by JAX's first GPU; all GPUs that JAX sees take part."""
    from ..runtime.device import default_arch, gpu_devices
    from .header import device_here, toolchain_here

    visible = [x.strip() for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x.strip()]
    gpus = gpu_devices()
    alike = [i for i, gpu in enumerate(gpus) if gpu.device_kind == gpus[0].device_kind]
    names = tuple(visible[i] if i < len(visible) else str(i) for i in alike)
    return Machine(default_arch() or "", device_here(), toolchain_here(), names, timer)
