"""Reading and writing Refs by index arrays: `ref[i]`, `ref[:, i] = x`, in shared and global memory.

Every thread moves the elements of its part of the array, one by one, wherever their indices say.  They count within the view,
of n elements along their dimension; -n to -1 count from its end, as in NumPy and JAX.  Beyond, in global memory an element
reads as zero and is not written, as where tiles stick out (the simulator's report counts them); in shared memory the simulator
says where indices are outside.  Which of several values for one place stays is undefined, so the simulator refuses repeated
indices in a store.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..codegen.emit_indexed import emit_get, emit_put
from ..errors import UnsupportedCall
from ..program import Equation, View
from .moves import IN_MEMORY
from .refs import Access
from .registry import WARPGROUP, op

NOWHERE = -(2**31)  # an index that is outside of every view on purpose
INSTEAD = "index arrays take a whole warpgroup; do it outside of warp_map"
get_indexed = op("get_indexed", pure=True, whole=True, dtypes=IN_MEMORY, instead=INSTEAD)
put_indexed = op("put_indexed", whole=True, dtypes=IN_MEMORY, instead=INSTEAD)


@dataclasses.dataclass(frozen=True)
class Indexed(Access):
    """As `Access`; dims: for each dimension that the view keeps (number of the index array, -1) or (-1, the moved array's
    dimension that runs along it)."""

    dims: tuple[tuple[int, int], ...] = ()


def _plan(ctx: Any, e: Equation) -> Indexed:
    view = e.operands[0]
    assert isinstance(view, View)
    kind = view.space.kind
    if kind not in ("smem", "gmem"):
        raise UnsupportedCall(f"an index array into a {kind.upper()} Ref: only SMEM and GMEM have addresses", e.line)
    if kind == "gmem" and e.op == "put_indexed":
        ctx.output_index(view.ref, e.line)
    return Indexed(kind, view, False, ctx.pointer(view.ref, e.line) if kind == "gmem" else -1, e.param("dims"))


for _o in (get_indexed, put_indexed):
    _o.plan(scopes=(WARPGROUP,))(_plan)


@get_indexed.layouts
def _(solver: Any, e: Equation) -> None:
    solver.same(e, [*e.operands[1:], *e.results])


@put_indexed.layouts
def _(solver: Any, e: Equation) -> None:
    solver.same(e, e.operands[1:])


@get_indexed.emit()
def _(out: Any, step: Any) -> None:
    emit_get(out, step.equation, step.data)


@put_indexed.emit()
def _(out: Any, step: Any) -> None:
    emit_put(out, step.equation, step.data)


@get_indexed.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    indices = [sim.read(o) for o in e.operands[1:]]
    sim.write(e.results[0], sim.load_indexed(step.data, e.results[0].shape, indices))


@put_indexed.simulate
def _(sim: Any, step: Any) -> None:
    x, *indices = (sim.read(o) for o in step.equation.operands[1:])
    sim.store_indexed(step.data, x, indices)
