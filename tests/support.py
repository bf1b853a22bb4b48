"""Small things that tests of several folders make: random arrays, types of outputs, transforms, attention in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

import mosaic_gpu as plgpu
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.masks import Causal
from mosaic_gpu.program import Program


def out(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    """The type of an output."""
    return jax.ShapeDtypeStruct(shape, dtype)


def program_of(kernel: Any, arrays: Sequence[Any]) -> Program:
    """What a kernel is for arrays like these."""
    program: Program = kernel.program(*(out(*x.shape, dtype=x.dtype) for x in arrays))
    return program


def randoms(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Normal numbers, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def tiled(dtype: Any = ml_dtypes.bfloat16, rows: int = 8) -> tuple[Any, ...]:
    """Tiles of 128-byte rows with the widest swizzle."""
    return plgpu.TilingTransform((rows, 128 // np.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def plain_attention(
    q: Any, k: Any, v: Any, causal: Causal, scale: float | None = None, *, bias: Any = 0.0, mask: Any = True
) -> np.ndarray:
    """Attention in float32 whose probabilities and results are rounded to the inputs' type: a kernel may be twice as far off.

    q (b, s, h, d), k and v (b, t, h_kv, d or another), bias and mask that go with (b, h, s, t) -> (b, s, h, v's d)
    """
    group, dtype = q.shape[2] // k.shape[2], q.dtype
    qf, kf, vf = (np.asarray(x).astype(np.float32) for x in (q, k, v))
    kf, vf = (np.repeat(x, group, 2).transpose(0, 2, 1, 3) for x in (kf, vf))
    s = (
        qf.transpose(0, 2, 1, 3)
        @ kf.transpose(0, 1, 3, 2)
        * np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    )
    s = s + np.asarray(bias).astype(np.float32)
    s = np.where(reference.visible(q.shape[1], k.shape[1], causal) & np.asarray(mask), s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    found = p.astype(dtype).astype(np.float32) @ vf / np.maximum(p.sum(-1, keepdims=True), 1e-30)
    rounded: np.ndarray = found.transpose(0, 2, 1, 3).astype(dtype)
    return rounded
