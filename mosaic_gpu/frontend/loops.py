"""Control flow and scopes as the user writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .memory import RefType
from .primitives import is_ref, run_scoped_p, slice_class, warp_branch_p, warp_map_p
from .trace import leaf_names


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Decorator: run the function if `condition` (a scalar bool) holds.  On a warpgroup index it makes a role."""

    def run(body: Callable[[], None]) -> None:
        def branch() -> None:
            body()

        if isinstance(condition, bool):
            if condition:
                branch()
        else:
            jax.lax.cond(condition, branch, lambda: None)

    return run


def ds(start: Any, size: int) -> Any:
    """A slice of `size` elements from `start` (which may be traced)."""
    return slice_class()(start, int(size), 1)


def cdiv(a: Any, b: Any) -> Any:
    """a / b rounded up; for ints and for traced integers (both positive)."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return div(a + (b - 1), b)


def div(a: Any, b: Any) -> Any:
    """a / b rounded towards zero: `lax.div`, but a Python number takes the other's dtype (also where x64 is enabled)."""
    return a // b if isinstance(a, int) and isinstance(b, int) else jax.lax.div(*_alike(a, b))


def rem(a: Any, b: Any) -> Any:
    """What `div` leaves, with the sign of a: ring slots are `rem(step, stages)`."""
    return a % b if isinstance(a, int) and isinstance(b, int) else jax.lax.rem(*_alike(a, b))


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
    leaves, tree = jax.tree.flatten((types, named), is_leaf=lambda x: isinstance(x, RefType))
    for leaf in leaves:
        if not isinstance(leaf, RefType):
            raise TypeError(f"run_scoped allocates memory spaces such as SMEM((128, 64), dtype), not {leaf!r}")
    out_tree: list[Any] = []

    def flat(*refs: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, refs)
        results, structure = jax.tree.flatten(f(*args, **kwargs))
        if any(is_ref(r) for r in results):
            raise ValueError("run_scoped cannot return a Ref: its memory ends with the scope")
        out_tree.append(structure)
        return results

    closed = jax.make_jaxpr(flat)(*(leaf.aval() for leaf in leaves))
    axes = (collective_axes,) if isinstance(collective_axes, str) else tuple(collective_axes)
    names = tuple(leaf_names(f, types, named, lambda x: isinstance(x, RefType)))
    out = run_scoped_p.bind(*closed.consts, jaxpr=closed.jaxpr, collective_axes=axes, names=names)
    return jax.tree.unflatten(out_tree[-1], out)


def warp_map(f: Callable[[Any], None]) -> None:
    """Run `f(warp_id)` on each of the four warps of this warpgroup, on its own; branch on `warp_id` for roles.

    Inside, operations have single-warp meaning: scalars, barriers, TMA and tensor-core issue; no register arrays.
    """

    def body(warp: Any) -> tuple[()]:
        f(warp)
        return ()

    closed = jax.make_jaxpr(body)(jax.ShapeDtypeStruct((), jax.numpy.int32))
    warp_map_p.bind(*closed.consts, jaxpr=closed.jaxpr)


def bind_warp_branch(condition: Any, body: Callable[[], None]) -> None:
    """Trace the body of `when_any_in_warp`."""

    def traced() -> tuple[()]:
        body()
        return ()

    closed = jax.make_jaxpr(traced)()
    warp_branch_p.bind(condition, *closed.consts, jaxpr=closed.jaxpr)
