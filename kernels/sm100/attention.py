"""Blackwell attention forward: query tiles of 128 rows in flight, scores and output in tensor memory.

Warpgroup 0 is a mesh of warps: one loads Q and K, one V, one issues every product, and the fourth loads a bias where there is
one.  The softmax of a query tile is a warpgroup's: a thread holds a row, so maxima and sums need no exchange.  P goes back to
tensor memory over the scores it came from, as operand A of P V, in parts if asked for.  The last warpgroup is off the critical
path: it rescales an output whose maximum has grown by more than `rescale_threshold` (by a vote of each warp), and carries the
finished ones out.

Products that touch the same columns in different shapes are ordered by a commit and its barrier, as the PTX ISA asks (9.7.16.6):
scores are multiplied when the P V that reads the probabilities under them has finished.  Meanwhile exponentials are computed: of
the other one of two query tiles, or, of a single tile, those of the scores in the other buffer.

With `pair`, two neighbouring blocks multiply together.  Each has its own query rows, softmax and output, half of the keys of
every block of K and half of the columns of V; the first block issues for both.  Tiles come from a list made on the host, longest
first, or (`dynamic`) are handed out by cluster launch control, for which the fourth warp asks ahead.  Key blocks are visited from
the last to the first, as on Hopper, so that the steady loop has no mask.  Compiled, checked in the disassembly and simulated; no
Blackwell GPU has run it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.masks import Causal, Mask, last_key_of_query_0
from mosaic_gpu.kernels.sm90.schedule import tile_table
from mosaic_gpu.kernels.sm100.attention_config import BUFFERS, ROWS, AttentionConfig
from mosaic_gpu.kernels.sm100.attention_config import default_config as default_config
from mosaic_gpu.kernels.sm100.attention_loads import Loads
from mosaic_gpu.kernels.sm100.attention_products import buffer, multiply
from mosaic_gpu.kernels.sm100.attention_tiles import ANSWERS, ask_ahead, own_rows, walk
from mosaic_gpu.kernels.tiles import chunk, columns_of, head_rows, tiles_of, whole_rows
from mosaic_gpu.runtime.device import blackwell_arch, multiprocessors

LOWEST = -1e30  # where the running maximum starts: finite, so that a block without a visible key leaves no NaN
LOG2_E = math.log2(math.e)
LOAD_K, LOAD_V, MMA, LAST = 0, 1, 2, 3  # warps of warpgroup 0; the last one loads a bias, or asks for tiles
SOFTMAX = 1  # the first of these warpgroups; behind them stands the correction


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    *,
    config: AttentionConfig,
    causal: Causal,
    scale: float,
    return_lse: bool,
) -> tuple[jax.Array, ...]:
    """The kernel itself, for arrays that the dispatcher has checked.

    q: (b, s, h, d); k: (b, t, h_kv, d); v: (b, t, h_kv, dv); bias: (b or 1, h or 1, s, t), of their dtype, or None; returns
    (b, s, h, dv) and, if asked for, the LSE, (b, h, s) float32.
    """
    b, s, h, d = q.shape
    dv, biases = v.shape[3], () if bias is None else (whole_rows(bias),)
    config.check(d, dv, bool(biases))
    tiles = b * h * plgpu.cdiv(s, config.rows)
    listed = config.persistent and not config.dynamic
    walkers = min(tiles, max(multiprocessors() // config.blocks, 1)) if listed else tiles
    diagonal = last_key_of_query_0(causal, s, k.shape[1])
    table = tile_table(b, h, k.shape[2], s, k.shape[1], d + dv, config.rows, config.tile_k, diagonal, walkers)
    arch = blackwell_arch()
    kernel = _kernel(b, s, h, d, dv, walkers, jnp.dtype(q.dtype), config, causal, scale, return_lse, arch, bool(biases))
    return tuple(kernel(table, q, k, v, *biases))


@functools.lru_cache(maxsize=256)
def _kernel(
    b: int,
    s: int,
    h: int,
    d: int,
    dv: int,
    walkers: int,
    dtype: Any,
    c: AttentionConfig,
    causal: Causal,
    scale: float,
    return_lse: bool,
    arch: str,
    has_bias: bool = False,
) -> Any:
    out_type = [jax.ShapeDtypeStruct((b, s, h, dv), dtype)]
    d, dv = columns_of(d), columns_of(dv)  # of tiles
    keys, slots, tiles, parts = c.tile_k, c.kv_slots, c.query_tiles, c.p_parts
    factor = scale * LOG2_E  # scores in base 2: exp2(factor * (score - max))
    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE
    row_layout = layout.reduce(1)

    def softmax(
        i: Any,
        each_tile: Any,
        seen: Any,
        scores: Any,
        bias_tile: Any,
        probabilities: Any,
        lse: Any,
        row_values: Any,
        bars: Any,
    ) -> None:
        """Query tile i: a row of scores in each thread."""
        size = keys // parts
        plgpu.set_max_registers(c.softmax_registers, action="increase")

        def hand_over(x: Any, count: Any) -> None:
            """A value of each row for the correction: the factor of a block, at the end of a tile the sum."""

            @plgpu.when(count > 0)
            def _() -> None:
                plgpu.barrier_wait(bars["row_empty"].at[i])

            row_values[i] = x
            plgpu.barrier_arrive(bars["row_full"].at[i])

        def work(turn: Any, where: Any, tile: Any, before: Any, needed: Any) -> None:
            first_row = own_rows(c, tile, i)

            def biased(x: Any) -> Any:
                """Scores with the bias, 32 columns of which are held at a time; both are divided by the scale."""
                plgpu.barrier_wait(bars["b_full"].at[i])
                parts = []
                for n in range(0, keys, 32):
                    part = plgpu.load(bias_tile.at[i, :, plgpu.ds(n, 32)], layout=layout).astype(jnp.float32)
                    parts.append(lax.slice_in_dim(x, n, n + 32, axis=1) + part * (1 / scale))
                plgpu.barrier_arrive(bars["b_empty"].at[i])
                return jnp.concatenate(parts, axis=1)

            def step(masked: bool, j: Any, carry: Any) -> Any:
                top, total = carry
                at = buffer(c, i, before + j)
                plgpu.barrier_wait(bars["s_full"].at[at])
                if c.load_reduces and not masked and not has_bias:
                    x, highest = plgpu.async_load_tmem(scores.at[at], reduce="max")
                    plgpu.wait_load_tmem()
                else:
                    x = plgpu.async_load_tmem(scores.at[at])
                    plgpu.wait_load_tmem()
                    x = biased(x) if has_bias else x
                    x = seen.apply(x, needed - 1 - j, first_row, layout) if masked else x
                    highest = jnp.max(x, axis=1)
                if c.rescale_threshold:  # an old maximum that is not much too small will do: P just grows beyond 1
                    new_top = jnp.where((highest - top) * factor > c.rescale_threshold, highest, top)
                else:
                    new_top = jnp.maximum(top, highest)
                shrink = jnp.exp2((top - new_top) * factor)
                hand_over(shrink, before + turn + j)  # a sum for each tile before this one
                if has_bias:  # of -1e9, say, whose product with the factor rounds by more than an exponent takes
                    shifted = (x - new_top[:, None]) * factor
                else:
                    shifted = x * factor - (new_top * factor)[:, None]
                total = total * shrink
                emulated = 0 if masked or has_bias else c.emulated_columns
                for part in range(parts):
                    begin, end = part * size, (part + 1) * size
                    middle = min(max(emulated, begin), end)
                    for lo, hi, exp2 in ((begin, middle, plgpu.exp2_fma), (middle, end, jnp.exp2)):
                        if lo < hi:
                            p = exp2(lax.slice_in_dim(shifted, lo, hi, axis=1))
                            plgpu.async_store_tmem(probabilities(at, plgpu.ds(lo, hi - lo)), p.astype(dtype))
                            total = total + jnp.sum(p, axis=1)
                    plgpu.commit_tmem()
                    plgpu.barrier_arrive(bars["p_full"].at[at * parts + part])
                return new_top, total

            start = (
                plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), row_layout),
                jnp.zeros((ROWS,), jnp.float32),
            )
            begin: Any = 1
            if causal:  # the diagonal crosses the blocks of both tiles' rows
                begin = jnp.maximum(needed - seen.whole_blocks(tile * c.rows), 1)
            carry = lax.fori_loop(0, begin, functools.partial(step, True), start)
            top, total = lax.fori_loop(begin, needed, functools.partial(step, False), carry)
            hand_over(total, before + turn + needed)
            if lse is not None:
                batch, head = where()
                lse[batch, head, plgpu.ds(first_row, ROWS)] = top * scale + jnp.log(total)

        each_tile(work)

    def correct(each_tile: Any, result: Any, out: Any, o_tile: Any, row_values: Any, bars: Any) -> None:
        """Rescales the outputs between products, and carries them out at the end of a tile."""
        plgpu.set_max_registers(c.correction_registers, action="decrease")
        wide = chunk(dv)
        chunks = range(0, dv, wide)

        def pieces(start: int, size: int) -> list[Any]:
            """Columns that are held at a time."""
            ends = range(start, start + size, c.correction_columns)
            return [plgpu.ds(n, min(c.correction_columns, start + size - n)) for n in ends]

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
                for columns in pieces(0, dv):
                    plgpu.async_store_tmem(out.at[i, :, columns], scaled(i, columns, shrink))
                plgpu.commit_tmem()

            if c.rescale_threshold:
                plgpu.when_any_in_warp(shrink != 1.0)(multiply_all)
            else:
                multiply_all()
            plgpu.barrier_arrive(bars["o_ready"].at[i])

        def work(turn: Any, where: Any, tile: Any, before: Any, needed: Any) -> None:
            batch, head = where()
            for i in range(tiles):
                take(i)  # of the first block: there is nothing to rescale, and the tile before has left the accumulator
                plgpu.barrier_arrive(bars["o_ready"].at[i])

            def step(j: Any, _: None) -> None:
                for i in range(tiles):
                    rescale(i)

            lax.fori_loop(1, needed, step, None)
            for i in range(tiles):
                total = take(i)
                plgpu.barrier_wait(bars["pv_done"].at[i])
                inverse = jnp.where(total > 0, 1 / total, 0.0)
                rows, kept = plgpu.ds(own_rows(c, tile, i), ROWS), c.output_tiles(dv)
                for n, start in enumerate(chunks):
                    uneven = n == 0 and len(chunks) % kept  # then the chunk before may have left from this place, too
                    plgpu.wait_smem_to_gmem(0 if uneven else kept - 1, wait_read_only=True)
                    place = o_tile.at[n % kept]
                    for columns in pieces(start, wide):
                        within = plgpu.ds(columns.start - start, columns.size)
                        place[:, within] = scaled(i, columns, inverse).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        place, head_rows(result, batch, rows, head, dv).at[:, plgpu.ds(start, wide)]
                    )

        each_tile(work)
        plgpu.wait_smem_to_gmem(0)

    def with_bias(table: Any, q: Any, k: Any, v: Any, bias: Any, result: Any, *rest: Any) -> None:
        body(table, q, k, v, result, *rest, bias=bias)

    def body(table: Any, q: Any, k: Any, v: Any, result: Any, *rest: Any, bias: Any = None) -> None:
        lse, rest = (rest[0], rest[1:]) if return_lse else (None, rest)
        q_tile, k_tile, v_tile, o_tile, row_values, (scores, over_scores), out, bars, *more = rest
        answers, places = more if c.dynamic else (None, None)
        bias_tile = more[0] if has_bias else None
        seen = Mask(causal, q, k, keys)
        each_tile = functools.partial(walk, c, seen, table, places)
        loads = Loads(c, d, dv, each_tile, bars)
        wg = lax.axis_index("wg")

        def probabilities(at: Any, some: Any) -> Any:
            return over_scores.at[at, :, some]

        def issue() -> None:
            operands = q_tile, k_tile, v_tile
            products = functools.partial(multiply, c, each_tile, operands, scores, probabilities, out, bars)
            if not c.pair:
                return products()
            first = lax.axis_index("pair") == 0  # which issues for both
            plgpu.when(first)(products)
            if c.dynamic:  # every place has as many readers in the second block
                plgpu.when(jnp.logical_not(first))(lambda: each_tile(lambda *_: None))

        @plgpu.when(wg == 0)
        def _() -> None:
            plgpu.set_max_registers(c.issue_registers, action="decrease")

            @plgpu.warp_map
            def _(warp: Any) -> None:
                plgpu.when(warp == LOAD_K)(lambda: loads.q_and_k(q, k, q_tile, k_tile))
                plgpu.when(warp == LOAD_V)(lambda: loads.v(q, k, v, v_tile))
                plgpu.when(warp == MMA)(issue)
                if has_bias:
                    plgpu.when(warp == LAST)(lambda: loads.bias(bias, bias_tile))
                if c.dynamic:
                    plgpu.when(warp == LAST)(lambda: ask_ahead(answers, places))

        @plgpu.when((wg >= SOFTMAX) & (wg < SOFTMAX + tiles))
        def _() -> None:
            softmax(wg - SOFTMAX, each_tile, seen, scores, bias_tile, probabilities, lse, row_values, bars)

        @plgpu.when(wg == SOFTMAX + tiles)
        def _() -> None:
            correct(each_tile, result, out, o_tile, row_values, bars)

    def barriers(count: int) -> Any:
        return plgpu.Barrier(num_barriers=count)

    def tensor(count: int, to_issuer: bool = False) -> Any:
        """Barriers that hand tensor memory over; to_issuer: from both blocks of a pair to the one that issues."""
        if c.pair and to_issuer:
            return plgpu.ClusterBarrier(collective_axes="pair", num_barriers=count, orders_tensor_core=True)
        return plgpu.Barrier(num_barriers=count, orders_tensor_core=True)

    # Probabilities take the first half of the columns of the scores that they are computed from.
    scores_type = plgpu.TMEM((BUFFERS, ROWS, keys), jnp.float32, collective=c.pair)
    probabilities_type = plgpu.TMEM((BUFFERS, ROWS, 2 * keys), dtype, packed=True, collective=c.pair)
    more: list[Any] = [tiles_of(tiles, ROWS, keys, dtype)] if has_bias else []
    if c.dynamic:
        free: Any = barriers(ANSWERS)
        if c.pair:
            free = plgpu.ClusterBarrier(collective_axes="pair", num_barriers=ANSWERS)
        readers = tiles + 1 + 3  # warpgroups, and warps of warpgroup 0
        read = plgpu.Barrier(num_arrivals=readers, num_barriers=ANSWERS)
        more = [
            (plgpu.TryClusterCancelResult(ANSWERS), barriers(ANSWERS), free),
            (plgpu.SMEM((ANSWERS,), jnp.int32), barriers(ANSWERS), read),
        ]
    return plgpu.kernel(
        with_bias if has_bias else body,
        out_type + ([jax.ShapeDtypeStruct((b, h, s), jnp.float32)] if return_lse else []),
        scratch_types=[
            tiles_of(tiles, ROWS, d, dtype),
            tiles_of(slots, keys // c.blocks, d, dtype),
            tiles_of(slots, keys, dv // c.blocks, dtype),
            tiles_of(c.output_tiles(dv), ROWS, chunk(dv), dtype),
            plgpu.SMEM((tiles, ROWS), jnp.float32),
            plgpu.RefUnion(scores_type, probabilities_type),
            plgpu.TMEM((tiles, ROWS, dv), jnp.float32, collective=c.pair),
            {
                **{name: barriers(tiles) for name in ("q_full", "q_empty", "row_full", "row_empty")},
                **{name: barriers(slots) for name in ("k_full", "k_empty", "v_full", "v_empty")},
                **{name: barriers(tiles) for name in (("b_full", "b_empty") if has_bias else ())},
                "s_full": tensor(BUFFERS),
                "p_full": tensor(BUFFERS * parts, True),
                "o_ready": tensor(tiles, True),
                "pv_done": tensor(tiles),
            },
            *more,
        ],
        grid=(walkers,),
        grid_names=("block",),
        num_threads=tiles + 2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(arch=arch, approx_math=True, strict=True),
        name="attention_sm100",
        **(dict(cluster=(2,), cluster_names=("pair",)) if c.pair else {}),
    )
