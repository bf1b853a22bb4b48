"""Small functions that kernels of Pallas use beside the operations: numbers, orders of tiles, scopes as decorators."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import arguments
from .loops import cdiv, div, ds, rem, run_scoped
from .primitives import is_ref

dslice = ds


def align_to(a: Any, alignment: Any) -> Any:
    """The next multiple of `alignment` that is not below `a`; both positive ints, symbols or traced integers."""
    return cdiv(a, alignment) * alignment


def next_power_of_2(x: int) -> int:
    """The least power of two that is not below `x`, an int from 0."""
    return 1 << max(0, arguments.whole("next_power_of_2", "x", x, 0) - 1).bit_length()


def multiple_of(x: Any, values: Sequence[int] | int) -> Any:
    """`x`, an integer that the caller knows to be a multiple of each of `values`: slices may begin there without other proof.

    Written as `x // n * n`, so an x that is none is rounded towards zero.
    """
    given = (values,) if isinstance(values, int) else values
    n = math.lcm(*arguments.whole_numbers("multiple_of", "values", given, 1))
    return div(x, n) * n


def find_swizzle(minor_dim_bits: int, what: str = "") -> int:
    """The widest swizzle, 128, 64, 32 or 16 bytes (which is none), whose rows divide rows of `minor_dim_bits` bits.

    For `TilingTransform((8, 8 * swizzle // bits of an element))` and `SwizzleTransform(swizzle)`.  what: the array, for the
    error.  Raises ValueError where the rows are no multiple of 16 bytes.
    """
    bits = arguments.whole("find_swizzle", "minor_dim_bits", minor_dim_bits, 1)
    found = math.gcd(bits, 128 * 8) // 8
    if found < 16:
        of = f" of {what}" if what else ""
        raise ValueError(f"find_swizzle: rows{of} have {bits} bits, which is no multiple of 128 (16 bytes): pad them")
    return found


def planar_snake(lin_idx: Any, shape: tuple[Any, Any], minor_dim: int, tile_width: int) -> tuple[Any, Any]:
    """Where step `lin_idx` of a walk over a grid of `shape` is: tiles of `tile_width` along `minor_dim`, one after the other, up
    along the other dimension in the first, down in the second, so that blocks that run at once share operands in the L2 cache.

    lin_idx, and the sizes of shape: ints or traced int32.  The last tile may be narrower.
    """
    where = "planar_snake"
    axis = arguments.whole(where, "minor_dim", minor_dim, 0, 1)
    width = arguments.whole(where, "tile_width", tile_width, 1)
    if len(shape) != 2:
        arguments.refuse(where, "shape", shape, "two sizes")
    minor_size, major_size = shape[axis], shape[1 - axis]
    step = jnp.asarray(lin_idx, jnp.int32)
    tile, within = div(step, width * major_size), rem(step, width * major_size)
    here: Any = width
    if not (isinstance(minor_size, int) and minor_size % width == 0):
        here = jnp.minimum(width, minor_size - tile * width)
    major, minor = div(within, here), tile * width + rem(within, here)
    major = jnp.where(rem(tile, 2) == 1, major_size - 1 - major, major)
    return (minor, major) if axis == 0 else (major, minor)


def with_scoped(*types: Any, collective_axes: Sequence[str] | str = (), **named: Any) -> Callable[..., Any]:
    """Decorator: the function gets Refs of these types, as from `run_scoped`, behind the arguments that it is called with."""

    def decorated(f: Callable[..., Any]) -> Callable[..., Any]:
        arguments.function("with_scoped", "the decorated object", f)

        @functools.wraps(f)
        def call(*args: Any) -> Any:
            return run_scoped(functools.partial(f, *args), *types, collective_axes=collective_axes, **named)

        return call

    return decorated


def transpose_ref(ref: Any, permutation: Sequence[int]) -> Any:
    """`ref.transpose(permutation)`: a view of a Ref in GMEM or SMEM with its dimensions in another order."""
    if not is_ref(ref):
        arguments.refuse("transpose_ref", "ref", ref, "a Ref or a view of one")
    order = arguments.whole_numbers("transpose_ref", "permutation", permutation, 0)
    if sorted(order) != list(range(len(ref.shape))):
        raise ValueError(f"transpose_ref: permutation={order} of a Ref of {len(ref.shape)} dimensions")
    return ref.transpose(order)


def wgmma_accumulator_load(acc: Any, *, wait_n: int | None = 0) -> jax.Array:
    """`acc[...]` after `wgmma_wait(wait_n)`; None: without, where the kernel has waited before."""
    from ..ops.wgmma import wgmma_wait

    if not is_ref(acc):
        arguments.refuse("wgmma_accumulator_load", "acc", acc, "an accumulator, ACC")
    if wait_n is not None:
        wgmma_wait(arguments.whole("wgmma_accumulator_load", "wait_n", wait_n, 0))
    found: jax.Array = acc[...]
    return found
