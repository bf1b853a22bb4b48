"""The program after each pass, as text: traced, split by role, with waits resolved, and what the plan decided."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from ..ops.registry import Scope
from ..plan import in_flight, roles
from ..plan.model import Block, Plan, Role
from ..plan.products import Products
from ..program import Program, Value, format_equations, format_program
from .common import table


def stage_texts(program: Program, plan: Plan) -> dict[str, str]:
    """The text of each stage, by name in the order of the passes."""
    split = roles.split(program.body, program.thread_name, program.num_threads)
    names = {r.indices: r.name for r in plan.roles}
    products = Products(program, plan.arch, split)
    by_role, resolved = [], []
    for part in split:
        result = in_flight.resolve(products.lower(part), products.fresh)
        head = f"role {names.get(part.indices, part.indices)}: warpgroups {', '.join(map(str, part.indices))}"
        by_role += [head, *format_equations(part.equations, 1), ""]
        resolved += [head, *format_equations(result.equations, 1)]
        resolved += [*(f"  note: {note}" for note in result.notes), ""]
    return {
        "traced": format_program(program),
        "roles": "\n".join(by_role),
        "in_flight": "\n".join(resolved),
        "plan": plan_text(plan),
    }


def plan_text(plan: Plan) -> str:
    """The tables of `plan_tables` as plain text."""
    file = io.StringIO()
    Console(file=file, width=160, no_color=True).print(plan_tables(plan))
    return file.getvalue()


def plan_tables(plan: Plan) -> Group:
    """What the plan decided: roles, shared memory, barriers, named barriers, TMEM, tensor maps, parameters, notes."""
    data = plan_json(plan)
    head = Text(
        f"{data['kernel']} for {data['arch']}: {data['threads']} threads, {data['shared_bytes']} bytes of shared memory"
    )
    parts: list[Any] = [head]
    for title in ("roles", "buffers", "barriers", "named_barriers", "tmem", "maps"):
        rows = data[title]
        if rows:
            parts.append(table(title.replace("_", " "), list(rows[0]), [list(row.values()) for row in rows]))
    parts += [Text("parameters: " + (", ".join(data["parameters"]) or "none"))]
    parts += [Text(f"note: {note}") for note in data["notes"]]
    return Group(*parts)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The same as plain data: a list of rows for each table."""

    def name(value: Value) -> str:
        return value.name or f"%{value.id}"

    def type_of(value: Value) -> str:
        return f"{value.dtype}{list(value.shape)}"

    def transforms(value: Value) -> str:
        return " ".join(map(str, value.space.transforms)) if value.space else ""

    inputs = [name(v) for v in plan.program.inputs]
    return {
        "kernel": plan.program.name,
        "arch": plan.arch,
        "threads": plan.threads,
        "shared_bytes": plan.shared_bytes,
        "tmem_columns": plan.tmem_columns,
        "roles": [row for r in plan.roles for row in _role_rows(r)],
        "buffers": [
            {
                "buffer": name(b.value),
                "type": type_of(b.value),
                "transforms": transforms(b.value),
                "offset": b.offset,
                "bytes": b.layout.nbytes,
            }
            for b in sorted(plan.buffers.values(), key=lambda b: b.offset)
        ],
        "barriers": [
            {
                "barrier": name(b.value),
                "count": b.count,
                "offset": b.offset,
                "arrivals declared": b.info.num_arrivals,
                "hardware arrivals a phase": b.expected,
            }
            for b in sorted(plan.barriers.values(), key=lambda b: b.offset)
        ],
        "named_barriers": [
            {"barrier": name(b.value), "ids": f"{b.id} to {b.id + b.count - 1}", "threads": b.threads}
            for b in sorted(plan.named_barriers.values(), key=lambda b: b.id)
        ],
        "tmem": [
            {"buffer": name(b.value), "type": type_of(b.value), "column": b.column, "columns": b.columns}
            for b in sorted(plan.tmem.values(), key=lambda b: b.column)
        ],
        "maps": [
            {
                "tensor map": i,
                "of": inputs[m.input],
                "dtype": m.dtype,
                "box, innermost first": " x ".join(map(str, m.box)),
                "axes": ", ".join(f"{d.axis}" + (f" by {d.step}" if d.step != 1 else "") for d in m.dims),
                "swizzle": m.swizzle,
            }
            for i, m in enumerate(plan.maps)
        ],
        "parameters": [
            *(f"map {i}" for i in range(len(plan.maps))),
            *(f"address of {inputs[i]}" for i in plan.pointers),
            *(f"multicast address of {inputs[i]}" for i in plan.multicast),
            *(f"extent of {inputs[d.input]} axis {d.axis}" for d in plan.dims),
        ],
        "notes": list(plan.notes),
    }


def _role_rows(role: Role, outer: str = "") -> list[dict[str, Any]]:
    """A role, then the roles of its warps where it divides them."""
    unit = "warps" if role.scope is Scope.WARP else "warpgroups"
    row = {
        "role": f"{outer} {role.name}".strip(),
        "of": f"{unit} {', '.join(map(str, role.indices))}",
        "registers": role.registers,
        "runs on": "one thread" if role.single_thread else "all threads",
        "register arrays": len(role.layouts),
    }
    return [row, *(found for warps in _warp_roles(role.body) for found in _role_rows(warps, role.name))]


def _warp_roles(block: Block) -> Iterator[Role]:
    for step in block.steps:
        if step.equation.op == "warp_map":
            yield from step.data
        for region in step.regions:
            yield from _warp_roles(region)
