"""Whether what an emitted kernel exchanges through its scratch stays inside of it, by computing the addresses of every thread.

The simulator moves whole arrays there, so that it cannot see what the emitted text does: a place past the end is an error
on the GPU only, and takes the process with it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.text import C_TYPES, stored_type
from mosaic_gpu.layouts.shared import itemsize
from mosaic_gpu.ops.registry import Scope
from mosaic_gpu.plan.model import Plan, Role

BYTES = {stored_type(t): itemsize(t) for t in C_TYPES}
DECLARED = re.compile(r"^\s*const int (\w+) = ([^;?]+);")
PLACE = re.compile(r"\(\((?:const )?([\w ]+?)\*\)\(shared \+ ([^)\[\]]*(?:\([^)]*\)[^)\[\]]*)*)\)\)\[([^\[\]]+)\]")


def value(text: str, names: dict[str, Any]) -> Any:
    """Of a C expression of integers for all 128 threads; None where it has other names in it."""
    text = text.replace("here(", "(").replace("/", "//")
    if re.search(r"[^\w\s+\-*/%()]", text) or not set(re.findall(r"[A-Za-z_]\w*", text)) <= set(names):
        return None
    return eval(text, {"__builtins__": {}}, names)


def roles_of(plan: Plan, text: str) -> list[tuple[Role, list[str]]]:
    """The text of each role that exchanges anything."""
    named = {r.name: r for r in plan.roles}
    parts = re.split(r"// role (\w+)", text)
    found = [(named.get(name), part.splitlines()) for name, part in zip(parts[1::2], parts[2::2], strict=True)]
    return [(r, lines) for r, lines in found if r is not None and r.scratch_bytes and r.scope is Scope.WARPGROUP]


def past_scratch(plan: Plan, source: str) -> tuple[int, list[str]]:
    """How many accesses without a condition were computed, and the lines of those that leave their role's scratch."""
    count, wrong = 0, []
    for role, lines in roles_of(plan, body_of(source)):
        thread = np.arange(128)
        for k, wg in enumerate(role.indices):
            first = role.scratch + k * role.scratch_bytes
            names: dict[str, Any] = {"lane": thread % 32, "tid": thread, "warp": thread // 32, "wg": wg}
            inside = 0  # braces open since the last condition
            for line in lines:
                if inside or "if (" in line or "else" in line:
                    inside = max(inside + line.count("{") - line.count("}"), 0)
                    continue
                declared = DECLARED.match(line)
                if declared and declared[1] not in ("lane", "tid", "warp", "wg"):
                    names.pop(declared[1], None)
                    at = value(declared[2], names)
                    if at is not None:
                        names[declared[1]] = at
                    continue
                if "?" in line:
                    continue
                for kind, start, index in PLACE.findall(line):
                    place, number = value(start, names), value(index, names)
                    if place is None or number is None or kind not in BYTES:
                        continue
                    at = place + number * BYTES[kind]
                    count += 1
                    if np.min(at) < first or np.max(at) + BYTES[kind] > first + role.scratch_bytes:
                        wrong.append(line.strip())
    return count, wrong
