"""What a block is: `BlockSpec`, the kinds of block dimensions, `GridSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import export

from .. import arguments
from ..errors import Line
from ..frontend.memory import GMEM, SMEM, Space
from ..frontend.trace import function_line
from ..memory import SmemTransform, SwizzleTransform, TilingTransform


@dataclasses.dataclass(frozen=True)
class Blocked:
    """A dimension cut into blocks of `block_size`; the index map returns the block's number."""

    block_size: int


@dataclasses.dataclass(frozen=True)
class Element:
    """`block_size` elements from where the index map says, in elements.

    padding: (low, high) elements of zeros that the array is thought to have before and behind; the index counts from the
    first of them.
    """

    block_size: int
    padding: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class Squeezed:
    """One element, whose dimension the kernel does not see; the index map returns the element.  None means the same."""


@dataclasses.dataclass(frozen=True)
class BoundedSlice:
    """Up to `block_size` elements; the index map returns a slice, `ds(start, size)`, whose size may be known at run time only.

    The block has block_size elements along this dimension.  Behind the slice (and outside of the array) it reads zeros, and
    what is written there is dropped: only the slice is written.  A size over block_size counts as block_size.
    """

    block_size: int


@dataclasses.dataclass(frozen=True)
class Indirect:
    """`block_size` elements picked by an array of int32 indices of shape (block_size,), which the index map returns: a gather
    of an input, a scatter of an output, whose indices must differ.

    Indices outside of the array read zeros; what is written there is dropped.
    """

    block_size: int


squeezed = Squeezed()
BlockDim = Blocked | Element | Squeezed | BoundedSlice | Indirect


@dataclasses.dataclass(frozen=True)
class Buffered:
    """pipeline_mode: `buffer_count` buffers for this operand, instead of `max_concurrent_steps`."""

    buffer_count: int

    def __post_init__(self) -> None:
        arguments.whole("Buffered", "buffer_count", self.buffer_count, 1)


class _NoBlockSpec:
    """In one slot of in_specs or out_specs: the whole array, left where it is (GMEM).  Omitting the specs is another thing: then
    every array is copied to shared memory, whole."""

    def __repr__(self) -> str:
        return "no_block_spec"


no_block_spec = _NoBlockSpec()

ANY = GMEM
"""Left where it is, which on a GPU is GMEM."""


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Which block of an array a grid point works on.  Nothing is checked before the call sees the array.

    block_shape: for each dimension an int (as Blocked), None (as Squeezed), Blocked, Element, Squeezed, BoundedSlice or
    Indirect (the last two are copied by the threads, not by TMA); None altogether: the whole array.
    index_map: (program ids, prefetch refs) -> one index for each dimension (a slice for a BoundedSlice, an array for an
    Indirect); None: zeros.
    pipeline_mode: `Buffered(n)`: n buffers in shared memory, whatever max_concurrent_steps is.
    transforms: how the block lies in shared memory (TilingTransform, SwizzleTransform), as wgmma needs it.
    delay_release: the body may leave work on an input's buffer in flight for so many further steps.
    memory_space: SMEM (the default) or GMEM (ANY): the block is not copied, the kernel sees that part of the array.
    """

    block_shape: Sequence[BlockDim | int | None] | None = None
    index_map: Callable[..., Any] | None = None
    pipeline_mode: Buffered | None = None
    transforms: Sequence[SmemTransform] = ()
    delay_release: int = 0
    collective_axes: Sequence[str] = ()
    memory_space: Any = dataclasses.field(default=None, kw_only=True)

    @property
    def line(self) -> Line | None:
        """Where its index map was written, the only place in it that has a line."""
        return function_line(self.index_map) if self.index_map is not None else None

    def dims(self, where: str, name: str, shape: Sequence[int]) -> tuple[BlockDim, ...]:
        """The block's dimensions for an array of `shape`; `where` and `name` stand in errors."""
        if self.block_shape is None:
            return tuple(Blocked(n) if self.in_gmem(where, name) else _dim(where, f"{name}, whole", n) for n in shape)
        if not hasattr(self.block_shape, "__iter__"):
            arguments.refuse(where, f"block_shape of {name}", self.block_shape, "a sequence or None")
        given = tuple(self.block_shape)
        if len(given) != len(shape):
            raise ValueError(
                f"Block shape for {name} (= {given}) must have the same number of dimensions as the array shape "
                f"{tuple(shape)}"
            )
        return tuple(_dim(where, f"block_shape[{i}] of {name}", d) for i, d in enumerate(given))

    def in_gmem(self, where: str, name: str) -> bool:
        """Whether the block stays in global memory."""
        space = self.memory_space
        if space is None or (isinstance(space, Space) and space.kind == "smem"):
            return False
        if isinstance(space, Space) and space.kind == "gmem":
            return True
        arguments.refuse(where, f"memory_space of {name}", space, "plgpu.SMEM, plgpu.GMEM, plgpu.ANY or None")

    def depth(self, where: str, name: str, steps: int) -> int:
        """Buffers of this operand, where `steps` is max_concurrent_steps."""
        mode = self.pipeline_mode
        if mode is None:
            return steps
        count = getattr(mode, "buffer_count", None)
        if count is None:
            arguments.refuse(where, f"pipeline_mode of {name}", mode, "Buffered(buffer_count) or None")
        return arguments.whole(where, f"pipeline_mode of {name}", count, 1)

    def checked_transforms(self, where: str, name: str) -> tuple[SmemTransform, ...]:
        return arguments.sequence_of(
            where,
            f"transforms of {name}",
            self.transforms,
            (TilingTransform, SwizzleTransform),
            "TilingTransform and SwizzleTransform",
        )


def _dim(where: str, name: str, d: Any) -> BlockDim:
    if d is None:
        return squeezed
    if isinstance(d, Squeezed):
        return d
    if isinstance(d, (Blocked, Element, BoundedSlice, Indirect)):
        arguments.whole(where, name, d.block_size, 1)
        if isinstance(d, Element):
            low_high = arguments.whole_numbers(where, f"padding of {name}", d.padding, 0)
            if len(low_high) != 2:
                raise ValueError(f"{where}: padding of {name} is (low, high), not {d.padding}")
        return d
    if export.is_symbolic_dim(d):
        raise ValueError(
            f"{where}: {name}={d}: shape polymorphism for Pallas does not support dynamically-shaped blocks: shared memory and "
            "registers are dealt out when the kernel is compiled. A block's sizes are numbers; the array's and the grid's may "
            f"be symbols: a block_shape with 64, say, in place of {d}, and a grid of plgpu.cdiv({d}, 64). What sticks out of the "
            "array reads as zeros and is not written"
        )
    return Blocked(arguments.whole(where, name, d, 1))


def block_size(d: BlockDim) -> int | None:
    """Elements along a dimension of the block; None where the dimension is squeezed."""
    return None if isinstance(d, Squeezed) else d.block_size


@dataclasses.dataclass(frozen=True)
class GridSpec:
    """The grid and specs of a `pallas_call` in one object; it excludes the four arguments of the same names.

    num_scalar_prefetch: so many of the call's first arguments are given to the index maps, too (and not cut into blocks).
    """

    grid: Any = ()
    in_specs: Any = no_block_spec
    out_specs: Any = no_block_spec
    scratch_shapes: Any = ()
    num_scalar_prefetch: int = 0


def PrefetchScalarGridSpec(
    num_scalar_prefetch: int,
    grid: Any = (),
    in_specs: Any = no_block_spec,
    out_specs: Any = no_block_spec,
    scratch_shapes: Any = (),
) -> GridSpec:
    """A `GridSpec` whose first `num_scalar_prefetch` arguments the index maps see."""
    count = arguments.whole("PrefetchScalarGridSpec", "num_scalar_prefetch", num_scalar_prefetch, 0)
    return GridSpec(grid, in_specs, out_specs, scratch_shapes, count)


@dataclasses.dataclass(frozen=True)
class CostEstimate:
    """What a call costs, for XLA's scheduler: operations, of them transcendental, bytes read and written."""

    flops: int
    transcendentals: int
    bytes_accessed: int
    remote_bytes_transferred: int = 0


__all__ = [
    "ANY",
    "SMEM",
    "BlockDim",
    "BlockSpec",
    "Blocked",
    "BoundedSlice",
    "Buffered",
    "CostEstimate",
    "Element",
    "GridSpec",
    "Indirect",
    "PrefetchScalarGridSpec",
    "Squeezed",
    "block_size",
    "no_block_spec",
    "squeezed",
]
