"""What ptxas says while it assembles a kernel: resources of each function, and messages that mean lost speed.

ptxas never refuses a badly ordered wgmma or an impossible ``setmaxnreg``: it serialises, injects waits, or drops the
request, and says so in one line of the log. All of these carry a code C75xx; those whose words are known get an
explanation, the others are kept as they are.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from mosaic_gpu.codegen.nvrtc import locate

Kind = Literal["setmaxnreg", "serialized", "injected", "other"]

_DROPPED = "The register budgets were dropped: every thread keeps the registers it was launched with. "
_SERIALIZED = "Every wgmma of the function is now issued and waited for one at a time. "

# Known by their words: from release to release the same code may stand for another message (C7519 does).
_KNOWN: tuple[tuple[str, Kind, str], ...] = (
    (
        "'setmaxnreg' ignored to maintain compatibility across compilation units",  # C7504
        "setmaxnreg",
        _DROPPED + "The cubin was assembled as relocatable code (-rdc, nvJitLink).",
    ),
    (
        "'setmaxnreg' ignored to allow debugging",  # C7505
        "setmaxnreg",
        _DROPPED + "The kernel was compiled for debugging (-G).",
    ),
    (
        "'setmaxnreg' ignored to maintain compatibility into 'extern' call",
        "setmaxnreg",
        _DROPPED + "The kernel calls a function that is not in the same source.",
    ),
    (
        "'setmaxnreg' ignored to maintain minimum register requirements",  # C7507
        "setmaxnreg",
        _DROPPED + "A budget is too small for the code behind it; give that role more, or less to do.",
    ),
    (
        "'setmaxnreg' ignored; unable to determine register count at entry",  # C7508
        "setmaxnreg",
        _DROPPED + "ptxas must know the registers at launch: __launch_bounds__ needs its second argument (1).",
    ),
    (
        "due to the presence of Extern calls",  # C7509
        "serialized",
        _SERIALIZED + "The function calls code outside this source (-rdc, -G).",
    ),
    (
        "due to wgmma pipeline crossing function boundary",  # C7510
        "serialized",
        _SERIALIZED
        + "A product is in flight across a function call (printf and assert are calls), or its kernel makes "
        "one at all. Inline the function, or do without.",
    ),
    (
        "due to insufficient register resources for the wgmma pipeline",  # C7511
        "serialized",
        _SERIALIZED + "The registers do not suffice for what is in flight together: an accumulator or an A operand "
        "would have to be copied. Shrink the tile, or wait before the tile is written.",
    ),
    (
        "due to insufficient register resources for the function",  # C7512
        "serialized",
        _SERIALIZED + "The function has too few registers. Shrink the tile, raise the role's budget, or use fewer "
        "threads.",
    ),
    (
        "due to non wgmma instructions defining input registers",  # C7513
        "serialized",
        _SERIALIZED + "An A operand in registers is written while a product that reads it may be in flight; a copy at "
        "the end of a loop (a loop carry) does this too. Write it below the wait, or use two tiles in turn.",
    ),
    (
        "due to non wgmma instructions reading accumulator registers",  # C7514
        "serialized",
        _SERIALIZED + "An accumulator is read or rescaled while a product that writes it may be in flight, on some "
        "path to that point. Wait on every path first.",
    ),
    (
        "due to non wgmma instructions defining accumulator registers",  # C7515
        "serialized",
        _SERIALIZED
        + "An accumulator is set (filled, copied) before a loop that keeps products in flight from one pass "
        "to the next. Let the first product overwrite it (scale-d 0) instead of filling it.",
    ),
    (
        "due to ill formed pipeline stage",
        "serialized",
        _SERIALIZED + "Fence, product, commit and wait are not in an order that ptxas can follow.",
    ),
    (
        "dependence on compiler-inserted WG.DP",  # C7518
        "serialized",
        _SERIALIZED + "A wait would be needed on a path that only some threads take: the products in flight differ "
        "between paths that meet. Wait, or issue, on all of them alike, under conditions uniform over the warpgroup.",
    ),
    (
        "dependence on compiler-inserted WG.AR",  # C7519 in CUDA 13, C7520 before
        "serialized",
        _SERIALIZED + "A fence would be needed on a path that only some threads take: a product lies in another block "
        "of code than its fence. Fence right before the product, under conditions uniform over the warpgroup.",
    ),
    (
        "wait is injected",  # C7517, CUDA 12 ("warpgroup.wait")
        "injected",
        "An accumulator is used where its product may still be in flight; ptxas put a wait for it there.",
    ),
    (
        "wait_group is injected",  # C7517
        "injected",
        "An accumulator is used where its product may still be in flight; ptxas put a wait for it there.",
    ),
    (
        "arrive is injected",  # C7519 in CUDA 12; CUDA 13 injects without a word
        "injected",
        "A product has no fence in its block of code; ptxas put one there.",
    ),
    ("'setmaxnreg' ignored", "setmaxnreg", ""),
    ("instructions are serialized", "serialized", ""),
    ("is injected", "injected", ""),
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


@functools.lru_cache(maxsize=64)  # asked for registers, complaints and the report, one after the other
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
    kind: Kind = "other"
    explanation = ""
    for words, kind_of_words, explanation_of_words in _KNOWN:
        if words in text:
            kind, explanation = kind_of_words, explanation_of_words
            break
    function = re.search(r"\bfunction '([^']*)'", text)
    number = re.search(r"\bline (\d+)", text)
    place = locate(ptx, int(number[1])) if number and ptx else None
    file, line = place or ("", 0)
    return PtxasMessage(code, text, explanation, kind, function[1] if function else "", file, line)
