"""Attention on Blackwell: in the simulator by the accuracy rule of the Hopper kernel, under several schedules, and its SASS.

No Blackwell GPU has run it.  What is known is: the results of the plan in the simulator, that no schedule finds a race, and what
the compiler makes of it for sm_100a and sm_103a.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.sass import read_cubin
from mosaic_gpu.errors import IllegalInstruction, ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm100.attention import AttentionConfig, default_config
from mosaic_gpu.kernels.tiles import HEAD_DIMS
from mosaic_gpu.runtime.device import planning_for
from tests import support
from tests.kernels import closed_forms
from tests.support import plain_attention

BF, F16 = ml_dtypes.bfloat16, np.float16
SCHEDULES = (
    dict(),
    dict(timing="early"),
    dict(shadow="bytes"),
    dict(seed=1),
    dict(seed=2),
    dict(timing="early", seed=3),
)
randoms = functools.partial(support.randoms, dtype=BF)


def check(q, k, v, *, causal, config, scale=None):
    results = attention(*map(jnp.asarray, (q, k, v)), causal=causal, scale=scale, config=config, return_lse=True)
    found = np.asarray(results[0])
    expected, expected_lse = reference.attention(q, k, v, causal=causal, scale=scale)
    yardstick = plain_attention(q, k, v, causal, scale).astype(np.float64)
    rms = np.sqrt(np.mean(expected**2))
    allowed = max(2 * np.sqrt(np.mean((yardstick - expected) ** 2)), 1e-3 * rms)
    error = np.sqrt(np.mean((found.astype(np.float64) - expected) ** 2))
    assert found.shape == (*q.shape[:3], v.shape[3]) and found.dtype == q.dtype
    assert error <= allowed, f"rms error {error:.2e}, allowed {allowed:.2e}"
    assert np.abs(found.astype(np.float64) - expected).max() <= 0.05 * np.abs(expected).max(), "no element is far off"
    np.testing.assert_allclose(np.asarray(results[1]), expected_lse, rtol=1e-5, atol=1e-4)
    return found


def small(**options):
    return AttentionConfig(**{"tile_k": 64, "kv_slots": 2, **options})


@pytest.mark.parametrize(
    ("b", "s", "t", "h", "h_kv", "d", "dtype", "causal", "config"),
    [
        (1, 256, 256, 1, 1, 64, BF, False, default_config(64)),
        (1, 256, 384, 1, 1, 128, F16, False, default_config(128)),
        (2, 200, 300, 2, 1, 64, BF, False, small()),
        (1, 300, 500, 4, 2, 128, BF, True, default_config(128)),
        (1, 600, 600, 1, 1, 64, F16, True, small(kv_slots=3)),
        (1, 600, 520, 2, 2, 128, BF, True, small(tile_k=96, kv_slots=1)),
        (1, 513, 700, 1, 1, 64, BF, True, small(tile_k=32, kv_slots=4)),
        (1, 100, 100, 3, 1, 64, BF, False, small(persistent=False)),
        (1, 256, 500, 1, 1, 64, BF, False, small(rescale_threshold=0.0, correction_columns=64)),
        (1, 1, 1, 1, 1, 64, BF, True, small()),
        (1, 130, 16, 1, 1, 128, F16, False, small(correction_columns=16)),
        (1, 256, 512, 1, 1, 64, F16, False, small(tile_k=96, emulated_columns=64)),
    ],
)
def test_against_the_reference(b, s, t, h, h_kv, d, dtype, causal, config):
    """Tails of queries and keys, one block and many, grouped heads, both types and head dims, the diagonal, LSE, rings of every
    length, several tiles a block."""
    q, k, v = (randoms(b, n, x, d, dtype=dtype, seed=i) for i, (n, x) in enumerate(((s, h), (t, h_kv), (t, h_kv))))
    check(q, k, v, causal=causal, config=config)


@pytest.mark.parametrize(
    ("b", "s", "t", "h", "h_kv", "d", "dv", "dtype", "causal", "config"),
    [
        (1, 300, 450, 2, 1, 256, 256, BF, True, default_config(256)),
        (1, 300, 450, 1, 1, 192, 128, BF, True, default_config(192, 128)),
        (1, 200, 200, 1, 1, 192, 192, F16, False, default_config(192)),
        (1, 100, 150, 1, 1, 80, 48, F16, True, default_config(80, 48)),
        (1, 300, 200, 1, 1, 16, 16, BF, False, default_config(16)),
        (1, 300, 200, 2, 1, 8, 40, BF, False, default_config(8, 40)),
        (1, 200, 300, 1, 1, 120, 72, F16, True, default_config(120, 72)),
        (1, 400, 300, 1, 1, 72, 88, BF, True, small(pair=True, dynamic=False)),
        (1, 200, 300, 1, 1, 96, 240, BF, True, AttentionConfig(query_tiles=1, kv_slots=1)),
        (2, 400, 300, 2, 1, 64, 64, BF, True, small(query_tiles=1)),
        (1, 300, 300, 1, 1, 64, 64, F16, True, AttentionConfig(p_parts=4, emulated_columns=32)),
        (1, 300, 400, 1, 1, 128, 128, BF, False, AttentionConfig(p_parts=2, emulated_columns=96, query_tiles=1)),
        (1, 900, 700, 2, 1, 64, 64, BF, True, small(pair=True)),
        (1, 200, 100, 1, 1, 128, 64, F16, False, small(pair=True, p_parts=2, kv_slots=3)),
        (1, 1100, 300, 1, 1, 192, 128, BF, True, AttentionConfig(pair=True, tile_k=96)),
        (1, 600, 500, 2, 2, 256, 256, BF, True, AttentionConfig(pair=True, query_tiles=1, p_parts=2)),
        (1, 900, 300, 2, 1, 64, 64, BF, True, small(dynamic=True)),
        (1, 500, 300, 1, 1, 128, 256, F16, False, AttentionConfig(dynamic=True, query_tiles=1, tile_k=64)),
        (1, 1, 1, 1, 1, 32, 32, BF, True, small(pair=True, query_tiles=1, persistent=False)),
        (1, 1900, 300, 2, 1, 64, 64, BF, True, small(pair=True, dynamic=True)),
        (1, 500, 300, 1, 1, 192, 128, F16, False, AttentionConfig(pair=True, dynamic=True, query_tiles=1, p_parts=2)),
        (1, 1, 1, 1, 1, 32, 32, BF, True, small(pair=True, dynamic=True)),
    ],
)
def test_head_dims_pairs_and_parts(b, s, t, h, h_kv, d, dv, dtype, causal, config):
    """Head dims in chunks of every swizzle, another one for V, one query tile with two buffers of scores, probabilities in parts,
    pairs of blocks; each with tails, and most with several tiles a block."""
    q, k = randoms(b, s, h, d, dtype=dtype), randoms(b, t, h_kv, d, dtype=dtype, seed=1)
    check(q, k, randoms(b, t, h_kv, dv, dtype=dtype, seed=2), causal=causal, config=config)


def test_every_head_dim_has_a_default():
    """That fits, for each pair of multiples of 8."""
    for d in HEAD_DIMS:
        for dv in HEAD_DIMS:
            default_config(d, dv).check(d, dv)
    assert (default_config(128).query_tiles, default_config(256).query_tiles) == (2, 1)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_pairs_and_tiles_change_no_bit(d):
    """A pair computes what its blocks would compute by themselves, and of one query tile or two each row is the same.  (Parts are
    sums of their own.)"""
    q, k, v = randoms(1, 520, 1, d), randoms(1, 300, 1, d, seed=1), randoms(1, 300, 1, d, seed=2)
    base = dict(query_tiles=1, tile_k=64, kv_slots=1)
    first = check(q, k, v, causal=False, config=AttentionConfig(**base))
    for changed in (dict(pair=True), dict(query_tiles=2), dict(kv_slots=2)):
        if d == 256 and "query_tiles" in changed:
            continue
        c = AttentionConfig(**{**base, **changed})
        np.testing.assert_array_equal(check(q, k, v, causal=False, config=c), first, str(changed))


@pytest.mark.parametrize("causal", [False, True])
def test_loads_that_reduce(causal):
    """On sm_103a the load of the scores finds the maxima: the same bits as without."""
    q, k, v = randoms(1, 300, 1, 64), randoms(1, 400, 1, 64, seed=1), randoms(1, 400, 1, 64, seed=2)
    with planning_for(132, "sm_103a"):
        found = [check(q, k, v, causal=causal, config=small(load_reduces=x)) for x in (True, False)]
        assert default_config(64).load_reduces and default_config(64).emulated_columns == 0
    np.testing.assert_array_equal(*found)
    assert not default_config(64).load_reduces
    with pytest.raises(IllegalInstruction, match="sm_100a has no load with a reduction"):
        check(q, k, v, causal=causal, config=small(load_reduces=True))


def test_its_machine_code_for_sm_103a(plan_of, compiled):
    """Fewer maxima are computed in the loop without a mask: each load of 32 columns brings its own."""
    plain, reduced = (
        compiled(plan_of(128, AttentionConfig(load_reduces=x), causal=False, arch="sm_103a")) for x in (False, True)
    )
    assert reduced.complaints() == [] and reduced.mnemonics["LDTM"] == plain.mnemonics["LDTM"]
    maxima = [sum(n for name, n in r.mnemonics.items() if name.startswith("FMNMX")) for r in (plain, reduced)]
    assert maxima[0] - maxima[1] >= 128 // 2 - 8


def test_large_scores_are_rescaled():
    """Scores in the hundreds, which grow from block to block: every warp rescales, and does not lose what it had."""
    q, k, v = randoms(1, 256, 1, 64) * BF(20), randoms(1, 384, 1, 64, seed=1), randoms(1, 384, 1, 64, seed=2)
    ramp = np.linspace(3, 0.1, 384, dtype=np.float32).astype(BF)[None, :, None, None]
    check(q, k * ramp, v, causal=False, config=small(), scale=1.0)


def test_some_warps_rescale():
    """Rows whose maxima stay beside rows whose maxima grow: a warp that does not vote keeps its accumulator as it is."""
    q, k, v = randoms(1, 256, 1, 64), randoms(1, 256, 1, 64, seed=1), randoms(1, 256, 1, 64, seed=2)
    q[:, 32:64] *= BF(30)
    q[:, 200:210] *= BF(30)
    check(q, k, v, causal=False, config=small(), scale=1.0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("causal", "config"),
    [
        (False, small()),
        (True, small()),
        (True, small(query_tiles=1, p_parts=2)),
        (True, small(pair=True, p_parts=2)),
        (False, small(pair=True, query_tiles=1)),
        (True, small(dynamic=True)),
        (True, small(dynamic=True, pair=True, query_tiles=1)),
    ],
    ids=["full", "causal", "one tile", "pair", "pair of one tile", "launch control", "launch control of pairs"],
)
def test_every_schedule_gives_the_same(schedule, causal, config):
    """The same bits whatever the order of events, and nothing found: several tiles a block, rings shorter than the work."""
    q, k, v = randoms(1, 520, 2, 64), randoms(1, 400, 1, 64, seed=1), randoms(1, 400, 1, 64, seed=2)
    run = functools.partial(check, q, k, v, causal=causal, config=config)
    first = run()
    with plgpu.simulator_params(plgpu.SimulatorParams(**schedule)):
        np.testing.assert_array_equal(run(), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 101))
def test_a_hundred_schedules(seed):
    q, k, v = randoms(1, 300, 2, 64), randoms(1, 260, 1, 64, seed=1), randoms(1, 260, 1, 64, seed=2)
    with plgpu.simulator_params(plgpu.SimulatorParams(seed=seed)):
        options = dict(
            kv_slots=1 + seed % 3, query_tiles=1 + seed // 2 % 2, pair=bool(seed // 4 % 2), p_parts=1 + seed // 8 % 2
        )
        options["dynamic"] = bool(seed // 16 % 2)
        check(q, k, v, causal=bool(seed % 2), config=small(**options))


def test_what_it_has_not():
    q = jnp.zeros((1, 8, 1, 256), jnp.bfloat16)
    with pytest.raises(ResourceExceeded, match="2 x 256 of outputs take 768 columns of tensor memory.*query_tiles=1"):
        attention(q, q, q, config=AttentionConfig())
    q = jnp.zeros((1, 8, 1, 128), jnp.bfloat16)
    with pytest.raises(ResourceExceeded, match="tile_k=128 x 3 slots at head dim 128 take"):
        attention(q, q, q, config=AttentionConfig(kv_slots=3))
    q = jnp.zeros((1, 8, 1, 48), jnp.bfloat16)
    with pytest.raises(UnsupportedCall, match="head dim 48: with pair each block has half of V's 48 columns"):
        attention(q, q, q, config=AttentionConfig(pair=True))
    with pytest.raises(UnsupportedCall, match="head dim 20: the kernels have multiples of 8"):
        AttentionConfig().check(20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(query_tiles=3), r"query_tiles=3: one of \(1, 2\)"),
        (dict(p_parts=3), "p_parts=3: parts of tile_k=128 keys are multiples of 32"),
        (dict(tile_k=96, p_parts=2), "p_parts=2: parts of tile_k=96"),
        (dict(query_tiles=1, softmax_registers=160), "a block of 3 warpgroups is launched with 168 each"),
        (
            dict(query_tiles=1, softmax_registers=256, correction_registers=168, issue_registers=88),
            "the pool of 3 warpgroups has 504",
        ),
    ],
)
def test_configs_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


# ---- what the compiler makes of it -------------------------------------------------------------------------------------
@pytest.fixture
def plan_of(kernel_plan):
    def make(d, c, causal=True, lse=True, shape=(2, 4096, 8), arch="sm_100a", dtype=jnp.bfloat16, dv=None):
        b, s, h = shape
        x, v = (jax.ShapeDtypeStruct((b, s, h, n), dtype) for n in (d, dv or d))
        call = functools.partial(attention, causal=causal, config=c, return_lse=lse)
        with planning_for(132, arch):
            return kernel_plan(call, x, x, v, arch=arch)

    return make


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(
    ("d", "dv", "causal", "config"),
    [
        (64, 64, False, default_config(64)),
        (64, 64, True, default_config(64)),
        (128, 128, False, default_config(128)),
        (128, 128, True, default_config(128)),
        (64, 64, True, small(correction_columns=16)),
        (128, 128, True, small(tile_k=96, rescale_threshold=0.0)),
        (256, 256, True, default_config(256)),
        (192, 128, True, default_config(192, 128)),
        (80, 48, False, default_config(80, 48)),
        (128, 128, True, AttentionConfig(p_parts=4, emulated_columns=32)),
        (128, 128, False, AttentionConfig(pair=True, p_parts=2, kv_slots=4, emulated_columns=32)),
        (256, 256, True, AttentionConfig(pair=True, query_tiles=1, p_parts=2)),
        (128, 128, True, AttentionConfig(dynamic=True)),
        (128, 128, True, AttentionConfig(dynamic=True, pair=True, p_parts=2)),
    ],
    ids=str,
)
def test_machine_code(plan_of, compiled, arch, causal, d, dv, config):
    """No spill, no complaint, budgets kept; products and transfers, in all and loop by loop, as the config says."""
    plan = plan_of(d, config, causal, arch=arch, dv=dv)
    forms = closed_forms.Attention(config, d, dv, causal)
    closed_forms.check_code(plan, forms.whole(), forms.loops())
    assert sorted((b.kind, b.requested) for b in compiled(plan).budgets) == sorted(
        [
            ("increase", config.softmax_registers),
            ("decrease", config.correction_registers),
            ("decrease", config.issue_registers),
        ]
    )
    assert plan.tmem_pair is config.pair and ("tcgen05_mma_f16_ts<2>" in emit(plan)) == config.pair
    # Of a pair only the warps that ask pay for the cluster's scope, once a tile; no arrival in the loops does.
    kernel = emit(plan).rpartition('#line 1 "/mosaic_gpu/kernel.cu"')[2]
    scopes = (kernel.count("mbarrier_arrive_cluster_release("), kernel.count("mbarrier_wait_cluster("))
    assert scopes == ((2, 1) if config.dynamic and config.pair else (0, 0))


def test_products_are_issued_from_uniform_registers(plan_of):
    """At most 4 instructions from one product of a group to the next: a warp that parts would move every descriptor."""
    d, c = 128, default_config(128)
    (function,) = read_cubin(compile_cuda(emit(plan_of(d, c)), arch="sm_100a", name="/t.cu").cubin)
    at = function.find("UTCHMMA")
    gaps = sorted(b - a for a, b in zip(at, at[1:], strict=False))
    groups = 2 * 2 + 2 * 2
    within = gaps[: len(at) - groups]
    # Where a group of four begins, up to 10: the slot, with the guard of a division by a number of the caller's.
    assert max(within) <= 10 and sum(within) <= 4 * len(within), gaps


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_polynomials_instead_of_special_functions(plan_of, compiled, arch):
    """By default a quarter of the exponentials, on sm_103a none; each saves one special function in the loop without a mask."""
    c = default_config(64, arch=arch)
    assert c.emulated_columns == (32 if arch == "sm_100a" else 0)
    with_, without = (
        compiled(plan_of(64, AttentionConfig(kv_slots=4, emulated_columns=n), arch=arch)).mnemonics["MUFU"]
        for n in (32, 0)
    )
    assert without - with_ == 32


def test_the_config_knows_its_memory(plan_of):
    """What it says is what the plan takes."""
    pair = AttentionConfig(pair=True, query_tiles=1, p_parts=2)
    for d, dv, c in (
        (64, 64, default_config(64)),
        (128, 128, default_config(128)),
        (64, 64, small()),
        (192, 128, default_config(192, 128)),
        (80, 48, default_config(80, 48)),
        (256, 256, pair),
        (128, 128, AttentionConfig(dynamic=True)),
        (64, 64, small(dynamic=True, pair=True, query_tiles=1)),
    ):
        plan = plan_of(d, c, dv=dv)
        assert plan.shared_bytes == c.shared_bytes(d, dv)
        assert max(b.column + b.columns for b in plan.tmem.values()) == c.tmem_columns(d, dv)
        assert plan.tmem_columns == max(32, 1 << (c.tmem_columns(d, dv) - 1).bit_length())


def test_one_source_for_all_lengths(plan_of):
    """Lengths and head counts are run-time values: one cubin for a config and a mask."""
    c = default_config(64)
    sources = {emit(plan_of(64, c, shape=s)) for s in ((2, 4096, 8), (1, 8192, 16), (3, 1000, 2))}
    assert len(sources) == 1
