"""How arguments of public functions are checked: `where: name=... must be ...`, before anything else is done with them.

TypeError for a value of another kind, ValueError for one of the kind that is out of range.  No JAX here.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

MEMORY = {"gmem": "a GMEM", "smem": "an SMEM", "tmem": "a TMEM", "acc": "an ACC"}
MEMORY |= {"barrier": "a Barrier", "named_barrier": "a NamedBarrier", "semaphore": "a semaphore"}


def shown(x: Any) -> str:
    """A value in an error, cut short."""
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(where: str, name: str, x: Any, wanted: str) -> NoReturn:
    """TypeError: `x` is not of the kind that is wanted."""
    raise TypeError(f"{where}: {name} must be {wanted}, not {shown(x)}")


def whole(where: str, name: str, x: Any, least: int | None = None, most: int | None = None) -> int:
    """A whole number that is known when the kernel is traced."""
    if most is not None:
        wanted = f"a whole number from {least} to {most}"
    else:
        wanted = "a whole number" + ("" if least is None else f" of at least {least}")
    try:
        if isinstance(x, (bool, np.bool_)):
            raise TypeError
        number = operator.index(x)
    except TypeError:  # a traced integer, too
        traced = " known when the kernel is traced" if hasattr(x, "aval") else ""
        raise TypeError(f"{where}: {name} must be {wanted}{traced}, not {shown(x)}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{where}: {name}={number} must be {wanted}")
    return number


def whole_numbers(where: str, name: str, x: Any, least: int | None = None) -> tuple[int, ...]:
    """Whole numbers; a single one stands for a sequence of one."""
    if isinstance(x, (int, np.integer)):
        return (whole(where, name, x, least),)
    if isinstance(x, (str, bytes)) or not hasattr(x, "__iter__"):
        refuse(where, name, x, "a whole number or a sequence of them")
    return tuple(whole(where, f"{name}[{i}]", n, least) for i, n in enumerate(x))


def flag(where: str, name: str, x: Any) -> bool:
    """True or False."""
    if not isinstance(x, (bool, np.bool_)):
        refuse(where, name, x, "True or False")
    return bool(x)


def names(where: str, name: str, x: Any) -> tuple[str, ...]:
    """Names of axes; a single one stands for a sequence of one."""
    if isinstance(x, str):
        return (x,)
    given = tuple(x) if hasattr(x, "__iter__") else (x,)
    if not all(isinstance(n, str) for n in given):
        refuse(where, name, x, "a name or a sequence of names")
    return given


def function(where: str, name: str, x: Any) -> Callable[..., Any]:
    """Something to call."""
    if not callable(x):
        refuse(where, name, x, "a function")
    return x  # type: ignore[no-any-return]


def dtype(where: str, name: str, x: Any) -> np.dtype[Any]:
    """A dtype of numbers or bools."""
    found: np.dtype[Any] | None = None
    with contextlib.suppress(TypeError):
        found = None if x is None else np.dtype(x)  # np.dtype(None) is float64
    if found is None or found.kind in "OSUMm":
        refuse(where, name, x, "a dtype such as jnp.bfloat16")
    return found


def memory(where: str, name: str, x: Any, *kinds: str, or_array: bool = False) -> None:
    """`x`, as abstract rules see operands, must be a Ref into one of these memories (or a register array)."""
    if x.space is None:
        if or_array:
            return
        what = f"{'an array' if x.shape else 'a scalar'} ({x.dtype}{list(x.shape)})"
    elif x.space.kind in kinds:
        return
    else:
        what = f"{MEMORY[x.space.kind]} Ref"
    where_from = " (run_scoped allocates it: run_scoped(f, plgpu.ACC((m, n))))" if "acc" in kinds else ""
    wanted = " or ".join(
        [*(f"{MEMORY[k]} Ref{where_from}" for k in kinds), *(["a register array"] if or_array else [])]
    )
    raise TypeError(f"{where}: {name} must be {wanted}, not {what}")


def sequence_of(where: str, name: str, x: Any, kinds: tuple[type, ...], wanted: str) -> tuple[Any, ...]:
    """A sequence whose items are of some classes."""
    if not isinstance(x, Sequence) or isinstance(x, str) or not all(isinstance(i, kinds) for i in x):
        refuse(where, name, x, f"a sequence of {wanted}")
    return tuple(x)
