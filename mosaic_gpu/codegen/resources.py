"""What a compiled kernel uses of the GPU, read back from ptxas's log and the cubin, and whether it keeps its budgets.

A warpgroup's register budget is a request: ptxas may drop it without an error, and nothing checks that the budgets add
up to no more than the block was launched with; if they do, the GPU waits for ever. `check` refuses such kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.emulated import emulated_products
from mosaic_gpu.codegen.nvrtc import Compiled
from mosaic_gpu.codegen.ptxas_log import PtxasMessage, parse_log
from mosaic_gpu.errors import RegisterBudgetError


@dataclass(frozen=True)
class BudgetUse:
    """One ``setmaxnreg`` of the cubin, and what the code behind it needs."""

    kind: str  # "increase" or "decrease"
    requested: int
    needed: int  # the highest register index behind it, plus one
    place: tuple[str, int] | None  # file and line


@dataclass(frozen=True)
class LoopUse:
    """An innermost loop with tensor core instructions."""

    place: tuple[str, int] | None
    products: int
    instructions: int


@dataclass(frozen=True)
class ResourceReport:
    """Resources of one kernel. ``dataclasses.asdict`` makes it JSON."""

    kernel: str
    arch: str
    toolchain: str
    entry_registers: int  # a thread's, at launch
    budgets: tuple[BudgetUse, ...]
    stack: int
    spill_stores: int  # bytes, as ptxas counts them
    spill_loads: int
    local_accesses: int  # STL and LDL instructions
    static_shared: int  # bytes
    dynamic_shared: int
    cubin_bytes: int
    mnemonics: dict[str, int]
    loops: tuple[LoopUse, ...]
    messages: tuple[PtxasMessage, ...]
    emulated: tuple[str, ...]  # products for which the GPU has no instruction

    def complaints(self) -> list[str]:
        """What makes the kernel slower than it was written: messages of ptxas, emulated products, and spills."""
        found = [*map(str, self.messages), *self.emulated]
        if self.spill_stores or self.spill_loads or self.local_accesses:
            found.append(
                f"{self.kernel}: {self.spill_stores} bytes of spill stores and {self.spill_loads} of spill loads, "
                f"{self.local_accesses} accesses to local memory."
            )
        return found


def report_resources(compiled: Compiled, kernel: str | None = None, dynamic_shared: int = 0) -> ResourceReport:
    """Reads a cubin back. ``kernel`` is its name, needed only where the cubin holds several."""
    log = parse_log(compiled.log, compiled.ptx)
    usage = log.entry(kernel)
    function = next(found for found in sass.read_cubin(compiled.cubin) if found.name == usage.name)
    called = {other.name for other in log.functions if not other.is_entry}
    loops = []
    for loop, count in function.loops_with():
        first = min(index for index in loop.body if function.instructions[index].mnemonic in sass.TENSOR_CORE)
        loops.append(LoopUse(function.instructions[first].place, count, len(loop.body)))
    return ResourceReport(
        kernel=usage.name,
        arch=compiled.arch,
        toolchain=compiled.toolchain,
        entry_registers=usage.registers or 0,
        budgets=tuple(
            BudgetUse(request.kind, request.value, request.highest_register + 1, request.place)
            for request in function.register_requests
        ),
        stack=usage.stack,
        spill_stores=usage.spill_stores,
        spill_loads=usage.spill_loads,
        local_accesses=function.spills,
        static_shared=usage.shared,
        dynamic_shared=dynamic_shared,
        cubin_bytes=len(compiled.cubin),
        mnemonics=dict(sorted(function.counts().items())),
        loops=tuple(loops),
        messages=tuple(m for m in log.messages if m.function in ("", usage.name) or m.function in called),
        emulated=emulated_products(compiled.ptx, compiled.arch),
    )


def entry_registers(compiled: Compiled) -> int:
    """Registers of a thread at launch, from the compiler's log."""
    return parse_log(compiled.log, compiled.ptx).entry(None).registers or 0


def log_complaints(compiled: Compiled) -> tuple[list[str], bool]:
    """`ResourceReport.complaints` as far as log and PTX tell, without the slow disassembly; whether setmaxnreg was ignored."""
    log = parse_log(compiled.log, compiled.ptx)
    found = [*map(str, log.messages), *emulated_products(compiled.ptx, compiled.arch)]
    for usage in log.functions:
        if usage.spill_stores or usage.spill_loads:
            found.append(
                f"{usage.name}: {usage.spill_stores} bytes of spill stores and {usage.spill_loads} of spill loads."
            )
    return found, any(message.kind == "setmaxnreg" for message in log.messages)


def check_sum(entry_registers: int, requested_budgets: Sequence[tuple[str, int]], warpgroups: int) -> None:
    """Refuses budgets that together exceed what the block is launched with. Can be asked before compiling.

    ``requested_budgets`` has one (role, value) for each warpgroup that asks, so a role of two warpgroups is in it
    twice; a warpgroup that does not ask keeps ``entry_registers``.
    """
    pool = entry_registers * warpgroups
    silent = warpgroups - len(requested_budgets)
    if silent < 0:
        raise RegisterBudgetError(f"{len(requested_budgets)} register budgets for {warpgroups} warpgroups.")
    total = sum(value for _, value in requested_budgets) + silent * entry_registers
    if requested_budgets and total > pool:
        parts = " + ".join(f"{value} ({role})" for role, value in requested_budgets)
        parts += f" + {silent} x {entry_registers} (no request)" if silent else ""
        raise RegisterBudgetError(
            f"The register budgets {parts} add up to {total}, but the block is launched with {entry_registers} "
            f"registers in each of {warpgroups} warpgroups, {pool} together: the last warpgroup to ask would wait for "
            f"ever. Lower the budgets by {total - pool}."
        )


def check(report: ResourceReport, requested_budgets: Sequence[tuple[str, int]], warpgroups: int) -> None:
    """Refuses a kernel whose cubin does not keep the budgets that were asked for (see `check_sum` for the argument)."""
    asked = {value for _, value in requested_budgets}
    kept = {budget.requested for budget in report.budgets}
    dropped = " ".join(str(message) for message in report.messages if message.kind == "setmaxnreg")
    if missing := asked - kept or (asked if dropped else set()):
        roles = _roles(requested_budgets, missing)
        raise RegisterBudgetError(
            f"{report.kernel}: the cubin lacks the register budget of {roles}. "
            + (dropped or f"It has {sorted(kept) or 'none'}.")
        )
    for budget in report.budgets:
        where = f" ({budget.place[0]}:{budget.place[1]})" if budget.place else ""
        if budget.requested not in asked:
            raise RegisterBudgetError(
                f"{report.kernel}: the cubin sets {budget.requested} registers{where}, which no role asked for."
            )
        roles = _roles(requested_budgets, {budget.requested})
        if budget.needed > budget.requested:
            raise RegisterBudgetError(
                f"{report.kernel}: the code of {roles} uses {budget.needed} registers{where}, more than its budget. "
                f"Raise the budget to {-(-budget.needed // 8) * 8}, or shrink the role's tiles."
            )
        limit = report.entry_registers
        if budget.requested < limit if budget.kind == "increase" else budget.requested > limit:
            article = "an" if budget.kind == "increase" else "a"
            raise RegisterBudgetError(
                f"{report.kernel}: {roles} asks for {article} {budget.kind} to {budget.requested} registers{where}, "
                f"but the kernel is launched with {limit}."
            )
    check_sum(report.entry_registers, requested_budgets, warpgroups)


def _roles(requested_budgets: Sequence[tuple[str, int]], values: set[int]) -> str:
    named = dict.fromkeys(f"{role} ({value})" for role, value in requested_budgets if value in values)
    return ", ".join(named)
