"""The ordinary accesses of a plan to shared memory, and the bank conflicts of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..errors import Line
from ..layouts.conflicts import planned_cost
from ..program import Value
from .model import Block, Plan, Role


@dataclasses.dataclass(frozen=True)
class SharedAccess:
    """One load or store of an array: what a warpgroup takes for it each time.

    wavefronts: of which each gives one word from each of the 32 banks; ideal: as few as the same bytes can take.
    """

    line: Line | None
    role: str
    op: str
    buffer: str
    layout: str
    instructions: int
    wavefronts: int
    ideal: int

    @property
    def factor(self) -> float:
        return self.wavefronts / self.ideal if self.ideal else 1.0

    def as_dict(self) -> dict[str, Any]:
        line = {"file": self.line.file, "line": self.line.number} if self.line else {"file": None, "line": None}
        rest = {k: v for k, v in dataclasses.asdict(self).items() if k != "line"}
        return {**line, **rest, "factor": self.factor}


def shared_accesses(plan: Plan) -> list[SharedAccess]:
    """Ordinary loads and stores of arrays in the block's own shared memory, in program order by role.

    Left out: scalars, which take one of everything; arrays whose elements are all equal; index arrays, other blocks' memory and
    exchanges between threads, whose addresses are no layout's; operands that a product reads where they lie.
    """
    return [a for role in plan.roles for a in _of(plan, role, role.body)]


def _of(plan: Plan, role: Role, block: Block) -> Iterator[SharedAccess]:
    for step in block.steps:
        e = step.equation
        if (
            e.op in ("get", "load", "swap")
            and step.data.kind == "smem"
            and not step.data.scalar
            and not step.data.view.peer
        ):
            view, buffer = step.data.view, plan.buffers[step.data.view.ref.id]
            for op, value in (("load", e.results[0] if e.results else None), ("store", e.operands[1:])):
                moved = value[0] if isinstance(value, tuple) and value else value
                layout = role.layouts.get(moved.id) if isinstance(moved, Value) else None
                if layout is not None:
                    cost = planned_cost(view, layout, buffer.layout, op == "store")
                    name = buffer.value.name or f"%{buffer.value.id}"
                    yield SharedAccess(e.line, role.name, op, name, layout.name, *cost)
        for region in step.regions:
            yield from _of(plan, role, region)
