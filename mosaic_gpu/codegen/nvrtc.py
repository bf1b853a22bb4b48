"""CUDA C++ to cubin, through NVRTC called by ctypes.

Of the NVRTC libraries on this machine (wheels, toolkits, the loader's path) the newest whose major version the
driver takes is used; where there is no driver, the newest. ``MOSAIC_GPU_NVRTC`` names one library and ends the search.

The source goes straight to a cubin. PTX is kept beside it for people and for mapping messages to lines, but is never
assembled by anything else: nvJitLink and ``cuda.core`` silently drop ``setmaxnreg`` from PTX.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mosaic_gpu.errors import ToolchainError

ENVIRONMENT_VARIABLE = "MOSAIC_GPU_NVRTC"
BASE_OPTIONS = (
    "--std=c++17",
    "-lineinfo",
    "--ptxas-options=-v",
    "--diag-suppress=177,550",  # values that a kernel computes and does not use: every spare element of an array would be one
    "--fmad=false",  # the emitter writes out which products are not rounded: plan/contraction.py
)
_MAJORS = (14, 13, 12)  # sonames tried through the loader's own search path
_SUCCESS, _INVALID_OPTION = 0, 5
_MISSING = (
    "NVRTC, NVIDIA's run-time compiler, is not installed. Install it with `pip install nvidia-cuda-nvrtc` "
    "(CUDA 13 drivers) or `pip install nvidia-cuda-nvrtc-cu12` (CUDA 12 drivers), or point "
    f"{ENVIRONMENT_VARIABLE} at a libnvrtc.so."
)


@dataclass(frozen=True)
class Compiled:
    """A cubin, with what the compiler said about it."""

    cubin: bytes = field(repr=False)
    log: str = field(repr=False)
    arch: str
    toolchain: str  # for example "NVRTC 13.0.88"
    name: str = "kernel.cu"
    options: tuple[str, ...] = ()
    ptx: str | None = field(default=None, repr=False, compare=False)


class Nvrtc:
    """One loaded NVRTC library. Safe to call from several threads, which then compile in parallel."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError) as error:
            raise ToolchainError(f"{path} could not be loaded as NVRTC: {error}") from error
        self.version = (major.value, minor.value)
        self._rejects_no_cache = False
        # It looks for its companion on the loader's path only, where a wheel's folder is not.
        beside = os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.{}.{}".format(*self.version))
        self._builtins = ctypes.CDLL(beside) if os.path.isfile(beside) else None

    def __repr__(self) -> str:
        return f"Nvrtc({self.path!r}, {self.version[0]}.{self.version[1]})"

    @functools.cached_property
    def toolchain(self) -> str:
        """Name and full version, as the compiler writes it into its output (an empty program is compiled to ask)."""
        _, _, _, ptx = self._run("", "version.cu", (f"--gpu-architecture=compute_{min(self.architectures)}",))
        found = re.search(r"\bV(\d+(?:\.\d+)+)", ptx)
        return "NVRTC " + (found[1] if found else "{}.{}".format(*self.version))

    @functools.cached_property
    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities it can compile for, such as 90 and 100 (the ``a`` is not part of the list)."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        values = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(values), "nvrtcGetSupportedArchs")
        return tuple(values)

    def compile(self, source: str, *, arch: str, name: str, options: Sequence[str] = ()) -> Compiled:
        """Compiles for one real architecture; raises ToolchainError with the first errors of the log."""
        capability = re.fullmatch(r"sm_(\d+)[af]?", arch)
        if capability is None or int(capability[1]) not in self.architectures:
            known = ", ".join(f"sm_{number}" for number in self.architectures)
            raise ToolchainError(f"{self.toolchain} cannot compile for {arch!r}; it knows {known}.")
        given = (f"--gpu-architecture={arch}", *options)
        # With a driver, NVRTC keeps results of its own, and one that comes from there has no log.
        own = () if self._rejects_no_cache else ("--no-cache",)
        status, log, cubin, ptx = self._run(source, name, (*given, *own))
        if status == _INVALID_OPTION and own:  # a release from before the option, and so without the cache
            self._rejects_no_cache = True
            status, log, cubin, ptx = self._run(source, name, given)
        if status != _SUCCESS:
            what = self._library.nvrtcGetErrorString(status).decode()
            errors = first_errors(log, ptx) or f"{what}\n{log}".strip()
            raise ToolchainError(f"{self.toolchain} could not compile {name} for {arch}:\n{errors}")
        return Compiled(cubin, log, arch, self.toolchain, name, tuple(options), ptx)

    def _run(self, source: str, name: str, options: Sequence[str]) -> tuple[int, str, bytes, str]:
        program = ctypes.c_void_p()
        created = self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        self._check(created, "nvrtcCreateProgram")
        try:
            encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            status = self._library.nvrtcCompileProgram(program, len(options), encoded)
            log, cubin, ptx = (self._read(program, what) for what in ("ProgramLog", "CUBIN", "PTX"))
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return status, _text(log), cubin, _text(ptx)

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        if getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) != _SUCCESS or not size.value:
            return b""
        buffer = ctypes.create_string_buffer(size.value)
        if getattr(self._library, f"nvrtcGet{what}")(program, buffer) != _SUCCESS:
            return b""
        return buffer.raw

    def _check(self, status: int, call: str) -> None:
        if status != _SUCCESS:
            reason = self._library.nvrtcGetErrorString(status).decode()
            raise ToolchainError(f"{call} of {self.path} failed: {reason}")


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def compile_cuda(source: str, *, arch: str, name: str, extra_options: Sequence[str] = ()) -> Compiled:
    """Compiles CUDA C++ to a cubin for ``arch`` ("sm_90a", "sm_100a", "sm_103a") with the NVRTC that was found.

    ``name`` is the file name that messages and line information use where the source has no ``#line``.
    """
    return find_nvrtc().compile(source, arch=arch, name=name, options=(*BASE_OPTIONS, *extra_options))


_lock = threading.Lock()
_found: dict[str, Nvrtc] = {}


def find_nvrtc() -> Nvrtc:
    """The NVRTC library to use (see the top of this file); the search is done once per value of the variable."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "")
    with _lock:
        if wanted not in _found:
            _found[wanted] = Nvrtc(wanted) if wanted else newest(list_nvrtc(), driver_version())
        return _found[wanted]


def newest(libraries: Sequence[Nvrtc], driver: tuple[int, int] | None) -> Nvrtc:
    """The newest library whose major version is not above the driver's; ToolchainError if there is none."""
    if not libraries:
        raise ToolchainError(_MISSING)
    usable = [library for library in libraries if driver is None or library.version[0] <= driver[0]]
    if not usable:
        have = ", ".join(sorted({f"{major}.{minor}" for major, minor in (lib.version for lib in libraries)}))
        assert driver is not None
        raise ToolchainError(
            f"The driver supports CUDA {driver[0]}.{driver[1]}, but the only NVRTC found is {have}, whose cubins it "
            f"would refuse. Update the driver, or `pip install nvidia-cuda-nvrtc{'-cu12' if driver[0] == 12 else ''}` "
            f"in a {driver[0]}.x version, or point {ENVIRONMENT_VARIABLE} at one."
        )
    return max(usable, key=lambda library: library.version)  # the first found wins among equals


def list_nvrtc() -> list[Nvrtc]:
    """Every NVRTC on this machine that loads, each once, wheels first."""
    libraries: dict[object, Nvrtc] = {}
    for candidate in _candidates():
        # A path names a file; a bare soname is left to the loader, and may be one that is listed already.
        identity: object = os.path.realpath(candidate)
        if identity in libraries:
            continue
        try:
            library = Nvrtc(candidate)
        except ToolchainError:
            continue
        if os.sep not in candidate and any(library.version == other.version for other in libraries.values()):
            continue
        libraries[identity] = library
    return list(libraries.values())


def _candidates() -> Iterator[str]:
    for folder in sys.path:
        yield from sorted(glob.glob(os.path.join(glob.escape(folder), "nvidia", "*", "lib", "libnvrtc.so.*")))
    toolkits = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    for folder in (*filter(None, toolkits), *sorted(glob.glob("/usr/local/cuda*"), reverse=True)):
        for libraries in ("lib64", "lib", "targets/x86_64-linux/lib"):
            yield from sorted(glob.glob(os.path.join(glob.escape(folder), libraries, "libnvrtc.so.[0-9]*")))
    yield from (f"libnvrtc.so.{major}" for major in _MAJORS)


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the installed driver supports, or None without a driver. Needs no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < 1000:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def first_errors(log: str, ptx: str = "", limit: int = 5) -> str:
    """The first errors of a compile log: those of C++ with the line they quote, those of ptxas with their place."""
    lines = log.splitlines()
    picked: list[str] = []
    for number, line in enumerate(lines):
        assembler = re.match(r"ptxas .*, line (\d+); (?:error|fatal)\s*: (.*)", line)
        if assembler:
            place = locate(ptx, int(assembler[1]))
            where = f"{place[0]}({place[1]})" if place else f"PTX line {assembler[1]}"
            text = ptx.splitlines()[int(assembler[1]) - 1].strip() if ptx else ""
            picked.append(f"{where}: error from ptxas: {assembler[2]}" + (f"\n    {text}" if text else ""))
        elif re.search(r"\b(?:catastrophic )?error\b\s*:", line):
            quoted = [row for row in lines[number + 1 : number + 3] if row.startswith("  ")]
            picked.append("\n".join([line, *quoted]))
        elif re.match(r"(?:ptxas|nvrtc)\s*(?:fatal|error)\b", line) and not picked:
            picked.append(line)
    more = [f"… and {len(picked) - limit} more"] if len(picked) > limit else []
    return "\n".join(picked[:limit] + more)


_LOC = re.compile(r"\s*\.loc\s+(\d+ \d+ \d+)(?:,\s*function_name\s+[^,]+,\s*inlined_at\s+(\d+ \d+ \d+))?")


def locate(ptx: str, line: int) -> tuple[str, int] | None:
    """The source file and line of a line of PTX (counted from 1), by the nearest ``.loc`` at or above it.

    Inside an inlined function it is the line of the outermost call: what the kernel's author wrote.
    """
    above = ptx.splitlines()[: max(line, 0)]
    place: str | None = None  # "file line column"; then that of the call, and of the call of that
    for row in reversed(above):
        if place is None and re.match(r"\.(?:visible\s+|weak\s+)?(?:entry|func)\b", row):
            return None
        found = _LOC.match(row)
        if found and place in (None, found[1]):
            place = found[2] or found[1]
            if found[2] is None:
                break
    if place is None:
        return None
    number, source_line, _ = place.split()
    file = re.search(rf'^\s*\.file\s+{number}\s+"([^"]*)"', ptx, re.MULTILINE)
    return (file[1] if file else "?", int(source_line))
