"""CUDA C++ spellings: types, literals, and a line buffer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np

from ..errors import UnsupportedPrimitive
from ..ops.elementwise import SMALL_FLOATS, numpy_dtype
from ..program import Literal

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "float",
    "float16": "float",
    "int64": "long long",
    "uint64": "u64",
    "int32": "int",
    "uint32": "u32",
    "int16": "short",
    "uint16": "u16",
    "int8": "signed char",
    "uint8": "u8",
    "bool": "bool",
    "float8_e4m3fn": "u8",  # their bits
    "float8_e5m2": "u8",
    "float4_e2m1fn": "u8",
    "int4": "signed char",  # their values
    "uint4": "u8",
}
STORED = {"bfloat16": "u16", "float16": "u16"}


def c_type(dtype: str) -> str:
    """The type that a scalar of `dtype` is computed in: 16-bit floats as float, holding a rounded value."""
    if dtype not in C_TYPES:
        raise UnsupportedPrimitive(f"{dtype} values in registers: this version computes in {', '.join(C_TYPES)}")
    return C_TYPES[dtype]


def stored_type(dtype: str) -> str:
    """The type that memory holds."""
    return STORED.get(dtype, C_TYPES[dtype])


def literal(x: Literal) -> str:
    v = x.value
    if x.dtype == "bool":
        return "true" if v else "false"
    if x.dtype in SMALL_FLOATS:
        return f"(u8){int(np.asarray(v).astype(numpy_dtype(x.dtype)).view(np.uint8))}"
    if isinstance(v, float):
        if math.isnan(v):
            return "__int_as_float(0x7fc00000)"
        if math.isinf(v):
            return "__int_as_float(0x7f800000)" if v > 0 else "__int_as_float(0xff800000)"
        text = repr(v) if x.dtype == "float64" else f"{v:.9g}"
        text = text if any(c in text for c in ".en") else text + ".0"
        return f"({text}{'' if x.dtype == 'float64' else 'f'})"
    if x.dtype == "int32" and v == -(2**31):
        return "(-2147483647 - 1)"
    return f"({v})" if v < 0 else f"{v}{'u' if x.dtype.startswith('u') else ''}"


def half(dtype: str) -> str:
    """'bf16' or 'f16', as the prelude's functions are named."""
    return "bf16" if dtype == "bfloat16" else "f16"


class Text:
    """Lines with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text if not text.startswith("#") else text)

    @contextlib.contextmanager
    def block(self, head: str = "") -> Iterator[None]:
        self.line(f"{head} {{" if head else "{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")
