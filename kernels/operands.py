"""What every generation's matmul takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mosaic_gpu.errors import UnsupportedCall


def check_matmul(a: jax.Array, b: jax.Array) -> None:
    """(m, k) and (k, n), both float16 or both bfloat16, k and n multiples of 8; UnsupportedCall for anything else."""
    for name, x in (("a", a), ("b", b)):
        if not hasattr(x, "ndim"):
            raise TypeError(f"matmul: {name} is an array, not {x!r:.60}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise UnsupportedCall(f"matmul of {a.shape} and {b.shape}: it takes (m, k) and (k, n)")
    if a.dtype != b.dtype or a.dtype not in (jnp.float16, jnp.bfloat16):
        raise UnsupportedCall(f"matmul of {a.dtype} and {b.dtype}: both float16 or both bfloat16")
    if a.shape[1] % 8 or b.shape[1] % 8:
        raise UnsupportedCall(
            f"matmul with k = {a.shape[1]} and n = {b.shape[1]}: multiples of 8 only, since TMA moves rows of 16 bytes; pad them"
        )
