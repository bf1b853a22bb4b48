"""How the Hopper attention forward kernel can be built, what that takes, and what is the default."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mosaic_gpu.errors import ResourceExceeded
from mosaic_gpu.kernels.config import Config
from mosaic_gpu.kernels.tiles import check_head_dims, chunk, columns_of
from mosaic_gpu.plan.resources import SHARED_LIMIT

ROWS = 64  # query rows of a compute warpgroup
POOL = {2: 504, 3: 512, 4: 480}  # registers that a block has for one thread of each of its warpgroups
SHORT = 1024  # queries
NO_BIAS = "Hopper's kernel takes no bias and no mask yet; implementation='xla' does, and Blackwell's kernel"
ONES = 8  # columns that sum the rows of P: the fewest by which a product can be wider


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """How the kernel is built.

    block_kv: keys of a block, a multiple of 16 up to 256.  num_stages: blocks of K, and of V, in flight.
    compute_warpgroups: 2, 3 or 4, of 64 query rows each.  compute_registers, memory_registers: per thread; in sum over the
    warpgroups at most what the block is launched with: 504, 512 and 480 for 2, 3 and 4 compute warpgroups.
    take_turns: the compute warpgroups alternate on the tensor cores.
    rescale_threshold: powers of two by which a row's maximum may grow before the output is rescaled; 0 rescales always.
    persistent: one thread block per multiprocessor walks a list of tiles; else one block per tile.
    output_tile: the output leaves through shared memory and TMA, whole or in two halves; else straight from the registers;
    None: if it fits.
    q_in_registers: Q is read from shared memory once a tile instead of by every product.
    sum_by_product: eight columns of ones beside V make the tensor cores add up the rows of P, rounded to 16 bits as they
    are (the log-sum-exp is then off by up to 2^-8, the output is not); else the softmax adds them up in float32.  A config
    that was not passed in is used without it where the log-sum-exp is asked for, as gradients do.
    """

    generation: ClassVar[str] = "sm90"
    kernel: ClassVar[str] = "attention"
    block_kv: int = 128
    num_stages: int = 2
    compute_warpgroups: int = 2
    compute_registers: int = 240
    memory_registers: int = 24
    take_turns: bool = True
    rescale_threshold: float = 8.0
    persistent: bool = True
    output_tile: bool | None = None
    q_in_registers: bool = False
    sum_by_product: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_kv % 16 or not 16 <= self.block_kv <= 256:
            raise ValueError(f"block_kv={self.block_kv}: a multiple of 16 from 16 to 256")
        if self.num_stages < 1:
            raise ValueError(f"num_stages={self.num_stages}: at least 1")
        if self.compute_warpgroups not in POOL:
            raise ValueError(f"compute_warpgroups={self.compute_warpgroups}: one of {tuple(POOL)}")
        total = self.compute_warpgroups * self.compute_registers + self.memory_registers
        pool = POOL[self.compute_warpgroups]
        if total > pool:
            raise ValueError(
                f"{self.compute_warpgroups} x {self.compute_registers} + {self.memory_registers} = {total} registers; "
                f"the pool of {self.compute_warpgroups + 1} warpgroups has {pool}"
            )
        for n in (self.compute_registers, self.memory_registers):
            if n % 8 or not 24 <= n <= 240:
                raise ValueError(f"{n} registers: a multiple of 8 from 24 to 240")
        if not 0 <= self.rescale_threshold <= 8:
            raise ValueError(f"rescale_threshold={self.rescale_threshold}: 0 to 8, so that P stays below 2^8")

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return ROWS * self.compute_warpgroups

    def output_columns(self, head_dim: int, value_dim: int | None = None, bias: bool = False) -> int:
        """Columns of the output that lie in shared memory at a time: all, half of them, or none.  bias: whether there is one."""
        return self._beside_keys(head_dim, value_dim or head_dim, bias)[0]

    def bias_slots(self, head_dim: int, value_dim: int | None = None) -> int:
        """Key blocks of a bias in flight: two where there is room for them, else one."""
        return self._beside_keys(head_dim, value_dim or head_dim, True)[1]

    def shared_bytes(self, head_dim: int, value_dim: int | None = None, bias: bool = False) -> int:
        """Bytes of shared memory (16-bit operands).  bias: whether there is one."""
        value_dim = value_dim or head_dim
        return self._bytes(head_dim, value_dim, *self._beside_keys(head_dim, value_dim, bias))

    def _beside_keys(self, head_dim: int, value_dim: int, bias: bool) -> tuple[int, int]:
        """(columns of the output, key blocks of a bias) in shared memory.

        First half of the output gives way, which leaves once a tile; then the second block of the bias, which is waited for in
        every step; then the rest of the output.
        """
        sizes = [n for n in (value_dim, value_dim // 2) if value_dim % n == 0 and n % 16 == 0]
        slots = (2, 1) if bias else (0,)
        some = [(n, m) for m in slots for n in sizes if self.output_tile is not False]
        some += [(0, m) for m in slots if not self.output_tile]
        fitting = [x for x in some if self._bytes(head_dim, value_dim, *x) <= SHARED_LIMIT]
        return fitting[0] if fitting else some[-1]

    def _bytes(self, head_dim: int, value_dim: int, output_columns: int, bias_slots: int) -> int:
        ones = chunk(value_dim) if self.sum_by_product else 0
        keys = self.num_stages * self.block_kv * (head_dim + value_dim + ones)
        barriers = 2 * self.compute_warpgroups * (1 + bias_slots) + 4 * self.num_stages + self.sum_by_product
        rows = self.rows * (head_dim + output_columns + bias_slots * self.block_kv)
        return 2 * (rows + keys) + 8 * barriers

    def registers_needed(self, head_dim: int, value_dim: int | None = None, bias: bool = False) -> int:
        """An estimate of a compute thread's registers: scores, output, P, what surrounds them, and a bias on its way."""
        q, added = head_dim // 4 if self.q_in_registers else 0, self.block_kv // 8 if bias else 0
        return 24 + self.block_kv // 2 + (value_dim or head_dim) // 2 + self.block_kv // 4 + q + added

    def check(self, head_dim: int, value_dim: int | None = None, bias: bool = False) -> None:
        """Raise UnsupportedCall for head dims there is no kernel for, ResourceExceeded if they do not fit.

        head_dim: of Q and K; value_dim: of V and the output, None if it is the same; bias: whether there is one.
        """
        value_dim = value_dim or head_dim
        check_head_dims(head_dim, value_dim)
        dims = f"{head_dim}" if value_dim == head_dim else f"{head_dim}/{value_dim}"
        head_dim, value_dim = columns_of(head_dim), columns_of(value_dim)
        if self.sum_by_product and value_dim + ONES > 256:
            raise ResourceExceeded(
                f"sum_by_product at head dim {dims}: a product has at most 256 columns; leave it out"
            )
        with_bias = " and a bias" if bias else ""
        if self.shared_bytes(head_dim, value_dim, bias) > SHARED_LIMIT:
            more = f", bias {2 * self.rows * self.block_kv}" if bias else ""
            raise ResourceExceeded(
                f"block_kv={self.block_kv} x {self.num_stages} stages at head dim {dims}{with_bias} take "
                f"{self.shared_bytes(head_dim, value_dim, bias)} bytes of shared memory (Q {2 * self.rows * head_dim}, K and V "
                f"{2 * self.num_stages * self.block_kv * (head_dim + value_dim)}{more}); a block has {SHARED_LIMIT}"
            )
        needed = self.registers_needed(head_dim, value_dim, bias)
        if needed > self.compute_registers:
            raise ResourceExceeded(
                f"block_kv={self.block_kv} at head dim {dims}{with_bias} needs about {needed} registers, compute_registers is "
                f"{self.compute_registers}"
            )


def default_config(
    head_dim: int, value_dim: int | None = None, length: int | None = None, causal: bool = False, bias: bool = False
) -> AttentionConfig:
    """What runs when nothing was tuned: at head dims 64, 96, 128 and 256 the fastest on an H200 (docs/performance.md).

    length: of the queries, None for a long one.  bias: whether there is one; its defaults are not measured.
    """
    head_dim, value_dim = columns_of(head_dim), columns_of(value_dim or head_dim)
    widest = max(head_dim, value_dim)
    if bias:  # which takes shared memory, and registers while it is added
        ones = widest <= 128
        keys = 128 if widest <= 64 else 96 if widest <= 128 else 64
        return AttentionConfig(block_kv=keys, q_in_registers=ones, sum_by_product=ones)
    if widest <= 64 and (length is None or length > SHORT):
        return AttentionConfig(compute_warpgroups=3, compute_registers=160, memory_registers=32, sum_by_product=True)
    if widest <= 64 and not causal:  # tiles of 256 rows: a tile's start and end weigh as much as its few key blocks
        return AttentionConfig(
            block_kv=64,
            num_stages=4,
            compute_warpgroups=4,
            compute_registers=112,
            memory_registers=32,
            sum_by_product=True,
        )
    if widest <= 128:
        return AttentionConfig(q_in_registers=True, sum_by_product=True)
    if widest <= 192 and value_dim <= 128:
        return AttentionConfig()
    return AttentionConfig(block_kv=64)
