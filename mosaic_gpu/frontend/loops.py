"""Control flow and scopes as the user writes them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax import export

from .. import arguments
from ..collecting import to_its_end
from ..errors import UnsupportedCall, UnsupportedPrimitive
from .foreign import in_our_words
from .memory import InitialAccumulator, RefType
from .primitives import get_global_p, is_ref, run_scoped_p, slice_class, warp_branch_p, warp_map_p
from .trace import leaf_names


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Decorator: run the function if `condition` (a scalar bool) holds.  On a warpgroup index it makes a role."""

    if not isinstance(condition, (bool, int)) and (not hasattr(condition, "dtype") or np.shape(condition)):
        arguments.refuse(
            "when", "condition", condition, "a bool or a scalar (of an array, one element or jnp.any of it)"
        )

    def run(body: Callable[[], None]) -> None:
        arguments.function("when", "the decorated object", body)

        def branch() -> None:
            to_its_end(body, in_our_words)

        if isinstance(condition, (bool, np.bool_)):
            if condition:
                branch()
        else:
            jax.lax.cond(condition, branch, lambda: None)

    return run


def loop(
    lower: Any, upper: Any, *, init_carry: Any = None, step: Any = 1, unroll: int | bool | None = None
) -> Callable[..., Any]:
    """Decorator: run the function for lower, lower + step, ... below `upper`, as `jax.lax.fori_loop` does.

    Without `init_carry` it is called with the index; else with the index and the carry, whose next value it returns, and the
    decorated name is the last one.
    """
    for name, x in (("lower", lower), ("upper", upper), ("step", step)):
        _integer("loop", name, x)

    def run(body: Callable[..., Any]) -> Any:
        arguments.function("loop", "the decorated object", body)

        def one(i: Any, carry: Any) -> Any:
            at = lower + i * step
            return body(at) if init_carry is None else body(at, carry)

        return jax.lax.fori_loop(0, cdiv(upper - lower, step), one, init_carry, unroll=unroll)

    return run


_bounded = contextvars.ContextVar("a slice's size may be traced", default=False)


@contextlib.contextmanager
def bounded_slices() -> Iterator[None]:
    """While an index map is called: the size of a `ds` may be traced."""
    token = _bounded.set(True)
    try:
        yield
    finally:
        _bounded.reset(token)


def ds(start: Any, size: Any) -> Any:
    """A slice of `size` elements from `start` (which may be traced).

    size: an int; in an index map, for a `BoundedSlice`, it may be a traced integer, too.
    """
    _integer("ds", "start", start)
    if _bounded.get() and hasattr(size, "aval"):
        _integer("ds", "size", size)
        return slice_class()(start, size, 1)
    return slice_class()(start, arguments.whole("ds", "size", size, 0), 1)


def cdiv(a: Any, b: Any) -> Any:
    """a / b rounded up; for ints, symbols of `jax.export` and traced integers (both positive)."""
    if export.is_symbolic_dim(a) or export.is_symbolic_dim(b):
        return -(-a // b)
    _integer("cdiv", "a", a)
    _integer("cdiv", "b", b)
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return div(a + (b - 1), b)


def div(a: Any, b: Any) -> Any:
    """a / b rounded towards zero: `lax.div`, but a Python number takes the other's dtype (also where x64 is enabled)."""
    _number("div", "a", a)
    _number("div", "b", b)
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return jax.lax.div(*_alike(a, b))


def rem(a: Any, b: Any) -> Any:
    """What `div` leaves, with the sign of a: ring slots are `rem(step, stages)`."""
    _number("rem", "a", a)
    _number("rem", "b", b)
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) % abs(b) * (-1 if a < 0 else 1)
    return jax.lax.rem(*_alike(a, b))


def _integer(where: str, name: str, x: Any) -> None:
    traced = hasattr(x, "dtype") and not np.shape(x) and jax.numpy.issubdtype(x.dtype, jax.numpy.integer)
    if isinstance(x, bool) or not (isinstance(x, int) or traced):
        arguments.refuse(where, name, x, "an int or a traced integer")


def _number(where: str, name: str, x: Any) -> None:
    if isinstance(x, bool) or not (isinstance(x, (int, float)) or hasattr(x, "dtype")):
        arguments.refuse(where, name, x, "a number or a traced one")


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Two integers of one dtype, a traced one's."""
    dtype = jax.numpy.result_type(b if isinstance(a, int) else a)
    return (jax.numpy.asarray(a, dtype) if isinstance(a, int) else a), (
        jax.numpy.asarray(b, dtype) if isinstance(b, int) else b
    )


def run_scoped(f: Callable[..., Any], *types: Any, collective_axes: Sequence[str] | str = (), **named: Any) -> Any:
    """Call `f` with buffers that live as long as the call: `run_scoped(f, SMEM(...), acc=ACC(...))`.

    Returns what f returns (arrays, no Refs).  Shared memory, barriers and TMEM belong to the block: in a role of several
    warpgroups pass `collective_axes=<thread_name>` to say that all of them share it.
    """
    arguments.function("run_scoped", "f", f)
    axes = arguments.names("run_scoped", "collective_axes", collective_axes)
    leaves, tree = jax.tree.flatten((types, named), is_leaf=lambda x: x is None or isinstance(x, RefType))
    names = tuple(leaf_names(f, types, named, lambda x: x is None or isinstance(x, RefType)))
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, RefType):
            wanted = "a memory space such as SMEM((128, 64), dtype)"
            if isinstance(leaf, InitialAccumulator):
                wanted += "; ACC.init(x) is an initial value of run_state. Here: ACC(x.shape, x.dtype), and acc[...] = x in it"
            arguments.refuse("run_scoped", name, leaf, wanted)
        if leaf.space.kind == "semaphore":
            raise UnsupportedCall(
                f"run_scoped: {name} is a semaphore, which belongs to the launch: put it in scratch_types, or use get_global"
            )
    out_tree: list[Any] = []

    def flat(*refs: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, refs)
        results, structure = jax.tree.flatten(f(*args, **kwargs))
        if any(is_ref(r) for r in results):
            raise ValueError("run_scoped cannot return a Ref: its memory ends with the scope")
        out_tree.append(structure)
        return results

    closed = jax.make_jaxpr(flat)(*(leaf.aval() for leaf in leaves))
    out = run_scoped_p.bind(*closed.consts, jaxpr=closed.jaxpr, collective_axes=axes, names=names)
    return jax.tree.unflatten(out_tree[-1], out)


def get_global(what: RefType) -> Any:
    """Semaphores of the launch, zero when it begins: `get_global(SemaphoreType.REGULAR)`, each call others.

    The same as a parameter that `scratch_types` makes.  Raises TypeError for another type.
    """
    if not isinstance(what, RefType) or what.space.kind != "semaphore":
        arguments.refuse("get_global", "what", what, "SemaphoreType.REGULAR or SemaphoreType.REGULAR(shape)")
    return get_global_p.bind(aval=what.aval())[0]


def inline_mgpu(*_: Any, **__: Any) -> NoReturn:
    """Refused with UnsupportedPrimitive: it takes MLIR of JAX's own compiler, which kernels here do not go through."""
    raise UnsupportedPrimitive(
        "inline_mgpu takes MLIR of JAX's Mosaic GPU compiler, and kernels here become CUDA C++: write it with the operations "
        "that docs/ops.md lists"
    )


def run_state(f: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A function from initial values to what `f` makes of them: `run_state(f)(ACC.init(x))`.

    f gets Refs in the structure of the initial values, each `ACC.init(array)`, which live as long as the call; what they hold
    at its end comes back in that structure.  Waits that reading them needs are put in.  Raises TypeError for other values: for
    shared memory and barriers there is `run_scoped`.
    """
    arguments.function("run_state", "f", f)

    def run(init: Any) -> Any:
        leaves, tree = jax.tree.flatten(init, is_leaf=lambda x: x is None)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, InitialAccumulator):
                arguments.refuse(
                    "run_state",
                    f"initial value {i}",
                    leaf,
                    "ACC.init(array); arrays travel as carries of loops, other memory is run_scoped's",
                )

        def scope(*refs: Any) -> tuple[Any, ...]:
            for ref, leaf in zip(refs, leaves, strict=True):
                ref[...] = leaf.value
            f(jax.tree.unflatten(tree, refs))
            return tuple(ref[...] for ref in refs)

        return jax.tree.unflatten(tree, run_scoped(scope, *(leaf.type for leaf in leaves)))

    return run


def warp_map(f: Callable[[Any], None]) -> None:
    """Run `f(warp_id)` on each of the four warps of this warpgroup, on its own; branch on `warp_id` for roles.

    Inside, operations have single-warp meaning: scalars, barriers, TMA and tensor-core issue; no register arrays.
    """

    arguments.function("warp_map", "f", f)

    def body(warp: Any) -> tuple[()]:
        to_its_end(lambda: f(warp), in_our_words)
        return ()

    closed = jax.make_jaxpr(body)(jax.ShapeDtypeStruct((), jax.numpy.int32))
    warp_map_p.bind(*closed.consts, jaxpr=closed.jaxpr, axis_name=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpMesh:
    """The four warps of a warpgroup as an axis, for `core_map`.  axis_name: how `lax.axis_index` asks for the warp, 0 to 3."""

    axis_name: str

    def __post_init__(self) -> None:
        if not isinstance(self.axis_name, str):
            arguments.refuse("WarpMesh", "axis_name", self.axis_name, "a name")


def core_map(mesh: WarpMesh) -> Callable[[Callable[[], None]], None]:
    """Decorator of a function without arguments that each warp of this warpgroup runs on its own, at once, as in `warp_map`:

        @core_map(WarpMesh(axis_name="warp"))
        def _():
            warp = lax.axis_index("warp")

    Raises TypeError for another mesh, ValueError for a name that an axis of the kernel has.
    """
    if not isinstance(mesh, WarpMesh):
        arguments.refuse("core_map", "mesh", mesh, "a WarpMesh: grids and warpgroups are arguments of kernel()")
    name = mesh.axis_name

    def run(f: Callable[[], None]) -> None:
        arguments.function("core_map", "f", f)
        with contextlib.suppress(NameError):
            jax.lax.axis_size(name)
            raise ValueError(f"WarpMesh: the kernel has an axis {name!r} already; give the warps another name")

        def body() -> tuple[()]:
            to_its_end(f, in_our_words)
            return ()

        closed = jax.make_jaxpr(body, axis_env=[(name, 4)])()
        warp_map_p.bind(*closed.consts, jaxpr=closed.jaxpr, axis_name=name)

    return run


def bind_warp_branch(condition: Any, body: Callable[[], None]) -> None:
    """Trace the body of `when_any_in_warp`."""

    def traced() -> tuple[()]:
        to_its_end(body, in_our_words)
        return ()

    closed = jax.make_jaxpr(traced)()
    warp_branch_p.bind(condition, *closed.consts, jaxpr=closed.jaxpr)
