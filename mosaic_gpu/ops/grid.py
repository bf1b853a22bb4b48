"""Where am I, and how large are things at run time."""

from __future__ import annotations

from typing import Any

from .. import arguments
from ..errors import UnsupportedCall
from ..program import Equation, View
from .registry import BOTH, WARP, WARPGROUP, gives, op, whole_number

SCOPES = (WARPGROUP, WARP)
axis_index = op("axis_index", issues_only=True)
program_id_p = op("program_id", issues_only=True)
num_programs_p = op("num_programs", issues_only=True)
dim_size_p = op("dim_size", issues_only=True)


@axis_index.plan()
def _(ctx: Any, e: Equation) -> tuple[str, int]:
    """('grid' | 'cluster' | 'thread', position of the axis)."""
    name, p = e.param("axis_name"), ctx.program
    if name == p.thread_name:
        return ("thread", 0)
    for kind, names in (("grid", p.grid_names), ("cluster", p.cluster_names)):
        if name in names:
            return (kind, names.index(name))
    raise UnsupportedCall(
        f"axis_index({name!r}): the kernel has axes {p.grid_names + p.cluster_names + (p.thread_name,)}", e.line
    )


@axis_index.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    kind, axis = step.data
    out.define_scalar(step.equation.results[0], out.axis(kind, axis))


@axis_index.simulate
def _(sim: Any, step: Any) -> None:
    sim.write(step.equation.results[0], sim.axis(*step.data))


@gives(whole_number)
def program_id(axis: int) -> Any:
    """Index of this block along grid dimension `axis` (int32)."""
    from ..frontend.primitives import bind

    return bind(program_id_p, axis=arguments.whole("program_id", "axis", axis, 0))[0]


@gives(whole_number)
def num_programs(axis: int) -> Any:
    """Blocks along grid dimension `axis` (int32, a run-time value: the grid does not enter the cubin)."""
    from ..frontend.primitives import bind

    return bind(num_programs_p, axis=arguments.whole("num_programs", "axis", axis, 0))[0]


def _grid_axis(ctx: Any, e: Equation) -> tuple[str, int]:
    axis, rank = e.param("axis"), len(ctx.program.grid)
    if not 0 <= axis < rank:
        raise UnsupportedCall(f"{e.op}: axis={axis}, and the grid has {rank} dimensions: {ctx.program.grid}", e.line)
    return ("grid", axis)


@program_id_p.abstract
def _(*, axis: int) -> Any:
    return (((), "int32"),)


program_id_p.plan()(_grid_axis)


@program_id_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    out.define_scalar(step.equation.results[0], out.axis(*step.data))


@program_id_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.write(step.equation.results[0], sim.axis(*step.data))


@num_programs_p.abstract
def _(*, axis: int) -> Any:
    return (((), "int32"),)


num_programs_p.plan()(_grid_axis)


@num_programs_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    out.define_scalar(step.equation.results[0], out.axis_size(step.data[1]))


@num_programs_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.write(step.equation.results[0], sim.program.grid[step.data[1]])


@gives(whole_number)
def dim_size(ref: Any, axis: int) -> Any:
    """Extent of dimension `axis` of a GMEM Ref as a run-time int32.

    `ref.shape[axis]` is a Python number and would be compiled in; this is a parameter of the kernel, so one cubin serves
    every length.
    """
    from ..frontend.primitives import bind, checked_operand

    operand = checked_operand("dim_size", "ref", False, ref)
    arguments.memory("dim_size", "ref", operand, "gmem")
    rank = len(operand.shape)  # type: ignore[union-attr]
    return bind(dim_size_p, ref, axis=arguments.whole("dim_size", "axis", axis, -rank, rank - 1) % rank)[0]


@dim_size_p.abstract
def _(ref: Any, *, axis: int) -> Any:
    return (((), "int32"),)


@dim_size_p.plan()
def _(ctx: Any, e: Equation) -> tuple[int, int]:
    """(index of the input, axis)."""
    view: View = e.operands[0]  # type: ignore[assignment]
    return ctx.runtime_dim(view.ref, view.kept[e.param("axis")])  # type: ignore[no-any-return]


@dim_size_p.emit(BOTH, SCOPES)
def _(out: Any, step: Any) -> None:
    out.define_scalar(step.equation.results[0], out.runtime_dim(*step.data))


@dim_size_p.simulate
def _(sim: Any, step: Any) -> None:
    sim.write(step.equation.results[0], sim.runtime_dim(*step.data))
