"""The device functions that generated kernels call, as CUDA C++ text without any ``#include``.

The text is kept in ``prelude/*.cuh``, one family of instructions a file ("piece"); every piece needs only ``common``.
`prelude` joins pieces, `prelude_for` finds out which of them a kernel's text needs.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from typing import get_args

from mosaic_gpu.codegen.tcgen05_text import (
    REDUCED,
    Direction,
    Shape,
    tcgen05_reduced_load_template,
    tcgen05_transfer_template,
)

_FILES = (
    "common",
    "debug",
    "delay",
    "mbarrier",
    "barriers",
    "fences",
    "registers",
    "griddep",
    "semaphores",
    "atomics",
    "multimem",
    "tma",
    "math",
    "pairs",
    "numbers",
    "matrix",
    "mma",
    "wgmma",
    "tcgen05",
    "launch_control",
)
_TRANSFERS: dict[str, tuple[Direction, Shape]] = {
    f"tcgen05_{direction}_{shape}": (direction, shape) for direction in get_args(Direction) for shape in get_args(Shape)
}
_REDUCED = {f"tcgen05_load_{form}": form for form in REDUCED}  # sm_103a has these
PIECES: tuple[str, ...] = (*_FILES, *_TRANSFERS)
_BLANKS = {i: " " for i in range(128) if not (chr(i).isalnum() or chr(i) == "_")}  # for all that is in no word


@functools.cache
def piece(name: str) -> str:
    """Text of one piece, with a ``#line`` that makes messages and line information name it."""
    if name in _TRANSFERS:
        text = tcgen05_transfer_template(*_TRANSFERS[name])
    elif name in _REDUCED:
        text = tcgen05_reduced_load_template(_REDUCED[name])
    elif name in _FILES:
        text = (importlib.resources.files(__package__) / "prelude" / f"{name}.cuh").read_text(encoding="utf-8")
    else:
        raise KeyError(f"the prelude has no piece {name!r}; it has {', '.join(PIECES)}")
    return f'#line 1 "{source_name(name)}"\n{text}'


def source_name(name: str) -> str:
    """The file name under which a piece appears in messages and line information."""
    return f"/mosaic_gpu/prelude/{name}.cuh"


def generated(text: str) -> str:
    """Marks functions made on demand (`wgmma_function`) as part of the prelude, for messages and line information."""
    return f'#line 1 "{source_name("generated")}"\n{text}'


def is_prelude(file: str) -> bool:
    """Is this file name, from a message or from line information, one of the prelude's?"""
    return file.startswith("/mosaic_gpu/prelude/")


def prelude(*names: str) -> str:
    """The named pieces and ``common``, in an order that compiles; all of them when none is named."""
    wanted = {"common", *(names or PIECES)}
    unknown = wanted - {*PIECES, *_REDUCED}
    if unknown:
        piece(sorted(unknown)[0])  # raises
    return "\n".join(piece(name) for name in (*PIECES, *_REDUCED) if name in wanted)


@functools.cache
def functions(name: str) -> frozenset[str]:
    """The device functions that a piece defines."""
    text = piece(name)
    plain = re.findall(r"^\s*DI\s+[\w\s*&]*?\b(\w+)(?:<\d+>)?\s*\(", text, re.MULTILINE)
    generated = re.findall(r"^MOSAIC_\w+\((\w+),", text, re.MULTILINE)
    outside = re.findall(r'^extern "C" __device__ .*?\b([a-z]\w*)\(const', text, re.MULTILINE)
    return frozenset(plain) - {"name"} | frozenset(generated) | frozenset(outside)


def prelude_for(text: str) -> str:
    """The pieces of the prelude whose functions occur in ``text``."""
    words = set(text.translate(_BLANKS).split())
    return prelude("common", *(name for name in (*PIECES, *_REDUCED) if functions(name) & words))
