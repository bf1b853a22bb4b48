"""mbarriers and named barriers count as the hardware does."""

from __future__ import annotations

import pytest

from mosaic_gpu.errors import BarrierMisuse, Line
from mosaic_gpu.simulator.barriers import Arrival, MBarrier, NamedBarrier

HERE = Line("kernel.py", 7)


def arrival(count: int = 1, who: str = "wg0") -> Arrival:
    return Arrival(who, HERE, count)


def test_phase_completes_after_all_arrivals_and_resets():
    b = MBarrier("b[0]", expected=2)
    b.arrive(arrival())
    assert (b.phase, b.pending) == (0, 1)
    b.arrive(arrival())
    assert (b.phase, b.pending, b.arrivals) == (1, 2, [])


def test_bytes_hold_a_phase_open():
    b = MBarrier("b[0]", expected=1)
    b.expect_tx(128)
    b.arrive(arrival())
    b.complete_tx(64)
    assert b.phase == 0
    b.complete_tx(64)
    assert b.phase == 1


def test_bytes_may_land_before_they_are_expected():
    b = MBarrier("b[0]", expected=1)
    b.complete_tx(64)
    assert b.phase == 0 and b.tx == -64
    b.expect_tx(64)
    b.arrive(arrival())
    assert b.phase == 1 and b.tx == 0


def test_arrival_too_many_while_bytes_are_missing():
    b = MBarrier("b[0]", expected=4, unit=4)
    b.expect_tx(16)
    b.arrive(arrival(4, "producer"))
    with pytest.raises(
        BarrierMisuse,
        match=r"(?s)b\[0\]: too many arrivals.*1 arrival.*16 bytes.*arrived: producer at .*arrives: wg1 at",
    ) as e:
        b.arrive(arrival(4, "wg1"))
    assert e.value.line == HERE


def test_missing_is_told_in_the_users_unit():
    b = MBarrier("b[0]", expected=8, unit=4)
    b.arrive(arrival(4))
    b.expect_tx(256)
    assert b.missing() == "1 arrival of 2 and 256 bytes"


def test_named_barrier_generations():
    b = NamedBarrier("n[0]", threads=256)
    assert b.arrive("wg0", HERE) == 0
    assert b.arrive("wg1", HERE) == 0
    assert b.generation == 1
    assert b.arrive("wg0", HERE) == 1


def test_named_barrier_twice_by_one():
    b = NamedBarrier("n[0]", threads=256)
    b.arrive("wg0", HERE)
    with pytest.raises(BarrierMisuse, match="wg0 arrives twice"):
        b.arrive("wg0", HERE)
