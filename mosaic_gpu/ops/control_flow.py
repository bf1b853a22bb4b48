"""Loops, branches and scopes.  Their regions are planned, emitted and simulated by the passes; the rules here only arrange."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..program import Literal
from .barriers import is_arrival_of_warps
from .registry import BOTH, WARP, WARPGROUP, op

SCOPES = (WARPGROUP, WARP)
for_ = op("for", issues_only=True)
while_ = op("while", issues_only=True)
cond = op("cond", issues_only=True)
run_scoped = op("run_scoped", issues_only=True)
warp_map = op("warp_map")


@for_.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    e, body = step.equation, step.regions[0]
    index, *carried = body.inputs
    lower, upper, *init = e.operands
    unroll = e.param("unroll", 1)
    out.define_all(carried, init)
    out.line(f"#pragma unroll{f' {unroll}' if unroll else ''}")
    i = out.name(index)
    with out.block(f"for (int {i} = {out.scalar(lower)}; {i} < {out.scalar(upper)}; ++{i})"):
        out.steps(body.steps)
        out.assign_all(carried, body.outputs)
    out.alias_all(e.results, carried)


@for_.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    e, body = step.equation, step.regions[0]
    index, *carried = body.inputs
    lower, upper, *init = e.operands
    values = [sim.read_as(o, c) for o, c in zip(init, carried, strict=True)]
    for i in range(int(sim.read(lower)), int(sim.read(upper))):
        sim.write(index, i)
        for c, v in zip(carried, values, strict=True):
            sim.write(c, v)
        yield from sim.run(body.steps)
        values = [sim.read_as(o, c) for o, c in zip(body.outputs, carried, strict=True)]
    for r, v in zip(e.results, values, strict=True):
        sim.write(r, v)


@while_.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    e, (condition, body) = step.equation, step.regions
    out.define_all(body.inputs, e.operands)
    with out.block("for (;;)"):
        out.alias_all(condition.inputs, body.inputs)
        out.steps(condition.steps)
        out.line(f"if (!({out.scalar(condition.outputs[0])})) break;")
        out.steps(body.steps)
        out.assign_all(body.inputs, body.outputs)
    out.alias_all(e.results, body.inputs)


@while_.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    e, (condition, body) = step.equation, step.regions
    values = [sim.read_as(o, c) for o, c in zip(e.operands, body.inputs, strict=True)]
    watched = sim.watch(step)
    while True:
        yield from watched.turn(values)
        for c, b, v in zip(condition.inputs, body.inputs, values, strict=True):
            sim.write(c, v)
            sim.write(b, v)
        yield from sim.run(condition.steps)
        if not bool(sim.read(condition.outputs[0])):
            break
        yield from sim.run(body.steps)
        values = [sim.read_as(o, c) for o, c in zip(body.outputs, body.inputs, strict=True)]
    for r, v in zip(e.results, values, strict=True):
        sim.write(r, v)


@cond.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    e = step.equation
    out.declare_all(e.results)
    index = out.scalar(e.operands[0])
    last = len(step.regions) - 1
    if last == 1 and not e.results and not step.regions[0].steps and not out.condition:
        if all(is_arrival_of_warps(out, s) for s in step.regions[1].steps):
            # A branch would end a block of code, across which ptxas moves little; the steady loop of a pipeline has such.
            out.condition = f" && {index} >= 1"
            out.steps(step.regions[1].steps)
            out.condition = ""
            return
    for k in range(last, -1, -1):  # the last branch takes every index from it on, as JAX clamps
        region = step.regions[k]
        test = f"if ({index} >= {k})" if k == last else (f"else if ({index} == {k})" if k else "else")
        if last == 1 and k == 0 and not region.steps and not e.results:
            continue
        with out.block(test):
            out.steps(region.steps)
            out.assign_all(e.results, region.outputs)


@cond.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    e = step.equation
    index = min(max(int(sim.read(e.operands[0])), 0), len(step.regions) - 1)
    region = step.regions[index]
    yield from sim.run(region.steps)
    for r, o in zip(e.results, region.outputs, strict=True):
        sim.write(r, sim.read_as(o, r))


@run_scoped.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    e, body = step.equation, step.regions[0]
    for ref in body.inputs:
        if ref.space is not None and ref.space.kind == "acc":
            out.accumulator(ref)
    out.steps(body.steps)
    out.declare_all(e.results)
    out.assign_all(e.results, body.outputs)


@run_scoped.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    e, body = step.equation, step.regions[0]
    for ref in body.inputs:
        sim.allocate(ref)
    yield from sim.run(body.steps)
    for r, o in zip(e.results, body.outputs, strict=True):
        sim.write(r, sim.read_as(o, r))


@warp_map.emit()
def _(out: Any, step: Any) -> None:
    out.warp_roles(step.data)


@warp_map.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    yield from sim.run_warps(step.data)


ZERO = Literal(0, "int32")
