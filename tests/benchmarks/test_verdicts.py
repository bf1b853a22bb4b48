"""Ratios, intervals, verdicts and means."""

from __future__ import annotations

import math
import random

import pytest

from mosaic_gpu.bench.verdicts import Ratio, compare, geometric_mean, overall


def around(middle, noise, n=40, seed=0):
    chance = random.Random(seed)
    return [middle * (1 + noise * chance.gauss(0, 1)) for _ in range(n)]


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (1.05, 1.01, 1.09, "won"),
        (1.0, 1.0, 1.0, "won"),
        (1.05, 0.9999, 1.09, "tied"),
        (0.995, 0.98, 1.01, "tied"),
        (0.99, 0.97, 1.0, "tied"),
        (0.985, 0.96, 1.01, "lost"),
        (0.995, 0.99, 0.999, "lost"),
        (math.nan, math.nan, math.nan, "lost"),
    ],
)
def test_verdict(value, low, high, verdict):
    assert Ratio("peer", value, low, high).verdict == verdict


def test_overall_is_the_worst():
    assert overall(["won", "won"]) == "won"
    assert overall(["won", "tied"]) == "tied"
    assert overall(["lost", "tied", "won"]) == "lost"


def test_the_interval_of_two_unlike_kernels_excludes_one():
    r = compare(around(700, 0.01), {"slow": around(500, 0.01, seed=1), "fast": around(650, 0.01, seed=2)}, paired=True)
    assert r.peer == "fast" and r.low < r.value < r.high
    assert r.low > 1.05 and r.high < 1.1 and r.verdict == "won"


def test_the_interval_of_two_equal_kernels_contains_one():
    """At 95 %: in nearly all of many pairs of samples from one distribution."""
    found = [
        compare(around(1, 0.02, seed=2 * i), {"peer": around(1, 0.02, seed=2 * i + 1)}, paired=False, resamples=1000)
        for i in range(100)
    ]
    assert 88 <= sum(r.low <= 1 <= r.high for r in found) <= 100


def test_pairs_cancel_what_slows_a_round_down():
    chance = random.Random(5)
    drift = [1 + 0.2 * chance.random() for _ in range(40)]
    ours, peer = [1.02 * x for x in drift], {"peer": drift}
    paired, apart = compare(ours, peer, paired=True), compare(ours, peer, paired=False)
    assert paired.low == pytest.approx(1.02) and paired.verdict == "won"
    assert apart.high - apart.low > 0.02 and apart.verdict == "tied"


def test_a_peer_that_is_best_by_luck_is_chosen_anew():
    """Among many equal peers the interval's lower end falls, since some peer is lucky in every resample."""
    peers = {f"p{i}": around(1, 0.02, 7, seed=i + 10) for i in range(8)}
    ours = around(1, 0.02, 7, seed=1)
    best = max(peers, key=lambda n: sorted(peers[n])[3])
    many, one = compare(ours, peers, paired=False), compare(ours, {best: peers[best]}, paired=False)
    assert many.peer == best and many.value == one.value and many.low <= one.low and many.high < one.high


def test_the_same_samples_give_the_same_interval():
    ours, peers = around(1, 0.1), {"p": around(1, 0.1, seed=3)}
    assert compare(ours, peers, paired=True) == compare(ours, peers, paired=True)


@pytest.mark.parametrize(
    ("ours", "peers", "paired", "words"),
    [
        ([], {"p": [1.0]}, False, "needs samples"),
        ([1.0], {}, False, "needs samples"),
        ([1.0], {"p": []}, False, "needs samples"),
        ([1.0], {"p": [1.0, 2.0]}, True, r"1 of ours, \[2\] of the peers"),
    ],
)
def test_nothing_to_compare(ours, peers, paired, words):
    with pytest.raises(ValueError, match=words):
        compare(ours, peers, paired=paired)


def test_geometric_mean():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)
    assert geometric_mean([1.1, 1.1, 1.1]) == pytest.approx(1.1)
    assert math.isnan(geometric_mean([]))
