"""One access to the same array in the memory of several devices: `multimem_store` and `multimem_load_reduce` (PTX ISA 9.7.9.14).

Compiled and simulated, never launched: a multimem address is one of a multicast object (NVLink SHARP), which the launcher does
not make.  In the simulator there is one device, so that a store is a store, and a reduction over all devices a load.

On the hardware the same memory then has two addresses, and accesses by both are ordered by a proxy fence that the language does
not have; nor has it anything that orders devices within a kernel.  So the plan lets an array be reached in one way only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .. import arguments
from ..codegen.emit_multimem import emit_multimem
from ..errors import IllegalInstruction, NoMulticastObject, UnsupportedCall
from ..layouts.shared import itemsize
from ..program import SHAPE_ONLY, Equation, Program, View, refs_of, walk
from .refs import Access
from .registry import WARPGROUP, gives, like, op

INTEGERS = ("int32", "uint32", "int64", "uint64")
HALVES = ("float16", "bfloat16")
# What a reduction is over: the rows of the table in PTX ISA 9.7.9.14, without float8.
TYPES = {
    "add": (*INTEGERS, *HALVES, "float32", "float64"),
    "min": (*INTEGERS, *HALVES),
    "max": (*INTEGERS, *HALVES),
    "and": INTEGERS,
    "or": INTEGERS,
    "xor": INTEGERS,
}
STORED = TYPES["add"]
LEAST_BYTES = 4  # of one access
# Which do not write, and may stand beside a reduction.
READS = {"get", "load", "get_indexed", "masked_load", "multimem_load_reduce", "copy_gmem_to_smem", "async_prefetch"}

INSTEAD = "it is a warpgroup's; do it outside of warp_map"
store_p = op("multimem_store", whole=True, dtypes=STORED, instead=INSTEAD)
load_reduce_p = op("multimem_load_reduce", whole=True, dtypes=STORED, instead=INSTEAD)
OPS = (store_p.name, load_reduce_p.name)


def multimem_store(source: Any, ref: Any, collective_axes: Any) -> None:
    """Store `source` (an array of the Ref's shape and dtype, or a scalar) to `ref`, a GMEM view, on all devices along mesh axes.

    collective_axes: a name or names, all axes of the mesh that `jax.shard_map` maps over.  int32, uint32, int64, uint64, float32,
    float64; float16 and bfloat16 where a thread holds at least two neighbours.  What sticks out of the array is not written.  The
    kernel reaches the array in no other way, and each device stores to a part of its own: nothing orders devices in a kernel.

    Compiled, and simulated on one device.  Raises NoMulticastObject where it would be launched, UnsupportedCall for a mesh of
    several devices and for single elements of 16 bits, IllegalInstruction for another dtype.  PTX ISA 9.7.9.14, multimem.st.
    """
    from ..frontend.primitives import bind, spread

    value = spread("multimem_store", "source", source, ref)
    bind(store_p, ref, value, collective_axes=mesh_axes("multimem_store", collective_axes))


@gives(like)
def multimem_load_reduce(ref: Any, *, collective_axes: Any, reduction_op: str) -> Any:
    """What `ref`, a GMEM view, holds on all devices along mesh axes, reduced: an array (or scalar) of its shape and dtype.

    collective_axes: as of `multimem_store`.  reduction_op: 'add' (int32, uint32, int64, uint64, float32, float64, float16 and
    bfloat16, sums of 16-bit floats being made in float32 and rounded once), 'min' and 'max' (not of float32 and float64), 'and',
    'or', 'xor' (of integers).  Of 16-bit floats a thread gets at least two neighbours.  What sticks out of the array is zero.
    The kernel writes the array in no way; what other devices hold, kernels before it have written.

    Raises what `multimem_store` does.  PTX ISA 9.7.9.14, multimem.ld_reduce.
    """
    from ..frontend.primitives import bind

    if reduction_op not in TYPES:
        arguments.refuse("multimem_load_reduce", "reduction_op", reduction_op, f"one of {', '.join(TYPES)}")
    axes = mesh_axes("multimem_load_reduce", collective_axes)
    return bind(load_reduce_p, ref, collective_axes=axes, reduction_op=reduction_op)[0]


def mesh_axes(where: str, given: Any) -> tuple[str, ...]:
    axes = arguments.names(where, "collective_axes", given)
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"{where}: collective_axes={axes} must name the axes of the mesh, each once")
    return axes


@store_p.abstract
def _(ref: Any, source: Any, *, collective_axes: tuple[str, ...]) -> Any:
    arguments.memory("multimem_store", "ref", ref, "gmem")
    return ()


@load_reduce_p.abstract
def _(ref: Any, *, collective_axes: tuple[str, ...], reduction_op: str) -> Any:
    arguments.memory("multimem_load_reduce", "ref", ref, "gmem")
    return ((ref.shape, ref.dtype),)


def _plan(ctx: Any, e: Equation) -> Access:
    view, kind = e.operands[0], e.param("reduction_op")
    assert isinstance(view, View)
    types = STORED if kind is None else TYPES[kind]
    if view.dtype not in types:
        what = "" if kind is None else f", reduction_op={kind!r},"
        raise IllegalInstruction(f"{e.op}{what} of {view.dtype}: it takes {', '.join(types)}", e.line)
    if not view.shape and itemsize(view.dtype) < LEAST_BYTES:
        raise IllegalInstruction(f"{e.op} of one {view.dtype}: it moves at least 32 bits; take two neighbours", e.line)
    _refuse_others(ctx.program, e, view)
    if kind is None:
        ctx.output_index(view.ref, e.line)
    return Access("gmem", view, not view.shape, ctx.multicast_pointer(view.ref, e.line))


def _refuse_others(program: Program, e: Equation, view: View) -> None:
    """UnsupportedCall where the kernel reaches the array in a way that nothing orders with this one."""
    outputs = program.inputs[len(program.inputs) - program.num_outputs :]
    aliased = {program.inputs[i].id: outputs[o].id for i, o in program.aliases}

    def array(v: View) -> int:
        return aliased.get(v.ref.id, v.ref.id)

    allowed = READS if e.op == load_reduce_p.name else {e.op}
    for x in walk(program.body):
        if x.op not in allowed and x.op != SHAPE_ONLY and any(array(v) == array(view) for v in refs_of(x)):
            raise UnsupportedCall(
                f"{e.op} of {view.name}, which {x.op} at {x.line} accesses as well: nothing in a kernel orders accesses of "
                "several devices, nor those by an array's own address with those by its address on all of them; use another "
                "array, or another kernel",
                e.line,
            )


def _layouts(solver: Any, e: Equation) -> None:
    solver.neighbours(e.results[0] if e.results else e.operands[1])


for _o in (store_p, load_reduce_p):
    _o.layouts(_layouts)
    _o.plan(scopes=(WARPGROUP,))(_plan)


@store_p.emit()
def _(out: Any, step: Any) -> None:
    emit_multimem(out, step.equation, step.data)


@load_reduce_p.emit()
def _(out: Any, step: Any) -> None:
    emit_multimem(out, step.equation, step.data)


@store_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.store(step.data, sim.read(step.equation.operands[1]))


@load_reduce_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.write(step.equation.results[0], sim.load(step.data))


def _on_several_devices(program: Program) -> Iterator[Equation]:
    """The operations whose address is one of a multicast object."""
    for e in walk(program.body):
        if e.op in OPS or (e.op == "semaphore_signal" and e.param("collective_axes")):
            yield e


def check_world(program: Program, mesh: Mapping[str, int]) -> None:
    """UnsupportedCall for operations on several devices in a call over other axes than the mesh has, or over several devices.

    mesh: the axes of the mesh around, with their sizes; empty: there is none, and so one device.
    """
    if not mesh:
        return
    for e in _on_several_devices(program):
        axes = e.param("collective_axes")
        if set(axes) != set(mesh):
            raise UnsupportedCall(
                f"{e.op}(collective_axes={axes}): the mesh has {tuple(mesh)}, and a multicast object is of all its devices",
                e.line,
            )
        if math.prod(mesh.values()) > 1:
            raise UnsupportedCall(
                f"{e.op} on {math.prod(mesh.values())} devices: the simulator has one, whose memory the others do not see, and "
                "no launch is made; between kernels XLA does it (jax.lax.psum, jax.lax.all_gather)",
                e.line,
            )


def refuse_launch(plan: Any) -> None:
    """NoMulticastObject for a kernel with operations on several devices."""
    e = next(_on_several_devices(plan.program), None)
    if e is not None:
        raise NoMulticastObject(
            f"{e.op} cannot be launched: its address is one of a multicast object (NVLink SHARP; cuMulticastCreate, with every "
            f"device's memory bound to it), which this launcher does not make. The kernel {plan.program.name} can be compiled "
            "and simulated (interpret=True); on GPUs let XLA combine devices (jax.lax.psum, jax.lax.all_gather)",
            e.line,
        )
