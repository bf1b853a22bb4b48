"""What `doctor` looks at, one function each.  None of them raises, whatever is missing, and none needs JAX to be there."""

from __future__ import annotations

import ctypes
import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..errors import MosaicGpuError
from .common import Refusal, require_writable

Status = Literal["ok", "missing", "problem"]
GPU_ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at.  remedy: the command (or, where none can, the words) that brings it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    data: Any = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def guarded(name: str, look: Callable[[], Check], remedy: str = "") -> Check:
    """A check that becomes a problem when looking fails in a way that it did not expect."""
    try:
        return look()
    except MosaicGpuError as error:
        return Check(name, "missing" if _absent(str(error)) else "problem", str(error), remedy)
    except Exception as error:
        return Check(name, "problem", f"{type(error).__name__}: {error}", remedy)


def _absent(message: str) -> bool:
    return "not installed" in message or "is missing" in message


def python() -> Check:
    """The interpreter."""
    return Check("Python", "ok", f"{platform.python_version()} on {platform.platform()}")


def package(module: str, distribution: str, remedy: str) -> Check:
    """A Python package: imported, since one that is there may still not load."""
    if importlib.util.find_spec(module) is None:
        return Check(distribution, "missing", "not installed", remedy)
    importlib.import_module(module)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(importlib.import_module(module), "__version__", "of unknown version"))
    return Check(distribution, "ok", version)


def nvrtc() -> Check:
    """The compilers found, and the one that is used; it compiles an empty program, so that a broken one shows."""
    from ..codegen.nvrtc import ENVIRONMENT_VARIABLE, find_nvrtc, list_nvrtc

    used = find_nvrtc()
    toolchain = used.toolchain
    others = [f"{lib.version[0]}.{lib.version[1]} {lib.path}" for lib in list_nvrtc() if lib.path != used.path]
    archs = sorted(used.architectures)
    detail = f"{toolchain}, {used.path}{chosen_by(ENVIRONMENT_VARIABLE)}" + (
        f"; also found: {'; '.join(others)}" if others else ""
    )
    return Check("NVRTC", "ok", detail, data={"path": used.path, "architectures": archs, "others": others})


def disassembler() -> Check:
    """nvdisasm, which every new kernel is read back with."""
    from ..codegen.sass import ENVIRONMENT_VARIABLE, find_nvdisasm

    path = find_nvdisasm()
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return Check(
        "nvdisasm", "ok", f"{version[1] if version else 'no version'}, {path}{chosen_by(ENVIRONMENT_VARIABLE)}"
    )


def launcher() -> Check:
    """The native launcher."""
    from ..runtime import native

    return Check("native launcher", "ok", f"{native.load()._name}{chosen_by('MOSAIC_GPU_NATIVE')}")


def driver() -> Check:
    """The driver, asked without JAX."""
    from ..codegen.nvrtc import driver_version

    version = driver_version()
    remedy = (
        "install NVIDIA's driver (on Ubuntu: sudo apt install nvidia-driver-580-open); without a GPU none is needed"
    )
    if version is None:
        return Check("NVIDIA driver", "missing", "libcuda.so.1 not found", remedy)
    return Check("NVIDIA driver", "ok", "takes cubins of CUDA {}.{} and older".format(*version), data=version)


def gpus() -> Check:
    """The GPUs that the driver sees, each with name and compute capability, asked without JAX."""
    found = driver_gpus()
    if not found:
        return Check("GPU", "missing", "the driver sees none", "kernels run in the simulator without one")
    usable = [g for g in found if g[1] in GPU_ARCHS]
    detail = "; ".join(f"{name}, compute capability {major}.{minor}" for name, (major, minor) in found)
    if not usable:
        return Check("GPU", "problem", detail, "kernels run on 9.0 (Hopper), 10.0 and 10.3 (Blackwell) only", found)
    return Check("GPU", "ok", detail, data=found)


def driver_gpus() -> list[tuple[str, tuple[int, int]]]:
    """Name and compute capability of each GPU; [] without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for i in range(count.value):
        name, numbers = ctypes.create_string_buffer(256), (ctypes.c_int * 2)()
        cuda.cuDeviceGetName(name, 256, i)
        for slot, attribute in enumerate((75, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            cuda.cuDeviceGetAttribute(ctypes.byref(numbers, slot * ctypes.sizeof(ctypes.c_int)), attribute, i)
        found.append((name.value.decode(errors="replace"), (numbers[0], numbers[1])))
    return found


def jax_gpus(cuda_major: int | None) -> Check:
    """Whether JAX sees the GPUs too: that takes its CUDA plugin, of the driver's major version."""
    remedy = f"pip install 'mosaic-gpu[cuda{cuda_major or 13}]'"
    from ..runtime.device import gpu_devices

    found = gpu_devices()
    if not found:
        return Check("JAX on the GPU", "missing", "JAX sees no CUDA device", remedy)
    return Check("JAX on the GPU", "ok", ", ".join(str(getattr(d, "device_kind", d)) for d in found))


def cache() -> Check:
    """The compiled kernels: their place, whose it is and who may write there, how many and how large they are."""
    from ..codegen.cubin_cache import ENVIRONMENT_VARIABLE, cache_folder, cache_root

    remedy = f"set {ENVIRONMENT_VARIABLE} to a folder of your own"
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        folder = cache_folder()
    if folder is None:
        why = str(complaints[0].message) if complaints else f"turned off by {ENVIRONMENT_VARIABLE}="
        return Check("kernel cache", "problem" if complaints else "missing", why, remedy)
    root = cache_root()
    for place in (root, folder):
        with tempfile.TemporaryFile(dir=place):
            pass
    sizes = [path.stat().st_size for path in folder.iterdir() if len(path.name) == 64]
    modes = ", ".join(f"mode {stat.S_IMODE(place.stat().st_mode):o} {place.name}" for place in (root, folder))
    detail = f"{folder}{chosen_by(ENVIRONMENT_VARIABLE)}, {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB ({modes})"
    mode = root.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        return Check("kernel cache", "problem", f"{detail}; others may replace what is in {root}", f"chmod go-w {root}")
    return Check("kernel cache", "ok", detail)


# Ours, and what each chooses.
VARIABLES = {
    "MOSAIC_GPU_CACHE_DIR": "where compiled kernels are kept",
    "MOSAIC_GPU_COMMIT": "the commit that result files of bench name outside a checkout",
    "MOSAIC_GPU_LIBCUDA": "the driver's library for launches",
    "MOSAIC_GPU_NATIVE": "the native launcher",
    "MOSAIC_GPU_NVDISASM": "the disassembler",
    "MOSAIC_GPU_NVRTC": "the compiler",
    "MOSAIC_GPU_PALLAS_BACKEND": "the backend of a pallas_call without compiler_params",
    "MOSAIC_GPU_TUNE_DIR": "where tuned configs are kept",
}
BACKENDS = ("mosaic_gpu", "triton")
EMPTY = {"MOSAIC_GPU_CACHE_DIR": "no compiled kernel is kept"}


def environment() -> Check:
    """The environment variables of ours that are set; one that is nearly ours is a mistake."""
    ours = {name: value for name, value in sorted(os.environ.items()) if name.startswith("MOSAIC_GPU_")}
    known = [
        f"{name}={value} chooses {VARIABLES[name]}" if value else f"{name} is empty: {EMPTY.get(name, 'as if not set')}"
        for name, value in ours.items()
        if name in VARIABLES
    ]
    for name in ours.keys() - VARIABLES.keys():  # the prefix is JAX's, too: what is like none of ours may be its own
        if meant := difflib.get_close_matches(name, VARIABLES, 1, 0.85):
            remedy = f"write {meant[0]}"
            return Check("environment", "problem", "; ".join([*known, f"{name} means nothing to us"]), remedy, ours)
    for name, (wrong, remedy) in _wrong_values(ours).items():
        return Check("environment", "problem", "; ".join([*known, f"{name}: {wrong}"]), remedy, ours)
    return Check("environment", "ok", "; ".join(known) or "no variable of ours is set", data=ours)


def _wrong_values(ours: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What is wrong with a value that no other check looks at, and what to do, by variable."""
    found = {}
    backend, library = ours.get("MOSAIC_GPU_PALLAS_BACKEND"), ours.get("MOSAIC_GPU_LIBCUDA")
    if backend not in (None, *BACKENDS):
        found["MOSAIC_GPU_PALLAS_BACKEND"] = (
            f"there is no backend {backend!r}",
            f"write {' or '.join(BACKENDS)}, or unset it",
        )
    if library:
        try:
            ctypes.CDLL(library)
        except OSError as error:
            found["MOSAIC_GPU_LIBCUDA"] = str(error), "name another library, or unset it"
    return found


def tuned_configs() -> Check:
    """Where tuned configs are kept, how many files there are, and whether more can be written."""
    from ..tune.cache import ENVIRONMENT_VARIABLE, user_folder

    folder = user_folder()
    try:
        require_writable(folder, "folder")
    except Refusal as error:
        return Check("tuned configs", "problem", str(error), f"set {ENVIRONMENT_VARIABLE} to a folder of your own")
    files = len(list(folder.glob("*/*.json")))
    return Check("tuned configs", "ok", f"{folder}{chosen_by(ENVIRONMENT_VARIABLE)}, {files} files")


def chosen_by(variable: str) -> str:
    """For the detail of what an environment variable has chosen."""
    return f" (chosen by {variable})" if os.environ.get(variable) else ""


def remedy_of(variable: str, otherwise: str) -> str:
    """How to get out of a check that failed: what chose it comes first."""
    value = os.environ.get(variable)
    return f"{variable}={value} chooses it: name another, or unset it" if value else otherwise


def all_checks() -> list[Check]:
    """Everything, in the order of the report."""
    install, reinstall = "pip install mosaic-gpu", "pip install --force-reinstall --no-deps"
    checks = [
        guarded("Python", python),
        guarded("mosaic-gpu", lambda: package("mosaic_gpu", "mosaic-gpu", install)),
        guarded(
            "jax", lambda: package("jax", "jax", "pip install 'jax>=0.10.2,<0.13'"), "pip install 'jax>=0.10.2,<0.13'"
        ),
        guarded("jaxlib", lambda: package("jaxlib", "jaxlib", "pip install jaxlib"), "pip install jaxlib"),
        guarded("environment", environment),
        guarded("NVRTC", nvrtc, remedy_of("MOSAIC_GPU_NVRTC", "pip install nvidia-cuda-nvrtc")),
        guarded("nvdisasm", disassembler, remedy_of("MOSAIC_GPU_NVDISASM", "pip install nvidia-cuda-nvdisasm")),
        guarded("native launcher", launcher, remedy_of("MOSAIC_GPU_NATIVE", f"{reinstall} mosaic-gpu")),
        guarded("kernel cache", cache, "set MOSAIC_GPU_CACHE_DIR to a folder of your own"),
        guarded("tuned configs", tuned_configs, "set MOSAIC_GPU_TUNE_DIR to a folder of your own"),
        guarded("NVIDIA driver", driver),
        guarded("GPU", gpus),
    ]
    found = {c.name: c for c in checks}
    major = found["NVIDIA driver"].data[0] if found["NVIDIA driver"].data else None
    if found["jax"].ok and found["GPU"].status != "missing":  # without a GPU there is nothing for JAX to see
        checks.append(guarded("JAX on the GPU", lambda: jax_gpus(major)))
    return checks
