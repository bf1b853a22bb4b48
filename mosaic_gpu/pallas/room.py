"""Blocks that shared memory has no room for: which of them stay in global memory, where the kernel works on them in place."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..errors import Line
from ..plan.resources import SHARED_LIMIT
from .mapping import BlockMapping


def on_inputs(blocks: Sequence[BlockMapping], num_outputs: int, aliased: Collection[int]) -> tuple[BlockMapping, ...]:
    """The blocks of a call, those of outputs that are an input's buffer in place, unless their spec says where they lie.

    What a body leaves unwritten keeps the input's values there; a block in shared memory would have none of them.
    """
    why = "it is an input's buffer (input_output_aliases): what is not written keeps the input's values"
    first = len(blocks) - num_outputs
    return tuple(
        dataclasses.replace(b, in_place=why) if b.free and b.staged and i - first in aliased else b
        for i, b in enumerate(blocks)
    )


def with_room(
    name: str, blocks: Sequence[BlockMapping], num_outputs: int, scratch: Sequence[Any], line: Line | None
) -> tuple[BlockMapping, ...]:
    """The blocks of a call, as many of them staged as shared memory can hold once each; scratch: its RefTypes.

    Inputs give way before outputs, large ones before small ones, and only blocks of whose place the spec says nothing.  Rings of
    several buffers are not looked at: how long they are is the caller's choice, which an error leaves open.  A warning says
    what stays behind, as it costs time.  Where nothing helps all blocks are as they were, for the error that lists them.
    """
    own = sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in scratch if s.space.kind == "smem")
    needed = left = own + sum(b.nbytes for b in blocks if b.staged)
    inputs = len(blocks) - num_outputs
    leaving: list[int] = []
    for i in sorted(range(len(blocks)), key=lambda i: (i >= inputs, -blocks[i].nbytes)):
        if left > SHARED_LIMIT and blocks[i].staged and blocks[i].free:
            leaving.append(i)
            left -= blocks[i].nbytes
    found = list(blocks)
    for i in leaving if left <= SHARED_LIMIT else ():
        b = blocks[i]
        why = (
            f"its block has {b.nbytes} bytes; one buffer for each block of this call would take {needed} bytes of shared "
            f"memory, and there are {SHARED_LIMIT}"
        )
        found[i] = dataclasses.replace(b, in_place=why)
        _warn(
            b.line or line,
            f"pallas_call {name}: {b.name} stays in global memory, and the kernel works on it there: {why}. Smaller blocks are "
            "faster; memory_space=plgpu.GMEM says that this is meant, memory_space=plgpu.SMEM makes it an error",
        )
    return tuple(found)


def _warn(line: Line | None, text: str) -> None:
    """At the user's line."""
    if line is None:
        warnings.warn(text, stacklevel=2)
    else:
        warnings.warn_explicit(text, UserWarning, line.file, line.number)
