"""Global and shared memory: bytes, which of them were written, and views of them as arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OutOfBounds, UninitializedRead
from ..layouts.shared import SharedLayout, itemsize
from ..ops.elementwise import numpy_dtype
from ..program import Affine, View
from .global_shadow import GlobalShadow, Part
from .shadow import ShadowMemory

Array = npt.NDArray[Any]
Evaluate = Callable[[Affine], int]
Note = Callable[[GlobalShadow, Part, Part | None], None]
UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
WRITTEN = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}
POISON_INT = 0xAB  # each byte of an integer that nobody wrote
POISON_FLOAT = 0xFF  # a NaN in every floating type


def poison_byte(dtype: str) -> int:
    kind = numpy_dtype(dtype).kind
    return 1 if kind == "b" else POISON_INT if kind in "iu" else POISON_FLOAT


class GlobalArray:
    """An array in global memory, row-major.

    written: which elements hold data; None: all do (an input).  shadow: who accessed what, for arrays that are written.
    """

    def __init__(self, name: str, data: Array, written: npt.NDArray[np.bool_] | None) -> None:
        self.name, self.data, self.written = name, data, written
        self.bytes = data.reshape(-1).view(np.uint8)
        self.shadow: GlobalShadow | None = None
        self.changes = 0  # how often it has been written
        self.extents: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # of the tensor maps of it

    @staticmethod
    def of_input(name: str, array: Array) -> GlobalArray:
        return GlobalArray(name, np.array(array, order="C", copy=True), None)

    @staticmethod
    def of_output(name: str, shape: tuple[int, ...], dtype: str, poison: bool) -> GlobalArray:
        size = math.prod(shape) * itemsize(dtype)
        raw = np.full(size, poison_byte(dtype) if poison else 0, np.uint8)
        data = raw.view(numpy_dtype(dtype)).reshape(shape)
        return GlobalArray(name, data, np.zeros(shape, np.bool_) if poison else None)

    def take(self, which: npt.NDArray[np.bool_], values: Array) -> None:
        """Take over what was written elsewhere.  which: a flat mask of the elements."""
        self.data.reshape(-1)[which] = values
        if self.written is not None:
            self.written.reshape(-1)[which] = True

    def strided(self, start: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[Array, Array | None]:
        """Elements start + sum of i * steps (in elements) as a writable view, and the same of `written`."""
        size = self.data.dtype.itemsize
        last = start + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        if start < 0 or last >= self.data.size:
            bad = start if start < 0 else last
            raise OutOfBounds(f"a copy touches element {bad} of {self.name}, which has {self.data.size}")
        # Through uint8: the extension types of ml_dtypes do not export the buffer protocol.
        view: Array = np.ndarray(shape, self.data.dtype, self.bytes.data, start * size, [s * size for s in steps])
        return view, None if self.written is None else strided_part(self.written, start, shape, steps)

    def check_written(self, mask: Array | None) -> None:
        if mask is not None and not mask.all():
            bad = int(mask.size - mask.sum())
            raise UninitializedRead(f"{self.name} is read before it is written ({bad} of {mask.size} elements)")

    def load(self, view: View, evaluate: Evaluate, note: Note | None = None) -> Array:
        """The view's elements; what lies past the array's end is zero.  note: told which part of the shadow is read."""
        index, inside, shape = self.clip(view, evaluate)
        part = self.data[index]
        self._note(index, note)
        if self.written is not None:
            self.check_written(self.written[index])
        if part.shape != shape:
            whole = np.zeros(shape, self.data.dtype)
            whole[inside] = part
            part = whole
        return part.transpose(view.permutation).copy()

    def store(self, view: View, evaluate: Evaluate, x: Array, note: Note | None = None) -> None:
        """Write the view's elements; what lies past the array's end is dropped.  note: told which part is written."""
        index, inside, _ = self.clip(view, evaluate)
        x = np.broadcast_to(x, view.shape).transpose(np.argsort(view.permutation))
        self._note(index, note)
        self.data[index] = x[inside]
        self.changes += 1
        if self.written is not None:
            self.written[index] = True

    def _note(self, index: tuple[int | slice, ...], note: Note | None) -> None:
        if note is None or self.shadow is None:
            return
        # A view, even of one element and of an array of no dimensions.
        exact = (*(slice(i, i + 1) if isinstance(i, int) else i for i in index), ...)
        readers = self.shadow.readers
        note(self.shadow, self.shadow.writers[exact], None if readers is None else readers[exact])

    def note_places(self, places: tuple[Array, ...], note: Note | None) -> None:
        """As `_note`, for the elements at these indices along each dimension."""
        if note is None or self.shadow is None:
            return
        writers = self.shadow.writers[places]
        readers = None if self.shadow.readers is None else self.shadow.readers[places]
        note(self.shadow, writers, readers)
        self.shadow.writers[places] = writers
        if self.shadow.readers is not None and readers is not None:
            self.shadow.readers[places] = readers

    def clip(
        self, view: View, evaluate: Evaluate
    ) -> tuple[tuple[int | slice, ...], tuple[slice, ...], tuple[int, ...]]:
        """(index of what exists, where that lies in the tile, the tile's shape in the array's order of dimensions)."""
        index: list[int | slice] = []
        inside: list[slice] = []
        shape: list[int] = []
        for axis, (d, n) in enumerate(zip(view.dims, self.data.shape, strict=True)):
            start = evaluate(d.start)
            if start < 0 or (d.size is None and start >= n):
                raise OutOfBounds(f"index {start} along axis {axis} of {self.name}, whose shape is {self.data.shape}")
            if d.size is None:
                index.append(start)
                continue
            count = min(d.size, max(0, -(-(n - start) // d.stride)))
            index.append(slice(start, start + count * d.stride, d.stride))
            inside.append(slice(0, count))
            shape.append(d.size)
        return tuple(index), tuple(inside), tuple(shape)


def strided_part(whole: Array, start: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> Array:
    """Elements start + sum of i * steps of a contiguous array, as a writable view."""
    size = whole.dtype.itemsize
    return np.ndarray(shape, whole.dtype, whole.reshape(-1).data, start * size, [s * size for s in steps])


CHUNK = np.dtype("V16")  # moved as one element, which is ten times faster than a row of 16


class SharedMemory:
    """The dynamic shared memory of a block as bytes, and which of them were written.

    It starts at an address that is a multiple of 1024, so that offsets have the address bits that swizzles act on.
    history: who wrote what, for errors; coming: (addresses, which of them are written) -> what will write the others.
    """

    def __init__(self, nbytes: int, poison: bool) -> None:
        size = self.size_of(nbytes)
        self.nbytes, self.changes = nbytes, 0
        self.data = np.full(size, POISON_FLOAT if poison else 0, np.uint8)
        self.written = np.full(size, 0 if poison else 1, np.uint8)
        self.raw = {k: self.data.view(t) for k, t in UNSIGNED.items()}
        self.marks = {k: self.written.view(t) for k, t in UNSIGNED.items()}
        self.known: set[Hashable] = set()
        self.history: ShadowMemory | None = None
        self.coming: Callable[[Array, Array], list[str]] = lambda address, written: []
        self.chunks, self.chunk_marks = self.data.view(CHUNK), self.written.reshape(-1, 16)

    @staticmethod
    def size_of(nbytes: int) -> int:
        """Bytes that are there where a kernel has asked for so many."""
        return -(-max(nbytes, 1024) // 1024) * 1024

    def read(self, index: Array, size: int, what: Callable[[], str], key: Hashable = None) -> Array:
        """Raw unsigned elements of `size` bytes at element indices (byte address / size).

        key: stands for `index`; what was written once stays so, and is not looked up again.
        """
        if key is None or key not in self.known:
            marks = self.marks[size][index]
            if not (marks == WRITTEN[size]).all():
                raise self.never_written(what(), index * size, marks == WRITTEN[size])
            if key is not None:
                self.known.add(key)
        return self.raw[size][index]

    def never_written(self, what: str, address: Array, written: Array) -> UninitializedRead:
        """The error for reading elements at these addresses, not all of which are written: which, and who wrote the others."""
        bad = f"{int((~written).sum())} of {written.size} elements"
        lines = [
            f"{what}: reads shared memory that nothing has written, {bad}{place(~written) if written.any() else ''}"
        ]
        if self.history is not None:
            lines += [f"  {op} at {line} wrote {place(m)[2:]}" for op, line, m in self.history.wrote(address, written)]
        lines += [f"  {text}" for text in self.coming(address, written)]
        return UninitializedRead("\n".join(lines))

    def write_chunks(self, chunks: Array, raw: Array, key: Hashable) -> None:
        """16-byte chunks, of type CHUNK; key: stands for `chunks`."""
        self.chunks[chunks] = raw
        self.changes += 1
        if key not in self.known:
            self.chunk_marks[chunks] = 1
            self.known.add(key)

    def write(self, index: Array, size: int, raw: Array) -> None:
        self.raw[size][index] = raw
        self.changes += 1
        self.marks[size][index] = WRITTEN[size]


def place(mask: Array) -> str:
    """', [0:32, 0:64]': the part of an array in which all elements of a mask are, and whether others are in it as well."""
    found = [(int(along.min()), int(along.max()) + 1) for along in np.nonzero(mask)]
    box = f", [{', '.join(f'{a}:{b}' for a, b in found)}]" if found else ", it"
    whole = math.prod(b - a for a, b in found) == int(mask.sum())
    return box if whole else f"{box}, of that {int(mask.sum())} elements"


@functools.lru_cache(maxsize=256)
def element_offsets(layout: SharedLayout) -> Array:
    """Byte offset of each element of a buffer; shared by all who ask, so not to be written."""
    offsets = layout.byte_offsets()
    offsets.setflags(write=False)
    return offsets


def shared_index(view: View, layout: SharedLayout, offset: int, evaluate: Evaluate) -> Array:
    """Element index (byte address / item size) of each element of a view of a buffer at `offset`."""
    return shared_index_at(view, layout, offset, tuple(evaluate(d.start) for d in view.dims))


def shared_index_at(view: View, layout: SharedLayout, offset: int, starts: tuple[int, ...]) -> Array:
    """As `shared_index`, for evaluated starts."""
    index: list[int | slice] = []
    for axis, (d, start) in enumerate(zip(view.dims, starts, strict=True)):
        last = last_index(view, axis, start)
        index.append(start if d.size is None else slice(start, last + 1, d.stride))
    picked = np.asarray(element_offsets(layout)[tuple(index)]).transpose(view.permutation)
    return (picked + offset) // layout.itemsize


def last_index(view: View, axis: int, start: int) -> int:
    """The last index along an axis of its buffer that a view takes, from `start` on.  Raises OutOfBounds for one outside."""
    d, shape = view.dims[axis], view.ref.shape
    last = start + ((d.size or 1) - 1) * d.stride
    if start < 0 or last >= shape[axis]:
        bad = start if start < 0 else last
        raise OutOfBounds(f"{describe(view)}: index {bad} along axis {axis} of a buffer of shape {shape}")
    return last


def describe(view: View) -> str:
    """A view as messages call it."""
    return f"{view.dtype}{list(view.shape)} of {view.ref}"


def to_raw(x: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """Values as unsigned integers of the dtype's size, in `shape`."""
    exact: Array = np.ascontiguousarray(np.broadcast_to(np.asarray(x).astype(numpy_dtype(dtype), copy=False), shape))
    return exact.view(np.dtype(UNSIGNED[itemsize(dtype)])).reshape(shape)


def from_raw(raw: Array, dtype: str) -> Array:
    return np.ascontiguousarray(raw).view(numpy_dtype(dtype)).reshape(raw.shape)
