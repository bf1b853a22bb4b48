"""Attention on Hopper: in the simulator against the reference by the accuracy rule, one cubin for all lengths, SASS.

The accuracy rule: the error against float32 is at most twice that of plain attention in float32 from the same rounded
inputs with P rounded to the type, with a floor of 1e-3 of the output's rms.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.cubin_cache import cached_compile, compile_count, forget
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import DeviceMismatch, ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels import attention as dispatcher
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90 import attention as sm90
from mosaic_gpu.kernels.sm90.attention import AttentionConfig
from mosaic_gpu.kernels.sm100.attention import AttentionConfig as Sm100Config
from mosaic_gpu.kernels.tiles import HEAD_DIMS, chunk, columns_of
from tests import support
from tests.support import plain_attention

BF, F16 = ml_dtypes.bfloat16, np.float16
randoms = functools.partial(support.randoms, dtype=BF)


def check(q, k, v, *, causal=False, scale=None, config=None, lse=False):
    results = attention(*map(jnp.asarray, (q, k, v)), causal=causal, scale=scale, config=config, return_lse=lse)
    found = np.asarray(results[0] if lse else results)
    assert found.shape == (*q.shape[:-1], v.shape[-1]) and found.dtype == q.dtype
    expected, expected_lse = reference.attention(q, k, v, causal=causal, scale=scale)
    yardstick = plain_attention(q, k, v, causal, scale).astype(np.float64)
    rms = np.sqrt(np.mean(expected**2))
    allowed = max(2 * np.sqrt(np.mean((yardstick - expected) ** 2)), 1e-3 * rms)
    error = np.sqrt(np.mean((found.astype(np.float64) - expected) ** 2))
    assert error <= allowed, f"rms error {error:.2e}, allowed {allowed:.2e}"
    assert np.abs(found.astype(np.float64) - expected).max() <= 0.05 * np.abs(expected).max(), (
        "and no element is far off"
    )
    if lse:
        rounded = config is not None and config.sum_by_product  # the sums are then of P in 16 bits
        rtol, atol = (1e-3, 2e-3) if rounded else (1e-5, 1e-4)
        np.testing.assert_allclose(np.asarray(results[1]), expected_lse, rtol=rtol, atol=atol)


def small(d, keys=64, stages=2, **options):
    return AttentionConfig(block_kv=keys, num_stages=stages, **options)


@pytest.mark.parametrize(
    ("b", "s", "t", "h", "h_kv", "d", "dtype", "causal", "config"),
    [
        (1, 128, 128, 1, 1, 64, BF, False, small(64)),
        (1, 128, 192, 1, 1, 64, F16, False, small(64)),
        (2, 200, 300, 2, 1, 64, BF, False, small(64)),
        (1, 256, 256, 1, 1, 64, BF, True, small(64)),
        (1, 200, 200, 2, 2, 64, F16, True, small(64, stages=3)),
        (1, 130, 100, 1, 1, 64, BF, True, small(64, keys=128)),
        (1, 100, 300, 1, 1, 64, BF, True, small(64, keys=48)),
        (1, 500, 500, 1, 1, 128, BF, True, small(128, keys=176, output_tile=False)),  # wider than the tile is high
        (2, 300, 333, 4, 2, 64, F16, True, small(64, keys=80, sum_by_product=True)),
        (1, 200, 130, 1, 1, 128, BF, False, small(128, sum_by_product=True, q_in_registers=True)),
        (1, 128, 256, 4, 2, 128, BF, False, small(128)),
        (1, 128, 160, 1, 1, 128, F16, True, small(128, keys=32, stages=4)),
        (1, 128, 128, 1, 1, 256, BF, False, sm90.default_config(256)),
        (1, 65, 70, 1, 1, 256, F16, True, sm90.default_config(256)),
        (1, 1, 1, 1, 1, 64, BF, False, small(64)),
        (1, 64, 16, 1, 1, 64, BF, False, small(64, stages=1)),
        (1, 128, 256, 1, 1, 64, BF, False, small(64, take_turns=False)),
    ],
)
def test_against_the_reference(b, s, t, h, h_kv, d, dtype, causal, config):
    """Tails of queries and keys, one block and many, grouped heads, both types, all head dims, the diagonal, LSE."""
    q, k, v = (
        randoms(b, s, h, d, dtype=dtype),
        randoms(b, t, h_kv, d, dtype=dtype, seed=1),
        randoms(b, t, h_kv, d, dtype=dtype, seed=2),
    )
    check(q, k, v, causal=causal, config=config, lse=True)


EVENS = [(16, 16), (32, 32), (80, 80), (96, 96), (192, 128), (64, 128), (240, 240)]
ODD_EIGHTHS = [(8, 8), (72, 72), (40, 120), (248, 200)]  # tiles have columns beside them


@pytest.mark.parametrize(("d", "dv"), EVENS + ODD_EIGHTHS)
def test_head_dims(d, dv):
    """Multiples of 8, of V another than of Q and K."""
    q, k, v = randoms(1, 200, 2, d), randoms(1, 230, 1, d, seed=1), randoms(1, 230, 1, dv, seed=2)
    check(q, k, v, causal=True, lse=True)


def test_without_lse_and_with_a_scale():
    q, k, v = randoms(1, 128, 1, 64), randoms(1, 128, 1, 64, seed=1), randoms(1, 128, 1, 64, seed=2)
    check(q, k, v, scale=0.3, config=small(64))


def test_large_scores():
    """Scores in the hundreds: the running maximum keeps exponentials in range."""
    q, k, v = randoms(1, 128, 1, 64) * BF(20), randoms(1, 192, 1, 64, seed=1), randoms(1, 192, 1, 64, seed=2)
    check(q, k, v, scale=1.0, config=small(64), lse=True)


def test_leading_dimensions_and_defaults():
    """Any number of batch dimensions, none too; no config takes the default."""
    q = randoms(130, 2, 64)
    k, v = randoms(140, 1, 64, seed=1), randoms(140, 1, 64, seed=2)
    one = attention(*map(jnp.asarray, (q, k, v)))
    stacked = attention(*(jnp.asarray(np.broadcast_to(x, (1, 2, *x.shape))) for x in (q, k, v)))
    assert one.shape == q.shape and stacked.shape == (1, 2, *q.shape)
    np.testing.assert_array_equal(np.asarray(stacked[0, 1]), np.asarray(one))


def test_under_jit():
    q = randoms(1, 128, 1, 64)
    f = functools.partial(attention, config=small(64), causal=True)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(q, q, q)), np.asarray(f(*map(jnp.asarray, (q, q, q)))))


@pytest.mark.parametrize(("s", "t"), [(0, 8), (8, 0)])
def test_zero_length(s, t):
    """No query: nothing. No key: zeros, and an LSE of -inf."""
    q, k = jnp.ones((2, s, 2, 64), jnp.bfloat16), jnp.ones((2, t, 1, 64), jnp.bfloat16)
    out, lse = attention(q, k, k, return_lse=True)
    assert out.shape == q.shape and not np.asarray(out).any() and lse.shape == (2, 2, s)
    assert (np.asarray(lse) == -np.inf).all()
    assert attention(q, k, k).shape == q.shape


# ---- bad inputs ------------------------------------------------------------------------------------------------------
def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


X = zeros(1, 8, 2, 64)


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "words"),
    [
        (zeros(8, 64), X, X, {}, r"q has shape \(8, 64\); it takes \(..., length, heads, head dim\)"),
        (
            X,
            zeros(1, 8, 2, 64, dtype=jnp.float16),
            X,
            {},
            "q bfloat16, k float16, v bfloat16: all float16 or all bfloat16",
        ),
        (*[zeros(1, 8, 2, 64, dtype=jnp.float32)] * 3, {}, "all float16 or all bfloat16"),
        (
            *[zeros(1, 8, 2, 68)] * 3,
            {},
            r"head dim 68: the kernels have multiples of 8 from 8 to 256; pad with zeros .q and k: and pass scale., "
            "or take implementation='xla'",
        ),
        (zeros(1, 8, 3, 64), X, X, {}, "3 query heads over 2 KV heads: 3 is not a multiple of 2"),
        (X, zeros(1, 8, 0, 64), zeros(1, 8, 0, 64), {}, "over 0 KV heads"),
        (X, X, zeros(1, 9, 2, 64), {}, "k and v must be alike"),
        (zeros(2, 8, 2, 64), X, X, {}, "share batch"),
        (X, zeros(1, 8, 2, 128), zeros(1, 8, 2, 128), {}, "k also its head dim with q"),
        (X, X, X, dict(scale=0.0), "scale=0.0; it must be positive"),
        (X, X, X, dict(scale=-1.0), "scale=-1.0; it must be positive"),
        (X, X, X, dict(scale=float("nan")), "scale=nan; it must be positive"),
    ],
)
def test_bad_inputs(q, k, v, options, words):
    with pytest.raises(UnsupportedCall, match=words):
        attention(q, k, v, **options)


# ---- configs ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AttentionConfig(block_kv=24), "block_kv=24: a multiple of 16 from 16 to 256"),
        (lambda: AttentionConfig(block_kv=272), "block_kv=272"),
        (lambda: AttentionConfig(num_stages=0), "num_stages=0: at least 1"),
        (
            lambda: AttentionConfig(compute_registers=240, memory_registers=32),
            "= 512 registers; the pool of .* warpgroups has 504",
        ),
        (lambda: AttentionConfig(compute_registers=236), "236 registers: a multiple of 8"),
        (lambda: Sm100Config(tile_k=24), "tile_k=24"),
        (lambda: Sm100Config(kv_slots=0), "kv_slots=0"),
        (lambda: Sm100Config(tile_k=160), "the keys of a row that a thread holds"),
        (lambda: Sm100Config(softmax_registers=100), "100 registers"),
        (lambda: Sm100Config(softmax_registers=200), "= 528 registers; the pool of 4 warpgroups has 512"),
        (lambda: Sm100Config(softmax_registers=120), "is launched with 128 each"),
        (lambda: Sm100Config(rescale_threshold=9.0), "so that P stays below 2\\^8"),
        (lambda: Sm100Config(correction_columns=48), "16, 32 or 64"),
        (lambda: Sm100Config(emulated_columns=128), "to below tile_k=128"),
    ],
)
def test_bad_configs(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_configs_that_do_not_fit_a_head_dim():
    q = zeros(1, 8, 1, 256)
    with pytest.raises(
        ResourceExceeded, match="block_kv=128 x 2 stages at head dim 256 take .* bytes of shared memory"
    ):
        attention(q, q, q, config=AttentionConfig(block_kv=128))
    with pytest.raises(ResourceExceeded, match="needs about .* registers, compute_registers is 160"):
        attention(X, X, X, config=AttentionConfig(block_kv=192, compute_registers=160))


@pytest.mark.parametrize("config", [AttentionConfig(block_kv=176, take_turns=False), Sm100Config(tile_k=64)])
def test_json_round_trip_keeps_the_tag(config):
    data = config.to_json()
    assert (data["generation"], data["kernel"]) == (config.generation, "attention")
    again = type(config).from_json(data)
    assert again == config and type(again) is type(config)
    other = Sm100Config if isinstance(config, AttentionConfig) else AttentionConfig
    with pytest.raises(
        ValueError,
        match=f"a config of attention for {config.generation}; AttentionConfig is for attention on {other.generation}",
    ):
        other.from_json(data)
    with pytest.raises(ValueError, match="has no field colour"):
        type(config).from_json({**data, "colour": 1})
    with pytest.raises(ValueError):
        type(config).from_json({k: v for k, v in data.items() if k != "generation"})


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("block_kv", "64", "int"),
        ("num_stages", None, "int"),
        ("num_stages", True, "int"),
        ("take_turns", "yes", "bool"),
        ("rescale_threshold", "8", "float"),
        ("output_tile", 1, "bool or None"),
    ],
)
def test_a_config_field_of_another_type(field, value, wanted):
    """A config comes from JSON that people write: the field is named before its value reaches a comparison."""
    data = AttentionConfig().to_json()
    assert AttentionConfig.from_json({**data, "rescale_threshold": 8}).rescale_threshold == 8.0
    with pytest.raises(ValueError, match=f"{field}={value!r} is not of type {wanted}$"):
        AttentionConfig.from_json({**data, field: value})


def test_generations_have_disjoint_types():
    assert AttentionConfig is not Sm100Config
    assert not issubclass(AttentionConfig, Sm100Config) and not issubclass(Sm100Config, AttentionConfig)
    assert AttentionConfig.generation != Sm100Config.generation


def test_the_dispatcher_goes_by_type(monkeypatch):
    """Another type is a TypeError; another generation than the device's a DeviceMismatch that names both."""
    with pytest.raises(TypeError, match="not dict"):
        attention(X, X, X, config=dict(block_kv=64))
    monkeypatch.setattr(dispatcher, "default_arch", lambda: "sm_100a")
    with pytest.raises(DeviceMismatch, match="AttentionConfig is for sm90, this device is sm_100a"):
        attention(X, X, X, config=AttentionConfig())
    monkeypatch.setattr(dispatcher, "default_arch", lambda: "sm_90a")
    with pytest.raises(DeviceMismatch, match="is for sm100, this device is sm_90a"):
        attention(X, X, X, config=Sm100Config())


def test_default_configs(monkeypatch):
    """By the device's generation, and every default fits its head dim."""
    for d, dv, length, causal in itertools.product(HEAD_DIMS, HEAD_DIMS, (512, None), (False, True)):
        sm90.default_config(d, dv, length, causal).check(d, dv)
    assert dispatcher.choose_config(X, X, X, False) == sm90.default_config(64, length=X.shape[1])
    monkeypatch.setattr(dispatcher, "default_arch", lambda: "sm_100a")
    assert isinstance(dispatcher.choose_config(X, X, X, False), Sm100Config)


# ---- what is compiled ------------------------------------------------------------------------------------------------
@pytest.fixture
def plan_of(kernel_plan):
    def make(b=1, s=256, t=256, h=2, h_kv=2, d=128, dv=None, config=None, causal=False, lse=False, dtype=jnp.bfloat16):
        dv = dv or d
        q, k = jax.ShapeDtypeStruct((b, s, h, d), dtype), jax.ShapeDtypeStruct((b, t, h_kv, d), dtype)
        v = jax.ShapeDtypeStruct((b, t, h_kv, dv), dtype)
        call = functools.partial(attention, causal=causal, return_lse=lse, config=config or sm90.default_config(d, dv))
        return kernel_plan(call, q, k, v)

    return make


SHAPES = [dict(), dict(s=1000, t=777), dict(b=7), dict(h=16, h_kv=4), dict(h=8, h_kv=1, s=1), dict(b=3, s=100000, t=5)]


@pytest.mark.parametrize("features", [dict(), dict(causal=True), dict(lse=True)], ids=str)
def test_one_source_for_all_shapes(plan_of, features):
    """Lengths, batch, heads and groups are run-time values of one cubin per config and features; without a diagonal, of one
    for lengths that end with a whole block of keys, which has no mask, and one for the others."""
    whole, tails = (
        {emit(plan_of(**s, **features)) for s in SHAPES if (s.get("t", 256) % 128 != 0) is x} for x in (False, True)
    )
    assert len(whole) == len(tails) == 1 and (whole == tails) == ("causal" in features)


def test_features_have_sources_of_their_own(plan_of):
    variants = [
        dict(),
        dict(causal=True),
        dict(lse=True),
        dict(d=64),
        dict(dtype=jnp.float16),
        dict(config=AttentionConfig(block_kv=64)),
    ]
    assert len({emit(plan_of(**v)) for v in variants}) == len(variants)


def test_the_cache_compiles_once_for_all_shapes(plan_of, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_CACHE_DIR", str(tmp_path))
    forget()
    before = compile_count()
    config = AttentionConfig(block_kv=16, num_stages=1)
    for shape in SHAPES:
        cached_compile(emit(plan_of(**shape, d=64, causal=True, config=config)), arch="sm_90a", name="attention.cu")
    assert compile_count() - before == 1


@pytest.mark.parametrize(("d", "dv"), ODD_EIGHTHS)
def test_columns_beside_a_head_dim(plan_of, compiled, d, dv):
    """What is computed is that of the next multiple of 16; TMA fills in what is not there, chunk by chunk."""
    wide, wide_dv = columns_of(d), columns_of(dv)
    found = compiled(plan_of(d=d, dv=dv, causal=True, lse=True))
    whole = compiled(plan_of(d=wide, dv=wide_dv, causal=True, lse=True))
    assert found.complaints() == []
    for name in ("HGMMA", "MUFU", "LDSM", "STSM"):
        assert found.mnemonics.get(name) == whole.mnemonics.get(name), name
    loads = sm90.default_config(d, dv).compute_warpgroups + 2  # Q of each warpgroup; a tile's first K, and the others
    copies = loads * wide // chunk(wide) + 2 * wide_dv // chunk(wide_dv)
    assert found.mnemonics["UTMALDG"] == copies and whole.mnemonics["UTMALDG"] == loads + 2


@pytest.mark.parametrize(
    ("features", "loops"),
    [
        (dict(), 1),
        (dict(causal=True), 1),
        (dict(d=64, causal=True, lse=True), 2),
        (dict(d=256, causal=True), 2),
    ],
    ids=str,
)
def test_machine_code(plan_of, compiled, features, loops):
    """The main loop once for all compute warpgroups (a masked one beside it where more blocks touch the diagonal)."""
    plan = plan_of(**features)
    report = compiled(plan)
    assert report.complaints() == [] and report.stack == 0 and report.local_accesses == 0
    c = sm90.default_config(features.get("d", 128))
    products = features.get("d", 128) // 16 + c.block_kv // 16
    assert [loop.products for loop in report.loops] == [products] * loops
    budgets = {("increase", c.compute_registers), ("decrease", c.memory_registers)}
    assert {(b.kind, b.requested) for b in report.budgets} == budgets
    assert max(b.needed for b in report.budgets if b.kind == "increase") <= c.compute_registers
    assert report.entry_registers == {3: 168, 4: 128}[c.compute_warpgroups + 1]
    assert report.mnemonics["MUFU"] > 0 and report.dynamic_shared == 0


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_softmax_runs_under_the_product(plan_of, d):
    """In the steady loop the maximum is known before the wait for P V, which ptxas would else put right behind the scores'."""
    (function,) = sass.read_cubin(compile_plan(plan_of(d=d)).compiled.cubin)
    loop, _ = min(function.loops_with(), key=lambda found: len(found[0].body))
    code = [function.instructions[i] for i in sorted(loop.body)]
    scores, values = (k for k, i in enumerate(code) if i.opcode.startswith("WARPGROUP.DEPBAR"))
    maximum = [k for k, i in enumerate(code) if i.mnemonic == "FMNMX"]
    assert sum(k < values for k in maximum) >= 0.9 * len(maximum) > 0 and scores < maximum[len(maximum) // 2]


def test_the_config_knows_its_shared_memory(plan_of):
    """What it says is what the plan takes, but for what aligns the buffers."""
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (80, 80)):
        c = sm90.default_config(d, dv)
        for config in (c, dataclasses.replace(c, block_kv=64, sum_by_product=dv < 256)):
            assert abs(plan_of(d=d, dv=dv, config=config).shared_bytes - config.shared_bytes(d, dv)) < 1024


def test_the_log_sum_exp_is_exact_unless_a_config_asks_otherwise():
    """The default sums rounded probabilities by a product; whoever wants the log-sum-exp gets float32 sums."""
    q, k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((1, 96, 1, 64)), BF) for i in range(3))
    exact = reference.attention(q, k, v)[1]
    default = sm90.default_config(64, length=96)
    assert default.sum_by_product
    errors = [
        np.abs(np.asarray(attention(q, k, v, return_lse=True, config=c)[1]) - exact).max() for c in (None, default)
    ]
    assert errors[0] < 1e-5 < errors[1] < 2**-8


@pytest.mark.parametrize(
    "options",
    [{"return_lse": "x"}, {"deterministic": 1}, {"causal": "no"}, {"backward_config": AttentionConfig()}],
    ids=lambda o: next(iter(o)),
)
def test_arguments_of_another_type(options):
    with pytest.raises(TypeError, match=f"attention: {next(iter(options))}"):
        attention(X, X, X, **options)
