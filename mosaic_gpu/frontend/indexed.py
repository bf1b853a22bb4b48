"""`ref[...]` with index arrays: the arrays spread over the shape of what is moved, the rest of the view as ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..errors import Line, UnsupportedCall
from ..ops.elementwise import FLOATS
from ..program import Equation, Operand, View
from .primitives import slice_class

if TYPE_CHECKING:
    from .trace import Tracer


def _transforms(e: Any, skip: int) -> Sequence[Any]:
    return jax.tree.unflatten(e.params["tree"], list(e.invars[skip:]))  # type: ignore[no-any-return]


def _is_array(index: Any) -> bool:
    return bool(getattr(getattr(index, "aval", index), "shape", ()))


def has_index_array(e: Any, skip: int) -> bool:
    """Whether a read or write of a Ref has an index that is an array; skip: operands before those of the view."""
    indices = [i for t in _transforms(e, skip) for i in getattr(t, "indices", ())]
    return any(not isinstance(i, slice_class()) and _is_array(i) for i in indices)


def _indexed(
    tr: Tracer, e: Any, skip: int, shape: tuple[int, ...], out: list[Equation], line: Line | None
) -> tuple[View, list[Operand], tuple[tuple[int, int], ...]]:
    """(the view with its indexed dimensions whole, index arrays of `shape`, which of them or of its dimensions each takes)."""
    *before, last = _transforms(e, skip)
    base = tr.view(e.invars[0], before, line)  # refuses index arrays that are no last ones
    wholes = [
        i if isinstance(i, slice_class()) else slice_class()(0, n)
        for i, n in zip(last.indices, base.shape, strict=True)
    ]
    view = tr.indexed(base, wholes, line)
    arrays = [k for k, i in enumerate(last.indices) if not isinstance(i, slice_class())]
    common = tuple(last.int_indexer_shape)
    # As NumPy: the arrays' dimensions stand where they stand, and first where a slice is between them.
    adjacent = arrays == list(range(arrays[0], arrays[-1] + 1))
    first = arrays[0] if adjacent else 0
    kept = [k for k in range(len(view.shape)) if k not in arrays]
    position = {k: n if n < first else n + len(common) for n, k in enumerate(kept)}
    expected = [0] * (len(kept) + len(common))
    for k, p in position.items():
        expected[p] = view.shape[k]
    expected[first : first + len(common)] = common
    if tuple(expected) != shape:
        raise UnsupportedCall(f"a view of shape {shape} by index arrays of {common} into {base}: not supported", line)
    operands: list[Operand] = []
    dims = []
    for k in range(len(view.shape)):
        if k in position:
            dims.append((-1, position[k]))
            continue
        index = tr.read(last.indices[k])
        if index.dtype == "bool" or index.dtype in FLOATS:
            raise UnsupportedCall(
                f"an array of {index.dtype} as an index of {view.ref}: an index is a whole number. What a mask chooses has no "
                "shape that is known here: load all and take jnp.where(mask, ref[...], other); "
                "plgpu.store(ref, x, mask=mask) writes where the mask holds",
                line,
            )
        wide = tr.fresh(shape, index.dtype)
        along = tuple(range(first + len(common) - len(index.shape), first + len(common)))
        params = (("broadcast_dimensions", along), ("shape", shape))
        out.append(Equation("broadcast_in_dim", (index,), (wide,), params, (), line))
        dims.append((len(operands), -1))
        operands.append(wide)
    return view, operands, tuple(dims)


def get_indexed(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    view, indices, dims = _indexed(tr, e, 1, tuple(e.outvars[0].aval.shape), out, line)
    out.append(Equation("get_indexed", (view, *indices), tr.define(e.outvars), (("dims", dims),), (), line))


def put_indexed(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    x = tr.read(e.invars[1])
    view, indices, dims = _indexed(tr, e, 2, tuple(e.invars[1].aval.shape), out, line)
    out.append(Equation("get_indexed", (view, *indices), tr.define(e.outvars), (("dims", dims),), (), line))
    out += tr.stored(view, Equation("put_indexed", (view, x, *indices), (), (("dims", dims),), (), line))


def add_indexed(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    x = tr.read(e.invars[1])
    view, indices, dims = _indexed(tr, e, 2, tuple(e.invars[1].aval.shape), out, line)
    old, new = tr.fresh(x.shape, view.dtype), tr.fresh(x.shape, view.dtype)
    out.append(Equation("get_indexed", (view, *indices), (old,), (("dims", dims),), (), line))
    out.append(Equation("add", (old, x), (new,), (), (), line))
    out += tr.stored(view, Equation("put_indexed", (view, new, *indices), (), (("dims", dims),), (), line))
