"""Good kernels, small enough to be simulated in some milliseconds: the project's own, and one for each way to synchronise.

Every one is compared with a NumPy reference.  What breaks them is in `sabotages.py` and `mutate.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.kernels.sm90 import attention as attention90
from mosaic_gpu.kernels.sm90 import matmul as matmul90
from mosaic_gpu.kernels.sm100 import matmul as matmul100
from mosaic_gpu.program import Program

BF16 = ml_dtypes.bfloat16
Arrays = tuple[np.ndarray, ...]
# The body of the attention kernel takes its buffers as *rest; selectors call them by these names.
ATTENTION_NAMES = {
    f"rest[{i}]": name
    for i, name in enumerate(
        (
            *("q_tile", "k_tile", "v_tile"),
            *("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "turns", "o_tile"),
        )
    )
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A traced kernel, arguments and what it must give.  names: what selectors call Refs that have no name of their own."""

    name: str
    arch: str
    program: Program
    arrays: Arrays
    expected: Arrays
    tolerance: float
    names: dict[str, str]

    def right(self, outputs: list[np.ndarray]) -> bool:
        """Whether outputs are what the reference says, but for rounding."""
        return all(
            bool(np.all(np.abs(np.asarray(x, np.float32) - want) <= self.tolerance))
            for x, want in zip(outputs, self.expected, strict=True)
        )


MAKERS: dict[str, Callable[..., tuple[Any, str, Arrays, Arrays, dict[str, str]]]] = {}


def _maker(f: Any) -> Any:
    MAKERS[f.__name__] = f
    return f


@functools.cache
def case(name: str, **options: Any) -> Case:
    """A kernel by name; options are those of its maker."""
    kernel, arch, arrays, expected, names = MAKERS[name](**options)
    if hasattr(kernel, "program"):
        program = kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
    else:
        program, arrays = _recorded(kernel, arrays)
    return Case(name, arch, program, arrays, tuple(np.asarray(x, np.float32) for x in expected), 0.05, names)


def _recorded(function: Callable[..., Any], arrays: Arrays) -> tuple[Program, Arrays]:
    """The program and the arguments of the one kernel that a function of the project's interface calls."""
    calls: list[tuple[Program, Arrays]] = []

    def record(traced: Any, arguments: Any) -> list[Any]:
        calls.append((traced.program, tuple(np.asarray(x) for x in arguments)))
        return [jnp.zeros(a.shape, a.dtype) for a in traced.out_avals]

    with mock.patch("mosaic_gpu.runtime.execute.run", record):
        function(*map(jnp.asarray, arrays))
    (call,) = calls
    return call


def _random(seed: int, *shape: int, dtype: Any = BF16) -> np.ndarray:
    # Small integers: sums are exact, so that one wrong tile cannot hide in the tolerance.
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _tiled(rows: int = 8, dtype: Any = BF16) -> tuple[Any, ...]:
    return plgpu.TilingTransform((rows, 128 // np.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def _options(warpgroups: int = 1, arch: str = "sm_90a") -> dict[str, Any]:
    threads: dict[str, Any] = dict(num_threads=warpgroups, thread_name="wg") if warpgroups > 1 else {}
    return dict(compiler_params=plgpu.CompilerParams(arch=arch), **threads)


@_maker
def pipeline(steps: int = 5) -> Any:
    """One warpgroup, double-buffered both ways: TMA in, arithmetic in registers, TMA out."""

    def body(x: Any, y: Any, in_tile: Any, out_tile: Any, full: Any) -> None:
        for i in range(2):
            plgpu.copy_gmem_to_smem(x.at[i], in_tile.at[i], full.at[i])

        def step(i: Any, _: None) -> None:
            slot = lax.rem(i, 2)
            plgpu.barrier_wait(full.at[slot])
            value = plgpu.load(in_tile.at[slot], layout=plgpu.Layout.WGMMA)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read its tile
            out_tile[slot] = value * 2.0 + 1.0
            plgpu.commit_smem()  # all warps have read in_tile and written out_tile
            plgpu.copy_smem_to_gmem(out_tile.at[slot], y.at[i])

            @plgpu.when(i + 2 < steps)
            def _() -> None:
                plgpu.copy_gmem_to_smem(x.at[i + 2], in_tile.at[slot], full.at[slot])

        lax.fori_loop(0, steps, step, None)
        plgpu.wait_smem_to_gmem(0)

    x = _random(1, steps, 64, 16, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 64, 16), jnp.float32),
            plgpu.SMEM((2, 64, 16), jnp.float32),
            plgpu.Barrier(num_barriers=2),
        ],
        name="pipeline",
        **_options(),
    )
    return kernel, "sm_90a", (x,), (x * 2 + 1,), {}


@_maker
def cluster(k_steps: int = 5) -> Any:
    """Matmul by a cluster of two: each block loads its rows of A and half of B's tile, which goes to both."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any, empty: Any) -> None:
        wg, block = lax.axis_index("wg"), lax.axis_index("pair")
        rows = plgpu.ds(block * 64, 64)

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])  # both blocks have released it

                k = plgpu.ds(i * 64, 64)
                plgpu.copy_gmem_to_smem(a.at[rows, k], a_tile.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(b.at[k], b_tile.at[slot], full.at[slot], collective_axes="pair")

            lax.fori_loop(0, k_steps, step, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def product(acc: Any) -> Any:
                def step(i: Any, _: None) -> None:
                    slot = lax.rem(i, 2)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, a_tile.at[slot], b_tile.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                lax.fori_loop(0, k_steps, step, None)
                return acc[...]

            o[rows] = plgpu.run_scoped(product, plgpu.ACC((64, 64)))

    a, b = _random(1, 128, 64 * k_steps), _random(2, 64 * k_steps, 64)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((128, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=_tiled(64)),
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=_tiled()),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.ClusterBarrier(collective_axes="pair", num_barriers=2),
        ],
        cluster=(2,),
        cluster_names=("pair",),
        name="cluster",
        **_options(2),
    )
    return kernel, "sm_90a", (a, b), (_f32(a) @ _f32(b),), {}


@_maker
def persistent(tiles: int = 5, k_steps: int = 3, stages: int = 2) -> Any:
    """Matmul where a block walks over several tiles; the ring goes on from tile to tile, one product stays in flight."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, o_tile: Any, full: Any, empty: Any) -> None:
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        own_tiles = lax.div(tiles - block + 1, 2)

        def rows(j: Any) -> Any:
            return plgpu.ds((block + 2 * j) * 64, 64)

        @plgpu.when(wg == 1)
        def _() -> None:
            def tile(j: Any, _: None) -> None:
                def step(i: Any, _: None) -> None:
                    count = j * k_steps + i
                    slot = lax.rem(count, stages)

                    @plgpu.when(count >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    k = plgpu.ds(i * 64, 64)
                    plgpu.copy_gmem_to_smem(a.at[rows(j), k], a_tile.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(b.at[k], b_tile.at[slot], full.at[slot])

                lax.fori_loop(0, k_steps, step, None)

            lax.fori_loop(0, own_tiles, tile, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def tile(j: Any, _: None) -> None:
                def product(acc: Any) -> Any:
                    def step(i: Any, _: None) -> None:
                        count = j * k_steps + i
                        slot = lax.rem(count, stages)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, a_tile.at[slot], b_tile.at[slot])
                        plgpu.wgmma_wait(1)

                        @plgpu.when(i > 0)
                        def _() -> None:
                            plgpu.barrier_arrive(empty.at[lax.rem(count + stages - 1, stages)])

                    lax.fori_loop(0, k_steps, step, None)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[lax.rem(j * k_steps + k_steps - 1, stages)])
                    return acc[...]

                total = plgpu.run_scoped(product, plgpu.ACC((64, 64))).astype(jnp.bfloat16)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_tile[...] = total
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_tile, o.at[rows(j)])

            lax.fori_loop(0, own_tiles, tile, None)
            plgpu.wait_smem_to_gmem(0)

    a, b = _random(1, 64 * tiles, 64 * k_steps), _random(2, 64 * k_steps, 64)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((64 * tiles, 64), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((stages, 64, 64), jnp.bfloat16, transforms=_tiled(64)),
            plgpu.SMEM((stages, 64, 64), jnp.bfloat16, transforms=_tiled(64)),
            plgpu.SMEM((64, 64), jnp.bfloat16, transforms=_tiled(64)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(2,),
        grid_names=("block",),
        name="persistent",
        **_options(2),
    )
    return kernel, "sm_90a", (a, b), ((_f32(a) @ _f32(b)).astype(BF16),), {}


@_maker
def handoff(steps: int = 4) -> Any:
    """Named barriers: one warpgroup writes a tile with ordinary stores, another reads it, turn by turn."""

    def body(x: Any, y: Any, tile: Any, ready: Any, free: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                value = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA) * 2.0

                @plgpu.when(i > 0)
                def _() -> None:
                    plgpu.named_barrier_sync(free)

                tile[...] = value
                plgpu.named_barrier_arrive(ready)

            lax.fori_loop(0, steps, step, None)

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                plgpu.named_barrier_sync(ready)
                value = plgpu.load(tile, layout=plgpu.Layout.WGMMA)

                @plgpu.when(i < steps - 1)
                def _() -> None:
                    plgpu.named_barrier_arrive(free)

                y[i] = value + 1.0

            lax.fori_loop(0, steps, step, None)

    x = _random(1, steps, 64, 16, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 16), jnp.float32),
            plgpu.NamedBarrier(num_warpgroups=2),
            plgpu.NamedBarrier(num_warpgroups=2),
        ],
        name="handoff",
        **_options(2),
    )
    return kernel, "sm_90a", (x,), (x * 2 + 1,), {}


@_maker
def staged(k_steps: int = 5) -> Any:
    """Operands written by ordinary stores: one warpgroup converts B to bfloat16 in shared memory, another multiplies."""

    def body(a: Any, b: Any, o: Any, b_tile: Any, full: Any, empty: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                slot = lax.rem(i, 2)
                value = plgpu.load(b.at[plgpu.ds(i * 64, 64)], layout=plgpu.Layout.WGMMA).astype(jnp.bfloat16)

                @plgpu.when(i >= 2)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                b_tile[slot] = value
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])

            lax.fori_loop(0, k_steps, step, None)

        @plgpu.when(wg == 0)
        def _() -> None:
            def product(acc: Any) -> Any:
                def step(i: Any, _: None) -> None:
                    slot = lax.rem(i, 2)
                    part = plgpu.load(a.at[:, plgpu.ds(i * 64, 64)], layout=plgpu.Layout.WGMMA)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, part, b_tile.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                lax.fori_loop(0, k_steps, step, None)
                return acc[...]

            o[...] = plgpu.run_scoped(product, plgpu.ACC((64, 64)))

    a, b = _random(1, 64, 64 * k_steps), _random(2, 64 * k_steps, 64, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=_tiled(64)),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        name="staged",
        **_options(2),
    )
    return kernel, "sm_90a", (a, b), (_f32(a) @ b,), {}


@_maker
def through_memory(steps: int = 3, writer: str = "copy", reader: str = "load") -> Any:
    """One warpgroup leaves tiles in global memory, another takes them from there.

    writer: 'copy' (TMA) or 'store'; reader: 'load' or 'copy'.  What is stored must not be copied: no fence of this
    language makes ordinary stores to global memory visible to TMA.
    """

    def body(x: Any, t: Any, y: Any, out_tile: Any, in_tile: Any, ready: Any, full: Any, free: Any) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                value = plgpu.load(x.at[i], layout=plgpu.Layout.WGMMA) * 2.0
                if writer == "store":
                    t[i] = value
                else:
                    out_tile[...] = value
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_tile, t.at[i])
                    plgpu.wait_smem_to_gmem(0)  # written, not only read
                plgpu.barrier_arrive(ready)

                @plgpu.when(i < steps - 1)
                def _() -> None:
                    plgpu.barrier_wait(free)

            lax.fori_loop(0, steps, step, None)

        @plgpu.when(wg == 1)
        def _() -> None:
            def step(i: Any, _: None) -> None:
                plgpu.barrier_wait(ready)
                if reader == "copy":
                    plgpu.copy_gmem_to_smem(t.at[i], in_tile, full)
                    plgpu.barrier_wait(full)
                    value = plgpu.load(in_tile, layout=plgpu.Layout.WGMMA)
                else:
                    value = plgpu.load(t.at[i], layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(free)
                y[i] = value + 1.0

            lax.fori_loop(0, steps, step, None)

    x = _random(1, steps, 64, 16, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        [jax.ShapeDtypeStruct(x.shape, jnp.float32)] * 2,
        scratch_types=[
            plgpu.SMEM((64, 16), jnp.float32),
            plgpu.SMEM((64, 16), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
        name="through_memory",
        **_options(2),
    )
    return kernel, "sm_90a", (x,), (x * 2, x * 2 + 1), {}


@_maker
def relay(steps: int = 4) -> Any:
    """Warps on their own: one copies, one waits for the copy and tells the warpgroup, which hands the tile back."""

    def body(x: Any, y: Any, tile: Any, full: Any, ready: Any, free: Any) -> None:
        def step(i: Any, _: None) -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                @plgpu.when(warp == 0)
                def _() -> None:
                    @plgpu.when(i > 0)
                    def _() -> None:
                        plgpu.barrier_wait(free)  # all four warps have read it

                    plgpu.copy_gmem_to_smem(x.at[i], tile, full)

                @plgpu.when(warp == 1)
                def _() -> None:
                    plgpu.barrier_wait(full)
                    plgpu.barrier_arrive(ready)

            plgpu.barrier_wait(ready)
            value = plgpu.load(tile, layout=plgpu.Layout.WGMMA)

            @plgpu.when(i < steps - 1)
            def _() -> None:
                plgpu.barrier_arrive(free)

            y[i] = value + 1.0

        lax.fori_loop(0, steps, step, None)

    x = _random(1, steps, 64, 16, dtype=np.float32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types=[plgpu.SMEM((64, 16), jnp.float32), plgpu.Barrier(), plgpu.Barrier(), plgpu.Barrier()],
        name="relay",
        **_options(1),
    )
    return kernel, "sm_90a", (x,), (x + 1,), {}


@_maker
def sm100_tiles(tiles: int = 3, k_steps: int = 3) -> Any:
    """Blackwell: one accumulator in tensor memory serves several tiles, so the MMA waits until it has been read."""

    def body(
        a: Any,
        b: Any,
        o: Any,
        a_tile: Any,
        b_tile: Any,
        o_tile: Any,
        acc: Any,
        full: Any,
        empty: Any,
        done: Any,
        drained: Any,
    ) -> None:
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Any) -> None:
                @plgpu.when(warp == 0)
                def _() -> None:
                    def tile(j: Any, _: None) -> None:
                        def step(i: Any, _: None) -> None:
                            count = j * k_steps + i
                            slot = lax.rem(count, 2)

                            @plgpu.when(count >= 2)
                            def _() -> None:
                                plgpu.barrier_wait(empty.at[slot])

                            k = plgpu.ds(i * 64, 64)
                            plgpu.copy_gmem_to_smem(a.at[plgpu.ds(j * 128, 128), k], a_tile.at[slot], full.at[slot])
                            plgpu.copy_gmem_to_smem(b.at[k], b_tile.at[slot], full.at[slot])

                        lax.fori_loop(0, k_steps, step, None)

                    lax.fori_loop(0, tiles, tile, None)

                @plgpu.when(warp == 1)
                def _() -> None:
                    def tile(j: Any, _: None) -> None:
                        @plgpu.when(j > 0)
                        def _() -> None:
                            plgpu.barrier_wait(drained)

                        def step(i: Any, _: None) -> None:
                            slot = lax.rem(j * k_steps + i, 2)
                            plgpu.barrier_wait(full.at[slot])
                            plgpu.tcgen05_mma(acc, a_tile.at[slot], b_tile.at[slot], empty.at[slot], accumulate=i > 0)

                        lax.fori_loop(0, k_steps, step, None)
                        plgpu.tcgen05_commit_arrive(done)

                    lax.fori_loop(0, tiles, tile, None)

        @plgpu.when(wg == 1)
        def _() -> None:
            def tile(j: Any, _: None) -> None:
                plgpu.barrier_wait(done)
                total = plgpu.async_load_tmem(acc)
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(drained)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_tile[...] = total.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_tile, o.at[plgpu.ds(j * 128, 128)])

            lax.fori_loop(0, tiles, tile, None)
            plgpu.wait_smem_to_gmem(0)

    a, b = _random(1, 128 * tiles, 64 * k_steps), _random(2, 64 * k_steps, 64)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((128 * tiles, 64), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((2, 128, 64), jnp.bfloat16, transforms=_tiled(128)),
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=_tiled(64)),
            plgpu.SMEM((128, 64), jnp.bfloat16, transforms=_tiled(128)),
            plgpu.TMEM((128, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        name="sm100_tiles",
        **_options(2, "sm_100a"),
    )
    return kernel, "sm_100a", (a, b), ((_f32(a) @ _f32(b)).astype(BF16),), {}


# ---- the project's kernels ------------------------------------------------------------------------------------------
@_maker
def sm90_matmul() -> Any:
    a, b = _random(1, 384, 320), _random(2, 320, 128)

    def kernel(*arrays: jax.Array) -> Any:
        config = matmul90.MatmulConfig(block_n=128, num_stages=3, persistent=True)
        with mock.patch.object(matmul90, "multiprocessors", lambda: 1):  # one block takes all tiles
            return matmul90.matmul(*arrays, config=config)

    return kernel, "sm_90a", (a, b), ((_f32(a) @ _f32(b)).astype(BF16),), {}


@_maker
def sm90_matmul_pair() -> Any:
    """As `sm90_matmul`, by a cluster of two blocks that share B."""
    a, b = _random(1, 512, 320), _random(2, 320, 128)

    def kernel(*arrays: jax.Array) -> Any:
        config = matmul90.MatmulConfig(block_n=128, num_stages=2, cluster_m=2, persistent=True)
        with mock.patch.object(matmul90, "multiprocessors", lambda: 2):  # one cluster takes all tiles
            return matmul90.matmul(*arrays, config=config)

    return kernel, "sm_90a", (a, b), ((_f32(a) @ _f32(b)).astype(BF16),), {}


@_maker
def sm100_matmul() -> Any:
    a, b = _random(1, 128, 320), _random(2, 320, 64)
    kernel = functools.partial(matmul100.matmul, config=matmul100.MatmulConfig(tile_n=64, num_slots=2))
    return kernel, "sm_100a", (a, b), ((_f32(a) @ _f32(b)).astype(BF16),), {}


def _attention(queries: int, keys: int, causal: bool, **config: Any) -> Any:
    rng = np.random.default_rng(3)
    d = 64
    q, k, v = (rng.standard_normal((1, n, 1, d)).astype(BF16) for n in (queries, keys, keys))

    def kernel(*arrays: jax.Array) -> Any:
        # One block takes all query tiles, one after the other.
        with mock.patch.object(attention90, "multiprocessors", lambda: 1):
            return attention90.attention(
                *arrays,
                config=attention90.AttentionConfig(block_kv=64, persistent=True, **config),
                causal=causal,
                scale=d**-0.5,
                return_lse=False,
            )

    scores = _f32(q[0, :, 0]) @ _f32(k[0, :, 0]).T * d**-0.5
    if causal:
        scores = np.where(np.arange(keys)[None] <= np.arange(queries)[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(1, keepdims=True))
    out = p @ _f32(v[0, :, 0]) / p.sum(1, keepdims=True)
    return kernel, "sm_90a", (q, k, v), (out[None, :, None],), ATTENTION_NAMES


# Two or three tiles of queries, and so many key blocks that every barrier of the ring comes round again.
@_maker
def attention() -> Any:
    return _attention(384, 320, causal=False, output_tile=True)


@_maker
def attention_causal() -> Any:
    """There are key blocks behind those on the diagonal."""
    return _attention(384, 384, causal=True, output_tile=True)


@_maker
def attention_short() -> Any:
    """One key block: a tile's first product is its last."""
    return _attention(384, 64, causal=False, output_tile=True)


@_maker
def attention_registers() -> Any:
    """Three compute warpgroups that keep Q in registers.  So few keys that only q_empty tells when Q may be refilled."""
    registers = dict(compute_warpgroups=3, compute_registers=160, memory_registers=32)
    return _attention(576, 128, causal=False, output_tile=True, q_in_registers=True, **registers)


NAMES = tuple(MAKERS)
# Most of attention_short's equations are never reached, so their mutants would say nothing.
MUTATED = tuple(n for n in NAMES if n != "attention_short")
