"""What ptxas says while it assembles a kernel: resources of each function, and messages that mean lost speed.

ptxas never refuses a badly ordered wgmma or an impossible ``setmaxnreg``: it serialises, injects waits, or drops the
request, and says so in one line of the log. All of these carry a code C75xx; those that are known get an explanation,
the others are kept word for word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from mosaic_gpu.codegen.nvrtc import locate

Kind = Literal["setmaxnreg", "serialized", "injected", "other"]

_SETMAXNREG = "The register budgets were dropped: every thread keeps the registers it was launched with. "
_SERIALIZED = "Every wgmma of the function is now issued and waited for one at a time. "
EXPLANATIONS: dict[str, tuple[Kind, str]] = {
    "C7504": ("setmaxnreg", _SETMAXNREG + "The cubin was assembled as relocatable code (-rdc, nvJitLink)."),
    "C7505": ("setmaxnreg", _SETMAXNREG + "The kernel was compiled for debugging (-G)."),
    "C7506": ("setmaxnreg", _SETMAXNREG + "The kernel calls a function that is not in the same source."),
    "C7507": (
        "setmaxnreg",
        _SETMAXNREG + "A budget is too small for the code behind it; give that role more, or less to do.",
    ),
    "C7508": (
        "setmaxnreg",
        _SETMAXNREG + "ptxas must know the registers at launch: __launch_bounds__ needs its second argument (1).",
    ),
    "C7509": ("serialized", _SERIALIZED + "The function calls code outside this source (-rdc, -G)."),
    "C7510": (
        "serialized",
        _SERIALIZED + "A product is in flight across a function call (also printf, assert). Inline the function or "
        "wait before the call.",
    ),
    "C7511": (
        "serialized",
        _SERIALIZED + "The registers do not suffice for what is in flight together: an accumulator or an A operand "
        "would have to be copied. Shrink the tile, or wait before the tile is written.",
    ),
    "C7512": (
        "serialized",
        _SERIALIZED + "The function has too few registers. Shrink the tile, raise the role's budget, or use fewer "
        "threads.",
    ),
    "C7513": (
        "serialized",
        _SERIALIZED + "An A operand in registers is written while a product that reads it may be in flight; a copy at "
        "the end of a loop (a loop carry) does this too. Write it below the wait, or use two tiles in turn.",
    ),
    "C7514": (
        "serialized",
        _SERIALIZED + "An accumulator is read or rescaled while a product that writes it may be in flight, on some "
        "path to that point. Wait on every path first.",
    ),
    "C7515": (
        "serialized",
        _SERIALIZED + "An accumulator is set (filled, copied) between a fence and the product that uses it. Let the "
        "first product overwrite it (scale-d 0), or set it before the fence and outside the loop.",
    ),
    "C7516": ("serialized", _SERIALIZED + "Fence, product, commit and wait are not in an order that ptxas can follow."),
    "C7517": (
        "injected",
        "An accumulator is used where its product may still be in flight; ptxas put a wait for it there.",
    ),
    "C7518": (
        "serialized",
        _SERIALIZED + "A wait would be needed on a path that only some threads take: the products in flight differ "
        "between paths that meet. Wait, or issue, on all of them alike, under conditions uniform over the warpgroup.",
    ),
    "C7519": (
        "serialized",
        _SERIALIZED + "A fence would be needed on a path that only some threads take: a product lies in another block "
        "of code than its fence. Fence right before the product, under conditions uniform over the warpgroup.",
    ),
}
_BY_TEXT: tuple[tuple[str, Kind], ...] = (
    ("'setmaxnreg' ignored", "setmaxnreg"),
    ("are serialized due to", "serialized"),
    ("is injected in", "injected"),
)


@dataclass(frozen=True)
class PtxasMessage:
    """One remark of ptxas. ``file`` and ``line`` are the source's, where ptxas named a line of PTX that has one."""

    code: str  # "C7513", or "" where there is none
    text: str
    explanation: str
    kind: Kind
    function: str
    file: str
    line: int  # 0: not known

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.line else f"{self.function}: " if self.function else ""
        return f"{where}{self.code or 'ptxas'}: {self.explanation or self.text}"


@dataclass(frozen=True)
class FunctionUsage:
    """Resources of one function. ``registers`` is what the kernel is launched with; None for functions it calls."""

    name: str
    registers: int | None
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # bytes, static
    barriers: int

    @property
    def is_entry(self) -> bool:
        return self.registers is not None


@dataclass(frozen=True)
class PtxasLog:
    functions: tuple[FunctionUsage, ...]
    messages: tuple[PtxasMessage, ...]
    warnings: tuple[str, ...]  # of the C++ compiler

    def entry(self, name: str | None = None) -> FunctionUsage:
        """The kernel of this name, or the only one."""
        found = [function for function in self.functions if function.is_entry and name in (None, function.name)]
        if len(found) != 1:
            have = ", ".join(function.name for function in self.functions if function.is_entry)
            raise KeyError(f"the log has {have or 'no kernels'}; asked for {name or 'the only one'}")
        return found[0]


def parse_log(log: str, ptx: str | None = None) -> PtxasLog:
    """Reads a log made with ``--ptxas-options=-v``; with the PTX, messages are traced to lines of the source."""
    functions: list[FunctionUsage] = []
    messages: list[PtxasMessage] = []
    warnings: list[str] = []
    name, memory = "", (0, 0, 0)
    pending = False  # "Function properties" seen, whose "Used" line (kernels only) has not come

    def close() -> None:
        if pending:
            functions.append(FunctionUsage(name, None, *memory, 0, 0))

    for line in log.splitlines():
        if found := re.search(r"Function properties for (\S+)", line):
            close()
            name, memory, pending = found[1], (0, 0, 0), True
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            memory = (int(found[1]), int(found[2]), int(found[3]))
        elif found := re.match(r"ptxas info\s*: Used (\d+) registers", line):
            shared, barriers = re.search(r"(\d+) bytes smem", line), re.search(r"used (\d+) barriers", line)
            counted = (int(value[1]) if value else 0 for value in (shared, barriers))
            functions.append(FunctionUsage(name, int(found[1]), *memory, *counted))
            pending = False
        elif found := re.match(r"ptxas (?:info|warning)\s*: \((C\d+)\) (.*)", line):
            messages.append(_message(found[1], found[2], ptx))
        elif found := re.match(r"ptxas warning\s*: (.*)", line):
            messages.append(_message("", found[1], ptx))
        elif re.search(r"\bwarning\b.*:", line) and not line.startswith("Remark"):
            warnings.append(line)
    close()
    return PtxasLog(tuple(functions), tuple(messages), tuple(warnings))


def _message(code: str, text: str, ptx: str | None) -> PtxasMessage:
    by_text: Kind = next((kind for words, kind in _BY_TEXT if words in text), "other")
    kind, explanation = EXPLANATIONS.get(code, (by_text, ""))
    function = re.search(r"\bfunction '([^']*)'", text)
    number = re.search(r"\bline (\d+)", text)
    place = locate(ptx, int(number[1])) if number and ptx else None
    file, line = place or ("", 0)
    return PtxasMessage(code, text, explanation, kind, function[1] if function else "", file, line)
