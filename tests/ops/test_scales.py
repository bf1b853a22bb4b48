"""Block-scaled products (mxfp8, mxfp4, nvfp4): factors through shared memory into tensor memory, against float64, and compiled.

Refusals are in tests/refusals, the words that the tensor core reads in tests/oracle.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import Race, UninitializedRead
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams, simulate
from tests.support import program_of

E4, E5, E8, F4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
KINDS = {  # types of A, B and factors, elements that share one
    "mxfp8": (E4, E5, E8, 32),
    "mxfp4": (F4, F4, E8, 32),
    "mxfp4 in 16": (F4, F4, E8, 16),
    "nvfp4": (F4, F4, E4, 16),
}
MNEMONICS = {"mxfp8": "UTCQMMA", "mxfp4": "UTCOMMA", "mxfp4 in 16": "UTCOMMA", "nvfp4": "UTCOMMA"}


def values(rng, shape, dtype):
    return rng.uniform(-4, 4, shape).astype(dtype)


def factors(rng, shape, dtype):
    if dtype is E8:
        return rng.integers(122, 132, shape).astype(np.uint8).view(E8)  # 2^-5 to 2^4
    return rng.uniform(0.25, 8, shape).astype(dtype)


def packed(x):
    """Two float4 in a byte, the lower half first; other types as they are."""
    if x.dtype != F4:
        return x
    raw = x.view(np.uint8)
    return raw[:, ::2] | raw[:, 1::2] << 4


def tiled(scales):
    """Factors (rows, n) as the copy takes them, rows filled up to whole blocks."""
    rows, n = scales.shape
    scales = np.concatenate([scales, np.zeros((-rows % 128, n), scales.dtype)])
    blocks = scales.reshape(-1, 4, 32, n // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(blocks).reshape(-1, n // 4, 32, 16)


def product(a, b, a_scale, b_scale, block):
    def wide(x, scale):
        return x.astype(np.float64) * np.repeat(scale.astype(np.float64), block, axis=1)

    return wide(a, a_scale) @ wide(b, b_scale).T


def operands(kind, m, n, k, seed=0):
    a_type, b_type, scale_type, block = KINDS[kind]
    rng = np.random.default_rng(seed)
    a, b = values(rng, (m, k), a_type), values(rng, (n, k), b_type)
    a_scale, b_scale = (factors(rng, (rows, k // block), scale_type) for rows in (m, n))
    want = product(a, b, a_scale, b_scale, block)
    return (packed(a), packed(b), tiled(a_scale), tiled(b_scale)), want


def scaled_kernel(arrays, n, steps, *, pair=False, slots=1, wait=True, copy_after=False, copy_b=True):
    """acc = the sum of `steps` products along K.  Factors go through `slots` slots of tensor memory; before one is overwritten a
    commit is waited for (wait).  copy_after: the products are issued before the copies of their factors."""
    a, b, a_scale, b_scale = arrays
    wide, groups, share = a.shape[1] // steps, a_scale.shape[1] // steps, 2 if pair else 1
    axis = dict(collective_axis="pair") if pair else {}

    def shared(partition):
        return dict(collective_axes="pair", leader_tracked=partition) if pair else {}

    halves, whole = shared(plgpu.CopyPartition.PARTITIONED(0)), shared(plgpu.CopyPartition.REPLICATED)

    def body(a, b, a_s, b_s, o, a_t, b_t, a_st, b_st, acc, a_sc, b_sc, full, free, done):
        me = lax.axis_index("pair") if pair else 0

        def load():
            for i in range(steps):
                k, g = plgpu.ds(i * wide, wide), plgpu.ds(i * groups, groups)
                plgpu.copy_gmem_to_smem(a.at[:, k], a_t.at[i], full.at[i], **halves)
                plgpu.copy_gmem_to_smem(b.at[:, k], b_t.at[i], full.at[i], **halves)
                plgpu.copy_gmem_to_smem(a_s.at[:, g], a_st.at[i], full.at[i], **halves)
                plgpu.copy_gmem_to_smem(b_s.at[:, g], b_st.at[i], full.at[i], **whole)

        def multiply():
            for i in range(steps):
                slot = i % slots
                plgpu.barrier_wait(full.at[i])
                if i >= slots and wait:
                    plgpu.barrier_wait(free.at[slot])

                def copy(i=i, slot=slot):
                    plgpu.async_copy_scales_to_tmem(a_st.at[i], a_sc.at[slot], **axis)
                    if copy_b:
                        plgpu.async_copy_scales_to_tmem(b_st.at[i], b_sc.at[slot], **axis)

                if not copy_after:
                    copy()
                factors = dict(a_scale=a_sc.at[slot], b_scale=b_sc.at[slot])
                plgpu.tcgen05_mma(acc, a_t.at[i], b_t.at[i].transpose((1, 0)), **factors, accumulate=i > 0, **axis)
                if copy_after:
                    copy()
                if i + slots < steps and wait:
                    plgpu.tcgen05_commit_arrive(free.at[slot])
            plgpu.tcgen05_commit_arrive(done, **axis)

        @plgpu.warp_map
        def _(warp):
            plgpu.when(warp == 0)(load)
            plgpu.when((warp == 1) & (me == 0))(multiply)

        plgpu.barrier_wait(done)
        for start in range(0, n, 64):  # more at once would not fit the registers
            some = plgpu.ds(start, 64)
            o[plgpu.ds(me * 128, 128), some] = plgpu.async_load_tmem(acc.at[:, some])
            plgpu.wait_load_tmem()

    def scales(rows):
        return plgpu.TMEM(
            (slots, rows, 4 * groups), a_scale.dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT, collective=pair
        )

    tile = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((128 * share, n), jnp.float32),
        scratch_types=[
            plgpu.SMEM((steps, 128, wide), a.dtype, transforms=tile),
            plgpu.SMEM((steps, n // share, wide), b.dtype, transforms=tile),
            plgpu.SMEM((steps, 1, groups, 32, 16), a_scale.dtype),
            plgpu.SMEM((steps, b_scale.shape[0], groups, 32, 16), a_scale.dtype),
            plgpu.TMEM((128, n), jnp.float32, collective=pair),
            scales(128),
            scales(128 * b_scale.shape[0]),
            plgpu.Barrier(num_arrivals=4, num_barriers=steps),
            plgpu.Barrier(num_barriers=slots, orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(arch="sm_100a"),
        **(dict(cluster=(2,), cluster_names=("pair",)) if pair else {}),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "n", "steps", "slots"),
    [(128, 128, 1, 1), (128, 64, 2, 2), (128, 256, 2, 1), (256, 128, 3, 2), (256, 256, 2, 1)],
)
def test_products(kind, m, n, steps, slots):
    """Every kind, one block and a pair, one or two blocks of factors of B, filled up or not; in several orders of events; with as
    many products in the machine code as K has steps."""
    arrays, want = operands(kind, m, n, steps * 256)
    kernel = scaled_kernel(arrays, n, steps, pair=m == 256, slots=slots)
    program = program_of(kernel, arrays)
    plan = build_plan(program, "sm_100a")
    for params in (dict(), dict(timing="early"), dict(seed=1), dict(seed=2), dict(shadow="bytes")):
        (got,) = simulate(plan, arrays, SimulatorParams(**params))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [128, 256])
def test_machine_code(compiled, arch, kind, m):
    """A product for each 32 bytes of K, a copy for each four factors of 128 rows."""
    steps, n = 2, 256
    arrays, _ = operands(kind, m, n, steps * 256)
    kernel = scaled_kernel(arrays, n, steps, pair=m == 256)
    plan = build_plan(program_of(kernel, arrays), arch)
    report = compiled(plan)
    assert report.complaints() == []
    wide = arrays[0].shape[1] // 32
    copies = steps * (arrays[2].shape[1] // steps) * (1 + 2)
    assert report.mnemonics[MNEMONICS[kind]] == wide and report.mnemonics["UTCCP"] == copies
    assert f"tcgen05_copy_32x128b_warpx4{'<2>' if m == 256 else ''}(" in emit(plan)


def test_factors_that_are_no_number():
    """Of float8_e8m0fnu 0xFF: the rows and columns of that factor, and no others."""
    arrays, _ = operands("mxfp8", 128, 128, 256)
    a_scale = arrays[2].copy()
    a_scale.view(np.uint8)[0, 0, 3, 4] = 255  # factor 0 of row 32 + 3
    arrays = (*arrays[:2], a_scale, arrays[3])
    (got,) = simulate(build_plan(program_of(scaled_kernel(arrays, 128, 1), arrays), "sm_100a"), arrays)
    assert np.isnan(got[35]).all() and np.isfinite(np.delete(got, 35, 0)).all()


ORDERS = (dict(), dict(timing="early"), dict(seed=1))


@pytest.mark.parametrize(
    ("options", "errors", "message"),
    [
        (dict(wait=False), Race, "async_copy_scales_to_tmem.*tcgen05_mma .scale factors."),
        (dict(copy_after=True), (Race, UninitializedRead), "scale"),
        (dict(copy_b=False), UninitializedRead, "tcgen05_mma, b_scale, is tensor memory that nothing has written"),
    ],
)
@pytest.mark.parametrize("pair", [False, True])
def test_mistakes(options, errors, message, pair):
    """Factors overwritten while a product may read them, copied too late, or not at all."""
    arrays, _ = operands("nvfp4", 256 if pair else 128, 128, 512)
    program = program_of(scaled_kernel(arrays, 128, 2, pair=pair, **options), arrays)
    for params in ORDERS:
        with pytest.raises(errors, match=message):
            simulate(build_plan(program, "sm_100a"), arrays, SimulatorParams(**params))
