"""The native launcher: a shared library of plain C symbols, loaded with ctypes.

`MOSAIC_GPU_NATIVE` names another build of it; `MOSAIC_GPU_LIBCUDA` makes it use another driver library (tests do).
Imports no JAX.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import threading
from collections.abc import Sequence
from types import TracebackType

from mosaic_gpu import errors
from mosaic_gpu.runtime import launch_spec

LIBRARY_NAME = "libmosaic_gpu_launch.so"
_MESSAGE_BYTES = 4096

# Markers at the head of the library's messages (native/status.h) and the classes they stand for.
_ERROR_CLASSES: dict[str, type[errors.MosaicGpuError]] = {
    "[ToolchainError] ": errors.ToolchainError,
    "[DeviceMismatch] ": errors.DeviceMismatch,
    "[UnsupportedCall] ": errors.UnsupportedCall,
    "[LaunchError] ": errors.MosaicGpuError,
}


def error_from_text(text: str) -> errors.MosaicGpuError | None:
    """The error that a message of the launcher stands for, wherever in `text` it begins; None if `text` has none."""
    found = [(text.find(marker), marker) for marker in _ERROR_CLASSES if marker in text]
    if not found:
        return None
    start, marker = min(found)
    return _ERROR_CLASSES[marker](text[start + len(marker) :].strip())


def _find() -> pathlib.Path:
    chosen = os.environ.get("MOSAIC_GPU_NATIVE")
    # An editable install keeps the built library apart from the sources; both folders are in the package's path.
    folders = [pathlib.Path(folder) for folder in __path__]
    candidates = [pathlib.Path(chosen)] if chosen else [folder / LIBRARY_NAME for folder in folders]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise errors.ToolchainError(
        f"the native launcher is missing: no {' or '.join(map(str, candidates))}. "
        "It is built when mosaic_gpu is installed: run `pip install` again"
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library, its functions' signatures set.  Raises ToolchainError if it is missing or does not fit."""
    path = _find()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise errors.ToolchainError(f"the native launcher {path} cannot be loaded: {error}") from error
    library.mosaic_gpu_spec_version.restype = ctypes.c_uint
    library.mosaic_gpu_driver_version.restype = ctypes.c_int
    library.mosaic_gpu_driver_problem.restype = ctypes.c_char_p
    library.mosaic_gpu_launcher_create.restype = ctypes.c_void_p
    library.mosaic_gpu_launcher_create.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    library.mosaic_gpu_launcher_launch.restype = ctypes.c_int
    library.mosaic_gpu_launcher_launch.argtypes = [
        *[ctypes.c_void_p] * 4,
        ctypes.c_size_t,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    library.mosaic_gpu_launcher_destroy.restype = None
    library.mosaic_gpu_launcher_destroy.argtypes = [ctypes.c_void_p]
    built_for = library.mosaic_gpu_spec_version()
    if built_for != launch_spec.VERSION:
        raise errors.ToolchainError(
            f"the native launcher {path} reads launch specifications of version {built_for}, this mosaic_gpu writes "
            f"version {launch_spec.VERSION}: run `pip install` again"
        )
    return library


def address(symbol: str) -> int:
    """The address of an exported function."""
    return ctypes.cast(getattr(load(), symbol), ctypes.c_void_p).value or 0


def data_address(accessor: str) -> int:
    """The address that the exported function `accessor` returns."""
    function = getattr(load(), accessor)
    function.restype = ctypes.c_void_p
    return function() or 0


class Launcher:
    """Launches one spec on device addresses, for callers other than JAX.

    A context manager: leaving it (or `close`) unloads the kernel, so its launches must have finished by then.
    """

    def __init__(self, spec: launch_spec.LaunchSpec | bytes) -> None:
        self._library = load()
        blob = spec if isinstance(spec, bytes) else launch_spec.serialize(spec)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._lock = threading.Lock()
        self._handle = self._library.mosaic_gpu_launcher_create(blob, len(blob), message, _MESSAGE_BYTES)
        if not self._handle:
            raise _error(message)

    def launch(self, addresses: Sequence[int], sizes: Sequence[int], stream: int = 0) -> None:
        """Enqueues the kernel.

        addresses, sizes: device address and bytes of each buffer, inputs before outputs.
        stream: a CUstream as an integer; 0 is the default stream of the current context.
        """
        if self._handle is None:
            raise errors.MosaicGpuError("launch on a closed Launcher")
        count = len(addresses)
        if len(sizes) != count:
            raise errors.UnsupportedCall(f"{count} buffer addresses and {len(sizes)} sizes")
        array = ctypes.c_uint64 * count
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self._library.mosaic_gpu_launcher_launch(
            self._handle, stream, array(*addresses), array(*sizes), count, message, _MESSAGE_BYTES
        ):
            raise _error(message)

    def close(self) -> None:
        """Unloads the kernel; a second call does nothing."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle:
            self._library.mosaic_gpu_launcher_destroy(handle)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _error(message: ctypes.Array[ctypes.c_char]) -> errors.MosaicGpuError:
    text = message.value.decode(errors="replace")
    return error_from_text(text) or errors.MosaicGpuError(text)
