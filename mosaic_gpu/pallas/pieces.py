"""Bodies on arrays that no warpgroup can hold, computed tile by tile.

`z[...] = f(x[...] @ y[...])` on blocks of 512 x 1024 floats means what it means on small ones; only nobody has the registers.
Where every array of a body is loaded, computed element by element, repeated or transposed, or a product, any tile of what is
stored can be computed by itself: arrays become functions from a tile's place to the tile, each store a loop over tiles.  A
product's tile is a loop over pieces of K.

Only bodies that could not run otherwise are rewritten, and only where all of a body is of this kind.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..frontend import shard_map
from ..frontend.loops import ds
from ..frontend.primitives import is_ref, space_of
from ..frontend.trace import CALLS
from ..memory import GMEM_SPACE
from ..ops.elementwise import ELEMENTWISE, WITH_PARAMETERS
from ..plan.registers import MOST_REGISTERS
from ..plan.resources import SHARED_LIMIT
from .blocks import count, symbolic, unravel
from .mapping import BlockMapping

SIDE = 64  # of a tile, and of a piece of K, at most
REGISTER_BYTES = (MOST_REGISTERS - 1) * 4 * 128  # that a warpgroup can hold
Starts = tuple[Any, ...]
Sizes = tuple[int, ...]


class _NotInPieces(Exception):
    """The body has something of which a tile cannot be computed by itself."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tiled:
    """An array of which any tile can be computed.

    reads: buffers, each with the number of stores to it before the read; elsewhere: those of which a tile needs more than that
    tile; loaded: it is what this Ref holds, perhaps transposed; product: it is one, or made from one.
    """

    shape: tuple[int, ...]
    dtype: Any
    piece: Callable[[Tiles, Starts, Sizes], Any]
    reads: frozenset[tuple[int, int]] = frozenset()
    elsewhere: frozenset[int] = frozenset()
    loaded: Any = None
    product: bool = False

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.shape) * np.dtype(self.dtype).itemsize)


class Tiles:
    """Tiles that have been computed at one place of the program, so that what is used twice is computed once."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], tuple[Starts, Any]] = {}

    def of(self, x: Any, starts: Starts, sizes: Sizes) -> Any:
        """A tile of a Tiled; scalars are what they are."""
        if not isinstance(x, Tiled):
            return x
        key = id(x), tuple(map(id, starts)), sizes
        if key not in self.known:
            self.known[key] = starts, x.piece(self, starts, sizes)  # starts: so that their ids stay theirs
        return self.known[key][1]


WHY = f"the body is computed tile by tile, and a warpgroup cannot hold the block, which has more than {REGISTER_BYTES} bytes"


def in_place(blocks: Sequence[BlockMapping]) -> tuple[BlockMapping, ...]:
    """The blocks of a body that is taken apart: large ones stay in global memory, unless their spec says where they lie."""
    return tuple(
        dataclasses.replace(b, in_place=WHY) if b.free and b.staged and b.nbytes > REGISTER_BYTES else b for b in blocks
    )


def in_pieces(closed: Any, refs: Sequence[Any], same: Mapping[int, int]) -> Any:
    """A body's closed jaxpr with its arrays taken apart; None where all of them fit, or one cannot be taken apart.

    refs: types of its inputs; same: inputs (outputs of the call) that are the buffer of another one.
    """
    body = _Body()

    def run(*refs: Any) -> tuple[()]:
        body.buffers = {id(r): same.get(i, i) for i, r in enumerate(refs)}
        body.run(closed.jaxpr, refs, closed.consts)
        return ()

    try:
        if not any(_bytes(v) > REGISTER_BYTES for v in _made(closed.jaxpr)):
            return None
        found = shard_map.traced_outside(lambda: jax.make_jaxpr(run)(*refs))
    except _NotInPieces:
        return None
    return found if body.needed else None


def _made(jaxpr: Any) -> Iterator[Any]:
    for e in jaxpr.eqns:
        yield from (v.aval for v in e.outvars)
        if e.primitive.name in CALLS:
            yield from _made(_inner(e))


def _bytes(aval: Any) -> int:
    if not isinstance(getattr(aval, "dtype", None), np.dtype) or symbolic(
        aval.shape
    ):  # random keys have a type of JAX's
        return 0
    return int(math.prod(aval.shape) * aval.dtype.itemsize)


def _inner(e: Any) -> Any:
    """The jaxpr that a call runs."""
    inner = e.params.get(CALLS[e.primitive.name]) or e.params.get("jaxpr") or e.params.get("fun_jaxpr")
    if getattr(inner, "consts", ()):
        raise _NotInPieces
    return getattr(inner, "jaxpr", inner)


class _Body:
    """Evaluates a body.

    needed: whether an array did not fit; buffers: the number of each Ref's, by id; stores: how many each has had so far.
    """

    def __init__(self) -> None:
        self.needed = False
        self.buffers: dict[int, int] = {}
        self.stores: collections.Counter[int] = collections.Counter()

    def run(self, jaxpr: Any, operands: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        env.update(zip(jaxpr.constvars, consts, strict=True))

        def value(v: Any) -> Any:
            return v.val if isinstance(v, jex.Literal) else env[v]

        for e in jaxpr.eqns:
            found = self.equation(e, [value(v) for v in e.invars])
            env.update(zip(e.outvars, found, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def equation(self, e: Any, values: list[Any]) -> Sequence[Any]:
        name = e.primitive.name
        if name in CALLS:
            return self.run(_inner(e), values)
        if name == "get":
            return [self.load(values[0], jax.tree.unflatten(e.params["tree"], values[1:]), e.outvars[0].aval)]
        if name == "swap":
            self.store(values[0], jax.tree.unflatten(e.params["tree"], values[2:]), values[1])
            return [None]  # what was there before: refused where it is read
        if not any(isinstance(x, Tiled) or is_ref(x) or x is None for x in values) and not any(
            v.aval.shape for v in e.outvars
        ):
            out = e.primitive.bind(*values, **e.params)
            return out if e.primitive.multiple_results else [out]
        if len(e.outvars) != 1 or any(is_ref(x) or x is None for x in values):
            raise _NotInPieces
        made = RULES.get(name, _elementwise if name in ELEMENTWISE or name in WITH_PARAMETERS else None)
        if made is None:
            raise _NotInPieces
        return [made(self, e, values)]

    def holds(self, x: Any) -> None:
        """An array that would have to be in registers as a whole."""
        self.needed |= isinstance(x, Tiled) and x.nbytes > REGISTER_BYTES

    def load(self, ref: Any, transforms: Any, aval: Any) -> Any:
        view = _view(ref, transforms)
        if not aval.shape:
            return view[...]
        buffer = self.buffers[id(ref)]
        return Tiled(
            aval.shape,
            aval.dtype,
            lambda tiles, starts, sizes: _part(view, starts, sizes)[...],
            frozenset({(buffer, self.stores[buffer])}),
            frozenset() if view.shape == ref.shape else frozenset({buffer}),
            ref,
        )

    def store(self, ref: Any, transforms: Any, x: Any) -> None:
        view, buffer = _view(ref, transforms), self.buffers[id(ref)]
        if not isinstance(x, Tiled):
            view[...] = x
            self.stores[buffer] += 1
            return
        self.holds(x)
        # Tiles are read when they are stored: what was stored since the load would be read, or what another tile has stored.
        if any(self.stores[b] != n for b, n in x.reads):
            raise _NotInPieces
        if buffer in {b for b, _ in x.reads} and (buffer in x.elsewhere or view.shape != ref.shape):
            raise _NotInPieces
        self.stores[buffer] += 1
        sides = _sides(x.shape)
        counts = [n // s for n, s in zip(x.shape, sides, strict=True)]

        def one(step: Any, _: None) -> None:
            starts = tuple(i * s for i, s in zip(unravel(step, counts), sides, strict=True))
            _part(view, starts, sides)[...] = Tiles().of(x, starts, sides)

        jax.lax.fori_loop(count(0), count(math.prod(counts)), one, None)


def _view(ref: Any, transforms: Any) -> Any:
    space = space_of(ref)
    if space is None or space.kind not in ("smem", "gmem"):
        raise _NotInPieces
    for t in transforms:
        if type(t).__name__ != "NDIndexer" or any(hasattr(i, "shape") and i.shape for i in t.indices):
            raise _NotInPieces
        ref = ref.at[tuple(t.indices)]
    return ref


def _part(view: Any, starts: Starts, sizes: Sizes) -> Any:
    return view.at[tuple(ds(i, n) for i, n in zip(starts, sizes, strict=True))]


def _side(n: int) -> int:
    """The largest power of two that divides an extent, up to SIDE: tiles that stick out of a block would lie in its neighbour."""
    return math.gcd(n, SIDE)


def _sides(shape: Sizes) -> Sizes:
    return tuple(_side(n) if i >= len(shape) - 2 else 1 for i, n in enumerate(shape))


# ---- rules: (body, equation, operands) -> Tiled ------------------------------------------------------------------------------
def _elementwise(body: _Body, e: Any, values: list[Any]) -> Tiled:
    aval = e.outvars[0].aval
    shapes = [np.shape(x) for x in values]
    if e.primitive.name == "bitcast_convert_type" and shapes[0] != aval.shape:  # to another width
        raise _NotInPieces
    for x, shape in zip(values, shapes, strict=True):
        body.holds(x)
        if shape and not isinstance(x, Tiled):
            raise _NotInPieces

    def piece(tiles: Tiles, starts: Starts, sizes: Sizes) -> Any:
        return e.primitive.bind(*(_repeating(tiles, x, starts, sizes) for x in values), **e.params)

    return _made_from(values, aval, piece, elsewhere=any(shape not in ((), aval.shape) for shape in shapes))


def _repeating(tiles: Tiles, x: Any, starts: Starts, sizes: Sizes) -> Any:
    """The part of x that belongs to a tile; dimensions of 1 are repeated."""
    if not isinstance(x, Tiled):
        return x
    one = [n == 1 for n in x.shape]
    starts = tuple(count(0) if o else i for o, i in zip(one, starts, strict=True))
    return tiles.of(x, starts, tuple(1 if o else n for o, n in zip(one, sizes, strict=True)))


def _made_from(values: Sequence[Any], aval: Any, piece: Any, elsewhere: bool = False, **more: Any) -> Tiled:
    """elsewhere: a tile is not made from the tiles of the same place."""
    arrays = [x for x in values if isinstance(x, Tiled)]
    reads = frozenset[tuple[int, int]]().union(*(x.reads for x in arrays))
    away = frozenset(b for b, _ in reads) if elsewhere else frozenset[int]().union(*(x.elsewhere for x in arrays))
    more = {"product": any(x.product for x in arrays)} | more
    return Tiled(aval.shape, aval.dtype, piece, reads, away, **more)


def _broadcast(body: _Body, e: Any, values: list[Any]) -> Tiled:
    (x,) = values
    aval, dims = e.outvars[0].aval, e.params["broadcast_dimensions"]

    def piece(tiles: Tiles, starts: Starts, sizes: Sizes) -> Any:
        own = _repeating(tiles, x, tuple(starts[d] for d in dims), tuple(sizes[d] for d in dims))
        return jax.lax.broadcast_in_dim(own, sizes, dims)

    return _made_from(values, aval, piece, elsewhere=True)


def _iota(body: _Body, e: Any, values: list[Any]) -> Tiled:
    aval, along = e.outvars[0].aval, e.params["dimension"]

    def piece(tiles: Tiles, starts: Starts, sizes: Sizes) -> Any:
        return jax.lax.broadcasted_iota(aval.dtype, sizes, along) + starts[along].astype(aval.dtype)

    return Tiled(aval.shape, aval.dtype, piece)


def _transpose(body: _Body, e: Any, values: list[Any]) -> Tiled:
    (x,), aval, order = values, e.outvars[0].aval, e.params["permutation"]
    back = tuple(int(i) for i in np.argsort(order))

    def piece(tiles: Tiles, starts: Starts, sizes: Sizes) -> Any:
        own = tiles.of(x, tuple(starts[i] for i in back), tuple(sizes[i] for i in back))
        return jax.lax.transpose(own, order)

    return _made_from(values, aval, piece, elsewhere=True, loaded=x.loaded)


def _dot(body: _Body, e: Any, values: list[Any]) -> Tiled:
    x, y = values
    (contracted, batch), aval = e.params["dimension_numbers"], e.outvars[0].aval
    if batch != ((), ()) or len(contracted[0]) != 1 or len(x.shape) != 2 or len(y.shape) != 2:
        raise _NotInPieces
    if x.product or y.product:  # would be computed again for each tile of this one
        raise _NotInPieces
    for o in (x, y):
        if o.loaded is None:
            body.holds(o)
        elif space_of(o.loaded) == GMEM_SPACE:  # else wgmma may read it where it lies
            body.needed |= o.nbytes > SHARED_LIMIT
    body.needed |= aval.size * np.dtype(aval.dtype).itemsize > REGISTER_BYTES
    k_axes = contracted[0][0], contracted[1][0]
    depth = x.shape[k_axes[0]]
    step = _side(depth)
    wide = jnp.issubdtype(aval.dtype, jnp.floating) and np.dtype(aval.dtype).itemsize < 4
    dtype = np.dtype(np.float32) if wide else aval.dtype
    params = {**e.params, "preferred_element_type": dtype}

    def piece(tiles: Tiles, starts: Starts, sizes: Sizes) -> Any:
        def add(i: Any, acc: Any) -> Any:
            inside, k = Tiles(), i * step
            parts = []
            for o, axis, start, size in zip((x, y), k_axes, starts, sizes, strict=True):
                place, extent = ((k, start), (step, size)) if axis == 0 else ((start, k), (size, step))
                parts.append(inside.of(o, place, extent))
            return acc + e.primitive.bind(*parts, **params)

        total = jax.lax.fori_loop(count(0), count(depth // step), add, jnp.zeros(sizes, dtype))
        return total.astype(aval.dtype)

    return _made_from(values, aval, piece, elsewhere=True, product=True)


RULES: dict[str, Callable[[_Body, Any, list[Any]], Tiled]] = {
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "transpose": _transpose,
    "dot_general": _dot,
}
__all__ = ["in_pieces", "in_place"]
