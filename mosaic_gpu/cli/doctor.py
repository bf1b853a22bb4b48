"""`mosaic-gpu doctor`: what is installed, and what will work as a consequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import typer
from rich.markup import escape
from rich.table import Table

from .checks import GPU_ARCHS, Check, all_checks
from .common import FAILED, AsJson, output, print_json, steps

MARKS = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "problem": "[red]problem[/]"}


@dataclasses.dataclass(frozen=True)
class Ability:
    """Something that works or does not.  why: the checks that stand against it."""

    name: str
    works: bool
    why: str = ""


def abilities(checks: Sequence[Check]) -> list[Ability]:
    """What follows from the checks."""
    found = {c.name: c for c in checks}

    def needs(name: str, *wanted: str, extra: str = "") -> Ability:
        lacking = [w for w in wanted if w not in found or not found[w].ok]
        why = ", ".join(f"needs {w}" for w in lacking) or extra
        return Ability(name, not why, why)

    trace = ("jax", "jaxlib")
    compiler = found.get("NVRTC")
    known = compiler.data["architectures"] if compiler is not None and compiler.data else []

    def compiles(arch: str) -> Ability:
        unknown = "" if int(arch[3:-1]) in known else "this NVRTC is too old for it: pip install -U nvidia-cuda-nvrtc"
        return needs(f"compile for {arch}", *trace, "NVRTC", "nvdisasm", extra=unknown)

    gpu = found.get("GPU")
    run = needs(
        "run on the GPU", *trace, "NVRTC", "nvdisasm", "native launcher", "NVIDIA driver", "GPU", "JAX on the GPU"
    )
    if run.works and gpu is not None:
        archs = {GPU_ARCHS[capability] for _, capability in gpu.data if capability in GPU_ARCHS}
        if blocked := [a for a in sorted(archs) if not compiles(a).works]:
            run = Ability(run.name, False, compiles(blocked[0]).why)
    return [needs("simulate", *trace), compiles("sm_90a"), compiles("sm_100a"), run]


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, which GPU there is, and what will work.

    Exit code 1 if not even the simulator works.
    """
    with steps() as progress:
        progress.step("looking at compilers, JAX and the GPU")
        checks = all_checks()
    able = abilities(checks)
    if as_json:
        print_json({"checks": [dataclasses.asdict(c) for c in checks], "works": [dataclasses.asdict(a) for a in able]})
    else:
        console = output()
        grid = Table(title="Installed", title_justify="left", title_style="bold")
        for column in ("what", "", "detail"):
            grid.add_column(column, overflow="fold")
        for c in checks:
            remedy = f"\n[bold]→ {escape(c.remedy)}[/]" if c.remedy and not c.ok else ""
            grid.add_row(c.name, MARKS[c.status], escape(c.detail) + remedy)
        console.print(grid)
        grid = Table(title="What will work", title_justify="left", title_style="bold")
        for column in ("what", "", "why not"):
            grid.add_column(column, overflow="fold")
        for a in able:
            grid.add_row(a.name, "[green]yes[/]" if a.works else "[red]no[/]", escape(a.why))
        console.print(grid)
    if not able[0].works:
        raise typer.Exit(FAILED)
