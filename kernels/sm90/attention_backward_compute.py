"""The computing warpgroups of the Hopper attention backward kernel, in two ways.

`both_results`: each makes dK and dV of 64 keys of its own.  A step: dP^T = V dO^T with dV in flight together; then the next
scores S^T = K Q^T with dK, under which P^T of the next queries is computed.

`make_dv`, `make_dk`: they share 64 keys, for head dims of which dK and dV together have no room in a warpgroup's registers.  The
first makes the scores, P and dV, and hands P on through shared memory; the second makes dP, dS and dK.  Nothing is computed
twice, but dQ is left to a kernel of its own.  The first has the large product of the block before in flight with the small one
of this block; the second starts it as soon as it can.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.sm90.attention_backward_config import ROWS
from mosaic_gpu.kernels.sm90.attention_backward_work import BY_COLUMN, Build, Work, accumulators, add, pieces
from mosaic_gpu.kernels.tiles import head_rows


def both_results(
    build: Build, wg: Any, look_up: Any, results: Any, tiles: Any, ds_tile: Any, barriers: Any, ds_barriers: Any
) -> None:
    """64 keys: their rows of dK and dV."""
    c, queries = build.config, build.queries
    stages, ds_stages = c.num_stages, c.ds_stages
    work = look_up()
    plgpu.set_max_registers(c.compute_registers, action="increase")
    k_tile, v_tile, q_tile, do_tile, nlse_tile, ndelta_tile = tiles
    k_full, v_full, q_full, q_empty, do_full, do_empty = barriers
    first_key = work.tile * build.keys + wg * ROWS
    # dP begins with ndelta, which is then not waited for behind it: 1 % at 64 queries; of 128 the moves cost 3 %.
    early_ndelta = queries <= ROWS

    def start_scores(s_acc: Any, step: Any) -> None:
        slot = plgpu.rem(step, stages)
        plgpu.barrier_wait(q_full.at[slot])
        plgpu.wgmma(s_acc, k_tile.at[wg], q_tile.at[slot].transpose((1, 0)))

    def first_probabilities(s_acc: Any) -> Any:
        start_scores(s_acc, 0)
        plgpu.wgmma_wait(0)
        return work.probabilities(s_acc[...], nlse_tile, 0, first_key, work.first_query(0)).astype(build.dtype)

    def score_gradients(dv_acc: Any, step: Any, p: Any) -> Any:
        """dS^T of a block, on its way to the dQ warpgroup too; dV is up to date."""
        slot, ds_slot = plgpu.rem(step, stages), plgpu.rem(step, ds_stages)
        plgpu.barrier_wait(do_full.at[slot])

        def scope(dp_acc: Any) -> Any:
            ndelta = functools.partial(plgpu.load, ndelta_tile.at[slot], layout=BY_COLUMN)
            if early_ndelta:
                dp_acc[...] = jnp.broadcast_to(ndelta()[None, :], dp_acc.shape)
            plgpu.wgmma(dp_acc, v_tile.at[wg], do_tile.at[slot].transpose((1, 0)))
            add(dv_acc, dv_pieces, p, do_tile.at[slot])
            if build.with_dq:

                @plgpu.when(step >= ds_stages)
                def _() -> None:
                    plgpu.barrier_wait(ds_barriers[1].at[ds_slot])

            plgpu.wgmma_wait(0)
            dp = dp_acc[...] if early_ndelta else dp_acc[...] + ndelta()[None, :]
            return (dp * p.astype(jnp.float32)).astype(build.dtype)

        ds = plgpu.run_scoped(scope, plgpu.ACC((ROWS, queries)))
        if build.with_dq:
            ds_tile.at[ds_slot * build.key_tiles + wg].transpose((1, 0))[...] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(ds_barriers[0].at[ds_slot])
        plgpu.barrier_arrive(do_empty.at[slot])
        return ds

    def add_keys(dk_acc: Any, step: Any, ds: Any) -> None:
        add(dk_acc, dk_pieces, ds, q_tile.at[plgpu.rem(step, stages)])

    def sweep(dk_acc: Any, dv_acc: Any) -> None:
        def one(masked: bool, i: Any, p: Any) -> Any:
            """All of block i - 1 but its scores, with the scores of block i."""
            masked_from = work.first_query(i) if masked else None  # a division: while there are registers
            ds = score_gradients(dv_acc, i - 1, p)
            if stages == 1:  # the next Q takes the place of this one
                add_keys(dk_acc, i - 1, ds)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(q_empty.at[0])

            def scope(s_acc: Any) -> Any:
                start_scores(s_acc, i)
                if stages > 1:
                    add_keys(dk_acc, i - 1, ds)
                plgpu.wgmma_wait(len(dk_pieces) if stages > 1 else 0)
                new_p = work.probabilities(s_acc[...], nlse_tile, i, first_key, masked_from).astype(build.dtype)
                if stages > 1:
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_empty.at[plgpu.rem(i - 1, stages)])
                return new_p

            return plgpu.run_scoped(scope, plgpu.ACC((ROWS, queries)))

        plgpu.barrier_wait(k_full)
        p = plgpu.run_scoped(first_probabilities, plgpu.ACC((ROWS, queries)))
        plgpu.barrier_wait(v_full)
        p = _steps(work, one, p)
        last = work.steps - 1
        ds = score_gradients(dv_acc, last, p)
        add_keys(dk_acc, last, ds)
        plgpu.wgmma_wait(0)

    def write(values: list[tuple[slice, Any]], result: Any, through_tile: bool) -> None:
        """A result in pieces of columns, through this warpgroup's own rows of V, which nobody else reads."""
        columns = values[-1][0].stop
        rows = _rows_of(look_up(), wg, result, columns)  # again: no register holds it through the loop
        if not through_tile:
            for some, x in values:
                rows[:, some] = x
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for some, x in values:
            v_tile[wg, :, some] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(v_tile.at[wg], rows)

    def accumulate(*accs: Any) -> None:
        """accs: pieces of dK, then of dV."""
        dk_acc, dv_acc = accs[: len(dk_pieces)], accs[len(dk_pieces) :]
        _clear(accs)
        plgpu.when(work.steps > 0)(lambda: sweep(dk_acc, dv_acc))
        d_v, d_k = results
        write(_rounded(build, dv_pieces, dv_acc), d_v, True)
        write(_rounded(build, dk_pieces, dk_acc, build.scale), d_k, build.d == build.dv)
        plgpu.wait_smem_to_gmem(0)

    dk_pieces, dv_pieces = pieces(build.d), pieces(build.dv)
    plgpu.run_scoped(accumulate, *accumulators(dk_pieces + dv_pieces))


def make_dv(
    build: Build, work: Work, look_up: Any, d_v: Any, tiles: Any, p_tile: Any, barriers: Any, p_barriers: Any
) -> None:
    """64 keys' dV; the scores and P, which are handed on through p_tile and its barriers (full, empty)."""
    plgpu.set_max_registers(build.config.compute_registers, action="increase")
    stages, queries = build.config.num_stages, build.queries
    k_tile, _, q_tile, do_tile, nlse_tile, _ = tiles
    k_full, _, q_full, q_empty, do_full, do_empty = barriers
    p_full, p_empty = p_barriers
    first_key, some = work.tile * build.keys, pieces(build.dv)

    def start_scores(s_acc: Any, step: Any) -> None:
        slot = plgpu.rem(step, stages)
        plgpu.barrier_wait(q_full.at[slot])
        plgpu.wgmma(s_acc, k_tile.at[0], q_tile.at[slot].transpose((1, 0)))

    def hand_on(values: Any, step: Any) -> Any:
        """P^T of a step, rounded; the other warpgroup gets it, too."""
        plgpu.barrier_arrive(q_empty.at[plgpu.rem(step, stages)])

        @plgpu.when(step >= 1)
        def _() -> None:
            plgpu.barrier_wait(p_empty)

        p = values.astype(build.dtype)
        p_tile[0] = p
        plgpu.barrier_arrive(p_full)
        return p

    def first(s_acc: Any) -> Any:
        start_scores(s_acc, 0)
        plgpu.wgmma_wait(0)
        values = work.probabilities(s_acc[...], nlse_tile, jnp.int32(0), first_key, work.first_query(0))
        return hand_on(values, jnp.int32(0))

    def add_queries(dv_acc: Any, step: Any, p: Any) -> None:
        slot = plgpu.rem(step, stages)
        plgpu.barrier_wait(do_full.at[slot])
        add(dv_acc, some, p, do_tile.at[slot])

    def sweep(dv_acc: Any) -> None:
        def one(masked: bool, i: Any, p: Any) -> Any:
            """dV of block i - 1, and under it P of block i."""
            masked_from = work.first_query(i) if masked else None

            def scope(s_acc: Any) -> Any:
                start_scores(s_acc, i)
                add_queries(dv_acc, i - 1, p)
                plgpu.wgmma_wait(len(some))
                values = work.probabilities(s_acc[...], nlse_tile, i, first_key, masked_from)
                plgpu.wgmma_wait(0)  # P is rounded into the registers of the one before
                plgpu.barrier_arrive(do_empty.at[plgpu.rem(i - 1, stages)])
                return hand_on(values, i)

            return plgpu.run_scoped(scope, plgpu.ACC((ROWS, queries)))

        plgpu.barrier_wait(k_full)
        p = _steps(work, one, plgpu.run_scoped(first, plgpu.ACC((ROWS, queries))))
        add_queries(dv_acc, work.steps - 1, p)
        plgpu.wgmma_wait(0)

    def accumulate(*dv_acc: Any) -> None:
        _clear(dv_acc)
        plgpu.when(work.steps > 0)(lambda: sweep(dv_acc))
        rows = _rows_of(look_up(), 0, d_v, build.dv)
        for columns, x in _rounded(build, some, dv_acc):
            rows[:, columns] = x

    plgpu.run_scoped(accumulate, *accumulators(some))


def make_dk(
    build: Build, work: Work, look_up: Any, d_k: Any, tiles: Any, p_tile: Any, barriers: Any, p_barriers: Any
) -> None:
    """64 keys' dK; dP and dS."""
    plgpu.set_max_registers(build.config.compute_registers + 8, action="increase")
    stages, queries = build.config.num_stages, build.queries
    _, v_tile, q_tile, do_tile, _, ndelta_tile = tiles
    _, v_full, _, q_empty, do_full, do_empty = barriers
    p_full, p_empty = p_barriers
    some = pieces(build.d)

    def one(dk_acc: Any, i: Any) -> None:
        """dS and dK of a block; dK is under way with the next dP, and soon done: its Q is asked for by then."""
        slot = plgpu.rem(i, stages)

        def scope(dp_acc: Any) -> Any:
            plgpu.barrier_wait(do_full.at[slot])
            plgpu.wgmma(dp_acc, v_tile.at[0], do_tile.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @plgpu.when(i >= 1)
            def _() -> None:
                plgpu.barrier_arrive(q_empty.at[plgpu.rem(i - 1, stages)])

            plgpu.barrier_wait(p_full)
            plgpu.wgmma_wait(0)
            ndelta = plgpu.load(ndelta_tile.at[slot], layout=BY_COLUMN)
            plgpu.barrier_arrive(do_empty.at[slot])
            values = dp_acc[...] + ndelta[None, :]
            p = plgpu.load(p_tile.at[0], layout=plgpu.Layout.WGMMA)  # now: there are no registers for both
            plgpu.barrier_arrive(p_empty)
            return (values * p.astype(jnp.float32)).astype(build.dtype)

        ds = plgpu.run_scoped(scope, plgpu.ACC((ROWS, queries)))
        add(dk_acc, some, ds, q_tile.at[slot])

    def sweep(dk_acc: Any) -> None:
        plgpu.barrier_wait(v_full)
        lax.fori_loop(0, work.steps, lambda i, _: one(dk_acc, i), None)
        plgpu.wgmma_wait(0)

    def accumulate(*dk_acc: Any) -> None:
        _clear(dk_acc)
        plgpu.when(work.steps > 0)(lambda: sweep(dk_acc))
        rows = _rows_of(look_up(), 0, d_k, build.d)
        for columns, x in _rounded(build, some, dk_acc, build.scale):
            rows[:, columns] = x

    plgpu.run_scoped(accumulate, *accumulators(some))


def _steps(work: Work, one: Any, carry: Any) -> Any:
    """one(masked, i, carry) for every block but the first, those that need a mask before the others."""
    begin = jnp.maximum(work.masked(), 1)
    carry = lax.fori_loop(1, begin, functools.partial(one, True), carry)
    return lax.fori_loop(begin, work.steps, functools.partial(one, False), carry)


def _clear(accs: Any) -> None:
    for acc in accs:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)


def _rounded(build: Build, some: list[slice], accs: Any, factor: float | None = None) -> list[tuple[slice, Any]]:
    """(columns, values) of each accumulator."""
    values = [acc[...] if factor is None else acc[...] * factor for acc in accs]
    return [(columns, x.astype(build.dtype)) for columns, x in zip(some, values, strict=True)]


def _rows_of(work: Work, wg: Any, result: Any, columns: int) -> Any:
    """The 64 keys' rows of a result."""
    rows = plgpu.ds(work.tile * work.build.keys + wg * ROWS, ROWS)
    return head_rows(result, work.batch, rows, work.kv_head, columns)
