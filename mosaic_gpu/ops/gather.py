"""Elements by index arrays: `x[i]`, `jnp.take`, `take_along_axis` (gather), `x.at[i].set/add/mul/min/max` (scatters).

Everything but the scatters' operand meets in the scratch.  A gathered element is read from where its indices say; an element of
a scatter's operand looks through all updates, in order, for those that are its own: repeated indices give the same result
in every run, at the price of one comparison for each update and element.

Indices outside: JAX's modes.  'clip' moves the whole window inside; 'fill' ('drop') and, for scatters, 'promise_in_bounds'
take the fill value (drop the window) where any part of a window is outside; a gather that promises clips.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..codegen.emit_gather import emit_gather, emit_scatter
from ..layouts.registers import RegisterLayout
from ..layouts.shared import array_bytes
from ..program import Equation
from .elementwise import FLOATS, INTEGERS, numpy_dtype
from .moves import ALL
from .order import maximum, minimum
from .reductions import MAX, MIN, PRODUCT, SUM, Combine
from .registry import op

gather = op("gather", pure=True, whole=True, dtypes=ALL)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of an array, one for each index vector.

    shape: of the array; window: extents of each window along all its dimensions; batch: of the index vectors; start_map:
    dimension of the array that each part of an index vector is for; batching: (dimension of the array, of `batch`) pairs
    that run together; offsets: for each dimension of the array that of the gathered array (or the updates) along which its
    window lies, -1 where there is none; outer: dimensions of the gathered array (updates) that are those of `batch`.
    """

    shape: tuple[int, ...]
    window: tuple[int, ...]
    batch: tuple[int, ...]
    start_map: tuple[int, ...]
    batching: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    outer: tuple[int, ...]

    def limit(self, d: int) -> int:
        """The largest start along dimension d of the array."""
        return self.shape[d] - self.window[d]


def windows_of(e: Equation) -> Windows:
    x, indices = e.operands[0], e.operands[1]
    shape, batch = tuple(x.shape), tuple(indices.shape[:-1])
    batching = tuple(zip(*e.param("batching"), strict=True))
    inside = e.param("offset_dims") if e.op == "gather" else e.param("window_dims")
    gone = {*(e.param("collapsed") if e.op == "gather" else e.param("inserted")), *(d for d, _ in batching)}
    kept = [d for d in range(len(shape)) if d not in gone]
    offsets = [-1] * len(shape)
    for d, o in zip(kept, inside, strict=True):
        offsets[d] = o
    if e.op == "gather":
        window, rank = tuple(e.param("slice_sizes")), len(e.results[0].shape)
    else:
        sizes = e.operands[2].shape
        window, rank = tuple(sizes[o] if o >= 0 else 1 for o in offsets), len(sizes)
    outer = tuple(d for d in range(rank) if d not in inside)
    return Windows(shape, window, batch, tuple(e.param("start_map")), batching, tuple(offsets), outer)


def _starts(w: Windows, indices: np.ndarray, clip: bool) -> tuple[np.ndarray, np.ndarray]:
    """(start of each window [*batch, dim of the array], whether it lies inside [*batch])."""
    starts = np.zeros((*w.batch, len(w.shape)), np.int64)
    for j, d in enumerate(w.start_map):
        starts[..., d] = indices[..., j]
    limits = np.array([w.limit(d) for d in range(len(w.shape))], np.int64)
    mapped = np.isin(np.arange(len(w.shape)), w.start_map)
    valid: np.ndarray = np.all((starts >= 0) & (starts <= limits) | ~mapped, axis=-1)
    if clip:
        starts, valid = np.where(mapped, np.clip(starts, 0, limits), starts), np.ones_like(valid)
    for d, b in w.batching:
        starts[..., d] = np.arange(w.batch[b]).reshape([-1 if i == b else 1 for i in range(len(w.batch))])
    return starts, valid


def _places(w: Windows, starts: np.ndarray, rank: int) -> list[np.ndarray]:
    """For each dimension of the array its index at every element of the gathered array (or the updates)."""
    out = []
    for d in range(len(w.shape)):
        spread = [1] * rank
        for k, b in zip(w.outer, w.batch, strict=True):
            spread[k] = b
        index = starts[..., d].reshape(spread)
        if w.offsets[d] >= 0:
            along = [1] * rank
            along[w.offsets[d]] = w.window[d]
            index = index + np.arange(w.window[d]).reshape(along)
        out.append(index)
    return out


def _spread(w: Windows, x: np.ndarray, rank: int) -> np.ndarray:
    """Something for each index vector, to be broadcast over the windows."""
    shape = [1] * rank
    for k, b in zip(w.outer, w.batch, strict=True):
        shape[k] = b
    return x.reshape(shape)


@gather.scratch
def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
    return array_bytes(*e.operands[:2], align=16)


@gather.emit()
def _(out: Any, step: Any) -> None:
    emit_gather(out, step.equation, windows_of(step.equation))


@gather.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    x, indices, fill = (np.asarray(sim.read(o)) for o in e.operands)
    w, rank = windows_of(e), len(e.results[0].shape)
    starts, valid = _starts(w, indices, False)
    inside, _ = _starts(w, indices, True)
    found = x[tuple(np.broadcast_arrays(*_places(w, inside, rank)))] if w.shape else x
    if e.param("fill"):
        found = np.where(_spread(w, valid, rank), found, fill)
    sim.write(e.results[0], np.broadcast_to(found, e.results[0].shape).astype(x.dtype))


SET = Combine("scatter", lambda a, b: b, "{1}", "{1}", "{1}")
SUBTRACT = Combine("scatter-sub", np.subtract, "({0} - {1})", "({0} - {1})")
SCATTERS = {
    "scatter": SET,
    "scatter-add": SUM,
    "scatter-sub": SUBTRACT,
    "scatter-mul": PRODUCT,
    "scatter-min": MIN,
    "scatter-max": MAX,
}
NUMPY: dict[str, Callable[..., Any]] = {
    SUM.name: np.add,
    PRODUCT.name: np.multiply,
    MIN.name: minimum,
    MAX.name: maximum,
}


def _define(name: str, c: Combine) -> None:
    dtypes = tuple(d for d in (*FLOATS, *INTEGERS, "bool") if c.of(d))
    o = op(name, pure=True, whole=True, dtypes=dtypes)

    @o.layouts
    def _(solver: Any, e: Equation) -> None:
        solver.same(e, [e.operands[0], *e.results])

    @o.scratch
    def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
        return array_bytes(e.operands[2], e.operands[1], align=16)

    @o.emit()
    def _(out: Any, step: Any) -> None:
        e = step.equation
        emit_scatter(out, e, windows_of(e), str(c.of(e.operands[0].dtype)))

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        x, indices, updates = (np.asarray(sim.read(o)) for o in e.operands)
        w, rank = windows_of(e), len(updates.shape)
        starts, valid = _starts(w, indices, e.param("clip"))
        half = x.dtype.itemsize == 2 and x.dtype.kind not in "iu"
        result, updates = (a.astype(np.float32) if half else np.array(a) for a in (x, updates))
        places = np.broadcast_arrays(*_places(w, starts, rank)) if w.shape else []
        combine = NUMPY.get(c.name, c.numpy)
        with np.errstate(all="ignore"):
            for at in np.ndindex(*w.batch):
                if not valid[at]:
                    continue
                part: list[Any] = [slice(None)] * rank
                for k, i in zip(w.outer, at, strict=True):
                    part[k] = i
                target = tuple(p[tuple(part)] for p in places)
                result[target] = combine(result[target], updates[tuple(part)])
        sim.write(e.results[0], result.astype(numpy_dtype(e.results[0].dtype)))


for _name, _combine in SCATTERS.items():
    _define(_name, _combine)
