"""Reading a cubin back: its instructions, their Python lines, loops, and the registers that each role really uses.

The disassembler is nvdisasm, from the wheel ``nvidia-cuda-nvdisasm`` or a CUDA toolkit. A kernel becomes a `Function`,
a control flow graph over instructions, which the other questions are put to.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mosaic_gpu.codegen.prelude import is_prelude
from mosaic_gpu.errors import ToolchainError

ENVIRONMENT_VARIABLE = "MOSAIC_GPU_NVDISASM"
TENSOR_CORE = frozenset(
    {"HGMMA", "QGMMA", "IGMMA", "BGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "HMMA", "IMMA"}
)
_WARPGROUP_PRODUCTS = frozenset({"HGMMA", "QGMMA", "IGMMA", "BGMMA"})
_BRANCHES = frozenset({"BRA", "BRX", "BRXU", "JMP", "JMX", "CALL", "BSSY", "BREAK", "WARPSYNC"})
_ENDS = frozenset({"EXIT", "RET", "KILL", "BPT"})  # BPT.TRAP ends a kernel


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    predicate: str  # "@!P0", or ""
    opcode: str  # "HGMMA.64x256x16.F32.BF16"
    operands: str
    places: tuple[tuple[str, int], ...]  # file and line: innermost inlined function first, the kernel's own text last

    @property
    def mnemonic(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def place(self) -> tuple[str, int] | None:
        """File and line of what the kernel's author wrote: the innermost that is not the prelude's.

        ptxas gives warpgroup products no line of their own; they show that of whatever stands before them.
        """
        return next((place for place in self.places if not is_prelude(place[0])), None)

    @property
    def highest_register(self) -> int:
        """Index of the highest general register it touches, or -1. SASS names a run of them by its first only."""
        found = re.findall(r"(?<![A-Z])R(\d+)(\.64)?", self.operands)
        highest = -1
        for position, (index, pair) in enumerate(found):
            width = 2 if pair else self._run(first=position == 0, last=position == len(found) - 1)
            highest = max(highest, int(index) + width - 1)
        return highest

    def _run(self, first: bool, last: bool) -> int:
        """Registers that one register operand stands for."""
        opcode, mnemonic = self.opcode, self.mnemonic
        if mnemonic in _WARPGROUP_PRODUCTS:
            columns, packed = int(opcode.split("x")[1]), opcode.split(".")[2] == "F16"
            return columns // (4 if packed else 2) if first else 4  # the others: A, and D again
        if mnemonic in ("LDTM", "STTM"):
            repeats = re.search(r"\.x(\d+)", opcode)
            lanes = re.match(r"\w+\.16dp(128|256)bit", opcode)
            return (int(repeats[1]) if repeats else 1) * (int(lanes[1]) // 64 if lanes else 1)
        if (mnemonic.startswith("LD") and first) or (mnemonic.startswith("ST") and last):
            if mnemonic in ("LDSM", "STSM"):
                return int(opcode[-1]) if opcode[-2:] in (".2", ".4") else 1
            return 4 if ".128" in opcode else 2 if ".64" in opcode else 1
        return 2 if first and ".WIDE" in opcode else 1

    def __str__(self) -> str:
        return f"{self.address:05x} {self.predicate} {self.opcode} {self.operands}"


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop, its inner loops included: instruction indices of its first instruction and of all of them."""

    head: int
    body: frozenset[int]


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """A USETMAXREG, and the highest register reachable from it before the next one."""

    kind: Literal["increase", "decrease"]
    value: int
    index: int
    highest_register: int
    place: tuple[str, int] | None


@dataclass(frozen=True)
class Function:
    """One kernel with the functions it calls."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # to an instruction index

    @functools.cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each instruction, which may execute next. A call goes to the callee and to what follows it."""
        result = []
        for index, instruction in enumerate(self.instructions):
            mnemonic = instruction.mnemonic
            targets = []
            if mnemonic in _BRANCHES:
                names = re.findall(r"`\(([^)]+)\)|(\.L_x_\d+)", instruction.operands)
                targets = [self.labels[a or b] for a, b in names if (a or b) in self.labels]
            plain_jump = mnemonic in ("BRA", "JMP") and re.fullmatch(r"`\([^)]+\)", instruction.operands)
            indirect = mnemonic in ("BRX", "BRXU", "JMX") and targets
            stays = instruction.predicate or not (plain_jump or indirect or mnemonic in _ENDS)
            if stays and index + 1 < len(self.instructions):
                targets.append(index + 1)
            result.append(tuple(dict.fromkeys(target for target in targets if target < len(self.instructions))))
        return tuple(result)

    def counts(self, indices: Iterable[int] | None = None) -> Counter[str]:
        """How often each mnemonic (the opcode up to its first dot) occurs, in all or in some instructions."""
        chosen = self.instructions if indices is None else (self.instructions[index] for index in indices)
        return Counter(instruction.mnemonic for instruction in chosen)

    def find(self, prefix: str) -> list[int]:
        """Indices of the instructions whose opcode is ``prefix`` or goes on from it with a dot."""
        return [
            index
            for index, instruction in enumerate(self.instructions)
            if instruction.opcode == prefix or instruction.opcode.startswith(prefix + ".")
        ]

    def reachable(self, start: int, stop: Iterable[int] = ()) -> frozenset[int]:
        """What may execute from ``start`` on, ``start`` included; ``stop`` is neither entered nor counted."""
        seen, waiting, closed = {start}, [start], set(stop) - {start}
        while waiting:
            for following in self.successors[waiting.pop()]:
                if following not in seen and following not in closed:
                    seen.add(following)
                    waiting.append(following)
        return frozenset(seen)

    def highest_register(self, indices: Iterable[int] | None = None) -> int:
        chosen = range(len(self.instructions)) if indices is None else indices
        return max((self.instructions[index].highest_register for index in chosen), default=-1)

    @functools.cached_property
    def register_requests(self) -> tuple[RegisterRequest, ...]:
        """Every USETMAXREG, in the order of the text."""
        places = self.find("USETMAXREG")
        requests = []
        for index in places:
            instruction = self.instructions[index]
            value = re.search(r"0x[0-9a-f]+", instruction.operands)
            highest = self.highest_register(self.reachable(index, stop=places))
            kind: Literal["increase", "decrease"] = "decrease" if "DEALLOC" in instruction.opcode else "increase"
            requests.append(
                RegisterRequest(kind, int(value[0], 16) if value else -1, index, highest, instruction.place)
            )
        return tuple(requests)

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Natural loops in the order of their heads; loops that share a head count as one."""
        predecessors: list[list[int]] = [[] for _ in self.instructions]
        for index, following in enumerate(self.successors):
            for target in following:
                predecessors[target].append(index)
        bodies: dict[int, set[int]] = {}
        for index, following in enumerate(self.successors):
            for head in following:
                # An edge that goes up, from code that the start reaches only through its target, closes a loop.
                if head <= index and self._dominates(head, index):
                    body = bodies.setdefault(head, {head})
                    waiting = [index]
                    while waiting:
                        here = waiting.pop()
                        if here not in body:
                            body.add(here)
                            waiting += predecessors[here]
        return tuple(Loop(head, frozenset(bodies[head])) for head in sorted(bodies))

    def _dominates(self, head: int, index: int) -> bool:
        return index in self._from_start and (head == 0 or index not in self.reachable(0, stop=(head,)))

    @functools.cached_property
    def _from_start(self) -> frozenset[int]:
        return self.reachable(0)

    def loops_with(self, mnemonics: frozenset[str] = TENSOR_CORE) -> tuple[tuple[Loop, int], ...]:
        """Innermost loops that hold such an instruction, with how many each holds."""
        found = []
        for loop in self.loops:
            count = sum(self.instructions[index].mnemonic in mnemonics for index in loop.body)
            if count:
                found.append((loop, count))
        return tuple((loop, count) for loop, count in found if not any(other.body < loop.body for other, _ in found))

    @property
    def spills(self) -> int:
        """Accesses to local memory: spilled registers, and arrays that did not fit into registers."""
        counts = self.counts()
        return counts["STL"] + counts["LDL"]


def find_nvdisasm() -> str:
    """Path of nvdisasm; ToolchainError, which says what to install, where there is none."""
    if wanted := os.environ.get(ENVIRONMENT_VARIABLE):
        return wanted
    candidates: list[str] = []
    for folder in sys.path:
        wheels = glob.glob(os.path.join(glob.escape(folder), "nvidia", "*", "bin", "nvdisasm"))
        candidates += sorted(wheels, reverse=True)
    candidates.append(shutil.which("nvdisasm") or "")
    candidates += sorted(glob.glob("/usr/local/cuda*/bin/nvdisasm"), reverse=True)
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ToolchainError(
        "nvdisasm, NVIDIA's disassembler, is not installed. Install it with `pip install nvidia-cuda-nvdisasm`, or "
        f"point {ENVIRONMENT_VARIABLE} at one."
    )


def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin with lines of its source."""
    tool = find_nvdisasm()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        try:
            done = subprocess.run([tool, "-c", "-gi", path], capture_output=True, text=True, check=False)
        except OSError as error:
            raise ToolchainError(f"{tool} could not be run: {error}") from error
    if done.returncode != 0:
        raise ToolchainError(f"{tool} could not read the cubin: {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout


_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_PLACE = re.compile(r'"([^"]*)", line (\d+)')


def parse(text: str) -> tuple[Function, ...]:
    """The kernels of a disassembly."""
    functions: list[Function] = []
    name = ""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    places: tuple[tuple[str, int], ...] = ()
    fresh = False  # has the current run of place comments ended?
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([^,\s]+)", line):
            if instructions:
                functions.append(Function(name, tuple(instructions), labels))
            name, instructions, labels, places = section[1], [], {}, ()
        elif "//## File" in line:
            found = [(file, int(number)) for file, number in _PLACE.findall(line)]
            places = tuple(found) if fresh else places + tuple(place for place in found if place not in places)
            fresh = False
        elif label := re.match(r"([.$\w]+):\s*$", line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = instruction.groups()
            instructions.append(Instruction(int(address, 16), predicate or "", opcode, operands, places))
            fresh = True
    if instructions:
        functions.append(Function(name, tuple(instructions), labels))
    return tuple(functions)


@functools.lru_cache(maxsize=2)
def read_cubin(cubin: bytes) -> tuple[Function, ...]:
    """Disassembles and parses a cubin, once for all who look at it one after the other."""
    return parse(disassemble(cubin))
