"""Primitives without a rule of their own, written with others: a function of `jax.numpy` in the place of each.

To add one: a function (params, line) -> function of arrays here, and its name in COMPOSED.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import Line, UnsupportedCall, UnsupportedPrimitive
from ..ops.ways_out import way_out
from ..program import Equation
from . import special

if TYPE_CHECKING:
    from .trace import Tracer

Function = Callable[..., Any]
MOST_STEPS = 64  # operations that one window may become


def composed(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    """The equations of what stands for one of JAX's primitives."""
    f = COMPOSED[e.primitive.name](e.params, line)
    tr.bind(e.outvars, tr.inlined(lambda *x: jax.tree.leaves(f(*x)), [tr.read(v) for v in e.invars], out, line))


def applied(params: dict[str, Any]) -> Function:
    """`x.at[i].apply(f)`, a scatter of a function: of an element that is named n times, f n times."""
    f = _elementwise(params["update_jaxpr"], params["update_consts"])
    options = {k: params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}

    def call(x: Any, indices: Any, updates: Any) -> Any:
        ones = jnp.ones(updates.shape, jnp.int32)
        counts = lax.scatter_add(jnp.zeros(x.shape, jnp.int32), indices, ones, params["dimension_numbers"], **options)
        if params["unique_indices"] or math.prod(indices.shape[:-1]) == 1:
            return jnp.where(counts > 0, f(x, x), x)
        return lax.fori_loop(0, jnp.max(counts), lambda i, y: jnp.where(counts > i, f(y, y), y), x)

    return call


def _elementwise(jaxpr: Any, consts: Sequence[Any]) -> Function:
    """A jaxpr of scalars as a function of arrays, all of one shape."""
    closed = jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, list(consts))
    f = jex.jaxpr_as_fun(closed)

    def call(*arrays: Any) -> Any:
        g = f
        for _ in range(arrays[0].ndim):
            g = jax.vmap(g)
        results = g(*arrays)
        return results[0] if len(results) == 1 else results

    return call


# ---- reductions by any function, and over windows -------------------------------------------------------------------------
def _reduce(p: dict[str, Any], line: Line | None) -> Function:
    """By halves, along one axis after the other; JAX says that the function is associative."""
    combine = _elementwise(p["jaxpr"], p.get("consts", ()))

    def call(*operands: Any) -> Any:
        n = len(operands) // 2
        arrays, starts = list(operands[:n]), operands[n:]
        if any(arrays[0].shape[d] == 0 for d in p["dimensions"]):
            shape = [k for d, k in enumerate(arrays[0].shape) if d not in p["dimensions"]]
            return [jnp.broadcast_to(s, shape) for s in starts]
        for d in sorted(p["dimensions"], reverse=True):
            while arrays[0].shape[d] > 1:
                size = arrays[0].shape[d]
                low, high = ([lax.slice_in_dim(x, a, a + size // 2, axis=d) for x in arrays] for a in (0, size // 2))
                found = combine(*low, *high)
                halves = list(found) if n > 1 else [found]
                if size % 2:
                    rest = [lax.slice_in_dim(x, size - 1, size, axis=d) for x in arrays]
                    halves = [lax.concatenate([a, b], d) for a, b in zip(halves, rest, strict=True)]
                arrays = halves
            arrays = [lax.squeeze(x, (d,)) for x in arrays]
        return combine(*(jnp.broadcast_to(s, arrays[0].shape) for s in starts), *arrays)

    return call


def _window(combine: Function, identity: Callable[[Any], Any]) -> Callable[[dict[str, Any], Line | None], Function]:
    def of(p: dict[str, Any], line: Line | None) -> Function:
        windows = _windows(p, line)
        return lambda x: windows(x, jnp.asarray(identity(x.dtype), x.dtype), combine)

    return of


def _window_of_any(p: dict[str, Any], line: Line | None) -> Function:
    """The same where JAX did not see which function it is, or where it starts."""
    windows = _windows(p, line)
    (one, *more), names = p["jaxpr"].eqns, {"add": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
    known = None if more or len(one.invars) != 2 else names.get(one.primitive.name)
    combine = known or _elementwise(p["jaxpr"], p.get("consts", ()))

    def call(*operands: Any) -> Any:
        if len(operands) != 2:
            raise UnsupportedCall("reduce_window of several arrays: of each by itself", line)
        x, start = operands
        found = windows(x, start, combine)
        return combine(jnp.broadcast_to(start, found.shape), found)

    return call


def _windows(p: dict[str, Any], line: Line | None) -> Callable[[Any, Any, Function], Any]:
    """Along one axis after the other: what lies at each place of the window, shifted, combined; padded with `start`."""
    if max(p["window_dimensions"], default=1) > MOST_STEPS:
        raise UnsupportedCall(
            f"reduce_window with a window of {tuple(p['window_dimensions'])}: at most {MOST_STEPS} elements along an axis, as "
            "each is an operation of its own; sums over long windows are differences of jnp.cumsum",
            line,
        )

    def call(x: Any, start: Any, combine: Function) -> Any:
        wide = combine is jnp.add and x.dtype in (jnp.float16, jnp.bfloat16)
        y = x.astype(jnp.float32) if wide else x
        for d in range(x.ndim):
            n, step, apart = (p[k][d] for k in ("window_dimensions", "window_strides", "window_dilation"))
            low, high = p["padding"][d]
            widths = [(low, high, p["base_dilation"][d] - 1) if k == d else (0, 0, 0) for k in range(x.ndim)]
            y = lax.pad(y, start.astype(y.dtype), widths)
            count = (y.shape[d] - (n - 1) * apart - 1) // step + 1
            ends = [(i * apart, i * apart + (count - 1) * step + 1) for i in range(n)]
            y = functools.reduce(combine, (lax.slice_in_dim(y, a, b, step, axis=d) for a, b in ends))
        return y.astype(x.dtype)

    return call


def _least(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return False
    return np.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else -np.inf


def _most(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return True
    return np.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else np.inf


# ---- convolutions -------------------------------------------------------------------------------------------------------------
def _convolution(p: dict[str, Any], line: Line | None) -> Function:
    """The sum over the places of the window of a product of channels each."""
    lhs_spec, rhs_spec, out_spec = (tuple(s) for s in p["dimension_numbers"])
    groups = p["feature_group_count"]
    if p["batch_group_count"] != 1:
        raise UnsupportedCall(
            "conv_general_dilated(batch_group_count=...), the gradient of a grouped convolution: convolve each group by itself",
            line,
        )

    def call(x: Any, w: Any) -> Any:
        result = jnp.result_type(p["preferred_element_type"] or x.dtype)
        # Narrow floats are added up in float32; integers in the type that was asked for, which sums of x's own may not fit.
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        wide = jnp.float32 if narrow else result if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype
        x, w = lax.transpose(x, lhs_spec), lax.transpose(w, rhs_spec)  # batch, features, space; features out, in, space
        window = w.shape[2:]
        if math.prod(window) > MOST_STEPS:
            raise UnsupportedCall(
                f"conv_general_dilated with a window of {window}: at most {MOST_STEPS} places, as each is a product of its own; "
                "convolve outside of the kernel, or multiply by a matrix of windows",
                line,
            )
        space = [(*pads, d - 1) for pads, d in zip(p["padding"], p["lhs_dilation"], strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *space])
        apart, step = p["rhs_dilation"], p["window_strides"]
        counts = [(n - (k - 1) * a - 1) // s + 1 for n, k, a, s in zip(x.shape[2:], window, apart, step, strict=True)]
        total = None
        for place in itertools.product(*map(range, window)):
            starts = [i * a for i, a in zip(place, apart, strict=True)]
            ends = [i + (n - 1) * s + 1 for i, n, s in zip(starts, counts, step, strict=True)]
            part = lax.slice(x, [0, 0, *starts], [*x.shape[:2], *ends], [1, 1, *step])
            term = _channels(part, w[(slice(None), slice(None), *place)], groups, p["precision"], wide)
            total = term if total is None else total + term
        assert total is not None
        return lax.transpose(total.astype(result), [out_spec.index(d) for d in range(len(out_spec))])

    return call


def _channels(x: Any, w: Any, groups: int, precision: Any, wide: Any) -> Any:
    """(batch, features, *space) by (features out, features in of a group) -> (batch, features out, *space); sums in `wide`."""
    batch, features, *space = x.shape
    out, each = w.shape
    if each == 1:  # one product an element
        x = x.reshape(batch, groups, 1, *space).astype(wide)
        return (x * w.reshape(1, groups, out // groups, *[1] * len(space)).astype(wide)).reshape(batch, out, *space)
    x, w = x.reshape(batch, groups, each, math.prod(space)), w.reshape(groups, out // groups, each)
    found = [lax.dot_general(w[g], x[:, g], (((1,), (1,)), ((), ())), precision, wide) for g in range(groups)]
    return jnp.concatenate([jnp.moveaxis(y, 1, 0) for y in found], 1).reshape(batch, out, *space)


# ---- the k nearly largest, which here are the k largest -----------------------------------------------------------------------
def _approx_top_k(p: dict[str, Any], line: Line | None) -> Function:
    if not p["aggregate_to_topk"]:
        raise UnsupportedCall(
            "approx_max_k(aggregate_to_topk=False): here the k largest are found exactly: leave it out", line
        )

    def call(x: Any) -> Any:
        x = jnp.moveaxis(x, p["reduction_dimension"], -1)
        values, places = lax.top_k(x if p["is_max_k"] else -x, p["k"])
        values = values if p["is_max_k"] else -values
        return [jnp.moveaxis(y, -1, p["reduction_dimension"]) for y in (values, places)]

    return call


# ---- collectives over an axis of jax.vmap, which by then is an axis of the array ----------------------------------------------
def _along(reduce: Callable[..., Any], name: str) -> Callable[[dict[str, Any], Line | None], Function]:
    def rule(p: dict[str, Any], line: Line | None) -> Function:
        if not all(isinstance(axis, int) for axis in p["axes"]) or p.get("axis_index_groups"):
            raise UnsupportedPrimitive(f"{name!r} over {p['axes']}: {way_out(name)}", line)
        return lambda *arrays: [reduce(x, axis=tuple(p["axes"])).astype(x.dtype) for x in arrays]

    return rule


COMPOSED: dict[str, Callable[[dict[str, Any], Line | None], Function]] = {
    "reduce": _reduce,
    "reduce_window": _window_of_any,
    "reduce_window_max": _window(jnp.maximum, _least),
    "reduce_window_min": _window(jnp.minimum, _most),
    "reduce_window_sum": _window(jnp.add, lambda dtype: 0),
    "conv_general_dilated": _convolution,
    "approx_top_k": _approx_top_k,
    "psum": _along(jnp.sum, "psum"),
    "psum_invariant": _along(jnp.sum, "psum"),
    "pmax": _along(jnp.max, "pmax"),
    "pmin": _along(jnp.min, "pmin"),
    **{name: (lambda p, line, f=f: f) for name, f in special.FUNCTIONS.items()},  # type: ignore[misc]
}
