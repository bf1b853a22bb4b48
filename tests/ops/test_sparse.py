"""2:4 sparse products: metadata through shared memory into tensor memory, against float64, and compiled.

Refusals are in tests/refusals, the words that the tensor core reads in tests/oracle.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.encodings import Instruction
from mosaic_gpu.errors import IllegalInstruction, Race, UninitializedRead
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams, simulate
from tests.support import program_of

E4, E5, BF = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
TYPES = {  # A, B, accumulator, mnemonic of the machine code
    "float16": (np.float16, np.float16, np.float32, "UTCHMMA"),
    "bfloat16": (BF, BF, np.float32, "UTCHMMA"),
    "float32": (np.float32, np.float32, np.float32, "UTCHMMA"),
    "float8": (E4, E5, np.float32, "UTCQMMA"),
    "int8": (np.int8, np.uint8, np.int32, "UTCIMMA"),
}
PAIRS = np.array(list(itertools.combinations(range(4), 2)), np.uint8)


def sparse_operands(kind, m, n, k, seed=0):
    """(A as kept, B, metadata as copied) and the product in float64."""
    a_type, b_type, acc_type, _ = TYPES[kind]
    rng = np.random.default_rng(seed)
    group, each = (2, 1) if kind == "float32" else (4, 2)

    def values(shape, dtype):
        if acc_type is np.int32:
            info = np.iinfo(dtype)
            return rng.integers(info.min, info.max + 1, shape, dtype)
        x = rng.uniform(-2, 2, shape).astype(dtype)
        return (x.view(np.uint32) & 0xFFFFE000).view(np.float32) if dtype is np.float32 else x  # as tf32 reads it

    a, b = values((m, k // 2), a_type), values((n, k), b_type)
    if kind == "float32":
        at = rng.integers(0, 2, (m, k // group, 1)).astype(np.uint8)
    else:
        at = PAIRS[rng.integers(0, 6, (m, k // group))]
    dense = np.zeros((m, k // group, group))
    np.put_along_axis(dense, at.astype(np.int64), a.reshape(m, k // group, each).astype(np.float64), axis=-1)
    meta = np.asarray(plgpu.format_tcgen05_sparse_metadata(at, a_type))
    return (a, b, meta), dense.reshape(m, k) @ b.astype(np.float64).T


def sparse_kernel(
    arrays, n, steps, acc_type, *, pair=False, slots=1, wait=True, copy_after=False, copy=True, turn_b=False
):
    """acc = the sum of `steps` products along K.  Metadata goes through `slots` slots; before one is overwritten a
    commit is waited for (wait).  copy_after: the products are issued before the copies of their metadata.  turn_b: B is (k, n)
    in memory."""
    a, b, meta = arrays
    wide, tiles, share = a.shape[1] // steps, meta.shape[1] // steps, 2 if pair else 1
    size = a.dtype.itemsize
    axis = dict(collective_axis="pair") if pair else {}

    def shared(partition):
        return dict(collective_axes="pair", leader_tracked=partition) if pair else {}

    def body(a, b, meta, o, a_t, b_t, m_t, acc, m_sp, full, free, done):
        me = lax.axis_index("pair") if pair else 0
        rows = shared(plgpu.CopyPartition.PARTITIONED(0))
        columns = shared(plgpu.CopyPartition.PARTITIONED(1 if turn_b else 0))

        def load():
            for i in range(steps):
                k = plgpu.ds(i * 2 * wide, 2 * wide)
                plgpu.copy_gmem_to_smem(a.at[:, plgpu.ds(i * wide, wide)], a_t.at[i], full.at[i], **rows)
                plgpu.copy_gmem_to_smem(b.at[k] if turn_b else b.at[:, k], b_t.at[i], full.at[i], **columns)
                plgpu.copy_gmem_to_smem(meta.at[:, plgpu.ds(i * tiles, tiles)], m_t.at[i], full.at[i], **rows)

        def multiply():
            for i in range(steps):
                slot = i % slots
                plgpu.barrier_wait(full.at[i])
                if i >= slots and wait:
                    plgpu.barrier_wait(free.at[slot])
                if copy and not copy_after:
                    plgpu.async_copy_sparse_metadata_to_tmem(m_t.at[i], m_sp.at[slot], **axis)
                b_op = b_t.at[i] if turn_b else b_t.at[i].transpose((1, 0))
                plgpu.tcgen05_mma(acc, a_t.at[i], b_op, a_sparse_metadata=m_sp.at[slot], accumulate=i > 0, **axis)
                if copy_after:
                    plgpu.async_copy_sparse_metadata_to_tmem(m_t.at[i], m_sp.at[slot], **axis)
                if i + slots < steps and wait:
                    plgpu.tcgen05_commit_arrive(free.at[slot])
            plgpu.tcgen05_commit_arrive(done, **axis)

        @plgpu.warp_map
        def _(warp):
            plgpu.when(warp == 0)(load)
            plgpu.when((warp == 1) & (me == 0))(multiply)

        plgpu.barrier_wait(done)
        for start in range(0, n, 32):
            some = plgpu.ds(start, 32)
            o[plgpu.ds(me * 128, 128), some] = plgpu.async_load_tmem(acc.at[:, some])
            plgpu.wait_load_tmem()

    layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
    tile = (plgpu.TilingTransform((8, 128 // size)), plgpu.SwizzleTransform(128))
    b_tile = (2 * wide, n // share) if turn_b else (n // share, 2 * wide)
    return plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((128 * share, n), acc_type),
        scratch_types=[
            plgpu.SMEM((steps, 128, wide), a.dtype, transforms=tile),
            plgpu.SMEM((steps, *b_tile), b.dtype, transforms=tile),
            plgpu.SMEM((steps, 1, tiles, 128, 16), jnp.uint8),
            plgpu.TMEM((128, n), acc_type, collective=pair),
            plgpu.TMEM((slots, 128, 16 * tiles), jnp.uint8, layout=layout, collective=pair),
            plgpu.Barrier(num_arrivals=3, num_barriers=steps),
            plgpu.Barrier(num_barriers=slots, orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(arch="sm_100a"),
        **(dict(cluster=(2,), cluster_names=("pair",)) if pair else {}),
    )


def wide_k(kind):
    """So much of K that rows of A have 128 bytes."""
    return 256 // np.dtype(TYPES[kind][0]).itemsize


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("m", "n", "steps", "slots"),
    [(128, 128, 1, 1), (128, 96, 3, 2), (128, 256, 2, 1), (256, 128, 3, 2), (256, 256, 2, 1)],
)
def test_products(kind, m, n, steps, slots):
    """Every kind, in one block and in a pair; in several orders of events."""
    arrays, want = sparse_operands(kind, m, n, steps * wide_k(kind))
    kernel = sparse_kernel(arrays, n, steps, TYPES[kind][2], pair=m == 256, slots=slots)
    plan = build_plan(program_of(kernel, arrays), "sm_100a")
    for params in (dict(), dict(timing="early"), dict(seed=1), dict(shadow="bytes")):
        (got,) = simulate(plan, arrays, SimulatorParams(**params))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["float16", "float8"])
@pytest.mark.parametrize("m", [128, 256])
def test_float16_accumulators(compiled, kind, m):
    """Rounded at each step: 8 of them."""
    arrays, want = sparse_operands(kind, m, 128, 2 * wide_k(kind))
    plan = build_plan(program_of(sparse_kernel(arrays, 128, 2, np.float16, pair=m == 256), arrays), "sm_100a")
    (got,) = simulate(plan, arrays)
    np.testing.assert_allclose(got, want, rtol=0, atol=8 * 2**-11 * 2 * np.abs(want).max())
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("kind", ["bfloat16", "float8", "int8"])
@pytest.mark.parametrize("m", [128, 256])
def test_b_contiguous_along_n(kind, m):
    (a, b, meta), want = sparse_operands(kind, m, 256, wide_k(kind))
    arrays = (a, np.ascontiguousarray(b.T), meta)
    kernel = sparse_kernel(arrays, 256, 1, TYPES[kind][2], pair=m == 256, turn_b=True)
    (got,) = simulate(build_plan(program_of(kernel, arrays), "sm_100a"), arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_what_is_left_out_is_not_read():
    """Elements of B that A leaves out may be anything: here those of odd columns are no numbers."""
    (a, b, _), _ = sparse_operands("bfloat16", 128, 128, 128)
    meta = np.asarray(plgpu.format_tcgen05_sparse_metadata(np.broadcast_to(np.array([0, 2]), (128, 32, 2)), BF))
    b[:, 1::2] = np.nan
    arrays = (a, b, meta)
    (got,) = simulate(build_plan(program_of(sparse_kernel(arrays, 128, 1, np.float32), arrays), "sm_100a"), arrays)
    want = a.astype(np.float64) @ b[:, ::2].astype(np.float64).T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("m", [128, 256])
def test_machine_code(compiled, arch, kind, m):
    """A product for each 32 bytes of a row of A, a copy for each 16 bytes of metadata; the words that it is given."""
    steps, n, group = 2, 256, "<2>" if m == 256 else ""
    a_type, b_type, acc_type, mnemonic = TYPES[kind]
    arrays, _ = sparse_operands(kind, m, n, steps * wide_k(kind))
    kernel = sparse_kernel(arrays, n, steps, acc_type, pair=m == 256)
    if kind == "int8" and arch == "sm_103a":
        with pytest.raises(IllegalInstruction, match="no integer tensor core"):
            build_plan(program_of(kernel, arrays), arch)
        return
    plan = build_plan(program_of(kernel, arrays), arch)
    report = compiled(plan)
    assert report.complaints() == []
    assert report.mnemonics[mnemonic] == 4 * steps and report.mnemonics["UTCCP"] == arrays[2].shape[1]
    text = emit(plan)
    assert f"tcgen05_copy_128x128b{group}(" in text
    names = (np.dtype(t).name for t in (a_type, b_type, acc_type))
    ours = {"float8": "f8f6f4", "int8": "i8", "float32": "tf32"}.get(kind, "f16")
    word = Instruction(ours, *names, m, n, sparse=True)
    narrow = kind in ("float8", "int8")
    cells = [(0, 0), (2, 0), (4, 0), (6, 0)] if narrow else [(0, 0), (0, 1), (2, 0), (2, 1)]
    for cell, selector in cells:
        encoded = word.encode() | selector
        assert any(f"{encoded:#x}u" in line and f"metadata + {cell})" in line for line in text.splitlines())


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8"])
def test_metadata_that_means_nothing(kind):
    arrays, _ = sparse_operands(kind, 128, 128, wide_k(kind))
    meta = arrays[2].copy()
    meta[0, 0, 3, 0] = 0x44 & 0xF0  # of row 3 the first group keeps element 0 twice
    arrays = (*arrays[:2], meta)
    kernel = sparse_kernel(arrays, 128, 1, TYPES[kind][2])
    with pytest.raises(IllegalInstruction, match="a_sparse_metadata of row 3, group 0 along K, is 0x0"):
        simulate(build_plan(program_of(kernel, arrays), "sm_100a"), arrays)


@pytest.mark.parametrize(
    ("options", "errors", "message"),
    [
        (dict(wait=False), Race, "async_copy_sparse_metadata_to_tmem.*tcgen05_mma .sparsity metadata."),
        (dict(copy_after=True), (Race, UninitializedRead), "metadata"),
        (
            dict(copy=False),
            UninitializedRead,
            "tcgen05_mma, a_sparse_metadata, is tensor memory that nothing has written",
        ),
    ],
)
@pytest.mark.parametrize("pair", [False, True])
def test_mistakes(options, errors, message, pair):
    """Metadata overwritten while a product may read it, copied too late, or not at all."""
    arrays, _ = sparse_operands("bfloat16", 256 if pair else 128, 128, 256)
    program = program_of(sparse_kernel(arrays, 128, 2, np.float32, pair=pair, **options), arrays)
    for params in (dict(), dict(timing="early"), dict(seed=1)):
        with pytest.raises(errors, match=message):
            simulate(build_plan(program, "sm_100a"), arrays, SimulatorParams(**params))


@pytest.mark.parametrize(
    ("shape", "dtype", "operand"),
    [
        ((128, 32), np.uint8, jnp.bfloat16),
        ((64, 32, 2), np.uint8, jnp.bfloat16),
        ((128, 16, 2), np.uint8, jnp.int8),
        ((128, 32, 2), np.float32, jnp.int8),
        ((128, 32, 2), np.uint8, jnp.float32),
        ((128, 32, 2), np.uint8, jnp.float64),
    ],
)
def test_metadata_of_other_shapes(shape, dtype, operand):
    with pytest.raises(ValueError, match="format_tcgen05_sparse_metadata: meta is"):
        plgpu.format_tcgen05_sparse_metadata(np.zeros(shape, dtype), operand)
