"""The emitted C++ run on the host, against the simulator and NumPy: addresses, packing, shuffles, control flow, barriers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import Layout
from mosaic_gpu.plan.build import build_plan
from tests.support import dtype_of

F = jnp.float32
LAYOUTS = [Layout.WGMMA, Layout.TCGEN05_TMEM_NATIVE, Layout.WG_STRIDED]


def shape(*dims, dtype=F):
    return jax.ShapeDtypeStruct(dims, dtype)


def plan_of(body, outs, *arrays, **options):
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    return build_plan(plgpu.kernel(body, outs, **options).program(*abstract), "sm_90a")


def numbers(*dims, dtype="float32", seed=0):
    x = np.random.default_rng(seed).integers(-50, 50, dims)
    return (x > 0) if dtype == "bool" else x.astype(dtype_of(dtype))


def tiles(dtype, swizzle, rows=8):
    size = dtype_of(dtype).itemsize
    return () if not swizzle else (plgpu.TilingTransform((rows, swizzle // size)), plgpu.SwizzleTransform(swizzle))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_layouts_and_types_in_global_memory(agree, dtype):
    """A copy in each layout, of a tile that sticks out of the array: every element once, nothing past the end."""
    x = numbers(200, 40, dtype=dtype)

    def body(x, *outs):
        rows, columns = plgpu.ds(lax.axis_index("i") * 128, 128), plgpu.ds(lax.axis_index("j") * 32, 32)
        for layout, o in zip(LAYOUTS, outs, strict=True):
            o[rows, columns] = plgpu.load(x.at[rows, columns], layout=layout)

    plan = plan_of(body, [shape(*x.shape, dtype=x.dtype)] * 3, x, grid=(2, 2), grid_names=("i", "j"))
    for found in agree(plan, [x]):
        np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize(
    ("dtype", "swizzle"),
    [
        ("bfloat16", 0),
        ("bfloat16", 32),
        ("bfloat16", 64),
        ("bfloat16", 128),
        ("float32", 0),
        ("float32", 128),
        ("int8", 64),
    ],
)
def test_shared_memory(agree, dtype, swizzle):
    """What one layout writes, another reads, in every combination; stmatrix and vectors included."""
    x = numbers(128, 128, dtype=dtype)

    def body(x, *refs):
        outs, buffers = refs[:3], refs[3:]
        for i, o in enumerate(outs):
            buffers[i % 2][...] = plgpu.load(x, layout=LAYOUTS[i])
            plgpu.commit_smem()
            o[...] = plgpu.load(buffers[i % 2], layout=LAYOUTS[(i + 1) % 3])
            plgpu.commit_smem()

    scratch = [plgpu.SMEM((128, 128), x.dtype, transforms=tiles(dtype, swizzle, rows)) for rows in (8, 128)]
    plan = plan_of(body, [shape(128, 128, dtype=x.dtype)] * 3, x, scratch_types=scratch)
    for found in agree(plan, [x]):
        np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_matrices_move_transposed(agree, swizzle):
    """stmatrix and ldmatrix with `.trans`: what goes in through a transposed view comes out by either, also from a run-time
    slot and out of wide tiles."""
    x = numbers(128, 192, dtype="bfloat16")

    def body(x, a, b, s):
        i = lax.axis_index("g")
        s.at[i].transpose((1, 0))[...] = plgpu.load(x, layout=Layout.WGMMA)
        plgpu.commit_smem()
        a[...] = plgpu.load(s.at[i].transpose((1, 0)), layout=Layout.WGMMA)
        b[...] = plgpu.load(s.at[i], layout=Layout.WGMMA)

    outs = [shape(*n, dtype=x.dtype) for n in ((128, 192), (192, 128))]
    scratch = [plgpu.SMEM((1, 192, 128), x.dtype, transforms=tiles("bfloat16", swizzle))]
    plan = plan_of(body, outs, x, scratch_types=scratch, grid=(1,), grid_names=("g",))
    straight, turned = agree(plan, [x])
    np.testing.assert_array_equal(straight, x)
    np.testing.assert_array_equal(turned, x.T)


def test_views_of_shared_memory(agree):
    """Slots, run-time columns, transposed, strided, rows of odd length."""
    x = numbers(2, 64, 64)

    def body(x, a, b, c, d, e, s, odd):
        i = lax.axis_index("g")
        for k in range(2):
            s[k] = plgpu.load(x.at[k], layout=Layout.WGMMA)
            odd.at[k, :, plgpu.ds(0, 64)][...] = plgpu.load(x.at[k], layout=Layout.WGMMA)
        plgpu.commit_smem()
        a[i] = plgpu.load(s.at[1 - i], layout=Layout.WGMMA)
        b[i] = plgpu.load(s.at[i, :, plgpu.ds(i * 16, 16)], layout=Layout.WGMMA)
        c[i] = plgpu.load(s.at[i].transpose((1, 0)), layout=Layout.WGMMA)
        d[i] = plgpu.load(odd.at[i, :, plgpu.ds(0, 64)], layout=Layout.WG_STRIDED)
        e[i] = plgpu.load(odd.at[i, :, 0:64:4], layout=Layout.WGMMA)

    outs = [shape(*n) for n in ((2, 64, 64), (2, 64, 16), (2, 64, 64), (2, 64, 64), (2, 64, 16))]
    scratch = [plgpu.SMEM((2, 64, 64), F, transforms=tiles("float32", 64)), plgpu.SMEM((2, 64, 65), F)]
    plan = plan_of(body, outs, x, scratch_types=scratch, grid=(2,), grid_names=("g",))
    a, b, c, d, e = agree(plan, [x])
    np.testing.assert_array_equal(a, x[::-1])
    np.testing.assert_array_equal(b, np.stack([x[0, :, :16], x[1, :, 16:32]]))
    np.testing.assert_array_equal(c, x.transpose(0, 2, 1))
    np.testing.assert_array_equal(d, x)
    np.testing.assert_array_equal(e, x[:, :, ::4])


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Layout.WGMMA, t) for t in ("float32", "bfloat16", "float16", "int32")]
    + [(Layout.TCGEN05_TMEM_NATIVE, "bfloat16")],
    ids=str,
)
def test_reductions_and_broadcasts(agree, dtype, layout):
    """All four reductions along rows, broadcast back, with a row vector and a column vector."""
    x, row, column = numbers(128, 16, dtype=dtype), numbers(16, dtype=dtype, seed=1), numbers(128, dtype=dtype, seed=2)

    def body(x, row, column, o, p, top):
        a = plgpu.load(x, layout=layout)
        b = a + row[...][None, :] - column[...][:, None]
        o[...] = b - jnp.max(b, axis=1)[:, None]
        p[...] = jnp.sum(b, axis=1) + jnp.min(b, axis=1)
        top[...] = jnp.prod(jnp.minimum(jnp.maximum(b, -1), 1), axis=1)

    outs = [shape(128, 16, dtype=x.dtype), shape(128, dtype=x.dtype), shape(128, dtype=x.dtype)]
    agree(plan_of(body, outs, x, row, column), [x, row, column], ulps=2)


def test_large_integers_in_reductions(agree):
    x = numbers(64, 16, dtype="int32") + 2**24 + 1

    def body(x, top, low):
        a = plgpu.load(x, layout=Layout.WGMMA)
        top[...], low[...] = jnp.max(a, axis=1), jnp.min(a, axis=1)

    top, low = agree(plan_of(body, [shape(64, dtype=jnp.int32)] * 2, x), [x])
    np.testing.assert_array_equal(top, x.max(1))
    np.testing.assert_array_equal(low, x.min(1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_iota(agree, layout):
    def body(o, p):
        rows, columns = (plgpu.broadcasted_iota(jnp.int32, (128, 16), d, layout=layout) for d in (0, 1))
        o[...] = rows * 100 + columns
        p[...] = columns.astype(jnp.bfloat16)

    o, _ = agree(plan_of(body, [shape(128, 16, dtype=jnp.int32), shape(128, 16, dtype=jnp.bfloat16)]), [])
    np.testing.assert_array_equal(o, np.arange(128)[:, None] * 100 + np.arange(16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_arithmetic_in_pairs(agree, dtype):
    """16-bit values two to a register, meeting 32-bit ones, booleans, splats and odd counts."""
    x, y = numbers(64, 8, dtype=dtype), numbers(64, 8, dtype=dtype, seed=1)
    v = numbers(128, dtype=dtype, seed=2)

    def body(x, y, v, o, p, q, r):
        a, b = plgpu.load(x, layout=Layout.WGMMA), plgpu.load(y, layout=Layout.WGMMA)
        o[...] = jnp.where(a > b, a * b + a, b - a * jnp.asarray(0.5, a.dtype))
        p[...] = a.astype(F) * 0.25 + b.astype(F)
        q[...] = (a < b).astype(jnp.int32) + a.astype(jnp.int32)
        w = v[...]
        r[...] = (w + w).astype(F) + w.astype(F)

    outs = [shape(64, 8, dtype=x.dtype), shape(64, 8), shape(64, 8, dtype=jnp.int32), shape(128)]
    agree(plan_of(body, outs, x, y, v), [x, y, v])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_control_flow(agree, dtype):
    """Loops with swapped carries and splats, branches, switch at and past its ends, while."""

    def compute(x, n):
        a, b = lax.fori_loop(0, n, lambda i, c: (c[1] + 1, c[0] * jnp.asarray(0.5, x.dtype)), (x, jnp.zeros_like(x)))
        c = lax.cond(n > 2, lambda: a + b, lambda: a - b)
        d = lax.switch(n - 1, [lambda: jnp.zeros_like(x), lambda: x, lambda: x * 2, lambda: c])
        return (
            lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + d), (jnp.int32(0), jnp.ones_like(x)))[1] + c
        )

    def body(x, n, o):
        g = plgpu.program_id(0)
        o[g] = compute(plgpu.load(x, layout=Layout.WGMMA), n[g])

    x, n = numbers(64, 8, dtype=dtype), np.array([0, 1, 2, 3, 4, 9], np.int32)
    agree(plan_of(body, shape(6, 64, 8, dtype=x.dtype), x, n, grid=(6,)), [x, n], ulps=1)


def test_loops_over_scalars(agree):
    """Parallel assignment, a counter after its loop, nested loops, a carry that is another's old value."""

    def body(x, n, o):
        g = plgpu.program_id(0)
        a, b = lax.fori_loop(0, n[g], lambda i, c: (c[1], c[0] + i.astype(F)), (x[0], x[1]))
        i, _, t = lax.while_loop(
            lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], c[2] + x[2]), (jnp.int32(2), n[g], a)
        )
        nested = lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(i, 4, lambda j, d: d * 2.0 + j.astype(F), c) + 1.0, b)
        for k, v in enumerate((a, b, i.astype(F), t, nested)):
            o[g, k] = v

    x, n = np.array([1, 2, 3], np.float32), np.array([0, 1, 2, 5], np.int32)
    agree(plan_of(body, shape(4, 5), x, n, grid=(4,)), [x, n])


def test_grids_of_every_rank(agree):
    """Index and size along each of four axes."""

    def body(o):
        index = [lax.axis_index(a) for a in "abcd"]
        o[tuple(index)] = (
            sum(i * 10**k for k, i in enumerate(index)) + 10000 * plgpu.num_programs(1) + 100000 * plgpu.num_programs(3)
        )

    grid = (2, 3, 2, 4)
    (o,) = agree(plan_of(body, shape(*grid, dtype=jnp.int32), grid=grid, grid_names=tuple("abcd")), [])
    index = np.indices(grid)
    np.testing.assert_array_equal(o, sum(index[k] * 10**k for k in range(4)) + 30000 + 400000)


def test_roles_hand_data_over(agree):
    """Two warpgroups, a ring of two slots, mbarriers counted warp by warp and by one thread, and a named barrier."""
    x = numbers(5, 64, 16)

    def body(x, o, s, full, empty, turn):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            def step(i, _):
                slot = lax.rem(i, 2)

                @plgpu.when(i >= 2)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                s[slot] = plgpu.load(x.at[i], layout=Layout.WGMMA) * 2.0
                plgpu.barrier_arrive(full.at[slot])

            lax.fori_loop(0, plgpu.dim_size(x, 0), step, None)
            plgpu.named_barrier_arrive(turn)

        @plgpu.when(wg == 1)
        def _():
            def step(i, _):
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(full.at[slot])
                o[i] = plgpu.load(s.at[slot], layout=Layout.WGMMA) + 1.0
                plgpu.barrier_arrive(empty.at[slot])

            lax.fori_loop(0, plgpu.dim_size(x, 0), step, None)
            plgpu.named_barrier_sync(turn)

    two = plgpu.Barrier(num_barriers=2)
    scratch = [plgpu.SMEM((2, 64, 16), F), two, two, plgpu.NamedBarrier(num_warpgroups=2)]
    plan = plan_of(body, shape(5, 64, 16), x, scratch_types=scratch, num_threads=2, thread_name="wg")
    (o,) = agree(plan, [x])
    np.testing.assert_array_equal(o, x * 2 + 1)


def test_warps_of_a_warpgroup(on_host):
    """warp_map: each warp in its role, phases that outlive the map; every warp arrives, so none can lap another."""

    def body(x, o, each, all_):
        def step(i, _):
            def warps(warp):
                @plgpu.when(warp == 0)
                def _():
                    o[i, 0] = x[i] * 2.0
                    plgpu.barrier_arrive(each)
                    plgpu.barrier_wait(each)

                @plgpu.when(warp > 0)
                def _():
                    o[i, warp] = x[i] + warp.astype(F)
                    plgpu.barrier_arrive(each)
                    plgpu.barrier_wait(each)

            plgpu.warp_map(warps)
            plgpu.barrier_arrive(all_)
            plgpu.barrier_wait(all_)

        lax.fori_loop(0, 3, step, None)

    x = np.array([1, 2, 3], np.float32)
    plan = plan_of(body, shape(3, 4), x, scratch_types=[plgpu.Barrier(num_arrivals=4), plgpu.Barrier()])
    assert [(b.unit, b.expected) for b in plan.barriers.values()] == [(1, 4), (4, 4)]
    (o,) = on_host(plan, [x])
    np.testing.assert_array_equal(o, np.stack([x * 2, x + 1, x + 2, x + 3], 1))


@pytest.mark.parametrize("weight", ["warp first", "warpgroup first"])
def test_arrivals_of_a_warp_and_of_a_warpgroup(on_host, weight):
    """One barrier for both: the warp's arrival counts as much as the warpgroup's four, and the wait ends."""

    def body(x, o, b):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            plgpu.barrier_arrive(b)
            o[0] = x[0]

        @plgpu.when(wg == 1)
        def _():
            def warps(warp):
                @plgpu.when(warp == 1)
                def _():
                    o[1] = jnp.reshape(x[1], ()) + 1.0
                    plgpu.barrier_arrive(b)

            if weight == "warp first":
                plgpu.warp_map(warps)
                plgpu.barrier_arrive(b)
            else:
                plgpu.barrier_arrive(b)
                plgpu.warp_map(warps)
            plgpu.barrier_wait(b)
            o[2] = x[2]

    x = np.array([1, 2, 3], np.float32)
    plan = plan_of(body, shape(3), x, scratch_types=[plgpu.Barrier(num_arrivals=3)], num_threads=2, thread_name="wg")
    (o,) = on_host(plan, [x])
    np.testing.assert_array_equal(o, [1, 3, 3])
