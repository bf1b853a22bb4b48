"""Vector clocks: what has happened before what, as a thread of the kernel may know it.

An *agent* is something whose work is done in an order: a warpgroup (or a warp under `warp_map`), the wgmma groups of a
warpgroup, the bulk groups and the tcgen05 products of the warp that issues them, the copies that a barrier counts.  Work
is stamped with its agent and that agent's clock; a thread's knowledge is a number for each agent: all up to there has
happened before.  It has four rows, as the hardware orders in four ways (PTX ISA 8.9, 9.7.16.6):

ORDER   what ordinary synchronisation orders: generic accesses, and asynchronous ones whose completion was observed;
FENCED  which generic accesses the asynchronous proxy sees too: those that their own thread fenced, then synchronised;
RUN     what has been executed, whether or not its effects are visible: what a barrier's phases are ordered by;
TMEM    which accesses to tensor memory come first: handed on and taken over by tcgen05 fences only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan.model import Block, Plan

ORDER, FENCED, RUN, TMEM = 0, 1, 2, 3
Rows = npt.NDArray[np.int64]


def _has_warp_map(body: Block) -> bool:
    return any(s.equation.op == "warp_map" or any(_has_warp_map(r) for r in s.regions) for s in body.steps)


class Agents:
    """Numbers the agents of a cluster.  warps: those of a warpgroup that may do something on their own."""

    def __init__(self, plan: Plan, blocks: int) -> None:
        self.warps = 4 if any(_has_warp_map(r.body) for r in plan.roles) else 1
        self._warpgroup = 4 + 4 * self.warps
        offset = self._warpgroup * plan.program.num_threads
        self._barriers: dict[int, int] = {}
        for id, array in plan.barriers.items():
            self._barriers[id] = offset
            offset += array.count
        self._block = offset
        self.total = offset * blocks

    def thread(self, block: int, warpgroup: int, warp: int | None = None) -> int:
        """Generic accesses of a warpgroup, or of one of its warps on its own."""
        base = block * self._block + warpgroup * self._warpgroup
        return base if warp is None else base + 4 + warp

    def wgmma(self, block: int, warpgroup: int) -> int:
        return self.thread(block, warpgroup) + 1

    def tmem(self, block: int, warpgroup: int) -> tuple[int, int]:
        """Loads from and stores to tensor memory."""
        return self.thread(block, warpgroup) + 2, self.thread(block, warpgroup) + 3

    def issuer(self, block: int, warpgroup: int, warp: int, kind: int) -> int:
        """What the elected lane of a warp issues.  kind: 1 reads, 2 writes of its bulk groups; 3 its tcgen05 products."""
        return self.thread(block, warpgroup) + 4 + kind * self.warps + warp % self.warps

    def barriers(self, block: int) -> range:
        """What all barriers of a block count."""
        end = (block + 1) * self._block
        return range(block * self._block + min(self._barriers.values(), default=self._block), end)

    def barrier(self, block: int, array: int, slot: int) -> int:
        return block * self._block + self._barriers[array] + slot


class ThreadClock:
    """What a warpgroup knows, or a warp on its own.

    rows: knowledge, of all its warps together or (after a `warp_map`, until they meet) of each of the four.
    single: one thread, so its own accesses are ordered as they come.  Those of a warpgroup's 128 threads are ordered with
    each other only where these meet or wait for each other.
    """

    def __init__(
        self, agent: int, rows: Rows, single: bool, tensor: bool, transfers: tuple[int, int] | None = None
    ) -> None:
        self.agent, self.single, self.tensor, self.transfers = agent, single, tensor, transfers
        self.rows = [rows]
        self.now = 0
        # Asynchronous loads from and stores to tensor memory that every warp has waited for, each its own part.
        self.moved = [0, 0]
        # Tensor memory: what acquired barriers offer until a fence takes it over; what the last fence has handed on.
        self.offered = np.zeros(rows.shape[1], np.int64)
        self.handed = np.zeros(rows.shape[1], np.int64)
        self._tick()

    def _tick(self) -> None:
        self.now += 1
        if self.single:
            self.rows[0][ORDER, self.agent] = self.now

    def _moved(self) -> list[tuple[int, int]]:
        """(agent, how far it has been waited for) of its loads from and stores to tensor memory."""
        return [] if self.transfers is None else list(zip(self.transfers, self.moved, strict=True))

    def known_of_own_lanes(self) -> Rows:
        """What each warp knows of the lanes of tensor memory that it alone reaches: its own loads and stores, once waited for,
        need no meeting of the warps."""
        out = self.known().copy()
        for agent, done in self._moved():
            out[TMEM, agent] = max(out[TMEM, agent], done)
        return out

    def known(self) -> Rows:
        """What all of it know."""
        return self.rows[0] if len(self.rows) == 1 else np.minimum.reduce(self.rows)

    def elected(self) -> Rows:
        """What its elected thread knows, which is in its first warp."""
        return self.rows[0]

    def release(self, every: bool = True) -> Rows:
        """What an arrival hands on: of all its warps, or of the elected thread alone."""
        out: Rows = (self.rows[0] if not every or len(self.rows) == 1 else np.maximum.reduce(self.rows)).copy()
        if every:
            out[ORDER, self.agent] = self.now
            for agent, done in self._moved():
                out[ORDER, agent] = done
        out[RUN, self.agent] = self.now
        out[TMEM] = self.handed
        self._tick()
        return out

    def started(self) -> Rows:
        """What asynchronous work hands on by its completion: that its issue has been reached, nothing else."""
        out: Rows = np.zeros_like(self.rows[0])
        out[RUN] = self.rows[0][RUN]
        out[RUN, self.agent] = self.now
        self._tick()
        return out

    def acquire(self, released: Rows) -> None:
        for rows in self.rows:
            np.maximum(rows[:TMEM], released[:TMEM], out=rows[:TMEM])
        if self.tensor:
            np.maximum(self.offered, released[TMEM], out=self.offered)

    def observe(self, agent: int, clock: int) -> None:
        """All of it have seen an agent's work up to `clock` completed."""
        for rows in self.rows:
            rows[:, agent] = np.maximum(rows[:, agent], clock)

    def meet(self) -> None:
        """All its threads have waited for each other."""
        rows = self.rows[0] if len(self.rows) == 1 else np.maximum.reduce(self.rows)
        rows[ORDER, self.agent] = self.now
        for agent, done in self._moved():
            rows[ORDER, agent] = rows[TMEM, agent] = done
        self.rows = [rows]
        self._tick()

    def fence_async(self, others: list[int]) -> None:
        """fence.proxy.async by all its threads.  others: agents whose work it covers as far as it is known."""
        for rows in self.rows:
            rows[FENCED, self.agent] = self.now
            rows[FENCED, others] = rows[ORDER, others]

    def fence_before(self) -> None:
        """tcgen05.fence::before_thread_sync by all its threads."""
        self.handed = np.maximum.reduce([r[TMEM] for r in self.rows])
        for agent, done in self._moved():
            self.handed[agent] = done

    def fence_after(self) -> None:
        """tcgen05.fence::after_thread_sync by all its threads."""
        for rows in self.rows:
            np.maximum(rows[TMEM], self.offered, out=rows[TMEM])
