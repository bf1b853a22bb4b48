"""Measuring one config: the result is judged, then the kernel is timed on the GPU.

A call takes its inputs from several sets in turn, together more than twice the second-level cache, so that no timing
profits from what the call before left there.  All sets are one compiled program: launches follow each other on the GPU
without waiting for Python.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import MosaicGpuError
from ..runtime.jax_ffi import translate_error
from .accuracy import Judge
from .workload import Attention

L2_BYTES = 60_000_000
MOST_SETS = 32
Inputs = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What came of one config.  ok: right and timed; wrong: the result is not right; refused: it does not compile or run."""

    status: Literal["ok", "wrong", "refused"]
    seconds: float | None = None
    error: float | None = None
    allowed: float | None = None
    message: str = ""


def random_inputs(workload: Attention, seed: int) -> Inputs:
    """Normal random q, k and v, drawn on the device that they will be used on."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = zip(keys, workload.shapes, strict=True)
    dtype = jnp.dtype(workload.dtype)
    return tuple(jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in shapes)


def sets_for(workload: Attention) -> int:
    """How many sets of inputs exceed twice the second-level cache; at least two."""
    size = sum(math.prod(s) for s in workload.shapes) * jnp.dtype(workload.dtype).itemsize
    return min(max(2, 2 * L2_BYTES // max(size, 1) + 1), MOST_SETS)


def input_sets(workload: Attention, seed: int) -> list[Inputs]:
    """Different inputs to rotate through."""
    first = random_inputs(workload, seed)
    roll = jax.jit(functools.partial(jax.tree.map, lambda x, n: jnp.roll(x.ravel(), n * 977).reshape(x.shape)))
    return [first] + [tuple(roll(x, n) for x in first) for n in range(1, sets_for(workload))]


def timed(enqueue: Callable[[], Any], calls: int, *, at_least: float = 0.03, repeats: int = 7) -> float:
    """Seconds of one call: the median of several repeats, each long enough to hide what Python and the clock add.

    enqueue starts `calls` calls and returns their results without waiting.
    """
    jax.block_until_ready(enqueue())
    jax.block_until_ready(enqueue())
    begun = time.perf_counter()
    jax.block_until_ready(enqueue())
    loops = max(1, math.ceil(at_least / max(time.perf_counter() - begun, 1e-9)))
    samples = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(loops):
            result = enqueue()  # an older result is dropped at once: the same memory serves the next call
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - begun) / (loops * calls))
    return statistics.median(samples)


class AttentionBench:
    """Measures configs of attention on one workload.  Making one draws the inputs and computes the reference.

    output: the result that was judged last.
    """

    output: jax.Array | None = None

    def __init__(self, workload: Attention, seed: int | None = None) -> None:
        self.workload = workload
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self.sets = input_sets(workload, self.seed)
        self.judge = Judge.of(*self.sets[0], causal=workload.causal)

    def measure(self, config: Any) -> Measurement:
        """Judge and time one config (None: what the dispatcher chooses)."""
        from mosaic_gpu.kernels.attention import attention

        call = functools.partial(attention, causal=self.workload.causal, config=config)
        try:
            return self.measure_call(call)
        except Exception as error:
            ours = error if isinstance(error, (MosaicGpuError, ValueError)) else translate_error(error)
            if ours is None:
                raise  # the GPU's state is unknown: nothing measured after this would count
            return Measurement("refused", message=str(ours).splitlines()[0])

    def measure_call(self, call: Callable[..., Any]) -> Measurement:
        """Judge and time any function of q, k and v."""
        first = jax.jit(call)(*self.sets[0])
        self.output = first
        error = self.judge.error(first)
        judged = functools.partial(Measurement, error=error, allowed=self.judge.allowed)
        if not self.judge.accepts(error):
            return judged("wrong", message=f"relative error {error:.2e}, allowed {self.judge.allowed:.2e}")

        @jax.jit
        def all_sets(sets: Sequence[Inputs]) -> list[jax.Array]:
            return [call(*inputs) for inputs in sets]

        again = all_sets(self.sets)[0]
        if not bool(jnp.array_equal(first, again)):
            return judged("wrong", message="two runs on the same inputs differ: the kernel has a race")
        return judged("ok", timed(lambda: all_sets(self.sets), len(self.sets)))
