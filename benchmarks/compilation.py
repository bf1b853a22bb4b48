"""How long attention takes from Python function to loaded executable inside `jax.jit`, beside JAX's own `attention_mgpu`.

    python -m benchmarks.compilation [--repeats N] [--json FILE]

Trace + lower + compile, in turns: ours with no cubin on disk, JAX's, and ours with its cubin on disk.  Each time with a batch
size of its own, so that nothing is remembered but what a process does once (imports, the first use of a compiler), which
is done before.  JAX's kernel runs with fp16, as its bf16 does not trace, in the config that its own benchmark tries
first.  `XLA alone`: the same for a function that adds one.  Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mosaic_gpu.cli.bench_compile import fresh_cache
from mosaic_gpu.codegen import cubin_cache
from mosaic_gpu.kernels.attention import attention

CASES = [(d, causal) for d in (64, 128, 256) for causal in (False, True)]
OURS, JAX, WARM, XLA = "ours", "JAX's attention_mgpu", "ours from disk", "XLA alone"
SIDES = (OURS, JAX, WARM, XLA)


def shapes(batch: int, head_dim: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    """Q, K and V of 1024 rows with as many heads as 2048 / head_dim."""
    return [jax.ShapeDtypeStruct((batch, 1024, 2048 // head_dim, head_dim), dtype)] * 3


def jax_attention(head_dim: int, causal: bool) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=64 if head_dim == 256 else 128, max_concurrent_steps=2, causal=causal
    )
    return lambda q, k, v: attention_mgpu.attention(q, k, v, config=config)


def seconds(function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct]) -> float:
    begun = time.perf_counter()
    jax.jit(function).lower(*arguments).compile()
    return time.perf_counter() - begun


def once(head_dim: int, causal: bool, batch: int, jax_first: bool) -> dict[str, float]:
    """One sample of every side."""
    found: dict[str, float] = {}

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, causal=causal, implementation="mosaic_gpu")

    def theirs() -> None:
        found[JAX] = seconds(jax_attention(head_dim, causal), shapes(batch, head_dim, jnp.float16))

    if jax_first:
        theirs()
    with fresh_cache():
        found[OURS] = seconds(ours, shapes(batch, head_dim, jnp.bfloat16))
        cubin_cache.settle()  # what is checked in the background, and writing to disk
        cubin_cache.forget()
        found[WARM] = seconds(ours, shapes(batch + 20, head_dim, jnp.bfloat16))
    if not jax_first:
        theirs()
    found[XLA] = seconds(lambda x: x + batch, [jax.ShapeDtypeStruct((batch,), jnp.float32)])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print("no GPU: both kernels compile for the one at hand")
        return 2
    once(64, False, 40, False)  # what a process does once
    rows = []
    for d, causal in CASES:
        samples = [once(d, causal, i + 1, bool(i % 2)) for i in range(options.repeats)]
        row: dict[str, Any] = {"head_dim": d, "causal": causal}
        row |= {side: [s[side] for s in samples] for side in SIDES}
        rows.append(row)
        median = {side: statistics.median(row[side]) for side in SIDES}
        print(
            f"d{d} {'causal' if causal else 'full'}: "
            + ", ".join(f"{side} {median[side]:.3f} s" for side in SIDES)
            + f"; {median[OURS] / median[JAX]:.2f} of JAX's",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
