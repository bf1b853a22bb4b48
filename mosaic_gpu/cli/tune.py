"""`mosaic-gpu tune run | resume | compile | time`: find the fastest configs for this GPU and keep them where kernels look.

The verbs for cache files are in `tune_caches.py`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from .common import (
    ARCHS,
    FAILED,
    AsJson,
    Refusal,
    kernel_dtype,
    output,
    print_json,
    refused_for,
    require_gpu,
    require_writable,
    steps,
    table,
)

UNITS = {"s": 1, "": 1, "m": 60, "h": 3600}
PLAN, PLAN_SCHEMA = "plan.json", 1
QUIET_SECONDS = 5.0  # between two lines of progress in a log

Kernel = Annotated[
    str, typer.Argument(help="attention, attention_backward, matmul, or FILE.py:NAME of a Tunable of yours.")
]
Shapes = Annotated[str, typer.Option(help="Sets such as llama3-8b, or shapes, with commas between them.")]
Shape = Annotated[list[str] | None, typer.Option(help="A shape, as b4s4096h16d128 or m4096n4096k4096; repeatable.")]
FromFile = Annotated[Path | None, typer.Option(help="A file with a shape a line.")]
Causal = Annotated[bool | None, typer.Option("--causal/--full", help="One mask only; default: both.")]
Dtype = Annotated[str, typer.Option(help="bf16 or f16.")]
Budget = Annotated[str, typer.Option(help="Time for everything: 120s, 10m, 1h; default: until all is done.")]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Time every config fully, whatever its estimate says.")]
Guided = Annotated[int, typer.Option(min=0, help="Let Optuna choose so many configs to time.")]
Again = Annotated[bool, typer.Option("--again", help="Measure anew what is known.")]
Repo = Annotated[bool, typer.Option("--repo", help="Write the autotune_cache/ of this checkout, not the user's.")]


def seconds_of(text: str) -> float:
    """'120s', '2m', '1.5h' or a plain number of seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|)\s*", text)
    if found is None or float(found[1]) == 0:
        raise Refusal(f"--budget {text}: write 120s, 10m or 1.5h")
    return float(found[1]) * UNITS[found[2]]


def tunable_for(kernel: str, arch: str) -> Any:
    """The kernel to tune; a refusal says which there are."""
    from ..errors import UnsupportedCall
    from ..tune.space import generation_of
    from ..tune.tunable import find_tunable
    from .targets import users_code

    try:
        if ":" not in kernel:
            return find_tunable(kernel, generation_of(arch))
        with users_code(Path(kernel.rpartition(":")[0]), f"{kernel} cannot be imported"):
            try:
                return find_tunable(kernel)
            except ValueError as error:
                raise Refusal(str(error)) from error
    except (ValueError, UnsupportedCall) as error:
        raise Refusal(f"tune: {error}") from error


def wanted_shapes(
    kernel: str,
    tunable: Any,
    shapes: str,
    shape: list[str] | None,
    from_file: Path | None,
    causal: bool | None,
    dtype: str,
) -> list[Any]:
    """The workloads that the options ask for, the kernel's usual ones if they ask for none."""
    from ..tune.shapes import DEFAULTS, named_shapes, shapes_from_file, workloads

    with refused_for("--from-file"):
        texts = shapes_from_file(from_file) if from_file else []
    with refused_for("--shapes"):
        named = named_shapes(kernel, shapes) if shapes else []
    options: dict[str, Any] = {"dtype": kernel_dtype(dtype) if kernel in DEFAULTS else dtype, "causal": causal}
    found = []
    for option, some in (("--from-file", texts), ("--shapes", named), ("--shape", list(shape or []))):
        with refused_for(option):
            found += workloads(tunable, some, **options)
    if not found:
        if kernel not in DEFAULTS:
            example = tunable.example or "".join(f"{letter}128" for letter in tunable.letters)
            raise Refusal(f"{kernel} has no usual shapes: give --shape, such as {example}")
        with refused_for("--causal or --full"):
            found = workloads(tunable, DEFAULTS[kernel], **options)
    return list(dict.fromkeys(found))


def machine() -> Any:
    """This host as workers see it; a refusal without a GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the workers need the memory
    require_gpu("tune")
    from ..tune.workers import machine_here

    return machine_here()


def folder_for(repo: bool) -> Path:
    """Where to write; a refusal where that cannot be."""
    from ..tune import cache

    folder = cache.repository_folder() if repo else cache.user_folder()
    if repo and not (folder.parent / "pyproject.toml").exists():
        raise Refusal(f"--repo: {folder} is not in a checkout of this project")
    require_writable(folder, "--repo" if repo else cache.ENVIRONMENT_VARIABLE)
    return folder


def settings_of(exhaustive: bool, guided: int) -> Any:
    """From the command line."""
    from ..tune.search import Settings

    return Settings(exhaustive=exhaustive, guided=guided)


def run(
    kernel: Kernel,
    shapes: Shapes = "",
    shape: Shape = None,
    from_file: FromFile = None,
    causal: Causal = None,
    dtype: Dtype = "bf16",
    budget: Budget = "",
    exhaustive: Exhaustive = False,
    guided: Guided = 0,
    again: Again = False,
    repo: Repo = False,
    as_json: AsJson = False,
) -> None:
    """Search the fastest config of each shape on this host's GPUs; what is known already is not measured again.

    Every result is judged before it is timed, every trial is on disk when it has ended: stop it at any time and run it
    again.  Exit code 1 if no config was right for some shape; 2 without a GPU.
    """
    total = seconds_of(budget) if budget else float("inf")
    tunable = tunable_for(kernel, "sm_90a")
    wanted_shapes(
        kernel, tunable, shapes, shape, from_file, causal, dtype
    )  # what is wrong with them, before a GPU is asked for
    here = machine()
    tunable = tunable_for(kernel, here.arch)
    wanted = wanted_shapes(kernel, tunable, shapes, shape, from_file, causal, dtype)
    tune(tunable, wanted, here, folder_for(repo), settings_of(exhaustive, guided), total, again, as_json)


def resume(
    kernel: Kernel,
    budget: Budget = "",
    exhaustive: Exhaustive = False,
    guided: Guided = 0,
    repo: Repo = False,
    as_json: AsJson = False,
) -> None:
    """Go on with every shape that this device's cache has: measure what is new or was not reached."""
    total = seconds_of(budget) if budget else float("inf")
    tunable_for(kernel, "sm_90a")
    here = machine()
    tunable, folder = tunable_for(kernel, here.arch), folder_for(repo)
    from ..tune import cache
    from ..tune.manage import good_entries

    path = cache.cache_file(folder, here.device["name"], tunable.name)
    if not path.exists():
        raise Refusal(f"there is nothing to go on with: no {path}")
    wanted = [tunable.workload(e["workload"]) for e in good_entries(cache.read(path))]
    tune(tunable, wanted, here, folder, settings_of(exhaustive, guided), total, False, as_json)


def tune(
    tunable: Any,
    wanted: Sequence[Any],
    here: Any,
    folder: Path,
    settings: Any,
    budget: float,
    fresh: bool,
    as_json: bool,
    only: Sequence[Sequence[dict[str, Any]]] | None = None,
) -> None:
    """Search all workloads, show how it goes, print what came of it."""
    from ..errors import MosaicGpuError
    from ..tune.workers import Job, run_all

    jobs = [
        Job(
            tunable.reference_text,
            w.to_json(),
            str(folder),
            settings,
            fresh=fresh,
            only=None if only is None else tuple(only[i]),
        )
        for i, w in enumerate(wanted)
    ]
    outcomes: dict[int, Any] = {}
    begun = time.monotonic()
    with TuneProgress(wanted) as progress:
        for number, outcome in run_all(jobs, here, budget=budget, on_event=progress.event):
            outcomes[number] = outcome
            progress.ended(number)
    rows = [_row(w, outcomes[i]) for i, w in enumerate(wanted)]
    path = next((str(o.path) for o in outcomes.values() if not isinstance(o, MosaicGpuError)), None)
    if as_json:
        print_json({"file": path, "seconds": time.monotonic() - begun, "gpus": len(here.gpus), "results": rows})
    else:
        _print(rows, here, path)
    if any(r["config"] is None for r in rows):
        raise typer.Exit(FAILED)


def _row(w: Any, outcome: Any) -> dict[str, Any]:
    from ..errors import MosaicGpuError

    row: dict[str, Any] = {"shape": name_of(w), "workload": w.to_json(), "message": ""}
    if isinstance(outcome, MosaicGpuError):
        empty = dict.fromkeys(("tflops", "seconds", "heuristic_seconds", "gain", "config"))
        return {**row, **empty, "measured": 0, "known": 0, "left": 0, "message": str(outcome)}
    best = outcome.best or dict.fromkeys(("config", "seconds", "tflops"))
    gain = outcome.heuristic / best["seconds"] - 1 if outcome.heuristic and best["seconds"] else None
    return {
        **row,
        "tflops": best["tflops"],
        "seconds": best["seconds"],
        "heuristic_seconds": outcome.heuristic,
        "gain": gain,  # of the tuned config over the heuristic's
        "config": best["config"],
        "measured": outcome.measured,
        "known": outcome.known,
        "left": outcome.left,
        "message": "" if outcome.best else "no config gave a right result",
    }


def _print(rows: list[dict[str, Any]], here: Any, path: str | None) -> None:
    columns = ["shape", "us", "TFLOP/s", "gain", "measured", "known", "left", "config"]
    cells = []
    for r in rows:
        gain = None if r["gain"] is None else f"{r['gain']:+.1%}"
        us = None if r["seconds"] is None else f"{r['seconds'] * 1e6:.1f}"
        cells.append(
            [
                r["shape"],
                us,
                r["tflops"],
                gain,
                r["measured"],
                r["known"],
                r["left"],
                r["config"] and short(r["config"]),
            ]
        )
    console = output()
    console.print(table(f"tuned on {here.device['name']}, {len(here.gpus)} GPU(s)", columns, cells))
    for r in rows:
        if r["message"]:
            console.print(f"{r['shape']}: {r['message']}", highlight=False, markup=False)
    if path:
        console.print(path, highlight=False, soft_wrap=True)
    if any(r["left"] for r in rows):
        console.print("time was up before all were tried; the same command goes on", highlight=False)


def compile_ahead_of_time(
    kernel: Kernel,
    out: Annotated[Path, typer.Option(help="A folder for the plan and the compiled kernels.")],
    shapes: Shapes = "",
    shape: Shape = None,
    from_file: FromFile = None,
    causal: Causal = None,
    dtype: Dtype = "bf16",
    arch: Annotated[str, typer.Option(help=f"{', '.join(ARCHS)}.")] = "sm_90a",
    top: Annotated[int, typer.Option(min=0, help="Only so many configs by the cost estimate; 0: all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Without a GPU: enumerate, rank and compile configs into a folder, for `tune time` on a machine with one."""
    if arch not in ARCHS:
        raise Refusal(f"--arch {arch}: one of {', '.join(ARCHS)}")
    tunable = tunable_for(kernel, arch)
    wanted = wanted_shapes(kernel, tunable, shapes, shape, from_file, causal, dtype)
    require_writable(out, "--out")
    from ..codegen.cubin_cache import ENVIRONMENT_VARIABLE
    from ..codegen.nvrtc import find_nvrtc
    from ..runtime.device import planning_for
    from ..tune.chip import chip_of
    from .ahead import compile_ahead, compile_pool

    chip = chip_of(None, arch)
    plan: dict[str, Any] = {
        "schema": PLAN_SCHEMA,
        "kernel": kernel,
        "arch": arch,
        "nvrtc": find_nvrtc().toolchain,
        "ranked_for": chip.name,
    }
    plan["workloads"] = []
    os.environ[ENVIRONMENT_VARIABLE] = str(out.resolve())
    with steps(len(wanted)) as progress, compile_pool(max(os.cpu_count() or 1, 2)) as pool:
        assert pool is not None
        for w in wanted:
            progress.step(f"compiling {name_of(w)}")
            with planning_for(chip.multiprocessors, arch):
                ranked = tunable.candidates(w, chip)
            ranked = ranked[:top] if top else ranked
            found = compile_ahead(tunable, w, ranked, arch, pool)
            configs = [
                {"config": c.to_json(), "rank": i, "estimate_seconds": tunable.cost(w, c, chip), **found[c]}
                for i, c in enumerate(ranked)
            ]
            plan["workloads"].append({"workload": w.to_json(), "configs": configs})
    (out / PLAN).write_text(json.dumps(plan, indent=1) + "\n")
    rows = []
    for w, entry in zip(wanted, plan["workloads"], strict=True):
        counts = [sum(c["status"] == s for c in entry["configs"]) for s in ("ok", "spilled", "refused")]
        first = next((c for c in entry["configs"] if c["status"] == "ok"), None)
        rows.append([name_of(w), *counts, first and short(first["config"])])
    if as_json:
        print_json({**plan, "folder": str(out)})
    else:
        console = output()
        console.print(table(f"compiled for {arch}", ["shape", "ok", "spilled", "refused", "first by estimate"], rows))
        console.print(f"carry {out} to the GPU's machine: mosaic-gpu tune time {out}", highlight=False, soft_wrap=True)
    if any(not any(c["status"] == "ok" for c in e["configs"]) for e in plan["workloads"]):
        raise typer.Exit(FAILED)


def time_compiled(
    folder: Annotated[Path, typer.Argument(help="What `tune compile --out` has written.")],
    budget: Budget = "",
    exhaustive: Exhaustive = False,
    repo: Repo = False,
    as_json: AsJson = False,
) -> None:
    """On the GPU's machine: judge and time what `tune compile` has compiled, and write the cache."""
    total = seconds_of(budget) if budget else float("inf")
    try:
        plan = json.loads((folder / PLAN).read_text())
        if plan["schema"] != PLAN_SCHEMA:
            raise ValueError(f"schema {plan['schema']}, this version has {PLAN_SCHEMA}")
        kernel, arch, entries = plan["kernel"], plan["arch"], plan["workloads"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{folder} has no plan of `tune compile`: {error}") from error
    here = machine()
    if here.arch != arch:
        raise Refusal(f"{folder} was compiled for {arch}, this GPU is {here.arch}")
    tunable = tunable_for(kernel, arch)
    from ..codegen.cubin_cache import ENVIRONMENT_VARIABLE

    os.environ[ENVIRONMENT_VARIABLE] = str(folder.resolve())
    if plan["nvrtc"] != here.toolchain["nvrtc"]:
        Console(stderr=True).print(
            f"compiled by {plan['nvrtc']}, this machine has {here.toolchain['nvrtc']}: it is compiled again",
            highlight=False,
        )
    only = [[c["config"] for c in e["configs"] if c["status"] == "ok"] for e in entries]
    wanted = [tunable.workload(e["workload"]) for e in entries]
    tune(tunable, wanted, here, folder_for(repo), settings_of(exhaustive, 0), total, False, as_json, only)


def name_of(w: Any) -> str:
    """A workload in words."""
    return " ".join(
        str(x) for x in (w, getattr(w, "mask", ""), "f16" if getattr(w, "dtype", "") == "float16" else "") if str(x)
    )


def short(config: dict[str, Any]) -> str:
    """A config in one line, without its tags."""
    return " ".join(f"{k}={v}" for k, v in config.items() if k not in ("generation", "kernel"))


class TuneProgress:
    """A line for each workload that is being searched: how far, the best so far, the time left."""

    def __init__(self, wanted: Sequence[Any]) -> None:
        self.wanted, self.through = wanted, set[int]()
        self.console = Console(stderr=True)
        columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn()]
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.tasks: dict[int, Any] = {}
        self.said: dict[int, tuple[float, str]] = {}

    def __enter__(self) -> TuneProgress:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def event(self, number: int, event: Any) -> None:
        """Something happened in the search of a workload."""
        if event.what in ("trying", "trial", "waiting"):
            return
        text = self.text(number, event)
        if number not in self.tasks:
            self.tasks[number] = self.progress.add_task("", total=None)
        self.progress.update(
            self.tasks[number], description=escape(text), completed=event.done, total=event.total or None
        )
        before, what = self.said.get(number, (0.0, ""))
        if not self.console.is_terminal and (event.what != what or time.monotonic() - before > QUIET_SECONDS):
            self.said[number] = (time.monotonic(), event.what)
            self.console.print(f"… {text}", highlight=False, markup=False, soft_wrap=True)

    def text(self, number: int, event: Any) -> str:
        """Such as 'b4 s4096 h16 d128 full (2 of 12): timing 31 of 80, best 861.0 us 638 TFLOP/s, 40 s left'."""
        w = self.wanted[number]
        text = f"{name_of(w)} ({len(self.through - {number}) + 1} of {len(self.wanted)}): {event.what}"
        text += f" {event.done} of {event.total}" if event.done else ""
        if event.best:
            rate = f" {w.flops / event.best / 1e12:.0f} TFLOP/s" if w.flops else ""
            text += f", best {event.best * 1e6:.1f} us{rate}"
        if event.what == "crashed" and event.config is not None:
            text += f": {short(event.config.to_json())}"
        return text + (f", {event.left:.0f} s left" if event.left is not None else "")

    def ended(self, number: int) -> None:
        """A workload is through, for now: one that ran out of its time may be taken up again."""
        self.through.add(number)
        if number in self.tasks:
            self.progress.remove_task(self.tasks.pop(number))
