"""Products before anything else looks at a role: sums into them, and wgmma or tcgen05 in the place of `dot_general`.

`acc + jnp.dot(a, b)` is one product that starts from acc: its result needs no registers of its own, and nothing is added
afterwards.  Operands in shared memory are read where they were loaded from, which is the same if nothing between the load and
the product writes memory or waits.  On sm_90a, where they lie as wgmma reads them, a product becomes a scope with an
accumulator, one wgmma group and the read that waits for it; so its waits, fences and commits are those of every wgmma.  What
takes its place on Blackwell is in `tcgen05_products.py`.  Other products stay `dot_general`; those on mma.sync read operands in
shared memory where they lie, too, if ldmatrix can.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ..errors import MosaicGpuError
from ..layouts.access import lines_of_product
from ..layouts.operands import shared_operand
from ..layouts.registers import Layout
from ..layouts.shared import SharedLayout, shared_layout
from ..memory import MemorySpace
from ..ops.dot import ACCURATE, AND, XOR, Dot, dot_of
from ..ops.registry import OPS, Generation
from ..ops.wgmma import FRAGMENTS, TYPES
from ..program import Equation, Operand, Program, Region, Value, View, scalars_of, walk
from .in_flight import unused_ids
from .roles import DEAD_IF_UNUSED, Split
from .tcgen05_products import Pool, RoleProducts, Terms, transposed

LOADS = ("get", "load")


class Products:
    """Lowers the products of a kernel's roles, one role after the other.

    splits: the roles; staging: whether operands in registers may go through shared memory to tcgen05.  `program` has, once all
    roles are lowered, what their products need of the block.
    """

    def __init__(self, program: Program, arch: str, splits: Sequence[Split], staging: bool = True) -> None:
        self._program, self.generation = program, Generation.of_arch(arch)
        bodies = (program.body, *(s.equations for s in splits))
        self.fresh = unused_ids(*bodies, values=(*program.inputs, *program.scratch))
        on_tcgen05 = self.generation is Generation.SM100 and any(e.op == "dot_general" for e in walk(program.body))
        self.pool = Pool(program, arch, self.fresh, staging) if on_tcgen05 else None

    @property
    def program(self) -> Program:
        own = self.pool.scratch if self.pool is not None else ()
        return dataclasses.replace(self._program, scratch=(*self._program.scratch, *own)) if own else self._program

    @property
    def notes(self) -> list[str]:
        return self.pool.notes if self.pool is not None else []

    @property
    def staged(self) -> bool:
        return self.pool is not None and self.pool.staged

    def lower(self, role: Split) -> tuple[Equation, ...]:
        """A role's equations with sums taken into its products, and products rewritten where that is possible."""
        equations = role.equations
        if not any(e.op == "dot_general" for e in walk(equations)):
            return equations
        if not self._program.params.strict_math:  # which rounds products before it adds
            uses = collections.Counter(i for e in walk(equations) for i in _read(e))
            equations = _with_sums(equations, uses)
        written = {
            o.ref.id
            for e in walk(self._program.body)
            if e.op in ("swap", "put_indexed", "async_store_smem")
            for o in e.operands[:1]
            if isinstance(o, View) and o.space.kind == "smem"
        }
        own = RoleProducts(self.pool, role.indices) if self.pool is not None else None
        out = _Rewriter(self.generation, written, self.fresh, own).region(equations)
        return _without_unused(own.finished(out) if own is not None else out)


def _read(e: Equation) -> Iterator[int]:
    """Ids of the values that an equation, or the end of a region of it, reads."""
    for o in (*e.operands, *(o for r in e.regions for o in r.outputs)):
        yield from (v.id for v in scalars_of(o))


def _with_sums(equations: tuple[Equation, ...], uses: Mapping[int, int]) -> tuple[Equation, ...]:
    """`acc + product`, where nobody else reads the product, as a product that starts from acc."""
    products: dict[int, Equation] = {}
    taken: set[int] = set()
    out: list[Equation] = []
    for e in equations:
        e = e.with_(regions=tuple(Region(r.inputs, _with_sums(r.equations, uses), r.outputs) for r in e.regions))
        if e.op == "dot_general" and len(e.operands) == 2 and dot_of(e).acc == e.results[0].dtype:
            products[e.results[0].id] = e
        elif e.op == "add":
            for k in (1, 0):
                o, acc = e.operands[k], e.operands[1 - k]
                if isinstance(o, Value) and o.id in products and uses[o.id] == 1 and acc.shape == o.shape:
                    product = products.pop(o.id)
                    taken.add(o.id)
                    e = product.with_(operands=(*product.operands, acc), results=e.results)
                    break
        out.append(e)
    return tuple(e for e in out if not (e.op == "dot_general" and e.results[0].id in taken))


class _Rewriter:
    """written: ids of shared buffers that ordinary stores write; ids: fresh ones; own: the role's products on tcgen05."""

    def __init__(self, generation: Generation, written: set[int], ids: Iterator[int], own: RoleProducts | None) -> None:
        self.generation, self.written, self.ids, self.own = generation, written, ids, own
        self.sources: dict[int, Value] = {}  # of arrays that are another one transposed

    def region(self, equations: Sequence[Equation]) -> tuple[Equation, ...]:
        out: list[Equation] = []
        loaded: dict[int, View] = {}  # arrays that are, at this point, what a view of shared memory holds
        for e in equations:
            if e.op in LOADS and isinstance(e.operands[0], View) and e.operands[0].space.kind == "smem":
                if len(e.operands[0].shape) == 2 and not e.operands[0].peer:
                    loaded[e.results[0].id] = e.operands[0]
            elif e.op == "transpose" and isinstance(e.operands[0], Value) and e.operands[0].id in loaded:
                loaded[e.results[0].id] = transposed(loaded[e.operands[0].id])
            elif e.op == "transpose" and len(e.results[0].shape) == 2 and isinstance(e.operands[0], Value):
                self.sources[e.results[0].id] = e.operands[0]
            elif e.op == "dot_general":
                out += self.tensor_core(e, loaded) or self.in_place(e, loaded) or [e]
                continue
            elif not (e.op in DEAD_IF_UNUSED or e.op in (*LOADS, "num_programs") or (e.op in OPS and OPS[e.op].pure)):
                loaded = {}
            if e.op == "warp_map":  # where a product is refused
                out.append(e)
                continue
            regions = tuple(Region(r.inputs, self.region(r.equations), r.outputs) for r in e.regions)
            out.append(e.with_(regions=regions))
        return tuple(out)

    def fresh(self, shape: tuple[int, ...], dtype: str, space: MemorySpace | None = None) -> Value:
        return Value(next(self.ids), shape, dtype, space)

    def in_place(self, e: Equation, loaded: dict[int, View]) -> list[Equation] | None:
        """A product on mma.sync whose operands ldmatrix reads where they lie, if it can."""
        d = dot_of(e)
        if not d.kind or d.size == 8 or not d.whole or d.left[0] >= 0 or -1 in (*d.left[1:], *d.right[1:]):
            return None
        operands = list(e.operands)
        for i, k_axis in ((0, d.left[2]), (1, d.right[2])):
            o = operands[i]
            view = loaded.get(o.id) if isinstance(o, Value) else None
            if view is not None and lines_of_product(view, self.layout(view), k_axis):
                operands[i] = view
        if operands == list(e.operands):
            return None
        read = Equation(
            "commit_smem", (), (), (), (), e.line
        )  # all threads have read before one of them refills a buffer
        return [*self.fence(e, operands), e.with_(operands=tuple(operands)), read]

    def fence(self, e: Equation, operands: Sequence[Operand | None]) -> list[Equation]:
        """What makes ordinary stores visible to whoever reads these operands in shared memory."""
        if any(isinstance(o, View) and (o.ref.id in self.written or o.space.union) for o in operands):
            return [Equation("commit_smem", (), (), (), (), e.line)]
        return []

    @staticmethod
    def layout(view: View) -> SharedLayout:
        return shared_layout(view.ref.shape, view.dtype, view.space, None)

    def tensor_core(self, e: Equation, loaded: dict[int, View]) -> list[Equation] | None:
        """The equations that take a product's place on wgmma or tcgen05; None where they cannot do it."""
        d = dot_of(e)
        x, y = e.operands[:2]
        if (
            d.left[0] >= 0
            or -1 in (*d.left[1:], *d.right[1:])
            or (x.dtype == "float32" and e.param("precision") == ACCURATE)
            or d.m % 64
            or d.n % 8
            or d.n > 256
            or d.k % (32 // d.size)
            or e.param("precision") == XOR
            or (e.param("precision") == AND and self.generation is not Generation.SM90)
        ):
            return None
        if self.generation is Generation.SM90:
            return self.wgmma(e, d, loaded)
        assert self.own is not None
        operands: list[tuple[Operand, bool]] = []
        for o, turned in ((x, d.left[2] == 0), (y, d.right[2] == 1)):
            view = loaded.get(o.id) if isinstance(o, Value) else None
            source = self.sources.get(o.id) if isinstance(o, Value) else None
            if view is not None:
                operands.append((view, turned))
            else:
                operands.append((o, turned) if source is None else (source, not turned))
        (a, a_turned), (b, b_turned) = operands
        return self.own.lower(e, Terms(d.m, d.n, d.k, d.acc, a, b, (a_turned, b_turned)), self.fence(e, (a, b)))

    def wgmma(self, e: Equation, d: Dot, loaded: dict[int, View]) -> list[Equation] | None:
        """B is in shared memory, A there or an array (not of float32, which products of arrays round, not cut off)."""
        x, y, *start = e.operands
        result, bits = e.results[0], e.param("precision") == AND
        b_types, acc_types = TYPES.get("b1" if bits else x.dtype, ((), ()))
        if (
            ("b1" if bits else y.dtype) not in b_types
            or d.acc not in acc_types
            or (d.acc == "int32" and d.n > 32 and d.n % 16)
        ):
            return None
        b = self.operand(y, loaded, d.right[2] == 1, 0)
        if b is None:
            return None
        a: Operand | None = self.operand(x, loaded, d.left[2] == 0, 1)
        out: list[Equation] = []
        if a is None:
            if x.dtype == "float32" or d.left[2] == 0 or not isinstance(x, Value):
                return None
            a = self.fresh(x.shape, x.dtype)
            out.append(Equation("layout_cast", (x,), (a,), (("layout", FRAGMENTS[d.size]),), (), e.line))
        out += self.fence(e, (a, b))
        acc = self.fresh((d.m, d.n), d.acc, MemorySpace("acc"))
        inside, outside = self.fresh((d.m, d.n), d.acc), self.fresh((d.m, d.n), d.acc)
        if result.dtype == d.acc:
            outside = result
        body = [
            Equation("wgmma", (View.whole(acc), a, b), (), (("bits", "and"),) if bits else (), (), e.line),
            Equation("get", (View.whole(acc),), (inside,), (), (), e.line),
        ]
        if start:
            laid = self.fresh(acc.shape, acc.dtype)
            out.append(Equation("layout_cast", (start[0],), (laid,), (("layout", Layout.WGMMA),), (), e.line))
            body.insert(0, Equation("swap", (View.whole(acc), laid), (), (), (), e.line))
        scope = (("collective_axes", ()),)
        out.append(Equation("run_scoped", (), (outside,), scope, (Region((acc,), tuple(body), (inside,)),), e.line))
        if result.dtype != d.acc:
            to = (("new_dtype", result.dtype),)
            out.append(Equation("convert_element_type", (outside,), (result,), to, (), e.line))
        return out

    def operand(self, o: Operand, loaded: dict[int, View], turn: bool, k_axis: int) -> View | None:
        """The view of an operand that a matrix descriptor describes, if there is one."""
        view = loaded.get(o.id) if isinstance(o, Value) else None
        if view is None:
            return None
        view = transposed(view) if turn else view
        try:
            shared_operand(view, self.layout(view), k_axis, "operand", None)
        except MosaicGpuError:
            return None
        return view


def _without_unused(equations: tuple[Equation, ...]) -> tuple[Equation, ...]:
    """Loads that only products took, and their transposes, are gone."""
    while True:
        used = {i for e in walk(equations) for i in _read(e)}
        kept = _sweep(equations, used)
        if kept == equations:
            return kept
        equations = kept


def _sweep(equations: tuple[Equation, ...], used: set[int]) -> tuple[Equation, ...]:
    return tuple(
        e.with_(regions=tuple(Region(r.inputs, _sweep(r.equations, used), r.outputs) for r in e.regions))
        for e in equations
        if not (e.op in (*LOADS, "transpose") and e.results[0].id not in used)
    )
