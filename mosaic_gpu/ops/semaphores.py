"""Semaphores: counters in global memory by which blocks of a launch wait for each other (PTX ISA 8.7, 8.10: release, acquire).

A signal comes after all that its warpgroup (under `warp_map`: its warp) has done before: its threads meet, one of them fences
and adds.  A wait is made by one thread, which fences when the counter is high enough; then the threads meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import arguments
from ..codegen.emit_multimem import BASE
from ..errors import UnsupportedCall
from ..program import Affine, Equation, Operand, View
from .barriers import single
from .multimem import mesh_axes
from .registry import BOTH, WARP, WARPGROUP, gives, op, whole_number

SCOPES = (WARPGROUP, WARP)
signal_p = op("semaphore_signal", issues_only=True)
wait_p = op("semaphore_wait", issues_only=True)
read_p = op("semaphore_read", issues_only=True)
fetch_add_p = op("semaphore_fetch_add", issues_only=True)
MEMORY_SCOPES = ("sys", "gpu")


@dataclasses.dataclass(frozen=True)
class SemaphoreUse:
    """Which semaphore: the kernel's input or output that holds the array, its value id, and the index of each dimension."""

    input: int
    array: int
    index: tuple[Affine, ...]


@dataclasses.dataclass(frozen=True)
class SemaphoreSignal:
    """One signal of `semaphore_signal_parallel`.  ref: the semaphore; inc: what is added; device_id: None, this device."""

    ref: Any
    _: dataclasses.KW_ONLY
    device_id: Any = None
    inc: Any = 1


def semaphore_signal(semaphore: Any, inc: Any = 1, *, device_id: Any = None, memory_scope: str = "sys") -> None:
    """Add `inc` (an int32 scalar) to a semaphore, after all that this warpgroup has read and written (a release).

    memory_scope: whom it orders that with, "gpu": this GPU's threads, "sys": other devices and the host, too.
    device_id: None; UnsupportedCall for another device's, whose semaphores have no address here.
    """
    semaphore_signal_parallel(SemaphoreSignal(semaphore, device_id=device_id, inc=inc), memory_scope=memory_scope)


def semaphore_signal_parallel(*signals: SemaphoreSignal, memory_scope: str = "sys") -> None:
    """Several signals for the price of one fence: all come after what this warpgroup has done, in no order among themselves."""
    from ..frontend.primitives import bind

    where = "semaphore_signal"
    _memory_scope(where, memory_scope)
    operands: list[Any] = []
    for i, s in enumerate(signals):
        if not isinstance(s, SemaphoreSignal):
            arguments.refuse(
                "semaphore_signal_parallel", f"signals[{i}]", s, "plgpu.SemaphoreSignal(ref, device_id=None)"
            )
        _number(where, s.inc)
        operands += [single(s.ref), s.inc]
    if not operands:
        raise ValueError("semaphore_signal_parallel: no signals")
    elsewhere = next((f"device_id={arguments.shown(s.device_id)}" for s in signals if s.device_id is not None), "")
    bind(signal_p, *operands, scope=memory_scope, elsewhere=elsewhere, collective_axes=())


def semaphore_signal_multicast(semaphore: Any, value: Any = 1, *, collective_axes: Any) -> None:
    """Add `value` (an int32 scalar) to a semaphore on all devices along mesh axes, after all that this warpgroup has done.

    collective_axes: a name or names, all axes of the mesh that `jax.shard_map` maps over.  Compiled, and simulated on one device,
    as `multimem_store` is: NoMulticastObject where it would be launched, UnsupportedCall for a mesh of several devices.
    PTX ISA 9.7.9.14, multimem.red, behind a fence of the system's scope.
    """
    from ..frontend.primitives import bind

    where = "semaphore_signal_multicast"
    _number(where, value)
    axes = mesh_axes(where, collective_axes)
    bind(signal_p, single(semaphore), value, scope="sys", elsewhere="", collective_axes=axes)


def semaphore_wait(semaphore: Any, value: Any = 1, *, decrement: bool = True, memory_scope: str = "sys") -> None:
    """Wait until a semaphore is at least `value` (an int32 scalar), then go on after what its signallers had done (an acquire).

    decrement: take `value` off it, so that the next wait is for signals of its own.  memory_scope: as of `semaphore_signal`.
    """
    from ..frontend.primitives import bind

    _memory_scope("semaphore_wait", memory_scope)
    taken = arguments.flag("semaphore_wait", "decrement", decrement)
    bind(wait_p, single(semaphore), value, decrement=taken, scope=memory_scope)


@gives(whole_number)
def semaphore_read(semaphore: Any) -> Any:
    """The value of a semaphore, an int32 scalar, the same in all threads.  It orders nothing: wait for what is to be read."""
    from ..frontend.primitives import bind

    return bind(read_p, single(semaphore))[0]


@gives(whole_number)
def semaphore_fetch_add(semaphore: Any, inc: Any = 1) -> Any:
    """Add `inc` (an int32 scalar) to a semaphore and return what it was before, an int32 scalar, the same in all threads.

    Each call gets another value, so a counter that starts at zero hands out numbers: which tile a block works on next, say.  It
    orders nothing (PTX ISA 9.7.13.5, atom.relaxed.gpu): for that there are `semaphore_signal` and `semaphore_wait`.
    """
    from ..frontend.primitives import bind

    _number("semaphore_fetch_add", inc)
    return bind(fetch_add_p, single(semaphore), inc)[0]


def _number(where: str, inc: Any) -> None:
    if not isinstance(inc, (int, np.integer)) and not hasattr(inc, "aval"):
        arguments.refuse(where, "inc", inc, "an int32 scalar")


def _memory_scope(where: str, given: Any) -> None:
    if given not in MEMORY_SCOPES:
        arguments.refuse(where, "memory_scope", given, '"sys" or "gpu"')


def _checked(where: str, semaphore: Any, name: str = "", number: Any = None) -> None:
    arguments.memory(where, "semaphore", semaphore, "semaphore")
    if number is not None and (
        number.shape or number.space is not None or number.dtype not in ("int32", "uint32", "int64")
    ):
        raise TypeError(f"{where}: {name} is an int32 scalar, not {number.dtype}{list(number.shape)}")


@signal_p.abstract
def _(*operands: Any, scope: str, elsewhere: str, collective_axes: tuple[str, ...]) -> Any:
    for semaphore, inc in zip(operands[::2], operands[1::2], strict=True):
        _checked("semaphore_signal", semaphore, "inc", inc)
    return ()


@wait_p.abstract
def _(semaphore: Any, value: Any, *, decrement: bool, scope: str) -> Any:
    _checked("semaphore_wait", semaphore, "value", value)
    return ()


@read_p.abstract
def _(semaphore: Any) -> Any:
    _checked("semaphore_read", semaphore)
    return (((), "int32"),)


@fetch_add_p.abstract
def _(semaphore: Any, inc: Any) -> Any:
    _checked("semaphore_fetch_add", semaphore, "inc", inc)
    return (((), "int32"),)


def _uses(ctx: Any, e: Equation) -> tuple[SemaphoreUse, ...]:
    views = [o for o in e.operands if isinstance(o, View)]
    if elsewhere := e.param("elsewhere"):
        raise UnsupportedCall(
            f"{e.op}({elsewhere}): semaphores of other devices have no address in a kernel; let XLA synchronise devices between "
            "two kernels (jax.lax.psum and the like), signal this device's with device_id=None",
            e.line,
        )
    for v in views:
        if v.shape:
            raise UnsupportedCall(f"{e.op}: semaphores of shape {v.shape}; select one with semaphore.at[index]", e.line)
    address = ctx.multicast_pointer if e.param("collective_axes") else ctx.pointer
    return tuple(SemaphoreUse(address(v.ref, e.line), v.ref.id, tuple(d.start for d in v.dims)) for v in views)


for _o in (signal_p, wait_p, read_p, fetch_add_p):
    _o.plan()(_uses)


def _told(layouts: Any, e: Equation) -> int:
    return 4  # bytes through which one thread tells the others


for _o in (read_p, fetch_add_p):
    _o.scratch(_told)


def _place(out: Any, use: SemaphoreUse, base: str = "p") -> str:
    if not use.index:
        return f"{base}{use.input}"
    return f"{base}{use.input} + {out.global_index(use.input, [out.affine(i) for i in use.index])}"


def _count(out: Any, x: Operand) -> str:
    return f"(int)({out.scalar(x)})"


@signal_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    suffix = "_sys" if step.equation.param("scope") == "sys" else ""
    everywhere = bool(step.equation.param("collective_axes"))
    add, base = ("multimem_signal", BASE) if everywhere else (f"semaphore_add{suffix}", "p")
    out.after_loads()
    out.role_sync()
    with out.elected():
        out.line(f"semaphore_fence{suffix}();")
        for use, inc in zip(step.data, step.equation.operands[1::2], strict=True):
            out.line(f"{add}({_place(out, use, base)}, {_count(out, inc)});")


@wait_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    e, (use,) = step.equation, step.data
    function = "semaphore_take" if e.param("decrement") else "semaphore_wait"
    with out.elected():
        out.line(f"{function}({_place(out, use)}, {_count(out, e.operands[1])});")
        out.line(f"semaphore_fence{'_sys' if e.param('scope') == 'sys' else ''}();")
    out.role_sync()


@read_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    _tell(out, step, f"semaphore_read({_place(out, step.data[0])})")


@fetch_add_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    count = _count(out, step.equation.operands[1])
    _tell(out, step, f"semaphore_fetch_add({_place(out, step.data[0])}, {count})")


def _tell(out: Any, step: Any, call: str) -> None:
    """The result is what one thread gets of `call`."""
    result = step.equation.results[0]
    if out.single_thread:
        out.define_scalar(result, call)
    elif out.scope is WARP:
        out.define_scalar(result, f"__shfl_sync(~0u, lane == 0 ? {call} : 0, 0)")
    else:
        told = f"*(volatile int*)(shared + {out.scratch})"
        with out.elected():
            out.line(f"{told} = {call};")
        out.role_sync()
        out.define_scalar(result, f"uniform({told})")
        out.role_sync()  # before the place is used again


@signal_p.simulate
def _(sim: Any, step: Any) -> None:
    from ..simulator import semaphores

    semaphores.signal(sim, step.data, [int(sim.read(x)) for x in step.equation.operands[1::2]])


@wait_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    from ..simulator import semaphores

    e = step.equation
    yield from semaphores.wait(sim, step.data[0], int(sim.read(e.operands[1])), e.param("decrement"))


@read_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    from ..simulator import semaphores

    yield from semaphores.read(sim, step.data[0])


@fetch_add_p.simulate
def _(sim: Any, step: Any) -> Iterator[Any]:
    from ..simulator import semaphores

    yield from semaphores.fetch_add(sim, step.data[0], int(sim.read(step.equation.operands[1])))
