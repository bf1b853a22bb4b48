"""Attention with a bias as a workload of its own: its key, what it takes from caches, how it is asked for, what is timed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import ResourceExceeded
from mosaic_gpu.kernels import attention as dispatcher
from mosaic_gpu.kernels.sm90.attention_config import default_config as default90
from mosaic_gpu.kernels.sm100 import attention as sm100
from mosaic_gpu.kernels.sm100.attention_config import AttentionConfig, default_config
from mosaic_gpu.plan.resources import SHARED_LIMIT
from mosaic_gpu.runtime import device
from mosaic_gpu.tune.chip import H200
from mosaic_gpu.tune.search import Store
from mosaic_gpu.tune.shapes import workloads
from mosaic_gpu.tune.space import config_from
from mosaic_gpu.tune.tunable import find_tunable

B200 = "nvidia_b200"
TUNABLE = find_tunable("attention", "sm100")
Q = jnp.zeros((1, 512, 2, 128), jnp.bfloat16)
BIAS = jax.ShapeDtypeStruct((1, 2, 512, 512), jnp.float32)
MASK = jax.ShapeDtypeStruct((1, 2, 512, 512), jnp.bool_)
TUNED = {"": AttentionConfig(kv_slots=3, tile_k=64), " bias": AttentionConfig(kv_slots=1, tile_k=96)}


@pytest.fixture
def b200(monkeypatch, folder, fakes):
    """A machine whose cache has one config for calls without a bias, and put(config) that adds one for those with."""
    monkeypatch.setattr(device, "device_key", lambda: B200)
    for module in (device, dispatcher):
        monkeypatch.setattr(module, "default_arch", lambda: "sm_100a")

    def put(text, config):
        (w,) = workloads(TUNABLE, [f"b1s512h2d128 full{text}"], dtype="bfloat16", causal=None)
        s = Store(folder, TUNABLE, w, {**fakes.DEVICE, "name": B200}, fakes.TOOLCHAIN, fakes.PROTOCOL)
        s.add([{"status": "ok", "seconds": 1e-3, "config": config.to_json()}])

    put("", TUNED[""])
    return lambda config: put(" bias", config)


def explained(**more):
    return plgpu.explain_config("attention", Q, Q, Q, **more)


def test_only_what_was_tuned_with_a_bias(b200):
    """And the other way round; a mask is a bias."""
    assert (explained().config, explained().match) == (TUNED[""], "exact")
    before = explained(bias=BIAS)
    assert (before.source, before.config) == ("heuristic", default_config(128, bias=True)) and before.key[
        "bias"
    ] is True
    assert "bias=True" in str(before) and "bias" not in explained().key
    b200(TUNED[" bias"])
    for more in (dict(bias=BIAS), dict(mask=MASK), dict(bias=BIAS, mask=MASK)):
        found = explained(**more)
        assert (found.config, found.match, found.source) == (TUNED[" bias"], "exact", "user")
    assert explained().config == TUNED[""]
    assert explained(bias=BIAS, causal=True).distance == 2.0


def test_without_room_for_a_bias(b200):
    """A tuned config that is none for this call is said and not taken."""
    b200(AttentionConfig(kv_slots=4))
    found = explained(bias=BIAS)
    assert found.source == "heuristic" and "is none of today's kernel" in found.notes[0]


def test_what_takes_no_bias_at_all(b200):
    """Nor one that another error refuses, which is no ValueError."""
    b200(AttentionConfig(kv_slots=2, tile_k=64, dynamic=True))
    found = explained(bias=BIAS)
    assert found.source == "heuristic" and "take dynamic=False" in found.notes[0]


def test_what_a_call_takes(b200, monkeypatch):
    taken = []

    def record(q, *arrays, config, **_):
        taken.append(config)
        return (jnp.zeros_like(q),)

    monkeypatch.setattr(sm100, "attention", record)
    b200(TUNED[" bias"])
    bias = jnp.zeros(BIAS.shape)
    for more in ({}, dict(bias=bias), dict(mask=bias > 0)):
        dispatcher.attention(Q, Q, Q, **more)
    with plgpu.override_config(AttentionConfig(tile_k=32)):
        dispatcher.attention(Q, Q, Q, bias=bias)
    assert taken == [TUNED[""], TUNED[" bias"], TUNED[" bias"], AttentionConfig(tile_k=32)]


def test_on_hopper():
    """A key, a default and candidates of its own; what has no room for a bias is none of them."""
    before = explained(bias=BIAS)
    assert before.config == default90(128, bias=True) != explained().config and before.key["bias"] is True
    tunable = find_tunable("attention", "sm90")
    for shape in ("s4096h16d64", "s4096h16d128", "s4096h16d256"):
        (w,) = workloads(tunable, [f"{shape} causal bias"], dtype="bfloat16", causal=None)
        (plain,) = workloads(tunable, [f"{shape} causal"], dtype="bfloat16", causal=None)
        with_bias, without = ({c for c in tunable.valid()[0] if tunable._fits(x, c)} for x in (w, plain))
        assert with_bias < without and tunable.default(w) in with_bias
        assert all(tunable.cost(w, c, H200) > tunable.cost(plain, c, H200) for c in with_bias)
        for c in with_bias:
            assert c.shared_bytes(w.head_dim, bias=True) <= SHARED_LIMIT
    with pytest.raises(ResourceExceeded, match="at head dim 256 and a bias take .* bytes of shared memory"):
        tunable.fits(w, config_from("attention", "sm90", {"block_kv": 80}))


def test_how_it_is_asked_for():
    (w,) = workloads(TUNABLE, ["b2s256h4kv2d64 causal bias"], dtype="bfloat16", causal=None)
    assert w.bias and w.causal and str(w).endswith(" bias") and w.bias_shape == (1, 4, 256, 256)
    assert TUNABLE.workload(w.to_json()) == w and w.to_json()["bias"] is True
    (plain,) = workloads(TUNABLE, ["b2s256h4kv2d64 causal"], dtype="bfloat16", causal=None)
    assert "bias" not in {**plain.to_json(), **TUNABLE.key(plain)} and TUNABLE.workload(plain.to_json()) == plain
    assert w.bytes == plain.bytes + 2 * 4 * 256 * 256 and w.flops == plain.flops
    assert len(workloads(TUNABLE, ["s256 bias"], dtype="bfloat16", causal=None)) == 2  # both masks
    for kernel, generation in (("attention_backward", "sm90"), ("matmul", "sm100")):
        shape = "m64n64k64" if kernel == "matmul" else "s256"
        with pytest.raises(ValueError, match=f"{kernel} takes no bias: shape '{shape} bias'"):
            workloads(find_tunable(kernel, generation), [f"{shape} bias"], dtype="bfloat16", causal=None)


def test_every_candidate_has_room():
    (w,) = workloads(TUNABLE, ["s4096h16d128 full bias"], dtype="bfloat16", causal=None)
    (plain,) = workloads(TUNABLE, ["s4096h16d128 full"], dtype="bfloat16", causal=None)
    with_bias, without = ({c for c in TUNABLE.valid()[0] if TUNABLE._fits(x, c)} for x in (w, plain))
    assert (
        with_bias < without and not any(c.dynamic for c in with_bias) and TUNABLE.default(w) != TUNABLE.default(plain)
    )
    for c in with_bias:
        c.check(128, 128, bias=True)
    with pytest.raises(ResourceExceeded, match="bias 65536"):
        TUNABLE.fits(w, AttentionConfig(kv_slots=4))


@pytest.mark.parametrize(("generation", "fields"), [("sm100", {"tile_k": 64}), ("sm90", {"block_kv": 64})])
def test_what_is_timed_is_judged_with_it(generation, fields):
    """The call, its arrays and the judge: right with the bias, and wrong without."""
    tunable = find_tunable("attention", generation)
    w = tunable.parse("b1s200t136h2d64", bias=True)
    arrays = tunable.inputs(w, 3)
    assert [x.shape for x in arrays] == [*w.shapes, w.bias_shape]
    judge = tunable.judge(w, arrays)
    config = config_from("attention", generation, fields)
    assert judge.accepts(judge.error(tunable.call(w, config)(*arrays)))
    plain = tunable.parse("b1s200t136h2d64")
    assert not judge.accepts(judge.error(tunable.call(plain, config)(*arrays[:3])))
    assert judge.accepts(judge.error(tunable.peers(w)["jax.nn xla"](*arrays)))
