"""Memory spaces as the user calls them: `SMEM((128, 64), jnp.bfloat16)`, `Barrier(num_arrivals=2)`, `ACC((64, 128))`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.ref import AbstractRef

from ..memory import BarrierInfo, MemorySpace, SmemTransform, SpaceKind


@dataclasses.dataclass(frozen=True)
class RefType:
    """A buffer to allocate: shape (elements), dtype, memory space.  Made by calling a memory space."""

    shape: tuple[int, ...]
    dtype: Any
    space: MemorySpace

    def aval(self) -> AbstractRef:
        return AbstractRef(jax.core.ShapedArray(self.shape, np.dtype(self.dtype)), memory_space=self.space)


def _dims(shape: Sequence[int] | int) -> tuple[int, ...]:
    return tuple(int(x) for x in ((shape,) if isinstance(shape, int) else shape))


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

        shape: elements; dtype: a JAX dtype; transforms (SMEM only): `TilingTransform`, `SwizzleTransform`;
        packed, collective, layout (TMEM only).  Raises ValueError for a combination the space does not have.
        """
        if transforms and self.kind != "smem":
            raise ValueError(f"transforms describe shared memory; {self.kind.upper()} has none")
        if (packed is not None or collective is not None or layout is not None) and self.kind != "tmem":
            raise ValueError(f"packed, collective and layout describe TMEM; {self.kind.upper()} has none")
        space = MemorySpace(self.kind, tuple(transforms), None, bool(packed), bool(collective), layout)
        return RefType(_dims(shape), np.dtype(dtype), space)

    def __str__(self) -> str:
        return self.kind


GMEM, SMEM, TMEM = Space("gmem"), Space("smem"), Space("tmem")


def ACC(shape: Sequence[int], dtype: Any = np.float32) -> RefType:
    """A wgmma accumulator in the registers of one warpgroup: (m, n), m a multiple of 64; starts as zeros."""
    return RefType(_dims(shape), np.dtype(dtype), MemorySpace("acc"))


def Barrier(
    *, num_arrivals: int = 1, num_barriers: int | Sequence[int] = 1, orders_tensor_core: bool = False
) -> RefType:
    """An array of mbarriers in shared memory (PTX ISA 9.7.13.15).

    num_arrivals: arrivals that complete a phase, each by a warpgroup (or by a warp under `warp_map`), by a TMA copy or by a
    tensor-core commit.  num_barriers: how many; index them as `barrier.at[slot]`.  orders_tensor_core: the barrier hands
    tensor memory from one role to another.
    """
    if not 1 <= num_arrivals < 2**18:
        raise ValueError(f"Barrier(num_arrivals={num_arrivals}): between 1 and 2**18 - 1")
    dims = _dims(num_barriers)
    if math.prod(dims) < 1:
        raise ValueError(f"Barrier(num_barriers={num_barriers}): at least one")
    return RefType(
        dims, np.dtype(np.int32), MemorySpace("barrier", barrier=BarrierInfo(num_arrivals, orders_tensor_core))
    )


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
    one = Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers, orders_tensor_core=orders_tensor_core)
    axes = (collective_axes,) if isinstance(collective_axes, str) else tuple(collective_axes)
    return RefType(
        one.shape, one.dtype, MemorySpace("barrier", barrier=BarrierInfo(num_arrivals, orders_tensor_core, axes))
    )


def NamedBarrier(*, num_warpgroups: int, num_barriers: int = 1) -> RefType:
    """Hardware barriers of the block (PTX ISA 9.7.13.1): `num_warpgroups` take part, by `named_barrier_arrive` (does not
    wait) or `named_barrier_sync` (waits).  A block has 16, of which the compiler keeps number 0.
    """
    if not 1 <= num_warpgroups <= 8:
        raise ValueError(f"NamedBarrier(num_warpgroups={num_warpgroups}): a block has 1 to 8 warpgroups")
    return RefType(
        _dims(num_barriers), np.dtype(np.int32), MemorySpace("named_barrier", barrier=BarrierInfo(num_warpgroups))
    )
