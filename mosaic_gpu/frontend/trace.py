"""jaxpr -> Program.  All differences between JAX versions and all of JAX's own data structures end here."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from ..errors import Line, OutOfBounds, UnsupportedCall
from ..memory import MemorySpace
from ..ops.elementwise import ELEMENTWISE
from ..program import Affine, DimIndex, Equation, Literal, Operand, Region, Value, View
from .primitives import TreeOf, dtype_name, slice_class
from .random import RANDOM, key_of_constant

JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
KERNELS_FOLDER = os.path.join(OUR_FOLDER, "kernels") + os.sep
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
}
CALLS |= {
    "remat": "jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
IDENTITY = {
    "copy",
    "copy_p",
    "stop_gradient",
    "reshard",
    "sharding_constraint",
    "optimization_barrier",
    "pvary",
    "multiple_of",
}
SAME_AS = {"add_any": "add"}  # what autodiff writes, and the operation that it is


def user_line(equation: Any, outer: Line | None) -> Line | None:
    """The innermost line of the traceback that is the user's: not JAX's and not ours (our kernels count as a user's)."""
    found = equation.source_info.traceback
    for f in found.frames if found else ():
        if is_users(f.file_name):
            return Line(os.path.abspath(f.file_name), int(f.line_num), str(f.function_name))
    return outer  # e.g. inside jnp.where, whose trace JAX caches: no frame of the user


def is_users(file: str) -> bool:
    """Whether a file is the user's: not JAX's and not ours."""
    name = os.path.abspath(file)
    ours = name.startswith(OUR_FOLDER) and not name.startswith(KERNELS_FOLDER)
    return not (name.startswith(JAX_FOLDER) or ours or file.startswith("<"))


def raised_at(error: BaseException, outer: Line | None) -> Line | None:
    """The innermost line of the user's that an exception passed through."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_users(frame.f_code.co_filename):
            return Line(os.path.abspath(frame.f_code.co_filename), number, frame.f_code.co_name)
    return outer


class Tracer:
    """Converts one jaxpr.  `fresh` numbers values; `env` maps JAX variables to operands."""

    def __init__(self) -> None:
        self.count = 0
        self.env: dict[Any, Operand] = {}
        self.unions: dict[int, int] = {}  # number of a RefUnion -> its number in this program
        self.sums: dict[int, Affine] = {}  # int32 scalars that are sums of products: what an index may look through
        self.block: tuple[tuple[Operand, ...], tuple[Operand, ...]] | None = (
            None  # of an inlined body: its ids and sizes
        )

    def fresh(self, shape: Sequence[int], dtype: Any, space: MemorySpace | None = None) -> Value:
        self.count += 1
        return Value(
            self.count, tuple(int(n) for n in shape), dtype if isinstance(dtype, str) else dtype_name(dtype), space
        )

    def value_of_aval(self, aval: Any, name: str = "") -> Value:
        space = getattr(aval, "memory_space", None)
        if isinstance(space, MemorySpace) and space.union is not None:
            number, group = space.union
            space = dataclasses.replace(space, union=(self.unions.setdefault(number, len(self.unions)), group))
        value = self.fresh(aval.shape, aval.dtype, space if isinstance(space, MemorySpace) else None)
        return dataclasses.replace(value, name=name)

    def read(self, v: Any) -> Operand:
        if isinstance(v, jex.Literal):
            return literal(v.val, getattr(v.aval, "dtype", None))
        return self.env[v]

    def bind(self, variables: Sequence[Any], operands: Sequence[Operand]) -> None:
        self.env.update(zip(variables, operands, strict=True))

    def define(self, variables: Sequence[Any]) -> tuple[Value, ...]:
        values = tuple(self.value_of_aval(v.aval) for v in variables)
        self.bind(variables, values)
        return values

    # ---- a jaxpr's equations, appended to `out` ---------------------------------------------------------------------
    def inline(self, jaxpr: Any, operands: Sequence[Operand], out: list[Equation], line: Line | None) -> list[Operand]:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        consts = getattr(jaxpr, "consts", ())
        self.bind(inner.constvars, [self.constant(c, line) for c in consts])
        self.bind(inner.invars, operands)
        for e in inner.eqns:
            self.equation(e, out, user_line(e, line))
        return [self.read(v) for v in inner.outvars]

    def constant(self, c: Any, line: Line | None) -> Operand:
        key = key_of_constant(c, literal)
        if key is not None:
            return key  # type: ignore[no-any-return]
        if np.ndim(c) == 0 and not hasattr(c, "aval"):
            return literal(c, np.asarray(c).dtype)
        raise UnsupportedCall(
            f"the kernel captures an array constant of shape {np.shape(c)}; pass it as an input (Python and NumPy "
            "scalars may be captured)",
            line,
        )

    def region(self, jaxpr: Any, operands: Sequence[Operand], inputs: tuple[Value, ...], line: Line | None) -> Region:
        equations: list[Equation] = []
        outputs = self.inline(jaxpr, operands, equations, line)
        return Region(inputs, tuple(equations), tuple(outputs))

    def equation(self, e: Any, out: list[Equation], line: Line | None) -> None:
        name = SAME_AS.get(e.primitive.name, e.primitive.name)
        operands = e.params.get("operands")
        if name in STRUCTURED:
            STRUCTURED[name](self, e, out, line)
        elif name in ("program_id", "num_programs") and self.block is not None:
            self.bind(e.outvars, [self.place_in_grid(name, e.params["axis"], line)])
        elif isinstance(operands, TreeOf):
            params = {k: v for k, v in e.params.items() if k not in ("operands", "results")}
            out.append(
                Equation(name, self.operands(operands, e.invars, line), self.define(e.outvars), plain(params), (), line)
            )
        elif name in CALLS:
            inner = e.params.get(CALLS[name]) or e.params.get("jaxpr") or e.params.get("fun_jaxpr")
            self.bind(e.outvars, self.inline(inner, [self.read(v) for v in e.invars], out, line))
        elif name in IDENTITY:
            self.bind(e.outvars, [self.read(v) for v in e.invars])
        else:
            params = {
                k: v
                for k, v in e.params.items()
                if isinstance(v, (int, float, str, bool, tuple, np.dtype, np.generic)) or k == "new_dtype"
            }
            inputs = tuple(self.read(v) for v in e.invars)
            if name in ELEMENTWISE:
                inputs = tuple(self.widened(x, e.outvars[0].aval.shape, out, line) for x in inputs)
            results = self.define(e.outvars)
            if results:
                self.note_sum(name, inputs, results[0])
            out.append(Equation(name, inputs, results, plain(params), (), line))

    def place_in_grid(self, name: str, axis: int, line: Line | None) -> Operand:
        """What `program_id` or `num_programs` is in an inlined body."""
        assert self.block is not None
        ids, sizes = self.block
        if axis >= len(ids):
            raise UnsupportedCall(f"{name}({axis}): the grid of this pallas_call has {len(ids)} axes", line)
        return (ids if name == "program_id" else sizes)[axis]

    def widened(self, x: Operand, shape: tuple[int, ...], out: list[Equation], line: Line | None) -> Operand:
        """JAX lets an array of (64, 1) meet one of (64, 16) without a broadcast of its own."""
        if not isinstance(x, Value) or not x.shape or x.shape == tuple(shape):
            return x
        wide = self.fresh(shape, x.dtype)
        params = (("broadcast_dimensions", tuple(range(len(shape)))), ("shape", tuple(int(n) for n in shape)))
        out.append(Equation("broadcast_in_dim", (x,), (wide,), params, (), line))
        return wide

    def note_sum(self, name: str, inputs: tuple[Operand, ...], result: Value) -> None:
        """Remember i * 64 + 8 and the like, so that an index built from it is known to be a multiple of 8."""
        if result.shape or result.dtype != "int32" or name not in ("add", "sub", "mul", "convert_element_type"):
            return
        parts = [self.sum_of(x) for x in inputs]
        if name == "mul":
            constant = next((p for p in parts if p.static), None)
            if constant is None:
                return
            other = parts[1] if constant is parts[0] else parts[0]
            self.sums[result.id] = other * constant.const
        elif name == "convert_element_type":
            if not isinstance(inputs[0], View) and inputs[0].dtype == "int32":
                self.sums[result.id] = parts[0]
        else:
            self.sums[result.id] = parts[0] + parts[1] * (-1 if name == "sub" else 1)

    def sum_of(self, x: Operand) -> Affine:
        if isinstance(x, Literal):
            return Affine(int(x.value))
        assert isinstance(x, Value)
        return self.sums.get(x.id, Affine(0, ((x, 1),)))

    def operands(self, tree: TreeOf, invars: Sequence[Any], line: Line | None) -> tuple[Operand, ...]:
        items = jax.tree.unflatten(tree.tree, list(invars))
        out: list[Operand] = []
        for item, is_ref in zip(items, tree.refs, strict=True):
            if is_ref:
                ref, transforms = item
                out.append(self.view(ref, transforms, line))
            elif item is not None:
                out.append(self.read(item))
        return tuple(out)

    # ---- views ------------------------------------------------------------------------------------------------------
    def view(self, ref: Any, transforms: Sequence[Any], line: Line | None) -> View:
        base = self.read(ref)
        assert not isinstance(base, Literal)
        v = base if isinstance(base, View) else View.whole(base)
        for t in transforms:
            kind = type(t).__name__
            if kind == "NDIndexer":
                v = self.indexed(v, t.indices, line)
            elif kind == "TransposeTransform":
                v = View(v.ref, v.dims, tuple(v.permutation[p] for p in t.permutation))
            elif kind == "ReshapeTransform" and tuple(t.shape) == v.shape:
                pass
            else:
                raise UnsupportedCall(
                    f"{kind} on a {v.space} Ref: views can be indexed and transposed; copy into a buffer of that shape",
                    line,
                )
        return v

    def indexed(self, v: View, indices: Sequence[Any], line: Line | None) -> View:
        dims = list(v.dims)
        gone: set[int] = set()
        for position, index in zip(v.kept, indices, strict=True):
            old = dims[position]
            size = int(old.size or 0)
            if isinstance(index, slice_class()):
                start, length, stride = self.affine(index.start, line), int(index.size), int(index.stride)
                last = start.const + (length - 1) * stride if length else start.const
                dims[position] = DimIndex(old.start + start * old.stride, length, old.stride * stride)
            else:
                start = self.affine(index, line)
                last = start.const
                dims[position] = DimIndex(old.start + start * old.stride, None)
                gone.add(position)
            clipped = v.space.kind == "gmem" and position not in gone  # a tile may stick out of an array: TMA clips it
            if start.static and (start.const < 0 or (last >= size and not clipped) or (clipped and start.const > size)):
                raise OutOfBounds(
                    f"index {dims[position]} of dimension {position} is outside {v.ref} (extent {v.ref.shape[position]})",
                    line,
                )
        kept = [p for p in v.kept if p not in gone]
        order = sorted(kept)
        return View(v.ref, tuple(dims), tuple(order.index(p) for p in kept))

    def affine(self, x: Any, line: Line | None) -> Affine:
        if isinstance(x, (int, np.integer)):
            return Affine(int(x))
        operand = self.read(x) if not isinstance(x, np.ndarray) else literal(x, x.dtype)
        if isinstance(operand, Literal):
            return Affine(int(operand.value))
        assert isinstance(operand, Value)
        if operand.shape:
            raise UnsupportedCall("an array as an index: use a loop over rows, or one index per copy", line)
        return self.sum_of(operand)


def literal(value: Any, dtype: Any) -> Literal:
    """A NumPy or Python scalar as a plain one; floats of narrow types become the float they round to."""
    array = np.asarray(value)
    if array.shape:
        raise UnsupportedCall(f"an array constant of shape {array.shape} in a kernel; pass it as an input")
    name = dtype_name(dtype)
    if name == "bool":
        return Literal(bool(array), name)
    if np.issubdtype(np.dtype(dtype), np.integer):
        return Literal(int(array), name)
    return Literal(float(array.astype(np.dtype(dtype)).astype(np.float64)), name)


def plain(params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Parameters as sorted pairs of hashable plain values; dtypes by name."""

    def convert(v: Any) -> Any:
        if isinstance(v, (tuple, list)):
            return tuple(convert(x) for x in v)
        if isinstance(v, np.dtype) or (isinstance(v, type) and issubclass(v, np.generic)):
            return dtype_name(np.dtype(v))
        return v.item() if isinstance(v, np.generic) else v

    return tuple(sorted((k, convert(v)) for k, v in params.items() if v is not None))


# ---- structured primitives ----------------------------------------------------------------------------------------------
def _views(tr: Tracer, e: Any, skip: int, line: Line | None) -> View:
    transforms = jax.tree.unflatten(e.params["tree"], list(e.invars[skip:]))
    return tr.view(e.invars[0], transforms, line)


def _get(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    out.append(Equation("get", (_views(tr, e, 1, line),), tr.define(e.outvars), (), (), line))


def _swap(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    view = _views(tr, e, 2, line)
    out.append(Equation("swap", (view, tr.read(e.invars[1])), tr.define(e.outvars), (), (), line))


def _addupdate(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    view, x = _views(tr, e, 2, line), tr.read(e.invars[1])
    old, new = tr.fresh(view.shape, view.dtype), tr.fresh(view.shape, view.dtype)
    out.append(Equation("get", (view,), (old,), (), (), line))
    out.append(Equation("add", (old, x), (new,), (), (), line))
    out.append(Equation("swap", (view, new), (), (), (), line))


def _cond(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    index, *operands = [tr.read(v) for v in e.invars]
    regions = tuple(tr.region(b, operands, (), line) for b in e.params["branches"])
    out.append(Equation("cond", (index,), tr.define(e.outvars), (), regions, line))


def _is_increment(jaxpr: Any, variable: Any, result: Any) -> bool:
    """Whether an integer carry counts: result = variable + 1."""
    if str(variable.aval.dtype) not in ("int32", "int64"):
        return False
    for e in jaxpr.eqns:
        if e.outvars and e.outvars[0] is result:
            a, b = e.invars if e.primitive.name == "add" else (None, None)
            return a is variable and isinstance(b, jex.Literal) and int(b.val) == 1
    return False


def _scan(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    p = e.params
    if "ft_in" in p:  # JAX 0.11 and later: (consts, carry, xs) as trees, whose leaves here are placeholders
        consts, carry, xs = (len(part) for part in p["ft_in"].elts)
    else:
        consts, carry = p["num_consts"], p["num_carry"]
        xs = len(e.invars) - consts - carry
    body = p["jaxpr"]
    inner = getattr(body, "jaxpr", body)
    if xs or len(inner.outvars) != carry:
        _scan_arrays(tr, e, body, consts, carry, out, line)
        return
    operands = [tr.read(v) for v in e.invars]
    outer, init = operands[:consts], operands[consts:]
    counted = (
        carry > 0 and _is_increment(inner, inner.invars[consts], inner.outvars[0]) and isinstance(init[0], Literal)
    )
    start = int(init[0].value) if counted and isinstance(init[0], Literal) else 0
    bounds = (Literal(start, "int32"), Literal(start + p["length"], "int32"))
    _for(tr, e, body, outer, init, bounds, counted, p["unroll"], out, line)


def _scan_arrays(
    tr: Tracer, e: Any, body: Any, consts: int, carry: int, out: list[Equation], line: Line | None
) -> None:
    """A scan over register arrays: a counted loop that carries the ys; step i takes element i of each xs."""
    p, inner = e.params, getattr(body, "jaxpr", body)
    operands = [tr.read(v) for v in e.invars]
    outer, init, xs = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]
    ys = e.outvars[carry:]
    i = tr.fresh((), "int32")
    inside: list[Equation] = []
    at: Operand = i
    if p["reverse"]:
        at = tr.fresh((), "int32")
        inside.append(Equation("sub", (Literal(p["length"] - 1, "int32"), i), (at,), (), (), line))
    zero = Literal(0, "int32")

    def first(x: Operand) -> tuple[Operand, ...]:
        return (at, *[zero] * (len(x.shape) - 1))

    elements: list[Operand] = []
    for x in xs:
        row, element = tr.fresh((1, *x.shape[1:]), x.dtype), tr.fresh(x.shape[1:], x.dtype)
        params = (("slice_sizes", row.shape),)
        inside.append(Equation("dynamic_slice", (x, *first(x)), (row,), params, (), line))
        inside.append(Equation("squeeze", (row,), (element,), (("dimensions", (0,)),), (), line))
        elements.append(element)
    carried = tuple(tr.fresh(o.shape, o.dtype) for o in init)
    stacked = tuple(tr.fresh(v.aval.shape, v.aval.dtype) for v in ys)
    results = tr.inline(body, [*outer, *carried, *elements], inside, line)
    outputs: list[Operand] = list(results[:carry])
    for y, old in zip(results[carry:], stacked, strict=True):
        row, new = tr.fresh((1, *old.shape[1:]), old.dtype), tr.fresh(old.shape, old.dtype)
        dims = tuple(range(1, len(old.shape)))
        wide = (("broadcast_dimensions", dims), ("shape", row.shape))
        inside.append(Equation("broadcast_in_dim", (y,), (row,), wide, (), line))
        inside.append(Equation("dynamic_update_slice", (old, row, *first(old)), (new,), (), (), line))
        outputs.append(new)
    starts: list[Operand] = []
    for v in stacked:
        start = tr.fresh(v.shape, v.dtype)
        blank = literal(0, np.dtype(v.dtype) if v.dtype != "bfloat16" else jax.numpy.bfloat16)
        out.append(
            Equation(
                "broadcast_in_dim", (blank,), (start,), (("broadcast_dimensions", ()), ("shape", v.shape)), (), line
            )
        )
        starts.append(start)
    assert len(inner.outvars) == len(outputs)
    region = Region((i, *carried, *stacked), tuple(inside), tuple(outputs))
    bounds = (zero, Literal(p["length"], "int32"))
    loop = (("unroll", int(p["unroll"]) if not isinstance(p["unroll"], bool) else (0 if p["unroll"] else 1)),)
    out.append(Equation("for", (*bounds, *init, *starts), tr.define(e.outvars), loop, (region,), line))


def _while(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    p = e.params
    cond, body = p["cond_jaxpr"], p["body_jaxpr"]
    ic, ib = getattr(cond, "jaxpr", cond), getattr(body, "jaxpr", body)
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    operands = [tr.read(v) for v in e.invars]
    c_outer, b_outer, init = operands[:nc], operands[nc : nc + nb], operands[nc + nb :]
    carry = ib.invars[nb:]
    fori = (
        nc == 0
        and len(ic.eqns) == 1
        and ic.eqns[0].primitive.name == "lt"
        and list(ic.eqns[0].invars) == list(ic.invars[:2])
        and len(carry) >= 2
        and ib.outvars[1] is carry[1]
        and _is_increment(ib, carry[0], ib.outvars[0])
    )
    if fori:
        bounds = (init[0], init[1])
        # The bound is a carried value that never changes: inside the body it is the bound itself.
        _for(tr, e, body, b_outer, init, bounds, True, 1, out, line, invariant=1)
        # The counter ends at the upper bound, or where it started if that is not below.
        end = tr.fresh((), "int32")
        out.append(Equation("max", bounds, (end,), (), (), line))
        tr.bind(e.outvars[:1], [end])
        return
    values = tuple(tr.fresh(v.aval.shape, v.aval.dtype) for v in carry)
    c_region = tr.region(cond, [*c_outer, *values], values, line)
    values_b = tuple(tr.fresh(v.aval.shape, v.aval.dtype) for v in carry)
    b_region = tr.region(body, [*b_outer, *values_b], values_b, line)
    out.append(Equation("while", tuple(init), tr.define(e.outvars), (), (c_region, b_region), line))


def _for(
    tr: Tracer,
    e: Any,
    body: Any,
    outer: Sequence[Operand],
    init: Sequence[Operand],
    bounds: tuple[Operand, Operand],
    counted: bool,
    unroll: int | bool,
    out: list[Equation],
    line: Line | None,
    invariant: int = 0,
) -> None:
    """A counted loop.  counted: carry 0 is the counter; invariant: the next so many carries are the loop's bounds."""
    skip = (1 + invariant) if counted else 0
    index = tr.fresh((), "int32")
    carried = tuple(tr.fresh(o.shape, o.dtype) for o in init[skip:])
    inside: list[Operand] = ([index, *([bounds[1]] * invariant)] if counted else []) + list(carried)
    region = tr.region(body, [*outer, *inside], (index, *carried), line)
    region = dataclasses.replace(region, outputs=region.outputs[skip:])
    results = tr.define(e.outvars[skip:])
    if counted:
        tr.bind(e.outvars[:skip], [bounds[1]] * skip)
    params = (("unroll", int(unroll) if not isinstance(unroll, bool) else (0 if unroll else 1)),)
    out.append(Equation("for", (*bounds, *init[skip:]), results, params, (region,), line))


def _run_scoped(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    jaxpr = e.params["jaxpr"]
    tr.bind(jaxpr.constvars, [tr.read(v) for v in e.invars])
    refs = tuple(tr.value_of_aval(v.aval, n) for v, n in zip(jaxpr.invars, e.params["names"], strict=True))
    region = tr.region(_without_consts(jaxpr), list(refs), refs, line)
    params = (("collective_axes", e.params["collective_axes"]),)
    out.append(Equation("run_scoped", (), tr.define(e.outvars), params, (region,), line))


def _warp_map(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    jaxpr = e.params["jaxpr"]
    tr.bind(jaxpr.constvars, [tr.read(v) for v in e.invars])
    warp = tr.fresh((), "int32")
    out.append(Equation("warp_map", (), (), (), (tr.region(_without_consts(jaxpr), [warp], (warp,), line),), line))


def _warp_branch(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    jaxpr = e.params["jaxpr"]
    condition, *consts = e.invars
    tr.bind(jaxpr.constvars, [tr.read(v) for v in consts])
    region = tr.region(_without_consts(jaxpr), [], (), line)
    out.append(Equation("warp_branch", (tr.read(condition),), (), (), (region,), line))


def _inlined(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    operands, rank = tr.operands(e.params["operands"], e.invars, line), e.params["rank"]
    before, tr.block = tr.block, (operands[:rank], operands[rank : 2 * rank])
    tr.bind(e.outvars, tr.inline(e.params["jaxpr"], operands[2 * rank :], out, line))
    tr.block = before


@dataclasses.dataclass(frozen=True)
class _without_consts:  # noqa: N801 - reads as what it does
    """A jaxpr whose constvars are bound already."""

    whole: Any
    constvars: tuple[Any, ...] = ()

    @property
    def invars(self) -> Any:
        return self.whole.invars

    @property
    def outvars(self) -> Any:
        return self.whole.outvars

    @property
    def eqns(self) -> Any:
        return self.whole.eqns


def _axis_index(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    name = e.params["axis_name"]
    out.append(Equation("axis_index", (), tr.define(e.outvars), (("axis_name", name),), (), line))


STRUCTURED: dict[str, Callable[[Tracer, Any, list[Equation], Line | None], None]] = {
    "get": _get,
    "swap": _swap,
    "addupdate": _addupdate,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "run_scoped": _run_scoped,
    "warp_branch": _warp_branch,
    "warp_map": _warp_map,
    "axis_index": _axis_index,
    **RANDOM,
    "inlined": _inlined,
}


@functools.cache
def function_line(f: Any) -> Line | None:
    code = getattr(getattr(f, "func", f), "__code__", None)
    return Line(code.co_filename, code.co_firstlineno, code.co_name) if code else None


def leaf_names(
    f: Any, args: Sequence[Any], kwargs: dict[str, Any], is_leaf: Callable[[Any], bool] | None = None
) -> list[str]:
    """What `f` calls each leaf of (args, kwargs), in the order of `jax.tree.flatten`: `acc`, `tiles[1]`; for reports."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    bases = [positional[i] if i < len(positional) else f"{rest}[{i - len(positional)}]" for i in range(len(args))]
    names = []
    for base, value in [*zip(bases, args, strict=True), *sorted(kwargs.items())]:
        for path, _ in jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)[0]:
            names.append(base + jax.tree_util.keystr(path))
    return names
