"""`mosaic-gpu simulate`: a kernel in the simulator, under many legal schedules, on random inputs.  No GPU needed."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MosaicGpuError, Race
from ..simulator.params import SimulatorParams
from ..simulator.remarks import Report, UnwrittenOutput
from .common import (
    FAILED,
    AsJson,
    Bias,
    BottomRight,
    Mask,
    Refusal,
    output,
    parse_json_option,
    print_json,
    steps,
    table,
)
from .compile import ARCHS, target_arch

if TYPE_CHECKING:
    from ..plan.residency import Residency

SMALL = {  # what the simulator does in moments
    "attention": "b1s256h2kv1d128",
    "attention_backward": "b1s256h2kv1d128",
    "matmul": "m256n256k256",
}


def simulate_kernel(
    kernel: Annotated[
        str, typer.Argument(help="attention, attention_backward, matmul, or FILE.py:NAME of a kernel of yours.")
    ],
    schedules: Annotated[int, typer.Option(min=0, help="How many random orders, besides late and early.")] = 20,
    schedule: Annotated[
        list[str] | None, typer.Option(help="Only this one, as the table calls it: late, early, 'seed 7'; repeat.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
    shadow: Annotated[
        str,
        typer.Option(
            help="What accesses are remembered for: 'regions' of memory, or 'bytes' (slow, the same findings)."
        ),
    ] = "regions",
    arch: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(ARCHS)}; default: the kernel's, else this GPU's, else sm_90a."),
    ] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Do not ask NVRTC and ptxas first.")] = False,
    shape: Annotated[str | None, typer.Option(help="b1s256h2kv1d128, or m256n256k256 for matmul.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 or f16; default: bf16.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Attention: query i sees keys 0 to i.")] = False,
    bottom_right: BottomRight = False,
    bias: Bias = None,
    mask: Mask = None,
    lse: Annotated[bool, typer.Option("--lse", help="Attention: with the log-sum-exp as second output.")] = False,
    config: Annotated[str | None, typer.Option(help="The kernel's config as JSON.")] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="Type of an argument of your kernel, e.g. 'bf16[4096,128]'; repeat.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a kernel in the simulator under many legal schedules; the results must be the same bits.

    Exit code 0 if all are clean, 1 with a finding, 2 if the kernel was refused before it ran.
    """
    if arch is not None and arch not in ARCHS:
        raise Refusal(f"--arch {arch}: one of {', '.join(ARCHS)}")
    fields = parse_json_option(config, "--config")
    ways = chosen_schedules(schedule, schedules, shadow)
    with steps(len(ways) + 2) as progress:
        progress.step(f"tracing and planning {kernel}")
        from ..runtime import device
        from ..runtime.schedules import Rehearsal
        from .targets import Request, find_call

        try:
            request = Request(
                arch or target_arch(), shape or SMALL.get(kernel), dtype, causal, lse, fields, bottom_right, bias, mask
            )
            with device.planning_for(device.multiprocessors(), request.arch):
                function, types = find_call(kernel, request, arg or ())
                rehearsal = Rehearsal(function, random_arrays(types, seed), arch, request.arch)
            compiled, fits = _compile(rehearsal, progress.step, no_compile)
        except MosaicGpuError as error:
            raise Refusal(f"{type(error).__name__}: {error}") from error
        report = Report()
        runs, findings = run_schedules(rehearsal, ways, progress.step, report)
    if as_json:
        names = [p.name for p in rehearsal.programs]
        data = {"kernels": names, "arch": rehearsal.plans[0].arch, "seed": seed, "compiled": compiled}
        data["residency"] = [r.to_json() for r in fits]
        print_json({**data, "clean": not findings, "schedules": runs, "report": report.to_json()})
    else:
        _print(rehearsal, runs, findings, compiled, fits, seed)
        _print_remarks(report)
    if findings:
        raise typer.Exit(FAILED)


def chosen_schedules(names: Sequence[str] | None, random: int, shadow: str) -> list[SimulatorParams]:
    """The schedules of these names; None: late, early and so many random ones.  shadow: that of `SimulatorParams`."""
    from ..runtime.schedules import named, schedules

    try:
        ways = [named(name) for name in names] if names else schedules(random)
        changes: Any = {"shadow": shadow}
        return [dataclasses.replace(way, **changes) for way in ways]
    except ValueError as error:
        raise Refusal(str(error)) from error


def run_schedules(
    rehearsal: Any, ways: Sequence[SimulatorParams], step: Any, report: Report
) -> tuple[list[dict[str, Any]], dict[str, MosaicGpuError]]:
    """What happened under each schedule, and the findings by their text, each once.  report: gets what the first notices."""
    from ..runtime.schedules import name_of

    runs: list[dict[str, Any]] = []
    findings: dict[str, MosaicGpuError] = {}
    first: tuple[list[Any], str] | None = None
    for schedule in ways:
        name = name_of(schedule)
        step(f"simulating: {name}")
        begun = time.perf_counter()
        finding: MosaicGpuError | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnwrittenOutput)  # the report has it
                chosen = schedule if runs else dataclasses.replace(schedule, report=report)
                outputs = rehearsal.outputs(chosen)
        except MosaicGpuError as error:
            finding = error
        else:
            first = first or (outputs, name)
            finding = rehearsal.compare(*first, outputs, name)
        if finding is not None:
            findings.setdefault(str(finding), finding)
        seconds = time.perf_counter() - begun
        runs.append({"schedule": name, "clean": finding is None, "seconds": seconds, "finding": _to_json(finding)})
    return runs, findings


def random_arrays(types: Sequence[Any], seed: int) -> list[Any]:
    """Random arrays: floats are normal, bools a coin, integers of 8 bits or fewer from their whole range, others 0 to 15."""
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    chance = np.random.default_rng(seed)
    arrays = []
    for t in types:
        if jnp.issubdtype(t.dtype, jnp.integer):
            limits: Any = ml_dtypes.iinfo(t.dtype)  # type: ignore[no-untyped-call]
            low, high = (int(limits.min), int(limits.max)) if limits.bits <= 8 else (0, 15)
            arrays.append(chance.integers(low, high + 1, t.shape).astype(t.dtype))
        elif jnp.issubdtype(t.dtype, jnp.bool_):
            arrays.append(chance.integers(0, 2, t.shape).astype(t.dtype))
        else:
            arrays.append(np.asarray(chance.standard_normal(t.shape)).astype(t.dtype))
    return arrays


def _compile(rehearsal: Any, step: Any, no_compile: bool) -> tuple[str, list[Residency]]:
    """Compile the plans, so that what only ptxas refuses is refused; says with what, or why not, and how many blocks of each
    kernel fit a multiprocessor."""
    from ..codegen.build import compile_plan
    from ..codegen.nvrtc import find_nvrtc, list_nvrtc
    from ..codegen.resources import entry_registers
    from ..plan.residency import residency

    if no_compile or not list_nvrtc():
        why = "not asked for" if no_compile else "no NVRTC here"
        return why, [residency(plan, None) for plan in rehearsal.plans]
    fits = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel that spills is slow, not wrong; `compile` tells
        for plan in rehearsal.plans:
            step(f"compiling {plan.program.name}")
            fits.append(residency(plan, entry_registers(compile_plan(plan).compiled)))
    return find_nvrtc().toolchain, fits


def _to_json(finding: MosaicGpuError | None) -> dict[str, Any] | None:
    if finding is None:
        return None
    data: dict[str, Any] = {"class": type(finding).__name__, "message": finding.message}
    data["file"], data["line"] = (finding.line.file, finding.line.number) if finding.line else (None, None)
    if isinstance(finding, Race):
        other = str(finding.other_line) if finding.other_line else None
        data |= {"kind": finding.kind, "place": finding.place, "other_line": other, "remedy": finding.remedy}
        data |= {"between": finding.between, "who": finding.who, "other": finding.other}
    return data


def _print(
    rehearsal: Any,
    runs: list[dict[str, Any]],
    findings: dict[str, MosaicGpuError],
    compiled: str,
    fits: Sequence[Residency],
    seed: int,
) -> None:
    console = output()
    rows = []
    for run in runs:
        found = run["finding"]
        what = f"{found['class']}{f': {kind}' if (kind := found.get('kind')) else ''}" if found else "clean"
        where = f"{found['file']}:{found['line']}" if found and found["file"] else None
        rows.append([run["schedule"], what, where, f"{run['seconds']:.2f}"])
    names = ", ".join(p.name for p in rehearsal.programs)
    about = f"{names} for {rehearsal.plans[0].arch}, inputs of seed {seed}; compiled: {compiled}"
    console.print(about, markup=False, highlight=False, soft_wrap=True)
    for program, fit in zip(rehearsal.programs, fits, strict=True):
        console.print(f"{program.name}: {fit}", markup=False, highlight=False, soft_wrap=True)
    console.print(table("", ["schedule", "result", "line", "seconds"], rows, left=3))
    for finding in findings.values():
        console.print(f"[bold red]{type(finding).__name__}[/]: ", end="")
        console.print(str(finding), markup=False, highlight=False, soft_wrap=True)
    if not findings:
        console.print(f"[green]clean[/] under {len(runs)} schedules, the same bits under all", highlight=False)


def _print_remarks(report: Report) -> None:
    """What is no error, line by line."""
    remarks = list(report.remarks())
    if not remarks:
        return
    console = output()
    console.print("no errors, but worth a look:", highlight=False)
    for remark in remarks:
        line = getattr(remark, "line", None)
        at = f" at {line.file}:{line.number}" if line else ""
        console.print(f"- {remark}{at}", markup=False, highlight=False, soft_wrap=True)
