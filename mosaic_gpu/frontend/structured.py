"""The primitives that carry a jaxpr or Refs (conditions, loops, scopes, reads and writes), each to equations of the program.

To add one: a function (tracer, equation, out, line) here, and its name in STRUCTURED.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex

from ..errors import Line, UnsupportedCall
from ..program import Equation, Literal, Operand, Region, Value, View
from . import shard_map
from .composed import COMPOSED, composed
from .gathers import GATHERS
from .indexed import add_indexed, get_indexed, has_index_array, put_indexed
from .primitives import TreeOf, literal
from .products import bit_dot, dot_general
from .random import RANDOM, refuse_keys

if TYPE_CHECKING:
    from .trace import Tracer


def _views(tr: Tracer, e: Any, skip: int, line: Line | None) -> View:
    transforms = jax.tree.unflatten(e.params["tree"], list(e.invars[skip:]))
    return tr.view(e.invars[0], transforms, line)


def _get(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    if has_index_array(e, 1):
        get_indexed(tr, e, out, line)
        return
    out.append(Equation("get", (_views(tr, e, 1, line),), tr.define(e.outvars), (), (), line))


def _swap(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    if has_index_array(e, 2):
        put_indexed(tr, e, out, line)
        return
    view, x = _views(tr, e, 2, line), tr.read(e.invars[1])
    out += tr.stored(view, Equation("swap", (view, x), tr.define(e.outvars), (), (), line))


def _addupdate(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    if has_index_array(e, 2):
        add_indexed(tr, e, out, line)
        return
    view, x = _views(tr, e, 2, line), tr.read(e.invars[1])
    old, new = tr.fresh(view.shape, view.dtype), tr.fresh(view.shape, view.dtype)
    out.append(Equation("get", (view,), (old,), (), (), line))
    out.append(Equation("add", (old, x), (new,), (), (), line))
    out += tr.stored(view, Equation("swap", (view, new), (), (), (), line))


def _cond(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    index, *operands = [tr.read(v) for v in e.invars]
    if isinstance(index, Literal):  # of lax.platform_dependent
        tr.bind(e.outvars, tr.inline(e.params["branches"][int(index.value)], operands, out, line))
        return
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
    refuse_keys("a loop's carry", init, line)
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
    refuse_keys("a loop's carry", [*init, *xs], line)
    ys = e.outvars[carry:]
    if not p["length"]:  # of ys there are no elements
        tr.bind(e.outvars, [*init, *(_zeros(tr, v.aval, out, line) for v in ys)])
        return
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
    starts = [_zeros(tr, v.aval, out, line) for v in ys]
    assert len(inner.outvars) == len(outputs)
    region = Region((i, *carried, *stacked), tuple(inside), tuple(outputs))
    bounds = (zero, Literal(p["length"], "int32"))
    loop = (("unroll", int(p["unroll"]) if not isinstance(p["unroll"], bool) else (0 if p["unroll"] else 1)),)
    out.append(Equation("for", (*bounds, *init, *starts), tr.define(e.outvars), loop, (region,), line))


def _zeros(tr: Tracer, aval: Any, out: list[Equation], line: Line | None) -> Operand:
    return tr.full(literal(0, aval.dtype), tuple(int(n) for n in aval.shape), out, line)


def _while(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    p = e.params
    cond, body = p["cond_jaxpr"], p["body_jaxpr"]
    ic, ib = getattr(cond, "jaxpr", cond), getattr(body, "jaxpr", body)
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    operands = [tr.read(v) for v in e.invars]
    c_outer, b_outer, init = operands[:nc], operands[nc : nc + nb], operands[nc + nb :]
    refuse_keys("a loop's carry", init, line)
    carry = ib.invars[nb:]
    batch = tuple(int(n) for n in ic.outvars[0].aval.shape)  # under vmap each element goes on for itself
    fori = (
        nc == 0
        and not batch
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
    values_b = tuple(tr.fresh(v.aval.shape, v.aval.dtype) for v in carry)
    if batch:
        c_region = _any_goes_on(tr, cond, [*c_outer, *values], values, batch, line)
        b_region = _those_that_go_on(tr, cond, c_outer, body, b_outer, values_b, batch, line)
    else:
        c_region = tr.region(cond, [*c_outer, *values], values, line)
        b_region = tr.region(body, [*b_outer, *values_b], values_b, line)
    out.append(Equation("while", tuple(init), tr.define(e.outvars), (), (c_region, b_region), line))


def _any_goes_on(
    tr: Tracer, cond: Any, inputs: list[Operand], values: tuple[Value, ...], batch: tuple[int, ...], line: Line | None
) -> Region:
    equations: list[Equation] = []
    (goes_on,) = tr.inline(cond, inputs, equations, line)
    some = tr.fresh((), "bool")
    axes = (("axes", tuple(range(len(batch)))),)
    equations.append(Equation("reduce_or", (goes_on,), (some,), axes, (), line))
    return Region(values, tuple(equations), (some,))


def _those_that_go_on(
    tr: Tracer,
    cond: Any,
    c_outer: list[Operand],
    body: Any,
    b_outer: list[Operand],
    values: tuple[Value, ...],
    batch: tuple[int, ...],
    line: Line | None,
) -> Region:
    """The body, of which only elements that go on take what it gives."""
    equations: list[Equation] = []
    (goes_on,) = tr.inline(cond, [*c_outer, *values], equations, line)
    outputs: list[Operand] = []
    for old, new in zip(values, tr.inline(body, [*b_outer, *values], equations, line), strict=True):
        where: Operand = goes_on
        if old.shape != batch:
            where = tr.fresh(old.shape, "bool")
            params = (("broadcast_dimensions", tuple(range(len(batch)))), ("shape", old.shape))
            equations.append(Equation("broadcast_in_dim", (goes_on,), (where,), params, (), line))
        kept = tr.fresh(old.shape, old.dtype)
        equations.append(Equation("select_n", (where, old, new), (kept,), (), (), line))
        outputs.append(kept)
    return Region(values, tuple(equations), tuple(outputs))


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
    if "names" not in e.params:
        raise UnsupportedCall(
            "run_scoped of jax.experimental.pallas allocates memory that is not ours; call mosaic_gpu.run_scoped, or allocate "
            "the buffers as scratch",
            line,
        )
    tr.bind(jaxpr.constvars, [tr.read(v) for v in e.invars])
    refs = tuple(tr.value_of_aval(v.aval, n) for v, n in zip(jaxpr.invars, e.params["names"], strict=True))
    region = tr.region(_without_consts(jaxpr), list(refs), refs, line)
    params = (("collective_axes", e.params["collective_axes"]),)
    out.append(Equation("run_scoped", (), tr.define(e.outvars), params, (region,), line))


def _get_global(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    (value,) = tr.define(e.outvars)
    tr.semaphores.append(dataclasses.replace(value, name=f"global{len(tr.semaphores)}"))
    tr.bind(e.outvars, tr.semaphores[-1:])


def _warp_map(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    jaxpr = e.params["jaxpr"]
    tr.bind(jaxpr.constvars, [tr.read(v) for v in e.invars])
    warp, name = tr.fresh((), "int32"), e.params["axis_name"]
    if name is not None:
        tr.warp_axes[name] = warp
    given = [] if name is not None else [warp]
    out.append(Equation("warp_map", (), (), (), (tr.region(_without_consts(jaxpr), given, (warp,), line),), line))
    tr.warp_axes.pop(name, None)


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
    if name in tr.warp_axes:
        tr.bind(e.outvars, [tr.warp_axes[name]])
        return
    out.append(Equation("axis_index", (), tr.define(e.outvars), (("axis_name", name),), (), line))


def _debug_print(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    """Ours, or `jax.debug.print`, whose fields may have names or numbers."""
    operands = e.params.get("operands")
    if isinstance(operands, TreeOf):
        values, fmt = tr.operands(operands, e.invars, line), e.params["fmt"]
    else:
        if e.params.get("static_args"):
            raise UnsupportedCall("debug.print of values that are no arrays: format them into the string", line)
        args, kwargs = jax.tree.unflatten(e.params["in_tree"], [tr.read(v) for v in e.invars])
        fmt, fields, unnamed = "", [], iter(args)
        for text, name, spec, conversion in string.Formatter().parse(
            e.params["fmt"]
        ):  # JAX has held it against the values
            fmt += text.replace("{", "{{").replace("}", "}}")
            if name is None:
                continue
            fields.append(kwargs[name] if name in kwargs else args[int(name)] if name else next(unnamed))
            fmt += "{" + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
        values = tuple(fields)
    out.append(Equation("debug_print", values, (), (("fmt", fmt),), (), line))


def _platform_index(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    """Which branch of `lax.platform_dependent` is for this GPU; in the simulator, too, as it runs what is compiled."""
    platforms = e.params["platforms"]
    mine = [i for i, names in enumerate(platforms) if names is None or {"cuda", "gpu"} & set(names)]
    if not mine:
        raise UnsupportedCall("platform_dependent: none of its functions is for cuda, and there is no default", line)
    tr.bind(e.outvars, [Literal(mine[0], "int32")])


def _expanded(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    """A primitive of `jax.experimental.hijax`, defined by a function of others: in JAX 0.12 `jnp.searchsorted` is one."""
    primitive = e.params["_prim"]

    def flat(*operands: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))

    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in e.invars]
    closed = shard_map.traced_outside(lambda: jax.make_jaxpr(flat)(*types))
    before, tr.in_jax = tr.in_jax, True
    tr.bind(e.outvars, tr.inline(closed, [tr.read(v) for v in e.invars], out, line))
    tr.in_jax = before


def _linear_solve(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    """Of `lax.custom_linear_solve`, as in jax.scipy.sparse.linalg: its function that solves."""
    lengths, operands = e.params["const_lengths"], [tr.read(v) for v in e.invars]
    first = lengths.matvec + lengths.vecmat
    consts, right = operands[first : first + lengths.solve], operands[sum(lengths) :]
    tr.bind(e.outvars, tr.inline(e.params["jaxprs"].solve, [*consts, *right], out, line))


def _broadcast_to(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    """Of the indices of a Ref: as jnp.broadcast_to, to their common shape."""
    x, shape = tr.read(e.invars[0]), tuple(int(n) for n in e.params["shape"])
    along = tuple(range(len(shape) - len(x.shape), len(shape)))
    params = (("broadcast_dimensions", along), ("shape", shape))
    out.append(Equation("broadcast_in_dim", (x,), tr.define(e.outvars), params, (), line))


def _bitcast(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    """Of another width, elements come apart along a further last dimension, or are put together along it."""
    x, (result,) = tr.read(e.invars[0]), tr.define(e.outvars)
    name = {0: "bitcast_convert_type", 1: "split_bits", -1: "join_bits"}[len(result.shape) - len(x.shape)]
    out.append(Equation(name, (x,), (result,), (("new_dtype", result.dtype),), (), line))


def _refused(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    tr.define(e.outvars)


STRUCTURED: dict[str, Callable[[Tracer, Any, list[Equation], Line | None], None]] = {
    "get": _get,
    "swap": _swap,
    "addupdate": _addupdate,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "run_scoped": _run_scoped,
    "get_global": _get_global,
    "warp_branch": _warp_branch,
    "warp_map": _warp_map,
    "axis_index": _axis_index,
    "bitcast_convert_type": _bitcast,
    "broadcast_to": _broadcast_to,
    "custom_linear_solve": _linear_solve,
    "debug_print": _debug_print,
    "platform_index": _platform_index,
    "call_hi_primitive": _expanded,
    "refused": _refused,
    "dot_general": dot_general,
    "bit_dot": bit_dot,
    **RANDOM,
    **GATHERS,
    **dict.fromkeys(COMPOSED, composed),
    "inlined": _inlined,
}
