"""Compiles the configs of a search ahead of their timing, on any `concurrent.futures.Executor`: NVRTC takes a second for each.

A job is plain data and a function of this module, so it travels to other processes, and to other machines by Dask's, Ray's or
MPI's executors.  The cubins travel through the cache on disk, which those must share; without one, or with one processor, nothing
is compiled ahead and the timing process compiles for itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..codegen.cubin_cache import cache_folder
from ..errors import MosaicGpuError
from ..tune.tunable import Tunable, find_tunable
from .common import Refusal


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """One config of one workload.  kernel: its reference (`tune.tunable`)."""

    kernel: str
    arch: str
    workload: dict[str, Any]
    config: dict[str, Any]


def compile_job(job: CompileJob) -> dict[str, Any]:
    """Compile its kernels into the cache: `status` ok, refused or spilled, `message`, `spills` in bytes, and, of the kernel that
    takes most, `registers` at launch and `shared_bytes` of a block."""
    import warnings

    from ..codegen.build import compile_plan
    from ..codegen.ptxas_log import parse_log
    from ..runtime.device import planning_for
    from ..runtime.execute import plan_of
    from ..tune.chip import chip_of
    from ..tune.space import generation_of
    from .targets import programs_for

    try:
        tunable = find_tunable(job.kernel, generation_of(job.arch))
        w = tunable.workload(job.workload)
        call = tunable.call(w, tunable.from_json(job.config))
        # This process is kept off the GPU: what it is planned for is that of the architecture.
        with planning_for(chip_of(None, job.arch).multiprocessors, job.arch), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # spills are in the result
            plans = [plan_of(p, job.arch) for p in programs_for(call, tunable.arguments(w), job.arch)]
            compiled = [compile_plan(plan).compiled for plan in plans]
    except (MosaicGpuError, Refusal, ValueError) as error:
        text = str(error).splitlines()[0]
        return {"status": "spilled" if "spill" in text else "refused", "message": text}
    usages = [parse_log(c.log, c.ptx).entry(None) for c in compiled]
    spills = sum(usage.spill_stores + usage.spill_loads for usage in usages)
    return {
        "status": "spilled" if spills else "ok",
        "message": f"{spills} bytes of spills" if spills else "",
        "registers": max(usage.registers or 0 for usage in usages),
        "spills": spills,
        "shared_bytes": max(plan.shared_bytes for plan in plans),
    }


@contextlib.contextmanager
def compile_pool(processes: int | None = None) -> Iterator[concurrent.futures.Executor | None]:
    """Processes to compile in; None where there is nothing to win: one processor, or no cache for the cubins to travel by."""
    processes = processes or os.cpu_count() or 1
    if cache_folder() is None or processes < 2:
        yield None
        return
    # Spawned, as JAX has threads.
    pool = concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_behind)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _behind() -> None:
    """In a process that compiles: JAX must not take its share of the GPU's memory, nor the process its share of the processors
    while another one launches kernels that are timed.  This process's environment stays."""
    os.nice(15)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # by the program that started us
        sys.modules["jax"].config.update("jax_platforms", "cpu")


class Ahead:
    """Compiles configs of one workload on an executor (`tune.search.Compiler`).  executor None: nothing ahead, all is taken
    as ok, and what the compiler refuses is met when it is checked."""

    def __init__(
        self, tunable: Tunable, workload: Any, arch: str, executor: concurrent.futures.Executor | None
    ) -> None:
        self.tunable, self.workload, self.arch, self.executor = tunable, workload, arch, executor
        self.futures: dict[Any, concurrent.futures.Future[dict[str, Any]]] = {}

    def start(self, configs: Sequence[Any]) -> None:
        """Submit them in this order."""
        if self.executor is None:
            return
        where = (self.tunable.reference_text, self.arch, self.workload.to_json())
        # A compiler that crashes breaks its executor: the rest is compiled where it is timed.
        with contextlib.suppress(concurrent.futures.BrokenExecutor):
            for c in configs:
                self.futures[c] = self.executor.submit(compile_job, CompileJob(*where, c.to_json()))

    def result(self, config: Any) -> Mapping[str, Any]:
        """Of one config; waits for it."""
        if config in self.futures:
            with contextlib.suppress(concurrent.futures.BrokenExecutor):
                return self.futures[config].result()
        return {"status": "ok", "message": ""}

    def stop(self) -> None:
        """Cancel what has not begun."""
        for future in self.futures.values():
            future.cancel()


def compile_ahead(
    tunable: Tunable,
    workload: Any,
    configs: Sequence[Any],
    arch: str,
    executor: concurrent.futures.Executor,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Any, Mapping[str, Any]]:
    """Compile all of them; returns what came of each.  on_done: called with (how many are done, of how many)."""
    ahead = Ahead(tunable, workload, arch, executor)
    ahead.start(configs)
    for done, _ in enumerate(concurrent.futures.as_completed(ahead.futures.values()), 1):
        on_done(done, len(configs))
    return {c: ahead.result(c) for c in configs}
