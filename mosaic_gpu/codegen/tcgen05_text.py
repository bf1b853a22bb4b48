"""C++ text of the loads and stores of tensor memory: one device function per shape and width.

A function moves ``N`` repeats of its shape between registers and tensor memory, for the 32 lanes that the executing
warp can reach; it is asynchronous, and ended by ``tcgen05_wait_load`` or ``tcgen05_wait_store``. ``halves``: a register holds
the lower halves of two neighbouring columns, so that it covers twice as many.
"""

from __future__ import annotations

from typing import Literal

from mosaic_gpu.errors import IllegalInstruction

Shape = Literal["32x32b", "16x64b", "16x128b", "16x256b"]
Direction = Literal["load", "store", "load_halves", "store_halves"]

REGISTERS_PER_REPEAT: dict[str, int] = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}
MOST_REGISTERS = 128


def repeats(shape: Shape) -> tuple[int, ...]:
    """The repeat counts that exist for a shape: powers of two, 128 registers at most."""
    return tuple(1 << power for power in range(8) if REGISTERS_PER_REPEAT[shape] << power <= MOST_REGISTERS)


def tcgen05_transfer_template(direction: Direction, shape: Shape, counts: tuple[int, ...] | None = None) -> str:
    """``tcgen05_load_<shape><N>(u32* r, u32 address)`` or ``tcgen05_store_<shape><N>(u32 address, const u32* r)``.

    ``counts`` are the values of N to write out, by default all that exist.
    """
    known = repeats(shape)
    counts = known if counts is None else counts
    missing = [count for count in counts if count not in known]
    if missing:
        raise IllegalInstruction(f"tcgen05 {direction} {shape} has no x{missing[0]}; it has {known}.")
    name = f"tcgen05_{direction}_{shape}"
    parameters = "u32* r, u32 address" if direction.startswith("load") else "u32 address, const u32* r"
    parts = [f"template <int N>\nDI void {name}({parameters});\n"]
    for count in counts:
        body = _statement(direction, shape, count)
        parts.append(f"template <>\nDI void {name}<{count}>({parameters}) {{\n{body}}}\n")
    return "".join(parts)


REDUCED = tuple(f"{which}_f32" for which in ("max", "min", "absmax", "absmin")) + (
    *("max_s32", "min_s32", "max_u32", "min_u32"),
)


def tcgen05_reduced_load_template(form: str) -> str:
    """``tcgen05_load_<form><N>(u32* r, u32* extremum, u32 address)``: a load of 32x32b that also reduces each lane's columns."""
    which, _, kind = form.partition("_")
    magnitude, modifiers = which.startswith("abs"), ".NaN" if kind == "f32" else ""
    operation = f"{which[-3:]}{'.abs' if magnitude else ''}{modifiers}.{kind}"
    name, parameters = f"tcgen05_load_{form}", "u32* r, u32* extremum, u32 address"
    parts = [f"template <int N>\nDI void {name}({parameters});\n"]
    for count in (2, 4, 8, 16, 32):
        names = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"=r"(r[{i}])' for i in range(count))
        text = f"tcgen05.ld.red.sync.aligned.32x32b.x{count}.{operation} {{{names}}}, %{count}, [%{count + 1}];"
        body = f'  asm volatile("{text}"\n               : {outputs}, "=r"(*extremum)\n               : "r"(address)\n'
        parts.append(f'template <>\nDI void {name}<{count}>({parameters}) {{\n{body}               : "memory");\n}}\n')
    return "".join(parts)


def _statement(direction: Direction, shape: Shape, count: int) -> str:
    registers = count * REGISTERS_PER_REPEAT[shape]
    halves = {"load_halves": ".pack::16b", "store_halves": ".unpack::16b"}.get(direction, "")
    if direction.startswith("load"):
        names = ", ".join(f"%{index}" for index in range(registers))
        outputs = ", ".join(f'"=r"(r[{index}])' for index in range(registers))
        instruction = f"tcgen05.ld.sync.aligned.{shape}.x{count}{halves}.b32 {{{names}}}, [%{registers}];"
        operands = f': {outputs}\n               : "r"(address)'
    else:
        names = ", ".join(f"%{index}" for index in range(1, registers + 1))
        inputs = ", ".join(f'"r"(r[{index}])' for index in range(registers))
        instruction = f"tcgen05.st.sync.aligned.{shape}.x{count}{halves}.b32 [%0], {{{names}}};"
        operands = f':\n               : "r"(address), {inputs}'
    return f'  asm volatile("{instruction}"\n               {operands}\n               : "memory");\n'
