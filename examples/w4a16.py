"""Weights of 4 bits times activations of 16: `y = x @ (w * scales).T`, unpacked in registers on the way to the tensor core.

XLA keeps an int4 array with two elements in a byte, and a kernel takes the bytes.  In the kernel `bitcast_convert_type` and
`reshape` make elements of them again; they are scaled, rounded to bfloat16, and are an operand of `jnp.dot` in registers: wgmma
reads it there, Blackwell's tensor core through shared memory.  No layout is named: the product asks for its fragment, and bytes
are loaded by the thread that needs their elements.  Run this file to see it against JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mosaic_gpu as plgpu

F32, BF16 = jnp.float32, jnp.bfloat16
GROUP = 64  # weights along k that share a scale; a step of the pipeline
FEATURES, TOKENS = 128, 64  # of a block


def w4a16_matmul(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
    """x (m, k) bfloat16, w (n, k) int4 or uint4, scales (n, k / 64) float32 -> (m, n) bfloat16, added in float32.

    m: any; n: a multiple of 128; k: of 64.
    """
    (m, k), n, kind = x.shape, w.shape[0], w.dtype
    pairs = lax.bitcast_convert_type(w.reshape(n, k // 2, 2), jnp.uint8)

    def body(x: Any, pairs: Any, scales: Any, o: Any) -> None:
        i, j = lax.axis_index("features"), lax.axis_index("tokens")
        features, tokens = plgpu.ds(i * FEATURES, FEATURES), plgpu.ds(j * TOKENS, TOKENS)

        def step(indices: Any, x_tile: Any, w_tile: Any, acc: Any) -> Any:
            elements = lax.bitcast_convert_type(w_tile[...], kind).reshape(FEATURES, GROUP)
            scale = scales[indices[0], features]
            weights = (elements.astype(F32) * scale[:, None]).astype(BF16)
            return acc + jnp.dot(weights, x_tile[...].T, preferred_element_type=F32)

        # A warp loads a byte of each of eight rows at once, from different banks if the rows are swizzled.
        stream = plgpu.emit_pipeline(
            step,
            grid=(k // GROUP,),
            in_specs=[
                plgpu.BlockSpec((TOKENS, GROUP), lambda t: (j, t)),
                plgpu.BlockSpec((FEATURES, GROUP // 2), lambda t: (i, t), transforms=(plgpu.SwizzleTransform(32),)),
            ],
            max_concurrent_steps=4,
            init_carry=jnp.zeros((FEATURES, TOKENS), F32),
        )
        o[tokens, features] = stream(x, pairs).astype(BF16).T

    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((m, n), BF16),
        grid=(n // FEATURES, plgpu.cdiv(m, TOKENS)),
        grid_names=("features", "tokens"),
        name="w4a16_matmul",
    )
    result: jax.Array = kernel(x, pairs, scales.T)
    return result


def reference(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
    """The same by XLA."""
    weights = (w.astype(F32) * jnp.repeat(scales, GROUP, axis=1)).astype(BF16)
    return jnp.dot(x, weights.T, preferred_element_type=F32).astype(BF16)


def arrays(m: int, n: int, k: int, kind: Any = jnp.int4, seed: int = 0) -> list[np.ndarray]:
    """Random activations, weights of all values, positive scales."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(*((-8, 8) if kind == jnp.int4 else (0, 16)), (n, k)).astype(kind)
    scales = rng.uniform(0.01, 0.1, (n, k // GROUP)).astype(np.float32)
    return [rng.standard_normal((m, k)).astype(BF16), weights, scales]


if __name__ == "__main__":
    given = arrays(100, 256, 256)
    found, expected = (np.asarray(jax.jit(f)(*given), np.float64) for f in (w4a16_matmul, reference))
    print(f"w4a16_matmul: {np.linalg.norm(found - expected) / np.linalg.norm(expected):.1e} from XLA's")
