"""The machine: a plan's grid, cluster by cluster, on NumPy arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from .. import ops  # noqa: F401  (fills the tables of rules)
from ..errors import BarrierMisuse, Leak, OutOfBounds
from ..ops.elementwise import numpy_dtype
from ..plan.model import Plan
from ..program import Shape, View
from .barriers import MBarrier, NamedBarrier
from .memory import Array, GlobalArray, SharedMemory
from .report import deadlock
from .scheduler import Scheduler
from .tensor_core import TensorCore
from .thread import Thread
from .tma import TmaEngine

Uninitialized = Literal["nan", "zero"]
Timing = Literal["late", "early"]


def simulate(
    plan: Plan, arrays: Sequence[Array], *, uninitialized: Uninitialized = "nan", timing: Timing = "late"
) -> list[Array]:
    """Run a planned kernel and return its outputs.

    arrays: the kernel's inputs, in order; they are not changed.
    uninitialized: what memory that nobody has written holds.  'nan': NaNs (integers: bytes 0xAB), and reading it raises
    `UninitializedRead`; 'zero': zeros, read without complaint.

    timing: when asynchronous work is done.  'late': copies and tcgen05 only when no thread can go on without them, a
    wgmma when it is waited for; 'early': all at once.  A kernel that synchronises as it must gives the same bits both
    ways.

    `grid` counts clusters (axes of `cluster` index the blocks inside one); they run one after the other in row-major
    order, the blocks of one cluster side by side.
    """
    program = plan.program
    count = len(program.inputs) - program.num_outputs
    if len(arrays) != count:
        raise ValueError(f"{program.name} takes {count} arrays, not {len(arrays)}")
    poison = uninitialized == "nan"
    memory: list[GlobalArray] = []
    for i, value in enumerate(program.inputs):
        if i >= count:
            memory.append(GlobalArray.of_output(f"output {i - count}", value.shape, value.dtype, poison))
            continue
        array = np.asarray(arrays[i])
        if array.dtype != numpy_dtype(value.dtype) or array.ndim != len(value.shape):
            raise ValueError(
                f"{program.name}: input {i} is {array.dtype}{list(array.shape)}; "
                f"the kernel was traced for {value.dtype}{list(value.shape)}"
            )
        memory.append(GlobalArray.of_input(f"input {i}", array))
    for index in itertools.product(*map(range, program.grid)):
        Cluster(plan, memory, index, poison, timing == "early").run()
    return [a.data for a in memory[count:]]


class BlockState:
    """One block: its place, its memory, its barriers and its engines."""

    def __init__(self, cluster: Cluster, position: Shape) -> None:
        plan = cluster.plan
        self.cluster, self.plan, self.arrays, self.scheduler = cluster, plan, cluster.arrays, cluster.scheduler
        self.grid, self.position = cluster.grid, position
        self.poison, self.early = cluster.poison, cluster.early
        self.name = "block " + (str(self.grid) if not position else f"{self.grid}+{position}")
        self.shared = SharedMemory(plan.shared_bytes, self.poison)
        self.tma = TmaEngine(cluster.arrays, self.shared, self.early)
        self.tensor_core = TensorCore(self.shared, self.poison, self.early)
        self.barriers = {
            id: [MBarrier(self._name(id, slot), a.expected, a.unit) for slot in range(a.count)]
            for id, a in plan.barriers.items()
        }
        self.named = {
            a.id + slot: NamedBarrier(self._name(id, slot), a.threads)
            for id, a in plan.named_barriers.items()
            for slot in range(a.count)
        }

    def _name(self, id: int, slot: int) -> str:
        return f"{self.cluster.name_of(id)}[{slot}] of {self.name}"

    def barrier(self, id: int, slot: int) -> MBarrier:
        slots = self.barriers[id]
        if not 0 <= slot < len(slots):
            raise OutOfBounds(f"barrier {slot} of an array of {len(slots)}: {self.cluster.name_of(id)}")
        return slots[slot]

    def array_of(self, view: View) -> GlobalArray:
        return self.arrays[self.cluster.inputs[view.ref.id]]

    def along(self, axes: Sequence[str]) -> list[BlockState]:
        """The blocks of the cluster that differ from this one along `axes` only, itself included, in a common order."""
        if not axes:
            return [self]
        names = self.plan.program.cluster_names
        fixed = [i for i, n in enumerate(names) if n not in axes]
        return [b for b in self.cluster.blocks if all(b.position[i] == self.position[i] for i in fixed)]

    def check_end(self) -> None:
        """What must hold when all threads have ended."""
        for barrier in itertools.chain.from_iterable(self.barriers.values()):
            if barrier.tx:
                raise BarrierMisuse(
                    f"{barrier.name}: the kernel ends with {barrier.tx} bytes "
                    + ("expected and never delivered" if barrier.tx > 0 else "delivered that were never expected")
                    + f"; arrived in phase {barrier.phase}: {barrier.describe_arrivals()}",
                    barrier.arrivals[0].line if barrier.arrivals else None,
                )
            if barrier.loaded_phase >= barrier.observed:
                raise Leak(
                    f"{barrier.name}: the kernel ends and nobody has waited for the last copy that arrives on it",
                    barrier.loaded_line,
                )


class Cluster:
    """The blocks of one cluster, which run side by side.  names: how reports call buffers, by value id."""

    def __init__(self, plan: Plan, arrays: list[GlobalArray], grid: Shape, poison: bool, early: bool) -> None:
        self.plan, self.arrays, self.grid = plan, arrays, grid
        self.poison, self.early = poison, early
        program = plan.program
        self.inputs = {v.id: i for i, v in enumerate(program.inputs)}
        barriers = [a.value for a in plan.barriers.values()] + [a.value for a in plan.named_barriers.values()]
        self.names = {v.id: f"{v.space} {v.name or f'%{v.id}'}" for v in barriers}
        self.scheduler = Scheduler(deadlock)
        self.blocks = [BlockState(self, position) for position in itertools.product(*map(range, program.cluster))]

    def name_of(self, id: int) -> str:
        """How reports call a barrier array."""
        return self.names.get(id, f"barrier %{id}")

    def run(self) -> None:
        for block in self.blocks:
            for index, role in sorted(((i, r) for r in self.plan.roles for i in r.indices), key=lambda x: x[0]):
                thread = Thread(block, role, index)
                self.scheduler.add(thread.main(), thread)
        for block in self.blocks:
            self.scheduler.add(block.tma.run(), background=True)
            self.scheduler.add(block.tensor_core.run(), background=True)
        self.scheduler.run()
        for block in self.blocks:
            block.check_end()
