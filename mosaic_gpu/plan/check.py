"""What each line of a kernel becomes, and everything that is wrong with it: `mosaic-gpu check`.

Compiling stops at the first error.  Here each equation is held against the tables and its plan rule for itself, each layouts rule
is applied whatever the others said, budgets and resources are added up; where nothing has failed so far the plan is built and
the emitter run as ever, so what passes here compiles (but for what only NVRTC and ptxas refuse).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..codegen.emitter import Emitter
from ..collecting import Failure
from ..errors import Line, MosaicGpuError
from ..layouts.conflicts import planned_cost
from ..layouts.inference import infer
from ..layouts.registers import RegisterLayout
from ..layouts.shared import ITEM_BITS
from ..ops import registry
from ..ops.elementwise import ELEMENTWISE, expression_of
from ..ops.grid_dependency import waits_for_earlier_kernels
from ..ops.registry import OPS, Generation, Scope
from ..program import Equation, Program, Value, View, refs_of, walk
from . import in_flight, roles
from .build import PlanContext, build_plan, check_launch, role_name
from .model import Plan, Step
from .peers import check_peer
from .products import Products
from .registers import check_registers
from .resources import Resources, allocate, budget_of, check_budgets, registers_for
from .types import IN_MEMORY, has_unsized_products, has_unsized_refs, made_for, refuse_types


@dataclasses.dataclass(frozen=True)
class Finding:
    """One operation of a line.  table: 'sm90/warpgroup'; rule: whether that table has it; layouts: of the arrays it makes, with
    the registers that a thread holds; costs: what moves between threads, bank conflicts."""

    line: Line | None
    op: str
    table: str
    rule: bool
    layouts: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()


@dataclasses.dataclass
class Checked:
    """findings: in program order, by role; errors: every failure once; skipped: what they leave nothing to look at for."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    errors: list[MosaicGpuError] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)

    def add(self, error: MosaicGpuError, line: Line | None) -> None:
        error.line = error.line or line
        if all((e.message, e.line) != (error.message, error.line) for e in self.errors):
            self.errors.append(error)


def check_program(program: Program, arch: str, traced: Sequence[Failure] = ()) -> Checked:
    """Every operation and every failure of a program for `arch`.  traced: what has been refused of it before."""
    out = Checked()

    def tried(what: Callable[[], Any]) -> Any:
        try:
            return what()
        except MosaicGpuError as error:
            out.add(error, program.line)
            return None

    tried(lambda: check_launch(program))
    splits = tried(lambda: roles.split(program.body, program.thread_name, program.num_threads)) or []
    bodies: list[tuple[tuple[int, ...], Sequence[Equation]]] = []
    known = not any(has_unsized_products(s.equations) for s in splits)
    products = tried(lambda: Products(program, arch, splits)) if known else None
    for s in splits:
        equations: Sequence[Equation] = s.equations
        if products is not None:
            equations = tried(lambda s=s: products.lower(s)) or equations  # type: ignore[misc]
            resolved = tried(lambda equations=equations: in_flight.resolve(equations, products.fresh))  # type: ignore[misc]
            equations = resolved.equations if resolved else equations
        bodies.append((s.indices, equations))
    tried(lambda: waits_for_earlier_kernels([tuple(equations) for _, equations in bodies]))
    budgets = [
        (role_name(s, program), s.indices, tried(lambda e=equations: budget_of(e)))  # type: ignore[misc]
        for s, (_, equations) in zip(splits, bodies, strict=True)
    ]
    unknown = any(f.rest or f.call == "set_max_registers" for f in traced) or any(b is None for _, _, b in budgets)
    if unknown:
        out.skipped.append("the register budgets, not all of which are known")
    else:
        tried(lambda: check_budgets(budgets, program.num_threads))
    limits: list[MosaicGpuError] = []
    refs = [v for v in (*program.inputs, *program.scratch) if v.space is not None and v.space.kind in IN_MEMORY]
    sized = all(v.dtype in ITEM_BITS for v in refs) and not any(has_unsized_refs(e) for _, e in bodies)
    placed = program if products is None else products.program
    resources = tried(lambda: allocate(placed, bodies, limits)) if sized else None
    for error in limits:
        out.add(error, program.line)
    if resources is None:
        out.skipped.append("what operations need of buffers and barriers, which could not be placed")
    for (name, _, budget), (_, equations) in zip(budgets, bodies, strict=True):
        layouts = _check_role(program, arch, equations, resources, out)
        if layouts is not None and not unknown:
            found: list[MosaicGpuError] = []
            registers = registers_for(budget, budgets, program.num_threads)
            check_registers(name, equations, layouts, *registers, found)
            for error in found:
                out.add(error, program.line)
    if out.errors or traced:
        out.skipped.append("what shows only when the whole kernel is planned and emitted")
    else:
        plan = tried(lambda: build_plan(program, arch))
        if plan is not None:
            _Recorder(plan, out).source()
    return out


class _Recorder(Emitter):
    """Emits as ever, but notes what an operation's rule refuses and goes on.  Its text is of no use."""

    def __init__(self, plan: Plan, out: Checked) -> None:
        super().__init__(plan)
        self.out = out

    def _step(self, s: Step) -> None:
        try:
            super()._step(s)
        except MosaicGpuError as error:
            self.out.add(error, s.equation.line)


def _check_role(
    program: Program, arch: str, equations: Sequence[Equation], resources: Resources | None, out: Checked
) -> dict[int, RegisterLayout] | None:
    """Every operation of a role; its layouts if all agree."""
    ctx = PlanContext(program, arch, resources) if resources is not None else None
    scopes: dict[int, Scope] = {}
    failed: set[int] = set()
    _plan_rules(program, equations, Generation.of_arch(arch), Scope.WARPGROUP, ctx, scopes, failed, out)
    refused: list[MosaicGpuError] = []
    layouts = infer(equations, refused)
    for error in refused:
        out.add(error, program.line)
    generation = Generation.of_arch(arch)
    for e in walk(tuple(equations)):
        table = (generation, scopes[id(e)])
        rule = e.op in OPS and OPS[e.op].supports(table)
        if e.op not in ("for", "while", "cond", "run_scoped", "warp_map") or not rule:
            shown = tuple(dict.fromkeys(_layout(v, layouts) for v in e.results if v.shape and v.space is None))
            costs = _costs(e, layouts, resources) if not refused and id(e) not in failed else ()
            out.findings.append(Finding(e.line, e.op, f"{table[0].value}/{table[1].value}", rule, shown, costs))
    return None if refused else layouts


def _plan_rules(
    program: Program,
    equations: Sequence[Equation],
    generation: Generation,
    scope: Scope,
    ctx: PlanContext | None,
    scopes: dict[int, Scope],
    failed: set[int],
    out: Checked,
) -> None:
    needed = made_for(equations)
    for e in equations:
        scopes[id(e)] = scope
        try:
            if e.op == "fft":  # as it is where a plan is made, so that its conversions say the same
                refuse_types(e, needed)
            o = registry.lookup(e.op, (generation, scope), e.line)
            refuse_types(e, needed)
            row = ELEMENTWISE.get(e.op)
            if row is not None:
                expression_of(row, e, False)
            for view in refs_of(e):
                if view.peer:
                    check_peer(program, e, view)
            rule = o.plan_rules.get((generation, scope))
            if rule is not None and ctx is not None:
                ctx.scope = scope
                rule(ctx, e)
        except MosaicGpuError as error:
            failed.add(id(e))
            out.add(error, e.line)
        inner = Scope.WARP if e.op == "warp_map" else scope
        for r in e.regions:
            _plan_rules(program, r.equations, generation, inner, ctx, scopes, failed, out)


def _layout(v: Value, layouts: dict[int, RegisterLayout]) -> str:
    what = f"{v.dtype}{list(v.shape)}"
    if v.dtype not in ITEM_BITS:  # refused elsewhere
        return what
    layout = layouts.get(v.id)
    return f"{what} {'one value' if layout is None else f'{layout.name} x{layout.registers}'}"


def _costs(e: Equation, layouts: dict[int, RegisterLayout], resources: Resources | None) -> tuple[str, ...]:
    found = []
    scratch = OPS[e.op].scratch_rule if e.op in OPS else None
    nbytes = scratch(layouts, e) if scratch is not None else 0
    if nbytes:
        found.append(f"{nbytes} bytes through shared memory")
    view = e.operands[0] if e.operands else None
    if e.op in ("get", "load", "swap") and isinstance(view, View) and view.space.kind == "smem" and resources:
        for store, value in ((False, e.results[0] if e.results else None), (True, e.operands[-1])):
            layout = layouts.get(value.id) if isinstance(value, Value) else None
            if layout is not None:
                _, actual, ideal = planned_cost(view, layout, resources.buffers[view.ref.id].layout, store)
                if actual > ideal:
                    found.append(f"bank conflicts: {actual} wavefronts for {ideal}")
    return tuple(found)
