"""The TMA engine of a block: boxes of a tensor map between global and shared memory (PTX ISA 5.5 and 9.7.9.27).

It works as the hardware does, from the descriptor's dimensions, strides, box and swizzle and from absolute addresses in
shared memory.  `SharedLayout` is not consulted, so a plan that disagrees with itself comes out as wrong numbers.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..errors import IllegalInstruction, Line, MosaicGpuError
from ..layouts.shared import itemsize
from ..plan.model import TensorMapPlan
from ..plan.tma import tensor_map_arguments, wrong_coordinates
from .async_store import RemoteStore
from .barriers import MBarrier
from .clocks import Rows
from .global_shadow import GlobalShadow, Part
from .launch_control import Cancel
from .memory import CHUNK, WRITTEN, Array, GlobalArray, SharedMemory, strided_part
from .scheduler import Blocked, Steps


@dataclasses.dataclass(frozen=True)
class TmaBox:
    """A box of a tensor map and its address in shared memory."""

    map: TensorMapPlan
    coordinates: tuple[int, ...]
    address: int


@dataclasses.dataclass
class Load:
    """A box on its way to shared memory; destinations: memory of each block, and the barrier that counts its bytes.

    released: what its completion hands on.
    """

    map: TensorMapPlan
    coordinates: tuple[int, ...]
    address: int
    destinations: tuple[tuple[SharedMemory, MBarrier], ...]
    line: Line | None
    released: Rows | None = None


@dataclasses.dataclass
class Store:
    """A box on its way to global memory.

    source: the copy that it is of, as messages call it, and the index (byte address / item size) of each of its elements.
    add: it is added to what is there; partial: what nothing has written may be in it, and is then unwritten in global memory.
    """

    map: TensorMapPlan
    coordinates: tuple[int, ...]
    address: int
    line: Line | None
    source: tuple[str, Callable[[], Array]]
    add: bool = False
    partial: bool = False
    read: bool = False
    done: bool = False


@dataclasses.dataclass
class Group:
    """A bulk group of stores.  released: its issuer has waited until their sources had been read."""

    stores: list[Store]
    released: bool = False

    def finished(self, read_only: bool) -> bool:
        return all(s.read if read_only else s.done for s in self.stores)


Item = Load | Store | Cancel | RemoteStore


class TmaEngine:
    """Works one box off at each of its turns, in order of issue or (given `chance`) in any; early: at once."""

    def __init__(
        self,
        arrays: list[GlobalArray],
        shared: SharedMemory,
        early: bool = False,
        chance: random.Random | None = None,
    ) -> None:
        self.arrays, self.shared, self.early, self.chance = arrays, shared, early, chance
        self.queue: collections.deque[Item] = collections.deque()

    def submit(self, copy: Item) -> None:
        """Take a copy over from the thread that issues it."""
        if self.early:
            collections.deque(self._move(copy), maxlen=0)
        else:
            self.queue.append(copy)

    def run(self) -> Steps:
        while True:
            yield Blocked(lambda: bool(self.queue), lambda: "no copy is queued")
            if self.chance is not None:
                self.queue.rotate(-self.chance.randrange(len(self.queue)))
            yield from self._move(self.queue.popleft())

    def _move(self, copy: Item) -> Steps:
        try:
            if isinstance(copy, (Cancel, RemoteStore)):
                copy.deliver()
            elif isinstance(copy, Load):
                self._load(copy)
            else:
                check_coordinates(copy.map, copy.coordinates, store=True)
                data, known = self._read_shared(copy)
                copy.read = True
                yield None
                self._write_global(copy, data, known)
                copy.done = True
        except MosaicGpuError as e:
            e.line = e.line or copy.line
            raise

    def _load(self, copy: Load) -> None:
        check_coordinates(copy.map, copy.coordinates, store=False)
        data = read_box(self.arrays[copy.map.input], copy.map, copy.coordinates)
        chunks = chunk_index(copy.address, data.nbytes, copy.map.swizzle)
        raw = data.reshape(-1).view(CHUNK)
        key = ("box", copy.address, data.nbytes, copy.map.swizzle)
        for shared, barrier in copy.destinations:
            shared.write_chunks(chunks, raw, key)
            barrier.loaded_phase, barrier.loaded_line = barrier.phase, copy.line
            barrier.complete_tx(data.nbytes, copy.released, copy.line)

    def _read_shared(self, copy: Store) -> tuple[Array, npt.NDArray[np.bool_] | None]:
        """The box, and which of its elements have been written; None: all of them."""
        m = copy.map
        array, shape = self.arrays[m.input], m.box[::-1]
        chunks = chunk_index(copy.address, box_bytes(m), m.swizzle)
        marks, known = self.shared.chunk_marks[chunks], None
        if not marks.all():
            size = array.data.dtype.itemsize
            known = np.asarray(marks.reshape(-1, size).all(-1), np.bool_).reshape(shape)
            if not copy.partial or array.written is None:
                what, index = copy.source[0], copy.source[1]()
                raise self.shared.never_written(what, index * size, self.shared.marks[size][index] == WRITTEN[size])
        return self.shared.chunks[chunks].view(array.data.dtype).reshape(shape), known

    def _write_global(self, copy: Store, data: Array, known: npt.NDArray[np.bool_] | None) -> None:
        array = self.arrays[copy.map.input]
        found = box_part(array, copy.map, copy.coordinates)
        if found is not None:
            inside, part, mask = found
            if copy.add:
                array.check_written(mask)
                part += data[inside]
            else:
                part[...] = data[inside]
            array.changes += 1
            if mask is not None:
                mask[...] = True if known is None else known[inside]


def check_coordinates(m: TensorMapPlan, coordinates: tuple[int, ...], store: bool) -> None:
    """What the plan could not know."""
    if wrong := wrong_coordinates([(c, ()) for c in coordinates], itemsize(m.dtype), store):
        raise IllegalInstruction(wrong)


def box_bytes(m: TensorMapPlan) -> int:
    return math.prod(m.box) * itemsize(m.dtype)


Place = tuple[tuple[slice, ...], int, tuple[int, ...], tuple[int, ...]]


def box_place(array: GlobalArray, m: TensorMapPlan, coordinates: tuple[int, ...]) -> Place | None:
    """What of a box exists in the array, None for nothing: where in the box (outermost first), and the elements there:
    first, extents and steps (outermost first)."""
    found = array.extents.get(id(m))
    if found is None:
        size = itemsize(m.dtype)
        dims, strides = tensor_map_arguments(m, array.data.shape, size)
        found = array.extents[id(m)] = dims, (1, *(s // size for s in strides))
    dims, steps = found
    inside, shape, start = [], [], 0
    for c, extent, n, step in zip(coordinates, m.box, dims, steps, strict=True):
        low, high = max(0, -c), min(extent, n - c)
        if high <= low:
            return None
        inside.append(slice(low, high))
        shape.append(high - low)
        start += (c + low) * step
    return tuple(inside[::-1]), start, tuple(shape[::-1]), tuple(steps[::-1])


def box_part(
    array: GlobalArray, m: TensorMapPlan, coordinates: tuple[int, ...]
) -> tuple[tuple[slice, ...], Array, Array | None] | None:
    """What of a box exists in the array, None for nothing: where in the box (outermost first), elements, `written`."""
    found = box_place(array, m, coordinates)
    if found is None:
        return None
    inside, start, shape, steps = found
    part, mask = array.strided(start, shape, steps)
    return inside, part, mask


def box_shadow(array: GlobalArray, box: TmaBox) -> tuple[GlobalShadow, Part, Part | None] | None:
    """The part of an array's shadow that a box stands for."""
    found = box_place(array, box.map, box.coordinates)
    if found is None or array.shadow is None:
        return None
    _, start, shape, steps = found
    array.strided(start, shape, steps)  # its check of the bounds
    shadow = array.shadow
    readers = None if shadow.readers is None else strided_part(shadow.readers, start, shape, steps)
    return shadow, strided_part(shadow.writers, start, shape, steps), readers


def read_box(array: GlobalArray, m: TensorMapPlan, coordinates: tuple[int, ...]) -> Array:
    """A box, outermost dimension first; zero where the array has no such element."""
    found = box_part(array, m, coordinates)
    shape = m.box[::-1]
    if found is not None and found[1].shape == shape:
        array.check_written(found[2])
        return np.ascontiguousarray(found[1])
    data = np.zeros(shape, array.data.dtype)
    if found is not None:
        array.check_written(found[2])
        data[found[0]] = found[1]
    return data


@functools.lru_cache(maxsize=1024)
def chunk_index(address: int, nbytes: int, swizzle: int) -> Array:
    """The 16-byte chunk of shared memory where each chunk of a packed box goes."""
    if address % 128:
        raise IllegalInstruction(f"TMA: shared memory address {address} is not a multiple of 128")
    if nbytes % 16:
        raise IllegalInstruction(f"TMA: a box of {nbytes} bytes is not a multiple of 16")
    linear = address // 16 + np.arange(nbytes // 16)
    # Address bits from 4 on (3 of them for 128 B, 2 for 64 B, 1 for 32 B) are XORed with those from 7 on.
    return linear ^ (linear >> 3 & swizzle // 16 - 1) if swizzle else linear
