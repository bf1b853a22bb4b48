"""One kernel for each way in which what only Blackwell has is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import mosaic_gpu as plgpu

from .cases import BAR, BF, I8, WGMMA, F, case, ds, mma, nothing, o, smem, x
from .cases_products import transposed


# ---- tcgen05 ------------------------------------------------------------------------------------------------------------------
def tcgen05(t: Any = lambda t: t, a: Any = lambda a: a, b: Any = lambda b: b) -> Callable[..., None]:
    return lambda m, s, u: plgpu.tcgen05_mma(t(m), a(s), b(u))


def tmem(columns: int, dtype: Any = F) -> Any:
    return plgpu.TMEM((128, columns), dtype)


NEW = dict(arch="sm_100a")
ROWS = (((1,), (1,)), ((), ()))  # dimension numbers: both operands contiguous along K
case("tcgen05 on Hopper", tcgen05(), scratch=[tmem(64), mma(128, 64), mma(64, 64)])
case("tcgen05 of two types", tcgen05(), scratch=[tmem(64), mma(128, 64), mma(64, 64, dtype=jnp.float16)], **NEW)
case("tcgen05 into integers", tcgen05(), scratch=[tmem(64, jnp.int32), mma(128, 64), mma(64, 64)], **NEW)
case("tcgen05 of shapes that do not fit", tcgen05(), scratch=[tmem(64), mma(128, 64), mma(128, 64)], **NEW)
case("tcgen05 of 64 rows", tcgen05(lambda m: m.at[ds(0, 64)]), scratch=[tmem(64), mma(64, 64), mma(64, 64)], **NEW)
I8_OPERANDS = [tmem(64, jnp.int32), mma(128, 128, dtype=I8), mma(64, 128, dtype=I8)]
case("tcgen05 of integers on sm_103a", tcgen05(b=transposed), scratch=I8_OPERANDS, arch="sm_103a")
case(
    "tcgen05 of 12 columns",
    tcgen05(b=lambda u: transposed(u.at[ds(0, 12)])),
    scratch=[tmem(12), mma(128, 64), mma(16, 64)],
    **NEW,
)
case(
    "tcgen05 of half a step of K",
    tcgen05(a=lambda s: s.at[:, ds(0, 8)], b=lambda u: u.at[ds(0, 8)]),
    scratch=[tmem(64), mma(128, 64), mma(64, 64)],
    **NEW,
)
PACKED = plgpu.TMEM((128, 64), BF, packed=True)
F16 = jnp.float16
case(
    "A in tensor memory that is not packed",
    tcgen05(),
    scratch=[tmem(64), tmem(64, F16), mma(64, 64, dtype=F16)],
    **NEW,
)
case(
    "a packed accumulator",
    tcgen05(),
    scratch=[plgpu.TMEM((128, 64), F16, packed=True), mma(128, 64, dtype=F16), mma(64, 64, dtype=F16)],
    **NEW,
)
case("bfloat16 into float16", tcgen05(), scratch=[tmem(64, F16), mma(128, 64), mma(64, 64)], **NEW)
case(
    "an odd column of float16",
    lambda m: plgpu.async_load_tmem(m.at[:, ds(0, 1)]),
    scratch=[tmem(64, F16)],
    **NEW,
)
case(
    "a load that reduces float16",
    lambda m: plgpu.async_load_tmem(m, reduce="max"),
    scratch=[tmem(64, F16)],
    arch="sm_103a",
)
case(
    "A in tensor memory of 64 rows",
    tcgen05(),
    scratch=[plgpu.TMEM((64, 64), F), plgpu.TMEM((64, 64), BF, packed=True), mma(64, 64)],
    **NEW,
)
CLUSTER = dict(cluster=(2, 2), cluster_names=("c", "p"), **NEW)


def pair(axis: Any = "p", **more: Any) -> Callable[..., None]:
    return lambda m, s, u, *rest: plgpu.tcgen05_mma(m, s, u, *rest, collective_axis=axis, **more)


def both(columns: int, dtype: Any = F, rows: int = 128) -> Any:
    return plgpu.TMEM((rows, columns), dtype, collective=True, packed=np.dtype(dtype).itemsize < 4)


case("a pair for one block's accumulator", pair(), scratch=[tmem(128), mma(128, 64), mma(64, 64)], **CLUSTER)
case("a pair that is no neighbour", pair("c"), scratch=[both(128), mma(128, 64), mma(64, 64)], **CLUSTER)
case("a pair of 64 rows", pair(), scratch=[both(128, rows=64), mma(64, 64), mma(64, 64)], **CLUSTER)
FOLDED = plgpu.TMEMLayout.M64_COLLECTIVE_LAYOUT
HALF_ROWS = plgpu.TMEM((64, 128), F, collective=True, layout=FOLDED)
case("64 rows of a pair for one block", nothing, scratch=[plgpu.TMEM((64, 128), F, layout=FOLDED)], **CLUSTER)
case(
    "a pair of 128 rows each as if of 64",
    nothing,
    scratch=[plgpu.TMEM((128, 128), F, collective=True, layout=FOLDED)],
    **CLUSTER,
)
case(
    "some columns of 64 rows of a pair",
    lambda m: plgpu.async_load_tmem(m.at[:, ds(0, 64)]),
    scratch=[HALF_ROWS],
    **CLUSTER,
)
case(
    "64 rows of a pair in another layout",
    lambda o, m: o.__setitem__(..., plgpu.async_load_tmem(m, layout=WGMMA)),
    out=o(64, 128),
    scratch=[HALF_ROWS],
    **CLUSTER,
)
case(
    "64 rows of a pair and 24 columns",
    pair(),
    scratch=[
        plgpu.TMEM((64, 48), F, collective=True, layout=FOLDED),
        mma(64, 128, dtype=jnp.float8_e4m3fn),
        mma(128, 24, dtype=jnp.float8_e4m3fn),
    ],
    **CLUSTER,
)
case(
    "an A of one block for a pair",
    pair(),
    scratch=[both(128), plgpu.TMEM((128, 64), BF, packed=True), mma(64, 64)],
    **CLUSTER,
)
case("tensor memory of pairs and of blocks", nothing, scratch=[both(64), tmem(64)], **CLUSTER)
case(
    "tensor memory of a pair without one", nothing, scratch=[both(64)], cluster=(2, 1), cluster_names=("c", "p"), **NEW
)
case(
    "a commit along no axis",
    lambda b: plgpu.tcgen05_commit_arrive(b, collective_axis="z"),
    scratch=[BAR],
    **CLUSTER,
)
case(
    "a commit along another axis than its barrier's",
    lambda b: plgpu.tcgen05_commit_arrive(b, collective_axis="p"),
    scratch=[plgpu.ClusterBarrier(collective_axes="c")],
    **CLUSTER,
)
HALF = dict(collective_axes="c", leader_tracked=plgpu.CopyPartition.PARTITIONED(0))
case(
    "a half of a pair that is none",
    lambda a, s, b: plgpu.copy_gmem_to_smem(a, s, b, **HALF),
    x(128, 32),
    scratch=[smem(64, 32), BAR],
    **CLUSTER,
)
case(
    "a view of some lanes",
    lambda b, m: plgpu.async_load_tmem(m.at[ds(0, 64)]),
    out=o(64, 64),
    scratch=[tmem(64)],
    **NEW,
)
case("half a cell", lambda m: plgpu.async_load_tmem(m.at[:, ds(1, 62)]), scratch=[PACKED], **NEW)
case(
    "tensor memory in another layout",
    lambda o, m: o.__setitem__(..., plgpu.async_load_tmem(m, layout=WGMMA)),
    out=o(128, 64),
    scratch=[tmem(64)],
    **NEW,
)
case(
    "one value into tensor memory",
    lambda m: plgpu.async_store_tmem(m, jnp.full((128, 64), 1.5, F)),
    scratch=[tmem(64)],
    **NEW,
)
case(
    "tensor memory seen as another width",
    lambda t: plgpu.async_load_tmem(t.bitcast(jnp.bfloat16)),
    scratch=[tmem(64)],
    **NEW,
)
case(
    "half cells of tensor memory seen as another type",
    lambda t: plgpu.async_load_tmem(t.bitcast(jnp.int16)),
    scratch=[tmem(64, F16)],
    **NEW,
)
case("tensor memory of 32 lanes", nothing, scratch=[plgpu.TMEM((32, 64), F)], **NEW)
case("tensor memory that is not packed", nothing, scratch=[plgpu.TMEM((128, 64), BF)], **NEW)
case("tensor memory of half cells", nothing, scratch=[plgpu.TMEM((128, 63), BF, packed=True)], **NEW)
case("tensor memory with a layout", nothing, scratch=[plgpu.TMEM((128, 64), F, layout=WGMMA)], **NEW)


def _too_early(a: Any, out: Any) -> None:
    value = a[...]
    plgpu.griddepcontrol_wait()
    out[...] = value


case("global memory before the wait for earlier kernels", _too_early, x(64, 64), out=o(64, 64))
case(
    "a wait for earlier kernels on some paths",
    lambda a, out: plgpu.when(plgpu.program_id(0) == 0)(plgpu.griddepcontrol_wait),
    x(64, 64),
    out=o(64, 64),
    grid=(2,),
    grid_names=("x",),
)


# ---- scale factors ------------------------------------------------------------------------------------------------------------
E4, E8 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
SCALES = plgpu.TMEMLayout.SCALES_LAYOUT


def scales(*shape: int, dtype: Any = E8, collective: bool = False) -> Any:
    return plgpu.TMEM(shape, dtype, layout=SCALES, collective=collective)


def scaled(a: Any = lambda a: a, first: Any = lambda x: x, second: Any = lambda x: x) -> Callable[..., None]:
    return lambda m, s, u, f, g: plgpu.tcgen05_mma(m, a(s), transposed(u), a_scale=first(f), b_scale=second(g))


F8_OPERANDS = [tmem(128), mma(128, 128, dtype=E4), mma(128, 128, dtype=E4)]
F4_OPERANDS = [tmem(128), mma(128, 128, dtype=jnp.uint8), mma(128, 128, dtype=jnp.uint8)]
FACTORS = [scales(128, 4), scales(128, 4)]
case("factors of 64 rows", nothing, scratch=[scales(64, 4)], **NEW)
case("factors of another type", nothing, scratch=[scales(128, 4, dtype=jnp.float8_e5m2)], **NEW)
case(
    "factors seen as another type",
    lambda m: plgpu.async_load_tmem(m.bitcast(jnp.uint8)),
    scratch=[scales(128, 4)],
    **NEW,
)
case("factors loaded as a matrix", lambda m: plgpu.async_load_tmem(m), scratch=[scales(128, 4)], **NEW)
case(
    "a matrix for factors",
    scaled(),
    scratch=[*F8_OPERANDS, scales(128, 4), plgpu.TMEM((128, 4), E8, packed=True)],
    **NEW,
)
case(
    "half of the factors",
    scaled(first=lambda f: f.at[:, ds(0, 4)]),
    scratch=[*F8_OPERANDS, scales(128, 8), scales(128, 4)],
    **NEW,
)
case("factors of too many rows", scaled(), scratch=[*F8_OPERANDS, scales(256, 4), scales(128, 4)], **NEW)
case("factors of bfloat16", scaled(), scratch=[tmem(128), mma(128, 64), mma(128, 64), *FACTORS], **NEW)
case("mxfp8 in blocks of 16", scaled(), scratch=[*F8_OPERANDS, scales(128, 8), scales(128, 8)], **NEW)
case("nvfp4 in blocks of 32", scaled(), scratch=[*F4_OPERANDS, *(scales(128, 8, dtype=E4) for _ in range(2))], **NEW)
case("factors of two types", scaled(), scratch=[*F4_OPERANDS, scales(128, 16), scales(128, 16, dtype=E4)], **NEW)
case(
    "float4 contiguous along N",
    lambda m, s, u, f, g: plgpu.tcgen05_mma(m, s, u, a_scale=f, b_scale=g),
    scratch=[*F4_OPERANDS, scales(128, 8), scales(128, 8)],
    **NEW,
)
case(
    "factors and A in tensor memory",
    scaled(),
    scratch=[tmem(128), plgpu.TMEM((128, 128), E4, packed=True), F8_OPERANDS[2], *FACTORS],
    **NEW,
)
case(
    "factors and 64 rows",
    scaled(),
    scratch=[plgpu.TMEM((64, 128), F), mma(64, 128, dtype=E4), F8_OPERANDS[2], *FACTORS],
    **NEW,
)
case(
    "factors on Hopper",
    lambda s, f: plgpu.async_copy_scales_to_tmem(s, f),
    scratch=[smem(1, 1, 32, 16, dtype=E8), FACTORS[0]],
)
case(
    "swizzled factors",
    lambda s, f: plgpu.async_copy_scales_to_tmem(s, f),
    scratch=[smem(1, 8, 32, 16, dtype=E8, tile=(32, 16)), scales(128, 32)],
    **NEW,
)

# ---- sparse A -----------------------------------------------------------------------------------------------------------------
SPARSE = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT


def kept(*shape: int, dtype: Any = jnp.uint8, collective: bool = False) -> Any:
    return plgpu.TMEM(shape, dtype, layout=SPARSE, collective=collective)


def sparse(b: Any = transposed, of: Any = lambda k: k, **more: Any) -> Callable[..., None]:
    return lambda m, s, u, k: plgpu.tcgen05_mma(m, s, b(u), a_sparse_metadata=of(k), **more)


HALVES = [tmem(64), mma(128, 64), mma(64, 128)]
case("metadata of 64 rows", nothing, scratch=[kept(64, 16)], **NEW)
case("metadata of 24 bytes", nothing, scratch=[kept(128, 24)], **NEW)
case("metadata of another type", nothing, scratch=[kept(128, 16, dtype=I8)], **NEW)
case("metadata loaded as a matrix", lambda m: plgpu.async_load_tmem(m), scratch=[kept(128, 16)], **NEW)
case("factors for metadata", sparse(), scratch=[*HALVES, scales(128, 16)], **NEW)
case(
    "metadata from the middle of a tile",
    sparse(of=lambda k: k.at[:, ds(8, 16)]),
    scratch=[*HALVES, kept(128, 32)],
    **NEW,
)
case("metadata for more of K", sparse(), scratch=[*HALVES, kept(128, 32)], **NEW)
case(
    "metadata and factors",
    lambda m, s, u, k, f, g: plgpu.tcgen05_mma(m, s, transposed(u), a_sparse_metadata=k, a_scale=f, b_scale=g),
    scratch=[tmem(64), mma(128, 128, dtype=E4), mma(64, 256, dtype=E4), kept(128, 32), *FACTORS],
    **NEW,
)
case(
    "a sparse A in tensor memory",
    sparse(),
    scratch=[tmem(64), plgpu.TMEM((128, 64), BF, packed=True), HALVES[2], kept(128, 16)],
    **NEW,
)
case("a sparse A of 64 rows", sparse(), scratch=[plgpu.TMEM((64, 64), F), mma(64, 64), HALVES[2], kept(128, 16)], **NEW)
case(
    "a sparse A beside 32 bytes of B at once",
    sparse(),
    scratch=[*HALVES[:2], smem(64, 128, dtype=BF, tile=(8, 16), swizzle=32), kept(128, 16)],
    **NEW,
)
case(
    "a sparse A beside 24 columns",
    sparse(b=lambda u: transposed(u.at[ds(0, 24)])),
    scratch=[tmem(24), mma(128, 64), mma(32, 128), kept(128, 16)],
    **NEW,
)
case(
    "a sparse A beside 48 columns of a pair",
    sparse(b=lambda u: transposed(u.at[ds(0, 24)]), collective_axis="p"),
    scratch=[both(48), mma(128, 64), mma(32, 128), kept(128, 16, collective=True)],
    **CLUSTER,
)
case(
    "metadata on Hopper",
    lambda s, k: plgpu.async_copy_sparse_metadata_to_tmem(s, k),
    scratch=[smem(1, 1, 128, 16, dtype=jnp.uint8), kept(128, 16)],
)
case(
    "swizzled metadata",
    lambda s, k: plgpu.async_copy_sparse_metadata_to_tmem(s, k),
    scratch=[smem(1, 1, 128, 16, dtype=jnp.uint8, tile=(128, 16)), kept(128, 16)],
    **NEW,
)


# ---- copies of matrices to tensor memory --------------------------------------------------------------------------------------
def copied(s: Any = lambda s: s, t: Any = lambda t: t) -> Callable[..., None]:
    return lambda u, m: plgpu.async_copy_smem_to_tmem(s(u), t(m))


case("a matrix to tensor memory, on Hopper", copied(), scratch=[mma(128, 64, dtype=F), tmem(64)])
case("a copy of 64 rows", copied(), scratch=[mma(64, 64, dtype=F), plgpu.TMEM((64, 64), F)], **NEW)
case(
    "a copy of 16 bytes of a row", copied(lambda s: s.at[:, ds(0, 4)]), scratch=[mma(128, 32, dtype=F), tmem(4)], **NEW
)
case("a copy without a swizzle", copied(), scratch=[smem(128, 32), tmem(32)], **NEW)
case("a transposed copy", copied(transposed), scratch=[mma(128, 128, dtype=F), tmem(128)], **NEW)
case("a copy to metadata", copied(), scratch=[mma(128, 128, dtype=jnp.uint8), kept(128, 128)], **NEW)

# ---- loads that reduce --------------------------------------------------------------------------------------------------------
case("a load that reduces, on sm_100a", lambda m: plgpu.async_load_tmem(m, reduce="max"), scratch=[tmem(64)], **NEW)
case(
    "a load that reduces 16-bit values",
    lambda m: plgpu.async_load_tmem(m, reduce="max"),
    scratch=[plgpu.TMEM((128, 64), BF, packed=True)],
    arch="sm_103a",
)


# ---- cluster launch control ---------------------------------------------------------------------------------------------------
RESULT = plgpu.TryClusterCancelResult()
ASK = [RESULT, plgpu.Barrier()]
case("launch control on Hopper", lambda r, b: plgpu.try_cluster_cancel(r, b), scratch=ASK)
case(
    "launch control of an axis that is none",
    lambda r, b: plgpu.query_cluster_cancel(r, "x"),
    scratch=ASK,
    grid=(2,),
    grid_names=("g",),
    **NEW,
)
case(
    "an answer in a part of other memory",
    lambda r, b: plgpu.try_cluster_cancel(r.at[ds(0, 4)], b),
    scratch=[smem(8, dtype=jnp.int32), plgpu.Barrier()],
    **NEW,
)
