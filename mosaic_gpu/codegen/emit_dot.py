"""Emission of products of register arrays: operands to the scratch in lines of K, then tiles of mma.sync or single fmas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..layouts.access import lines_of_product
from ..layouts.shared import itemsize, row_major
from ..program import Equation, Operand, View
from .text import C_TYPES, c_type

FMA = {"float": "fmaf", "double": "fma"}


def _strides(axes: tuple[int, int, int], values: tuple[int, int, int], rank: int) -> list[int]:
    """For each dimension of an operand the value of its part (batch, m or n, k)."""
    out = [0] * rank
    for axis, value in zip(axes, values, strict=True):
        if axis >= 0:
            out[axis] = value
    return out


def emit_by_tiles(out: Any, e: Equation, d: Any) -> None:
    """The product on tensor cores.  d: `ops.dot.Dot`."""
    x, y, *start = e.operands
    m, n, k = d.padded
    pitch, (base, nbytes) = d.pitch // d.size, d.operand_bytes(e)
    if base + nbytes:
        out.met()
    if not d.whole:
        total = (base + nbytes) // 4
        out.line(f"for (int i = here(tid); i < {total}; i += 128) ((u32*)(shared + {out.scratch}))[i] = 0;")
        out.met()
    for o, axes, lines, place in ((x, d.left, m, 0), (y, d.right, n, base)):
        if isinstance(o, View):
            continue
        with out.block():
            strides = _strides(axes, (lines * pitch, pitch, 1), len(o.shape))
            positions = out.positions("at", out.layout(o), strides)
            for i, p in enumerate(positions):
                value = out.element(o, i)
                out.write_place(o.dtype, p, f"__uint_as_float(to_tf32({value}))" if "tf32" in d.kind else value, place)
    if base + nbytes:
        out.met()
    result = e.results[0]
    there = d.is_there(out.layout(result))
    texts = _tiles(out, e, d, base, start if there else ())
    if there:
        out.assign_elements(result, texts)
        return
    out.met()
    to = (d.m * d.n, d.n, 1)
    with out.block():
        rows = out.coordinates("c", d.layout())
        for text, (_, i, j), at in zip(texts, rows, (_dot(r, to) for r in rows), strict=True):
            inside = [f"{i} < {d.m}"] * (m != d.m) + [f"{j} < {d.n}"] * (n != d.n)
            with out.block(f"if ({' && '.join(inside)})" if inside else ""):
                out.write_place(result.dtype, at, text)
    out.met()
    if not start:
        out.from_scratch(result, row_major(result.shape))
        return
    own = out.layout(result)
    places = out.positions(f"from{result.id}", own, row_major(result.shape)) if own is not None else ["0"]
    out.assign_elements(
        result, [f"{out.read_place(result.dtype, p)} + {out.element(start[0], i)}" for i, p in enumerate(places)]
    )


def _dot(coordinates: list[str], strides: tuple[int, ...]) -> str:
    return " + ".join(f"({c}) * {s}" for c, s in zip(coordinates, strides, strict=True))


def _tiles(out: Any, e: Equation, d: Any, base: int, start: Sequence[Operand]) -> list[str]:
    """Multiplies; the accumulators in the order of `d.layout()`'s registers.  start: what they start from, () for 0."""
    m, n, k = d.padded
    rows, columns = d.warps
    row_tiles, column_tiles = m // 16 // rows, n // 8 // columns
    name, dtype = f"dot{e.results[0].id}", e.results[0].dtype
    tiles, half, wide = row_tiles * column_tiles * d.batch, d.acc == "float16", d.size == 8
    per = 2 if half else 4  # registers of a tile's accumulators
    for i in range(tiles):
        first = [out.element(start[0], 4 * i + j) if start else "0" for j in range(4)]
        if half:
            first = [f"pack_f16x2({x}, {y})" if start else "0" for x, y in (first[:2], first[2:])]
        names = ", ".join(f"{name}_{per * i + j} = {x}" for j, x in enumerate(first))
        out.line(f"{'u32' if half else C_TYPES[d.acc]} {names};")
    second = 8 * columns  # from one tile of B to the next
    at_a, at_b = f"here(warp) % {rows} * 16", f"here(warp) / {rows} % {columns} * 8"
    if wide:
        left, right = _doubles(out, f"{name}_a", d, 0, at_a, 2), _doubles(out, f"{name}_b", d, base, at_b, 1)
    else:
        at_b += f" + lane / 16 * {second if column_tiles > 1 else 0}"
        left = _matrices(out, f"{name}_a", e.operands[0], d.left[2], d, 0, at_a, _A)
        right = _matrices(out, f"{name}_b", e.operands[1], d.right[2], d, base, at_b, _B)
    word, of_a, of_b, together = (
        ("double", 8, 4, 1) if wide else ("u32", 4, 2, 2)
    )  # together: tiles of B loaded at once
    for b in range(d.batch):
        with out.block(f"for (int k = 0; k < {k * d.size}; k += {d.step * d.size})"):
            for i in range(row_tiles):
                registers = [f"a{i}_{r}" for r in range(of_a)]
                out.line(f"{word} {', '.join(registers)}; {left(registers, b * m + i * 16 * rows)}")
            for j in range(0, column_tiles, together):
                some = min(together, column_tiles - j)
                registers = [f"b{j}_{r}" for r in range(of_b * some)]
                out.line(f"{word} {', '.join(registers)}; {right(registers, b * n + j * second)}")
                for t in range(some):
                    for i in range(row_tiles):
                        first_of = per * (j + t + column_tiles * (i + row_tiles * b))
                        accumulators = [f"{name}_{first_of + r}" for r in range(per)]
                        operands = [f"a{i}_{r}" for r in range(of_a)] + registers[of_b * t : of_b * (t + 1)]
                        out.line(f"{d.instruction}({', '.join(accumulators + operands)});")
    texts = [f"{name}_{i}" for i in range(per * tiles)]
    if any(isinstance(o, View) for o in e.operands):
        out.note_loads(texts[::per])
    if half:
        return [f"unpack_f16_{end}({t})" for t in texts for end in ("low", "high")]
    return texts if d.acc in (dtype, "float32") else [f"({c_type(dtype)}){t}" for t in texts]


# Which line (of 16, or of 8) and which 16 bytes of K a lane gives ldmatrix the address of: four 8x8 pieces of A are (line, K)
# (0, 0), (8, 0), (0, 1), (8, 1), two of B (0, 0), (0, 1); and the same with lines of M or N, which ldmatrix transposes.
_A = {"k": ("lane % 16", "lane / 16"), "mn": ("lane / 8 % 2 * 8", "lane % 8 + lane / 16 * 8")}
_B = {"k": ("lane % 8", "lane / 8 % 2"), "mn": ("0", "lane % 8 + lane / 8 % 2 * 8")}


def _doubles(out: Any, name: str, d: Any, base: int, first: str, halves: int) -> Callable[[Sequence[str], int], str]:
    """As `_matrices`, of float64, which no ldmatrix spreads so: a lane has line lane / 4 (of two halves, that plus 8, too), and
    of each four elements of K its own."""
    pitch = d.pitch // d.size
    place = f"(const double*)(shared + {out.scratch} + {base}) + ({first} + lane / 4) * {pitch} + lane % 4"
    out.line(f"const double* {name} = {place};")

    def loads(to: Sequence[str], at: int) -> str:
        places = [(at + 8 * (i % halves)) * pitch + 4 * (i // halves) for i in range(len(to))]
        return " ".join(f"{r} = {name}[{p} + k / {d.size}];" for r, p in zip(to, places, strict=True))

    return loads


def _matrices(
    out: Any, name: str, o: Operand, k_axis: int, d: Any, base: int, first: str, lanes: dict[str, tuple[str, str]]
) -> Callable[[Sequence[str], int], str]:
    """How tiles of an operand come into registers: (2 or 4 registers, line) -> a call of ldmatrix in a loop over k, in bytes.

    base: of the operand in the scratch; first: the line at which this warp's tiles start.
    """
    if not isinstance(o, View):
        line, k = lanes["k"]
        out.line(f"const u32 {name} = smem + {out.scratch} + {base} + ({first} + {line}) * {d.pitch} + {k} * 16;")
        return lambda to, at: f"ldmatrix_x{len(to)}({', '.join(to)}, {name} + {at * d.pitch} + k);"
    buffer = out.plan.buffers[o.ref.id]
    how = lines_of_product(o, buffer.layout, k_axis)
    line, k = lanes[str(how)]
    out.line(f"const int {name}_line = {first} + {line}, {name}_k = ({k}) * {16 // d.size if how == 'k' else 1};")

    def call(to: Sequence[str], at: int) -> str:
        coordinates = [out.affine(dim.start) for dim in o.dims]
        for axis, text in ((1 - k_axis, f"{name}_line + {at}"), (k_axis, f"{name}_k + k / {d.size}")):
            dim = o.kept[axis]
            coordinates[dim] = text if coordinates[dim] == "0" else f"{text} + {coordinates[dim]}"
        place = out.shared_offset(buffer.layout, buffer.offset, coordinates)
        return f"ldmatrix_x{len(to)}{'_trans' if how == 'mn' else ''}({', '.join(to)}, smem + {place});"

    return call


def emit_by_elements(out: Any, e: Equation, d: Any) -> None:
    """Every thread computes the elements of the result that it holds."""
    x, y, *first = e.operands
    result = e.results[0]
    start = -(-math.prod(x.shape) * itemsize(x.dtype) // 16) * 16
    out.met()
    for o, base in ((x, 0), (y, start)):
        with out.block():
            out.to_scratch(o, out.positions("at", out.layout(o), row_major(o.shape)), base)
    out.met()
    layout, name = out.layout(result), f"dot{result.id}"
    coordinates = out.coordinates(f"{name}_c", layout) if layout is not None else [[]]
    kind = {"float32": "float", "float64": "double"}.get(d.acc, "u64" if itemsize(d.acc) == 8 else "u32")
    for i, c in enumerate(coordinates):
        places = [_place(d, o, axes, c, side) for side, (o, axes) in enumerate(((x, d.left), (y, d.right)))]
        zero = f"({kind}){out.element(first[0], i)}" if first else "0"
        out.line(f"{kind} {name}_{i} = {zero}; const int {name}_x{i} = {places[0]}, {name}_y{i} = {places[1]};")
    steps = [row_major(o.shape)[axes[2]] for o, axes in ((x, d.left), (y, d.right))]
    with out.block(f"for (int k = 0; k < {d.k}; ++k)"):
        for i in range(len(coordinates)):
            a = out.read_place(x.dtype, f"{name}_x{i} + k * {steps[0]}")
            b = out.read_place(y.dtype, f"{name}_y{i} + k * {steps[1]}", start)
            if kind in FMA:
                out.line(f"{name}_{i} = {FMA[kind]}(({kind}){a}, ({kind}){b}, {name}_{i});")
            else:
                out.line(f"{name}_{i} += ({kind}){a} * ({kind}){b};")
    out.assign_elements(result, [f"({c_type(result.dtype)}){name}_{i}" for i in range(len(coordinates))])


def _place(d: Any, o: Operand, axes: tuple[int, int, int], coordinates: list[str], side: int) -> str:
    """Where the line of K of an operand starts that an element of the result takes."""
    strides, terms = row_major(o.shape), []
    names = ["batch"] * (d.left[0] >= 0) + ["left"] * (d.left[1] >= 0) + ["right"] * (d.right[1] >= 0)
    for name, axis in (("batch", axes[0]), ("right" if side else "left", axes[1])):
        if axis >= 0:
            terms.append(f"({coordinates[names.index(name)]}) * {strides[axis]}")
    return " + ".join(terms) or "0"
