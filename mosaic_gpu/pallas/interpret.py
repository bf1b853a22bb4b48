"""`interpret=True`: a call as XLA operations, a loop over the grid that slices blocks out and puts them back.

The body's jaxpr is evaluated with mutable arrays in place of its Refs.  What JAX has itself keeps its meaning; of our own
operations those that say what is computed are translated, those that say when (waits, fences) fall away.  Barriers, copies that
complete on one and tensor memory are the machine's: for them there is the simulator.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..errors import Line, UnsupportedPrimitive
from ..frontend import shard_map
from ..frontend.primitives import TreeOf, is_ref
from ..frontend.trace import CALLS, user_line
from ..program import CompilerParams
from . import lowering
from .blocks import count, symbolic, unravel
from .irregular import is_irregular, positions
from .mapping import BlockMapping
from .specs import BlockDim, Element, Squeezed

if TYPE_CHECKING:
    from .call import Call

NOTHING = {"wgmma_wait", "commit_smem", "set_max_registers", "wait_smem_to_gmem"}
NOTHING |= {"griddepcontrol_wait", "griddepcontrol_launch_dependents"}
ALLOCATED = ("smem", "acc")


def interpret(call: Call, *operands: Any) -> list[Any]:
    """The outputs of a call; to be used under a trace."""
    m = call.mapping
    sizes = m.sizes(operands[: m.num_dynamic])
    rest = operands[m.num_dynamic :]
    prefetch, inputs = list(rest[: len(m.prefetch)]), list(rest[len(m.prefetch) :])
    aliased = {o: i for i, o in call.aliases}
    first = [rest[aliased[k]] if k in aliased else _unwritten(b) for k, b in enumerate(m.outputs)]
    scratch, scratch_tree = jax.tree.flatten(call.scratch, is_leaf=lambda x: hasattr(x, "space"))
    for s in scratch:
        if s.space.kind not in ALLOCATED:
            raise _machine(f"scratch {s}", call.line)
    # Scratch is new where a CUDA block begins: at the first step of all sequential axes.
    ours = isinstance(call.params, CompilerParams)
    kinds = lowering.semantics(call) if ours else (lowering.PARALLEL,) * len(m.grid)
    # Warpgroups that run the body take turns; each has accumulators of its own.
    axis, several = next(iter(call.axis_env), ("", 1))
    copies = [several if s.space.kind == "acc" else 1 for s in scratch]
    starts = list(itertools.accumulate(copies, initial=0))
    new = [
        jnp.zeros(s.shape, s.dtype) if s.space.kind == "acc" else _empty(s.shape, s.dtype)
        for s, n in zip(scratch, copies, strict=True)
        for _ in range(n)
    ]
    everything = _alike([*prefetch, *inputs, *first, *new])
    prefetch, everything = everything[: len(prefetch)], everything[len(prefetch) :]
    inputs, everything = everything[: len(inputs)], everything[len(inputs) :]
    first, new = everything[: len(first)], everything[len(first) :]
    whole_inputs = [_padded(x, b) for x, b in zip(inputs, m.inputs, strict=True)]
    carry = (
        [_padded(x, b) for x, b in zip(first, m.outputs, strict=True)],
        new,
    )
    # An input that shares its buffer with an output is read from there.
    shared = {i - len(m.prefetch): o for i, o in call.aliases if i >= len(m.prefetch)}

    def one(step: Any, carry: Any) -> Any:
        step = jnp.asarray(step, jnp.int32)
        outs, own = carry
        ids = unravel(step, sizes)
        looped = [i for i, k in zip(ids, kinds, strict=True) if k == lowering.SEQUENTIAL]
        begins = functools.reduce(operator.and_, [i == 0 for i in looped], jnp.bool_(True))
        own = [jnp.where(begins, n, x) for n, x in zip(new, own, strict=True)]
        read = [jax.ref.new_ref(x) for x in prefetch]
        given = [outs[shared[i]] if i in shared else x for i, x in enumerate(whole_inputs)]
        at = [b.starts(ids, read) for b in m.blocks]
        refs = [jax.ref.new_ref(_cut(x, b, s)) for x, b, s in zip((*given, *outs), m.blocks, at, strict=True)]
        mine = [jax.ref.new_ref(x) for x in own]
        for wg in range(several):
            own = [mine[k + min(wg, n - 1)] for k, n in zip(starts, copies, strict=False)]
            place = Place(tuple(m.seen(ids)), tuple(m.seen(sizes)), call.line, {axis: wg})
            place.run(call.jaxpr, [*read, *refs, *own], call.line)
        written = refs[len(inputs) :]
        outs = [
            _put(x, b, s, jax.ref.freeze(r))
            for x, b, s, r in zip(outs, m.outputs, at[len(inputs) :], written, strict=True)
        ]
        return outs, [jax.ref.freeze(r) for r in mine]

    total = functools.reduce(lambda a, b: a * b, sizes, 1)
    outs, _ = jax.lax.fori_loop(count(0), count(total), one, carry)
    return [_unpadded(x, b) for x, b in zip(outs, m.outputs, strict=True)]


# ---- blocks ---------------------------------------------------------------------------------------------------------------
def _empty(shape: Sequence[int], dtype: Any) -> Any:
    """What has not been written: NaNs, or zeros where there are none."""
    bad = np.nan if jnp.issubdtype(dtype, jnp.inexact) else 0
    return jnp.full(tuple(shape), bad, dtype)


def _unwritten(b: BlockMapping) -> Any:
    return _empty(b.shape, b.dtype)


def _margin(d: BlockDim, extent: int) -> tuple[int, int]:
    """Elements before and behind an array along a dimension, so that every block that starts in it lies inside."""
    if isinstance(d, Squeezed):
        return 0, 0
    if isinstance(d, Element):
        return d.padding[0], max(d.padding[1], d.block_size)
    if symbolic((extent,)) or not extent:  # of a symbol JAX must see that it reaches far enough
        return 0, d.block_size
    return 0, (-extent) % d.block_size


def _irregular(b: BlockMapping) -> bool:
    return any(is_irregular(d) for d in b.dims)


def _padded(x: Any, b: BlockMapping) -> Any:
    """Zeros around an array, as TMA reads them."""
    if not b.dims or _irregular(b):
        return x
    return jnp.pad(x, [_margin(d, n) for d, n in zip(b.dims, b.shape, strict=True)])


def _unpadded(x: Any, b: BlockMapping) -> Any:
    if not b.dims or _irregular(b):
        return x
    starts = [_margin(d, n)[0] for d, n in zip(b.dims, b.shape, strict=True)]
    return jax.lax.slice(x, starts, [s + n for s, n in zip(starts, b.shape, strict=True)])


def _window(b: BlockMapping, index: Sequence[Any]) -> tuple[list[Any], list[int]]:
    starts, sizes = [], []
    for d, i in zip(b.dims, index, strict=True):
        starts.append(i if isinstance(d, (Squeezed, Element)) else i * d.block_size)
        sizes.append(1 if isinstance(d, Squeezed) else d.block_size)
    return [jnp.asarray(s, jnp.int32) for s in starts], sizes


def _places(b: BlockMapping, index: Sequence[Any]) -> tuple[Any, ...]:
    """Index arrays of a block with irregular dimensions, squeezed ones as dimensions of 1; NOWHERE comes after the end."""
    along = []
    for d, i, extent in zip(b.dims, index, b.shape, strict=True):
        if is_irregular(d):
            at = positions(d, i)
        elif isinstance(d, Squeezed):
            at = jnp.reshape(jnp.asarray(i, jnp.int32), (1,))
        else:
            start = i - d.padding[0] if isinstance(d, Element) else i * d.block_size
            at = jnp.arange(d.block_size, dtype=jnp.int32) + start
        along.append(jnp.where(at < 0, extent, at))
    return jnp.ix_(*along)


def _cut(x: Any, b: BlockMapping, index: Sequence[Any]) -> Any:
    if not b.dims:
        return x
    if _irregular(b):
        return x.at[_places(b, index)].get(mode="fill", fill_value=0).reshape(b.block_shape)
    starts, sizes = _window(b, index)
    block = jax.lax.cond(
        _inside(x, starts, sizes),
        lambda: jax.lax.dynamic_slice(x, starts, sizes),
        lambda: x.at[_around(x, starts, sizes)].get(mode="fill", fill_value=0),
    )
    return block.reshape(b.block_shape)


def _put(x: Any, b: BlockMapping, index: Sequence[Any], block: Any) -> Any:
    if not b.dims:
        return block
    if _irregular(b):
        places = _places(b, index)
        return x.at[places].set(block.reshape([p.size for p in places]), mode="drop")
    starts, sizes = _window(b, index)
    block = block.reshape(sizes)
    return jax.lax.cond(
        _inside(x, starts, sizes),
        lambda: jax.lax.dynamic_update_slice(x, block, starts),
        lambda: x.at[_around(x, starts, sizes)].set(block, mode="drop"),
    )


def _inside(x: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Whether a block lies in the array and its margins; `dynamic_slice` would move one that does not."""
    fits = [(s >= 0) & (s <= n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
    return functools.reduce(lambda a, b: a & b, fits)


def _around(x: Any, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[Any, ...]:
    """Index arrays of a block that may lie outside, where the index is past the end."""
    at = [s + jnp.arange(size, dtype=jnp.int32) for s, size in zip(starts, sizes, strict=True)]
    return jnp.ix_(*(jnp.where(a < 0, n, a) for a, n in zip(at, x.shape, strict=True)))


# ---- the body -------------------------------------------------------------------------------------------------------------
def _machine(what: str, line: Line | None) -> UnsupportedPrimitive:
    return UnsupportedPrimitive(
        f"interpret=True runs on XLA, which has no {what}; run it in the simulator: interpret=plgpu.SimulatorParams()",
        line,
    )


class Place:
    """Evaluates jaxprs at one point of the grid."""

    def __init__(
        self, ids: tuple[Any, ...], sizes: tuple[Any, ...], line: Line | None, warpgroup: dict[str, int]
    ) -> None:
        self.ids, self.sizes, self.line, self.warpgroup = ids, sizes, line, warpgroup

    def run(
        self, closed: Any, operands: Sequence[Any], line: Line | None, consts: Sequence[Any] | None = None
    ) -> list[Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        env: dict[Any, Any] = {}
        env.update(zip(jaxpr.constvars, getattr(closed, "consts", ()) if consts is None else consts, strict=True))
        env.update(zip(jaxpr.invars, operands, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, jex.Literal) else env[v]

        for e in jaxpr.eqns:
            found = self.equation(e, [read(v) for v in e.invars], user_line(e, line))
            env.update(zip(e.outvars, found, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, e: Any, values: list[Any], line: Line | None) -> Sequence[Any]:
        name, p = e.primitive.name, e.params
        values = _alike(values)
        if name in ("program_id", "num_programs"):
            if p["axis"] >= len(self.ids):
                raise _machine(f"axis {p['axis']} of this grid", line)
            here = (self.ids if name == "program_id" else self.sizes)[p["axis"]]
            return [jnp.asarray(here, jnp.int32)]
        if name == "axis_index" and p.get("axis_name") in self.warpgroup:
            return [jnp.int32(self.warpgroup[p["axis_name"]])]
        if name in NOTHING:
            return []
        if isinstance(p.get("operands"), TreeOf):
            rule = OURS.get(name)
            if rule is None:
                raise _machine(name, line)
            return rule(e, jax.tree.unflatten(p["operands"].tree, values))
        if name in CALLS:
            inner = p.get(CALLS[name]) or p.get("jaxpr") or p.get("fun_jaxpr")
            return self.run(inner, values, line)
        if name == "cond":
            index, *given = values
            branches = [lambda b=b: self.run(b, given, line) for b in p["branches"]]
            return _listed(jax.lax.switch(jnp.asarray(index, jnp.int32), branches))
        if name == "scan":
            return self._scan(e, values, line)
        if name == "while":
            return self._while(p, values, line)
        if name == "run_scoped":
            return self._run_scoped(p["jaxpr"], values, line)
        if name in ("warp_map", "warp_branch", "inlined"):
            raise _machine(name, line)
        out = e.primitive.bind(*values, **p)
        return _listed(out) if e.primitive.multiple_results else [out]

    def _scan(self, e: Any, values: list[Any], line: Line | None) -> Sequence[Any]:
        p = e.params
        if "ft_in" in p:
            consts, carry, _ = (len(part) for part in p["ft_in"].elts)
        else:
            consts, carry = p["num_consts"], p["num_carry"]
        outer, init, xs = values[:consts], values[consts : consts + carry], values[consts + carry :]

        def body(c: Any, x: Any) -> tuple[Any, Any]:
            out = self.run(p["jaxpr"], [*outer, *c, *x], line)
            return out[:carry], out[carry:]

        last, ys = jax.lax.scan(body, list(init), list(xs), p["length"], p["reverse"])
        return [*last, *ys]

    def _while(self, p: Any, values: list[Any], line: Line | None) -> Sequence[Any]:
        nc, nb = p["cond_nconsts"], p["body_nconsts"]
        c, b, init = values[:nc], values[nc : nc + nb], values[nc + nb :]
        return _listed(
            jax.lax.while_loop(
                lambda s: self.run(p["cond_jaxpr"], [*c, *s], line)[0],
                lambda s: self.run(p["body_jaxpr"], [*b, *s], line),
                list(init),
            )
        )

    def _run_scoped(self, jaxpr: Any, consts: list[Any], line: Line | None) -> Sequence[Any]:
        refs = []
        for v in jaxpr.invars:
            kind = v.aval.memory_space.kind
            if kind not in ALLOCATED:
                raise _machine(f"{kind} buffers", line)
            zero = kind == "acc"  # accumulators start as zeros
            new = jnp.zeros(v.aval.shape, v.aval.dtype) if zero else _empty(v.aval.shape, v.aval.dtype)
            refs.append(jax.ref.new_ref(new))
        return self.run(jaxpr, refs, line, consts)


def _alike(values: list[Any]) -> list[Any]:
    """Under shard_map, arrays that vary along the same axes of the mesh: the body was traced outside and knows of none."""
    if not shard_map.inside_shard_map():
        return values
    arrays = {i: x for i, x in enumerate(values) if not is_ref(x) and not isinstance(x, tuple)}
    found = dict(zip(arrays, shard_map.alike(list(arrays.values())), strict=True))
    return [found.get(i, x) for i, x in enumerate(values)]


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def _value(operand: Any) -> Any:
    """An array, or what a (Ref, transforms) pair holds."""
    return _view(operand)[...] if isinstance(operand, tuple) else operand


def _view(operand: tuple[Any, Any]) -> Any:
    """The view that (ref, transforms) stands for, made anew on the Ref that is there now."""
    view, transforms = operand
    for t in transforms:
        kind = type(t).__name__
        if kind == "NDIndexer":
            view = view.at[tuple(t.indices)]
        elif kind == "TransposeTransform":
            view = view.transpose(tuple(t.permutation))
        else:
            raise _machine(kind, None)
    return view


def _load(e: Any, operands: Any) -> list[Any]:
    return [_value(operands[0])]


def _wgmma(e: Any, operands: Any) -> list[Any]:
    acc, a, b = operands
    ref = _view(acc)
    exact = jnp.issubdtype(ref.dtype, jnp.integer)
    product = jnp.dot(_value(a), _value(b), preferred_element_type=ref.dtype)
    ref[...] = ref[...] + (product if exact else product.astype(ref.dtype))
    return []


def _copy_out(e: Any, operands: Any) -> list[Any]:
    """A copy to global memory: here it has ended before the next operation begins."""
    source, target = _value(operands[0]), _view(operands[1])
    target[...] = target[...] + source if e.params["reduction_op"] else source
    return []


def _iota(e: Any, operands: Any) -> list[Any]:
    p = e.params
    return [jax.lax.broadcasted_iota(jnp.dtype(p["dtype"]), p["shape"], p["dimension"])]


OURS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "load": _load,
    "wgmma": _wgmma,
    "copy_smem_to_gmem": _copy_out,
    "broadcasted_iota": _iota,
    "layout_cast": _load,
    "dim_size": lambda e, operands: [jnp.int32(_view(operands[0]).shape[e.params["axis"]])],
}
__all__ = ["interpret"]
