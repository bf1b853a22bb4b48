"""What JAX refuses of a Ref comes out in our words: the class, the line of the user's, both shapes, the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import IllegalInstruction, MosaicGpuError, OutOfBounds, UnsupportedCall

F = jnp.float32


def run(body: Callable[..., None], make: str = "kernel") -> Any:
    shape = jax.ShapeDtypeStruct((4, 128), F)
    if make == "kernel":
        return plgpu.kernel(body, shape, interpret=True)(np.ones((4, 128), np.float32))
    return plgpu.pallas_call(body, shape, interpret=True)(np.ones((4, 128), np.float32))


def stores_rows(x, o):
    o[...] = x[:2]  # here


def stores_to_a_part(x, o):
    o[plgpu.ds(1, 2)] = x[...]  # here


def stores_an_array_to_an_element(x, o):
    o[0, 0] = x[0]  # here


def swaps(x, o):
    jax.ref.swap(o, ..., x[0])  # here


def adds(x, o):
    jax.ref.addupdate(o, ..., x[:3])  # here


def of_another_dtype(x, o):
    o[...] = x[...].astype(jnp.int32)  # here


def stores_a_scalar(x, o):
    o[...] = x[0, 0]  # here


def list_of_rows(x, o):
    o[:2] = x[[0, 2]]  # here


def list_of_one(x, o):
    o[:1] = x[[3]]  # here


def list_among_indices(x, o):
    o[..., [0, 1]] = 1.0  # here


def text_as_an_index(x, o):
    o[0] = x["first"]  # here


def three_indices(x, o):
    o[...] = x[0, 0, 0]  # here


def backwards(x, o):
    o[...] = x[::-1]  # here


def arithmetic(x, o):
    o[...] = x + 1  # here


def given_to_jnp(x, o):
    o[0, 0] = jnp.max(x)  # here


def branches(x, o):
    if x[0, 0] > 0:  # here
        o[...] = x[...]


def loops(x, o):
    @plgpu.when(x[0, 0] > 0)
    def _():
        while x[0, 1] > 0:  # here
            o[...] = x[...]


def counts(x, o):
    for i in range(x[0, 0].astype(jnp.int32)):  # here
        o[i] = x[i]


def converts(x, o):
    o[0, 0] = float(x[0, 0])  # here


def with_numpy(x, o):
    o[...] = np.sin(x[...])  # here


NEEDED_IN_PYTHON = [
    (branches, jax.errors.TracerBoolConversionError, ("`if`", "(bool[])", "plgpu.when", "jnp.where", "lax.cond")),
    (loops, jax.errors.TracerBoolConversionError, ("`while`", "plgpu.when")),
    (counts, jax.errors.TracerIntegerConversionError, ("range()", "(int32[])", "lax.fori_loop", "plgpu.ds")),
    (converts, jax.errors.ConcretizationTypeError, ("float()", "(float32[])", "x.astype")),
    (with_numpy, jax.errors.TracerArrayConversionError, ("NumPy", "(float32[4,128])", "jnp")),
]
CASES = [
    (stores_rows, IllegalInstruction, ("(2, 128) is stored to a Ref of shape (4, 128)", "jnp.broadcast_to")),
    (
        stores_to_a_part,
        IllegalInstruction,
        ("(4, 128) is stored to a part of shape (2, 128) of a Ref of shape (4, 128)",),
    ),
    (stores_an_array_to_an_element, IllegalInstruction, ("(128,) is stored to a part of shape ()", "(4, 128)")),
    (swaps, IllegalInstruction, ("(128,) is stored to", "(4, 128)")),
    (adds, IllegalInstruction, ("(3, 128) is added to", "(4, 128)")),
    (of_another_dtype, IllegalInstruction, ("int32 is stored to a Ref of float32", "x.astype(ref.dtype)")),
    (stores_a_scalar, IllegalInstruction, ("a scalar is stored to", "or store to one element (ref[0, 0] = x)")),
    (list_of_rows, UnsupportedCall, ("a list among", "ref[jnp.array([0, 2])]")),
    (list_of_one, UnsupportedCall, ("a list among", "ref[jnp.array([0, 2])]")),
    (list_among_indices, UnsupportedCall, ("a list among",)),
    (text_as_an_index, UnsupportedCall, ("first among a Ref's indices: those are whole numbers",)),
    (three_indices, OutOfBounds, ("(0, 0, 0)", "(4, 128)")),
    (backwards, UnsupportedCall, ("-1", "jnp.flip")),
    (arithmetic, UnsupportedCall, ("ref[...]",)),
    (given_to_jnp, UnsupportedCall, ("ref[...]",)),
]


def here(body: Callable[..., None]) -> int:
    lines, first = inspect.getsourcelines(body)
    return first + next(i for i, text in enumerate(lines) if "# here" in text)


@pytest.mark.parametrize("make", ["kernel", "pallas_call"])
@pytest.mark.parametrize(("body", "cause", "words"), NEEDED_IN_PYTHON, ids=lambda x: getattr(x, "__name__", ""))
def test_a_traced_value_where_python_needs_it(
    body: Callable[..., None], cause: type[Exception], words: tuple[str, ...], make: str
) -> None:
    """JAX's own error stays as the cause."""
    with pytest.raises(UnsupportedCall) as e:
        run(body, make)
    assert all(w in e.value.message for w in words), e.value.message
    assert e.value.line is not None and (e.value.line.file, e.value.line.number) == (__file__, here(body))
    assert isinstance(e.value.__cause__, cause)


@pytest.mark.parametrize("make", ["kernel", "pallas_call"])
@pytest.mark.parametrize(("body", "kind", "words"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_in_our_words(body: Callable[..., None], kind: type[MosaicGpuError], words: tuple[str, ...], make: str) -> None:
    with pytest.raises(kind) as e:
        run(body, make)
    assert type(e.value) is kind and all(w in e.value.message for w in words), e.value.message
    assert e.value.line is not None and (e.value.line.file, e.value.line.number) == (__file__, here(body))
    assert e.value.__cause__ is None and e.value.__suppress_context__  # JAX's own text would say it again


@pytest.mark.parametrize("index", [..., (0, 0)], ids=str)
def test_an_input_that_is_a_list_of_arrays(index: Any) -> None:
    def body(x, o):
        o[...] = x[index]  # here

    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct((3,), F), interpret=True)
    with pytest.raises(
        UnsupportedCall, match=r"a list is indexed as a Ref: .*\(x\[0\]\[...\]\), or hand one array over"
    ) as e:
        kernel([1.0, 2.0, 3.0])
    assert e.value.line is not None and e.value.line.number == here(body)


@pytest.mark.parametrize("values", [(), (1, 2)], ids=str)
def test_the_users_own_unpacking_is_not_taken_for_an_index(values: tuple[int, ...]) -> None:
    def body(x, o):
        (first,) = values
        o[...] = x[...] + first

    with pytest.raises(ValueError, match="values to unpack") as e:
        run(body)
    assert not isinstance(e.value, MosaicGpuError)


@pytest.mark.parametrize("make", ["kernel", "pallas_call"])
def test_other_errors_come_out_as_they_are(make: str) -> None:
    def body(x, o):
        raise ValueError("mine")

    with pytest.raises(ValueError) as e:
        run(body, make)
    assert type(e.value) is ValueError and str(e.value) == "mine"
