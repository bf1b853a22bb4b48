"""What result files say: roofline shares, tables over GPUs, what changed between two runs, plots."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from mosaic_gpu.bench import report
from mosaic_gpu.bench.harness import summary
from mosaic_gpu.errors import ToolchainError
from mosaic_gpu.tune.chip import B200, H100, H200, chip_of


def results(device="NVIDIA H200", seed=0, **rates):
    """A file with cells of 1 TFLOP; cell=(ours, peer) in TFLOP/s, None where there is none."""
    chance = np.random.default_rng(seed)
    cells = {}
    for cell, (ours, peer) in rates.items():
        providers = {}
        for name, rate in (("ours", ours), ("cudnn", peer)):
            row = {"ours": name == "ours", "host_timed": False, "status": "ok", "message": "", "version": "1"}
            if isinstance(rate, str):
                row["status"] = rate
            elif rate:
                row["interleaved"] = summary(list(rate * (1 + 0.005 * chance.standard_normal(40))))
            if rate:
                providers[name] = row
        comparison = {}
        if ours and peer and not isinstance(ours, str):
            ratio = ours / peer
            found = {"peer": "cudnn", "value": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "verdict": "won"}
            comparison = {"ours": {"interleaved": found, "alone": found}}
        chosen = {"chosen": "ours"} if ours and not isinstance(ours, str) else {}
        cells[cell] = {"cell": cell, "flops": 10**12, "bytes": 10**9, "providers": providers, "comparison": comparison}
        cells[cell] |= {"verdict": ours if isinstance(ours, str) else "won", **chosen}
    return {"schema": 1, "benchmark": "attention", "machine": {"device": device}, "cells": cells}


def verdicts(old, new):
    return {c.cell: c.verdict for c in report.changes(old, new)}


def test_chips_and_the_roof():
    assert chip_of("nvidia_h100_80gb_hbm3") == H100 and chip_of("nvidia_b200") == B200
    assert chip_of("nvidia_nothing", "sm_100a") == B200 and chip_of(None) == H200
    assert H200.peak_flops == pytest.approx(989e12, rel=1e-3)
    assert H200.bound(1e12, 0) == pytest.approx(1 / 989, rel=1e-3) and H200.bound(0, 4.8e12) == pytest.approx(1.0)
    record = results(a=(494.7, None))["cells"]["a"]
    assert report.roofline(record, H200) == pytest.approx(0.5, rel=1e-2)
    record["bytes"] = (
        48 * 10**9
    )  # 10 ms of memory against 1 ms of products: reached 2 ms, so that is impossible, and seen
    assert report.roofline(record, H200) > 1


def test_one_table_for_all_generations_with_empty_columns():
    text = report.markdown([results(a=(700.0, 650.0), b=(None, 500.0))])
    lines = text.splitlines()
    assert "Hopper (NVIDIA H200): ours" in lines[2] and "Blackwell (not measured): ours" in lines[2]
    assert "650 (cudnn) | 1.077 [1.067, 1.087] | 71% | – | – | – | – |" in lines[4].replace("649", "650").replace(
        "651", "650"
    )
    assert len({line.count("|") for line in lines[2:]}) == 1
    both = report.markdown([results(a=(700.0, 650.0)), results("NVIDIA B200", a=(1400.0, 1300.0), c=(1.0, None))])
    assert "Blackwell (NVIDIA B200)" in both and len(both.splitlines()) == 6


def test_the_same_twice_is_the_same():
    old, new = results(a=(700.0, 650.0), b=(500.0, None)), results(seed=1, a=(700.0, 650.0), b=(500.0, None))
    assert verdicts(old, new) == {"a": "same", "b": "same"}
    assert not any(c.regression for c in report.changes(old, new))


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((700.0, 650.0), (650.0, 650.0), "slower"),
        ((700.0, 650.0), (750.0, 650.0), "faster"),
        ((700.0, 650.0), (665.0, 617.0), "same"),  # the chip was slower that day, and the peer with it
        ((700.0, 650.0), (700.0, 700.0), "slower"),  # than its peer became
        ((700.0, 650.0), (694.0, 650.0), "same"),  # one percent is noise
        ((700.0, None), (680.0, None), "same"),  # three percent are, too, without a peer
        ((700.0, None), (620.0, None), "slower"),
        ((700.0, 650.0), ("wrong", 650.0), "broken"),
        ((700.0, 650.0), ("failed", 650.0), "broken"),
        (("wrong", 650.0), (700.0, 650.0), "fixed"),
        ((None, 650.0), (None, 650.0), "not measured"),
    ],
)
def test_changes(old, new, verdict):
    (change,) = report.changes(results(a=old), results(seed=1, a=new))
    assert change.verdict == verdict and change.regression == (verdict in ("slower", "broken"))


def test_another_version_of_the_peer_is_no_measure():
    old, new = results(a=(700.0, 650.0)), results(seed=1, a=(700.0, 700.0))
    new["cells"]["a"]["providers"]["cudnn"]["version"] = "2"
    assert verdicts(old, new) == {"a": "same"}


def test_cells_of_one_file_only_and_files_that_cannot_be_compared():
    assert verdicts(results(a=(1.0, None)), results(b=(1.0, None))) == {"a": "only old", "b": "only new"}
    with pytest.raises(ValueError, match="different GPUs: NVIDIA H200 and NVIDIA B200"):
        report.changes(results(), results("NVIDIA B200"))
    with pytest.raises(ValueError, match="different benchmarks"):
        report.changes(results(), results() | {"benchmark": "matmul"})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "machine": {}, "cells": {}}'])
def test_files_that_are_no_results(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no result file"):
        report.read_results(path)
    path.write_text(json.dumps(results()))
    assert report.read_results(path)["cells"] == {}


def test_panels_of_plots():
    """Gradients alone and with the forward pass are lines of different panels."""
    from mosaic_gpu.bench.plots import panel_of

    assert panel_of("b1 s512 h16 d64 causal") == ("d64 causal", 512)
    assert panel_of("b2 s8192 h32/8 d192/128 causal fwd+bwd") == ("d192/128 causal fwd+bwd", 8192)
    assert panel_of("b4 s4096 h8 d256 full bwd") == ("d256 full bwd", 4096)
    assert panel_of("4096x4096x4096") == ("", "4096x4096x4096")


def test_plots(tmp_path, monkeypatch):
    from mosaic_gpu.bench import plots

    names = [f"b1 s{s} h16 d{d} {m}" for s in (512, 1024) for d in (64, 128) for m in ("full", "causal")]
    made = plots.write_plots(results(**{n: (700.0, 650.0) for n in names}), tmp_path / "deep")
    assert [p.name for p in made] == ["attention_tflops.png", "attention_ratio.png"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" and p.stat().st_size > 5000 for p in made)
    alone = copy.deepcopy(results(**{"4096x4096x4096": (700.0, None)}))
    assert [p.name for p in plots.write_plots(alone, tmp_path)] == ["attention_tflops.png"]
    assert plots.write_plots(results(), tmp_path) == []
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ToolchainError, match="pip install 'mosaic-gpu\\[plot\\]'"):
        plots.write_plots(results(), tmp_path)
