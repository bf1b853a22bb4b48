"""What JAX's transformations make of a kernel: `vmap` one with another grid axis, differentiation an error that says why."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.interpreters import ad, batching

from ..errors import UnsupportedCall
from ..program import Affine, DimIndex, Equation, Operand, Program, Region, Value, View, walk


def batched(program: Program, size: int, mapped: Sequence[bool]) -> Program:
    """The program over arrays with one more dimension in front, block by block along a grid axis put in front.

    mapped: of each input and output, whether it has the new dimension.
    """
    index = Value(1 + _last_id(program), (), "int32")
    at = DimIndex(Affine(0, ((index, 1),)), None)
    wide = {
        v.id: dataclasses.replace(v, shape=(size, *v.shape)) for v, m in zip(program.inputs, mapped, strict=True) if m
    }

    def operand(o: Operand) -> Operand:
        if isinstance(o, View) and o.ref.id in wide:
            return View(wide[o.ref.id], (at, *o.dims), o.permutation)
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
        inputs=tuple(wide.get(v.id, v) for v in program.inputs),
        body=(Equation("program_id", (), (index,), (("axis", 0),), (), program.line), *map(equation, program.body)),
        grid=(size, *program.grid),
        grid_names=(name, *names) if names else (),
    )


def _last_id(program: Program) -> int:
    values = [*program.inputs, *program.scratch]
    for e in walk(program.body):
        values += [*e.results, *(v for r in e.regions for v in r.inputs)]
    return max((v.id for v in values), default=0)


@functools.lru_cache(maxsize=256)
def _batched(traced: Any, size: int, mapped: tuple[bool, ...]) -> Any:
    outs = tuple(jax.core.ShapedArray((size, *a.shape), a.dtype) for a in traced.out_avals)
    return traced.with_program(batched(traced.program, size, (*mapped, *[True] * len(outs))), outs)


def register(call_p: Any) -> None:
    """Give a kernel's primitive these rules."""

    def batch(args: Sequence[Any], dims: Sequence[int | None], *, traced: Any) -> tuple[list[Any], list[int]]:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        inputs = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        replaced = {i for i, _ in traced.program.aliases}  # an output has the new dimension, and so what it starts with
        for i in replaced:
            if dims[i] is None:
                inputs[i] = jax.numpy.broadcast_to(inputs[i], (size, *inputs[i].shape))
        mapped = tuple(d is not None or i in replaced for i, d in enumerate(dims))
        results = call_p.bind(*inputs, traced=_batched(traced, size, mapped))
        return results, [0] * len(results)

    def differentiate(primals: Any, tangents: Any, *, traced: Any) -> NoReturn:
        raise UnsupportedCall(
            f"kernel {traced.program.name} cannot be differentiated: what its body does has no derivative rule. Wrap the call "
            "in a function with jax.custom_vjp (or jax.custom_jvp) and give the derivative there, or stop the gradient "
            "before it with jax.lax.stop_gradient",
            traced.program.line,
        )

    batching.primitive_batchers[call_p] = batch
    ad.primitive_jvps[call_p] = differentiate
