"""What a launch needs, as plain data: the cubin, the grid and how each kernel parameter comes about.

Made by the code generator, handed as bytes (`serialize`) to the native launcher in `runtime/native`.  Imports no JAX,
so that specs can be made, pickled and exported in other processes.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from typing import Literal

from mosaic_gpu.errors import IllegalInstruction, ResourceExceeded, UnsupportedCall

__all__ = [
    "BufferPointer",
    "Extent",
    "LaunchSpec",
    "Parameter",
    "Scalar",
    "ShapedMap",
    "TensorMap",
    "deserialize",
    "serialize",
]

# Element types that a tensor map can carry: the driver's CUtensorMapDataType and the size in bytes.  A tensor map only
# moves bytes and fills with zeros, so types that the driver has no name for travel as unsigned integers of their size.
TENSOR_MAP_TYPES: dict[str, tuple[int, int]] = {
    "bool": (0, 1),
    "int8": (0, 1),
    "uint8": (0, 1),
    "float8_e4m3fn": (0, 1),
    "float8_e5m2": (0, 1),
    "float8_e4m3b11fnuz": (0, 1),
    "float8_e4m3fnuz": (0, 1),
    "float8_e5m2fnuz": (0, 1),
    "float8_e4m3": (0, 1),
    "float8_e3m4": (0, 1),
    "float8_e8m0fnu": (0, 1),
    "int16": (1, 2),
    "uint16": (1, 2),
    "uint32": (2, 4),
    "int32": (3, 4),
    "uint64": (4, 8),
    "int64": (5, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
}
# Swizzle in bytes -> CUtensorMapSwizzle.
SWIZZLES: dict[int, int] = {0: 0, 32: 1, 64: 2, 128: 3}

MAX_RANK = 5
MAX_BOX = 256  # elements
MAX_DIM = 1 << 32  # elements
MAX_STRIDE = 1 << 40  # bytes, exclusive
MAX_THREADS = 1024
MAX_CLUSTER = 16  # blocks; above 8 the launcher asks the driver for a non-portable size
MAX_SHARED = 227 * 1024  # bytes of dynamic shared memory a block can have on sm_90 and sm_100
MAX_GRID = (2**31 - 1, 65535, 65535)  # blocks

_SCALARS: dict[str, tuple[str, int]] = {"int32": ("<i", 4), "int64": ("<q", 8), "float32": ("<f", 4)}


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor over one buffer: rows beyond the array read as zeros, L2 promotion 256 bytes, no interleave.

    buffer: index among the call's inputs followed by its outputs.
    dtype: NumPy name of the element type.
    dims: extents in elements, innermost first, 1 to 5 of them.
    strides: distance in bytes between neighbours along dims[1:]; the innermost dimension is dense.
    box: extents in elements of what one copy moves, innermost first.
    swizzle: 0 (none), 32, 64 or 128 bytes.
    """

    buffer: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in TENSOR_MAP_TYPES:
            raise UnsupportedCall(
                f"TMA cannot copy elements of type {self.dtype}; it knows {', '.join(TENSOR_MAP_TYPES)}. "
                "Copy through registers instead, or view the array as one of these types"
            )
        if self.buffer < 0:
            raise UnsupportedCall(f"tensor map over buffer {self.buffer}: a buffer index counts from 0")
        rank = len(self.dims)
        if not 1 <= rank <= MAX_RANK:
            raise IllegalInstruction(f"a tensor map has 1 to {MAX_RANK} dimensions; {self.dims} has {rank}")
        if len(self.strides) != rank - 1 or len(self.box) != rank:
            raise IllegalInstruction(
                f"a tensor map of rank {rank} has {rank - 1} strides and {rank} box extents; "
                f"got strides {self.strides} and box {self.box}"
            )
        self._check_array()
        self._check_box()

    def _check_array(self) -> None:
        for axis, dim in enumerate(self.dims):
            if not 1 <= dim <= MAX_DIM:
                raise UnsupportedCall(
                    f"TMA dimension {axis} has {dim} elements; 1 to {MAX_DIM} are possible (dims {self.dims})"
                )
        for axis, stride in enumerate(self.strides, start=1):
            if stride % 16 or not 0 <= stride < MAX_STRIDE:
                raise UnsupportedCall(
                    f"TMA needs strides that are multiples of 16 bytes below 2^40; dimension {axis} of {self.dims} "
                    f"({self.dtype}) has a stride of {stride} bytes. Pad the inner dimension to a multiple of "
                    f"{16 // math.gcd(16, self.itemsize)} elements"
                )

    def _check_box(self) -> None:
        for axis, extent in enumerate(self.box):
            if not 1 <= extent <= MAX_BOX:
                raise IllegalInstruction(
                    f"a TMA box has 1 to {MAX_BOX} elements in each dimension; "
                    f"dimension {axis} of {self.box} has {extent}"
                )
        if self.swizzle not in SWIZZLES:
            raise IllegalInstruction(f"TMA swizzles by {', '.join(map(str, SWIZZLES))} bytes; got {self.swizzle}")
        row = self.box[0] * self.itemsize
        if row % 16:
            raise IllegalInstruction(
                f"the innermost extent of a TMA box is a multiple of 16 bytes; {self.box[0]} elements of {self.dtype} "
                f"are {row} bytes"
            )
        if self.swizzle and row > self.swizzle:
            raise IllegalInstruction(
                f"with a swizzle of {self.swizzle} bytes the innermost extent of a TMA box is at most as many; "
                f"{self.box[0]} elements of {self.dtype} are {row} bytes"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return TENSOR_MAP_TYPES[self.dtype][1]

    @property
    def extent(self) -> int:
        """Bytes from the first to the end of the last element: the launcher refuses a smaller buffer."""
        reach = sum((dim - 1) * stride for dim, stride in zip(self.dims[1:], self.strides, strict=True))
        return reach + self.dims[0] * self.itemsize

    def _pack(self) -> bytes:
        rank = len(self.dims)
        head = struct.pack(
            "<IIIIIQ", 0, self.buffer, TENSOR_MAP_TYPES[self.dtype][0], rank, SWIZZLES[self.swizzle], self.extent
        )
        return head + struct.pack(f"<{rank}Q{rank - 1}Q{rank}I", *self.dims, *self.strides, *self.box)


@dataclasses.dataclass(frozen=True)
class BufferPointer:
    """A pointer to `offset` bytes past the start of a buffer (inputs, then outputs of the call)."""

    buffer: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.buffer < 0 or self.offset < 0:
            raise UnsupportedCall(f"pointer into buffer {self.buffer} at byte {self.offset}: both count from 0")

    def _pack(self) -> bytes:
        return struct.pack("<IIQ", 1, self.buffer, self.offset)


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A kernel parameter passed by value."""

    value: int | float
    dtype: Literal["int32", "int64", "float32"]

    def __post_init__(self) -> None:
        if self.dtype not in _SCALARS:
            raise UnsupportedCall(f"a scalar kernel parameter is {', '.join(_SCALARS)}; got {self.dtype}")
        bits = {"int32": 31, "int64": 63}.get(self.dtype)
        if bits and not (isinstance(self.value, int) and -(1 << bits) <= self.value < 1 << bits):
            raise UnsupportedCall(f"{self.value!r} does not fit a scalar kernel parameter of type {self.dtype}")

    def _pack(self) -> bytes:
        form, size = _SCALARS[self.dtype]
        return struct.pack("<II", 2, size) + struct.pack(form, self.value).ljust(8, b"\0")


@dataclasses.dataclass(frozen=True)
class ShapedMap:
    """A `TensorMap` whose extents are those of the array that a call brings, row-major: for programs exported with symbols.

    dims: for each of its dimensions, innermost first, (axis of the array, elements of a step along it, steps); steps None: as
    many as the array has.  buffer, dtype, box, swizzle: as there.
    """

    buffer: int
    dtype: str
    dims: tuple[tuple[int, int, int | None], ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        rows = 16 // math.gcd(16, TENSOR_MAP_TYPES[self.dtype][1]) if self.dtype in TENSOR_MAP_TYPES else 1
        extents = tuple(n or rows for _, _, n in self.dims)
        TensorMap(
            self.buffer, self.dtype, extents, (16,) * (len(extents) - 1), self.box, self.swizzle
        )  # all but the array

    def _pack(self) -> bytes:
        code, size = TENSOR_MAP_TYPES[self.dtype]
        head = struct.pack("<IIIIII", 3, self.buffer, code, len(self.dims), SWIZZLES[self.swizzle], size)
        dims = b"".join(struct.pack("<IIQ", axis, step, steps or 0) for axis, step, steps in self.dims)
        return head + dims + struct.pack(f"<{len(self.box)}I", *self.box)


@dataclasses.dataclass(frozen=True)
class Extent:
    """An extent of the array that a call brings, as an int32: for programs exported with symbols."""

    buffer: int
    axis: int

    def __post_init__(self) -> None:
        if self.buffer < 0 or self.axis < 0:
            raise UnsupportedCall(f"axis {self.axis} of buffer {self.buffer}: both count from 0")

    def _pack(self) -> bytes:
        return struct.pack("<III", 4, self.buffer, self.axis)


Parameter = TensorMap | BufferPointer | Scalar | ShapedMap | Extent


@dataclasses.dataclass(frozen=True)
class LaunchSpec:
    """One kernel launch.

    cubin, entry: the compiled kernel and its symbol.
    grid, cluster: blocks along x, y, z.  A grid with a zero launches nothing.
    threads: threads of a block.
    shared_bytes: dynamic shared memory of a block, in bytes.
    parameters: in the order of the kernel's parameters.
    toolchain: what made the cubin, for messages; it ends in the target, as in "NVRTC 13.0 sm_90a".
    early: it may begin while earlier kernels of the stream run (programmatic stream serialization); it waits for them by itself.
    """

    cubin: bytes
    entry: str
    grid: tuple[int, int, int]
    threads: int
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    toolchain: str
    early: bool = False

    def __post_init__(self) -> None:
        _ = self.arch  # refuses a toolchain string without a target
        if len(self.grid) != 3 or any(not 0 <= g <= m for g, m in zip(self.grid, MAX_GRID, strict=True)):
            raise UnsupportedCall(
                f"a grid has at most {MAX_GRID} blocks along x, y, z; {self.entry} asks for {self.grid}"
            )
        if len(self.cluster) != 3 or min(self.cluster) < 1 or math.prod(self.cluster) > MAX_CLUSTER:
            raise UnsupportedCall(
                f"a cluster has 1 to {MAX_CLUSTER} blocks; {self.entry} asks for {self.cluster} = "
                f"{math.prod(self.cluster)} blocks"
            )
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise UnsupportedCall(f"{self.entry}: the grid {self.grid} is no multiple of the cluster {self.cluster}")
        if not 1 <= self.threads <= MAX_THREADS:
            raise ResourceExceeded(f"a block has 1 to {MAX_THREADS} threads; {self.entry} asks for {self.threads}")
        if not 0 <= self.shared_bytes <= MAX_SHARED:
            raise ResourceExceeded(
                f"a block has at most {MAX_SHARED} bytes of shared memory; {self.entry} asks for {self.shared_bytes}"
            )

    @property
    def arch(self) -> tuple[int, str]:
        """The cubin's target, as compute capability times ten and suffix: (90, "a")."""
        found = re.search(r"\bsm_(\d+)([af]?)\b", self.toolchain)
        if not found:
            raise UnsupportedCall(f"the toolchain {self.toolchain!r} of {self.entry} names no target such as sm_90a")
        return int(found[1]), found[2]


MAGIC = b"MGLS"
VERSION = 3  # of the bytes below; runtime/native/spec.cc reads them


def serialize(spec: LaunchSpec) -> bytes:
    """The spec as little-endian bytes for the native launcher; the same spec gives the same bytes."""
    number, suffix = spec.arch
    entry, toolchain = spec.entry.encode(), spec.toolchain.encode()
    fixed = (*spec.grid, spec.threads, *spec.cluster, spec.shared_bytes, spec.early)
    return b"".join(
        (
            MAGIC,
            struct.pack("<III", VERSION, number, ord(suffix) if suffix else 0),
            struct.pack("<9I", *fixed),
            struct.pack("<I", len(toolchain)),
            toolchain,
            struct.pack("<I", len(entry)),
            entry,
            struct.pack("<I", len(spec.parameters)),
            *(parameter._pack() for parameter in spec.parameters),
            struct.pack("<Q", len(spec.cubin)),
            spec.cubin,
        )
    )


def deserialize(data: bytes) -> LaunchSpec:
    """The spec that `serialize` made bytes of, checked as a new one is; a tensor map's type is the first that the driver calls
    the same.  UnsupportedCall for anything else."""
    reader = _Reader(data)
    if reader.bytes(4) != MAGIC:
        raise UnsupportedCall("this is no launch specification")
    version, _, _ = reader.unpack("<III")
    if version != VERSION:
        raise UnsupportedCall(f"a launch specification of version {version}; this mosaic_gpu reads version {VERSION}")
    *fixed, shared, early = reader.unpack("<9I")
    toolchain, entry = reader.text(), reader.text()
    parameters = tuple(reader.parameter() for _ in range(reader.unpack("<I")[0]))
    cubin = reader.bytes(reader.unpack("<Q")[0])
    if reader.at != len(data):
        raise UnsupportedCall(
            f"a launch specification of {reader.at} bytes with {len(data) - reader.at} more behind it"
        )
    x, y, z, threads, cx, cy, cz = fixed
    return LaunchSpec(cubin, entry, (x, y, z), threads, (cx, cy, cz), shared, parameters, toolchain, bool(early))


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bytes(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise UnsupportedCall(
                f"a launch specification that ends after {len(self.data)} bytes, in the middle of a field"
            )
        found, self.at = self.data[self.at : end], end
        return found

    def unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))

    def text(self) -> str:
        return self.bytes(self.unpack("<I")[0]).decode(errors="replace")

    def parameter(self) -> Parameter:
        (kind,) = self.unpack("<I")
        if kind == 0:
            buffer, code, rank, swizzle, _ = self.unpack("<IIIIQ")
            dims, strides, box = (
                self.unpack(f"<{rank}Q"),
                self.unpack(f"<{max(rank, 1) - 1}Q"),
                self.unpack(f"<{rank}I"),
            )
            types = [name for name, (number, _) in TENSOR_MAP_TYPES.items() if number == code]
            spans = [span for span, number in SWIZZLES.items() if number == swizzle]
            if types and spans:
                return TensorMap(buffer, types[0], dims, strides, box, spans[0])
        elif kind == 1:
            return BufferPointer(*self.unpack("<IQ"))
        elif kind == 2:
            (size,) = self.unpack("<I")
            raw = self.bytes(8)[:size]
            # A scalar's type is not in the bytes: those of 4 bytes are taken for int32, which packs to the same.
            if size in (4, 8):
                return Scalar(int.from_bytes(raw, "little", signed=True), "int32" if size == 4 else "int64")
        elif kind == 3:
            buffer, code, rank, swizzle, size = self.unpack("<IIIII")
            steps = [self.unpack("<IIQ") for _ in range(rank)]
            box = self.unpack(f"<{rank}I")
            types = [name for name, (number, width) in TENSOR_MAP_TYPES.items() if (number, width) == (code, size)]
            spans = [span for span, number in SWIZZLES.items() if number == swizzle]
            if types and spans:
                return ShapedMap(buffer, types[0], tuple((a, n, e or None) for a, n, e in steps), box, spans[0])
        elif kind == 4:
            return Extent(*self.unpack("<II"))
        raise UnsupportedCall(f"a launch specification with a parameter of kind {kind} that this version does not know")
