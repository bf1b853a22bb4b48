"""Shapes, grids, judges and timing, without a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mosaic_gpu.bench.protocols import sets_for
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.tune import space
from mosaic_gpu.tune.accuracy import FLOOR, Judge, plain_attention
from mosaic_gpu.tune.chip import B200, B300, H200
from mosaic_gpu.tune.measure import AttentionBench, GpuTimer, input_sets, random_inputs, timed
from mosaic_gpu.tune.space import points
from mosaic_gpu.tune.tunable import find_tunable
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


@pytest.mark.parametrize("kernel", ["attention", "matmul"])
@pytest.mark.parametrize("generation", ["sm90", "sm100"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_spaces(kernel, generation, head_dim):
    """Candidates are valid, different, of the right type, by rising estimate, and have the default among them."""
    t = find_tunable(kernel, generation)
    w = t.parse({"attention": f"b4s4096d{head_dim}", "matmul": f"m4096n4096k{head_dim}"}[kernel])
    found = t.candidates(w, H200)
    assert t.default(w) in found and len(set(found)) == len(found) > 4
    costs = [t.cost(w, c, H200) for c in found]
    assert costs == sorted(costs) and (generation, kernel) == (found[0].generation, found[0].kernel)
    for config in found:
        assert t.from_json(config.to_json()) == config
        t.fits(w, config)


def test_attention_has_a_space_worth_a_search():
    t = find_tunable("attention")
    counts = [len(t.candidates(t.parse(f"b4s4096d{d}"), H200)) for d in (64, 128, 256)]
    assert min(counts[:2]) >= 40 and len(t.valid()[0]) >= 40, counts


def test_conditional_fields_and_what_constructors_refuse(fake):
    valid, refused = fake.valid()
    assert [(c.a, c.b) for c in valid if c.a == 16] == [(16, 1)] and refused == 1
    assert len(list(points({"a": (1, 2), "b": lambda c: range(c["a"])}))) == 3
    assert len(list(points([{"a": (1,)}, {"b": (1, 2)}]))) == 3


def test_the_estimate_ranks_what_was_measured():
    """Timed on an H200 on 2026-11-29 (b4 s4096 h32 d64, microseconds).  It was not fitted to these."""
    t = find_tunable("attention")
    three = {"compute_warpgroups": 3, "compute_registers": 160, "memory_registers": 32}
    full = t.parse("b4s4096h32d64")
    measured = [
        ({"block_kv": 128, **three}, 1097),
        ({"block_kv": 96, **three}, 1165),
        ({"block_kv": 64, **three}, 1243),
    ]
    measured.append(({"block_kv": 128}, 1265))
    estimates = [t.cost(full, t.config(**fields), H200) * 1e6 for fields, _ in measured]
    assert estimates == sorted(estimates)
    assert all(abs(e / m - 1) < 0.12 for e, (_, m) in zip(estimates, measured, strict=True)), estimates


def test_the_estimate_of_blackwell_knows_what_binds():
    """It was never measured; but what a field is for must show, on the chip and shape where it matters."""
    t = find_tunable("attention", "sm100")
    assert t.slack > find_tunable("attention", "sm90").slack

    def cost(shape="b4s4096h32d128", chip=B200, causal=False, **fields):
        w = t.parse(shape, causal=causal)
        config = t.config(**{"kv_slots": 2, **fields})
        t.fits(w, config)
        return t.cost(w, config, chip)

    assert cost(emulated_columns=32) < cost()  # special function units bind on a B200,
    assert cost(emulated_columns=32, chip=B300) >= cost(chip=B300)  # and have twice the rate on a B300
    assert cost(chip=B300) < cost()
    assert cost(rescale_threshold=0.0) > cost()
    assert cost(query_tiles=1) > cost()
    assert cost(p_parts=2) < cost()
    assert cost(kv_slots=1, tile_k=64) > cost(tile_k=64)  # latency
    assert cost(pair=True, emulated_columns=32) <= cost(emulated_columns=32)
    assert cost(persistent=False) > cost() == cost(persistent=False, dynamic=True)
    assert 0.5 < cost(causal=True) / cost() < 0.65  # half, and what the diagonal costs
    w = t.parse("b4s4096h32d128")
    seconds = w.flops / B200.peak_flops
    assert seconds < cost(emulated_columns=32) < 2 * seconds  # under the roof, and not far


def test_configs_from_json():
    assert space.config_from("attention", "sm90", {"block_kv": 64}).block_kv == 64
    with pytest.raises(ValueError, match="nonsense"):
        space.config_from("attention", "sm90", {"nonsense": 1})
    with pytest.raises(ValueError, match="sm100"):
        space.config_from("attention", "sm90", {"generation": "sm100"})
    with pytest.raises(UnsupportedCall):
        space.config_class("nothing", "sm90")
    with pytest.raises(ValueError, match="attention, attention_backward, matmul or FILE.py:NAME, not 'nothing'"):
        find_tunable("nothing")


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
    def sets(text):
        return sets_for(Attention.parse(text).bytes * 3 // 4)  # without the result

    assert sets("b4s4096h16d128") == 2
    assert sets("b1s4096h16d128") * 3 * 2 * 4096 * 2048 > 120e6
    small = input_sets(find_tunable("attention"), dataclasses.replace(SMALL, length=16, kv_length=16), 0)
    assert len({np.asarray(q).tobytes() for q, _, _ in small}) == len(small) == 32


def test_timing_counts_calls_and_stops_what_cannot_win():
    runs = []
    samples = timed(runs.append, 4, at_least=1e-9, repeats=3)
    assert len(samples) == 3 and all(0 < s < 1 for s in samples) and runs[:2] == [1, 1] and len(runs) == 5
    assert len(timed(runs.append, 4, at_least=1e-9, repeats=3, stop_above=0.0)) == 1


@pytest.fixture
def few_sets(monkeypatch):
    monkeypatch.setattr("mosaic_gpu.bench.protocols.MOST_SETS", 2)
    monkeypatch.setattr("mosaic_gpu.tune.measure.timed", lambda run, calls, repeats, stop_above: [1e-3] * repeats)


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

    def racy(q, k, v):  # each run gives another last bit
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return bench.judge.reference * (1 + 1e-4 * jax.pure_callback(lambda: np.float32(next(state)), shape))

    result = bench.measure_call(racy)
    assert result.status == "wrong" and "race" in result.message


def test_an_error_that_is_not_ours_ends_it(few_sets, monkeypatch):
    def broken(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr("mosaic_gpu.kernels.attention.attention", broken)
    with pytest.raises(jax.errors.JaxRuntimeError):
        AttentionBench(SMALL, 5).measure(None)


def test_matmuls_are_measured_too(few_sets):
    t = find_tunable("matmul")
    timer = GpuTimer(t, t.parse("m136n72k64"), 5)
    small = t.config(block_n=64, num_stages=2)
    found = timer.check(small)
    assert found.status == "ok" and found.error <= found.allowed and timer.samples(small, 3, 1.0) == [1e-3] * 3
    assert [len(rounds) for rounds in timer.interleaved([small], 2)] == [2]
    timer.forget(small)
    assert timer.measure_call(lambda a, b: (a @ b) * 1.01).status == "wrong"
