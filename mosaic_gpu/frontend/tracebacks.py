"""Tracebacks that show the user's own lines.

An error's report says what is wrong and where.  Between it and the user's call lie twenty frames of JAX's tracing, of our
passes or of the simulator: `shortened` leaves them out, as JAX does with its own.  `located` gives an error a line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import jax

from ..collecting import calling
from ..errors import Line, MosaicGpuError
from .trace import is_users, raised_at

F = TypeVar("F", bound=Callable[..., Any])
LOCATED = (MosaicGpuError, TypeError, ValueError)


class located:  # noqa: N801 - reads as what it does
    """Errors of ours, TypeErrors and ValueErrors leave the `with` with a `line`: their own, else the innermost of the user's that
    they have passed through, else `line`, else that of the user's call that is running."""

    def __init__(self, line: Line | None = None) -> None:
        self.line = line

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, LOCATED) and getattr(error, "line", None) is None:
            error.line = raised_at(error, self.line) or calling()  # type: ignore[union-attr]


def located_at_its_call(function: F) -> F:
    """A function for users: what it refuses has the line of whoever called it, where it has none."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except LOCATED as error:
            if getattr(error, "line", None) is None:
                error.line = calling(2)  # type: ignore[union-attr]
            raise

    return call  # type: ignore[return-value]


def shortened(error: MosaicGpuError) -> MosaicGpuError:
    """`error` with a traceback of the user's frames only, and so that of the errors behind it.

    JAX_TRACEBACK_FILTERING=off (`jax.config.jax_traceback_filtering`) leaves it whole.
    """
    if getattr(jax.config, "jax_traceback_filtering", "auto") == "off":
        return error
    behind: BaseException | None = error
    while behind is not None:
        behind.__traceback__ = _users(behind.__traceback__)
        behind = behind.__cause__
    return error


def _users(whole: TracebackType | None) -> TracebackType | None:
    frames = []
    while whole is not None:
        if is_users(whole.tb_frame.f_code.co_filename):
            frames.append(whole)
        whole = whole.tb_next
    short: TracebackType | None = None
    for t in reversed(frames):
        short = TracebackType(short, t.tb_frame, t.tb_lasti, t.tb_lineno)
    return short
