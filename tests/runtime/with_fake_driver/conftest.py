"""Tests with the launcher on the fake driver; `test_native_launcher.py` starts them, plain runs pass them by."""

from __future__ import annotations

import collections.abc
import ctypes
import itertools
import os

import pytest

from mosaic_gpu.runtime.launch_spec import LaunchSpec, Parameter

collect_ignore_glob = [] if "MOSAIC_GPU_LIBCUDA" in os.environ else ["test_*.py"]

_serial = itertools.count()


class FakeDriver:
    """What the launcher asked of the driver since the test began, and knobs to make the driver refuse."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["MOSAIC_GPU_LIBCUDA"])
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_reset()

    def fail(self, function: str, result: int) -> None:
        """Makes each call of `function` return `result`; 0 makes it work again."""
        self._library.fake_fail(function.encode(), result)

    def capability(self, device: int, major: int, minor: int) -> None:
        self._library.fake_capability(device, major, minor)

    def parameters(self, *sizes: int) -> None:
        """Bytes of each parameter of the kernel in the cubin; without a call of this the driver does not tell."""
        self._library.fake_parameters(len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))

    def calls(self, function: str) -> list[dict[str, str]]:
        """The arguments of each call of `function`, oldest first."""
        lines = self._library.fake_log().decode().splitlines()
        return [dict(pair.split("=", 1) for pair in line.split()[1:]) for line in lines if line.split()[0] == function]


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


MakeSpec = collections.abc.Callable[..., LaunchSpec]


@pytest.fixture
def make_spec() -> MakeSpec:
    """Specs with a cubin of their own: kernels are shared by cubin throughout a process."""

    def make(*parameters: Parameter, arch: str = "sm_90a", **changes: object) -> LaunchSpec:
        cubin = b"\x7fELF".ljust(64, b"\0") + str(next(_serial)).encode()
        fields: dict[str, object] = {
            "cubin": cubin,
            "entry": "kernel",
            "grid": (4, 2, 1),
            "threads": 384,
            "cluster": (1, 1, 1),
            "shared_bytes": 0,
            "parameters": parameters,
            "toolchain": f"NVRTC 13.0 {arch}",
        }
        return LaunchSpec(**(fields | changes))  # type: ignore[arg-type]

    return make
