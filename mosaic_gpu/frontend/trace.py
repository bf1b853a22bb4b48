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

from ..collecting import FAILURES, Failure, keep
from ..errors import Line, MosaicGpuError, OutOfBounds, UnsupportedCall
from ..layouts.tmem import seen_as
from ..memory import MemorySpace
from ..ops.constants import MOST_ELEMENTS, Table
from ..ops.elementwise import ELEMENTWISE, FLOATS, HIGHEST
from ..program import Affine, DimIndex, Equation, Literal, Operand, Region, Value, View
from .empty import of_nothing
from .foreign import STATIC_START
from .peers import PeerTransform
from .primitives import TreeOf, dtype_name, literal, plain, slice_class
from .random import Keys, key_of_constant, refuse_keys, taken
from .shard_map import traced_outside
from .structured import STRUCTURED

JAX_FOLDER = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
NUMPY_FOLDER = os.path.dirname(os.path.abspath(np.__file__)) + os.sep
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
    "device_put",
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
    """The innermost line of the traceback that is the user's: not JAX's, NumPy's or ours (our kernels count as a user's)."""
    found = equation.source_info.traceback
    for f in found.frames if found else ():
        if is_users(f.file_name):
            return Line(os.path.abspath(f.file_name), int(f.line_num), str(f.function_name))
    return outer  # e.g. inside jnp.where, whose trace JAX caches: no frame of the user


def is_jaxs(jaxpr: Any) -> bool:
    """Whether it is of a jitted function of JAX's: JAX keeps its trace, and in that the lines of whoever called it first."""
    source = str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", "") or "")
    return source.rpartition(" at ")[2].startswith(JAX_FOLDER)


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a file is the user's: not JAX's, NumPy's or ours."""
    name = os.path.abspath(file)
    ours = name.startswith(OUR_FOLDER) and not name.startswith(KERNELS_FOLDER)
    return not (name.startswith((JAX_FOLDER, NUMPY_FOLDER)) or ours or file.startswith("<"))


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
        self.failures = FAILURES.get()
        self.in_jax = False  # in a function of JAX's, whose lines are those of its call
        self.env: dict[Any, Operand] = {}
        self.warp_axes: dict[str, Value] = {}  # the warp, by the name of its axis, inside of a core_map
        self.semaphores: list[Value] = []  # that the body has asked for with get_global
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

    def stored(self, view: View, store: Equation) -> list[Equation]:
        """A store, in the body of a `pallas_call` with all threads meeting before and after it.

        Its author chose no layouts, so cannot know which thread reads what another wrote.
        """
        meet = [Equation("commit_smem", (), (), (), (), store.line)]
        return [*meet, store, *meet] if self.block and view.space.kind in ("smem", "gmem") else [store]

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
        for v, c in zip(inner.constvars, consts, strict=True):
            first = next((e for e in inner.eqns if any(x is v for x in e.invars)), None)
            at = line if first is None or self.in_jax else user_line(first, line)
            self.bind([v], [self.constant(c, v.aval, out, at)])
        self.bind(inner.invars, operands)
        for e in inner.eqns:
            own = line if self.in_jax else user_line(e, line)
            if self.failures is None:
                self.equation(e, out, own)
            else:
                self.tried(e, out, own, self.failures)
        return [self.read(v) for v in inner.outvars]

    def tried(self, e: Any, out: list[Equation], line: Line | None, failures: list[Failure]) -> None:
        """As `equation`; an error is kept, and what would have come out stands for itself."""
        try:
            self.equation(e, out, line)
        except MosaicGpuError as error:
            error.line = error.line or line
            keep(failures, Failure(error, error.line))
            self.define([v for v in e.outvars if v not in self.env])

    def constant(self, c: Any, aval: Any, out: list[Equation], line: Line | None) -> Operand:
        """What a body has captured: a number is a literal, a small array a table in the code."""
        key = key_of_constant(c, literal)
        if key is not None:
            return key  # type: ignore[no-any-return]
        if isinstance(c, jax.core.Tracer):
            raise UnsupportedCall(
                f"the kernel captures {aval.str_short()}, which is traced (an argument of the function around it, or made of "
                "one): pass it as an input",
                line,
            )
        array = np.asarray(c).astype(aval.dtype)
        if not array.shape:
            return literal(array, aval.dtype)
        table = Table.of(array)
        if table.uniform(array.itemsize):
            first = array.reshape(-1)[0] if array.size else np.zeros((), array.dtype)
            return self.full(literal(first, aval.dtype), array.shape, out, line)
        if array.size > MOST_ELEMENTS:
            raise UnsupportedCall(
                f"the kernel captures an array constant of shape {array.shape}, {array.size} elements; pass it as an input "
                f"(arrays up to {MOST_ELEMENTS} elements may be captured, and numbers)",
                line,
            )
        value = self.fresh(array.shape, aval.dtype)
        out.append(Equation("constant", (), (value,), (("table", table),), (), line))
        return value

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
            before, self.in_jax = self.in_jax, self.in_jax or is_jaxs(getattr(inner, "jaxpr", inner))
            self.bind(e.outvars, self.inline(inner, [self.read(v) for v in e.invars], out, line))
            self.in_jax = before
        elif name in IDENTITY or (name == "convert_element_type" and self.keeps_dtype(e)):
            self.bind(e.outvars, [self.read(v) for v in e.invars])
        else:
            params = {
                k: v
                for k, v in e.params.items()
                if isinstance(v, (int, float, str, bool, tuple, np.dtype, np.generic)) or k == "new_dtype"
            }
            accuracy = _accuracy(e.params.get("accuracy"))
            if accuracy is not None:
                params["accuracy"] = accuracy
            inputs = tuple(self.read(v) for v in e.invars)
            if inputs and isinstance(inputs[0], Keys):
                self.bind(e.outvars, taken(name, inputs[0], e.params, line))
                return
            refuse_keys(name, inputs, line)
            if name in ELEMENTWISE:
                inputs = tuple(self.widened(x, e.outvars[0].aval.shape, out, line) for x in inputs)
            results = self.define(e.outvars)
            if results:
                self.note_sum(name, inputs, results[0])
            known = of_nothing(name, inputs, results)
            if known is None:
                out.append(Equation(name, inputs, results, plain(params), (), line))
            else:
                full = [self.full(x, r.shape, out, line) for x, r in zip(known, results, strict=True)]
                self.bind(e.outvars, full)

    def keeps_dtype(self, e: Any) -> bool:
        """Whether a conversion only makes a weak type a strong one."""
        x = self.read(e.invars[0])
        return isinstance(x, Value) and x.dtype == dtype_name(e.outvars[0].aval.dtype)

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

    def inlined(
        self, f: Callable[..., Any], operands: Sequence[Operand], out: list[Equation], line: Line | None
    ) -> list[Operand]:
        """What a function of arrays gives for operands: its operations stand here."""
        avals = [jax.ShapeDtypeStruct(o.shape, np.dtype(o.dtype)) for o in operands]
        closed = traced_outside(lambda: jax.make_jaxpr(f)(*avals))
        before, self.in_jax = self.in_jax, True
        found = self.inline(closed, operands, out, line)
        self.in_jax = before
        return found

    def full(self, x: Operand, shape: tuple[int, ...], out: list[Equation], line: Line | None) -> Operand:
        """An array whose elements are all `x`, or that itself where a scalar is wanted."""
        if not shape:
            return x
        wide = self.fresh(shape, x.dtype)
        out.append(
            Equation("broadcast_in_dim", (x,), (wide,), (("broadcast_dimensions", ()), ("shape", shape)), (), line)
        )
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
                v = dataclasses.replace(v, permutation=tuple(v.permutation[p] for p in t.permutation))
            elif kind == "BitcastTransform" and v.space.kind == "tmem":
                v = seen_as(v, dtype_name(t.dtype), line)
            elif isinstance(t, PeerTransform):
                v = self.of_peer(v, t, line)
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
            in_gmem = v.space.kind == "gmem" and position not in gone
            # A tile of which that is traced may stick out: TMA clips it.  A number must lie inside (newer JAX says so by itself).
            clipped = in_gmem and not isinstance(index.start, (int, np.integer))
            if start.static and (start.const < 0 or (last >= size and not clipped) or (clipped and start.const > size)):
                more = "; indices do not count from the end" if start.const < 0 else ""
                if in_gmem and not more:
                    more = f". {STATIC_START}"
                raise OutOfBounds(
                    f"index {dims[position]} of dimension {position} is outside {v.ref} (extent {size}){more}", line
                )
        kept = [p for p in v.kept if p not in gone]
        order = sorted(kept)
        return dataclasses.replace(v, dims=tuple(dims), permutation=tuple(order.index(p) for p in kept))

    def of_peer(self, v: View, t: PeerTransform, line: Line | None) -> View:
        if v.peer:
            raise UnsupportedCall(f"cluster_ref of {v}, which is a peer's already: name all axes in one call", line)
        return dataclasses.replace(v, peer=tuple((n, self.affine(i, line)) for n, i in zip(t.axes, t.ids, strict=True)))

    def affine(self, x: Any, line: Line | None) -> Affine:
        if isinstance(x, (int, np.integer)):
            return Affine(int(x))
        operand = self.read(x) if not isinstance(x, np.ndarray) else literal(x, x.dtype)
        assert not isinstance(operand, View)
        if operand.dtype == "bool" or operand.dtype in FLOATS:
            raise UnsupportedCall(f"{operand} as an index: an index is a whole number", line)
        if isinstance(operand, Literal):
            return Affine(int(operand.value))
        if operand.shape:
            raise UnsupportedCall("an array as an index: use a loop over rows, or one index per copy", line)
        return self.sum_of(operand)


def _accuracy(x: Any) -> Any:
    """The parameter of exp, log and the like as plain data: 'highest', (atol, rtol, ulps), or None."""
    if x is None or x is jax.lax.AccuracyMode.DEFAULT:
        return None
    if x is jax.lax.AccuracyMode.HIGHEST:
        return HIGHEST
    return float(x.atol), float(x.rtol), int(x.ulps)


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
