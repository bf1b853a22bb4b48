"""Stores to, and reductions over, the memory of several devices: simulated on one, compiled, and refused in launches."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mosaic_gpu as plgpu
from mosaic_gpu.cli.stages import plan_json
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.sass import disassemble
from mosaic_gpu.errors import Deadlock, NoMulticastObject, Race, UninitializedRead, UnsupportedCall
from mosaic_gpu.ops.multimem import STORED, TYPES
from mosaic_gpu.runtime.execute import launch_spec
from mosaic_gpu.simulator import simulate

ARCHS = ("sm_90a", "sm_100a")
BLOCKS, ROWS, COLUMNS = 2, 4, 256  # of which a thread takes 16 bytes side by side
GRID = dict(grid=(BLOCKS,), grid_names=("b",))
REDUCTIONS = [(op, dtype) for op, types in TYPES.items() for dtype in types]
# What the disassembler calls a reduction of 16 bytes of floats, or of one integer.
NAMES = dict(float32="F32x4", float16="F16x8", bfloat16="BF16x8", float64="F64", int32="S32", uint32="32", uint64="64")


def numbers(dtype, *shape, seed=0):
    rng = np.random.default_rng(seed)
    if "int" in dtype:
        return rng.integers(0, 2**31 - 1, shape).astype(dtype)
    return rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def both(op, layout=None, rows=ROWS):
    """Each block reduces its rows over all devices, and stores them to all devices."""

    def body(x, o):
        own = plgpu.ds(lax.axis_index("b") * rows, rows)
        total = plgpu.multimem_load_reduce(x.at[own], collective_axes="d", reduction_op=op)
        total = total if layout is None else plgpu.layout_cast(total, layout)
        plgpu.multimem_store(total, o.at[own], "d")

    return body


def x64(on):
    return (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(on)


def planned(plan, op, dtype, arch="sm_90a"):
    t = jax.ShapeDtypeStruct((BLOCKS * ROWS, COLUMNS), getattr(ml_dtypes, dtype, dtype))
    with x64(dtype.endswith("64")):
        return plan(both(op), t, out=t, arch=arch, **GRID)


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_one_device(plan, op, dtype):
    """On one device what is reduced is what is there, and one store is all stores."""
    x = numbers(dtype, BLOCKS * ROWS, COLUMNS)
    (got,) = simulate(planned(plan, op, dtype), [x])
    assert got.tobytes() == x.tobytes()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", STORED)
def test_machine_code(plan, compiled, arch, dtype):
    """One instruction for 16 bytes of floats, for each integer and each float64; stores of 16 bytes, or 8 of 64-bit types."""
    ops = [op for op, types in TYPES.items() if dtype in types]

    def body(x, o):
        for i, op in enumerate(ops):
            plgpu.multimem_store(plgpu.multimem_load_reduce(x, collective_axes="d", reduction_op=op), o.at[i], "d")

    kind = getattr(ml_dtypes, dtype, dtype)
    size, elements = np.dtype(kind).itemsize, ROWS * COLUMNS // 128
    with x64(size == 8):
        x = jax.ShapeDtypeStruct((ROWS, COLUMNS), kind)
        p = plan(body, x, out=jax.ShapeDtypeStruct((len(ops), *x.shape), kind), arch=arch)
    report = compiled(p)
    assert report.complaints() == []
    loads = elements if "int" in dtype or size == 8 else elements * size // 16
    stores = elements if size == 8 else elements * size // 16
    found = report.mnemonics
    assert (found["LDGMC"], found["STG"]) == (len(ops) * loads, len(ops) * stores) and not found.get("LDG", 0), found
    text = disassemble(compile_plan(p).compiled.cubin)
    kinds = {line.split("LDGMC.E.")[1].split()[0] for line in text.splitlines() if "LDGMC.E." in line}
    assert len(kinds) == len(ops) and all(k.endswith(".STRONG.SYS") for k in kinds), kinds
    in_float32 = {"sm_90a": "F32ADD", "sm_100a": "HPADD"}[arch] if size == 2 else "ADD"
    for op in ops:
        verb = in_float32 if op == "add" else op.upper()
        name = NAMES.get(dtype, "") if op in ("add", "min", "max") else ""  # the others are of bits
        assert any(k.startswith(f"{verb}.{name}") for k in kinds), (op, kinds)


def test_scalars_and_what_sticks_out(plan, compiled):
    """A scalar is stored by one thread; a tile's part outside of the array is neither read nor written."""

    def body(x, y, o, p):
        axes, tile = ("a", "b"), plgpu.ds(60 + 0 * lax.axis_index("b"), 8)
        plgpu.multimem_store(
            plgpu.multimem_load_reduce(x.at[3], collective_axes=axes, reduction_op="add"), o.at[0], axes
        )
        y_tile = plgpu.multimem_load_reduce(y.at[tile], collective_axes="d", reduction_op="max")
        plgpu.multimem_store(y_tile + 1, p.at[tile], "d")

    x, y = numbers("float32", 7), numbers("int32", 66, 128)
    outs = [jax.ShapeDtypeStruct((1,), np.float32), jax.ShapeDtypeStruct((66, 128), np.int32)]
    p = plan(body, x, y, out=outs, grid=(1,), grid_names=("b",))
    o, got = simulate(p, [x, y])
    assert o[0] == x[3]
    np.testing.assert_array_equal(got[60:66], y[60:66] + 1)
    assert compiled(p).complaints() == []


def test_addresses_of_their_own(plan):
    """What the code needs of an array that it reaches by a multicast address is that address, not the array's own."""
    p = planned(plan, "add", "float32")
    assert p.multicast == (0, 1) and p.pointers == ()
    text = emit(p)
    assert "float* multicast0, float* multicast1" in text and not re.search(r"\bp[01]\b", text.split("kernel.cu")[-1])
    assert "multicast address of x" in plan_json(p)["parameters"]


def test_order_within_the_device(plan):
    """Blocks that store to the same elements are a race, here as for ordinary stores; what nobody has written is found."""

    def overlapping(x, o):
        plgpu.multimem_store(plgpu.load(x), o, "d")

    t = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32)
    with pytest.raises(Race, match="a store writes gmem o"):
        simulate(plan(overlapping, t, out=t, **GRID), [numbers("float32", ROWS, COLUMNS)])

    def unwritten(o, p):
        p[...] = plgpu.multimem_load_reduce(o, collective_axes="d", reduction_op="add")

    with pytest.raises(UninitializedRead):
        simulate(plan(unwritten, out=[t, t]), [])


def test_fragments(plan, compiled):
    """The layout of a product has two neighbours in a thread: one word of halves, two of floats."""
    for dtype in ("bfloat16", "float32"):
        x = numbers(dtype, BLOCKS * 64, 64)
        p = plan(both("add", plgpu.Layout.WGMMA, 64), x, out=jax.ShapeDtypeStruct(x.shape, x.dtype), **GRID)
        assert simulate(p, [x])[0].tobytes() == x.tobytes()
        report = compiled(p)
        assert report.complaints() == [] and report.mnemonics["LDGMC"] == 64 * 64 // 128 // 2


def test_single_elements_of_16_bits(plan, assert_at):
    """Where neighbours are in two threads there is no instruction."""

    def rows_of_65(x, o):
        value = plgpu.load(x.at[:, plgpu.ds(0, 64)], layout=plgpu.Layout.WGMMA)
        plgpu.multimem_store(value, o.at[:, plgpu.ds(0, 64)], "d")  # store

    t = jax.ShapeDtypeStruct((128, 65), np.float16)
    with pytest.raises(UnsupportedCall, match=r"at least 32 bits.*layout_cast") as e:
        emit(plan(rows_of_65, t, out=t))
    assert_at(e.value, rows_of_65, "store")


def test_never_launched(plan):
    """Wherever launch data are made, in a lowering for GPUs, too."""
    p = planned(plan, "add", "float32")
    with pytest.raises(NoMulticastObject, match="multicast object .NVLink SHARP") as e:
        launch_spec(p)
    assert e.value.line is not None and e.value.line.file == __file__
    t = jax.ShapeDtypeStruct((BLOCKS * ROWS, COLUMNS), np.float32)
    kernel = plgpu.kernel(both("add"), t, **GRID)
    with pytest.raises(NoMulticastObject, match="jax.lax.psum"):
        jax.jit(kernel).trace(t).lower(lowering_platforms=("cuda",))
    x = numbers("float32", *t.shape)
    np.testing.assert_array_equal(np.asarray(kernel(x)), x)  # the simulator takes it


def signals(x, o, s):
    """Each block tells all devices, and waits for what all blocks of this one have said."""
    plgpu.semaphore_signal_multicast(s.at[1], 3, collective_axes="d")  # signal
    plgpu.semaphore_wait(s.at[1], 3 * BLOCKS, decrement=False)
    own = plgpu.ds(lax.axis_index("b") * ROWS, ROWS)
    o[own] = x[own]


SIGNALS = dict(scratch_types=[plgpu.SemaphoreType.REGULAR((2,))], **GRID)


@pytest.mark.parametrize("arch", ARCHS)
def test_signals(plan, compiled, arch):
    """One reduction behind a fence of the system's scope, by the address on all devices; waits are by this one's."""
    t = jax.ShapeDtypeStruct((BLOCKS * ROWS, COLUMNS), np.float32)
    p = plan(signals, t, out=t, arch=arch, **SIGNALS)
    x = numbers("float32", *t.shape)
    np.testing.assert_array_equal(simulate(p, [x])[0], x)
    assert p.multicast == (2,) and set(p.pointers) == {0, 1, 2}
    kernel = re.sub(r"#line.*\n", "", emit(p).split("kernel.cu")[-1])
    assert re.search(r"semaphore_fence_sys\(\);\s*multimem_signal\(multicast2 \+ [^;]*, \(int\)\(3\)\);", kernel)
    assert "semaphore_wait(p2 + " in kernel
    report = compiled(p)
    assert report.complaints() == [] and (report.mnemonics["MEMBAR"], report.mnemonics["REDG"]) == (2, 1)


def test_signals_that_nobody_makes_are_missed(plan):
    """They are counted: one too few and the wait does not end."""

    def one_block(x, o, s):
        plgpu.when(lax.axis_index("b") == 0)(lambda: plgpu.semaphore_signal_multicast(s.at[0], collective_axes="d"))
        plgpu.semaphore_wait(s.at[0], BLOCKS, decrement=False)
        o[...] = x[...]

    t = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32)
    with pytest.raises(Deadlock):
        simulate(plan(one_block, t, out=t, **SIGNALS), [numbers("float32", ROWS, COLUMNS)])


def test_signals_are_never_launched(plan):
    t = jax.ShapeDtypeStruct((BLOCKS * ROWS, COLUMNS), np.float32)
    with pytest.raises(NoMulticastObject, match="semaphore_signal cannot be launched: its address") as e:
        launch_spec(plan(signals, t, out=t, **SIGNALS))
    assert e.value.line is not None and e.value.line.file == __file__


def test_signals_on_several_axes():
    def body(x, o, s):
        plgpu.semaphore_signal_multicast(s.at[0], collective_axes="d")
        o[...] = x[...]

    t = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32)
    mesh = jax.make_mesh((1, 1), ("d", "e"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    kernel = plgpu.kernel(body, t, interpret=True, scratch_types=SIGNALS["scratch_types"])
    with pytest.raises(
        UnsupportedCall, match=r"semaphore_signal\(collective_axes=\('d',\)\): the mesh has \('d', 'e'\)"
    ):
        jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))(
            numbers("float32", ROWS, COLUMNS)
        )


def mapped(axes, devices, names=("d",)):
    t = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32)

    def body(x, o):
        plgpu.multimem_store(plgpu.multimem_load_reduce(x, collective_axes=axes, reduction_op="add"), o, axes)

    shape = (devices,) + (1,) * (len(names) - 1)
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[:devices])
    kernel = plgpu.kernel(body, t, interpret=True)
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P(names[0]), out_specs=P(names[0]), check_vma=False))


def test_a_mesh_of_one_device():
    x = numbers("float32", ROWS, COLUMNS)
    np.testing.assert_array_equal(np.asarray(mapped(("d", "e"), 1, ("d", "e"))(x)), x)
    with pytest.raises(UnsupportedCall, match=r"the mesh has \('d', 'e'\)"):
        mapped("d", 1, ("d", "e"))(x)


SEVERAL = """
import jax, numpy as np
from mosaic_gpu.errors import UnsupportedCall
from tests.ops.test_multimem import mapped, ROWS, COLUMNS
try:
    mapped("d", 2)(np.zeros((2 * ROWS, COLUMNS), np.float32))
except UnsupportedCall as error:
    print("refused:", error)
"""


def test_several_devices_are_refused():
    """Not one device's part taken for the sum."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    done = subprocess.run([sys.executable, "-c", SEVERAL], env=environment, capture_output=True, text=True, check=False)
    assert "refused: multimem_load_reduce on 2 devices: the simulator has one" in done.stdout, done.stderr[-2000:]


def test_arguments():
    def traced(body):
        t = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
        plgpu.kernel(body, t, scratch_types=[plgpu.SMEM((ROWS, COLUMNS), jnp.float32)]).program(t)

    for axes in ((), ("d", "d")):
        with pytest.raises(ValueError, match="each once"):
            traced(lambda x, o, s, axes=axes: plgpu.multimem_store(1.0, o, axes))
    with pytest.raises(TypeError, match="reduction_op must be one of add, min, max, and, or, xor"):
        traced(lambda x, o, s: plgpu.multimem_load_reduce(x, collective_axes="d", reduction_op="mul"))
    with pytest.raises(TypeError, match="ref must be a GMEM Ref"):
        traced(lambda x, o, s: plgpu.multimem_store(1.0, s, "d"))
    with pytest.raises(TypeError, match="source is int32"):
        traced(lambda x, o, s: plgpu.multimem_store(jnp.zeros((ROWS, COLUMNS), jnp.int32), o, "d"))
    assert set(STORED) == set(TYPES["add"])
