"""Blocks whose place no TMA box names: a slice of a size known at run time (`BoundedSlice`), rows that an array of indices picks
(`Indirect`).

The threads of the warpgroup copy them, each step before the body and behind it, by index arrays: one place in the array for each
row of the block, `NOWHERE` where there is none.  What lies outside reads as zeros and is not written.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import arguments
from ..frontend.loops import ds
from ..frontend.primitives import slice_class
from ..ops.copies import commit_smem
from ..ops.indexed import NOWHERE
from ..ops.refs import load
from .specs import BlockDim, Blocked, BoundedSlice, Element, Indirect, Squeezed, block_size

if TYPE_CHECKING:
    from .blocks import Moved

ELEMENTS = 4096  # that a warpgroup moves at a time: 32 registers of a thread


class Part(NamedTuple):
    """What an index map says of a BoundedSlice: where it starts, how many elements it has."""

    start: Any
    size: Any


def is_irregular(d: BlockDim) -> bool:
    """Whether a dimension is one of the two kinds."""
    return isinstance(d, (BoundedSlice, Indirect))


def checked(what: str, i: int, d: BlockDim, x: Any) -> Any:
    """What an index map returns for dimension `i`; of an irregular one a Part or an array, int32 where traced.

    Raises ValueError where that is not what such a dimension takes.
    """
    if not is_irregular(d):
        if isinstance(x, slice_class()):
            raise ValueError(
                f"{what} returns a slice for {d} at position {i}; a BoundedSlice takes slices, others an integer"
            )
        return x
    if isinstance(d, Indirect):
        if np.shape(x) != (d.block_size,) or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(
                f"{what} must return {d.block_size} integers, an array of shape ({d.block_size},), for {d} at position {i}; it "
                f"returns {jax.typeof(x) if hasattr(x, 'aval') else f'{type(x).__name__} ({x})'}"
            )
        return jnp.asarray(x, jnp.int32)
    assert isinstance(d, BoundedSlice)
    if not isinstance(x, slice_class()):
        raise ValueError(
            f"{what} must return a slice, plgpu.ds(start, size), for {d} at position {i}; it returns "
            f"{jax.typeof(x) if hasattr(x, 'aval') else f'{type(x).__name__} ({x})'}"
        )
    if x.stride != 1:
        raise ValueError(f"{what} returns a slice of stride {x.stride} for {d} at position {i}; it must be 1")
    if isinstance(x.size, int) and not 0 <= x.size <= d.block_size:
        raise ValueError(
            f"{what} returns a slice of {x.size} elements for {d} at position {i}, more than it has room for"
        )
    return Part(_int32(x.start), _int32(x.size))


def no_index(x: Any) -> str | None:
    """What an index map returns where an integer scalar belongs; None: one."""
    if hasattr(x, "aval") or hasattr(x, "dtype"):
        integer = not x.shape and jnp.issubdtype(x.dtype, jnp.integer)
        return None if integer else str(jax.typeof(x))
    return None if isinstance(x, int) else f"{type(x).__name__} ({arguments.shown(x)})"


def _int32(x: Any) -> Any:
    return int(x) if isinstance(x, (int, np.integer)) else jnp.asarray(x, jnp.int32)


def grouped(dims: Sequence[BlockDim], flat: Sequence[Any]) -> list[Any]:
    """The results of an index map's jaxpr, one for each dimension."""
    if not dims:
        return list(flat)
    left = iter(flat)
    return [Part(next(left), next(left)) if isinstance(d, BoundedSlice) else next(left) for d in dims]


def results(dims: Sequence[BlockDim]) -> int:
    """How many results of an index map's jaxpr say where these dimensions are."""
    return sum(2 if isinstance(d, BoundedSlice) else 1 for d in dims)


def positions(d: BlockDim, found: Any, first: Any = 0, count: int | None = None) -> Any:
    """Where in the array `count` rows of the block lie, from its row `first` on; of an Indirect always all.

    NOWHERE in front of the array: blocks do not count from its end.
    """
    if isinstance(d, Indirect):
        return jnp.where(found < 0, jnp.int32(NOWHERE), found)
    assert isinstance(d, BoundedSlice)
    row = jax.lax.iota(jnp.int32, d.block_size if count is None else count) + first
    place = row + found.start
    return jnp.where((row < found.size) & (place >= 0), place, jnp.int32(NOWHERE))


def in_front(m: Moved) -> Moved:
    """An output with padding in front of the array as one that threads store, all others as they are: TMA loads from in front of
    an array, but a store there ends the kernel with an illegal instruction (seen on an H200)."""
    low = [d.padding[0] if isinstance(d, Element) else 0 for d in m.dims]
    if not m.by_tma or not any(low):
        return m

    def index(ids: Any) -> list[Any]:
        found = zip(m.index(ids), m.dims, low, strict=True)
        return [Part(i - n, jnp.int32(block_size(d) or 1)) if n else i for i, d, n in found]

    dims = tuple(BoundedSlice(block_size(d) or 1) if n else d for d, n in zip(m.dims, low, strict=True))
    return dataclasses.replace(m, dims=dims, index=index)


def gather(m: Moved, index: Sequence[Any], block: Any, zero: Any) -> None:
    """Copy what `index` says of the array into `block`, an SMEM view."""

    def one(array: Any, places: Any, piece: Any) -> None:
        piece[...] = array[places]

    _copy(m, index, block, zero, one)
    commit_smem()  # all threads, TMA and the tensor core see it


def scatter(m: Moved, index: Sequence[Any], block: Any, zero: Any) -> None:
    """Copy `block`, an SMEM view that all threads see, to where `index` says in the array."""

    def one(array: Any, places: Any, piece: Any) -> None:
        # Rows that go nowhere are not read: the body need not have written them.
        meant = functools.reduce(operator.and_, [p >= 0 for p in places if not isinstance(p, slice)])
        first = next(k for k, p in enumerate(places) if not isinstance(p, slice))
        along = range(first, first + meant.ndim)
        mask = jax.lax.broadcast_in_dim(meant, piece.shape, tuple(along))
        array[places] = load(piece, mask=mask)

    _copy(m, index, block, zero, one)
    commit_smem()  # all threads have read it


def _copy(m: Moved, index: Sequence[Any], block: Any, zero: Any, one: Any) -> None:
    from .blocks import block_of, count, unravel

    whole = [Blocked(n) if is_irregular(d) else d for d, n in zip(m.dims, m.ref.shape, strict=True)]
    array = block_of(m.ref, whole, [0 if is_irregular(d) else i for d, i in zip(m.dims, index, strict=True)], zero)
    kept = [(d, i) for d, i in zip(m.dims, index, strict=True) if not isinstance(d, Squeezed)]
    dims = [d for d, _ in kept]
    sizes = _piece(dims)
    counts = [n // p for n, p in zip(m.shape, sizes, strict=True)]
    odd = [k for k, d in enumerate(dims) if is_irregular(d)]
    between = range(odd[0], odd[-1] + 1)  # all of these get index arrays, so that their order stays

    def move(step: Any, _: None = None) -> None:
        first = [n * p for n, p in zip(unravel(step, counts), sizes, strict=True)]
        parts = [slice(None) if n == 1 else ds(f, p) for n, f, p in zip(counts, first, sizes, strict=True)]
        places: list[Any] = [slice(None)] * len(dims)
        for k in between:
            d, i = kept[k]
            if is_irregular(d):
                places[k] = positions(d, i, first[k], sizes[k])
            else:
                places[k] = jax.lax.iota(jnp.int32, sizes[k])
            places[k] = places[k].reshape([-1 if k == other else 1 for other in between])
        narrowed = array.at[tuple(slice(None) if k in odd else p for k, p in enumerate(parts))]
        one(narrowed, tuple(places), block.at[tuple(parts)])

    steps = math.prod(counts)
    move(zero) if steps == 1 else jax.lax.fori_loop(count(0), count(steps), move, None)


def _piece(dims: Sequence[BlockDim]) -> list[int]:
    """Elements along each dimension that are moved at a time: all of an Indirect, of others a power of two."""
    sizes = [block_size(d) or 1 for d in dims]
    room = max(1, ELEMENTS // math.prod(n for n, d in zip(sizes, dims, strict=True) if isinstance(d, Indirect)))
    room = 1 << room.bit_length() - 1
    for k in reversed(range(len(dims))):
        if not isinstance(dims[k], Indirect):
            sizes[k] = math.gcd(sizes[k], room)
            room //= sizes[k]
    return sizes


__all__ = ["Part", "checked", "gather", "grouped", "in_front", "is_irregular", "positions", "results", "scatter"]
