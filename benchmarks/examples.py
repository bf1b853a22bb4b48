"""The kernels of `examples/` at sizes that fill a GPU, beside XLA's own of the same functions.

    python -m benchmarks.examples [--json FILE] [--only REGEX]

Plain `jnp` in a kernel, products in plain `jnp`, and `pallas_call`.  Both sides of a row take turns in one process, inside JAX,
timed by the host's clock over programs of many calls.  The matmuls stand beside `kernels.sm90.matmul` as well as XLA's,
flash attention beside `kernels.attention`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mosaic_gpu.bench.jax_calls import host_call, program_of_sets
from mosaic_gpu.bench.protocols import sets_for, turns
from mosaic_gpu.kernels.reference import relative_error
from mosaic_gpu.tune.tunable import rolled

FOLDER = pathlib.Path(__file__).parents[1] / "examples"
SECONDS = 0.02  # of a turn
ROUNDS = 12


@dataclasses.dataclass(frozen=True)
class Row:
    """sides: name -> function, ours first, the last one is the reference; bytes: that must move; flops: of products; allowed:
    relative norm of the difference from the reference."""

    sides: Mapping[str, Callable[..., Any]]
    arrays: Sequence[Any]
    bytes: int
    flops: int
    allowed: float


def example(name: str) -> Any:
    """A module of `examples/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(scale: int = 1) -> dict[str, Row]:
    """By name; scale: divides the sizes, for tests."""
    rng = np.random.default_rng(0)
    many = 65536 // scale

    def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    plain, products, pallas = example("plain"), example("products"), example("pallas_kernels")
    found: dict[str, Row] = {}

    def add(name: str, ours: Any, xla: Any, *arrays: Any, flops: int = 0, allowed: float = 1e-5, **more: Any) -> None:
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        moved = sum(a.size * a.dtype.itemsize for a in (*arrays, *jax.tree.leaves(jax.eval_shape(xla, *types))))
        found[name] = Row({"ours": ours, **more, "xla": xla}, arrays, moved, flops, allowed)

    def add_attention(d: int, causal: bool, block_k: int, steps: int) -> None:
        """Beside our kernel and XLA's, which take one head of each of a batch."""
        from mosaic_gpu.kernels.attention import attention

        def one_head(f: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *qkv: f(*(x[:, :, None] for x in qkv))[:, :, 0]

        heads, length = max(32 // scale, 1), 4096 // scale
        arrays = [normal(heads, length, d, dtype=jnp.bfloat16) for _ in range(3)]
        add(
            f"pallas_call flash_attention d{d} {'causal' if causal else 'full'}, {block_k} keys, {steps} steps",
            functools.partial(pallas.flash_attention, causal=causal, block_k=block_k, steps=steps),
            one_head(functools.partial(jax.nn.dot_product_attention, is_causal=causal)),
            *arrays,
            flops=4 * heads * length**2 * d // (2 if causal else 1),
            allowed=1e-2,
            kernel=one_head(functools.partial(attention, causal=causal)),
        )

    wide = dict.fromkeys(("softmax", "layer_norm", "rms_norm", "gelu_gate"), 2)
    for name, (f, tile, whole, small) in plain.examples().items():
        columns = small[0].shape[1] * wide.get(name, 1)
        arrays = [normal(many, columns)]
        for a in small[1 : len(small) - whole]:
            arrays.append(normal(many, columns) if a.ndim == 2 else rng.integers(0, columns, many).astype(a.dtype))
        arrays += [normal(columns) for _ in range(whole)]
        add(name, plain.rows(f, tile, whole=whole), f, *arrays)

    def product(a: Any, b: Any) -> Any:
        return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)

    from mosaic_gpu.kernels.sm90.matmul import matmul as by_roles

    n = 4096 // scale
    square = normal(n, n, dtype=jnp.bfloat16), normal(n, n, dtype=jnp.bfloat16)
    add("products matmul", products.matmul, product, *square, flops=2 * n**3, allowed=1e-2)
    width, hidden = max(64, 128 // scale), max(64, 512 // scale)
    layers = [normal(*s, dtype=jnp.bfloat16) for s in ((many, width), (width, hidden), (hidden, width))]
    add("products gelu_mlp", products.gelu_mlp, products.mlp, *layers, flops=4 * many * width * hidden, allowed=1e-2)
    for block_m, block_n, steps in ((64, 128, 4), (128, 128, 3), (64, 256, 4), (128, 128, 6)):

        def pipelined(a: Any, b: Any, m: int = block_m, n: int = block_n, steps: int = steps) -> Any:
            return pallas.matmul(a, b, block_m=m, block_n=n, steps=steps)

        name = f"pallas_call matmul {block_m}x{block_n}, {steps} steps"
        add(name, pipelined, product, *square, flops=2 * n**3, allowed=1e-2, kernel=by_roles)
    add(
        "pallas_call matmul 128x256, 2 warpgroups",
        pallas.matmul_warpgroups,
        product,
        *square,
        flops=2 * n**3,
        allowed=1e-2,
        kernel=by_roles,
    )
    arrays = normal(many, 256), normal(256), normal(256)
    lookup = rng.integers(0, many // 2, many).astype(np.int32), normal(many // 2, 256)
    for block in (8, 16, 32):
        softmax, layer_norm, embedding = (
            functools.partial(f, rows=block) for f in (pallas.softmax, pallas.layer_norm, pallas.embedding)
        )
        add(f"pallas_call softmax, {block} rows", softmax, lambda x: jax.nn.softmax(x, 1), arrays[0])
        add(f"pallas_call layer_norm, {block} rows", layer_norm, plain.layer_norm, *arrays)
        add(f"pallas_call embedding, {block} rows", embedding, lambda i, t: t[i], *lookup, allowed=0.0)
    for d, causal in itertools.product((64, 128), (False, True)):
        add_attention(d, causal, 64, 2)
    add_attention(64, False, 128, 2)
    add_attention(128, False, 128, 1)
    return found


def distance(found: Any, reference: Any) -> float:
    """Largest relative error among the leaves."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True)
    return max(relative_error(x, np.asarray(y, np.float64)) for x, y in pairs)


def measure(row: Row, rounds: int = ROUNDS, seconds: float = SECONDS) -> dict[str, Any]:
    """Errors of the sides and median seconds of a call; ValueError where a side is wrong."""
    arrays = [jnp.asarray(a) for a in row.arrays]
    reference = jax.jit(list(row.sides.values())[-1])(*arrays)
    errors = {name: distance(jax.jit(f)(*arrays), reference) for name, f in row.sides.items()}
    wrong = {name: e for name, e in errors.items() if not e <= row.allowed}
    if wrong:
        raise ValueError(f"differs from the reference by {wrong}, allowed {row.allowed}")

    sets = [
        tuple(a if a.dtype == jnp.int32 else rolled(a, i) for a in arrays)
        for i in range(sets_for(sum(a.size * a.dtype.itemsize for a in arrays)))
    ]
    ready = {n: host_call(program_of_sets(f, sets), sets, lambda a, b: True) for n, f in row.sides.items()}
    loops = {}
    for name, call in ready.items():
        call.run(2)
        begun = time.perf_counter()
        call.run(2)
        loops[name] = max(1, round(seconds / max((time.perf_counter() - begun) / 2, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for r in range(rounds):
        for name in turns(list(ready), r):
            begun = time.perf_counter()
            ready[name].run(loops[name])
            samples[name].append((time.perf_counter() - begun) / (loops[name] * ready[name].calls))
    return {"errors": errors, "seconds": {name: statistics.median(s) for name, s in samples.items()}}


def text(name: str, row: Row, result: Mapping[str, Any]) -> str:
    """A line of the table in Markdown."""
    rate, unit = (row.flops / 1e12, "TFLOP/s") if row.flops else (row.bytes / 1e9, "GB/s")
    s = result["seconds"]
    cells = [f"{rate / s['ours']:.0f} {unit}", *(f"{other} {rate / s[other]:.0f}" for other in s if other != "ours")]
    ratios = ", ".join(f"{s[other] / s['ours']:.2f} x {other}" for other in s if other != "ours")
    return f"| {name} | {cells[0]} | {', '.join(cells[1:])} | {ratios} | {result['errors']['ours']:.1e} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a kernel is wrong or does not run, 2 without a GPU."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.examples", description=__doc__.splitlines()[0])
    p.add_argument("--json", type=pathlib.Path, help="also write the results here")
    p.add_argument("--only", default="", help="rows whose name this regular expression finds")
    args = p.parse_args(argv)
    if jax.default_backend() != "gpu":
        print("benchmarks.examples: an NVIDIA GPU is needed; JAX sees none", file=sys.stderr)
        return 2
    print("| kernel | ours | others | ratio | difference |\n|---|---|---|---|---|")
    results: dict[str, Any] = {}
    for name, row in rows().items():
        if not re.search(args.only, name):
            continue
        try:
            results[name] = measure(row)
            print(text(name, row, results[name]), flush=True)
        except Exception as error:  # the other rows are still worth having
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"| {name} | {results[name]['error'].splitlines()[0][:200]} | | | |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "rows": results}, indent=1))
    return 1 if any("error" in r for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
