"""How the Blackwell attention kernel can be built, what that takes, and what is the default."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels.config import Config
from mosaic_gpu.kernels.tiles import check_head_dims, chunk, columns_of
from mosaic_gpu.ops.tcgen05_rules import features_of
from mosaic_gpu.plan.resources import SHARED_LIMIT
from mosaic_gpu.runtime.device import blackwell_arch

ROWS = 128  # of a query tile: the lanes of tensor memory
BUFFERS = 2  # of scores in tensor memory: one for each query tile, or for one tile two in turn
TMEM_COLUMNS = 512
# By query tiles in flight: registers that a block has for one thread of each of its warpgroups, and those it is launched with.
POOL, LAUNCHED = {1: 504, 2: 512}, {1: 168, 2: 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """How the kernel is built.

    query_tiles: 2 tiles of 128 rows in flight, each with a softmax warpgroup and its scores; or 1, whose next scores are
    multiplied while the last ones are in the softmax, for head dims whose two outputs do not fit tensor memory.
    pair: two neighbouring blocks multiply together, each with its own query rows and half of every key block.
    tile_k: keys of a block, a multiple of 32 from 32 to 128.  kv_slots: blocks of K, and of V, in flight.
    p_parts: parts in which the probabilities of a block are handed to the tensor core, of a multiple of 32 keys each.
    softmax_registers, correction_registers, issue_registers: per thread of those warpgroups; query_tiles x softmax + the
    others at most 512 (504 with one query tile).  rescale_threshold: powers of two by which a row's maximum may grow before
    the output is rescaled; 0 rescales always.
    persistent: one thread block per multiprocessor walks a list of tiles; else one block per pair of query tiles.
    dynamic: those blocks, or pairs, take over the tiles of others that have not been launched (cluster launch control), instead
    of a list.
    correction_columns: columns of the output that the correction holds at a time.
    emulated_columns: keys of a block whose exponentials are polynomials on the FMA units instead of the special function units,
    a multiple of 32 below tile_k; where a mask falls, or with a bias, none are.
    load_reduces: the load of the scores also finds each row's maximum, where no mask falls and no bias is added; sm_103a only.
    """

    generation: ClassVar[str] = "sm100"
    kernel: ClassVar[str] = "attention"
    query_tiles: int = 2
    pair: bool = False
    tile_k: int = 128
    kv_slots: int = 2
    p_parts: int = 1
    softmax_registers: int = 192
    correction_registers: int = 96
    issue_registers: int = 32
    rescale_threshold: float = 8.0
    persistent: bool = True
    dynamic: bool = False
    correction_columns: int = 32
    emulated_columns: int = 0
    load_reduces: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_tiles not in POOL:
            raise ValueError(f"query_tiles={self.query_tiles}: one of {tuple(POOL)}")
        if self.tile_k % 32 or not 32 <= self.tile_k <= 128:
            raise ValueError(
                f"tile_k={self.tile_k}: a multiple of 32 from 32 to 128, the keys of a row that a thread holds"
            )
        if self.kv_slots < 1:
            raise ValueError(f"kv_slots={self.kv_slots}: at least 1")
        if self.p_parts < 1 or self.tile_k % (32 * self.p_parts):
            raise ValueError(f"p_parts={self.p_parts}: parts of tile_k={self.tile_k} keys are multiples of 32")
        if not 0 <= self.rescale_threshold <= 8:
            raise ValueError(f"rescale_threshold={self.rescale_threshold}: 0 to 8, so that P stays below 2^8")
        if self.emulated_columns % 32 or not 0 <= self.emulated_columns < self.tile_k:
            raise ValueError(
                f"emulated_columns={self.emulated_columns}: a multiple of 32 from 0 to below tile_k={self.tile_k}"
            )
        if self.correction_columns not in (16, 32, 64):
            raise ValueError(f"correction_columns={self.correction_columns}: 16, 32 or 64")
        self._check_registers()

    def _check_registers(self) -> None:
        for n in (self.softmax_registers, self.correction_registers, self.issue_registers):
            if n % 8 or not 24 <= n <= 256:
                raise ValueError(f"{n} registers: a multiple of 8 from 24 to 256")
        total = self.query_tiles * self.softmax_registers + self.correction_registers + self.issue_registers
        if total > POOL[self.query_tiles]:
            raise ValueError(
                f"{self.query_tiles} x {self.softmax_registers} + {self.correction_registers} + {self.issue_registers} = {total} "
                f"registers; the pool of {self.query_tiles + 2} warpgroups has {POOL[self.query_tiles]}"
            )
        launched = LAUNCHED[self.query_tiles]
        if self.softmax_registers < launched or max(self.correction_registers, self.issue_registers) > launched:
            raise ValueError(
                f"softmax_registers={self.softmax_registers}, correction_registers={self.correction_registers}, "
                f"issue_registers={self.issue_registers}: a block of {self.query_tiles + 2} warpgroups is launched with "
                f"{launched} each, from which the softmax takes more and the others give"
            )

    @property
    def blocks(self) -> int:
        """That multiply together."""
        return 2 if self.pair else 1

    @property
    def rows(self) -> int:
        """Query rows that a block, or pair, has in flight."""
        return self.query_tiles * ROWS * self.blocks

    def tmem_columns(self, head_dim: int, value_dim: int | None = None) -> int:
        """Columns of tensor memory: scores (P over them) and output of each query tile."""
        return BUFFERS * self.tile_k + self.query_tiles * (value_dim or head_dim)

    def output_tiles(self, value_dim: int) -> int:
        """Chunks of the output in shared memory on their way out."""
        return min(2, value_dim // chunk(value_dim))

    def shared_bytes(self, head_dim: int, value_dim: int | None = None, bias: bool = False) -> int:
        """Bytes of shared memory (16-bit operands): Q, K, V, chunks of an output tile, a value a row, barriers, a bias."""
        value_dim = value_dim or head_dim
        q = self.query_tiles * ROWS * head_dim
        kv = self.kv_slots * self.tile_k * (head_dim + value_dim) // self.blocks
        out = self.output_tiles(value_dim) * ROWS * chunk(value_dim)
        barriers = 6 * self.query_tiles + BUFFERS * (1 + self.p_parts) + 4 * self.kv_slots
        # Two answers, each at a multiple of 128 bytes behind the row values, two places, and their barriers.
        answers = 128 + 8 + 2 * 4 * 8 if self.dynamic else 0
        if bias:
            out, barriers = out + self.query_tiles * ROWS * self.tile_k, barriers + 2 * self.query_tiles
        return 2 * (q + kv + out) + 4 * self.query_tiles * ROWS + 8 * barriers + 8 + answers

    def check(self, head_dim: int, value_dim: int | None = None, bias: bool = False) -> None:
        """Raise UnsupportedCall for head dims there is no kernel for, ResourceExceeded if they do not fit.

        head_dim: of Q and K; value_dim: of V and the output, None if it is the same; bias: whether there is one.
        """
        if bias and self.dynamic:
            raise UnsupportedCall("attention with a bias and dynamic=True: one warp would do both; take dynamic=False")
        value_dim = value_dim or head_dim
        check_head_dims(head_dim, value_dim)
        dims = f"{head_dim}" if value_dim == head_dim else f"{head_dim}/{value_dim}"
        head_dim, value_dim = columns_of(head_dim), columns_of(value_dim)
        if self.pair and value_dim % 32:
            raise UnsupportedCall(
                f"head dim {dims}: with pair each block has half of V's {value_dim} columns, in chunks of 16"
            )
        if self.tmem_columns(head_dim, value_dim) > TMEM_COLUMNS:
            raise ResourceExceeded(
                f"{BUFFERS} x {self.tile_k} columns of scores and {self.query_tiles} x {value_dim} of outputs take "
                f"{self.tmem_columns(head_dim, value_dim)} columns of tensor memory, which has {TMEM_COLUMNS}: take a smaller "
                "tile_k, or query_tiles=1"
            )
        if self.shared_bytes(head_dim, value_dim, bias) > SHARED_LIMIT:
            kv = 2 * self.kv_slots * self.tile_k * (head_dim + value_dim) // self.blocks
            raise ResourceExceeded(
                f"tile_k={self.tile_k} x {self.kv_slots} slots at head dim {dims} take "
                f"{self.shared_bytes(head_dim, value_dim, bias)} bytes of shared memory (Q "
                f"{2 * self.query_tiles * ROWS * head_dim}, K and V {kv}, output "
                f"{2 * ROWS * chunk(value_dim) * self.output_tiles(value_dim)}, bias "
                f"{2 * self.query_tiles * ROWS * self.tile_k * bias}); a block has {SHARED_LIMIT}"
            )


def default_config(
    head_dim: int, value_dim: int | None = None, arch: str | None = None, bias: bool = False
) -> AttentionConfig:
    """What runs when nothing was tuned.  Nothing here has been measured: there was no Blackwell GPU.

    The first that fits of two query tiles and one, with 128 keys in a block and 64, and at least two blocks of K and V in flight.
    A quarter of the exponentials of a block of 128 keys are polynomials where the chip has half as many special function units as
    its tensor cores would need: by the counts of instructions those and the FMA units are then equally busy.  Polynomials come in
    groups of 32 columns, so blocks of 64 keys (head dims above 128) have none.  sm_103a has twice as many units, so none
    either, and loads that reduce.  arch: None, that of the GPU.  bias: whether room is needed for one.
    """
    for query_tiles, tile_k in ((2, 128), (2, 64), (1, 128), (1, 64), (1, 32)):
        for slots in (4, 3, 2):
            features = features_of(arch or blackwell_arch())
            emulated = 0 if features.fast_exp2 else tile_k // 4 // 32 * 32
            c = AttentionConfig(
                query_tiles=query_tiles,
                softmax_registers=192 if query_tiles == 2 else 232,
                issue_registers=32 if query_tiles == 2 else 64,
                tile_k=tile_k,
                kv_slots=slots,
                emulated_columns=emulated,
                load_reduces=features.load_reduction,
            )
            dims = columns_of(head_dim), columns_of(value_dim or head_dim)
            if c.tmem_columns(*dims) <= TMEM_COLUMNS and c.shared_bytes(*dims, bias) <= SHARED_LIMIT:
                return c
    return AttentionConfig()  # whose check says what is wrong with these head dims
