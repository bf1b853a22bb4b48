"""Hopper attention forward: two compute warpgroups of 64 query rows each, one memory warpgroup; K and V by TMA in stages.

A step of a compute warpgroup puts the scores of the next key block and P V of the current one in flight together, and takes
the next block's softmax (in base 2) under P V.  The two warpgroups take turns on the tensor cores (named barriers), so that
one computes exponentials while the other multiplies.  Key blocks are visited from the last to the first: the blocks that
need a mask, for the tail or the diagonal, come first, and the steady loop has none.
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

HEAD_DIMS = (64, 128, 256)
MEMORY_WARPGROUP = 2
ROWS = 64  # query rows of a compute warpgroup
SHARED_LIMIT = 232_448  # bytes
REGISTER_POOL = 504  # registers per thread position of three warpgroups
LOWEST = -1e30  # where the running maximum starts: finite, so that a block without a visible key leaves no NaN
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """block_kv: keys of a block, a multiple of 16 up to 256; num_stages: blocks of K, and of V, in flight;
    compute_registers, memory_registers: per thread, 2 x compute + memory at most 504; take_turns: the compute warpgroups
    alternate on the tensor cores."""

    generation: ClassVar[str] = "sm90"
    kernel: ClassVar[str] = "attention"
    block_kv: int = 128
    num_stages: int = 2
    compute_registers: int = 240
    memory_registers: int = 24
    take_turns: bool = True

    def __post_init__(self) -> None:
        if self.block_kv % 16 or not 16 <= self.block_kv <= 256:
            raise ValueError(f"block_kv={self.block_kv}: a multiple of 16 from 16 to 256")
        if self.num_stages < 1:
            raise ValueError(f"num_stages={self.num_stages}: at least 1")
        total = 2 * self.compute_registers + self.memory_registers
        if total > REGISTER_POOL:
            raise ValueError(
                f"2 x {self.compute_registers} + {self.memory_registers} = {total} registers; the pool of three "
                f"warpgroups has {REGISTER_POOL}"
            )
        for n in (self.compute_registers, self.memory_registers):
            if n % 8 or not 24 <= n <= 240:
                raise ValueError(f"{n} registers: a multiple of 8 from 24 to 240")

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of shared memory for a head dimension (16-bit operands)."""
        return 2 * head_dim * (2 * ROWS + 2 * self.num_stages * self.block_kv) + 8 * (1 + 4 * self.num_stages)

    def registers_needed(self, head_dim: int) -> int:
        """An estimate of a compute thread's registers: scores, output, P and what surrounds them."""
        return 24 + self.block_kv // 2 + head_dim // 2 + self.block_kv // 4

    def check(self, head_dim: int) -> None:
        """Raise UnsupportedCall for a head dim there is no kernel for, ResourceExceeded if it does not fit."""
        if head_dim not in HEAD_DIMS:
            raise UnsupportedCall(f"head dim {head_dim}: this kernel has {HEAD_DIMS}")
        if self.shared_bytes(head_dim) > SHARED_LIMIT:
            raise ResourceExceeded(
                f"block_kv={self.block_kv} x {self.num_stages} stages at head dim {head_dim} take "
                f"{self.shared_bytes(head_dim)} bytes of shared "
                f"memory (Q {4 * ROWS * head_dim}, K and V {4 * self.num_stages * self.block_kv * head_dim}); a "
                f"block has {SHARED_LIMIT}"
            )
        if self.registers_needed(head_dim) > self.compute_registers:
            raise ResourceExceeded(
                f"block_kv={self.block_kv} at head dim {head_dim} needs about {self.registers_needed(head_dim)} registers, "
                f"compute_registers is {self.compute_registers}"
            )


def default_config(head_dim: int) -> AttentionConfig:
    """What runs when nothing was tuned."""
    return AttentionConfig(block_kv=64 if head_dim > 128 else 128)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, config: AttentionConfig, causal: bool, scale: float, return_lse: bool
) -> tuple[jax.Array, ...]:
    """The kernel itself, for arrays that the dispatcher has checked: (b, s, h, d), (b, t, h_kv, d); lse is (b, h, s) float32."""
    b, s, h, d = q.shape
    config.check(d)
    return tuple(_kernel(b, s, h, d, jnp.dtype(q.dtype), config, causal, scale, return_lse)(q, k, v))


@functools.lru_cache(maxsize=256)
def _kernel(
    b: int, s: int, h: int, d: int, dtype: Any, c: AttentionConfig, causal: bool, scale: float, return_lse: bool
) -> Any:
    rows_of_tile, keys = 2 * ROWS, c.block_kv
    factor = scale * LOG2_E  # scores in base 2: exp2(factor * (score - max))

    def key_blocks(k: Any, tile: Any) -> Any:
        """Key blocks that a query tile needs."""
        blocks = plgpu.cdiv(plgpu.dim_size(k, 1), keys)
        if causal:
            blocks = jnp.minimum(blocks, plgpu.cdiv((tile + 1) * rows_of_tile, keys))
        return blocks

    def query_tile(q: Any) -> Any:
        """Index of this block's query tile; causal: the longest first."""
        tile = lax.axis_index("q_tile")
        return plgpu.num_programs(2) - 1 - tile if causal else tile

    def memory(q: Any, k: Any, v: Any, buffers: Any, barriers: Any) -> None:
        """One thread issues every copy."""
        plgpu.set_max_registers(c.memory_registers, action="decrease")
        q_tile, k_tile, v_tile = buffers
        q_full, k_full, k_empty, v_full, v_empty = barriers
        batch, head, tile = lax.axis_index("batch"), lax.axis_index("head"), query_tile(q)
        kv_head = lax.div(head, lax.div(plgpu.dim_size(q, 2), plgpu.dim_size(k, 2)))
        blocks = key_blocks(k, tile)
        for w in range(2):
            rows = plgpu.ds(tile * rows_of_tile + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_tile.at[w], q_full)

        def step(i: Any, _: None) -> None:
            slot = lax.rem(i, c.num_stages)
            block = plgpu.ds((blocks - 1 - i) * keys, keys)

            def refill(x: Any, x_tile: Any, full: Any, empty: Any) -> None:
                @plgpu.when(i >= c.num_stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                plgpu.copy_gmem_to_smem(x.at[batch, block, kv_head], x_tile.at[slot], full.at[slot])

            refill(k, k_tile, k_full, k_empty)
            refill(v, v_tile, v_full, v_empty)

        lax.fori_loop(0, blocks, step, None)

    def compute(wg: Any, k: Any, out: Any, lse: Any, buffers: Any, barriers: Any, turn: Any) -> None:
        """64 query rows: online softmax over the key blocks."""
        plgpu.set_max_registers(c.compute_registers, action="increase")
        q_tile, k_tile, v_tile = buffers
        q_full, k_full, k_empty, v_full, v_empty = barriers
        batch, head, tile = lax.axis_index("batch"), lax.axis_index("head"), query_tile(k)
        first_row = tile * rows_of_tile + wg * ROWS
        blocks = key_blocks(k, tile)

        def take_turn() -> None:
            if c.take_turns:
                plgpu.named_barrier_sync(turn.at[wg])

        def pass_turn() -> None:
            if c.take_turns:
                plgpu.named_barrier_arrive(turn.at[1 - wg])

        def mask(scores: Any, block: Any) -> Any:
            """-inf where a key does not exist or, causal, lies behind the query."""
            columns = plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), 1, layout=plgpu.Layout.WGMMA) + block * keys
            seen = columns < plgpu.dim_size(k, 1)
            if causal:
                rows = plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), 0, layout=plgpu.Layout.WGMMA) + first_row
                seen = seen & (columns <= rows)
            return jnp.where(seen, scores, -jnp.inf)

        def softmax(scores: Any, top: Any, total: Any) -> Any:
            """(exp2 of the shifted scores, new maximum, new sum, factor by which what was summed so far shrinks)."""
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            shift = new_top * factor
            shrink = jnp.exp2(top * factor - shift)
            p = jnp.exp2(scores * factor - shift[:, None])
            return p, new_top, total * shrink + jnp.sum(p, axis=1), shrink

        def attend(acc: Any) -> Any:
            def scores_of(s_acc: Any, i: Any) -> None:
                """Start Q K^T for the i-th visited block."""
                slot = lax.rem(i, c.num_stages)
                plgpu.barrier_wait(k_full.at[slot])
                take_turn()
                plgpu.wgmma(s_acc, q_tile.at[wg], k_tile.at[slot].transpose((1, 0)))

            def values_of(p: Any, i: Any) -> None:
                """Start acc += P V for the i-th visited block."""
                slot = lax.rem(i, c.num_stages)
                plgpu.barrier_wait(v_full.at[slot])
                plgpu.wgmma(acc, p, v_tile.at[slot])
                pass_turn()

            def first(s_acc: Any) -> Any:
                scores_of(s_acc, 0)
                pass_turn()
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(k_empty.at[0])
                start = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
                p, top, total, _ = softmax(mask(s_acc[...], blocks - 1), *start)
                return p.astype(dtype), top, total

            def step(masked: bool, i: Any, carry: Any) -> Any:
                p, top, total = carry

                def scope(s_acc: Any) -> Any:
                    scores_of(s_acc, i)
                    values_of(p, i - 1)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(k_empty.at[lax.rem(i, c.num_stages)])
                    scores = s_acc[...]
                    if masked:
                        scores = mask(scores, blocks - 1 - i)
                    new_p, new_top, new_total, shrink = softmax(scores, top, total)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(v_empty.at[lax.rem(i - 1, c.num_stages)])
                    acc[...] = acc[...] * shrink[:, None]
                    return new_p.astype(dtype), new_top, new_total

                return plgpu.run_scoped(scope, plgpu.ACC((ROWS, keys)))

            if c.take_turns:  # warpgroup 0 goes first

                @plgpu.when(wg == 1)
                def _() -> None:
                    plgpu.named_barrier_arrive(turn.at[0])

            carry = plgpu.run_scoped(first, plgpu.ACC((ROWS, keys)))
            begin: Any = 1
            if causal and keys < rows_of_tile:  # more blocks than the first touch the diagonal
                unmasked = lax.div(tile * rows_of_tile + 1, keys)
                begin = jnp.maximum(blocks - unmasked, 1)
                carry = lax.fori_loop(1, begin, functools.partial(step, True), carry)
            p, top, total = lax.fori_loop(begin, blocks, functools.partial(step, False), carry)
            slot = lax.rem(blocks - 1, c.num_stages)
            plgpu.barrier_wait(v_full.at[slot])
            plgpu.wgmma(acc, p, v_tile.at[slot])
            plgpu.wgmma_wait(0)
            inverse = jnp.where(total > 0, 1 / total, 0.0)
            return (acc[...] * inverse[:, None]).astype(dtype), top, total

        plgpu.barrier_wait(q_full)
        o, top, total = plgpu.run_scoped(attend, plgpu.ACC((ROWS, d)))
        q_tile[wg] = o  # Q is not needed any more
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile.at[wg], out.at[batch, plgpu.ds(first_row, ROWS), head])
        if lse is not None:
            lse[batch, head, plgpu.ds(first_row, ROWS)] = top * scale + jnp.log(total)
        plgpu.wait_smem_to_gmem(0)

    def body(q: Any, k: Any, v: Any, out: Any, *rest: Any) -> None:
        lse, rest = (rest[0], rest[1:]) if return_lse else (None, rest)
        buffers, barriers, turn = rest[:3], rest[3:8], rest[8]
        wg = lax.axis_index("wg")

        @plgpu.when(wg == MEMORY_WARPGROUP)
        def _() -> None:
            memory(q, k, v, buffers, barriers)

        @plgpu.when(wg < MEMORY_WARPGROUP)
        def _() -> None:
            compute(wg, k, out, lse, buffers, barriers, turn)

    def tile(rows: int) -> tuple[Any, Any]:
        return plgpu.TilingTransform((rows, 64)), plgpu.SwizzleTransform(128)

    stages = c.num_stages
    full, empty = plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    out_type = [jax.ShapeDtypeStruct((b, s, h, d), dtype)]
    return plgpu.kernel(
        body,
        out_type + ([jax.ShapeDtypeStruct((b, h, s), jnp.float32)] if return_lse else []),
        scratch_types=[
            plgpu.SMEM((2, ROWS, d), dtype, transforms=tile(ROWS)),
            plgpu.SMEM((stages, keys, d), dtype, transforms=tile(keys)),
            plgpu.SMEM((stages, keys, d), dtype, transforms=tile(keys)),
            plgpu.Barrier(num_arrivals=2),
            full,
            empty,
            full,
            empty,
            plgpu.NamedBarrier(num_warpgroups=2, num_barriers=2),
        ],
        grid=(b, h, plgpu.cdiv(s, rows_of_tile)),
        grid_names=("batch", "head", "q_tile"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_90a", approx_math=True, strict=True),
        name="attention_sm90",
    )
