"""Blocks of arrays in global memory: where one starts, whether TMA can move it, how its index depends on the grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import export

from ..frontend.loops import ds
from ..frontend.memory import SMEM, RefType
from ..memory import SmemTransform
from ..plan.tma import ALIGNMENT, MAX_BOX, MAX_RANK, piece_of
from .irregular import is_irregular
from .specs import BlockDim, Element, Squeezed, block_size

Ids = Sequence[Any]


def kept_shape(dims: Sequence[BlockDim]) -> tuple[int, ...]:
    """The shape of the Ref that the kernel sees."""
    return tuple(n for d in dims if (n := block_size(d)) is not None)


def symbolic(sizes: Sequence[Any]) -> bool:
    """Whether one of them is a symbol of `jax.export`."""
    return any(export.is_symbolic_dim(n) for n in sizes)


def known_multiple(n: Any) -> int:
    """A number, at most 128, of which `n` is a multiple whatever its symbols are; the largest power of two for which JAX sees
    that (from a constraint `mod(n, 128) == 0`, say)."""
    powers = (128 >> i for i in range(8))
    return next(p for p in powers if not symbolic((rest := n % p,)) and rest == 0)


def why_in_place(
    shape: Sequence[int], dims: Sequence[BlockDim], dtype: Any, transforms: Sequence[SmemTransform] = ()
) -> str | None:
    """Why such blocks cannot go through shared memory; None where they can, by TMA or by threads (irregular ones)."""
    if any(is_irregular(d) for d in dims):
        return "the array is empty" if 0 in shape else None
    return why_no_tma(shape, dims, dtype, transforms)


def why_no_tma(
    shape: Sequence[int], dims: Sequence[BlockDim], dtype: Any, transforms: Sequence[SmemTransform] = ()
) -> str | None:
    """Why TMA cannot move such blocks of an array of `shape`; None where it can.  transforms: how they lie in shared memory."""
    size = np.dtype(dtype).itemsize
    if not shape or not kept_shape(dims):
        return "the block is a scalar"
    if isinstance(dims[-1], Squeezed):
        return "the last dimension, along which TMA moves, is squeezed"
    if np.dtype(dtype) == np.bool_:
        return "TMA has no bools"
    if len(shape) > MAX_RANK:
        return f"the array has {len(shape)} dimensions, TMA at most {MAX_RANK}"
    if 0 in shape:
        return "the array is empty"
    row = kept_shape(dims)[-1] * size
    if row % 16:
        return f"the block's rows have {row} bytes, TMA moves multiples of 16"
    if len(shape) > 1 and known_multiple(shape[-1]) * size % 16:
        return f"the array's rows have {shape[-1] * size} bytes, TMA needs multiples of 16"
    stride = size
    for n in () if transforms else reversed(kept_shape(dims)):
        if n > MAX_BOX:
            if not piece_of(n, stride)[1]:
                return (
                    f"TMA moves at most {MAX_BOX} elements along a dimension, and {n} of them do not split where copies may "
                    f"start, at multiples of {ALIGNMENT} bytes"
                )
            break  # so do those outside of it
        stride *= n
    return None


@dataclasses.dataclass(frozen=True)
class Moved:
    """An operand of a pipeline: what of it each step works on.

    ref: GMEM Ref or view; index: program ids -> one index for each dimension (a Part for a BoundedSlice, an array for an
    Indirect); depth: buffers; staged: through shared memory, by TMA unless it is irregular, else the kernel sees the part of
    the array itself; fresh: an output whose block is another one in each step, whether or not that can be seen.
    """

    name: str
    ref: Any
    dims: tuple[BlockDim, ...]
    index: Callable[[Ids], Sequence[Any]]
    depth: int
    delay: int
    transforms: tuple[SmemTransform, ...]
    staged: bool
    fresh: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return kept_shape(self.dims)

    @property
    def irregular(self) -> bool:
        """Whether threads copy its blocks, before the body and behind it."""
        return self.staged and any(is_irregular(d) for d in self.dims)

    @property
    def by_tma(self) -> bool:
        return self.staged and not self.irregular

    def buffer(self, depth: int) -> RefType:
        """Shared memory for `depth` blocks; rows are added where the next block would not start where TMA needs it."""
        return SMEM((depth, self._rows(), *self.shape[1:]), self.ref.dtype, transforms=self.transforms)

    def _rows(self) -> int:
        if self.transforms or self.irregular:
            return self.shape[0]
        row = math.prod(self.shape[1:]) * np.dtype(self.ref.dtype).itemsize
        step = ALIGNMENT // math.gcd(row, ALIGNMENT)
        return -(-self.shape[0] // step) * step

    def slot(self, buffer: Any, slot: Any) -> Any:
        """One block of the buffer."""
        return buffer.at[slot] if self._rows() == self.shape[0] else buffer.at[slot, ds(0, self.shape[0])]

    def block(self, ids: Ids, zero: Any) -> Any:
        """The block of the array at `ids`.  zero: a traced 0, for starts that are known and whose block sticks out."""
        return block_of(self.ref, self.dims, self.index(ids), zero)


def block_of(ref: Any, dims: Sequence[BlockDim], index: Sequence[Any], zero: Any) -> Any:
    """The part of a GMEM Ref that an index map's result picks."""
    if not dims:
        return ref
    parts = []
    for d, i, extent in zip(dims, index, ref.shape, strict=True):
        if isinstance(d, Squeezed):
            parts.append(i)
            continue
        low = d.padding[0] if isinstance(d, Element) else 0
        start = i - low if isinstance(d, Element) else i * d.block_size
        if isinstance(start, (int, np.integer)):
            inside = 0 <= start <= extent - d.block_size
            start = int(start) if inside else zero + int(start)
        parts.append(ds(start, d.block_size))
    return ref.at[tuple(parts)]


@dataclasses.dataclass(frozen=True)
class Dependence:
    """How an index depends on the axes of a grid.  axes: those that it may depend on; plain: those that are one of its
    components as they are, so that it changes whenever they do."""

    axes: frozenset[int]
    plain: frozenset[int]


def dependence(index: Callable[[Ids], Sequence[Any]], rank: int) -> Dependence:
    """Of an index map over a grid of `rank` axes."""
    closed = jax.make_jaxpr(lambda *ids: list(index(ids)))(*[jax.ShapeDtypeStruct((), jnp.int32)] * rank)
    return dependence_of(closed.jaxpr, closed.jaxpr.invars[:rank])


def dependence_of(jaxpr: Any, axes: Sequence[Any]) -> Dependence:
    """Of a jaxpr's results on some of its inputs: conservative, an operation depends on all that goes into it."""
    known: dict[Any, frozenset[int]] = {v: frozenset((i,)) for i, v in enumerate(axes)}
    for e in jaxpr.eqns:
        reached = frozenset[int]().union(*(known.get(v, ()) for v in e.invars if not isinstance(v, jex.Literal)))
        known.update(dict.fromkeys(e.outvars, reached))
    found, plain = frozenset[int](), frozenset[int]()
    for v in jaxpr.outvars:
        if not isinstance(v, jex.Literal):
            found |= known.get(v, frozenset())
            plain |= frozenset(i for i, a in enumerate(axes) if a is v)
    return Dependence(found, plain)


def count(n: Any) -> Any:
    """A loop's bound as an int32, also where x64 is enabled; known ones stay known."""
    return np.int32(n) if isinstance(n, (int, np.integer)) else jnp.asarray(n, jnp.int32)


def unravel(step: Any, grid: Sequence[Any]) -> tuple[Any, ...]:
    """A step's place in the grid, the last axis fastest; sizes are ints or traced."""
    step = jnp.asarray(step, jnp.int32)
    long = [i for i, n in enumerate(grid) if not (isinstance(n, int) and n == 1)]
    ids: list[Any] = [step * 0] * len(grid)
    for k in reversed(long):
        n = grid[k]
        if k == long[0]:
            ids[k] = step
        else:
            size = jnp.asarray(n, jnp.int32)
            ids[k], step = jax.lax.rem(step, size), jax.lax.div(step, size)
    return tuple(ids)
