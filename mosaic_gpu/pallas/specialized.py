"""A pipeline whose blocks one warpgroup loads, while others compute: `emit_pipeline_warp_specialized`.

The memory warpgroup fills a ring of buffers for each input, as fast as they come free; a buffer is free once every compute
warpgroup has arrived on its `consumed` barrier.  Outputs are written by all compute warpgroups, which meet before the first of
them stores a block, and before a buffer is used again.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import arguments
from ..errors import UnsupportedCall
from ..frontend.loops import run_scoped, when
from ..frontend.memory import Barrier, NamedBarrier, RefType
from ..frontend.primitives import is_ref
from ..ops.barriers import barrier_arrive, barrier_wait, named_barrier_sync
from ..ops.copies import commit_smem, copy_block_to_gmem, copy_gmem_to_smem, wait_smem_to_gmem
from ..ops.registers import set_max_registers
from ..plan.resources import entry_registers
from .blocks import Moved, block_of, count, unravel
from .irregular import in_front
from .pipeline import Body, Operands, Rings, is_scalar, moves, slot_of
from .specs import BlockSpec

WHERE = "emit_pipeline_warp_specialized"


class PipelinePipeline(enum.IntEnum):
    """Where a pipeline stands among those that run into each other: `emit_pipeline_warp_specialized(pipeline_state=)`."""

    START = 0
    STEADY = 1
    STOP = 2


def emit_pipeline_warp_specialized(
    body: Body,
    *,
    grid: Sequence[Any] | int,
    memory_registers: int,
    in_specs: Sequence[BlockSpec] = (),
    out_specs: Sequence[BlockSpec] = (),
    max_concurrent_steps: int = 2,
    wg_axis: str,
    num_compute_wgs: int,
    pipeline_state: Any = None,
    manual_produced_barriers: bool = False,
    manual_consumed_barriers: bool = False,
    compute_context: Callable[[Callable[[Any], Any]], None] | None = None,
    memory_thread_idx: int | None = None,
) -> SpecializedPipeline:
    """A loop over `grid` inside a kernel: one warpgroup loads its blocks by TMA, the others run the body, each for itself.

    body(indices, *input blocks, *output blocks[, *produced][, *consumed][, carry]): as of `emit_pipeline`; every compute
    warpgroup runs it for every step, with the same blocks, and takes its part by `lax.axis_index(wg_axis)`.
    grid, in_specs, out_specs, max_concurrent_steps: as of `emit_pipeline`; `BlockSpec.delay_release` as well.
    memory_registers: registers of a thread of the memory warpgroup; the compute warpgroups share what is left.
    wg_axis: the warpgroups' axis, of num_compute_wgs + 1; memory_thread_idx: which of them loads (None: the last).
    manual_produced_barriers: the body gets a barrier for each input and waits for each of them, once in every step, before it
    reads the block.
    manual_consumed_barriers: the body gets a barrier for each input and arrives on each of them, once in every step and compute
    warpgroup, when it has done with the block.
    compute_context(pipeline): called in the compute warpgroups, to do something before and after; it calls pipeline(carry), which
    runs the loop and returns the last carry, arrays or accumulators (Refs stay as they are).  Without it there is no carry.

    pipeline_state: of pipelines one after the other with the same grid and blocks of the same types, which share their buffers:
    PipelinePipeline.START the first, STEADY, and STOP the last (or int32 values of these).  The memory warpgroup goes on to the
    next while the others still compute, so until STOP nothing may change what they read.  Registers are dealt out by START
    alone; where it is a run-time value, by `set_max_registers` in the kernel.

    The result is called by all warpgroups, at the top of the kernel, with the GMEM Refs (or views) of the inputs, then of the
    outputs; `allocations=`: buffers and barriers from a scope of the caller's, `run_scoped(f, result.get_allocations(*refs),
    collective_axes=wg_axis)`, which pipeline_state needs.  Raises ValueError and UnsupportedCall, with the spec that is wrong.
    """
    arguments.function(WHERE, "body", body)
    if compute_context is not None:
        arguments.function(WHERE, "compute_context", compute_context)
    if not isinstance(wg_axis, str):
        arguments.refuse(WHERE, "wg_axis", wg_axis, "the name of the warpgroups' axis")
    if not (pipeline_state is None or isinstance(pipeline_state, PipelinePipeline) or is_scalar(pipeline_state)):
        arguments.refuse(WHERE, "pipeline_state", pipeline_state, "a PipelinePipeline, an int32 scalar or None")
    computing = arguments.whole(WHERE, "num_compute_wgs", num_compute_wgs, 1, 7)
    memory = computing if memory_thread_idx is None else memory_thread_idx
    memory = arguments.whole(WHERE, "memory_thread_idx", memory, 0, computing)
    registers = arguments.whole(WHERE, "memory_registers", memory_registers, 24, 256)
    produced = arguments.flag(WHERE, "manual_produced_barriers", manual_produced_barriers)
    consumed = arguments.flag(WHERE, "manual_consumed_barriers", manual_consumed_barriers)
    operands = Operands(WHERE, grid, in_specs, out_specs, max_concurrent_steps, 0)
    return SpecializedPipeline(
        body, operands, wg_axis, computing, memory, registers, pipeline_state, produced, consumed, compute_context
    )


@dataclasses.dataclass(frozen=True)
class SpecializedPipeline:
    """What `emit_pipeline_warp_specialized` returns."""

    body: Body
    operands: Operands
    axis: str
    computing: int
    memory: int
    registers: int
    state: Any
    manual_produced: bool
    manual_consumed: bool
    context: Callable[[Callable[[Any], Any]], None] | None

    def get_allocations(self, *refs: Any) -> Any:
        """Types of the buffers and barriers that the pipeline takes for these Refs, for `run_scoped`."""
        return self._made(refs).types()

    def __call__(self, *refs: Any, allocations: Any = None) -> None:
        there = jax.lax.axis_size(self.axis)
        if there != self.computing + 1:
            raise ValueError(
                f"{WHERE}: num_compute_wgs={self.computing} and the one that loads make {self.computing + 1} warpgroups; "
                f"the kernel has num_threads={there}"
            )
        p = self._made(refs)
        if allocations is None:
            if self.state is not None:
                raise UnsupportedCall(
                    f"{WHERE}(pipeline_state={self.state}): pipelines that run into each other share their buffers: "
                    "run_scoped(lambda a: ... pipeline(*refs, allocations=a), pipeline.get_allocations(*refs), "
                    "collective_axes=wg_axis) around all of them"
                )
            run_scoped(functools.partial(self._run, p, False), *p.types(), collective_axes=self.axis)
            return
        own = [(x.shape, x.dtype) for x in jax.tree.leaves(p.types(), is_leaf=lambda x: isinstance(x, RefType))]
        given = jax.tree.leaves(allocations, is_leaf=is_ref)
        if [(x.shape, x.dtype) for x in given] != own:
            raise ValueError(
                f"{WHERE}(allocations=...): {len(given)} buffers and barriers, and it takes {len(own)}, of other shapes or "
                "types; pipelines share them if grids, types and shapes of blocks, and options are the same"
            )
        self._run(p, True, *allocations)

    def _made(self, refs: Sequence[Any]) -> _Pipeline:
        inputs, outputs = self.operands.of(refs)
        if irregular := next((m for m in (*inputs, *map(in_front, outputs)) if m.irregular), None):
            raise UnsupportedCall(
                f"{WHERE}: {irregular.name}: threads copy blocks with BoundedSlice or Indirect dimensions, and outputs with "
                "padding in front, and a memory warpgroup moves its blocks by TMA; use emit_pipeline in a warpgroup that computes"
            )
        return _Pipeline(self, inputs, outputs)

    def over(self, inputs: list[Moved], outputs: list[Moved], nested: bool) -> None:
        """Run it on operands that have been checked.  nested: the first axis of the grid is a loop of its own around the compute
        context: each of its iterations writes other blocks of the outputs, and loads run ahead from one to the next."""
        p = _Pipeline(self, inputs, outputs, nested)
        run_scoped(functools.partial(self._run, p, False), *p.types(), collective_axes=self.axis)

    def _run(self, p: _Pipeline, shared: bool, buffers: Any, full: Any, consumed: Any, meet: Any) -> None:
        """shared: the buffers are there before and behind this pipeline."""
        p.allocated(buffers, full, consumed, meet)
        wg = jax.lax.axis_index(self.axis)
        first = self.state is None or self.state is PipelinePipeline.START

        @when(wg == self.memory)
        def _() -> None:
            if first:
                set_max_registers(self.registers, action="decrease")
            p.outer(p.load)
            if shared:
                p.leave()

        @when(wg != self.memory)
        def _() -> None:
            if first:
                set_max_registers(_compute_registers(self.registers, self.computing), action="increase")
            context = self.context
            if context is None:
                p.outer(lambda begun, place: p.compute(begun, place, None, False))
            else:
                p.outer(lambda begun, place: context(lambda carry: p.compute(begun, place, carry, True)))
            if p.nested:
                p.sent()


def _compute_registers(memory: int, computing: int) -> int:
    """What the memory warpgroup leaves of the registers at launch for each of the others."""
    pool = entry_registers(computing + 1) * (computing + 1)
    return min((pool - memory) // computing // 8 * 8, 256)


class _Pipeline:
    """One such loop.  Its buffers and barriers are known once the scope is there (`allocated`).

    nested: see `SpecializedPipeline.over`.
    """

    def __init__(
        self, of: SpecializedPipeline, inputs: list[Moved], outputs: list[Moved], nested: bool = False
    ) -> None:
        self.of, self.body, self.grid, self.inputs, self.outputs = of, of.body, of.operands.sizes, inputs, outputs
        self.axis, self.computing, self.first = of.axis, of.computing, int(of.memory == 0)
        self.total = functools.reduce(operator.mul, self.grid, 1)
        self.rings = Rings(self.grid, self.total if isinstance(self.total, int) else None, inputs, outputs)
        self.groups = list(self.rings.groups.items())
        self.staged = [i for i, m in enumerate(outputs) if m.staged]
        self.nested, self.inner = nested, self.grid[1:] if nested else self.grid
        self.steps = functools.reduce(operator.mul, self.inner, 1)
        for (changing, _, delay), members in self.groups:
            name = inputs[members[0]].name
            if of.manual_produced and not changing:
                raise UnsupportedCall(
                    f"{WHERE}(manual_produced_barriers=True): the block of {name} is the same in every step, so it comes "
                    "once, and no barrier says so in every step; load it before, with copy_gmem_to_smem"
                )
            if of.state is not None and (delay or not changing or not isinstance(self.total, int)):
                why = (
                    "a grid that is known at run time only"
                    if not isinstance(self.total, int)
                    else f"{name} with delay_release={delay}"
                    if delay
                    else f"{name}, whose block is the same in every step"
                )
                raise UnsupportedCall(
                    f"{WHERE}(pipeline_state=...): {why}: the next pipeline could not know when a buffer is free. Make "
                    "one pipeline of them, with another axis in its grid"
                )

    def types(self) -> tuple[Any, ...]:
        """Buffers; for every group of inputs barriers that say that blocks are there, and that they may be filled again: one, or
        one of each input where the body handles them; where the compute warpgroups meet."""

        def of_group(members: Sequence[int], depth: int, each: bool, arrivals: int) -> list[Any]:
            return [Barrier(num_arrivals=arrivals, num_barriers=depth) for _ in (members if each else members[:1])]

        by_hand = self.of.manual_produced
        full = [of_group(m, depth, by_hand, 1 if by_hand else len(m)) for (_, depth, _), m in self.groups]
        consumed = [of_group(m, depth, self.of.manual_consumed, self.computing) for (_, depth, _), m in self.groups]
        meet = [NamedBarrier(num_warpgroups=self.computing)] if self.staged and self.computing > 1 else []
        return self.rings.buffers(), full, consumed, meet

    def allocated(self, buffers: Any, full: Any, consumed: Any, meet: Any) -> None:
        self.buffers = [buffers.get(m.name) for m in (*self.inputs, *self.outputs)]
        self.full, self.consumed, self.meeting = full, consumed, meet

    def outer(self, loop: Callable[[Any, tuple[Any, ...]], None]) -> None:
        """loop(steps before, place along the first axis) for each iteration of that axis, if it is a loop of its own."""
        if not self.nested:
            return loop(0, ())

        def one(i: Any, _: None) -> None:
            i = jnp.asarray(i, jnp.int32)
            loop(i * jnp.asarray(self.steps, jnp.int32), (i,))

        jax.lax.fori_loop(count(0), count(self.grid[0]), one, None)

    # ---- the memory warpgroup -------------------------------------------------------------------------------------------
    def load(self, begun: Any, place: tuple[Any, ...]) -> None:
        """begun: steps before; place: along the first axis, if that is a loop of its own."""
        state = self.of.state
        before = state is not None and state != PipelinePipeline.START  # another pipeline has used the buffers

        def fill(k: Any, _: Any) -> None:
            k = jnp.asarray(k, jnp.int32)
            step, ids = begun + k, (*place, *unravel(k, self.inner))
            for g, ((changing, depth, _), members) in enumerate(self.groups):
                slot = slot_of(step, depth)

                def copy(members: Sequence[int] = members, g: int = g, slot: Any = slot) -> None:
                    for k, i in enumerate(members):
                        m, barrier = self.inputs[i], self.full[g][k if self.of.manual_produced else 0]
                        block = m.block(ids, step * 0)
                        copy_gmem_to_smem(block, m.slot(self.buffers[i], slot), barrier.at[slot])

                if not changing:
                    when(step == 0)(copy)
                    continue
                when(True if before is True else (step >= depth) | before)(functools.partial(self._free, g, slot))
                copy()

        jax.lax.fori_loop(count(0), count(self.steps), fill, None)

    def _free(self, g: int, slot: Any) -> None:
        """Wait until the compute warpgroups have given a buffer back."""
        for barrier in self.consumed[g]:
            barrier_wait(barrier.at[slot])

    def leave(self) -> None:
        """Barriers that outlive the pipeline are left as they were found: whoever comes next finds the buffers free."""
        state = self.of.state

        @when(True if state is None else state == PipelinePipeline.STOP)
        def _() -> None:
            for g, ((changing, depth, _), _) in enumerate(self.groups):
                for slot in range(depth) if changing else ():
                    when(slot < self.total)(functools.partial(self._free, g, slot))

    # ---- the compute warpgroups -----------------------------------------------------------------------------------------
    def compute(self, begun: Any, place: tuple[Any, ...], carry: Any, with_carry: bool) -> Any:
        """The loop; `carry`'s arrays travel through it, its Refs stay."""
        leaves: list[Any]
        leaves, tree = jax.tree.flatten(carry)
        refs = [is_ref(leaf) for leaf in leaves]

        def one(k: Any, arrays: list[Any]) -> list[Any]:
            left = iter(arrays)
            now = [leaf if fixed else next(left) for leaf, fixed in zip(leaves, refs, strict=True)]
            k = jnp.asarray(k, jnp.int32)
            following = self._step(begun + k, k, place, jax.tree.unflatten(tree, now), with_carry)
            if not with_carry:
                return []
            found, structure = jax.tree.flatten(following)
            if str(structure) != str(tree):
                raise TypeError(f"{WHERE}: the body got the carry {tree} and returns {structure}")
            if any(fixed and x is not leaf for x, leaf, fixed in zip(found, leaves, refs, strict=True)):
                raise TypeError(
                    f"{WHERE}: the body returns another Ref than it got in its carry; Refs stay what they are"
                )
            return [x for x, fixed in zip(found, refs, strict=True) if not fixed]

        first = [x for x, fixed in zip(leaves, refs, strict=True) if not fixed]
        arrays = iter(jax.lax.fori_loop(count(0), count(self.steps), one, first))
        if not self.nested:
            self.sent()
        last = [leaf if fixed else next(arrays) for leaf, fixed in zip(leaves, refs, strict=True)]
        return jax.tree.unflatten(tree, last)

    def sent(self) -> None:
        """Wait until all outputs are in global memory."""
        if self.staged:
            when(jax.lax.axis_index(self.axis) == self.first)(lambda: wait_smem_to_gmem(0))

    def _step(self, step: Any, k: Any, place: tuple[Any, ...], carry: Any, with_carry: bool) -> Any:
        """step: of all; k: of those at `place`."""
        ids, p = (*place, *unravel(k, self.inner)), self.rings
        for g, ((changing, depth, _), _) in enumerate(self.groups):
            if not self.of.manual_produced:
                wait = functools.partial(barrier_wait, self.full[g][0].at[slot_of(step, depth)])
                wait() if changing else when(step == 0)(wait)
        streamed = [p.depths[len(self.inputs) + i] for i in self.staged if p.streaming[i]]
        if streamed:  # what left the buffer so many steps ago has been read
            self._first(lambda: wait_smem_to_gmem(min(streamed) - 1, wait_read_only=True))
            self._meet()
        blocks = [
            m.slot(b, slot_of(step, n)) if m.staged else block_of(m.ref, m.dims, m.index(ids), step * 0)
            for m, b, n in zip((*self.inputs, *self.outputs), self.buffers, p.depths, strict=True)
        ]
        barriers = self._barriers("produced", self.full, step) if self.of.manual_produced else []
        barriers += self._barriers("consumed", self.consumed, step) if self.of.manual_consumed else []
        carry = self.body(ids, *blocks, *barriers, *([carry] if with_carry else []))
        if not self.of.manual_consumed:
            self._release(step)
        self._store(step, k, place)
        return carry

    def _barriers(self, kind: str, barriers: Any, step: Any) -> list[Any]:
        """For each input the one that says that its block is there, or on which it is given back."""
        of = {
            i: b.at[slot_of(step, key[1])]
            for (key, ms), bs in zip(self.groups, barriers, strict=True)
            for i, b in zip(ms, bs, strict=True)
        }
        missing = [m.name for i, m in enumerate(self.inputs) if i not in of]
        if missing:
            raise UnsupportedCall(
                f"{WHERE}(manual_{kind}_barriers=True): {', '.join(missing)} stays in global memory and has no buffer"
            )
        return [of[i] for i in range(len(self.inputs))]

    def _release(self, step: Any) -> None:
        for ((changing, depth, delay), _), (barrier, *_) in zip(self.groups, self.consumed, strict=True):
            if changing:
                before = step - delay
                arrive = functools.partial(barrier_arrive, barrier.at[slot_of(before, depth)])
                when(step >= delay)(arrive) if delay else arrive()

    def _first(self, f: Callable[[], None]) -> None:
        f() if self.computing == 1 else when(jax.lax.axis_index(self.axis) == self.first)(f)

    def _meet(self) -> None:
        for barrier in self.meeting:
            named_barrier_sync(barrier)

    def _store(self, step: Any, k: Any, place: tuple[Any, ...]) -> None:
        """Send away the outputs that are finished: those of every step in one group, others when their index moves on."""
        last = k == self.steps - 1
        ids = (*place, *unravel(k, self.inner))
        following = (*place, *unravel(jnp.minimum(k + 1, count(self.steps - 1)), self.inner))

        def send(which: Sequence[int]) -> None:
            """Once all have written them."""
            commit_smem()
            self._meet()
            self._first(lambda: copy(which))

        def copy(which: Sequence[int]) -> None:
            for i in which:
                m, b = self.outputs[i], len(self.inputs) + i
                source = m.slot(self.buffers[b], slot_of(step, self.rings.depths[b]))
                copy_block_to_gmem(source, m.block(ids, step * 0), i == which[-1])

        def send_on(i: int) -> None:
            """From the one buffer that the next block will be written to."""
            send([i])
            self._first(lambda: wait_smem_to_gmem(0, wait_read_only=True))
            self._meet()

        if streamed := [i for i in self.staged if self.rings.streaming[i]]:
            send(streamed)
        for i in self.staged:
            if not self.rings.streaming[i]:
                stays = self.rings.constant[i] or (self.nested and not self.rings.inner[i])
                when(last if stays else last | moves(self.outputs[i], ids, following))(functools.partial(send_on, i))
