"""Attention with a bias and a mask: Blackwell's kernel in the simulator and compiled, XLA's, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import ResourceExceeded, UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90.attention import AttentionConfig as HopperConfig
from mosaic_gpu.kernels.sm100.attention import AttentionConfig, default_config
from mosaic_gpu.kernels.tiles import HEAD_DIMS
from mosaic_gpu.runtime.device import planning_for
from tests.kernels import closed_forms
from tests.support import randoms

BF, F16 = ml_dtypes.bfloat16, np.float16
SCHEDULES = (dict(timing="early"), dict(shadow="bytes"), dict(seed=1), dict(seed=2), dict(timing="early", seed=3))


def small(**options):
    return AttentionConfig(**{"tile_k": 64, "kv_slots": 2, **options})


def given(b, s, t, h, h_kv, d, dv, bias, mask, dtype=BF, seed=0):
    """Arrays; bias, mask: shapes, or None.  Some queries see no key at all."""
    sizes = ((s, h, d), (t, h_kv, d), (t, h_kv, dv))
    arrays = [randoms(b, *x, dtype=dtype, seed=seed + i) for i, x in enumerate(sizes)]
    bias = None if bias is None else 2 * randoms(*bias, seed=seed + 3).astype(np.float32)
    mask = None if mask is None else np.random.default_rng(seed + 4).random(mask) < 0.7
    if mask is not None and mask.shape[2] > 3:
        mask[:, :, 3] = False
    return arrays, bias, mask


def check(arrays, bias, mask, *, causal, config=None, implementation=None):
    call = functools.partial(attention, causal=causal, config=config, implementation=implementation, return_lse=True)
    more = {name: jnp.asarray(x) for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    out, lse = map(np.asarray, call(*map(jnp.asarray, arrays), **more))
    rounded = None if bias is None else bias.astype(arrays[0].dtype)  # as the kernel has it
    exact, exact_lse = reference.attention(
        *arrays, causal=causal, bias=rounded if implementation is None else bias, mask=mask
    )
    assert out.dtype == arrays[0].dtype and out.shape == exact.shape
    assert reference.relative_error(out, exact) < (4e-3 if out.dtype == BF else 6e-4)
    hidden = ~np.isfinite(exact_lse)
    np.testing.assert_array_equal(lse[hidden], exact_lse[hidden])
    np.testing.assert_allclose(lse[~hidden], exact_lse[~hidden], rtol=1e-5, atol=1e-4)
    assert not out.transpose(0, 2, 1, 3)[hidden].any(), "a query that sees no key gives zeros"
    return out


CASES = [
    (1, 300, 400, 2, 1, 64, 64, (1, 2, 300, 400), None, BF, False, small()),
    (2, 200, 303, 2, 1, 64, 64, (1, 1, 200, 303), (2, 1, 1, 303), BF, True, small(kv_slots=3)),
    (2, 260, 300, 2, 2, 128, 64, None, (2, 2, 260, 300), F16, False, default_config(128, 64, bias=True)),
    (1, 130, 500, 3, 1, 64, 128, (1, 3, 1, 500), (1, 1, 130, 500), BF, False, small(tile_k=96, rescale_threshold=0.0)),
    (1, 700, 333, 1, 1, 128, 128, (1, 1, 700, 333), None, BF, True, AttentionConfig(pair=True, p_parts=2)),
    (1, 600, 200, 2, 1, 64, 64, (1, 2, 600, 200), None, F16, True, small(pair=True, query_tiles=1)),
    (1, 200, 300, 1, 1, 256, 256, (1, 1, 200, 300), None, BF, True, default_config(256, bias=True)),
    (1, 100, 40, 1, 1, 80, 48, (1, 1, 100, 40), None, BF, "bottom_right", small(emulated_columns=32)),
    (1, 1, 1, 1, 1, 64, 64, (1, 1, 1, 1), (1, 1, 1, 1), BF, False, small(persistent=False)),
]


@pytest.mark.parametrize(("b", "s", "t", "h", "h_kv", "d", "dv", "bias", "mask", "dtype", "causal", "config"), CASES)
def test_against_the_reference(b, s, t, h, h_kv, d, dv, bias, mask, dtype, causal, config):
    """Of each head or of all, of each query or of all; masks that hide all keys of a query; with the diagonal, tails, grouped
    heads, pairs, one query tile and two; and XLA's of the same arrays."""
    arrays = given(b, s, t, h, h_kv, d, dv, bias, mask, dtype)
    check(*arrays, causal=causal, config=config)
    check(*arrays, causal=causal, implementation="xla")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "config", [small(), small(pair=True, p_parts=2), small(query_tiles=1)], ids=["two tiles", "pair", "one tile"]
)
def test_every_schedule_gives_the_same(schedule, config):
    arrays = given(1, 520, 400, 2, 1, 64, 64, (1, 2, 520, 400), None)
    first = check(*arrays, causal=True, config=config)
    with plgpu.simulator_params(plgpu.SimulatorParams(**schedule)):
        np.testing.assert_array_equal(check(*arrays, causal=True, config=config), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 101))
def test_a_hundred_schedules(seed):
    options = dict(
        kv_slots=1 + seed % 3, query_tiles=1 + seed // 2 % 2, pair=bool(seed // 4 % 2), p_parts=1 + seed // 8 % 2
    )
    arrays = given(1, 300, 260, 2, 1, 64, 64, (1, 1, 300, 260), (1, 2, 1, 260), seed=seed)
    with plgpu.simulator_params(plgpu.SimulatorParams(seed=seed)):
        check(*arrays, causal=bool(seed % 2), config=small(**options))


def test_batches_jit_and_vmap():
    """Batch dimensions are those of q, one of extent 1 stands for all; the same bits each way."""
    arrays, bias, _ = given(2, 200, 300, 2, 1, 64, 64, (1, 2, 200, 300), None)
    q, k, v = map(jnp.asarray, arrays)
    call, bias = functools.partial(attention, config=small()), jnp.asarray(bias, BF)
    plain, every = np.asarray(call(q, k, v, bias=bias)), jnp.broadcast_to(bias, (2, 2, 200, 300))
    more = [x[None] for x in (q, k, v)]
    each = jax.vmap(lambda q, k, v, bias: call(q, k, v, bias=bias))(*(x[:, None] for x in (q, k, v, every)))
    for found in (
        jax.jit(call)(q, k, v, bias=bias),
        call(q, k, v, bias=every),
        call(*more, bias=bias[None])[0],
        call(*more, bias=every[None])[0],
        each[:, 0],
    ):
        np.testing.assert_array_equal(np.asarray(found), plain)


@pytest.mark.parametrize("low", [-1e4, -1e9, -3e38, -np.inf])
def test_large_negative_values_hide_keys(low):
    """What is written for a mask: a block of keys behind the end, the first that is visited, and single ones; and rows of nothing
    but such values are no NaN."""
    arrays, _, _ = given(1, 200, 300, 1, 1, 64, 64, None, None)
    hidden = np.zeros((1, 1, 200, 300), bool)
    hidden[..., 180:] = True
    hidden[:, :, ::3, 7:90] = True
    hidden[:, :, 5] = True
    more = dict(bias=jnp.asarray(np.where(hidden, np.float32(low), 0)), config=small())
    out = np.asarray(attention(*map(jnp.asarray, arrays), **more)).astype(np.float32)
    exact, _ = reference.attention(*arrays, mask=~hidden)
    seen = ~hidden[0, 0].all(1)
    assert reference.relative_error(out[:, seen], exact[:, seen]) < 4e-3 and np.isfinite(out).all()


@pytest.mark.parametrize(("arch", "keys"), [("sm_100a", 4096), ("sm_103a", 4088)])
@pytest.mark.parametrize(
    ("d", "causal", "options"),
    [
        (64, False, {}),
        (64, True, {}),
        (128, False, {}),
        (256, True, {}),
        (128, True, dict(pair=True, p_parts=2)),
        (128, False, dict(query_tiles=1, tile_k=96)),
    ],
)
def test_machine_code(kernel_plan, arch, keys, d, causal, options):
    """No spill, budgets kept, loads in their loop, one fma more for each score; and the memory that the config says."""
    c = AttentionConfig(**options) if options else default_config(d, arch=arch, bias=True)
    x, y = (jax.ShapeDtypeStruct((2, n, 8, d), BF) for n in (4096, keys))
    bias = jax.ShapeDtypeStruct((1, 8, 4096, keys), BF)
    call = functools.partial(attention, causal=causal, config=c, return_lse=True)
    with planning_for(132, arch):
        plan = kernel_plan(lambda q, k, v, bias: call(q, k, v, bias=bias), x, y, y, bias, arch=arch)
    forms = closed_forms.Attention(c, d, d, causal, keys)
    closed_forms.check_code(plan, forms.whole(), forms.loops())
    assert plan.shared_bytes == c.shared_bytes(d, d, bias=True)


def test_every_head_dim_has_a_default():
    for d in HEAD_DIMS:
        for dv in HEAD_DIMS:
            default_config(d, dv, bias=True).check(d, dv, bias=True)


def test_xla_has_gradients_of_a_bias():
    arrays, bias, mask = given(1, 12, 16, 2, 1, 8, 8, (1, 2, 1, 16), (1, 1, 12, 16))
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays)

    def total(bias):
        return attention(q, k, v, bias=bias, mask=jnp.asarray(mask), implementation="xla").sum()

    slope = jax.grad(total)(jnp.asarray(bias))
    step = 1e-2 * randoms(*bias.shape, seed=7)
    difference = total(jnp.asarray(bias + step)) - total(jnp.asarray(bias - step))
    np.testing.assert_allclose(float((slope * step).sum() * 2), float(difference), rtol=2e-2)


Q = jnp.zeros((2, 8, 4, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(bias=jnp.zeros((4, 8, 8))), UnsupportedCall, r"bias has shape \(4, 8, 8\); it takes \(2, 4, 8, 8\)"),
        (dict(bias=jnp.zeros((2, 4, 8, 1))), UnsupportedCall, "any extent but the last may be 1"),
        (dict(bias=jnp.zeros((2, 2, 8, 8))), UnsupportedCall, r"bias has shape \(2, 2, 8, 8\)"),
        (dict(bias=jnp.zeros((2, 4, 8, 8), jnp.int32)), UnsupportedCall, "bias is int32; it takes a floating array"),
        (dict(mask=jnp.zeros((2, 4, 8, 8))), UnsupportedCall, "mask is float32; it takes a bool array"),
        (dict(mask=3), TypeError, "mask is an array, not 3"),
        (dict(bias=jnp.zeros((1, 1, 8, 8)), config=HopperConfig()), UnsupportedCall, "Hopper's kernel takes no bias"),
        (dict(mask=jnp.ones((1, 1, 8, 8), bool), config=small(dynamic=True)), UnsupportedCall, "take dynamic=False"),
        (
            dict(bias=jnp.zeros((1, 1, 8, 8)), config=AttentionConfig(kv_slots=4)),
            ResourceExceeded,
            "bias 0|bias 65536",
        ),
    ],
)
def test_what_is_refused(arguments, error, words):
    wide = jnp.zeros((2, 8, 4, 128), jnp.bfloat16) if error is ResourceExceeded else Q
    with pytest.raises(error, match=words):
        attention(wide, wide, wide, **arguments)


def test_no_gradients_on_blackwell():
    bias = jnp.zeros((1, 1, 8, 8), jnp.bfloat16)
    with pytest.raises(UnsupportedCall, match="implementation='xla' has them"):
        jax.grad(lambda x: attention(Q, Q, Q, bias=x, config=small()).astype(jnp.float32).sum())(bias)


@pytest.mark.parametrize(("arch", "slots"), [("sm_100a", (2, 64)), ("sm_90a", None)])
def test_which_config(arch, slots, monkeypatch):
    """On Blackwell one that has room, whatever was tuned; Hopper refuses, or hands over to XLA's where that may be."""
    from mosaic_gpu.kernels import attention as module
    from mosaic_gpu.kernels.sm100 import attention as sm100

    taken = []

    def record(q, k, v, bias, *, config, **_):
        taken.append((config, bias.shape))
        return (jnp.zeros_like(q),)

    monkeypatch.setattr(module, "default_arch", lambda: arch)
    monkeypatch.setattr(sm100, "attention", record)
    x, bias = jnp.zeros((1, 8, 2, 128), jnp.bfloat16), jnp.zeros((1, 1, 1, 8))
    if slots:
        attention(x, x, x, bias=bias)
        ((config, shape),) = taken
        assert (config.query_tiles, config.tile_k) == slots and shape == (1, 1, 8, 8)
        return
    with pytest.raises(UnsupportedCall, match="Hopper's kernel takes no bias"):
        attention(x, x, x, bias=bias)
    assert attention(x, x, x, bias=bias, implementation=("mosaic_gpu", "xla")).shape == x.shape
