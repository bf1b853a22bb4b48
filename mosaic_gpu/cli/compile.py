"""`mosaic-gpu compile`: a kernel to CUDA C++, PTX, cubin, SASS and resources, and what each pass made of it.  No GPU needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .common import ARCHS as ARCHS
from .common import (
    AsJson,
    Bias,
    BottomRight,
    Mask,
    Refusal,
    output,
    parse_json_option,
    print_json,
    refuse_options,
    require_writable,
    steps,
    table,
)


def compile_kernel(
    kernel: Annotated[
        str,
        typer.Argument(
            help="attention, attention_backward, matmul, or FILE.py:NAME of a kernel of yours or a function that calls some; "
            "with --bundle also all."
        ),
    ],
    arch: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(ARCHS)}; default: the kernel's, else this GPU's, else sm_90a."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files; default: out.")] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Print and write the program after each pass.")] = False,
    shape: Annotated[str | None, typer.Option(help="b4s4096h32kv8d128, or m4096n4096k4096 for matmul.")] = None,
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
    bundle: Annotated[
        Path | None,
        typer.Option(help="Write a bundle for `verify-device` instead: many shapes and configs of KERNEL (or all)."),
    ] = None,
    benchmark: Annotated[
        bool | None,
        typer.Option("--benchmark/--no-benchmark", help="With --bundle: also what is timed; default: that, too."),
    ] = None,
    multiprocessors: Annotated[
        int | None, typer.Option(min=1, help="With --bundle: those of the GPU; default: of an H200, B200 or B300.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a kernel and write kernel.cu, .ptx, .cubin, .sass and resources.json.

    Of a function that calls several kernels each has a folder of its name.
    """
    if arch is not None and arch not in ARCHS:
        raise Refusal(f"--arch {arch}: one of {', '.join(ARCHS)}")
    if bundle is not None:
        alone = {"--out": out, "--stages": stages, "--shape": shape, "--dtype": dtype, "--causal": causal, "--lse": lse}
        alone |= {"--bottom-right": bottom_right, "--bias": bias, "--mask": mask}
        why = "--bundle is a file of its own, with its own shapes and configs"
        refuse_options(why, {**alone, "--config": config, "--arg": arg or None})
        _compile_bundle(kernel, arch or target_arch(), bundle, benchmark is not False, multiprocessors, as_json)
        return
    timed = {
        "--benchmark": benchmark or None,
        "--no-benchmark": benchmark is False,
        "--multiprocessors": multiprocessors,
    }
    refuse_options("without --bundle one kernel is compiled", timed)
    out = out or Path("out")
    fields = parse_json_option(config, "--config")
    require_writable(out, "--out")
    made: list[dict[str, Any]] = []
    with steps() as progress:
        progress.step(f"tracing {kernel}")
        from ..runtime import device
        from .targets import Request, find_call, programs_for

        request = Request(arch or target_arch(), shape, dtype, causal, lse, fields, bottom_right, bias, mask)
        with device.planning_for(device.multiprocessors(), request.arch):
            called = programs_for(*find_call(kernel, request, arg or ()), arch)
        programs = list({id(p): p for p in called}.values())  # one that is called twice, once
        for number, program in enumerate(programs, 1):
            known = all(p is program or p.name != program.name for p in programs)
            folder = program.name if known else f"{program.name}_{number}"
            place = out if len(programs) == 1 else out / folder
            made.append(_compiled(program, arch or program.params.arch or request.arch, place, stages, progress.step))
    if as_json:
        told = [{k: v for k, v in m.items() if k not in ("texts", "tables")} for m in made]
        print_json(told[0] if len(told) == 1 else {"kernels": told})
        return
    for m in made:
        _print(m)


def _compiled(program: Any, target: str, out: Path, stages: bool, step: Callable[[str], None]) -> dict[str, Any]:
    """Compile one kernel and write its files: where they are, its resources and, with `stages`, each pass's text."""
    from ..codegen.artifacts import resources_json, write_artifacts
    from ..codegen.build import compile_plan
    from ..plan.build import build_plan
    from .stages import plan_json, plan_tables, stage_texts

    step(f"planning {program.name} for {target}")
    plan = build_plan(program, target)
    texts = stage_texts(program, plan) if stages else {}
    step("compiling")
    built = compile_plan(plan)
    step("disassembling")
    paths = write_artifacts(plan, built, out)
    for number, (name, text) in enumerate(texts.items(), 1):
        paths[f"stage {name}"] = out / f"stage{number}_{name}.txt"
        paths[f"stage {name}"].write_text(text + "\n")
    told: dict[str, Any] = {"files": {k: str(v) for k, v in paths.items()}, "resources": resources_json(plan, built)}
    return told | ({"plan": plan_json(plan), "texts": texts, "tables": plan_tables(plan)} if stages else {})


def _print(made: dict[str, Any]) -> None:
    console = output()
    for name, text in made.get("texts", {}).items():
        if name == "plan":
            console.print(made["tables"])
        else:
            console.rule(name, align="left")
            print(text)
    print_resources(console, made["resources"])
    for path in made["files"].values():
        console.print(path, highlight=False, soft_wrap=True)


def _compile_bundle(
    kernel: str, arch: str, path: Path, benchmark: bool, multiprocessors: int | None, as_json: bool
) -> None:
    known = ("attention", "matmul", "scaled_matmul")
    if kernel not in (*known, "all"):
        raise Refusal(f"--bundle takes {', '.join(known)} or all, not {kernel!r}")
    require_writable(path.parent, "--bundle")
    from ..bundle import files, make
    from ..bundle.cases import sweep

    cases = sweep(arch, known if kernel == "all" else (kernel,), benchmark)
    if not cases:
        raise Refusal(f"there is no {kernel} for {arch}")
    with steps(len(cases)) as progress:
        made = make.make(cases, arch, multiprocessors, on_case=lambda c: progress.step(str(c)))
        identity = files.write(made, path)
    spilled = [e.name for e in made.entries if e.spills]
    held = {"file": str(path), "identity": identity, "arch": arch, **files.describe(made.entries), "spills": spilled}
    if as_json:
        print_json(held)
        return
    output().print(
        f"{path}: {held['entries']} launches of {held['cubins']} kernels for {arch}, {path.stat().st_size} bytes, "
        f"{len(spilled) or 'none'} with spills\n{identity}",
        highlight=False,
        soft_wrap=True,
    )


def print_resources(console: Console, resources: dict[str, Any]) -> None:
    """Registers by role, shared memory, spills, how many blocks fit a multiprocessor, and what ptxas complained of."""
    rows = []
    for r in resources["roles"]:
        groups = ", ".join(map(str, r["warpgroups"]))
        entry = f"{resources['entry_registers']} (at launch)"
        rows.append([r["role"], groups, r["requested"] or entry, r["needed"]])
    title = f"{resources['program']} for {resources['arch']}, {resources['toolchain']}"
    console.print(table(title, ["role", "warpgroups", "registers", "used"], rows, left=2))
    shared = resources["static_shared"] + resources["dynamic_shared"]
    tmem = f", {resources['tmem_columns']} TMEM columns" if resources["tmem_columns"] else ""
    spills = resources["spill_stores"] + resources["spill_loads"]
    console.print(
        f"{resources['threads']} threads, {shared} bytes of shared memory{tmem}, "
        f"{f'{spills} bytes' if spills else 'no'} spills, cubin of {resources['cubin_bytes']} bytes",
        highlight=False,
    )
    console.print(resources["residency"]["text"], highlight=False)
    print_accesses(console, resources["shared_accesses"])
    for message in resources["messages"]:
        console.print(f"ptxas: {message}", highlight=False, markup=False)


def print_accesses(console: Console, accesses: list[dict[str, Any]]) -> None:
    """Ordinary loads and stores of shared memory with their bank conflicts, each line once."""
    rows: dict[tuple[Any, ...], None] = {}
    for a in accesses:
        place = f"{Path(a['file']).name}:{a['line']}" if a["file"] else "–"
        rows[place, a["op"], a["buffer"], a["layout"], a["wavefronts"], a["ideal"], f"{a['factor']:.3g}"] = None
    if rows:
        title = "shared memory, for each access of a warpgroup"
        columns = ["line", "access", "buffer", "layout", "wavefronts", "at best", "times"]
        console.print(table(title, columns, [list(r) for r in rows], left=4))


def target_arch() -> str:
    """This GPU's architecture if kernels run on it, else Hopper's."""
    from ..runtime.device import default_arch

    arch = default_arch()
    return arch if arch in ARCHS else "sm_90a"
