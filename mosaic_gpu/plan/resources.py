"""Shared memory, barriers, TMEM and register budgets: where everything goes, and whether it fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from ..collecting import kept
from ..errors import Line, MosaicGpuError, RegisterBudgetError, ResourceExceeded, UnsupportedCall
from ..layouts.registers import RegisterLayout
from ..layouts.shared import SharedLayout, shared_layout
from ..layouts.tmem import TmemLayout, tmem_layout
from ..memory import BarrierInfo
from ..program import Equation, Program, Value, View, walk
from .model import BarrierArray, NamedBarrierArray, SharedBuffer, TmemBuffer
from .placement import Piece, place
from .roles import uses_arrays

SHARED_LIMIT = 232_448  # bytes a block may have on sm_90, sm_100 and sm_103 (CUDA guide, compute capabilities)
TMEM_COLUMNS = 512
ALIGNMENT = 1024  # the longest swizzle pattern
NAMED_BARRIERS = 16


@dataclasses.dataclass
class Resources:
    """Everything a block owns."""

    buffers: dict[int, SharedBuffer]
    barriers: dict[int, BarrierArray]
    named: dict[int, NamedBarrierArray]
    tmem: dict[int, TmemBuffer]
    shared_bytes: int
    tmem_columns: int
    tmem_address_offset: int
    tmem_pair: bool
    scratch_bytes: int = 0  # of shared_bytes: where threads exchange elements of register arrays


def allocations(program: Program) -> list[tuple[Value, Line | None, bool]]:
    """(ref, line, shared by all warpgroups) of every buffer, scratch and scoped."""
    out: list[tuple[Value, Line | None, bool]] = [(v, program.line, True) for v in program.scratch]

    def visit(equations: Iterable[Equation], top: bool) -> None:
        for e in equations:
            scoped = e.op == "run_scoped"
            if scoped:
                collective = top or program.thread_name in e.param("collective_axes", ())
                out.extend((v, e.line, collective) for v in e.regions[0].inputs)
            for r in e.regions:
                visit(r.equations, top and scoped)

    visit(program.body, True)
    return out


def allocate(
    program: Program,
    role_bodies: Sequence[tuple[tuple[int, ...], Sequence[Equation]]],
    failures: list[MosaicGpuError] | None = None,
) -> Resources:
    """Assign addresses.  role_bodies: (warpgroups, equations) of each role, to see who arrives on what.

    failures: where that there is too little of something goes; None: it is raised.
    """
    wanted = allocations(program)
    buffers: dict[int, SharedBuffer] = {}
    named: dict[int, NamedBarrierArray] = {}
    tmem: dict[int, TmemBuffer] = {}
    layouts: list[tuple[Value, SharedLayout, Line | None]] = []
    barrier_refs: list[tuple[Value, BarrierInfo]] = []
    columns_of: list[tuple[Value, TmemLayout]] = []
    next_named = 1
    owners = _owners(role_bodies)
    for ref, line, collective in wanted:
        assert ref.space is not None
        kind = ref.space.kind
        if kind in ("smem", "barrier", "tmem") and not collective and len(owners.get(ref.id, ())) > 1:
            raise UnsupportedCall(
                f"run_scoped allocates {kind.upper()} in a role of {len(owners[ref.id])} warpgroups; it belongs "
                "to the block, so say that they share it: "
                f"run_scoped(..., collective_axes={program.thread_name!r})",
                line,
            )
        if kind == "smem":
            layouts.append((ref, shared_layout(ref.shape, ref.dtype, ref.space, line), line))
        elif kind == "barrier":
            assert ref.space.barrier is not None
            if math.prod(ref.shape) > 32:
                raise ResourceExceeded(
                    f"an array of {math.prod(ref.shape)} barriers: a role keeps one phase bit for each in one "
                    "register, so 32 at most; use two arrays",
                    line,
                )
            barrier_refs.append((ref, ref.space.barrier))
        elif kind == "named_barrier":
            assert ref.space.barrier is not None
            count = math.prod(ref.shape)
            named[ref.id] = NamedBarrierArray(ref, next_named, count, 128 * ref.space.barrier.num_arrivals)
            next_named += count
        elif kind == "tmem":
            columns_of.append((ref, tmem_layout(ref, line)))
    starts, offset = place(Piece(ref, layout.nbytes, _alignment(layout)) for ref, layout, _ in layouts)
    for ref, layout, _ in sorted(layouts, key=lambda item: starts[item[0].id]):
        buffers[ref.id] = SharedBuffer(ref, layout, starts[ref.id])
    first_columns, next_column = place(Piece(ref, of.total, of.alignment) for ref, of in columns_of)
    for ref, tmem_of in columns_of:
        tmem[ref.id] = TmemBuffer(ref, first_columns[ref.id], tmem_of.total)
    offset = -(-offset // 8) * 8
    arrivals = _arrivals(role_bodies)
    barriers: dict[int, BarrierArray] = {}
    for ref, info in barrier_refs:
        warpgroups, commits = arrivals.get(ref.id, (False, False))
        unit = 4 if warpgroups and not commits else 1
        for a in info.collective_axes:
            if a not in program.cluster_names:
                raise UnsupportedCall(
                    f"ClusterBarrier(collective_axes={info.collective_axes}): {a!r} is not a cluster axis; "
                    f"the kernel has {program.cluster_names}",
                    program.line,
                )
        blocks = math.prod(program.cluster[program.cluster_names.index(a)] for a in info.collective_axes)
        barriers[ref.id] = BarrierArray(
            ref, offset, math.prod(ref.shape), info, unit, info.num_arrivals * unit * blocks
        )
        offset += 8 * math.prod(ref.shape)
    tmem_offset = offset
    if tmem:
        offset += 8
    with kept(failures):
        _check_shared(offset, buffers, barriers, program)
    with kept(failures):
        if next_named + 1 > NAMED_BARRIERS:
            table = ", ".join(f"{a.id}-{a.id + a.count - 1}: %{a.value.id}" for a in named.values())
            raise ResourceExceeded(
                f"{next_named - 1} named barriers; a block has {NAMED_BARRIERS}, of which 0 is the whole block ({table})",
                program.line,
            )
    with kept(failures):
        if next_column > TMEM_COLUMNS:
            rows = "\n".join(
                f"  {b.columns:4d} columns from {b.column:4d}  {b.value}{' (in a union)' if _in_union(b.value) else ''}"
                for b in tmem.values()
            )
            raise ResourceExceeded(f"{next_column} TMEM columns; an SM has {TMEM_COLUMNS}\n{rows}", program.line)
    columns = max(32, 1 << (next_column - 1).bit_length()) if tmem else 0
    return Resources(buffers, barriers, named, tmem, offset, columns, tmem_offset, _pair(program, tmem))


def _pair(program: Program, tmem: dict[int, TmemBuffer]) -> bool:
    """Whether tensor memory is that of a pair of blocks: all of it or none (`cta_group` is one for a whole kernel)."""
    pairs = [b.value for b in tmem.values() if b.value.space is not None and b.value.space.collective]
    others = [b.value for b in tmem.values() if b.value.space is not None and not b.value.space.collective]
    if pairs and others:
        raise UnsupportedCall(
            f"{pairs[0]} is collective and {others[0]} is not: a kernel works in pairs of blocks or in single ones "
            "throughout, so give all TMEM buffers collective=True or none",
            program.line,
        )
    if pairs and (not program.cluster or program.cluster[-1] != 2):
        raise UnsupportedCall(
            f"{pairs[0]} is collective: the pair is the last axis of the cluster, which must have 2 blocks; "
            f"cluster={program.cluster}",
            program.line,
        )
    return bool(pairs)


def _in_union(ref: Value) -> bool:
    return ref.space is not None and ref.space.union is not None


def scratch_of(equations: Sequence[Equation], layouts: Mapping[int, RegisterLayout]) -> tuple[int, Equation | None]:
    """Bytes of shared memory that a role's threads need to exchange elements: the most that one operation needs, and which."""
    from ..ops.registry import OPS

    most, of = 0, None
    for e in walk(tuple(equations)):
        rule = OPS[e.op].scratch_rule if e.op in OPS else None
        if rule is not None and (nbytes := -(-rule(layouts, e) // 16) * 16) > most:
            most, of = nbytes, e
    return most, of


def add_scratch(resources: Resources, nbytes: int, indices: Sequence[int], of: Equation) -> int:
    """Room for the exchanges of a role's warpgroups; where it starts.  of: the operation that needs so much."""
    start = -(-resources.shared_bytes // 16) * 16
    warpgroups = max(indices) - min(indices) + 1
    total = start + nbytes * warpgroups
    if total > SHARED_LIMIT:
        array = of.operands[0] if of.operands else of.results[0]
        each = f" for each of {warpgroups} warpgroups" if warpgroups > 1 else ""
        pieces = "Do it on pieces of the array, one after the other (ref.at[plgpu.ds(i * 64, 64)])"
        raise ResourceExceeded(
            f"{of.op} of {array.dtype}{list(array.shape)} moves elements between threads through {nbytes} bytes of shared "
            f"memory{each}; {start} of the block's {SHARED_LIMIT} are taken. {pieces}{', or with smaller buffers' * bool(start)}"
            + "".join(f"\n{row}" for row in _table(resources.buffers, resources.barriers, resources.scratch_bytes)),
            of.line,
        )
    resources.shared_bytes = total
    resources.scratch_bytes += total - start
    return start


def _alignment(layout: SharedLayout) -> int:
    return ALIGNMENT if layout.swizzle else 128


def _owners(role_bodies: Sequence[tuple[tuple[int, ...], Sequence[Equation]]]) -> dict[int, tuple[int, ...]]:
    """Which warpgroups open the scope that allocates a ref."""
    out: dict[int, tuple[int, ...]] = {}

    def visit(indices: tuple[int, ...], equations: Iterable[Equation]) -> None:
        for e in equations:
            for r in e.regions:
                if e.op == "run_scoped":
                    for v in r.inputs:
                        out[v.id] = tuple(sorted({*out.get(v.id, ()), *indices}))
                visit(indices, r.equations)

    for indices, body in role_bodies:
        visit(indices, body)
    return out


def _arrivals(role_bodies: Sequence[tuple[tuple[int, ...], Sequence[Equation]]]) -> dict[int, tuple[bool, bool]]:
    """By barrier: whether a whole warpgroup arrives on it (warp by warp), and whether the tensor core commits to it."""
    out: dict[int, tuple[bool, bool]] = {}

    def note(view: object, warpgroup: bool, commit: bool) -> None:
        if isinstance(view, View) and view.space.kind == "barrier":
            a, b = out.get(view.ref.id, (False, False))
            out[view.ref.id] = (a or warpgroup, b or commit)

    def visit(equations: Iterable[Equation], many_threads: bool) -> None:
        for e in equations:
            if e.op == "barrier_arrive":
                note(e.operands[0], many_threads, False)
            elif e.op in ("tcgen05_commit_arrive", "tcgen05_mma"):  # an arrival is one thread's
                for operand in e.operands:
                    note(operand, False, True)
            for r in e.regions:
                visit(r.equations, many_threads and e.op != "warp_map")

    for _, body in role_bodies:
        visit(body, not runs_on_one_thread(body))
    return out


def runs_on_one_thread(equations: Sequence[Equation]) -> bool:
    """Whether nothing here needs more than one thread: copies, barriers, scalars."""
    from ..ops.registry import OPS

    def fits(body: Iterable[Equation]) -> bool:
        return all(e.op in OPS and OPS[e.op].issues_only and all(fits(r.equations) for r in e.regions) for e in body)

    return fits(equations) and not uses_arrays(equations)


def _table(buffers: dict[int, SharedBuffer], barriers: dict[int, BarrierArray], scratch: int = 0) -> list[str]:
    """A line for each thing in shared memory."""
    rows = [f"  {b.layout.nbytes:7d} bytes  {b.value}" for b in buffers.values()] + [
        f"  {8 * b.count:7d} bytes  {b.value}" for b in barriers.values()
    ]
    return rows + ([f"  {scratch:7d} bytes  for elements that other roles' threads exchange"] if scratch else [])


def _check_shared(
    total: int, buffers: dict[int, SharedBuffer], barriers: dict[int, BarrierArray], program: Program
) -> None:
    if total <= SHARED_LIMIT:
        return
    raise ResourceExceeded(
        f"the block needs {total} bytes of shared memory, {total - SHARED_LIMIT} more than the {SHARED_LIMIT} it can have\n"
        + "\n".join(_table(buffers, barriers)),
        program.line,
    )


# ---- registers ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Budget:
    """A role's request: registers per thread, the action it was written with, its line; None: it makes none."""

    registers: int | None
    action: str | None
    line: Line | None


def budget_of(equations: Sequence[Equation]) -> Budget:
    """The final request of a role, which every path must reach: at the top of the role, not in a loop or branch."""
    found = Budget(None, None, None)
    for e in equations:
        if e.op == "set_max_registers":
            found = Budget(e.param("registers"), e.param("action"), e.line)
        elif e.op == "run_scoped":
            inner = budget_of(e.regions[0].equations)
            found = inner if inner.registers is not None else found
        elif e.op != "warp_map":  # a warp has no such operation, which its own error says
            for r in e.regions:
                inner = budget_of(r.equations)
                if inner.registers is not None:
                    raise RegisterBudgetError(
                        "set_max_registers must be reached on every path of its role: move it out of the loop or branch",
                        inner.line,
                    )
    return found


def entry_registers(warpgroups: int, largest_increase: int | None = None) -> int:
    """Registers per thread that ptxas launches a block of so many warpgroups with.

    An equal share of the 64 K, in steps of 8, at most 255; no more than the largest increase, if there is one.  The
    compiled kernel says what it really is, and is checked against it.
    """
    share = min(65536 // (128 * warpgroups) // 8 * 8, 255)
    return share if largest_increase is None else min(share, largest_increase)


Budgets = Sequence[tuple[str, tuple[int, ...], Budget]]


def _largest_increase(budgets: Budgets) -> Budget | None:
    increases = [b for _, _, b in budgets if b.registers is not None and b.action == "increase"]
    return max(increases, key=lambda b: b.registers or 0, default=None)


def registers_for(role: Budget, budgets: Budgets, warpgroups: int) -> tuple[int, tuple[str, Line | None] | None]:
    """Registers of a thread in a role, and where that number comes from if from a request (its own, or the largest)."""
    if role.registers is not None:
        return min(role.registers, 255), (f"set_max_registers({role.registers}) at {role.line}", role.line)
    largest, share = _largest_increase(budgets), entry_registers(warpgroups)
    if largest is None or largest.registers is None or largest.registers >= share:
        return share, None
    why = f"it keeps those of the launch, which are no more than the largest increase, {largest.registers} at {largest.line}"
    return largest.registers, (why, largest.line)


def check_budgets(budgets: Budgets, warpgroups: int) -> None:
    """The sum of the final budgets must fit the pool: registers at launch x warpgroups (PTX ISA 9.7.19.5)."""
    if all(b.registers is None for _, _, b in budgets):
        return
    largest = _largest_increase(budgets)
    entry = entry_registers(warpgroups, largest.registers if largest else None)
    pool = entry * warpgroups
    rows = []
    total = 0
    for name, indices, b in budgets:
        final = b.registers if b.registers is not None else entry
        total += final * len(indices)
        rows.append(
            f"  {final:3d} x {len(indices)} warpgroup(s)  {name}"
            + (f"  {b.line}" if b.line else "  (keeps what it is launched with)")
        )
        if b.registers is not None and b.action == "increase" and b.registers < entry:
            raise RegisterBudgetError(
                f"set_max_registers({b.registers}, action='increase') is below the {entry} registers of the "
                "launch: write 'decrease'",
                b.line,
            )
        if b.registers is not None and b.action == "decrease" and b.registers > entry:
            raise RegisterBudgetError(
                f"set_max_registers({b.registers}, action='decrease') is above the {entry} registers of the "
                "launch: write 'increase'",
                b.line,
            )
    if total > pool:
        worst = max(budgets, key=lambda item: item[2].registers or 0)[2]
        raise RegisterBudgetError(
            f"the register budgets add up to {total} per thread position, but the block is launched with {entry} "
            f"x {warpgroups} warpgroups = {pool}; "
            f"the increase would wait for ever. Lower them by {total - pool}:\n" + "\n".join(rows),
            worst.line,
        )
