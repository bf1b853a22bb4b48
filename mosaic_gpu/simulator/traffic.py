"""Counts what ordinary loads and stores cost: bank conflicts in shared memory, sectors of global memory.

Shared memory: `layouts/conflicts.py`.  On global memory an instruction takes one transaction for each 32-byte sector that it
touches.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Line
from ..layouts.access import global_vector, together
from ..layouts.conflicts import Cost, shared_cost
from ..layouts.registers import RegisterLayout
from ..layouts.shared import itemsize
from ..program import View
from .memory import Array
from .remarks import Report

if TYPE_CHECKING:
    from ..plan.model import SharedBuffer

SECTOR = 32


def sectors(addresses: Array, active: Array, nbytes: int) -> Cost:
    """addresses, active: [instruction, lane]; each active lane moves `nbytes` bytes at its address."""
    busy = active.any(axis=1)
    addresses, active = addresses[busy], active[busy]
    actual = ideal = 0
    for a, on in zip(addresses, active, strict=True):
        places = np.unique(a[on])
        actual += len(np.unique(places // SECTOR))
        ideal += -(-len(places) * nbytes // SECTOR)
    return len(addresses), actual, ideal


def _storing(layout: RegisterLayout) -> Array:
    """Which [warp, lane] stores to global memory: of replicas only the first."""
    out = np.ones((4, 32), np.bool_)
    for axis, digits in ((0, layout.warp), (1, layout.lane)):
        index = np.arange(out.shape[axis])
        for d in digits:
            if d.dim is None and d.size > 1:
                first = index % d.size == 0
                out &= first[:, None] if axis == 0 else first[None]
            index //= d.size
    return out


class Meter:
    """Adds the accesses of a simulation to a report.  The cost of a pattern is worked out once."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._costs: dict[Hashable, Cost] = {}

    def shared(
        self, line: Line | None, view: View, layout: RegisterLayout, buffer: SharedBuffer, index: Array, store: bool
    ) -> None:
        """An access to shared memory.  index: of each element of the view, in elements from the start of it all."""
        key = ("smem", id(view), layout, store, int(index.flat[0]))
        cost = self._costs.get(key)
        if cost is None:
            cost = self._costs[key] = shared_cost(view, layout, buffer.layout, index, store)
        self._add(line, store, "smem", view, cost)

    def global_memory(
        self,
        line: Line | None,
        view: View,
        layout: RegisterLayout,
        shape: tuple[int, ...],
        starts: tuple[int, ...],
        store: bool,
    ) -> None:
        """An access to an array of `shape` in global memory, by a view that starts there."""
        steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        size = itemsize(view.dtype)
        base = sum(s * n for s, n in zip(starts, steps, strict=True)) * size
        left = tuple(shape[d] - starts[d] for d in view.kept)  # how much of the array there is from the start on
        left = tuple(
            min(n, (view.dims[d].size or 1) * view.dims[d].stride) for n, d in zip(left, view.kept, strict=True)
        )
        key = ("gmem", id(view), layout, store, base % SECTOR, left, shape)
        cost = self._costs.get(key)
        if cost is None:
            width = together(global_vector(layout, view, view.dtype), view.dtype)
            coordinates = layout.coordinates()[:, :, ::width]
            offset = np.zeros(coordinates.shape[:-1], np.int64)
            active: Array = np.ones(offset.shape, np.bool_)
            for k, d in enumerate(view.kept):
                place = coordinates[..., k] * view.dims[d].stride
                offset += place * steps[d] * size
                active &= place < left[k]
            if store:
                active &= _storing(layout)[:, :, None]
            by_instruction = [np.moveaxis(x, 1, 2).reshape(-1, 32) for x in (base % SECTOR + offset, active)]
            cost = self._costs[key] = sectors(by_instruction[0], by_instruction[1], width * size)
        self._add(line, store, "gmem", view, cost)

    def _add(self, line: Line | None, store: bool, memory: str, view: View, cost: Cost) -> None:
        place = view.ref.name or f"%{view.ref.id}"
        self.report.add_traffic(line, "store" if store else "load", memory, place, cost)
