"""The Plan: everything decided about a kernel before it is emitted or simulated, as plain frozen data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..errors import Line
from ..layouts.registers import RegisterLayout
from ..layouts.shared import SharedLayout
from ..memory import BarrierInfo
from ..program import Equation, Operand, Program, Value

if TYPE_CHECKING:  # the ops themselves need this module
    from ..ops.registry import Generation, Scope
    from .contraction import Fma


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation with what was decided about it.

    data: what the op's plan rule returned.  waits: the implicit `wgmma.wait_group` N that must come first (None: none).
    fma: the fma that a sum of a product is (None: it is none).
    """

    equation: Equation
    data: Any = None
    regions: tuple[Block, ...] = ()
    waits: int | None = None
    fma: Fma | None = None


@dataclasses.dataclass(frozen=True)
class Block:
    """A planned region."""

    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Operand, ...] = ()


@dataclasses.dataclass(frozen=True)
class Role:
    """What a set of warpgroups (or warps) does.

    indices: the warpgroups (scope WARPGROUP) or warps of one warpgroup (scope WARP) that run `body`.
    single_thread: nothing in it needs more than one thread, so one elected thread runs it and the others wait at the end.
    layouts: register layout of every array value by id; absent: the value is a splat (one scalar stands for all elements).
    scratch: bytes from the start of shared memory of where its threads exchange elements, scratch_bytes for each warpgroup.
    registers: the budget that `set_max_registers` asks for and its line; None where it does not ask.
    """

    name: str
    scope: Scope
    indices: tuple[int, ...]
    body: Block
    layouts: dict[int, RegisterLayout]
    single_thread: bool
    registers: int | None = None
    registers_line: Line | None = None
    scratch: int = 0
    scratch_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class SharedBuffer:
    """A buffer in shared memory.  offset: bytes from the start of the block's dynamic shared memory."""

    value: Value
    layout: SharedLayout
    offset: int


@dataclasses.dataclass(frozen=True)
class BarrierArray:
    """An array of mbarriers.

    offset: bytes; count: how many; info: as declared; unit: hardware arrivals that make one of the user's (4 when
    warpgroups arrive warp by warp, else 1); expected: hardware arrivals that complete a phase.
    """

    value: Value
    offset: int
    count: int
    info: BarrierInfo
    unit: int
    expected: int


@dataclasses.dataclass(frozen=True)
class NamedBarrierArray:
    """Hardware barriers id .. id + count - 1, each for `threads` threads."""

    value: Value
    id: int
    count: int
    threads: int


@dataclasses.dataclass(frozen=True)
class TmemBuffer:
    """A buffer in tensor memory.  column: its first of 512; columns: how many it takes."""

    value: Value
    column: int
    columns: int


@dataclasses.dataclass(frozen=True)
class MapDim:
    """One dimension of a tensor map: steps of `step` elements along `axis` of the array.

    extent None: as many steps as the array has (a run-time number, it never enters the cubin); else fixed (the inside of a
    chunk, whose outside is another MapDim).
    """

    axis: int
    step: int = 1
    extent: int | None = None


@dataclasses.dataclass(frozen=True)
class TensorMapPlan:
    """A TMA descriptor to be made at launch from input `input`'s address and shape; box in elements, innermost first."""

    input: int
    dims: tuple[MapDim, ...]
    box: tuple[int, ...]
    swizzle: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class RuntimeDim:
    """An extent of a GMEM array that the code uses: an int32 kernel parameter, so that it does not enter the cubin."""

    input: int
    axis: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel ready to be emitted or simulated.

    buffers, barriers, named_barriers, tmem: by value id.  shared_bytes: dynamic shared memory of a block.
    tmem_pair: tensor memory and its products belong to a pair of blocks (`cta_group::2`).
    roles: the warpgroups' roles, in order of their first warpgroup.  warp_roles: by id of the `warp_map` equation's input.
    early: it may begin while earlier kernels run, for whose end it waits (programmatic dependent launch).
    pointers: inputs whose address is a parameter; multicast: those whose address in a multicast object is one; dims: extents that
    are parameters; maps: TMA descriptors.
    """

    program: Program
    generation: Generation
    arch: str
    roles: tuple[Role, ...]
    buffers: dict[int, SharedBuffer]
    barriers: dict[int, BarrierArray]
    named_barriers: dict[int, NamedBarrierArray]
    tmem: dict[int, TmemBuffer]
    shared_bytes: int
    tmem_columns: int
    tmem_address_offset: int
    tmem_pair: bool
    maps: tuple[TensorMapPlan, ...]
    pointers: tuple[int, ...]
    dims: tuple[RuntimeDim, ...]
    notes: tuple[str, ...] = ()
    early: bool = False
    multicast: tuple[int, ...] = ()

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return 128 * self.program.num_threads
