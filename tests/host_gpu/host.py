"""Runs what is emitted on the host: the C++ itself, thread by thread, with `kernel.h` in the place of CUDA."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import pathlib
import re
import shutil
import subprocess
from typing import Any

import numpy as np

from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import HELPERS, emit, launch_grid, parameters
from mosaic_gpu.codegen.text import stored_type
from mosaic_gpu.ops.elementwise import numpy_dtype
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.program import Value

HERE = pathlib.Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++20", "-shared", "-fPIC", "-pthread", "-w", "-ffp-contract=off"]
# kernel.h has a declaration of its own, inside of guards, and casts of floats that lie outside of an integer's range.
DECLARATION = "extern __shared__ __align__(1024) unsigned char shared[];"
CAST = re.compile(r"\((int|u8|u16|u32|u64|long long|signed char|short)\)(?=[\w(*!~-])")
GUARD = 256  # bytes around each array in global memory
UNTOUCHED = 0xAB
NUMBERS = itertools.count()


class Unavailable(Exception):
    """No compiler, or one that is too old."""


class NotForHost(Exception):
    """The kernel needs something that `kernel.h` has not."""


def build(source: pathlib.Path, *more: str) -> pathlib.Path:
    """A shared library; NotForHost with what the compiler says."""
    target = source.with_suffix(".so")
    command = [str(COMPILER), *FLAGS, "-I", str(HERE), "-o", str(target), str(source), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotForHost(next((t for t in done.stderr.splitlines() if "error" in t), done.stderr))
    return target


def load_runtime(folder: pathlib.Path) -> Any:
    """The threads, warps and barriers, to be loaded once in a process."""
    if COMPILER is None:
        raise Unavailable("no g++")
    (folder / "probe.cpp").write_text("#include <barrier>\nstd::barrier<> probe(1);\n")
    try:
        build(folder / "probe.cpp")
    except NotForHost:
        raise Unavailable("g++ without <barrier>, which is of C++20") from None
    source = folder / "runtime.cpp"
    shutil.copy(HERE / "runtime.cpp", source)
    return ctypes.CDLL(str(build(source, "-O1")), mode=ctypes.RTLD_GLOBAL)


@dataclasses.dataclass
class Guarded:
    """An array with bytes around it that nobody is to write."""

    memory: np.ndarray
    array: np.ndarray
    around: int

    @staticmethod
    def of(number: int, value: Value, data: np.ndarray | None = None) -> Guarded:
        """Around each array lies another byte, so that none passes for another's that was read there."""
        dtype, shape = numpy_dtype(value.dtype), value.shape if data is None else data.shape
        size = math.prod(shape) * dtype.itemsize
        around = number % 100 + 1
        memory = np.full(size + 2 * GUARD, around, np.uint8)
        memory[GUARD : GUARD + size] = UNTOUCHED
        array = memory[GUARD : GUARD + size].view(dtype).reshape(shape)
        if data is not None:
            array[...] = data
        return Guarded(memory, array, around)

    def intact(self) -> bool:
        outside = np.concatenate([self.memory[:GUARD], self.memory[GUARD + self.array.nbytes :]])
        return bool(np.all(outside == self.around))


def run(runtime: Any, folder: pathlib.Path, plan: Plan, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs that the emitted C++ computes; what it leaves alone has bytes 0xAB.

    Whatever is written past the ends of shared memory or of an array is an error here.  Raises NotForHost for TMA and the like.
    """
    program, count = plan.program, len(arrays)
    memory = [Guarded.of(i, v, a) for i, (v, a) in enumerate(zip(program.inputs, arrays, strict=False))]
    for i, v in enumerate(program.inputs[count:]):
        first = next((a for a, o in program.aliases if o == i), None)
        counter = i >= program.num_outputs - program.semaphores
        start = np.zeros(v.shape, np.int32) if counter else None
        memory.append(memory[first] if first is not None else Guarded.of(count + i, v, start))
    given: list[Any] = []
    texts = []
    for i, p in enumerate(parameters(plan)):
        if p.kind not in ("pointer", "dim", "grid"):
            raise NotForHost(f"a parameter that is a {p.kind}")
        if p.kind == "pointer":
            given.append(ctypes.c_void_p(memory[p.index].array.ctypes.data))
            texts.append(f"({stored_type(program.inputs[p.index].dtype)}*)a[{i}]")
        else:
            n = memory[p.index].array.shape[p.axis] if p.kind == "dim" else program.grid[p.index]
            given.append(ctypes.c_void_p(n))
            texts.append(f"(int)(long long)a[{i}]")
    helpers = "\n".join(t for t in HELPERS.splitlines() if "asm(" not in t)
    launch = f'extern "C" void launch(void** a) {{ kernel({", ".join(texts)}); }}'
    source = folder / f"kernel{next(NUMBERS)}.cpp"  # another path each time: one is loaded once
    text = body_of(emit(plan))
    assert DECLARATION in text
    text = CAST.sub(r"As<\1>() ->* ", text.replace(DECLARATION, ""))
    source.write_text(f'#include "kernel.h"\n{helpers}\n{text}\n{launch}\n')
    library = ctypes.CDLL(str(build(source)))
    argument = (ctypes.c_void_p * max(len(given), 1))(*given)
    wrong = runtime.run(library.launch, argument, *launch_grid(plan), plan.threads, plan.shared_bytes)
    assert wrong != 1, "a barrier was waited on for 10 seconds"
    assert wrong != 2, f"shared memory was written outside of its {plan.shared_bytes} bytes"
    for i, m in enumerate(memory):
        assert m.intact(), f"global memory was written around array {i}"
    for i, a in enumerate(arrays):
        kept = i in {k for k, _ in program.aliases} or memory[i].array.tobytes() == np.ascontiguousarray(a).tobytes()
        assert kept, f"input {i} was written"
    return [m.array for m in memory[count : len(memory) - program.semaphores]]
