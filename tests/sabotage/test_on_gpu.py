"""Everything of `on_gpu` but the GPU: what is chosen, the loop of runs, children that end, die or hang, the table."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

from mosaic_gpu.simulator import simulator_params

from . import on_gpu
from .defects import SABOTAGES
from .on_gpu import Row

NAMED = {str(s): s for s in SABOTAGES}
CHILD = """
import json, os, sys, time
for name in json.load(sys.stdin):
    print(json.dumps({"name": name}), flush=True)
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        sys.exit("an illegal memory access")
    print(json.dumps({"name": name, "outcome": "ran", "runs": 5, "wrong": 2, "results": 3}), flush=True)
"""


def test_what_waits_for_ever_is_not_chosen() -> None:
    chosen = on_gpu.runnable(
        NAMED[f"pipeline: {name}"]
        for name in ("no commit_smem", "the tile is not waited for", "the last refill is missing", "one copy too many")
    )
    assert list(chosen) == ["pipeline: no commit_smem", "pipeline: the tile is not waited for"]
    finding = chosen["pipeline: no commit_smem"].finding
    assert finding.startswith("Race (missing commit_smem), line ")


def test_sm100_is_not_chosen() -> None:
    assert on_gpu.runnable(s for s in SABOTAGES if s.kernel.startswith("sm100")) == {}
    assert "sm90_matmul" in on_gpu.controls() and "sm100_matmul" not in on_gpu.controls()


def test_runs_are_counted() -> None:
    assert on_gpu.measure("pipeline", 3) == {"runs": 3, "wrong": 0, "results": 1}
    with simulator_params(checks=False, uninitialized="zero"), np.errstate(all="ignore"):
        found = on_gpu.measure("pipeline: the read is of the other slot", 2)
    assert found == {"runs": 2, "wrong": 2, "results": 1}


def test_children_that_hang_or_die_cost_one_program_each() -> None:
    names = ("first", "hangs", "second", "dies", "third")
    rows = {name: Row(name, "C15", "Race", "not run") for name in names}
    done = {r.name: r for r in on_gpu.run_all(rows, [sys.executable, "-S", "-c", CHILD], limit=1, startup=10)}
    assert set(done) == set(names)
    assert done["hangs"].outcome == "hung: nothing for 1 s"
    assert done["dies"].outcome == "died with code 1: an illegal memory access"
    for name in ("first", "second", "third"):
        assert done[name] == Row(name, "C15", "Race", "ran", 5, 2, 3)


def test_a_child_that_cannot_start_is_told() -> None:
    rows = {"a": Row("a", "C15", "Race", "not run")}
    done = list(on_gpu.run_all(rows, [sys.executable, "-S", "-c", "raise SystemExit('no JAX here')"], 1, 10))
    assert [r.outcome for r in done] == ["died with code 1: no JAX here"]


def test_child_and_parent_agree(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(["handoff"])))
    on_gpu.child(1)
    begins, ends = map(json.loads, capsys.readouterr().out.splitlines())
    assert begins == {"name": "handoff"}
    assert ends == {"name": "handoff", "outcome": "ran", "runs": 1, "wrong": 0, "results": 1}


def test_table() -> None:
    rows = [
        {"name": "k", "rule": on_gpu.GOOD, "finding": "clean", "outcome": "ran", "runs": 9, "wrong": 0, "results": 1},
        {"name": "k: x", "rule": "C15", "finding": "Race", "outcome": "ran", "runs": 9, "wrong": 4, "results": 5},
        {"name": "k: y", "rule": "D7", "finding": "Race", "outcome": "hung", "runs": 0, "wrong": 0, "results": 0},
    ]
    about = {"date": "2026-01-01", "device": "H200", "commit": "abc", "runs": 9, "all": 292}
    lines = on_gpu.markdown({**about, "rows": rows})
    assert "- 1 good kernels: 0 wrong results." in lines
    assert "- 1 sabotages of 292 that do not deadlock ran to the end: 1 gave wrong results" in "\n".join(lines)
    assert "| k: x | C15 | Race | 4 of 9 | 5 |" in lines
    assert "| k: y | D7 | Race | hung |  |" in lines


def test_last_words_are_the_drivers() -> None:
    told = (
        "2026 E cuda_status.cc:50] CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access\nTraceback\ncuda_status.cc:50\n"
    )
    assert on_gpu.last_words(told) == "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"
    assert on_gpu.last_words("first\nno JAX here\n\n") == "no JAX here" and on_gpu.last_words("") == "no message"
