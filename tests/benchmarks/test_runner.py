"""The command line: the result file and resuming, the time budget, refusals, the table."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

from mosaic_gpu.bench import runner
from mosaic_gpu.bench.runner import Benchmark, main

QUICK = ["--rounds", "4", "--alone-repeats", "2", "--alone-seconds", "0.01"]


@pytest.fixture
def made(fakes):
    """A benchmark of three cells; ours cannot do `c`."""
    device = fakes.Device()

    def refuse(cell):
        return fakes.Unsupported("no such head dim") if cell.name == "c" else None

    ours = fakes.Provider(device, "ours", 1e-3, ours=True, refuse=refuse)
    peer = fakes.Provider(device, "peer", lambda name: {"a": 1.1e-3, "b": 0.9e-3, "c": 1e-3}[name])
    benchmark = Benchmark("fake", fakes.cells("a", "b", "c"), fakes.Problem, lambda device, configs: [ours, peer])
    return types.SimpleNamespace(benchmark=benchmark, device=device, ours=ours, peer=peer)


def cells_in(path):
    return json.loads(path.read_text())["cells"]


def test_every_cell_is_measured_or_reported(made, tmp_path, capsys):
    path = tmp_path / "deep" / "r.json"
    assert main(made.benchmark, [*QUICK, "--json", str(path)], made.device) == 0
    found = {name: r["verdict"] for name, r in cells_in(path).items()}
    assert found == {"a": "won", "b": "lost", "c": "unsupported"}
    out = capsys.readouterr().out
    assert "| a | 1000 / 1000 | 909 / 909 | 1.100 [1.100, 1.100] peer |" in out and "won (quick)" in out
    assert "| c | unsupported | 1000 / 1000 | – | – | unsupported (quick) |" in out
    assert "geometric mean of ours / best peer over 2 of 3 cells: interleaved 0.995, alone 0.995" in out
    assert "cells: 1 won, 1 lost, 1 unsupported" in out and "ours: no such head dim (1 cells: c)" in out


def test_full_rounds_are_no_quick_look(made, tmp_path):
    path = tmp_path / "r.json"
    assert main(made.benchmark, ["--alone-seconds", "0.01", "--cells", "a", "--json", str(path)], made.device) == 0
    record = cells_in(path)["a"]
    assert record["quick"] is False and len(record["providers"]["ours"]["interleaved"]["samples"]) >= 30
    assert len(record["providers"]["ours"]["alone"]["samples"]) >= 7


def test_a_run_goes_on_where_the_last_one_ended(made, tmp_path, monkeypatch, capsys):
    """Every finished cell is in the file at once; one that was measured differently is measured again."""
    path = tmp_path / "r.json"
    whole = runner.measure_cell

    def breaks(cell, *rest):
        if cell.name == "b":
            raise KeyboardInterrupt
        return whole(cell, *rest)

    monkeypatch.setattr(runner, "measure_cell", breaks)
    with pytest.raises(KeyboardInterrupt):
        main(made.benchmark, [*QUICK, "--json", str(path)], made.device)
    assert list(cells_in(path)) == ["a"]
    monkeypatch.setattr(runner, "measure_cell", whole)
    before = cells_in(path)["a"]
    assert main(made.benchmark, [*QUICK, "--json", str(path)], made.device) == 0
    assert made.ours.prepared == ["a", "b", "c"] and cells_in(path)["a"] == before
    assert f"a: in {path}" in capsys.readouterr().out
    assert main(made.benchmark, [*QUICK, "--rounds", "5", "--cells", "a", "--json", str(path)], made.device) == 0
    assert made.ours.prepared == ["a", "b", "c", "a"] and set(cells_in(path)) == {"a", "b", "c"}
    made.device.describe = lambda: {"device": "another"}
    main(made.benchmark, [*QUICK, "--rounds", "5", "--cells", "a", "--json", str(path)], made.device)
    assert made.ours.prepared == ["a", "b", "c", "a", "a"]


def test_failures_are_tried_again_only_when_asked(made, tmp_path):
    path = tmp_path / "r.json"
    made.ours.error = 1.0
    arguments = [*QUICK, "--cells", "a", "--json", str(path)]
    assert main(made.benchmark, arguments, made.device) == 1 and cells_in(path)["a"]["verdict"] == "wrong"
    made.ours.error = 0.0
    assert main(made.benchmark, arguments, made.device) == 1 and made.ours.prepared == ["a"]
    assert main(made.benchmark, [*arguments, "--retry"], made.device) == 0 and cells_in(path)["a"]["verdict"] == "won"


def test_another_file_is_not_overwritten(made, tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"schema": 1, "benchmark": "other", "cells": {}}')
    with pytest.raises(SystemExit, match="is no result file of benchmarks.fake"):
        main(made.benchmark, ["--json", str(path)], made.device)


def test_time_budget(made, tmp_path, monkeypatch, capsys):
    """No cell is begun that would not end in time; what is left is in the table."""
    path = tmp_path / "r.json"
    times = iter([0, 1, 1, 41, 42])  # begun; before a: spent, started, ended; before b: spent
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(times))
    assert main(made.benchmark, [*QUICK, "--json", str(path), "--budget", "60"], made.device) == 3
    out = capsys.readouterr().out
    assert "time budget: 42 s used, 2 cells from b on left" in out and "| b | – | – | – | – | not reached |" in out
    assert list(cells_in(path)) == ["a"]


def test_a_lost_gpu_ends_the_run(made, tmp_path, capsys):
    path = tmp_path / "r.json"

    def refuse(cell):
        made.device.lost = True
        return RuntimeError("illegal address")

    made.ours.refuse = refuse
    assert main(made.benchmark, [*QUICK, "--json", str(path)], made.device) == 1
    assert list(cells_in(path)) == ["a"] and cells_in(path)["a"]["verdict"] == "failed"
    assert "cell: after ours failed (RuntimeError: illegal address): gone" in capsys.readouterr().out


def test_choosing_cells_and_providers(made, tmp_path, capsys):
    path = tmp_path / "r.json"
    assert (
        main(made.benchmark, [*QUICK, "--cells", "[ab]", "--providers", "none", "--json", str(path)], made.device) == 0
    )
    assert {n: (list(r["providers"]), r["verdict"]) for n, r in cells_in(path).items()} == {
        "a": (["ours"], "alone"),
        "b": (["ours"], "alone"),
    }
    assert main(made.benchmark, ["--list", "--cells", "b|c"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["b", "c"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--cells", "zzz"], "'zzz' matches none of: a, b, c"), (["--cells", "("], "not a regular expression")],
)
def test_mistakes_on_the_command_line(made, capsys, arguments, words):
    with pytest.raises(SystemExit) as found:
        main(made.benchmark, arguments, made.device)
    assert found.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention", "matmul", "dispatch"])
def test_without_a_gpu(name, pytestconfig):
    """Exit code 2 and one line."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from benchmarks import {name} as b; sys.exit("
         f"b.main(b.BENCHMARK, []) if hasattr(b, 'BENCHMARK') else b.main([]))"],
        cwd=pytestconfig.rootpath,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"benchmarks.{name}: an NVIDIA ")
