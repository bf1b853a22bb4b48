"""Memory spaces as the user calls them: `SMEM((128, 64), jnp.bfloat16)`, `Barrier(num_arrivals=2)`, `ACC((64, 128))`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.ref import AbstractRef

from .. import arguments
from ..layouts.registers import checked_layout
from ..layouts.tmem import TMEMLayout
from ..memory import BarrierInfo, MemorySpace, SmemTransform, SpaceKind, SwizzleTransform, TilingTransform


@dataclasses.dataclass(frozen=True)
class RefType:
    """A buffer to allocate: shape (elements), dtype, memory space.  Made by calling a memory space."""

    shape: tuple[int, ...]
    dtype: Any
    space: MemorySpace

    def __repr__(self) -> str:
        kinds = {"barrier": "Barrier", "named_barrier": "NamedBarrier"}
        if self.space.kind in kinds:
            return f"{kinds[self.space.kind]}(num_barriers={self.shape})"
        if self.space.kind == "semaphore":
            return f"SemaphoreType.REGULAR({self.shape})"
        return f"{self.space.kind.upper()}({self.shape}, {self.dtype})"

    def aval(self) -> AbstractRef:
        return AbstractRef(jax.core.ShapedArray(self.shape, np.dtype(self.dtype)), memory_space=self.space)


_unions = itertools.count()


class RefUnion:
    """Groups of buffers that lie over each other: `RefUnion(s, p)` takes as much memory as the larger of the two.

    Each group is a buffer or a tree of buffers, all in shared memory or all in tensor memory; a group's buffers lie one
    behind the other.  In the kernel it is a tuple of the groups' Refs: `scores, probabilities = union`.  What one group holds
    is gone when another is written; the simulator sees them as the same bytes and columns.
    Raises ValueError for fewer than two groups, or buffers of two memories.
    """

    def __init__(self, *groups: Any) -> None:
        leaves = [jax.tree.leaves(g, is_leaf=lambda x: x is None or isinstance(x, RefType)) for g in groups]
        for i, group in enumerate(leaves):
            for leaf in group:
                if not isinstance(leaf, RefType) or leaf.space.kind not in ("smem", "tmem"):
                    arguments.refuse("RefUnion", f"groups[{i}]", leaf, "an SMEM or TMEM buffer, or a tree of them")
        kinds = {leaf.space.kind for group in leaves for leaf in group}
        if len(groups) < 2 or len(kinds) != 1:
            raise ValueError(f"RefUnion: {len(groups)} groups in {sorted(kinds)}: at least two, in one memory")
        if any(leaf.space.union is not None for group in leaves for leaf in group):
            raise ValueError("RefUnion: a union inside of a union; list its groups in the outer one")
        number = next(_unions)  # a program counts its own from 0
        self.groups = tuple(
            jax.tree.map(lambda leaf, g=g: _in_union(leaf, number, g), tree, is_leaf=lambda x: isinstance(x, RefType))
            for g, tree in enumerate(groups)
        )


def _in_union(leaf: RefType, number: int, group: int) -> RefType:
    return dataclasses.replace(leaf, space=dataclasses.replace(leaf.space, union=(number, group)))


jax.tree_util.register_pytree_with_keys(
    RefUnion,
    lambda u: (tuple((jax.tree_util.SequenceKey(i), g) for i, g in enumerate(u.groups)), None),
    lambda _, groups: tuple(groups),  # type: ignore[arg-type,return-value]
    lambda u: (u.groups, None),
)


@dataclasses.dataclass(frozen=True)
class Space:
    """A memory space; call it for an allocation."""

    kind: SpaceKind

    def __call__(
        self,
        shape: Sequence[int] | int,
        dtype: Any,
        *,
        transforms: Sequence[SmemTransform] = (),
        packed: bool | None = None,
        collective: bool | None = None,
        layout: Any = None,
    ) -> RefType:
        """A buffer of this space.

        shape: elements; dtype: a JAX dtype; transforms (SMEM only): `TilingTransform`, `SwizzleTransform`; without them a buffer
        that the tensor core reads gets those that fit, and all others lie row by row.
        TMEM only: shape (rows, columns) or (n, rows, columns), rows 128 or 64 (the lanes); packed: elements of 16 or 8 bits
        share a 32-bit cell, as an operand A and what is stored to be one are (False: an element a cell, as in accumulators);
        collective: the accumulator of a pair of blocks, whose rows this block has; layout: None, or `TMEMLayout.SCALES_LAYOUT`
        for the scale factors of a block-scaled operand, `TMEMLayout.SPARSE_METADATA_LAYOUT` for the metadata of a sparse one,
        `TMEMLayout.M64_COLLECTIVE_LAYOUT` for the accumulator of a pair of blocks of 64 rows each.
        Raises ValueError for a combination the space does not have.
        """
        where = self.kind.upper()
        dims, scalar = arguments.whole_numbers(where, "shape", shape, 0), arguments.dtype(where, "dtype", dtype)
        given = arguments.sequence_of(
            where, "transforms", transforms, (TilingTransform, SwizzleTransform), "TilingTransform and SwizzleTransform"
        )
        if given and self.kind != "smem":
            raise ValueError(f"transforms describe shared memory; {where} has none")
        if (packed is not None or collective is not None or layout is not None) and self.kind != "tmem":
            raise ValueError(f"packed, collective and layout describe TMEM; {where} has none")
        packed = arguments.flag(where, "packed", packed or False)
        collective = arguments.flag(where, "collective", collective or False)
        kept = layout if isinstance(layout, TMEMLayout) else checked_layout(where, layout)
        return RefType(dims, scalar, MemorySpace(self.kind, given, None, packed, collective, kept))

    def __str__(self) -> str:
        return self.kind


GMEM, SMEM, TMEM = Space("gmem"), Space("smem"), Space("tmem")


@dataclasses.dataclass(frozen=True)
class InitialAccumulator:
    """An accumulator of `run_state` and what it starts from."""

    type: RefType
    value: Any


class Accumulators:
    """The memory space `ACC`; call it for an allocation, `ACC.init(array)` for one of `run_state`."""

    def __call__(self, shape: Sequence[int], dtype: Any = np.float32) -> RefType:
        """A wgmma accumulator in the registers of one warpgroup: (m, n), m a multiple of 64; starts as zeros.

        `ACC.init(array)`: one that starts from an array of its shape and dtype, for `run_state`.
        """
        dims = arguments.whole_numbers("ACC", "shape", shape, 1)
        return RefType(dims, arguments.dtype("ACC", "dtype", dtype), MemorySpace("acc"))

    def init(self, array: Any) -> InitialAccumulator:
        """An accumulator of `run_state` that starts from `array`."""
        if not hasattr(array, "dtype") or len(np.shape(array)) != 2:
            arguments.refuse(
                "ACC.init", "array", array, "a 2-D register array, such as jnp.zeros((64, 128), jnp.float32)"
            )
        return InitialAccumulator(self(array.shape, array.dtype), array)


ACC = Accumulators()


def Barrier(
    *, num_arrivals: int = 1, num_barriers: int | Sequence[int] = 1, orders_tensor_core: bool = False
) -> RefType:
    """An array of mbarriers in shared memory (PTX ISA 9.7.13.15).

    num_arrivals: arrivals that complete a phase, each by a warpgroup (or by a warp under `warp_map`), by a TMA copy or by a
    tensor-core commit.  num_barriers: how many; index them as `barrier.at[slot]`.  orders_tensor_core: the barrier hands
    tensor memory from one role to another.
    """
    return _mbarriers("Barrier", num_arrivals, num_barriers, orders_tensor_core)


def _mbarriers(
    where: str,
    num_arrivals: int,
    num_barriers: int | Sequence[int],
    orders_tensor_core: bool,
    axes: tuple[str, ...] = (),
) -> RefType:
    info = BarrierInfo(
        arguments.whole(where, "num_arrivals", num_arrivals, 1, 2**18 - 1),
        arguments.flag(where, "orders_tensor_core", orders_tensor_core),
        axes,
    )
    dims = arguments.whole_numbers(where, "num_barriers", num_barriers, 1)
    return RefType(dims, np.dtype(np.int32), MemorySpace("barrier", barrier=info))


def ClusterBarrier(
    *,
    collective_axes: Sequence[str] | str,
    num_arrivals: int = 1,
    num_barriers: int | Sequence[int] = 1,
    orders_tensor_core: bool = False,
) -> RefType:
    """As `Barrier`, but an arrival counts in every block of the cluster along `collective_axes`; a wait is on one's own.

    num_arrivals: arrivals by each block; a phase completes after num_arrivals from each of the blocks along the axes.
    """
    axes = arguments.names("ClusterBarrier", "collective_axes", collective_axes)
    return _mbarriers("ClusterBarrier", num_arrivals, num_barriers, orders_tensor_core, axes)


@dataclasses.dataclass(frozen=True, repr=False)
class _Semaphores(RefType):
    def __call__(self, shape: Sequence[int] | int) -> RefType:
        return RefType(arguments.whole_numbers("SemaphoreType.REGULAR", "shape", shape, 1), self.dtype, self.space)


class SemaphoreType:
    """Counters in global memory that all blocks of a launch share (`semaphore_signal`, `semaphore_wait`, `semaphore_read`).

    `SemaphoreType.REGULAR` is one, `SemaphoreType.REGULAR((4,))` an array of them, int32, zero when a launch begins: in
    `scratch_types`, or `get_global(SemaphoreType.REGULAR)` in the body.  Blocks that wait for each other must be on the GPU at
    the same time; no more than one a multiprocessor is certain to be, and the simulator runs so many.
    """

    REGULAR = _Semaphores((), np.dtype(np.int32), MemorySpace("semaphore"))


def NamedBarrier(*, num_warpgroups: int, num_barriers: int = 1) -> RefType:
    """Hardware barriers of the block (PTX ISA 9.7.13.1): `num_warpgroups` take part, by `named_barrier_arrive` (does not
    wait) or `named_barrier_sync` (waits).  A block has 16, of which the compiler keeps number 0.
    """
    info = BarrierInfo(arguments.whole("NamedBarrier", "num_warpgroups", num_warpgroups, 1, 8))
    dims = arguments.whole_numbers("NamedBarrier", "num_barriers", num_barriers, 1)
    return RefType(dims, np.dtype(np.int32), MemorySpace("named_barrier", barrier=info))
