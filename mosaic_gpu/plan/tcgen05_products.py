"""`dot_general` on tcgen05: the tensor memory, barriers and shared memory of a role's products, and what takes a product's place.

Each warpgroup of a role has columns of tensor memory, as many as its widest product needs, and two barriers.  A product is
issued once all threads have read what the last one left there (`ready`); its commit arrives on `done`, after which every thread
loads its part of the result.  So products of a role follow each other on the same columns, in loops and in branches, and
operands may be overwritten as soon as the product is over.  Operands that lie in registers go through shared memory of the
compiler's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import Line, MosaicGpuError
from ..layouts.operands import SharedOperand, shared_operand
from ..layouts.shared import itemsize, shared_layout
from ..layouts.tmem import default_layout, tmem_layout
from ..memory import BarrierInfo, MemorySpace, SwizzleTransform, TilingTransform
from ..ops.tcgen05_rules import TYPES, Shape, check_shape, features_of
from ..program import Affine, DimIndex, Equation, Literal, Operand, Program, Value, View, substitute_all
from .placement import Piece, place
from .resources import TMEM_COLUMNS, allocations

CONTIGUOUS = (1, 2)  # sizes of elements that may be contiguous along M or N
# float32 is not among them: the tensor core would cut off the bits that `mma.sync` is given rounded.
STAGED = ("float16", "bfloat16", "int8", "uint8")
LEAST_STAGED = (
    64 * 64 * 128
)  # m x n x bytes of K from which on operands in registers are worth the way through shared memory


class Pool:
    """What the products of all roles of a kernel may take of the block, and have taken (`scratch`).

    staging: whether operands in registers may go through shared memory; staged: whether some do.
    """

    def __init__(self, program: Program, arch: str, fresh: Iterator[int], staging: bool) -> None:
        self.program, self.arch, self.fresh, self.staging = program, arch, fresh, staging
        self.scratch: list[Value] = []
        self.notes: list[str] = []
        self.staged = False
        unions = [v.space.union[0] for v, _, _ in allocations(program) if v.space is not None and v.space.union]
        self.unions = iter(range(max(unions, default=-1) + 1, 1 << 30))
        tmem = [(v, line) for v, line, _ in allocations(program) if v.space is not None and v.space.kind == "tmem"]
        # A kernel works in pairs of blocks or in single ones throughout, and these products are of one block.
        self.in_pairs = any(v.space is not None and v.space.collective for v, _ in tmem)
        self.columns = TMEM_COLUMNS - place(Piece(v, tmem_layout(v, line).total) for v, line in tmem)[1]


@dataclasses.dataclass(frozen=True)
class Terms:
    """A product (m, k) x (k, n) and its operands: views of shared memory where there are any, else arrays; turned: the array has
    K first (A) or last (B)."""

    m: int
    n: int
    k: int
    acc: str
    a: Operand
    b: Operand
    turned: tuple[bool, bool]

    @property
    def rows(self) -> int:
        """Of one instruction."""
        return 128 if self.m % 128 == 0 else 64

    @property
    def instructions(self) -> int:
        """For each 32 bytes of K."""
        return self.m // self.rows

    @property
    def columns(self) -> int:
        """Of tensor memory: the rows that are more than an instruction's lie in the columns beside."""
        return self.n * self.instructions


class RoleProducts:
    """Those of one role.  indices: its warpgroups, each of which has a slot in all that the role has."""

    def __init__(self, pool: Pool, indices: Sequence[int]) -> None:
        self.pool, self.first = pool, min(indices)
        self.slots = max(indices) - self.first + 1
        self.columns = self.products = 0
        self.index = self.new((), "int32") if self.slots > 1 else None
        self.accumulators: dict[tuple[int, str], Value] = {}
        self.barriers: tuple[Value, ...] = ()
        self.unions = next(pool.unions), next(pool.unions)

    def new(self, shape: tuple[int, ...], dtype: str, space: MemorySpace | None = None, name: str = "") -> Value:
        return Value(next(self.pool.fresh), shape, dtype, space, name)

    @property
    def slot(self) -> Affine:
        return Affine(0) if self.index is None else Affine(-self.first, ((self.index, 1),))

    def lower(self, e: Equation, p: Terms, fence: list[Equation]) -> list[Equation] | None:
        """What takes a product's place; None where tcgen05 cannot do it, or it is better off elsewhere.

        fence: what must come before operands in shared memory are read.
        """
        pool, start, result = self.pool, e.operands[2:], e.results[0]
        if pool.in_pairs or (self.slots > 1 and pool.program.thread_name is None):
            return None
        in_registers = not (isinstance(p.a, View) and isinstance(p.b, View))
        if in_registers and (not pool.staging or p.m * p.n * p.k * itemsize(e.operands[0].dtype) < LEAST_STAGED):
            return None
        self.products += 1
        stores: list[Equation] = []
        a = self.operand(p.a, p.turned[0], stores, e.line)
        b = self.operand(p.b, p.turned[1], stores, e.line)
        if a is None or b is None or not self.legal(p, a, b) or not self.room(p, e.line):
            return None
        for store in stores:
            assert isinstance(store.operands[0], View)
            pool.scratch.append(store.operands[0].ref)
            pool.staged = True

        def equation(op: str, *operands: Operand, result: Value | None = None, **params: Any) -> None:
            results = () if result is None else (result,)
            out.append(Equation(op, operands, results, tuple(sorted(params.items())), (), e.line))

        out = stores or list(fence)
        if stores:
            equation("commit_smem")
        parts, layout = [self.accumulator(p, i) for i in range(p.instructions)], default_layout(p.rows)
        if start:
            laid = self.new((p.m, p.n), p.acc)
            equation("layout_cast", start[0], result=laid, layout=layout)
            for i, part in enumerate(parts):
                rows = laid
                if len(parts) > 1:
                    rows = self.new(part.shape, p.acc)
                    ends = (p.rows * i, 0), (p.rows * (i + 1), p.n)
                    equation("slice", laid, result=rows, start_indices=ends[0], limit_indices=ends[1], strides=None)
                equation("async_store_tmem", part, rows)
            equation("commit_tmem")
        ready, done = self.ready_and_done()
        equation("barrier_arrive", ready)
        equation("barrier_wait", ready)
        for i, part in enumerate(parts):
            last = (done,) if i == len(parts) - 1 else ()
            operands = part, _rows(a, p.rows, i), b, Literal(bool(start), "bool"), *last
            equation("tcgen05_mma", *operands, collective_axis=None)
        equation("barrier_wait", done)
        loaded = [self.new(part.shape, p.acc) for part in parts]
        for part, x in zip(parts, loaded, strict=True):
            equation("async_load_tmem", part, result=x, layout=layout, reduce=None)
        equation("wait_load_tmem")
        # The layout of what tensor memory delivers ends here, so that the result meets any other.
        whole = result if result.dtype == p.acc else self.new((p.m, p.n), p.acc)
        joined = loaded[0]
        if len(parts) > 1:
            joined = self.new((p.m, p.n), p.acc)
            equation("concatenate", *loaded, result=joined, dimension=0)
        equation("reshape", joined, result=whole, new_sizes=whole.shape)
        if whole is not result:
            equation("convert_element_type", whole, result=result, new_dtype=result.dtype)
        return out

    def legal(self, p: Terms, a: View, b: View) -> bool:
        """Whether tcgen05 multiplies these operands as they lie."""
        kind, b_types, acc_types = TYPES.get(a.dtype, ("f16", (), ()))
        if b.dtype not in b_types or p.acc not in acc_types or kind not in features_of(self.pool.arch).kinds:
            return False
        try:
            for i in range(p.instructions):
                _described(_rows(a, p.rows, i), 1)
            mn_major = _described(b, 0).mn_major
            check_shape(Shape(kind, p.rows, p.n, False, False, mn_major, itemsize(b.dtype)), None)
        except MosaicGpuError:
            return False
        return True

    def room(self, p: Terms, line: Line | None) -> bool:
        """Whether there are columns for a product, which are then taken."""
        more = max(p.columns - self.columns, 0) * self.slots
        if more <= self.pool.columns:
            self.columns, self.pool.columns = max(self.columns, p.columns), self.pool.columns - more
            return True
        why = (
            f"{p.columns * self.slots} columns of tensor memory for a product of {p.a.dtype} ({self.slots} warpgroup(s) of "
            f"{p.columns} each), but {self.pool.columns + self.columns * self.slots} of {TMEM_COLUMNS} are left to it"
        )
        self.pool.notes.append(f"{line}: on mma.sync, as it would need {why}")
        return False

    def operand(self, o: Operand, turned: bool, stores: list[Equation], line: Line | None) -> View | None:
        """The view of an operand, (m, k) or (k, n).  stores: gets that of an array to shared memory."""
        view = self.staged(o, stores, line) if isinstance(o, Value) else o
        return None if not isinstance(view, View) else transposed(view) if turned else view

    def staged(self, x: Value, stores: list[Equation], line: Line | None) -> View | None:
        """Shared memory that an array is stored to as it is; None where the tensor core could not read that."""
        size = itemsize(x.dtype)
        swizzle = next((s for s in (128, 64, 32) if x.shape[1] * size % s == 0), 0)
        if x.dtype not in STAGED or not swizzle or x.shape[0] % 8:
            return None
        transforms = (TilingTransform((8, swizzle // size)), SwizzleTransform(swizzle))
        # Products of one warpgroup follow each other, so their operands lie over each other; slots of two would not meet.
        union = (self.unions[0], self.products) if self.slots == 1 else None
        space = MemorySpace("smem", transforms, union=union)
        view = self.part(self.new((self.slots, *x.shape), x.dtype, space, "operands of products"), x.shape[1])
        stores.append(Equation("swap", (view, x), (), (), (), line))
        return view

    def accumulator(self, p: Terms, i: int) -> View:
        """The columns of a product's i-th rows.  Of how many there are in the end, `finished` tells."""
        key = p.rows, p.acc
        if key not in self.accumulators:
            space = MemorySpace("tmem", union=(self.unions[1], len(self.accumulators)))
            self.accumulators[key] = self.new((self.slots, p.rows, TMEM_COLUMNS), p.acc, space, "results of products")
        return self.part(self.accumulators[key], p.n, i * p.n)

    def part(self, buffer: Value, columns: int, first: int = 0) -> View:
        """This warpgroup's slot of a buffer, as many columns of it."""
        rows = DimIndex(Affine(0), buffer.shape[1])
        return View(buffer, (DimIndex(self.slot, None), rows, DimIndex(Affine(first), columns)), (0, 1))

    def ready_and_done(self) -> tuple[View, ...]:
        if not self.barriers:
            space = MemorySpace("barrier", barrier=BarrierInfo(1, orders_tensor_core=True))
            names = "before products", "after products"
            self.barriers = tuple(self.new((self.slots,), "int32", space, n) for n in names)
        return tuple(View(b, (DimIndex(self.slot, None),), ()) for b in self.barriers)

    def finished(self, equations: tuple[Equation, ...]) -> tuple[Equation, ...]:
        """The role's equations, once all its products are known."""
        if not self.barriers:
            return equations
        env: dict[int, Operand] = {}
        for (rows, _), v in self.accumulators.items():
            env[v.id] = new = dataclasses.replace(v, shape=(self.slots, rows, self.columns))
            self.pool.scratch.append(new)
        self.pool.scratch += self.barriers
        equations = substitute_all(equations, env)
        if self.index is None:
            return equations
        name = (("axis_name", self.pool.program.thread_name),)
        return (Equation("axis_index", (), (self.index,), name, (), self.pool.program.line), *equations)


def transposed(view: View) -> View:
    return dataclasses.replace(view, permutation=tuple(reversed(view.permutation)))


def _rows(view: View, rows: int, i: int) -> View:
    """The i-th `rows` rows of a 2-D view."""
    dims, axis = list(view.dims), view.kept[0]
    dims[axis] = dataclasses.replace(dims[axis], start=dims[axis].start + Affine(rows * i), size=rows)
    return dataclasses.replace(view, dims=tuple(dims))


def _described(view: View, k_axis: int) -> SharedOperand:
    """What a matrix descriptor says of an operand; IllegalInstruction where none can."""
    layout = shared_layout(view.ref.shape, view.dtype, view.space, None)
    return shared_operand(view, layout, k_axis, "operand", None, CONTIGUOUS)
