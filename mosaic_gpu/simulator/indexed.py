"""Loads and stores by index arrays in the simulator: where each element lies, whether it is inside, who touched it before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OutOfBounds, Race
from ..ops.elementwise import numpy_dtype
from ..ops.indexed import NOWHERE, Indexed
from ..program import View
from . import memory
from .hazards import view_bytes
from .memory import Array

if TYPE_CHECKING:
    from .thread import Thread


def _coordinates(
    sim: Thread, access: Indexed, shape: tuple[int, ...], indices: Sequence[Array]
) -> tuple[list[Array], Array]:
    """The index along each dimension of the buffer, for every element of an array of `shape`, and which lie in the view.

    OutOfBounds where one of shared memory does not; the report counts those of global memory, but those that are NOWHERE.
    """
    view = access.view
    out: list[Array] = [np.asarray(sim.evaluate(d.start), np.int64) for d in view.dims]
    inside, astray = np.ones(shape, np.bool_), np.zeros(shape, np.bool_)
    for k, (d, (array, along)) in enumerate(zip(view.kept, access.dims, strict=True)):
        if array < 0:
            out[d] = out[d] + _along(shape, along) * view.dims[d].stride
            continue
        index, n = np.asarray(indices[array], np.int64), view.shape[k]
        part = np.where(index < 0, index + n, index)
        fits = (part >= 0) & (part < n)
        if access.kind == "smem" and not fits.all():
            raise OutOfBounds(
                f"{memory.describe(view)}: index {int(index[~fits][0])} along axis {k} of a view of shape {view.shape}: "
                f"from {-n} to {n - 1}"
            )
        inside &= fits
        astray |= ~fits & (index != NOWHERE)
        out[d] = out[d] + part * view.dims[d].stride
    places = list(np.broadcast_arrays(*out, np.empty(shape)))[:-1]
    if access.kind == "gmem":
        for p, n in zip(places, sim.block.array_of(view).data.shape, strict=True):
            inside &= (p >= 0) & (p < n)
        if sim.meter is not None and astray.any():
            op = "load" if sim.step is None or sim.step.equation.results else "store"
            name = sim.block.array_of(view).name
            sim.meter.report.add_outside(sim.line, f"{op} by index arrays", name, int(astray.sum()))
    return places, inside


def _along(shape: tuple[int, ...], d: int) -> Array:
    return np.arange(shape[d], dtype=np.int64).reshape([-1 if i == d else 1 for i in range(len(shape))])


def _once(sim: Thread, access: Indexed, places: list[Array], inside: Array) -> None:
    """Refuse a store of several values to one place."""
    rows = np.stack([p[inside] for p in places], -1)
    found, count = np.unique(rows, axis=0, return_counts=True)
    if (count > 1).any():
        at = ", ".join(map(str, found[count > 1][0]))
        name = access.view.ref.name or f"%{access.view.ref.id}"
        raise Race(
            f"a store by index arrays writes {name}[{at}] {int(count.max())} times, by different threads: which value stays is "
            "undefined. Combine the values first (x.at[i].add(...) on a register array), or give every place one index",
            kind="write/write",
            between="warpgroup",
            other_line=sim.line,
            who=sim.who,
            other=sim.who,
            place=f"{access.kind} {name}",
            remedy="indices that differ",
        )


def _shared(sim: Thread, access: Indexed, places: list[Array], write: bool) -> tuple[Array, int]:
    """(element index of each element, its size), and the access noted."""
    view, buffer = access.view, sim.plan.buffers[access.view.ref.id]
    layout = buffer.layout
    for axis, (p, n) in enumerate(zip(places, layout.shape, strict=True)):
        if p.size and (p.min() < 0 or p.max() >= n):  # where the view starts is known at run time only
            bad = int(p.min()) if p.min() < 0 else int(p.max())
            raise OutOfBounds(
                f"{memory.describe(view)}: index {bad} along axis {axis} of a buffer of shape {layout.shape}"
            )
    index = (memory.element_offsets(layout)[tuple(places)] + buffer.offset) // layout.itemsize
    if sim.hazards is not None and sim.step is not None:
        sim.hazards.indexed(
            sim.step, sim.moved(write), index.tobytes(), write, lambda: view_bytes(index, layout.itemsize)
        )
    return index, layout.itemsize


def load(sim: Thread, access: Indexed, shape: tuple[int, ...], indices: Sequence[Array]) -> Array:
    places, inside = _coordinates(sim, access, shape, indices)
    if access.kind == "smem":
        index, size = _shared(sim, access, places, False)
        raw = sim.block.shared.read(index, size, lambda: memory.describe(access.view))
        return memory.from_raw(raw, access.view.dtype)
    array = sim.block.array_of(access.view)
    where = tuple(p[inside] for p in places)
    if array.written is not None:
        array.check_written(array.written[where])
    if sim.hazards is not None and sim.step is not None:
        sim.hazards.global_indexed(array, sim.step, sim.moved(False), where, False)
    out: Array = np.zeros(shape, array.data.dtype)
    out[inside] = array.data[where]
    return out


def store(sim: Thread, access: Indexed, x: Array, indices: Sequence[Array]) -> None:
    shape = np.shape(x)
    places, inside = _coordinates(sim, access, shape, indices)
    if access.kind == "smem":
        index, size = _shared(sim, access, places, True)
        _once(sim, access, places, inside)
        sim.block.shared.write(index, size, memory.to_raw(x, access.view.dtype, shape))
        return
    array = sim.block.array_of(access.view)
    _once(sim, access, places, inside)
    where = tuple(p[inside] for p in places)
    if sim.hazards is not None and sim.step is not None:
        sim.hazards.global_indexed(array, sim.step, sim.moved(True), where, True)
    array.data[where] = np.asarray(x).astype(numpy_dtype(access.view.dtype))[inside]
    array.changes += 1
    if array.written is not None:
        array.written[where] = True


def load_view(sim: Thread, view: View) -> Array:
    """A view of shared memory whose elements any thread of the warpgroup reads."""
    buffer = sim.plan.buffers[view.ref.id]
    starts = tuple(sim.evaluate(d.start) for d in view.dims)
    index, size = sim.block.cluster.index_of(view, buffer, starts), buffer.layout.itemsize
    if sim.hazards is not None and sim.step is not None:
        sim.hazards.indexed(sim.step, sim.moved(False), (id(view), starts), False, lambda: view_bytes(index, size))
    return memory.from_raw(sim.block.shared.read(index, size, lambda: memory.describe(view)), view.dtype)
