"""Refs by index arrays: values as NumPy's, what is outside, races, repeated indices; compiled, and on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import OutOfBounds, Race, UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.simulator import simulate
from mosaic_gpu.simulator.remarks import Report

ROWS = np.array([3, 0, 3, 15, 9, 1, 7, 2], np.int32)
OTHER = np.array([6, 14, 12, 4, 13, 8, 10, 11], np.int32)
DIFFERENT = np.array([3, 0, 5, 15, 9, 1, 7, 2], np.int32)
TILE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
GETS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "points": lambda x, i: x[i, i],
    "a_row_of_points": lambda x, i: x[i, 3],
    "outer": lambda x, i: x[i[:, None], i[None, :4]],
    "some_columns": lambda x, i: x[i, 4:12],
}


def view_get(x: Any, i: Any) -> Any:
    return x.at[plgpu.ds(0, 16)][i, plgpu.ds(8, 16)]


def table(dtype: str) -> np.ndarray:
    x = np.random.default_rng(1).integers(-40, 40, (16, 32))
    return x > 0 if dtype == "bool" else x.astype(getattr(ml_dtypes, dtype, dtype))


def get_plan(f: Any, x: np.ndarray, out: Any, smem: Any, arch: str = "sm_90a", indices: np.ndarray = ROWS) -> Plan:
    """out = f(x, indices), x in global memory or, with transforms, in shared memory."""

    def body(x_ref: Any, i_ref: Any, o: Any, *tile: Any) -> None:
        ref = x_ref
        if tile:
            tile[0][...] = x_ref[...]
            plgpu.commit_smem()
            ref = tile[0]
        o[...] = f(ref, i_ref[...])

    scratch = [] if smem is None else [plgpu.SMEM(x.shape, x.dtype, transforms=smem)]
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, indices)]
    return build_plan(plgpu.kernel(body, out, scratch_types=scratch).program(*abstract), arch)


@pytest.mark.parametrize("smem", [None, (), TILE], ids=["gmem", "smem", "swizzled"])
@pytest.mark.parametrize("name", GETS)
def test_loads(name, smem, compiled):
    x = table("float32")
    expected = np.asarray(GETS[name](x, ROWS))
    plan = get_plan(GETS[name], x, jax.ShapeDtypeStruct(expected.shape, x.dtype), smem)
    np.testing.assert_array_equal(simulate(plan, [x, ROWS])[0], expected)
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "int8", "bool"])
def test_types(dtype, compiled):
    x = table(dtype)
    for smem in (None, ()):
        plan = get_plan(GETS["rows"], x, jax.ShapeDtypeStruct((8, 32), x.dtype), smem, "sm_100a")
        np.testing.assert_array_equal(simulate(plan, [x, ROWS])[0], x[ROWS])
        assert compiled(plan).complaints() == []


def test_views():
    x = table("float32")
    plan = get_plan(view_get, x, jax.ShapeDtypeStruct((8, 16), x.dtype), ())
    np.testing.assert_array_equal(simulate(plan, [x, ROWS])[0], x[ROWS, 8:24])


def put_plan(write: Any, smem: Any, dtype: str = "float32", arch: str = "sm_90a", outside: Any = None) -> Plan:
    """o (16, 32) is ones, then `write(o, x, indices)` with x (8, 32)."""

    def body(x_ref: Any, i_ref: Any, o: Any, *tile: Any) -> None:
        target = tile[0] if tile else o
        target[...] = plgpu.layout_cast(jnp.ones((16, 32), x_ref.dtype), plgpu.Layout.WG_STRIDED)
        plgpu.commit_smem()
        write(target, x_ref[...], i_ref[...])
        if tile:
            plgpu.commit_smem()
            o[...] = tile[0][...]

    kind = jnp.dtype(getattr(ml_dtypes, dtype, dtype))
    out = jax.ShapeDtypeStruct((16, 32), kind)
    scratch = [] if smem is None else [plgpu.SMEM((16, 32), kind, transforms=smem)]
    abstract = jax.ShapeDtypeStruct((8, 32), kind), jax.ShapeDtypeStruct((8,), np.int32)
    return build_plan(plgpu.kernel(body, out, scratch_types=scratch).program(*abstract), arch)


def set_rows(o: Any, x: Any, i: Any) -> None:
    o[i] = x


def set_points(o: Any, x: Any, i: Any) -> None:
    o[i, i + 3] = x[:, 0]


def add_rows(o: Any, x: Any, i: Any) -> None:
    o[i] += x


@pytest.mark.parametrize("smem", [None, (), TILE], ids=["gmem", "smem", "swizzled"])
@pytest.mark.parametrize("write", [set_rows, set_points, add_rows], ids=lambda f: f.__name__)
def test_stores(write, smem, compiled):
    x, expected = table("float32")[:8], np.ones((16, 32), np.float32)
    write(expected, x, DIFFERENT)
    plan = put_plan(write, smem)
    np.testing.assert_array_equal(simulate(plan, [x, DIFFERENT])[0], expected)
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("smem", [None, ()], ids=["gmem", "smem"])
def test_repeated_indices_in_a_store(smem):
    with pytest.raises(Race, match=r"2 times, by different threads"):
        simulate(put_plan(set_rows, smem), [table("float32")[:8], ROWS])


FROM_THE_END = np.array([3, 0, -1, 15, -16, 1, -7, 2], np.int32)


@pytest.mark.parametrize("smem", [None, (), TILE], ids=["gmem", "smem", "swizzled"])
@pytest.mark.parametrize("name", GETS)
def test_negative_indices_count_from_the_end(name, smem, compiled):
    """As of an array in registers, NumPy's and JAX's."""
    x = table("float32")
    expected = np.asarray(GETS[name](x, FROM_THE_END))
    np.testing.assert_array_equal(np.asarray(GETS[name](jnp.asarray(x), jnp.asarray(FROM_THE_END))), expected)
    plan = get_plan(GETS[name], x, jax.ShapeDtypeStruct(expected.shape, x.dtype), smem)
    np.testing.assert_array_equal(simulate(plan, [x, FROM_THE_END])[0], expected)
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("smem", [None, (), TILE], ids=["gmem", "smem", "swizzled"])
@pytest.mark.parametrize("write", [set_rows, add_rows], ids=lambda f: f.__name__)
def test_stores_count_from_the_end(write, smem, compiled):
    x, expected, places = (
        table("float32")[:8],
        np.ones((16, 32), np.float32),
        np.where(DIFFERENT % 2, DIFFERENT - 16, DIFFERENT),
    )
    write(expected, x, DIFFERENT)
    plan = put_plan(write, smem)
    np.testing.assert_array_equal(simulate(plan, [x, places])[0], expected)
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("smem", [None, ()], ids=["gmem", "smem"])
def test_one_place_from_both_ends(smem):
    with pytest.raises(Race, match=r"2 times, by different threads"):
        simulate(put_plan(set_rows, smem), [table("float32")[:8], np.array([3, 0, -13, 15, 9, 1, 7, 2], np.int32)])


@pytest.mark.parametrize("smem", [None, ()], ids=["gmem", "smem"])
def test_indices_count_within_the_view(smem, compiled):
    """Also from its end; beyond both ends there is nothing, though the array goes on."""

    def get(ref: Any, i: Any) -> Any:
        return ref.at[plgpu.ds(4, 8)][i]

    x = table("float32")
    plan = get_plan(get, x, jax.ShapeDtypeStruct((8, 32), x.dtype), smem)
    i = np.array([0, -1, 7, -8, 3, -4, 5, 1], np.int32)
    np.testing.assert_array_equal(simulate(plan, [x, i])[0], x[4:12][i])
    assert compiled(plan).complaints() == []
    far = np.array([0, -9, 7, 8, 3, -4, 5, 1], np.int32)
    if smem is not None:
        with pytest.raises(OutOfBounds, match=r"index -9 along axis 0 of a view of shape \(8, 32\): from -8 to 7"):
            simulate(plan, [x, far])
        return
    there = (far >= -8) & (far < 8)
    np.testing.assert_array_equal(simulate(plan, [x, far])[0], np.where(there[:, None], x[4:12][far % 8], 0))


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8"])
def test_indices_of_other_types(dtype, compiled):
    """Unsigned ones do not wrap: 255 is 255."""
    x, i = np.arange(300, dtype=np.float32), np.array([3, 255, 128, 0], "uint8").astype(dtype)
    out = jax.ShapeDtypeStruct((4,), x.dtype)
    plan = get_plan(lambda ref, i: ref[i], x, out, None, indices=i)
    np.testing.assert_array_equal(simulate(plan, [x, i])[0], x[i])
    assert compiled(plan).complaints() == []


def test_outside():
    """Global memory: zero, and not written, and the report says so; shared memory: an error."""
    x, far = table("float32"), np.array([3, 0, -17, 16, 9, 1, 99, 2], np.int32)
    inside = (far >= -16) & (far < 16)
    out = jax.ShapeDtypeStruct((8, 32), x.dtype)

    def raw(ref: Any, i: Any) -> Any:
        return ref[i]

    report = Report()
    params = plgpu.SimulatorParams(report=report)
    (found,) = simulate(get_plan(raw, x, out, None), [x, far], params)
    np.testing.assert_array_equal(found, np.where(inside[:, None], x[far % 16], 0))
    expected = np.ones((16, 32), np.float32)
    expected[far[inside]] = x[:8][inside]
    np.testing.assert_array_equal(simulate(put_plan(set_rows, None), [x[:8], far], params)[0], expected)
    loads, stores = sorted(map(str, report.outside.values()))
    assert "96 elements of a load by index arrays have an index outside input 0 and read as zero" in loads
    assert "96 elements of a store by index arrays" in stores and "are not written" in stores
    for i in (far, np.abs(far)):
        with pytest.raises(
            OutOfBounds, match=r"index (-17|17) along axis 0 of a view of shape \(16, 32\): from -16 to 15"
        ):
            simulate(get_plan(raw, x, out, ()), [x, i])


@pytest.mark.parametrize("fenced", [False, True])
def test_races(fenced):
    """Other threads wrote what an index array reads: that takes a meeting in between."""

    def body(x: Any, i: Any, o: Any, tile: Any) -> None:
        tile[...] = x[...]
        if fenced:
            plgpu.commit_smem()
        o[...] = tile[i[...]]

    x = table("float32")
    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct((8, 32), x.dtype), scratch_types=[plgpu.SMEM(x.shape, x.dtype)])
    plan = build_plan(kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, ROWS))), "sm_90a")
    if fenced:
        np.testing.assert_array_equal(simulate(plan, [x, ROWS])[0], x[ROWS])
    else:
        with pytest.raises(Race):
            simulate(plan, [x, ROWS])


@pytest.mark.parametrize("same", [False, True])
def test_two_warpgroups(same):
    """Rows that differ do not race, the same rows do."""

    def body(x: Any, i: Any, o: Any) -> None:
        wg = jax.lax.axis_index("wg")
        o[i[wg]] = x[wg]

    x = np.stack([table("float32")[:8]] * 2)
    i = np.stack([DIFFERENT, DIFFERENT if same else OTHER])
    out = jax.ShapeDtypeStruct((16, 32), x.dtype)
    kernel = plgpu.kernel(body, out, num_threads=2, thread_name="wg")
    plan = build_plan(kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, i))), "sm_90a")
    if same:
        with pytest.raises(Race):
            simulate(plan, [x, i])
    else:
        (found,) = simulate(plan, [x, i])
        np.testing.assert_array_equal(found[DIFFERENT], x[0])
        np.testing.assert_array_equal(found[OTHER], x[1])


def test_an_accumulator_has_no_addresses():
    def body(i: Any, o: Any) -> None:
        def scope(acc: Any) -> Any:
            return acc[i[...]]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 32)))

    out = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    with pytest.raises(UnsupportedCall, match="only SMEM and GMEM have addresses"):
        build_plan(plgpu.kernel(body, out).program(jax.ShapeDtypeStruct((8,), np.int32)), "sm_90a")
