"""What JAX's transformations make of a kernel: `vmap` one with another grid axis, differentiation an error that says why."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.interpreters import ad, batching

from ..errors import UnsupportedCall
from ..program import Affine, DimIndex, Equation, Literal, Operand, Program, Region, Value, View, walk

MOST_BLOCKS = 65535  # of an axis of the grid that is not the last


@dataclasses.dataclass(frozen=True)
class Batch:
    """What vmaps around each other have made of a call: all their axes are one of the grid and one of each array, so that
    arrays keep to the five dimensions that TMA has.

    base: the call without them.  sizes: of the axes, the outermost first; mapped: for each of them, which inputs and outputs
    have it.
    """

    base: Any
    sizes: tuple[int, ...]
    mapped: tuple[tuple[bool, ...], ...]

    def axes_of(self, i: int) -> tuple[int, ...]:
        """The axes that an input or output has."""
        return tuple(axis for axis, m in enumerate(self.mapped) if m[i])

    def size_of(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def batched(program: Program, batch: Batch) -> Program:
    """The program over arrays whose batch axes are one dimension in front, block by block along a grid axis in front."""
    number = _last_id(program)
    equations: list[Equation] = []

    def scalar(op: str, *operands: Operand, **params: Any) -> Value:
        nonlocal number
        number += 1
        result = Value(number, (), "int32")
        equations.append(Equation(op, operands, (result,), tuple(params.items()), (), program.line))
        return result

    block = scalar("program_id", axis=0)

    @functools.cache
    def place(axis: int) -> Value:
        """Where along one of the axes this block is."""
        below = batch.size_of(range(axis + 1, len(batch.sizes)))
        x = scalar("div", block, Literal(below, "int32")) if below != 1 else block
        return scalar("rem", x, Literal(batch.sizes[axis], "int32")) if axis else x

    @functools.cache
    def index(axes: tuple[int, ...]) -> DimIndex:
        """Of an array that has these axes."""
        if len(axes) == len(batch.sizes):
            return DimIndex(Affine(0, ((block, 1),)), None)
        terms = ((place(axis), batch.size_of(axes[i + 1 :])) for i, axis in enumerate(axes))
        return DimIndex(Affine(0, tuple(terms)), None)

    wide: dict[int, tuple[Value, DimIndex]] = {}
    for i, v in enumerate(program.inputs):
        if axes := batch.axes_of(i):
            wide[v.id] = dataclasses.replace(v, shape=(batch.size_of(axes), *v.shape)), index(axes)

    def operand(o: Operand) -> Operand:
        if isinstance(o, View) and o.ref.id in wide:
            ref, at = wide[o.ref.id]
            return View(ref, (at, *o.dims), o.permutation)
        return o

    def equation(e: Equation) -> Equation:
        params = e.params
        if e.op in ("program_id", "num_programs"):
            params = tuple((k, v + 1 if k == "axis" else v) for k, v in params)
        regions = tuple(
            Region(r.inputs, tuple(map(equation, r.equations)), tuple(map(operand, r.outputs))) for r in e.regions
        )
        return e.with_(operands=tuple(map(operand, e.operands)), params=params, regions=regions)

    names = program.grid_names
    taken = {*names, *program.cluster_names, program.thread_name}
    name = next(n for i in range(len(taken) + 1) if (n := f"vmap{i or ''}") not in taken)
    return dataclasses.replace(
        program,
        inputs=tuple(wide[v.id][0] if v.id in wide else v for v in program.inputs),
        body=(*equations, *map(equation, program.body)),
        grid=(batch.size_of(range(len(batch.sizes))), *program.grid),
        grid_names=(name, *names) if names else (),
    )


def _last_id(program: Program) -> int:
    values = [*program.inputs, *program.scratch]
    for e in walk(program.body):
        values += [*e.results, *(v for r in e.regions for v in r.inputs)]
    return max((v.id for v in values), default=0)


@functools.lru_cache(maxsize=256)
def _batched(batch: Batch) -> Any:
    size = batch.size_of(range(len(batch.sizes)))
    outs = tuple(jax.core.ShapedArray((size, *a.shape), a.dtype) for a in batch.base.out_avals)
    traced = batch.base.with_program(batched(batch.base.program, batch), outs)
    traced.batch = batch
    return traced


def register(call_p: Any) -> None:
    """Give a kernel's primitive these rules."""

    def batch(args: Sequence[Any], dims: Sequence[int | None], *, traced: Any) -> tuple[list[Any], list[int]]:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        if size == 0:  # TMA has no descriptors of arrays without elements
            return [jax.numpy.zeros((0, *a.shape), a.dtype) for a in traced.out_avals], [0] * len(traced.out_avals)
        inputs = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        replaced = {i for i, _ in traced.program.aliases}  # an output has the new dimension, and so what it starts with
        for i in replaced:
            if dims[i] is None:
                inputs[i] = jax.numpy.broadcast_to(inputs[i], (size, *inputs[i].shape))
        mapped = (*(d is not None or i in replaced for i, d in enumerate(dims)), *[True] * traced.program.num_outputs)
        batch = Batch(traced, (size,), (mapped,))
        inner: Batch | None = traced.batch
        if inner is not None and size * inner.size_of(range(len(inner.sizes))) <= MOST_BLOCKS:
            batch = Batch(inner.base, (size, *inner.sizes), (mapped, *inner.mapped))
            for i, x in enumerate(inputs):
                if mapped[i] and inner.axes_of(i):
                    inputs[i] = x.reshape(size * x.shape[1], *x.shape[2:])
        results = call_p.bind(*inputs, traced=_batched(batch))
        return [r.reshape(size, *a.shape) for r, a in zip(results, traced.out_avals, strict=True)], [0] * len(results)

    def differentiate(primals: Any, tangents: Any, *, traced: Any) -> NoReturn:
        raise UnsupportedCall(
            f"kernel {traced.program.name} cannot be differentiated: what its body does has no derivative rule. Wrap the call "
            "in a function with jax.custom_vjp (or jax.custom_jvp) and give the derivative there, or stop the gradient "
            "before it with jax.lax.stop_gradient",
            traced.program.line,
        )

    batching.primitive_batchers[call_p] = batch
    ad.primitive_jvps[call_p] = differentiate
