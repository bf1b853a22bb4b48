"""The search, with a fake timer: what is written when, what resuming skips, which config wins."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mosaic_gpu.kernels.sm90.attention import AttentionConfig
from mosaic_gpu.tune import cache
from mosaic_gpu.tune.measure import Measurement
from mosaic_gpu.tune.search import Environment, search
from mosaic_gpu.tune.workload import Attention

HERE = Environment("CUDA 13.0", "NVRTC 13.0.88", "0.1.0")
WORK = Attention.parse("b4s4096h16d128")
CONFIGS = [AttentionConfig(block_kv=n) for n in (128, 64, 96, 112)]
SECONDS = {128: 3e-3, 64: 2e-3, 96: 1e-3, 112: 4e-3}


class Timer:
    """A measure that knows the answers and remembers what it was asked; each measurement takes a second."""

    def __init__(self, folder, **special):
        self.asked, self.now, self.folder, self.special, self.seen = [], 0.0, folder, special, []

    def __call__(self, config):
        path = self.folder / "nvidia_h200" / "attention.json"
        self.seen.append(len(json.loads(path.read_text())["trials"][WORK.key]) if path.exists() else 0)
        self.asked.append(config.block_kv)
        self.now += 1
        return self.special.get(f"b{config.block_kv}", Measurement("ok", SECONDS[config.block_kv], 1e-3, 2e-3))

    def run(self, candidates=CONFIGS, workload=WORK, budget=100.0, environment=HERE, **options):
        options = {"device": "nvidia_h200", "kernel": "attention", "environment": environment} | options
        return search(workload, candidates, lambda: self, budget=budget, clock=lambda: self.now, **options)


@pytest.fixture
def timer(folder):
    return lambda **special: Timer(folder, **special)


def stored():
    return cache.load("nvidia_h200", "attention")


def test_everything_is_written_after_each_trial(timer):
    t = timer()
    outcome = t.run()
    assert t.seen == [0, 1, 2, 3] and (outcome.measured, outcome.left) == (4, 0)
    data = stored()
    assert data["schema"] == cache.SCHEMA and data["best"][WORK.key]["config"]["block_kv"] == 96
    trial = data["trials"][WORK.key][0]
    assert trial["environment"] == dataclasses.asdict(HERE) and trial["date"].startswith("20")
    assert trial["workload"] == WORK.to_json() and trial["tflops"] == round(WORK.flops / 3e-3 / 1e12, 1)


def test_only_right_results_can_win(timer):
    t = timer(b96=Measurement("wrong", None, 0.5, 2e-3, "far off"), b64=Measurement("refused", message="spills"))
    assert t.run().best["config"]["block_kv"] == 128
    assert {x["status"] for x in stored()["trials"][WORK.key]} == {"ok", "wrong", "refused"}
    nothing = timer(**{f"b{n}": Measurement("refused") for n in SECONDS}).run(
        workload=Attention.parse("s128d64"), candidates=CONFIGS
    )
    assert nothing.best is None and "d64" not in " ".join(stored()["best"])


def test_the_budget_ends_it_and_resuming_goes_on(timer):
    assert timer().run(budget=2).left == 2
    t = timer()
    outcome = t.run(resume=True)
    assert t.asked == [96, 112] and (outcome.measured, outcome.skipped) == (2, 2)
    assert outcome.best["config"]["block_kv"] == 96
    t = timer()
    assert t.run(resume=True).measured == 0 and t.asked == []


def test_without_resuming_all_is_measured_anew_the_best_first(timer):
    timer().run()
    t = timer()
    t.run(budget=1)
    assert t.asked == [96]
    assert len(stored()["trials"][WORK.key]) == 1 and stored()["best"][WORK.key]["config"]["block_kv"] == 96


@pytest.mark.parametrize("change", ["environment", "workload"])
def test_trials_of_another_environment_or_workload_are_not_compared(timer, change):
    timer().run()
    other = {
        "environment": {"environment": dataclasses.replace(HERE, driver="CUDA 13.1")},
        "workload": {"workload": Attention.parse("b1s4000h32d128")},
    }[change]
    t = timer(b96=Measurement("ok", 9e-3))
    outcome = t.run(resume=True, **other)
    assert len(t.asked) == 4 and outcome.best["config"]["block_kv"] == 64
    assert len(stored()["trials"][WORK.key]) == 8


def test_a_measurement_that_breaks_the_gpu_loses_nothing(timer):
    t = timer()
    wanted = [*CONFIGS, AttentionConfig(block_kv=176)]
    with pytest.raises(KeyError):  # the fake's way to fail: it has no answer
        t.run(candidates=wanted)
    assert len(stored()["trials"][WORK.key]) == 4


def test_nothing_to_measure_makes_no_measure(timer):
    timer().run()

    def make():
        raise AssertionError("inputs drawn for nothing")

    options = {"device": "nvidia_h200", "kernel": "attention", "environment": HERE, "budget": 10.0}
    assert search(WORK, CONFIGS, make, resume=True, **options).skipped == 4
