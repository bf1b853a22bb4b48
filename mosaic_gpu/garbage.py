"""Python's collector of cyclic garbage, held back for a moment."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collection while the body runs, if there would be any.

    For work that takes a tenth of a second and makes many objects that stay, such as to trace a kernel: a collection that falls
    into it looks through all that the process has, 70 ms with nothing but JAX loaded, and frees nothing.
    """
    if not gc.isenabled():  # by the user, or by us around this; another thread's end turns it on again a little early
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
