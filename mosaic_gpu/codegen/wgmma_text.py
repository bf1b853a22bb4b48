"""C++ text of Hopper's warpgroup matrix products: an asm statement for each variant of ``wgmma.mma_async`` and chain of it.

The asynchronous product reads its operands and writes its accumulator until a ``wgmma_wait`` ends it; which registers
may be touched meanwhile is the planner's affair. Fence, commit and wait are in the prelude (``wgmma.cuh``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from mosaic_gpu.errors import IllegalInstruction

OperandKind = Literal["f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "b1"]
AccumulatorKind = Literal["f32", "f16", "s32"]
Init = bool | Literal["dynamic"]

DEPTH: dict[str, int] = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "b1": 256}
_ACCUMULATORS: dict[str, tuple[str, ...]] = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "e5m2": ("f16", "f32"),
    "s8": ("s32",),
    "u8": ("s32",),
    "b1": ("s32",),
}
_FAMILY = {"e4m3": "fp8", "e5m2": "fp8", "s8": "int8", "u8": "int8"}
_C_TYPE = {"f32": ("float", "f"), "f16": ("u32", "r"), "s32": ("int", "r")}  # f16: two to a register


def accumulator_registers(n: int, d_kind: AccumulatorKind) -> int:
    """Registers of one thread that hold the 64 x n accumulator."""
    return n // 4 if d_kind == "f16" else n // 2


@dataclasses.dataclass(frozen=True)
class Chain:
    """The instructions of one product, step by step along K, in one asm statement.

    a, b: what each step adds to the low word of the operand's descriptor, in its units (a: empty where A is in registers);
    a_high, b_high: the high words.  Each statement has the whole accumulator as operands, which costs the compiler more than
    the instructions do: in one statement it takes a tenth less time for the same machine code.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    a_high: int
    b_high: int


ONE_STEP = Chain((0,), (0,), 0, 0)


@dataclasses.dataclass(frozen=True)
class Product:
    """An asm statement for D (+)= A B of shape 64 x n x (32 bytes), and those behind it in a chain.

    registers: of the accumulator, of C++ type `c_type`.  inputs: the low word of A's descriptor, or four registers for each step,
    the low word of B's, and with ``init`` "dynamic" an int that is 0 to overwrite D.  name: lacks what tells chains of other
    offsets apart.
    """

    name: str
    instructions: str
    c_type: str
    constraint: str
    registers: int
    inputs: tuple[str, ...]

    def statement(self, instructions: str, d: Sequence[str], inputs: Sequence[str]) -> str:
        """In C++: with the instructions (or a macro for them), the accumulator's registers and the inputs as written there."""
        assert len(d) == self.registers and len(inputs) == len(self.inputs), self
        outputs = ", ".join([f'"{self.constraint}"({x})' for x in d])
        given = ", ".join([f'"r"({x})' for x in inputs])
        return f"asm volatile({instructions} : {outputs} : {given});"


def wgmma_product(
    n: int,
    a_kind: OperandKind,
    b_kind: OperandKind,
    d_kind: AccumulatorKind,
    a_in_registers: bool,
    a_mn_major: bool,
    b_mn_major: bool,
    init: Init,
    chain: Chain = ONE_STEP,
) -> Product:
    """Registers are float for f32, int for s32 and u32, two values each, for f16.

    ``init`` True overwrites D in the first step (which then need not be set before), False adds to it, and "dynamic" decides when
    it runs.
    """
    _refuse_illegal(n, a_kind, b_kind, d_kind, a_in_registers, a_mn_major, b_mn_major)
    count = accumulator_registers(n, d_kind)
    c_type, constraint = _C_TYPE[d_kind]

    steps = len(chain.b)
    inputs = [f"a{index}" for index in range(4 * steps)] if a_in_registers else ["a_low"]
    at_b = count + len(inputs)
    inputs += ["b_low"] + ["scale_d"] * (init == "dynamic")

    flags = ["1", "1"] * (a_kind not in ("s8", "u8", "b1"))  # neither A nor B is negated
    if a_kind in ("f16", "bf16"):
        flags += [str(int(a_mn_major))] * (not a_in_registers) + [str(int(b_mn_major))]
    shape = f"m64n{n}k{DEPTH[a_kind]}"
    lines = [".reg .b32 low;", ".reg .b64 a, b;"]
    if init == "dynamic":
        lines += [".reg .pred accumulate;", f"setp.ne.b32 accumulate, %{at_b + 1}, 0;"]
    for step in range(steps):
        accumulate = "1" if step else {"dynamic": "accumulate", True: "0", False: "1"}[init]
        if not a_in_registers:
            lines += _word("a", f"%{count}", chain.a[step], chain.a_high)
        lines += _word("b", f"%{at_b}", chain.b[step], chain.b_high)
        source = f"{{{_numbered(count + 4 * step, 4)}}}" if a_in_registers else "a"
        operands = [f"{{{_numbered(0, count)}}}", source, "b", accumulate, *flags]
        types = f"{d_kind}.{a_kind}.{b_kind}" + ".and.popc" * (a_kind == "b1")
        lines.append(f"wgmma.mma_async.sync.aligned.{shape}.{types} {', '.join(operands)};")
    instructions = '"' + "\\n".join(["{", *lines, "}"]) + '"'
    access = "=&" if init is True else "+&"  # a step must not overwrite what the next one reads
    majors = ("_ta" if a_mn_major else "") + ("_tb" if b_mn_major else "")
    ending = {True: "set", False: "add", "dynamic": "choose"}[init]
    place = "rs" if a_in_registers else "ss"
    name = f"wgmma_{shape}_{d_kind}_{a_kind}_{b_kind}_{place}{majors}_{ending}" + (f"_x{steps}" if steps > 1 else "")
    return Product(name, instructions, c_type, access + constraint, count, tuple(inputs))


def _word(name: str, low: str, offset: int, high: int) -> list[str]:
    """A descriptor in PTX: its low word moved on, and its high word."""
    moved = [f"add.u32 low, {low}, {offset};"] if offset else []
    return [*moved, f"mov.b64 {name}, {{{'low' if offset else low}, {high}}};"]


def _numbered(first: int, count: int) -> str:
    return ", ".join(f"%{index}" for index in range(first, first + count))


def _refuse_illegal(
    n: int, a_kind: str, b_kind: str, d_kind: str, a_in_registers: bool, a_mn_major: bool, b_mn_major: bool
) -> None:
    what = f"wgmma {d_kind} += {a_kind} x {b_kind} with n = {n}"
    if a_kind not in DEPTH or b_kind not in DEPTH:
        raise IllegalInstruction(f"{what}: operands are one of {', '.join(DEPTH)}.")
    if _FAMILY.get(a_kind, a_kind) != _FAMILY.get(b_kind, b_kind):
        raise IllegalInstruction(f"{what}: the two operand types cannot be mixed.")
    if d_kind not in _ACCUMULATORS[a_kind]:
        raise IllegalInstruction(f"{what}: the accumulator must be {' or '.join(_ACCUMULATORS[a_kind])}.")
    if not 8 <= n <= 256 or n % 8:
        raise IllegalInstruction(f"{what}: n is a multiple of 8 from 8 to 256.")
    if d_kind == "s32" and n > 32 and n % 16:
        raise IllegalInstruction(f"{what}: for integers n is 8, 16, 24, 32, or a multiple of 16.")
    if (a_mn_major or b_mn_major) and a_kind not in ("f16", "bf16"):
        raise IllegalInstruction(f"{what}: only 16-bit operands may be MN-major.")
    if a_in_registers and a_mn_major:
        raise IllegalInstruction(f"{what}: an A in registers has no MN-major form.")
