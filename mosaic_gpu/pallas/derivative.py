"""Forward-mode derivatives of a `pallas_call`: one call of twice as many Refs.

Beside each Ref of floats lies one of tangents, in blocks that its index map picks, too.  The body's jaxpr is evaluated over pairs
(value, tangent): equations without Refs as `jax.jvp` has them, reads and writes on both Refs, control flow over pairs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, partial_eval
from jax.ref import AbstractRef

from ..errors import Line, UnsupportedCall
from ..frontend import shard_map
from ..frontend.primitives import TreeOf, is_ref
from ..frontend.trace import CALLS, user_line
from ..memory import GMEM_SPACE
from .mapping import BlockMapping
from .room import with_room

if TYPE_CHECKING:
    from .call import Call

BOTH = ("get", "swap", "addupdate", "load")
"""Linear in what lies in the Ref and in what is written: the same on the tangents."""
Pair = tuple[Any, Any]  # (value or Ref, its tangent or None: zero)


def register(pallas_call_p: Any) -> None:
    """Give the primitive these rules."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
        m = call.mapping
        scalars = m.num_dynamic + len(m.prefetch)
        moves = [not isinstance(t, ad.Zero) and jnp.issubdtype(t.dtype, jnp.inexact) for t in tangents]
        if any(moves[:scalars]):
            raise UnsupportedCall(
                f"pallas_call {call.name}: scalar-prefetch operands have no tangents; stop the gradient before the call with "
                "jax.lax.stop_gradient",
                call.line,
            )
        shared = [m.num_dynamic + i for i, _ in call.aliases]  # its output has a tangent, which starts in the input's
        given = list(tangents)
        for i in shared:
            if not moves[i] and jnp.issubdtype(primals[i].dtype, jnp.inexact):
                given[i], moves[i] = jnp.zeros(primals[i].shape, primals[i].dtype), True
        both = with_tangents(call, tuple(moves[scalars:]))
        found = pallas_call_p.bind(*primals, *(t for t, k in zip(given, moves, strict=True) if k), call=both)
        outs, out_tangents = found[: m.num_outputs], iter(found[m.num_outputs :])
        return outs, [next(out_tangents) if _real(x) else np.zeros(x.shape, jax.dtypes.float0) for x in outs]

    def reverse(*_: Any, call: Call) -> Any:
        raise UnsupportedCall(
            f"pallas_call {call.name.removesuffix('_jvp')} has no reverse-mode derivative (only jax.jvp): wrap it in a "
            "function with jax.custom_vjp and give the derivative there, or stop the gradient before it with "
            "jax.lax.stop_gradient",
            call.line,
        )

    ad.primitive_jvps[pallas_call_p] = jvp
    ad.primitive_transposes[pallas_call_p] = reverse
    partial_eval.custom_partial_eval_rules[pallas_call_p] = reverse  # what linearising asks first


def _real(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


@functools.lru_cache(maxsize=256)
def with_tangents(call: Call, moves: tuple[bool, ...]) -> Call:
    """The call on values and tangents.  moves: of each input, whether it has one; every output of floats does."""
    m = call.mapping
    fetched, ins, outs = len(m.prefetch), len(m.inputs), m.num_outputs
    scratch = tuple(jax.tree.leaves(call.scratch, is_leaf=lambda x: hasattr(x, "space")))
    floating = [s.space.kind in ("smem", "acc") and _real(s) for s in scratch]
    out_moves = [_real(b) for b in m.outputs]
    taken = {b.name for b in m.blocks}
    of_inputs = [_tangent_block(b, taken) for b, k in zip(m.inputs, moves, strict=True) if k]
    of_outputs = [_tangent_block(b, taken) for b, k in zip(m.outputs, out_moves, strict=True) if k]
    sizes = [ins, len(of_inputs), outs, len(of_outputs), len(scratch), sum(floating)]

    def body(*given: Any) -> tuple[()]:
        read, parts = given[:fetched], list(given[fetched:])
        x, dx, y, dy, s, ds = (tuple(parts.pop(0) for _ in range(n)) for n in sizes)
        pairs = [(r, None) for r in read]
        for values, tangents, has in ((x, dx, moves), (y, dy, out_moves), (s, ds, floating)):
            left = iter(tangents)
            pairs += [(v, next(left) if k else None) for v, k in zip(values, has, strict=True)]
        Tangents(call).run(call.jaxpr, pairs, call.line)
        return ()

    name = f"{call.name.removesuffix('_jvp')}_jvp"
    scratch = (*scratch, *(s for s, k in zip(scratch, floating, strict=True) if k))
    blocks = with_room(
        name, (*m.inputs, *of_inputs, *m.outputs, *of_outputs), outs + len(of_outputs), scratch, call.line
    )
    types = [
        *(AbstractRef(a, memory_space=GMEM_SPACE) for a in m.prefetch),
        *(b.ref() for b in blocks),
        *(s.aval() for s in scratch),
    ]
    place = {i: ins + sum(moves[:i]) for i in range(ins) if moves[i]}
    aliases = list(call.aliases)
    for i, o in call.aliases:
        if out_moves[o]:
            aliases.append((fetched + place[i - fetched], outs + sum(out_moves[:o])))
    return call.with_(
        name=name,
        jaxpr=shard_map.traced_outside(lambda: jax.make_jaxpr(body, axis_env=call.axis_env)(*types)),
        mapping=dataclasses.replace(m, blocks=blocks, num_outputs=outs + len(of_outputs)),
        scratch=scratch,
        aliases=tuple(sorted(aliases)),
        cost=None,
        primal=call,
    )


def _tangent_block(b: BlockMapping, taken: set[str]) -> BlockMapping:
    """Of the same blocks, under a name that is not taken (by tangents of a lower order)."""
    name = f"tangent of {b.name}"
    while name in taken:
        name = f"{name}'"
    taken.add(name)
    return dataclasses.replace(b, name=name)


class Tangents:
    """Evaluates jaxprs over pairs."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def run(self, closed: Any, pairs: Sequence[Pair], line: Line | None) -> list[Pair]:
        jaxpr = getattr(closed, "jaxpr", closed)
        env: dict[Any, Pair] = {
            v: (c, None) for v, c in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True)
        }
        env.update(zip(jaxpr.invars, pairs, strict=True))

        def read(v: Any) -> Pair:
            return (v.val, None) if isinstance(v, jex.Literal) else env[v]

        for e in jaxpr.eqns:
            env.update(zip(e.outvars, self.equation(e, [read(v) for v in e.invars], user_line(e, line)), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, e: Any, pairs: list[Pair], line: Line | None) -> Sequence[Pair]:
        name, p = e.primitive.name, e.params
        if all(t is None for _, t in pairs):
            return [(x, None) for x in _bound(e, [x for x, _ in pairs])]
        if name in BOTH:
            ref, tangent = pairs[0]
            given = [x for x, _ in pairs]
            values = _bound(e, given)
            if tangent is None:
                return [(x, None) for x in values]
            moved = [tangent, *(_tangent(x) if _written(e, i) else x[0] for i, x in enumerate(pairs[1:], 1))]
            return list(zip(values, _bound(e, moved), strict=True))
        if not any(is_ref(x) for x, _ in pairs) and not isinstance(p.get("operands"), TreeOf):
            return _jvp(e, pairs)
        if name in CALLS:
            return self.run(p.get(CALLS[name]) or p.get("jaxpr") or p.get("fun_jaxpr"), pairs, line)
        if name == "cond":
            return self._cond(e, pairs, line)
        if name in ("scan", "while"):
            return self._loop(e, pairs, line)
        raise UnsupportedCall(
            f"pallas_call {self.call.name}: {name} has no derivative here; wrap the call in a function with jax.custom_jvp",
            line,
        )

    def _flat(self, closed: Any, pairs: Sequence[Pair], line: Line | None) -> list[Any]:
        """Results, then the tangents of those that are floats."""
        found = self.run(closed, pairs, line)
        return [*(x for x, _ in found), *(_tangent(x) for x in found if _real(jax.typeof(x[0])))]

    def _cond(self, e: Any, pairs: list[Pair], line: Line | None) -> list[Pair]:
        (index, _), *given = pairs
        branches = [lambda b=b: self._flat(b, given, line) for b in e.params["branches"]]
        return _paired(jax.lax.switch(jnp.asarray(index, jnp.int32), branches), [v.aval for v in e.outvars])

    def _loop(self, e: Any, pairs: list[Pair], line: Line | None) -> list[Pair]:
        p, avals = e.params, [v.aval for v in e.outvars]
        if e.primitive.name == "while":
            nc, nb = p["cond_nconsts"], p["body_nconsts"]
            tests, consts, init = pairs[:nc], pairs[nc : nc + nb], pairs[nc + nb :]
            found = jax.lax.while_loop(
                lambda s: self.run(p["cond_jaxpr"], [*tests, *((x, None) for x, _ in _paired(s, avals))], line)[0][0],
                lambda s: self._flat(p["body_jaxpr"], [*consts, *_paired(s, avals)], line),
                _together(init),
            )
            return _paired(found, avals)
        if "ft_in" in p:
            num_consts, num_carry, _ = (len(part) for part in p["ft_in"].elts)
        else:
            num_consts, num_carry = p["num_consts"], p["num_carry"]
        consts, init, xs = (
            pairs[:num_consts],
            pairs[num_consts : num_consts + num_carry],
            pairs[num_consts + num_carry :],
        )
        carried, stacked = avals[:num_carry], avals[num_carry:]
        elements = [jax.core.ShapedArray(jnp.shape(x)[1:], x.dtype) for x, _ in xs]

        def body(c: Any, x: Any) -> tuple[Any, Any]:
            out = self.run(p["jaxpr"], [*consts, *_paired(c, carried), *_paired(x, elements)], line)
            return _together(out[:num_carry]), _together(out[num_carry:])

        last, ys = jax.lax.scan(body, _together(init), _together(xs), p["length"], p["reverse"])
        return [*_paired(last, carried), *_paired(ys, stacked)]


def _together(pairs: Sequence[Pair]) -> list[Any]:
    return [*(x for x, _ in pairs), *(_tangent(x) for x in pairs if _real(jax.typeof(x[0])))]


def _paired(flat: Sequence[Any], avals: Sequence[Any]) -> list[Pair]:
    values, tangents = flat[: len(avals)], iter(flat[len(avals) :])
    return [(x, next(tangents) if _real(a) else None) for x, a in zip(values, avals, strict=True)]


def _tangent(pair: Pair) -> Any:
    x, t = pair
    return jnp.zeros(jnp.shape(x), jnp.result_type(x)) if t is None else t


def _written(e: Any, i: int) -> bool:
    """Whether operand i of an access is the value that is written (not a part of the index)."""
    return e.primitive.name in ("swap", "addupdate") and i == 1


def _bound(e: Any, values: Sequence[Any]) -> list[Any]:
    params = e.primitive.get_bind_params(e.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # which depends on the version of JAX
    out = e.primitive.bind(*functions, *values, **params)
    return list(out) if e.primitive.multiple_results else [out]


def _jvp(e: Any, pairs: Sequence[Pair]) -> list[Pair]:
    moving = [i for i, (_, t) in enumerate(pairs) if t is not None]

    def f(*given: Any) -> list[Any]:
        values = [x for x, _ in pairs]
        for i, x in zip(moving, given, strict=True):
            values[i] = x
        return _bound(e, values)

    values, tangents = jax.jvp(f, [pairs[i][0] for i in moving], [pairs[i][1] for i in moving])
    return [(x, t if _real(x) else None) for x, t in zip(values, tangents, strict=True)]
