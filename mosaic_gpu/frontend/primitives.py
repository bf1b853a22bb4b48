"""JAX primitives made out of the op registry, and how an op's Python function binds one.

A Ref or a view of one (`ref.at[...]`) is not a pytree, so an operand travels as its leaves with the tree as a parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, NoReturn

import jax
import jax.extend.core as jex
import numpy as np
from jax.interpreters import mlir
from jax.ref import AbstractRef

from .. import arguments
from ..errors import UnsupportedCall
from ..memory import MemorySpace
from ..ops.registry import Op
from ..program import Literal


@dataclasses.dataclass(frozen=True)
class OperandType:
    """What an abstract rule sees of an operand.  space is None for values."""

    shape: tuple[int, ...]
    dtype: str
    space: MemorySpace | None = None


class TreeOf:
    """A hashable wrapper of a treedef and of which operands are Refs; equal trees compare equal."""

    def __init__(self, tree: Any, refs: tuple[bool, ...]) -> None:
        self.tree, self.refs = tree, refs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeOf) and (self.tree, self.refs) == (other.tree, other.refs)

    def __hash__(self) -> int:
        return hash((self.tree, self.refs))

    def __repr__(self) -> str:
        return "operands"


def split_ref(x: Any) -> tuple[Any, tuple[Any, ...]]:
    """A Ref or view as (ref, transforms)."""
    if hasattr(x, "transforms") and hasattr(x, "ref"):
        return x.ref, tuple(x.transforms)
    return x, ()


def is_ref(x: Any) -> bool:
    x = split_ref(x)[0]
    aval = getattr(x, "aval", x)
    return isinstance(aval, AbstractRef)


def space_of(x: Any) -> MemorySpace | None:
    """The memory space of a Ref or view; None for anything else."""
    ref = split_ref(x)[0]
    aval = getattr(ref, "aval", ref)
    space = getattr(aval, "memory_space", None)
    return space if isinstance(space, MemorySpace) else None


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: Any) -> str:
    return str(np.dtype(dtype)) if not hasattr(dtype, "name") else str(dtype.name)


def operand_type(x: Any) -> OperandType:
    if is_ref(x):
        return OperandType(tuple(x.shape), dtype_name(x.dtype), space_of(x))
    return OperandType(tuple(np.shape(x)), dtype_name(jax.numpy.result_type(x)))


def new_primitive(name: str) -> Any:
    """A primitive that the front end understands, and nothing else: outside of a kernel it is an error that says so."""

    def outside(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedCall(
            f"{name} is an operation of a kernel: call it in the body of a function that mosaic_gpu.kernel(...) makes a kernel of"
        )

    p = jex.Primitive(name)
    p.multiple_results = True
    p.def_impl(outside)
    mlir.register_lowering(p, outside)
    return p


@functools.cache
def primitive(op: Op) -> Any:
    p = new_primitive(op.name)
    p.def_abstract_eval(lambda *avals, results, **params: [jax.core.ShapedArray(s, np.dtype(d)) for s, d in results])
    return p


@functools.cache
def _operand_names(op: Op) -> tuple[tuple[str, bool], ...]:
    """What an op's abstract rule calls its operands, and whether None stands for one that is not there."""
    assert op.abstract_rule is not None
    parameters = inspect.signature(op.abstract_rule).parameters.values()
    return tuple((p.name, p.default is None) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def checked_operand(where: str, name: str, optional: bool, x: Any) -> OperandType | None:
    """The type of an operand, which is a Ref or view, an array or a number; a TypeError for anything else."""
    if x is None and optional:
        return None
    if not isinstance(x, (bool, int, float, np.generic)) and not (hasattr(x, "dtype") and hasattr(x, "shape")):
        arguments.refuse(where, name, x, "a Ref or an array")
    return operand_type(x)


def bind(op: Op, *operands: Any, **params: Any) -> list[Any]:
    """Bind the op's primitive.  Operands: Refs, views, arrays, scalars or None; params: hashable plain values."""
    names = _operand_names(op)
    names += tuple((f"args[{i}]", False) for i in range(len(operands) - len(names)))  # of a rule of *args
    types = tuple(checked_operand(op.name, *name, x) for name, x in zip(names, operands, strict=True))
    assert op.abstract_rule is not None
    results = tuple(op.abstract_rule(*types, **params))
    results = tuple((tuple(s), np.dtype(d) if not isinstance(d, str) else jax.numpy.dtype(d)) for s, d in results)
    refs = tuple(x is not None and is_ref(x) for x in operands)
    leaves, tree = jax.tree.flatten(tuple(split_ref(x) if r else x for x, r in zip(operands, refs, strict=True)))
    return primitive(op).bind(*leaves, operands=TreeOf(tree, refs), results=results, **params)  # type: ignore[no-any-return]


def spread(where: str, name: str, x: Any, ref: Any, dtype: str | None = None) -> Any:
    """The array or number that `name` is given, in the shape and dtype of a Ref (or `dtype`); TypeError for another dtype."""
    if not is_ref(ref):
        arguments.refuse(where, "ref", ref, "a Ref or a view of one")
    wanted = jax.numpy.dtype(dtype or ref.dtype)
    if not isinstance(x, (bool, np.bool_) if wanted.kind == "b" else (bool, int, float, np.generic)):
        if is_ref(x) or not hasattr(x, "dtype"):
            arguments.refuse(where, name, x, f"an array or a number of {wanted}")
        if x.dtype != wanted:
            raise TypeError(f"{where}: {name} is {x.dtype}, where {wanted} is needed: convert it with astype")
    return jax.numpy.broadcast_to(jax.numpy.asarray(x, wanted), ref.shape)


def dot_of(a: Any, b: Any, dtype: str) -> Any:
    """`jax.lax.dot` that accumulates in a dtype, for ops."""
    preset = jax.lax.DotAlgorithmPreset
    in_half = preset.F16_F16_F16 if operand_type(a).dtype == "float16" else preset.ANY_F8_ANY_F8_ANY
    precision = in_half if dtype == "float16" else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jax.numpy.dtype(dtype))


def axis_index_of(name: str) -> Any:
    """`jax.lax.axis_index`, for ops, which do not import JAX themselves."""
    return jax.lax.axis_index(name)


# What stands for the result of a call that was refused, where errors are collected.
refused_p = new_primitive("refused")
refused_p.def_abstract_eval(lambda *, shape, dtype: [jax.core.ShapedArray(shape, jax.numpy.dtype(dtype))])


def refused(shape: Any, dtype: Any) -> Any:
    """A value of that type that nothing defines."""
    return refused_p.bind(shape=tuple(shape), dtype=dtype_name(jax.numpy.dtype(dtype)))[0]


# Operations with a body: one jaxpr closed over the values and Refs around it.
run_scoped_p = new_primitive("run_scoped")
run_scoped_p.def_abstract_eval(lambda *a, jaxpr, collective_axes, names: [v.aval for v in jaxpr.outvars])
get_global_p = new_primitive("get_global")
get_global_p.def_abstract_eval(lambda *, aval: [aval])
warp_branch_p = new_primitive("warp_branch")
warp_branch_p.def_abstract_eval(lambda *a, jaxpr: [])
warp_map_p = new_primitive("warp_map")
warp_map_p.def_abstract_eval(lambda *a, jaxpr, axis_name: [])

# A body that was traced on its own, with what its `program_id` and `num_programs` mean; operands: ids, sizes, then its inputs.
inlined_p = new_primitive("inlined")
inlined_p.def_abstract_eval(lambda *a, jaxpr, operands, rank: list(jaxpr.out_avals))


def inlined(jaxpr: Any, ids: Any, sizes: Any, *operands: Any) -> list[Any]:
    """Run a closed jaxpr on Refs, views and scalars, as block `ids` of a grid of `sizes`."""
    scalars = [jax.numpy.asarray(n, jax.numpy.int32) for n in (*ids, *sizes)]
    everything = (*scalars, *operands)
    refs = tuple(is_ref(x) for x in everything)
    leaves, tree = jax.tree.flatten(tuple(split_ref(x) if r else x for x, r in zip(everything, refs, strict=True)))
    return inlined_p.bind(*leaves, jaxpr=jaxpr, operands=TreeOf(tree, refs), rank=len(ids))  # type: ignore[no-any-return]


@functools.cache
def slice_class() -> Any:
    """JAX's own slice class, found by asking a view for one: it has no public name outside jax.experimental.pallas."""
    found: list[Any] = []

    def ask(r: Any) -> None:
        found.append(type(r.at[0:1].transforms[0].indices[0]))

    jax.make_jaxpr(ask)(AbstractRef(jax.core.ShapedArray((4,), np.dtype("float32"))))
    return found[0]


def literal(value: Any, dtype: Any) -> Literal:
    """A NumPy or Python scalar as a plain one; floats of narrow types become the float they round to."""
    array = np.asarray(value)
    if array.shape:
        raise UnsupportedCall(f"an array constant of shape {array.shape} in a kernel; pass it as an input")
    name = dtype_name(dtype)
    if name == "bool":
        return Literal(bool(array), name)
    if jax.numpy.issubdtype(np.dtype(dtype), np.integer):
        return Literal(int(array), name)
    # A complex constant is used in what has a complex result, and that the plan refuses at its line.
    return Literal(float(array.astype(np.dtype(dtype)).real.astype(np.float64)), name)


def plain(params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Parameters as sorted pairs of hashable plain values; dtypes by name."""

    def convert(v: Any) -> Any:
        if isinstance(v, (tuple, list)):
            return tuple(convert(x) for x in v)
        if isinstance(v, np.dtype) or (isinstance(v, type) and issubclass(v, np.generic)):
            return dtype_name(np.dtype(v))
        return v.item() if isinstance(v, np.generic) else v

    return tuple(sorted((k, convert(v)) for k, v in params.items() if v is not None))
