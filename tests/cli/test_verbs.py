"""`demo`, `bench` and `tune` in this process: results on a CPU, refusals where a GPU is needed."""

from __future__ import annotations

import json
import time

import pytest

from mosaic_gpu.cli import demo as demo_module
from mosaic_gpu.codegen import nvrtc
from mosaic_gpu.errors import ToolchainError
from mosaic_gpu.kernels import attention as dispatcher


def test_demo(verb):
    begun = time.monotonic()
    result = verb("demo", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["where"] == "the simulator" and data["right"]
    assert 0 < data["relative_error"] <= data["allowed_error"] < 1e-2
    assert (data["workload"]["heads"], data["workload"]["kv_heads"], data["heads_checked"]) == (32, 8, 32)
    assert data["resources"]["roles"][0]["requested"] == 240
    assert time.monotonic() - begun < 25


def test_demo_prints(verb):
    result = verb("demo", "--shape", "s128h2kv1d64", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert "simulator" in result.stdout and "right" in result.stdout and "wg0,1" in result.stdout


def test_demo_of_other_head_dims_of_v(verb):
    result = verb("demo", "--shape", "b1s64h1d64dv32", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["shape"] == "b1 s64 h1 d64/32" and data["right"] and data["resources"]


def test_demo_that_is_wrong(verb, monkeypatch):
    real = dispatcher.attention
    monkeypatch.setattr(dispatcher, "attention", lambda *a, **k: real(*a, **k) * 1.01)
    result = verb("demo", "--shape", "s128h1d64")
    assert result.exit_code == 1 and "WRONG" in result.stdout


def test_demo_without_a_compiler(verb, monkeypatch):
    def missing():
        raise ToolchainError("NVRTC is not installed")

    monkeypatch.setattr("mosaic_gpu.codegen.cubin_cache.find_nvrtc", missing)
    monkeypatch.setattr(nvrtc, "find_nvrtc", missing)
    result = verb("demo", "--shape", "s128h1d64")
    assert result.exit_code == 0, result.output
    assert "NVRTC is not installed" in result.stdout


def test_the_shape_of_the_demo():
    assert str(demo_module.LLAMA3) == "b2 s4096 h32/8 d128"


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "attention"],
        ["tune", "run", "attention"],
        ["bench", "attention", "--peers", "all", "--json"],
        ["bench", "matmul"],
    ],
)
def test_refusals_without_a_gpu(verb, arguments):
    result = verb(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "needs a GPU" in result.stderr


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["bench", "attention", "--shapes", "x4"], "write it like"),
        (["bench", "attention", "--config", "[]"], "is a JSON object"),
        (["bench", "attention", "--config", '{"blocks": 3}'], "has no field blocks"),
        (["bench", "kernel", "attention"], "needs a GPU"),
        (["tune", "run", "conv"], "attention, attention_backward, matmul or FILE.py:NAME"),
        (["tune", "run", "attention", "--budget", "soon"], "120s"),
        (["tune", "run", "attention", "--shape", "d64"], "no length"),
        (["bench", "compile", "--arch", "sm_90a", "--head-dim", "65"], None),
        (["nonsense"], "No such command"),
    ],
)
def test_bad_arguments(verb, arguments, why):
    result = verb(*arguments)
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert why is None or why in result.stderr


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_bench_compile(verb, arch):
    result = verb("bench", "compile", "--arch", arch, "--head-dim", "64", "--repeats", "1", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [r["mask"] for r in rows] == ["full", "causal"]
    for row in rows:
        assert row["cold"] > row["build_cold"] > row["build_from_disk"] > 0


def test_version_and_help(verb):
    assert verb("--version").stdout.startswith("mosaic-gpu ")
    for name in ("doctor", "demo", "compile", "bench", "tune"):
        assert name in verb("--help").stdout
        assert verb(name, "--help").exit_code == 0
