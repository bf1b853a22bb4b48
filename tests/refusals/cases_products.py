"""One kernel for each way in which a product is refused: wgmma's and those of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import ds

from .cases import BF, GRID, I8, STRIDED, WGMMA, F, case, mma, o, scoped, smem, x


# ---- wgmma --------------------------------------------------------------------------------------------------------------------
def product(acc: Any = None, a: Any = lambda a: a, b: Any = lambda b: b) -> Callable[..., None]:
    return scoped(lambda c, s, t: plgpu.wgmma(c, a(s), b(t)), acc or plgpu.ACC((64, 64)))


def transposed(t: Any) -> Any:
    return t.transpose((1, 0))


AB = [mma(64, 64), mma(64, 64)]
case("wgmma on Blackwell", product(), scratch=AB, arch="sm_100a")
case("wgmma of two types", product(), scratch=[mma(64, 64), mma(64, 64, dtype=jnp.float16)])
case("wgmma of shapes that do not fit", product(plgpu.ACC((64, 128))), scratch=AB)
case("wgmma into a slice", scoped(lambda c, s, t: plgpu.wgmma(c.at[ds(0, 64)], s, t), plgpu.ACC((128, 64))), scratch=AB)
case(
    "another layout into an accumulator",
    scoped(lambda c, g: c.__setitem__(..., plgpu.load(g, layout=STRIDED)), plgpu.ACC((64, 64))),
    x(64, 64),
)
case("wgmma of 32 rows", product(plgpu.ACC((32, 64))), scratch=[mma(32, 64), mma(64, 64)])
case(
    "wgmma of 12 columns",
    product(plgpu.ACC((64, 12)), b=lambda t: transposed(t.at[ds(0, 12)])),
    scratch=[mma(64, 64), mma(16, 64)],
)
case(
    "int8 from registers",
    scoped(lambda c, g, s: plgpu.wgmma(c, plgpu.load(g, layout=WGMMA), transposed(s)), plgpu.ACC((64, 64), jnp.int32)),
    x(64, 128, dtype=np.int8),
    scratch=[mma(64, 128, dtype=I8)],
)
case("an operand without tiles", product(), scratch=[smem(64, 64, dtype=BF, tile=(64, 64)), mma(64, 64)])
case("an operand across slots", product(a=lambda s: s.at[:, 0]), scratch=[mma(64, 8, 64), mma(64, 64)])
case("tiles of four rows", product(), scratch=[mma(64, 64, rows=4), mma(64, 64)])
case("every other row", product(a=lambda s: s.at[::2]), scratch=[mma(128, 64), mma(64, 64)])
case("64 rows in tiles of 16", product(), scratch=[mma(64, 64, rows=16), mma(64, 64)])
case(
    "rows across tiles",
    product(plgpu.ACC((64, 16)), b=lambda t: transposed(t.at[ds(8, 16)])),
    scratch=[mma(64, 64), mma(64, 64, rows=16)],
)
case(
    "float8 that is contiguous along N",
    product(plgpu.ACC((64, 128))),
    scratch=[mma(64, 128, dtype=jnp.float8_e4m3fn), mma(128, 128, dtype=jnp.float8_e4m3fn)],
)
case("a K of 8", product(a=lambda s: transposed(s), b=lambda t: t), scratch=[mma(8, 64), mma(8, 64)])
case("an operand from row 4", product(b=lambda t: transposed(t.at[ds(4, 64)])), scratch=[mma(64, 64), mma(128, 64)])
case(
    "an operand inside a tile",
    scoped(lambda c, s, t: plgpu.wgmma(c, s, transposed(t.at[ds(lax.axis_index("g") * 8, 8)])), plgpu.ACC((64, 8))),
    scratch=[mma(64, 64), mma(64, 64, rows=16)],
    **GRID,
)


def never_waits(c: Any, s: Any, t: Any) -> None:
    lax.fori_loop(0, 4, lambda i, _: plgpu.wgmma(c, s, t), None)


def tile_in_flight(c: Any, g: Any, t: Any) -> None:
    def step(carry: Any) -> Any:
        i, p = carry
        plgpu.wgmma(c, p, t)
        new = p * jnp.asarray(2.0, BF)
        t[...] = new
        plgpu.wgmma_wait(0)
        return i + 2, new

    lax.while_loop(lambda carry: carry[0] < 8, step, (jnp.int32(0), plgpu.load(g, layout=WGMMA)))


case(
    "more elements than there is code for",
    lambda a, b: b.__setitem__(..., plgpu.load(a, layout=WGMMA)),
    x(64, 4096),
    out=o(64, 4096),
)
case(
    "an addition in bfloat16",
    lambda b, s: plgpu.copy_smem_to_gmem(s, b, reduction_op="add"),
    out=o(64, 128, dtype=BF),
    scratch=[smem(64, 128, dtype=BF)],
)
case("fragments of 60 rows", lambda a, b: b.__setitem__(0, plgpu.to_fragments(a[...])), x(60, 64), out=o(1, 30, 128))
case(
    "fragments of another shape",
    lambda a, b: b.__setitem__(..., plgpu.from_fragments(a[...], (64, 8))),
    x(64, 128),
    out=o(64, 8),
)
case(
    "fragments of one repeated value",
    lambda b: b.__setitem__(..., plgpu.to_fragments(jnp.zeros((64, 64), F))),
    out=o(32, 128),
)
case("products that pile up", scoped(never_waits, plgpu.ACC((64, 64))), scratch=AB)
case(
    "a tile that a product still reads",
    scoped(tile_in_flight, plgpu.ACC((64, 64))),
    x(64, 64, dtype=BF),
    scratch=[mma(64, 64)],
)


# ---- products of arrays ------------------------------------------------------------------------------------------------------
def _dot(precision: Any) -> Callable[..., Any]:
    return lambda a, c: c.__setitem__(..., lax.dot(a[...], a[...], precision=precision))


B64 = x(64, 64, dtype=jnp.bfloat16)
case(
    "a product of float8 in float64",
    lambda a, b, c: c.__setitem__(..., lax.dot(a[...], a[...], preferred_element_type=np.float64)),
    x(64, 64, dtype=jnp.float8_e5m2),
    x(64, 64, dtype=np.float64),
    out=o(64, 64, dtype=np.float64),
)
case(
    "a product of bools",
    lambda a, c: c.__setitem__(..., lax.dot(a[...] > 0, a[...] > 0).astype(jnp.float32)),
    x(64, 64),
    out=o(64, 64),
)
case(
    "a Ref of 4 bits",
    lambda a, c: c.__setitem__(..., a[...].astype(jnp.int32)),
    x(64, 64, dtype=jnp.int4),
    out=o(64, 64, dtype=jnp.int32),
)
case("an algorithm that no type here has", _dot(lax.DotAlgorithmPreset.F16_F16_F16), B64, out=o(64, 64, dtype=BF))
ALGORITHM = lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, F)
case("an algorithm without a name", _dot(ALGORITHM), B64, out=o(64, 64, dtype=BF))
