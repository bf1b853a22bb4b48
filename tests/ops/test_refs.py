"""Loads and stores: SMEM of each layout, type and swizzle, GMEM with tails, scalars, views; simulator and NVRTC."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.support import dtype_of

F = jnp.float32
LAYOUTS = [Layout.WGMMA, Layout.TCGEN05_TMEM_NATIVE, Layout.WG_STRIDED]


def plan_of(body, outs, *arrays, arch="sm_90a", **options):
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    return build_plan(plgpu.kernel(body, outs, **options).program(*abstract), arch)


def like(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def numbers(shape, dtype="float32"):
    x = np.random.default_rng(0).integers(-100, 100, shape)
    return (x > 0) if dtype == "bool" else x.astype(dtype_of(dtype))


def transforms(dtype, swizzle, rows=8):
    size = dtype_of(dtype).itemsize
    return () if not swizzle else (plgpu.TilingTransform((rows, swizzle // size)), plgpu.SwizzleTransform(swizzle))


@pytest.mark.parametrize(
    ("dtype", "swizzle"),
    [(t, s) for t in ("float32", "bfloat16", "int8") for s in (0, 32, 64, 128)]
    + [("float16", 128), ("int32", 64), ("bool", 0)],
)
def test_through_shared_memory(dtype, swizzle, compiled):
    """GMEM to registers to SMEM to registers to GMEM, in all three layouts; two buffers that differ in their tiles."""
    x = numbers((128, 128), dtype)

    def body(x, *refs):
        outs, (tiled, whole) = refs[: len(LAYOUTS)], refs[len(LAYOUTS) :]
        for layout, o in zip(LAYOUTS, outs, strict=True):
            tiled[...] = plgpu.load(x, layout=layout)
            plgpu.commit_smem()
            whole[...] = plgpu.load(tiled, layout=layout)
            plgpu.commit_smem()
            o[...] = plgpu.load(whole, layout=layout)

    scratch = [
        plgpu.SMEM((128, 128), dtype_of(dtype), transforms=transforms(dtype, swizzle, rows)) for rows in (8, 128)
    ]
    plan = plan_of(body, [like(x)] * len(LAYOUTS), x, scratch_types=scratch)
    for found, layout in zip(simulate(plan, [x]), LAYOUTS, strict=True):
        np.testing.assert_array_equal(found, x, err_msg=str(layout))
    if dtype == "bfloat16" or swizzle == 128:
        assert compiled(small(dtype, swizzle)).complaints() == []


def small(dtype, swizzle):
    """The same on few elements, so that it compiles fast and fits."""
    width = max(16, swizzle // dtype_of(dtype).itemsize)
    layouts = LAYOUTS if width <= 32 else [Layout.WGMMA, Layout.WG_STRIDED]
    x = numbers((128 if len(layouts) == 3 else 64, width), dtype)

    def body(x, o, s):
        for layout in layouts:
            s[...] = plgpu.load(x, layout=layout)
            plgpu.commit_smem()
            o[...] = plgpu.load(s, layout=layout)

    scratch = [plgpu.SMEM(x.shape, dtype_of(dtype), transforms=transforms(dtype, swizzle))]
    return plan_of(body, like(x), x, scratch_types=scratch)


def lines(plan, *words):
    return [t for t in body_of(emit(plan)).splitlines() if all(w in t for w in words)]


def test_16_bit_wgmma_arrays_move_by_ldmatrix_and_stmatrix():
    """Four 8x8 pieces at a time, nothing element by element, and one address for all pieces."""
    x = numbers((64, 64), "bfloat16")

    def body(x, o, s):
        s[...] = plgpu.load(x, layout=Layout.WGMMA)
        s[...] = plgpu.load(s, layout=Layout.WGMMA) + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s, o)
        plgpu.wait_smem_to_gmem(0)

    plan = plan_of(
        body, like(x), x, scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16, transforms=transforms("bfloat16", 128))]
    )
    assert len(lines(plan, "stmatrix_x4(")) == 2 * 64 // 16 and len(lines(plan, "ldmatrix_x4(")) == 64 // 16
    assert not lines(plan, "shared +") and len(lines(plan, "swizzle<")) == 3
    np.testing.assert_array_equal(simulate(plan, [x])[0], x + np.ones_like(x))


@pytest.mark.parametrize("swizzle", [0, 32, 128])
def test_16_bit_wgmma_arrays_move_transposed_by_matrices(swizzle):
    """Through a transposed view, too: each 8x8 piece is turned on its way."""
    x = numbers((64, 64), "bfloat16")

    def body(x, o, s):
        s.at[1].transpose((1, 0))[...] = plgpu.load(x, layout=Layout.WGMMA)
        s.at[0].transpose((1, 0))[...] = plgpu.load(s.at[1].transpose((1, 0)), layout=Layout.WGMMA) + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.at[0], o)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=transforms("bfloat16", swizzle))]
    plan = plan_of(body, like(x), x, scratch_types=scratch)
    assert len(lines(plan, "stmatrix_x4_trans(")) == 2 * 64 // 16 and len(lines(plan, "ldmatrix_x4_trans(")) == 64 // 16
    assert not lines(plan, "shared +") and len(lines(plan, "swizzle<")) == (3 if swizzle else 0)
    np.testing.assert_array_equal(simulate(plan, [x])[0], x.T + np.ones_like(x))


def test_rows_in_registers_move_16_bytes_at_a_time():
    """A thread with a whole row of float32 stores it as uint4."""
    x = numbers((128, 16))

    def body(x, o, s):
        s[...] = plgpu.load(x, layout=Layout.TCGEN05_TMEM_NATIVE)
        plgpu.commit_smem()
        o[...] = plgpu.load(s, layout=Layout.TCGEN05_TMEM_NATIVE)

    plan = plan_of(body, like(x), x, scratch_types=[plgpu.SMEM((128, 16), F)])
    assert len(lines(plan, "*(uint4*)(shared +")) == 2 * 16 // 4


def accesses(plan):
    """The vector accesses to shared memory that a plan emits."""
    return [
        t
        for t in body_of(emit(plan)).splitlines()
        if "shared +" in t and any(k in t for k in ("uint2", "uint4", "*(u32*)"))
    ]


@pytest.mark.parametrize("columns", [66, 65, 68])
def test_rows_that_are_no_multiple_of_a_vector(columns, compiled):
    """A buffer with odd rows: an 8-byte access in its second row would be misaligned."""
    x = numbers((64, 64))

    def body(x, o, s):
        s.at[:, plgpu.ds(0, 64)][...] = plgpu.load(x, layout=Layout.WGMMA)
        plgpu.commit_smem()
        o[...] = plgpu.load(s.at[:, plgpu.ds(0, 64)], layout=Layout.WGMMA)

    plan = plan_of(body, like(x), x, scratch_types=[plgpu.SMEM((64, columns), F)])
    np.testing.assert_array_equal(simulate(plan, [x])[0], x)
    assert bool(accesses(plan)) == (columns % 2 == 0)
    if columns == 65:
        assert compiled(plan).complaints() == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strided_views_of_shared_memory(dtype):
    """Every second row and column: the emitted coordinates carry the stride, and nothing is moved in vectors."""
    x = numbers((128, 32), dtype)

    def body(x, o, s):
        s[...] = plgpu.load(x, layout=Layout.WGMMA)
        plgpu.commit_smem()
        o[...] = plgpu.load(s.at[::2, ::2], layout=Layout.WGMMA)

    plan = plan_of(
        body, jax.ShapeDtypeStruct((64, 16), dtype_of(dtype)), x, scratch_types=[plgpu.SMEM((128, 32), dtype_of(dtype))]
    )
    np.testing.assert_array_equal(simulate(plan, [x])[0], x[::2, ::2])
    starts = [t for t in body_of(emit(plan)).splitlines() if re.match(r" *u32 o\d+_\d = ", t)][-2:]
    assert [t.rstrip().endswith(") * 2;") for t in starts] == [True, True], starts
    assert not [t for t in accesses(plan) if "set_bits" in t]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_views_of_shared_memory(dtype, compiled):
    """Slots, ranges of rows and columns at run time, transposed: what is read is what NumPy reads."""
    x = numbers((2, 64, 64), dtype)
    size = dtype_of(dtype).itemsize

    def body(x, a, b, c, s):
        i = lax.axis_index("g")
        for k in range(2):
            s[k] = plgpu.load(x.at[k], layout=Layout.WGMMA)
        plgpu.commit_smem()
        a[i] = plgpu.load(s.at[1 - i], layout=Layout.WGMMA)
        b[i] = plgpu.load(s.at[i, :, plgpu.ds(i * 16, 16)], layout=Layout.WGMMA)
        c[i] = plgpu.load(s.at[i].transpose((1, 0)), layout=Layout.WGMMA)

    outs = [jax.ShapeDtypeStruct(s, dtype_of(dtype)) for s in ((2, 64, 64), (2, 64, 16), (2, 64, 64))]
    tile = (plgpu.TilingTransform((8, 64 // size)), plgpu.SwizzleTransform(64))
    plan = plan_of(
        body,
        outs,
        x,
        scratch_types=[plgpu.SMEM((2, 64, 64), dtype_of(dtype), transforms=tile)],
        grid=(2,),
        grid_names=("g",),
    )
    a, b, c = simulate(plan, [x])
    np.testing.assert_array_equal(a, x[::-1])
    np.testing.assert_array_equal(b, np.stack([x[0, :, :16], x[1, :, 16:32]]))
    np.testing.assert_array_equal(c, x.transpose(0, 2, 1))
    if dtype == "bfloat16":
        assert compiled(plan).complaints() == []


# ---- global memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_tiles_that_stick_out(dtype, compiled):
    """What lies past the end reads as zero and is not written, along both dimensions."""
    x = numbers((100, 20), dtype)

    def body(x, o):
        rows, columns = plgpu.ds(lax.axis_index("i") * 64, 64), plgpu.ds(lax.axis_index("j") * 16, 16)
        o[rows, columns] = plgpu.load(x.at[rows, columns], layout=Layout.WGMMA)

    plan = plan_of(body, like(x), x, grid=(2, 2), grid_names=("i", "j"))
    np.testing.assert_array_equal(simulate(plan, [x])[0], x)
    if dtype in ("bfloat16", "bool"):
        assert compiled(plan).complaints() == []


def test_views_of_global_memory(compiled):
    """Squeezed, strided and transposed."""
    x = numbers((3, 128, 64))

    def body(x, a, b):
        i = lax.axis_index("g")
        a[i] = plgpu.load(x.at[i, ::2, 1:64:4], layout=Layout.WGMMA)
        b[:, i] = plgpu.load(x.at[i].transpose((1, 0)).at[:, plgpu.ds(0, 64)], layout=Layout.WGMMA)

    outs = [jax.ShapeDtypeStruct((3, 64, 16), F), jax.ShapeDtypeStruct((64, 3, 64), F)]
    plan = plan_of(body, outs, x, grid=(3,), grid_names=("g",))
    a, b = simulate(plan, [x])
    np.testing.assert_array_equal(a, x[:, ::2, 1::4])
    np.testing.assert_array_equal(b, x.transpose(2, 0, 1)[..., :64])
    assert compiled(plan).complaints() == []


def test_replicas_are_stored_once():
    """A row vector in WGMMA.reduce(1) is held by four lanes; one of them writes it to GMEM."""
    x = numbers((64, 16))

    def body(x, o):
        o[...] = jnp.max(plgpu.load(x, layout=Layout.WGMMA), axis=1)

    plan = plan_of(body, jax.ShapeDtypeStruct((64,), F), x)
    (test,) = lines(plan, "float*", "= p1", "bool")
    stores = lines(plan, "if (", "*(float*)(")
    assert "lane / 1 % 4 == 0" in test and len(stores) == 2
    assert all(test.split("bool ")[1].split(" ")[0] in s for s in stores)
    np.testing.assert_array_equal(simulate(plan, [x])[0], x.max(1))


def test_large_indices_do_not_overflow():
    """Offsets into an array are 64 bits wide."""
    x = jax.ShapeDtypeStruct((70000, 70000), F)
    k = plgpu.kernel(lambda x, o: o.__setitem__(0, x[69999, 69999]), jax.ShapeDtypeStruct((1,), F))
    (read,) = lines(build_plan(k.program(x), "sm_90a"), "*(float*)(p0")
    assert "(long long)(69999) * n0_1" in read


# ---- scalars ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
def test_scalars(dtype, compiled):
    """One element of GMEM and of SMEM, at static and run-time places."""
    x = numbers((4, 8), dtype)

    def body(x, o, s):
        i = lax.axis_index("g")
        s[i, 3] = x[i, 5]
        s[1 + i, 7] = x[0, i]
        plgpu.commit_smem()
        o[i, 0] = s[i, 3]
        o[i, 1] = s[1 + i, 7]

    tile = (plgpu.TilingTransform((2, 4)),)
    out = jax.ShapeDtypeStruct((2, 2), dtype_of(dtype))
    plan = plan_of(
        body, out, x, scratch_types=[plgpu.SMEM((4, 8), dtype_of(dtype), transforms=tile)], grid=(2,), grid_names=("g",)
    )
    np.testing.assert_array_equal(simulate(plan, [x])[0], [[x[i, 5], x[0, i]] for i in range(2)])
    assert compiled(plan).complaints() == []


def test_a_scalar_is_stored_by_one_thread():
    plan = plan_of(lambda x, o: o.__setitem__(0, x[0] + 1.0), jax.ShapeDtypeStruct((1,), F), numbers((4,)))
    assert plan.roles[0].single_thread and len(lines(plan, "if (tid == 0)")) == 1

    def with_arrays(x, y, o):
        o[0] = x[0]
        y[...] = y[...] + 1.0

    plan = plan_of(with_arrays, [jax.ShapeDtypeStruct((128,), F), jax.ShapeDtypeStruct((1,), F)], numbers((4,)))
    text = [t for t in body_of(emit(plan)).splitlines() if not t.startswith("#line")]
    store = next(i for i, t in enumerate(text) if "*(float*)(p2" in t)
    assert "if (tid == 0)" in text[store - 1]


def test_swap_returns_what_was_there():
    """`ref[...] = x` as an expression: jax.ref.swap."""

    def body(x, o, p):
        o[0] = x[0]
        old = jax.ref.swap(o, 0, x[1])
        p[0] = old

    plan = plan_of(body, [jax.ShapeDtypeStruct((1,), F)] * 2, numbers((4,)))
    x = np.array([1, 2, 3, 4], np.float32)
    o, p = simulate(plan, [x])
    assert (o[0], p[0]) == (2, 1)


# ---- refusals -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda t, b: t[...], "get on a TMEM Ref: use async_load_tmem"),
        (lambda t, b: b[0], "get on a BARRIER Ref: barriers are waited on, not read"),
    ],
)
def test_refs_that_cannot_be_read(use, words, assert_at):
    def body(t, b):
        use(t, b)

    with pytest.raises(UnsupportedCall, match=words) as e:
        plan_of(body, (), scratch_types=[plgpu.TMEM((128, 8), F), plgpu.Barrier(num_barriers=2)], arch="sm_100a")
    assert e.value.line.file == __file__


def test_a_part_of_an_accumulator():
    def body(o):
        o[...] = plgpu.run_scoped(lambda acc: acc[:, 0:8], plgpu.ACC((64, 16)))

    with pytest.raises(UnsupportedCall, match="an accumulator is read and written whole"):
        plan_of(body, jax.ShapeDtypeStruct((64, 8), F))
