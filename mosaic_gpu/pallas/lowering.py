"""A `pallas_call` as a `kernel`: parallel axes of its grid become CUDA blocks, sequential ones a pipeline in each block."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..errors import MosaicGpuError, ResourceExceeded, UnsupportedCall
from ..frontend.kernel import kernel
from ..frontend.loops import run_scoped
from ..frontend.primitives import inlined
from ..ops.grid import num_programs, program_id
from ..program import CompilerParams
from ..simulator.params import SimulatorParams
from . import backends
from .blocks import Ids, Moved, count, dependence_of, unravel
from .mapping import BlockMapping, GridMapping, dynamic
from .pipeline import stream

if TYPE_CHECKING:
    from .call import Call

PARALLEL, SEQUENTIAL = "parallel", "sequential"
BLOCKS = 132  # that share the iterations of parallel axes whose sizes only the device knows


def semantics(call: Call) -> tuple[str, ...]:
    """Of each axis of the grid, vmap's included.

    Where nobody says, an axis is sequential if some output's block does not depend on it (all steps then meet in that block),
    else parallel.
    """
    m, params = call.mapping, call.params
    assert isinstance(params, CompilerParams)
    given, rank = params.dimension_semantics, len(m.grid)
    seen = m.seen(range(rank))
    if given is not None and len(given) != len(seen):
        raise ValueError(
            f"dimension_semantics={given} has {len(given)} entries, the grid of {call.name} has {len(seen)} axes"
        )
    out = [PARALLEL] * rank
    for k, axis in enumerate(seen):
        shared = [b for b in m.outputs if axis not in depends(b, rank)] if m.grid[axis] != 1 else []
        if given is None:
            out[axis] = SEQUENTIAL if shared else PARALLEL
        elif given[k] != PARALLEL:
            out[axis] = SEQUENTIAL
        elif clash := next((b for b in shared if b.dims), None):
            raise UnsupportedCall(
                f"{call.name}: dimension_semantics={given} makes axis {k} of the grid parallel, but the block of {clash.name} "
                "does not depend on it: CUDA blocks would write it over each other. Make the axis 'sequential'",
                clash.line or call.line,
            )
    _check_revisits(call, out)
    return tuple(out)


def depends(b: BlockMapping, rank: int) -> frozenset[int]:
    """Axes of the grid on which a block's index may depend."""
    return dependence_of(b.index.jaxpr, b.index.jaxpr.invars[:rank]).axes


def _check_revisits(call: Call, kinds: Sequence[str]) -> None:
    """An output's buffer leaves when its index changes; a block that comes back later would start from nothing."""
    m, rank = call.mapping, len(call.mapping.grid)
    loop = [i for i in range(rank) if kinds[i] == SEQUENTIAL and m.grid[i] != 1]
    for b in m.outputs:
        if not b.staged:
            continue
        on = depends(b, rank)
        outer = next((i for i in loop if i not in on), None)
        inner = next((i for i in loop if i in on and outer is not None and i > outer), None)
        if outer is not None and inner is not None:
            a, c = (m.seen(range(rank)).index(i) for i in (outer, inner))
            raise UnsupportedCall(
                f"{call.name}: the block of {b.name} depends on sequential axis {c} but not on axis {a} outside of it, so each "
                f"block would leave shared memory and come back. Put axis {a} behind axis {c} in the grid, or leave the output "
                "in place with memory_space=plgpu.GMEM",
                b.line or call.line,
            )


@functools.lru_cache(maxsize=256)
def kernel_of(call: Call) -> Any:
    """The kernel that runs a call: (dynamic bounds of shape (1,), prefetch operands, inputs) -> outputs."""
    m, params = call.mapping, call.params
    assert isinstance(params, CompilerParams)
    kinds = semantics(call)
    rank = len(m.grid)
    blocks_axes = [i for i in range(rank) if kinds[i] == PARALLEL and m.grid[i] is not dynamic]
    shared_axes = [i for i in range(rank) if kinds[i] == PARALLEL and m.grid[i] is dynamic]
    loop_axes = [i for i in range(rank) if kinds[i] == SEQUENTIAL]
    grid = [n for i in blocks_axes if isinstance(n := m.grid[i], int)]
    if shared_axes:
        grid.append(BLOCKS)
    fetched, arrays = m.num_dynamic, len(m.prefetch)

    def body(*refs: Any) -> None:
        sizes = m.sizes([r[0] for r in refs[:fetched]])
        prefetch, operands = refs[fetched : fetched + arrays], refs[fetched + arrays :]
        place: dict[int, Any] = {axis: program_id(k) for k, axis in enumerate(blocks_axes)}

        def run(shared: Ids) -> None:
            here = place | dict(zip(shared_axes, shared, strict=True))

            def scoped(*scratch: Any, **named: Any) -> None:
                _pipeline(call, here, loop_axes, sizes, prefetch, operands, scratch, named)

            if isinstance(call.scratch, dict):
                run_scoped(scoped, **call.scratch)
            else:
                run_scoped(scoped, *call.scratch)

        if not shared_axes:
            return run(())
        # A fixed number of blocks takes one iteration after the other of the axes that only the device knows.
        counts = [sizes[i] for i in shared_axes]
        total = functools.reduce(lambda a, b: a * b, counts)
        start, step = program_id(len(blocks_axes)), num_programs(len(blocks_axes))

        def one(i: Any, _: None) -> None:
            run(unravel(start + jnp.asarray(i, jnp.int32) * step, counts))

        jax.lax.fori_loop(count(0), jax.lax.div(total - start + step - 1, step), one, None)

    body.__name__ = call.name
    made = kernel(
        body,
        [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in m.outputs],
        grid=tuple(grid),
        compiler_params=dataclasses.replace(params, dimension_semantics=None, max_concurrent_steps=2),
        interpret=call.interpret if isinstance(call.interpret, SimulatorParams) else None,
        name=call.name,
        debug=call.debug,
    )
    made.options["aliases"] = tuple((fetched + i, o) for i, o in call.aliases)
    made.options["line"] = call.line
    return made


def _pipeline(
    call: Call,
    place: dict[int, Any],
    loop_axes: Sequence[int],
    sizes: Sequence[Any],
    prefetch: Sequence[Any],
    operands: Sequence[Any],
    scratch: Sequence[Any],
    named: dict[str, Any],
) -> None:
    """One block's part of the grid."""
    m, params = call.mapping, call.params
    assert isinstance(params, CompilerParams)

    def everywhere(looped: Ids) -> list[Any]:
        ids = place | dict(zip(loop_axes, looped, strict=True))
        return [ids[i] for i in range(len(m.grid))]

    def moved(b: BlockMapping, ref: Any) -> Moved:
        depth = params.max_concurrent_steps if b.depth is None else b.depth
        return Moved(
            b.name,
            ref,
            b.dims,
            lambda looped: b.starts(everywhere(looped), prefetch),
            depth,
            min(b.delay, depth - 1),
            b.transforms,
            b.staged,
        )

    def step(looped: Ids, *blocks: Any) -> None:
        ids = m.seen(everywhere(looped))
        own = jax.tree.leaves(named) if named else scratch
        inlined(call.jaxpr, ids, m.seen(sizes), *prefetch, *blocks, *own)

    everything = [moved(b, r) for b, r in zip(m.blocks, operands, strict=True)]
    ins = len(m.inputs)
    stream(step, [sizes[i] for i in loop_axes], everything[:ins], everything[ins:], None)


def run(call: Call, *operands: Any) -> list[Any]:
    """The call on arrays, eagerly or under a trace."""
    m = call.mapping
    bounds, rest = operands[: m.num_dynamic], operands[m.num_dynamic :]
    if not any(b.dims for b in m.blocks):
        backends.hint()
    try:
        return list(kernel_of(call)(*(jnp.reshape(b, (1,)) for b in bounds), *rest))
    except MosaicGpuError as error:
        raise explained(call, error) from None


def check(call: Call) -> None:
    """Hold the call against the rule tables of its target, as compiling it would."""
    from ..runtime.execute import plan_to_simulate

    m = call.mapping
    types = [jax.ShapeDtypeStruct((1,), jnp.int32)] * m.num_dynamic
    arrays = [*m.prefetch, *(jax.core.ShapedArray(b.shape, b.dtype) for b in m.inputs)]
    try:
        if all(math.prod(a.shape) for a in arrays):
            plan_to_simulate(kernel_of(call).program(*types, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)))
    except MosaicGpuError as error:
        raise explained(call, error) from None


def explained(call: Call, error: MosaicGpuError) -> MosaicGpuError:
    """The error with a note on operands that are not in shared memory, where the body may take them to be; blocks that are too
    large point at the largest one's spec."""
    staged = [b for b in call.mapping.blocks if b.staged and b.line]
    if isinstance(error, ResourceExceeded) and error.line == call.line and staged:
        error.line = max(staged, key=lambda b: b.nbytes).line
    if "memory_note" not in error.__dict__ and isinstance(error, (UnsupportedCall, ValueError)):
        error.__dict__["memory_note"] = True
        for line in memory_notes(call.mapping):
            error.add_note(line)
    return error


def memory_notes(m: GridMapping) -> list[str]:
    """Why operands that a reader may expect in shared memory are in global memory."""
    notes = [b.left for b in m.blocks if b.left]
    notes += [
        f"{b.name} is read in place, in global memory: {b.why_not}"
        for b in m.blocks
        if b.dims and b.why_not and not b.in_gmem
    ]
    return notes
