"""What `kernel` is given: its options checked one by one, and whether a body takes as many Refs as it will get."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import arguments
from ..errors import UnsupportedCall
from ..program import OF_PALLAS_CALLS, CompilerParams
from ..simulator.params import SimulatorParams
from .memory import RefType
from .trace import function_line

SCRATCH = "a sequence or a mapping of memory spaces such as [SMEM((128, 64), dtype), Barrier()]"


def checked_options(
    *,
    out_type: Any,
    scratch_types: Any,
    compiler_params: Any,
    grid: Any,
    grid_names: Any,
    cluster: Any,
    cluster_names: Any,
    num_threads: Any,
    thread_name: Any,
    interpret: Any,
    name: Any,
    debug: Any,
    input_output_aliases: Any = None,
) -> dict[str, Any]:
    """The options of `kernel`, each of its kind; a TypeError or ValueError names the one that is not."""
    where = "kernel"
    for leaf in jax.tree.leaves(out_type, is_leaf=lambda x: x is None):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            arguments.refuse(where, "out_type", leaf, "jax.ShapeDtypeStruct(shape, dtype) or a tree of them")
    scratch_types = () if scratch_types is None else scratch_types
    if isinstance(scratch_types, str) or not isinstance(scratch_types, (Sequence, Mapping)):
        arguments.refuse(where, "scratch_types", scratch_types, SCRATCH)
    for leaf in jax.tree.leaves(scratch_types, is_leaf=lambda x: x is None or isinstance(x, RefType)):
        if not isinstance(leaf, RefType):
            arguments.refuse(where, "scratch_types", leaf, SCRATCH)
        if leaf.space.kind in ("acc", "gmem"):
            raise UnsupportedCall(
                f"scratch_types cannot hold {leaf.space.kind.upper()}: an accumulator belongs to one warpgroup, use run_scoped"
            )
    if compiler_params is not None and not isinstance(compiler_params, CompilerParams):
        arguments.refuse(where, "compiler_params", compiler_params, "plgpu.CompilerParams(...) or None")
    if compiler_params is not None:
        for field in OF_PALLAS_CALLS:
            given = getattr(compiler_params, field)
            if given != getattr(CompilerParams(), field):
                raise ValueError(
                    f"kernel: compiler_params has {field}={given}, which is for pallas_call; a kernel's grid is its blocks, "
                    "num_threads its warpgroups, and emit_pipeline has the number of steps"
                )
    if interpret is not None and not isinstance(interpret, SimulatorParams):
        if not isinstance(interpret, bool):
            arguments.refuse(where, "interpret", interpret, "True, False, None or plgpu.SimulatorParams(...)")
    for what, text in (("thread_name", thread_name), ("name", name)):
        if text is not None and not isinstance(text, str):
            arguments.refuse(where, what, text, "a name or None")
    options = dict(
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=compiler_params or CompilerParams(),
        grid=arguments.whole_numbers(where, "grid", grid, 0),
        grid_names=arguments.names(where, "grid_names", grid_names),
        cluster=arguments.whole_numbers(where, "cluster", cluster, 1),
        cluster_names=arguments.names(where, "cluster_names", cluster_names),
        num_threads=None if num_threads is None else arguments.whole(where, "num_threads", num_threads, 1),
        thread_name=thread_name,
        interpret=interpret,
        name=name,
        debug=arguments.flag(where, "debug", debug),
        aliases=_aliases(where, input_output_aliases),
    )
    _check_axes(options)
    return options


def _aliases(where: str, given: Any) -> tuple[tuple[int, int], ...]:
    """(input, output) pairs."""
    name = "input_output_aliases"
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        arguments.refuse(where, name, given, "a dict from inputs to outputs by number, {2: 0}, or None")
    pairs = tuple(
        sorted((arguments.whole(where, name, i, 0), arguments.whole(where, name, o, 0)) for i, o in given.items())
    )
    if len({o for _, o in pairs}) < len(pairs):
        raise ValueError(f"kernel: {name}={dict(pairs)}: an output takes the place of one input only")
    return pairs


def check_aliases(name: str, pairs: Sequence[tuple[int, int]], inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """TypeError where an input and the output in its place are not of one shape and dtype."""
    for i, o in pairs:
        if i >= len(inputs) or o >= len(outputs):
            raise TypeError(
                f"kernel {name}: input_output_aliases has input {i} -> output {o}; it has {_count(len(inputs), 'input')} and "
                f"{_count(len(outputs), 'output')}"
            )
        a, b = inputs[i], outputs[o]
        if (tuple(a.shape), a.dtype) != (tuple(b.shape), b.dtype):
            raise TypeError(
                f"kernel {name}: input_output_aliases puts output {o}, {b.dtype}{list(b.shape)}, in the place of input {i}, "
                f"{a.dtype}{list(a.shape)}: they must be alike"
            )


def _check_axes(o: Mapping[str, Any]) -> None:
    for sizes, names, what in ((o["grid"], o["grid_names"], "grid"), (o["cluster"], o["cluster_names"], "cluster")):
        if names and len(names) != len(sizes):
            raise ValueError(f"kernel: {what}={sizes} has {len(sizes)} axes, {what}_names={names} has {len(names)}")
    if o["cluster"] and len(o["cluster_names"]) != len(o["cluster"]):
        raise ValueError(f"kernel: cluster={o['cluster']} needs cluster_names")
    if (o["num_threads"] is None) != (o["thread_name"] is None):
        raise ValueError("kernel: num_threads and thread_name go together")
    if math.prod(o["cluster"]) > 16 or len(o["cluster"]) > 3:
        raise UnsupportedCall(
            f"cluster={o['cluster']}: a cluster has at most 16 blocks (8 is portable) in at most 3 axes"
        )
    all_names = [*o["grid_names"], *o["cluster_names"], *([o["thread_name"]] if o["thread_name"] else [])]
    if len(set(all_names)) != len(all_names):
        raise ValueError(f"kernel: axis names must differ: {all_names}")


def inputs_of(body: Callable[..., Any], outputs: int, scratch: Any) -> inspect.Signature:
    """The signature of the kernel that a body makes: its first parameters, without those of outputs and scratch."""
    anything = inspect.Signature([inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)])
    try:
        parameters = _refs_of(body, scratch)
    except (TypeError, ValueError):  # e.g. a builtin
        return anything
    if parameters is None:
        return anything
    count = len(parameters) - outputs - (0 if isinstance(scratch, Mapping) else len(scratch))
    return inspect.Signature([p.replace(kind=p.POSITIONAL_ONLY) for p in parameters[: max(count, 0)]])


def _refs_of(body: Callable[..., Any], scratch: Any) -> list[inspect.Parameter] | None:
    """The parameters that take Refs by position; None where their number is not fixed."""
    own = list(inspect.signature(body).parameters.values())
    named = set(scratch) if isinstance(scratch, Mapping) else set()
    refs = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in named]
    fixed = all(p.kind is not p.VAR_POSITIONAL for p in own) and all(p.default is p.empty for p in refs)
    return refs if fixed else None


def check_number_of_refs(
    name: str,
    body: Callable[..., Any],
    inputs: int,
    outputs: int,
    scratch: Any,
    called: tuple[str, str, str] = ("kernel", "out_type", "scratch_types"),
) -> None:
    """TypeError where the body cannot be called with so many Refs; it says which of them come from where.

    called: the function that makes the kernel and its arguments for outputs and scratch.
    """
    function, out_type, scratch_types = called
    positional, named = ((), scratch) if isinstance(scratch, Mapping) else (tuple(scratch), {})
    given = inputs + outputs + len(positional)
    try:
        signature = inspect.signature(body)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * given, **dict.fromkeys(named))
    except TypeError as error:
        parts = [_count(inputs, "input"), f"{_count(outputs, 'output')} ({out_type})"]
        parts.append(f"{_count(len(scratch), 'scratch buffer')} ({scratch_types})")
        expected = inputs_of(body, outputs, scratch).parameters
        wanted = f"{_count(len(expected), 'input')}{f' ({names})' if (names := ', '.join(expected)) else ''}"
        if any(p.kind is p.VAR_POSITIONAL for p in expected.values()):
            wanted = "more inputs"
        places = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        wrong = f"{error}"
        if given > len(places) and "too many" in wrong:  # Python's words for it
            wrong = f"it takes {_count(len(places), 'positional argument')} but {given} were given"
        raise TypeError(
            f"{function} {name}({', '.join(signature.parameters)}) gets {parts[0]}, {parts[1]} and {parts[2]}: {wrong}. "
            f"Call it with {wanted}, or change {out_type} or {scratch_types}\n  at {function_line(body)}"
        ) from None


def _count(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
