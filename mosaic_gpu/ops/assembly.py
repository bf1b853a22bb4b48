"""Arrays put together and taken apart: concatenate, pad, split, tile, slices that start at run time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..layouts.registers import RegisterLayout
from ..layouts.shared import array_bytes, row_major
from ..layouts.spread import register_table
from ..program import Equation, Value
from .moves import ALL, Map
from .registry import BOTH, Op, op


def _define(
    name: str, emit: Callable[[Any, Any], None], numpy: Callable[..., Any], scratch: Callable[[Equation], int]
) -> Op:
    """An op that goes through the scratch: emit rule, NumPy function of (equation, *operands), bytes of scratch."""
    o = op(name, pure=True, whole=True, dtypes=ALL)
    o.emit(BOTH)(emit)

    @o.scratch
    def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
        return scratch(e)

    @o.simulate
    def _(sim: Any, step: Any) -> None:
        e = step.equation
        results = numpy(e, *[sim.read(x) for x in e.operands])
        for r, x in zip(e.results, results if isinstance(results, (list, tuple)) else [results], strict=True):
            sim.write(r, x)

    return o


# ---- concatenate, split, tile ----------------------------------------------------------------------------------------
def _joined(layout_of: Callable[[Any], RegisterLayout | None], e: Equation) -> list[tuple[int, int]] | None:
    """For each register of the result (operand, its register) where every thread has what it wants; else None."""
    layout, d, start = layout_of(e.results[0]), e.param("dimension"), 0
    found: dict[int, tuple[int, int]] = {}
    for k, x in enumerate(e.operands):
        own, rank = layout_of(x), len(x.shape)
        if layout is None or own is None:
            return None
        place = tuple(start if i == d else 0 for i in range(rank))
        identity = tuple(tuple(int(i == j) for j in range(rank)) for i in range(rank))
        table = register_table(layout, own, Map(layout.shape, identity, place))
        if table is None:
            return None
        found |= {r: (k, i) for i, r in enumerate(table)}
        start += x.shape[d]
    return [found[r] for r in range(len(found))] if layout is not None and len(found) == layout.registers else None


def _concatenate(out: Any, step: Any) -> None:
    e = step.equation
    result, d = e.results[0], e.param("dimension")
    joined = _joined(out.layout, e)
    if joined is not None:
        out.assign_moved(result, [out.moved_element(e.operands[k], i) for k, i in joined])
        return
    strides, start = row_major(result.shape), 0
    out.met()
    for x in e.operands:
        with out.block():
            out.to_scratch(x, out.positions("at", out.layout(x), strides, str(start * strides[d])))
        start += x.shape[d]
    out.met()
    out.from_scratch(result, strides)


concatenate = _define(
    "concatenate",
    _concatenate,
    lambda e, *xs: np.concatenate(xs, e.param("dimension")),
    lambda e: array_bytes(e.results[0]),
)


@concatenate.scratch
def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
    there = _joined(lambda x: layouts.get(x.id) if isinstance(x, Value) else None, e)
    return 0 if there is not None else array_bytes(e.results[0])


@concatenate.layouts
def _(solver: Any, e: Equation) -> None:
    for x in e.operands:
        solver.part(e, e.results[0], x)


def _split(out: Any, step: Any) -> None:
    e = step.equation
    x, d, start = e.operands[0], e.param("axis"), 0
    strides = row_major(x.shape)
    out.met()
    with out.block():
        out.to_scratch(x, out.positions("at", out.layout(x), strides))
    out.met()
    for r in e.results:
        out.from_scratch(r, strides, str(start * strides[d]))
        start += r.shape[d]


_define(
    "split",
    _split,
    lambda e, x: np.split(x, list(itertools.accumulate(e.param("sizes")))[:-1], e.param("axis")),
    lambda e: array_bytes(e.operands[0]),
)


# ---- stack, unstack --------------------------------------------------------------------------------------------------
def _without(strides: tuple[int, ...], axis: int) -> list[int]:
    return [s for d, s in enumerate(strides) if d != axis]


def _stack(out: Any, step: Any) -> None:
    e = step.equation
    result, d = e.results[0], e.param("axis")
    strides = row_major(result.shape)
    out.met()
    for k, x in enumerate(e.operands):
        with out.block():
            positions = out.positions("at", out.layout(x), _without(strides, d), str(k * strides[d]))
            out.to_scratch(x, positions)
    out.met()
    out.from_scratch(result, strides)


_define("stack", _stack, lambda e, *xs: np.stack(xs, e.param("axis")), lambda e: array_bytes(e.results[0]))


def _unstack(out: Any, step: Any) -> None:
    e = step.equation
    x, d = e.operands[0], e.param("axis")
    strides = row_major(x.shape)
    out.met()
    with out.block():
        out.to_scratch(x, out.positions("at", out.layout(x), strides))
    out.met()
    for k, r in enumerate(e.results):
        out.from_scratch(r, _without(strides, d), str(k * strides[d]))


_define(
    "unstack",
    _unstack,
    lambda e, x: [np.take(x, k, e.param("axis")) for k in range(x.shape[e.param("axis")])],
    lambda e: array_bytes(e.operands[0]),
)


def _texts(out: Any, e: Equation, index: Callable[[int, str], str]) -> list[str]:
    """The operand's elements in the scratch at coordinates that are expressions of the result's."""
    x, result = e.operands[0], e.results[0]
    strides = row_major(x.shape)
    rows = out.coordinates(f"c{result.id}", out.layout(result))
    return [
        out.read_place(
            x.dtype, " + ".join(f"({index(d, c)}) * {s}" for d, (c, s) in enumerate(zip(row, strides, strict=True)))
        )
        for row in rows
    ]


def _tile(out: Any, step: Any) -> None:
    e = step.equation
    x = e.operands[0]
    out.met()
    with out.block():
        out.to_scratch(x, out.positions("at", out.layout(x), row_major(x.shape)))
    out.met()
    out.assign_elements(e.results[0], _texts(out, e, lambda d, c: f"({c}) % {x.shape[d]}"))


_define("tile", _tile, lambda e, x: np.tile(x, e.param("reps")), lambda e: array_bytes(e.operands[0]))


# ---- pad -------------------------------------------------------------------------------------------------------------
def _pad(out: Any, step: Any) -> None:
    e = step.equation
    x, value, result = e.operands[0], e.operands[1], e.results[0]
    config = e.param("padding_config")
    out.met()
    with out.block():
        out.to_scratch(x, out.positions("at", out.layout(x), row_major(x.shape)))
    out.met()
    strides, texts = row_major(x.shape), []
    for row in out.coordinates(f"c{result.id}", out.layout(result)):
        tests, position = [], "0"
        for (low, _, inside), n, s, c in zip(config, x.shape, strides, row, strict=True):
            at = f"({c} - ({low}))"
            index = f"{at} / {inside + 1}" if inside else at
            tests += [f"{at} >= 0", f"{index} < {n}"] + ([f"{at} % {inside + 1} == 0"] if inside else [])
            position += f" + {index} * {s}"
        texts.append(f"({' && '.join(tests) or 'true'} ? {out.read_place(x.dtype, position)} : {out.scalar(value)})")
    out.assign_elements(result, texts)


def _padded(e: Equation, x: Any, value: Any) -> Any:
    result = np.full(e.results[0].shape, value, x.dtype)
    into, of = [], []
    for (low, _, inside), n, m in zip(e.param("padding_config"), x.shape, result.shape, strict=True):
        places = np.arange(n) * (inside + 1) + low
        keep = (places >= 0) & (places < m)
        into.append(places[keep])
        of.append(np.flatnonzero(keep))
    result[np.ix_(*into)] = x[np.ix_(*of)]
    return result


_define("pad", _pad, _padded, lambda e: array_bytes(e.operands[0]))


# ---- slices that start at run time -----------------------------------------------------------------------------------
def _start(out: Any, indices: Any, shape: tuple[int, ...], size: tuple[int, ...]) -> str:
    """Row-major number of the first element, its indices clamped as JAX clamps them."""
    strides = row_major(shape)
    terms = [
        f"{out.clamped(i, n - m)} * {s}" for i, n, m, s in zip(indices, shape, size, strides, strict=True) if n != m
    ]
    return " + ".join(terms) or "0"


def _dynamic_slice(out: Any, step: Any) -> None:
    e = step.equation
    x, *indices = e.operands
    result = e.results[0]
    out.met()
    with out.block():
        out.to_scratch(x, out.positions("at", out.layout(x), row_major(x.shape)))
    out.met()
    out.from_scratch(result, row_major(x.shape), _start(out, indices, x.shape, e.param("slice_sizes")))


def _clamped(indices: Any, shape: Any, size: Any) -> list[int]:
    return [min(max(int(i), 0), n - m) for i, n, m in zip(indices, shape, size, strict=True)]


def _sliced(e: Equation, x: Any, *indices: Any) -> Any:
    size = e.param("slice_sizes")
    start = _clamped(indices, x.shape, size)
    return x[tuple(slice(i, i + m) for i, m in zip(start, size, strict=True))]


_define("dynamic_slice", _dynamic_slice, _sliced, lambda e: array_bytes(e.operands[0]))


def _dynamic_update_slice(out: Any, step: Any) -> None:
    e = step.equation
    x, update, *indices = e.operands
    result, strides = e.results[0], row_major(x.shape)
    out.met()
    with out.block():
        out.to_scratch(x, out.positions("at", out.layout(x), strides))
    out.met()
    with out.block():
        start = _start(out, indices, x.shape, update.shape)
        out.to_scratch(update, out.positions("at", out.layout(update), strides, start))
    out.met()
    out.from_scratch(result, strides)


def _updated(e: Equation, x: Any, update: Any, *indices: Any) -> Any:
    result = np.array(x)
    start = _clamped(indices, x.shape, update.shape)
    result[tuple(slice(i, i + m) for i, m in zip(start, update.shape, strict=True))] = update
    return result


_define("dynamic_update_slice", _dynamic_update_slice, _updated, lambda e: array_bytes(e.operands[0]))
