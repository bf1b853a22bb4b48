"""`mosaic-gpu verify-device`: run a bundle on this machine's GPU, and write a report that can be sent back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import FAILED, AsJson, Refusal, output, print_json, require_writable, steps, table


def verify_device(
    bundle: Annotated[Path, typer.Argument(help="A file that `mosaic-gpu compile KERNEL --bundle FILE` has made.")],
    out: Annotated[Path, typer.Option(help="The report, as JSON.")] = Path("verification.json"),
    benchmark: Annotated[
        bool, typer.Option("--benchmark/--no-benchmark", help="Time the benchmark's entries, too.")
    ] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one entry; then it counts as hung.")] = 180.0,
    as_json: AsJson = False,
) -> None:
    """Check a bundle's hashes, run every kernel in it twice against a reference, then the benchmark."""
    from ..bundle import files, verify
    from ..errors import UnsupportedCall

    require_writable(out.parent, "--out")
    try:
        held = files.load(bundle)
    except UnsupportedCall as error:
        raise Refusal(error.message) from error
    begun = verify.now()
    with steps(len(held.entries)) as progress:
        outcome = verify.run(
            bundle,
            held,
            benchmark=benchmark,
            timeout=timeout,
            on_start=lambda e: progress.step(e.name),
        )
    if outcome.arch != held.arch:
        here = outcome.arch or "no GPU"
        raise Refusal(f"{bundle} is for {held.arch}; here is {here}. `mosaic-gpu doctor` says what JAX sees")
    data = verify.report(bundle, held, outcome, begun)
    out.write_text(json.dumps(data, indent=1) + "\n")
    if as_json:
        print_json(data)
    else:
        _print(data, out)
    if set(data["summary"]) != {"ok"}:
        raise typer.Exit(FAILED)


def _print(data: dict[str, Any], out: Path) -> None:
    console = output()
    rows = [
        [
            r["name"],
            r["status"],
            None if r["error"] is None else f"{r['error']:.1e}",
            None if r["allowed"] is None else f"{r['allowed']:.1e}",
            None if r["tflops"] is None else f"{r['tflops']:.0f}",
            r["message"],
        ]
        for r in data["results"]
    ]
    held, device = data["bundle"], data["device"]
    title = f"bundle {held['identity'][:12]} ({held['arch']}) on {device.get('name', 'a GPU')}"
    console.print(table(title, ["kernel", "result", "error", "allowed", "TFLOP/s", ""], rows, left=2))
    if device.get("multiprocessors") != held["multiprocessors"]:
        console.print(
            f"planned for {held['multiprocessors']} multiprocessors, here are {device.get('multiprocessors')}: times may be "
            "worse than they need to be",
            highlight=False,
        )
    counts = ", ".join(f"{n} {status}" for status, n in data["summary"].items())
    console.print(f"{counts}; report: {out}", highlight=False, soft_wrap=True)
