"""Blackwell attention forward: four warpgroups, two query tiles of 128 rows in flight, scores and output in tensor memory.

Warpgroup 0 is a mesh of warps: one loads Q and K, one loads V, one issues every product.  Warpgroups 1 and 2 take the softmax
of one query tile each: a thread holds a row, so maxima and sums need no exchange.  P goes back to tensor memory over the scores
it came from, as operand A of P V.  Warpgroup 3 is off the critical path: it rescales an output whose maximum has grown by more
than `rescale_threshold` (by a vote of each warp), and carries the finished ones out.

Products that touch the same columns in different shapes are ordered by a commit and its barrier, as the PTX ISA asks (9.7.16.6):
the next scores are multiplied when the P V that reads the probabilities under them has finished.  Meanwhile the other query
tile's exponentials are computed.  Key blocks are visited from the last to the first, as on Hopper, so that the steady loop has
no mask.  Compiled, checked in the disassembly and simulated; no Blackwell GPU has run it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels.config import Config
from mosaic_gpu.kernels.sm90.schedule import tile_table
from mosaic_gpu.ops.tcgen05_rules import features_of
from mosaic_gpu.runtime.device import multiprocessors

HEAD_DIMS = (64, 128)
TILES = 2  # query tiles in flight
ROWS = 128  # of a query tile: the lanes of tensor memory
TMEM_COLUMNS = 512
SHARED_LIMIT = 232_448  # bytes
POOL = 512  # registers of the four warpgroups together, for each thread position
LOWEST = -1e30  # where the running maximum starts: finite, so that a block without a visible key leaves no NaN
LOG2_E = math.log2(math.e)
LOAD_K, LOAD_V, MMA = 0, 1, 2  # warps of warpgroup 0
SOFTMAX, CORRECTION = 1, 3  # warpgroups: 1 and 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """How the kernel is built.

    tile_k: keys of a block, a multiple of 32 from 32 to 128.  kv_slots: blocks of K, and of V, in flight.
    softmax_registers, correction_registers, issue_registers: per thread of those warpgroups; 2 x softmax + the others at most
    512.  rescale_threshold: powers of two by which a row's maximum may grow before the output is rescaled; 0 rescales always.
    persistent: one thread block per multiprocessor walks a list of tiles; else one block per pair of query tiles.
    correction_columns: columns of the output that the correction holds at a time, which divide the head dim.
    emulated_columns: keys of a block whose exponentials are polynomials on the FMA units instead of the special function units,
    a multiple of 32 below tile_k; where a mask falls none are.
    """

    generation: ClassVar[str] = "sm100"
    kernel: ClassVar[str] = "attention"
    tile_k: int = 128
    kv_slots: int = 2
    softmax_registers: int = 192
    correction_registers: int = 96
    issue_registers: int = 32
    rescale_threshold: float = 8.0
    persistent: bool = True
    correction_columns: int = 32
    emulated_columns: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_k % 32 or not 32 <= self.tile_k <= 128:
            raise ValueError(
                f"tile_k={self.tile_k}: a multiple of 32 from 32 to 128, the keys of a row that a thread holds"
            )
        if self.kv_slots < 1:
            raise ValueError(f"kv_slots={self.kv_slots}: at least 1")
        for n in (self.softmax_registers, self.correction_registers, self.issue_registers):
            if n % 8 or not 24 <= n <= 256:
                raise ValueError(f"{n} registers: a multiple of 8 from 24 to 256")
        total = TILES * self.softmax_registers + self.correction_registers + self.issue_registers
        if total > POOL:
            raise ValueError(
                f"{TILES} x {self.softmax_registers} + {self.correction_registers} + {self.issue_registers} = {total} "
                f"registers; the pool of 4 warpgroups has {POOL}"
            )
        if self.softmax_registers < 128 or self.correction_registers > 128 or self.issue_registers > 128:
            raise ValueError(
                f"softmax_registers={self.softmax_registers}, correction_registers={self.correction_registers}, "
                f"issue_registers={self.issue_registers}: a block of 4 warpgroups is launched with 128 each, from which the "
                "softmax takes more and the others give"
            )
        if not 0 <= self.rescale_threshold <= 8:
            raise ValueError(f"rescale_threshold={self.rescale_threshold}: 0 to 8, so that P stays below 2^8")
        if self.emulated_columns % 32 or not 0 <= self.emulated_columns < self.tile_k:
            raise ValueError(
                f"emulated_columns={self.emulated_columns}: a multiple of 32 from 0 to below tile_k={self.tile_k}"
            )
        if self.correction_columns not in (16, 32, 64):
            raise ValueError(f"correction_columns={self.correction_columns}: 16, 32 or 64")

    @property
    def rows(self) -> int:
        """Query rows that a block has in flight."""
        return TILES * ROWS

    def tmem_columns(self, head_dim: int) -> int:
        """Columns of tensor memory: scores (P over them) and output of each query tile."""
        return TILES * (self.tile_k + head_dim)

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of shared memory for a head dimension (16-bit operands): Q, K, V, an output tile, a factor and a sum a row."""
        tiles = self.rows + ROWS + 2 * self.kv_slots * self.tile_k
        return 2 * head_dim * tiles + 4 * TILES * ROWS + 8 * (TILES * 8 + 4 * self.kv_slots) + 8

    def check(self, head_dim: int) -> None:
        """Raise UnsupportedCall for a head dim there is no kernel for, ResourceExceeded if it does not fit."""
        if head_dim not in HEAD_DIMS:
            raise UnsupportedCall(f"head dim {head_dim}: the Blackwell kernel has {HEAD_DIMS}")
        if self.shared_bytes(head_dim) > SHARED_LIMIT:
            raise ResourceExceeded(
                f"tile_k={self.tile_k} x {self.kv_slots} slots at head dim {head_dim} take {self.shared_bytes(head_dim)} "
                f"bytes of shared memory (Q and output {2 * (self.rows + ROWS) * head_dim}, K and V "
                f"{4 * self.kv_slots * self.tile_k * head_dim}); a block has {SHARED_LIMIT}"
            )


def default_config(head_dim: int, arch: str = "sm_100a") -> AttentionConfig:
    """What runs when nothing was tuned.  Nothing here has been measured: there was no Blackwell GPU.

    A quarter of the exponentials are polynomials where the chip has half as many special function units as its tensor cores
    would need: by the counts of instructions those and the FMA units are then equally busy.  sm_103a has twice as many.
    """
    emulated = 0 if features_of(arch).fast_exp2 else 32
    return AttentionConfig(kv_slots=4 if head_dim <= 64 else 2, emulated_columns=emulated)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, config: AttentionConfig, causal: bool, scale: float, return_lse: bool
) -> tuple[jax.Array, ...]:
    """The kernel itself, for arrays that the dispatcher has checked.

    q: (b, s, h, d); k, v: (b, t, h_kv, d); returns (b, s, h, d) and, if asked for, the LSE, (b, h, s) float32.
    """
    b, s, h, d = q.shape
    config.check(d)
    if v.shape[3] != d:
        raise UnsupportedCall(f"head dims {d} and {v.shape[3]}: on Blackwell V has the head dim of Q and K")
    tiles = b * h * plgpu.cdiv(s, config.rows)
    blocks = min(tiles, multiprocessors()) if config.persistent else tiles
    table = tile_table(b, h, k.shape[2], s, k.shape[1], 2 * d, config.rows, config.tile_k, causal, blocks)
    kernel = _kernel(b, s, h, d, blocks, jnp.dtype(q.dtype), config, causal, scale, return_lse)
    return tuple(kernel(table, q, k, v))


@functools.lru_cache(maxsize=256)
def _kernel(
    b: int,
    s: int,
    h: int,
    d: int,
    blocks: int,
    dtype: Any,
    c: AttentionConfig,
    causal: bool,
    scale: float,
    return_lse: bool,
) -> Any:
    keys, slots = c.tile_k, c.kv_slots
    factor = scale * LOG2_E  # scores in base 2: exp2(factor * (score - max))
    row_layout = plgpu.Layout.TCGEN05_TMEM_NATIVE.reduce(1)

    def key_blocks(k: Any, tile: Any) -> Any:
        """Key blocks that a pair of query tiles needs."""
        needed = plgpu.cdiv(plgpu.dim_size(k, 1), keys)
        return jnp.minimum(needed, plgpu.cdiv((tile + 1) * c.rows, keys)) if causal else needed

    def each_tile(table: Any, k: Any, work: Any) -> None:
        """work(turn, tile, key blocks before this tile, its key blocks) for every pair of query tiles of this block."""
        block = lax.axis_index("block")

        def one(carry: Any) -> Any:
            turn, tile, before = carry
            needed = key_blocks(k, tile)
            work(turn, tile, before, needed)
            return turn + 1, table[turn + 1, block, 2], before + needed

        zero = jnp.int32(0)
        lax.while_loop(lambda carry: carry[1] >= 0, one, (zero, table[0, block, 2], zero))

    def refill(x: Any, batch: Any, head: Any, key_block: Any, count: Any, x_tile: Any, full: Any, empty: Any) -> None:
        """The count-th key block of K or V into its ring."""
        slot = plgpu.rem(count, slots)

        @plgpu.when(count >= slots)
        def _() -> None:
            plgpu.barrier_wait(empty.at[slot])

        some_keys = plgpu.ds(key_block * keys, keys)
        plgpu.copy_gmem_to_smem(x.at[batch, some_keys, head], x_tile.at[slot], full.at[slot])

    def place(table: Any, q: Any, k: Any, turn: Any) -> Any:
        """(batch, head, head of K and V) of a turn."""
        block = lax.axis_index("block")
        batch, head = table[turn, block, 0], table[turn, block, 1]
        return batch, head, plgpu.div(head, plgpu.div(plgpu.dim_size(q, 2), plgpu.dim_size(k, 2)))

    def load_q_and_k(table: Any, q: Any, k: Any, q_tile: Any, k_tile: Any, bars: Any) -> None:
        def work(turn: Any, tile: Any, before: Any, needed: Any) -> None:
            batch, head, kv_head = place(table, q, k, turn)

            def load_k(i: Any) -> None:
                refill(k, batch, kv_head, needed - 1 - i, before + i, k_tile, bars["k_full"], bars["k_empty"])

            for i in range(TILES):
                plgpu.when(turn > 0)(lambda i=i: plgpu.barrier_wait(bars["q_empty"].at[i]))
                rows = plgpu.ds(tile * c.rows + i * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_tile.at[i], bars["q_full"].at[i])
                if i == 0:
                    load_k(0)  # what the first product needs comes first
            lax.fori_loop(1, needed, lambda i, _: load_k(i), None)

        each_tile(table, k, work)

    def load_v(table: Any, q: Any, k: Any, v: Any, v_tile: Any, bars: Any) -> None:
        def work(turn: Any, tile: Any, before: Any, needed: Any) -> None:
            batch, _, kv_head = place(table, q, k, turn)

            def step(i: Any, _: None) -> None:
                refill(v, batch, kv_head, needed - 1 - i, before + i, v_tile, bars["v_full"], bars["v_empty"])

            lax.fori_loop(0, needed, step, None)

        each_tile(table, k, work)

    def multiply(table: Any, k: Any, tiles: Any, scores: Any, probabilities: Any, out: Any, bars: Any) -> None:
        """Every product: scores of block 0 of both query tiles, then block by block and tile by tile P V and the next scores."""
        q_tile, k_tile, v_tile = tiles

        def score(i: int, count: Any, last_of_tile: Any) -> None:
            """Scores of query tile i and the count-th key block; the second tile's are the last use of the block."""
            slot = plgpu.rem(count, slots)
            k_block = k_tile.at[slot].transpose((1, 0))
            plgpu.tcgen05_mma(scores.at[i], q_tile.at[i], k_block, bars["s_full"].at[i], accumulate=False)
            if i == TILES - 1:
                plgpu.tcgen05_commit_arrive(bars["k_empty"].at[slot])
            plgpu.when(last_of_tile)(lambda: plgpu.tcgen05_commit_arrive(bars["q_empty"].at[i]))

        def value(i: int, count: Any, first: Any) -> None:
            """out += P V of query tile i, once P is there and the output has been rescaled."""
            slot = plgpu.rem(count, slots)
            plgpu.barrier_wait(bars["p_full"].at[i])
            plgpu.barrier_wait(bars["o_ready"].at[i])
            v_block = v_tile.at[slot]
            p, done = probabilities(i), bars["pv_done"].at[i]
            plgpu.tcgen05_mma(out.at[i], p, v_block, done, accumulate=jnp.logical_not(first))
            if i == TILES - 1:
                plgpu.tcgen05_commit_arrive(bars["v_empty"].at[slot])

        def work(turn: Any, tile: Any, before: Any, needed: Any) -> None:
            plgpu.barrier_wait(bars["k_full"].at[plgpu.rem(before, slots)])
            for i in range(TILES):
                plgpu.barrier_wait(bars["q_full"].at[i])
                score(i, before, needed == 1)

            def step(j: Any, _: None) -> None:
                count = before + j
                plgpu.barrier_wait(bars["v_full"].at[plgpu.rem(count, slots)])
                plgpu.barrier_wait(bars["k_full"].at[plgpu.rem(count + 1, slots)])
                for i in range(TILES):
                    value(i, count, j == 0)
                    plgpu.barrier_wait(bars["pv_done"].at[i])  # the next scores lie over the probabilities
                    score(i, count + 1, j + 2 == needed)

            lax.fori_loop(0, needed - 1, step, None)
            last = before + needed - 1
            plgpu.barrier_wait(bars["v_full"].at[plgpu.rem(last, slots)])
            for i in range(TILES):
                value(i, last, needed == 1)
            for i in range(TILES):
                plgpu.barrier_wait(bars["pv_done"].at[i])

        each_tile(table, k, work)

    def softmax(
        i: Any, table: Any, k: Any, scores: Any, probabilities: Any, lse: Any, row_values: Any, bars: Any
    ) -> None:
        """Query tile i: a row of scores in each thread."""
        plgpu.set_max_registers(c.softmax_registers, action="increase")

        def mask(x: Any, key_block: Any, first_row: Any) -> Any:
            """-inf where a key does not exist or, causal, lies behind the query."""
            last = plgpu.dim_size(k, 1) - 1 - key_block * keys
            if causal:
                rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=row_layout)
                last = jnp.minimum(last, rows + (first_row - key_block * keys))[:, None]
            columns = plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), 1, layout=plgpu.Layout.TCGEN05_TMEM_NATIVE)
            return jnp.where(columns <= last, x, -jnp.inf)

        def hand_over(x: Any, count: Any) -> None:
            """A value of each row for the correction: the factor of a block, at the end of a tile the sum."""

            @plgpu.when(count > 0)
            def _() -> None:
                plgpu.barrier_wait(bars["row_empty"].at[i])

            row_values[i] = x
            plgpu.barrier_arrive(bars["row_full"].at[i])

        def work(turn: Any, tile: Any, before: Any, needed: Any) -> None:
            first_row = tile * c.rows + i * ROWS

            def step(masked: bool, j: Any, carry: Any) -> Any:
                top, total = carry
                plgpu.barrier_wait(bars["s_full"].at[i])
                x = plgpu.async_load_tmem(scores)
                plgpu.wait_load_tmem()
                if masked:
                    x = mask(x, needed - 1 - j, first_row)
                highest = jnp.max(x, axis=1)
                if c.rescale_threshold:  # an old maximum that is not much too small will do: P just grows beyond 1
                    new_top = jnp.where((highest - top) * factor > c.rescale_threshold, highest, top)
                else:
                    new_top = jnp.maximum(top, highest)
                shrink = jnp.exp2((top - new_top) * factor)
                hand_over(shrink, before + turn + j)  # a sum for each tile before this one
                shifted = x * factor - (new_top * factor)[:, None]
                total = total * shrink
                emulated = 0 if masked else c.emulated_columns
                for start, size, exp2 in ((0, emulated, plgpu.exp2_fma), (emulated, keys - emulated, jnp.exp2)):
                    if size:
                        p = exp2(lax.slice_in_dim(shifted, start, start + size, axis=1))
                        plgpu.async_store_tmem(probabilities.at[:, plgpu.ds(start, size)], p.astype(dtype))
                        total = total + jnp.sum(p, axis=1)
                plgpu.commit_tmem()
                plgpu.barrier_arrive(bars["p_full"].at[i])
                return new_top, total

            start = (
                plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), row_layout),
                jnp.zeros((ROWS,), jnp.float32),
            )
            begin: Any = 1
            if causal:  # the diagonal crosses the blocks of both tiles' rows
                begin = jnp.maximum(needed - plgpu.div(tile * c.rows + 1, keys), 1)
            carry = lax.fori_loop(0, begin, functools.partial(step, True), start)
            top, total = lax.fori_loop(begin, needed, functools.partial(step, False), carry)
            hand_over(total, before + turn + needed)
            if lse is not None:
                block = lax.axis_index("block")
                batch, head = table[turn, block, 0], table[turn, block, 1]
                lse[batch, head, plgpu.ds(first_row, ROWS)] = top * scale + jnp.log(total)

        each_tile(table, k, work)

    def correct(table: Any, k: Any, result: Any, out: Any, o_tile: Any, row_values: Any, bars: Any) -> None:
        """Rescales the outputs between products, and carries them out at the end of a tile."""
        plgpu.set_max_registers(c.correction_registers, action="decrease")
        block = lax.axis_index("block")
        some_columns = [plgpu.ds(n, c.correction_columns) for n in range(0, d, c.correction_columns)]

        def take(i: int) -> Any:
            plgpu.barrier_wait(bars["row_full"].at[i])
            x = plgpu.load(row_values.at[i], layout=row_layout)
            plgpu.barrier_arrive(bars["row_empty"].at[i])
            return x

        def scaled(i: int, columns: Any, by: Any) -> Any:
            x = plgpu.async_load_tmem(out.at[i, :, columns])
            plgpu.wait_load_tmem()
            return x * by[:, None]

        def rescale(i: int) -> None:
            shrink = take(i)
            plgpu.barrier_wait(bars["pv_done"].at[i])

            def multiply_all() -> None:
                for columns in some_columns:
                    plgpu.async_store_tmem(out.at[i, :, columns], scaled(i, columns, shrink))
                plgpu.commit_tmem()

            if c.rescale_threshold:
                plgpu.when_any_in_warp(shrink != 1.0)(multiply_all)
            else:
                multiply_all()
            plgpu.barrier_arrive(bars["o_ready"].at[i])

        def work(turn: Any, tile: Any, before: Any, needed: Any) -> None:
            batch, head = table[turn, block, 0], table[turn, block, 1]
            for i in range(TILES):
                take(i)  # of the first block: there is nothing to rescale, and the tile before has left the accumulator
                plgpu.barrier_arrive(bars["o_ready"].at[i])

            def step(j: Any, _: None) -> None:
                for i in range(TILES):
                    rescale(i)

            lax.fori_loop(1, needed, step, None)
            for i in range(TILES):
                total = take(i)
                plgpu.barrier_wait(bars["pv_done"].at[i])
                inverse = jnp.where(total > 0, 1 / total, 0.0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what left through the tile before
                for columns in some_columns:
                    o_tile[:, columns] = scaled(i, columns, inverse).astype(dtype)
                plgpu.commit_smem()
                rows = plgpu.ds(tile * c.rows + i * ROWS, ROWS)
                plgpu.copy_smem_to_gmem(o_tile, result.at[batch, rows, head])

        each_tile(table, k, work)
        plgpu.wait_smem_to_gmem(0)

    def body(table: Any, q: Any, k: Any, v: Any, result: Any, *rest: Any) -> None:
        lse, rest = (rest[0], rest[1:]) if return_lse else (None, rest)
        q_tile, k_tile, v_tile, o_tile, row_values, (scores, over_scores), out, bars = rest
        wg = lax.axis_index("wg")

        def probabilities(i: Any) -> Any:
            return over_scores.at[i, :, plgpu.ds(0, keys)]

        @plgpu.when(wg == 0)
        def _() -> None:
            plgpu.set_max_registers(c.issue_registers, action="decrease")

            @plgpu.warp_map
            def _(warp: Any) -> None:
                plgpu.when(warp == LOAD_K)(lambda: load_q_and_k(table, q, k, q_tile, k_tile, bars))
                plgpu.when(warp == LOAD_V)(lambda: load_v(table, q, k, v, v_tile, bars))
                tiles = q_tile, k_tile, v_tile
                plgpu.when(warp == MMA)(lambda: multiply(table, k, tiles, scores, probabilities, out, bars))

        @plgpu.when((wg >= SOFTMAX) & (wg < CORRECTION))
        def _() -> None:
            i = wg - SOFTMAX
            softmax(i, table, k, scores.at[i], probabilities(i), lse, row_values, bars)

        @plgpu.when(wg == CORRECTION)
        def _() -> None:
            correct(table, k, result, out, o_tile, row_values, bars)

    def tile(rows: int) -> tuple[Any, Any]:
        return plgpu.TilingTransform((rows, 64)), plgpu.SwizzleTransform(128)

    # Probabilities take the first half of the columns of the scores that they are computed from.
    scores_type = plgpu.TMEM((TILES, ROWS, keys), jnp.float32)
    probabilities_type = plgpu.TMEM((TILES, ROWS, 2 * keys), dtype, packed=True)

    def barriers(count: int, tensor: bool = False) -> Any:
        return plgpu.Barrier(num_barriers=count, orders_tensor_core=tensor)

    kv_type = plgpu.SMEM((slots, keys, d), dtype, transforms=tile(keys))
    out_type = [jax.ShapeDtypeStruct((b, s, h, d), dtype)]
    return plgpu.kernel(
        body,
        out_type + ([jax.ShapeDtypeStruct((b, h, s), jnp.float32)] if return_lse else []),
        scratch_types=[
            plgpu.SMEM((TILES, ROWS, d), dtype, transforms=tile(ROWS)),
            kv_type,
            kv_type,
            plgpu.SMEM((ROWS, d), dtype, transforms=tile(ROWS)),
            plgpu.SMEM((TILES, ROWS), jnp.float32),
            plgpu.RefUnion(scores_type, probabilities_type),
            plgpu.TMEM((TILES, ROWS, d), jnp.float32),
            {
                **{name: barriers(TILES) for name in ("q_full", "q_empty", "row_full", "row_empty")},
                **{name: barriers(slots) for name in ("k_full", "k_empty", "v_full", "v_empty")},
                **{name: barriers(TILES, True) for name in ("s_full", "p_full", "o_ready", "pv_done")},
            },
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_100a", approx_math=True, strict=True),
        name="attention_sm100",
    )
