"""Fifth-generation tensor core (PTX ISA 9.7.16): matrix products into tensor memory, and commits.

One thread issues; nothing is in order by itself except products of one shape on one accumulator.  What has finished is known
through a commit's barrier.  Loads and stores of tensor memory are in `tmem.py`, what is legal in `tcgen05_rules.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .. import arguments
from ..codegen.encodings import Instruction, ScaledInstruction
from ..errors import IllegalInstruction, UnsupportedCall
from ..layouts.operands import SharedOperand, shared_operand
from ..layouts.shared import itemsize
from ..layouts.tmem import (
    SCALE_ROWS,
    MetadataPart,
    Part,
    ScalesPart,
    TMEMLayout,
    TmemPart,
    metadata_part,
    scales_part,
    tmem_part,
)
from ..program import Equation, Operand, View, named_shape
from .barriers import BarrierUse, barrier_use, single
from .registry import SM100, WARP, WARPGROUP, op
from .tcgen05_rules import (
    PAIRS_OF_FLOAT4,
    ScaledKind,
    Shape,
    check_scaled_shape,
    check_shape,
    check_sparse,
    kind_of,
    metadata_bits,
    scaled_kind_of,
)

ON_SM90 = "tcgen05 exists on sm_100a and later; on sm_90a use wgmma"
mma_p = op("tcgen05_mma", issues_only=True, instead=ON_SM90)
commit_p = op("tcgen05_commit_arrive", issues_only=True, instead=ON_SM90)


@dataclasses.dataclass(frozen=True)
class CommitPlan:
    """barrier: arrived on in every block along `axes` (none: in this one)."""

    barrier: BarrierUse
    axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Scales:
    """The factors of a block-scaled product.  a, b: where; per_step: of a row for each instruction."""

    a: ScalesPart
    b: ScalesPart
    per_step: int

    def cells(self, part: ScalesPart, step: int) -> int:
        """The cells, from the part's first, that hold the factors of a step."""
        return step * self.per_step // 4 * part.group

    def id(self, step: int) -> int:
        """Which byte of those cells is the step's first."""
        return step * self.per_step % 4


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Which elements a sparse A keeps.  part: where that stands; paired: an instruction reads both columns of a pair, not the one
    that its selector names."""

    part: MetadataPart
    paired: bool

    def cells(self, step: int) -> int:
        """The pair of columns, from the part's first, that holds the metadata of a step."""
        return 2 * step if self.paired else step // 2 * 2

    def selector(self, step: int) -> int:
        return 0 if self.paired else step % 2


@dataclasses.dataclass(frozen=True)
class Tcgen05Plan:
    """m, n, k: of the instructions' product, over both blocks of a pair (k: elements of a row of A in memory, each of which holds
    two of float4; of a sparse A those that are kept); d: the accumulator's part of tensor memory; a: shared memory or tensor
    memory; b: shared memory (of a pair: half of N in each block); instruction: its descriptor, `idesc`; scales: of block-scaled
    kinds; metadata: of a sparse A;
    accumulate: False (or a run-time bool) lets the first k-step overwrite; pair: issued for both blocks; commit: if asked for."""

    d: TmemPart
    m: int
    n: int
    k: int
    a: SharedOperand | TmemPart
    b: SharedOperand
    instruction: Instruction | ScaledInstruction
    scales: Scales | None
    accumulate: Operand
    pair: bool
    commit: CommitPlan | None
    metadata: Metadata | None = None

    @property
    def k_step(self) -> int:
        """Elements of a row of A for each instruction."""
        return 32 // self.b.itemsize

    def idesc(self, step: int) -> int:
        """The instruction descriptor of a step along K."""
        if isinstance(self.instruction, Instruction):
            selector = 0 if self.metadata is None else self.metadata.selector(step)
            return dataclasses.replace(self.instruction, selector=selector).encode()
        assert self.scales is not None
        id = self.scales.id(step)
        return dataclasses.replace(self.instruction, a_scale_id=id, b_scale_id=id).encode()

    def reads_of_tmem(self, a: int, scales: tuple[int, int], metadata: int) -> list[tuple[str, Part, int]]:
        """(what, part, its first column) of what is read in tensor memory besides the accumulator, whose places are given."""
        found: list[tuple[str, Part, int]] = []
        if isinstance(self.a, TmemPart):
            found.append(("operand A", self.a, a))
        if self.scales is not None:
            found += [("scale factors", self.scales.a, scales[0]), ("scale factors", self.scales.b, scales[1])]
        if self.metadata is not None:
            found.append(("sparsity metadata", self.metadata.part, metadata))
        return found

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of A and of B that lie in each block."""
        return (self.m // 2, self.n // 2) if self.pair else (self.m, self.n)


def tcgen05_mma(
    acc: Any,
    a: Any,
    b: Any,
    barrier: Any = None,
    *,
    a_scale: Any = None,
    b_scale: Any = None,
    a_sparse_metadata: Any = None,
    accumulate: Any = True,
    collective_axis: str | None = None,
) -> None:
    """acc (+)= a @ b, asynchronously, issued by one thread.

    acc: TMEM Ref (m, n), float32 (int32 for int8 operands; of float16 and float8 also float16, not packed), m 128 or 64, n a
    multiple of 8 up to 256.
    a: (m, k) SMEM Ref, tiled and swizzled, or packed TMEM Ref (m = 128); b: (k, n) SMEM Ref.  float16 x float16,
    bfloat16 x bfloat16, float32 x float32 (as tf32, K contiguous), float8 of either kind with either, int8 (sm_100a only).
    accumulate: bool or traced bool; False overwrites.  barrier: arrives once the MMA and all before it have finished.

    a_scale, b_scale: TMEM(..., layout=TMEMLayout.SCALES_LAYOUT) Refs of the factors by which each block of K of A's and B's
    elements is multiplied, (m, k / block) and (n, k / block) with n rounded up to 128 rows (of a pair: all of n in each
    block).  a and b are then float8 with float8_e8m0fnu factors, block 32 (mxfp8), or uint8, each element of which holds two
    float4_e2m1fn, the lower half first, K contiguous: blocks of 32 or 16 with float8_e8m0fnu (mxfp4), of 16 with
    float8_e4m3fn (nvfp4); k counts the float4.  PTX ISA 9.7.16.10.7.  `async_copy_scales_to_tmem` brings them there.

    a_sparse_metadata: TMEM(..., layout=TMEMLayout.SPARSE_METADATA_LAYOUT) Ref, (128, n): a is then 2:4 sparse and holds only the
    elements that are kept, two of each 4 of a row (of float32 one of each 2): a (m, k / 2), b (k, n), m = 128, k a multiple of
    128 (of float32: of 64), both in shared memory, no factors; N a multiple of 16, in a pair of 32.  n is k / 8, for float32
    k / 4.  `async_copy_sparse_metadata_to_tmem` brings it there.  PTX ISA 9.7.16.10.8.

    collective_axis: the last axis of the cluster, of two blocks that multiply together: acc, TMEM(..., collective=True), and a
    are each block's own 128 rows, b is each block's half of the columns, (k, n // 2).  Or own 64 rows: acc is then in
    TMEMLayout.M64_COLLECTIVE_LAYOUT, a in shared memory and not sparse, without factors.  Block 0 issues for both; `barrier`
    arrives in both.  Raises IllegalInstruction with the row of the table that is missing.
    """
    from ..frontend.primitives import bind

    if collective_axis is not None and not isinstance(collective_axis, str):
        arguments.refuse("tcgen05_mma", "collective_axis", collective_axis, "the name of a cluster axis or None")
    done = None if barrier is None else single(barrier)
    bind(mma_p, acc, a, b, accumulate, done, a_scale, b_scale, a_sparse_metadata, collective_axis=collective_axis)


@mma_p.abstract
def _(
    acc: Any,
    a: Any,
    b: Any,
    accumulate: Any,
    barrier: Any = None,
    a_scale: Any = None,
    b_scale: Any = None,
    a_sparse_metadata: Any = None,
    *,
    collective_axis: str | None = None,
) -> Any:
    arguments.memory("tcgen05_mma", "acc", acc, "tmem")
    arguments.memory("tcgen05_mma", "a", a, "smem", "tmem")
    arguments.memory("tcgen05_mma", "b", b, "smem")
    if accumulate.space is not None or accumulate.shape or accumulate.dtype != "bool":
        raise TypeError(f"tcgen05_mma: accumulate must be a bool, not {accumulate.dtype}{list(accumulate.shape)}")
    if barrier is not None:
        arguments.memory("tcgen05_mma", "barrier", barrier, "barrier")
    if (a_scale is None) != (b_scale is None):
        raise TypeError("tcgen05_mma: a_scale and b_scale come together")
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale), ("a_sparse_metadata", a_sparse_metadata)):
        if scale is not None:
            arguments.memory("tcgen05_mma", name, scale, "tmem")
            if len(scale.shape) != 2:
                each = "bytes" if name == "a_sparse_metadata" else "factors"
                raise ValueError(f"tcgen05_mma: {name} has shape {scale.shape}; it is (rows, {each} of a row)")
    return ()


def _check_fits(e: Equation, acc: View, a: View, b: View, sparse: bool) -> None:
    """acc (m, n), a (m, k), b (k, n): here, where the Refs' names are known."""
    pair, kept = e.param("collective_axis") is not None, 2 if sparse else 1  # of so many elements of a row a has one
    fits = len(acc.shape) == len(a.shape) == len(b.shape) == 2 and a.shape[1] * kept == b.shape[0]
    if fits and acc.shape == (a.shape[0], b.shape[1] * (2 if pair else 1)):
        return
    halves = " (with collective_axis half of the columns in each block)" if pair else ""
    halves += " (of a sparse a half of the elements of a row)" if sparse else ""
    raise IllegalInstruction(
        f"tcgen05_mma: acc {named_shape(acc)} += a {named_shape(a)} @ b {named_shape(b)}{halves}: shapes do not fit",
        e.line,
    )


def is_pair(ctx: Any, acc: View, e: Equation) -> bool:
    """Whether a pair of blocks works together on this tensor memory; UnsupportedCall where Ref and `collective_axis` disagree."""
    axis, names = e.param("collective_axis"), ctx.program.cluster_names
    if acc.space.collective != (axis is not None):
        raise UnsupportedCall(
            f"{e.op}: {acc.ref} is {'collective' if acc.space.collective else 'of one block'} and collective_axis is "
            f"{axis!r}: a pair of blocks needs TMEM(..., collective=True) and collective_axis, one block neither",
            e.line,
        )
    if axis is not None and (not names or axis != names[-1]):
        raise UnsupportedCall(
            f"{e.op}(collective_axis={axis!r}): a pair is two neighbours, the last axis of the cluster; the kernel has "
            f"{names}",
            e.line,
        )
    return axis is not None


@mma_p.plan((SM100,))
def _(ctx: Any, e: Equation) -> Tcgen05Plan:
    acc, a, b, accumulate, *rest = e.operands
    assert isinstance(acc, View) and isinstance(a, View) and isinstance(b, View)
    pair = is_pair(ctx, acc, e)
    barriers = [x for x in rest if isinstance(x, View) and x.space.kind == "barrier"]
    factors = [x for x in rest if isinstance(x, View) and x.space.kind == "tmem"]
    sparse = factors.pop() if len(factors) % 2 else None
    _check_fits(e, acc, a, b, sparse is not None)
    d = tmem_part(acc, "tcgen05_mma", e.line)
    if pair and d.rows == 64 and not d.folded:
        raise IllegalInstruction(
            f"tcgen05_mma: {acc.ref} has 64 rows in each of a pair of blocks: allocate it with "
            f"layout={TMEMLayout.M64_COLLECTIVE_LAYOUT}",
            e.line,
        )
    if d.packing > 1:
        raise IllegalInstruction(f"tcgen05_mma: {acc.ref} is packed; an accumulator has an element a cell", e.line)
    turned = () if factors and a.dtype == PAIRS_OF_FLOAT4 else (1, 2)  # sizes that may be contiguous along M or N
    b_op = shared_operand(b, ctx.buffers[b.ref.id].layout, 0, "B", e.line, turned)
    m, n = acc.shape[0] * (2 if pair else 1), acc.shape[1]
    a_op: SharedOperand | TmemPart
    if a.space.kind == "tmem":
        a_op = tmem_part(a, "tcgen05_mma, operand A", e.line)
        if a_op.packing * itemsize(a.dtype) != 4:
            raise IllegalInstruction(
                f"tcgen05_mma: operand A in tensor memory is packed; {a.ref} has an element a cell", e.line
            )
    else:
        a_op = shared_operand(a, ctx.buffers[a.ref.id].layout, 1, "A", e.line, turned)
    a_mn = isinstance(a_op, SharedOperand) and a_op.mn_major
    metadata: Metadata | None = None
    if sparse is not None:
        b_op = dataclasses.replace(b_op, k_bytes=2 * b_op.k_bytes)
        metadata = _metadata(e, a, b, sparse)
    scales: Scales | None = None
    instruction: Instruction | ScaledInstruction
    in_tmem = isinstance(a_op, TmemPart)
    shape = Shape("f16", m, n, pair, in_tmem, b_op.mn_major, b_op.itemsize, sparse is not None)
    if sparse is not None:
        check_sparse(shape, bool(factors), b_op.swizzle, e.line)
    if factors:
        scales, scaled = _scales(e, a, b, acc, factors)
        check_scaled_shape(dataclasses.replace(shape, kind=scaled.kind), e.line)
        types = scaled.a_type, scaled.b_type, scaled.scale_type
        instruction = ScaledInstruction(scaled.kind, *types, m, n, a_mn=a_mn, b_mn=b_op.mn_major)
    else:
        kind = kind_of(a.dtype, b.dtype, acc.dtype, ctx.arch, e.line)
        check_shape(dataclasses.replace(shape, kind=kind), e.line)
        types = a.dtype, b.dtype, acc.dtype
        instruction = Instruction(kind, *types, m, n, a_mn, b_op.mn_major, sparse=sparse is not None)
    commit = _commit_plan(ctx, barriers[0], e, e.param("collective_axis")) if barriers else None
    return Tcgen05Plan(d, m, n, a.shape[1], a_op, b_op, instruction, scales, accumulate, pair, commit, metadata)


def _metadata(e: Equation, a: View, b: View, view: View) -> Metadata:
    """Where the metadata of a sparse A stands."""
    part = metadata_part(view, "tcgen05_mma, a_sparse_metadata,", e.line)
    bits = a.shape[1] * metadata_bits(a.dtype)
    if part.columns * 32 != bits:
        raise IllegalInstruction(
            f"tcgen05_mma: a_sparse_metadata {view.shape} beside a {a.dtype}{list(a.shape)}, whose {a.shape[1]} elements of K = "
            f"{b.shape[0]} in each row take {bits / 8:g} bytes, a multiple of 16",
            e.line,
        )
    return Metadata(part, itemsize(a.dtype) == 1)


def _scales(e: Equation, a: View, b: View, acc: View, factors: list[View]) -> tuple[Scales, ScaledKind]:
    """Where the factors of a block-scaled product are, and which kind they make it."""
    if a.shape[0] != SCALE_ROWS:
        raise IllegalInstruction("tcgen05_mma with scale factors has M = 128, in a pair of blocks 256; not 64", e.line)
    parts = [
        scales_part(x, f"tcgen05_mma, {name},", e.line) for x, name in zip(factors, ("a_scale", "b_scale"), strict=True)
    ]
    k = a.shape[1] * (2 if a.dtype == PAIRS_OF_FLOAT4 else 1)
    rows = (a.shape[0], -(-acc.shape[1] // SCALE_ROWS) * SCALE_ROWS)
    if tuple(p.rows for p in parts) != rows or parts[0].per_row != parts[1].per_row:
        raise IllegalInstruction(
            f"tcgen05_mma: a_scale {factors[0].shape} and b_scale {factors[1].shape}; for acc {acc.shape} they have {rows[0]} "
            f"and {rows[1]} rows, and as many factors in each row as there are blocks in K = {k}",
            e.line,
        )
    kind = scaled_kind_of(
        a.dtype, b.dtype, acc.dtype, (factors[0].dtype, factors[1].dtype), k / parts[0].per_row, e.line
    )
    return Scales(parts[0], parts[1], kind.per_step), kind


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
    with out.elected(tcgen05=True):
        out.tcgen05_commit(step.data)


@commit_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.tcgen05_commit(step.data)
