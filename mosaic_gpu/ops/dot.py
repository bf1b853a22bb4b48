"""Products of register arrays: `jnp.dot`, `@`, `lax.dot_general`.

Operands in shared memory that ldmatrix can read are read where they lie; all others meet in the warpgroup's scratch, each line
of K contiguous, filled up with zeros to whole tiles.  Every warp takes its tiles of the result: `mma.sync` m16n8 (PTX ISA
9.7.14.5), 32 bytes of K at a time for 16-bit floats, tf32, float8 and 8-bit integers, accumulating in float32 or int32 (float16
and float8 also in float16, where that is asked for), 128 bytes (k16) for float64; for all other types one fma after the other.
The planner makes wgmma or tcgen05 of a product whose shape and operands they take
(`plan/products.py`); then none of this runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import arguments
from ..codegen.emit_dot import emit_by_elements, emit_by_tiles
from ..errors import UnsupportedCall
from ..layouts.registers import Digit, RegisterLayout
from ..layouts.shared import itemsize
from ..program import Equation, View
from .elementwise import FLOAT8, FLOATS, INT4, INTEGERS, numpy_dtype
from .registry import WARPGROUP, Op, gives, like, op

dot_general = op(
    "dot_general",
    pure=True,
    whole=True,
    dtypes=(*FLOATS, *FLOAT8, *INTEGERS, *INT4),  # int4 the front end makes int8
    instead="a product takes a whole warpgroup; do it outside of warp_map",
)
TILES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "tf32",
    "float64": "f64",
    **FLOAT8,
    "int8": "s8",
    "uint8": "u8",
}
# Operand types of `mma` and what each may accumulate in, the usual one first.
MMA_TYPES = {
    "float16": ("float32", "float16"),
    "bfloat16": ("float32",),
    "float64": ("float64",),
    "float8_e4m3fn": ("float32", "float16"),
    "float8_e5m2": ("float32", "float16"),
    "int8": ("int32",),
    "uint8": ("int32",),
    "int4": ("int32",),
    "uint4": ("int32",),
}
TOGETHER = (
    {"int8", "uint8"},
    {"int4", "uint4"},
    {"float8_e4m3fn", "float8_e5m2"},
)  # types that a product takes as they are, though they differ
# Parameter `precision`: float32 products of all 24 bits; sums in float16; of the bits in bytes, ones that both or just one have.
ACCURATE, HALF, AND, XOR = "exact", "half", "and", "xor"

bit_dot = Op("bit_dot")
"""`mma(bits=)`, in no table: the front end makes a dot_general of it, whose precision is the operation."""


@bit_dot.abstract
def _(a: Any, b: Any, *, bits: str) -> Any:
    return [((a.shape[0], b.shape[1]), "int32")]


@gives(like)
def mma(acc: Any, a: Any, b: Any, /, *, bits: str | None = None) -> Any:
    """acc + a @ b of register arrays, at once: (m, n) + (m, k) x (k, n).

    a, b: both float16, bfloat16 or float64, int8 or uint8 of either kind, int4 or uint4 of either kind (multiplied as 8 bits),
    float8_e4m3fn or float8_e5m2 of either kind.  acc: float32 (int32 of integers, float64 of float64); float16 and float8 are
    added in float16 where acc is that.  `mma.sync` (PTX ISA 9.7.14.5), which the GPU has not for float8: ptxas converts to
    float16, and the report says so.  It is
    `acc + jnp.dot(a, b, preferred_element_type=acc.dtype)` and lowers as that does (to add in float16, with `precision=`
    `DotAlgorithmPreset.F16_F16_F16`, of float8 `ANY_F8_ANY_F8_ANY`).  Raises TypeError for other shapes or types.

    bits: "and" or "xor": a and b are uint8, eight bits of K each, and acc (int32) gets the number of ones that a's row and b's
    column have both, or that just one of them has (`.b1`, `.and.popc` and `.xor.popc`).  "xor" ptxas makes of other instructions,
    and on sm_100a "and", too; the report says so.
    """
    from ..frontend.primitives import bind, dot_of, operand_type

    (m, n), x, y = (operand_type(acc).shape + (0, 0))[:2], operand_type(a), operand_type(b)
    wanted = operand_type(acc).dtype
    if bits not in (None, AND, XOR):
        arguments.refuse("mma", "bits", bits, '"and", "xor" or None')
    kinds = wanted in MMA_TYPES.get(x.dtype, ()) and (x.dtype == y.dtype or {x.dtype, y.dtype} in TOGETHER)
    if bits:
        kinds = (wanted, x.dtype, y.dtype) == ("int32", "uint8", "uint8")
    fits = len(x.shape) == 2 and (x.shape[0], n) == (m, y.shape[-1] if y.shape else 0) and y.shape == (x.shape[1], n)
    if not kinds or not fits:
        types = ", ".join(f"{t.dtype}{list(t.shape)}" for t in map(operand_type, (acc, a, b)))
        raise TypeError(
            f"mma: acc (m, n) of float32 (int32 for integers, float64 for float64; of float16 and float8 also float16), "
            f"a (m, k), b (k, n) of {', '.join(MMA_TYPES)}; with bits= acc int32, a and b uint8; not {types}"
        )
    if bits:
        return acc + bind(bit_dot, a, b, bits=bits)[0]
    return acc + dot_of(a, b, wanted)


@dataclasses.dataclass(frozen=True)
class Dot:
    """One product [batch] (m, k) x (k, n).

    left, right: which axis of an operand is batch, m (n), k; -1: it has none, and the extent is 1.
    kind: of the tensor core's instruction, as 'bf16_bf16', or '' where there is none; acc: what it accumulates in.
    """

    batch: int
    m: int
    n: int
    k: int
    left: tuple[int, int, int]
    right: tuple[int, int, int]
    kind: str
    acc: str
    size: int  # bytes of an element

    @property
    def padded(self) -> tuple[int, int, int]:
        """Extents (m, n, k) in whole tiles."""
        return -(-self.m // 16) * 16, -(-self.n // 8) * 8, -(-self.k // self.step) * self.step

    @property
    def step(self) -> int:
        """Elements of K that an instruction takes."""
        return 16 if self.size == 8 else 32 // self.size

    @property
    def instruction(self) -> str:
        """As the prelude names it."""
        return f"mma_{self.kind}{'_half' if self.acc == 'float16' else ''}"

    @property
    def pitch(self) -> int:
        """Bytes from one line of K to the next: an odd number of 16, so that eight lines lie in different banks; of float64,
        where half a warp loads 32 bytes of each of four lines at once, of 32."""
        return self.padded[2] * self.size + (32 if self.size == 8 else 16)

    @property
    def whole(self) -> bool:
        return self.padded == (self.m, self.n, self.k)

    @property
    def warps(self) -> tuple[int, int]:
        """Warps along m and along n."""
        rows = math.gcd(4, self.padded[0] // 16)
        return rows, math.gcd(4 // rows, self.padded[1] // 8)

    def layout(self) -> RegisterLayout:
        """Of the accumulators, (batch, m, n) in whole tiles (PTX ISA 9.7.14.5.8); for m % 64 == 0 that of wgmma."""
        m, n, _ = self.padded
        rows, columns = self.warps
        reg = (
            Digit(2, 2, 1),
            Digit(2, 1, 8),
            Digit(n // 8 // columns, 2, 8 * columns),
            Digit(m // 16 // rows, 1, 16 * rows),
            Digit(self.batch, 0, 1),
        )
        warp = (Digit(rows, 1, 16), Digit(columns, 2, 8), Digit(4 // rows // columns, None))
        return RegisterLayout("MMA", (self.batch, m, n), reg, (Digit(4, 2, 2), Digit(8, 1, 1)), warp)

    def result_layout(self) -> RegisterLayout | None:
        """The same for the result as it is; None where it is no whole number of tiles."""
        if self.padded[:2] != (self.m, self.n) or -1 in (self.left[1], self.right[1]):
            return None
        layout = self.layout()
        return layout if self.left[0] >= 0 else dataclasses.replace(layout.reduce(0), name="MMA")

    def is_there(self, layout: RegisterLayout | None) -> bool:
        """Whether the accumulators are the result in that layout; then they begin with what the sum starts from, else that is
        added once the result has been brought there."""
        own = self.result_layout()
        return own is not None and layout is not None and layout.same_map(own)

    def operand_bytes(self, e: Equation) -> tuple[int, int]:
        """Of each operand in the scratch, in lines of K; 0 of what is read where it lies."""
        m, n, _ = self.padded
        left, right = (
            0 if isinstance(o, View) else self.batch * lines * self.pitch
            for o, lines in zip(e.operands, (m, n), strict=False)
        )
        return left, right


def dot_of(e: Equation) -> Dot:
    """What a dot_general is.

    Operands: x, y (arrays, or views of shared memory that ldmatrix reads), and what the sum starts from, if it is not 0 (of the
    result's type, which is then that of the sum); params: dims (left and right as in `Dot`), precision ('', 'exact', 'half',
    'and', 'xor').
    """
    x, y = e.operands[:2]
    left, right = e.param("dims")

    def extent(o: Any, axis: int) -> int:
        return o.shape[axis] if axis >= 0 else 1

    on_tiles = x.dtype in TILES and not (x.dtype == "float32" and e.param("precision") == ACCURATE)
    kind = f"{TILES[x.dtype]}_{TILES[y.dtype]}" if on_tiles else ""
    if e.param("precision") in (AND, XOR):
        kind = f"b1_{e.param('precision')}"
    out = e.results[0].dtype
    if e.param("precision") == HALF:
        acc = "float16"
    elif out in FLOATS:
        acc = "float64" if out == "float64" else "float32"
    else:
        acc = out if itemsize(out) == 8 else "int32"
    if x.dtype in TILES and acc not in MMA_TYPES.get(x.dtype, ("float32",)):
        kind = ""
    size = itemsize(x.dtype)
    batch, m, k = (extent(x, a) for a in left)
    return Dot(batch, m, extent(y, right[1]), k, left, right, kind, acc, size)


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """A layout where a name of one is expected."""

    layout: RegisterLayout

    def of(self, shape: tuple[int, ...]) -> RegisterLayout:
        return self.layout


@dot_general.layouts
def _(solver: Any, e: Equation) -> None:
    d = dot_of(e)
    layout = d.result_layout() if d.kind else None
    solver.same(e, [*e.operands[2:], *e.results])
    if layout is not None:
        solver.prefer(e, e.results[0], _Fixed(layout))


@dot_general.plan(scopes=(WARPGROUP,))
def _(ctx: Any, e: Equation) -> Dot:
    x, d = e.operands[0], dot_of(e)
    if x.dtype not in (*FLOATS, *INTEGERS) and not d.kind:
        raise UnsupportedCall(
            f"dot_general of {x.dtype} to {e.results[0].dtype}: its sums are in float32 or float16; ask for one of these "
            "(preferred_element_type) and convert that, or convert the operands with astype first",
            e.line,
        )
    return d


@dot_general.scratch
def _(layouts: Mapping[int, RegisterLayout], e: Equation) -> int:
    d = dot_of(e)
    (x, y), result = e.operands[:2], e.results[0]
    if not d.kind:
        nbytes = [math.prod(o.shape) * itemsize(o.dtype) for o in (x, y)]
        return -(-nbytes[0] // 16) * 16 + nbytes[1]
    there = d.is_there(layouts.get(result.id))
    return max(sum(d.operand_bytes(e)), 0 if there else math.prod(result.shape) * itemsize(result.dtype))


@dot_general.emit(scopes=(WARPGROUP,))
def _(out: Any, step: Any) -> None:
    (emit_by_tiles if step.data.kind else emit_by_elements)(out, step.equation, step.data)


def to_tf32(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the 10 bits of tf32, ties away from zero, as `cvt.rna.tf32.f32` does."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = np.where(np.isfinite(x), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)
    result: np.ndarray = rounded.view(np.float32)
    return result


def cut_to_tf32(x: np.ndarray) -> np.ndarray:
    """float32 as the tensor core reads it where it lies: without the low 13 bits."""
    result: np.ndarray = (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return result


@dot_general.simulate
def _(sim: Any, step: Any) -> None:
    from ..simulator.contraction import sum_of_products
    from ..simulator.tensor_core import matmul, multiply_add

    e, d = step.equation, step.data
    result = e.results[0]
    operands = []
    for o, axes, middle in zip(e.operands[:2], (d.left, d.right), (d.m, d.n), strict=True):
        x = np.asarray(sim.load_view(o) if isinstance(o, View) else sim.read(o))
        x = np.transpose(x, [a for a in axes if a >= 0]).reshape(d.batch, middle, d.k)
        if d.kind.startswith("tf32"):
            x = cut_to_tf32(x) if isinstance(o, View) else to_tf32(x)
        if d.kind.startswith("b1"):
            x = np.unpackbits(x, axis=-1)
        wide = np.int64 if x.dtype.kind in "iu" else np.float32 if x.dtype.itemsize <= 2 else x.dtype
        operands.append(x.astype(wide))
    start = None
    if e.operands[2:]:
        start = np.broadcast_to(sim.read(e.operands[2]), result.shape).reshape(d.batch, d.m, d.n)
    starts: list[Any] = [None] * d.batch
    if start is not None and d.kind and d.acc in ("float16", "float64") and d.is_there(sim.role.layouts.get(result.id)):
        starts, start = list(start), None  # it is rounded with the sum
    with np.errstate(all="ignore"):
        if d.kind == "b1_xor":
            x, y = operands
            found = np.matmul(x, 1 - y.transpose(0, 2, 1)) + np.matmul(1 - x, y.transpose(0, 2, 1))
        elif d.kind and d.acc == "float16":
            found = np.stack([multiply_add(c, a, b, d.step, d.acc) for c, a, b in zip(starts, *operands, strict=True)])
        elif d.kind and d.acc == "float64":
            found = np.stack([sum_of_products(c, a, b) for c, a, b in zip(starts, *operands, strict=True)])
        elif d.acc == "float32" or d.kind:
            found = np.stack([matmul(a, b.T) for a, b in zip(*operands, strict=True)])
        else:
            found = np.matmul(operands[0], operands[1].transpose(0, 2, 1))
        total = found.reshape(result.shape).astype(numpy_dtype(result.dtype))
        sim.write(result, total if start is None else total + start.reshape(result.shape))
