"""Tiles and swizzles that nobody has given: buffers in shared memory without transforms that the tensor core reads.

A buffer as it comes lies row by row, which no matrix descriptor describes.  One that a wgmma, a tcgen05_mma, or a product of a
shape that these have reads gets tiles of all its rows and the widest swizzle that its rows and its slices allow; all other
accesses take any layout.  Transforms that are given stay.  What has other requirements (copies of factors to tensor memory,
another block's memory, unions) is left alone.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from ..memory import SwizzleTransform, TilingTransform
from ..program import DimIndex, Equation, Program, Value, View, substitute_all, walk
from .shared import ITEM_BITS, itemsize

MMAS = ("wgmma", "tcgen05_mma")
COPIES = ("copy_gmem_to_smem", "copy_smem_to_gmem")
LOADS = ("get", "load")
# Which take any layout.
ANY_LAYOUT = {
    *MMAS,
    *COPIES,
    *LOADS,
    "swap",
    "get_indexed",
    "put_indexed",
    "masked_load",
    "masked_store",
    "print_layout",
}


def with_tilings(program: Program) -> Program:
    """The program whose operands in shared memory are tiled and swizzled."""
    read = _read_by_tensor_core(program)
    if not read:
        return program
    uses: dict[int, list[tuple[str, View]]] = collections.defaultdict(list)
    for e in walk(program.body):
        for o in e.operands:
            if isinstance(o, View) and o.ref.id in read:
                uses[o.ref.id].append((e.op, o))
    env: dict[int, Value] = {}
    for id, views in uses.items():
        ref = views[0][1].ref
        tiled = _tiled(ref, views, read[id]) if ref.space is not None else None
        if tiled is not None:
            env[id] = tiled
    if not env:
        return program
    scratch = tuple(env.get(v.id, v) for v in program.scratch)
    return dataclasses.replace(program, scratch=scratch, body=substitute_all(program.body, dict(env)))


def _read_by_tensor_core(program: Program) -> dict[int, list[View]]:
    """By buffer without transforms: the views that the tensor core reads, or could."""
    found: dict[int, list[View]] = collections.defaultdict(list)
    loaded: dict[int, View] = {}  # arrays that are what a view holds, perhaps transposed

    def note(o: View | None) -> None:
        if o is not None and _is_plain(o.ref) and len(o.shape) == 2:
            found[o.ref.id].append(o)

    for e in walk(program.body):
        first = e.operands[0] if e.operands else None
        if e.op in MMAS:
            for o in e.operands[1:]:
                note(o if isinstance(o, View) else None)
        elif e.op in LOADS and isinstance(first, View):
            loaded[e.results[0].id] = first
        elif e.op == "transpose" and isinstance(first, Value) and first.id in loaded:
            loaded[e.results[0].id] = loaded[first.id]
        elif e.op == "dot_general" and _has_shape(e):
            for o in e.operands[:2]:
                note(loaded.get(o.id) if isinstance(o, Value) else None)
    return found


def _is_plain(ref: Value) -> bool:
    s = ref.space
    return s is not None and s.kind == "smem" and not s.transforms and s.union is None and len(ref.shape) >= 2


def _has_shape(e: Equation) -> bool:
    """Whether a product's shape is one of the tensor core's instructions on shared memory."""
    x, y = e.operands[:2]
    left, right = e.param("dims")
    if left[0] >= 0 or -1 in (*left[1:], *right[1:]):
        return False
    m, k, n = x.shape[left[1]], x.shape[left[2]], y.shape[right[1]]
    return bool(m % 64 == 0 and n % 8 == 0 and n <= 256 and k * itemsize(x.dtype) % 32 == 0)


def _tiled(ref: Value, uses: Iterable[tuple[str, View]], read: Iterable[View]) -> Value | None:
    """The buffer with the widest swizzle that its shape and its slices allow; None where there is none."""
    rows, columns = ref.shape[-2:]
    if ref.dtype not in ITEM_BITS:  # which the plan refuses
        return None
    size = itemsize(ref.dtype)
    if rows % 8 or any(op not in ANY_LAYOUT or v.peer for op, v in uses):
        return None
    slices = [*read, *(v for op, v in uses if op in COPIES)]
    for swizzle in (128, 64, 32):
        chunk = swizzle // size
        if columns % chunk == 0 and all(
            _fits(v.dims[-2], 8, rows) and _fits(v.dims[-1], chunk, columns) for v in slices
        ):
            transforms = (TilingTransform((rows, chunk)), SwizzleTransform(swizzle))
            assert ref.space is not None
            return dataclasses.replace(ref, space=dataclasses.replace(ref.space, transforms=transforms))
    return None


def _fits(d: DimIndex, unit: int, extent: int) -> bool:
    """Whether a slice starts and ends at multiples of `unit`, as the whole dimension may."""
    if d.size is None or d.stride != 1:
        return False
    return d.size == extent or (
        d.size % unit == d.start.const % unit == 0 and all(f % unit == 0 for _, f in d.start.terms)
    )
