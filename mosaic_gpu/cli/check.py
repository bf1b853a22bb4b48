"""`mosaic-gpu check`: a kernel's source line by line: what each line became, where arrays lie, what it costs, what fails."""

from __future__ import annotations

import collections
import linecache
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..collecting import Failure, collecting
from ..errors import Line, MosaicGpuError
from .common import ARCHS, FAILED, AsJson, Refusal, output, parse_json_option, print_json, table
from .compile import target_arch

# What is one of our operations, by the names that JAX's backends have for it.
THEIRS = {
    "for": ("scan", "while"),
    "get_indexed": ("get", "masked_load"),
    "put_indexed": ("swap", "masked_swap"),
    "get": ("get", "masked_load", "load"),
    "swap": ("swap", "masked_swap"),
    "layout_cast": ("layout_cast", "relayout"),
}


def check_kernel(
    kernel: Annotated[
        str,
        typer.Argument(
            help="attention, attention_backward, matmul, or FILE.py:NAME of a kernel (or pallas_call) of yours."
        ),
    ],
    arch: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(ARCHS)}; default: the kernel's, else this GPU's, else sm_90a."),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="b4s4096h32kv8d128, or m4096n4096k4096 for matmul.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 or f16; default: bf16.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Attention: query i sees keys 0 to i.")] = False,
    config: Annotated[str | None, typer.Option(help="The kernel's config as JSON.")] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="Type of an argument of your kernel, e.g. 'bf16[4096,128]'; repeat.")
    ] = None,
    backends: Annotated[
        bool, typer.Option("--backends", help="Also which of JAX's own GPU backends have all of a line's primitives.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what each source line of a kernel becomes, and every failure at once."""
    if arch is not None and arch not in ARCHS:
        raise Refusal(f"--arch {arch}: one of {', '.join(ARCHS)}")
    fields = parse_json_option(config, "--config")
    from ..runtime import device
    from .targets import Request, find_call, programs_for

    request = Request(arch or target_arch(), shape, dtype, causal, False, fields)
    with collecting() as traced:
        try:
            with device.planning_for(device.multiprocessors(), request.arch):
                programs = programs_for(*find_call(kernel, request, arg or ()), arch)
        except MosaicGpuError as error:  # one that leaves nothing to go on with
            failures = [*traced, Failure(error, error.line, rest=f"the rest of {kernel}")]
            data = _report(kernel, request.arch, [], failures, [], backends)
        else:
            from ..plan.check import check_program

            target = arch or programs[0].params.arch or request.arch
            checked = [check_program(p, target, traced) for p in programs]
            failures = [*traced, *(Failure(e, e.line) for c in checked for e in c.errors)]
            name = ", ".join(dict.fromkeys(p.name for p in programs))
            skipped = [s for c in checked for s in c.skipped]
            data = _report(name, target, [f for c in checked for f in c.findings], failures, skipped, backends)
    if as_json:
        print_json(data)
    else:
        _print(data, backends)
    if not data["ok"]:
        raise typer.Exit(FAILED)


def _report(
    name: str, arch: str, findings: Any, errors: Sequence[Failure], skipped: Sequence[str], backends: bool
) -> dict[str, Any]:
    """The lines in the order of their files, each with its operations and failures."""
    lines: dict[tuple[str, int], dict[str, Any]] = {}

    def at(line: Line) -> dict[str, Any]:
        key = (line.file, line.number)
        if key not in lines:
            source = linecache.getline(*key).strip()
            lines[key] = {"file": line.file, "line": line.number, "source": source, "operations": [], "failures": []}
        return lines[key]

    counts: collections.Counter[Any] = collections.Counter()
    for f in findings:
        if f.line is not None:
            counts[f] += 1
    theirs = _backends() if backends else {}
    for f, count in counts.items():
        row: dict[str, Any] = {
            "operation": f.op,
            "count": count,
            "table": f.table,
            "rule": f.rule,
            "layouts": list(f.layouts),
            "costs": list(f.costs),
        }
        if backends:
            row["backends"] = [b for b, names in theirs.items() if names & {f.op, *THEIRS.get(f.op, ())}]
        at(f.line)["operations"].append(row)
    other = []
    for f in errors:
        failure = {"class": type(f.error).__name__, "message": f.message}
        if f.line is None:
            other.append(failure)
        else:
            at(f.line)["failures"].append(failure)
    ordered = [lines[k] for k in sorted(lines)]
    missed = [*(f.rest for f in errors if f.rest), *skipped]
    return {
        "kernel": name,
        "arch": arch,
        "ok": not errors,
        "lines": ordered,
        "failures": other,
        "skipped": list(dict.fromkeys(missed)),
    }


def _backends() -> dict[str, set[str]]:
    from ..ops import coverage

    try:
        return {b: set(coverage.backend_names(b)) for b in coverage.BACKENDS}
    except (OSError, ValueError) as error:
        raise Refusal(f"--backends: the installed JAX's rules cannot be read ({error})") from error


def _print(data: dict[str, Any], backends: bool) -> None:
    console = output()
    by_file: dict[str, list[dict[str, Any]]] = {}
    for line in data["lines"]:
        by_file.setdefault(line["file"], []).append(line)
    for file, lines in by_file.items():
        rows = []
        for line in lines:
            for k, o in enumerate(line["operations"] or [None]):
                first = [line["line"], line["source"]] if k == 0 else ["", ""]
                if o is None:
                    rows.append([*first, "", "", "", "", *([""] if backends else [])])
                    continue
                times = f" x{o['count']}" if o["count"] > 1 else ""
                rule = o["table"] if o["rule"] else f"not in {o['table']}"
                row = [*first, o["operation"] + times, rule, "\n".join(o["layouts"]), "\n".join(o["costs"])]
                rows.append([*row, " ".join(o["backends"]) or "–"] if backends else row)
        columns = ["line", "source", "operation", "table", "layouts", "cost", *(["JAX's backends"] if backends else [])]
        console.print(table(f"{Path(file).name} for {data['arch']}", columns, rows, left=len(columns)))
    failures = [(f"{Path(x['file']).name}:{x['line']}: {x['source']}", f) for x in data["lines"] for f in x["failures"]]
    for where, f in [*failures, *(("", f) for f in data["failures"])]:
        console.print(f"[bold red]{f['class']}[/] {escape(where)}", highlight=False, soft_wrap=True)
        console.print(f"  {escape(f['message'])}", highlight=False, soft_wrap=True)
    for what in data["skipped"]:
        console.print(f"[bold]not looked at:[/] {escape(what)}", highlight=False, soft_wrap=True)
    total = len(failures) + len(data["failures"])
    console.print(f"{data['kernel']}: {f'{total} failures' if total else 'every line has its rules'}")
