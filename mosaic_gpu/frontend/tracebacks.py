"""Tracebacks that show the user's own lines.

An error's report says what is wrong and where.  Between it and the user's call lie twenty frames of JAX's tracing, of our
passes or of the simulator: `shortened` leaves them out, as JAX does with its own.
"""

from __future__ import annotations

from types import TracebackType

import jax

from ..errors import MosaicGpuError
from .trace import is_users


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
