"""`mosaic-gpu tune run`: measure the grid of configs on this GPU and keep the best where the dispatcher finds it."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from ..tune.workload import Attention
from .common import FAILED, AsJson, Refusal, kernel_dtype, output, print_json, refused_for, require_gpu, steps, table

UNITS = {"s": 1, "": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """'120s', '2m', '1.5h' or a plain number of seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|)\s*", text)
    if found is None or float(found[1]) == 0:
        raise Refusal(f"--budget {text}: write 120s, 10m or 1.5h")
    return float(found[1]) * UNITS[found[2]]


def run(
    kernel: Annotated[str, typer.Argument(help="attention.")],
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dims; default 64, 128, 256.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Shapes instead of head dims, as b4s4096h16d128.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="One mask only; default: both.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or f16.")] = "bf16",
    budget: Annotated[str, typer.Option(help="Time for everything: 120s, 10m, 1h.")] = "10m",
    resume: Annotated[bool, typer.Option("--resume", help="Keep what was measured before; measure the rest.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time every valid config for this GPU; the best go into the tuning cache, which the kernels read.

    Each result is judged against a reference before it is timed, and the cache is written after each.  Exit code 1 if no
    config was right for some shape; 2 without a GPU.
    """
    if kernel != "attention":
        raise Refusal(f"tune knows attention, not {kernel}")
    total, dtype = seconds_of(budget), kernel_dtype(dtype)
    masks = (False, True) if causal is None else (causal,)
    texts = shape or [f"b4s4096d{d}" for d in head_dim or (64, 128, 256)]
    with refused_for("--shape" if shape else "--head-dim"):
        wanted = [Attention.parse(text, dtype=dtype, causal=mask) for text in texts for mask in masks]
    arch = require_gpu("tune")
    rows = tune_all(kernel, wanted, arch, total, resume)
    from ..runtime.device import device_key
    from ..tune.cache import cache_file

    path = str(cache_file(device_key() or "", kernel))
    if as_json:
        print_json({"file": path, "results": rows})
    else:
        columns = ["shape", "mask", "TFLOP/s", "tried now", "known", "left", "config"]
        cells = [[r["shape"], r["mask"], r["tflops"], r["measured"], r["skipped"], r["left"], r["best"]] for r in rows]
        console = output()
        console.print(table(f"tuned on {arch}", columns, cells, left=2))
        console.print(path, highlight=False, soft_wrap=True)
        if any(r["left"] for r in rows):
            console.print("time was up before all were tried; --resume goes on", highlight=False)
    if any(r["best"] is None for r in rows):
        raise typer.Exit(FAILED)


def tune_all(kernel: str, wanted: list[Attention], arch: str, total: float, resume: bool) -> list[dict[str, Any]]:
    """Search each workload with its share of the time; what one leaves over goes to the next."""
    import time

    from ..runtime.device import device_key
    from ..tune.measure import AttentionBench
    from ..tune.search import Environment, search
    from ..tune.space import candidates, generation_of
    from .ahead import compile_ahead

    end, rows = time.monotonic() + total, []
    environment = Environment.here()
    for i, workload in enumerate(wanted):
        grid = candidates(kernel, generation_of(arch), workload.head_dim)
        name = f"{workload} {workload.mask}"
        with steps(len(grid)) as progress:

            def compiling(done: int, of: int, name: str = name, progress: Any = progress) -> None:
                progress.step(f"{name}: compiling, {done} of {of}")

            refused = compile_ahead(kernel, workload, grid, arch, on_done=compiling)
        with steps(len(grid)) as progress:
            progress.step(f"{name}: reference")

            def show(done: int, of: int, config: Any, result: Any, name: str = name, progress: Any = progress) -> None:
                took = f"{result.seconds * 1e6:.0f} us" if result.seconds else f"{result.status}: {result.message}"
                progress.step(f"{name}: {done} of {of}: {took} {_short(config.to_json())}")

            outcome = search(
                workload,
                grid,
                lambda workload=workload, refused=refused: _measure(AttentionBench(workload), refused),  # type: ignore[misc]
                device=device_key() or "",
                kernel=kernel,
                environment=environment,
                budget=max(end - time.monotonic(), 0) / (len(wanted) - i),
                resume=resume,
                on_trial=show,
            )
        best = outcome.best
        rows.append(
            {
                "shape": str(workload),
                "mask": workload.mask,
                "key": workload.key,
                "tflops": best and best["tflops"],
                "measured": outcome.measured,
                "skipped": outcome.skipped,
                "left": outcome.left,
                "best": best and _short(best["config"]),
                "config": best and best["config"],
            }
        )
    return rows


def _measure(bench: Any, refused: dict[Any, str]) -> Any:
    """How a config is measured; what the compiler has refused already is not compiled again."""
    from ..tune.measure import Measurement

    def measure(config: Any) -> Any:
        return Measurement("refused", message=refused[config]) if config in refused else bench.measure(config)

    return measure


def _short(config: dict[str, Any]) -> str:
    """A config in one line, without its tags."""
    return " ".join(f"{k}={v}" for k, v in config.items() if k not in ("generation", "kernel"))
