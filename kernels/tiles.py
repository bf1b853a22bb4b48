"""What the attention kernels of both generations agree on: head dims, and how a tile lies in shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall

HEAD_DIMS = range(8, 257, 8)


def check_head_dims(*dims: int) -> None:
    """UnsupportedCall for a head dim that no kernel has."""
    for d in dims:
        if d not in HEAD_DIMS:
            small = 0 < d < HEAD_DIMS[-1]
            raise UnsupportedCall(
                f"head dim {d}: the kernels have multiples of {HEAD_DIMS.step} from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}; "
                + ("pad with zeros (q and k: and pass scale), or take " if small else "take ")
                + "implementation='xla'"
            )


def columns_of(head_dim: int) -> int:
    """Columns of a tile of this head dim: whole steps of a product, 16 deep.  Those beyond are zeros, which TMA fills in."""
    return head_dim + head_dim % 16


def head_rows(x: Any, batch: Any, rows: Any, head: Any, columns: int) -> Any:
    """Rows of one head of x, (b, length, h, d): past their end columns read as zeros and are not written."""
    start = 0 if columns == x.shape[-1] else jnp.int32(0)  # JAX takes a slice with a static start to lie inside
    return x.at[batch, rows, head, plgpu.ds(start, columns)]


def chunk(columns: int) -> int:
    """16-bit columns that lie together in shared memory: as many as a swizzle takes, up to 64, that divide all of them."""
    return next(n for n in (64, 32, 16) if columns % n == 0)


def tiles_of(count: int, rows: int, columns: int, dtype: Any, extra: int = 0) -> Any:
    """SMEM of `count` tiles of (rows, columns + extra), 16-bit, as TMA and the tensor cores take them: in chunks of columns."""
    n = chunk(columns)
    transforms = plgpu.TilingTransform((rows, n)), plgpu.SwizzleTransform(2 * n)
    return plgpu.SMEM((count, rows, columns + extra), dtype, transforms=transforms)


def whole_rows(bias: jax.Array) -> jax.Array:
    """(b, h, s, t) with t a multiple of 8, by zeros: TMA moves rows of multiples of 16 bytes."""
    missing = -bias.shape[3] % 8
    return jnp.pad(bias, ((0, 0),) * 3 + ((0, missing),)) if missing else bias
