"""The machine: a plan's grid, cluster by cluster, on NumPy arrays."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import ops  # noqa: F401  (fills the tables of rules)
from ..errors import BarrierMisuse, Leak, OutOfBounds
from ..ops.elementwise import numpy_dtype
from ..plan.model import Plan, SharedBuffer
from ..program import Shape, View
from .barriers import MBarrier, NamedBarrier
from .core import Starts
from .global_shadow import GlobalShadow
from .hazards import BlockHazards
from .memory import Array, GlobalArray, SharedMemory, shared_index_at
from .missing_waits import BarrierInProgram
from .parallel import run_grid
from .params import SimulatorParams, current
from .remarks import Report, Unwritten
from .report import deadlock
from .scheduler import Scheduler, Steps
from .semaphores import Semaphore
from .tables import Tables
from .tensor_memory import TensorCore
from .thread import Thread
from .tma import TmaEngine
from .traffic import Meter
from .under_way import coming

MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}  # of an H200, a B200 and a B300
EARLY_END = 0.3  # how often, under a seed, no place in the grid is left: other multiprocessors have taken all


def simulate(plan: Plan, arrays: Sequence[Array], params: SimulatorParams | None = None, **changes: Any) -> list[Array]:
    """Run a planned kernel and return its outputs.

    arrays: the kernel's inputs, in order; they are not changed.  params: how (None: `current()`); changes: fields of it to
    replace, such as timing="early".

    `grid` counts clusters (axes of `cluster` index the blocks inside one); they run one after the other in row-major order, or
    in several processes, which gives the same; the blocks of one cluster run side by side.  Raises the errors of
    `mosaic_gpu.errors` for what it finds: Race, Deadlock, BarrierMisuse, UninitializedRead, OutOfBounds, Leak.
    """
    params = dataclasses.replace(params or current(), **changes)
    machine = Machine(plan, global_memory(plan, arrays, params), params)
    try:
        run_grid(machine, [np.asarray(a) for a in arrays])
        outputs = machine.arrays[len(arrays) : len(machine.arrays) - plan.program.semaphores]
        machine.note_unwritten(outputs)
    finally:
        if params.report is not None and machine.report is not None:
            params.report.merge(machine.report)
    return [a.data for a in outputs]


def global_memory(plan: Plan, arrays: Sequence[Array], params: SimulatorParams) -> list[GlobalArray]:
    """Inputs with their values, then outputs with none (or an aliased input's)."""
    program = plan.program
    count = len(program.inputs) - program.num_outputs
    if len(arrays) != count:
        raise ValueError(f"{program.name} takes {count} arrays, not {len(arrays)}")
    memory: list[GlobalArray] = []
    replaced = {i for i, _ in program.aliases}
    for i, value in enumerate(program.inputs):
        if i >= len(program.inputs) - program.semaphores:
            memory.append(GlobalArray.of_input(value.name, np.zeros(value.shape, np.int32)))
            continue
        first = next((a for a, o in program.aliases if o == i - count), None)
        if first is not None:
            memory.append(memory[first])  # one array: what is written to the output is seen by who reads the input
            continue
        if i >= count:
            poison = params.uninitialized == "nan"
            memory.append(GlobalArray.of_output(f"output {i - count}", value.shape, value.dtype, poison))
            continue
        array = np.asarray(arrays[i])
        if array.dtype != numpy_dtype(value.dtype) or array.ndim != len(value.shape):
            raise ValueError(
                f"{program.name}: input {i} is {array.dtype}{list(array.shape)}; "
                f"the kernel was traced for {value.dtype}{list(value.shape)}"
            )
        memory.append(GlobalArray.of_input(f"input {i}", array.copy() if i in replaced else array))
    return memory


class Machine:
    """What all clusters of a launch share.  clusters: their places in the grid, in row-major order; written: the arrays that
    the kernel writes (without checks: not known, none); added: those of them to which copies add."""

    def __init__(self, plan: Plan, arrays: list[GlobalArray], params: SimulatorParams) -> None:
        self.plan, self.arrays, self.params = plan, arrays, params
        self.clusters: list[Shape] = list(itertools.product(*map(range, plan.program.grid)))
        self.inputs = {v.id: i for i, v in enumerate(plan.program.inputs)}
        self.operands_inside: set[tuple[int, int]] = set()  # (id of an operand, address) that have been checked
        self.constants: dict[int, Array] = {}  # by the id of the literal, which the plan keeps
        self.starts: dict[int, Starts] = {}  # by the id of the equation
        self.report = Report() if params.report is not None else None
        self.meter = Meter(self.report) if self.report is not None else None
        self.tables: Tables | None = None
        self._indices: dict[tuple[int, tuple[int, ...]], Array] = {}
        self.written: list[int] = []
        self._waiting: collections.deque[int] = collections.deque()
        self.added: set[int] = set()
        self.semaphores: dict[tuple[int, int], Semaphore] = {}  # by array and place
        inputs = len(plan.program.inputs) - plan.program.num_outputs
        self._aliases = {inputs + o: i for i, o in plan.program.aliases}
        self._before = {i: arrays[i].data.copy() for i in self._aliases}
        if params.checks:
            size = SharedMemory.size_of(plan.shared_bytes)
            self.tables = Tables(plan, size, params.shadow == "bytes")
            written, read, self.added = self.tables.written_and_read()
            self.written, self._several = sorted(written), read | self.added
            self._watch()

    def _watch(self) -> None:
        for i in self.written:
            read = {i, self._aliases.get(i, i)} & self._several
            ordered = self.plan.program.semaphores > 0
            self.arrays[i].shadow = GlobalShadow(self.arrays[i].data.shape, bool(read), ordered)

    def run(self, clusters: range) -> None:
        """Run some of the clusters, one after the other; not those whose place another one has taken over.

        Integers wrap and floats overflow silently, as on the GPU.
        """
        self._waiting = collections.deque(clusters)
        with np.errstate(all="ignore"):  # once, not around each of a million small operations
            if self.plan.program.semaphores:
                self._at_once()
            while self._waiting:
                number = self._waiting.popleft()
                Cluster(self, self.clusters[number], number).run()

    def _at_once(self) -> None:
        """Run the waiting clusters beside each other, as many as are sure to have a place: one block a multiprocessor."""
        places = MULTIPROCESSORS[self.plan.arch] // math.prod(self.plan.program.cluster)
        seed = self.params.seed
        scheduler = Scheduler(
            lambda stuck: deadlock(stuck, len(self._waiting), places), random.Random(f"{seed}") if seed else None
        )
        clusters: list[Cluster] = []

        def begin() -> None:
            number = self._waiting.popleft()
            clusters.append(Cluster(self, self.clusters[number], number, scheduler))
            clusters[-1].start(lambda: begin() if self._waiting else None)

        for _ in range(min(places, len(self._waiting))):
            begin()
        scheduler.run()
        for cluster in clusters:
            cluster.check_end()

    def cancel(self, chance: random.Random | None) -> int | None:
        """The number of a cluster that will not be launched; None: all have been, which by chance happens early."""
        if not self._waiting or (chance is not None and chance.random() < EARLY_END):
            return None
        return self._waiting.popleft()

    def reset(self) -> None:
        """Forget what clusters have done to global memory, and what was noticed of it."""
        for i in self.written:
            array, value = self.arrays[i], self.plan.program.inputs[i]
            if i in self._aliases:
                self.arrays[i] = GlobalArray.of_input(array.name, self._before[i])
                self.arrays[self._aliases[i]] = self.arrays[i]
                continue
            self.arrays[i] = GlobalArray.of_output(array.name, value.shape, value.dtype, array.written is not None)
        self._watch()
        if self.meter is not None:
            self.report = self.meter.report = Report()

    def note_unwritten(self, outputs: list[GlobalArray]) -> None:
        """At the end: which outputs are not whole.  Without a report to take it there is a warning."""
        inputs = self.plan.program.inputs
        first = len(inputs) - self.plan.program.num_outputs
        for array, value in zip(outputs, inputs[first : first + len(outputs)], strict=True):
            if array.written is None or array.written.all():
                continue
            name = f"{array.name} ({value.name})" if value.name else array.name
            found = Unwritten(name, int(array.written.size - array.written.sum()), array.written.size)
            if self.report is not None:
                self.report.unwritten[found.output] = found
            else:
                found.warn(self.plan.program)

    def index_of(self, view: View, buffer: SharedBuffer, starts: tuple[int, ...]) -> Array:
        """Element index of each element of a view of shared memory that starts there."""
        key = (id(view), starts)
        found = self._indices.get(key)
        if found is None:
            found = self._indices[key] = shared_index_at(view, buffer.layout, buffer.offset, starts)
        return found


class BlockState:
    """One block: its place, its memory, its barriers and its engines."""

    def __init__(self, cluster: Cluster, position: Shape, index: int) -> None:
        machine = cluster.machine
        plan = machine.plan
        self.cluster, self.plan, self.arrays, self.scheduler = cluster, plan, machine.arrays, cluster.scheduler
        self.grid, self.position, self.chance = cluster.grid, position, cluster.chance
        self.poison = machine.params.uninitialized == "nan"
        self.asking, self.refused = False, False  # for a place in the grid; a thread knows that none is left
        self.early, self.max_steps = machine.params.timing == "early", machine.params.max_steps
        self.constants, self.starts = machine.constants, machine.starts
        self.name = "block " + (str(self.grid) if not position else f"{self.grid}+{position}")
        self.shared = SharedMemory(plan.shared_bytes, self.poison)
        self.shared.coming = functools.partial(coming, self)
        self.tma = TmaEngine(machine.arrays, self.shared, self.early, self.chance)
        self.tensor_core = TensorCore(self.poison, self.early, self.chance, plan.tmem_columns)
        self.hazards: BlockHazards | None = None
        self.threads: list[Thread] = []
        self.barriers = {
            id: [
                MBarrier(self._name(id, slot), a.expected, a.unit, program=BarrierInProgram(plan, id, slot))
                for slot in range(a.count)
            ]
            for id, a in plan.barriers.items()
        }
        if machine.tables is not None:
            if plan.program.semaphores:  # numbered through the grid
                index += cluster.number * math.prod(plan.program.cluster)
            self.hazards = BlockHazards(machine.tables, cluster.number, index)
            self.shared.history = self.hazards.smem
            for id, slots in self.barriers.items():
                for slot, barrier in enumerate(slots):
                    barrier.agent = machine.tables.agents.barrier(index, id, slot)
        self.named = {
            a.id + slot: NamedBarrier(self._name(id, slot), a.threads)
            for id, a in plan.named_barriers.items()
            for slot in range(a.count)
        }

    def _name(self, id: int, slot: int) -> str:
        return f"{self.cluster.name_of(id)}[{slot}] of {self.name}"

    def changes(self) -> tuple[int, ...]:
        """How often each memory that its threads can read has been written, and how many phases their barriers have ended."""
        shared = [b.shared.changes for b in self.cluster.blocks]
        phases = [x.phase for b in self.cluster.blocks for slots in b.barriers.values() for x in slots]
        return *shared, *phases, self.tensor_core.memory.changes, *(a.changes for a in self.arrays)

    def answered(self) -> None:
        """The answer to a request for a place in the grid has come."""
        self.asking = False

    def barrier(self, id: int, slot: int) -> MBarrier:
        slots = self.barriers[id]
        if not 0 <= slot < len(slots):
            raise OutOfBounds(f"barrier {slot} of an array of {len(slots)}: {self.cluster.name_of(id)}")
        return slots[slot]

    def array_of(self, view: View) -> GlobalArray:
        return self.arrays[self.cluster.machine.inputs[view.ref.id]]

    def along(self, axes: Sequence[str]) -> list[BlockState]:
        """The blocks of the cluster that differ from this one along `axes` only, itself included, in a common order."""
        if not axes:
            return [self]
        names = self.plan.program.cluster_names
        fixed = [i for i, n in enumerate(names) if n not in axes]
        return [b for b in self.cluster.blocks if all(b.position[i] == self.position[i] for i in fixed)]

    def peer(self, place: Mapping[str, int]) -> BlockState:
        """The block of the cluster that is at these indices along the axes named, and where this one is along the others."""
        program = self.plan.program
        position = list(self.position)
        for name, index in place.items():
            axis = program.cluster_names.index(name)
            if not 0 <= index < program.cluster[axis]:
                raise OutOfBounds(f"cluster_ref: block {index} along {name}, which has {program.cluster[axis]}")
            position[axis] = index
        return next(b for b in self.cluster.blocks if b.position == tuple(position))

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
                    f"{barrier.name}: the kernel ends and nobody has waited for the last copy that arrives on it"
                    + barrier.no_wait(),
                    barrier.loaded_line,
                )
        known = [t.hazards for b in self.cluster.blocks for t in b.threads if t.hazards is not None]
        for thread in self.threads:
            thread.check_products(known)
            thread.check_phases()


class Cluster:
    """The blocks of one cluster, which run side by side.

    chance: decides where several orders are legal (None: a fixed order); names: how reports call buffers, by value id.
    """

    def __init__(self, machine: Machine, grid: Shape, number: int, scheduler: Scheduler | None = None) -> None:
        self.machine, self.grid, self.number = machine, grid, number
        plan = self.plan = machine.plan
        self.index_of = machine.index_of
        barriers = [a.value for a in plan.barriers.values()] + [a.value for a in plan.named_barriers.values()]
        self.names = {v.id: f"{v.space} {v.name or f'%{v.id}'}" for v in barriers}
        seed = machine.params.seed
        # One of its own: what a cluster does depends on no other, nor on the process that runs it.
        self.chance = random.Random(f"{seed} {number}") if seed else None
        self.scheduler = scheduler or Scheduler(deadlock, self.chance)
        positions = itertools.product(*map(range, plan.program.cluster))
        self.blocks = [BlockState(self, position, i) for i, position in enumerate(positions)]
        self.multicasts: dict[Hashable, tuple[tuple[int, ...], str]] = {}  # the tile of each, and who named it first

    def name_of(self, id: int) -> str:
        """How reports call a barrier array."""
        return self.names.get(id, f"barrier %{id}")

    def run(self) -> None:
        self.start()
        self.scheduler.run()
        self.check_end()

    def start(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Hand its threads and engines to the scheduler; at_end: called when the last thread has ended."""
        running = sum(len(r.indices) for r in self.plan.roles) * len(self.blocks)

        def main(thread: Thread) -> Steps:
            nonlocal running
            yield from thread.main()
            running -= 1
            if not running:
                at_end()

        for block in self.blocks:
            for index, role in sorted(((i, r) for r in self.plan.roles for i in r.indices), key=lambda x: x[0]):
                thread = Thread(block, role, index)
                block.threads.append(thread)
                self.scheduler.add(main(thread), thread)
        for block in self.blocks:
            self.scheduler.add(block.tma.run(), background=True)
            self.scheduler.add(block.tensor_core.run(), background=True)

    def check_end(self) -> None:
        for block in self.blocks:
            block.check_end()
            if block.hazards is not None:
                block.hazards.close()
