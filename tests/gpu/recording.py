"""What the tests simulate, recorded to be run on a GPU: `replay.py` launches it there and compares.

    pytest -p tests.gpu.recording --record FOLDER tests/ops ...    every simulation for sm_90a that found nothing
    python -m tests.gpu.recording FOLDER FILE                      their kernels compiled: a bundle with results

Neither needs a GPU.  A kernel in which any test's simulation found a race, a deadlock or a barrier misused is left out whatever
other tests of it say; so are what the simulator was told not to check, and results that depend on the order of the blocks.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import hashlib
import json
import multiprocessing
import os
import pathlib
import pickle
import warnings
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mosaic_gpu.bundle.files import Bundle, Entry, write
from mosaic_gpu.bundle.make import MULTIPROCESSORS
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import BASE_OPTIONS, Compiled
from mosaic_gpu.codegen.ptxas_log import parse_log
from mosaic_gpu.errors import BarrierMisuse, Deadlock, Leak, MosaicGpuError, Race, UninitializedRead
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.program import Value, walk
from mosaic_gpu.runtime.execute import spec_without_cubin, with_cubin
from mosaic_gpu.simulator import machine
from mosaic_gpu.tune.header import toolchain_here

from .comparison import compare

ARCH = "sm_90a"
MOST_BYTES = 4 << 20  # of all arrays of a record
MOST_OF_SOURCE, MOST_OF_TEST = 3, 6  # records
FILE_BYTES = 40 << 20
DANGEROUS = (
    Race,
    Deadlock,
    BarrierMisuse,
    Leak,
    UninitializedRead,
)  # findings after which a kernel stays away from a GPU
ORDERS = ({"seed": 1}, {"seed": 2}, {"timing": "early"})
COMMUNICATES = ("atomic", "semaphore")  # how operations begin by which blocks can see which came first


# ---- recording ---------------------------------------------------------------------------------------------------------
def pytest_addoption(parser: Any) -> None:
    parser.addoption("--record", type=pathlib.Path, metavar="FOLDER", help="record what is simulated for sm_90a there")


def pytest_configure(config: Any) -> None:
    folder = config.getoption("--record")
    if folder is not None:
        config.recorder = Recorder(folder)
        machine.run_grid = config.recorder.run_grid


def pytest_unconfigure(config: Any) -> None:
    if hasattr(config, "recorder"):
        config.recorder.close()


class Recorder:
    """Takes the place of the simulator's `run_grid`.  Several processes may record into one folder.

    plans/SOURCE: a plan for each source; records/SOURCE-ARRAYS: an Entry without a cubin; found/SOURCE: of dangerous kernels.
    skipped: how many simulations were not recorded, by reason.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.original = folder, machine.run_grid
        self.skipped: collections.Counter[str] = collections.Counter()
        self.of_test: collections.Counter[str] = collections.Counter()
        self.busy = False
        for name in ("plans", "records", "found", "skipped"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Put the simulator's function back and write down what was skipped."""
        machine.run_grid = self.original
        (self.folder / "skipped" / f"{os.getpid()}.json").write_text(json.dumps(self.skipped))

    def run_grid(self, run: machine.Machine, inputs: list[np.ndarray]) -> None:
        """Simulate, and record it."""
        if self.busy or run.plan.arch != ARCH:
            return self.original(run, inputs)
        try:
            self.original(run, inputs)
        except DANGEROUS:
            if (source := source_of(run.plan)) is not None:
                (self.folder / "found" / source).touch()
            raise
        reason = self.record(run, inputs)
        self.skipped.update([reason] if reason else [])
        return None

    def record(self, run: machine.Machine, inputs: list[np.ndarray]) -> str | None:
        """Record a simulation that has ended well; the reason why it is not recorded."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test").rpartition(" ")[0]
        program, ops = run.plan.program, {e.op for e in walk(run.plan.program.body)}
        outputs = run.arrays[len(inputs) : len(run.arrays) - program.semaphores]
        if not run.params.checks or run.params.uninitialized != "nan":
            return "not all was checked"
        if "debug_print" in ops:
            return "it prints"
        written = [a.written for a in outputs if a not in run.arrays[: len(inputs)]]
        if not outputs or any(w is None or not w.all() for w in written):
            return "outputs not wholly written"
        results = [np.array(a.data) for a in outputs]
        if sum(x.nbytes for x in (*inputs, *results)) > MOST_BYTES:
            return f"arrays of more than {MOST_BYTES} bytes"
        source = source_of(run.plan)
        if source is None:
            return "the emitter refuses it"
        path = self.folder / "records" / f"{source}-{_hash(*inputs)}"
        if path.exists():
            return "recorded already"
        if len(list(path.parent.glob(f"{source}-*"))) >= MOST_OF_SOURCE or self.of_test[test] >= MOST_OF_TEST:
            return "enough of this kernel or test"
        if any(op.startswith(COMMUNICATES) for op in ops) and self.depends_on_order(run, inputs, results):
            return "the result depends on the order of events"
        try:
            data = pickle.dumps(entry_of(test, run.plan, inputs, results))
            plan = pickle.dumps(run.plan)
        except MosaicGpuError as error:
            return f"no launch: {str(error).splitlines()[0][:60]}"
        except (pickle.PicklingError, AttributeError, TypeError):
            return "the plan holds something of the test's"
        self.of_test[test] += 1
        _store(self.folder / "plans" / source, plan)
        _store(path, data)
        return None

    def depends_on_order(self, run: machine.Machine, inputs: list[np.ndarray], results: list[np.ndarray]) -> bool:
        """Whether other legal orders give other results."""
        self.busy = True
        try:
            for changes in ORDERS:
                others = machine.simulate(run.plan, inputs, dataclasses.replace(run.params, report=None), **changes)
                if any(compare(a, b).wrong for a, b in zip(others, results, strict=True)):
                    return True
            return False
        finally:
            self.busy = False


# A finding goes through it on its way to the user, who is to see as little of it as of the simulator's own frames.
Recorder.run_grid.__code__ = Recorder.run_grid.__code__.replace(co_filename=machine.__file__)


def source_of(plan: Plan) -> str | None:
    """What a plan's cubin depends on, hashed; None where nothing can be emitted."""
    try:
        return _hash(emit(plan).encode(), *(o.encode() for o in BASE_OPTIONS))
    except MosaicGpuError:
        return None


def entry_of(test: str, plan: Plan, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> Entry:
    """A launch on these arrays, to be compiled.  Raises what `spec_without_cubin` does for shapes that TMA does not take."""
    program = plan.program
    values = program.inputs[len(inputs) :]
    # A plan serves any extents: those of the launch are the arrays'.
    given = tuple(dataclasses.replace(v, shape=x.shape) for v, x in zip(program.inputs, inputs, strict=False))
    here = dataclasses.replace(plan, program=dataclasses.replace(program, inputs=(*given, *values)))
    counters = [np.zeros(v.shape, np.int32) for v in values[len(results) :]]
    aliases = (*program.aliases, *((len(inputs) + i, len(results) + i) for i in range(len(counters))))
    return Entry(
        program.name,
        {"test": test, "float8": multiplies_float8(plan)},
        spec_without_cubin(here),
        (*(np.array(x) for x in inputs), *counters),
        tuple((x.shape, str(x.dtype)) for x in (*results, *counters)),
        aliases,
        "",
        0,
        0,
        tuple(results),
    )


def multiplies_float8(plan: Plan) -> bool:
    """Whether a tensor core multiplies numbers of 8 bits, of whose products it adds less exactly."""
    return any(
        isinstance(v, Value) and v.dtype.startswith("float8")
        for e in walk(plan.program.body)
        if e.op in ("wgmma", "dot_general")
        for v in e.operands
    )


def _hash(*parts: bytes | np.ndarray) -> str:
    digest = hashlib.sha256()
    for x in parts:
        digest.update(f"{x.dtype}{x.shape}".encode() + x.tobytes() if isinstance(x, np.ndarray) else x)
    return digest.hexdigest()[:32]


def _store(path: pathlib.Path, data: bytes) -> None:
    """Whole or not at all, as others look on."""
    part = path.parent.parent / f"part-{os.getpid()}"
    part.write_bytes(zlib.compress(data, 6))
    part.rename(path)


def _stored(path: pathlib.Path) -> Any:
    return pickle.loads(zlib.decompress(path.read_bytes()))


# ---- compiling ---------------------------------------------------------------------------------------------------------
Built = tuple[Compiled, str, int, int]  # with the hash of the source, registers, bytes of spills


def build(path: pathlib.Path) -> Built | str:
    """A recorded plan, compiled; or the error's text.  For other processes."""
    warnings.simplefilter("ignore")
    try:
        built = compile_plan(_stored(path))
    except MosaicGpuError as error:
        return f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
    usage = parse_log(built.compiled.log, built.compiled.ptx).entry(None)
    digest = hashlib.sha256(built.source.encode()).hexdigest()
    return built.compiled, digest, usage.registers or 0, usage.spill_stores + usage.spill_loads


def build_all(folder: pathlib.Path, processes: int = 2) -> dict[str, Built]:
    """Every recorded source that is not dangerous, compiled; those compiled before come from the package's cache."""
    paths = sorted(p for p in (folder / "plans").iterdir() if not (folder / "found" / p.name).exists())
    built: dict[str, Built] = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for n, (path, got) in enumerate(zip(paths, pool.map(build, paths), strict=True), 1):
            if isinstance(got, str):
                print(f"{path.name}: {got}", flush=True)
            else:
                built[path.name] = got
            if n % 50 == 0 or n == len(paths):
                print(f"{n} of {len(paths)} kernels compiled", flush=True)
    return built


def chosen(folder: pathlib.Path, sources: Iterable[str], room: int) -> list[pathlib.Path]:
    """The records that fit: one of each source first, small ones first."""
    ranked = []
    for source in sources:
        sizes = sorted((p.stat().st_size, p) for p in (folder / "records").glob(f"{source}-*"))
        ranked += [(rank, size, path) for rank, (size, path) in enumerate(sizes)]
    taken = []
    for _, size, path in sorted(ranked):
        if size <= room:
            room -= size
            taken.append(path)
    return sorted(taken)


def compile_folder(folder: pathlib.Path, out: pathlib.Path, limit: int = FILE_BYTES) -> Bundle:
    """Compile what was recorded and write it as one bundle of at most about `limit` bytes."""
    built = build_all(folder)
    cubins = {b[0].cubin for b in built.values()}
    room = limit - sum(len(zlib.compress(c)) for c in cubins)
    entries = []
    for path in chosen(folder, built, room):
        compiled, source, registers, spills = built[path.name.partition("-")[0]]
        e: Entry = _stored(path)
        spec = with_cubin(e.spec, compiled)
        entries.append(dataclasses.replace(e, spec=spec, source=source, registers=registers, spills=spills))
    kept = {k: v for k, v in toolchain_here().items() if k in ("nvrtc", "mosaic_gpu", "jax")}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    bundle = Bundle(ARCH, MULTIPROCESSORS[ARCH], kept, date, tuple(entries))
    write(bundle, out)
    return bundle


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile what `pytest -p tests.gpu.recording --record` has recorded.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, help="the file to write")
    options = parser.parse_args()
    bundle = compile_folder(options.folder, options.out)
    skipped: collections.Counter[str] = collections.Counter()
    for path in (options.folder / "skipped").iterdir():
        skipped.update(json.loads(path.read_text()))
    for reason, count in skipped.most_common():
        print(f"not recorded, {reason}: {count} simulations")
    recorded, found = (len(list((options.folder / x).iterdir())) for x in ("records", "found"))
    kernels = len({e.spec.cubin for e in bundle.entries})
    print(f"{recorded} records, {found} kernels with findings left out")
    print(
        f"{options.out}: {len(bundle.entries)} records of {kernels} kernels, {options.out.stat().st_size / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    main()
