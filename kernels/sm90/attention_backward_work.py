"""What the roles of the Hopper attention backward kernel share: how it is built, and what a block does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.masks import Causal
from mosaic_gpu.kernels.sm90.attention import LOG2_E
from mosaic_gpu.kernels.sm90.attention_backward_config import ROWS, AttentionBackwardConfig
from mosaic_gpu.kernels.tiles import columns_of, head_rows

BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Build:
    """What is compiled in.  head_dim: of Q and K; value_dim: of V; with_dq: whether dQ is summed up."""

    head_dim: int
    value_dim: int
    dtype: Any
    config: AttentionBackwardConfig
    causal: Causal
    scale: float
    with_dq: bool

    @property
    def d(self) -> int:
        """Columns of tiles of Q and K."""
        return columns_of(self.head_dim)

    @property
    def dv(self) -> int:
        """Columns of tiles of V and dO."""
        return columns_of(self.value_dim)

    @property
    def queries(self) -> int:
        """Of a step."""
        return self.config.block_q

    @property
    def key_tiles(self) -> int:
        """Of 64 keys each, of a block."""
        return self.config.key_tiles

    @property
    def keys(self) -> int:
        """Of a block."""
        return ROWS * self.key_tiles


class Work:
    """What a block does, as each role sees it: which keys, and which queries by the step's number."""

    def __init__(self, build: Build, table: Any, q: Any, k: Any) -> None:
        self.build = build
        block, queries = lax.axis_index("block"), build.queries
        self.batch, self.kv_head, self.tile = (table[block, i] for i in range(3))
        self.heads = plgpu.dim_size(q, 2)
        self.group = plgpu.div(self.heads, plgpu.dim_size(k, 2))
        self.all_blocks = plgpu.cdiv(plgpu.dim_size(q, 1), queries)
        # Of a diagonal that ends bottom right: how far behind the key the first query that sees it is.
        self.behind = plgpu.dim_size(q, 1) - plgpu.dim_size(k, 1) if build.causal == "bottom_right" else None
        self.first = jnp.int32(0)
        if build.causal:
            first = self.first_that_sees(self.tile * build.keys)
            self.first = plgpu.div(first if self.behind is None else jnp.maximum(first, 0), queries)
        self.keys = plgpu.dim_size(k, 1)
        self.steps = jnp.maximum(self.all_blocks - self.first, 0) * self.group

    def place(self, step: Any) -> tuple[Any, Any]:
        """(query block, head): all heads of the group for one block, then the next block."""
        return self.first + plgpu.div(step, self.group), self.kv_head * self.group + plgpu.rem(step, self.group)

    def first_that_sees(self, key: Any) -> Any:
        """The first query that sees a key by the diagonal: below 0 where all do."""
        return key if self.behind is None else key + self.behind

    def masked(self) -> Any:
        """How many steps, from the first on, need a mask: those on the diagonal, and all where keys end."""
        build = self.build
        diagonal: Any = plgpu.cdiv(build.keys, build.queries) * self.group if build.causal else 0
        if self.behind is not None:
            last = jnp.maximum(self.first_that_sees((self.tile + 1) * build.keys - 1), 0)
            diagonal = jnp.maximum(plgpu.cdiv(last, build.queries) - self.first, 0) * self.group
        return jnp.where((self.tile + 1) * build.keys > self.keys, self.steps, jnp.minimum(diagonal, self.steps))

    def first_query(self, step: Any) -> Any:
        """Of a step's block."""
        return self.place(step)[0] * self.build.queries

    def probabilities(self, scores: Any, nlse_tile: Any, step: Any, first_key: Any, masked_from: Any = None) -> Any:
        """P^T of 64 keys, as the forward pass had it, in float32.  masked_from: the first query of the block, where it needs a
        mask."""
        build = self.build
        if masked_from is not None:
            scores = self._mask(scores, first_key, masked_from)
        nlse = plgpu.load(nlse_tile.at[plgpu.rem(step, build.config.num_stages)], layout=BY_COLUMN)
        return jnp.exp2(scores * (build.scale * LOG2_E) + nlse[None, :])

    def _mask(self, scores: Any, first_key: Any, first_query: Any) -> Any:
        """-inf where a key does not exist or, causal, lies behind the query."""
        queries = self.build.queries
        key = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1)) + first_key
        least = jnp.where(key < self.keys, self.first_that_sees(key) - first_query if self.build.causal else 0, queries)
        query = plgpu.broadcasted_iota(jnp.int32, (ROWS, queries), 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(query >= least[:, None], scores, -jnp.inf)


def pieces(columns: int) -> list[slice]:
    """Columns of accumulators: one of more than 192 has more registers than the block is launched with."""
    n = 1 if columns <= 192 else 2
    size = -(-columns // n // 64) * 64 if n > 1 else columns
    return [slice(i, min(i + size, columns)) for i in range(0, columns, size)]


def accumulators(some: list[slice]) -> list[Any]:
    """For these columns of 64 keys' results."""
    return [plgpu.ACC((ROWS, x.stop - x.start)) for x in some]


def add(accs: Any, some: list[slice], a: Any, b: Any) -> None:
    """accs += a b, each its columns of b."""
    for acc, columns in zip(accs, some, strict=True):
        plgpu.wgmma(acc, a, b.at[:, columns])


def memory(work: Work, arrays: Any, tiles: Any, barriers: Any) -> None:
    """One thread issues every copy."""
    build = work.build
    stages, queries = build.config.num_stages, build.queries
    plgpu.set_max_registers(build.config.memory_registers, action="decrease")
    q, k, v, d_out, nlse, ndelta = arrays
    k_tile, v_tile, q_tile, do_tile, nlse_tile, ndelta_tile = tiles
    k_full, v_full, q_full, q_empty, do_full, do_empty = barriers

    def load_keys(x: Any, columns: int, tile: Any, full: Any) -> None:
        for w in range(build.key_tiles):
            rows = plgpu.ds(work.tile * build.keys + w * ROWS, ROWS)
            source = head_rows(x, work.batch, rows, work.kv_head, columns)
            plgpu.copy_gmem_to_smem(source, tile.at[w], full)

    def load_queries(
        step: Any, x: Any, columns: int, tile: Any, row: Any, row_tile: Any, full: Any, empty: Any
    ) -> None:
        slot, (block, head) = plgpu.rem(step, stages), work.place(step)

        @plgpu.when(step >= stages)
        def _() -> None:
            plgpu.barrier_wait(empty.at[slot])

        rows = plgpu.ds(block * queries, queries)
        plgpu.copy_gmem_to_smem(head_rows(x, work.batch, rows, head, columns), tile.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(row.at[work.batch, head, rows], row_tile.at[slot], full.at[slot])

    def step(i: Any, _: None) -> None:
        plgpu.when(i == 0)(lambda: load_keys(k, build.d, k_tile, k_full))
        load_queries(i, q, build.d, q_tile, nlse, nlse_tile, q_full, q_empty)
        plgpu.when(i == 0)(lambda: load_keys(v, build.dv, v_tile, v_full))
        load_queries(i, d_out, build.dv, do_tile, ndelta, ndelta_tile, do_full, do_empty)

    lax.fori_loop(0, work.steps, step, None)


def make_dq(work: Work, dq_sum: Any, k_tile: Any, ds_tile: Any, dq_tile: Any, k_full: Any, ds_barriers: Any) -> None:
    """dQ = dS K, 64 queries and some columns at a time, added to what the blocks of other keys make of it.

    `dq_ahead`: the product of the next part, which takes over the registers, begins before a part has left.
    """
    build, c = work.build, work.build.config
    parts, columns = c.parts(build.d), c.part_columns(build.d)
    plgpu.set_max_registers(c.dq_registers, action="decrease")
    ds_full, ds_empty = ds_barriers
    per_block = build.queries // ROWS * parts

    def await_ds(step: Any) -> None:
        plgpu.barrier_wait(ds_full.at[plgpu.rem(step, c.ds_stages)])

    def start(dq_acc: Any, step: Any, part: Any) -> None:
        tile = plgpu.rem(step, c.ds_stages) * build.key_tiles
        rows = plgpu.ds(plgpu.div(part, parts) * ROWS, ROWS)
        some = plgpu.ds(plgpu.rem(part, parts) * columns, columns)
        dq_acc[...] = jnp.zeros(dq_acc.shape, jnp.float32)
        for w in range(build.key_tiles):
            plgpu.wgmma(dq_acc, ds_tile.at[tile + w, rows], k_tile.at[w, :, some])

    def place(step: Any) -> Any:
        """Of a step's first part, in dq_sum."""
        block, head = work.place(step)
        return ((work.batch * work.heads + head) * work.all_blocks + block) * per_block

    def finish(dq_acc: Any, step: Any, part: Any, first: Any, then: Callable[[], None] | None = None) -> None:
        slot = plgpu.rem(step * per_block + part, c.dq_stages)
        plgpu.wait_smem_to_gmem(c.dq_stages - 1, wait_read_only=True)
        plgpu.wgmma_wait(0)

        @plgpu.when(part == per_block - 1)
        def _() -> None:
            plgpu.barrier_arrive(ds_empty.at[plgpu.rem(step, c.ds_stages)])

        dq_tile[slot] = plgpu.to_fragments(dq_acc[...])
        if then is not None:
            then()
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dq_tile.at[slot], dq_sum.at[first + part], reduction_op="add")

    def one_by_one(dq_acc: Any) -> None:
        def step(i: Any, _: None) -> None:
            first = place(i)
            await_ds(i)

            def part(j: Any, _: None) -> None:
                start(dq_acc, i, j)
                finish(dq_acc, i, j, first)

            lax.fori_loop(0, per_block, part, None)

        lax.fori_loop(0, work.steps, step, None)

    def ahead(dq_acc: Any) -> None:
        def step(i: Any, then: Callable[[], None] | None) -> None:
            first = place(i)
            for part in range(per_block - 1):
                finish(dq_acc, i, part, first, functools.partial(start, dq_acc, i, part + 1))
            finish(dq_acc, i, per_block - 1, first, then)

        def begin(i: Any) -> None:
            await_ds(i)
            start(dq_acc, i, 0)

        begin(0)
        lax.fori_loop(0, work.steps - 1, lambda i, _: step(i, lambda: begin(i + 1)), None)
        step(work.steps - 1, None)

    @plgpu.when(work.steps > 0)
    def _() -> None:
        plgpu.barrier_wait(k_full)
        plgpu.run_scoped(ahead if c.dq_ahead else one_by_one, plgpu.ACC((ROWS, columns)))

    plgpu.wait_smem_to_gmem(0)
