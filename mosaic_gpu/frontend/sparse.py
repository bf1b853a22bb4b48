"""Preparing the metadata of 2:4 sparse operands, outside of kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import arguments
from ..codegen.encodings import metadata_place
from ..layouts.tmem import METADATA_TILE, SCALE_ROWS


def format_tcgen05_sparse_metadata(meta: Any, operand_dtype: Any) -> jax.Array:
    """Which elements of a 2:4 sparse A are kept, in the order of bytes in which the tensor core reads it.

    meta: integers (m, k // 4, 2), for each 4 elements of a row the two that are kept, 0 to 3, the smaller first; for float32
    (m, k // 2, 1), for each 2 elements the one that is kept, 0 or 1.  m is a multiple of 128, k of 128 (float32: of 64).
    operand_dtype: of A and B, 8, 16 or 32 bits.  Returns uint8 (m // 128, k // 128, 128, 16) (float32: (m // 128, k // 64, 128,
    16)), to be copied to shared memory as it is and on with `async_copy_sparse_metadata_to_tmem`.  PTX ISA 9.7.16.10.8.
    Raises ValueError for other shapes and types.
    """
    where = "format_tcgen05_sparse_metadata"
    size = arguments.dtype(where, "operand_dtype", operand_dtype).itemsize
    if not hasattr(meta, "shape") or not hasattr(meta, "dtype"):
        arguments.refuse(where, "meta", meta, "an array of integers")
    meta = jnp.asarray(meta)
    each = 1 if size == 4 else 2
    per_tile = METADATA_TILE * 2  # groups of K
    fits = meta.ndim == 3 and meta.shape[2] == each and not meta.shape[0] % SCALE_ROWS and not meta.shape[1] % per_tile
    if size not in (1, 2, 4) or not fits or not jnp.issubdtype(meta.dtype, jnp.integer):
        raise ValueError(
            f"{where}: meta is {meta.dtype}{list(meta.shape)} for {np.dtype(operand_dtype).name}; it is integers "
            "(m, k // 4, 2), for float32 (m, k // 2, 1), m a multiple of 128 and k of 128 (float32: of 64)"
        )
    index = meta.astype(jnp.uint8)
    first, second = (2 * index[..., 0], 2 * index[..., 0] + 1) if size == 4 else (index[..., 0], index[..., 1])
    nibble = first | second << 2
    rows = nibble[:, ::2] | nibble[:, 1::2] << 4
    tiles = rows.reshape(-1, SCALE_ROWS, rows.shape[1] // METADATA_TILE, METADATA_TILE).transpose(0, 2, 1, 3)
    lane, byte = metadata_place(size, *np.ix_(np.arange(SCALE_ROWS), np.arange(METADATA_TILE)))
    source = np.empty(SCALE_ROWS * METADATA_TILE, np.int32)
    source[(lane * METADATA_TILE + byte).reshape(-1)] = np.arange(source.size)
    result: jax.Array = tiles.reshape(*tiles.shape[:2], -1)[:, :, source].reshape(tiles.shape)
    return result
