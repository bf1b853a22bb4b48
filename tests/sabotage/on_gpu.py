"""`python -m tests.sabotage.on_gpu`: what a Hopper GPU makes of the sabotages, beside what the simulator says of them.

Every hand-picked sabotage that never deadlocks in the simulator is compiled and run 1,000 times; the good kernels are
run as often, as a control.  Before each run the good kernel runs on NaN, so that shared memory holds no results of the run
before, and outputs start as NaN.  `--workers` children do the runs; one that says nothing for `--limit` seconds is
killed and what it was at is recorded.  Writes `on_gpu.json` and `on_gpu.md` into `--out` (default: beside this file, where
`tests.sabotage.table` takes them from).  What can be run is found by simulating, which takes minutes and no GPU:
`--prepare FILE` writes it down on any machine, `--prepared FILE` takes it on the GPU's.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

if __name__ == "__main__" and "--child" not in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"  # the GPU belongs to the children

import jax
import jax.numpy as jnp
import numpy as np

from mosaic_gpu.errors import Deadlock, MosaicGpuError
from mosaic_gpu.frontend.kernel import Traced, call_p
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import Program
from mosaic_gpu.simulator import SimulatorParams, simulate

from .defects import SABOTAGES
from .kernels import NAMES, Case, case
from .rewrite import Editor
from .sabotages import Sabotage, run_sabotage

ARCH = "sm_90a"
RUNS = 1000
LIMIT = 30.0  # seconds for one sabotage: compilation and all runs take some two
STARTUP = 180.0  # for a child to import JAX, find the GPU and trace its first kernel
CLASSES = ("Race", "UninitializedRead", "Leak", "wrong")  # of findings after which a kernel can go on
GOOD = "good kernel"


@dataclasses.dataclass(frozen=True)
class Row:
    """A program and what became of it.  finding: what the simulator says; outcome: 'ran', 'hung', or how the child died;
    wrong: runs with a wrong result; results: how many different ones."""

    name: str
    rule: str
    finding: str
    outcome: str
    runs: int = 0
    wrong: int = 0
    results: int = 0


# ---- what can be run --------------------------------------------------------------------------------------------------
def spoilt(s: Sabotage) -> Program:
    """The program of a sabotage."""
    c = case(s.kernel)
    editor = Editor(c.program, c.names)
    s.edit(editor)
    return editor.program


def can_hang(c: Case, program: Program) -> bool:
    """Whether the kernel stops in some order of events.  (What misuses a barrier may, on a GPU: the child's time is limited.)"""
    plan = build_plan(program, c.arch)
    ways = [SimulatorParams(), SimulatorParams(timing="early"), *(SimulatorParams(seed=i) for i in range(1, 9))]
    for params in ways:
        try:
            with np.errstate(all="ignore"):
                simulate(plan, c.arrays, dataclasses.replace(params, checks=False, uninitialized="zero"))
        except Deadlock:
            return True
        except MosaicGpuError:
            continue
    return False


def runnable(sabotages: Iterable[Sabotage] = SABOTAGES) -> dict[str, Row]:
    """The sabotages to run, by name, with what the simulator finds."""
    rows = {}
    for s in sabotages:
        if case(s.kernel).arch != ARCH:
            continue
        finding = run_sabotage(s)
        if finding is None or finding.cls not in CLASSES or can_hang(case(s.kernel), spoilt(s)):
            continue
        kind = re.match(r"[a-z0-9/_ ]+(?=:)", finding.message) if finding.cls == "Race" else None
        at = f", line {finding.line.number}" if finding.line else ""
        text = f"{finding.cls}{f' ({kind[0]})' if kind else ''}{at}"
        rows[str(s)] = Row(str(s), s.rule, text, "not run")
    return rows


def controls() -> dict[str, Row]:
    """The good kernels."""
    names = [n for n in NAMES if case(n).arch == ARCH]
    return {n: Row(n, GOOD, "clean", "not run") for n in names}


# ---- the child: runs on whatever JAX's default device is -----------------------------------------------------------------
def launcher(c: Case, program: Program) -> Callable[..., list[np.ndarray]]:
    """The program as a function on arrays, compiled for the device; its outputs are written over NaN."""
    n = len(program.inputs) - program.num_outputs
    outs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in program.inputs[n:]]
    traced = Traced(program, tuple(jax.core.ShapedArray(o.shape, o.dtype) for o in outs), None)

    def call(*everything: jax.Array) -> list[jax.Array]:
        return list(call_p.bind(*everything[:n], traced=traced))

    places = tuple(range(n, n + len(outs)))
    compiled = jax.jit(call, donate_argnums=places, keep_unused=True)

    def run(*arrays: jax.Array) -> list[np.ndarray]:
        poison = [jnp.full(o.shape, jnp.nan, o.dtype) for o in outs]
        return [np.asarray(x) for x in compiled(*arrays, *poison)]

    return run


@functools.cache
def good_launcher(kernel: str) -> Callable[..., list[np.ndarray]]:
    """The good kernel's, for all its sabotages."""
    return launcher(case(kernel), case(kernel).program)


def measure(name: str, runs: int) -> dict[str, Any]:
    """Run one program; how many results were wrong and how many different ones there were."""
    named = {str(s): s for s in SABOTAGES}
    c = case(named[name].kernel if name in named else name)
    program = spoilt(named[name]) if name in named else c.program
    good, sabotage = good_launcher(c.name), launcher(c, program)
    arrays = [jnp.asarray(x) for x in c.arrays]
    # Integers are kept: they say which tiles there are and how many, and without sense a kernel would go astray.
    nans = [jnp.full(x.shape, jnp.nan, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays]
    wrong, seen = 0, collections.Counter[str]()
    for _ in range(runs):
        good(*nans)
        outputs = sabotage(*arrays)
        wrong += not c.right(outputs)
        seen[hashlib.sha1(b"".join(x.tobytes() for x in outputs)).hexdigest()] += 1
    return {"runs": runs, "wrong": wrong, "results": len(seen)}


def child(runs: int) -> None:
    """Measure the programs whose names come on standard input; a line of JSON when one begins and when it ends."""
    for name in json.load(sys.stdin):
        print(json.dumps({"name": name}), flush=True)
        try:
            ended = {"outcome": "ran", **measure(name, runs)}
        except MosaicGpuError as error:
            ended = {"outcome": f"refused: {type(error).__name__}: {error.message.splitlines()[0]}"}
        print(json.dumps({"name": name, **ended}), flush=True)


def last_words(errors: str) -> str:
    """Why a child died: the driver's name of the error where its messages have one, else their last line."""
    if found := re.findall(r"CUDA_ERROR_\w+(?:: [^\n]*)?", errors):
        return str(found[0])[:200]
    return next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no message")[:200]


# ---- the parent -------------------------------------------------------------------------------------------------------
Outcome = dict[str, Any]


def attend(
    command: Sequence[str], names: Sequence[str], limit: float = LIMIT, startup: float = STARTUP
) -> Iterator[tuple[str, Outcome]]:
    """(name, outcome) of each program that one child comes to; the last may be the one at which it died or was killed."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            for line in stdout:
                lines.put(line)
            lines.put("")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        with contextlib.suppress(BrokenPipeError):  # it has died already; why is told below
            stdin.write(json.dumps(list(names)))
            stdin.close()
        current, wait = names[0], startup
        try:
            while line := lines.get(timeout=wait):
                report, wait = json.loads(line), limit
                current = report.pop("name")
                if report:
                    yield current, report
                    current = ""
            code = process.wait(wait)
        except (queue.Empty, subprocess.TimeoutExpired):
            process.kill()
            yield current, {"outcome": f"hung: nothing for {wait:.0f} s"}
            return
        finally:
            process.kill()
            process.wait()
            reader.join()
        if code:
            errors.seek(0)
            yield current or names[-1], {"outcome": f"died with code {code}: {last_words(errors.read())}"}


def run_all(
    rows: dict[str, Row], command: Sequence[str], limit: float = LIMIT, startup: float = STARTUP
) -> Iterator[Row]:
    """The rows with their outcomes, as they come; after a child that died a new one goes on with the rest."""
    left = list(rows)
    while left:
        before = len(left)
        for name, outcome in attend(command, left, limit, startup):
            if name in left:
                left.remove(name)
                yield dataclasses.replace(rows[name], **outcome)
        if len(left) == before:
            raise RuntimeError(f"the child ended and reported nothing: {' '.join(command)}")


def run_side_by_side(rows: dict[str, Row], command: Sequence[str], limit: float, workers: int) -> Iterator[Row]:
    """`run_all` by several children at once, each with its share of the rows."""
    names = list(rows)
    shares = [{n: rows[n] for n in names[i::workers]} for i in range(min(workers, len(names)))]
    done: queue.Queue[Row | Exception | None] = queue.Queue()

    def work(share: dict[str, Row]) -> None:
        try:
            for row in run_all(share, command, limit):
                done.put(row)
            done.put(None)
        except Exception as error:
            done.put(error)

    for share in shares:
        threading.Thread(target=work, args=(share,), daemon=True).start()
    running = len(shares)
    while running:
        got = done.get()
        if isinstance(got, Exception):
            raise got
        if got is None:
            running -= 1
        else:
            yield got


def markdown(data: dict[str, Any]) -> list[str]:
    """The table, as lines."""
    ran = [r for r in data["rows"] if r["outcome"] == "ran"]
    bad, clean = [r for r in ran if r["rule"] != GOOD], [r for r in ran if r["rule"] == GOOD]
    other = [r for r in data["rows"] if r["outcome"] != "ran"]
    out = [
        f"{data['date']}, {data['device']}, commit {data['commit']}: each program {data['runs']} times, the good kernel on NaN "
        "before each run, outputs over NaN.",
        "",
        f"- {len(clean)} good kernels: {sum(r['wrong'] for r in clean)} wrong results.",
        f"- {len(bad)} sabotages of {data['all']} that do not deadlock ran to the end: {sum(r['wrong'] > 0 for r in bad)} gave "
        f"wrong results, {sum(r['wrong'] == 0 for r in bad)} gave none, although every one is an error; "
        f"{len(other)} did not run to the end.",
        "",
        "| sabotage | rule | the simulator's finding | wrong results | different results |",
        "|---|---|---|---|---|",
    ]
    for r in sorted(data["rows"], key=lambda r: (r["rule"] != GOOD, -r["wrong"], r["name"])):
        wrong = f"{r['wrong']} of {r['runs']}" if r["outcome"] == "ran" else r["outcome"].replace("|", "/")
        out.append(f"| {r['name']} | {r['rule']} | {r['finding']} | {wrong} | {r['results'] or ''} |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--select", default="", help="only programs whose name contains this")
    parser.add_argument("--workers", type=int, default=1, help="children that share the GPU")
    parser.add_argument("--prepare", type=pathlib.Path, metavar="FILE", help="only find out what can be run; no GPU")
    parser.add_argument("--prepared", type=pathlib.Path, metavar="FILE", help="what --prepare wrote")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.runs)
        return
    if options.prepared:
        rows = {r["name"]: Row(**r) for r in json.loads(options.prepared.read_text())}
        if missing := rows.keys() - set(NAMES) - {str(s) for s in SABOTAGES}:
            raise SystemExit(f"{options.prepared} is of other sources: no program {sorted(missing)[0]!r}")
    else:
        rows = controls() | runnable(s for s in SABOTAGES if options.select in str(s))
    rows = {name: row for name, row in rows.items() if options.select in name}
    if options.prepare:
        options.prepare.write_text(json.dumps([dataclasses.asdict(r) for r in rows.values()], indent=1) + "\n")
        return
    probe = "import jax; print(jax.devices('gpu')[0].device_kind)"
    device = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"},
    )
    if device.returncode:
        raise SystemExit(f"no GPU: {device.stderr.strip().splitlines()[-1]}")
    print(f"{len(rows)} programs", flush=True)
    command = [sys.executable, "-m", "tests.sabotage.on_gpu", "--child", "--runs", str(options.runs)]
    commit = subprocess.run(["git", "log", "-1", "--format=%h"], capture_output=True, text=True)
    data: dict[str, Any] = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "device": device.stdout.strip().splitlines()[-1],
        "commit": commit.stdout.strip() or "unknown",
        "runs": options.runs,
        "all": len(SABOTAGES),
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for row in run_side_by_side(rows, command, options.limit, options.workers):
        print(f"{row.name}: {row.outcome}, {row.wrong} of {row.runs} wrong, {row.results} different", flush=True)
        data["rows"].append(dataclasses.asdict(row))
        # After each: what is there survives a time limit of the whole.
        (options.out / "on_gpu.json").write_text(json.dumps(data, indent=1) + "\n")
        (options.out / "on_gpu.md").write_text("\n".join(markdown(data)) + "\n")


if __name__ == "__main__":
    main()
