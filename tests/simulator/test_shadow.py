"""Shadow memory in regions says what shadow memory in bytes says, whatever the footprints; vector clocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_gpu.errors import BarrierMisuse, Line
from mosaic_gpu.simulator.barriers import Arrival, MBarrier, NamedBarrier, Sight
from mosaic_gpu.simulator.clocks import FENCED, ORDER, RUN, TMEM, ThreadClock
from mosaic_gpu.simulator.global_shadow import GlobalShadow
from mosaic_gpu.simulator.shadow import ASYNC, GENERIC, TENSOR, Access, Partition, ShadowMemory, unordered

SIZE = 24
AGENTS = 3


class Found(Exception):
    pass


def report(before: Access, after: Access, why: str, region: int) -> Exception:
    return Found(before.clock, before.agent, after.clock, why)


@dataclasses.dataclass(frozen=True)
class Event:
    """An access of an agent, or (start < 0) its release to another."""

    agent: int
    start: int
    length: int
    write: bool
    proxy: str
    to: int
    fence: bool


events = st.lists(
    st.builds(
        Event,
        st.integers(0, AGENTS - 1),
        st.integers(-3, SIZE - 1),
        st.integers(1, SIZE),
        st.booleans(),
        st.sampled_from((GENERIC, ASYNC)),
        st.integers(0, AGENTS - 1),
        st.booleans(),
    ),
    max_size=60,
)


def play(sequence: list[Event], fine: bool) -> list[tuple[int, tuple]]:
    """Findings (number of the event, what) of a sequence; an access with a finding is not noted."""
    shadow = ShadowMemory(Partition(SIZE, fine), report)
    clocks = [ThreadClock(i, np.zeros((4, AGENTS), np.int64), True, False) for i in range(AGENTS)]
    out = []
    for number, e in enumerate(sequence):
        clock = clocks[e.agent]
        if e.start < 0:
            if e.fence:
                clock.fence_async([])
            clocks[e.to].acquire(clock.release())
            continue
        touched = np.arange(e.start, min(SIZE, e.start + e.length))
        regions = shadow.partition.footprint((e.start, len(touched)), lambda touched=touched: touched)
        access = Access(e.agent, clock.now, e.proxy, e.write, "test", "", None)
        known = clock.known()
        try:  # all of it is checked before any is noted, so that regions and bytes note the same
            for region in regions:
                probe = ShadowMemory(Partition(1), report)
                probe.writers, probe.readers = [shadow.writers[region]], [dict(shadow.readers[region])]
                (probe.write if e.write else probe.read)([0], access, known)
        except Found as f:
            out.append((number, f.args))
            continue
        (shadow.write if e.write else shadow.read)(regions, access, known)
    return out


@settings(max_examples=300, deadline=None)
@given(events)
def test_regions_say_what_bytes_say(sequence):
    coarse, fine = play(sequence, False), play(sequence, True)
    assert [n for n, _ in coarse] == [n for n, _ in fine]


def test_regions_stay_few():
    p = Partition(1 << 16)
    for i in range(4):
        p.footprint(("slot", i), lambda i=i: np.arange(i << 14, (i + 1) << 14))
        for half in range(2):
            start = (i << 14) + (half << 13)
            regions = p.footprint(("half", i, half), lambda start=start: np.arange(start, start + (1 << 13)))
            assert len(regions) == 1
    assert len(p.sizes) == 8 and sorted(p.sizes) == [1 << 13] * 8
    assert sorted(p.footprint(("slot", 2), lambda: np.zeros(0))) == sorted(
        p.footprint(("half", 2, 0), lambda: np.zeros(0)) + p.footprint(("half", 2, 1), lambda: np.zeros(0))
    )


def test_a_split_keeps_the_history():
    p = Partition(8)
    shadow = ShadowMemory(p, report)
    nothing = np.zeros((4, 2), np.int64)
    shadow.write(p.footprint("all", lambda: np.arange(8)), Access(0, 1, GENERIC, True, "w", "", None), nothing)
    part = p.footprint("part", lambda: np.arange(2, 5))
    with pytest.raises(Found):
        shadow.read(part, Access(1, 1, GENERIC, False, "r", "", None), nothing)
    assert len(p.footprint("all", lambda: np.arange(8))) == 2


# ---- clocks ---------------------------------------------------------------------------------------------------------
def clock(agent: int, single: bool = False, tensor: bool = False) -> ThreadClock:
    return ThreadClock(agent, np.zeros((4, 4), np.int64), single, tensor)


def write(by: ThreadClock, proxy: str = GENERIC) -> Access:
    return Access(by.agent, by.now, proxy, True, "w", "", None, warpgroup=by.agent)


def read(by: ThreadClock, proxy: str = GENERIC) -> Access:
    return Access(by.agent, by.now, proxy, False, "r", "", None, warpgroup=by.agent)


def test_release_and_acquire():
    a, b, c = clock(0), clock(1), clock(2)
    w = write(a)
    assert unordered(w, read(b), b.known()) == "order"
    b.acquire(a.release())
    assert unordered(w, read(b), b.known()) == ""
    assert unordered(write(a), read(b), b.known()) == "order"  # after the release
    c.acquire(b.release())
    assert unordered(w, read(c), c.known()) == ""  # handed on


def test_one_threads_release_does_not_speak_for_the_others():
    a, b = clock(0), clock(1)
    w = write(a)
    b.acquire(a.release(every=False))
    assert unordered(w, read(b), b.known()) == "order"
    a.meet()
    b.acquire(a.release(every=False))
    assert unordered(w, read(b), b.known()) == ""


def test_fence_comes_before_the_release():
    a, b = clock(0), clock(1)
    w = write(a)
    b.acquire(a.release())
    assert unordered(w, read(b, ASYNC), b.known()) == "fence"
    b.fence_async([])  # the reader's
    assert unordered(w, read(b, ASYNC), b.known()) == "fence"
    a.fence_async([])
    a.meet()
    b.acquire(a.release())
    assert unordered(w, read(b, ASYNC), b.known()) == ""


def test_reads_need_no_fence_before_asynchronous_writes():
    a, b = clock(0), clock(1)
    r = read(a)
    b.acquire(a.release())
    assert unordered(r, write(b, ASYNC), b.known()) == ""


def test_tensor_memory_needs_both_fences():
    for before, after, why in (
        (False, False, "tmem"),
        (True, False, "tmem"),
        (False, True, "tmem"),
        (True, True, ""),
    ):
        a, b = clock(0, tensor=True), clock(1, tensor=True)
        a.observe(2, 1)  # it has seen a product
        product = Access(2, 1, TENSOR, True, "mma", "", None)
        if before:
            a.fence_before()
        b.acquire(a.release())
        if after:
            b.fence_after()
        assert unordered(product, read(b, TENSOR), b.known()) == why


def test_started_work_hands_on_nothing_but_that_it_was_reached():
    a, b = clock(0, single=True), clock(1)
    w = write(a)
    b.acquire(a.started())
    assert unordered(w, read(b), b.known()) == "order"
    assert w.clock <= b.known()[RUN, 0] < a.now and not b.known()[[ORDER, FENCED, TMEM]].any()


# ---- barriers -------------------------------------------------------------------------------------------------------
HERE = Line("kernel.py", 7)


def test_phase_that_may_end_before_the_last_was_seen():
    """C6"""
    a, b = clock(0), clock(1)
    barrier = MBarrier("b[0]", 1, agent=3)
    barrier.arrive(Arrival("a", HERE, 1), a.release())
    barrier.see(Sight(1, b.now, "b", HERE, 1))
    b.acquire(barrier.clock)
    with pytest.raises(BarrierMisuse, match="phase 1 can end before b has seen the end of phase 0"):
        barrier.arrive(Arrival("a", HERE, 1), a.release())


def test_phases_in_order():
    a, b = clock(0), clock(1)
    barrier = MBarrier("b[0]", 1, agent=3)
    for phase in range(3):
        barrier.arrive(Arrival("a", HERE, 1), a.release())
        barrier.see(Sight(1, b.now, "b", HERE, phase + 1))
        b.acquire(barrier.clock)
        a.acquire(b.release())
    assert barrier.clock[ORDER, 3] == 3  # copies counted by completed phases have landed


def test_named_barrier_again_too_soon():
    """G2"""
    a, b = clock(0), clock(1)
    n = NamedBarrier("n[0]", threads=256)
    for c, who in ((a, "a"), (b, "b")):
        now = c.now
        n.arrive(who, HERE, c.release(), c.agent, now)
    with pytest.raises(BarrierMisuse, match="a may arrive twice before b has come once"):
        n.arrive("a", HERE, a.release(), 0, a.now)
    a.acquire(n.clocks[0])
    assert n.arrive("a", HERE, a.release(), 0, a.now) == 1


# ---- global memory --------------------------------------------------------------------------------------------------
def test_global_shadow():
    def fail(before: Access, after: Access, why: str) -> Exception:
        return Found(why)

    shadow = GlobalShadow((4, 4), True)
    a, b = clock(0, single=True), clock(1, single=True)
    top, bottom = np.s_[:2], np.s_[2:]

    def go(part, by, cluster, write_it):
        access = write(by) if write_it else read(by)
        check = shadow.write if write_it else shadow.read
        check(shadow.writers[part], shadow.readers[part], access, cluster, by.known(), fail)

    go(top, a, 0, True)
    go(bottom, b, 1, True)
    with pytest.raises(Found, match="grid"):
        go(np.s_[:], a, 0, False)
    b.acquire(a.release())
    go(top, b, 0, False)
    with pytest.raises(Found, match="order"):
        go(np.s_[1:2, 1:], a, 0, True)
    a.acquire(b.release())
    go(np.s_[1:2, 1:], a, 0, True)
    with pytest.raises(Found, match="grid"):
        go(np.s_[0], a, 3, True)
