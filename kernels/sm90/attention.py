"""Hopper attention forward: compute warpgroups of 64 query rows each and one memory warpgroup; K and V by TMA in stages.

A step of a compute warpgroup puts the scores of the next key block and P V of the current one in flight together, and takes
the next block's softmax (in base 2) under P V; the last P V of a tile runs under the first scores of the next tile, so the
tensor cores are busy throughout.  The warpgroups take turns on them (named barriers), so that one computes exponentials
while another multiplies.  Key blocks are visited from the last to the first: the blocks that
need a mask, for the tail or the diagonal, come first, and the steady loop has none.  The output is rescaled only by those
warps whose maximum has grown by more than `rescale_threshold`.  Each thread block walks a list of tiles (`schedule.py`).
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
from mosaic_gpu.runtime.device import multiprocessors

HEAD_DIMS = (64, 128, 256)
ROWS = 64  # query rows of a compute warpgroup
SHARED_LIMIT = 232_448  # bytes
LOWEST = -1e30  # where the running maximum starts: finite, so that a block without a visible key leaves no NaN
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """How the kernel is built.

    block_kv: keys of a block, a multiple of 16 up to 256.  num_stages: blocks of K, and of V, in flight.
    compute_warpgroups: 2 or 3, of 64 query rows each.  compute_registers, memory_registers: per thread; in sum over the
    warpgroups at most what the block is launched with, 504 for three and 512 for four.
    take_turns: the compute warpgroups alternate on the tensor cores.
    rescale_threshold: powers of two by which a row's maximum may grow before the output is rescaled; 0 rescales always.
    persistent: one thread block per multiprocessor walks a list of tiles; else one block per tile.
    output_tile: the output leaves through shared memory and TMA; else straight from the registers; None: if it fits.
    q_in_registers: Q is read from shared memory once a tile instead of by every product.
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

    def __post_init__(self) -> None:
        if self.block_kv % 16 or not 16 <= self.block_kv <= 256:
            raise ValueError(f"block_kv={self.block_kv}: a multiple of 16 from 16 to 256")
        if self.num_stages < 1:
            raise ValueError(f"num_stages={self.num_stages}: at least 1")
        if self.compute_warpgroups not in (2, 3):
            raise ValueError(f"compute_warpgroups={self.compute_warpgroups}: 2 or 3")
        total = self.compute_warpgroups * self.compute_registers + self.memory_registers
        pool = {2: 504, 3: 512}[self.compute_warpgroups]
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

    def has_output_tile(self, head_dim: int) -> bool:
        """Whether the output leaves through shared memory."""
        fits = self._bytes(head_dim, True) <= SHARED_LIMIT
        return fits if self.output_tile is None else self.output_tile

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of shared memory for a head dimension (16-bit operands)."""
        return self._bytes(head_dim, self.has_output_tile(head_dim))

    def _bytes(self, head_dim: int, output_tile: bool) -> int:
        tiles = self.rows * (2 if output_tile else 1) + 2 * self.num_stages * self.block_kv
        return 2 * head_dim * tiles + 8 * (2 * self.compute_warpgroups + 4 * self.num_stages)

    def registers_needed(self, head_dim: int) -> int:
        """An estimate of a compute thread's registers: scores, output, P and what surrounds them."""
        q = head_dim // 4 if self.q_in_registers else 0
        return 24 + self.block_kv // 2 + head_dim // 2 + self.block_kv // 4 + q

    def check(self, head_dim: int) -> None:
        """Raise UnsupportedCall for a head dim there is no kernel for, ResourceExceeded if it does not fit."""
        if head_dim not in HEAD_DIMS:
            raise UnsupportedCall(f"head dim {head_dim}: this kernel has {HEAD_DIMS}")
        if self.shared_bytes(head_dim) > SHARED_LIMIT:
            raise ResourceExceeded(
                f"block_kv={self.block_kv} x {self.num_stages} stages at head dim {head_dim} take "
                f"{self.shared_bytes(head_dim)} bytes of shared memory (Q {2 * self.rows * head_dim}, K and V "
                f"{4 * self.num_stages * self.block_kv * head_dim}); a block has {SHARED_LIMIT}"
            )
        if self.registers_needed(head_dim) > self.compute_registers:
            raise ResourceExceeded(
                f"block_kv={self.block_kv} at head dim {head_dim} needs about {self.registers_needed(head_dim)} "
                f"registers, compute_registers is {self.compute_registers}"
            )


def default_config(head_dim: int) -> AttentionConfig:
    """What runs when nothing was tuned: what has been measured to be right and fast (docs/performance.md)."""
    if head_dim <= 64:
        return AttentionConfig(compute_warpgroups=3, compute_registers=160, memory_registers=32)
    if head_dim <= 128:
        return AttentionConfig(q_in_registers=True)
    return AttentionConfig(block_kv=64)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, config: AttentionConfig, causal: bool, scale: float, return_lse: bool
) -> tuple[jax.Array, ...]:
    """The kernel itself, for arrays that the dispatcher has checked.

    q: (b, s, h, d); k, v: (b, t, h_kv, d); returns (b, s, h, d) and, if asked for, the LSE, (b, h, s) float32.
    """
    b, s, h, d = q.shape
    config.check(d)
    tiles = b * h * plgpu.cdiv(s, config.rows)
    blocks = min(tiles, multiprocessors()) if config.persistent else tiles
    table = tile_table(b, h, k.shape[2], s, k.shape[1], d, config.rows, config.block_kv, causal, blocks)
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
    keys, stages, computes = c.block_kv, c.num_stages, c.compute_warpgroups
    output_tile = c.has_output_tile(d)
    factor = scale * LOG2_E  # scores in base 2: exp2(factor * (score - max))

    def key_blocks(k: Any, tile: Any) -> Any:
        """Key blocks that a query tile needs."""
        needed = plgpu.cdiv(plgpu.dim_size(k, 1), keys)
        return jnp.minimum(needed, plgpu.cdiv((tile + 1) * c.rows, keys)) if causal else needed

    def memory(table: Any, q: Any, k: Any, v: Any, tiles: Any, barriers: Any) -> None:
        """One thread issues every copy."""
        plgpu.set_max_registers(c.memory_registers, action="decrease")
        q_tile, k_tile, v_tile = tiles
        q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
        heads_per_kv = plgpu.div(plgpu.dim_size(q, 2), plgpu.dim_size(k, 2))

        block = lax.axis_index("block")

        def fill(carry: Any) -> Any:
            turn, tile, before = carry
            batch, head, needed = table[turn, block, 0], table[turn, block, 1], key_blocks(k, tile)
            kv_head = plgpu.div(head, heads_per_kv)

            def refill(x: Any, x_tile: Any, full: Any, empty: Any, i: Any) -> None:
                slot = plgpu.rem(before + i, stages)
                some_keys = plgpu.ds((needed - 1 - i) * keys, keys)

                @plgpu.when(before + i >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(x.at[batch, some_keys, kv_head], x_tile.at[slot], full.at[slot])

            def load_k(i: Any) -> None:
                refill(k, k_tile, k_full, k_empty, i)

            def load_v(i: Any) -> None:
                refill(v, v_tile, v_full, v_empty, i)

            load_k(0)
            for w in range(computes):

                @plgpu.when(turn > 0)
                def _(w: int = w) -> None:
                    plgpu.barrier_wait(q_empty.at[w])

                rows = plgpu.ds(tile * c.rows + w * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_tile.at[w], q_full.at[w])

            def step(i: Any, _: None) -> None:
                load_k(i)
                load_v(i - 1)  # a block's V is needed, and its slot is free, a step later than its K

            lax.fori_loop(1, needed, step, None)
            load_v(needed - 1)
            return turn + 1, table[turn + 1, block, 2], before + needed

        zero = jnp.int32(0)
        lax.while_loop(lambda carry: carry[1] >= 0, fill, (zero, table[0, block, 2], zero))

    def compute(
        wg: Any, table: Any, k: Any, out: Any, lse: Any, tiles: Any, o_tile: Any, barriers: Any, turns: Any
    ) -> None:
        """64 query rows of every tile: online softmax over the key blocks."""
        plgpu.set_max_registers(c.compute_registers, action="increase")
        q_tile, k_tile, v_tile = tiles
        q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers

        def take_turn() -> None:
            if c.take_turns:
                plgpu.named_barrier_sync(turns.at[wg])

        def pass_turn() -> None:
            if c.take_turns:
                plgpu.named_barrier_arrive(turns.at[plgpu.rem(wg + 1, computes)])

        def mask(scores: Any, block: Any, first_row: Any) -> Any:
            """-inf where a key does not exist or, causal, lies behind the query."""
            last = plgpu.dim_size(k, 1) - 1 - block * keys
            if causal:
                rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
                last = jnp.minimum(last, rows + (first_row - block * keys))[:, None]
            columns = plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), 1, layout=plgpu.Layout.WGMMA)
            return jnp.where(columns <= last, scores, -jnp.inf)

        def fold_columns(p: Any) -> Any:
            """Sums of every eighth column: no thread needs another's values, which one reduction per tile adds up."""
            return functools.reduce(jnp.add, (lax.slice_in_dim(p, i, i + 8, axis=1) for i in range(0, keys, 8)))

        def softmax(scores: Any, top: Any, total: Any) -> Any:
            """(exp2 of the shifted scores, new maximum, new sums, factor by which what was summed so far shrinks)."""
            highest = jnp.max(scores, axis=1)
            if c.rescale_threshold:  # an old maximum that is not much too small will do: P just grows beyond 1
                new_top = jnp.where((highest - top) * factor > c.rescale_threshold, highest, top)
            else:
                new_top = jnp.maximum(top, highest)
            # Subtracted before it is scaled: as one FMA, LOWEST * factor - LOWEST * factor would be its rounding error.
            shrink = jnp.exp2((top - new_top) * factor)
            p = jnp.exp2(scores * factor - (new_top * factor)[:, None])
            return p, new_top, total * shrink[:, None] + fold_columns(p), shrink

        def rescale(acc: Any, shrink: Any) -> None:
            def multiply() -> None:
                acc[...] = acc[...] * shrink[:, None]

            if c.rescale_threshold:
                plgpu.when_any_in_warp(shrink != 1.0)(multiply)
            else:
                multiply()

        def take_q() -> Any:
            """This warpgroup's rows of Q: where products read them from."""
            plgpu.barrier_wait(q_full.at[wg])
            if not c.q_in_registers:
                return q_tile.at[wg]
            own = plgpu.load(q_tile.at[wg], layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(q_empty.at[wg])
            return own

        def start_scores(s_acc: Any, own_q: Any, count: Any) -> None:
            """Q K^T with the count-th key block that was loaded."""
            slot = plgpu.rem(count, stages)
            plgpu.barrier_wait(k_full.at[slot])
            take_turn()
            plgpu.wgmma(s_acc, own_q, k_tile.at[slot].transpose((1, 0)))

        def end_scores(count: Any, last_of_tile: Any, others: int) -> None:
            """Wait for the scores, with `others` products behind them in flight; K, and after its last use Q, is free."""
            plgpu.wgmma_wait(others)
            plgpu.barrier_arrive(k_empty.at[plgpu.rem(count, stages)])
            if not c.q_in_registers:
                plgpu.when(last_of_tile)(lambda: plgpu.barrier_arrive(q_empty.at[wg]))

        def start_values(acc: Any, p: Any, count: Any) -> None:
            """acc += P V with the count-th block."""
            slot = plgpu.rem(count, stages)
            plgpu.barrier_wait(v_full.at[slot])
            plgpu.wgmma(acc, p, v_tile.at[slot])

        def end_values(count: Any, total: Any = None) -> None:
            """Wait for P V, the softmax that yields `total` under it; V is free."""
            plgpu.wgmma_wait(0, after=total)
            plgpu.barrier_arrive(v_empty.at[plgpu.rem(count, stages)])

        def first_softmax(scores: Any, tile: Any, needed: Any) -> Any:
            """P, maximum and sum after the first visited block of a tile, which has the tail and the diagonal."""
            start = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS, 8), jnp.float32)
            p, top, total, _ = softmax(mask(scores, needed - 1, tile * c.rows + wg * ROWS), *start)
            return p, top, total

        def write_out(acc: Any, turn: Any, tile: Any, top: Any, total: Any) -> None:
            """The end of a tile: normalise and store."""
            batch, head = table[turn, block, 0], table[turn, block, 1]
            rows = plgpu.ds(tile * c.rows + wg * ROWS, ROWS)
            o = (acc[...] * jnp.where(total > 0, 1 / total, 0.0)[:, None]).astype(dtype)
            if output_tile:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
                o_tile[wg] = o
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_tile.at[wg], out.at[batch, rows, head])
            else:
                out[batch, rows, head] = o
            if lse is not None:
                lse[batch, head, rows] = top * scale + jnp.log(total)

        def attend(acc: Any) -> None:
            def first(s_acc: Any) -> Any:
                own_q = take_q()
                needed = key_blocks(k, first_tile)
                start_scores(s_acc, own_q, 0)
                pass_turn()
                end_scores(0, needed == 1, 0)
                p, top, total = first_softmax(s_acc[...], first_tile, needed)
                return carried_q(own_q), p.astype(dtype), top, total

            def steps(tile: Any, needed: Any, before: Any, own_q: Any, carry: Any) -> Any:
                """All blocks of a tile after its first; its last P V is left to do."""

                def step(masked: bool, i: Any, carry: Any) -> Any:
                    p, top, total = carry

                    def scope(s_acc: Any) -> Any:
                        start_scores(s_acc, own_q, before + i)
                        start_values(acc, p, before + i - 1)
                        pass_turn()
                        end_scores(before + i, i == needed - 1, 1)
                        scores = s_acc[...]
                        if masked:
                            scores = mask(scores, needed - 1 - i, tile * c.rows + wg * ROWS)
                        new_p, new_top, new_total, shrink = softmax(scores, top, total)
                        end_values(before + i - 1, new_top)
                        packed = new_p.astype(dtype)  # in the shade of the exponentials, ahead of the vote's branch
                        rescale(acc, shrink)
                        return packed, new_top, new_total

                    return plgpu.run_scoped(scope, plgpu.ACC((ROWS, keys)))

                begin: Any = 1
                if causal and keys % c.rows:  # the diagonal can cross more blocks than the first
                    begin = jnp.maximum(needed - plgpu.div(tile * c.rows + 1, keys), 1)
                    carry = lax.fori_loop(1, begin, functools.partial(step, True), carry)
                return lax.fori_loop(begin, needed, functools.partial(step, False), carry)

            def one_tile(carry: Any) -> Any:
                turn, tile, before, old_q, *state = carry
                needed = key_blocks(k, tile)
                p, top, sums = steps(tile, needed, before, old_q if c.q_in_registers else q_tile.at[wg], tuple(state))
                total = jnp.sum(sums, axis=1)
                next_tile, done = table[turn + 1, block, 2], before + needed

                def go_on() -> Any:
                    """The last P V of this tile under the first scores of the next."""
                    own_q = take_q()
                    next_needed = key_blocks(k, next_tile)

                    def scope(s_acc: Any) -> Any:
                        start_scores(s_acc, own_q, done)
                        start_values(acc, p, done - 1)
                        pass_turn()
                        end_scores(done, next_needed == 1, 1)
                        new_p, new_top, new_total = first_softmax(s_acc[...], next_tile, next_needed)
                        end_values(done - 1)
                        packed = new_p.astype(dtype)
                        write_out(acc, turn, tile, top, total)
                        acc[...] = jnp.zeros((ROWS, d), jnp.float32)
                        return packed, new_top, new_total

                    return carried_q(own_q), *plgpu.run_scoped(scope, plgpu.ACC((ROWS, keys)))

                def end() -> Any:
                    start_values(acc, p, done - 1)
                    end_values(done - 1)
                    write_out(acc, turn, tile, top, total)
                    return old_q, p, top, sums

                return turn + 1, next_tile, done, *lax.cond(next_tile >= 0, go_on, end)

            acc[...] = jnp.zeros((ROWS, d), jnp.float32)
            state = plgpu.run_scoped(first, plgpu.ACC((ROWS, keys)))
            lax.while_loop(lambda carry: carry[1] >= 0, one_tile, (zero, first_tile, zero, *state))

        def carried_q(own_q: Any) -> Any:
            """What a loop carries of Q: its registers, or nothing."""
            return own_q if c.q_in_registers else zero

        zero, block = jnp.int32(0), lax.axis_index("block")
        first_tile = table[0, block, 2]
        if c.take_turns:  # warpgroup 0 goes first

            @plgpu.when(wg == computes - 1)
            def _() -> None:
                plgpu.named_barrier_arrive(turns.at[0])

        plgpu.run_scoped(attend, plgpu.ACC((ROWS, d)))
        plgpu.wait_smem_to_gmem(0)

    def body(table: Any, q: Any, k: Any, v: Any, out: Any, *rest: Any) -> None:
        lse, rest = (rest[0], rest[1:]) if return_lse else (None, rest)
        tiles, barriers, turns = rest[:3], rest[3:9], rest[9]
        o_tile = rest[10] if output_tile else None
        wg = lax.axis_index("wg")

        @plgpu.when(wg == computes)
        def _() -> None:
            memory(table, q, k, v, tiles, barriers)

        @plgpu.when(wg < computes)
        def _() -> None:
            compute(wg, table, k, out, lse, tiles, o_tile, barriers, turns)

    def tile(rows: int) -> tuple[Any, Any]:
        return plgpu.TilingTransform((rows, 64)), plgpu.SwizzleTransform(128)

    full, empty = plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_arrivals=computes, num_barriers=stages)
    q_type = plgpu.SMEM((computes, ROWS, d), dtype, transforms=tile(ROWS))
    kv_type = plgpu.SMEM((stages, keys, d), dtype, transforms=tile(keys))
    q_full, q_empty = plgpu.Barrier(num_barriers=computes), plgpu.Barrier(num_barriers=computes)
    turns = plgpu.NamedBarrier(num_warpgroups=2, num_barriers=computes)
    out_type = [jax.ShapeDtypeStruct((b, s, h, d), dtype)]
    return plgpu.kernel(
        body,
        out_type + ([jax.ShapeDtypeStruct((b, h, s), jnp.float32)] if return_lse else []),
        scratch_types=[q_type, kv_type, kv_type, q_full, q_empty, full, empty, full, empty, turns]
        + ([q_type] if output_tile else []),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=computes + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_90a", approx_math=True, strict=True),
        name="attention_sm90",
    )
