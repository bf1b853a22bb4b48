"""2:4 sparse A: where metadata goes, against the layouts by which CUTLASS's own compressor writes it, and what is compiled."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.layouts.operands import descriptor_high, descriptor_low
from mosaic_gpu.ops.tcgen05 import Tcgen05Plan

# By size of an element: of rows and of K, (extent, how many elements of K further) for each digit, the innermost first; elements
# of K for each byte. CUTLASS 4, sm1xx_sparse_config.inl, atoms of metadata of 128 rows by 16 bytes.
ATOMS = {
    1: ([(128, 128)], [(128, 1)], 8),
    2: ([(8, 128), (2, 16), (8, 2048)], [(16, 1), (2, 1024), (4, 32)], 8),
    4: ([(8, 64), (2, 8), (8, 1024)], [(8, 1), (2, 512), (4, 16)], 4),
}
DTYPES = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32}


def along(index, digits):
    at = 0
    for extent, stride in digits:
        at, index = at + index % extent * stride, index // extent
    return at


@pytest.mark.parametrize("size", ATOMS)
def test_places(size):
    """Random metadata, two tiles of rows and three of K: each 4 bits are where the atoms have them."""
    rows, columns, per_byte = ATOMS[size]
    tile_k, group = 16 * per_byte, 2 if size == 4 else 4
    m, k = 256, 3 * tile_k
    rng = np.random.default_rng(size)
    if size == 4:
        meta = rng.integers(0, 2, (m, k // 2, 1))
        nibbles = np.where(meta[..., 0] == 0, 0x4, 0xE)
    else:
        meta = np.sort(rng.permuted(np.tile(np.arange(4), (m, k // 4, 1)), axis=-1)[..., :2], axis=-1)
        nibbles = meta[..., 0] | meta[..., 1] << 2
    got = np.asarray(plgpu.format_tcgen05_sparse_metadata(meta.astype(np.uint8), DTYPES[size]))
    assert got.shape == (2, 3, 128, 16) and got.dtype == np.uint8
    half_bytes = np.stack([got & 15, got >> 4], axis=-1).reshape(2, 3, -1)
    row, at = np.ix_(np.arange(m), np.arange(0, k, group))
    place = along(row % 128, rows) + along(at % tile_k, columns)  # in elements of K
    assert (half_bytes[row // 128, at // tile_k, place * 2 // per_byte] == nibbles).all()


def plan_of(plan_step, dtype, m, n, k):
    """Our plan of one product, both operands swizzled by 128 bytes."""
    size, pair = jnp.dtype(dtype).itemsize, m == 256
    axis = dict(collective_axis="pair") if pair else {}

    def shared(rows, columns):
        tiles = plgpu.TilingTransform((rows, 128 // size))
        return plgpu.SMEM((rows, columns), dtype, transforms=(tiles, plgpu.SwizzleTransform(128)))

    def body(o, a, b, acc, metadata):
        @plgpu.warp_map
        def _(warp):
            @plgpu.when(warp == 0)
            def _():
                plgpu.tcgen05_mma(acc, a, b.transpose((1, 0)), a_sparse_metadata=metadata, **axis)

    kernel = plgpu.kernel(
        body,
        plgpu.GMEM((8,), jnp.float32),
        scratch_types=[
            shared(128, k // 2),
            shared(n * 128 // m, k),
            plgpu.TMEM((128, n), jnp.float32, collective=pair),
            plgpu.TMEM((128, k // 8), jnp.uint8, layout=plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT, collective=pair),
        ],
        **(dict(cluster=(2,), cluster_names=("pair",)) if pair else {}),
    )
    return plan_step(kernel, Tcgen05Plan)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("m, n, k", [(128, 128, 256), (128, 64, 512), (256, 128, 256), (256, 64, 512)])
def test_as_compiled(cute, cute_blackwell, ptx, plan_step, dtype, m, n, k):
    """Every word of every instruction: both matrix descriptors, the instruction descriptor with the selector, the column of the
    metadata."""
    compiled = cute_blackwell.sparse_product(dtype, m, n, k)
    uses = ptx.Evaluator(1024).run(compiled.ptx, "tcgen05.mma")
    plan = plan_of(plan_step, dtype, m, n, k)
    size = jnp.dtype(dtype).itemsize
    starts = 1024, 1024 + 128 * k // 2 * size
    assert len(uses) == plan.k // plan.k_step == k * size // 64
    kind = "f16" if size == 2 else "f8f6f4"
    for step, use in enumerate(uses):
        assert use.name.startswith(f"tcgen05.mma.sp.cta_group::{m // 128}.kind::{kind}")
        words = [
            descriptor_high(o, True) << 32 | descriptor_low(o, start + o.k_offset(step))
            for o, start in zip((plan.a, plan.b), starts, strict=True)
        ]
        assert list(use.operands[1:3]) == words
        metadata = cute_blackwell.METADATA_COLUMN + plan.metadata.cells(step)
        assert (use.operands[0], use.operands[3], use.operands[4]) == (cute.TMEM_COLUMN, metadata, plan.idesc(step))
