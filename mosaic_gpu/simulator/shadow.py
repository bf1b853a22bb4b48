"""Shadow memory: who accessed what last, kept for each region that operations address as a whole.

The regions of a memory are the parts into which all footprints so far cut it: two bytes are in one region as long as no
access has touched one of them alone.  So what is remembered is exact, and an access costs a few steps in Python whatever
its size.  `fine` makes every byte a region.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Line
from .clocks import FENCED, ORDER, TMEM, Rows

Bytes = npt.NDArray[Any]
GENERIC, ASYNC, TENSOR = "generic", "async", "tensor"
# `same` of copies into tensor memory is (COPIED, number), of what products read there READ: a copy is in order with the products
# that its issuer starts later, and with nothing else.
COPIED, READ = "copied", "read"
LOADED, STORED = "wait_load_tmem()", "commit_tmem()"  # what ends loads from and stores to tensor memory


class Access:
    """One access by an agent at its clock.

    proxy: 'generic', 'async' (TMA and MMAs on shared memory, TMA on global) or 'tensor' (tensor memory); op: what it is
    for messages; same: equal for two accesses of an agent that are in order by themselves: the same elements in the same
    threads, or products that follow each other in the tensor core's pipeline; apart: whether two different `same` of an
    agent never touch one element from two threads; cleared_by: a barrier or wait that ends it; warpgroup: whose it is.
    """

    __slots__ = (
        "agent",
        "apart",
        "cleared_by",
        "clock",
        "key",
        "line",
        "op",
        "proxy",
        "same",
        "warpgroup",
        "who",
        "write",
    )

    def __init__(
        self,
        agent: int,
        clock: int,
        proxy: str,
        write: bool,
        op: str,
        who: str,
        line: Line | None,
        same: Hashable = None,
        cleared_by: str = "",
        warpgroup: Hashable = None,
        apart: Callable[[Any, Any], bool] | None = None,
    ) -> None:
        self.agent, self.clock, self.proxy, self.write = agent, clock, proxy, write
        self.op, self.who, self.line, self.same, self.cleared_by = op, who, line, same, cleared_by
        self.warpgroup, self.apart = warpgroup, apart
        self.key = agent if same is None else (agent, same)

    @property
    def moves_tmem(self) -> bool:
        """Whether it is a load from tensor memory, or a store to it: every thread's own lanes, which that thread waits for."""
        return self.proxy == TENSOR and self.cleared_by in (LOADED, STORED)


def _copied(access: Access) -> bool:
    return isinstance(access.same, tuple) and access.same[0] == COPIED


def unordered(before: Access, after: Access, known: Rows) -> str:
    """Why `after`, by one who knows `known`, does not come after `before`: '' (it does), 'order', 'fence' or 'tmem'."""
    if before.agent == after.agent and before.same is not None and before.same == after.same:
        # In program order of a thread; another proxy would need a fence even so.
        if before.proxy == after.proxy:
            return ""
    if before.agent == after.agent and after.same is not None and _copied(before) and not _copied(after):
        return ""
    clock, agent = before.clock, before.agent
    if after.proxy == TENSOR:
        if known[TMEM, agent] >= clock:
            return ""
        return "tmem" if known[ORDER, agent] >= clock else "order"
    if before.write and before.proxy == GENERIC and after.proxy == ASYNC:
        if known[FENCED, agent] >= clock:
            return ""
        return "fence" if known[ORDER, agent] >= clock or before.warpgroup == after.warpgroup else "order"
    if known[ORDER, agent] >= clock:
        return ""
    if before.apart is not None and after.apart is not None and agent == after.agent and before.proxy == after.proxy:
        return "" if before.apart(before.same, after.same) else "order"
    return "order"


class Partition:
    """Cuts `size` bytes (or columns) into regions; shared by all blocks of a simulation, as their operations are the same."""

    def __init__(self, size: int, fine: bool = False) -> None:
        self.fine = fine
        self.region_of = np.arange(size) if fine else np.zeros(size, np.int64)
        self.sizes = [1] * size if fine else [size]
        self.footprints: dict[Hashable, list[int]] = {}
        self._users: list[list[list[int]]] = [] if fine else [[]]
        self.shadows: list[ShadowMemory] = []

    def footprint(self, key: Hashable, bytes_of: Callable[[], Bytes]) -> list[int]:
        """The regions of what an operation touches.  key: tells footprints apart; bytes_of: computed the first time."""
        found = self.footprints.get(key)
        return found if found is not None else self._add(key, bytes_of())

    def _add(self, key: Hashable, touched: Bytes) -> list[int]:
        touched = np.unique(touched)
        if self.fine:
            regions: list[int] = touched.tolist()
        else:
            regions = []
            of_each = self.region_of[touched]
            for region, n in zip(*np.unique(of_each, return_counts=True), strict=True):
                whole = n == self.sizes[region]
                regions.append(int(region) if whole else self._split(int(region), touched[of_each == region]))
            for region in regions:
                self._users[region].append(regions)
        self.footprints[key] = regions
        return regions

    def _split(self, old: int, part: Bytes) -> int:
        """Make `part` of a region one of its own, with the same history."""
        new = len(self.sizes)
        self.region_of[part] = new
        self.sizes.append(len(part))
        self.sizes[old] -= len(part)
        self._users.append(list(self._users[old]))
        for regions in self._users[old]:
            regions.append(new)
        for shadow in self.shadows:
            shadow.split(old)
        return new


Report = Callable[[Access, Access, str, int], Exception]


class ShadowMemory:
    """The accesses to one memory.  report: (before, after, why, region) -> the error to raise."""

    def __init__(self, partition: Partition, report: Report) -> None:
        self.partition, self.report = partition, report
        count = len(partition.sizes)
        self.writers: list[Access | None] = [None] * count
        self.readers: list[dict[Hashable, Access]] = [{} for _ in range(count)]
        partition.shadows.append(self)

    def close(self) -> None:
        self.partition.shadows.remove(self)

    def split(self, old: int) -> None:
        self.writers.append(self.writers[old])
        self.readers.append(dict(self.readers[old]))

    def wrote(self, address: Bytes, written: Bytes) -> list[tuple[str, Line | None, Bytes]]:
        """Who last wrote the elements at these addresses that are written: (operation, line, which of the elements)."""
        found: dict[tuple[str, Line | None], Bytes] = {}
        region_of = self.partition.region_of[address]
        for region in np.unique(region_of[written]):
            writer = self.writers[region]
            if writer is not None:
                mask = written & (region_of == region)
                key = (writer.op, writer.line)
                found[key] = found[key] | mask if key in found else mask
        return [(op, line, mask) for (op, line), mask in found.items()]

    def read(self, regions: Sequence[int], access: Access, known: Rows) -> None:
        """Check and note that `access` reads regions."""
        seen: Access | None = None
        for region in regions:
            writer = self.writers[region]
            if writer is not None and writer is not seen:
                why = unordered(writer, access, known)
                if why:
                    raise self.report(writer, access, why, region)
                seen = writer
            self.readers[region][access.key] = access

    def write(self, regions: Sequence[int], access: Access, known: Rows) -> None:
        """Check and note that `access` writes regions."""
        for region in regions:
            readers, writer = self.readers[region], self.writers[region]
            follows = False
            for reader in readers.values():
                why = unordered(reader, access, known)
                if why:
                    raise self.report(reader, access, why, region)
                # What was read is older than its reader.  Only an asynchronous one shows that the fence was there.
                follows = follows or reader.proxy == access.proxy or access.proxy == GENERIC
            if writer is not None and not follows:
                why = unordered(writer, access, known)
                if why:
                    raise self.report(writer, access, why, region)
            if readers:
                readers.clear()
            self.writers[region] = access
