"""Elements of 4 bits on a GPU: the functions of `tests/ops/test_int4.py`, against JAX on the CPU; how XLA packs its arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.runtime.device import gpu_devices
from tests.examples import test_w4a16 as example
from tests.ops import test_int4 as int4

pytestmark = pytest.mark.gpu
if not gpu_devices():
    pytest.skip("needs a GPU", allow_module_level=True)


def check(functions: dict[str, Any], x: np.ndarray) -> None:
    outs = [jax.eval_shape(f, jax.ShapeDtypeStruct(x.shape, x.dtype)) for f in functions.values()]

    def body(a: Any, *refs: Any) -> None:
        for f, o in zip(functions.values(), refs, strict=True):
            o[...] = f(a[...])

    found = [np.asarray(y) for y in jax.jit(plgpu.kernel(body, outs))(x)]
    with jax.default_device(jax.devices("cpu")[0]):
        int4.right(functions, x, found)


@pytest.mark.parametrize("kind", int4.KINDS)
def test_every_value_becomes_every_type(kind):
    check({n: f for n, f in int4.to_every(kind).items() if not (kind == "float4_e2m1fn" and "int" in n)}, int4.PAIRS)


@pytest.mark.parametrize("kind", int4.INTEGERS)
@pytest.mark.parametrize("source", ["float32", "bfloat16", "int8", "uint8", "int32", "uint32"])
def test_integers_from_other_types(kind, source):
    if "int" in source:
        info = np.iinfo(source)
        x = np.concatenate([np.linspace(info.min, info.max, 128).astype(source), np.arange(128).astype(source)])
    else:
        x = np.concatenate([np.linspace(-20, 20, 250), [np.nan, 1e30, -1e30, 0.0, -0.0, 7.99]]).astype(
            int4.dtype_of(source)
        )
    check({kind: lambda v: int4.packed(v.astype(int4.dtype_of(kind)))}, x)


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_rounding_to_float4(source):
    x = np.concatenate([np.linspace(-8, 8, 250), [np.nan, np.inf, -np.inf, 0.0, -0.0, 0.1]]).astype(
        int4.dtype_of(source)
    )
    check({"to": lambda v: int4.packed(v.astype(jnp.float4_e2m1fn))}, x)


@pytest.mark.parametrize("kind", int4.INTEGERS)
def test_arithmetic_of_every_pair(kind):
    check(int4.pairwise(kind), int4.PAIRS)


@pytest.mark.parametrize("kind", int4.KINDS)
def test_moves(kind):
    x = np.random.default_rng(1).integers(0, 256, (64, 32)).astype(np.uint8)
    check({"moves": lambda b: int4.moves(b, kind)}, x)


@pytest.mark.parametrize("wide", [a for a, n in int4.WIDTHS.items() if 4 < n < 64])
def test_bits_of_other_widths(wide):
    for shape in ((16, 24), (3,)):
        check(int4.apart(wide), int4.bits(wide, *shape))


@pytest.mark.parametrize(("a", "b"), int4.PRODUCTS)
def test_products(a, b):
    x, y = int4.factors()
    found = jax.jit(plgpu.kernel(int4.product_body(a, b), int4.PRODUCT_OUTS))(x, y)
    with jax.default_device(jax.devices("cpu")[0]):
        int4.right_products(a, b, x, y, [np.asarray(f) for f in found])


@pytest.mark.parametrize("kind", int4.KINDS)
def test_arrays_of_4_bits_handed_over_as_bytes(kind):
    """XLA packs an array of its own as a kernel takes it apart: the way out that errors name."""
    packed = np.random.default_rng(2).integers(0, 256, (64, 32)).astype(np.uint8)

    def twice(b: Any, o: Any) -> None:
        o[...] = int4.packed(int4.elements(b[...], kind)[:, ::-1])

    @jax.jit
    def f(b: Any) -> Any:
        x = lax.bitcast_convert_type(b, int4.dtype_of(kind)).reshape(64, 64)[::-1]  # an array of XLA's
        bytes_ = lax.bitcast_convert_type(x.reshape(64, 32, 2), jnp.uint8)
        return plgpu.kernel(twice, jax.ShapeDtypeStruct((64, 32), jnp.uint8))(bytes_)

    turned = packed[::-1, ::-1]
    np.testing.assert_array_equal(f(packed), turned >> 4 | turned << 4)


@pytest.mark.parametrize("kind", example.KINDS)
def test_weights_of_4_bits(kind):
    """The example, with weights that XLA holds; in a jit of its own, so that the bytes are XLA's to make."""
    arrays = example.w4a16.arrays(200, 512, 1024, kind)
    example.right(arrays, np.asarray(jax.jit(example.w4a16.w4a16_matmul)(*arrays)))
