"""What leaves its memory is found on the host, where nothing else would stop it; conversions out of range are CUDA's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emit_memory import MemoryEmitter
from mosaic_gpu.codegen.emit_moves import MoveEmitter
from mosaic_gpu.plan.build import build_plan

X = np.arange(5 * 12, dtype=np.float32).reshape(5, 12)


def body(x: Any, o: Any) -> None:
    v = x[...]
    o[...] = jnp.concatenate([v[:1], v[:0], v[::-1]])


def plan() -> Any:
    types = [jax.ShapeDtypeStruct((n, 12), np.float32) for n in (6, 5)]
    return build_plan(plgpu.kernel(body, types[0]).program(types[1]), "sm_90a")


def test_inside(on_host: Any) -> None:
    np.testing.assert_array_equal(on_host(plan(), [X])[0], np.concatenate([X[:1], X[::-1]]))


@pytest.mark.parametrize("shift", ["+ 9", "- 1"])
def test_past_the_ends_of_shared_memory(shift: str, on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = MoveEmitter.positions
    monkeypatch.setattr(MoveEmitter, "positions", lambda *a: [f"{p} {shift}" for p in usual(*a)])
    with pytest.raises(AssertionError, match="shared memory was written outside of its"):
        on_host(plan(), [X])


def test_arrays_of_no_elements(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose registers have no place in the scratch."""

    def everything(self: Any, o: Any, positions: Any, base: int = 0) -> None:
        for i, p in enumerate(positions):
            self.write_place(o.dtype, p, self.element(o, i), base)

    monkeypatch.setattr(MoveEmitter, "to_scratch", everything)
    with pytest.raises(AssertionError, match="shared memory was written outside of its"):
        on_host(plan(), [X])


def test_past_the_end_of_an_array(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that sticks out, without the test that keeps it in."""

    def tile(x: Any, o: Any) -> None:
        rows = plgpu.ds(lax.axis_index("g") * 8, 8)
        o[rows] = x[rows]

    types = jax.ShapeDtypeStruct((5, 12), np.float32)
    found = build_plan(plgpu.kernel(tile, types, grid=(1,), grid_names=("g",)).program(types), "sm_90a")
    np.testing.assert_array_equal(on_host(found, [X])[0], X)
    monkeypatch.setattr(MemoryEmitter, "runtime_dim", lambda self, i, axis: f"n{i}_{axis}" + " + 1" * (axis == 0))
    with pytest.raises(AssertionError, match="global memory was written around array 1"):
        on_host(found, [X])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_floats_out_of_range(dtype: str, agree: Any) -> None:
    x = np.array(
        [np.nan, np.inf, -np.inf, 1e30, -1e30, 2.0**31, -(2.0**31), 2.0**63, 300.7, -5.5, 2.5, -0.0], np.float32
    )
    with jax.enable_x64(dtype.endswith("64")):
        types = [jax.ShapeDtypeStruct(x.shape, d) for d in (np.float32, np.dtype(dtype))]
        kernel = plgpu.kernel(lambda x, o: o.__setitem__(..., x[...].astype(dtype)), types[1])
        agree(build_plan(kernel.program(types[0]), "sm_90a"), [x])
