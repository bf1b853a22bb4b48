"""vmap of a `pallas_call`: the grid grows by an axis in front.

Of every operand with a batch dimension the index map gets the batch's number there, and the block one element that the kernel
does not see.  Of a call on values and tangents whose tangents alone have a batch, the values are computed without one.  Three
ways around it: nothing batched (nothing to do), one element (squeeze, call, expand), and grid bounds or
prefetch operands that differ between the elements (index maps cannot tell whose they read): a loop over calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import batching

from .blocks import symbolic
from .irregular import results
from .mapping import BlockMapping, dynamic
from .specs import Blocked, squeezed

if TYPE_CHECKING:
    from .call import Call


def register(pallas_call_p: Any) -> None:
    """Give the primitive these rules."""

    def batch(args: Sequence[Any], dims: Sequence[int | None], *, call: Call) -> tuple[list[Any], list[int | None]]:
        primal = call.primal
        values = (
            0 if primal is None else len(call.mapping.prefetch) + call.mapping.num_dynamic + len(primal.mapping.inputs)
        )
        if primal is None or any(d is not None for d in dims[:values]):
            return whole(args, dims, call=call)
        # Only tangents have the batch, as in jax.jacfwd, which needs results without it.
        results = pallas_call_p.bind(*args[:values], call=primal)
        found, placed = whole(args, dims, call=call)
        return [*results, *found[len(results) :]], [*[None] * len(results), *placed[len(results) :]]

    def whole(args: Sequence[Any], dims: Sequence[int | None], *, call: Call) -> tuple[list[Any], list[int | None]]:
        m = call.mapping
        outs = len(m.outputs)
        if all(d is None for d in dims):
            return pallas_call_p.bind(*args, call=call), [None] * outs
        (size,) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
        if size == 0:  # nothing runs, and nothing can be sliced
            return [jnp.empty((0, *a.shape), a.dtype) for a in call.out_avals], [0] * outs
        if size == 1:
            args = [x if d is None else jnp.squeeze(x, d) for x, d in zip(args, dims, strict=True)]
            return [jnp.expand_dims(x, 0) for x in pallas_call_p.bind(*args, call=call)], [0] * outs
        scalars = m.num_dynamic + len(m.prefetch)
        if any(d is not None for d in dims[:scalars]):
            return _loop(pallas_call_p, args, dims, size, call), [0] * outs
        args, dims = list(args), list(dims)
        for i, _ in call.aliases:  # the output has the batch in front, and so must its buffer
            k = m.num_dynamic + i
            if i < len(m.prefetch):
                return _loop(pallas_call_p, args, dims, size, call), [0] * outs
            d = dims[k]
            args[k] = jnp.broadcast_to(args[k], (size, *args[k].shape)) if d is None else jnp.moveaxis(args[k], d, 0)
            dims[k] = 0
        if symbolic((size,)):  # the new axis of the grid is as long as an operand says
            args = [jnp.asarray(size, jnp.int32), *args]
        return pallas_call_p.bind(*args, call=grown(call, size, tuple(dims[scalars:]))), [0] * outs

    batching.primitive_batchers[pallas_call_p] = batch


@functools.lru_cache(maxsize=256)
def grown(call: Call, size: int, dims: tuple[int | None, ...]) -> Call:
    """The call over a batch of `size`.  dims: of each input, where its batch dimension is."""
    m = call.mapping
    rank = len(m.grid)
    blocks = tuple(_grown(b, d, size, rank) for b, d in zip(m.blocks, (*dims, *[0] * m.num_outputs), strict=True))
    front = dynamic if symbolic((size,)) else size
    mapping = dataclasses.replace(m, grid=(front, *m.grid), vmapped=(0, *(i + 1 for i in m.vmapped)), blocks=blocks)
    cost = call.cost
    if cost is not None:  # of so many calls; how many a symbol stands for nobody knows
        cost = None if front is dynamic else type(cost)(*(size * n for n in dataclasses.astuple(cost)))
    primal = call.primal and grown(call.primal, size, dims[: len(call.primal.mapping.inputs)])
    return call.with_(mapping=mapping, cost=cost, primal=primal)


def _grown(b: BlockMapping, dim: int | None, size: int, rank: int) -> BlockMapping:
    closed = b.index
    types = [v.aval for v in closed.jaxpr.invars]

    own = b.dims or tuple(Blocked(n) for n in b.shape)

    def index(batch: Any, *rest: Any) -> list[Any]:
        found = list(jex.jaxpr_as_fun(closed)(*rest))
        if dim is not None:
            found.insert(results(own[:dim]), batch)
        return found

    new = jax.make_jaxpr(index)(jax.ShapeDtypeStruct((), jnp.int32), *types)
    if dim is None:
        return dataclasses.replace(b, index=new)
    return dataclasses.replace(
        b,
        shape=(*b.shape[:dim], size, *b.shape[dim:]),
        dims=(*own[:dim], squeezed, *own[dim:]),
        index=new,
    )


def _loop(pallas_call_p: Any, args: Sequence[Any], dims: Sequence[int | None], size: int, call: Call) -> list[Any]:
    """One call after the other."""
    outs = [jnp.empty((size, *a.shape), a.dtype) for a in call.out_avals]

    def one(i: Any, outs: list[Any]) -> list[Any]:
        own = [
            x if d is None else jax.lax.dynamic_index_in_dim(x, i, d, keepdims=False)
            for x, d in zip(args, dims, strict=True)
        ]
        results = pallas_call_p.bind(*own, call=call)
        return [jax.lax.dynamic_update_index_in_dim(o, r, i, 0) for o, r in zip(outs, results, strict=True)]

    return jax.lax.fori_loop(0, size, one, outs)  # type: ignore[no-any-return]
