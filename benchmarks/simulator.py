"""The simulator with all its checks against JAX's GPU interpret mode, on a CPU.

    python -m benchmarks.simulator [--json]

Matmul n=1024 in bf16 with 64 x 64 x 64 tiles and three warpgroups, of which two compute a tile each: ours, and JAX's own
hopper_matmul_mgpu.  And attention b1 h4 s1024 d128 in ours only: JAX's attention kernels do not run in its mode.  Ours as it is
by default, and in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mosaic_gpu.bench.gpu import commit, package_version
from mosaic_gpu.bench.model import Unsupported, first_line
from mosaic_gpu.simulator import simulator_params

ALLOWED = 1e-2  # relative norm: the results are bf16
# JAX's matmul asks the device for its multiprocessors, and a CPU has none.  Idle ones cost its interpreter time: of 1, 4, 16
# and 132, of 2 and 4 stages and of both ways to share a block, this was among the fastest at n = 512.
JAX_MULTIPROCESSORS = 16
JAX_STAGES = 4


def normal(seed: int, *shape: int) -> jax.Array:
    """Random numbers in bf16."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def timed(call: Callable[[], Any], expected: np.ndarray, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of the first call, tracing and compiling included, and of later ones; the result's error.

    later_seconds: the median; best_seconds: the least, which is what a machine without other programs would show.
    cpu_seconds: of all threads of this process, of a later call: what other programs on the machine disturb less.
    """
    samples, cpu = [], []
    for _ in range(1 + repeats):
        begun, begun_cpu = clock(), time.process_time()
        result = jax.block_until_ready(call())
        samples.append(clock() - begun)
        cpu.append(time.process_time() - begun_cpu)
    found = np.asarray(result).astype(np.float64)
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if not error <= ALLOWED:
        raise ValueError(f"the result is wrong: relative error {error:.2e}")
    later = {"later_seconds": statistics.median(samples[1:]), "best_seconds": min(samples[1:])}
    return {"first_seconds": samples[0], **later, "cpu_seconds": statistics.median(cpu[1:]), "error": error}


def our_matmul(n: int, a: jax.Array, b: jax.Array) -> Callable[[], Any]:
    """Two compute warpgroups of 64 x 64 and one for memory."""
    from mosaic_gpu.kernels.sm90.matmul import MatmulConfig, matmul

    config = MatmulConfig(block_n=64, block_k=64, num_stages=2)
    return lambda: matmul(a, b, config)


@contextlib.contextmanager
def interpret(races: bool) -> Any:
    """JAX's GPU interpret mode; Unsupported where this JAX has none."""
    try:
        from jax.experimental.pallas import mosaic_gpu as pallas

        mode, params = pallas.force_gpu_interpret_mode, pallas.InterpretGPUParams
    except (ImportError, AttributeError):
        raise Unsupported(f"JAX {jax.__version__} has no GPU interpret mode; JAX 0.11.2 and later have") from None
    with mode(params(detect_races=races)):
        yield


def jax_matmul(n: int, a: jax.Array, b: jax.Array) -> Callable[[], Any]:
    """JAX's own warp-specialised matmul: two compute warpgroups of 64 x 64 and one for memory, under jit."""
    try:
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as module
    except ImportError as error:
        raise Unsupported(f"JAX {jax.__version__}: {first_line(error)}") from error
    module.get_num_sms = lambda: JAX_MULTIPROCESSORS
    config = module.TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=JAX_STAGES)
    product = jax.jit(functools.partial(module.matmul, config=config), static_argnums=2)
    return lambda: product(a, b, None)


def our_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Callable[[], Any]:
    """With its default config."""
    from mosaic_gpu.kernels.attention import attention

    return functools.partial(attention, q, k, v)


def run(
    n: int = 1024, length: int = 1024, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> list[dict[str, Any]]:
    """A row for each case: what it is, who runs it, and the times or why there are none."""
    a, b = normal(0, n, n), normal(1, n, n)
    product = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)
    name = f"matmul {n}^3, 64x64x64 tiles, 3 warpgroups"
    rows = []

    def row(case: str, who: str, make: Callable[[], Callable[[], Any]], expected: np.ndarray, context: Any) -> None:
        print(f"{case}: {who} ...", file=sys.stderr, flush=True)
        entry: dict[str, Any] = {"case": case, "who": who, "message": ""}
        try:
            with context:
                entry |= timed(make(), expected, repeats, clock)
        except Unsupported as error:
            entry["message"] = str(error)
        except Exception as error:  # JAX's mode may refuse a kernel in its own ways: a line in the table
            entry["message"] = f"{type(error).__name__}: {first_line(error)}"
        rows.append(entry)

    plain = contextlib.nullcontext
    row(name, "ours, all checks", lambda: our_matmul(n, a, b), product, plain())
    row(name, "ours, one process", lambda: our_matmul(n, a, b), product, simulator_params(processes=1))
    row(name, "JAX interpret", lambda: jax_matmul(n, a, b), product, interpret(False))
    row(name, "JAX interpret, detect_races", lambda: jax_matmul(n, a, b), product, interpret(True))
    from mosaic_gpu.kernels import reference

    q, k, v = (normal(i, 1, length, 4, 128) for i in range(3))
    out, _ = reference.attention(q, k, v)
    name = f"attention b1 h4 s{length} d128"
    row(name, "ours, all checks", lambda: our_attention(q, k, v), out, plain())
    row(name, "ours, one process", lambda: our_attention(q, k, v), out, simulator_params(processes=1))
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown."""
    head = "| case | who | first call, s | later calls, s | the best, s | their CPU time, s | error |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for r in rows:
        if r["message"]:
            lines.append(f"| {r['case']} | {r['who']} | {r['message']} | | | | |")
            continue
        seconds = " | ".join(f"{r[f'{k}_seconds']:.2f}" for k in ("first", "later", "best", "cpu"))
        times = f"{seconds} | {r['error']:.1e}"
        lines.append(f"| {r['case']} | {r['who']} | {times} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if one of ours does not run or is wrong."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__.splitlines()[0])
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    p.add_argument("--n", type=int, default=1024, help="of the matmul")
    p.add_argument("--length", type=int, default=1024, help="of the attention")
    p.add_argument("--repeats", type=int, default=3, help="calls after the first; their median counts")
    args = p.parse_args(argv)
    if jax.default_backend() != "cpu":
        print("benchmarks.simulator: set JAX_PLATFORMS=cpu, it compares simulators on a CPU", file=sys.stderr)
        return 2
    rows = run(args.n, args.length, args.repeats)
    machine = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": package_version("numpy"),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),  # programs that wanted a CPU in the last 1, 5 and 15 minutes, this one included
        "mosaic_gpu": commit(),
    }
    print(json.dumps({"machine": machine, "rows": rows}, indent=1) if args.json else f"{machine}\n\n{report(rows)}")
    return 1 if any(r["message"] and r["who"].startswith("ours") for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
