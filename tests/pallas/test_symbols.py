"""Calls exported with symbols in their shapes: one program for all lengths, in the simulator, interpreted, and for a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall, UnsupportedPrimitive
from mosaic_gpu.pallas import symbols
from mosaic_gpu.runtime import jax_ffi
from mosaic_gpu.runtime.launch_spec import BufferPointer, Extent, ShapedMap

F = jnp.float32
BOTH = pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
CHECKS = [export.DisabledSafetyCheck.custom_call(name) for name in (jax_ffi.TARGET, jax_ffi.LATE)]
TILE = plgpu.BlockSpec((8, 128), lambda i, j: (i, j))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def exported(f, *types, platform="cpu"):
    return export.export(jax.jit(f), platforms=[platform], disabled_checks=CHECKS)(*types)


def two(text, *constraints):
    return export.symbolic_shape(text, constraints=constraints)


def body(x, y, o):
    o[...] = 2 * x[...] + y[...] * plgpu.program_id(0).astype(F)


def call(x, y, **options):
    grid = (plgpu.cdiv(x.shape[0], 8), plgpu.cdiv(x.shape[1], 128))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.pallas_call(body, out, grid=grid, in_specs=[TILE, TILE], out_specs=TILE, **options)(x, y)


def wanted(x, y):
    rows = np.arange(x.shape[-2])[:, None] // 8
    return 2 * x.astype(np.float64) + y.astype(np.float64) * rows


SHAPES = [(8, 128), (20, 264), (3, 132), (1, 4), (40, 512)]


@BOTH
@pytest.mark.parametrize("multiple", [1, 4, 128])
def test_any_lengths(interpret, multiple):
    """Rows that are known to be multiples of 16 bytes go through TMA."""
    w, h = two("w, h", f"mod(h, {multiple}) == 0") if multiple > 1 else two("w, h")
    t = jax.ShapeDtypeStruct((w, h), F)
    program = exported(lambda x, y: call(x, y, interpret=interpret), t, t)
    for shape in SHAPES:
        if shape[1] % multiple == 0:
            x, y = numbers(*shape), numbers(*shape, seed=1)
            np.testing.assert_allclose(program.call(x, y), wanted(x, y), rtol=1e-6, atol=1e-6)


@BOTH
def test_batches(interpret):
    b, w = two("b, w")
    t = jax.ShapeDtypeStruct((b, w, 256), F)
    program = exported(jax.vmap(lambda x, y: call(x, y, interpret=interpret)), t, t)
    for shape in ((1, 8, 256), (3, 20, 256)):
        x, y = numbers(*shape), numbers(*shape, seed=1)
        np.testing.assert_allclose(program.call(x, y), wanted(x, y), rtol=1e-6, atol=1e-6)


@BOTH
def test_a_sum_over_a_symbolic_axis(interpret):
    def accumulate(x, o):
        plgpu.when(plgpu.program_id(0) == 0)(lambda: o.__setitem__(..., jnp.zeros_like(o)))
        o[...] += x[...]

    def f(x):
        spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
        out = plgpu.BlockSpec((8, 128), lambda i: (0, 0))
        kind = jax.ShapeDtypeStruct((8, 128), F)
        grid = x.shape[0] // 8
        return plgpu.pallas_call(accumulate, kind, grid=grid, in_specs=[spec], out_specs=out, interpret=interpret)(x)

    (n,) = two("n", "mod(n, 8) == 0")
    program = exported(f, jax.ShapeDtypeStruct((n, 128), F))
    for rows in (8, 56):
        x = numbers(rows, 128)
        exact = x.astype(np.float64).reshape(-1, 8, 128).sum(0)
        np.testing.assert_allclose(program.call(x), exact, rtol=1e-6, atol=1e-5)


def test_derivatives_and_aliases():
    def scale(n, x, o):
        o[...] = x[...] * x[...] * n[0]

    def f(x):
        spec = plgpu.BlockSpec((8, 128), lambda i, n: (i, 0))
        grid = plgpu.PrefetchScalarGridSpec(1, (plgpu.cdiv(x.shape[0], 8),), [spec], spec)
        out = jax.ShapeDtypeStruct(x.shape, F)
        return plgpu.pallas_call(scale, out, grid_spec=grid, input_output_aliases={1: 0})(jnp.full(1, 3.0, F), x)

    (n,) = two("n")
    t = jax.ShapeDtypeStruct((n, 128), F)
    program = exported(lambda x, dx: jax.jvp(f, (x,), (dx,)), t, t)
    x, dx = numbers(20, 128), numbers(20, 128, seed=1)
    y, dy = program.call(x, dx)
    np.testing.assert_allclose(y, 3.0 * x.astype(np.float64) ** 2, rtol=1e-6)
    np.testing.assert_allclose(dy, 6.0 * x.astype(np.float64) * dx, rtol=1e-6, atol=1e-6)


def test_shapes_of_one_name_do_not_meet():
    """Programs of other symbols are other programs, each with its own lengths."""
    for name in ("b1", "b2"):
        (b,) = two(name)
        t = jax.ShapeDtypeStruct((b, 8, 128), F)
        program = exported(jax.vmap(call), t, t)
        assert program.in_avals[0].shape == (b, 8, 128)
        x = numbers(2, 8, 128)
        np.testing.assert_allclose(program.call(x, x), wanted(x, x), rtol=1e-6, atol=1e-6)


# ---- for a GPU ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("multiple", [1, 4])
def test_for_a_gpu_extents_are_the_launchers(monkeypatch, multiple):
    specs = []
    launch = jax_ffi.launch_call
    monkeypatch.setattr(jax_ffi, "launch_call", lambda spec, *rest: specs.append(spec) or launch(spec, *rest))
    w, h = two("w, h", f"mod(h, {multiple}) == 0") if multiple > 1 else two("w, h")
    t = jax.ShapeDtypeStruct((w, h), F)
    program = exported(call, t, t, platform="cuda")
    assert jax_ffi.TARGET in program.mlir_module() and program.out_avals[0].shape == (w, h)
    (spec,) = specs
    assert spec.grid == (132, 1, 1)  # sizes of the grid are operands 0 and 1
    maps = [p for p in spec.parameters if isinstance(p, ShapedMap)]
    pointers = {p.buffer for p in spec.parameters if isinstance(p, BufferPointer)}
    extents = {(p.buffer, p.axis) for p in spec.parameters if isinstance(p, Extent)}
    if multiple == 4:
        assert [p.dims for p in maps] == [((1, 1, None), (0, 1, None))] * 3
        assert {p.buffer for p in maps} == {2, 3, 4} and pointers == {0, 1}
    else:
        assert not maps and pointers == {0, 1, 2, 3, 4}
        assert extents == {(b, axis) for b in (2, 3, 4) for axis in (0, 1)}


def test_code_that_depends_on_lengths_is_refused(monkeypatch):
    from mosaic_gpu.codegen import emitter

    emit = emitter.emit
    monkeypatch.setattr(emitter, "emit", lambda plan: f"{emit(plan)}// {plan.program.inputs[2].shape}")
    w, h = two("w, h")
    t = jax.ShapeDtypeStruct((w, h), F)
    with pytest.raises(UnsupportedCall, match="depends on lengths that are symbols; export it for each shape"):
        exported(call, t, t, platform="cuda")


# ---- what is refused ------------------------------------------------------------------------------------------------------
def test_a_body_that_closes_over_a_symbol():
    (n,) = two("n")

    def f(x):
        def masked(x_ref, o):
            o[...] = jnp.where(plgpu.program_id(0) * 8 < jnp.asarray(x.shape[0]), x_ref[...], 0)

        spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
        out = jax.ShapeDtypeStruct(x.shape, F)
        return plgpu.pallas_call(masked, out, grid=x.shape[0] // 8, in_specs=[spec], out_specs=spec)(x)

    with pytest.raises(UnsupportedPrimitive, match="dim_as_value"):
        exported(f, jax.ShapeDtypeStruct((n, 128), F))


def test_symbols_of_prefetch_operands():
    (n,) = two("n")

    def f(index, x):
        spec = plgpu.BlockSpec((8, 128), lambda i, index: (index[i], 0))
        grid = plgpu.PrefetchScalarGridSpec(1, (4,), [spec], spec)
        return plgpu.pallas_call(lambda index, x, o: None, jax.ShapeDtypeStruct((32, 128), F), grid_spec=grid)(index, x)

    with pytest.raises(UnsupportedCall, match=r"args\[0\] of shape \(n,\): only arrays that are cut into blocks"):
        exported(f, jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((32, 128), F))


def test_findings_of_the_simulator_leave_the_program():
    """As from a jitted call: our report, whose class is XLA's."""

    def f(x):
        spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0))

        def unwritten(x_ref, o, tile):
            plgpu.copy_smem_to_gmem(tile, o)
            plgpu.wait_smem_to_gmem(0)

        out = plgpu.BlockSpec((8, 128), lambda i: (i, 0), memory_space=plgpu.GMEM)
        return plgpu.pallas_call(
            unwritten,
            jax.ShapeDtypeStruct(x.shape, F),
            grid=plgpu.cdiv(x.shape[0], 8),
            in_specs=[spec],
            out_specs=out,
            scratch_shapes=[plgpu.SMEM((8, 128), F)],
        )(x)

    (n,) = two("n")
    program = exported(f, jax.ShapeDtypeStruct((n, 128), F))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"UninitializedRead: (.|\n)*test_symbols.py"):
        jax.block_until_ready(program.call(numbers(16, 128)))


def test_programs_of_other_processes():
    number = np.int64(1 << 40)
    jax_ffi._late_handler()
    f = jax.jit(lambda x: jax.ffi.ffi_call(jax_ffi.LATE, jax.ShapeDtypeStruct((2,), F))(x, call=number))
    with pytest.raises(jax.errors.JaxRuntimeError, match="UnsupportedCall.*only in the process that made it"):
        jax.block_until_ready(f(jnp.zeros(2)))


def test_multiples_that_are_known():
    n, m = two("n, m", "mod(m, 64) == 0")
    known = [symbols.known_multiple(x) for x in (n, m, 2 * n, n + 1, 96, 7)]
    assert known == [1, 64, 2, 1, 32, 1]
