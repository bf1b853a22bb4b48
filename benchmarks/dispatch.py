"""What the host pays to call our smallest kernel inside jit, beside XLA's own smallest kernel (a + 1).

    python -m benchmarks.dispatch [--json FILE]

One call a program: the host's time to start it.  Many calls a program, each on the result of the one before: the time of a
further kernel in it, where launching is all there is to do.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mosaic_gpu as plgpu
from mosaic_gpu.bench.protocols import turns
from mosaic_gpu.bench.verdicts import RESAMPLES

ELEMENTS = 128  # one of each thread of a warpgroup
CHAIN = 200  # calls of the long program
BATCH = 100  # calls of a sample; few enough that the queue to the GPU does not fill up
Function = Callable[[Any], Any]


def _add_one(a: Any, out: Any) -> None:
    out[...] = a[...] + 1


def smallest_kernel() -> Function:
    """One block, one warpgroup, 128 numbers: a + 1 as XLA's below."""
    kernel: Function = plgpu.kernel(_add_one, jax.ShapeDtypeStruct((ELEMENTS,), jnp.float32), name="add_one")
    return kernel


def chained(function: Function) -> Function:
    """CHAIN calls one after the other."""

    def chain(x: Any) -> Any:
        for _ in range(CHAIN):
            # Else XLA would make one kernel of its many additions.
            x = jax.lax.optimization_barrier(function(x))
        return x

    return chain


def started(
    programs: Mapping[str, Function], x: Any, rounds: int, wait: Callable[[Any], Any], clock: Callable[[], float]
) -> dict[str, dict[str, list[float]]]:
    """For each program the seconds of a call in every round: `start` until it is enqueued, `end` until it has run.

    The programs take turns, in a rotating order.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {"start": [], "end": []} for name in programs}
    for r in range(-2, rounds):
        for name in turns(list(programs), r):
            call = programs[name]
            wait(call(x))
            begun = clock()
            for _ in range(BATCH):
                result = call(x)
            enqueued = clock()
            wait(result)
            if r >= 0:
                samples[name]["start"].append((enqueued - begun) / BATCH)
                samples[name]["end"].append((clock() - begun) / BATCH)
    return samples


def difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of the medians of paired samples, in microseconds, with its 95 % bootstrap interval."""
    x, y = np.asarray(ours), np.asarray(theirs)
    index = np.random.default_rng(0).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.quantile(np.median(x[index], 1) - np.median(y[index], 1), (0.025, 0.975))
    middle = float(np.median(x) - np.median(y))
    return {"difference": middle * 1e6, "low": float(low) * 1e6, "high": float(high) * 1e6}


def measure(
    ours: Function, xla: Function, x: Any, rounds: int, *, wait: Any = None, clock: Any = time.perf_counter
) -> list[dict[str, Any]]:
    """A row for each kind of program, in microseconds of a kernel."""
    wait = wait or jax.block_until_ready
    rows = []
    for kind, calls, make in (("one call", 1, lambda f: f), (f"{CHAIN} calls", CHAIN, chained)):
        programs = {"ours": jax.jit(make(ours)), "xla": jax.jit(make(xla))}
        text = programs["xla"].lower(x).compile().as_text() or ""
        wanted = np.asarray(x) + calls
        for name, program in programs.items():
            if not np.array_equal(np.asarray(program(x)), wanted):
                raise ValueError(f"{name}, {kind}: the result is wrong")
        samples = started(programs, x, max(rounds // calls, 30), wait, clock)
        for what in ("start", "end"):
            a, b = ([s / calls for s in samples[name][what]] for name in ("ours", "xla"))
            row: dict[str, Any] = {
                "program": kind,
                "until": what,
                "ours": statistics.median(a) * 1e6,
                "xla": statistics.median(b) * 1e6,
            }
            rows.append(row | {"xla_kernels": _kernels(text)} | difference(a, b))
    return rows


def _kernels(text: str) -> int:
    """Kernels of a compiled program of additions: fewer than the additions if XLA merged some in spite of the barriers."""
    entry = text.partition("ENTRY")[2]
    return sum(entry.count(f" {what}(") for what in ("fusion", "call", "add", "custom-call"))


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown."""
    lines = ["| program | until | ours, µs | XLA, µs | ours - XLA, µs |", "|---|---|---|---|---|"]
    words = {"start": "enqueued", "end": "finished"}
    for r in rows:
        values = f"{r['ours']:.2f} | {r['xla']:.2f} | {r['difference']:+.2f} [{r['low']:+.2f}, {r['high']:+.2f}]"
        note = f" (XLA: {r['xla_kernels']} kernels)"
        lines.append(f"| {r['program']}{note} | {words[r['until']]} | {values} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 without a GPU."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__.splitlines()[0])
    p.add_argument("--json", type=pathlib.Path, help="also write the result here")
    p.add_argument(
        "--rounds", type=int, default=400, help=f"of {BATCH} calls; the long programs get fewer, 30 at least"
    )
    args = p.parse_args(argv)
    if jax.default_backend() != "gpu":
        print("benchmarks.dispatch: an NVIDIA GPU is needed; JAX sees none", file=sys.stderr)
        return 2
    rows = measure(smallest_kernel(), lambda x: x + 1, jnp.zeros(ELEMENTS, jnp.float32), args.rounds)
    machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(f"{machine}\n\nmicroseconds of a kernel, medians\n\n{report(rows)}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    return 0 if all(math.isfinite(r["ours"]) for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
