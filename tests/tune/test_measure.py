"""Shapes, grids, judges and timing, without a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.tune import space
from mosaic_gpu.tune.accuracy import FLOOR, Judge, plain_attention
from mosaic_gpu.tune.measure import AttentionBench, input_sets, random_inputs, sets_for, timed
from mosaic_gpu.tune.workload import Attention, Matmul

SMALL = Attention.parse("b1s130h4kv2d64", causal=True)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("b4s4096h16d128", "b4 s4096 h16 d128"),
        ("s4096 d64", "b1 s4096 h32 d64"),
        ("b2s8192h32kv8d128", "b2 s8192 h32/8 d128"),
        ("b1 s128 t4096 h8 d256", "b1 s128 t4096 h8 d256"),
    ],
)
def test_shapes(text, shown):
    assert str(Attention.parse(text)) == shown


@pytest.mark.parametrize("text", ["", "s", "s4s5", "q4", "b4", "s4,d3", "s-4"])
def test_bad_shapes(text):
    with pytest.raises(ValueError, match="write it like"):
        Attention.parse(text)
    with pytest.raises(ValueError, match="m4096n4096k4096"):
        Matmul.parse(text)


@pytest.mark.parametrize("text", ["s128h6kv4", "s128h4kv8"])
def test_heads_that_cannot_be_shared(text):
    with pytest.raises(ValueError, match="query heads cannot share"):
        Attention.parse(text)


@pytest.mark.parametrize("text", ["s128h4kv0", "b0s1", "s2147483648"])
def test_sizes_that_cannot_be(text):
    with pytest.raises(ValueError, match=r"must be from 1 to 2\*\*31 - 1"):
        Attention.parse(text)


def test_operations():
    full, causal = (Attention.parse("b2s1024h4d64", causal=c) for c in (False, True))
    assert full.flops == 4 * 2 * 1024 * 1024 * 4 * 64 == 2 * causal.flops
    ragged = Attention.parse("b1s3t5h1d1", causal=True)
    assert ragged.flops == 4 * (1 + 2 + 3)
    assert Attention.parse("b1s5t3h1d1", causal=True).flops == 4 * (1 + 2 + 3 + 3 + 3)


def test_keys_are_buckets_of_lengths():
    keys = {Attention.parse(t, causal=True).key for t in ("b1s4096h4d64", "b8s2049h32d64", "b2s4000h8kv2d64")}
    assert len(keys) == 1
    others = ("b1s4097h4d64", "b1s4096t8192h4d64", "b1s4096h4d128")
    assert keys.isdisjoint(Attention.parse(t, causal=True).key for t in others)
    assert Attention.parse("s4096h4d64", dtype="f16", causal=True).key not in keys
    assert Attention.parse("s4096h4d64").key not in keys


@pytest.mark.parametrize("kernel, generation", [("attention", "sm90"), ("attention", "sm100")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_grids(kernel, generation, head_dim):
    made = space.config_class(kernel, generation)
    names = {f.name for f in dataclasses.fields(made)}
    assert all(set(grid) <= names for grid in space.GRIDS[generation, kernel])
    if (generation, head_dim) == ("sm100", 256):
        with pytest.raises(UnsupportedCall, match="head dim 256: the Blackwell kernel has"):
            space.candidates(kernel, generation, head_dim)
        return
    found = space.candidates(kernel, generation, head_dim)
    assert found[0] == space.default_config(kernel, generation, head_dim) and len(set(found)) == len(found) > 4
    for config in found:
        assert made.from_json(config.to_json()) == config
        if hasattr(config, "check"):
            config.check(head_dim)


def test_configs_from_json():
    assert space.config_from("attention", "sm90", {"block_kv": 64}).block_kv == 64
    with pytest.raises(ValueError, match="nonsense"):
        space.config_from("attention", "sm90", {"nonsense": 1})
    with pytest.raises(ValueError, match="sm100"):
        space.config_from("attention", "sm90", {"generation": "sm100"})
    with pytest.raises(UnsupportedCall):
        space.config_class("nothing", "sm90")
    with pytest.raises(UnsupportedCall):
        space.candidates("matmul", "sm90", 64)


@pytest.mark.parametrize("causal", [False, True])
def test_the_judge_agrees_with_the_reference(causal):
    q, k, v = random_inputs(dataclasses.replace(SMALL, causal=causal), 1)
    right, _ = reference.attention(q, k, v, causal=causal)
    plain, _ = plain_attention(q, k, v, causal, 64**-0.5)
    np.testing.assert_allclose(plain, right, rtol=1e-4, atol=1e-5)
    judge = Judge.of(q, k, v, causal=causal)
    assert FLOOR <= judge.allowed < 1e-2
    rounded = jnp.asarray(right).astype(jnp.bfloat16)
    assert judge.accepts(judge.error(rounded))
    assert not judge.accepts(judge.error(rounded * 1.01))
    assert not judge.accepts(judge.error(rounded.at[0, 0, 0, 0].set(jnp.nan)))
    assert not judge.accepts(judge.error(rounded.at[0, 64:].set(0)))


def test_inputs_rotate_through_more_than_the_cache():
    assert sets_for(Attention.parse("b4s4096h16d128")) == 2
    assert sets_for(Attention.parse("b1s4096h16d128")) * 3 * 2 * 4096 * 2048 > 120e6
    small = input_sets(dataclasses.replace(SMALL, length=16, kv_length=16), 0)
    assert len({np.asarray(q).tobytes() for q, _, _ in small}) == len(small) == 32


def test_timing_takes_the_median_and_counts_calls():
    calls = []

    def enqueue():
        calls.append(1)
        return jnp.zeros(())

    assert 0 < timed(enqueue, 4, at_least=1e-9, repeats=3) < 1
    assert len(calls) >= 6


@pytest.fixture
def few_sets(monkeypatch):
    monkeypatch.setattr("mosaic_gpu.tune.measure.MOST_SETS", 2)
    monkeypatch.setattr("mosaic_gpu.tune.measure.timed", lambda enqueue, calls: 1e-3)


def test_a_bench_in_the_simulator(few_sets):
    bench = AttentionBench(dataclasses.replace(SMALL, heads=1, kv_heads=1), 5)
    result = bench.measure(space.default_config("attention", "sm90", 64))
    assert result.status == "ok" and result.seconds == 1e-3 and result.error <= result.allowed
    too_big = space.config_from("attention", "sm90", {"block_kv": 256, "num_stages": 8})
    refused = bench.measure(too_big)
    assert refused.status == "refused" and "bytes of shared" in refused.message


def test_wrong_and_racy_results_are_not_timed(few_sets):
    bench = AttentionBench(SMALL, 5)
    assert bench.measure_call(lambda q, k, v: q * 0).status == "wrong"
    state = iter(range(100))

    def racy(q, k, v):  # each trace, and so each compiled program, gives another last bit
        return bench.judge.reference * (1 + 1e-4 * next(state))

    result = bench.measure_call(racy)
    assert result.status == "wrong" and "race" in result.message


def test_an_error_that_is_not_ours_ends_it(few_sets, monkeypatch):
    def broken(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr("mosaic_gpu.kernels.attention.attention", broken)
    with pytest.raises(jax.errors.JaxRuntimeError):
        AttentionBench(SMALL, 5).measure(None)
