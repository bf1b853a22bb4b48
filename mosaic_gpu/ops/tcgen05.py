"""Fifth-generation tensor core (PTX ISA 9.7.16): matrix products into tensor memory, and commits.

One thread issues; nothing is in order by itself except products of one shape on one accumulator.  What has finished is known
through a commit's barrier.  Loads and stores of tensor memory are in `tmem.py`, what is legal in `tcgen05_rules.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .. import arguments
from ..codegen.encodings import Instruction
from ..errors import UnsupportedCall
from ..layouts.operands import SharedOperand, shared_operand
from ..layouts.tmem import TmemPart, tmem_part
from ..program import Equation, Operand, View
from .barriers import BarrierUse, barrier_use, single
from .registry import SM100, WARP, WARPGROUP, op
from .tcgen05_rules import Shape, check_shape, kind_of

ON_SM90 = "tcgen05 exists on sm_100a and later; on sm_90a use wgmma"
mma_p = op("tcgen05_mma", issues_only=True, instead=ON_SM90)
commit_p = op("tcgen05_commit_arrive", issues_only=True, instead=ON_SM90)


@dataclasses.dataclass(frozen=True)
class CommitPlan:
    """barrier: arrived on in every block along `axes` (none: in this one)."""

    barrier: BarrierUse
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Tcgen05Plan:
    """m, n, k: of the instructions' product, over both blocks of a pair; d: the accumulator's part of tensor memory; a: shared
    memory or tensor memory; b: shared memory (of a pair: half of N in each block); instruction: its descriptor, `idesc`;
    accumulate: False (or a run-time bool) lets the first k-step overwrite; pair: issued for both blocks; commit: if asked for."""

    d: TmemPart
    m: int
    n: int
    k: int
    a: SharedOperand | TmemPart
    b: SharedOperand
    instruction: Instruction
    accumulate: Operand
    pair: bool
    commit: CommitPlan | None

    @property
    def k_step(self) -> int:
        return 32 // self.b.itemsize

    @property
    def idesc(self) -> int:
        return self.instruction.encode()

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of A and of B that lie in each block."""
        return (self.m // 2, self.n // 2) if self.pair else (self.m, self.n)


def tcgen05_mma(
    acc: Any, a: Any, b: Any, barrier: Any = None, *, accumulate: Any = True, collective_axis: str | None = None
) -> None:
    """acc (+)= a @ b, asynchronously, issued by one thread.

    acc: TMEM Ref (m, n), float32 (int32 for int8 operands), m 128 or 64, n a multiple of 8 up to 256.
    a: (m, k) SMEM Ref, tiled and swizzled, or packed TMEM Ref (m = 128); b: (k, n) SMEM Ref.  float16 x float16,
    bfloat16 x bfloat16, float32 x float32 (as tf32, K contiguous), float8 of either kind with either, int8 (sm_100a only).
    accumulate: bool or traced bool; False overwrites.  barrier: arrives once the MMA and all before it have finished.

    collective_axis: the last axis of the cluster, of two blocks that multiply together: acc, TMEM(..., collective=True), and a
    are each block's own 128 rows, b is each block's half of the columns, (k, n // 2).  Block 0 issues for both; `barrier`
    arrives in both.  Raises IllegalInstruction with the row of the table that is missing.
    """
    from ..frontend.primitives import bind

    if collective_axis is not None and not isinstance(collective_axis, str):
        arguments.refuse("tcgen05_mma", "collective_axis", collective_axis, "the name of a cluster axis or None")
    bind(mma_p, acc, a, b, accumulate, None if barrier is None else single(barrier), collective_axis=collective_axis)


@mma_p.abstract
def _(acc: Any, a: Any, b: Any, accumulate: Any, barrier: Any = None, *, collective_axis: str | None = None) -> Any:
    arguments.memory("tcgen05_mma", "acc", acc, "tmem")
    arguments.memory("tcgen05_mma", "a", a, "smem", "tmem")
    arguments.memory("tcgen05_mma", "b", b, "smem")
    if accumulate.space is not None or accumulate.shape or accumulate.dtype != "bool":
        raise TypeError(f"tcgen05_mma: accumulate must be a bool, not {accumulate.dtype}{list(accumulate.shape)}")
    if barrier is not None:
        arguments.memory("tcgen05_mma", "barrier", barrier, "barrier")
    fits = len(acc.shape) == len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
    n = b.shape[-1] * (1 if collective_axis is None else 2) if b.shape else 0
    if not fits or acc.shape != (a.shape[0], n):
        halves = "" if collective_axis is None else " (with collective_axis half of the columns in each block)"
        raise ValueError(f"tcgen05_mma: acc {acc.shape} += a {a.shape} @ b {b.shape}{halves}: shapes do not fit")
    return ()


def _pair(ctx: Any, acc: View, e: Equation) -> bool:
    axis, names = e.param("collective_axis"), ctx.program.cluster_names
    if acc.space.collective != (axis is not None):
        raise UnsupportedCall(
            f"tcgen05_mma: {acc.ref} is {'collective' if acc.space.collective else 'of one block'} and collective_axis is "
            f"{axis!r}: a pair of blocks needs TMEM(..., collective=True) and collective_axis, one block neither",
            e.line,
        )
    if axis is not None and (not names or axis != names[-1]):
        raise UnsupportedCall(
            f"tcgen05_mma(collective_axis={axis!r}): a pair is two neighbours, the last axis of the cluster; the kernel has "
            f"{names}",
            e.line,
        )
    return axis is not None


@mma_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> Tcgen05Plan:
    acc, a, b, accumulate, *rest = e.operands
    assert isinstance(acc, View) and isinstance(a, View) and isinstance(b, View)
    pair = _pair(ctx, acc, e)
    kind = kind_of(a.dtype, b.dtype, acc.dtype, ctx.arch, e.line)
    d = tmem_part(acc, "tcgen05_mma", e.line)
    b_op = shared_operand(b, ctx.buffers[b.ref.id].layout, 0, "B", e.line, (1, 2))
    m, n = acc.shape[0] * (2 if pair else 1), acc.shape[1]
    a_op: SharedOperand | TmemPart
    if a.space.kind == "tmem":
        a_op = tmem_part(a, "tcgen05_mma, operand A", e.line)
    else:
        a_op = shared_operand(a, ctx.buffers[a.ref.id].layout, 1, "A", e.line, (1, 2))
    a_mn = isinstance(a_op, SharedOperand) and a_op.mn_major
    check_shape(Shape(kind, m, n, pair, isinstance(a_op, TmemPart), b_op.mn_major, b_op.itemsize), e.line)
    instruction = Instruction(kind, a.dtype, b.dtype, acc.dtype, m, n, a_mn, b_op.mn_major)
    commit = _commit_plan(ctx, rest[0], e, e.param("collective_axis")) if rest else None
    return Tcgen05Plan(d, m, n, a.shape[1], a_op, b_op, instruction, accumulate, pair, commit)


@mma_p.emit((SM100,), (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    out.tcgen05_mma(step.data)


@mma_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.tcgen05_mma(step.data)


def tcgen05_commit_arrive(barrier: Any, collective_axis: str | Sequence[str] | None = None) -> None:
    """Arrive on `barrier` once all tcgen05 work that this thread has issued has finished.

    collective_axis: cluster axis, or axes; the arrival then counts in every block along them (one arrival in each, whoever
    issued the work).  A `ClusterBarrier` has its own axes.
    """
    from ..frontend.primitives import bind

    given = () if collective_axis is None else collective_axis
    axes = arguments.names("tcgen05_commit_arrive", "collective_axis", given)
    bind(commit_p, single(barrier), collective_axes=axes)


@commit_p.abstract
def _(barrier: Any, *, collective_axes: tuple[str, ...]) -> Any:
    arguments.memory("tcgen05_commit_arrive", "barrier", barrier, "barrier")
    return ()


def _commit_plan(ctx: Any, barrier: Any, e: Equation, axes: Any) -> CommitPlan:
    use, own = barrier_use(barrier, e), barrier.space.barrier.collective_axes
    axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
    for a in axes:
        if a not in ctx.program.cluster_names:
            raise UnsupportedCall(
                f"{e.op}: collective_axis={a!r} is not a cluster axis; the kernel has {ctx.program.cluster_names}",
                e.line,
            )
    if own and axes and set(own) != set(axes):
        raise UnsupportedCall(
            f"{e.op}: {barrier.ref} is a ClusterBarrier along {own}, and the commit is along {axes}", e.line
        )
    return CommitPlan(use, axes or own)


@commit_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> CommitPlan:
    return _commit_plan(ctx, e.operands[0], e, e.param("collective_axes"))


@commit_p.emit((SM100,), (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    with out.elected():
        out.tcgen05_commit(step.data)


@commit_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.tcgen05_commit(step.data)
