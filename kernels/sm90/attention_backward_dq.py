"""Hopper attention backward, dQ by itself: the same bits in every run, as each block adds up its queries' keys in one order.

Scores and dP are computed again, as the kernel of dK and dV does: seven products instead of five in all.  Two warpgroups
compute 64 queries each, a third one issues the copies.  A step: the next scores S = Q K^T and dP = dO V^T in flight with
dQ += dS K of the block before, under which the next dS is computed.  Key blocks are visited from the last to the first, those
that need a mask first.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.masks import Causal, Mask
from mosaic_gpu.kernels.sm90.attention import LOG2_E
from mosaic_gpu.kernels.sm90.attention_backward_config import COMPUTES, ROWS, AttentionBackwardConfig
from mosaic_gpu.kernels.tiles import columns_of, head_rows, tiles_of
from mosaic_gpu.plan.resources import SHARED_LIMIT

QUERIES = COMPUTES * ROWS  # of a thread block


@functools.lru_cache(maxsize=256)
def query_gradients(
    b: int,
    s: int,
    h: int,
    d: int,
    dv: int,
    dtype: Any,
    c: AttentionBackwardConfig,
    causal: Causal,
    scale: float,
) -> Any:
    """The kernel (q, k, v, d_out, nlse, ndelta) -> dQ; nlse and ndelta as `preprocess` makes them.

    Of the config, which is made for the kernel of dK and dV, it takes the stages, as many as fit.
    """
    out_type = jax.ShapeDtypeStruct((b, s, h, d), dtype)
    d, dv = columns_of(d), columns_of(dv)  # of tiles
    keys = 64

    def shared_bytes(stages: int) -> int:
        return 2 * (QUERIES * (d + dv) + keys * ((stages + 1) * d + stages * dv)) + 8 * (COMPUTES + 4 * stages + 2)

    stages = next(n for n in range(c.num_stages, 0, -1) if n == 1 or shared_bytes(n) <= SHARED_LIMIT)
    k_stages = stages + 1  # K stays for dQ, a step longer than V
    one_loop = d + dv > 480  # descriptors that several loops share would take more registers than there are
    factor = scale * LOG2_E
    query_tiles = plgpu.cdiv(s, QUERIES)

    def memory(place: Any, arrays: Any, tiles: Any, barriers: Any) -> None:
        """One thread issues every copy."""
        plgpu.set_max_registers(24, action="decrease")
        q, k, v, d_out = arrays
        batch, head, tile = place
        q_tile, do_tile, k_tile, v_tile = tiles
        q_full, k_full, k_empty, v_full, v_empty = barriers
        kv_head = plgpu.div(head, plgpu.div(plgpu.dim_size(q, 2), plgpu.dim_size(k, 2)))
        needed = Mask(causal, q, k, keys).blocks_before((tile + 1) * QUERIES)
        for w in range(COMPUTES):
            rows = plgpu.ds(tile * QUERIES + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(head_rows(q, batch, rows, head, d), q_tile.at[w], q_full.at[w])
            plgpu.copy_gmem_to_smem(head_rows(d_out, batch, rows, head, dv), do_tile.at[w], q_full.at[w])

        def refill(i: Any, x: Any, columns: int, x_tile: Any, count: int, full: Any, empty: Any) -> None:
            slot = plgpu.rem(i, count)

            @plgpu.when(i >= count)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            some = plgpu.ds((needed - 1 - i) * keys, keys)
            plgpu.copy_gmem_to_smem(head_rows(x, batch, some, kv_head, columns), x_tile.at[slot], full.at[slot])

        def step(i: Any, _: None) -> None:
            refill(i, k, d, k_tile, k_stages, k_full, k_empty)
            refill(i, v, dv, v_tile, stages, v_full, v_empty)

        lax.fori_loop(0, needed, step, None)

    def compute(wg: Any, place: Any, k: Any, rows_of: Any, dq: Any, tiles: Any, barriers: Any) -> None:
        """64 queries."""
        plgpu.set_max_registers(240, action="increase")
        batch, head, tile = place
        nlse, ndelta = rows_of
        q_tile, do_tile, k_tile, v_tile = tiles
        q_full, k_full, k_empty, v_full, v_empty = barriers
        first_row = tile * QUERIES + wg * ROWS
        rows, by_row = plgpu.ds(first_row, ROWS), plgpu.Layout.WGMMA.reduce(1)
        seen = Mask(causal, dq, k, keys)
        needed = seen.blocks_before((tile + 1) * QUERIES)
        own_nlse, own_ndelta = (plgpu.load(x.at[batch, head, rows], layout=by_row) for x in (nlse, ndelta))
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row) + first_row
        own_nlse = jnp.where(row < plgpu.dim_size(nlse, 2), own_nlse, -jnp.inf)  # past the padding

        def accumulate(dq_acc: Any) -> None:
            def step(masked: bool, i: Any, old_ds: Any) -> Any:
                """dS of the i-th visited block, and dQ of the one before (old_ds; None: there is none)."""
                k_slot, v_slot = plgpu.rem(i, k_stages), plgpu.rem(i, stages)

                def scope(s_acc: Any, dp_acc: Any) -> Any:
                    plgpu.barrier_wait(k_full.at[k_slot])
                    plgpu.wgmma(s_acc, q_tile.at[wg], k_tile.at[k_slot].transpose((1, 0)))
                    plgpu.barrier_wait(v_full.at[v_slot])
                    plgpu.wgmma(dp_acc, do_tile.at[wg], v_tile.at[v_slot].transpose((1, 0)))
                    if old_ds is not None:
                        plgpu.wgmma(dq_acc, old_ds, k_tile.at[plgpu.rem(i - 1, k_stages)])
                    plgpu.wgmma_wait(0 if old_ds is None else 1)
                    plgpu.barrier_arrive(v_empty.at[v_slot])
                    scores = s_acc[...]
                    if masked:
                        scores = seen.apply(scores, needed - 1 - i, first_row, plgpu.Layout.WGMMA)
                    p = jnp.exp2(scores * factor + own_nlse[:, None])
                    ds = (p * (dp_acc[...] + own_ndelta[:, None])).astype(dtype)
                    if old_ds is not None:
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(k_empty.at[plgpu.rem(i - 1, k_stages)])
                    return ds

                return plgpu.run_scoped(scope, plgpu.ACC((ROWS, keys)), plgpu.ACC((ROWS, keys)))

            def alone(i: Any, _: None) -> None:
                """A block from its scores to dQ."""
                ds = step(True, i, None)
                plgpu.wgmma(dq_acc, ds, k_tile.at[plgpu.rem(i, k_stages)])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(k_empty.at[plgpu.rem(i, k_stages)])

            def overlapped() -> None:
                """dQ of a block under the dS of the next."""
                ds = step(True, jnp.int32(0), None)
                begin: Any = 1
                if causal:  # the diagonal crosses more blocks than the first
                    begin = jnp.maximum(needed - seen.whole_blocks(tile * QUERIES), 1)
                    ds = lax.fori_loop(1, begin, functools.partial(step, True), ds)
                ds = lax.fori_loop(begin, needed, functools.partial(step, False), ds)
                plgpu.wgmma(dq_acc, ds, k_tile.at[plgpu.rem(needed - 1, k_stages)])
                plgpu.wgmma_wait(0)

            dq_acc[...] = jnp.zeros((ROWS, d), jnp.float32)
            plgpu.barrier_wait(q_full.at[wg])
            if one_loop:
                lax.fori_loop(0, needed, alone, None)
            else:
                overlapped()
            q_tile[wg] = (dq_acc[...] * scale).astype(dtype)  # in Q's place, which nobody else reads
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile.at[wg], head_rows(dq, batch, rows, head, d))
            plgpu.wait_smem_to_gmem(0)

        plgpu.run_scoped(accumulate, plgpu.ACC((ROWS, d)))

    def body(q: Any, k: Any, v: Any, d_out: Any, nlse: Any, ndelta: Any, dq: Any, *scratch: Any) -> None:
        tiles, barriers, wg = scratch[:4], scratch[4:], lax.axis_index("wg")
        tile = lax.axis_index("tile")
        if causal:  # the longest first
            tile = plgpu.num_programs(2) - 1 - tile
        place = lax.axis_index("batch"), lax.axis_index("head"), tile
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()

        @plgpu.when(wg == COMPUTES)
        def _() -> None:
            memory(place, (q, k, v, d_out), tiles, barriers)

        @plgpu.when(wg < COMPUTES)
        def _() -> None:
            compute(wg, place, k, (nlse, ndelta), dq, tiles, barriers)

    def ring(count: int) -> tuple[Any, Any]:
        return plgpu.Barrier(num_barriers=count), plgpu.Barrier(num_arrivals=COMPUTES, num_barriers=count)

    return plgpu.kernel(
        body,
        out_type,
        scratch_types=[
            tiles_of(COMPUTES, ROWS, d, dtype),
            tiles_of(COMPUTES, ROWS, dv, dtype),
            tiles_of(k_stages, keys, d, dtype),
            tiles_of(stages, keys, dv, dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTES),
            *ring(k_stages),
            *ring(stages),
        ],
        grid=(b, h, query_tiles),
        grid_names=("batch", "head", "tile"),
        num_threads=COMPUTES + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch="sm_90a", approx_math=True, strict=True),
        name="attention_backward_dq_sm90",
    )
