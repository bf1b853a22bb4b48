"""Plan -> cubin, checked: emit, compile (or take from the cache), read the log and the disassembly, refuse what is not kept."""

from __future__ import annotations

import dataclasses
import re
import warnings

from ..errors import RegisterBudgetError, ToolchainError
from ..garbage import uncollected
from ..plan.model import Plan
from .cubin_cache import cached_compile
from .emitter import ENTRY, emit
from .nvrtc import Compiled
from .resources import ResourceReport, check, check_sum, entry_registers, log_complaints, report_resources


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled kernel.  hit: it came from the cache."""

    source: str
    compiled: Compiled
    hit: bool


class SpillWarning(UserWarning):
    """ptxas spilled registers or serialised MMAs; the kernel is right but slow."""


def compile_plan(plan: Plan, *, check_in_background: bool = False) -> Built:
    """Emit and compile a plan.  Spills, serialised and emulated MMAs are warnings, errors with `CompilerParams(strict=True)`.

    check_in_background: do not wait for the disassembly, which proves that the register budgets are kept.  What can hang
    or go wrong at once is still checked first: the sum of the budgets, and whether ptxas ignored them.
    """
    with uncollected():
        source = emit(plan)
    name = f"/mosaic_gpu/{plan.program.name}.cu"  # absolute, else NVRTC puts the working directory in front
    compiled, hit = cached_compile(
        source,
        arch=plan.arch,
        name=name,
        accept=(lambda c: check_budgets(plan, c)) if budgets(plan) else None,
        in_background=check_in_background,
    )
    if budgets(plan):
        check_sum(entry_registers(compiled), budgets(plan), plan.program.num_threads)
    _complain(plan, compiled)
    return Built(source, compiled, hit)


def report(plan: Plan, compiled: Compiled) -> ResourceReport:
    """Registers by role, spills, messages, instruction counts of a compiled plan (disassembles it)."""
    return report_resources(compiled, ENTRY, plan.shared_bytes)


def budgets(plan: Plan) -> list[tuple[str, int]]:
    """(role, registers) of every role that asks for a budget, once for each of its warpgroups."""
    return [(r.name, r.registers) for r in plan.roles for _ in r.indices if r.registers is not None]


def check_budgets(plan: Plan, compiled: Compiled) -> None:
    """Refuse a cubin that does not keep the register budgets.  Disassembles it: once, before it is cached."""
    check(report(plan, compiled), budgets(plan), plan.program.num_threads)


def _complain(plan: Plan, compiled: Compiled) -> None:
    """Spills and serialised or injected waits, from the compiler's log."""
    complaints, budgets_ignored = log_complaints(compiled)
    if complaints:
        text = f"kernel {plan.program.name}: " + "; ".join(complaints)
        if budgets_ignored:
            raise RegisterBudgetError(text, plan.program.line)
        if plan.program.params.strict:
            raise ToolchainError(text, plan.program.line)
        warnings.warn(text, SpillWarning, stacklevel=3)


def body_of(source: str) -> str:
    """The kernel without the prelude, for people."""
    found = re.search(r'^#line 1 "/mosaic_gpu/kernel.cu"\n', source, re.MULTILINE)
    return source[found.end() :] if found else source
