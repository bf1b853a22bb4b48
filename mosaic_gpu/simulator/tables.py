"""What all blocks of a simulation share: numbers of agents, regions of memory, footprints of operations, and which thread of a
warpgroup touches which element."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

from ..layouts.registers import RegisterLayout
from ..ops.refs import Access as RefAccess
from ..plan.model import Plan, Role, Step
from ..plan.peers import STORES
from ..program import Operand, Value, View
from .clocks import Agents
from .memory import Array
from .shadow import Partition

TMEM_COLUMNS = 512
LOADS = ("get", "load", "get_indexed", "masked_load", "multimem_load_reduce")
ThreadMap = tuple[int, tuple[int, ...]]  # a number for layout and shape of a view; where the view starts


class Tables:
    """Numbers of agents, regions of memory and footprints of operations, for all blocks of a simulation."""

    def __init__(self, plan: Plan, shared_bytes: int, fine: bool) -> None:
        self.plan = plan
        blocks = math.prod(plan.program.cluster)
        if plan.program.semaphores:  # blocks of different clusters may be ordered
            blocks *= math.prod(plan.program.grid)
        self.agents = Agents(plan, blocks)
        self.smem = Partition(shared_bytes, fine)
        self.tmem = Partition(TMEM_COLUMNS, fine)
        self.input_of = {v.id: i for i, v in enumerate(plan.program.inputs)}
        self._maps: dict[Hashable, int] = {}
        self._geometry: dict[int, tuple[RegisterLayout | None, View, bool]] = {}
        self._apart: dict[tuple[ThreadMap, ThreadMap], bool] = {}
        self._map_of_step: dict[tuple[int, int, bool], int] = {}

    def thread_map(
        self, role: Role, step: Step, access: RefAccess, value: Operand, starts: tuple[int, ...], write: bool
    ) -> ThreadMap:
        """Which thread accesses which element; equal where it is the same for every element."""
        key = (id(step), id(role), write)
        number = self._map_of_step.get(key)
        if number is None:
            view = access.view
            layout = role.layouts.get(value.id) if isinstance(value, Value) and not access.scalar else None
            shape = tuple((d.size, d.stride) for d in view.dims)
            # All threads read a scalar, one writes it.
            geometry = (layout, view.ref.id, shape, view.permutation, access.scalar and write)
            number = self._maps.setdefault(geometry, len(self._maps))
            self._geometry[number] = (layout, view, access.scalar and write)
            self._map_of_step[key] = number
        return number, starts

    def apart(self, a: ThreadMap, b: ThreadMap) -> bool:
        """Whether every element that both touch is touched by one thread, the same in both."""
        found = self._apart.get((a, b))
        if found is None:
            one, other = (self._geometry[number][1] for number, _ in (a, b))
            if (
                one.space.kind == "smem" and one.ref.id != other.ref.id
            ):  # of a union: elements are not at the same places
                return False
            owners = self._owners(a), self._owners(b)
            both = (owners[0] >= -1) & (owners[1] >= -1)
            found = self._apart[a, b] = bool(((owners[0] == owners[1]) & (owners[0] >= 0))[both].all())
        return found

    def _owners(self, map: ThreadMap) -> Array:
        """For each element of a buffer (of an array: of the part that its view reaches) the thread that touches it, -1 for
        several or an unknown one, -2 for none."""
        number, starts = map
        layout, view, one_thread = self._geometry[number]
        extents = [start + ((d.size or 1) - 1) * d.stride + 1 for d, start in zip(view.dims, starts, strict=True)]
        shape = [max(n, e) for n, e in zip(view.ref.shape, extents, strict=True)]
        owners: Array = np.full(shape, -2, np.int16)
        where = tuple(
            start if d.size is None else slice(start, start + d.size * d.stride, d.stride)
            for d, start in zip(view.dims, starts, strict=True)
        )
        if layout is None:
            owners[where] = 0 if one_thread else -1
            return owners
        coordinates = layout.coordinates()
        element = tuple(np.moveaxis(coordinates, -1, 0))
        threads = np.broadcast_to(np.arange(128, dtype=np.int16).reshape(4, 32, 1), coordinates.shape[:-1])
        least, most = np.full(layout.shape, 127, np.int16), np.zeros(layout.shape, np.int16)
        np.minimum.at(least, element, threads)
        np.maximum.at(most, element, threads)
        part = np.where(least == most, least, np.int16(-1))
        owners[where] = part.transpose(np.argsort(view.permutation))
        return owners

    def shared_place(self, region: int) -> str:
        """Buffer and slot of a region of shared memory."""
        byte = int(np.argmax(self.smem.region_of == region))
        for b in self.plan.buffers.values():
            rest = byte - b.offset
            if 0 <= rest < b.layout.nbytes:
                slot = []
                for d in range(max(0, min(b.layout.lead, len(b.layout.shape) - 2))):
                    index, rest = divmod(rest, b.layout.strides()[d][0][1])
                    slot.append(str(index))
                name = b.value.name or f"%{b.value.id}"
                return f"smem {name}" + (f"[{', '.join(slot)}]" if slot else "")
        return f"byte {byte} of shared memory"

    def tmem_place(self, region: int) -> str:
        column = int(np.argmax(self.tmem.region_of == region))
        for b in self.plan.tmem.values():
            if b.column <= column < b.column + b.columns:
                return f"tmem {b.value.name or f'%{b.value.id}'}, column {column - b.column}"
        return f"column {column} of tensor memory"

    def written_and_read(self) -> tuple[set[int], set[int], set[int]]:
        """Which inputs and outputs the kernel writes, which it reads, and to which of those it writes it adds."""
        written: set[int] = set()
        read: set[int] = set()
        added: set[int] = set()

        def visit(steps: tuple[Step, ...]) -> None:
            for s in steps:
                e = s.equation
                if e.op == "copy_smem_to_gmem":
                    written.add(self.plan.maps[s.data.map].input)
                    if e.param("reduction_op") is not None:
                        added.add(self.plan.maps[s.data.map].input)
                elif e.op == "copy_gmem_to_smem":
                    read.add(self.plan.maps[s.data[0].map].input)
                elif e.op in (*LOADS, *STORES) and s.data.kind == "gmem":
                    index = self.input_of[s.data.view.ref.id]
                    if e.op in STORES:
                        written.add(index)
                    if e.op == "atomic_store":
                        added.add(index)
                    if e.results:
                        read.add(index)
                elif e.op == "warp_map":
                    for role in s.data:
                        visit(role.body.steps)
                for r in s.regions:
                    visit(r.steps)

        for role in self.plan.roles:
            visit(role.body.steps)
        return written, read, added
