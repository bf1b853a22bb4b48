"""`mosaic-gpu explain-call`: who gets what in which order in a `pallas_call`, for given numbers of each."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import AsJson, Refusal, print_json


def orders(grid: int, dynamic: int, prefetch: int, inputs: int, outputs: int, scratch: int) -> dict[str, list[str]]:
    """Names of the arguments of the primitive, of the kernel's function and of an index map, in order."""
    bounds = [f"bound{i}" for i in range(dynamic)]
    fetched = _numbered("prefetch", prefetch)
    ins, outs, own = _numbered("input", inputs), _numbered("output", outputs), _numbered("scratch", scratch)
    return {
        "primitive": [*bounds, *fetched, *ins],
        "call": [*fetched, *ins],
        "kernel": [f"{n}_ref" for n in (*fetched, *ins, *outs, *own)],
        "index_map": [*(f"i{k}" for k in range(grid)), *(f"{n}_ref" for n in fetched)],
        "in_specs": ins,
        "out_specs": outs,
    }


def _numbered(what: str, count: int) -> list[str]:
    return [f"{what}{i}" for i in range(count)]


MEANING = {
    "call": "what you call the result of pallas_call with",
    "primitive": "what the jaxpr shows: sizes of the grid that only the device knows come first",
    "kernel": "your function's parameters; it returns None",
    "index_map": "each BlockSpec's index map: where in the grid, then the prefetch operands' Refs",
    "in_specs": "one BlockSpec for each, not for prefetch operands",
    "out_specs": "one BlockSpec for each; alone without a tuple",
}


def explain_call(
    grid: Annotated[int, typer.Option(min=0, help="Axes of the grid.")] = 1,
    dynamic: Annotated[int, typer.Option(min=0, help="Of them, how many sizes only the device knows.")] = 0,
    prefetch: Annotated[int, typer.Option(min=0, help="Scalar-prefetch operands.")] = 0,
    inputs: Annotated[int, typer.Option(min=0, help="Inputs.")] = 1,
    outputs: Annotated[int, typer.Option(min=0, help="Outputs.")] = 1,
    scratch: Annotated[int, typer.Option(min=0, help="Scratch buffers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the orders of arguments in a pallas_call: of the call, the kernel, index maps and the primitive."""
    if dynamic > grid:
        raise Refusal(f"--dynamic {dynamic}: the grid has {grid} axes")
    found = orders(grid, dynamic, prefetch, inputs, outputs, scratch)
    if as_json:
        print_json(found)
        return
    for name in ("call", "kernel", "index_map", "in_specs", "out_specs", "primitive"):
        brackets = "[]" if name.endswith("specs") else "()"
        print(f"{name:>10}{brackets[0]}{', '.join(found[name])}{brackets[1]}")
        print(f"{'':>10} {MEANING[name]}")
    if prefetch:
        print(f"{'':>10} the first {prefetch} arguments are num_scalar_prefetch={prefetch} of PrefetchScalarGridSpec")
