"""Running a traced kernel: in the simulator where there is no GPU, else compiled and launched."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..codegen.build import compile_plan
from ..codegen.emitter import ENTRY, emit, launch_grid, parameters
from ..codegen.nvrtc import Compiled
from ..errors import DeviceMismatch, MosaicGpuError
from ..garbage import uncollected
from ..layouts.shared import itemsize
from ..ops.multimem import refuse_launch
from ..plan.build import build_plan
from ..plan.model import Plan
from ..plan.tma import tensor_map_arguments
from ..program import Program
from . import device, jax_ffi
from .launch_spec import BufferPointer, Extent, LaunchSpec, Parameter, Scalar, ShapedMap, TensorMap

if TYPE_CHECKING:
    from ..frontend.kernel import Traced

log = logging.getLogger("mosaic_gpu")
_last: list[MosaicGpuError] = []
simulated: collections.Counter[str] = (
    collections.Counter()
)  # how often this process has simulated a kernel, by its name


def last_report() -> MosaicGpuError | None:
    """The error of the last simulated kernel that failed; inside jit JAX wraps the exception, this is the object."""
    return _last[-1] if _last else None


def target_arch(program: Program, capability: tuple[int, int] | None) -> str:
    """The architecture to compile for: the program's, else the device's, else sm_90a."""
    names = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
    if capability is None:
        return program.params.arch or "sm_90a"
    have = names.get(capability)
    if have is None:
        raise DeviceMismatch(
            f"compute capability {capability[0]}.{capability[1]}: kernels run on 9.0 (Hopper), 10.0 and 10.3 (Blackwell)",
            program.line,
        )
    if program.params.arch not in (None, have):
        raise DeviceMismatch(f"the kernel is for {program.params.arch}, the device is {have}", program.line)
    return have


@functools.lru_cache(maxsize=256)
def plan_of(program: Program, arch: str) -> Plan:
    with uncollected():
        return build_plan(program, arch)


@functools.lru_cache(maxsize=256)
def plan_to_simulate(program: Program) -> Plan:
    """The plan, after the emitter has seen it: what it refuses, the simulator must not accept."""
    plan = plan_of(program, target_arch(program, None))
    emit(plan)
    return plan


def writes_nothing(traced: Traced) -> bool:
    """An empty grid, or outputs without elements: nothing runs, on a GPU or in the simulator, and outputs are zeros."""
    return math.prod(traced.program.grid) == 0 or all(math.prod(a.shape) == 0 for a in traced.out_avals)


def run(traced: Traced, args: Sequence[Any]) -> list[Any]:
    """Outside jit: the error class itself comes out."""
    platforms = {d.platform for x in args if isinstance(x, jax.Array) for d in x.devices()} or {jax.default_backend()}
    if not traced.simulate and ("gpu" in platforms or "cuda" in platforms):
        try:
            return list(_jitted(traced)(*args))
        except Exception as error:
            ours = jax_ffi.translate_error(error)
            if ours is not None:
                raise ours from error
            raise
    _announce(traced)
    return [jax.numpy.asarray(o) for o in simulate(traced, *(np.asarray(x) for x in args))]


@functools.lru_cache(maxsize=256)
def _jitted(traced: Traced) -> Any:
    from ..frontend.kernel import call_p

    return jax.jit(lambda *a: call_p.bind(*a, traced=traced))


def _announce(traced: Traced) -> None:
    """Say once in a process that kernels are simulated, but not to who has asked for it (`interpret=`)."""
    if not traced.simulate:
        _say_once()


@functools.cache
def _say_once() -> None:
    log.warning("mosaic_gpu: no GPU here, kernels run in the simulator")


def simulate(traced: Traced, *arrays: np.ndarray) -> list[np.ndarray]:
    """The kernel in the simulator, on NumPy arrays."""
    from ..simulator.machine import simulate as run_simulator

    simulated[traced.program.name] += 1
    try:
        plan = plan_to_simulate(traced.program)
        if writes_nothing(traced):
            start = {o: arrays[i] for i, o in traced.program.aliases}
            return [np.array(start.get(i, np.zeros(a.shape, a.dtype))) for i, a in enumerate(traced.out_avals)]
        return run_simulator(plan, [np.asarray(a) for a in arrays], traced.simulator_params)
    except MosaicGpuError as error:
        _last[:] = [error]
        raise


def simulator_call(traced: Traced, args: Sequence[Any]) -> list[Any]:
    """The kernel as a callback, for a CPU lowering."""
    _announce(traced)
    if not jax_ffi.can_report():
        return _callback(traced, args)
    plan_to_simulate(traced.program)  # what the compiler refuses is refused when it is lowered
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.out_avals]

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        report = np.zeros(jax_ffi.REPORT_BYTES, np.uint8)
        try:
            return [report, *simulate(traced, *arrays)]
        except MosaicGpuError as error:
            text = f"{type(error).__name__}: {error}".encode()[: report.size - 1]
            report[: len(text)] = np.frombuffer(text, np.uint8)
            return [report, *(np.zeros(t.shape, t.dtype) for t in types)]

    report, *outputs = jax.pure_callback(call, [jax.ShapeDtypeStruct((jax_ffi.REPORT_BYTES,), np.uint8), *types], *args)
    return jax_ffi.simulated_call(report, outputs)


def _callback(traced: Traced, args: Sequence[Any]) -> list[Any]:
    """As `simulator_call` where there is nothing to hand a report on with: XLA wraps the exception, many frames of it."""
    plan_to_simulate(traced.program)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.out_avals]
    return list(jax.pure_callback(lambda *a: simulate(traced, *a), types, *args))


def gpu_call(traced: Traced, args: Sequence[Any]) -> list[Any]:
    """The kernel compiled and launched, for a CUDA lowering."""
    if traced.simulate:
        return _callback(traced, args)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.out_avals]
    devices = device.gpu_devices()
    capability = device.compute_capability(devices[0]) if devices else None
    plan = plan_of(traced.program, target_arch(traced.program, capability))
    if writes_nothing(traced):
        start = {o: args[i] for i, o in traced.program.aliases}
        return [start[i] if i in start else jax.numpy.zeros(t.shape, t.dtype) for i, t in enumerate(types)]
    return launch(plan, args, types, dict(traced.program.aliases))


def launch(
    plan: Plan, args: Sequence[Any], types: Sequence[Any], aliases: Mapping[int, int], shaped: Collection[int] = ()
) -> list[Any]:
    """The call of a compiled plan, for a lowering; shaped: as for `launch_spec`."""
    counters = plan.program.inputs[len(args) + len(types) :]  # XLA fills zeros in before each launch, in place
    zeros = [jax.numpy.zeros(v.shape, np.int32) for v in counters]
    alike = [jax.ShapeDtypeStruct(v.shape, np.int32) for v in counters]
    both = dict(aliases) | {len(args) + i: len(types) + i for i in range(len(counters))}
    return jax_ffi.launch_call(launch_spec(plan, shaped), [*args, *zeros], [*types, *alike], both)[: len(types)]


def launch_spec(plan: Plan, shaped: Collection[int] = ()) -> LaunchSpec:
    """Compile a plan and say how to launch it on arrays of its program's shapes; shaped: as for `spec_without_cubin`."""
    spec = spec_without_cubin(plan, shaped)  # what is never launched is not compiled first
    return with_cubin(spec, compile_plan(plan, check_in_background=True).compiled)


def with_cubin(spec: LaunchSpec, compiled: Compiled) -> LaunchSpec:
    """A launch of what has been compiled."""
    toolchain = f"{compiled.toolchain} {compiled.arch}"
    return dataclasses.replace(spec, cubin=compiled.cubin, toolchain=toolchain)


def spec_without_cubin(plan: Plan, shaped: Collection[int] = ()) -> LaunchSpec:
    """How to launch a plan on arrays of its program's shapes, all but the cubin.

    Buffers: the inputs, zeros for each semaphore, the outputs, the semaphores.
    shaped: inputs and outputs (counted on) whose extents are those that each call brings.
    Raises NoMulticastObject for a kernel with multimem operations.
    """
    refuse_launch(plan)
    program = plan.program
    shapes = [v.shape for v in program.inputs]
    given = len(shapes) - program.num_outputs
    out: list[Parameter] = []

    def buffer(i: int) -> int:
        return i if i < given else i + program.semaphores

    for p in parameters(plan):
        if p.kind == "map":
            m = plan.maps[p.index]
            if m.input in shaped:
                steps = tuple((d.axis, d.step, d.extent) for d in m.dims)
                out.append(ShapedMap(buffer(m.input), m.dtype, steps, m.box, m.swizzle))
                continue
            dims, strides = tensor_map_arguments(m, shapes[m.input], itemsize(m.dtype))
            out.append(TensorMap(buffer(m.input), m.dtype, dims, strides, m.box, m.swizzle))
        elif p.kind == "pointer":
            out.append(BufferPointer(buffer(p.index)))
        elif p.kind == "dim" and p.index in shaped:
            out.append(Extent(buffer(p.index), p.axis))
        else:
            out.append(Scalar(shapes[p.index][p.axis] if p.kind == "dim" else program.grid[p.index], "int32"))
    blocks = math.prod(program.cluster)
    return LaunchSpec(
        b"",
        ENTRY,
        launch_grid(plan),
        plan.threads,
        (blocks, 1, 1),
        plan.shared_bytes,
        tuple(out),
        f"not compiled, for {plan.arch}",
        plan.early,
    )
