"""The search, with a fake timer: what is written when, what is measured again, which config wins, what the shortcuts skip."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mosaic_gpu.tune import cache, schema
from mosaic_gpu.tune.search import Settings, Store, search


@pytest.fixture
def run(store, fakes):
    """run(timer=None, compiler=None, **options of search): the outcome; everything on a clock that timings move."""

    def do(timer=None, compiler=None, of=None, **options):
        timer = timer or fakes.Timer()
        return search(of or store(), lambda: timer, compiler or fakes.Compiler(), **options)

    return do


@pytest.fixture
def trials(store):
    return lambda: json.loads(store().path.read_text())["entries"][0]["trials"]


def test_the_best_of_the_space_wins(run, fake, fakes, trials):
    events = []
    outcome = run(on_event=events.append, settings=Settings(slack=2.0))
    assert outcome.best["config"] == fakes.FakeConfig(a=8, b=4).to_json() and outcome.left == 0
    assert outcome.best["tflops"] == round(64e9 / 1e-3 / 1e12, 1)
    assert outcome.heuristic == pytest.approx(fakes.true_seconds(fakes.FakeConfig()))
    assert not schema.problems(cache.read(outcome.path))
    found = trials()
    assert len(found) == len(fake.valid()[0]) == 17 and {t["registers"] for t in found} == {168}
    assert {t["status"] for t in found} == {"ok", "slow"}
    timing = [e for e in events if e.what == "timing"]
    assert timing[0].best and timing[-1].left is not None and timing[-1].left >= 0


def test_halving_times_few_configs_long_and_confirms_the_last_in_turns(run, fakes):
    timer = fakes.Timer()
    outcome = run(timer, settings=Settings(slack=2.0, keep=0.25, confirm=3))
    timed = timer.timed()
    first, later = timed[:17], timed[17:]
    assert len(set(first)) == 17 and len(later) <= 4 and set(later) <= set(first)
    (turns,) = [c for what, c in timer.asked if what == "interleaved"]
    assert len(turns) == 3 and turns[0].to_json() == outcome.best["config"]
    assert (
        turns[-1] == fakes.FakeConfig()
    )  # the default, which was far from the fastest: what is chosen has beaten it in turns
    exhaustive = fakes.Timer()
    run(exhaustive, settings=Settings(exhaustive=True), fresh=True)
    assert len(exhaustive.timed()) == 17


def test_what_cannot_win_by_the_estimate_is_left_out_but_never_the_default(run, fakes):
    timer = fakes.Timer()
    run(timer, settings=Settings(slack=1.15))
    assert {c.a for c in timer.timed()} == {1, 2, 4} and fakes.FakeConfig() in timer.timed()
    assert [c for c in timer.timed() if c.a == 1] == [fakes.FakeConfig()]


def test_a_config_that_cannot_win_is_stopped_at_its_first_timing(run, trials, fakes):
    run(settings=Settings(slack=2.0, stop_above=1.05))
    slow = [t for t in trials() if t["status"] == "slow"]
    assert slow and all(t["repeats"] == 1 for t in slow)


def test_only_right_results_can_win(run, trials, fakes):
    best, second = fakes.FakeConfig(a=8, b=4), fakes.FakeConfig(a=8, b=2)
    compiler = fakes.Compiler({fakes.FakeConfig(a=8, b=8): "spilled", fakes.FakeConfig(a=2, b=2): "refused"})
    timer = fakes.Timer({best: "wrong", second: "refused"})
    outcome = run(timer, compiler)
    assert outcome.best["config"] == fakes.FakeConfig(a=8, b=1).to_json() and compiler.stopped
    status = {(t["config"]["a"], t["config"]["b"]): t["status"] for t in trials()}
    assert status[8, 4] == "wrong" and status[8, 2] == status[2, 2] == "refused" and status[8, 8] == "spilled"
    assert not {fakes.FakeConfig(a=8, b=8), fakes.FakeConfig(a=2, b=2)} & {c for _, c in timer.asked}


def test_nothing_right_is_no_best(run, fake, fakes):
    timer = fakes.Timer({c: "wrong" for c in fake.valid()[0]})
    assert run(timer).best is None


def test_each_trial_is_on_disk_before_the_next_begins(run, fakes, store):
    path, seen = store().path, []

    class Looks(fakes.Timer):
        def samples(self, config, repeats, stop_above):
            entries = json.loads(path.read_text())["entries"] if path.exists() else []
            seen.append(len(entries[0]["trials"]) if entries else 0)
            return super().samples(config, repeats, stop_above)

    run(Looks(), settings=Settings(slack=2.0))
    assert seen[:17] == list(range(17))


def test_running_again_measures_nothing(run, store, fakes):
    run()

    def make():
        raise AssertionError("inputs drawn for nothing")

    again = search(store(), make, fakes.Compiler())
    assert again.measured == 0 and again.known > 0 and again.best["config"]["a"] == 8


def test_running_again_measures_nothing_though_the_last_were_timed_on_a_hotter_chip(run, store, fakes):
    """Else those that were timed once look faster than the confirmed ones, and are the next to be confirmed."""

    class Hot(fakes.Timer):
        def interleaved(self, configs, rounds):
            return [[2 * x for x in samples] for samples in super().interleaved(configs, rounds)]

    first = run(Hot(), settings=Settings(slack=2.0))
    timer = Hot()
    again = run(timer, settings=Settings(slack=2.0))
    assert timer.asked == [] and again.measured == 0 and again.best == first.best


def test_a_new_value_is_all_that_is_measured(run, store, fake, fakes, monkeypatch):
    run(settings=Settings(slack=2.0))
    larger = type(fake)()
    monkeypatch.setattr(larger, "space", {**fake.space, "a": (1, 2, 4, 8, 9, 16)}, raising=False)
    monkeypatch.setattr(fakes, "true_seconds", lambda c: 5e-4 if c.a == 9 else 1e-3 + c.b * 1e-5)
    timer = fakes.Timer()
    old = store()
    of = Store(old.path.parents[1], larger, old.workload, fakes.DEVICE, fakes.TOOLCHAIN, fakes.PROTOCOL)
    outcome = run(timer, of=of, settings=Settings(slack=2.0))
    # The three new ones, and whoever meets them in later rounds.
    assert {c.a for c in timer.timed()[:3]} == {9} and outcome.best["config"]["a"] == 9
    checked = [c for what, c in timer.asked if what == "check"]
    assert {c.a for c in checked[:3]} == {9} and len(checked) <= 6
    assert (
        of.entry
        and json.loads(of.path.read_text())["header"]["kernel"]["space"] == larger.space_hash != fake.space_hash
    )


def test_the_budget_ends_it_and_the_next_run_goes_on(run, fakes, store):
    now = [0.0]
    timer = fakes.Timer(now=now)
    options = {"settings": Settings(slack=2.0), "clock": lambda: now[0]}
    first = run(timer, budget=10.0, **options)
    assert first.left == 17 - 6 and first.best is not None  # 60 % of the time is the first stage's
    assert [c for what, c in timer.asked if what == "interleaved"]  # there was time left to confirm
    timer = fakes.Timer(now=now)
    second = run(timer, **options)
    assert second.known == 6 and second.left == 0 and second.best["config"]["b"] == 4


def test_the_best_of_before_comes_first_in_another_environment(run, store, fakes):
    run()
    timer = fakes.Timer()
    run(timer, of=store(toolchain={**fakes.TOOLCHAIN, "cuda": "13.1"}))
    assert timer.timed()[0] == fakes.FakeConfig(a=8, b=4) and timer.timed()[1] == fakes.FakeConfig()
    data = cache.read(store().path)
    assert len(data["header"]["provenances"]) == 2 and len(data["entries"]) == 1
    assert data["entries"][0]["best"]["provenance"] == store(toolchain={**fakes.TOOLCHAIN, "cuda": "13.1"}).id


def test_fresh_forgets_what_was_known(run, fakes, store):
    run(settings=Settings(slack=2.0))
    timer = fakes.Timer()
    run(timer, fresh=True, budget=0.0)
    assert timer.timed() == [] and store().best is not None  # nothing was lost for want of time
    run(timer, fresh=True, settings=Settings(slack=2.0))
    assert len(set(timer.timed())) == 17


def test_a_measurement_that_breaks_the_gpu_loses_nothing(run, trials, fakes, fake):
    bad = fakes.FakeConfig(a=8, b=4)
    with pytest.raises(RuntimeError, match="illegal address"):
        run(fakes.Timer({bad: RuntimeError("illegal address")}))
    assert trials() and bad.to_json() not in [t["config"] for t in trials()]


def test_a_guided_search_finds_it_with_fewer(run, fakes):
    timer = fakes.Timer()
    outcome = run(timer, settings=Settings(slack=9.0, guided=12))
    assert len(set(timer.timed())) == 12 and outcome.best["seconds"] < 1.3e-3


def test_workloads_of_one_file_keep_apart(run, store):
    run()
    run(of=store("m128n64"))
    entries = cache.read(store().path)["entries"]
    assert [e["workload"]["m"] for e in entries] == [128, 64] or [e["workload"]["m"] for e in entries] == [64, 128]
    assert dataclasses.asdict(store().workload)["sizes"]
