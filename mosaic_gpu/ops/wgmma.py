"""Warpgroup matrix multiply-accumulate (PTX ISA 9.7.15, wgmma.mma_async).

Each `wgmma` is one group: fence where it needs one, an m64nNkK per 64 rows and per 32 bytes of K, commit.  The planner puts
the waits that reading an accumulator needs; `wgmma_wait` places them where the user wants them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .. import arguments
from ..errors import IllegalInstruction
from ..layouts.operands import SharedOperand, shared_operand
from ..layouts.registers import Layout
from ..layouts.shared import itemsize
from ..program import Equation, Value, View, named_shape
from .registry import SM90, WARPGROUP, op

wgmma_p = op("wgmma", instead="wgmma exists on sm_90a, for whole warpgroups; on sm_100a use tcgen05_mma")
wgmma_wait_p = op("wgmma_wait", instead="wgmma exists on sm_90a; tcgen05 work is waited for through barriers")
KINDS = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "uint8": "u8",
    "float32": "tf32",
    "b1": "b1",  # eight in each uint8
}
# A type -> (B types, accumulator types): the rows of the table in PTX ISA 9.7.15.2
TYPES = {
    "float16": (("float16",), ("float32", "float16")),
    "bfloat16": (("bfloat16",), ("float32",)),
    "float32": (("float32",), ("float32",)),
    "float8_e4m3fn": (("float8_e4m3fn", "float8_e5m2"), ("float32", "float16")),
    "float8_e5m2": (("float8_e4m3fn", "float8_e5m2"), ("float32", "float16")),
    "int8": (("int8", "uint8"), ("int32",)),
    "uint8": (("int8", "uint8"), ("int32",)),
    "b1": (("b1",), ("int32",)),
}
# In which layout an array is A, by bytes of its elements.
FRAGMENTS = {1: Layout.WGMMA_8BIT, 2: Layout.WGMMA, 4: Layout.WGMMA_TF32}


@dataclasses.dataclass(frozen=True)
class WgmmaPlan:
    """acc: value id of the accumulator; m, n, k: of the whole product; a: shared operand, or the value id of a register
    tile; init: 'zero' (first k-step overwrites), 'add', or 'dynamic' (a run-time flag says which, and is then cleared);
    fence: whether one orders what was done to registers before it (`plan.fences`)."""

    acc: int
    m: int
    n: int
    k: int
    a: SharedOperand | int
    b: SharedOperand
    a_type: str
    b_type: str
    acc_type: str
    init: str
    fence: bool

    @property
    def k_step(self) -> int:
        return 32 // self.b.itemsize


def wgmma(acc: Any, a: Any, b: Any, *, bits: str | None = None) -> None:
    """acc += a @ b, asynchronously.

    acc: ACC Ref (m, n), float32 (also float16 for float16 and fp8 operands, int32 for int8); m a multiple of 64, n of 8 up
    to 256 (of integers and bits above 32 of 16).
    a: (m, k) SMEM Ref or register array, in Layout.WGMMA of 16-bit elements, WGMMA_8BIT of 8-bit ones, WGMMA_TF32 of float32;
    b: (k, n) SMEM Ref.  k is a multiple of 32 bytes.  Transposed views select the major-ness.  float32 is cut off to tf32.
    bits: "and": a and b are uint8, eight bits of K each, and acc (int32) gets the number of ones that a's row and b's column have
    in common (`.b1`, `.and.popc`; there is no other operation).
    The operands must not change until `wgmma_wait`.  Raises IllegalInstruction with the row of the table that is missing.
    """
    from ..frontend.primitives import bind

    if bits not in (None, "and"):
        arguments.refuse("wgmma", "bits", bits, '"and" or None (of "xor" there is no wgmma: plgpu.mma has it)')
    bind(wgmma_p, acc, a, b, **({"bits": bits} if bits else {}))


@wgmma_p.abstract
def _(acc: Any, a: Any, b: Any, *, bits: str | None = None) -> Any:
    arguments.memory("wgmma", "acc", acc, "acc")
    arguments.memory("wgmma", "a", a, "smem", or_array=True)
    arguments.memory("wgmma", "b", b, "smem")
    if bits and (a.dtype, b.dtype) != ("uint8", "uint8"):
        raise TypeError(f"wgmma(bits=): a and b are uint8, eight bits each; not {a.dtype} and {b.dtype}")
    return ()


@wgmma_p.layouts
def _(solver: Any, e: Equation) -> None:
    acc, a, b = e.operands
    # Here, where the Refs' names are known.
    fits = len(acc.shape) == len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
    if not fits or acc.shape != (a.shape[0], b.shape[1]):
        acc_text, a_text, b_text = map(named_shape, e.operands)
        raise IllegalInstruction(f"wgmma: acc {acc_text} += a {a_text} @ b {b_text}: shapes do not fit", e.line)
    if isinstance(a, Value):
        solver.pin(e, a, FRAGMENTS.get(itemsize(a.dtype), Layout.WGMMA))


@wgmma_p.plan((SM90,), (WARPGROUP,))
def _(ctx: Any, e: Equation) -> WgmmaPlan:
    acc, a, b = e.operands
    assert isinstance(acc, View) and isinstance(b, View) and not isinstance(a, int)
    a_type, b_type = ("b1", "b1") if e.param("bits", None) else (a.dtype, b.dtype)
    b_types, acc_types = TYPES.get(a_type, ((), ()))
    if b_type not in b_types or acc.dtype not in acc_types:
        rest = f"with A {a_type}, B may be {b_types} and the accumulator {acc_types}"
        if not b_types:
            rest = f"it multiplies {', '.join(t for t in TYPES if t != 'b1')}: convert A with astype first"
        raise IllegalInstruction(f"wgmma has no {a_type} x {b_type} -> {acc.dtype}; {rest}", e.line)
    m, n = acc.shape
    if acc.shape != acc.ref.shape:
        raise IllegalInstruction(f"wgmma into a slice of an accumulator ({acc}): use one ACC per slice", e.line)
    if m % 64:
        raise IllegalInstruction(f"wgmma: m = {m} rows is not a multiple of 64", e.line)
    integer = a.dtype in ("int8", "uint8")
    if n % 8 or not 8 <= n <= 256 or (integer and n > 32 and n % 16):
        raise IllegalInstruction(
            f"wgmma: n = {n}; legal are 8, 16, ..., 256 (integers and bits above 32: multiples of 16)", e.line
        )
    b_operand = shared_operand(b, ctx.buffers[b.ref.id].layout, 0, "B", e.line)
    if isinstance(a, View):
        a_operand: SharedOperand | int = shared_operand(a, ctx.buffers[a.ref.id].layout, 1, "A", e.line)
        assert isinstance(a_operand, SharedOperand)
    else:
        assert isinstance(a, Value)
        a_operand = a.id
    return WgmmaPlan(
        acc.ref.id,
        m,
        n,
        a.shape[1],
        a_operand,
        b_operand,
        a_type,
        b_type,
        acc.dtype,
        e.param("init", "add"),
        e.param("fence", True),
    )


@wgmma_p.emit((SM90,))
def _(out: Any, step: Any) -> None:
    out.wgmma(step.data)


@wgmma_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.wgmma(step.data)


def wgmma_wait(n: int, *, after: Any = None, first: bool = False) -> None:
    """Wait until at most `n` of this warpgroup's wgmma groups are in flight (groups end in order).

    after: a float32 array that was computed under the products that are waited for, and must be computed by then.  ptxas
    moves a wait ahead of arithmetic that does not need it, and what was meant to run under a product then runs after it;
    this ties the wait to the values, at the cost of three instructions.  A maximum or a sum of many elements is the best one
    to name: it has few registers and depends on all of them.  It changes no result.
    first: only each thread's first element must be there.  Of the maxima of a WGMMA tile, that is one of its two rows: what
    is made of it can run beside the maximum of the other.
    """
    from ..frontend.primitives import bind

    n = arguments.whole("wgmma_wait", "n", n, 0, 63)
    first = arguments.flag("wgmma_wait", "first", first)
    if first and after is None:
        raise ValueError("wgmma_wait(first=True): the first elements of which array? Give after=, too")
    bind(wgmma_wait_p, after, n=n, first=first)


@wgmma_wait_p.abstract
def _(after: Any = None, *, n: int, first: bool) -> Any:
    if after is not None and (after.space is not None or after.dtype != "float32"):
        raise TypeError(f"wgmma_wait(after=): a float32 array, not {'a Ref' if after.space else after.dtype}")
    return ()


@wgmma_wait_p.emit((SM90,))
def _(out: Any, step: Any) -> None:
    for after in step.equation.operands:
        out.tie(after, step.equation.param("first"))
    out.line(f"wgmma_wait<{step.equation.param('n')}>();")


@wgmma_wait_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    yield from sim.wgmma_wait(step.equation.param("n"))


acc_zero = op("acc_zero")
"""Zeros into an accumulator; the planner's, where something reads it before the first product.  dynamic: only if none has run."""


@acc_zero.emit((SM90,))
def _(out: Any, step: Any) -> None:
    out.zero_accumulator(step.equation.operands[0].ref, step.equation.param("dynamic"))


@acc_zero.simulate
def _(sim: Any, step: Any) -> None:
    sim.zero_accumulator(step.equation.operands[0].ref, step.equation.param("dynamic"))
