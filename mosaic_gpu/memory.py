"""Memory spaces, transforms and barriers as plain data: what a buffer is, before anything is compiled.

No JAX here.  The front end hands these to JAX as the hashable `memory_space` of an `AbstractRef`; the planner, the emitter
and the simulator read them from the `Program`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from . import arguments

SpaceKind = Literal["gmem", "smem", "tmem", "acc", "barrier", "named_barrier", "semaphore"]


@dataclasses.dataclass(frozen=True)
class TilingTransform:
    """Shared memory stored as row-major tiles, each tile row-major itself.

    tiling: the tile's shape; it applies to as many trailing dimensions.  `(8, 64)` is the 8-row atom of a 128-byte swizzle
    of a 16-bit type; `(rows, 64)` stores chunks of 64 columns one behind the other, which a single TMA copy can fill
    whatever the number of rows.
    """

    tiling: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiling", arguments.whole_numbers("TilingTransform", "tiling", self.tiling, 0))


@dataclasses.dataclass(frozen=True)
class SwizzleTransform:
    """16-byte chunks XORed with the row, as TMA and the tensor core expect.  swizzle: span in bytes, 32, 64 or 128."""

    swizzle: int

    def __post_init__(self) -> None:
        if arguments.whole("SwizzleTransform", "swizzle", self.swizzle) not in (16, 32, 64, 128):
            raise ValueError(
                f"SwizzleTransform: swizzle={self.swizzle}; the hardware has 32, 64 and 128 bytes (16 means none)"
            )


SmemTransform = TilingTransform | SwizzleTransform


@dataclasses.dataclass(frozen=True)
class BarrierInfo:
    """What a barrier array needs to know.

    num_arrivals: mbarriers: arrivals (by warpgroups, warps, TMA copies or tensor-core commits) that complete a phase;
    named barriers: warpgroups that take part.
    orders_tensor_core: the barrier hands tensor memory over, so waits carry a tcgen05 fence.
    collective_axes: cluster axes; an arrival then counts in every block along them.
    """

    num_arrivals: int = 1
    orders_tensor_core: bool = False
    collective_axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class MemorySpace:
    """Kind of memory and how data lies in it; the `memory_space` of every Ref in a kernel.

    packed: TMEM: as many elements as fit share a 32-bit cell; collective: TMEM of a pair of blocks; union: (number of a
    `RefUnion`, which of its groups), for buffers that lie over each other.
    """

    kind: SpaceKind
    transforms: tuple[SmemTransform, ...] = ()
    barrier: BarrierInfo | None = None
    packed: bool = False
    collective: bool = False
    layout: Any = None
    union: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.kind

    @property
    def tiling(self) -> tuple[int, ...] | None:
        for t in self.transforms:
            if isinstance(t, TilingTransform):
                return t.tiling
        return None

    @property
    def swizzle(self) -> int:
        """Swizzle span in bytes; 0 for none."""
        for t in self.transforms:
            if isinstance(t, SwizzleTransform):
                return 0 if t.swizzle == 16 else t.swizzle
        return 0


GMEM_SPACE = MemorySpace("gmem")
