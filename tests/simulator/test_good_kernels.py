"""Kernels that synchronise as they must: no report, whatever the order of threads, copies and products."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.sm90 import attention as attention90
from mosaic_gpu.kernels.sm90 import matmul as matmul90
from mosaic_gpu.kernels.sm100 import matmul as matmul100
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.simulator import SimulatorParams, simulate
from tests import support

BF16 = ml_dtypes.bfloat16
ROOT = pathlib.Path(__file__).parents[2]
SEEDS = 20
Call = tuple[Plan, list[np.ndarray]]
randoms = functools.partial(support.randoms, dtype=BF16)


def planned(arch: str, function: Callable[..., Any], *args: np.ndarray) -> Call:
    """The plan and the arrays of the one kernel that a function calls."""
    calls: list[Any] = []

    class Called(Exception):
        pass

    def call(kernel: Any, *given: Any) -> None:
        calls.append((kernel, [np.asarray(x) for x in jax.tree.leaves(given)]))
        raise Called

    with mock.patch("mosaic_gpu.frontend.kernel._Kernel.__call__", call), pytest.raises(Called):
        function(*args)
    kernel, arrays = calls[0]
    return build_plan(kernel.program(*arrays), arch), arrays


def attention(causal: bool, d: int = 64, s: int = 130, t: int = 200, stable: bool = True, **config: Any) -> Call:
    c = attention90.AttentionConfig(block_kv=64, **config)
    q, k, v = randoms(1, s, 2, d), randoms(1, t, 1, d, seed=1), randoms(1, t, 1, d, seed=2)

    def run(q: Any, k: Any, v: Any) -> Any:
        options = dict(config=c, causal=causal, scale=d**-0.5, return_lse=True, stable=stable)
        return attention90.attention(q, k, v, **options)

    return planned("sm_90a", run, q, k, v)


def readme() -> Call:
    """The example of the README, as it stands there."""
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    # The Python lines of its errors need a file: linecache has none for this, which is no matter here.
    names: dict[str, Any] = {}
    exec(compile(code[1].split("\nx = ")[0], "README.md", "exec"), names)
    x = randoms(64, 256)
    return planned("sm_90a", names["matmul"], x, np.ascontiguousarray(x.T))


def pair() -> Call:
    """The cluster kernel of the GPU tests."""
    spec = importlib.util.spec_from_file_location("pair_kernel", ROOT / "tests" / "gpu" / "test_cluster.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch("mosaic_gpu.runtime.device.default_arch", lambda: "sm_90a"):
        spec.loader.exec_module(module)
    return planned("sm_90a", module.pair_kernel(64), randoms(64 * module.TILES, 64, dtype=np.float32))


GOOD: dict[str, Callable[[], Call]] = {
    "matmul_sm90": lambda: planned(
        "sm_90a",
        lambda a, b: matmul90.matmul(a, b, matmul90.MatmulConfig(block_n=128)),
        randoms(136, 264),
        randoms(264, 128, seed=1),
    ),
    "matmul_sm100": lambda: planned("sm_100a", matmul100.matmul, randoms(136, 392), randoms(392, 128, seed=1)),
    "attention": lambda: attention(False),
    "attention_causal": lambda: attention(True),
    "attention_128": lambda: attention(True, 128, 70, 70),
    "readme": readme,
    "pair": pair,
}


def persistent(**config: Any) -> Call:
    """Attention by one block, which takes all tiles."""
    with mock.patch.object(attention90, "multiprocessors", lambda: 1):
        return attention(True, persistent=True, **config)


REGISTERS = dict(compute_warpgroups=3, compute_registers=160, memory_registers=32)
FOUR = dict(compute_warpgroups=4, compute_registers=112, memory_registers=32, sum_by_product=True)
# What else the attention kernel can do, for the long run.
VARIANTS: dict[str, Callable[[], Call]] = {
    "attention_without_maximum": lambda: persistent(stable=False),
    "attention_without_maximum_in_registers": lambda: persistent(
        stable=False, q_in_registers=True, num_stages=3, **REGISTERS
    ),
    "no_turns": lambda: attention(True, take_turns=False),
    "three_stages": lambda: attention(True, num_stages=3),
    "one_stage": lambda: attention(True, num_stages=1),
    "rescale": lambda: attention(True, rescale_threshold=8.0),
    "persistent": persistent,
    "persistent_output_tile": lambda: persistent(output_tile=True, num_stages=3),
    "registers": lambda: attention(True, q_in_registers=True),
    "three_warpgroups": lambda: attention(True, s=300, **REGISTERS),
    "four_warpgroups": lambda: attention(True, s=300, **FOUR),
    "persistent_registers": lambda: persistent(s=400, q_in_registers=True, output_tile=True, **REGISTERS),
    "no_output_tile": lambda: attention(False, output_tile=False),
    "256": lambda: attention(True, 256, 70, 70),
    "one_key": lambda: attention(False, s=64, t=1),
    "ones": lambda: attention(True, sum_by_product=True),
    "persistent_ones": lambda: persistent(s=400, q_in_registers=True, sum_by_product=True, **REGISTERS),
    "96": lambda: attention(True, 96, 70, 70),
}


def check_clean(call: Call, seeds: int) -> None:
    """No report in the late and the early order and in random ones, and the same bits in all."""
    plan, arrays = call
    ways = [SimulatorParams(timing=t, seed=s) for t in ("late", "early") for s in (None, *range(1, seeds + 1))]
    first: list[np.ndarray] | None = None
    for params in ways:
        results = simulate(plan, arrays, params)
        first = results if first is None else first
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, results, strict=True)), params


@pytest.mark.parametrize("name", GOOD)
def test_good_kernel_is_clean(name: str) -> None:
    check_clean(GOOD[name](), SEEDS)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_clean(name: str) -> None:
    check_clean(VARIANTS[name](), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GOOD, *VARIANTS])
def test_clean_under_100_seeds(name: str) -> None:
    """Twice a hundred: with copies late and early where the seed leaves the choice."""
    check_clean({**GOOD, **VARIANTS}[name](), 100)


@pytest.mark.parametrize("name", ["matmul_sm90", "readme", "pair"])
def test_good_kernel_is_clean_by_bytes(name: str) -> None:
    plan, arrays = GOOD[name]()
    fine, coarse = (simulate(plan, arrays, SimulatorParams(shadow=s)) for s in ("bytes", "regions"))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(fine, coarse, strict=True))


def tiles_of_64(n: int) -> Call:
    """Two compute warpgroups and a memory warpgroup; tiles of 64 x 64, depth 64, four stages."""
    tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((n, n), jnp.bfloat16),
        grid=(n // 128, n // 64),
        grid_names=("m", "n"),
        num_threads=3,
        thread_name="wg",
        scratch_types=dict(
            a=plgpu.SMEM((4, 128, 64), jnp.bfloat16, transforms=tiled),
            b=plgpu.SMEM((4, 64, 64), jnp.bfloat16, transforms=tiled),
            o=plgpu.SMEM((128, 64), jnp.bfloat16, transforms=tiled),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=4),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=4),
        ),
    )
    def kernel(x, y, z, *, a, b, o, full, empty):
        row, column, wg = jax.lax.axis_index("m") * 128, jax.lax.axis_index("n") * 64, jax.lax.axis_index("wg")

        @plgpu.when(wg == 2)
        def produce():
            def load(i, _):
                slot = jax.lax.rem(i, 4)

                @plgpu.when(i >= 4)
                def wait():
                    plgpu.barrier_wait(empty.at[slot])

                k = plgpu.ds(i * 64, 64)
                plgpu.copy_gmem_to_smem(x.at[plgpu.ds(row, 128), k], a.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(y.at[k, plgpu.ds(column, 64)], b.at[slot], full.at[slot])

            jax.lax.fori_loop(0, n // 64, load, None)

        @plgpu.when(wg < 2)
        def consume():
            own = plgpu.ds(wg * 64, 64)

            def scope(acc):
                def step(i, _):
                    slot = jax.lax.rem(i, 4)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, a.at[slot, own], b.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                jax.lax.fori_loop(0, n // 64, step, None)
                return acc[...]

            o[own] = plgpu.run_scoped(scope, plgpu.ACC((64, 64))).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o.at[own], z.at[plgpu.ds(row + wg * 64, 64), plgpu.ds(column, 64)])
            plgpu.wait_smem_to_gmem(0)

    x, y = randoms(n, n), randoms(n, n, seed=1)
    return build_plan(kernel.program(x, y), "sm_90a"), [x, y]


def seconds(call: Call) -> float:
    """Processor time of one simulation with all checks, the better of two."""
    times = []
    for _ in range(2):
        start = time.process_time()
        simulate(*call, processes=1)  # the time of others would not count
        times.append(time.process_time() - start)
    return min(times)


def test_matmul_of_1024_takes_a_second() -> None:
    assert seconds(tiles_of_64(1024)) < 2  # 0.8 s where nothing else runs


def test_attention_of_1024_takes_seconds() -> None:
    q, k, v = (randoms(1, 1024, 4, 128, seed=i) for i in range(3))

    def run(q: Any, k: Any, v: Any) -> Any:
        c = attention90.AttentionConfig()
        return attention90.attention(q, k, v, config=c, causal=False, scale=128**-0.5, return_lse=False)

    assert seconds(planned("sm_90a", run, q, k, v)) < 3
