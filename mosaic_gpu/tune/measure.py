"""Measuring configs on a GPU: the result is judged, then the kernel is timed.

`GpuTimer` is what the search asks, one for a workload on a GPU; tests give the search another one, with made-up times.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..bench.jax_calls import JaxDevice, host_call, program_of_sets
from ..bench.protocols import L2_BYTES, Session, sets_for
from ..errors import MosaicGpuError
from ..runtime.jax_ffi import translate_error
from .measure_types import Measurement
from .tunable import Tunable, find_tunable
from .workload import Attention

AT_LEAST = 0.012  # seconds of one timing: what Python and the clock add to it stays below a percent
Inputs = tuple[jax.Array, ...]


def normal_arrays(types: Sequence[Any], seed: int) -> Inputs:
    """Normal random arrays of these shapes and dtypes, drawn on the device that they will be used on."""
    keys = jax.random.split(jax.random.key(seed), len(types))
    pairs = zip(keys, types, strict=True)
    return tuple(jax.random.normal(key, t.shape, jnp.float32).astype(jnp.dtype(t.dtype)) for key, t in pairs)


def random_inputs(workload: Attention, seed: int) -> Inputs:
    """Normal random q, k and v."""
    return normal_arrays(find_tunable("attention").arguments(workload), seed)


def input_sets(tunable: Tunable, workload: Any, seed: int) -> list[Inputs]:
    """Different inputs to rotate through: the first ones, rolled."""
    first: Inputs = tunable.inputs(workload, seed)
    roll = jax.jit(functools.partial(tunable.rolled, workload), static_argnums=1)
    size = sum(x.size * x.dtype.itemsize for x in first)
    return [first, *(roll(first, n) for n in range(1, sets_for(size)))]


def timed(
    run: Callable[[int], Any], calls: int, *, at_least: float = AT_LEAST, repeats: int = 7, stop_above: float = math.inf
) -> list[float]:
    """Seconds of a call, `repeats` times, each of so many loops that it takes `at_least`; the first alone if it is above.

    run(n): starts n batches of `calls` calls and waits for them.
    """
    run(1)
    begun = time.perf_counter()
    run(1)
    loops = max(1, math.ceil(at_least / max(time.perf_counter() - begun, 1e-9)))
    samples: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run(loops)
        samples.append((time.perf_counter() - begun) / (loops * calls))
        if samples[0] > stop_above:
            break
    return samples


def protocol(seed: int) -> dict[str, Any]:
    """How `GpuTimer` measures, as plain data: a part of the provenance."""
    return {
        "timer": "host",
        "at_least_seconds": AT_LEAST,
        "warm_up": "2 batches",
        "l2": f"inputs rotate through more than {2 * L2_BYTES // 10**6} MB",
        "statistic": "median",
        "seed": seed,
    }


class GpuTimer:
    """Measures configs of one workload.  Making one draws the inputs and computes the reference.

    output: the result that was judged last.
    """

    output: jax.Array | None = None

    def __init__(self, tunable: Tunable, workload: Any, seed: int | None = None) -> None:
        self.tunable, self.workload = tunable, workload
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self.sets = input_sets(tunable, workload, self.seed)
        self.judge = tunable.judge(workload, self.sets[0])
        self._ready: dict[Any, Any] = {}

    def call(self, config: Any) -> Callable[..., Any]:
        """The function that is measured."""
        return self.tunable.call(self.workload, config)

    def check(self, config: Any) -> Measurement:
        """Compile, run twice, judge; the same inputs must give the same bits."""
        try:
            return self._check(config, self.call(config))
        except Exception as error:
            ours = error if isinstance(error, (MosaicGpuError, ValueError)) else translate_error(error)
            if ours is None:
                raise  # the GPU's state is unknown: nothing measured after this would count
            return Measurement("refused", message=str(ours).splitlines()[0])

    def _check(self, key: Any, call: Callable[..., Any]) -> Measurement:
        program = program_of_sets(call, self.sets)
        first = self.output = program(self.sets)[0]
        error = self.judge.error(first)
        judged = functools.partial(Measurement, error=error, allowed=self.judge.allowed)
        if not self.judge.accepts(error):
            return judged("wrong", message=f"relative error {error:.2e}, allowed {self.judge.allowed:.2e}")
        if not self.judge.same(first, program(self.sets)[0]):
            return judged("wrong", message="two runs on the same inputs differ: the kernel has a race")
        self._ready[key] = host_call(program, self.sets, self.judge.same)
        return judged("ok")

    def samples(self, config: Any, repeats: int, stop_above: float) -> list[float]:
        """Seconds of a call, repeatedly.  The config must have been checked."""
        ready = self._ready[config]
        return timed(ready.run, ready.calls, repeats=repeats, stop_above=stop_above)

    def interleaved(self, configs: Sequence[Any], rounds: int) -> list[list[float]]:
        """By the interleaved protocol of the benchmarks."""
        session = Session(JaxDevice(), {str(i): self._ready[c] for i, c in enumerate(configs)})
        found = session.interleaved(rounds)
        return [found[str(i)] for i in range(len(configs))]

    def forget(self, config: Any) -> None:
        """Free its program."""
        self._ready.pop(config, None)

    def measure(self, config: Any) -> Measurement:
        """Judge and time one config."""
        found = self.check(config)
        return self._with_time(found, config)

    def measure_call(self, call: Callable[..., Any]) -> Measurement:
        """Judge and time any function of the inputs."""
        return self._with_time(self._check(call, call), call)

    def _with_time(self, found: Measurement, key: Any) -> Measurement:
        if found.status != "ok":
            return found
        seconds = statistics.median(self.samples(key, 7, math.inf))
        self.forget(key)
        return dataclasses.replace(found, seconds=seconds)


class AttentionBench(GpuTimer):
    """Attention as users call it: through the dispatcher, which chooses the config where none is given."""

    def __init__(self, workload: Attention, seed: int | None = None) -> None:
        super().__init__(find_tunable("attention"), workload, seed)

    def call(self, config: Any) -> Callable[..., Any]:
        """The dispatcher's function."""
        from mosaic_gpu.kernels import attention as dispatcher

        return functools.partial(dispatcher.attention, causal=self.workload.causal, config=config)
