"""Fifth-generation tensor core (PTX ISA 9.7.16): MMA into tensor memory, commits, and the way back to registers.

First form: one block, M = 128, float32 accumulator, 16-bit or fp8 operands from shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .. import arguments
from ..errors import IllegalInstruction, UnsupportedCall
from ..layouts.operands import SharedOperand, shared_operand
from ..layouts.registers import Layout, checked_layout
from ..program import Equation, Literal, Operand, View
from .barriers import BarrierUse, barrier_use, single
from .registry import SM100, WARP, WARPGROUP, op

ON_SM90 = "tcgen05 exists on sm_100a and later; on sm_90a use wgmma"
mma_p = op("tcgen05_mma", issues_only=True, instead=ON_SM90)
commit_p = op("tcgen05_commit_arrive", issues_only=True, instead=ON_SM90)
load_p = op("async_load_tmem", instead=ON_SM90 + " (a whole warpgroup loads; not under warp_map)")
wait_load_p = op("wait_load_tmem", instead=ON_SM90 + " (a whole warpgroup loads; not under warp_map)")
# (kind, code of the type in the instruction descriptor), PTX ISA 9.7.16.4.2
KINDS = {"float16": ("f16", 0), "bfloat16": ("f16", 1), "float8_e4m3fn": ("f8f6f4", 0), "float8_e5m2": ("f8f6f4", 1)}


@dataclasses.dataclass(frozen=True)
class Tcgen05Plan:
    """d: value id of the TMEM buffer; d_column: first column of the view in it; idesc: instruction descriptor;
    accumulate: False (or a run-time bool) lets the first k-step overwrite; barrier: committed to when given."""

    d: int
    d_column: int
    m: int
    n: int
    k: int
    a: SharedOperand
    b: SharedOperand
    kind: str
    a_type: str
    b_type: str
    idesc: int
    accumulate: Operand
    barrier: BarrierUse | None

    @property
    def k_step(self) -> int:
        return 32 // self.b.itemsize


def instruction_descriptor(a_type: str, b_type: str, m: int, n: int, a_mn_major: bool, b_mn_major: bool) -> int:
    """The 32-bit descriptor of kinds f16 and f8f6f4 with a float32 accumulator (PTX ISA 9.7.16.4.2, table 42)."""
    a_code, b_code = KINDS[a_type][1], KINDS[b_type][1]
    return (
        (1 << 4)
        | (a_code << 7)
        | (b_code << 10)
        | (int(a_mn_major) << 15)
        | (int(b_mn_major) << 16)
        | ((n >> 3) << 17)
        | ((m >> 4) << 24)
    )


def tcgen05_mma(acc: Any, a: Any, b: Any, barrier: Any = None, *, accumulate: Any = True) -> None:
    """acc (+)= a @ b, asynchronously, issued by one thread.

    acc: TMEM Ref (128, n) float32; a: (128, k), b: (k, n) SMEM Refs of 16-bit or fp8 type, tiled and swizzled.
    accumulate: bool or traced bool; False overwrites.  barrier: arrives once the MMA and all before it have finished.
    """
    from ..frontend.primitives import bind

    bind(mma_p, acc, a, b, accumulate, None if barrier is None else single(barrier))


@mma_p.abstract
def _(acc: Any, a: Any, b: Any, accumulate: Any, barrier: Any = None) -> Any:
    arguments.memory("tcgen05_mma", "acc", acc, "tmem")
    arguments.memory("tcgen05_mma", "a", a, "smem")
    arguments.memory("tcgen05_mma", "b", b, "smem")
    if accumulate.space is not None or accumulate.shape or accumulate.dtype != "bool":
        raise TypeError(f"tcgen05_mma: accumulate must be a bool, not {accumulate.dtype}{list(accumulate.shape)}")
    if barrier is not None:
        arguments.memory("tcgen05_mma", "barrier", barrier, "barrier")
    if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[1], acc.shape) != (b.shape[0], (a.shape[0], b.shape[1])):
        raise ValueError(f"tcgen05_mma: acc {acc.shape} += a {a.shape} @ b {b.shape}: shapes do not fit")
    return ()


@mma_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> Tcgen05Plan:
    acc, a, b, accumulate, *rest = e.operands
    assert isinstance(acc, View) and isinstance(a, View) and isinstance(b, View)
    if (
        a.dtype not in KINDS
        or b.dtype not in KINDS
        or KINDS[a.dtype][0] != KINDS[b.dtype][0]
        or (KINDS[a.dtype][0] == "f16" and a.dtype != b.dtype)
    ):
        raise IllegalInstruction(
            f"tcgen05_mma of {a.dtype} x {b.dtype}: legal here are f16 x f16, bf16 x bf16 and any mix of e4m3 and e5m2",
            e.line,
        )
    if acc.dtype != "float32":
        raise IllegalInstruction(f"tcgen05_mma accumulates in float32 here; this TMEM buffer is {acc.dtype}", e.line)
    m, n = acc.shape
    if m != 128:
        raise UnsupportedCall(f"tcgen05_mma with M = {m}: this version has M = 128 in one block", e.line)
    a_op = shared_operand(a, ctx.buffers[a.ref.id].layout, 1, "A", e.line, (1, 2))
    b_op = shared_operand(b, ctx.buffers[b.ref.id].layout, 0, "B", e.line, (1, 2))
    step = 16 if b_op.mn_major and b_op.itemsize == 1 else 8
    if n % step or not 8 <= n <= 256:
        raise IllegalInstruction(f"tcgen05_mma: n = {n}; legal with M = 128 are {step}, {2 * step}, ..., 256", e.line)
    column = ctx.tmem_column(acc, e.line)
    kind = KINDS[a.dtype][0]
    idesc = instruction_descriptor(a.dtype, b.dtype, m, n, a_op.mn_major, b_op.mn_major)
    barrier = barrier_use(rest[0], e) if rest else None  # type: ignore[arg-type]
    return Tcgen05Plan(
        acc.ref.id, column, m, n, a.shape[1], a_op, b_op, kind, a.dtype, b.dtype, idesc, accumulate, barrier
    )


@mma_p.emit((SM100,), (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    out.tcgen05_mma(step.data)


@mma_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.tcgen05_mma(step.data)


def tcgen05_commit_arrive(barrier: Any) -> None:
    """Arrive on `barrier` once all tcgen05 work that this thread has issued has finished."""
    from ..frontend.primitives import bind

    bind(commit_p, single(barrier))


@commit_p.abstract
def _(barrier: Any) -> Any:
    arguments.memory("tcgen05_commit_arrive", "barrier", barrier, "barrier")
    return ()


@commit_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> BarrierUse:
    return barrier_use(e.operands[0], e)  # type: ignore[arg-type]


@commit_p.emit((SM100,), (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    with out.elected():
        out.line(f"tcgen05_commit({out.barrier_address(step.data)});")


@commit_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.tcgen05_commit(step.data)


def async_load_tmem(src: Any, *, layout: Layout | None = None) -> Any:
    """Start loading a TMEM Ref (128, n) into registers, in Layout.TCGEN05_TMEM_NATIVE.

    `wait_load_tmem` before an MMA may write the buffer again.
    """
    from ..frontend.primitives import bind

    return bind(load_p, src, layout=checked_layout("async_load_tmem", layout))[0]


@load_p.abstract
def _(src: Any, *, layout: Any) -> Any:
    arguments.memory("async_load_tmem", "src", src, "tmem")
    return ((src.shape, src.dtype),)


@load_p.layouts
def _(solver: Any, e: Equation) -> None:
    solver.pin(e, e.results[0], Layout.TCGEN05_TMEM_NATIVE)


@load_p.plan((SM100,), (WARPGROUP,))
def _(ctx: Any, e: Equation) -> tuple[int, int, int]:
    """(TMEM buffer, first column of the view, columns)."""
    src = e.operands[0]
    assert isinstance(src, View)
    if e.param("layout") not in (None, Layout.TCGEN05_TMEM_NATIVE):
        raise UnsupportedCall(
            f"async_load_tmem(layout={e.param('layout')}): this version delivers Layout.TCGEN05_TMEM_NATIVE", e.line
        )
    if len(src.shape) != 2 or src.shape[0] != 128 or src.shape[1] % 8:
        raise IllegalInstruction(
            f"async_load_tmem loads (128, n) with n a multiple of 8; this view is {src.shape}", e.line
        )
    return src.ref.id, ctx.tmem_column(src, e.line), src.shape[1]


@load_p.emit((SM100,), (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    out.tmem_load(step)


@load_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.write(step.equation.results[0], sim.tmem_load(*step.data))


def wait_load_tmem() -> None:
    """Wait until this warpgroup's `async_load_tmem`s have finished."""
    from ..frontend.primitives import bind

    bind(wait_load_p)


@wait_load_p.abstract
def _() -> Any:
    return ()


@wait_load_p.emit((SM100,), (WARPGROUP,))
def _(out: Any, step: Any) -> None:
    out.line("tcgen05_wait_load();")


@wait_load_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    yield from sim.wait_load_tmem()


FALSE = Literal(False, "bool")
