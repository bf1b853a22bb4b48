"""The two protocols on a fake GPU: order, rotation of inputs, head starts, what is measured."""

from __future__ import annotations

import pytest

from mosaic_gpu.bench.harness import measure_cell
from mosaic_gpu.bench.model import Options
from mosaic_gpu.bench.protocols import HOST_SECONDS, TURN_LAUNCHES, Session, turns

SHORT = Options(rounds=6, alone_seconds=0.05, alone_repeats=3)


def session(device, *providers):
    calls = {p.name: p.prepare(type("Cell", (), {"name": "c"}), None) for p in providers}
    for call in calls.values():
        call.first()
    return Session(device, calls)


def test_turns_rotate_and_turn_round():
    names = ["a", "b", "c"]
    orders = [turns(names, r) for r in range(6)]
    assert orders[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert orders[3:] == [o[::-1] for o in orders[:3]]
    for place in range(3):
        assert sorted(o[place] for o in orders) == sorted(names * 2), "everyone is as often at every place"
    assert sorted(turns(names, -1)) == names, "rounds of warming up count backwards"


def test_interleaved_measures_each_and_rotates_the_inputs(fakes):
    device = fakes.Device()
    fast, slow = fakes.Provider(device, "fast", 1e-3), fakes.Provider(device, "slow", 2e-3)
    s = session(device, fast, slow)
    device.launched.clear()
    found = s.interleaved(5)
    assert found == {"fast": [pytest.approx(1e-3)] * 5, "slow": [pytest.approx(2e-3)] * 5}
    sets = [i for _, i in device.launched]
    assert sets == list(range(sets[0], sets[0] + len(sets))), "no launch finds the inputs of the launch before in L2"
    turn = TURN_LAUNCHES + 1  # one is not counted
    names = [n for n, _ in device.launched][:: 2 * turn]
    assert len(set(names)) == 2, "each begins a round at times"


def test_slow_host_code_gets_a_head_start(fakes):
    """A library that takes longer to start a call than the GPU to run it is timed by its kernel all the same."""
    device = fakes.Device()
    quick = fakes.Provider(device, "quick", 100e-6, enqueue=5e-6)
    lazy = fakes.Provider(device, "lazy", 100e-6, enqueue=300e-6)
    s = session(device, quick, lazy)
    assert s.host_bound
    device.holds = 0
    found = s.interleaved(5)
    assert device.holds >= 10, "both get it in every round"
    assert found["lazy"] == [pytest.approx(100e-6)] * 5 == found["quick"]
    alone, _ = s.alone(["lazy", "quick"], 0.02, 2)
    assert alone["lazy"] == [pytest.approx(100e-6)] * 2


def test_alone_all_pause_where_one_must(fakes):
    """Pauses let a GPU cool: a library with a slow host must not be the only one that has them."""

    def holds(*names):
        device = fakes.Device()
        quick = fakes.Provider(device, "quick", 100e-6, enqueue=5e-6)
        lazy = fakes.Provider(device, "lazy", 100e-6, enqueue=300e-6)
        s = session(device, quick, lazy)
        device.holds = 0
        found, _ = s.alone(names, 0.02, 1)
        assert all(times == [pytest.approx(100e-6)] for times in found.values())
        return device.holds

    assert holds("quick") == 1, "one head start, and all in one go"
    assert holds("quick", "lazy") == 2 * holds("lazy") > 2


def test_alone_is_from_rest_in_random_order(fakes):
    device = fakes.Device()
    s = session(device, *[fakes.Provider(device, n, 1e-3) for n in "abc"])
    device.launched.clear()
    found, readings = s.alone(list("abc"), 0.1, 7)
    assert device.rests == 21 and {n: len(x) for n, x in found.items()} == {"a": 7, "b": 7, "c": 7}
    assert all(x == pytest.approx(1e-3) for times in found.values() for x in times)
    assert all(len(readings[n]) == 7 for n in "abc")
    runs = [n for i, (n, _) in enumerate(device.launched) if i == 0 or device.launched[i - 1][0] != n]
    assert len({tuple(runs[i : i + 3]) for i in range(0, len(runs), 3)}) > 1, "the order is drawn anew"
    assert device.launched.count(device.launched[0]) == 1 and len(device.launched) >= 21 * 100


def test_host_timed_batches_are_long(fakes):
    device = fakes.Device()
    s = session(device, fakes.Provider(device, "ours", 1e-3), fakes.HostProvider(device, "jax", 1e-3))
    timed = s.timed["jax"]
    assert timed.loops * 2 * 1e-3 >= 0.95 * HOST_SECONDS
    found = s.interleaved(4)
    assert found["jax"] == [pytest.approx(1e-3, rel=0.01)] * 4 and found["ours"] == [pytest.approx(1e-3)] * 4


def cell_record(fakes, device, *providers, options=SHORT):
    (cell,) = fakes.cells("c")
    return measure_cell(cell, fakes.Problem(device, cell, 0), providers, device, options)


def test_a_cell_that_is_won(fakes):
    device = fakes.Device()
    record = cell_record(
        fakes,
        device,
        fakes.Provider(device, "ours", 1.0e-3, ours=True, noise=0.01),
        fakes.Provider(device, "near", 1.05e-3, noise=0.01),
        fakes.Provider(device, "far", 2e-3),
        fakes.HostProvider(device, "jax", 1.5e-3),
    )
    assert record["verdict"] == "won" and record["chosen"] == "ours"
    for protocol in ("interleaved", "alone"):
        assert record["comparison"]["ours"][protocol]["peer"] == "near"
        assert record["comparison"]["ours"][protocol]["value"] == pytest.approx(1.05, rel=0.02)
    rows = record["providers"]
    assert rows["ours"]["interleaved"]["median"] == pytest.approx(1000, rel=0.02)
    assert "alone" in rows["near"] and "alone" not in rows["far"], "far behind, it cannot be the fastest alone"
    assert rows["jax"]["host_timed"] and 0 < rows["jax"]["host_overhead"] < 0.01
    assert len(rows["near"]["interleaved"]["samples"]) == SHORT.rounds and len(rows["near"]["readings"]) == 3


def test_the_best_of_several_configs_is_compared(fakes):
    device = fakes.Device()
    record = cell_record(
        fakes,
        device,
        fakes.Provider(device, "ours a", 1.2e-3, ours=True),
        fakes.Provider(device, "ours b", 1e-3, ours=True),
        fakes.Provider(device, "peer", 1.1e-3),
    )
    assert (record["chosen"], record["chosen_of"], record["verdict"]) == ("ours b", 2, "won")
    assert (
        record["comparison"]["ours a"]["interleaved"]["verdict"] == "lost"
        and "alone" not in record["comparison"]["ours a"]
    )


@pytest.mark.parametrize(
    ("options", "status", "verdict"),
    [
        ({"error": 1e-2}, "wrong", "wrong"),
        ({"error": float("nan")}, "wrong", "wrong"),
        ({"refuse": lambda cell: RuntimeError("no\nmore")}, "failed", "failed"),
        ({"again": False}, "wrong", "wrong"),
    ],
)
def test_ours_is_not_right(fakes, options, status, verdict):
    device = fakes.Device()
    record = cell_record(
        fakes,
        device,
        fakes.Provider(device, "ours", 1e-3, ours=True, **options),
        fakes.Provider(device, "peer", 2e-3),
    )
    assert record["providers"]["ours"]["status"] == status and record["verdict"] == verdict
    if "again" in options:
        assert "other bits" in record["providers"]["ours"]["message"], "seen after the timing"
    else:
        assert "interleaved" not in record["providers"]["ours"], "what is wrong is not timed"
        assert record["providers"]["peer"]["interleaved"]["median"] == pytest.approx(500)
    if status == "failed":
        assert record["providers"]["ours"]["message"] == "RuntimeError: no"


def test_unsupported_by_ours_and_peers(fakes):
    device = fakes.Device()

    def refuse(cell):
        return fakes.Unsupported("head dim 96")

    ours = fakes.Provider(device, "ours", 1e-3, ours=True, refuse=refuse)
    peer = fakes.Provider(device, "peer", 1e-3)
    record = cell_record(fakes, device, ours, peer)
    assert record["verdict"] == "unsupported" and record["providers"]["ours"]["message"] == "head dim 96"
    assert "alone" in record["providers"]["peer"], "the figure to beat is still wanted"
    absent = fakes.Provider(device, "peer", 1e-3, refuse=refuse)
    record = cell_record(fakes, device, fakes.Provider(device, "ours", 1e-3, ours=True), absent)
    assert record["verdict"] == "alone" and not record["comparison"]["ours"]


def test_a_lost_gpu_is_not_measured_on(fakes):
    device = fakes.Device()

    def refuse(cell):
        device.lost = True
        return RuntimeError("illegal address")

    bad = fakes.Provider(device, "ours", 1e-3, ours=True, refuse=refuse)
    with pytest.raises(fakes.Lost, match=r"after ours failed \(RuntimeError: illegal address\): gone"):
        cell_record(fakes, device, bad, fakes.Provider(device, "peer", 1e-3))
