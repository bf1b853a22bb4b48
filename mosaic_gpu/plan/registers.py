"""Arrays that no thread can hold, refused before the compiler works on them for minutes and spills.

Counted is only what stands in registers as a whole: an array that is loaded from GMEM or SMEM (copied or reduced, NVRTC
13.5 spilled it in every kernel tried), what a loop carries, an accumulator.  What is computed from coordinates, repeated, or
loaded from TMEM (256 columns of it compile without a spill) is made piece by piece; the time that unrolled code takes to
compile bounds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ..collecting import kept
from ..errors import Line, MosaicGpuError, RegisterBudgetError, ResourceExceeded
from ..layouts.registers import RegisterLayout
from ..layouts.shared import itemsize
from ..layouts.spread import default_layout
from ..program import Equation, Value, View, walk

MOST_REGISTERS = 255  # of a thread; one of them is the stack pointer
MOST_ELEMENTS = 1024  # of a thread: twice as many take NVRTC half a minute, four times as many minutes
MOST_PADDINGS = 2000  # that are looked at for one that spreads better
LOADS = ("get", "load", "swap", "get_indexed")
WAY_OUT = "Loop over pieces (ref.at[:, plgpu.ds(i * 64, 64)]), or spread the rows over more warpgroups (num_threads)"


def check_registers(
    role: str,
    equations: Sequence[Equation],
    layouts: Mapping[int, RegisterLayout],
    registers: int,
    budget: tuple[str, Line | None] | None,
    failures: list[MosaicGpuError] | None = None,
) -> None:
    """Refuse arrays of a role that do not fit its threads.

    registers: what a thread of the role has.  budget: where that number comes from, if from `set_max_registers`, with the line.
    failures: where each goes; None: the first is raised.
    """
    has = f"a thread of {role} has {registers}{f' ({budget[0]})' if budget else ''}, one of them the stack pointer"
    error = RegisterBudgetError if budget else ResourceExceeded
    remedy = f"{WAY_OUT}{', or give the role more registers' if registers < MOST_REGISTERS else ''}"
    for e in walk(tuple(equations)):
        with kept(failures, e.line):
            for v in e.results:
                layout = layouts.get(v.id)
                if layout is not None and layout.registers > MOST_ELEMENTS:
                    raise ResourceExceeded(
                        f"{e.op} makes {_type(v, layouts)} of {layout.registers} elements in each of 128 threads; at most "
                        f"{MOST_ELEMENTS}, since there is code for each. {_padding(v, layout.registers)}{WAY_OUT}",
                        e.line,
                    )
            what, values = _whole_at_once(e, layouts)
            parts = [(v, n) for v in values if (n := registers_of(v, layouts))]
            total = sum(n for _, n in parts)
            if total > registers - 1:
                if len(parts) > 1:
                    what += f" ({', '.join(f'{_type(v, layouts)}: {n}' for v, n in parts)})"
                else:
                    what += f" {_type(parts[0][0], layouts)}"
                arrays = [v for v, _ in parts if v.id in layouts]
                worst = max(arrays, key=lambda v: layouts[v.id].registers, default=None)
                pad = _padding(worst, layouts[worst.id].registers) if worst is not None else ""
                raise error(f"{what} takes {total} registers in each of 128 threads; {has}. {pad}{remedy}", e.line)


def _padding(v: Value, registers: int) -> str:
    """What to say of extents that 128 threads cannot share, so that each holds far more than its part."""
    options = [{n, *(-(-n // m) * m for m in (8, 16, 32, 64, 128))} if n > 1 else {n} for n in v.shape]
    if math.prod(map(len, options)) > MOST_PADDINGS:
        options = [{n, -(-n // 16) * 16} if n > 1 else {n} for n in v.shape]
    best = min(
        itertools.islice(itertools.product(*map(sorted, options)), MOST_PADDINGS),
        key=lambda shape: (default_layout(shape, itemsize(v.dtype)).registers, math.prod(shape)),
    )
    parts = default_layout(best, itemsize(v.dtype)).registers
    if 2 * parts > registers:
        return ""
    return (
        f"Threads share powers of two of each extent, here so few that each holds {registers} of {math.prod(v.shape)} elements: "
        f"pad to {list(best)} (jnp.pad), {parts} in each. "
    )


def _whole_at_once(e: Equation, layouts: Mapping[int, RegisterLayout]) -> tuple[str, Sequence[Value]]:
    """What an equation makes stand in registers together, and how to call that."""
    if e.op in LOADS:
        return e.op, e.results
    if e.op == "run_scoped":  # several accumulators need not live at the same time
        accumulators = [v for v in e.regions[0].inputs if registers_of(v, layouts)]
        return "the accumulator", sorted(accumulators, key=lambda v: registers_of(v, layouts))[-1:]
    if e.op in ("for", "while"):
        return "what the loop carries", (*e.results, *_accumulated(e))
    return "", ()


def registers_of(v: Value, layouts: Mapping[int, RegisterLayout]) -> int:
    """Registers of 32 bits that a thread needs for an array at least; 0 for what lives elsewhere, or in one scalar."""
    if v.space is not None:
        return math.prod(v.shape) * itemsize(v.dtype) // (4 * 128) if v.space.kind == "acc" else 0
    layout = layouts.get(v.id)
    if layout is None:
        return 0
    bits = 1 if v.dtype == "bool" else 8 * itemsize(v.dtype)
    return -(-layout.registers * bits // 32)


def _accumulated(loop: Equation) -> Iterator[Value]:
    """Accumulators of outside the loop that every step adds to."""
    inside = list(walk(tuple(e for r in loop.regions for e in r.equations)))
    own = {v.id for e in inside if e.op == "run_scoped" for v in e.regions[0].inputs}
    found: dict[int, Value] = {}
    for e in inside:
        if e.op == "wgmma" and e.param("init", "add") != "zero" and isinstance(e.operands[0], View):
            found.setdefault(e.operands[0].ref.id, e.operands[0].ref)
    yield from (v for i, v in found.items() if i not in own)


def _type(v: Value, layouts: Mapping[int, RegisterLayout]) -> str:
    layout = f" in layout {layouts[v.id].name}" if v.id in layouts else ""
    return f"{v.name + ' ' if v.name else ''}{v.dtype}{list(v.shape)}{layout}"
