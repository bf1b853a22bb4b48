"""Arrivals on mbarriers: the lines that make them, and waits that no run could end, refused before anything runs.

The arrivals of the whole kernel on each barrier are bounded from above: a line outside of loops arrives once for each warpgroup
(warp) of its role, in a loop with fixed bounds so often for each iteration, in any other loop any number of times; what is in a
branch may happen; where the slot is known at run time only it may be each; in a cluster every block may mean every other.  Where
even that is less than `num_arrivals`, no phase ever completes.  All else (order, phases, circles) the simulator finds as it runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from ..errors import BarrierNeverCompletes, Line
from ..ops.barriers import BarrierUse
from ..program import Literal
from .model import BarrierArray, Plan, Role, Step

# What arrives, and on which barrier: one of `num_arrivals` each time.
ARRIVING: dict[str, Callable[[Step], BarrierUse | None]] = {
    "barrier_arrive": lambda s: s.data,
    "copy_gmem_to_smem": lambda s: s.data[1],
    "async_store_smem": lambda s: s.data.barrier,
    "try_cluster_cancel": lambda s: s.data[1],
    "tcgen05_commit_arrive": lambda s: s.data.barrier,
    "tcgen05_mma": lambda s: s.data.commit.barrier if s.data.commit is not None else None,
}
WAYS = (
    "barrier_arrive; a copy to shared memory, async_store_smem or try_cluster_cancel with this barrier; tcgen05_mma with it, or "
    "tcgen05_commit_arrive"
)
SHOWN = 6  # lines, of one barrier


@dataclasses.dataclass(frozen=True)
class Site:
    """A line that arrives, or waits.  most: how often at most, in a block and for all warpgroups of the role."""

    role: str
    op: str
    line: Line | None
    use: BarrierUse
    most: float

    def may_be(self, slot: int) -> bool:
        return not self.use.slot.static or self.use.slot.const == slot

    def __str__(self) -> str:
        times = "once" if self.most == 1 else f"{self.most:g} times"
        return f"{self.op} at {self.line} ({self.role}), {times}"


def check_arrivals(plan: Plan) -> None:
    """BarrierNeverCompletes where a line waits on an mbarrier on which the kernel arrives too seldom for a single phase."""
    sites = [s for role in plan.roles for s in _sites(role.name, role.body.steps, len(role.indices))]
    blocks = math.prod(plan.program.cluster)
    for wait in (s for s in sites if s.op == "barrier_wait"):
        array = plan.barriers[wait.use.array]
        arriving = [s for s in sites if s.op != "barrier_wait" and s.use.array == wait.use.array]
        slots = [slot for slot in range(array.count) if wait.may_be(slot)]
        most = max((blocks * sum(s.most for s in arriving if s.may_be(slot)) for slot in slots), default=math.inf)
        if most < array.info.num_arrivals:
            raise BarrierNeverCompletes(_message(wait, array, arriving, most, blocks), wait.line)


def _message(wait: Site, array: BarrierArray, arriving: Sequence[Site], most: float, blocks: int) -> str:
    name = array.value.name or f"%{array.value.id}"
    if array.count > 1:
        name += f"[{wait.use.slot.const}]" if wait.use.slot.static else f" (any of {array.count})"
    needed = array.info.num_arrivals
    head = f"barrier_wait in {wait.role} could never end: barrier {name} takes num_arrivals={needed} for a phase, and "
    if not arriving:
        return f"{head}no line of the kernel arrives on it. Add the arrival ({WAYS}), or leave the wait out"
    counted = [s for s in arriving if not wait.use.slot.static or s.may_be(wait.use.slot.const)]
    lines = [f"  {s}" for s in counted[:SHOWN]] + [f"  and {len(counted) - SHOWN} lines more"] * (len(counted) > SHOWN)
    in_all = f"in all of the kernel, in {blocks} blocks of a cluster" if blocks > 1 else "in all of the kernel"
    rest = [f"  {s}: another slot" for s in arriving if s not in counted][:SHOWN]
    remedy = f"Say num_arrivals={most:g}, or add" if most else "Add"
    return "\n".join(
        [
            f"{head}there are at most {most:g} arrivals on it {in_all}:",
            *lines,
            *rest,
            f"{remedy} what is missing ({WAYS})",
        ]
    )


def _sites(role: str, steps: Sequence[Step], times: float) -> Iterator[Site]:
    """Arrivals and waits of steps that run at most so many times."""
    for s in steps:
        e = s.equation
        use = s.data if e.op == "barrier_wait" else ARRIVING[e.op](s) if e.op in ARRIVING else None
        if use is not None and times:
            yield Site(role, e.op, e.line, use, times)
        if e.op == "warp_map":
            warps: tuple[Role, ...] = s.data
            for r in warps:
                yield from _sites(f"{role}, {r.name}", r.body.steps, times * len(r.indices))
        inside = times * _iterations(s) if times else 0  # no number times infinity is none
        for region in s.regions:
            yield from _sites(role, region.steps, inside)


def _iterations(s: Step) -> float:
    """How often a step's regions run, at most."""
    if s.equation.op == "while":
        return math.inf
    if s.equation.op != "for":
        return 1
    first, end = s.equation.operands[:2]
    if isinstance(first, Literal) and isinstance(end, Literal):
        return max(int(end.value) - int(first.value), 0)
    return math.inf
