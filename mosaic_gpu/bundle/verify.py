"""Runs a bundle on this machine's GPU: every entry twice, judged; what is to be timed is timed; a report that can be sent back.

Entries run in a process beside this one, which starts JAX on the GPU.  A kernel that takes the GPU with it, or never ends, costs
that process and its own entry: a new process goes on with the rest.
"""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from . import files

FORMAT, VERSION = "mosaic-gpu verification", 1
START_SECONDS = 300.0  # until JAX has found its GPU
MOST_RESTARTS = 5  # in a row without a result: then it is not the kernels
Status = str  # ok, wrong, refused, failed, hung, crashed


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of an entry.  error, allowed: relative to the reference; seconds: of a call, the median."""

    name: str
    status: Status
    error: float | None = None
    allowed: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    message: str = ""


Launch = Callable[[files.Entry, Sequence[Any]], list[Any]]


def launch_entry(entry: files.Entry, arrays: Sequence[Any]) -> list[Any]:
    """The entry's kernel on arrays; to be called under `jax.jit`."""
    import jax
    import jax.numpy as jnp

    from ..runtime.jax_ffi import launch_call

    operands = [arrays[o] if isinstance(o, int) else jnp.asarray(o) for o in entry.operands]
    types = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in entry.outputs]
    return launch_call(entry.spec, operands, types, dict(entry.aliases))


def check(entry: files.Entry, launch: Launch = launch_entry, *, benchmark: bool = True) -> Result:
    """Run an entry twice on inputs of its seed, judge the result, compare the bits, time it if it is to be timed.

    Errors of ours become a result; others, after which nothing is known of the GPU, are raised.
    """
    import jax
    import numpy as np

    from ..bench.jax_calls import host_call, program_of_sets
    from ..bench.protocols import sets_for
    from ..errors import MosaicGpuError
    from ..runtime.jax_ffi import translate_error
    from ..tune.measure import timed
    from ..tune.tunable import rolled
    from . import cases

    case = cases.Case(**entry.case)
    arrays, judge = cases.inputs(case)

    def first(*xs: Any) -> Any:
        return launch(entry, xs)[0]

    try:
        program = jax.jit(first)
        found = np.asarray(program(*arrays))
        again = np.asarray(program(*arrays))
    except Exception as error:
        ours = error if isinstance(error, MosaicGpuError) else translate_error(error)
        if ours is None:
            raise
        return Result(entry.name, "refused", message=str(ours).splitlines()[0])
    off = judge.error(found)
    judged = Result(entry.name, "ok", off, judge.allowed)
    if not judge.accepts(off):
        message = f"relative error {off:.2e}, allowed {judge.allowed:.2e}"
        return dataclasses.replace(judged, status="wrong", message=message)
    if found.tobytes() != again.tobytes():
        message = "two runs on the same inputs differ: the kernel has a race"
        return dataclasses.replace(judged, status="wrong", message=message)
    if not (case.benchmark and benchmark):
        return judged
    size = sum(x.size * x.dtype.itemsize for x in arrays)
    sets = [tuple(rolled(x, n) for x in arrays) for n in range(sets_for(size))]
    ready = host_call(program_of_sets(first, sets), sets, lambda a, b: True)
    seconds = statistics.median(timed(ready.run, ready.calls))
    return dataclasses.replace(judged, seconds=seconds, tflops=case.workload.flops / seconds / 1e12)


def _work(path: str, indices: Sequence[int], benchmark: bool, pipe: Connection) -> None:
    """In a process of its own: ("device", ...), then for each entry ("start", i) and ("done", i, result); ("end",) at the end."""
    from ..runtime.device import default_arch
    from ..tune.header import device_here, toolchain_here

    bundle = files.load(Path(path))
    arch = default_arch()
    pipe.send(("device", arch, device_here() if arch else {}, toolchain_here() if arch else {}))
    if arch != bundle.arch:
        return
    for i in indices:
        pipe.send(("start", i))
        entry = bundle.entries[i]
        try:
            result = check(entry, benchmark=benchmark)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            pipe.send(("done", i, Result(entry.name, "failed", message=text)))
            traceback.print_exc()
            return  # the GPU's state is unknown: another process goes on
        pipe.send(("done", i, result))
    pipe.send(("end",))


@dataclasses.dataclass
class Outcome:
    """arch, device, here: of the machine that was found; results: by entry."""

    arch: str | None = None
    device: dict[str, Any] = dataclasses.field(default_factory=dict)
    here: dict[str, Any] = dataclasses.field(default_factory=dict)
    results: dict[int, Result] = dataclasses.field(default_factory=dict)


def run(
    path: Path,
    bundle: files.Bundle,
    *,
    benchmark: bool = True,
    timeout: float = 180.0,
    on_start: Callable[[files.Entry], None] = lambda entry: None,
    on_result: Callable[[Result], None] = lambda result: None,
    work: Callable[[str, Sequence[int], bool, Connection], None] = _work,
) -> Outcome:
    """Verify every entry.  timeout: seconds for one; work: what the processes run (tests have another)."""
    outcome = Outcome()
    context = multiprocessing.get_context("spawn")
    fruitless = 0
    while (rest := [i for i in range(len(bundle.entries)) if i not in outcome.results]) and fruitless < MOST_RESTARTS:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(str(path), rest, benchmark, theirs), daemon=True)
        process.start()
        theirs.close()
        before = len(outcome.results)
        try:
            goes_on = _listen(ours, bundle, outcome, timeout, on_start, on_result)
        finally:
            process.kill()
            process.join()
            ours.close()
        if not goes_on:
            break
        fruitless = 0 if len(outcome.results) > before else fruitless + 1
    return outcome


def _listen(
    pipe: Connection,
    bundle: files.Bundle,
    outcome: Outcome,
    timeout: float,
    on_start: Callable[[files.Entry], None],
    on_result: Callable[[Result], None],
) -> bool:
    """Take a process's messages until it ends, dies or says nothing for too long; whether there is reason to start another."""
    current: int | None = None

    def done(i: int, result: Result) -> None:
        outcome.results[i] = result
        on_result(result)

    deadline = time.monotonic() + START_SECONDS
    while True:
        if not pipe.poll(max(deadline - time.monotonic(), 0)):
            if current is not None:
                done(current, Result(bundle.entries[current].name, "hung", message=f"no result after {timeout:.0f} s"))
            return current is not None
        try:
            what, *rest = pipe.recv()
        except EOFError:  # it died
            if current is not None:
                done(current, Result(bundle.entries[current].name, "crashed", message="its process died"))
            return True
        if what == "device":
            outcome.arch, outcome.device, outcome.here = rest
            if outcome.arch != bundle.arch:
                return False
        elif what == "start":
            (current,) = rest
            on_start(bundle.entries[current])
            deadline = time.monotonic() + timeout
        elif what == "done":
            done(*rest)
            current, deadline = None, time.monotonic() + timeout
        else:
            return True


def report(path: Path, bundle: files.Bundle, outcome: Outcome, begun: str) -> dict[str, Any]:
    """What is sent back, as plain data."""
    missing = Result("", "failed", message="not run: processes ended before it")
    results = []
    for i, e in enumerate(bundle.entries):
        r = outcome.results.get(i, dataclasses.replace(missing, name=e.name))
        built = {"source": e.source, "registers": e.registers, "spills": e.spills}
        results.append({**dataclasses.asdict(r), "case": dict(e.case), **built})
    statuses = [r["status"] for r in results]
    return {
        "format": FORMAT,
        "version": VERSION,
        "bundle": {
            "file": path.name,
            "identity": bundle.identity,
            "arch": bundle.arch,
            "multiprocessors": bundle.multiprocessors,
            "made_by": dict(bundle.versions),
            "made": bundle.date,
            **files.describe(bundle.entries),
        },
        "device": outcome.device,
        "verified_by": outcome.here,
        "begun": begun,
        "ended": now(),
        "summary": {s: statuses.count(s) for s in sorted(set(statuses))},
        "results": results,
    }


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
