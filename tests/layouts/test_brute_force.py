"""Layout inference against a solver that tries every assignment: programs of up to six values, with and without a layout."""

from __future__ import annotations

import itertools
import time
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.errors import LayoutConflict
from mosaic_gpu.layouts.inference import infer
from mosaic_gpu.layouts.registers import RegisterLayout
from mosaic_gpu.program import Equation, Value

SHAPE = (128, 64)
NAMES = (Layout.WGMMA, Layout.TCGEN05_TMEM_NATIVE, Layout.WG_STRIDED)
MOST = 6

# A program: for each value how it comes to be, by numbers of earlier ones.
VALUES = st.one_of(
    st.tuples(st.just("load"), st.sampled_from((None, *NAMES))),
    st.tuples(st.just("neg"), st.integers(0, MOST)),
    st.tuples(st.just("add"), st.integers(0, MOST), st.integers(0, MOST)),
    st.tuples(st.just("select"), st.integers(0, MOST), st.integers(0, MOST)),
    st.tuples(st.just("cast"), st.integers(0, MOST), st.sampled_from(NAMES)),
    st.tuples(st.just("rev"), st.integers(0, MOST)),
)
PROGRAMS = st.lists(VALUES, min_size=1, max_size=MOST)


def traced(steps: list[tuple[Any, ...]], program: Any, array: Any) -> tuple[Equation, ...]:
    """The equations of the kernel that loads, computes and stores each value once."""

    def body(x: Any, *outs: Any) -> None:
        values: list[Any] = []
        for step, out in zip(steps, outs, strict=True):
            of = [values[i % len(values)] for i in step[1:] if isinstance(i, int)] if values else []
            if step[0] == "load" or not of:
                v = plgpu.load(x, layout=step[1] if step[0] == "load" else None)
            elif step[0] == "neg":
                v = -of[0]
            elif step[0] == "add":
                v = of[0] + of[1]
            elif step[0] == "select":
                v = jnp.where(of[0] > of[1], of[0], of[1])
            elif step[0] == "cast":
                v = plgpu.layout_cast(of[0], step[2])
            else:
                v = of[0][::-1]
            values.append(v)
            out[...] = v

    found: tuple[Equation, ...] = program(body, array(*SHAPE), out=[array(*SHAPE) for _ in steps]).body
    return found


FREE = ("rev", "swap", "layout_cast", "load", "get")  # whose operand and result may lie differently


def satisfies(equations: tuple[Equation, ...], chosen: dict[int, Layout]) -> bool:
    """Whether an assignment of layouts to all arrays is one: what is combined element by element lies alike, pins hold."""
    for e in equations:
        arrays = [v.id for v in (*e.operands, *e.results) if isinstance(v, Value) and v.shape and v.space is None]
        if e.op not in FREE and len({chosen[i] for i in arrays}) > 1:
            return False
        if e.op in ("load", "layout_cast") and e.param("layout") not in (None, chosen[e.results[0].id]):
            return False
    return True


def exists(equations: tuple[Equation, ...]) -> bool:
    """Tries all.  A comparison's bools are where its operands are, so they are not tried on their own."""
    results = [v for e in equations for v in e.results]
    own = [v.id for v in results if v.dtype != "bool"]
    tied = {e.results[0].id: e.operands[0] for e in equations if e.results and e.results[0].dtype == "bool"}
    for layouts in itertools.product(NAMES, repeat=len(own)):
        chosen = dict(zip(own, layouts, strict=True))
        chosen |= {i: chosen[o.id] for i, o in tied.items() if isinstance(o, Value)}
        if satisfies(equations, chosen):
            return True
    return False


def compared(steps: list[tuple[Any, ...]], program: Any, array: Any) -> None:
    equations = traced(steps, program, array)
    start = time.process_time()
    found: dict[int, RegisterLayout] | None
    try:
        found = infer(equations)
    except LayoutConflict as error:
        assert error.line is not None and error.line.file == __file__
        found = None
    assert time.process_time() - start < 0.05
    assert (found is not None) == exists(equations)
    if found is not None:  # and it is a solution itself
        for e in equations:
            arrays = [v.id for v in (*e.operands, *e.results) if isinstance(v, Value) and v.shape and v.space is None]
            if e.op not in FREE:
                assert all(found[i].same_map(found[arrays[0]]) for i in arrays)
            if e.op in ("load", "layout_cast") and e.param("layout") is not None:
                assert found[e.results[0].id].same_map(e.param("layout").of(SHAPE))


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=60, deadline=None, suppress_health_check=CHECKS, derandomize=True)
@given(steps=PROGRAMS)
def test_agrees_with_brute_force(steps, program, array):
    compared(steps, program, array)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=CHECKS)
@given(steps=PROGRAMS)
def test_five_hundred(steps, program, array):
    compared(steps, program, array)


def test_both_answers_occur(program, array):
    """The comparison is of programs with a layout and of some without."""
    one = [("load", Layout.WGMMA), ("load", Layout.WG_STRIDED)]
    assert not exists(traced([*one, ("add", 0, 1)], program, array))
    assert exists(traced([*one, ("cast", 0, Layout.WG_STRIDED), ("add", 1, 2)], program, array))
    assert not exists(traced([*one, ("select", 0, 1)], program, array))
    assert exists(traced([*one, ("rev", 0), ("add", 1, 2)], program, array))
