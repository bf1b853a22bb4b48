"""Launching from JAX: registers the native launcher with XLA and wraps the call."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.ffi
import numpy as np

from mosaic_gpu import errors
from mosaic_gpu.runtime import native
from mosaic_gpu.runtime.launch_spec import BufferPointer, Extent, LaunchSpec, ShapedMap, TensorMap, serialize

__all__ = [
    "REPORT_BYTES",
    "TARGET",
    "can_report",
    "late_call",
    "launch_call",
    "register",
    "register_cpu_test_target",
    "simulated_call",
    "translate_error",
]

TARGET = "mosaic_gpu_launch"
SIMULATED = "mosaic_gpu_simulated"
REPORT_BYTES = 1 << 15  # of the longest report that leaves a jitted function whole

_lock = threading.Lock()
_registered: set[str] = set()


def register() -> None:
    """Registers the launcher for CUDA; a second call does nothing.  Works on machines without a GPU."""
    _register("CUDA", "cuda", ("instantiate", "initialize", "execute"))


def register_cpu_test_target() -> None:
    """Registers the same launch for the CPU backend, to be run against a fake driver.  Only tests call this."""
    # The CPU backend refuses stateful targets that are registered before it exists.
    jax.devices("cpu")
    _register("cpu", "cpu_test", ("instantiate", "execute"))


def _register(platform: str, prefix: str, stages: Sequence[str]) -> None:
    with _lock:
        if platform in _registered:
            return
        # The type before the target: XLA asks for its id as soon as it sees the handlers.
        jax.ffi.register_ffi_type(
            f"{TARGET}_{prefix}_state",
            {
                "type_id": jax.ffi.pycapsule(native.data_address(f"mosaic_gpu_{prefix}_type_id")),
                "type_info": jax.ffi.pycapsule(native.data_address(f"mosaic_gpu_{prefix}_type_info")),
            },
            platform=platform,
        )
        handlers = {stage: jax.ffi.pycapsule(native.address(f"mosaic_gpu_{prefix}_{stage}")) for stage in stages}
        jax.ffi.register_ffi_target(TARGET, handlers, platform=platform)
        _registered.add(platform)


@functools.cache
def can_report() -> bool:
    """Whether `simulated_call` can be used: the launcher's library is there, which no other part of the simulator needs."""
    try:
        handler = jax.ffi.pycapsule(native.address(SIMULATED))
    except (errors.ToolchainError, AttributeError):
        return False
    jax.ffi.register_ffi_target(SIMULATED, handler, platform="cpu")
    return True


def simulated_call(report: jax.Array, outputs: Sequence[jax.Array]) -> list[jax.Array]:
    """`outputs`, or the end of the execution if `report`, uint8[REPORT_BYTES], has text (up to a zero).

    The error that a jitted function raises is then this text.  What a Python callback raises comes out with the frames of all
    of JAX and the simulator in its text, and has been logged before.
    """
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    call = jax.ffi.ffi_call(SIMULATED, types, input_output_aliases={i + 1: i for i in range(len(types))})
    return list(call(report, *outputs))


LATE = "mosaic_gpu_simulate_late"
LateFunction = Callable[..., list[np.ndarray[Any, Any]]]
_late: list[
    tuple[LateFunction, tuple[np.dtype[Any], ...], int]
] = []  # by number: function, dtypes, how many are arguments


@functools.cache
def _late_handler() -> Any:
    """Hands Python's side of late calls to the launcher's library, once; the result keeps it alive."""
    kind = ctypes.CFUNCTYPE(
        None,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_int64),
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_char),
        ctypes.c_int64,
    )

    def handler(call: int, buffers: Any, ranks: Any, shapes: Any, count: int, message: Any, capacity: int) -> None:
        try:
            if not 0 <= call < len(_late):
                raise errors.UnsupportedCall("a program for the simulator runs only in the process that made it")
            function, dtypes, inputs = _late[call]
            arrays, at = [], 0
            for i in range(count):
                shape = tuple(int(n) for n in shapes[at : at + ranks[i]])
                at += ranks[i]
                size = math.prod(shape) * dtypes[i].itemsize
                raw = memoryview((ctypes.c_uint8 * size).from_address(buffers[i])) if size else bytearray()
                arrays.append(np.frombuffer(raw, dtypes[i]).reshape(shape))
            found = function(*arrays[:inputs], shapes=[a.shape for a in arrays[inputs:]])
            for array, x in zip(arrays[inputs:], found, strict=True):
                array[...] = x
        except BaseException as error:  # nothing may be raised into XLA
            text = f"{type(error).__name__}: {error}".encode()[: capacity - 1]
            ctypes.memmove(message, text + b"\0", len(text) + 1)

    callback = kind(handler)
    native.load().mosaic_gpu_set_late_simulator(callback)
    jax.ffi.register_ffi_target(LATE, jax.ffi.pycapsule(native.address(LATE)), platform="cpu")
    return callback


def late_call(
    function: LateFunction, args: Sequence[jax.Array], out_types: Sequence[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    """`function(*arrays, shapes=)` when the program runs, where shapes are known: of programs exported with symbols, which Python
    callbacks of JAX cannot be in.  shapes: of the results.  The exported program runs in this process only.

    Raises ToolchainError if the launcher's library, which this needs, is not there.
    """
    _late_handler()
    with _lock:
        dtypes = (*(np.dtype(x.dtype) for x in args), *(np.dtype(x.dtype) for x in out_types))
        _late.append((function, dtypes, len(args)))
        number = len(_late) - 1
    return list(jax.ffi.ffi_call(LATE, list(out_types))(*args, call=np.int64(number)))


def launch_call(
    spec: LaunchSpec,
    args: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    input_output_aliases: Mapping[int, int] | None = None,
    has_side_effect: bool = False,
) -> list[jax.Array]:
    """Calls the kernel on `args` and returns its outputs, all in row-major order.

    To be used inside a function lowered for CUDA (`jax.interpreters.mlir.lower_fun`) or under `jax.jit`.

    out_types: shape and type of each output.  Buffers of the spec count args, then outputs.
    input_output_aliases: argument index -> output index, for outputs that replace an argument.
    has_side_effect: keep the call even if no output is used.
    """
    register()
    count = len(args) + len(out_types)
    for parameter in spec.parameters:
        if isinstance(parameter, TensorMap | BufferPointer | ShapedMap | Extent) and parameter.buffer >= count:
            raise errors.UnsupportedCall(
                f"{spec.entry} uses buffer {parameter.buffer}; "
                f"the call has {len(args)} inputs and {len(out_types)} outputs"
            )
    call = jax.ffi.ffi_call(
        TARGET,
        list(out_types),
        has_side_effect=has_side_effect,
        input_output_aliases=dict(input_output_aliases or {}),
    )
    # XLA keeps attributes as strings of bytes, so the cubin travels in the compiled and in the exported program.
    attributes: dict[str, Any] = {"spec": serialize(spec)}
    return list(call(*args, **attributes))


def translate_error(error: BaseException) -> errors.MosaicGpuError | None:
    """The error of ours that a run-time exception of JAX carries in its text, as its cause; None if it has none."""
    ours = native.error_from_text(str(error))
    if ours is not None:
        ours.__cause__ = error
    return ours
