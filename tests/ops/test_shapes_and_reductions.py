"""Reductions, broadcasts, reshapes, iota and conversions of layout: values in the simulator, C++ through NVRTC."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import LayoutConflict
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate

F = jnp.float32


def shape(*dims, dtype=F):
    return jax.ShapeDtypeStruct(dims, dtype)


def plan_of(body, outs, *arrays):
    return build_plan(plgpu.kernel(body, outs).program(*(shape(*a.shape, dtype=a.dtype) for a in arrays)), "sm_90a")


REDUCTIONS = {"sum": (jnp.sum, np.sum), "max": (jnp.max, np.max), "min": (jnp.min, np.min), "prod": (jnp.prod, np.prod)}


@pytest.mark.parametrize("layout", [Layout.WGMMA, Layout.TCGEN05_TMEM_NATIVE], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_row_reductions(layout, dtype, compiled):
    """All four over axis 1, in both layouts whose rows stay in a warp."""
    x = (np.random.default_rng(0).standard_normal((128, 16)) * 3).astype(getattr(ml_dtypes, dtype, dtype))

    def body(x, *outs):
        a = plgpu.load(x, layout=layout)
        for (f, _), o in zip(REDUCTIONS.values(), outs, strict=True):
            o[...] = f(a, axis=1)

    plan = plan_of(body, [shape(128, dtype=x.dtype)] * 4, x)
    for (name, (_, f)), found in zip(REDUCTIONS.items(), simulate(plan, [x]), strict=True):
        expected = f(x.astype(np.float64) if x.dtype.kind != "i" else x, axis=1)
        np.testing.assert_allclose(
            found.astype(np.float64), expected, rtol=1e-2 if dtype == "bfloat16" else 1e-5, err_msg=name
        )
    assert compiled(plan).complaints() == []


def test_integer_reductions_do_not_pass_through_floats(compiled):
    """2**24 + 1 has no float32."""

    def body(x, top, low):
        a = plgpu.load(x, layout=Layout.WGMMA)
        top[...], low[...] = jnp.max(a, axis=1), jnp.min(a, axis=1)

    x = np.full((64, 16), 2**24 + 1, np.int32)
    plan = plan_of(body, [shape(64, dtype=jnp.int32)] * 2, x)
    source = body_of(emit(plan))
    assert "max_nan" not in source and "min_nan" not in source and "fmaxf" not in source
    assert compiled(plan).complaints() == []


def test_softmax(compiled):
    """A reduction broadcast back over columns, twice."""

    def body(x, o):
        a = plgpu.load(x, layout=Layout.WGMMA)
        p = jnp.exp(a - jnp.max(a, axis=1, keepdims=True))
        o[...] = p / jnp.sum(p, axis=1)[:, None]

    x = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
    plan = plan_of(body, shape(64, 32), x)
    np.testing.assert_allclose(simulate(plan, [x])[0], jax.nn.softmax(x, axis=1), rtol=1e-5)
    report = compiled(plan)
    # two rows, two steps, two reductions, and at most one for the number of the warp and of the warpgroup each
    assert report.complaints() == [] and 2 * 2 * 2 <= report.mnemonics["SHFL"] <= 2 * 2 * 2 + 2


def test_columns_and_rows_broadcast(compiled):
    def body(x, row, column, o):
        a = plgpu.load(x, layout=Layout.WGMMA)
        o[...] = a * row[...][None, :] + column[...][:, None]

    rng = np.random.default_rng(2)
    x, row, column = (rng.standard_normal(s).astype(np.float32) for s in ((64, 32), (32,), (64,)))
    plan = plan_of(body, shape(64, 32), x, row, column)
    expected = x.astype(np.float64) * row + column[:, None]  # an fma: rounded once
    np.testing.assert_allclose(simulate(plan, [x, row, column])[0], expected, rtol=1e-6)
    assert compiled(plan).complaints() == []


def test_narrow_rows_and_columns(compiled):
    """The same in bfloat16, two to a register."""

    def body(x, row, column, o):
        a = plgpu.load(x, layout=Layout.WGMMA)
        o[...] = a * row[...][None, :] + column[...][:, None]

    rng = np.random.default_rng(2)
    x, row, column = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((64, 32), (32,), (64,)))
    plan = plan_of(body, shape(64, 32, dtype=jnp.bfloat16), x, row, column)
    expected = (x * row).astype(np.float32) + column.astype(np.float32)[:, None]
    np.testing.assert_allclose(simulate(plan, [x, row, column])[0].astype(np.float32), expected, rtol=2**-7, atol=1e-2)
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("layout", [Layout.WGMMA, Layout.TCGEN05_TMEM_NATIVE, Layout.WG_STRIDED], ids=str)
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
def test_iota(layout, dtype, compiled):
    d = getattr(ml_dtypes, dtype, dtype)

    def body(o):
        rows = plgpu.broadcasted_iota(d, (128, 16), 0, layout=layout)
        o[...] = rows * np.array(2, d) + plgpu.broadcasted_iota(d, (128, 16), 1, layout=layout)

    plan = plan_of(body, shape(128, 16, dtype=d))
    expected = np.arange(128)[:, None] * 2 + np.arange(16)
    np.testing.assert_allclose(simulate(plan, [])[0].astype(np.float64), expected, rtol=2**-7)
    assert compiled(plan).complaints() == []


def test_iota_of_jax(compiled):
    """jnp.arange and lax.broadcasted_iota take the layout of what they meet."""

    def body(x, o):
        a = plgpu.load(x, layout=Layout.WGMMA)
        o[...] = jnp.where(lax.broadcasted_iota(jnp.int32, (64, 16), 1) < 3, a, 0.0) + jnp.arange(16, dtype=F)[None, :]

    x = np.ones((64, 16), np.float32)
    plan = plan_of(body, shape(64, 16), x)
    np.testing.assert_array_equal(simulate(plan, [x])[0][5], (np.arange(16) < 3) + np.arange(16))
    assert compiled(plan).complaints() == []


def test_unit_dimensions(compiled):
    """reshape, squeeze and expand_dims that only add or drop dimensions of extent 1 move nothing."""

    def body(x, o):
        a = plgpu.load(x, layout=Layout.WGMMA)
        top = jnp.max(a, axis=1, keepdims=True)
        o[...] = lax.reshape(jnp.squeeze(top, 1), (64, 1)) + jnp.expand_dims(jnp.sum(a, axis=1), 1) + a

    x = np.random.default_rng(3).standard_normal((64, 16)).astype(np.float32)
    plan = plan_of(body, shape(64, 16), x)
    np.testing.assert_allclose(
        simulate(plan, [x])[0], x.max(1, keepdims=True) + x.sum(1, keepdims=True) + x, rtol=1e-5, atol=1e-5
    )
    assert compiled(plan).complaints() == []


def test_vectors_with_an_odd_number_of_elements_per_thread(compiled):
    """128 bfloat16 over 128 threads: one to a register, and arithmetic on it."""

    def body(x, o, p):
        a = x[...]
        o[...] = a.astype(F) * 2.0
        p[...] = a + a

    x = np.arange(128).astype(ml_dtypes.bfloat16)
    plan = plan_of(body, [shape(128), shape(128, dtype=jnp.bfloat16)], x)
    o, p = simulate(plan, [x])
    np.testing.assert_array_equal(o, np.arange(128) * 2)
    np.testing.assert_array_equal(p.astype(np.float32), (x + x).astype(np.float32))
    assert compiled(plan).complaints() == []


def test_layout_cast_is_free(compiled):
    def body(x, o):
        o[...] = plgpu.layout_cast(plgpu.layout_cast(x[...], Layout.WGMMA) * 2.0, Layout.WGMMA)

    x = np.ones((64, 16), np.float32)
    plan = plan_of(body, shape(64, 16), x)
    np.testing.assert_array_equal(simulate(plan, [x])[0], 2 * x)
    assert compiled(plan).mnemonics.get("SHFL", 0) <= 2, "only for the warp's number"


# ---- loops and branches over arrays -------------------------------------------------------------------------------------------
def test_arrays_through_control_flow(compiled):
    """Carried arrays, swapped carries, splats that become arrays, branches and while, against JAX."""

    def compute(x, n):
        a, b = x, jnp.zeros_like(x)
        a, b = lax.fori_loop(0, n, lambda i, c: (c[1] + 1.0, c[0] * 0.5), (a, b))
        c = lax.cond(n > 2, lambda: a + b, lambda: a - b)
        d = lax.switch(n, [lambda: jnp.zeros_like(x), lambda: x, lambda: x * 2.0, lambda: c])
        e = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + d), (jnp.int32(0), jnp.ones_like(x)))[1]
        return e + c

    def body(x, n, o):
        o[...] = compute(plgpu.load(x, layout=Layout.WGMMA), n[0])

    x = np.random.default_rng(4).standard_normal((64, 8)).astype(np.float32)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        plan = plan_of(body, shape(64, 8, dtype=dtype), x.astype(dtype), np.zeros(1, np.int32))
        for n in (0, 1, 3, 5):
            found = simulate(plan, [x.astype(dtype), np.array([n], np.int32)])[0]
            expected = np.asarray(compute(jnp.asarray(x.astype(dtype)), n))
            tolerance = 1e-5 if dtype == np.float32 else 3e-2
            np.testing.assert_allclose(
                found.astype(np.float32), expected.astype(np.float32), rtol=tolerance, atol=tolerance
            )
        assert compiled(plan).complaints() == []


def test_swapped_carries_keep_both_values():
    """The assignment at the end of an iteration is parallel: one of the two goes through a copy."""

    def body(x, o):
        a, b = lax.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (x[0], x[1]))
        o[0], o[1] = a, b

    plan = plan_of(body, shape(2), np.zeros(2, np.float32))
    assert "_next" in body_of(emit(plan))
    np.testing.assert_array_equal(simulate(plan, [np.array([1, 2], np.float32)])[0], [2, 1])


# ---- what needs no layout any more ---------------------------------------------------------------------------------------------
def test_one_repeated_value_is_stored(compiled):
    """It gets a layout of its own where it goes to memory."""

    def body(o):
        o[...] = jnp.zeros((64, 16), F) + 2.0

    plan = plan_of(body, shape(64, 16))
    np.testing.assert_array_equal(simulate(plan, [])[0], np.full((64, 16), 2.0, np.float32))
    assert compiled(plan).complaints() == []


def test_a_cast_converts(compiled):
    """Two pins that differ: the cast moves the elements, and says so by the scratch it takes."""

    def body(x, o):
        o[...] = plgpu.layout_cast(plgpu.load(x, layout=Layout.WGMMA), Layout.TCGEN05_TMEM_NATIVE) * 2.0

    x = np.random.default_rng(0).standard_normal((128, 16)).astype(np.float32)
    plan = plan_of(body, shape(128, 16), x)
    assert plan.roles[0].scratch_bytes == 128 * 16 * 4
    np.testing.assert_array_equal(simulate(plan, [x])[0], 2 * x)
    assert compiled(plan).complaints() == []


def test_rows_reduced_in_a_default_layout_stay_in_a_warp():
    """Lanes, not warps, share what is reduced: no scratch, no barrier."""

    def body(x, o):
        a = x[...]
        o[...] = a / jnp.sum(a, axis=1, keepdims=True)

    plan = plan_of(body, shape(64, 256), np.zeros((64, 256), np.float32))
    assert plan.roles[0].scratch_bytes == 0 and "named_barrier_sync" not in body_of(emit(plan))


def test_two_pins_in_one_operation_are_a_conflict():
    def body(x, y, o):
        o[...] = plgpu.load(x, layout=Layout.WGMMA) + plgpu.load(y, layout=Layout.TCGEN05_TMEM_NATIVE)

    x = np.zeros((128, 16), np.float32)
    with pytest.raises(
        LayoutConflict, match="add brings two register layouts together: WGMMA.*TCGEN05_TMEM_NATIVE.*layout_cast"
    ):
        plan_of(body, shape(128, 16), x, x)
