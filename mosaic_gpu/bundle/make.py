"""Compiles cases into a bundle.  Needs NVRTC and no GPU."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..codegen.build import compile_plan
from ..codegen.ptxas_log import parse_log
from ..errors import UnsupportedCall
from ..frontend.kernel import Traced, call_p
from ..runtime.device import planning_for
from ..runtime.execute import launch_spec, plan_of
from ..tune.header import toolchain_here
from .cases import Case, call_of
from .files import Bundle, Entry

MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}  # of H100 and H200, B200, B300


def make(
    cases: Sequence[Case],
    arch: str,
    multiprocessors: int | None = None,
    on_case: Callable[[Case], None] = lambda case: None,
) -> Bundle:
    """Compile cases for an architecture.  multiprocessors: of the GPU, over which persistent kernels spread; on_case: called
    before each.  Raises what the compiler raises, with the case's name in front."""
    count = multiprocessors or MULTIPROCESSORS[arch]
    entries = []
    with planning_for(count, arch):
        for case in cases:
            on_case(case)
            entries.append(entry_of(case, arch))
    kept = ("nvrtc", "mosaic_gpu", "jax")
    versions = {k: v for k, v in toolchain_here().items() if k in kept}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Bundle(arch, count, versions, date, tuple(entries))


def entry_of(case: Case, arch: str) -> Entry:
    """One case, compiled."""
    traced, operands = kernel_call(*call_of(case, arch))
    if traced.program.semaphores:
        raise UnsupportedCall(f"{traced.program.name} has semaphores, which a bundle's launch would not set to zero")
    plan = plan_of(traced.program, arch)
    built = compile_plan(plan)
    usage = parse_log(built.compiled.log, built.compiled.ptx).entry(None)
    return Entry(
        str(case),
        case.to_json(),
        launch_spec(plan),
        operands,
        tuple((tuple(a.shape), str(a.dtype)) for a in traced.out_avals),
        tuple(traced.program.aliases),
        hashlib.sha256(built.source.encode()).hexdigest(),
        usage.registers or 0,
        usage.spill_stores + usage.spill_loads,
    )


def kernel_call(function: Callable[..., Any], types: Sequence[Any]) -> tuple[Traced, tuple[int | np.ndarray, ...]]:
    """The one kernel that a function calls, and its operands: constants as arrays, all others numbered in their order."""
    closed = jax.make_jaxpr(lambda *a: function(*a))(*types)
    found = _calls(closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)))
    if len(found) != 1:
        raise UnsupportedCall(f"a case of a bundle is one kernel; this function calls {len(found)}")
    traced, values = found[0]
    numbers = iter(range(len(values)))
    return traced, tuple(next(numbers) if x is None else np.asarray(x) for x in values)


def _calls(jaxpr: Any, known: dict[Any, Any]) -> list[tuple[Traced, list[Any]]]:
    """Kernel calls with the constants among their operands, None for what is computed or given."""
    found = []
    for e in jaxpr.eqns:
        values = [x.val if hasattr(x, "val") else known.get(x) for x in e.invars]
        if e.primitive is call_p:
            found.append((e.params["traced"], values))
        for inner in e.params.values():
            if hasattr(inner, "jaxpr") and len(inner.jaxpr.invars) == len(values):
                own = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))
                own |= {v: x for v, x in zip(inner.jaxpr.invars, values, strict=True) if x is not None}
                found += _calls(inner.jaxpr, own)
    return found
