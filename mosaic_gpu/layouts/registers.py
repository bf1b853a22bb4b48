"""Register layouts: which thread and register of a warpgroup holds which element of an array.

A layout is three lists of mixed-radix digits: of the register index, of the lane (0..31) and of the warp (0..3), the fastest
digit first.  A digit of value d adds d * stride to the coordinate of its dimension; a digit without a dimension is a
replica.  Every layout of wgmma, mma.sync and tcgen05.ld (PTX ISA 9.7.14 to 9.7.16) has this form for any N, and so do their
reductions, which is why nothing else in the compiler needs to know a fragment's shape.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import arguments
from .shared import row_major

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Digit:
    """size values; each adds stride to the coordinate along dim (None: a replica)."""

    size: int
    dim: int | None
    stride: int = 0


@dataclasses.dataclass(frozen=True)
class RegisterLayout:
    """A distribution of `shape` over 128 threads.  name: how messages call it."""

    name: str
    shape: Shape
    reg: tuple[Digit, ...]
    lane: tuple[Digit, ...]
    warp: tuple[Digit, ...]

    def __post_init__(self) -> None:
        assert math.prod(d.size for d in self.lane) == 32 and math.prod(d.size for d in self.warp) == 4

    @property
    def registers(self) -> int:
        """Elements that one thread holds."""
        return math.prod(d.size for d in self.reg)

    def __str__(self) -> str:
        return f"{self.name}{list(self.shape)}"

    def same_map(self, other: RegisterLayout) -> bool:
        """Whether both put every element in the same place (names aside)."""
        return (self.shape, _merged(self.reg), _merged(self.lane), _merged(self.warp)) == (
            other.shape,
            _merged(other.reg),
            _merged(other.lane),
            _merged(other.warp),
        )

    def coordinates(self) -> np.ndarray:
        """int array [warp, lane, register, dim] of element coordinates."""
        return _coordinates(self)

    def register_part(self, register: int) -> tuple[int, ...]:
        """What the register index adds to each coordinate."""
        return _part(self.reg, register, len(self.shape))

    def reduce(self, axes: Sequence[int] | int) -> RegisterLayout:
        """The layout of a reduction over `axes`: their digits become replicas, registers along them are gone."""
        gone = {axes} if isinstance(axes, int) else set(axes)
        kept = [i for i in range(len(self.shape)) if i not in gone]

        def convert(digits: tuple[Digit, ...], drop: bool) -> tuple[Digit, ...]:
            out = []
            for d in digits:
                if d.dim is None or d.dim in gone:
                    if not drop:
                        out.append(Digit(d.size, None))
                else:
                    out.append(Digit(d.size, kept.index(d.dim), d.stride))
            return tuple(out)

        shape = tuple(self.shape[i] for i in kept)
        return RegisterLayout(
            f"{self.name}.reduce{tuple(sorted(gone))}",
            shape,
            convert(self.reg, True),
            convert(self.lane, False),
            convert(self.warp, False),
        )

    def with_unit_dims(self, shape: Shape, dims: Sequence[int]) -> RegisterLayout:
        """The same distribution seen as `shape`: dimension i becomes dims[i], the new dimensions have extent 1."""

        def convert(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
            return tuple(d if d.dim is None else Digit(d.size, dims[d.dim], d.stride) for d in digits)

        return RegisterLayout(self.name, shape, convert(self.reg), convert(self.lane), convert(self.warp))

    def with_minor(self, shape: Shape) -> RegisterLayout:
        """The same distribution of arrays of `shape`'s last extent, each with the thread that had the one element."""
        last = Digit(shape[-1], len(shape) - 1, 1)
        return RegisterLayout(f"{self.name}.parts", shape, (last, *self.reg), self.lane, self.warp)

    def reshaped(self, shape: Shape) -> RegisterLayout | None:
        """The same distribution of the elements, numbered row by row, seen as `shape`; None where that has no digits."""
        steps, groups = row_major(self.shape), []
        for digits in (self.reg, self.lane, self.warp):
            parts = [(d,) if d.dim is None else _across(d.size, d.stride * steps[d.dim], shape) for d in digits]
            groups.append(tuple(p for some in parts for p in some or ()))
            if None in parts:
                return None
        same = [n for n in shape if n != 1] == [n for n in self.shape if n != 1]
        return RegisterLayout(self.name if same else f"{self.name}.reshape", shape, *groups)


def _across(size: int, step: int, shape: Shape) -> tuple[Digit, ...] | None:
    """The digits of elements 0, step, 2 step, ... of an array of `shape`, numbered row by row."""
    out, steps = [], row_major(shape)
    while size > 1:
        dim = next(i for i, n in enumerate(shape) if n > 1 and steps[i] <= step)
        stride, rest = divmod(step, steps[dim])
        inside = min(size, shape[dim] // stride)
        if rest or size % inside or (inside < size and shape[dim] % stride):
            return None
        out.append(Digit(inside, dim, stride))
        size, step = size // inside, step * inside
    return tuple(out)


def _merged(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
    """Canonical form: unit digits dropped, neighbours that continue each other joined."""
    out: list[Digit] = []
    for d in digits:
        if d.size == 1:
            continue
        if out and out[-1].dim == d.dim and (d.dim is None or d.stride == out[-1].stride * out[-1].size):
            out[-1] = Digit(out[-1].size * d.size, d.dim, out[-1].stride)
        else:
            out.append(d)
    return tuple(out)


def _part(digits: tuple[Digit, ...], index: int, rank: int) -> tuple[int, ...]:
    out = [0] * rank
    for d in digits:
        if d.dim is not None:
            out[d.dim] += (index % d.size) * d.stride
        index //= d.size
    return tuple(out)


@functools.lru_cache(maxsize=1024)
def _coordinates(layout: RegisterLayout) -> np.ndarray:
    rank = len(layout.shape)
    parts = [
        np.array([_part(digits, i, rank) for i in range(n)], dtype=np.int64).reshape(n, rank)
        for digits, n in ((layout.warp, 4), (layout.lane, 32), (layout.reg, layout.registers))
    ]
    return parts[0][:, None, None] + parts[1][None, :, None] + parts[2][None, None]


# ---- the layouts of the hardware ----------------------------------------------------------------------------------------
def wgmma(shape: Shape) -> RegisterLayout:
    """Accumulator of wgmma m64nNkK and its 16-bit A fragment, (m, n) with m % 64 == 0 and n % 8 == 0 (PTX ISA 9.7.15.5)."""
    m, n = shape
    reg = (Digit(2, 1, 1), Digit(2, 0, 8), Digit(n // 8, 1, 8), Digit(m // 64, 0, 64))
    return RegisterLayout("WGMMA", shape, reg, (Digit(4, 1, 2), Digit(8, 0, 1)), (Digit(4, 0, 16),))


def wgmma_8bit(shape: Shape) -> RegisterLayout:
    """A fragment of wgmma m64nNk32 of 8-bit elements, (m, k) with m % 64 == 0 and k % 32 == 0 (PTX ISA 9.7.15.5.1)."""
    m, k = shape
    reg = (Digit(4, 1, 1), Digit(2, 0, 8), Digit(2, 1, 16), Digit(k // 32, 1, 32), Digit(m // 64, 0, 64))
    return RegisterLayout("WGMMA_8BIT", shape, reg, (Digit(4, 1, 4), Digit(8, 0, 1)), (Digit(4, 0, 16),))


def wgmma_tf32(shape: Shape) -> RegisterLayout:
    """A fragment of wgmma m64nNk8 of tf32, (m, k) with m % 64 == 0 and k % 8 == 0 (PTX ISA 9.7.15.5.1)."""
    m, k = shape
    reg = (Digit(2, 0, 8), Digit(2, 1, 4), Digit(k // 8, 1, 8), Digit(m // 64, 0, 64))
    return RegisterLayout("WGMMA_TF32", shape, reg, (Digit(4, 1, 1), Digit(8, 0, 1)), (Digit(4, 0, 16),))


def tcgen05_native(shape: Shape) -> RegisterLayout:
    """What tcgen05.ld.32x32b delivers: one TMEM lane (row) per thread, (128, n) (PTX ISA 9.7.16.8)."""
    m, n = shape
    return RegisterLayout(
        "TCGEN05_TMEM_NATIVE", shape, (Digit(n, 1, 1), Digit(m // 128, 0, 128)), (Digit(32, 0, 1),), (Digit(4, 0, 32),)
    )


def tcgen05(shape: Shape) -> RegisterLayout:
    """What two tcgen05.ld.16x256b deliver, (128, n): per warp 32 rows, in wgmma's fragments (PTX ISA 9.7.16.8)."""
    n = shape[1]
    reg = (Digit(2, 1, 1), Digit(2, 0, 8), Digit(n // 8, 1, 8), Digit(2, 0, 16))
    return RegisterLayout("TCGEN05", shape, reg, (Digit(4, 1, 2), Digit(8, 0, 1)), (Digit(4, 0, 32),))


def m64_collective_native(shape: Shape) -> RegisterLayout:
    """`tcgen05_native` of 64 rows whose right half of the columns lies in the upper 64 lanes (PTX ISA 9.7.16.10.5, layout B)."""
    n = shape[1]
    warp = (Digit(2, 0, 32), Digit(2, 1, n // 2))
    return RegisterLayout("TCGEN05_M64_COLLECTIVE_NATIVE", shape, (Digit(n // 2, 1, 1),), (Digit(32, 0, 1),), warp)


def m64_collective(shape: Shape) -> RegisterLayout:
    """`tcgen05` of the same."""
    n = shape[1]
    reg = (Digit(2, 1, 1), Digit(2, 0, 8), Digit(n // 16, 1, 8), Digit(2, 0, 16))
    warp = (Digit(2, 0, 32), Digit(2, 1, n // 2))
    return RegisterLayout("TCGEN05_M64_COLLECTIVE", shape, reg, (Digit(4, 1, 2), Digit(8, 0, 1)), warp)


def strided(shape: Shape, vector: int = 1) -> RegisterLayout:
    """Row-major round robin in vectors; the element count must divide by 128 * vector."""
    rank = len(shape)
    total = math.prod(shape)
    if total % (128 * vector):
        raise ValueError(
            f"WG_STRIDED{list(shape)}: {total} elements do not divide over 128 threads in vectors of {vector}"
        )
    sizes = (vector, 32, 4, total // (128 * vector))
    groups: list[list[Digit]] = [[], [], [], []]
    dim, remaining, stride = rank - 1, shape[-1] if rank else 1, 1
    for group, size in enumerate(sizes):
        left = size
        while left > 1:
            while remaining == 1:
                dim -= 1
                remaining, stride = shape[dim], 1
            take = math.gcd(left, remaining)
            if take == 1:
                raise ValueError(
                    f"WG_STRIDED{list(shape)} with vectors of {vector}: dimension {dim} cannot be split over threads evenly"
                )
            groups[group].append(Digit(take, dim, stride))
            stride, remaining, left = stride * take, remaining // take, left // take
    return RegisterLayout("WG_STRIDED", shape, (*groups[0], *groups[3]), tuple(groups[1]), tuple(groups[2]))


class Layout(enum.Enum):
    """Register layouts by name, as in `layout_cast(x, Layout.WGMMA)`; `Layout.WGMMA.reduce(1)` is that of its row reductions."""

    WGMMA = "WGMMA"
    WGMMA_8BIT = "WGMMA_8BIT"
    WGMMA_TF32 = "WGMMA_TF32"
    TCGEN05 = "TCGEN05"
    TCGEN05_TMEM_NATIVE = "TCGEN05_TMEM_NATIVE"
    TCGEN05_M64_COLLECTIVE = "TCGEN05_M64_COLLECTIVE"
    TCGEN05_M64_COLLECTIVE_NATIVE = "TCGEN05_M64_COLLECTIVE_NATIVE"
    WG_STRIDED = "WG_STRIDED"

    def reduce(self, axes: int | Sequence[int]) -> ReducedLayout:
        """The layout of a reduction of a 2-D array in this layout over `axes`."""
        chosen = arguments.whole_numbers(f"{self}.reduce", "axes", axes, 0)
        if not chosen or len(set(chosen)) != len(chosen) or max(chosen) > 1:
            raise ValueError(f"{self}.reduce: axes={axes} must be 0, 1 or both, as the arrays are (rows, columns)")
        return ReducedLayout(self, chosen)

    def __call__(self, *args: object, **kwargs: object) -> Layout:
        """`Layout.X()` means `Layout.X`: none of ours takes parameters (the shape comes from the array)."""
        if args or kwargs:
            raise ValueError(f"{self} takes no parameters: the array's shape decides")
        return self

    def of(self, shape: Shape) -> RegisterLayout:
        """The layout for an array of `shape`; ValueError where the shape does not fit."""
        if self is Layout.WG_STRIDED:
            return strided(shape)
        rows, columns = {
            Layout.WGMMA: (64, 8),
            Layout.WGMMA_8BIT: (64, 32),
            Layout.WGMMA_TF32: (64, 8),
            Layout.TCGEN05: (128, 8),
            Layout.TCGEN05_TMEM_NATIVE: (128, 1),
            Layout.TCGEN05_M64_COLLECTIVE: (64, 16),
            Layout.TCGEN05_M64_COLLECTIVE_NATIVE: (64, 2),
        }[self]
        if len(shape) != 2 or shape[0] % rows or shape[1] % columns:
            raise ValueError(
                f"{self.value} holds (m, n) arrays with m a multiple of {rows} and n of {columns}; this one is {shape}"
            )
        once = (Layout.TCGEN05, Layout.TCGEN05_M64_COLLECTIVE, Layout.TCGEN05_M64_COLLECTIVE_NATIVE)
        if self in once and shape[0] != rows:
            raise ValueError(f"{self.value} holds ({rows}, n) arrays; this one is {shape}")
        of = {
            Layout.WGMMA: wgmma,
            Layout.WGMMA_8BIT: wgmma_8bit,
            Layout.WGMMA_TF32: wgmma_tf32,
            Layout.TCGEN05: tcgen05,
            Layout.TCGEN05_TMEM_NATIVE: tcgen05_native,
            Layout.TCGEN05_M64_COLLECTIVE: m64_collective,
            Layout.TCGEN05_M64_COLLECTIVE_NATIVE: m64_collective_native,
        }[self]
        return of(shape)


@dataclasses.dataclass(frozen=True)
class ReducedLayout:
    """`Layout.X.reduce(axes)`: the layout of a reduction."""

    base: Layout
    axes: tuple[int, ...]

    def of(self, shape: Shape) -> RegisterLayout:
        """For a reduction result of `shape`.  The reduced extent does not matter: it is all replicas."""
        full, rows = list(shape), 64 if "M64" in self.base.value else 128
        for a in sorted(self.axes):
            full.insert(a, rows if a == 0 else 64)
        return self.base.of(tuple(full)).reduce(self.axes)


LayoutName = Layout | ReducedLayout


def checked_layout(where: str, x: Any) -> LayoutName | None:
    """The argument `layout` of a public function."""
    if x is not None and not isinstance(x, (Layout, ReducedLayout)):
        name = str(x).rsplit(".", 1)[-1]
        known = f"plgpu.Layout.{name}" if name in Layout.__members__ else "such as plgpu.Layout.WGMMA"
        arguments.refuse(where, "layout", x, f"a register layout, {known}")
    return x
