"""The dispatchers: implementations, fallbacks that are said once, configs of the wrong generation, tuned configs."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import DeviceMismatch, UnsupportedCall
from mosaic_gpu.kernels import attention as attention_dispatcher
from mosaic_gpu.kernels import dispatch, reference, xla
from mosaic_gpu.kernels import matmul as matmul_dispatcher
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.matmul import matmul
from mosaic_gpu.kernels.sm90 import attention as sm90
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig
from mosaic_gpu.kernels.sm90.matmul import MatmulConfig
from mosaic_gpu.kernels.sm100 import attention as sm100
from mosaic_gpu.kernels.sm100 import matmul as matmul100
from mosaic_gpu.runtime import device
from mosaic_gpu.tune import cache
from mosaic_gpu.tune.search import Store
from mosaic_gpu.tune.tunable import find_tunable


def random(*shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.fixture
def arrays():
    return random(2, 70, 4, 64), random(2, 50, 2, 64, seed=1), random(2, 50, 2, 64, seed=2)


@pytest.fixture
def on(monkeypatch):
    """on("sm_80"): the dispatchers see this GPU; kernels of ours then raise, as nothing could run them here."""

    def choose(arch):
        for module in (attention_dispatcher, matmul_dispatcher):
            monkeypatch.setattr(module, "default_arch", lambda: arch)
        dispatch._say_fallback.cache_clear()

    return choose


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dv", [64, 40])
def test_xla_is_right(arrays, causal, dv):
    arrays = *arrays[:2], arrays[2][..., :dv]
    out, lse = attention(*arrays, causal=causal, return_lse=True, implementation="xla")
    right, right_lse = reference.attention(*arrays, causal=causal)
    assert out.dtype == jnp.bfloat16 and reference.relative_error(out, right) < 1e-2
    np.testing.assert_allclose(lse, right_lse, atol=1e-2)
    ours = attention(*arrays, causal=causal, implementation="mosaic_gpu")
    assert reference.relative_error(ours, np.asarray(out, np.float64)) < 1e-2


def test_xla_of_queries_without_keys():
    q, k = random(1, 3, 1, 64), random(1, 0, 1, 64)
    out, lse = attention(q, k, k, return_lse=True, implementation="xla")
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_other_gpus_fall_back_and_say_so_once(arrays, on, caplog, arch):
    caplog.set_level(logging.WARNING, "mosaic_gpu")
    on(arch)
    for _ in range(2):
        np.testing.assert_array_equal(attention(*arrays), xla.attention(*arrays, causal=False, scale=0.125)[0])
    (record,) = caplog.records
    assert f"attention has no kernel for {arch}, XLA's runs instead" in record.getMessage()
    a, b = random(16, 64), random(64, 16)
    np.testing.assert_array_equal(matmul(a, b), xla.matmul(a, b))


def test_an_explicit_name_is_an_error_if_it_cannot(arrays, on):
    on("sm_80")
    with pytest.raises(UnsupportedCall, match="attention has no kernel for sm_80, only for sm90.*implementation='xla'"):
        attention(*arrays, implementation="mosaic_gpu")
    with pytest.raises(UnsupportedCall, match="matmul has no kernel for sm_80"):
        matmul(random(16, 64), random(64, 16), implementation="mosaic_gpu")
    on(None)
    odd = random(1, 8, 1, 68)
    with pytest.raises(UnsupportedCall, match="head dim 68: the kernels have"):
        attention(odd, odd, odd, implementation="mosaic_gpu")
    with pytest.raises(
        UnsupportedCall, match="head dim 68: the kernels have"
    ):  # only a GPU without a kernel falls back
        attention(odd, odd, odd)


def test_a_sequence_is_tried_in_order(arrays, on, monkeypatch):
    odd = random(1, 8, 1, 68)
    assert attention(odd, odd, odd, implementation=("mosaic_gpu", "xla")).shape == odd.shape
    ours = attention(*arrays, implementation=["mosaic_gpu", "xla"])
    np.testing.assert_array_equal(ours, attention(*arrays, implementation="mosaic_gpu"))
    on("sm_80")
    monkeypatch.setitem(dispatch.__dict__, "IMPLEMENTATIONS", ("mosaic_gpu", "xla", "never"))
    with pytest.raises(
        UnsupportedCall, match="none of mosaic_gpu, mosaic_gpu takes this call: mosaic_gpu: .*sm_80.*; mosaic_gpu"
    ):
        attention(*arrays, implementation=("mosaic_gpu", "mosaic_gpu"))


@pytest.mark.parametrize("wrong", ["cudnn", (), ("mosaic_gpu", "cudnn")])
def test_unknown_implementations(arrays, wrong):
    with pytest.raises(ValueError, match="it is None, or of mosaic_gpu, xla"):
        attention(*arrays, implementation=wrong)


def test_a_config_is_for_our_kernels(arrays, on):
    with pytest.raises(ValueError, match="config is for mosaic_gpu"):
        attention(*arrays, config=sm90.default_config(64), implementation="xla")
    a, b = random(16, 64), random(64, 16)
    on("sm_100a")
    with pytest.raises(DeviceMismatch, match="MatmulConfig is for sm90, this device is sm_100a"):
        matmul(a, b, config=MatmulConfig())
    on("sm_80")
    with pytest.raises(DeviceMismatch, match="is for sm90, this device is sm_80"):
        attention(*arrays, config=sm90.default_config(64))
    with pytest.raises(TypeError, match="not dict"):
        matmul(a, b, config={})


def test_without_a_gpu_any_config_runs_its_own_kernel():
    a, b = random(130, 72), random(72, 64, seed=1)
    right = reference.matmul(a, b)
    for config in (None, MatmulConfig(block_n=64, num_stages=2), matmul100.MatmulConfig(tile_n=64, num_slots=2)):
        assert reference.relative_error(matmul(a, b, config=config), right) < 1e-2


def test_the_dispatchers_take_tuned_and_overridden_configs(monkeypatch, tmp_path, on):
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cache, "repository_folder", lambda: tmp_path / "none")
    monkeypatch.setattr(device, "device_key", lambda: "nvidia_h200")
    q = jax.ShapeDtypeStruct((1, 4000, 8, 128), jnp.bfloat16)
    tunable = find_tunable("attention")
    wanted = sm90.AttentionConfig(block_kv=96)
    facts = {
        "name": "nvidia_h200",
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "memory_bytes": None,
        "power_limit_watts": None,
    }
    tools = dict.fromkeys(("driver", "cuda", "nvrtc", "mosaic_gpu", "jax"))
    Store(tmp_path, tunable, tunable.parse("b1s4000h8d128"), facts, tools, {}).add(
        [{"status": "ok", "seconds": 1e-3, "config": wanted.to_json()}]
    )
    assert attention_dispatcher.choose_config(q, q, q, False) == wanted
    with plgpu.override_config(sm90.AttentionConfig(block_kv=80)):
        assert attention_dispatcher.choose_config(q, q, q, False).block_kv == 80
    on("sm_100a")  # that file has none of Blackwell's
    assert attention_dispatcher.choose_config(q, q, q, False).generation == "sm100"


def test_requests_that_an_implementation_cannot_keep():
    """What the caller passed for one implementation or generation is not dropped by another."""
    q = random(1, 64, 1, 64)
    with pytest.raises(
        ValueError, match="AttentionBackwardConfig: a config is for mosaic_gpu, and implementation='xla' has none"
    ):
        attention(q, q, q, implementation="xla", backward_config=AttentionBackwardConfig())
    with pytest.raises(UnsupportedCall, match="backward_config with a config of sm100"):
        attention(q, q, q, config=sm100.AttentionConfig(), backward_config=AttentionBackwardConfig())
    with pytest.raises(ValueError, match=r"implementation=\(\); it is None, or of mosaic_gpu, xla$"):
        attention(q, q, q, implementation=())


def test_gradients_on_blackwell_are_refused_by_name():
    q = random(1, 64, 1, 64)

    def loss(q):
        return attention(q, q, q, config=sm100.AttentionConfig()).astype(jnp.float32).sum()

    with pytest.raises(UnsupportedCall, match="no gradients on Blackwell yet; implementation='xla' has them"):
        jax.grad(loss)(q)


@pytest.mark.parametrize(
    ("d", "config"),
    [
        (64, AttentionBackwardConfig(compute_registers=192, memory_registers=40, dq_registers=64)),
        (192, AttentionBackwardConfig(split=True, num_stages=3)),
    ],
)
def test_deterministic_takes_every_config_that_fits(d, config):
    """Its kernel of dQ has budgets of its own, and as many of the stages as it has room for."""
    q = random(1, 64, 1, d)

    def loss(deterministic, q):
        return attention(q, q, q, deterministic=deterministic, backward_config=config).astype(jnp.float32).sum()

    found, other = (jax.grad(functools.partial(loss, deterministic))(q) for deterministic in (True, False))
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(other, np.float32), atol=2e-2)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: attention(x, x, x), UnsupportedCall),
        (lambda x: attention(x, x, x, causal=3), TypeError),
        (lambda x: matmul(x, x), UnsupportedCall),
        (lambda x: matmul100.scaled_matmul(x, x, x, x), UnsupportedCall),
    ],
)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_what_a_call_is_refused_for_has_its_line(call, kind, jit):
    with pytest.raises(kind) as e:
        jit(call)(jnp.ones((8, 12), jnp.float32))
    assert (e.value.line.file, e.value.line.number) == (__file__, call.__code__.co_firstlineno)
