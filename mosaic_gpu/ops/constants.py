"""Small arrays of numbers that a kernel has captured: a table in the code, of which each thread reads its elements."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..layouts.shared import PACKED, row_major
from ..program import Equation
from .elementwise import FLOATS, INT4, INTEGERS, SMALL_FLOATS, numpy_dtype
from .registry import op

MOST_ELEMENTS = 1024  # of one: they stand in the source


@dataclasses.dataclass(frozen=True)
class Table:
    """An array's elements in row-major order, as bytes; of 4 bits one in each."""

    data: bytes

    @staticmethod
    def of(x: np.ndarray) -> Table:
        return Table(np.ascontiguousarray(x).tobytes())

    def array(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.frombuffer(self.data, numpy_dtype(dtype)).reshape(shape)

    def uniform(self, size: int) -> bool:
        """Whether all elements, of so many bytes, are the same."""
        return self.data[size:] == self.data[:-size]

    def __str__(self) -> str:
        return f"<{len(self.data)} bytes>"


constant = op("constant", pure=True, dtypes=(*FLOATS, *SMALL_FLOATS, *INTEGERS, *INT4, "bool"))
# By the width of an element: the type of its bits in the table.
BITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


@constant.emit()
def _(out: Any, step: Any) -> None:
    e: Equation = step.equation
    (result,) = e.results
    dtype = result.dtype
    x = e.param("table").array(result.shape, dtype).reshape(-1)
    # The values of 4-bit integers, the bits of all else.
    bits = x.astype(np.int8).view(np.uint8) if dtype in INT4 else x.view(f"u{x.dtype.itemsize}")
    name = f"table{result.id}"
    suffix = {8: "ull", 4: "u"}.get(bits.itemsize, "")
    values = ", ".join(f"{int(b)}{suffix}" for b in bits)
    out.line(f"static const {BITS[bits.itemsize]} {name}[{len(bits)}] = {{{values}}};")
    positions = out.positions(f"{name}_at", out.layout(result), row_major(result.shape))
    out.assign_elements(result, [_of_bits(dtype).format(f"{name}[{p}]") for p in positions])


def _of_bits(dtype: str) -> str:
    if dtype in PACKED:
        return f"from_{'bf16' if dtype == 'bfloat16' else 'f16'}({{}})"
    if dtype in ("float32", "float64"):
        return "__uint_as_float({})" if dtype == "float32" else "__longlong_as_double((long long){})"
    if dtype == "bool":
        return "({} != 0)"
    signed = {"int8": "signed char", "int4": "signed char", "int16": "short", "int32": "int", "int64": "long long"}
    return f"(({signed[dtype]}){{}})" if dtype in signed else "{}"


@constant.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    sim.write(e.results[0], e.param("table").array(e.results[0].shape, e.results[0].dtype))
