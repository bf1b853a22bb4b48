"""build_plan: all passes in order, Program -> Plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..collecting import kept
from ..errors import Line, MosaicGpuError, ResourceExceeded, UnsupportedCall
from ..layouts.inference import infer
from ..layouts.registers import RegisterLayout
from ..ops import registry
from ..ops.debug import print_layouts
from ..ops.grid_dependency import waits_for_earlier_kernels
from ..ops.registry import Generation, Scope
from ..ops.tcgen05_rules import features_of
from ..program import Equation, Program, Value, refs_of, walk
from . import in_flight, roles
from .arrivals import check_arrivals
from .contraction import Fma, fmas
from .model import Block, Plan, Role, RuntimeDim, Step, TensorMapPlan
from .peers import accesses, check_peer, filled_by_peers, met_by_peers, reaches_peers
from .products import Products
from .registers import check_registers
from .resources import (
    Resources,
    add_scratch,
    allocate,
    budget_of,
    check_budgets,
    registers_for,
    runs_on_one_thread,
    scratch_of,
)
from .roles import Split
from .types import made_for, refuse_ref, refuse_types


class PlanContext:
    """What a plan rule may ask for and add to."""

    def __init__(self, program: Program, arch: str, resources: Resources) -> None:
        self.program = program
        self.generation = Generation.of_arch(arch)
        self.scope = Scope.WARPGROUP
        self.resources = resources
        self.arch = arch
        self.features = features_of(arch)
        self.meets_peers = (
            False  # whether the role that is planned shares ordinary accesses with the cluster's other blocks
        )
        self.met: frozenset[int] = frozenset()  # refs of such accesses, where single warps differ in them
        self.reaches_peers = False  # whether any role loads from or stores to their shared memory
        self.filled_by_peers: frozenset[int] = frozenset()  # barriers that count what they store
        self.maps: list[TensorMapPlan] = []
        self.pointers: list[int] = []
        self.multicast: list[int] = []
        self.dims: list[RuntimeDim] = []

    @property
    def buffers(self) -> dict[int, Any]:
        return self.resources.buffers

    @property
    def named_barriers(self) -> dict[int, Any]:
        return self.resources.named

    def input_index(self, ref: Value, line: Line | None) -> int:
        """Which of the kernel's inputs and outputs a GMEM ref is."""
        for i, v in enumerate(self.program.inputs):
            if v.id == ref.id:
                return i
        raise UnsupportedCall(f"{ref} is not an input or output of the kernel", line)

    def output_index(self, ref: Value, line: Line | None) -> int:
        """As `input_index`, for something that is written: inputs belong to the caller and never change."""
        i = self.input_index(ref, line)
        if i < len(self.program.inputs) - self.program.num_outputs:
            raise UnsupportedCall(f"{ref} is an input of the kernel and cannot be written; write to an output", line)
        return i

    def tensor_map(self, plan: TensorMapPlan) -> int:
        if plan not in self.maps:
            self.maps.append(plan)
        return self.maps.index(plan)

    def pointer(self, ref: Value, line: Line | None) -> int:
        i = self.input_index(ref, line)
        return self._address(self.pointers, i, ref)

    def multicast_pointer(self, ref: Value, line: Line | None) -> int:
        """As `pointer`, for the array's address in a multicast object."""
        return self._address(self.multicast, self.input_index(ref, line), ref)

    def _address(self, among: list[int], i: int, ref: Value) -> int:
        if i not in among:
            among.append(i)
        for axis in range(len(ref.shape)):  # strides and bounds
            self.runtime_dim(ref, axis)
        return i

    def runtime_dim(self, ref: Value, axis: int) -> tuple[int, int]:
        d = RuntimeDim(self.input_index(ref, None), axis)
        if d not in self.dims:
            self.dims.append(d)
        return d.input, d.axis

    # ---- equations -> steps ---------------------------------------------------------------------------------------------
    def block(self, inputs: Sequence[Value], equations: Sequence[Equation], outputs: Sequence[Any] = ()) -> Block:
        contracted = [None] * len(equations) if self.program.params.strict_math else fmas(equations)
        steps = (self.step(e, fma) for e, fma in zip(equations, contracted, strict=True))
        return Block(tuple(inputs), tuple(steps), tuple(outputs))

    def step(self, e: Equation, fma: Fma | None) -> Step:
        table = (self.generation, self.scope)
        op = registry.lookup(e.op, table, e.line)
        if e.op == "warp_map":
            return Step(e, self.warp_roles(e))
        rule = op.plan_rules.get(table)
        for view in refs_of(e):
            if view.peer:
                check_peer(self.program, e, view)
        try:
            data = rule(self, e) if rule is not None else None
        except MosaicGpuError as error:
            if error.line is None:
                error.line = e.line
            raise
        return Step(e, data, tuple(self.block(r.inputs, r.equations, r.outputs) for r in e.regions), fma=fma)

    def warp_roles(self, e: Equation) -> tuple[Role, ...]:
        """The roles of the four warps under `warp_map`."""
        region = e.regions[0]
        out = []
        whole, self.scope = self.meets_peers, Scope.WARP
        try:
            for s in roles.split(region.equations, None, 4, region.inputs[0]):
                name = "warp" + ",".join(map(str, s.indices))
                self.meets_peers = whole and (not self.met or accesses(s.equations, self.met))
                out.append(
                    Role(
                        name,
                        Scope.WARP,
                        s.indices,
                        self.block(region.inputs, s.equations),
                        {},
                        runs_on_one_thread(s.equations),
                    )
                )
        finally:
            self.meets_peers, self.scope = whole, Scope.WARPGROUP
        return tuple(out)


def build_plan(program: Program, arch: str) -> Plan:
    """Plan a program for `arch` ('sm_90a', 'sm_100a', 'sm_103a').  Every legality error is raised here."""
    check_launch(program)
    splits = roles.split(program.body, program.thread_name, program.num_threads)
    for split in splits:
        equations = tuple(walk(split.equations))
        needed = made_for(equations)
        for e in equations:
            refuse_types(e, needed)
    products = Products(program, arch, splits)
    with kept(None, program.line):
        try:
            return _plan(program, arch, splits, products)
        except ResourceExceeded:
            if not products.staged:
                raise
        # There may be room if no operands of products go from registers to tcgen05.
        return _plan(program, arch, splits, Products(program, arch, splits, staging=False))


def check_launch(program: Program) -> None:
    """UnsupportedCall for more warpgroups, blocks or elements than there can be."""
    if not 1 <= program.num_threads <= 8:
        raise UnsupportedCall(
            f"num_threads={program.num_threads}: a block has 1 to 8 warpgroups (1024 threads)", program.line
        )
    if any(n > 65535 for n in program.grid[:-1][-1:]) or math.prod(program.grid[:-2]) > 65535:
        raise UnsupportedCall(
            f"grid={program.grid}: only the last axis may have more than 65535 blocks (CUDA's limit for y and z)",
            program.line,
        )
    for v in (*program.inputs, *program.scratch):
        refuse_ref(v, program.line)
    for v in program.inputs:
        if any(n >= 2**31 for n in v.shape):
            raise UnsupportedCall(f"{v}: extents are 32-bit numbers in a kernel, less than 2**31", program.line)


def _plan(program: Program, arch: str, splits: Sequence[Split], products: Products) -> Plan:
    """The same, for a program that has been split into roles."""
    generation = products.generation
    notes: list[str] = []
    resolved: list[tuple[Split, tuple[Equation, ...]]] = []
    for s in splits:
        result = in_flight.resolve(products.lower(s), products.fresh)
        notes += result.notes
        resolved.append((s, result.equations))
    notes += products.notes
    program = products.program
    early = waits_for_earlier_kernels([equations for _, equations in resolved])
    names = [role_name(s, program) for s in splits]
    budgets = [(n, s.indices, budget_of(e)) for n, (s, e) in zip(names, resolved, strict=True)]
    resources = allocate(program, [(s.indices, e) for s, e in resolved])
    ctx = PlanContext(program, arch, resources)
    planned = []
    met = met_by_peers(program, (e for _, e in resolved)) if math.prod(program.cluster) > 1 else frozenset()
    ctx.reaches_peers = reaches_peers(e for _, e in resolved)
    ctx.filled_by_peers = filled_by_peers(e for _, e in resolved)
    for name, (s, equations), (_, _, budget) in zip(names, resolved, budgets, strict=True):
        ctx.meets_peers = ctx.reaches_peers or accesses(equations, met)
        # What the warpgroup itself has accessed, each of its warps has.
        by_warp = not ctx.reaches_peers and not accesses(equations, met, in_warps=False)
        ctx.met = met if by_warp else frozenset()
        body = ctx.block((), equations)
        single = runs_on_one_thread(equations)
        layouts: dict[int, RegisterLayout] = infer(equations)
        print_layouts(equations, layouts)
        nbytes, exchange = scratch_of(equations, layouts)
        scratch = add_scratch(resources, nbytes, s.indices, exchange) if exchange else 0
        planned.append(
            Role(
                name,
                Scope.WARPGROUP,
                s.indices,
                body,
                layouts,
                single,
                budget.registers,
                budget.line,
                scratch,
                nbytes,
            )
        )
    # After the bodies: a tcgen05 call is refused at its own line.
    if resources.tmem and generation is Generation.SM90:
        ref = next(iter(resources.tmem.values())).value
        raise UnsupportedCall(
            f"{ref}: tensor memory exists on sm_100a and later; on sm_90a accumulate in an ACC", program.line
        )
    check_budgets(budgets, program.num_threads)
    for role, (_, equations), (_, _, budget) in zip(planned, resolved, budgets, strict=True):
        check_registers(role.name, equations, role.layouts, *registers_for(budget, budgets, program.num_threads))
    plan = Plan(
        program,
        generation,
        arch,
        tuple(planned),
        resources.buffers,
        resources.barriers,
        resources.named,
        resources.tmem,
        resources.shared_bytes,
        resources.tmem_columns,
        resources.tmem_address_offset,
        resources.tmem_pair,
        tuple(ctx.maps),
        tuple(ctx.pointers),
        tuple(ctx.dims),
        tuple(notes),
        early,
        tuple(ctx.multicast),
    )
    check_arrivals(plan)
    return plan


def role_name(s: Split, program: Program) -> str:
    return f"{program.thread_name or 'warpgroup'}{','.join(map(str, s.indices))}"


__all__ = ["PlanContext", "build_plan"]
