"""Where the causal diagonal ends: "bottom_right" in every attention kernel, against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.masks import last_key_of_query_0
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig
from mosaic_gpu.kernels.sm90.attention_config import AttentionConfig
from mosaic_gpu.kernels.sm90.schedule import TILE_OVERHEAD, tile_table
from mosaic_gpu.kernels.sm100.attention_config import AttentionConfig as Sm100Config
from mosaic_gpu.kernels.sm100.attention_config import default_config as sm100_default
from mosaic_gpu.tune.tunable import find_tunable

BOTTOM_RIGHT = functools.partial(attention, causal="bottom_right")
# (queries, keys): the diagonal inside of blocks and on their edges, far in, and with queries that see no key
LENGTHS = [(200, 330), (128, 256), (1, 300), (130, 600), (330, 200), (600, 130), (300, 1)]
# 16-bit results of float32 sums are this close to float64's, by norm; a key too many or too few is far beyond
CLOSE = 4e-3


def inputs(s: int, t: int, d: int = 64, dv: int | None = None) -> list[jax.Array]:
    rng = np.random.default_rng(s * 1000 + t)
    shapes = ((s, 2, d), (t, 1, d), (t, 1, dv or d), (s, 2, dv or d))
    return [jnp.asarray(rng.standard_normal((1, *shape)), jnp.bfloat16) for shape in shapes]


@pytest.mark.parametrize(("s", "t"), LENGTHS)
@pytest.mark.parametrize(
    "config",
    [
        None,
        AttentionConfig(block_kv=48, num_stages=2),
        AttentionConfig(block_kv=176, num_stages=1),
        sm100_default(64),
        Sm100Config(tile_k=64, kv_slots=2, pair=True),
    ],
    ids=lambda c: str(c and c.generation),
)
def test_forward(s: int, t: int, config: Any) -> None:
    q, k, v, _ = inputs(s, t)
    out, lse = BOTTOM_RIGHT(q, k, v, config=config, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, causal="bottom_right")
    assert reference.relative_error(out, expected) < CLOSE
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4, rtol=1e-5)
    assert not np.asarray(out, np.float32)[:, : max(s - t, 0)].any()  # they see no key


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("s", "t"), LENGTHS[:-1])  # of one key dQ and dK are zero: no norm to compare with
@pytest.mark.parametrize(("d", "config"), [(64, None), (128, None), (64, AttentionBackwardConfig(split=True))])
def test_backward(s: int, t: int, d: int, config: Any, deterministic: bool) -> None:
    q, k, v, d_out = inputs(s, t, d)
    call = functools.partial(BOTTOM_RIGHT, backward_config=config, deterministic=deterministic)
    found = jax.vjp(call, q, k, v)[1](d_out)
    zeros = np.zeros((1, 2, s))
    exact = reference.attention_gradients(q, k, v, d_out, zeros, causal="bottom_right", scale=d**-0.5)
    for x, y in zip(found, exact, strict=True):
        assert reference.relative_error(x, y) < CLOSE
    assert not np.asarray(found[0], np.float32)[:, : max(s - t, 0)].any()


@pytest.mark.parametrize(("s", "t"), LENGTHS)
def test_xlas(s: int, t: int) -> None:
    q, k, v, d_out = (x.astype(jnp.float32) for x in inputs(s, t))
    out, pull = jax.vjp(functools.partial(BOTTOM_RIGHT, implementation="xla"), q, k, v)
    assert reference.relative_error(out, reference.attention(q, k, v, causal="bottom_right")[0]) < 1e-5
    exact = reference.attention_gradients(q, k, v, d_out, np.zeros((1, 2, s)), causal="bottom_right", scale=0.125)
    for x, y in zip(pull(d_out), exact, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * max(np.abs(y).max(), 1.0))


def test_of_as_many_queries_as_keys_it_is_the_other_one() -> None:
    q, k, v, _ = inputs(200, 200)
    np.testing.assert_array_equal(BOTTOM_RIGHT(q, k, v), attention(q, k, v, causal=True))


@pytest.mark.parametrize("causal", ["top_left", 1, None])
def test_what_it_is_not(causal: Any) -> None:
    q, k, v, _ = inputs(8, 8)
    with pytest.raises(TypeError, match=f"causal={causal!r} is neither a bool nor 'bottom_right'"):
        attention(q, k, v, causal=causal)


@pytest.mark.parametrize(("s", "t"), [(1000, 4000), (4000, 1000), (777, 777)])
def test_tiles_are_handed_out_by_what_they_see(s: int, t: int) -> None:
    diagonal = last_key_of_query_0("bottom_right", s, t)
    table = tile_table(2, 3, 1, s, t, 128, 128, 64, diagonal, 7)
    seen = reference.visible(s, t, "bottom_right")
    steps = [max(-(-int(seen[m : m + 128].sum(1).max()) // 64), 1) for m in range(0, s, 128)]
    work = np.array([sum(TILE_OVERHEAD + steps[m] for m in column if m >= 0) for column in table[..., 2].T])
    assert work.max() - work.min() <= TILE_OVERHEAD + max(steps)


def test_a_tuned_config_is_for_both_diagonals() -> None:
    tunable, (q, k, v, _) = find_tunable("attention"), inputs(8, 8)
    assert tunable.workload_of(q, k, v, causal="bottom_right") == tunable.workload_of(q, k, v, causal=True)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_machine_code(kernel_plan: Any, compiled: Any, d: int, arch: str) -> None:
    """No spill and no message; lengths are run-time values."""

    def plan(s: int, t: int) -> Any:
        q, k = (jax.ShapeDtypeStruct((2, n, 4, d), jnp.bfloat16) for n in (s, t))
        config = None if arch == "sm_90a" else sm100_default(d)
        return kernel_plan(functools.partial(BOTTOM_RIGHT, config=config, return_lse=True), q, k, k, arch=arch)

    assert emit(plan(1000, 300)) == emit(plan(1, 5000))
    assert compiled(plan(1000, 300)).complaints() == []
