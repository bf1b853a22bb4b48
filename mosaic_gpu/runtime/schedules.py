"""A function that calls kernels, run in the simulator under one schedule after another, its results compared bit for bit.

    rehearsal = Rehearsal(kernel, arrays)
    for schedule in schedules(20):
        rehearsal.outputs(schedule)

JAX's own operations around the kernels run on the CPU, so that a GPU, where there is one, is not used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from ..errors import DeviceMismatch, Race, UnsupportedCall
from ..frontend.kernel import Traced, call_p
from ..frontend.trace import CALLS
from ..plan.model import Plan
from ..program import Program
from ..simulator.machine import simulate
from ..simulator.params import SimulatorParams
from .execute import plan_of, target_arch


def schedules(random: int) -> list[SimulatorParams]:
    """The late and the early order, and `random` orders that seeds from 1 on draw."""
    if random < 0:
        raise ValueError(f"{random} schedules: a number from 0 on")
    return [SimulatorParams(), SimulatorParams(timing="early"), *(SimulatorParams(seed=i + 1) for i in range(random))]


def name_of(schedule: SimulatorParams) -> str:
    """How reports call a schedule: 'late', 'early', 'seed 3'."""
    return f"seed {schedule.seed}" if schedule.seed else schedule.timing


def named(name: str) -> SimulatorParams:
    """The schedule of which `name_of` says this."""
    kind, _, number = name.partition(" ")
    if kind == "seed" and number.isdecimal() and int(number) > 0:
        return SimulatorParams(seed=int(number))
    if name == "late":
        return SimulatorParams()
    if name == "early":
        return SimulatorParams(timing="early")
    raise ValueError(f"schedule {name!r}: late, early, or 'seed N' with N from 1 on")


class Rehearsal:
    """A function traced for some arguments (arrays, or trees of them), its kernels planned.

    programs: those of the kernels that it calls, in order.  arch: what they must be for; None: what each says itself, else
    `default_arch`, else sm_90a.  A kernel's own `interpret` is not heeded.  Raises what the tracer, the planner and the
    emitter refuse; DeviceMismatch for a kernel of another architecture; UnsupportedCall without a kernel.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        arch: str | None = None,
        default_arch: str | None = None,
    ) -> None:
        with _on_cpu():
            given = jax.tree.map(jax.numpy.asarray, tuple(arguments))  # to the dtypes that JAX has switched on
            self._closed, shape = jax.make_jaxpr(lambda *a: function(*a), return_shape=True)(*given)
        self._inputs = [np.asarray(a) for a in jax.tree.leaves(given)]
        self._tree = jax.tree.structure(shape)
        self.programs: list[Program] = list(
            dict.fromkeys(e.params["traced"].program for e in _kernel_calls(self._closed.jaxpr))
        )
        if not self.programs:
            raise UnsupportedCall("the function calls no kernel")
        _refuse_hidden(self._closed.jaxpr)
        self._plans: dict[Program, Plan] = {}
        for p in self.programs:
            if arch is not None and p.params.arch not in (None, arch):
                raise DeviceMismatch(
                    f"kernel {p.name} is for {p.params.arch} (CompilerParams.arch), not for {arch}", p.line
                )
            self._plans[p] = plan_of(p, arch or p.params.arch or default_arch or target_arch(p, None))

    @property
    def plans(self) -> list[Plan]:
        """The plan of each program."""
        return [self._plans[p] for p in self.programs]

    def outputs(self, schedule: SimulatorParams) -> list[Any]:
        """The results, flat, of one run; raises what the simulator finds."""

        def run(traced: Traced, inputs: Sequence[Any]) -> list[Any]:
            return list(simulate(self._plans[traced.program], [np.asarray(x) for x in inputs], schedule))

        with _on_cpu():
            return [np.asarray(x) for x in _evaluate(self._closed.jaxpr, self._closed.consts, self._inputs, run)]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """Results in the structure in which the function returns them."""
        return jax.tree.unflatten(self._tree, outputs)

    def compare(self, first: Sequence[Any], first_name: str, other: Sequence[Any], other_name: str) -> Race | None:
        """A race of timing if two runs have not the same bits."""
        for i, (a, b) in enumerate(zip(first, other, strict=True)):
            if a.tobytes() == b.tobytes():
                continue
            bits = [np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, -1) for x in (a, b)]
            places = np.argwhere((bits[0] != bits[1]).any(axis=-1))
            at = tuple(int(x) for x in places[0])
            return Race(
                f"a race of timing: output {i} is not the same under {first_name} and under {other_name}; "
                f"{len(places)} of {math.prod(a.shape)} elements differ, the first at {list(at)}: {a[at]} and {b[at]}",
                self.programs[-1].line,
                "timing",
            )
        return None


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    try:
        on_cpu: contextlib.AbstractContextManager[Any] = jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the GPU only: then what is around the kernels runs there
        return contextlib.nullcontext()
    return on_cpu


def _nested(equation: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield getattr(value, "jaxpr", value)


def _kernel_calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive is call_p:
            yield equation
            continue
        for inner in _nested(equation):
            yield from _kernel_calls(inner)


def _refuse_hidden(jaxpr: Any) -> None:
    for equation in jaxpr.eqns:
        if equation.primitive is call_p:
            continue
        for inner in _nested(equation):
            if equation.primitive.name in CALLS:
                _refuse_hidden(inner)
                continue
            for call in _kernel_calls(inner):
                program = call.params["traced"].program
                raise UnsupportedCall(
                    f"kernel {program.name} is called inside JAX's {equation.primitive.name}, where it cannot be run under a "
                    "schedule: simulate the kernel itself",
                    program.line,
                )


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], run: Callable[..., list[Any]]) -> list[Any]:
    """What `jax.core.eval_jaxpr` does, with the kernels left to `run`."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, jex.Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs = [read(x) for x in equation.invars]
        inner = equation.params.get(CALLS.get(equation.primitive.name, ""))
        if equation.primitive is call_p:
            results = run(equation.params["traced"], inputs)
        elif inner is not None:
            results = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs, run)
        else:
            found = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
            results = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]
