"""Specs held against arrays: a `GridMapping`, one `BlockMapping` for each input and output, index maps as jaxprs.

Orders, everywhere in this package:

=============  =====================================================================
of what        order
=============  =====================================================================
the primitive  dynamic grid bounds, scalar-prefetch operands, inputs
the kernel     scalar-prefetch Refs, input Refs, output Refs, scratch
an index map   program ids (one an axis of the grid), scalar-prefetch Refs
=============  =====================================================================
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.ref import AbstractRef

from .. import arguments
from ..errors import Line, UnsupportedCall
from ..frontend import shard_map
from ..frontend.foreign import translated
from ..frontend.loops import bounded_slices
from ..frontend.trace import function_line, raised_at
from ..layouts.shared import BELOW_A_BYTE, ITEM_BITS, instead_of, way_out_below_a_byte
from ..memory import GMEM_SPACE, MemorySpace, SmemTransform
from .blocks import kept_shape, symbolic, why_in_place
from .irregular import checked, grouped, is_irregular, no_index
from .pipeline import check_place, is_scalar
from .specs import BlockDim, BlockSpec, Element, _NoBlockSpec, no_block_spec

WHERE = "pallas_call"
INT32_MAX = 2**31 - 1


class _Dynamic:
    def __repr__(self) -> str:
        return "dynamic"


dynamic = _Dynamic()
"""In a grid: a size that is an operand of the call."""
GridSize = int | _Dynamic


@dataclasses.dataclass(frozen=True)
class BlockMapping:
    """One input or output.

    name: as errors call it (`args[0]`, `args[1]['w']`, `outputs[0]`); shape, dtype: the array's; dims: the block's, () for an
    array that is left whole where it is; index: a closed jaxpr, (program ids, prefetch Refs) -> one int32 a dimension (two of
    a BoundedSlice, an array of an Indirect);
    in_gmem: the spec says so; depth: buffers, None: max_concurrent_steps; free: the spec does not say where the block lies, and
    nothing in it needs shared memory; in_place: why it stays in global memory all the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[BlockDim, ...]
    index: Any
    in_gmem: bool
    depth: int | None = None
    delay: int = 0
    transforms: tuple[SmemTransform, ...] = ()
    line: Line | None = None
    left: str = ""  # why a whole array stayed in GMEM without the spec saying so
    free: bool = False
    in_place: str = ""

    @property
    def staged(self) -> bool:
        """Whether blocks go through shared memory."""
        return not self.in_gmem and self.why_not is None

    @property
    def why_not(self) -> str | None:
        if not self.dims:
            return "the array is left where it is"
        return why_in_place(self.shape, self.dims, self.dtype, self.transforms) or self.in_place or None

    @property
    def block_shape(self) -> tuple[int, ...]:
        """What the kernel sees."""
        return kept_shape(self.dims) if self.dims else self.shape

    @property
    def nbytes(self) -> int:
        """Of one block."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    def ref(self) -> AbstractRef:
        space = MemorySpace("smem", self.transforms) if self.staged else GMEM_SPACE
        return AbstractRef(jax.core.ShapedArray(self.block_shape, self.dtype), memory_space=space)

    def starts(self, ids: Sequence[Any], prefetch: Sequence[Any]) -> list[Any]:
        """The index map's result, one entry a dimension; known numbers come as ints."""
        found = jex.jaxpr_as_fun(self.index)(*(jnp.asarray(i, jnp.int32) for i in ids), *prefetch)
        flat = [
            int(v.val) if isinstance(v, jex.Literal) else x
            for v, x in zip(self.index.jaxpr.outvars, found, strict=True)
        ]
        return grouped(self.dims, flat)


@dataclasses.dataclass(frozen=True)
class GridMapping:
    """grid: sizes, `dynamic` where an operand says; vmapped: axes that vmap has put there, which the kernel does not see;
    prefetch: types of the scalar-prefetch operands; blocks: of inputs, then outputs."""

    grid: tuple[GridSize, ...]
    vmapped: tuple[int, ...]
    prefetch: tuple[jax.core.ShapedArray, ...]
    blocks: tuple[BlockMapping, ...]
    num_outputs: int

    @property
    def num_dynamic(self) -> int:
        return sum(n is dynamic for n in self.grid)

    @property
    def inputs(self) -> tuple[BlockMapping, ...]:
        return self.blocks[: len(self.blocks) - self.num_outputs]

    @property
    def outputs(self) -> tuple[BlockMapping, ...]:
        return self.blocks[len(self.blocks) - self.num_outputs :]

    def sizes(self, bounds: Sequence[Any]) -> tuple[Any, ...]:
        """The grid with its dynamic sizes filled in."""
        given = iter(bounds)
        return tuple(next(given) if n is dynamic else n for n in self.grid)

    def seen(self, per_axis: Sequence[Any]) -> tuple[Any, ...]:
        """Of something for each axis, what belongs to the axes that the kernel sees."""
        return tuple(x for i, x in enumerate(per_axis) if i not in self.vmapped)


def no_symbols(what: str, sizes: Sequence[Any]) -> None:
    """Raises UnsupportedCall where a size is a symbol of `jax.export`, and must not be."""
    if symbolic(sizes):
        raise UnsupportedCall(
            f"{WHERE}: {what}: only arrays that are cut into blocks of known sizes may have symbols (jax.export.symbolic_shape) "
            "in their shapes; give it a BlockSpec with a block_shape of numbers"
        )


def grid_of(grid: Any) -> tuple[tuple[GridSize, ...], tuple[str | None, ...], list[Any]]:
    """The grid as sizes, the names of its axes, and the operands for its dynamic sizes."""
    if isinstance(grid, str) or (not hasattr(grid, "__iter__") and not isinstance(grid, (int, np.integer))):
        if not hasattr(grid, "dtype") and not symbolic((grid,)):
            arguments.refuse(WHERE, "grid", grid, "an int or a tuple of ints, int32 scalars and (name, size)")
    entries = tuple(grid) if hasattr(grid, "__iter__") and not hasattr(grid, "dtype") else (grid,)
    sizes: list[GridSize] = []
    names: list[str | None] = []
    bounds = []
    for i, n in enumerate(entries):
        named = isinstance(n, tuple) and len(n) == 2 and isinstance(n[0], str)
        names.append(n[0] if named else None)
        n = n[1] if named else n
        if is_scalar(n) or symbolic((n,)):
            if named:
                raise UnsupportedCall(
                    f"{WHERE}: grid[{i}]: a named axis has a size known before the call; leave the name out"
                )
            sizes.append(dynamic)
            bounds.append(jnp.asarray(n, jnp.int32))
        elif hasattr(n, "aval"):  # an array, a float
            arguments.refuse(WHERE, f"grid[{i}]", n, "a whole number or an int32 scalar")
        else:
            sizes.append(arguments.whole(WHERE, f"grid[{i}]", n, 0, INT32_MAX))
    given = [n for n in names if n is not None]
    if len(set(given)) != len(given):
        raise ValueError(f"{WHERE}: grid={entries}: axes share a name")
    return tuple(sizes), tuple(names), bounds


def specs_of(specs: Any, tree: Any, which: str, what: str) -> list[Any]:
    """One spec for each leaf of the arguments; ValueError where the trees differ."""
    count = tree.num_leaves
    if isinstance(specs, _NoBlockSpec):
        return [BlockSpec()] * count
    given = tuple(specs) if isinstance(specs, list) else specs
    paths, structure = jax.tree_util.tree_flatten_with_path(given, is_leaf=_is_spec)
    for path, leaf in paths:
        if not _is_spec(leaf):
            wanted = "BlockSpec or no_block_spec, in a tree like that of the arrays"
            if type(leaf).__name__ == BlockSpec.__name__:
                wanted += f" (mosaic_gpu's, not {type(leaf).__module__}'s)"
            arguments.refuse(WHERE, which + jax.tree_util.keystr(path), leaf, wanted)
    if structure != tree:
        raise ValueError(_mismatch(given, jax.tree.unflatten(tree, range(count)), which, what))
    return [leaf for _, leaf in paths]


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (BlockSpec, _NoBlockSpec))


def _mismatch(specs: Any, values: Any, which: str, what: str) -> str:
    found: list[str] = []

    def compare(a: Any, b: Any, path: str) -> None:
        at = f"at {path or 'the top'}, "
        if _is_spec(a) and isinstance(b, int):
            return
        if type(a) is not type(b):
            left = "a pytree leaf" if _is_spec(a) else f"a {type(a).__name__}"
            right = "a pytree leaf" if isinstance(b, int) else f"a {type(b).__name__}"
            found.append(f"{at}`{which}` is {left} but `{what}` is {right}, so their Python types differ")
        elif isinstance(a, dict):
            if set(a) != set(b):
                found.append(f"{at}`{which}` has the keys {sorted(a)} but `{what}` {sorted(b)}")
            else:
                for k in a:
                    compare(a[k], b[k], f"{path}[{k!r}]")
        elif isinstance(a, (tuple, list)):
            if len(a) != len(b):
                kind = type(a).__name__
                found.append(
                    f"{at}`{which}` is a {kind} of length {len(a)} but `{what}` is a {kind} of length {len(b)}"
                )
            else:
                for i, (x, y) in enumerate(zip(a, b, strict=True)):
                    compare(x, y, f"{path}[{i}]")
        else:
            found.append(f"{at}`{which}` and `{what}` differ")

    compare(specs, values, "")
    lines = "".join(f"\n    * {line}." for line in found)
    return f"Pytree for `{which}` and `{what}` do not match. There are {len(found)} mismatches, including:{lines}"


def block_mapping(spec: Any, name: str, shape: tuple[int, ...], dtype: Any, rank: int, prefetch: Any) -> BlockMapping:
    """A spec held against one array.  prefetch: (flat types, tree)."""
    if isinstance(spec, _NoBlockSpec) or spec is None:
        left = f"{name} has no BlockSpec while others have one, so it stays where it is, in global memory (GMEM)"
        no_symbols(f"{name} of shape {tuple(shape)}", shape)
        index = jax.make_jaxpr(lambda *_: [0] * len(shape))(*_index_types(rank, prefetch[0]))
        return BlockMapping(name, shape, np.dtype(dtype), (), index, True, left=left)
    kind = np.dtype(dtype).name
    if kind in BELOW_A_BYTE or kind not in ITEM_BITS:
        why = way_out_below_a_byte(kind) if kind in BELOW_A_BYTE else instead_of(kind)
        raise UnsupportedCall(f"{WHERE}: {name}: blocks of {kind} cannot be read: {why}", getattr(spec, "line", None))
    dims = spec.dims(WHERE, name, shape)
    if spec.collective_axes:
        raise UnsupportedCall(
            f"{WHERE}: {name}: a pallas_call has no cluster for collective_axes; use `kernel`", spec.line
        )
    in_gmem = spec.in_gmem(WHERE, name)
    check_place(WHERE, name, dims, spec)
    whole = spec.block_shape is None and in_gmem
    if whole:
        no_symbols(f"{name} of shape {tuple(shape)}", shape)
    delay = arguments.whole(WHERE, f"delay_release of {name}", spec.delay_release, 0)
    depth = None if spec.pipeline_mode is None else spec.depth(WHERE, name, 1)
    transforms = spec.checked_transforms(WHERE, name)
    padded = any(isinstance(d, Element) and d.padding[0] for d in dims)
    mapping = BlockMapping(
        name,
        shape,
        np.dtype(dtype),
        () if whole else dims,
        _traced_index(spec, name, dims, rank, prefetch),
        in_gmem,
        depth,
        delay,
        transforms,
        spec.line,
        free=not (
            spec.memory_space or spec.pipeline_mode or transforms or delay or padded or any(map(is_irregular, dims))
        ),
    )
    if mapping.dims and not mapping.staged and padded:
        raise UnsupportedCall(
            f"{WHERE}: {name}: padding in front of an array (Element) is TMA's doing, and these blocks stay in global memory: "
            f"{mapping.why_not or 'the spec says so'}. Pad the array with jnp.pad",
            spec.line,
        )
    return mapping


def _index_types(rank: int, prefetch: Sequence[jax.core.ShapedArray]) -> list[Any]:
    ids = [jax.ShapeDtypeStruct((), jnp.int32)] * rank
    return [*ids, *(AbstractRef(a, memory_space=GMEM_SPACE) for a in prefetch)]


def _traced_index(spec: BlockSpec, name: str, dims: Sequence[BlockDim], rank: int, prefetch: Any) -> Any:
    flat, tree = prefetch
    f = spec.index_map or (lambda *_: (0,) * len(dims))
    arguments.function(WHERE, f"index_map of {name}", f)
    what = f"Index map function {_shown(f)} for {name}"

    def traced(*given: Any) -> list[Any]:
        with bounded_slices():
            found = f(*given[:rank], *jax.tree.unflatten(tree, given[rank:]))
        found = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if len(found) != len(dims):
            raise ValueError(
                f"{what} must return {len(dims)} values to match block_shape={spec.block_shape}. "
                f"Currently returning {len(found)} values."
            )
        known: list[Any] = []
        for i, (d, x) in enumerate(zip(dims, found, strict=True)):
            x = checked(what, i, d, x)
            if is_irregular(d):
                known.append(x)
                continue
            if (kind := no_index(x)) is not None:
                raise ValueError(f"{what} must return integer scalars. Output[{i}] has type {kind}.")
            known.append(x if isinstance(x, int) or x.dtype == jnp.int32 else jnp.asarray(x, jnp.int32))
        return jax.tree.leaves(known)

    try:
        closed = shard_map.traced_outside(lambda: jax.make_jaxpr(traced)(*_index_types(rank, flat)))
    except TypeError as error:
        if "positional argument" in str(error):
            error.add_note(
                f"{what}: it is called with {rank} program ids and {len(jax.tree.unflatten(tree, flat))} scalar-prefetch Refs"
            )
        ours = translated(error, raised_at(error, function_line(f)))
        if ours is None:
            raise
        raise ours from ours.__cause__
    arrays = [c for c in closed.consts if np.ndim(c) or hasattr(c, "aval")]
    if arrays:
        raise ValueError(
            f"{what} must not capture constants: {[jax.typeof(c).str_short() for c in arrays]}. Pass them as scalar-prefetch "
            "operands (PrefetchScalarGridSpec)"
        )
    return closed


def _shown(f: Callable[..., Any]) -> str:
    line = function_line(f)
    name = getattr(getattr(f, "func", f), "__name__", "index_map")
    return f"{name} at {line.file}:{line.number}" if line else name


__all__ = [
    "BlockMapping",
    "GridMapping",
    "GridSize",
    "block_mapping",
    "dynamic",
    "grid_of",
    "no_block_spec",
    "specs_of",
]
