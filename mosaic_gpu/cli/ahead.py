"""Compiles the configs of a search before it begins, in processes beside each other: NVRTC takes a second for each.

The cubins travel through the cache on disk; without one there is nothing to win.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from ..codegen.cubin_cache import cache_folder
from ..errors import MosaicGpuError
from ..tune.space import config_from, generation_of
from ..tune.workload import Attention


def compile_ahead(
    kernel: str,
    workload: Attention,
    configs: Sequence[Any],
    arch: str,
    *,
    processes: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Any, str]:
    """Compile `configs` for one workload; returns why those that the compiler refuses were refused.

    on_done: called with (how many are done, of how many).
    """
    processes = processes or min(len(configs), os.cpu_count() or 1)
    if cache_folder() is None or processes < 2:
        return {}
    refused: dict[Any, str] = {}
    # Spawned, as JAX has threads; on the CPU, as each would else take its share of the GPU's memory.
    with (
        mock.patch.dict(os.environ, JAX_PLATFORMS="cpu"),
        concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool,
    ):
        jobs = {pool.submit(_compile, kernel, workload, c.to_json(), arch): c for c in configs}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            if message := job.result():
                refused[jobs[job]] = message
            on_done(done, len(jobs))
    return refused


def _compile(kernel: str, workload: Attention, fields: dict[str, Any], arch: str) -> str | None:
    """In a process of its own: compile one config into the cache; why not, if it is refused."""
    import warnings

    from ..codegen.build import compile_plan
    from ..runtime.execute import plan_of
    from .targets import attention_call, program_of

    try:
        call = attention_call(workload, arch, config_from(kernel, generation_of(arch), fields))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # spills are said when it is measured
            compile_plan(plan_of(program_of(*call, arch), arch))
    except (MosaicGpuError, ValueError) as error:
        return str(error).splitlines()[0]
    return None
