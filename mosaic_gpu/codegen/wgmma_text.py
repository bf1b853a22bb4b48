"""C++ text of Hopper's warpgroup matrix products: one device function per variant of ``wgmma.mma_async``.

The asynchronous product reads its operands and writes its accumulator until a ``wgmma_wait`` ends it; which registers
may be touched meanwhile is the planner's affair. Fence, commit and wait are in the prelude (``wgmma.cuh``).
"""

from __future__ import annotations

from typing import Literal

from mosaic_gpu.errors import IllegalInstruction

OperandKind = Literal["f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8"]
AccumulatorKind = Literal["f32", "f16", "s32"]
Init = bool | Literal["dynamic"]

DEPTH: dict[str, int] = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
_ACCUMULATORS: dict[str, tuple[str, ...]] = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "e5m2": ("f16", "f32"),
    "s8": ("s32",),
    "u8": ("s32",),
}
_FAMILY = {"e4m3": "fp8", "e5m2": "fp8", "s8": "int8", "u8": "int8"}
_C_TYPE = {"f32": ("float", "f"), "f16": ("u32", "r"), "s32": ("int", "r")}  # f16: two to a register


def accumulator_registers(n: int, d_kind: AccumulatorKind) -> int:
    """Registers of one thread that hold the 64 x n accumulator."""
    return n // 4 if d_kind == "f16" else n // 2


def wgmma_function(
    n: int,
    a_kind: OperandKind,
    b_kind: OperandKind,
    d_kind: AccumulatorKind,
    a_in_registers: bool,
    a_mn_major: bool,
    b_mn_major: bool,
    init: Init,
) -> tuple[str, str]:
    """Name and text of the device function for one product D (+)= A B of shape 64 x n x (32 bytes).

    Its parameters are ``(d, a, b_desc)``: ``d`` a pointer to the accumulator's registers (``float*``; ``int*`` for s32;
    ``u32*``, two values each, for f16), ``a`` a descriptor or four registers ``a0 … a3``. ``init`` True overwrites D
    (which then need not be set before), False adds to it, and "dynamic" appends a parameter ``int scale_d`` that is 0
    to overwrite.
    """
    _refuse_illegal(n, a_kind, b_kind, d_kind, a_in_registers, a_mn_major, b_mn_major)
    count = accumulator_registers(n, d_kind)
    c_type, constraint = _C_TYPE[d_kind]

    operands = [f"{{{_numbered(0, count)}}}"]
    inputs: list[tuple[str, str]] = []  # constraint, C++ name
    parameters = [f"{c_type}* d"]
    if a_in_registers:
        inputs += [("r", f"a{index}") for index in range(4)]
        operands.append(f"{{{_numbered(count, 4)}}}")
        parameters += [f"u32 a{index}" for index in range(4)]
    else:
        inputs.append(("l", "a_desc"))
        operands.append(f"%{count}")
        parameters.append("u64 a_desc")
    inputs.append(("l", "b_desc"))
    operands.append(f"%{count + len(inputs) - 1}")
    parameters.append("u64 b_desc")
    if init == "dynamic":
        inputs.append(("r", "scale_d"))
        operands.append("accumulate")
        parameters.append("int scale_d")
    else:
        operands.append("0" if init else "1")
    if a_kind not in ("s8", "u8"):
        operands += ["1", "1"]  # neither A nor B is negated
    if a_kind in ("f16", "bf16"):
        operands += [str(int(a_mn_major))] * (not a_in_registers) + [str(int(b_mn_major))]

    shape = f"m64n{n}k{DEPTH[a_kind]}"
    instruction = f"wgmma.mma_async.sync.aligned.{shape}.{d_kind}.{a_kind}.{b_kind} {', '.join(operands)};"
    if init == "dynamic":
        test = f"setp.ne.b32 accumulate, %{count + len(inputs) - 1}, 0;"
        instruction = f"{{\\n.reg .pred accumulate;\\n{test}\\n{instruction}\\n}}"
    access = "=" if init is True else "+"
    outputs = ", ".join(f'"{access}{constraint}"(d[{index}])' for index in range(count))
    given = ", ".join(f'"{letter}"({name})' for letter, name in inputs)
    majors = ("_ta" if a_mn_major else "") + ("_tb" if b_mn_major else "")
    ending = {True: "set", False: "add", "dynamic": "choose"}[init]
    source = "rs" if a_in_registers else "ss"
    name = f"wgmma_{shape}_{d_kind}_{a_kind}_{b_kind}_{source}{majors}_{ending}"
    text = (
        f"DI void {name}({', '.join(parameters)}) {{\n"
        f'  asm volatile("{instruction}"\n'
        f"               : {outputs}\n"
        f"               : {given});\n"
        "}\n"
    )
    return name, text


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
