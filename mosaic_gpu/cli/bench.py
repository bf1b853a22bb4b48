"""`mosaic-gpu bench attention | matmul | kernel | compare | report`: speed on this GPU, beside other libraries, by two protocols.

What is measured and how: docs/benchmarks.md.  The machinery is `mosaic_gpu.bench`; `python -m benchmarks.attention` has all
of its options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    FAILED,
    AsJson,
    Refusal,
    output,
    parse_json_option,
    print_json,
    refused_for,
    require_gpu,
    require_writable,
    table,
)
from .compile import target_arch
from .tune import Causal, Dtype, FromFile, Shape, Shapes, tunable_for, wanted_shapes

Peers = Annotated[str, typer.Option(help="all, or a regular expression of names; default: none.")]
Config = Annotated[str | None, typer.Option(help="One config for all, as JSON; default: the tuned ones.")]
Out = Annotated[Path | None, typer.Option(help="Result file: written after each cell, gone on with by the next run.")]
Plot = Annotated[Path | None, typer.Option(help="A folder for PNG plots (extra `plot`).")]
Markdown = Annotated[Path | None, typer.Option(help="A file for the table in Markdown.")]
Quick = Annotated[bool, typer.Option("--quick", help="A look: few rounds, no basis for a claim.")]
Seconds = Annotated[
    float | None, typer.Option("--budget", help="Seconds: no cell is begun that would not end in time.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the random inputs.")]


def attention(
    shapes: Shapes = "benchmark",
    shape: Shape = None,
    from_file: FromFile = None,
    causal: Causal = None,
    dtype: Dtype = "bf16",
    backward: Annotated[
        bool, typer.Option("--backward", help="The gradients, alone and with the forward pass.")
    ] = False,
    config: Config = None,
    peers: Peers = "",
    quick: Quick = False,
    budget: Seconds = None,
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    markdown: Markdown = None,
    as_json: AsJson = False,
) -> None:
    """Attention: every result is judged, then timed interleaved with the peers and alone.

    Exit code 1 if a result of ours is wrong or a kernel of ours does not run; 2 without a GPU; 3 out of time.
    """
    _bench(
        "attention_backward" if backward else "attention",
        shapes,
        shape,
        from_file,
        causal,
        dtype,
        config,
        peers,
        quick,
        budget,
        seed,
        out,
        plot,
        markdown,
        as_json,
    )


def matmul(
    shapes: Shapes = "benchmark",
    shape: Shape = None,
    from_file: FromFile = None,
    dtype: Dtype = "bf16",
    config: Config = None,
    peers: Peers = "",
    quick: Quick = False,
    budget: Seconds = None,
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    markdown: Markdown = None,
    as_json: AsJson = False,
) -> None:
    """Matrix products, as `bench attention`."""
    _bench(
        "matmul",
        shapes,
        shape,
        from_file,
        None,
        dtype,
        config,
        peers,
        quick,
        budget,
        seed,
        out,
        plot,
        markdown,
        as_json,
    )


def kernel(
    kernel: Annotated[str, typer.Argument(help="FILE.py:NAME of a Tunable of yours.")],
    shapes: Shapes = "",
    shape: Shape = None,
    from_file: FromFile = None,
    dtype: Dtype = "bf16",
    config: Config = None,
    peers: Peers = "all",
    quick: Quick = False,
    budget: Seconds = None,
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    markdown: Markdown = None,
    as_json: AsJson = False,
) -> None:
    """A kernel of your own, tuned and by its heuristic, beside what its Tunable names as peers."""
    _bench(
        kernel, shapes, shape, from_file, None, dtype, config, peers, quick, budget, seed, out, plot, markdown, as_json
    )


def device_for(kernel: str) -> Any:
    """PyTorch's device for kernels that have peers there, else JAX's; a refusal without a GPU."""
    from ..bench.gpu import NoGpu, TorchDevice
    from ..bench.jax_calls import JaxDevice

    require_gpu("bench")
    if kernel in ("attention", "attention_backward", "matmul"):
        with contextlib.suppress(NoGpu):
            return TorchDevice()
    return JaxDevice()


def _bench(
    kernel: str,
    shapes: str,
    shape: list[str] | None,
    from_file: Path | None,
    causal: bool | None,
    dtype: str,
    config: str | None,
    peers: str,
    quick: bool,
    budget: float | None,
    seed: int,
    out: Path | None,
    plot: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    importlib.import_module("mosaic_gpu.bench")  # first: it keeps JAX from taking most of the GPU's memory
    tunable = tunable_for(kernel, target_arch())
    named = "" if shape or from_file else shapes
    wanted = wanted_shapes(kernel, tunable, named, shape, from_file, causal, dtype)
    fields = parse_json_option(config, "--config")
    with refused_for("--config"):
        chosen = None if fields is None else tunable.from_json(fields)
    for folder, option in (
        (out and out.parent, "--out"),
        (plot, "--plot"),
        (markdown and markdown.parent, "--markdown"),
    ):
        if folder is not None:
            require_writable(folder, option)
    device = device_for(kernel)
    from ..bench.report import read_results
    from ..bench.runner import main

    benchmark = benchmark_for(tunable, wanted, device, chosen)
    with tempfile.TemporaryDirectory() as temporary:
        path = out or Path(temporary) / "results.json"
        arguments = ["--json", str(path), "--seed", str(seed), "--providers", {"": "$^", "all": ""}.get(peers, peers)]
        arguments += ["--quick"] if quick else []
        arguments += ["--budget", str(budget)] if budget else []
        with contextlib.redirect_stdout(sys.stderr):  # its log
            code = main(benchmark, arguments, device)
        results = read_results(path)
    results = {
        **results,
        "cells": {c.name: results["cells"][c.name] for c in benchmark.cells if c.name in results["cells"]},
    }
    _write(results, plot, markdown)
    if as_json:
        print_json(results)
    else:
        _print(results)
    if code:
        raise typer.Exit(code)


def benchmark_for(tunable: Any, wanted: Sequence[Any], device: Any, config: Any) -> Any:
    """What to run on a device: PyTorch's peers and events where it has them, else everything inside JAX."""
    from ..bench.gpu import TorchDevice
    from ..bench.jax_providers import benchmark_of
    from ..runtime.device import device_key

    if not isinstance(device, TorchDevice):
        return benchmark_of(tunable, wanted, device=device_key(), config=config)
    base: Any = importlib.import_module(f"mosaic_gpu.bench.{tunable.name}")
    from ..bench.ours import NamedConfig

    if other := [w for w in wanted if w.dtype != "bfloat16"]:
        raise Refusal(f"beside PyTorch's libraries only bf16 is measured, not {other[0]} {other[0].dtype}")
    if biased := [w for w in wanted if getattr(w, "bias", False)]:
        raise Refusal(f"beside PyTorch's libraries nothing with a bias is measured: {biased[0]}")
    if tunable.name == "matmul":
        cells = [base.Shape(w.m, w.n, w.k).cell() for w in wanted]
    else:
        if unequal := [w for w in wanted if w.length != w.kv_length]:
            raise Refusal(f"beside PyTorch's libraries only t = s is measured, not {unequal[0]}")
        shapes = [(w.batch, w.length, w.heads, w.kv_heads, w.head_dim, w.value_dim, w.causal) for w in wanted]
        if tunable.name == "attention":
            cells = [base.Shape(*s).cell() for s in shapes]
        else:
            cells = [base.GradientShape(*s, forward).cell() for forward in (False, True) for s in shapes]
    fields = None if config is None else config.to_json()

    def providers(device: Any, _: str | None) -> list[Any]:
        return list(base.providers_of(device.torch, [NamedConfig("ours", fields)]))

    return dataclasses.replace(base.BENCHMARK, cells=cells, providers=providers)


def _write(results: Any, plot: Path | None, markdown: Path | None) -> None:
    from ..bench.plots import write_plots
    from ..bench.report import markdown as markdown_of

    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(markdown_of([results]))
    if plot is not None:
        for path in write_plots(results, plot):
            print(path, file=sys.stderr)


def _print(results: Any) -> None:
    from ..bench import report

    chip = report.chip_for(results)
    rows: list[list[Any]] = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell, r in results["cells"].items():
        ours, peer = report.ours_of(r), report.best_peer(r)
        ratios = [
            f"{x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}]"
            if (x := r["comparison"].get(ours, {}).get(p))
            else None
            for p in ("interleaved", "alone")
        ]
        one, two = (report.rate(r, ours, p) if ours else None for p in ("interleaved", "alone"))
        share = report.roofline(r, chip)
        rows.append(
            [
                cell,
                one and f"{one:.4g}",
                two and f"{two:.4g}",
                share and f"{share:.0%}",
                peer and f"{peer} {report.rate(r, peer):.4g}",
            ]
            + [*ratios, r["verdict"] + (" (quick)" if r.get("quick") else "")]
        )
        for name, row in r["providers"].items():
            if row["message"]:
                reasons.setdefault((name, row["message"]), []).append(cell)
    heads = ["cell", "TFLOP/s", "alone", "of roofline", "best peer", "ratio, interleaved", "ratio, alone", "verdict"]
    console = output()
    console.print(table(f"{results['benchmark']} on {results['machine'].get('device')}", heads, rows))
    for (name, why), cells in reasons.items():
        console.print(f"{name}: {why} ({len(cells)} cells)", highlight=False, markup=False)


def compare(
    old: Annotated[Path, typer.Argument(help="A result file.")],
    new: Annotated[Path, typer.Argument(help="A later one of the same GPU.")],
    as_json: AsJson = False,
) -> None:
    """What changed beyond noise.  Exit code 1 if a cell of ours became slower, wrong, or does not run any more."""
    from ..bench.report import changes, read_results

    try:
        found = changes(read_results(old), read_results(new))
    except ValueError as error:
        raise Refusal(str(error)) from error
    if as_json:
        print_json([dataclasses.asdict(c) | {"regression": c.regression} for c in found])
    else:
        rows = []
        for c in found:
            ratio = None if c.ratio is None else f"{c.ratio:.3f} [{c.low:.3f}, {c.high:.3f}]"
            rows.append([c.cell, c.verdict, ratio, c.peer or None, c.message or None])
        output().print(table(f"{old} -> {new}", ["cell", "verdict", "new / old", "relative to", ""], rows, left=2))
    if any(c.regression for c in found):
        raise typer.Exit(FAILED)


def report(
    files: Annotated[list[Path], typer.Argument(help="Result files, of different GPUs perhaps.")],
    out: Annotated[Path | None, typer.Option(help="A file for the table; default: standard output.")] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """One table in Markdown, a group of columns for each GPU generation; what nobody has measured stays empty."""
    from ..bench.plots import write_plots
    from ..bench.report import markdown, read_results, rows

    try:
        found = [read_results(f) for f in files]
    except ValueError as error:
        raise Refusal(str(error)) from error
    text = markdown(found)
    if as_json:
        print_json(rows(found))
    elif out is None:
        print(text, end="")
    if out is not None:
        require_writable(out.parent, "--out")
        out.write_text(text)
    for results in found if plot else []:
        for path in write_plots(results, plot):  # type: ignore[arg-type]
            print(path, file=sys.stderr)
