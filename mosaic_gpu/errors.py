"""Every error the project raises: what it means, and how to get out of it.

All derive from `MosaicGpuError`.  An error carries the Python line of the request that caused it whenever there is one;
`str(error)` is the whole report.  Errors that JAX's users catch as `ValueError`, `TypeError` or `NotImplementedError`
are subclasses of those too.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the user's Python source: where a request was written."""

    file: str
    number: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" + (f" in {self.function}" if self.function else "")


class MosaicGpuError(Exception):
    """Base of all errors.  `line` is the Python line it is about (None where there is none)."""

    def __init__(self, message: str, line: Line | None = None) -> None:
        self.message = message
        self.line = line
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}\n  at {self.line}" if self.line is not None else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.line), self.__dict__  # the notes, too


class UnsupportedPrimitive(MosaicGpuError, NotImplementedError):
    """An operation has no rule in the table of this GPU generation and scope.  The message says what to write instead."""


class UnsupportedCall(MosaicGpuError, NotImplementedError):
    """The call does not fit (GPU generation, memory space, cluster, mesh, shape); raised before any primitive is looked at."""


class LayoutConflict(MosaicGpuError, ValueError):
    """Two register layouts meet in one operation.  The message names both lines and the `layout_cast` that settles it."""


class ResourceExceeded(MosaicGpuError, ValueError):
    """More shared memory, TMEM, barriers or threads than the GPU has; the message breaks the sum down by buffer."""


class RegisterBudgetError(MosaicGpuError, ValueError):
    """`set_max_registers` requests that cannot be met, or that the compiled kernel does not keep."""


class IllegalInstruction(MosaicGpuError, ValueError):
    """An instruction with a shape, type, layout, swizzle or placement that the hardware does not have; a store or copy between
    two shapes or dtypes."""


class InFlightError(MosaicGpuError, ValueError):
    """A register tile is touched while an asynchronous MMA owns it, and no reordering can avoid that."""


class BarrierNeverCompletes(MosaicGpuError, ValueError):
    """A wait on a barrier on which the whole kernel arrives too seldom for a single phase; the message names every line that
    arrives.  What only a run tells is a `Deadlock` of the simulator."""


class Race(MosaicGpuError, RuntimeError):
    """The simulator saw two accesses that nothing orders.

    kind: 'read/write' or 'write/write'; 'buffer in flight' (reused while TMA or an MMA still reads it); 'missing commit_smem'
    (a fence between the generic and the asynchronous proxy); 'missing tcgen05 fence'; 'accumulator in flight', 'register
    operand in flight' (an MMA still owns the registers).
    between: 'roles', 'warpgroup' (threads of one), 'cluster' (its blocks), 'grid' (blocks of different clusters).
    line, other_line: the later and the earlier access; who, other: their roles; place: buffer and slot; remedy: what would
    order them.
    """

    def __init__(
        self,
        message: str,
        line: Line | None = None,
        kind: str = "",
        *,
        between: str = "roles",
        other_line: Line | None = None,
        who: str = "",
        other: str = "",
        place: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(message, line)
        self.kind, self.between, self.other_line = kind, between, other_line
        self.who, self.other, self.place, self.remedy = who, other, place, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.line, self.kind), self.__dict__


class Deadlock(MosaicGpuError, RuntimeError):
    """Nothing can go on: the message names each warpgroup, its line, its barrier, what has arrived and what is missing."""


class UninitializedRead(MosaicGpuError, RuntimeError):
    """The simulator read memory that nothing has written."""


class OutOfBounds(MosaicGpuError, IndexError):
    """An index outside its buffer: static ones when the plan is made, run-time ones in the simulator."""


class BarrierMisuse(MosaicGpuError, RuntimeError):
    """A barrier used against its contract: too many arrivals, a phase that was never observed, bytes that do not add up."""


class Leak(MosaicGpuError, RuntimeError):
    """Something was still in flight or allocated when the kernel ended."""


class DebugCheckFailed(MosaicGpuError, RuntimeError):
    """A `debug_check` of the kernel did not hold in the simulator; on the GPU the launch ends with CUDA's assertion error."""


class ToolchainError(MosaicGpuError, RuntimeError):
    """NVRTC, the disassembler or the driver is missing or refuses; the message names the versions."""


class NoMulticastObject(MosaicGpuError, NotImplementedError):
    """A launch of a kernel with multimem operations, whose addresses are of a multicast object (NVLS): nothing here makes one."""


class DeviceMismatch(MosaicGpuError, ValueError):
    """A config or cubin of one GPU generation on a device of another."""


class CacheInvalid(MosaicGpuError, ValueError):
    """A tuning cache that does not fit this project, kernel or device."""
