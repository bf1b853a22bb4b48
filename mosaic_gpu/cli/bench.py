"""`mosaic-gpu bench attention`: TFLOP/s on this GPU, every kernel's result judged before it is timed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..tune.workload import Attention
from .common import (
    FAILED,
    AsJson,
    kernel_dtype,
    output,
    parse_json_option,
    print_json,
    refused_for,
    require_gpu,
    steps,
    table,
)

DEFAULT_SHAPES = "b4s4096d64,b4s4096d128,b4s4096d256"  # total width 2048


def workloads(shapes: str, causal: bool | None, dtype: str) -> list[Attention]:
    """Each shape with each mask (None: both)."""
    masks = (False, True) if causal is None else (causal,)
    dtype = kernel_dtype(dtype)
    with refused_for("--shapes"):
        return [Attention.parse(s, dtype=dtype, causal=m) for s in shapes.split(",") for m in masks]


def attention(
    shapes: Annotated[
        str, typer.Option(help="Comma-separated, as b4s4096h16d128 or b2s8192h32kv8d128.")
    ] = DEFAULT_SHAPES,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="One mask only; default: both.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or f16.")] = "bf16",
    config: Annotated[str | None, typer.Option(help="One config for all, as JSON; default: the tuned ones.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also cuDNN through PyTorch, in the same run.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Of the random inputs.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time attention: inputs rotate through more than twice the L2 cache, median of seven repeats.

    Exit code 1 if a result is wrong or a kernel does not run; 2 without a GPU.
    """
    wanted = workloads(shapes, causal, dtype)
    fields = parse_json_option(config, "--config")
    arch = require_gpu("bench")
    rows = []
    with steps(len(wanted)) as progress:
        from ..tune.measure import AttentionBench
        from ..tune.space import config_from, generation_of

        with refused_for("--config"):
            chosen = None if fields is None else config_from("attention", generation_of(arch), fields)
        for workload in wanted:
            progress.step(f"{workload} {workload.mask}")
            bench = AttentionBench(workload, seed)
            rows.append(_row(workload, bench.measure(chosen)))
            if peers:
                from .peers import cudnn_seconds

                seconds, message = cudnn_seconds(bench)
                rows[-1] |= {"cudnn_tflops": _tflops(workload, seconds), "cudnn_message": message}
            del bench  # its inputs and reference make room for the next
    if as_json:
        print_json(rows)
    else:
        _print(rows, arch, peers)
    if any(row["status"] != "ok" for row in rows):
        raise typer.Exit(FAILED)


def _tflops(workload: Attention, seconds: float | None) -> float | None:
    return workload.flops / seconds / 1e12 if seconds else None


def _row(workload: Attention, m: Any) -> dict[str, Any]:
    return {
        "shape": str(workload),
        "mask": workload.mask,
        "dtype": workload.dtype,
        "status": m.status,
        "milliseconds": m.seconds and m.seconds * 1e3,
        "tflops": _tflops(workload, m.seconds),
        "relative_error": m.error,
        "allowed_error": m.allowed,
        "message": m.message,
    }


def _print(rows: list[dict[str, Any]], arch: str, peers: bool) -> None:
    def number(value: float | None, form: str) -> str | None:
        return None if value is None else format(value, form)

    columns = ["shape", "mask", "dtype", "ms", "TFLOP/s", "error", "allowed"] + (
        ["cuDNN TFLOP/s", "ratio"] if peers else []
    )
    cells = []
    for r in rows:
        line = [r["shape"], r["mask"], r["dtype"], number(r["milliseconds"], ".3f"), number(r["tflops"], ".0f")]
        line += [number(r["relative_error"], ".1e"), number(r["allowed_error"], ".1e")]
        if peers:
            theirs = r["cudnn_tflops"]
            line += [number(theirs, ".0f"), number(r["tflops"] / theirs if theirs and r["tflops"] else None, ".2f")]
        cells.append(line)
    console = output()
    console.print(table(f"attention on {arch}", columns, cells, left=3))
    for r in rows:
        for message in (r["message"], r.get("cudnn_message")):
            if message:
                console.print(f"{r['shape']} {r['mask']}: {message}", highlight=False, markup=False)
