"""Shadow of an array in global memory: for each element, who wrote it last and who has read it since.

Only arrays that the kernel writes have one, and what was read is kept only where the kernel reads such an array.  Blocks of
different clusters are ordered by semaphores only; where there are none they run one after the other, all the same.  Copies
that add are atomic with each other, and so are threads' atomic updates: they need no order among them, and one with
everything else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .clocks import Rows
from .shadow import ASYNC, GENERIC, Access, unordered

Part = npt.NDArray[np.int32]
ADDITION = "copy_smem_to_gmem(reduction_op='add')"  # how an access by a copy that adds is called
UPDATE = "an atomic update"  # by a thread
ATOMIC = (ADDITION, UPDATE)
Report = Callable[[Access, Access, str], Exception]


def _distinct(part: Part) -> list[int]:
    """The numbers that occur in it."""
    if part.size == 0:
        return []
    first = part.flat[0]
    found: list[int] = [int(first)] if (part == first).all() else np.unique(part).tolist()
    return found


class GlobalShadow:
    """writers: number of the last access that wrote each element, 0 for none; readers: number of the set of those that have
    read it, or added to it, since; records: (cluster, access) by number.

    several: the kernel reads the array, or adds to it.  ordered: clusters may be ordered with each other, by semaphores."""

    def __init__(self, shape: tuple[int, ...], several: bool, ordered: bool = False) -> None:
        self.ordered = ordered
        self.writers = np.zeros(shape, np.int32)
        self.readers = np.zeros(shape, np.int32) if several else None
        self.records: list[tuple[int, Access] | None] = [None]
        self.sets: list[frozenset[int]] = [frozenset()]
        self.numbers: dict[frozenset[int], int] = {frozenset(): 0}

    def read(
        self, writers: Part, readers: Part | None, access: Access, cluster: int, known: Rows, report: Report
    ) -> None:
        """`access` reads the elements that these parts of `writers` and `readers` stand for."""
        for n in _distinct(writers):
            self._check(n, access, cluster, known, report)
        if readers is not None:
            self._join(readers, access, cluster, known, report)

    def add(
        self, writers: Part, readers: Part | None, access: Access, cluster: int, known: Rows, report: Report
    ) -> None:
        """`access` updates them, atomically."""
        assert readers is not None
        self.read(writers, readers, access, cluster, known, report)

    def _join(self, readers: Part, access: Access, cluster: int, known: Rows, report: Report) -> None:
        """One more in the sets of those that came since the last write, of which it must follow those of the other kind."""
        number = self._record(access, cluster)
        for n in _distinct(readers):
            for other in self.sets[n]:
                record = self.records[other]
                if record is not None and record[1].op != access.op and (record[1].write or access.write):
                    self._check(other, access, cluster, known, report)
            both = self.sets[n] | {number}
            if both not in self.numbers:
                self.numbers[both] = len(self.sets)
                self.sets.append(both)
            readers[readers == n] = self.numbers[both]

    def write(
        self, writers: Part, readers: Part | None, access: Access, cluster: int, known: Rows, report: Report
    ) -> None:
        """`access` writes them."""
        if readers is not None:
            for n in _distinct(readers):
                for reader in self.sets[n]:
                    self._check(reader, access, cluster, known, report)
            readers[...] = 0
        for n in _distinct(writers):
            self._check(n, access, cluster, known, report)
        writers[...] = self._record(access, cluster)

    def _record(self, access: Access, cluster: int) -> int:
        self.records.append((cluster, access))
        return len(self.records) - 1

    def _check(self, number: int, access: Access, cluster: int, known: Rows, report: Report) -> None:
        record = self.records[number]
        if record is None:
            return
        where, before = record
        if where != cluster and not self.ordered:
            raise report(before, access, "grid")
        why = unordered(before, access, known)
        if where != cluster and why == "order":
            raise report(before, access, "grid")
        if before.write and before.proxy == GENERIC and access.proxy == ASYNC and why in ("", "fence"):
            # commit_smem's fence is for shared memory; a later access by TMA may still meet the old bytes.
            raise report(before, access, "global fence")
        if why:
            raise report(before, access, why)
