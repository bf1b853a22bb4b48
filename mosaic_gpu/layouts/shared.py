"""Shared memory: how a buffer's elements lie in bytes (tiles, swizzle), for TMA, MMA descriptors, loads and the simulator."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import IllegalInstruction, Line
from ..memory import MemorySpace

ITEM_BITS = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int64": 64,
    "uint64": 64,
    "int32": 32,
    "uint32": 32,
    "int16": 16,
    "uint16": 16,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e8m0fnu": 8,
    "int4": 8,  # of a register, or in scratch
    "uint4": 8,
    "float4_e2m1fn": 8,
}

# Types of which no Ref is made: memory is addressed in bytes.
FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")
TINY_INTEGERS = ("int1", "uint1", "int2", "uint2")
BELOW_A_BYTE = (*TINY_INTEGERS, "float6_e2m3fn", "float6_e3m2fn", *FOUR_BITS)

PACKED = ("bfloat16", "float16")  # two to a register, low element first


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return ITEM_BITS[dtype] // 8


def width(dtype: str) -> int:
    """Bits of an element's value, as `lax.bitcast_convert_type` counts them."""
    return 4 if dtype in FOUR_BITS else ITEM_BITS[dtype]


def instead_of(dtype: str) -> str:
    """What to do instead of a type that a kernel does not have, for messages."""
    if dtype.startswith("complex"):
        return (
            "hand over real and imaginary parts as arrays of their own (jnp.real(x), jnp.imag(x)), compute with those, and put "
            "them together outside (jax.lax.complex)"
        )
    outside = "convert outside of the kernel to"
    if dtype in TINY_INTEGERS:
        return f"{outside} int8, or in it compute with int8 in its place"
    if dtype.startswith("float6"):
        return f"{outside} float8_e4m3fn, which holds all its values (by NumPy: XLA does not compile it either)"
    if dtype.startswith("float8"):
        return f"{outside} {'float32' if 'e8m0' in dtype else 'float16'}, which holds all its values"
    return f"{outside} one of these"


def way_out_below_a_byte(dtype: str) -> str:
    """What to do instead of a Ref of a type in BELOW_A_BYTE, for messages."""
    if dtype not in ITEM_BITS:
        return f"memory here counts in bytes: {instead_of(dtype)}"
    return (
        "memory here counts in bytes: hand over bytes, two elements along the last dimension in each (outside of the kernel "
        "lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int8)), and take them apart in registers "
        f"(lax.bitcast_convert_type(ref[...], jnp.{dtype}), which adds a last dimension of 2, to reshape away)"
    )


def array_bytes(*arrays: Any, align: int = 1) -> int:
    """Bytes of arrays one after the other, each filled up to a multiple of `align`.  arrays: anything with shape and dtype."""
    return sum(-(-math.prod(a.shape) * itemsize(a.dtype) // align) * align for a in arrays)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """By how many elements a step along each dimension goes on, in a row-major array."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@dataclasses.dataclass(frozen=True)
class SharedLayout:
    """Where element (i0, ..., in) of a buffer lies.

    Trailing dimensions in tiles: row-major grid of tiles, each row-major.  `tile` is () for a plain row-major buffer.
    Byte addresses then have their 16-byte chunk XORed with the 128-byte line: the swizzle acts on address bits, so a
    buffer must start on a multiple of 1024 bytes (`swizzle` > 0).
    """

    shape: tuple[int, ...]
    dtype: str
    tile: tuple[int, ...] = ()
    swizzle: int = 0

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def lead(self) -> int:
        """Number of leading dimensions that are not tiled."""
        return len(self.shape) - len(self.tile)

    def strides(self) -> list[tuple[tuple[int, int], ...]]:
        """For each dimension its digits, innermost first: (extent, byte stride).  An untiled one has a single digit."""
        out: list[tuple[tuple[int, int], ...]] = [()] * len(self.shape)
        step = self.itemsize
        inner = {}
        for k in reversed(range(len(self.tile))):
            inner[k] = (self.tile[k], step)
            step *= self.tile[k]
        for k in reversed(range(len(self.tile))):
            extent = self.shape[self.lead + k] // self.tile[k]
            out[self.lead + k] = (inner[k], (extent, step))
            step *= extent
        for d in reversed(range(self.lead)):
            out[d] = ((self.shape[d], step),)
            step *= self.shape[d]
        return out

    def places(self) -> list[tuple[tuple[int, int], ...]]:
        """The digits without those that an index inside the buffer need not be divided for."""
        out = []
        for digits in self.strides():
            if len(digits) > 1 and (digits[1][0] == 1 or digits[1][1] == digits[0][0] * digits[0][1]):
                digits = ((digits[0][0] * digits[1][0], digits[0][1]),)
            out.append(digits)
        return out

    def distance(self, shifts: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Steps along each dimension -> (those of them that have to be added to the index, the bytes by which the others move the
        place of any element)."""
        rest, total, again = [], 0, 8 * self.swizzle or 1  # bytes after which the swizzle begins again
        for shift, digits in zip(shifts, self.places(), strict=True):
            inner = digits[0][0] if len(digits) > 1 else 1
            moved = shift // inner * digits[-1][1]
            constant = shift % inner == 0 and moved % again == 0
            rest.append(0 if constant else shift)
            total += moved if constant else 0
        return tuple(rest), total

    def byte_offsets(self) -> np.ndarray:
        """int64 array of `shape`: the byte offset of each element, swizzle applied."""
        total = np.zeros(self.shape, np.int64)
        for d, digits in enumerate(self.strides()):
            index = np.arange(self.shape[d], dtype=np.int64)
            part = np.zeros_like(index)
            for extent, stride in digits:
                part += index % extent * stride
                index //= extent
            total += part.reshape([-1 if i == d else 1 for i in range(len(self.shape))])
        return swizzled(total, self.swizzle)


def swizzled(offset: np.ndarray, swizzle: int) -> np.ndarray:
    """Byte offsets after the XOR: 128 B bits 4-6 ^= 7-9; 64 B bits 4-5 ^= 7-8; 32 B bit 4 ^= 7 (PTX ISA 5.5.7)."""
    if not swizzle:
        return offset
    result: np.ndarray = offset ^ (((offset >> 7) & (swizzle // 16 - 1)) << 4)
    return result


def shared_layout(shape: tuple[int, ...], dtype: str, space: MemorySpace, line: Line | None) -> SharedLayout:
    """The layout a buffer's transforms ask for; `IllegalInstruction` where they do not fit the shape."""
    tile, swizzle = space.tiling or (), space.swizzle
    if len(tile) > len(shape):
        raise IllegalInstruction(f"TilingTransform{tile} has more dimensions than the buffer {shape}", line)
    for n, t in zip(shape[len(shape) - len(tile) :], tile, strict=True):
        if t < 1 or n % t:
            raise IllegalInstruction(
                f"TilingTransform{tile} does not divide the buffer {shape}: {n} % {t} = {n % t if t > 0 else n}", line
            )
    if swizzle:
        inner = (tile[-1] if tile else shape[-1]) * itemsize(dtype)
        if inner != swizzle:
            fits = swizzle // itemsize(dtype)
            raise IllegalInstruction(
                f"SwizzleTransform({swizzle}) needs rows of {swizzle} bytes, but the innermost tile of {shape} "
                f"{dtype} has {inner}; "
                f"add TilingTransform((rows, {fits}))",
                line,
            )
    return SharedLayout(tuple(shape), dtype, tuple(tile), swizzle)
