"""How the Hopper attention backward kernels can be built, what that takes, and what is the default."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mosaic_gpu.errors import ResourceExceeded
from mosaic_gpu.kernels.config import Config
from mosaic_gpu.kernels.tiles import chunk, columns_of
from mosaic_gpu.plan.resources import SHARED_LIMIT

ROWS = 64  # keys of a compute warpgroup, and rows of a product
COMPUTES = 2
OF_DQ = ("ds_stages", "dq_columns", "dq_stages", "dq_ahead", "dq_registers")  # of the warpgroup that makes dQ
POOLS = {3: 504, 4: 512}  # registers of a thread, summed over the warpgroups of a block, by how many there are


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionBackwardConfig(Config):
    """How the kernels are built.

    block_q: queries of a block, a multiple of 64 up to 256.  num_stages: blocks of Q, and of dO, in flight.
    ds_stages: blocks of dS on their way to the warpgroup that makes dQ.  dq_columns: columns of dQ that one product makes, at
    most; dq_stages: such parts of dQ on their way to global memory.  dq_ahead: the product of the next part begins before a
    part has left: a shorter chain for the warpgroup that makes dQ, which competes with the computing ones for the tensor core.
    compute_registers, memory_registers, dq_registers: per thread; in sum over the warpgroups (the computing ones are two) at
    most what the block is launched with, 512, or 504 where there is no dQ warpgroup.
    split: the two computing warpgroups share 64 keys, one makes their dV, the other their dK; else each makes both for 64 keys of
    its own.  For head dims whose dK and dV together have no room in a warpgroup's registers.  dK's has 8 registers more.  dQ is
    then left to a kernel of its own, as with determinism, and there are no ds_stages, dq_columns, dq_stages, dq_ahead,
    dq_registers: of 64 keys, adding to dQ in global memory took as long as all products.
    """

    generation: ClassVar[str] = "sm90"
    kernel: ClassVar[str] = "attention_backward"
    block_q: int = 64
    num_stages: int = 2
    ds_stages: int = 2
    dq_columns: int = 64
    dq_stages: int = 2
    dq_ahead: bool = True
    compute_registers: int = 208
    memory_registers: int = 24
    dq_registers: int = 72
    split: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_q % ROWS or not ROWS <= self.block_q <= 256:
            raise ValueError(f"block_q={self.block_q}: a multiple of {ROWS} from {ROWS} to 256")
        for name, least in (("num_stages", 1 + self.split), ("ds_stages", 1), ("dq_stages", 1)):
            if getattr(self, name) < least:
                why = ", as dK of a block is under way when the next is asked for (split)" if least > 1 else ""
                raise ValueError(f"{name}={getattr(self, name)}: at least {least}{why}")
        if self.dq_columns % 16 or not 16 <= self.dq_columns <= 256:
            raise ValueError(f"dq_columns={self.dq_columns}: a multiple of 16 from 16 to 256")
        if self.split:
            for f in dataclasses.fields(self):
                if f.name in OF_DQ and getattr(self, f.name) != f.default:
                    raise ValueError(
                        f"{f.name}={getattr(self, f.name)} with split=True, whose dQ has a kernel of its own: leave it out"
                    )
        given = [8] * self.split + [self.memory_registers] + [self.dq_registers] * (not self.split)
        total, pool = COMPUTES * self.compute_registers + sum(given), POOLS[4 - self.split]
        if total > pool:
            more = " + ".join(map(str, given))
            raise ValueError(
                f"{COMPUTES} x {self.compute_registers} + {more} = {total} registers; the pool of {4 - self.split} warpgroups "
                f"has {pool}"
            )
        for name in ("compute_registers", "memory_registers", "dq_registers"):
            n = getattr(self, name)
            if n % 8 or not 24 <= n <= 240:
                raise ValueError(f"{name}={n}: a multiple of 8 from 24 to 240")

    @property
    def key_tiles(self) -> int:
        """Of 64 keys each, of a thread block."""
        return 1 if self.split else COMPUTES

    def part_columns(self, head_dim: int) -> int:
        """Columns of dQ that one product makes: whole chunks of K's columns, and a divisor of all."""
        unit = chunk(head_dim)
        return max(n for n in range(unit, head_dim + 1, unit) if head_dim % n == 0 and n <= max(unit, self.dq_columns))

    def parts(self, head_dim: int) -> int:
        """Parts of dQ of 64 queries."""
        return head_dim // self.part_columns(head_dim)

    def registers_needed(self, head_dim: int, value_dim: int) -> int:
        """An estimate of a compute thread's registers: dK, dV, scores, P and dS, and 16 for the rest (measured: 8 less fit)."""
        kept = max(head_dim, value_dim) // 2 if self.split else (head_dim + value_dim) // 2
        handed_on = self.block_q // 8 if self.split else 0
        return 16 + kept + self.block_q // 2 + self.block_q // 2 + handed_on

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Bytes of shared memory of the main kernel."""
        dims, keys = head_dim + value_dim, ROWS * self.key_tiles
        tiles = 2 * keys * dims + self.num_stages * self.block_q * (2 * dims + 8)
        handed_on = 1 if self.split else self.ds_stages  # P, or dS
        dq = 0 if self.split else self.dq_stages * 4 * ROWS * self.part_columns(head_dim)
        return tiles + 2 * keys * self.block_q * handed_on + dq + 8 * (2 + 4 * self.num_stages + 2 * handed_on)

    def check(self, head_dim: int, value_dim: int) -> None:
        """Raise ResourceExceeded where the head dims (of Q and K; of V and the output) do not fit."""
        dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}/{value_dim}"
        head_dim, value_dim = columns_of(head_dim), columns_of(value_dim)
        less = "smaller blocks, fewer stages" + ("" if self.split else ", or split=True")
        if self.shared_bytes(head_dim, value_dim) > SHARED_LIMIT:
            raise ResourceExceeded(
                f"attention backward, block_q={self.block_q} x {self.num_stages} stages at head dim {dims}: "
                f"{self.shared_bytes(head_dim, value_dim)} bytes of shared memory; a block has {SHARED_LIMIT}: {less}"
            )
        if self.registers_needed(head_dim, value_dim) > self.compute_registers + 8:
            raise ResourceExceeded(
                f"attention backward, block_q={self.block_q} at head dim {dims} needs about "
                f"{self.registers_needed(head_dim, value_dim)} registers, compute_registers is {self.compute_registers}: {less}"
            )


def default_config(head_dim: int, value_dim: int) -> AttentionBackwardConfig:
    """What runs when nothing was tuned."""
    head_dim, value_dim = columns_of(head_dim), columns_of(value_dim)
    wide = head_dim + value_dim
    if wide <= 128:
        return AttentionBackwardConfig(block_q=128, ds_stages=3, dq_ahead=False)
    if wide <= 256:
        return AttentionBackwardConfig()
    return AttentionBackwardConfig(split=True, compute_registers=232)
