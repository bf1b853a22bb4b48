"""Attention without the maximum (`use_stable_softmax=False`) on Hopper and by XLA: against float64, what happens out of range,
machine code, and who refuses it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.kernels import attention as dispatcher
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90 import attention as sm90
from mosaic_gpu.kernels.sm90.attention import AttentionConfig
from mosaic_gpu.kernels.sm100.attention import AttentionConfig as Sm100Config
from tests import support
from tests.kernels import gradient_judge
from tests.kernels.variants import THREE

BF, F16 = ml_dtypes.bfloat16, np.float16
randoms = functools.partial(support.randoms, dtype=BF)
unstable = functools.partial(attention, use_stable_softmax=False)


def given(s, t, h=1, h_kv=1, d=64, dv=None, dtype=BF, b=1):
    shapes = (b, s, h, d), (b, t, h_kv, d), (b, t, h_kv, dv or d)
    return [randoms(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def plain(q, k, v, causal):
    """Attention in float32 without a maximum, whose probabilities and results are rounded to the inputs' type."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = (np.asarray(x).astype(np.float32).transpose(0, 2, 1, 3) for x in (q, k, v))
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * np.float32(q.shape[-1] ** -0.5)
    p = np.exp(np.where(reference.visible(q.shape[2], k.shape[2], causal), scores, -np.inf))
    out = p.astype(dtype).astype(np.float32) @ v / np.maximum(p.sum(-1, keepdims=True), 1e-30)
    return out.transpose(0, 2, 1, 3).astype(dtype).astype(np.float64)


def check(q, k, v, *, causal=False, lse_digits=1e-5, **options):
    """At most twice the error of `plain`, the accuracy rule of all kernels (test_attention.py)."""
    out, lse = unstable(*map(jnp.asarray, (q, k, v)), causal=causal, return_lse=True, **options)
    exact, exact_lse = reference.attention(q, k, v, causal=causal)
    found, rms = np.asarray(out).astype(np.float64), np.sqrt(np.mean(exact**2))
    allowed = max(2 * np.sqrt(np.mean((plain(q, k, v, causal) - exact) ** 2)), 1e-3 * rms)
    error = np.sqrt(np.mean((found - exact) ** 2))
    assert out.shape == exact.shape and out.dtype == q.dtype
    assert error <= allowed, f"rms error {error:.2e}, allowed {allowed:.2e}"
    np.testing.assert_allclose(np.asarray(lse), exact_lse, rtol=lse_digits, atol=10 * lse_digits)
    return np.asarray(out)


def small(keys=64, stages=2, **options):
    return AttentionConfig(block_kv=keys, num_stages=stages, **options)


@pytest.mark.parametrize(
    ("shape", "dtype", "causal", "config"),
    [
        (dict(s=128, t=128), BF, False, small()),
        (dict(s=128, t=192), F16, False, small()),
        (dict(b=2, s=200, t=300, h=2), BF, False, small(rescale_threshold=0.0)),
        (dict(s=256, t=256), BF, True, small()),
        (dict(s=130, t=100), F16, True, small(keys=128)),
        (dict(s=100, t=300), BF, True, small(keys=48, stages=3)),
        (dict(s=200, t=90), BF, "bottom_right", small()),  # queries that see no key
        (dict(s=300, t=333, h=4, h_kv=2), F16, True, small(keys=80, take_turns=False)),
        (dict(s=400, t=333, h=2), BF, "bottom_right", None),
        (dict(s=200, t=130, d=128), BF, False, small(q_in_registers=True)),
        (dict(s=200, t=230, h=2, d=192, dv=128), BF, True, small()),
        (dict(s=200, t=230, h=2, d=72), BF, True, small()),
        (dict(s=65, t=70, d=256), F16, True, sm90.default_config(256)),
        (dict(s=1, t=1), BF, False, small(stages=1)),
    ],
)
def test_against_the_reference(shape, dtype, causal, config):
    check(*given(**shape, dtype=dtype), causal=causal, config=config)


@pytest.mark.parametrize(
    ("d", "config"),
    [(64, small(sum_by_product=True, **THREE)), (128, small(sum_by_product=True, q_in_registers=True))],
)
@pytest.mark.parametrize("dtype", [BF, F16])
def test_sums_by_products(d, config, dtype):
    """Rounded to 16 bits as the probabilities are, and so is the log-sum-exp."""
    check(*given(300, 200, 2, 1, d, dtype=dtype), causal=True, config=config, lse_digits=1e-3)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_schedule(seed):
    arrays = given(300, 333, 2)
    first = check(*arrays, causal=True, config=small())
    with plgpu.simulator_params(plgpu.SimulatorParams(seed=seed)):
        np.testing.assert_array_equal(check(*arrays, causal=True, config=small()), first)


@pytest.mark.parametrize("causal", [False, True])
def test_xlas(causal):
    check(*given(100, 90, 4, 2), causal=causal, implementation="xla")


def test_a_bias_and_a_mask_by_xla():
    q, k, v = given(100, 90, 2)
    bias = randoms(1, 2, 100, 90, dtype=np.float32, seed=4)
    mask = randoms(1, 1, 100, 90, dtype=np.float32, seed=5) > 0
    mask[:, :, 7] = False
    more = dict(bias=jnp.asarray(bias), mask=jnp.asarray(mask), implementation="xla", return_lse=True)
    out, lse = unstable(*map(jnp.asarray, (q, k, v)), **more)
    exact, exact_lse = reference.attention(q, k, v, bias=bias, mask=mask)
    assert reference.relative_error(out, exact) < 4e-3
    np.testing.assert_allclose(np.asarray(lse), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("lse_counts", [False, True])
def test_gradients(causal, lse_counts):
    """Of the kernels, which start from the log-sum-exp: as good as with a maximum, by the same judge."""
    q, k, v = given(150, 200, 2, 1)
    d_out, d_lse = randoms(1, 150, 2, 64, seed=7), randoms(1, 2, 150, dtype=np.float32, seed=8) * np.float32(lse_counts)
    call = functools.partial(unstable, causal=causal, return_lse=True)
    (out, _), pull = jax.vjp(call, *map(jnp.asarray, (q, k, v)))
    found = pull((jnp.asarray(d_out), jnp.asarray(d_lse)))
    options = dict(causal=causal, scale=64**-0.5)
    exact = reference.attention_gradients(q, k, v, d_out, d_lse, **options)
    yardstick = reference.attention_gradients(q, k, v, d_out, d_lse, **options, rounded=True)
    for error, allowed in reference.gradient_errors(found, exact, yardstick):
        assert error <= allowed, f"rms error {error:.2e}, allowed {allowed:.2e}"
    gradient_judge.judge(found, (q, k, v, d_out, d_lse), out, causal, 64**-0.5)


def test_gradients_by_xla():
    """Rows that see nothing have gradients of zero, not NaN."""
    q, k, v = (jnp.asarray(x, jnp.float32) for x in given(40, 24, 2, 1, 16))

    def total(use_stable_softmax, q, k, v):
        more = dict(causal="bottom_right", implementation="xla", return_lse=True)
        out, lse = attention(q, k, v, use_stable_softmax=use_stable_softmax, **more)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum() + jnp.where(lse > -1e9, lse, 0).sum()

    found, wanted = (jax.grad(total, argnums=(1, 2, 3))(stable, q, k, v) for stable in (False, True))
    for x, y in zip(found, wanted, strict=True):
        assert np.isfinite(np.asarray(x)).all()
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-5)


# ---- out of range ----------------------------------------------------------------------------------------------------
def of_scores(score, dtype, s=128, t=64):
    """Rows of which every second one has a scaled score of so much with key 3, and none above 1 else; scale 1."""
    q, k, v = np.zeros((1, s, 1, 64)), np.zeros((1, t, 1, 64)), randoms(1, t, 1, 64, dtype=dtype)
    k[:, 3, :, 0], k[:, 5, :, 1] = 1, 1
    q[:, ::2, :, 0], q[:, 1::2, :, 1] = score, 1
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


@pytest.mark.parametrize("sum_by_product", [False, True])
@pytest.mark.parametrize(("score", "dtype", "in_float32"), [(96, BF, False), (12, F16, True), (96, F16, False)])
def test_too_large(score, dtype, in_float32, sum_by_product):
    """Only rows with such a score are inf or NaN, none quietly wrong; with a maximum there is nothing about them."""
    arrays = of_scores(score, dtype)
    more = dict(scale=1.0, return_lse=True, config=small(sum_by_product=sum_by_product))
    out, lse = (np.asarray(x).astype(np.float64) for x in unstable(*arrays, **more))
    exact, exact_lse = reference.attention(*map(np.asarray, arrays), scale=1.0)
    assert not np.isfinite(out[:, ::2]).any()
    assert reference.relative_error(out[:, 1::2], exact[:, 1::2]) < 4e-3
    np.testing.assert_allclose(lse[..., 1::2], exact_lse[..., 1::2], rtol=2e-3)
    if in_float32 and not sum_by_product:  # its exponentials are summed before they are rounded
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)
    else:
        assert not np.isfinite(lse[..., ::2]).any()
    stable = np.asarray(attention(*arrays, **more)[0]).astype(np.float64)
    assert reference.relative_error(stable, exact) < 4e-3


@pytest.mark.parametrize("score", [96, 12])
def test_too_large_for_xla(score):
    """It rounds what is divided already, so that float16 is no matter."""
    arrays = of_scores(score, F16)
    out, lse = (np.asarray(x) for x in unstable(*arrays, scale=1.0, return_lse=True, implementation="xla"))
    assert np.isfinite(out[:, 1::2]).all() and np.isfinite(lse[..., 1::2]).all()
    assert np.isfinite(out).all() == np.isfinite(lse).all() == (score == 12)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_too_small(implementation):
    """Rows all of whose exponentials vanish are like those that see no key."""
    q, k, v = randoms(1, 128, 1, 64), np.ones((1, 64, 1, 64), BF), randoms(1, 64, 1, 64, seed=2)
    q[:, ::2] = BF(-2)  # scores of -128
    config = small() if implementation == "mosaic_gpu" else None
    more = dict(scale=1.0, return_lse=True, config=config, implementation=implementation)
    out, lse = (np.asarray(x) for x in unstable(*map(jnp.asarray, (q, k, v)), **more))
    assert not out[:, ::2].any() and (lse[..., ::2] == -np.inf).all()
    assert np.isfinite(lse[..., 1::2]).all() and out[:, 1::2].any()


# ---- what is compiled, and who takes it ------------------------------------------------------------------------------
def plan_of(kernel_plan, d, stable=False, t=256, dtype=jnp.bfloat16, **options):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, d), dtype) for n in (256, t))
    call = functools.partial(attention, use_stable_softmax=stable, **options)
    return kernel_plan(call, q, k, k)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_machine_code(kernel_plan, compiled, d, causal, lse):
    """No spills, budgets kept; a main loop without maximum, exchange and vote, of fewer instructions."""
    config = sm90.default_config(d)
    plans = [plan_of(kernel_plan, d, stable=x, causal=causal, return_lse=lse, config=config) for x in (False, True)]
    found = compiled(plans[0])
    assert found.complaints() == [] and found.stack == 0 and found.local_accesses == 0
    assert max(b.needed for b in found.budgets if b.kind == "increase") <= config.compute_registers
    ours, stable = map(loops, plans)
    for (products, length, mnemonics), (others_products, others_length, others) in zip(ours, stable, strict=True):
        assert products == others_products and length < 0.8 * others_length
        assert not {"FMNMX", "VOTE", "SHFL"} & mnemonics and {"FMNMX", "SHFL", "VOTE"} <= others


def loops(plan):
    """(products, instructions, mnemonics) of each loop with products."""
    (function,) = sass.read_cubin(compile_plan(plan).compiled.cubin)
    return [
        (count, len(loop.body), {function.instructions[i].mnemonic for i in loop.body})
        for loop, count in function.loops_with()
    ]


def test_a_source_of_its_own(kernel_plan):
    assert emit(plan_of(kernel_plan, 64)) != emit(plan_of(kernel_plan, 64, stable=True))
    assert emit(plan_of(kernel_plan, 64, t=512)) == emit(plan_of(kernel_plan, 64, t=256))


def test_the_config_is_the_same(monkeypatch):
    taken = []

    def record(q, k, v, *, config, stable, **_):
        taken.append((config, stable))
        return (jnp.zeros_like(q),)

    monkeypatch.setattr(sm90, "attention", record)
    x = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    for flag in (True, False):
        attention(x, x, x, use_stable_softmax=flag)
    assert taken == [(taken[0][0], True), (taken[0][0], False)]


def test_blackwell_refuses(monkeypatch):
    x = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    with pytest.raises(UnsupportedCall, match="Blackwell's kernel always subtracts the row's maximum; leave it out"):
        unstable(x, x, x, config=Sm100Config())
    monkeypatch.setattr(dispatcher, "default_arch", lambda: "sm_100a")
    with pytest.raises(UnsupportedCall, match="implementation='xla'"):
        unstable(x, x, x)
    assert unstable(x, x, x, implementation=("mosaic_gpu", "xla")).shape == x.shape


def test_an_argument_of_another_type():
    x = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    with pytest.raises(TypeError, match="use_stable_softmax=1 is no bool"):
        attention(x, x, x, use_stable_softmax=1)
