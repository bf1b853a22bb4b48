"""`mosaic-gpu bench compile`: how long each step from Python function to cubin takes, cold and from the cache."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import typer

from .common import ARCHS, AsJson, Refusal, output, print_json, steps, table

T = TypeVar("T")
STEPS = ("trace", "plan", "emit", "nvrtc", "disassemble", "build_cold", "build_from_disk", "build_from_memory")


def bench_compile(
    arch: Annotated[str, typer.Option(help=f"{', '.join(ARCHS)}.")] = "sm_90a",
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dims; default 64, 128, 256.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Median of so many.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Time the compilation of attention, step by step, and as a whole.

    build: a plan to a checked cubin, which emits, compiles and disassembles; cold, then found on disk, then in memory.
    cold, warm: trace and plan with the build cold, resp. found on disk.
    """
    if arch not in ARCHS:
        raise Refusal(f"--arch {arch}: one of {', '.join(ARCHS)}")
    cases = [(d, causal) for d in head_dim or (64, 128, 256) for causal in (False, True)]
    rows: list[dict[str, Any]] = []
    from ..runtime import device

    with device.planning_for(device.multiprocessors(), arch), steps(len(cases) * repeats + 1) as progress:
        progress.step("starting JAX and the compiler")
        _once(arch, 64, False, 999)  # imports, and what JAX and NVRTC do once in a process, are not the kernel's
        for d, causal in cases:
            samples = []
            for i in range(repeats):
                progress.step(f"d{d} {'causal' if causal else 'full'}, {i + 1} of {repeats}")
                samples.append(_once(arch, d, causal, i + 1))
            median = {name: statistics.median(s[name] for s in samples) for name in STEPS}
            before = median["trace"] + median["plan"]
            whole = {"cold": before + median["build_cold"], "warm": before + median["build_from_disk"]}
            rows.append({"head_dim": d, "mask": "causal" if causal else "full", "arch": arch, **whole, **median})
    if as_json:
        print_json(rows)
        return
    columns = ["attention", "mask", "cold", "warm", *(name.replace("_", " ") for name in STEPS)]
    cells = [
        [f"d{r['head_dim']}", r["mask"], *(f"{1e3 * r[name]:.1f}" for name in ("cold", "warm", *STEPS))] for r in rows
    ]
    output().print(table(f"milliseconds for {arch}", columns, cells, left=2))


def _once(arch: str, head_dim: int, causal: bool, batch: int) -> dict[str, float]:
    """Seconds of each step.  A batch size of its own makes the trace a fresh one; the code does not depend on it."""
    from ..codegen import cubin_cache
    from ..codegen.build import compile_plan, report
    from ..codegen.emitter import emit
    from ..codegen.nvrtc import compile_cuda, find_nvrtc
    from ..plan.build import build_plan
    from .targets import Request, find_call, program_of

    try:
        call = find_call("attention", Request(arch, f"b{batch}s1024d{head_dim}", causal=causal))
    except NotImplementedError as error:
        raise Refusal(str(error)) from error
    found: dict[str, float] = {}

    def timed(name: str, function: Callable[[], T]) -> T:
        begun = time.perf_counter()
        result = function()
        found[name] = time.perf_counter() - begun
        return result

    program = timed("trace", lambda: program_of(*call, arch))
    plan = timed("plan", lambda: build_plan(program, arch))
    source = timed("emit", lambda: emit(plan))
    find_nvrtc()
    compiled = timed("nvrtc", lambda: compile_cuda(source, arch=arch, name=f"/{program.name}.cu"))
    timed("disassemble", lambda: report(plan, compiled))
    with fresh_cache():
        timed("build_cold", lambda: compile_plan(plan))
        cubin_cache.forget()
        if not timed("build_from_disk", lambda: compile_plan(plan)).hit:
            raise RuntimeError("the cubin that was just compiled is not in the cache")
        timed("build_from_memory", lambda: compile_plan(plan))
    return found


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """An empty cache of compiled kernels, on disk and in memory, for the body."""
    from ..codegen import cubin_cache

    before = os.environ.get(cubin_cache.ENVIRONMENT_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[cubin_cache.ENVIRONMENT_VARIABLE] = folder
        cubin_cache.forget()
        try:
            yield
        finally:
            cubin_cache.forget()
            if before is None:
                del os.environ[cubin_cache.ENVIRONMENT_VARIABLE]
            else:
                os.environ[cubin_cache.ENVIRONMENT_VARIABLE] = before
