"""Evaluates the integer arithmetic of straight-line PTX, to see the operands of its tensor-core instructions.

Enough for the kernels of cute_kernels.py: no branch of theirs goes back, and those forward skip what unelected threads
do not do, so every line is executed once, as by the elected thread.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

BITS = {"rd": 64, "r": 32, "rs": 16}


@dataclasses.dataclass(frozen=True)
class Use:
    """An instruction: its name, and its operands: a number, a list of them, or the text of what is not known."""

    name: str
    operands: tuple[Any, ...]


@dataclasses.dataclass
class Evaluator:
    """shared: byte address where dynamic shared memory starts; thread: threadIdx.x. `uses`: what matched, in order."""

    shared: int
    thread: int = 0
    uses: list[Use] = dataclasses.field(default_factory=list)
    registers: dict[str, int | None] = dataclasses.field(default_factory=dict)

    def run(self, text: str, wanted: str) -> list[Use]:
        """The instructions of a kernel whose names match the pattern `wanted`."""
        body = re.sub(r"//[^\n]*", "", text[text.index(".entry") :])
        body = body[body.index("{") + 1 :]
        for statement in re.split(r";|(?m:^\s*[{}]\s*$)|\$\w+:", body):
            words = re.sub(r"^@!?%?\w+ ", "", " ".join(statement.split())).split(" ", 1)
            if len(words) != 2 or words[0].startswith("."):
                continue
            name, operands = words[0], _operands(words[1])
            if re.match(wanted, name):
                self.uses.append(Use(name, tuple(self.value(o) for o in operands)))
            else:
                self.execute(name, operands)
        return self.uses

    def value(self, operand: str) -> Any:
        """A number (addresses: their sum), a list for {…}, the text where it is not known."""
        if operand[0] in "{[":
            inner = [self.value(o) for o in _operands(operand[1:-1])]
            return inner if operand[0] == "{" else inner[0]
        if "+" in operand[1:]:
            base, offset = (self.value(o) for o in operand.split("+"))
            return base + offset if isinstance(base, int) and isinstance(offset, int) else operand
        if operand == "__dynamic_shmem__0":
            return self.shared
        if operand == "%tid.x":
            return self.thread
        try:
            return int(operand, 0)
        except ValueError:
            known = self.registers.get(operand)
            return operand if known is None else known

    def execute(self, name: str, operands: list[str]) -> None:
        """One statement; a register that it sets in a way not handled here becomes unknown."""
        opcode, suffix = name.split(".")[0], name.split(".")[-1]
        destination, sources = operands[0], [self.value(o) for o in operands[1:]]
        if destination.startswith("{"):  # unpack
            for i, part in enumerate(_operands(destination[1:-1])):
                whole = sources[0] if opcode == "mov" and len(sources) == 1 and isinstance(sources[0], int) else None
                self._set(part, None if whole is None else whole >> (i * _bits(part)))
            return
        result = None
        if opcode == "mov" and isinstance(sources[0], list):  # pack
            if all(isinstance(s, int) for s in sources[0]):
                width = int(suffix[1:]) // len(sources[0])
                result = sum((s & ((1 << width) - 1)) << (i * width) for i, s in enumerate(sources[0]))
        elif sources and all(isinstance(s, int) for s in sources[: 1 if opcode == "shfl" else None]):
            result = _compute(opcode, suffix, sources)
        self._set(destination, result)

    def _set(self, register: str, value: int | None) -> None:
        if register.startswith("%") and "|" not in register:
            bits = _bits(register)
            self.registers[register] = None if value is None or not bits else value & ((1 << bits) - 1)


def _compute(opcode: str, suffix: str, s: list[int]) -> int | None:
    if opcode in ("mov", "cvt", "shfl", "cvta"):  # shfl: a broadcast of what is the same in all lanes
        return s[0]
    if opcode == "shr" and suffix.startswith("s"):
        half = 1 << (int(suffix[1:]) - 1)
        return ((s[0] ^ half) - half) >> s[1]
    if opcode == "mad":
        return s[0] * s[1] + s[2]
    binary = {
        "add": int.__add__,
        "sub": int.__sub__,
        "mul": int.__mul__,
        "and": int.__and__,
        "or": int.__or__,
        "xor": int.__xor__,
        "shl": int.__lshift__,
        "shr": int.__rshift__,
    }
    return binary[opcode](s[0], s[1]) if opcode in binary else None


def _bits(register: str) -> int:
    found = re.match(r"%([a-z]+)\d", register)
    return BITS.get(found[1], 0) if found else 0


def _operands(text: str) -> list[str]:
    """Split at the commas outside braces and brackets."""
    return [o.strip() for o in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text) if o.strip()]
