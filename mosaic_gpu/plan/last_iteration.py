"""A loop whose last iteration reads an accumulator, in two: all iterations but the last, then that one.

`for k: wgmma; wait(1); if k == last: o = acc` is how a body that is called step by step ends.  Both paths of a branch must
leave it with the same groups in flight (ptxas: C7518), so that each iteration would have to wait for its own product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..program import Equation, Literal, Operand, Region, Value, View, substitute_all, walk

Clone = Callable[[Region, Sequence[Operand], Iterator[int]], Region]


def apart(e: Equation, fresh: Iterator[int], clone: Clone) -> list[Equation] | None:
    """The equations that take the place of a `for` of known bounds that carries nothing; None where it is no such loop."""
    if e.op != "for" or e.results or not all(isinstance(o, Literal) for o in e.operands[:2]):
        return None
    lower, upper = (int(o.value) for o in e.operands[:2] if isinstance(o, Literal))
    body = e.regions[0]
    known = _holds_in_the_last(body, upper - 1)
    if upper <= lower or not any(_decided(x, known) and _reads_an_accumulator(x) for x in body.equations):
        return None
    before = Region(body.inputs, _chosen(body.equations, known, 0))
    last = clone(Region(body.inputs, _chosen(body.equations, known, 1)), (Literal(upper - 1, "int32"),), fresh)
    if upper - lower == 1:
        return list(last.equations)
    bounds = (e.operands[0], Literal(upper - 1, "int32"))
    return [e.with_(operands=bounds, regions=(before,)), *last.equations]


def _holds_in_the_last(body: Region, last: int) -> set[int]:
    """Conditions that say whether this is the last iteration, also as the index of a branch."""
    found: set[int] = set()
    for x in body.equations:
        values = [o.id for o in x.operands if isinstance(o, Value)]
        if x.op == "eq" and values == [body.inputs[0].id]:
            if any(isinstance(o, Literal) and o.value == last for o in x.operands):
                found.add(x.results[0].id)
        elif x.op == "convert_element_type" and values and found.issuperset(values):
            found.add(x.results[0].id)
    return found


def _decided(x: Equation, known: set[int]) -> bool:
    return x.op == "cond" and isinstance(x.operands[0], Value) and x.operands[0].id in known


def _reads_an_accumulator(x: Equation) -> bool:
    return any(
        y.op in ("get", "swap", "load") and isinstance(o := y.operands[0], View) and o.space.kind == "acc"
        for y in walk((x,))
    )


def _chosen(equations: Sequence[Equation], known: set[int], branch: int) -> tuple[Equation, ...]:
    """The equations with one branch in the place of those that are decided."""
    out: list[Equation] = []
    env: dict[int, Operand] = {}
    for x in equations:
        (x,) = substitute_all((x,), env)
        if _decided(x, known):
            region = x.regions[branch]
            out += region.equations
            env.update({r.id: o for r, o in zip(x.results, region.outputs, strict=True)})
        else:
            out.append(x)
    return tuple(out)
