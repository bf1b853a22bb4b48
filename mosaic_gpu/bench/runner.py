"""The command line that benchmarks of kernels share: which cells, how long, and a result file that a next run goes on with."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import site
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from .gpu import NoGpu, TorchDevice
from .harness import measure_cell
from .model import QUICK, Cell, Device, DeviceLost, Options, Provider, first_line
from .verdicts import geometric_mean

OK, FAILED, NO_GPU, UNFINISHED = 0, 1, 2, 3
SCHEMA = 1
MIN_ROUNDS, MIN_REPEATS = 30, 7  # what a claim rests on
PROTOCOLS = ("interleaved", "alone")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """problem(device, cell, seed): inputs and judge.  providers(device, configs file): ours and the peers, ours first."""

    name: str
    cells: Sequence[Cell]
    problem: Callable[[Any, Cell, int], Any]
    providers: Callable[[Any, str | None], list[Provider]]


def parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    """Of the command line."""
    p = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark.name}",
        description="Exit code 0: all cells done; 1: a result of ours is wrong or does not run; 2: no Hopper GPU; "
        "3: the time budget ended it, run it again with the same --json.",
    )
    add = p.add_argument
    add("--json", type=pathlib.Path, help="result file: written after each cell; cells in it are not measured again")
    add("--cells", default="", help="only cells whose name this regular expression matches")
    add("--providers", default="", help="only providers whose name this regular expression matches; ours always")
    add("--ours-configs", help='JSON: {"name": {config}, ...}, or a list of {"name", "cells", "config"}')
    add("--rounds", type=int, help=f"of the interleaved protocol (default {Options().rounds}; 30 at least for a claim)")
    add("--alone-repeats", type=int, help=f"default {Options().alone_repeats}; 7 at least for a claim")
    add("--alone-seconds", type=float, help=f"default {Options().alone_seconds}")
    add("--quick", action="store_true", help="a look: 8 rounds, 3 x 0.2 s alone; no basis for a claim")
    add("--budget", type=float, help="seconds; no cell is begun that would probably not end in time")
    add("--seed", type=int, default=0, help="of the inputs")
    add("--site", action="append", default=[], help="a folder of packages to add, its .pth files processed")
    add("--retry", action="store_true", help="measure cells again that failed")
    add("--list", action="store_true", help="print the names of the cells and end")
    return p


def main(benchmark: Benchmark, argv: Sequence[str] | None = None, device: Device | None = None) -> int:
    """Run it; returns the exit code.  device: tests give one."""
    p = parser(benchmark)
    args = p.parse_args(argv)
    try:
        cells = [c for c in benchmark.cells if re.search(args.cells, c.name)]
        re.compile(args.providers)
    except re.error as error:
        p.error(f"not a regular expression: {error}")
    if args.list:
        print("\n".join(c.name for c in cells))
        return OK
    if not cells:
        p.error(f"--cells {args.cells!r} matches none of: {', '.join(c.name for c in benchmark.cells)}")
    for folder in args.site:
        site.addsitedir(folder)
    try:
        device = device or TorchDevice()
    except NoGpu as error:
        print(f"benchmarks.{benchmark.name}: {error}", file=sys.stderr)
        return NO_GPU
    try:
        providers = benchmark.providers(device, args.ours_configs)
    except (OSError, ValueError, TypeError) as error:
        p.error(f"--ours-configs: {error}")
    providers = [x for x in providers if x.ours or re.search(args.providers, x.name)]
    run = _Run(benchmark, args, device, cells, providers)
    return run.go()


def options_of(args: argparse.Namespace) -> Options:
    """From the command line."""
    base = QUICK if args.quick else Options()
    given = {f: getattr(args, f) for f in ("rounds", "alone_repeats", "alone_seconds") if getattr(args, f) is not None}
    return dataclasses.replace(base, **given)


class _Run:
    def __init__(
        self,
        benchmark: Benchmark,
        args: argparse.Namespace,
        device: Device,
        cells: Sequence[Cell],
        providers: Sequence[Provider],
    ) -> None:
        self.benchmark, self.args, self.device, self.cells, self.providers = benchmark, args, device, cells, providers
        self.options = options_of(args)
        self.quick = self.options.rounds < MIN_ROUNDS or self.options.alone_repeats < MIN_REPEATS
        # A record counts as done only if it was measured in the same way; configs and versions are part of that.
        ours = {x.name: x.version() for x in providers if x.ours}
        self.settings = dataclasses.asdict(self.options) | {
            "ours": ours,
            "peers": [x.name for x in providers if not x.ours],
        }
        self.settings["seed"] = args.seed
        self.results: dict[str, Any] = {"schema": SCHEMA, "benchmark": benchmark.name, "cells": {}}
        if args.json and args.json.exists():
            self.results = json.loads(args.json.read_text())
            if self.results.get("schema") != SCHEMA or self.results.get("benchmark") != benchmark.name:
                raise SystemExit(f"{args.json} is no result file of benchmarks.{benchmark.name}: name another")
        self.machine = device.describe()
        self.results["machine"] = self.machine

    def done(self, cell: Cell) -> bool:
        """Whether the result file has it, measured in this way on this machine."""
        record = self.results["cells"].get(cell.name)
        same = record is not None and record["settings"] == self.settings and record["machine"] == self.machine
        return same and not (self.args.retry and _bad(record))

    def go(self) -> int:
        begun, longest = time.monotonic(), 0.0
        print(f"{self.benchmark.name} on {self.machine}", flush=True)
        for number, cell in enumerate(self.cells, 1):
            if self.done(cell):
                print(f"[{number}/{len(self.cells)}] {cell.name}: in {self.args.json}", flush=True)
                continue
            spent = time.monotonic() - begun
            if self.args.budget and spent + longest > self.args.budget:
                print(f"time budget: {spent:.0f} s used, {len(self.cells) - number + 1} cells from {cell.name} on left")
                self.report()
                return UNFINISHED
            print(f"[{number}/{len(self.cells)}] {cell.name} ({spent:.0f} s)", flush=True)
            started = time.monotonic()
            lost = self.measure(cell)
            longest = max(longest, time.monotonic() - started)
            if lost:
                self.report()
                if isinstance(self.device, TorchDevice):
                    sys.stdout.flush()
                    os._exit(FAILED)  # a usual end would wait for the GPU, for ever if a kernel hangs
                return FAILED
        self.report()
        return FAILED if any(_bad(self.results["cells"][c.name]) for c in self.cells) else OK

    def measure(self, cell: Cell) -> bool:
        """One cell, written at once; True if the GPU is lost."""
        lost = False
        try:
            problem = self.benchmark.problem(self.device, cell, self.args.seed)
            record = measure_cell(cell, problem, self.providers, self.device, self.options, _log)
            del problem
            self.device.release()
        except Exception as error:  # in the middle of measuring: nothing after it can be trusted
            message = str(error) if isinstance(error, DeviceLost) else f"{type(error).__name__}: {first_line(error)}"
            record = {"cell": cell.name, "flops": cell.flops, "providers": {}, "comparison": {}}
            record |= {"verdict": "failed", "message": message}
            print(f"    failed: {message}", flush=True)
            lost = True
        record |= {"settings": self.settings, "machine": self.machine, "quick": self.quick}
        print(f"    verdict: {describe(record)}", flush=True)
        self.results["cells"][cell.name] = record
        if self.args.json:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.args.json.with_suffix(".writing")
            temporary.write_text(json.dumps(self.results, indent=1))
            temporary.replace(self.args.json)
        return lost

    def report(self) -> None:
        print(report([self.results["cells"].get(c.name) or {"cell": c.name} for c in self.cells]), flush=True)


def _bad(record: dict[str, Any]) -> bool:
    """Whether a kernel of ours is wrong or does not run."""
    rows = [r["status"] for r in record["providers"].values() if r["ours"]]
    return any(x in ("failed", "wrong") for x in [record["verdict"], *rows])


def _log(line: str) -> None:
    print(line, flush=True)


def describe(record: dict[str, Any]) -> str:
    """The verdict with its ratios."""
    chosen = record.get("comparison", {}).get(record.get("chosen", ""), {})
    ratios = [
        f"{k} {r['value']:.3f} [{r['low']:.3f}, {r['high']:.3f}] to {r['peer']} {r['verdict']}"
        for k, r in chosen.items()
    ]
    return "; ".join([str(record["verdict"]), *ratios])


def report(records: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown with a row for every cell, what ours cannot do and what was not reached included."""
    names = list(dict.fromkeys(n for r in records for n, row in r.get("providers", {}).items()))
    hosted = {n for r in records for n, row in r.get("providers", {}).items() if row["host_timed"]}
    heads = [n + (" (host-timed)" if n in hosted else "") for n in names]
    lines = ["", "TFLOP/s, medians, interleaved / alone. (host-timed): by the host's clock, not by events.", ""]
    lines += ["| " + " | ".join(["cell", *heads, "ratio interleaved", "ratio alone", "verdict"]) + " |"]
    lines += ["|" + "---|" * (len(names) + 4)]
    for r in records:
        chosen = r.get("comparison", {}).get(r.get("chosen", ""), {})
        ratios = [_ratio(chosen.get(k)) for k in PROTOCOLS]
        verdict = r.get("verdict", "not reached") + (" (quick)" if r.get("quick") else "")
        entries = [_entry(r.get("providers", {}).get(n)) for n in names]
        lines.append("| " + " | ".join([r["cell"], *entries, *ratios, verdict]) + " |")
    return "\n".join(lines + ["", *_summary(records), *_reasons(records)])


def _ratio(r: dict[str, Any] | None) -> str:
    return f"{r['value']:.3f} [{r['low']:.3f}, {r['high']:.3f}] {r['peer']}" if r else "–"


def _entry(row: dict[str, Any] | None) -> str:
    if row is None or "interleaved" not in row:
        return row["status"] if row and row["status"] != "ok" else "–"
    alone = f"{row['alone']['median']:.0f}" if "alone" in row else "–"
    return f"{row['interleaved']['median']:.0f} / {alone}"


def _summary(records: Sequence[dict[str, Any]]) -> list[str]:
    compared = [r for r in records if r.get("comparison", {}).get(r.get("chosen", ""))]
    means = []
    for protocol in PROTOCOLS:
        values = [r["comparison"][r["chosen"]][protocol]["value"] for r in compared]
        means.append(
            f"{protocol} {geometric_mean(values):.3f}" if values and math.isfinite(values[0]) else f"{protocol} –"
        )
    kinds = [r.get("verdict", "not reached") for r in records]
    counts = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
    return [
        f"geometric mean of ours / best peer over {len(compared)} of {len(records)} cells: {', '.join(means)}",
        f"cells: {counts}",
    ]


def _reasons(records: Sequence[dict[str, Any]]) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for r in records:
        if r.get("message"):
            found.setdefault(("cell", r["message"]), []).append(r["cell"])
        for name, row in r.get("providers", {}).items():
            if row["message"]:
                found.setdefault((name, row["message"]), []).append(r["cell"])
    return [
        f"{name}: {why} ({len(cells)} cells: {', '.join(cells[:3])}{', …' if len(cells) > 3 else ''})"
        for (name, why), cells in found.items()
    ]
