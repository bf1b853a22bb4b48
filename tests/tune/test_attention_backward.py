"""The gradients of attention as a kernel to tune: space, ranking, judge, inputs, a config timed in the simulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.bench.ours import kernel_calls
from mosaic_gpu.cli.ahead import CompileJob, compile_job
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.kernels import reference
from mosaic_gpu.kernels.attention import attention
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig, default_config
from mosaic_gpu.runtime import execute
from mosaic_gpu.tune.accuracy import GradientJudge, plain_forward, plain_gradients
from mosaic_gpu.tune.chip import H200
from mosaic_gpu.tune.measure import GpuTimer, input_sets
from mosaic_gpu.tune.tunable import find_tunable

TUNABLE = find_tunable("attention_backward")
SMALL = TUNABLE.parse("b1s70h4kv2d16", causal=True)


def test_operations_and_bytes():
    full, causal = (TUNABLE.parse("b2s1024h4d64", causal=c) for c in (False, True))
    assert full.flops == 10 * 2 * 1024 * 1024 * 4 * 64 == 2 * causal.flops
    wide = TUNABLE.parse("b2s1024h4d192dv128")
    assert wide.flops == 2 * 2 * 1024 * 1024 * 4 * (3 * 192 + 2 * 128)
    assert full.bytes == 2 * 8 * 2 * 1024 * 4 * 64
    assert TUNABLE.workload(wide.to_json()) == wide


def test_the_space():
    """At least 40 configs where the registers hold dK and dV; the default is in it for the usual head dims."""
    for d, least in ((64, 40), (128, 40), (256, 2)):
        w = TUNABLE.parse(f"b1s16384d{d}")
        found = TUNABLE.candidates(w, H200)
        assert len(found) >= least and default_config(d, d) in TUNABLE.valid()[0]
        assert all(TUNABLE.cost(w, a, H200) <= TUNABLE.cost(w, b, H200) for a, b in zip(found, found[1:], strict=False))
        assert found.index(default_config(d, d)) < max(len(found) // 4, 1)


def test_the_estimate_says_what_was_measured():
    """Of hand-written kernels on an H200, in clocks; larger blocks win at d64, splitting costs, one stage costs."""

    def clocks(d, **fields):
        w = TUNABLE.parse(f"b1s16384h{2048 // d}d{d}")
        return TUNABLE.cost(w, AttentionBackwardConfig(**fields), H200) * H200.clock

    assert 12.2e6 < clocks(128) < 13.2e6 and 14e6 < clocks(64, block_q=128) < 15.5e6
    assert clocks(64, block_q=128) < clocks(64, block_q=64)
    assert clocks(128) < clocks(128, split=True) and clocks(128) < clocks(128, num_stages=1)


def test_keys_and_what_is_there_for_other_generations():
    w = TUNABLE.workload_of(*(jax.ShapeDtypeStruct((2, 1000, h, 64), jnp.bfloat16) for h in (4, 2, 2)), causal=True)
    assert (w.batch, w.heads, w.kv_heads, w.causal) == (2, 4, 2, True) and TUNABLE.key(w)["length"] == 1024
    with pytest.raises(UnsupportedCall, match="attention_backward has no kernel for sm100"):
        find_tunable("attention_backward", "sm100")


@pytest.mark.parametrize("causal", [False, True])
def test_the_judge_agrees_with_the_reference(causal):
    q, k, v, out, lse, d_out = TUNABLE.inputs(SMALL, 1)
    right, right_lse = reference.attention(q, k, v, causal=causal)
    plain, plain_lse = plain_forward(q, k, v, causal, 0.25)
    np.testing.assert_allclose(np.asarray(plain, np.float64), right, rtol=2**-7, atol=2**-8)
    np.testing.assert_allclose(plain_lse, right_lse, rtol=1e-4, atol=1e-4)
    options = {"causal": causal, "scale": 0.25}
    exact = reference.attention_gradients(q, k, v, d_out, np.zeros_like(lse), **options)
    rounded = reference.attention_gradients(q, k, v, d_out, np.zeros_like(lse), **options, rounded=True)
    found, found_rounded = plain_gradients(q, k, v, d_out, causal, 0.25)
    judge = GradientJudge.of(q, k, v, d_out, causal=causal)
    for x, y, a, b, limit in zip(found, found_rounded, exact, rounded, judge.limits, strict=True):
        np.testing.assert_allclose(x, a, rtol=1e-3, atol=1e-4)
        own, numpys = (reference.relative_error(z, a) for z in (y, b))
        assert own < 1.2 * numpys < 1.5 * own and limit == pytest.approx(2 * own, rel=0.05)
    right = [jnp.asarray(x).astype(jnp.bfloat16) for x in exact]
    assert judge.accepts(judge.error(right))
    for n in range(3):
        for wrong in (right[n] * 1.02, right[n].at[0, 0, 0, 0].set(jnp.nan), right[n].at[0, 35:].set(0)):
            assert not judge.accepts(judge.error([*right[:n], wrong, *right[n + 1 :]]))
    other_dq, other_dk = [right[0] * 2, *right[1:]], [right[0], right[1] * 2, right[2]]
    assert judge.same(right, other_dq) and not judge.same(right, other_dk)


def test_inputs_belong_together(monkeypatch):
    """Also those that timings rotate through: the output is that of q, k and v."""
    monkeypatch.setattr("mosaic_gpu.bench.protocols.MOST_SETS", 2)
    for q, k, v, out, lse, _ in input_sets(TUNABLE, SMALL, 3):
        plain, plain_lse = plain_forward(q, k, v, SMALL.causal, 0.25)
        np.testing.assert_array_equal(np.asarray(out), np.asarray(plain))
        np.testing.assert_array_equal(np.asarray(lse), np.asarray(plain_lse))


def test_measured_in_the_simulator(monkeypatch):
    monkeypatch.setattr("mosaic_gpu.bench.protocols.MOST_SETS", 2)
    monkeypatch.setattr("mosaic_gpu.tune.measure.timed", lambda run, calls, repeats, stop_above: [1e-3] * repeats)
    timer = GpuTimer(TUNABLE, SMALL, 5)
    found = timer.measure(TUNABLE.default(SMALL))
    assert found.status == "ok" and found.error <= found.allowed
    assert timer.measure(AttentionBackwardConfig(num_stages=9, block_q=256)).status == "refused"
    wrong = timer.measure_call(lambda *arrays: [x * 1.1 for x in timer.call(TUNABLE.default(SMALL))(*arrays)])
    assert wrong.status == "wrong"


def test_compiled_ahead():
    """All three kernels; what the largest takes."""
    job = CompileJob("attention_backward", "sm_90a", SMALL.to_json(), TUNABLE.default(SMALL).to_json())
    found = compile_job(job)
    assert found["status"] == "ok" and found["registers"] == 128 and found["shared_bytes"] > 50_000, found


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
def test_likely_configs_compile(d):
    """Of each combination of split, dq_columns and dq_ahead the likeliest: no spill, the budgets kept."""
    w = TUNABLE.parse(f"b1s16384d{d}", causal=True)
    likeliest = {(c.split, c.dq_columns, c.dq_ahead): c for c in reversed(TUNABLE.candidates(w, H200))}
    assert len(likeliest) >= (4 if d < 256 else 1)  # at 256 all are split, and make no dQ
    for c in likeliest.values():
        found = compile_job(CompileJob("attention_backward", "sm_90a", w.to_json(), c.to_json()))
        assert found["status"] == "ok", (c, found)


def test_calls_take_the_overridden_config():
    """A user's gradient runs with it, also where the same call was traced before with another."""
    q, k, v = (jax.ShapeDtypeStruct((1, 70, h, 16), jnp.bfloat16) for h in (2, 1, 1))
    bytes_of_tiles = {}
    for stages in (2, 3):
        with plgpu.override_config(AttentionBackwardConfig(num_stages=stages)):
            steps, _ = kernel_calls(lambda q, k, v: jax.vjp(attention, q, k, v)[1](q), q, k, v)
            e = plgpu.explain_config("attention_backward", q, k, v)
        assert e.source == "override" and e.config.num_stages == stages
        (main,) = (program for program, _ in steps if program.name == "attention_backward_sm90")
        bytes_of_tiles[stages] = execute.plan_of(main, "sm_90a").shared_bytes
    assert bytes_of_tiles[3] > bytes_of_tiles[2]
