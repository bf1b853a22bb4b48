"""Operations that move elements or combine them along a dimension: simulator against JAX, C++ on the host against both, NVRTC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.support import dtype_of

FLOATS = ("float32", "float16", "bfloat16")
INTS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
Function = Callable[[Any], Any]
MOVES: dict[str, Function] = {
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(x.shape[1], x.shape[0]),
    "to_three": lambda x: x.reshape(4, -1, x.shape[1])[1],
    "rev_rows": lambda x: lax.rev(x, (0,)),
    "rev_both": lambda x: lax.rev(x, (0, 1)),
    "slice": lambda x: x[3:, 1:-2],
    "strided_slice": lambda x: x[::2, 1::3],
    "row": lambda x: x[5],
    "concatenate": lambda x: jnp.concatenate([x, x[:, :3], lax.rev(x, (1,))], axis=1),
    "stack": lambda x: jnp.stack([x[:, 0], x[:, 3]]),
    "stack_last": lambda x: jnp.stack([x[1], x[3], x[5]], axis=1),
    "unstack": lambda x: sum(jnp.unstack(x[:4])[1:], jnp.unstack(x[:4])[0]),
    "pad": lambda x: lax.pad(x, jnp.asarray(1, x.dtype), ((3, 1, 0), (-1, 2, 1))),
    "split": lambda x: jnp.split(x, 2, axis=0)[1],
    "tile": lambda x: jnp.tile(x, (1, 3)),
    "roll": lambda x: jnp.roll(x, 3, axis=1),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.int32(2), jnp.int32(100)), (8, 4)),
    "dynamic_update": lambda x: lax.dynamic_update_slice(x, x[:4, :4] + x[1:5, :4], (jnp.int32(3), jnp.int32(1))),
    "row_over_columns": lambda x: x + jnp.broadcast_to(x[:, :1].T[:, : x.shape[1]].reshape(-1)[0], x.shape),
    "outer": lambda x: x[:, 0][:, None] + x[0][None, :],
    "columns_as_rows": lambda x: x[:8, :8] + x[:8, 0][None, :],
    "last_three": lambda x: x.reshape(2, -1, x.shape[1]).transpose(2, 0, 1),
}
ALONG: dict[str, Function] = {
    "sort": lambda x: lax.sort(x, dimension=1),
    "sort_rows": lambda x: lax.sort(x, dimension=0),
    "argsort": lambda x: jnp.argsort(x, axis=1),
    "sort_two": lambda x: lax.sort((x, lax.rev(x, (1,))), num_keys=2)[1],
    "top_3": lambda x: lax.top_k(x, 3)[0],
    "top_3_indices": lambda x: lax.top_k(x, 3)[1],
    "top_5_of_columns": lambda x: sum(lax.top_k(x.T, 5)) if x.dtype == jnp.int32 else lax.top_k(x.T, 5)[1],
    "argmax": lambda x: jnp.argmax(x, axis=1),
    "argmin_rows": lambda x: jnp.argmin(x, axis=0),
    "cummax": lambda x: lax.cummax(x, axis=1),
    "cummin_back": lambda x: lax.cummin(x, axis=0, reverse=True),
    "max_rows": lambda x: jnp.max(x, axis=0),
    "min_all": lambda x: jnp.min(x)[None],
    "max_columns": lambda x: jnp.max(x, axis=1, keepdims=True),
}
ADDING: dict[str, Function] = {
    "sum_rows": lambda x: jnp.sum(x, axis=0, dtype=x.dtype),
    "sum_all": lambda x: jnp.sum(x, dtype=x.dtype)[None],
    "sum_columns": lambda x: jnp.sum(x, axis=1, keepdims=True, dtype=x.dtype) + x,
    "sum_of_ones": lambda x: jnp.sum(jnp.ones_like(x), axis=1, dtype=x.dtype),
    "prod": lambda x: jnp.prod(jnp.where(x > 0, jnp.ones_like(x), jnp.full_like(x, 2)), axis=1, dtype=x.dtype),
    "cumsum": lambda x: lax.cumsum(x, axis=1),
    "cumsum_back": lambda x: lax.cumsum(x, axis=0, reverse=True),
    "cumprod": lambda x: lax.cumprod(jnp.where(x > 0, jnp.ones_like(x), jnp.full_like(x, 2)), axis=1),
}
BITS: dict[str, Function] = {
    "reduce_and": lambda x: jnp.bitwise_and.reduce(x, axis=0),
    "reduce_or": lambda x: lax.reduce_or(x, axes=(1,)),
    "reduce_xor": lambda x: lax.reduce_xor(x, axes=(0, 1))[None],
}
BOOLS: dict[str, Function] = {
    "any": lambda x: jnp.any(x, axis=1),
    "all": lambda x: jnp.all(x, axis=0),
    "xor": lambda x: lax.reduce_xor(x, axes=(1,)),
    "sort": lambda x: lax.sort(x, dimension=1),
    "top_4_indices": lambda x: lax.top_k(x, 4)[1],
    **{n: MOVES[n] for n in ("transpose", "reshape", "rev_both", "slice", "concatenate", "split", "dynamic_slice")},
}
ONLY_FLOATS: dict[str, Function] = {"cumlogsumexp": lambda x: lax.cumlogsumexp(x * jnp.asarray(0.125, x.dtype), axis=1)}
TABLES = {
    **{d: MOVES | ALONG | ADDING | ONLY_FLOATS for d in FLOATS},
    **{d: MOVES | ALONG | ADDING | BITS for d in INTS},
    "bool": BOOLS,
}


def numbers(dtype: str, *shape: int) -> np.ndarray:
    """Whole numbers, so that sums are exact in every order."""
    rng = np.random.default_rng(5)
    if dtype == "bool":
        return rng.integers(0, 2, shape) > 0
    low = 0 if dtype.startswith("u") else -3
    return rng.integers(low, 4, shape).astype(dtype_of(dtype))


def plan_of(functions: dict[str, Function], x: np.ndarray, layout: Layout | None, arch: str = "sm_90a") -> Any:
    outs = [jax.eval_shape(f, jax.ShapeDtypeStruct(x.shape, x.dtype)) for f in functions.values()]

    def body(a: Any, *refs: Any) -> None:
        for f, o in zip(functions.values(), refs, strict=True):
            o[...] = f(plgpu.load(a, layout=layout))

    return build_plan(plgpu.kernel(body, outs).program(jax.ShapeDtypeStruct(x.shape, x.dtype)), arch)


def right(functions: dict[str, Function], x: np.ndarray, found: list[np.ndarray]) -> None:
    for (name, f), a in zip(functions.items(), found, strict=True):
        expected = np.asarray(f(jnp.asarray(x)))
        assert a.dtype == expected.dtype, name
        if name == "cumlogsumexp":
            rtol = {2: 2**-7, 4: 1e-5}[a.dtype.itemsize]
            np.testing.assert_allclose(
                a.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=rtol, err_msg=name
            )
        else:
            np.testing.assert_array_equal(a, expected, err_msg=name)


FAST = ("float32", "int32", "bool")
CASES = [pytest.param(d, marks=[] if d in FAST else [pytest.mark.slow]) for d in TABLES]
CHUNK = 8  # functions of a kernel on the host, whose compiler takes long for large ones
CHUNKS = [
    pytest.param(d, k, marks=[] if d == "float32" else [pytest.mark.slow])
    for d in TABLES
    for k in range(-(-len(TABLES[d]) // CHUNK))
]


@pytest.mark.parametrize("dtype", CASES)
def test_against_jax(dtype, compiled):
    """Whole table of a type, default layouts, a shape that does not divide over 128 threads evenly."""
    functions, x = TABLES[dtype], numbers(dtype, 24, 12)
    plan = plan_of(functions, x, None)
    right(functions, x, simulate(plan, [x]))
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize(("dtype", "chunk"), CHUNKS)
def test_on_the_host(dtype, chunk, agree):
    """What the emitted C++ computes."""
    functions = dict(list(TABLES[dtype].items())[chunk * CHUNK :][:CHUNK])
    x = numbers(dtype, 24, 12)
    right(functions, x, agree(plan_of(functions, x, None), [x], ulps=8 if "cumlogsumexp" in functions else 0))


@pytest.mark.parametrize(
    ("layout", "shape"), [(Layout.WGMMA, (64, 16)), (Layout.TCGEN05_TMEM_NATIVE, (128, 12))], ids=str
)
def test_from_the_layouts_of_products(layout, shape, agree):
    """The same operations on arrays in a fragment's layout."""
    names = ("transpose", "reshape", "roll", "concatenate", "outer", "argmax", "sum_rows", "sum_all", "cumsum")
    functions = {n: TABLES["bfloat16"][n] for n in names}
    x = numbers("bfloat16", *shape)
    right(functions, x, agree(plan_of(functions, x, layout), [x]))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_several_warpgroups_have_scratch_of_their_own(arch, agree, compiled):
    """Two warpgroups of one role and a third of another exchange elements at the same time."""
    x = numbers("float32", 3, 96, 8)

    def body(a, o):
        wg = lax.axis_index("wg")

        @plgpu.when(wg < 2)
        def _():
            o[wg] = lax.cumsum(lax.rev(a[wg], (0,)), axis=1)

        @plgpu.when(wg == 2)
        def _():
            o[wg] = lax.sort(a[wg], dimension=0)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    plan = build_plan(plgpu.kernel(body, out, num_threads=3, thread_name="wg").program(out), arch)
    scratch = [(r.scratch, r.scratch_bytes, len(r.indices)) for r in plan.roles]
    assert sorted(n for _, _, n in scratch) == [1, 2] and all(b >= 96 * 8 * 4 for _, b, _ in scratch)
    (found,) = agree(plan, [x]) if arch == "sm_90a" else simulate(plan, [x])
    expected = np.concatenate([np.cumsum(x[:2, ::-1], 2), np.sort(x[2:], 1)])
    np.testing.assert_array_equal(found, expected)
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool", "float32"])
def test_every_lane_shuffles_once(dtype):
    """A shuffle inside of `a > b ? a : b` or `a || b` would be left out by some lanes, and the others would wait for ever."""
    f = (lambda x: jnp.any(x, axis=1)) if dtype == "bool" else (lambda x: jnp.max(x, axis=1))
    for text in emit(plan_of({"f": f}, numbers(dtype, 64, 16), Layout.WGMMA)).splitlines():
        if "__shfl_xor_sync" in text:
            before = text.split("__shfl_xor_sync")[0]
            assert text.count("__shfl_xor_sync") == 1 and "?" not in before and "||" not in before, text


def test_special_values(agree):
    """NaN and signed zeros in argmax, sort and maxima, as in JAX."""
    x = np.array(
        [[0.0, np.nan, -0.0, np.inf, -np.inf, 1.0, np.nan, -1.0], [-0.0, 0.0, 2.0, -5.0, 2.0, 0.0, -0.0, 1.0]],
        np.float32,
    )
    x = np.tile(x, (8, 1))
    functions: dict[str, Function] = {
        "argmax": lambda v: jnp.argmax(v, axis=1),
        "argmin": lambda v: jnp.argmin(v, axis=1),
        "argsort": lambda v: jnp.argsort(v, axis=1),
        "max": lambda v: jnp.max(v, axis=1),
        "cummax": lambda v: lax.cummax(v, axis=1),
    }
    right(functions, x, agree(plan_of(functions, x, None), [x]))
