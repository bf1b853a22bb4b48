"""A pipeline whose blocks one warpgroup loads, while others compute: `emit_pipeline_warp_specialized`.

The memory warpgroup fills a ring of buffers for each input, as fast as they come free; a buffer is free once every compute
warpgroup has arrived on its `consumed` barrier.  Outputs are written by all compute warpgroups, which meet before the first of
them stores a block, and before a buffer is used again.
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
from ..frontend.loops import run_scoped, when
from ..frontend.memory import Barrier, NamedBarrier
from ..frontend.primitives import is_ref
from ..ops.barriers import barrier_arrive, barrier_wait, named_barrier_sync
from ..ops.copies import commit_smem, copy_block_to_gmem, copy_gmem_to_smem, wait_smem_to_gmem
from ..ops.registers import set_max_registers
from ..plan.resources import entry_registers
from .blocks import Moved, block_of, count, unravel
from .pipeline import Body, Operands, Rings, moves, slot_of
from .specs import BlockSpec

WHERE = "emit_pipeline_warp_specialized"


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
    manual_consumed_barriers: bool = False,
    compute_context: Callable[[Callable[[Any], Any]], None] | None = None,
    memory_thread_idx: int | None = None,
) -> Callable[..., None]:
    """A loop over `grid` inside a kernel: one warpgroup loads its blocks by TMA, the others run the body, each for itself.

    body(indices, *input blocks, *output blocks[, *consumed][, carry]): as of `emit_pipeline`; every compute warpgroup runs it
    for every step, with the same blocks, and takes its part by `lax.axis_index(wg_axis)`.
    grid, in_specs, out_specs, max_concurrent_steps: as of `emit_pipeline`; `BlockSpec.delay_release` as well.
    memory_registers: registers of a thread of the memory warpgroup; the compute warpgroups share what is left.
    wg_axis: the warpgroups' axis, of num_compute_wgs + 1; memory_thread_idx: which of them loads (None: the last).
    manual_consumed_barriers: the body gets a barrier for each input and arrives on each of them, once in every step and compute
    warpgroup, when it has done with the block.
    compute_context(pipeline): called in the compute warpgroups, to do something before and after; it calls pipeline(carry), which
    runs the loop and returns the last carry, arrays or accumulators (Refs stay as they are).  Without it there is no carry.

    The result is called by all warpgroups, at the top of the kernel, with the GMEM Refs (or views) of the inputs, then of the
    outputs.  Raises ValueError and UnsupportedCall, with the spec that is wrong; pipeline_state is refused.
    """
    arguments.function(WHERE, "body", body)
    if compute_context is not None:
        arguments.function(WHERE, "compute_context", compute_context)
    if not isinstance(wg_axis, str):
        arguments.refuse(WHERE, "wg_axis", wg_axis, "the name of the warpgroups' axis")
    if pipeline_state is not None:
        raise UnsupportedCall(
            f"{WHERE}(pipeline_state={pipeline_state}): pipelines that run into each other are not in this version; make one of "
            "them, with another axis in its grid"
        )
    computing = arguments.whole(WHERE, "num_compute_wgs", num_compute_wgs, 1, 7)
    memory = computing if memory_thread_idx is None else memory_thread_idx
    memory = arguments.whole(WHERE, "memory_thread_idx", memory, 0, computing)
    registers = arguments.whole(WHERE, "memory_registers", memory_registers, 24, 256)
    manual = arguments.flag(WHERE, "manual_consumed_barriers", manual_consumed_barriers)
    operands = Operands(WHERE, grid, in_specs, out_specs, max_concurrent_steps, 0)

    def pipeline(*refs: Any) -> None:
        there = jax.lax.axis_size(wg_axis)
        if there != computing + 1:
            raise ValueError(
                f"{WHERE}: num_compute_wgs={computing} and the one that loads make {computing + 1} warpgroups; the kernel has "
                f"num_threads={there}"
            )
        inputs, outputs = operands.of(refs)
        if irregular := next((m for m in (*inputs, *outputs) if m.irregular), None):
            raise UnsupportedCall(
                f"{WHERE}: {irregular.name}: threads copy blocks with BoundedSlice or Indirect dimensions, and a memory "
                "warpgroup moves its blocks by TMA; use emit_pipeline in the warpgroup that computes"
            )
        p = _Pipeline(body, operands.sizes, inputs, outputs, wg_axis, computing, memory, manual)

        def scope(buffers: Any, full: Any, consumed: Any, meet: Any) -> None:
            p.allocated(buffers, full, consumed, meet)
            wg = jax.lax.axis_index(wg_axis)

            @when(wg == memory)
            def _() -> None:
                set_max_registers(registers, action="decrease")
                p.load()

            @when(wg != memory)
            def _() -> None:
                set_max_registers(_compute_registers(registers, computing), action="increase")
                if compute_context is None:
                    p.compute(None, False)
                else:
                    compute_context(lambda carry: p.compute(carry, True))

        run_scoped(scope, *p.types(), collective_axes=wg_axis)

    return pipeline


def _compute_registers(memory: int, computing: int) -> int:
    """What the memory warpgroup leaves of the registers at launch for each of the others."""
    pool = entry_registers(computing + 1) * (computing + 1)
    return min((pool - memory) // computing // 8 * 8, 256)


class _Pipeline:
    """One such loop.  Its buffers and barriers are known once the scope is there (`allocated`)."""

    def __init__(
        self,
        body: Body,
        grid: Sequence[Any],
        inputs: list[Moved],
        outputs: list[Moved],
        axis: str,
        computing: int,
        memory: int,
        manual: bool,
    ) -> None:
        self.body, self.grid, self.inputs, self.outputs = body, grid, inputs, outputs
        self.axis, self.computing, self.first, self.manual = axis, computing, int(memory == 0), manual
        self.total = functools.reduce(operator.mul, grid, 1)
        self.rings = Rings(grid, self.total if isinstance(self.total, int) else None, inputs, outputs)
        self.groups = list(self.rings.groups.items())
        self.staged = [i for i, m in enumerate(outputs) if m.staged]

    def types(self) -> tuple[Any, ...]:
        # Of every group that changes one barrier says that it may be filled again, or one of each of its inputs.
        consumed = [
            [
                Barrier(num_arrivals=self.computing, num_barriers=depth)
                for _ in (members if self.manual else members[:1])
            ]
            for (_, depth, _), members in self.groups
        ]
        meet = [NamedBarrier(num_warpgroups=self.computing)] if self.staged and self.computing > 1 else []
        return self.rings.buffers(), self.rings.barriers(), consumed, meet

    def allocated(self, buffers: Any, full: Any, consumed: Any, meet: Any) -> None:
        self.buffers = [buffers.get(m.name) for m in (*self.inputs, *self.outputs)]
        self.full, self.consumed, self.meeting = full, consumed, meet

    # ---- the memory warpgroup -------------------------------------------------------------------------------------------
    def load(self) -> None:
        def fill(step: Any, _: Any) -> None:
            step = jnp.asarray(step, jnp.int32)
            for g, ((changing, depth, _), members) in enumerate(self.groups):
                slot = slot_of(step, depth)

                def copy(members: Sequence[int] = members, g: int = g, slot: Any = slot) -> None:
                    for i in members:
                        m = self.inputs[i]
                        block = m.block(unravel(step, self.grid), step * 0)
                        copy_gmem_to_smem(block, m.slot(self.buffers[i], slot), self.full[g].at[slot])

                if not changing:
                    when(step == 0)(copy)
                    continue

                def free(g: int = g, slot: Any = slot) -> None:
                    for barrier in self.consumed[g]:
                        barrier_wait(barrier.at[slot])

                when(step >= depth)(free)
                copy()

        jax.lax.fori_loop(count(0), count(self.total), fill, None)

    # ---- the compute warpgroups -----------------------------------------------------------------------------------------
    def compute(self, carry: Any, with_carry: bool) -> Any:
        """The loop; `carry`'s arrays travel through it, its Refs stay."""
        leaves: list[Any]
        leaves, tree = jax.tree.flatten(carry)
        refs = [is_ref(leaf) for leaf in leaves]

        def one(step: Any, arrays: list[Any]) -> list[Any]:
            left = iter(arrays)
            now = [leaf if fixed else next(left) for leaf, fixed in zip(leaves, refs, strict=True)]
            following = self._step(jnp.asarray(step, jnp.int32), jax.tree.unflatten(tree, now), with_carry)
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
        arrays = iter(jax.lax.fori_loop(count(0), count(self.total), one, first))
        if self.staged:
            when(jax.lax.axis_index(self.axis) == self.first)(lambda: wait_smem_to_gmem(0))
        last = [leaf if fixed else next(arrays) for leaf, fixed in zip(leaves, refs, strict=True)]
        return jax.tree.unflatten(tree, last)

    def _step(self, step: Any, carry: Any, with_carry: bool) -> Any:
        ids, p = unravel(step, self.grid), self.rings
        for g, ((changing, depth, _), _) in enumerate(self.groups):
            wait = functools.partial(barrier_wait, self.full[g].at[slot_of(step, depth)])
            wait() if changing else when(step == 0)(wait)
        streamed = [p.depths[len(self.inputs) + i] for i in self.staged if p.streaming[i]]
        if self.staged:  # what lay in the outputs' buffers has been read
            pending = min(streamed) - 1 if streamed and all(p.streaming[i] for i in self.staged) else 0
            self._first(lambda: wait_smem_to_gmem(pending, wait_read_only=True))
            self._meet()
        blocks = [
            m.slot(b, slot_of(step, n)) if m.staged else block_of(m.ref, m.dims, m.index(ids), step * 0)
            for m, b, n in zip((*self.inputs, *self.outputs), self.buffers, p.depths, strict=True)
        ]
        barriers = self._barriers(step) if self.manual else []
        carry = self.body(ids, *blocks, *barriers, *([carry] if with_carry else []))
        if not self.manual:
            self._release(step)
        if self.staged:
            commit_smem()
            self._meet()
            self._first(lambda: self._store(step, ids))
        return carry

    def _barriers(self, step: Any) -> list[Any]:
        """For each input that on which its block is given back."""
        of = {
            i: b.at[slot_of(step, key[1])]
            for (key, ms), bs in zip(self.groups, self.consumed, strict=True)
            for i, b in zip(ms, bs, strict=True)
        }
        missing = [m.name for i, m in enumerate(self.inputs) if i not in of]
        if missing:
            raise UnsupportedCall(
                f"{WHERE}(manual_consumed_barriers=True): {', '.join(missing)} stays in global memory and has no buffer "
                "to give back"
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

    def _store(self, step: Any, ids: Any) -> None:
        """Send away the outputs that are finished: those of every step in one group, others when their index moves on."""
        last = step == self.total - 1
        following = unravel(jnp.minimum(step + 1, count(self.total - 1)), self.grid)

        def send(i: int, commit: bool) -> None:
            m = self.outputs[i]
            source = m.slot(self.buffers[len(self.inputs) + i], slot_of(step, self.rings.depths[len(self.inputs) + i]))
            copy_block_to_gmem(source, m.block(ids, step * 0), commit)

        streamed = [i for i in self.staged if self.rings.streaming[i]]
        for i in streamed:
            send(i, i == streamed[-1])
        for i in self.staged:
            if i not in streamed:
                done = last if self.rings.constant[i] else last | moves(self.outputs[i], ids, following)
                when(done)(functools.partial(send, i, True))
