"""How many thread blocks of a kernel a multiprocessor holds at once, and which resource says so.

The limits are those of compute capabilities 9.0, 10.0 and 10.3, which are alike (CUDA Programming Guide, technical specifications
per compute capability); how resources are dealt out is the rule of NVIDIA's occupancy calculator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .model import Plan
from .resources import TMEM_COLUMNS

BLOCKS, WARPS, REGISTERS, SHARED = 32, 64, 65536, 233_472  # of a multiprocessor; shared memory in bytes
PARTITIONS = 4  # of its registers; a warpgroup has a warp in each
REGISTER_UNIT = 256  # registers that a warp gets more or fewer of
SHARED_UNIT, RESERVED = 128, 1024  # bytes: the step in which a block gets them, and what the system takes of each block


@dataclasses.dataclass(frozen=True)
class Residency:
    """blocks: how many fit a multiprocessor.  room: for how many each resource has room.  limited_by: those that have the least.

    The registers are those of the launch: what warpgroups hand over to each other by `set_max_registers` stays in the block.
    Where they are not known, as nothing was compiled, room has none for registers, and there may be fewer blocks.
    A block for which only columns of tensor memory are missing starts, and waits in its allocation until another one ends.
    """

    blocks: int
    room: dict[str, int]
    limited_by: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data, with the words for people under `text`."""
        return {"text": str(self), **dataclasses.asdict(self)}

    def __str__(self) -> str:
        words = f"{self.blocks} {'block fits' if self.blocks == 1 else 'blocks fit'} a multiprocessor"
        if "registers" not in self.room:
            words = f"at most {words} (registers unknown: not compiled)"
        others = [f"{name} {n}" for name, n in self.room.items() if name not in self.limited_by]
        rest = f"; room for {', '.join(others)}" if others else ""
        return f"{words}, limited by {' and '.join(self.limited_by)}{rest}"


def residency(plan: Plan, registers: int | None, shared_bytes: int | None = None) -> Residency:
    """Of a block of this plan.  registers: of a thread at launch, None if unknown; shared_bytes: None, those of the plan."""
    shared = plan.shared_bytes if shared_bytes is None else shared_bytes
    warps = plan.threads // 32
    room = {}
    if registers is not None:
        of_a_warp = -(-32 * max(registers, 1) // REGISTER_UNIT) * REGISTER_UNIT
        room["registers"] = REGISTERS // PARTITIONS // of_a_warp * PARTITIONS // warps
    room["shared memory"] = SHARED // (-(-shared // SHARED_UNIT) * SHARED_UNIT + RESERVED)
    if plan.tmem_columns:
        room["TMEM columns"] = TMEM_COLUMNS // plan.tmem_columns
    room["warps"], room["blocks"] = WARPS // warps, BLOCKS
    least = min(room.values())
    return Residency(least, room, tuple(name for name, n in room.items() if n == least))
