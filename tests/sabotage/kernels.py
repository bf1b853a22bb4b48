"""Good kernels, small enough to be simulated in some milliseconds: the project's own, and those of `handwritten.py`.

Every one is compared with a NumPy reference.  What breaks them is in `sabotages.py` and `mutate.py`.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np

from mosaic_gpu.kernels.sm90 import attention as attention90
from mosaic_gpu.kernels.sm90 import attention_backward as backward90
from mosaic_gpu.kernels.sm90 import matmul as matmul90
from mosaic_gpu.kernels.sm90.attention_backward_work import Build
from mosaic_gpu.kernels.sm90.schedule import key_tile_table
from mosaic_gpu.kernels.sm100 import attention as attention100
from mosaic_gpu.kernels.sm100 import matmul as matmul100

from . import handwritten, handwritten100, handwritten_peers  # noqa: F401  (add their kernels)
from .cases import BF16, MAKERS, Case, case, f32, maker, random

__all__ = ["MUTATED", "NAMES", "Case", "case"]
# The body of the attention kernel takes its buffers as *rest; selectors call them by these names.
ATTENTION_NAMES = {
    f"rest[{i}]": name
    for i, name in enumerate(
        (
            *("q_tile", "k_tile", "v_tile"),
            *("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "turns", "o_tile", "ones"),
        )
    )
}


@maker
def sm90_matmul() -> Any:
    a, b = random(1, 384, 320), random(2, 320, 128)

    def kernel(*arrays: jax.Array) -> Any:
        config = matmul90.MatmulConfig(block_n=128, num_stages=3, persistent=True)
        with mock.patch.object(matmul90, "multiprocessors", lambda: 1):  # one block takes all tiles
            return matmul90.matmul(*arrays, config=config)

    return kernel, "sm_90a", (a, b), ((f32(a) @ f32(b)).astype(BF16),), {}


@maker
def sm90_matmul_pair() -> Any:
    """As `sm90_matmul`, by a cluster of two blocks that share B."""
    a, b = random(1, 512, 320), random(2, 320, 128)

    def kernel(*arrays: jax.Array) -> Any:
        config = matmul90.MatmulConfig(block_n=128, num_stages=2, cluster_m=2, persistent=True)
        with mock.patch.object(matmul90, "multiprocessors", lambda: 2):  # one cluster takes all tiles
            return matmul90.matmul(*arrays, config=config)

    return kernel, "sm_90a", (a, b), ((f32(a) @ f32(b)).astype(BF16),), {}


FLOAT8 = ml_dtypes.float8_e4m3fn


def _matmul100(rows: int, columns: int, config: matmul100.MatmulConfig) -> Any:
    a, b = random(1, rows, 320), random(2, 320, columns)

    def kernel(*arrays: jax.Array) -> Any:
        with mock.patch.object(
            matmul100, "multiprocessors", lambda: config.blocks
        ):  # one block, or pair, takes all tiles
            return matmul100.matmul(*arrays, config=config)

    return kernel, "sm_100a", (a, b), ((f32(a) @ f32(b)).astype(BF16),), _named100(0)


def _named100(first: int, *more: str) -> dict[str, str]:
    names = ("o", "a_tile", "b_tile", "o_tile", "acc", "full", "empty", "ready", "drained", *more)
    return {f"rest[{first + i}]": name for i, name in enumerate(names)}


@maker
def sm100_matmul() -> Any:
    """Four tiles, so that both accumulators come round again."""
    return _matmul100(512, 64, matmul100.MatmulConfig(tile_n=64, num_slots=2))


@maker
def sm100_pair() -> Any:
    """As `sm100_matmul`, by two blocks that multiply together."""
    return _matmul100(1024, 128, matmul100.MatmulConfig(tile_n=128, num_slots=2, pair=True))


@maker
def sm100_scaled() -> Any:
    """mxfp8 by a pair of blocks with two accumulators, four tiles: factors of A and B in rings of shared and tensor memory."""
    config = matmul100.MatmulConfig(tile_n=128, num_slots=2, pair=True)
    rng, (m, n, k) = np.random.default_rng(5), (1024, 128, 640)
    a, b = random(1, m, k, dtype=FLOAT8), random(2, n, k, dtype=FLOAT8)
    scales = [
        rng.integers(126, 129, (rows, k // 32)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu) for rows in (m, n)
    ]

    def kernel(*arrays: jax.Array) -> Any:
        with mock.patch.object(matmul100, "multiprocessors", lambda: config.blocks):
            return matmul100.scaled_matmul(*arrays, config=config)

    wide = [f32(x) * np.repeat(f32(s), 32, axis=1) for x, s in zip((a, b), scales, strict=True)]
    names = _named100(2, "a_scales", "b_scales", "a_factors", "b_factors")
    return kernel, "sm_100a", (a, b, *scales), ((wide[0] @ wide[1].T).astype(BF16),), names


def _attention100(with_bias: bool = False, **options: Any) -> Any:
    """Two tiles of a block or pair, one after the other, and so many key blocks that every barrier comes round again."""
    config = attention100.AttentionConfig(tile_k=64, kv_slots=2, rescale_threshold=0.5, **options)
    rng, keys, d = np.random.default_rng(3), 320, 64
    q, k, v = (rng.standard_normal((1, n, 1, d)).astype(BF16) for n in (2 * config.rows, keys, keys))
    # Later blocks have larger scores, so that the output is rescaled.
    k = (f32(k) * np.linspace(1, 0.5, keys)[None, :, None, None]).astype(BF16)

    more = [rng.standard_normal((1, 1, 2 * config.rows, keys)).astype(BF16)] if with_bias else []

    def kernel(*arrays: jax.Array) -> Any:
        with mock.patch.object(attention100, "multiprocessors", lambda: config.blocks):
            return attention100.attention(*arrays, config=config, causal=False, scale=0.25, return_lse=False)

    scores = f32(q[0, :, 0]) @ f32(k[0, :, 0]).T * 0.25 + sum(f32(x[0, 0]) for x in more)
    p = np.exp(scores - scores.max(1, keepdims=True))
    out = p @ f32(v[0, :, 0]) / p.sum(1, keepdims=True)
    tiles = ("q_tile", "k_tile", "v_tile", "o_tile", "row_values")
    names = {f"rest[{i}]": name for i, name in enumerate(tiles)} | {"rest[6]": "out", "rest[8]": "bias_tile"}
    names |= {"rest[5][0]": "scores", "rest[5][1]": "probabilities"}
    every = ("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "row_full", "row_empty")
    every += ("s_full", "p_full", "o_ready", "pv_done", "b_full", "b_empty")
    names |= {f"rest[7]['{name}']": name for name in every}
    return kernel, "sm_100a", (q, k, v, *more), (out[None, :, None],), names


@maker
def sm100_attention() -> Any:
    """Two query tiles in flight."""
    return _attention100()


@maker
def sm100_attention_pair() -> Any:
    """A pair of blocks with a query tile each, two buffers of scores in turn, probabilities in two parts."""
    return _attention100(pair=True, query_tiles=1, p_parts=2)


@maker
def sm100_attention_bias() -> Any:
    """Two query tiles, each with a bias."""
    return _attention100(with_bias=True)


def _attention(queries: int, keys: int, causal: bool, with_bias: bool = False, **config: Any) -> Any:
    rng = np.random.default_rng(3)
    d = 64
    q, k, v = (rng.standard_normal((1, n, 1, d)).astype(BF16) for n in (queries, keys, keys))
    more = [rng.standard_normal((1, 1, queries, keys)).astype(BF16)] if with_bias else []

    def kernel(*arrays: jax.Array) -> Any:
        # One block takes all query tiles, one after the other.
        with mock.patch.object(attention90, "multiprocessors", lambda: 1):
            return attention90.attention(
                *arrays,
                config=attention90.AttentionConfig(block_kv=64, persistent=True, **config),
                causal=causal,
                scale=d**-0.5,
                return_lse=False,
            )

    scores = f32(q[0, :, 0]) @ f32(k[0, :, 0]).T * d**-0.5 + sum(f32(x[0, 0]) for x in more)
    if causal:
        scores = np.where(np.arange(keys)[None] <= np.arange(queries)[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    out = p @ f32(v[0, :, 0]) / p.sum(1, keepdims=True)
    ring = {f"rest[{11 + i}]": name for i, name in enumerate(("bias_tile", "b_full", "b_empty"))} if with_bias else {}
    return kernel, "sm_90a", (q, k, v, *more), (out[None, :, None],), ATTENTION_NAMES | ring


# Two or three tiles of queries, and so many key blocks that every barrier of the ring comes round again.
@maker
def attention() -> Any:
    return _attention(384, 320, causal=False, output_tile=True)


@maker
def attention_causal() -> Any:
    """There are key blocks behind those on the diagonal."""
    return _attention(384, 384, causal=True, output_tile=True)


@maker
def attention_short() -> Any:
    """One key block: a tile's first product is its last."""
    return _attention(384, 64, causal=False, output_tile=True)


@maker
def attention_registers() -> Any:
    """Three compute warpgroups that keep Q in registers.  So few keys that only q_empty tells when Q may be refilled."""
    registers = dict(num_stages=3, compute_warpgroups=3, compute_registers=160, memory_registers=32)
    return _attention(576, 128, causal=False, output_tile=True, q_in_registers=True, **registers)


@maker
def attention_ones() -> Any:
    """The products sum the rows of P by columns of ones that a warpgroup wrote for all; no turns, which would order that, too."""
    return _attention(384, 192, causal=False, output_tile=True, sum_by_product=True, take_turns=False)


@maker
def attention_bias() -> Any:
    """A ring of two key blocks of a bias for each warpgroup.  With three of K and V, whose own waits would else cover it."""
    return _attention(384, 320, causal=False, with_bias=True, output_tile=True, num_stages=3)


def _backward(config: Any) -> Any:
    """The main kernel: blocks of keys, the last one with a tail, add to dQ; six blocks of queries of two heads."""
    rng = np.random.default_rng(4)
    s, t, h, d = 192, 192 if not config.split else 96, 2, 64
    q, do = (rng.standard_normal((1, s, h, d)).astype(BF16) for _ in range(2))
    k, v = (rng.standard_normal((1, t, 1, d)).astype(BF16) for _ in range(2))
    lse, delta, dq = np.zeros((1, h, s)), np.zeros((1, h, s)), np.zeros((h, s, d))
    dk, dv = np.zeros((t, d)), np.zeros((t, d))
    for j in range(h):
        scores = f32(q[0, :, j]) @ f32(k[0, :, 0]).T * d**-0.5
        lse[0, j] = np.log(np.exp(scores).sum(1))
        p, dp = np.exp(scores - lse[0, j][:, None]), f32(do[0, :, j]) @ f32(v[0, :, 0]).T
        delta[0, j] = (p * dp).sum(1)
        ds = p * (dp - delta[0, j][:, None])
        dq[j], dk, dv = ds @ f32(k[0, :, 0]), dk + ds.T @ f32(q[0, :, j]) * d**-0.5, dv + p.T @ f32(do[0, :, j])
    build = Build(d, d, np.dtype(BF16), config, False, d**-0.5, not config.split)
    table = key_tile_table(1, 1, t, 1, 1, build.keys, None, 132)
    arrays = [table, q, k, v, do, (-lse / np.log(2)).astype(np.float32), (-delta).astype(np.float32)]
    results = [dv[None, :, None], dk[None, :, None]]
    names = ["v", "d_out", "nlse", "ndelta", "same_table" if config.split else "start", "d_v", "d_k"]
    names += ["k_tile", "v_tile", "q_tile", "do_tile", "nlse_tile", "ndelta_tile"]
    of_barriers = ["k_full", "v_full", "q_full", "q_empty", "do_full", "do_empty"]
    if config.split:
        kernel = backward90._main(1, 1, t, len(table), build)
        arrays.append(table)
        names += [*of_barriers, "p_tile", "p_full", "p_empty"]
    else:
        # In the order of the registers: columns in pairs, rows 8 apart, columns 8 apart; a thread has four at a time.
        tiles = dq.reshape(h * s // 64, 4, 2, 8, 8, 4, 2)  # warp, row's half, row | column's eighth, pair, column
        total = tiles.transpose(0, 4, 1, 3, 5, 2, 6).reshape(h * s // 64, 32, 128)
        kernel = backward90._main(1, 1, t, len(table), build, total.shape)
        arrays.append(np.zeros(total.shape, np.float32))
        results.append(total)
        names = [*names[:7], "dq_sum", *names[7:], *of_barriers, "ds_tile", "dq_tile", "ds_full", "ds_empty"]
    by_place = {f"rest[{i}]": name for i, name in enumerate(names)}
    return kernel, "sm_90a", tuple(arrays), tuple(results), by_place


@maker
def attention_backward() -> Any:
    """Each computing warpgroup has 64 keys of its own; the next product of dQ begins before a part has left."""
    return _backward(backward90.AttentionBackwardConfig(block_q=64))


@maker
def attention_backward_one_by_one() -> Any:
    """A part of dQ leaves before the next product begins."""
    return _backward(backward90.AttentionBackwardConfig(block_q=64, dq_ahead=False))


@maker
def attention_backward_split() -> Any:
    """The computing warpgroups share 64 keys; P goes from one to the other, and there is no dQ."""
    return _backward(backward90.AttentionBackwardConfig(block_q=64, split=True))


NAMES = tuple(MAKERS)
# Most of attention_short's equations are never reached, so their mutants would say nothing; those of the other two backward
# kernels have not been gone through yet.
NOT_MUTATED = ("attention_short", "attention_backward_one_by_one", "attention_backward_split")
MUTATED = tuple(n for n in NAMES if n not in NOT_MUTATED)
