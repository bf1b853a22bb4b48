"""What JAX itself refuses of a Ref while a body is traced, in our words: the line, the shapes, the way out.

JAX has no classes for these errors, so they are told by their text; the tests hold it against every JAX that we run with.
"""

from __future__ import annotations

import os
import re
import traceback

import jax

from ..errors import IllegalInstruction, Line, MosaicGpuError, OutOfBounds, UnsupportedCall

STATIC_START = "A tile may stick out of a GMEM array only where its start is traced (axis_index, a loop's counter)"

_TUPLE = r"(\([^)]*\))"
SHAPE = re.compile(
    rf"Invalid shape for `(\w+)`\. Ref shape: {_TUPLE}\. Expected shape: {_TUPLE}\. Value shape: {_TUPLE}"
)
DTYPE = re.compile(r"Invalid dtype for `(\w+)`\. Ref dtype: (\w+)\. Value dtype: (\w+)")
RANK = re.compile(rf"`indices` must not be longer than `shape`: indices=(.*), shape={_TUPLE}", re.S)
NEW_AXIS = re.compile(r"^not enough values to unpack \(expected 1, got 0\)$")
SEQUENCE = re.compile(r"^too many values to unpack \(expected 1|between instances of 'list' and 'int'")
OF_A_TREE = re.compile(r"^(list|tuple) indices must be integers or slices, not (ellipsis|tuple)")
NO_INDEX = re.compile(r"^Argument '(.*)' of type .* is not a valid JAX type", re.S)
STEP = re.compile("slice must have a step|slice step cannot be zero")
REF_AS_ARRAY = re.compile(
    r"'AbstractRef' object has no attribute|requires ndarray or scalar arguments, got <class '[\w.]*Tracer'>"
    r"|got a Ref of type .* where an array is expected"
)
DOES = {"swap": "is stored to", "addupdate": "is added to"}


KNOWN_ONLY_AT_RUN_TIME = (
    jax.errors.ConcretizationTypeError,  # bool(), float(), int()
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
TRACED = re.compile(r"traced array with shape (\w+\[[^\]]*\])")
UNBOUND = "Found an unbound axis name"


def in_our_words(error: Exception) -> Exception:
    """As `translated` where that knows the error; an unbound axis, which `kernel` alone can explain, is raised on."""
    if isinstance(error, NameError) and str(error).startswith(UNBOUND):
        raise error
    return translated(error, None) or error


def _needed_in_python(error: Exception, text: str, line: Line | None) -> MosaicGpuError:
    """The body is traced once, before there are values; JAX's error stays as the cause."""
    found = TRACED.search(text)
    value = f"a traced value ({found[1]})" if found else "a traced value"
    if isinstance(error, jax.errors.TracerBoolConversionError):
        what = f"`if`, `while`, `and`, `or`, `not` or bool() of {value}"
        instead = (
            "run statements under @plgpu.when(condition), choose between values with jnp.where or lax.cond, combine conditions "
            "with &, | and ~, and take a slice from there on with plgpu.ds(start, size)"
        )
    elif isinstance(error, jax.errors.TracerArrayConversionError):
        what, instead = f"a NumPy function of {value}", "use that of jnp"
    elif isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        what = "an array of traced bools as an index, which gives as many elements as are true"
        instead = (
            "leave the others in (jnp.where(mask, x, 0), jnp.sum(x, where=mask)), or say how many places there are for them: "
            "x[jnp.nonzero(mask, size=n, fill_value=len(x) - 1)]"
        )
    else:
        what = f"{value} where Python needs a number (range(), a list's index, int(), float(), a size)"
        instead = (
            "loop with lax.fori_loop, slice with plgpu.ds(start, size), take one of several values with jnp.where or lax.switch, "
            "convert with x.astype, and where a result is as long as its data say (nonzero, unique, repeat) give its size="
        )
    ours = UnsupportedCall(
        f"{what}: a kernel's body is traced once, before any value is known. Instead, {instead}", line
    )
    ours.__cause__ = error
    return ours


def _of_pallas(error: AssertionError, line: Line | None) -> MosaicGpuError | None:
    """JAX's Pallas asserts that it is one of its own bodies that it traces."""
    frames = [f.f_code for f, _ in traceback.walk_tb(error.__traceback__)]
    called = next((c.co_name for c in frames if "/jax/_src/pallas/" in c.co_filename.replace(os.sep, "/")), None)
    if called is None:
        return None
    return UnsupportedCall(
        f"{called} of jax.experimental.pallas works in calls of JAX's only; here it is mosaic_gpu.{called} "
        "(import mosaic_gpu as pl)",
        line,
    )


def _is_of_an_index(error: Exception) -> bool:
    """Whether JAX's code for the indices of a Ref raised it: by itself the text could be of the user's own body."""
    files = [f.f_code.co_filename.replace(os.sep, "/") for f, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.endswith("/jax/_src/state/indexing.py") for name in files)


def translated(error: Exception, line: Line | None) -> MosaicGpuError | None:
    """The error of ours for one of JAX's, at `line`; None for any other."""
    text = str(error)
    if isinstance(error, AssertionError):
        return _of_pallas(error, line)
    if isinstance(error, KNOWN_ONLY_AT_RUN_TIME):
        return _needed_in_python(error, text, line)
    if found := SHAPE.search(text):
        what, ref, part, value = found.groups()
        x = "a scalar" if value == "()" else f"an array of shape {value}"
        place = f"a Ref of shape {ref}" if ref == part else f"a part of shape {part} of a Ref of shape {ref}"
        element = ", ".join("0" * len(re.findall(r"\d+", ref)))
        smaller = f"one element (ref[{element}] = x)"
        if value != "()":
            smaller = f"a part of shape {value} (ref[plgpu.ds(start, size)] = x)"
        return IllegalInstruction(
            f"{x} {DOES.get(what, 'goes to')} {place}: nothing is broadcast or cut on the way. Make it an array of shape {part} "
            f"(jnp.full, jnp.broadcast_to, reshape), or store to {smaller}",
            line,
        )
    if found := DTYPE.search(text):
        what, ref, value = found.groups()
        return IllegalInstruction(
            f"{value} {DOES.get(what, 'goes to')} a Ref of {ref}: memory has one dtype, nothing is converted on the way. Convert "
            "it: ref[...] = x.astype(ref.dtype)",
            line,
        )
    if found := RANK.search(text):
        return OutOfBounds(
            f"more indices than dimensions: {found[1]} for a Ref of shape {found[2]}; ref.shape says how many there are, "
            "ref[...] takes all of it",
            line,
        )
    if text.startswith("Out of bound"):  # JAX's own check of static slices
        return OutOfBounds(f"{text} {STATIC_START}", line)
    if STEP.search(text):
        return UnsupportedCall(f"{text}: a Ref is read and written upwards. Turn the array around: jnp.flip", line)
    if SEQUENCE.search(text) and _is_of_an_index(error):
        return UnsupportedCall(
            "a list among a Ref's indices: ref[i, j] is one element; several rows an array takes, ref[jnp.array([0, 2])]",
            line,
        )
    if found := OF_A_TREE.search(text):
        return UnsupportedCall(
            f"a {found[1]} is indexed as a Ref: an input that is a {found[1]} is one of Refs, one for each element. Take one of "
            "them first (x[0][...]), or hand one array over (jnp.array(x))",
            line,
        )
    if (found := NO_INDEX.search(text)) and _is_of_an_index(error):
        return UnsupportedCall(
            f"{found[1]} among a Ref's indices: those are whole numbers, slices, plgpu.ds(start, size), arrays of whole numbers "
            "and `...`",
            line,
        )
    if NEW_AXIS.search(text) and _is_of_an_index(error):
        return UnsupportedCall(
            "None (a new axis) among a Ref's indices: read first, then add the axis, ref[...][:, None]", line
        )
    if REF_AS_ARRAY.search(text):
        return UnsupportedCall("a Ref is used as an array: read it first, ref[...]", line)
    return None
