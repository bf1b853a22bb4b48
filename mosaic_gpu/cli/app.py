"""The verbs, put together.  Verbs import JAX and the compiler when they run, so that `--help` and `doctor` need neither."""

from __future__ import annotations

from typing import Annotated

import typer

import mosaic_gpu

from . import bench, tune_caches
from .bench_compile import bench_compile
from .check import check_kernel
from .common import Verbs
from .compile import compile_kernel
from .demo import demo
from .doctor import doctor
from .explain_call import explain_call
from .ops import list_ops
from .simulate import simulate_kernel
from .tune import compile_ahead_of_time, resume, run, time_compiled
from .verify_device import verify_device

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Mosaic GPU: a kernel language for NVIDIA Hopper and Blackwell GPUs, with its own compiler and simulator.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure kernels, or the compiler.")
tune_app = typer.Typer(
    no_args_is_help=True, help="Find the fastest configs for this GPU, and look after what was found."
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mosaic-gpu {mosaic_gpu.__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors; goes anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every verb."""


app.command("doctor")(doctor)
app.command("demo")(demo)
app.command("compile")(compile_kernel)
app.command("check")(check_kernel)
app.command("verify-device")(verify_device)
app.command("ops")(list_ops)
app.command("simulate")(simulate_kernel)
app.command("explain-call")(explain_call)
for measure in (bench.attention, bench.matmul, bench.kernel, bench.compare, bench.report):
    bench_app.command(measure.__name__)(measure)
bench_app.command("compile")(bench_compile)
tune_app.command("run")(run)
tune_app.command("resume")(resume)
tune_app.command("compile")(compile_ahead_of_time)
tune_app.command("time")(time_compiled)
for verb in (
    tune_caches.show,
    tune_caches.savings,
    tune_caches.diff,
    tune_caches.merge,
    tune_caches.prune,
    tune_caches.validate,
    tune_caches.export,
):
    tune_app.command(verb.__name__)(verb)
app.add_typer(bench_app, name="bench")
app.add_typer(tune_app, name="tune")
