"""Errors that are collected instead of ending what goes on, so that `mosaic-gpu check` shows all of them.

While a body is traced, a call of one of our operations that is refused is left out; where it has a result whose type its
arguments tell (`gives` in ops/registry.py), something of that type stands for it.  Any other error ends the body in which it is
raised (the kernel's, or one of `when`, `core_map`, `warp_map`), as no Python function can be resumed; tracing goes on behind
that body.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .errors import Line, MosaicGpuError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Failure:
    """One of several errors.  call: the operation that is left out; rest: what could not be looked at because of it."""

    error: Exception
    line: Line | None
    call: str = ""
    rest: str = ""

    @property
    def message(self) -> str:
        return self.error.message if isinstance(self.error, MosaicGpuError) else str(self.error)


# Where errors go instead of ending a trace; None: they end it.
FAILURES: contextvars.ContextVar[list[Failure] | None] = contextvars.ContextVar("failures", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[Failure]]:
    """Errors of what is traced inside go to the list."""
    found: list[Failure] = []
    token = FAILURES.set(found)
    try:
        yield found
    finally:
        FAILURES.reset(token)


def keep(failures: list[Failure], new: Failure) -> None:
    """Once: JAX traces the bodies of loops more than once."""
    if all((f.message, f.line) != (new.message, new.line) for f in failures):
        failures.append(new)


@contextlib.contextmanager
def kept(failures: list[MosaicGpuError] | None, line: Line | None = None) -> Iterator[None]:
    """What is refused inside goes to a list, at `line` if it has none; None: it is raised."""
    try:
        yield
    except MosaicGpuError as error:
        error.line = error.line or line
        if failures is None:
            raise
        failures.append(error)


def remembered(traces: dict[Any, T], key: Any, trace: Callable[[], T]) -> T:
    """traces[key], traced where it is not there; a trace of which something may be missing is not kept."""
    if FAILURES.get() is not None:
        return trace()
    if key not in traces:
        traces[key] = trace()
    return traces[key]


def recoverable(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation's Python function: where errors are collected, a call that is refused is left out."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        failures = FAILURES.get()
        if failures is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except (MosaicGpuError, TypeError, ValueError) as error:
            result = _instead(function, error, args, kwargs)
            keep(failures, Failure(error, getattr(error, "line", None) or calling(), call=function.__name__))
            return result

    return called


def _instead(function: Callable[..., Any], error: Exception, args: Any, kwargs: Any) -> Any:
    """What stands for the result of a call that is refused; where nobody knows, the error itself."""
    from .frontend.primitives import refused

    if function.__annotations__.get("return") == "None":
        return None
    try:
        return refused(*function.gives(*args, **kwargs))  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # no rule, or the argument that tells is what is wrong
        raise error from None


def calling(skip: int = 0) -> Line | None:
    """The innermost line of the user's that is running; skip: frames that do not count, this one included."""
    from .frontend.trace import is_users

    frame = inspect.currentframe()
    for _ in range(skip):
        frame = frame.f_back if frame is not None else None
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def to_its_end(body: Callable[[], None], said: Callable[[Exception], Exception]) -> None:
    """Run a body that returns nothing; where errors are collected, one that is raised ends it and nothing else.

    said: the error in our words.
    """
    failures = FAILURES.get()
    if failures is None:
        body()
        return
    from .frontend.trace import raised_at

    try:
        body()
    except Exception as error:
        line = getattr(error, "line", None) or raised_at(error, None) or calling()
        rest = f"{line.function or 'the body'} behind line {line.number}" if line else "what comes behind it"
        keep(failures, Failure(said(error), line, rest=rest))
