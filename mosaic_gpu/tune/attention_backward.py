"""The gradients of attention as the tuner sees them: key, space and a cost estimate by two clocks.

The estimate counts, for a block of queries, what the tensor cores take and what shared memory takes to feed them: the main
kernel is bound by the larger of the two where latencies are covered.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .attention import AttentionTunable
from .chip import Chip
from .space import Grid, default_config, kernel_files
from .workload import Attention

ROWS, COMPUTES = 64, 2
# Estimates, not measured: clocks for the start and the end of a block of keys, and for the barriers in a step.
BLOCK_OVERHEAD = 6000.0
STEP_OVERHEAD = 60.0
# Element-wise work hides under the products up to this share of a step, and of the rest this much does not: so that the estimate
# gives the cycles of hand-written kernels on an H200, 3120 a step at d128 and 3650 at d64.
HIDDEN, EXPOSED = 0.4, 0.6

# The warpgroup of dQ needs its accumulators and 32 registers besides, 64 at least; what it leaves, the computing ones get.
SM90: list[Grid] = [
    *(
        {
            "dq_columns": (columns,),
            "compute_registers": (compute,),
            "dq_registers": (dq,),
            "block_q": (64, 128, 192),
            "num_stages": (1, 2, 3),
            "ds_stages": (1, 2, 3),
            "dq_stages": (1, 2),
            "dq_ahead": (False, True),
        }
        for columns, compute, dq in ((32, 208, 64), (64, 208, 72), (128, 192, 96))
    ),
    {"split": (True,), "compute_registers": (208, 232), "block_q": (64, 128), "num_stages": (2, 3)},
]


class AttentionBackward(Attention):
    """One call of attention's gradients."""

    @property
    def flops(self) -> int:
        """By the usual count: five products, of which three go over d and two over dv."""
        forward = super().flops
        return forward // (self.head_dim + self.value_dim) * (3 * self.head_dim + 2 * self.value_dim)

    @property
    def bytes(self) -> int:
        """Of q, k, v, the output and its cotangent, and of the gradients."""
        q, k, v = (math.prod(s) for s in self.shapes)
        return 2 * (2 * (q + k + v) + 2 * (q // self.head_dim * self.value_dim))


class AttentionBackwardTunable(AttentionTunable):
    """`jax.vjp` of `mosaic_gpu.kernels.attention.attention`: of (q, k, v, output, LSE, the output's cotangent)."""

    name: ClassVar[str] = "attention_backward"
    slack: float = 1.3  # chosen, not measured: the estimate was compared with two hand-written kernels only

    def __init__(self, generation: str) -> None:
        super().__init__(generation)
        self.space = SM90

    def parse(self, text: str, *, dtype: str = "bfloat16", causal: bool = False, **options: Any) -> Attention:
        """As b4s4096h16d128."""
        return AttentionBackward.parse(text, dtype=dtype, causal=causal)

    def workload(self, data: Mapping[str, Any]) -> Attention:
        """Of plain data."""
        return AttentionBackward(**data)

    def workload_of(self, q: Any, k: Any, v: Any = None, *args: Any, causal: bool = False, **rest: Any) -> Attention:
        """Of the arguments of `attention`, or of the backward kernels."""
        return AttentionBackward(**super().workload_of(q, k, v, causal=causal).to_json())

    def default(self, w: Attention) -> Any:
        """Of the head dims."""
        return default_config("attention_backward", self.generation, w.head_dim, w.value_dim)

    def fits(self, w: Attention, config: Any) -> None:
        """Shared memory and registers at these head dims."""
        config.check(w.head_dim, w.value_dim)

    def cost(self, w: Attention, config: Any, chip: Chip) -> float:
        """Seconds by the tensor cores' and shared memory's clocks."""
        return _cost(w, config, chip)

    def arguments(self, w: Attention) -> Sequence[Any]:
        """q, k, v, output, LSE and the output's cotangent."""
        import jax
        import jax.numpy as jnp

        q, k, v = super().arguments(w)
        out = jax.ShapeDtypeStruct((*q.shape[:-1], w.value_dim), q.dtype)
        return [q, k, v, out, jax.ShapeDtypeStruct((w.batch, w.heads, w.length), jnp.float32), out]

    def inputs(self, w: Attention, seed: int) -> tuple[Any, ...]:
        """Normal random q, k, v and cotangent, and the output and LSE that belong to them, by XLA."""
        from .accuracy import plain_forward

        q, k, v, out, lse, d_out = super().inputs(w, seed)
        out, lse = plain_forward(q, k, v, w.causal, w.head_dim**-0.5)
        return q, k, v, out, lse, d_out

    def rolled(self, w: Attention, arrays: Sequence[Any], n: int) -> tuple[Any, ...]:
        """By KV heads, so that outputs stay those of their inputs."""
        import jax.numpy as jnp

        group = w.heads // w.kv_heads
        by = (group, 1, 1, group, group, group)
        axes = (2, 2, 2, 2, 1, 2)
        return tuple(jnp.roll(x, n * m, axis) for x, m, axis in zip(arrays, by, axes, strict=True))

    def call(self, w: Attention, config: Any) -> Callable[..., Any]:
        """The kernels of this generation: (dQ, dK, dV)."""
        module = importlib.import_module(f"mosaic_gpu.kernels.{self.generation}.attention_backward")
        options = {"config": config, "causal": w.causal, "scale": w.head_dim**-0.5, "deterministic": False}
        return functools.partial(module.attention_backward, d_lse=None, **options)

    def peers(self, w: Attention) -> dict[str, Callable[..., Any]]:
        """JAX's own attention, forward and backward: it gives its residuals to no other."""
        import jax

        def of(implementation: str) -> Callable[..., Any]:
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=w.causal, implementation=implementation)

            def both(q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any) -> Any:
                return jax.vjp(attend, q, k, v)[1](d_out)

            return both

        return {f"jax.nn {name}, with its forward": of(name) for name in ("xla", "cudnn")}

    def judge(self, w: Attention, arrays: Sequence[Any]) -> Any:
        """Twice the error of plain gradients that round P, dS and the output."""
        from .accuracy import GradientJudge

        q, k, v, _, _, d_out = arrays
        return GradientJudge.of(q, k, v, d_out, causal=w.causal)

    def sources(self) -> Sequence[Path]:
        """The kernels, how their tiles lie in shared memory, and the order of their blocks."""
        parts = ("", "_compute", "_config", "_dq", "_work")
        return kernel_files(*(f"sm90/attention_backward{p}.py" for p in parts), "sm90/schedule.py", "tiles.py")


@dataclasses.dataclass
class _Clocks:
    """What a step costs on a multiprocessor."""

    chip: Chip
    tensor: float = 0.0
    shared: float = 0.0

    def product(self, m: int, n: int, k: int, a_in_shared: bool, pieces: int = 1) -> None:
        """(m, k) times (k, n), in so many pieces of n: A is read for each."""
        times = m / ROWS * k / 16
        self.tensor += times * n / 2
        self.move(times * (32 * n + pieces * 2048 * a_in_shared))

    def move(self, count: float) -> None:
        """Bytes in or out of shared memory."""
        self.shared += count / self.chip.shared_bytes_per_clock


def _cost(w: Attention, c: Any, chip: Chip) -> float:
    d, dv, queries, keys = w.head_dim, w.value_dim, c.block_q, ROWS * c.key_tiles
    dims = d + dv
    clocks = _Clocks(chip)
    clocks.product(keys, queries, d, True)  # scores
    clocks.product(keys, queries, dv, True)  # dP
    clocks.product(keys, dv, queries, False)
    clocks.product(keys, d, queries, False)
    clocks.move(2 * queries * dims)  # Q and dO come in
    if c.split:
        clocks.move(2 * keys * queries * 2)  # P, written and read
    else:
        clocks.product(queries, d, keys, True, c.parts(d))  # dQ
        clocks.move(2 * keys * queries)  # dS
        clocks.move(2 * 4 * queries * d)  # dQ's parts, written and read by TMA
    clocks.move(COMPUTES * 4 * queries * 4 * (2 - c.split))  # LSE and delta: each warp reads them all
    longer = max(clocks.tensor, clocks.shared)
    elements = keys * queries
    work = elements / chip.exponentials + 8 * elements / chip.fp32_results
    step = longer + EXPOSED * max(work - HIDDEN * longer, 0.0) + STEP_OVERHEAD
    if not c.split:
        step += (work if c.ds_stages == 1 else 0) + 100 * (c.dq_stages == 1)  # what waits for the one slot
    loads = 2 * queries * dims / chip.l2_bytes_per_clock
    step = max(step, (chip.load_latency + loads) / c.num_stages + (step if c.num_stages == 1 else 0))
    blocks, tiles = math.ceil(w.length / queries), math.ceil(w.kv_length / keys)
    firsts = [m * keys // queries if w.causal else 0 for m in range(tiles)]
    steps = [max(blocks - first, 0) * (w.heads // w.kv_heads) for first in firsts]
    units = w.batch * w.kv_heads
    share = units * (sum(steps) * step + tiles * BLOCK_OVERHEAD) / chip.multiprocessors
    waves = math.ceil(units * tiles / chip.multiprocessors) / (units * tiles / chip.multiprocessors)
    longest = max(steps) * step + BLOCK_OVERHEAD
    main = max(share * (waves if not w.causal else 1 + (waves - 1) / 2), longest)
    return float(main + (_dq_alone(w, chip) if c.split else 0.0)) / chip.clock


def _dq_alone(w: Attention, chip: Chip) -> float:
    """Clocks of the kernel that makes dQ by itself: scores and dP again, and dQ, of 128 queries and 64 keys a step."""
    d, dv, queries = w.head_dim, w.value_dim, 2 * ROWS
    clocks = _Clocks(chip)
    clocks.product(queries, ROWS, d, True)
    clocks.product(queries, ROWS, dv, True)
    clocks.product(queries, d, ROWS, False)
    clocks.move(2 * ROWS * (d + dv))  # K and V come in
    steps = w.batch * w.heads * math.ceil(w.length / queries) * math.ceil(w.kv_length / ROWS)
    share = steps * (0.5 if w.causal else 1.0) / chip.multiprocessors
    return share * (max(clocks.tensor, clocks.shared) + STEP_OVERHEAD)
