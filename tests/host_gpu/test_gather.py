"""Elements by index arrays: simulator and the C++ on the host against JAX, repeated and outside indices too; NVRTC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

Function = Callable[[Any, Any], Any]
# of x (16, 12) and i (8,), whose indices repeat, are negative, and lie outside of 12 and of 16
GATHERS: dict[str, Function] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "points": lambda x, i: x[i, i // 2],
    "a_row": lambda x, i: x[i[0]],
    "clip": lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
    "fill": lambda x, i: jnp.take(x, i, axis=1, mode="fill", fill_value=1),
    "default_fill": lambda x, i: x.at[i].get(mode="fill"),
    "matrix_of_indices": lambda x, i: x[i.reshape(2, 4) % 16],
    "along_rows": lambda x, i: jnp.take_along_axis(x, (i[None, :4] + jnp.arange(16)[:, None]) % 12, axis=1),
    "along_columns": lambda x, i: jnp.take_along_axis(
        x[:8], jnp.abs(i).reshape(1, 8)[:, :1] % 8 + jnp.zeros((3, 12), i.dtype), 0
    ),
    "windows": lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, k), (4, 4)))(i),
    "outside_windows": lambda x, i: lax.gather(
        x,
        i[:, None],
        lax.GatherDimensionNumbers((1, 2), (), (0,)),
        (4, 12),
        mode="fill",
        fill_value=2,
    ),
    "table": lambda x, i: x.reshape(-1)[jnp.abs(i) * 3],
}
SETS: dict[str, Function] = {
    "set_rows": lambda x, i: x.at[i].set(x[:8]),
    "set_columns": lambda x, i: x.at[:, i].set(x[:, :8]),
    "set_points": lambda x, i: x.at[i, i // 2].set(x[0, :8]),
    "set_clip": lambda x, i: x.at[i].set(x[:8], mode="clip"),
    "set_one": lambda x, i: x.at[i[1], 3].set(x[0, 0]),
    "set_windows": lambda x, i: lax.scatter(
        x, i[:, None], x[:8, :4].reshape(8, 2, 2), lax.ScatterDimensionNumbers((1, 2), (), (1,)), mode="drop"
    ),
}
UPDATES: dict[str, Function] = {
    "add": lambda x, i: x.at[i].add(x[:8]),
    "sub": lambda x, i: x.at[i].subtract(x[:8]),
    "mul": lambda x, i: x.at[:, i[:3]].mul(x[:, 1:4]),
    "min": lambda x, i: x.at[i, 3].min(x[0, :8]),
    "max": lambda x, i: x.at[i].max(x[3]),
    "add_clip": lambda x, i: x.at[i].add(x[:8], mode="clip"),
    "histogram": lambda x, i: jnp.zeros((16,), x.dtype).at[i].add(1),
    "batched": lambda x, i: jax.vmap(lambda r, k: r.at[k].add(3))(x[:8], i),
}
TYPES = ("float32", "bfloat16", "int32", "float16", "int8", "uint16", "bool")
INDICES = np.array([3, 0, 3, -1, 15, 19, -30, 7], np.int32)


def table(dtype: str) -> dict[str, Function]:
    return GATHERS | SETS | ({} if dtype == "bool" else UPDATES)


def numbers(dtype: str) -> np.ndarray:
    x = np.random.default_rng(7).integers(0, 4, (16, 12))
    return x > 1 if dtype == "bool" else x.astype(getattr(ml_dtypes, dtype, dtype))


def plan_of(functions: dict[str, Function], x: np.ndarray, i: np.ndarray = INDICES, arch: str = "sm_90a") -> Any:
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, i)]
    outs = [jax.eval_shape(f, *abstract) for f in functions.values()]

    def body(x_ref: Any, i_ref: Any, *refs: Any) -> None:
        for f, o in zip(functions.values(), refs, strict=True):
            o[...] = f(x_ref[...], i_ref[...])

    return build_plan(plgpu.kernel(body, outs).program(*abstract), arch)


def right(functions: dict[str, Function], x: np.ndarray, found: list[np.ndarray], i: np.ndarray = INDICES) -> None:
    for (name, f), a in zip(functions.items(), found, strict=True):
        expected = np.asarray(f(jnp.asarray(x), jnp.asarray(i)))
        assert a.dtype == expected.dtype
        wide = np.float32 if a.dtype == ml_dtypes.bfloat16 else a.dtype  # whose NaN is none to NumPy
        np.testing.assert_array_equal(a.astype(wide), expected.astype(wide), err_msg=name)


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=[] if d in TYPES[:3] else [pytest.mark.slow]) for d in TYPES])
def test_against_jax(dtype, compiled):
    functions, x = table(dtype), numbers(dtype)
    plan = plan_of(functions, x)
    right(functions, x, simulate(plan, [x, INDICES]))
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize(
    ("dtype", "chunk"),
    [
        pytest.param(d, k, marks=[] if d == "float32" else [pytest.mark.slow])
        for d in TYPES
        for k in range(-(-len(table(d)) // 7))
    ],
)
def test_on_the_host(dtype, chunk, agree):
    functions = dict(list(table(dtype).items())[7 * chunk :][:7])
    x = numbers(dtype)
    right(functions, x, agree(plan_of(functions, x), [x, INDICES]))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_types_of_indices(dtype, agree):
    x, i = numbers("float32"), np.abs(INDICES).astype(dtype)
    functions = {n: table("float32")[n] for n in ("rows", "clip", "set_rows", "add")}
    right(functions, x, agree(plan_of(functions, x, i), [x, i]), i)


def test_compiles_for_sm100(compiled):
    functions = {n: table("float32")[n] for n in ("rows", "fill", "set_points", "add")}
    assert compiled(plan_of(functions, numbers("float32"), arch="sm_100a")).complaints() == []


def test_sums_are_the_same_in_every_run(agree):
    """Updates of one place are added in their order, as a loop over them would."""
    x, i = np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32), np.zeros(8, np.int32)
    (found,) = agree(plan_of({"add": UPDATES["add"]}, x, i), [x, i])
    expected = x[0].copy()
    for k in range(8):
        expected += x[k]
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[1:], x[1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_refs(dtype, agree):
    """Loads and stores by index arrays, in shared memory with a swizzle, and in global memory, partly outside."""
    x = numbers(dtype)[:, :8].repeat(8 * 4 // np.dtype(numbers(dtype).dtype).itemsize // 2, 1)
    span = x.shape[1] * x.itemsize
    tile = (plgpu.TilingTransform((8, x.shape[1])), plgpu.SwizzleTransform(span))
    i = np.array([3, 0, 5, 15, 9, 1, 7, 2], np.int32)

    def body(x_ref: Any, i_ref: Any, o: Any, far: Any, end: Any, back: Any, buffer: Any) -> None:
        buffer[...] = x_ref[...]
        plgpu.commit_smem()
        rows = buffer[i_ref[...]]
        o[...] = rows
        far[...] = x_ref[i_ref[...] * 2]
        end[...] = x_ref[-i_ref[...]] + buffer[-i_ref[...]]
        plgpu.commit_smem()
        buffer[i_ref[...][::-1]] = rows
        plgpu.commit_smem()
        back[...] = buffer[...]

    half = jax.ShapeDtypeStruct((8, x.shape[1]), x.dtype)
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = plgpu.kernel(
        body, (half, half, half, whole), scratch_types=[plgpu.SMEM(x.shape, x.dtype, transforms=tile)]
    )
    found = agree(build_plan(kernel.program(whole, jax.ShapeDtypeStruct(i.shape, i.dtype)), "sm_90a"), [x, i])
    np.testing.assert_array_equal(found[0], x[i])
    np.testing.assert_array_equal(found[1], np.where((i < 8)[:, None], x[i * 2 % 16], np.zeros_like(x[i])))
    expected = x.copy()
    expected[i[::-1]] = x[i]
    np.testing.assert_array_equal(found[2], x[-i] + x[-i])
    np.testing.assert_array_equal(found[3], expected)
