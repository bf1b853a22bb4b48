"""Looking into a kernel: `debug_print`, `debug_check`, `print_layout`.

On the GPU a print is one `printf` for scalars, by one thread of the warpgroup (or warp), and one for each element of an array, in
no order; its output appears when the stream is next waited for.  In the simulator the same lines go to stdout, an array's in
row-major order.
"""

from __future__ import annotations

import dataclasses
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import arguments
from ..errors import DebugCheckFailed, UnsupportedCall
from ..layouts.registers import Digit, RegisterLayout
from ..program import Equation, Operand, Value, View, walk
from .elementwise import FLOATS, INTEGERS
from .registry import BOTH, WARP, WARPGROUP, op

TYPES = (*FLOATS, *INTEGERS, "bool")
debug_print_p = op("debug_print", issues_only=True, whole=True, dtypes=TYPES)
debug_check_p = op("debug_check", issues_only=True, whole=True, dtypes=("bool",))
print_layout_p = op("print_layout", issues_only=True)


# ---- print -----------------------------------------------------------------------------------------------------------
def debug_print(fmt: str, *args: Any) -> None:
    """Print `fmt` with a value for each `{}` (also `{:d}`, `{:x}`, `{:.3f}`, `{:e}`, `{:g}` with a width), and a line end.

    args: scalars, or one register array, each element of which is a line with its index: `[3, 0]: 1.5`.  `jax.debug.print` does
    the same.  Raises UnsupportedCall for other formats and for several arrays.
    """
    from ..frontend.primitives import bind

    if not isinstance(fmt, str):
        arguments.refuse("debug_print", "fmt", fmt, "a format string with a {} for each value")
    bind(debug_print_p, *args, fmt=fmt)


@debug_print_p.abstract
def _(*args: Any, fmt: str) -> Any:
    if any(a.space is not None for a in args):
        raise TypeError("debug_print: a Ref is no value; load it first (ref[...])")
    return ()


@dataclasses.dataclass(frozen=True)
class Print:
    """text: a C format; python: the same for Python's %; conversions: the letters of its values; array: of one array."""

    text: str
    python: str
    conversions: tuple[str, ...]
    array: bool


def parsed(fmt: str, line: Any) -> list[tuple[str, str | None, str | None, str | None]]:
    """The parts of a format string; UnsupportedCall for one that is none."""
    try:
        return list(string.Formatter().parse(fmt))
    except ValueError as error:
        raise UnsupportedCall(f"the format {fmt!r}: {error}", line) from None


def print_plan(fmt: str, operands: Sequence[Operand], line: Any) -> Print:
    """The C format of a Python one."""
    text = ["", ""]  # C's, Python's
    conversions: list[str] = []
    array = any(o.shape for o in operands)
    for literal, name, spec, conversion in parsed(fmt, line):
        text = [t + literal.replace("%", "%%") for t in text]
        if name is None:
            continue
        k = len(conversions)
        found = re.fullmatch(r"([-+ 0#]*)(\d*)(\.\d+)?([dxXfeEgG]?)", spec or "")
        if name or conversion or found is None or k >= len(operands):
            raise UnsupportedCall(
                f"debug_print({fmt!r}) with {len(operands)} values: each has one {{}}, in order, with nothing but a width, a "
                "precision and one of d x f e g in it",
                line,
            )
        o = operands[k]
        flags, width, precision, letter = found.groups(default="")
        floating = o.dtype in FLOATS
        if letter and floating != (letter in "feEgG"):
            raise UnsupportedCall(f"debug_print: {{:{spec}}} of {o.dtype} values", line)
        letter = letter or ("g" if floating else "s" if o.dtype == "bool" else "d")
        if floating and not precision and not (spec or ""):
            precision = ".17" if o.dtype == "float64" else ".9"
        if letter == "d" and o.dtype.startswith("u"):
            letter = "u"
        place = f"[{', '.join(['%d'] * len(o.shape))}]: " if array else ""
        sizes = ("", "") if letter in "sfeEgG" else ("ll", "")
        text = [f"{t}{place}%{flags}{width}{precision}{size}{letter}" for t, size in zip(text, sizes, strict=True)]
        conversions.append(letter)
    if len(conversions) != len(operands) or (array and len(operands) > 1):
        raise UnsupportedCall(
            f"debug_print({fmt!r}) of {len(operands)} values: scalars, one {{}} for each, or a single array", line
        )
    return Print(text[0] + "\n", text[1] + "\n", tuple(conversions), array)


@debug_print_p.plan(BOTH, (WARPGROUP, WARP))
def _(ctx: Any, e: Equation) -> Print:
    return print_plan(e.param("fmt"), e.operands, e.line)


def _argument(text: str, letter: str) -> str:
    if letter == "s":
        return f'({text} ? "True" : "False")'
    return f"({'double' if letter in 'feEgG' else 'unsigned long long' if letter in 'uxX' else 'long long'})({text})"


@debug_print_p.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    e, p = step.equation, step.data
    text = json.dumps(p.text)
    if not p.array:
        values = [_argument(out.scalar(o), c) for o, c in zip(e.operands, p.conversions, strict=True)]
        with out.elected():
            out.line(f"printf({', '.join([text, *values])});")
        return
    x = e.operands[0]
    layout = out.layout(x)
    with out.block(f"if ({' && '.join(out.own_elements(layout)) or 'true'})"):
        for i, row in enumerate(out.coordinates("c", layout)):
            value = _argument(out.element(x, i), p.conversions[0])
            out.line(f"printf({', '.join([text, *row, value])});")


@debug_print_p.simulate
def _(sim: Any, step: Any) -> None:
    p, operands = step.data, [sim.read(o) for o in step.equation.operands]

    def value(x: Any, letter: str) -> Any:
        if letter == "s":
            return str(bool(x))
        if letter in "xX":
            return int(x) % 2**64  # as C shows negative numbers
        return float(x) if letter in "feEgG" else int(x)

    if not p.array:
        print(p.python % tuple(value(x, c) for x, c in zip(operands, p.conversions, strict=True)), end="", flush=True)
        return
    x = np.asarray(operands[0])
    lines = [p.python % (*at, value(x[at], p.conversions[0])) for at in np.ndindex(*x.shape)]
    print("".join(lines), end="", flush=True)


# ---- check -----------------------------------------------------------------------------------------------------------
def debug_check(condition: Any, message: str = "") -> None:
    """Stop the kernel where `condition`, a bool or a register array of them, is not true everywhere.

    On the GPU the failing thread says file, line, block and thread, with the message, and the launch ends with an error (CUDA's
    assert); the simulator raises DebugCheckFailed.
    """
    from ..frontend.primitives import bind

    if not isinstance(message, str):
        arguments.refuse("debug_check", "message", message, "a string")
    bind(debug_check_p, condition, message=message)


@debug_check_p.abstract
def _(condition: Any, *, message: str) -> Any:
    if condition.space is not None or condition.dtype != "bool":
        what = "a Ref" if condition.space is not None else condition.dtype
        raise TypeError(f"debug_check: the condition is a bool or an array of bools, not {what}")
    return ()


@debug_check_p.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    e = step.equation
    x, layout = e.operands[0], out.layout(e.operands[0])
    values = [out.scalar(x)] if layout is None else [out.element(x, i) for i in range(layout.registers)]
    line = e.line
    place = [json.dumps(line.file), str(line.number), json.dumps(line.function)] if line else ['""', "0", '""']
    text = json.dumps(f"debug_check: {e.param('message')}")
    out.line(f"if (!({' && '.join(values)})) failed_check({', '.join([text, *place])});")


@debug_check_p.simulate
def _(sim: Any, step: Any) -> None:
    e = step.equation
    x = np.asarray(sim.read(e.operands[0]))
    if not x.all():
        where = ""
        if x.shape:
            first = ", ".join(map(str, np.argwhere(~x)[0]))
            where = f" in {int((~x).sum())} of {x.size} elements, the first at [{first}]"
        message = e.param("message")
        raise DebugCheckFailed(f"debug_check fails{where}{f': {message}' if message else ''}; {sim.who}", e.line)


# ---- layouts -----------------------------------------------------------------------------------------------------------
def print_layout(fmt: str, x: Any) -> None:
    """Print, when the kernel is planned, `fmt` with the layout of `x` for its `{}`.

    x: a register array (its register layout: which thread holds what; or that one value stands for all elements) or a Ref (its
    memory, tiling and swizzle).  No code comes of it.
    """
    from ..frontend.primitives import bind

    if not isinstance(fmt, str):
        arguments.refuse("print_layout", "fmt", fmt, "a format string with a {} for the layout")
    bind(print_layout_p, x, fmt=fmt)


@print_layout_p.abstract
def _(x: Any, *, fmt: str) -> Any:
    return ()


@print_layout_p.emit(BOTH, (WARPGROUP, WARP))
def _(out: Any, step: Any) -> None:
    """Printed with the plan (`print_layouts`)."""


@print_layout_p.simulate
def _(sim: Any, step: Any) -> None:
    """As above."""


def describe(o: Operand, layouts: Mapping[int, RegisterLayout]) -> str:
    """The layout of an array or a Ref, as people read it."""
    if isinstance(o, View):
        space = o.space
        tiling = (
            f", tiles of {space.tiling}" if space.tiling else ", row-major" if space.kind in ("smem", "gmem") else ""
        )
        return f"{o.dtype}{list(o.shape)} in {space.kind.upper()}{tiling}" + (
            f", swizzle of {space.swizzle} bytes" if space.swizzle else ""
        )
    what = f"{o.dtype}{list(o.shape)}"
    if not o.shape:
        return f"{what}: a scalar"
    layout = layouts.get(o.id) if isinstance(o, Value) else None
    if layout is None:
        return f"{what}: one value for all elements"

    def digits(name: str, of: tuple[Digit, ...]) -> str:
        parts = [
            f"{d.size} replicas" if d.dim is None else f"{d.size} of dim {d.dim} by {d.stride}"
            for d in of
            if d.size > 1
        ]
        return f"{name}: {', '.join(parts) or '1'}"

    parts = "; ".join(
        digits(n, d) for n, d in (("registers", layout.reg), ("lanes", layout.lane), ("warps", layout.warp))
    )
    return f"{what} in {layout.name} ({parts})"


def print_layouts(equations: Sequence[Equation], layouts: Mapping[int, RegisterLayout]) -> None:
    """What a role's `print_layout`s ask for."""
    for e in walk(tuple(equations)):
        if e.op == "print_layout":
            fmt = e.param("fmt")
            if [name for _, name, _, _ in parsed(fmt, e.line) if name is not None] not in ([], [""]):
                raise UnsupportedCall(f"print_layout({fmt!r}): the format has one {{}}, for the layout", e.line)
            print(fmt.format(describe(e.operands[0], layouts)), flush=True)
