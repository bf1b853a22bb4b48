"""The benchmarks' own cells, how our kernels are taken out of JAX, configs from a file, the simulator and dispatch."""

from __future__ import annotations

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compilation, dispatch, examples, simulator
from mosaic_gpu.bench import attention, attention_backward, matmul, ours, protocols
from mosaic_gpu.bench.model import Unsupported
from mosaic_gpu.kernels.attention import attention as attention_kernel
from mosaic_gpu.kernels.sm90.attention import AttentionConfig
from mosaic_gpu.kernels.sm90.schedule import tile_table
from mosaic_gpu.runtime import execute
from mosaic_gpu.simulator import simulate


def test_cells_of_attention():
    names = [c.name for c in attention.CELLS]
    assert len(set(names)) == len(names) == 21
    for b, s in ((4, 4096), (1, 16384), (32, 512)):
        for h, d in ((32, 64), (16, 128), (8, 256)):
            assert f"b{b} s{s} h{h} d{d} full" in names and f"b{b} s{s} h{h} d{d} causal" in names
    assert names[-3:] == ["b2 s8192 h32/8 d128 causal", "b2 s8192 h16 d96 causal", "b2 s8192 h16 d192/128 causal"]
    flops = {c.name: c.flops for c in attention.CELLS}
    assert flops["b4 s4096 h16 d128 full"] == 4 * 4 * 4096**2 * 16 * 128 == 2 * flops["b4 s4096 h16 d128 causal"]
    assert flops["b2 s8192 h16 d192/128 causal"] == 2 * 8192**2 * 16 * (192 + 128)


def test_cells_of_matmul():
    assert [c.name for c in matmul.CELLS] == [
        *(f"{n}x{n}x{n}" for n in (2048, 4096, 8192)),
        *("8192x28672x4096", "16384x4096x14336", "512x8192x8192"),
    ]
    assert matmul.CELLS[0].flops == 2 * 2048**3


@pytest.mark.parametrize("cell", attention.CELLS, ids=lambda c: c.name)
def test_our_attention(cell):
    """The program with its table of tiles, for every cell."""
    abstract = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in cell.data.shapes]
    config = AttentionConfig(block_kv=64)
    [(program, inputs)], results = ours.kernel_calls(attention.our_function(cell, config), *abstract)
    assert results == [ours.Made(0, 0)]
    s = cell.data
    diagonal = 0 if s.causal else None
    table = tile_table(s.batch, s.heads, s.kv_heads, s.length, s.length, s.qk_dim + s.v_dim, 128, 64, diagonal, 132)
    np.testing.assert_array_equal(inputs[0], table)
    assert inputs[1:] == [0, 1, 2] and program.inputs[1].shape == s.shapes[0]


def test_our_kernel_is_launched_on_the_right_buffers():
    """The program taken out, run on the inputs in its order, gives what the function gives."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 128, h, 64)), jnp.bfloat16) for h in (2, 1, 1))
    f = attention.our_function(attention.Shape(1, 128, 2, 1, 64, 64, True).cell(), None)
    [(program, inputs)], _ = ours.kernel_calls(f, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)))
    arrays = [x if isinstance(x, np.ndarray) else np.asarray((q, k, v)[x]) for x in inputs]
    (out,) = simulate(execute.plan_of(program, "sm_90a"), arrays)
    np.testing.assert_array_equal(out, np.asarray(f(q, k, v)))
    spec = execute.launch_spec(execute.plan_of(program, "sm_90a"))
    assert {p.buffer for p in spec.parameters if hasattr(p, "buffer")} == set(range(5)), "four inputs, one output"


def test_kernels_are_wanted():
    with pytest.raises(ValueError, match="calls no kernel"):
        ours.kernel_calls(lambda x: x + 1, jax.ShapeDtypeStruct((8,), jnp.float32))


def test_configs_from_a_file(tmp_path):
    path = tmp_path / "c.json"

    def read(data):
        path.write_text(json.dumps(data))
        return ours.read_configs(str(path), "attention")

    assert [c.name for c in ours.read_configs(None, "attention")] == ["ours"]
    one, two = read({"small": {"block_kv": 64}, "tuned": None})
    assert (one.name, one.config("attention").block_kv) == ("ours small", 64)
    assert (two.name, two.config("attention")) == ("ours tuned", None)
    (only,) = read([{"name": "x", "cells": "d64", "config": {"block_kv": 96}}])
    cell = attention.CELLS[2]  # d128
    with pytest.raises(Unsupported, match="for other cells"):
        ours.Ours(None, only, "attention", attention.our_function).prepare(cell, None)
    for wrong, words in (
        ({"x": {"block_kb": 1}}, "no field block_kb"),
        ({"x": {"block_kv": 65}}, "block_kv=65"),
        ([{"config": {}}], "name and config"),
        ([{"name": "x"}, {"name": "x"}], "two configs"),
    ):
        with pytest.raises(ValueError, match=words):
            read(wrong)


def test_enough_sets_to_leave_the_l2():
    for size in (16_000_000, 60_000_000, 400_000_000):
        assert protocols.sets_for(size) >= 2 and protocols.sets_for(size) * size > 2 * protocols.L2_BYTES
    assert protocols.sets_for(1) == protocols.MOST_SETS


def test_simulator_small(capsys):
    """Ours is right and timed; JAX's mode too, or the reason why not is in the table."""
    clock = itertools.count(0, 0.5)
    rows = simulator.run(n=128, length=64, repeats=1, clock=lambda: next(clock))
    assert [r["who"] for r in rows] == [
        "ours, all checks",
        "ours, one process",
        "JAX interpret",
        "JAX interpret, detect_races",
        "ours, all checks",
        "ours, one process",
    ]
    for r in rows:
        if r["who"].startswith("ours"):
            assert r["first_seconds"] == r["later_seconds"] == r["best_seconds"] == 0.5 and r["error"] < 5e-3
        else:
            assert "no GPU interpret mode" in r["message"] or r["error"] < 5e-3
    assert simulator.report(rows).count("\n") == 7


def test_a_wrong_simulation_is_not_timed():
    with pytest.raises(ValueError, match="the result is wrong"):
        simulator.timed(lambda: jnp.ones(4), np.zeros(4) + 2, 1, lambda: 0.0)


def test_dispatch_with_a_fake_clock(monkeypatch):
    """Ours costs 3 µs to start, XLA's 1: medians, difference and interval say so."""
    monkeypatch.setattr(dispatch, "CHAIN", 4)
    now = [0.0]
    costs = {"ours": 3e-6, "xla": 1e-6}

    def program(name):
        def call(x):
            now[0] += costs[name]
            return x

        return call

    found = dispatch.started({n: program(n) for n in costs}, None, 30, lambda r: r, lambda: now[0])
    assert found["ours"]["start"] == [pytest.approx(3e-6)] * 30
    d = dispatch.difference(found["ours"]["start"], found["xla"]["start"])
    assert d == {"difference": pytest.approx(2), "low": pytest.approx(2), "high": pytest.approx(2)}
    rows = dispatch.measure(lambda x: x + 1, lambda x: x + 1, jnp.zeros(8), 30, clock=iter(range(10**6)).__next__)
    assert [(r["program"], r["until"]) for r in rows] == [
        (program, until) for program in ("one call", "4 calls") for until in ("start", "end")
    ]
    assert dispatch.report(rows).count("\n") == 5
    with pytest.raises(ValueError, match="ours, one call: the result is wrong"):
        dispatch.measure(lambda x: x, lambda x: x + 1, jnp.zeros(8), 30)


def test_our_smallest_kernel():
    np.testing.assert_array_equal(dispatch.smallest_kernel()(jnp.zeros(dispatch.ELEMENTS)), 1)


def test_cells_of_the_backward_pass():
    names = [c.name for c in attention_backward.CELLS]
    assert len(set(names)) == len(names) == 26 and names[12] == "b2 s8192 h32/8 d128 causal bwd"
    flops = {c.name: c.flops for c in attention_backward.CELLS}
    assert flops["b4 s4096 h16 d128 full bwd"] == 10 * 4 * 4096**2 * 16 * 128
    assert flops["b4 s4096 h16 d128 causal fwd+bwd"] == 14 * 4 * 4096**2 * 16 * 128 // 2


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_our_gradients_are_launched_on_the_right_buffers(forward, deterministic):
    """The kernels taken out, run one after the other on memory full of NaN, give what the function gives."""
    shape = attention_backward.GradientShape(1, 130, 2, 1, 64, 64, True, forward)
    rng = np.random.default_rng(0)
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((1, 130, h, 64)), jnp.bfloat16) for h in (2, 1, 1, 2))
    out, lse = attention_kernel(q, k, v, causal=True, return_lse=True)
    arguments = (q, k, v, d_out) if forward else (q, k, v, out, lse, d_out)
    f = attention_backward.our_function(shape.cell(), None, deterministic)
    steps, results = ours.kernel_calls(f, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments))
    assert len(steps) == 3 + forward
    made = {}
    for n, (program, inputs) in enumerate(steps):
        arrays = [
            np.array(x if isinstance(x, np.ndarray) else made[x] if isinstance(x, ours.Made) else arguments[x])
            for x in inputs
        ]
        found = simulate(execute.plan_of(program, "sm_90a"), arrays)
        made |= {ours.Made(n, i): x for i, x in enumerate(found)}
    for x, y in zip(results, f(*arguments), strict=True):
        np.testing.assert_array_equal(made[x], np.asarray(y))


def test_rows_of_examples():
    """Every example has a row; the sizes are what moves and what is multiplied."""
    rows = examples.rows(1024)
    assert {"softmax", "layer_norm", "rms_norm", "rotary", "gelu_gate", "top_k", "cross_entropy", "prefix_sum"} <= set(
        rows
    )
    assert rows["softmax"].bytes == 2 * 64 * 512 * 4 and rows["cross_entropy"].bytes == 64 * 1000 * 4 + 2 * 64 * 4
    assert rows["products matmul"].flops == 2 * 4**3
    assert rows["products gelu_mlp"].flops == 4 * 64 * 64 * 64


def test_a_row_is_judged_before_it_is_timed():
    x = np.arange(8, dtype=np.float32)
    right = examples.Row({"ours": lambda x: x + 1, "xla": lambda x: 1 + x}, [x], 64, 0, 0.0)
    found = examples.measure(right, rounds=2, seconds=1e-4)
    assert found["errors"] == {"ours": 0, "xla": 0} and min(found["seconds"].values()) > 0
    assert "GB/s" in examples.text("add", right, found)
    wrong = examples.Row({"ours": lambda x: x + 2, "xla": lambda x: x + 1}, [x], 64, 0, 1e-3)
    with pytest.raises(ValueError, match="ours"):
        examples.measure(wrong)


def test_compilation_without_a_gpu_says_so(capsys):
    assert compilation.main([]) == 2 and "no GPU" in capsys.readouterr().out


def test_compilation_takes_turns_and_its_medians_stand_beside_each_other(monkeypatch, tmp_path, capsys):
    """With a clock of our own: who comes first alternates, no two samples share a batch size, the ratio is that of medians."""
    asked = []

    def seconds(function, arguments):
        name = "jax" if function.__qualname__.startswith("jax_attention") else function.__name__
        asked.append((name, arguments[0].shape[0]))
        return {"jax": 2.0, "ours": 1.0}.get(name, 0.1) * (3.0 if asked.count(asked[-1]) > 1 else 1.0)

    monkeypatch.setattr(compilation, "seconds", seconds)
    monkeypatch.setattr(compilation.jax, "default_backend", lambda: "gpu")
    assert compilation.main(["--repeats", "2", "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(r["head_dim"], r["causal"]) for r in rows] == compilation.CASES
    assert all(len(r[side]) == 2 for r in rows for side in compilation.SIDES)
    first = [name for name, _ in asked if name != "<lambda>"][3:9]  # behind those of the warm-up
    assert first == ["ours", "ours", "jax", "jax", "ours", "ours"]
    assert "0.50 of JAX's" in capsys.readouterr().out
