"""Nothing that threads exchange leaves the role's scratch; the check, which `compiled` makes of every kernel, finds what does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emit_moves import MoveEmitter
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.plan.build import build_plan
from tests.scratch_bounds import past_scratch

ROWS = (5, 12)
WITH_NOTHING: dict[str, Callable[[Any], Any]] = {  # operands of no elements beside some that have them
    "concatenate": lambda x: jnp.concatenate([x[:1], x[:0], x[::-1]]),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:0], (1, 2)),
    "scatter": lambda x: x.at[jnp.zeros((0,), jnp.int32)].add(x[:0]),
    "product": lambda x: (x[:, :0] @ x[:0]) + x[:, :1],
    "scan": lambda x: lax.associative_scan(lambda a, b: a * b[:, ::-1], x),
}


def plan_of(f: Callable[[Any], Any]) -> Any:
    x = jax.ShapeDtypeStruct(ROWS, np.float32)
    out = jax.eval_shape(f, x)
    return build_plan(plgpu.kernel(lambda x, o: o.__setitem__(..., f(x[...])), out).program(x), "sm_90a")


@pytest.mark.parametrize("name", WITH_NOTHING)
def test_arrays_of_no_elements_have_no_place(name: str) -> None:
    plan = plan_of(WITH_NOTHING[name])
    count, wrong = past_scratch(plan, emit(plan))
    assert wrong == []
    assert count > 20 or name in ("scatter", "product")


def written_whatever_it_is(self: Any, o: Any, positions: Any, base: int = 0) -> None:
    for i, p in enumerate(positions):
        self.write_place(o.dtype, p, self.element(o, i), base)


def test_a_place_past_the_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(WITH_NOTHING["concatenate"])
    right = emit(plan)
    count, wrong = past_scratch(plan, right)
    assert count > 0 and wrong == []
    with (
        monkeypatch.context() as patch
    ):  # as it was once: an array of nothing written where its registers would have gone
        patch.setattr(MoveEmitter, "to_scratch", written_whatever_it_is)
        assert past_scratch(plan, emit(plan))[1]
    usual = MoveEmitter.positions
    monkeypatch.setattr(MoveEmitter, "positions", lambda *a: [f"{p} + 3" for p in usual(*a)])
    count_of_late, wrong = past_scratch(plan, emit(plan))
    assert count_of_late == count and wrong
