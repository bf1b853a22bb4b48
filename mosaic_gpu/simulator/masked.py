"""Loads and stores under a mask, and atomic updates, in the simulator: only the elements that are touched are noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..ops.elementwise import numpy_dtype
from ..ops.refs import Access
from . import memory
from .hazards import view_bytes
from .memory import Array, GlobalArray

if TYPE_CHECKING:
    from .thread import Thread


def load(sim: Thread, access: Access, mask: Array, other: Array) -> Array:
    view = access.view
    out: Array = np.array(np.broadcast_to(other, view.shape), numpy_dtype(view.dtype))
    mask = np.broadcast_to(mask, view.shape)
    if access.kind == "smem":
        index, size = _shared(sim, access, mask, False)
        out[mask] = memory.from_raw(sim.block.shared.read(index, size, lambda: memory.describe(view)), view.dtype)
        return out
    array, places, inside = _global(sim, access, mask)
    if array.written is not None:
        array.check_written(array.written[places])
    _note(sim, access, array, places, False)
    moved = np.zeros(int(mask.sum()), array.data.dtype)
    moved[inside] = array.data[places]
    out[mask] = moved
    return out


def store(sim: Thread, access: Access, x: Array, mask: Array) -> None:
    view = access.view
    mask = np.broadcast_to(mask, view.shape)
    moved = np.broadcast_to(x, view.shape)[mask]
    if access.kind == "smem":
        index, size = _shared(sim, access, mask, True)
        sim.block.shared.write(index, size, memory.to_raw(moved, view.dtype, moved.shape))
        return
    array, places, inside = _global(sim, access, mask)
    _note(sim, access, array, places, True)
    array.data[places] = moved[inside]
    array.changes += 1
    if array.written is not None:
        array.written[places] = True


def update(sim: Thread, access: Access, function: Callable[[Array], Array]) -> None:
    """Every element of a view becomes `function` of what it was, by an atomic operation."""
    array = sim.block.array_of(access.view)
    new = function(array.load(access.view, sim.evaluate))
    note = None
    if sim.hazards is not None and sim.step is not None:
        starts = tuple(sim.evaluate(d.start) for d in access.view.dims)
        note = sim.hazards.atomic_note(array, sim.step, access, sim.moved(True), starts)
    array.store(access.view, sim.evaluate, new, note)


def _shared(sim: Thread, access: Access, mask: Array, write: bool) -> tuple[Array, int]:
    """(element index of each element that is touched, its size), and the access noted."""
    view, buffer = access.view, sim.plan.buffers[access.view.ref.id]
    starts = tuple(sim.evaluate(d.start) for d in view.dims)
    index, size = sim.block.cluster.index_of(view, buffer, starts)[mask], buffer.layout.itemsize
    if sim.hazards is not None and sim.step is not None:
        key = ("masked", id(view), starts, mask.tobytes())
        owner, value = sim.hazards.block, sim.moved(write)
        sim.hazards.shared(owner, sim.step, access, value, starts, write, lambda: view_bytes(index, size), key)
    return index, size


def _global(sim: Thread, access: Access, mask: Array) -> tuple[GlobalArray, tuple[Array, ...], Array]:
    """(the array, the indices of what is touched and lies in it, which of what is touched that is)."""
    view = access.view
    array = sim.block.array_of(view)
    array.clip(view, sim.evaluate)  # refuses what no access may do
    along = np.nonzero(mask)
    places: list[Array] = [np.full(along[0].shape, sim.evaluate(d.start), np.int64) for d in view.dims]
    for k, d in enumerate(view.kept):
        places[d] = places[d] + along[k] * view.dims[d].stride
    inside: Array = np.ones(along[0].shape, np.bool_)
    for p, n in zip(places, array.data.shape, strict=True):
        inside &= p < n
    return array, tuple(p[inside] for p in places), inside


def _note(sim: Thread, access: Access, array: GlobalArray, places: tuple[Array, ...], write: bool) -> None:
    if sim.hazards is not None and sim.step is not None:
        starts = tuple(sim.evaluate(d.start) for d in access.view.dims)
        note = sim.hazards.global_note(array, sim.step, access, sim.moved(write), starts, write)
        array.note_places(places, note)
