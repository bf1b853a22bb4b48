"""Which products need a `wgmma.fence` before them (PTX ISA 9.7.15.7.1).

The fence orders what other instructions did to registers before the products behind it.  It also waits until the products
before it have left the tensor core, which then has nothing more of this warpgroup's to do.  So a product has one only if it
is not the first behind another: if anything but the arithmetic of addresses stands between them, which may have touched
its accumulator or its operand's registers, or have been a branch (ptxas wants a fence in the basic block of each batch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..program import Equation, Region, Value
from .roles import DEAD_IF_UNUSED as PURE


def place(equations: Sequence[Equation]) -> tuple[Equation, ...]:
    """A role's equations; each `wgmma` says by its parameter `fence` whether it has one."""
    return _region(equations, _Line())


@dataclasses.dataclass
class _Line:
    """Equations that become instructions in a line."""

    fenced: bool = False  # whether all that was done to registers is ordered before the next product


def _region(equations: Sequence[Equation], line: _Line) -> tuple[Equation, ...]:
    out = []
    for e in equations:
        if e.op == "wgmma":
            e = e.with_(params=(*(p for p in e.params if p[0] != "fence"), ("fence", not line.fenced)))
            line.fenced = True
        elif e.op == "run_scoped":  # opens no basic block
            r = e.regions[0]
            e = e.with_(regions=(Region(r.inputs, _region(r.equations, line), r.outputs),))
            line.fenced = line.fenced and not any(v.shape for v in e.results)
        elif e.regions:
            e = e.with_(regions=tuple(Region(r.inputs, place(r.equations), r.outputs) for r in e.regions))
            line.fenced = False
        elif e.op not in PURE or any(isinstance(v, Value) and v.shape for v in (*e.operands, *e.results)):
            line.fenced = False
        out.append(e)
    return tuple(out)
