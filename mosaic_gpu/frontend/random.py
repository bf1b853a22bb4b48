"""`jax.random` in a kernel: keys are pairs of uint32 scalars, bits are threefry2x32 of each element's number.

The same bits as outside of a kernel (with `jax_threefry_partitionable`, JAX's default), from elementwise operations only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import Line, UnsupportedCall
from ..program import Equation, Operand

if TYPE_CHECKING:
    from .trace import Tracer

MOST_KEYS = 64  # of a split, each of a hundred instructions where it is used
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@dataclasses.dataclass(frozen=True)
class Key:
    """A PRNG key in the Tracer's environment: two uint32 scalars.  shape: as of a scalar operand."""

    high: Operand
    low: Operand
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Keys:
    """What a split gives: keys that are taken by numbers known when the kernel is traced."""

    keys: tuple[Key, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.keys),)


def taken(name: str, keys: Keys, params: dict[str, Any], line: Line | None) -> list[Any]:
    """The results of an operation that takes some of the keys of a split."""
    if name == "slice":
        start, stop = params["start_indices"][0], params["limit_indices"][0]
        return [Keys(keys.keys[start : stop : (params["strides"] or (1,))[0]])]
    if name in ("squeeze", "reshape") and len(keys.keys) == 1 and not params.get("new_sizes"):
        return [keys.keys[0]]
    if name == "unstack":
        return list(keys.keys)
    refuse_keys(name, [keys], line)
    raise AssertionError


def refuse_keys(what: str, operands: Sequence[Any], line: Line | None) -> None:
    """UnsupportedCall where a key is carried or taken apart: it is no array here."""
    if any(isinstance(o, (Key, Keys)) for o in operands):
        raise UnsupportedCall(
            f"{what} of a PRNG key: a kernel only folds, splits and draws from keys, made by jax.random.key (PRNGKey makes an "
            "array of words), and takes those of a split by number. Carry a counter, and fold it into a key that stays outside: "
            "jax.random.fold_in(key, i). (Draws from gamma, beta, Poisson and binomial distributions carry keys: make them "
            "outside of the kernel.)",
            line,
        )


def refuse_key_array(where: str, name: str, x: Any) -> None:
    """UnsupportedCall where an argument of a kernel is an array of keys."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise UnsupportedCall(
            f"{where}: {name} is an array of PRNG keys ({x.dtype}), which memory has no place for. Pass a number, and fold it "
            "into a key that is made in the body: jax.random.fold_in(jax.random.key(0), ref[0])"
        )


def threefry2x32(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Twenty rounds of Threefry-2x32 (Salmon et al., SC11) on two uint32 of any shape."""
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(r)) | lax.shift_right_logical(x1, jnp.uint32(32 - r))
            x1 = x0 ^ x1
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def bits(shape: tuple[int, ...], width: int, k0: Any, k1: Any) -> Any:
    """Random bits of `width` for an array of `shape`: each from its row-major number."""
    number = jnp.zeros(shape, jnp.uint32)
    for d in range(len(shape)):
        number = number + lax.broadcasted_iota(jnp.uint32, shape, d) * np.uint32(math.prod(shape[d + 1 :]))
    high, low = threefry2x32(k0, k1, jnp.zeros_like(number), number)
    mixed = high ^ low
    if width == 64:
        return (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
    return mixed if width == 32 else mixed.astype({8: jnp.uint8, 16: jnp.uint16}[width])


def _seed(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    if str(getattr(e.params["impl"], "tag", e.params["impl"])) not in ("fry", "threefry2x32"):
        raise UnsupportedCall(f"a key of {e.params['impl']} in a kernel: threefry2x32 only", line)
    tr.env[e.outvars[0]] = _key(tr, tr.read(e.invars[0]), out, line)


def _key(tr: Tracer, seed: Operand, out: list[Equation], line: Line | None) -> Any:
    """A seed of 32 bits is the key (0, seed)."""

    def pair(s: Any) -> Any:
        wide = s.dtype.itemsize == 8
        high = lax.shift_right_logical(s, jnp.asarray(32, s.dtype)).astype(jnp.uint32) if wide else jnp.uint32(0)
        return high, lax.convert_element_type(s, jnp.uint32)

    return Key(*tr.inlined(pair, [seed], out, line))  # type: ignore[arg-type]


def _fold_in(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    key, data = (tr.read(v) for v in e.invars)
    new = _key(tr, data, out, line)
    tr.env[e.outvars[0]] = Key(*tr.inlined(threefry2x32, [*_pair(key, line), new.high, new.low], out, line))  # type: ignore[arg-type, assignment]


def _bits(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    shape, width = tuple(e.params["shape"]), int(e.params["bit_width"])
    found = tr.inlined(lambda a, b: bits(shape, width, a, b), _pair(tr.read(e.invars[0]), line), out, line)
    tr.bind(e.outvars, found)


def _split(tr: Tracer, e: Any, out: list[Equation], line: Line | None) -> None:
    """Key i is the bits of number i."""
    shape = tuple(e.params["shape"])
    if len(shape) != 1 or shape[0] > MOST_KEYS:
        raise UnsupportedCall(
            f"jax.random.split into {shape} keys in a kernel: at most {MOST_KEYS}, in one dimension; jax.random.fold_in(key, i) "
            "makes the i-th of any number",
            line,
        )
    pair = _pair(tr.read(e.invars[0]), line)
    found = []
    for i in range(shape[0]):

        def key(high: Any, low: Any, i: int = i) -> tuple[Any, Any]:
            return threefry2x32(high, low, jnp.uint32(0), jnp.uint32(i))

        found.append(Key(*tr.inlined(key, pair, out, line)))  # type: ignore[arg-type]
    tr.env[e.outvars[0]] = Keys(tuple(found))  # type: ignore[assignment]


def _pair(key: Any, line: Line | None) -> tuple[Operand, Operand]:
    if not isinstance(key, Key):
        raise UnsupportedCall(
            f"a key that is an array, or made of data ({key}), in a kernel: make one with jax.random.key(seed) or fold_in",
            line,
        )
    return key.high, key.low


def key_of_constant(c: Any, literal: Callable[[Any, Any], Operand]) -> Any:
    """A key that the kernel closes over, as literals; None for anything else."""
    if not (hasattr(c, "dtype") and jnp.issubdtype(c.dtype, jax.dtypes.prng_key)) or np.ndim(c):
        return None
    data = np.asarray(jax.random.key_data(c))
    return Key(literal(data[0], np.uint32), literal(data[1], np.uint32))


RANDOM: dict[str, Callable[[Tracer, Any, list[Equation], Line | None], None]] = {
    "random_seed": _seed,
    "random_fold_in": _fold_in,
    "random_bits": _bits,
    "random_split": _split,
}
