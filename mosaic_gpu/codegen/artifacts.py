"""A compiled kernel as files for people and tools: CUDA C++, PTX, cubin, SASS, resources."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..plan.accesses import shared_accesses
from ..plan.model import Plan
from ..plan.residency import residency
from .build import Built, report
from .resources import ResourceReport
from .sass import disassemble


@dataclasses.dataclass(frozen=True)
class RoleRegisters:
    """Registers of one role.  requested: its budget, None where it asks for none and keeps the entry value;
    needed: what the SASS of that budget uses, None where the role asks for none."""

    role: str
    warpgroups: tuple[int, ...]
    requested: int | None
    needed: int | None


def registers_by_role(plan: Plan, resources: ResourceReport) -> list[RoleRegisters]:
    """Pairs the roles of a plan with the budgets found in its cubin, by value; roles that ask alike share the highest."""
    found = []
    for role in plan.roles:
        needs = [b.needed for b in resources.budgets if b.requested == role.registers]
        found.append(RoleRegisters(role.name, role.indices, role.registers, max(needs, default=None)))
    return found


def resources_json(plan: Plan, built: Built, resources: ResourceReport | None = None) -> dict[str, Any]:
    """What the kernel takes of the GPU, as plain data."""
    resources = resources or report(plan, built.compiled)
    shared = resources.static_shared + resources.dynamic_shared
    return {
        "program": plan.program.name,
        "threads": plan.threads,
        "roles": [dataclasses.asdict(r) for r in registers_by_role(plan, resources)],
        "tmem_columns": plan.tmem_columns,
        "residency": residency(plan, resources.entry_registers, shared).to_json(),
        "notes": list(plan.notes),
        "shared_accesses": [a.as_dict() for a in shared_accesses(plan)],
        **dataclasses.asdict(resources),
    }


def write_artifacts(plan: Plan, built: Built, folder: Path) -> dict[str, Path]:
    """Write kernel.cu, kernel.ptx, kernel.cubin, kernel.sass and resources.json; returns the paths by what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str, tuple[str, str | bytes | None]] = {
        "cuda": ("kernel.cu", built.source),
        "ptx": ("kernel.ptx", built.compiled.ptx),  # None from a compiler that gave none
        "cubin": ("kernel.cubin", built.compiled.cubin),
        "sass": ("kernel.sass", disassemble(built.compiled.cubin)),
        "resources": ("resources.json", json.dumps(resources_json(plan, built), indent=2, default=str) + "\n"),
    }
    paths = {}
    for what, (name, content) in contents.items():
        if content is not None:
            paths[what] = folder / name
            paths[what].write_bytes(content.encode() if isinstance(content, str) else content)
    return paths
