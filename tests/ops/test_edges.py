"""What a stranger tried: division by zero, types without registers, new axes, sums into shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall, UnsupportedPrimitive


@pytest.mark.parametrize("dtype", ["int8", "int32", "int16", "uint8", "uint32"])
def test_integers_divided_by_zero_are_as_in_jax(dtype: str) -> None:
    """All bits set, and the remainder is the dividend; CUDA leaves both open."""
    a = jnp.asarray(np.arange(-64, 64).reshape(2, 64), dtype)
    b = jnp.asarray(np.arange(128).reshape(2, 64) % 4, dtype)

    def body(a: Any, b: Any, o: Any, r: Any) -> None:
        o[...], r[...] = lax.div(a[...], b[...]), lax.rem(a[...], b[...])

    found = plgpu.kernel(body, [jax.ShapeDtypeStruct(a.shape, dtype)] * 2)(a, b)
    np.testing.assert_array_equal(found[0], lax.div(a, b))
    np.testing.assert_array_equal(found[1], lax.rem(a, b))


def double(x: Any, o: Any) -> None:
    o[...] = x[...] + x[...]


def inverse_product(x: Any, o: Any) -> None:
    o[...] = jnp.linalg.inv(x[...]) @ x[...]


def new_axis(x: Any, o: Any) -> None:
    o[...] = x[:, None][:, 0]


@pytest.mark.parametrize(
    "body,shape,dtype,words",
    [
        (double, (64, 64), "int4", "no Refs of int4, as memory here counts in bytes: hand over"),
        (double, (64, 64), "complex64", "no Refs of complex64: hand over real and imaginary parts"),
        (inverse_product, (64, 64), "float32", "'lu' has no rule"),
        (new_axis, (64, 64), "float32", r"ref\[...\]\[:, None\]"),
    ],
)
def test_refused_by_name_and_line(body: Any, shape: Any, dtype: str, words: str) -> None:
    x = jnp.zeros(shape, dtype)
    with pytest.raises((UnsupportedPrimitive, UnsupportedCall), match=words) as e:
        plgpu.kernel(body, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    assert e.value.line is not None and e.value.line.file == __file__


@pytest.mark.parametrize("product", [True, False])
def test_sums_into_an_output_block(product: bool) -> None:
    """`o[...] = 0` and `o[...] += ...` may have different layouts: in a pallas_call threads meet around each store."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, (128, 128)), jnp.float32) for _ in range(2))

    def product_body(a: Any, b: Any, o: Any) -> None:
        @plgpu.when(plgpu.program_id(1) == 0)
        def _() -> None:
            o[...] = jnp.zeros(o.shape, o.dtype)

        o[...] += a[...] @ b[...]

    def sum_body(a: Any, o: Any) -> None:
        @plgpu.when(plgpu.program_id(1) == 0)
        def _() -> None:
            o[...] = jnp.zeros(o.shape, o.dtype)

        o[...] += a[...].sum(1)

    rows, columns = plgpu.BlockSpec((64, 64), lambda i, k: (i, k)), plgpu.BlockSpec((64, 128), lambda i, k: (k, 0))
    if product:
        out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        found = plgpu.pallas_call(
            product_body,
            out,
            grid=(2, 2),
            in_specs=[rows, columns],
            out_specs=plgpu.BlockSpec((64, 128), lambda i, k: (i, 0)),
        )(a, b)
        np.testing.assert_array_equal(found, a @ b)
    else:
        out = jax.ShapeDtypeStruct((128,), jnp.float32)
        found = plgpu.pallas_call(
            sum_body, out, grid=(2, 2), in_specs=[rows], out_specs=plgpu.BlockSpec((64,), lambda i, k: (i,))
        )(a)
        np.testing.assert_array_equal(found, a.sum(1))


def test_scalars_in_global_memory_are_added_to() -> None:
    """One thread stores what all of them have read."""

    def body(x: Any, o: Any) -> None:
        o[0] = x[0]
        for i in range(1, 4):
            o[0] += x[i]
        o[1] = o[0] + 1

    x = jnp.arange(8, dtype=jnp.int32)
    anywhere = plgpu.BlockSpec(memory_space=plgpu.GMEM)
    out = jax.ShapeDtypeStruct((2,), jnp.int32)
    found = plgpu.pallas_call(body, out, in_specs=[anywhere], out_specs=anywhere)(x)
    np.testing.assert_array_equal(found, [6, 7])
