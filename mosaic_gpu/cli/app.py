"""The verbs, put together.  Verbs import JAX and the compiler when they run, so that `--help` and `doctor` need neither."""

from __future__ import annotations

from typing import Annotated

import typer

import mosaic_gpu

from .bench import attention
from .bench_compile import bench_compile
from .common import Verbs
from .compile import compile_kernel
from .demo import demo
from .doctor import doctor
from .explain_call import explain_call
from .simulate import simulate_kernel
from .tune import run

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Mosaic GPU: a kernel language for NVIDIA Hopper and Blackwell GPUs, with its own compiler and simulator.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure kernels, or the compiler.")
tune_app = typer.Typer(no_args_is_help=True, help="Find the fastest config for this GPU.")


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


@tune_app.callback()
def tune_root() -> None:
    """Keeps `run` a verb of its own while it is the only one."""


app.command("doctor")(doctor)
app.command("demo")(demo)
app.command("compile")(compile_kernel)
app.command("simulate")(simulate_kernel)
app.command("explain-call")(explain_call)
bench_app.command("attention")(attention)
bench_app.command("compile")(bench_compile)
tune_app.command("run")(run)
app.add_typer(bench_app, name="bench")
app.add_typer(tune_app, name="tune")
