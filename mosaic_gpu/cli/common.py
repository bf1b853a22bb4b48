"""What the verbs share: how errors end the program, tables and JSON, progress, and the refusal where a GPU is needed.

Exit codes: 0 it worked; 1 it failed (a finding, a wrong result, a launch that did not run, a bug of ours); 2 it was refused
before it ran (bad arguments, no GPU, a kernel that cannot be traced, planned or compiled).
Tables and JSON go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import BarrierMisuse, Deadlock, DebugCheckFailed, Leak, MosaicGpuError, Race, UninitializedRead

FAILED, REFUSED = 1, 2
# `simulate` finds an OutOfBounds, too; of the other verbs it is refused, as an index that was known before anything ran.
FOUND_AS_IT_RAN = (BarrierMisuse, Deadlock, DebugCheckFailed, Leak, Race, UninitializedRead)
ARCHS = ("sm_90a", "sm_100a", "sm_103a")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
BottomRight = Annotated[
    bool,
    typer.Option(
        "--bottom-right", help="Attention: causal, and the last query sees all keys, each before it one less."
    ),
]
Bias = Annotated[
    str | None, typer.Option(help="Attention: with a bias of the extents bhst, with a 1 for what all share, e.g. 1hst.")
]
Mask = Annotated[str | None, typer.Option(help="Attention: with a bool mask of such extents, e.g. b11t.")]


class Refusal(Exception):
    """The verb cannot do this here; the message says why in one line."""


class Verbs(typer.core.TyperGroup):
    """The group of all verbs: takes `--debug` anywhere, and turns errors into a message and an exit code."""

    debug = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.debug = "--debug" in args
        return list(super().parse_args(ctx, [a for a in args if a != "--debug"]))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if hasattr(error, "exit_code") or isinstance(error, (typer.Abort, BrokenPipeError)):
                raise  # bad options, `Exit`, Ctrl-C: typer's to say
            if self.debug and not (isinstance(error, Refusal) and error.__cause__ is None):
                traceback.print_exception(error)
            else:
                report_error(*describe(error))
            raise typer.Exit(code_of(error)) from error


def code_of(error: Exception) -> int:
    """The exit code that an error of a verb ends in.  `MosaicGpuError` itself is a launch that the driver refuses."""
    if isinstance(error, Refusal):
        return REFUSED
    if no_platform(error):
        return REFUSED
    ours = find_ours(error)
    if ours is None or type(ours) is MosaicGpuError or isinstance(ours, FOUND_AS_IT_RAN):
        return FAILED
    return REFUSED


def describe(error: Exception) -> tuple[str, str]:
    """What kind of error, and the message for people.  What is not ours is a bug, and says where."""
    if isinstance(error, Refusal):
        return "refused", str(error)
    ours = find_ours(error)
    if ours is not None:
        return type(ours).__name__, str(ours)
    if text := no_platform(error):
        return "refused", text
    if isinstance(error, MemoryError):
        return "MemoryError", str(error) or "there is not enough memory"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.filename}:{frame.lineno} in {frame.name}"
    return type(error).__name__, f"{error}\n  at {where}; this is a bug of ours, --debug shows the whole traceback"


def no_platform(error: BaseException) -> str:
    """What to do where JAX, told by JAX_PLATFORMS which devices to use, finds none of them; else empty."""
    wanted = os.environ.get("JAX_PLATFORMS")
    inside = any(f.filename.endswith("xla_bridge.py") for f in traceback.extract_tb(error.__traceback__))
    if not wanted or not (inside or "initialize backend" in str(error)):
        return ""
    return (
        f"JAX_PLATFORMS={wanted}: JAX finds no such device here. Unset it, or let JAX fall back on the CPU: "
        f"JAX_PLATFORMS={wanted},cpu"
    )


def find_ours(error: BaseException) -> MosaicGpuError | None:
    """Our error that an exception is, or that JAX has wrapped into one of its own."""
    if isinstance(error, MosaicGpuError):
        return error
    if "jax" not in sys.modules:
        return None
    if isinstance(error, sys.modules["jax"].errors.JaxRuntimeError):
        from ..runtime.execute import last_report
        from ..runtime.jax_ffi import translate_error

        report = last_report()  # perhaps of another call, long ago
        return translate_error(error) or (report if report and report.message.split("\n")[0] in str(error) else None)
    return None


def output() -> Console:
    """Where results go.  Outside a terminal lines are long, so that tables are not folded in files."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def report_error(kind: str, message: str) -> None:
    """An error for people, without traceback.  Plain lines: a path or a command in it must not be folded."""
    Console(stderr=True).print(f"[bold red]{escape(kind)}[/]: {escape(message)}", soft_wrap=True, highlight=False)


def print_json(data: Any) -> None:
    """Data as JSON on standard output."""
    print(json.dumps(data, indent=2, default=str))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, left: int = 1) -> Table:
    """A table whose first `left` columns are text and whose others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right")
    for row in rows:
        made.add_row(*("–" if cell is None else escape(str(cell)) for cell in row))
    return made


class Steps:
    """Progress through steps that are announced as they begin."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._begun = 0

    def step(self, text: str) -> None:
        """The next step begins."""
        if not self._progress.console.is_terminal:  # a log shows what the moving bar would
            self._progress.console.print(f"… {text}", highlight=False, markup=False, soft_wrap=True)
        self._progress.update(self._task, description=escape(text), completed=self._begun)
        self._begun += 1


@contextlib.contextmanager
def steps(total: int | None = None) -> Iterator[Steps]:
    """Show progress on standard error while the body runs; nothing of it stays in a terminal."""
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    ]
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Steps(progress, total)


def require_gpu(verb: str) -> str:
    """The architecture of the GPU, such as 'sm_90a'; a refusal where there is none that our kernels run on."""
    from ..runtime.device import default_arch

    arch = default_arch()
    if arch is None:
        raise Refusal(f"{verb} needs a GPU, and JAX sees none here; `mosaic-gpu doctor` says what is missing")
    if not arch.endswith("a"):
        raise Refusal(f"{verb} needs a Hopper or Blackwell GPU (sm_90a, sm_100a, sm_103a); this one is {arch}")
    return arch


@contextlib.contextmanager
def refused_for(option: str) -> Iterator[None]:
    """What a wrong option's value raises, as the refusal that names the option."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refusal(f"{option}: {error}") from error


def require_writable(folder: Path, option: str) -> None:
    """Refuse, before anything is done, a folder that cannot be made or written to."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise Refusal(f"{option} {folder} cannot be written: {error.strerror or error}") from error


def kernel_dtype(text: str) -> str:
    """The option --dtype of a kernel of ours, by NumPy's name."""
    from ..tune.workload import dtype_name

    name = dtype_name(text)
    if name not in ("bfloat16", "float16"):
        raise Refusal(f"--dtype {text}: bf16 or f16")
    return name


def refuse_options(why: str, options: Mapping[str, Any]) -> None:
    """Refuse options that are set and mean nothing here, so that none is ignored.  options: their values by name; None and
    False are not set."""
    if given := [name for name, value in options.items() if value is not None and value is not False]:
        raise Refusal(f"{why}; it does not go with {', '.join(given)}")


def parse_json_option(text: str | None, option: str) -> dict[str, Any] | None:
    """The object that an option's JSON text stands for."""
    if text is None:
        return None
    try:
        data = json.loads(text)
    except ValueError as error:
        raise Refusal(f"{option} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise Refusal(f"{option} is a JSON object such as '{{\"num_stages\": 3}}', not {text}")
    return data
