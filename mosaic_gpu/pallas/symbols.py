"""Calls whose arrays have symbols in their shapes (`jax.export.symbolic_shape`): exported once, run with any lengths.

Blocks are numbers.  Sizes of the grid that are symbols become operands, as those do that only the device knows.  What remains of
the arrays' shapes are tensor maps and extents, which never enter a cubin: the launcher takes them from the arrays that a call
brings.  So a plan of stand-in lengths serves all; that the code does not depend on them is checked with a second set.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UnsupportedCall
from .blocks import known_multiple, symbolic
from .mapping import GridMapping

if TYPE_CHECKING:
    from .call import Call

FACTORS = (509, 1021)  # primes: a stand-in is divisible by what the symbol is known to be, and by nothing else


def has_symbols(m: GridMapping) -> bool:
    """Whether the shape of some array has symbols."""
    return any(symbolic(b.shape) for b in m.blocks)


@functools.lru_cache(maxsize=256)
def with_shapes(call: Call, shapes: tuple[tuple[int, ...], ...]) -> Call:
    """The call on arrays of these shapes, inputs then outputs; what lies in shared memory is what it was."""
    blocks = [
        dataclasses.replace(b, shape=shape, in_place=b.in_place or (b.why_not or "" if not b.staged else ""))
        for b, shape in zip(call.mapping.blocks, shapes, strict=True)
    ]
    return call.with_(mapping=dataclasses.replace(call.mapping, blocks=tuple(blocks)))


def stand_in(call: Call, factor: int = FACTORS[0]) -> Call:
    """The call with a number for each length that is a symbol."""
    return with_shapes(
        call,
        tuple(
            tuple(known_multiple(n) * factor if symbolic((n,)) else int(n) for n in b.shape)
            for b in call.mapping.blocks
        ),
    )


def run(call: Call, platform: str, operands: Sequence[Any]) -> list[Any]:
    """The call under a lowering for a platform."""
    m = call.mapping
    from . import lowering

    bounds = [jnp.reshape(b, (1,)) for b in operands[: m.num_dynamic]]
    arrays = [*bounds, *operands[m.num_dynamic :]]
    types = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in m.outputs]
    lowering.check(stand_in(call))  # what the compiler refuses is refused when it is lowered
    return _on_gpu(call, arrays, types) if platform == "cuda" else _simulated(call, arrays, types)


def _program(call: Call, factor: int) -> Any:
    from . import lowering

    m = call.mapping
    known = stand_in(call, factor)
    types = [jax.ShapeDtypeStruct((1,), jnp.int32)] * m.num_dynamic
    types += [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in m.prefetch]
    types += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in known.mapping.inputs]
    return lowering.kernel_of(known).program(*types)


def _on_gpu(call: Call, arrays: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    from ..codegen.emitter import emit
    from ..plan.build import build_plan
    from ..runtime import device, execute

    devices = device.gpu_devices()
    capability = device.compute_capability(devices[0]) if devices else None
    plans = []
    for factor in FACTORS:
        program = _program(call, factor)
        plans.append(build_plan(program, execute.target_arch(program, capability)))
    if emit(plans[0]) != emit(plans[1]):
        raise UnsupportedCall(
            f"pallas_call {call.name}: its code depends on lengths that are symbols; export it for each shape",
            call.line,
        )
    m = call.mapping
    first = m.num_dynamic + len(m.prefetch)
    shaped = {first + i for i, b in enumerate(m.blocks) if symbolic(b.shape)}
    aliases = {m.num_dynamic + i: o for i, o in call.aliases}
    return execute.launch(plans[0], arrays, types, aliases, shaped)


def _simulated(call: Call, arrays: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    from ..runtime import execute, jax_ffi
    from . import lowering

    m = call.mapping

    def late(*given: np.ndarray[Any, Any], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray[Any, Any]]:
        inputs = [x.shape for x in given[m.num_dynamic + len(m.prefetch) :]]
        made = lowering.kernel_of(with_shapes(call, (*inputs, *shapes)))
        return execute.simulate(made.traced(*given), *given)

    return jax_ffi.late_call(late, arrays, types)


__all__ = ["has_symbols", "run", "stand_in", "with_shapes"]
