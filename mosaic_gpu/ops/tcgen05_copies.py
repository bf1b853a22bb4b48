"""From shared memory to tensor memory by the tensor core (tcgen05.cp, PTX ISA 9.7.16.9): scale factors.

Asynchronous, issued by one thread.  A product that the same thread issues later has them; nothing else is in order by itself,
so that factors which a product may still read are overwritten only after a commit behind it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import arguments
from ..codegen.encodings import TCGEN05_VERSION, Descriptor
from ..errors import UnsupportedCall
from ..layouts.tmem import SCALE_ROWS, ScalesPart, scales_part
from ..program import Affine, Equation, View
from .registry import SM100, WARP, WARPGROUP, op
from .tcgen05 import ON_SM90, is_pair

copy_scales_p = op("async_copy_scales_to_tmem", issues_only=True, instead=ON_SM90)
CHUNK = (32, 16)  # rows x bytes that one instruction copies: 4 factors of each of 128 rows


@dataclasses.dataclass(frozen=True)
class ScalesCopy:
    """buffer: value id of the shared memory; start: byte in it; part: where to; pair: in both blocks of a pair."""

    buffer: int
    start: Affine
    part: ScalesPart
    pair: bool

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(byte of shared memory from the start, cell from the part's first) of each instruction."""
        groups = self.part.per_row // 4
        blocks = range(self.part.rows // SCALE_ROWS)
        return [
            ((i * groups + j) * CHUNK[0] * CHUNK[1], j * self.part.group + 4 * i) for i in blocks for j in range(groups)
        ]

    def descriptor(self, address: int = 0) -> Descriptor:
        """Of an instruction's 512 bytes: 8 rows of 16 bytes each 128 bytes, not swizzled."""
        return Descriptor(address, 16, 128, 0, TCGEN05_VERSION)


def async_copy_scales_to_tmem(smem_ref: Any, tmem_ref: Any, collective_axis: str | None = None) -> None:
    """Start copying the scale factors of a block-scaled operand from shared memory to tensor memory.

    tmem_ref: (rows, n) TMEM Ref in TMEMLayout.SCALES_LAYOUT, rows 128 or 256.  smem_ref: (rows // 128, n // 4, 32, 16) SMEM Ref
    of its dtype without transforms: element [i, j, r, 4 q + s] is factor 4 j + s of row 128 i + 32 q + r, as
    `scales.reshape(rows // 128, 4, 32, n // 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows // 128, n // 4, 32, 16)` makes it.
    collective_axis: of a pair of blocks; block 0 issues, each block copies out of its own shared memory into its own tensor
    memory.  Products that this thread issues later read the new factors; for the shared memory to be free, and for factors that
    a product may still read to be overwritten, wait for a commit.  PTX ISA 9.7.16.9.2, tcgen05.cp.32x128b.warpx4.
    """
    from ..frontend.primitives import bind

    if collective_axis is not None and not isinstance(collective_axis, str):
        arguments.refuse(
            "async_copy_scales_to_tmem", "collective_axis", collective_axis, "the name of a cluster axis or None"
        )
    bind(copy_scales_p, smem_ref, tmem_ref, collective_axis=collective_axis)


@copy_scales_p.abstract
def _(smem_ref: Any, tmem_ref: Any, *, collective_axis: str | None = None) -> Any:
    arguments.memory("async_copy_scales_to_tmem", "smem_ref", smem_ref, "smem")
    arguments.memory("async_copy_scales_to_tmem", "tmem_ref", tmem_ref, "tmem")
    if len(tmem_ref.shape) == 2:
        rows, n = tmem_ref.shape
        if smem_ref.shape == (rows // SCALE_ROWS, n // 4, *CHUNK) and smem_ref.dtype == tmem_ref.dtype:
            return ()
    raise ValueError(
        f"async_copy_scales_to_tmem: smem_ref {smem_ref.dtype}{list(smem_ref.shape)}, tmem_ref {tmem_ref.dtype}"
        f"{list(tmem_ref.shape)}: (rows // {SCALE_ROWS}, n // 4, {CHUNK[0]}, {CHUNK[1]}) goes to (rows, n), of one dtype"
    )


@copy_scales_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> ScalesCopy:
    source, target = e.operands
    assert isinstance(source, View) and isinstance(target, View)
    part = scales_part(target, "async_copy_scales_to_tmem, tmem_ref,", e.line)
    layout = ctx.buffers[source.ref.id].layout
    dense = all(d.size == n for d, n in zip(source.dims[-4:], source.ref.shape[-4:], strict=True))
    if layout.tile or layout.swizzle or source.is_transposed or not dense or any(d.size for d in source.dims[:-4]):
        raise UnsupportedCall(
            f"async_copy_scales_to_tmem: smem_ref is SMEM without transforms, all of it or of one slot (scales.at[slot]); this "
            f"is {source}",
            e.line,
        )
    start = Affine(0)
    for d, digits in zip(source.dims, layout.strides(), strict=True):
        start = start + d.start * digits[0][1]
    return ScalesCopy(source.ref.id, start, part, is_pair(ctx, target, e))


@copy_scales_p.emit((SM100,), (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    out.copy_scales(step.data)


@copy_scales_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.copy_scales(step.data)
