"""Blocks streamed through shared memory by one warpgroup: loads run ahead of the body, stores behind it.

Each input has a ring of buffers.  A step waits for its blocks, runs the body, makes the body's writes visible to TMA and meets,
then stores what is finished and fills the buffers that the body has left.  An input whose index does not depend on the grid is
loaded once.  An output is written back when its index changes: a new buffer each step where it surely does, else one buffer
that stays as long as the index does, so that a body may accumulate into it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import arguments
from ..errors import UnsupportedCall
from ..frontend.loops import bounded_slices, run_scoped, when
from ..frontend.memory import Barrier
from ..frontend.primitives import is_ref, space_of, split_ref
from ..frontend.tracebacks import located
from ..ops.barriers import barrier_wait
from ..ops.copies import commit_smem, copy_block_to_gmem, copy_gmem_to_smem, wait_smem_to_gmem
from .blocks import Dependence, Ids, Moved, block_of, count, dependence, unravel, why_in_place
from .irregular import checked, gather, in_front, is_irregular, no_index, scatter
from .specs import BlockDim, Blocked, BlockSpec

Body = Callable[..., Any]


def emit_pipeline(
    body: Body,
    *,
    grid: Sequence[Any] | int,
    in_specs: Sequence[BlockSpec] = (),
    out_specs: Sequence[BlockSpec] = (),
    max_concurrent_steps: int = 1,
    delay_release: int = 0,
    init_carry: Any = None,
) -> Callable[..., Any]:
    """A loop over `grid` inside a kernel, its blocks streamed between GMEM and SMEM by TMA.

    body(indices, *input blocks, *output blocks[, carry]): indices are int32 scalars, one for each axis of the grid; blocks are
    SMEM Refs of the specs' block shapes (GMEM views where the spec says GMEM, or where TMA has no such block: rows that are no
    multiple of 16 bytes, more than five dimensions).
    grid: sizes, ints or int32 scalars; the last axis is the fastest.
    in_specs, out_specs: `BlockSpec`s, one for each array; their index maps get the indices.
    max_concurrent_steps: buffers for each array that changes from step to step, so how far loads run ahead.
    delay_release: a body that leaves work in flight on its inputs (`wgmma_wait(1)`) needs them for so many further steps; also
    `BlockSpec.delay_release`, for one input.  Less than max_concurrent_steps.
    init_carry: given, the body gets a carry as its last argument and returns the next; the pipeline returns the last.

    The result is called with the GMEM Refs (or views) of the inputs, then of the outputs.  Blocks that stick out of an array
    read zeros there and are not written there.  For one warpgroup: under `num_threads` call it in a branch of one.
    Raises ValueError and UnsupportedCall, with the spec that is wrong.
    """
    where = "emit_pipeline"
    arguments.function(where, "body", body)
    delay = arguments.whole(where, "delay_release", delay_release, 0)
    operands = Operands(where, grid, in_specs, out_specs, max_concurrent_steps, delay)

    def pipeline(*refs: Any) -> Any:
        return stream(body, operands.sizes, *operands.of(refs), init_carry)

    return pipeline


class Operands:
    """What a pipeline says of its grid and its arrays, checked.  where: the function, for messages; sizes: of the grid."""

    def __init__(
        self,
        where: str,
        grid: Sequence[Any] | int,
        in_specs: Sequence[BlockSpec],
        out_specs: Sequence[BlockSpec],
        steps: int,
        delay: int,
    ) -> None:
        self.where, self.delay = where, delay
        self.steps = arguments.whole(where, "max_concurrent_steps", steps, 1)
        sizes: tuple[Any, ...] = tuple(grid) if hasattr(grid, "__iter__") else (grid,)
        self.sizes = tuple(
            n if is_scalar(n) else arguments.whole(where, f"grid[{i}]", n, 0) for i, n in enumerate(sizes)
        )
        kind = (BlockSpec,)
        self.ins = arguments.sequence_of(where, "in_specs", in_specs, kind, "BlockSpec")
        self.outs = arguments.sequence_of(where, "out_specs", out_specs, kind, "BlockSpec")

    def of(self, refs: Sequence[Any]) -> tuple[list[Moved], list[Moved]]:
        """The inputs and outputs that it is called with."""
        ins, outs = self.ins, self.outs
        if len(refs) != len(ins) + len(outs):
            raise TypeError(
                f"{self.where}: {len(ins)} in_specs and {len(outs)} out_specs, but it is called with {len(refs)} Refs"
            )
        names = [f"input {i}" for i in range(len(ins))] + [f"output {i}" for i in range(len(outs))]
        moved = []
        for i, (n, r, s) in enumerate(zip(names, refs, (*ins, *outs), strict=True)):
            delay = max(self.delay, s.delay_release) if i < len(ins) else 0
            with located(s.line):
                moved.append(_moved(self.where, n, r, s, self.steps, delay))
        return moved[: len(ins)], moved[len(ins) :]


def is_scalar(n: Any) -> bool:
    """Whether a grid's size is known at run time only."""
    return hasattr(n, "aval") and not n.shape and jnp.issubdtype(n.dtype, jnp.integer)


def _moved(where: str, name: str, ref: Any, spec: BlockSpec, steps: int, delay: int) -> Moved:
    space = space_of(ref)
    if not is_ref(ref) or space is None or space.kind != "gmem":
        arguments.refuse(where, name, ref, "a GMEM Ref or a view of one")
    dims = spec.dims(where, name, ref.shape)
    if spec.collective_axes:
        raise UnsupportedCall(
            f"{where}: {name}: collective_axes needs the blocks of a cluster to agree on when a buffer is free; load it with "
            "copy_gmem_to_smem(..., collective_axes=) and a ClusterBarrier",
            spec.line,
        )
    check_place(where, name, dims, spec)
    if split_ref(ref)[1]:  # a part of an array: what sticks out of it would be its neighbour
        for d, n in zip(dims, ref.shape, strict=True):
            if isinstance(d, Blocked) and n % d.block_size:
                raise ValueError(
                    f"{where}: {name} is a view of shape {tuple(ref.shape)}, which blocks of {spec.block_shape} do not divide; "
                    "the last one would reach into its neighbour. Pass the whole array and add the offset in the index map"
                )

    what = f"{where}: the index map of {name}"

    def index(ids: Ids) -> Sequence[Any]:
        if spec.index_map is None:
            found = (0,) * len(dims)
        else:
            with bounded_slices(), located(spec.line):
                try:
                    found = spec.index_map(*ids)
                except TypeError as error:
                    if "positional argument" in str(error):
                        error.add_note(f"{what}: it is called with {len(ids)} indices, one for each axis of the grid")
                    raise
        found = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        with located(spec.line):
            if len(found) != len(dims):
                raise ValueError(
                    f"{what} must return {len(dims)} values to match block_shape={spec.block_shape}, not {len(found)}"
                )
            parts = [checked(what, i, d, x) for i, (d, x) in enumerate(zip(dims, found, strict=True))]
            for i, (d, x) in enumerate(zip(dims, parts, strict=True)):
                if not is_irregular(d) and (kind := no_index(x)) is not None:
                    raise ValueError(f"{what} must return integer scalars. Output[{i}] has type {kind}.")
        return parts

    transforms = spec.checked_transforms(where, name)
    staged = not spec.in_gmem(where, name) and why_in_place(ref.shape, dims, ref.dtype, transforms) is None
    depth = spec.depth(where, name, steps)
    if delay and delay >= depth:
        raise ValueError(
            f"{where}: {name}: delay_release={delay} must be less than its buffers, {depth} (max_concurrent_steps)"
        )
    return Moved(name, ref, dims, index, depth, delay, transforms, staged)


def check_place(where: str, name: str, dims: Sequence[BlockDim], spec: BlockSpec) -> None:
    """UnsupportedCall where irregular blocks are to stay in global memory: what is outside of them would be their neighbours."""
    kind = next((type(d).__name__ for d in dims if is_irregular(d)), None)
    if kind and spec.in_gmem(where, name):
        raise UnsupportedCall(
            f"{where}: {name}: a block with a {kind} dimension is copied to shared memory, its spec says GMEM; leave "
            "memory_space out, or give the body the whole array, BlockSpec(memory_space=plgpu.GMEM), and index it there",
            spec.line,
        )


def stream(body: Body, grid: Sequence[Any], inputs: Sequence[Moved], outputs: Sequence[Moved], carry: Any) -> Any:
    """The pipeline over operands that have been checked."""
    total = functools.reduce(operator.mul, grid, 1)
    known = isinstance(total, int)
    if known and total == 0:
        return carry
    if known and total >= 2**31:
        raise UnsupportedCall(
            f"a pipeline of {total} steps: they are counted in int32, so there are at most {2**31 - 1}"
        )
    plan = Rings(grid, total if known else None, inputs, [in_front(m) for m in outputs])

    def run(buffers: dict[str, Any], barriers: Sequence[Any]) -> Any:
        return _loop(body, grid, total, plan, [buffers.get(m.name) for m in (*inputs, *outputs)], barriers, carry)

    return run_scoped(run, plan.buffers(), plan.barriers())


class Rings:
    """Which operands share a barrier, and how many buffers each has."""

    def __init__(
        self, grid: Sequence[Any], total: int | None, inputs: Sequence[Moved], outputs: Sequence[Moved]
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        rank = len(grid)
        long = [i for i, n in enumerate(grid) if not (isinstance(n, int) and n == 1)]
        found = [dependence(m.index, rank) for m in (*inputs, *outputs)]
        changing = [bool(d.axes & set(long)) for d in found]
        limit = total if total is not None else 2**31
        self.changing = changing
        # An irregular input is copied when its step begins: behind it lie those that the body may still be reading.
        ahead = [m.delay + 1 if m.irregular else m.depth for m in (*inputs, *outputs)]
        self.depths = [min(n, limit) if c else 1 for n, c in zip(ahead, changing, strict=True)]
        self.streaming = [
            not m.irregular and (m.fresh or _changes_each_step(d, grid, long))
            for m, d in zip(outputs, found[len(inputs) :], strict=True)
        ]
        for i, s in enumerate(self.streaming):
            if not s:
                self.depths[len(inputs) + i] = 1
        # Inputs that are filled at the same time share barriers: (changing, depth, delay) -> operands
        self.groups: dict[tuple[bool, int, int], list[int]] = {}
        for i, m in enumerate(inputs):
            if m.by_tma:
                depth = self.depths[i]
                self.groups.setdefault((changing[i], depth, min(m.delay, depth - 1)), []).append(i)
        self.constant = [not c for c in changing[len(inputs) :]]
        # Whether an output's index depends on axes behind the first one.
        self.inner = [bool(d.axes & set(long) - {0}) for d in found[len(inputs) :]]

    def buffers(self) -> dict[str, Any]:
        operands = zip((*self.inputs, *self.outputs), self.depths, strict=True)
        return {m.name: m.buffer(n) for m, n in operands if m.staged}

    def barriers(self) -> list[Any]:
        return [
            Barrier(num_arrivals=len(members), num_barriers=depth) for (_, depth, _), members in self.groups.items()
        ]


def _changes_each_step(d: Dependence, grid: Sequence[Any], long: Sequence[int]) -> bool:
    """Whether an index surely differs from one step to the next."""
    if not long:
        return True
    if all(isinstance(n, int) for n in grid):
        return long[-1] in d.plain
    return d.plain >= set(long)  # an axis may turn out to have one step


def _loop(
    body: Body, grid: Sequence[Any], total: Any, p: Rings, buffers: Sequence[Any], barriers: Sequence[Any], carry: Any
) -> Any:
    inputs, outputs = p.inputs, p.outputs
    groups = list(zip(p.groups.items(), barriers, strict=True))
    staged = [i for i, m in enumerate(outputs) if m.staged]
    streamed = [i for i in staged if p.streaming[i]]
    constant = [i for i in staged if p.constant[i] and not p.streaming[i]]
    visited = [i for i in staged if i not in streamed and i not in constant]
    out_buffers = buffers[len(inputs) :]

    def load(step: Any, members: Sequence[int], depth: int, barrier: Any) -> None:
        step = jnp.asarray(step, jnp.int32)
        slot = slot_of(step, depth)
        ids = unravel(step, grid)
        for i in members:
            copy_gmem_to_smem(inputs[i].block(ids, step * 0), inputs[i].slot(buffers[i], slot), barrier.at[slot])

    def store(i: int, step: Any, commit: bool) -> None:
        m, ids = outputs[i], unravel(step, grid)
        block = m.slot(out_buffers[i], slot_of(step, p.depths[len(inputs) + i]))
        if m.irregular:
            scatter(m, m.index(ids), block, step * 0)
        else:
            copy_block_to_gmem(block, m.block(ids, step * 0), commit)

    for ((_, depth, _), members), barrier in groups:

        def first(step: Any, _: None, members: Any = members, depth: int = depth, barrier: Any = barrier) -> None:
            load(step, members, depth, barrier)

        first_steps = depth if isinstance(total, int) else jnp.minimum(count(depth), total)
        jax.lax.fori_loop(count(0), count(first_steps), first, None)

    def one(step: Any, carry: Any) -> Any:
        step = jnp.asarray(step, jnp.int32)
        ids = unravel(step, grid)
        for ((changing, depth, _), _), barrier in groups:
            if changing:
                barrier_wait(barrier.at[slot_of(step, depth)])
            else:
                when(step == 0)(functools.partial(barrier_wait, barrier.at[0]))
        for i, m in enumerate(inputs):
            if m.irregular:
                slot = m.slot(buffers[i], slot_of(step, p.depths[i]))
                fetch = functools.partial(gather, m, m.index(ids), slot, step * 0)
                fetch() if p.changing[i] else when(step == 0)(fetch)
        if streamed:  # what left the buffer `depth` steps ago has been read
            wait_smem_to_gmem(min(p.depths[len(inputs) + i] for i in streamed) - 1, wait_read_only=True)
        blocks = [
            m.slot(b, slot_of(step, n)) if m.staged else block_of(m.ref, m.dims, m.index(ids), step * 0)
            for m, b, n in zip((*inputs, *outputs), buffers, p.depths, strict=True)
        ]
        carry = _next(carry, body(ids, *blocks) if carry is None else body(ids, *blocks, carry))
        commit_smem()  # the body's writes are visible to TMA, and all threads have read its inputs
        last = step == total - 1
        ahead = unravel(jnp.minimum(step + 1, count(total - 1)), grid)  # index maps see places in the grid only
        finished = {i: last | moves(outputs[i], ids, ahead) for i in visited}
        for i in streamed:
            store(i, step, i == streamed[-1])
        for i, done in finished.items():
            when(done)(functools.partial(store, i, step, True))
        for i in constant:
            when(last)(functools.partial(store, i, step, True))
        for ((changing, depth, delay), members), barrier in groups:
            following = step + (depth - delay)
            if changing and not (isinstance(total, int) and depth - delay >= total):
                enough = (following < total) & (step >= delay) if delay else following < total
                when(enough)(functools.partial(load, following, members, depth, barrier))
        for i, done in finished.items():
            if outputs[i].by_tma:
                when(done)(lambda: wait_smem_to_gmem(0, wait_read_only=True))
        return carry

    carry = jax.lax.fori_loop(count(0), count(total), one, carry)
    if any(outputs[i].by_tma for i in staged):
        wait_smem_to_gmem(0)
    return carry


def _next(carry: Any, returned: Any) -> Any:
    """What a body returns, held against its carry (a loop's own errors would speak of a `scan`)."""
    given, found = str(jax.tree.structure(carry)), str(jax.tree.structure(returned))
    if given != found:
        wanted = (
            "returns nothing without init_carry" if carry is None else f"must return a carry like init_carry, {given}"
        )
        raise TypeError(f"emit_pipeline: the body {wanted}; it returned {found}")
    return returned


def slot_of(step: Any, depth: int) -> Any:
    return 0 if depth == 1 else jax.lax.rem(step, jnp.asarray(depth, jnp.int32))


def moves(m: Moved, ids: Ids, following: Ids) -> Any:
    """Whether the next step works on another block."""
    here, there = (jax.tree.leaves(m.index(i)) for i in (ids, following))
    changed = [jnp.any(a != b) if jnp.ndim(a) else a != b for a, b in zip(here, there, strict=True)]
    return functools.reduce(operator.or_, [c for c in changed if not isinstance(c, bool)], jnp.bool_(False))


__all__ = ["check_place", "emit_pipeline", "is_scalar", "stream"]
