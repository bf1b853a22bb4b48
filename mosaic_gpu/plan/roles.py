"""Split by role: one program for each set of warpgroups that take the same outermost branches on their index.

A scalar that is a function of the warpgroup index is tracked as its tuple of values over the indices of a role.  Where all
agree it becomes a literal and branches on it disappear; where they do not, the index stays a run-time value, so that two
compute warpgroups share one copy of their main loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ops.elementwise import ELEMENTWISE, INT4, PURE, WITH_PARAMETERS, numpy_dtype, widened
from ..ops.registry import OPS
from ..program import Equation, Literal, Operand, Region, Value, View, scalars_of, substitute

DEAD_IF_UNUSED = PURE | {
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "expand_dims",
    "iota",
    "constant",
    "broadcasted_iota",
    "axis_index",
    "program_id",
}
DEAD_IF_UNUSED |= {
    "slice",
    "num_programs",
    "dim_size",
    "layout_cast",
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
}
Known = dict[int, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Split:
    """The warpgroups (or warps) `indices` run `equations`."""

    indices: tuple[int, ...]
    equations: tuple[Equation, ...]


def split(
    equations: Sequence[Equation], thread_name: str | None, count: int, index: Value | None = None
) -> list[Split]:
    """Partition 0..count-1 by the outcome of the outermost branches; `index`: a value that is the index (warp_map's input)."""
    everyone = tuple(range(count))
    known: Known = {index.id: everyone} if index is not None else {}
    outcomes: list[tuple[Any, ...]] = []
    _specialize(equations, thread_name, everyone, dict(known), {}, outcomes)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i in everyone:
        groups.setdefault(tuple(o[i] for o in outcomes), []).append(i)
    result = []
    for members in groups.values():
        own: Known = {index.id: tuple(members)} if index is not None else {}
        body, env = _specialize(equations, thread_name, tuple(members), own, {}, None)
        del env
        result.append(Split(tuple(members), _sweep(body)))
    return result


def _specialize(
    equations: Sequence[Equation],
    thread_name: str | None,
    members: tuple[int, ...],
    known: Known,
    env: dict[int, Operand],
    outcomes: list[tuple[Any, ...]] | None,
) -> tuple[list[Equation], dict[int, Operand]]:
    """Fold what is known, inline decided branches.  outcomes: collects undecided outermost branches (None: not outermost)."""
    for i, given in known.items():
        if i not in env and all(isinstance(v, int) for v in given) and len(set(given)) == 1:
            env[i] = Literal(given[0], "int32")
    out: list[Equation] = []
    for e in equations:
        operands = tuple(substitute(o, env) for o in e.operands)
        if e.op == "axis_index" and e.param("axis_name") == thread_name and thread_name is not None:
            known[e.results[0].id] = members
            if len(members) == 1:
                env[e.results[0].id] = Literal(members[0], "int32")
                continue
        elif e.op == "cond":
            values = _values(operands[0], known, len(members))
            if values is not None and len(set(map(int, values))) == 1:
                region = e.regions[min(max(int(values[0]), 0), len(e.regions) - 1)]
                body, env = _specialize(region.equations, thread_name, members, known, env, outcomes)
                out += body
                env.update(zip((r.id for r in e.results), (substitute(o, env) for o in region.outputs), strict=True))
                continue
            if values is not None and outcomes is not None:
                outcomes.append(tuple(int(v) for v in values))
        elif (folded := _fold(e, operands, known, len(members))) is not None:
            known[e.results[0].id] = folded
            if len({v.item() for v in folded}) == 1:
                env[e.results[0].id] = _literal(folded[0], e.results[0].dtype)
                continue
        # A scope at the top is transparent: branches in it are still outermost.
        inner_outcomes = outcomes if e.op == "run_scoped" else None
        if outcomes is not None and inner_outcomes is None:
            continue  # only outcomes are asked for, and there are none inside
        regions = []
        for r in e.regions:
            body, inner = _specialize(r.equations, thread_name, members, known, dict(env), inner_outcomes)
            regions.append(Region(r.inputs, tuple(body), tuple(substitute(o, inner) for o in r.outputs)))
        out.append(e.with_(operands=operands, regions=tuple(regions)))
    return out, env


def _values(o: Operand, known: Known, count: int) -> tuple[Any, ...] | None:
    if isinstance(o, Literal):
        return (np.asarray(o.value, numpy_dtype(o.dtype)),) * count
    if isinstance(o, Value) and o.id in known:
        return tuple(np.asarray(v, numpy_dtype(o.dtype)) for v in known[o.id])
    return None


def _fold(e: Equation, operands: tuple[Operand, ...], known: Known, count: int) -> tuple[Any, ...] | None:
    """Values of a scalar operation whose operands are all known."""
    if len(e.results) != 1 or e.results[0].shape or e.op not in PURE:
        return None
    if e.op in WITH_PARAMETERS and e.op != "convert_element_type":
        return None
    if e.results[0].dtype in ("bfloat16", "float16", *INT4):
        return None
    args: list[tuple[Any, ...]] = []
    for o in operands:
        values = _values(o, known, count)
        if values is None:
            return None
        args.append(values)
    dtype = numpy_dtype(e.results[0].dtype)
    out = []
    for row in zip(*args, strict=True):
        with np.errstate(all="ignore"):
            row = tuple(map(widened, row))
            value = row[0] if e.op == "convert_element_type" else ELEMENTWISE[e.op].numpy(*row)
        out.append(np.asarray(value).astype(dtype))
    return tuple(out)


def _literal(value: Any, dtype: str) -> Literal:
    return Literal(value.item(), dtype)


def _sweep(equations: Sequence[Equation], live: set[int] | None = None) -> tuple[Equation, ...]:
    """Drop pure equations whose results nobody reads."""
    used = set() if live is None else live
    out: list[Equation] = []
    for e in reversed(equations):
        if (e.op in DEAD_IF_UNUSED or (e.op in OPS and OPS[e.op].pure)) and not any(r.id in used for r in e.results):
            continue
        regions = []
        for r in e.regions:
            for o in r.outputs:
                used.update(v.id for v in scalars_of(o))
            regions.append(Region(r.inputs, _sweep(r.equations, used), r.outputs))
        if e.op == "swap" and e.results and e.results[0].id not in used:
            e = e.with_(results=())  # a plain store: nobody wants the old value
        for o in e.operands:
            used.update(v.id for v in scalars_of(o))
        out.append(e.with_(regions=tuple(regions)))
    return tuple(reversed(out))


def uses_arrays(equations: Sequence[Equation]) -> bool:
    """Whether any equation touches a register array."""
    for e in equations:
        if any(v.shape and v.space is None for v in e.results):
            return True
        if any(isinstance(o, Value) and o.shape and not isinstance(o, View) for o in e.operands):
            return True
        if any(uses_arrays(r.equations) for r in e.regions):
            return True
    return False
