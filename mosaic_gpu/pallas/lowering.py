"""A `pallas_call` as a `kernel`: parallel axes of its grid become CUDA blocks, sequential ones a pipeline in each block."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from ..errors import MosaicGpuError, Race, ResourceExceeded, UninitializedRead, UnsupportedCall
from ..frontend.kernel import kernel
from ..frontend.loops import run_scoped
from ..frontend.memory import RefType
from ..frontend.primitives import inlined
from ..ops.grid import program_id
from ..program import OF_PALLAS_CALLS, CompilerParams
from ..runtime.device import multiprocessors
from ..simulator.params import SimulatorParams
from . import backends
from .blocks import Ids, Moved, count, dependence_of, unravel
from .irregular import is_irregular
from .mapping import BlockMapping, GridMapping, dynamic
from .pipeline import Operands, stream
from .specialized import SpecializedPipeline
from .told import attributes

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
    parallel = [i for i in range(rank) if kinds[i] == PARALLEL]
    loop_axes = [i for i in range(rank) if kinds[i] == SEQUENTIAL]
    computing = params.num_compute_wgs
    if computing is None:
        shared_axes = [i for i in parallel if m.grid[i] is dynamic]
        blocks = BLOCKS
    else:
        _check_specialized(call)
        # Its registers are all that a multiprocessor has: more blocks would only begin one after the other.
        blocks = multiprocessors()
        known = [n for i in parallel if isinstance(n := m.grid[i], int)]
        shared_axes = parallel if len(known) < len(parallel) or math.prod(known) > blocks else []
    blocks_axes = [i for i in parallel if i not in shared_axes]
    grid = [n for i in blocks_axes if isinstance(n := m.grid[i], int)]
    if shared_axes:
        grid.append(blocks)
    fetched, arrays = m.num_dynamic, len(m.prefetch)

    def body(*refs: Any) -> None:
        sizes = m.sizes([r[0] for r in refs[:fetched]])
        prefetch, operands = refs[fetched : fetched + arrays], refs[fetched + arrays :]
        place: dict[int, Any] = {axis: program_id(k) for k, axis in enumerate(blocks_axes)}
        part = _Part(call, place, loop_axes, sizes, prefetch, operands)
        dealt = Dealt(shared_axes, sizes, len(blocks_axes), blocks) if shared_axes else None
        if computing is not None:
            _specialized(part, dealt)
        elif dealt is None:
            _pipeline(part)
        else:

            def one(i: Any, _: None) -> None:
                _pipeline(dataclasses.replace(part, place=place | dealt.at(i)))

            jax.lax.fori_loop(count(0), dealt.steps, one, None)

    body.__name__ = call.name
    made = kernel(
        body,
        [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in m.outputs],
        grid=tuple(grid),
        num_threads=None if computing is None else computing + 1,
        thread_name=None if computing is None else params.wg_axis,
        compiler_params=dataclasses.replace(params, **{f: getattr(CompilerParams(), f) for f in OF_PALLAS_CALLS}),
        interpret=call.interpret if isinstance(call.interpret, SimulatorParams) else None,
        name=call.name,
        debug=call.debug,
    )
    made.options["aliases"] = tuple((fetched + i, o) for i, o in call.aliases)
    made.options["line"] = call.line
    bounds = [f"grid[{i}]" for i, n in enumerate(m.grid) if n is dynamic]
    made.options["names"] = [*bounds, *(f"prefetch[{i}]" for i in range(arrays)), *(b.name for b in m.blocks)]
    return made


class Dealt:
    """Parallel axes whose iterations a fixed number of blocks takes one after the other.

    axis: that of the kernel's grid along which these blocks lie; blocks: how many they are.
    """

    def __init__(self, axes: Sequence[int], sizes: Sequence[Any], axis: int, blocks: int) -> None:
        self.axes, self.sizes = axes, [sizes[i] for i in axes]
        self.start, self.step = program_id(axis), np.int32(blocks)
        self.steps = jax.lax.div(functools.reduce(operator.mul, self.sizes) - self.start + (self.step - 1), self.step)

    def at(self, i: Any) -> dict[int, Any]:
        """Of each axis, where the i-th iteration of this block is."""
        place = unravel(self.start + jnp.asarray(i, jnp.int32) * self.step, self.sizes)
        return dict(zip(self.axes, place, strict=True))


@dataclasses.dataclass(frozen=True)
class _Part:
    """One block's part of the grid.  place: of axes that are fixed in it; loop_axes: the others, outermost first."""

    call: Call
    place: dict[int, Any]
    loop_axes: Sequence[int]
    sizes: Sequence[Any]
    prefetch: Sequence[Any]
    operands: Sequence[Any]

    @property
    def grid(self) -> list[Any]:
        return [self.sizes[i] for i in self.loop_axes]

    def ids(self, looped: Ids) -> list[Any]:
        """The place in the whole grid."""
        ids = self.place | dict(zip(self.loop_axes, looped, strict=True))
        return [ids[i] for i in range(len(self.call.mapping.grid))]

    def moved(self, ids: Callable[[Ids], list[Any]], fresh: bool = False) -> tuple[list[Moved], list[Moved]]:
        """Inputs and outputs.  ids: the pipeline's indices -> those of the grid; fresh: outputs have a new block in each step."""
        m, params = self.call.mapping, self.call.params
        assert isinstance(params, CompilerParams)
        found = []
        for b, ref in zip(m.blocks, self.operands, strict=True):
            depth = params.max_concurrent_steps if b.depth is None else b.depth
            index = functools.partial(lambda b, looped: b.starts(ids(looped), self.prefetch), b)
            delay = min(b.delay, depth - 1)
            found.append(Moved(b.name, ref, b.dims, index, depth, delay, b.transforms, b.staged, fresh))
        return found[: len(m.inputs)], found[len(m.inputs) :]

    def body(self, ids: Sequence[Any], blocks: Sequence[Any], scratch: Sequence[Any]) -> None:
        m = self.call.mapping
        inlined(self.call.jaxpr, m.seen(ids), m.seen(self.sizes), *self.prefetch, *blocks, *scratch)


def _pipeline(part: _Part) -> None:
    """All steps of a block, by one warpgroup."""

    def scoped(*scratch: Any, **named: Any) -> None:
        own = jax.tree.leaves(named) if named else scratch
        stream(lambda looped, *blocks: part.body(part.ids(looped), blocks, own), part.grid, *part.moved(part.ids), None)

    scratch = part.call.scratch
    if isinstance(scratch, dict):
        run_scoped(scoped, **scratch)
    else:
        run_scoped(scoped, *scratch)


def _specialized(part: _Part, dealt: Dealt | None) -> None:
    """The same by several warpgroups, and one more that loads, in one pipeline over all that the block has been dealt.

    Accumulators belong to each of them and start anew with each iteration of the parallel axes, other scratch to all.
    """
    params = part.call.params
    assert isinstance(params, CompilerParams) and params.num_compute_wgs is not None
    computing = params.num_compute_wgs
    types = jax.tree.leaves(part.call.scratch, is_leaf=lambda x: isinstance(x, RefType))
    each = [i for i, s in enumerate(types) if s.space.kind == "acc"]
    shared = [i for i in range(len(types)) if i not in each]
    grid = part.grid if dealt is None else [dealt.steps, *part.grid]
    fresh = dealt is not None and all(isinstance(n, int) and n == 1 for n in part.grid)

    def ids(looped: Ids) -> list[Any]:
        if dealt is None:
            return part.ids(looped)
        return dataclasses.replace(part, place=part.place | dealt.at(looped[0])).ids(looped[1:])

    def scoped(*common: Any) -> None:
        def body(looped: Ids, *given: Any) -> Any:
            *blocks, own = given
            scratch = dict(zip((*shared, *each), (*common, *own), strict=True))
            part.body(ids(looped), blocks, [scratch[i] for i in range(len(types))])
            return own

        def context(pipeline: Any) -> None:
            def with_accumulators(*own: Any) -> None:
                pipeline(own)

            run_scoped(with_accumulators, *(types[i] for i in each))

        sizes = Operands("pallas_call", grid, (), (), params.max_concurrent_steps, 0)
        pipeline = SpecializedPipeline(
            body, sizes, params.wg_axis, computing, computing, params.memory_registers, None, False, False, context
        )
        pipeline.over(*part.moved(ids, fresh), dealt is not None)

    run_scoped(scoped, *(types[i] for i in shared), collective_axes=params.wg_axis)


def _check_specialized(call: Call) -> None:
    """What needs the warpgroup that computes to load."""
    if b := next((b for b in call.mapping.blocks if b.staged and any(map(is_irregular, b.dims))), None):
        raise UnsupportedCall(
            f"{call.name}: CompilerParams(num_compute_wgs={call.params.num_compute_wgs}): {b.name}: threads copy blocks with "
            "BoundedSlice or Indirect dimensions, and a memory warpgroup moves its blocks by TMA; leave num_compute_wgs out",
            b.line or call.line,
        )


def run(call: Call, *operands: Any) -> list[Any]:
    """The call on arrays, eagerly or under a trace."""
    m = call.mapping
    bounds, rest = operands[: m.num_dynamic], operands[m.num_dynamic :]
    if not any(b.dims for b in m.blocks):
        backends.hint()
    try:
        with set_xla_metadata(**attributes(call)):
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
    """The error with what a reader of the body alone cannot see: the spec of the block that a copy moves (of those that are
    too large together the largest one's), operands that are not in shared memory, axes whose points are blocks of their own."""
    if "explained" in error.__dict__:
        return error
    error.__dict__["explained"] = True
    staged = [b for b in call.mapping.blocks if b.staged and b.line]
    if error.line is not None and error.line == call.line and staged:  # of no operation of the body
        named = [b for b in staged if f"{b.name}:gmem" in error.message or f"['{b.name}']" in error.message]
        if isinstance(error, ResourceExceeded):
            error.line = max(staged, key=lambda b: b.nbytes).line
        elif len(named) == 1:
            error.line = named[0].line
        else:
            for b in staged:
                error.add_note(f"{b.name} is copied in blocks of {b.block_shape}, as its BlockSpec says at {b.line}")
    if isinstance(error, UninitializedRead):
        grid = call.mapping.seen(list(zip(semantics(call), call.mapping.grid, strict=True)))
        axes = [i for i, (kind, n) in enumerate(grid) if kind == PARALLEL and n != 1]
        if axes:
            error.add_note(
                f"each point of the parallel axes of the grid ({', '.join(map(str, axes))}) is a CUDA block, with buffers and "
                "scratch of its own. Where a step reads what the one before has left, make the axis 'sequential': "
                "CompilerParams(dimension_semantics=...)"
            )
    if isinstance(error, Race) and error.kind == "write/write" and error.line == error.other_line == call.line:
        error.add_note(
            "two steps store the same block of an output"
            + (", and run at the same time: " if error.between == "grid" else ", with others between them: ")
            + "a block stays in shared memory only while steps that follow each other, along axes that are 'sequential', "
            "have its index. Order the grid so that they do, or leave the output where it is (BlockSpec(memory_space=pl.ANY)) "
            "and store to it in the body"
        )
    if isinstance(error, (UnsupportedCall, ValueError)):
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
