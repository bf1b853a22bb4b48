"""Where parts meet: arrivals behind ldmatrix, stores by index arrays in a pallas_call, names in the emitted text, formats."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import SimulatorParams

BF, F = jnp.bfloat16, jnp.float32
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def text(body: Any, *arrays: Any, scratch: Any, out: Any, arch: str = "sm_90a", **options: Any) -> str:
    kernel = plgpu.kernel(body, out, scratch_types=scratch, **options)
    return body_of(emit(build_plan(kernel.program(*arrays), arch)))


def with_ldmatrix(then: Any) -> str:
    """A role with a product under way that reads a tile by ldmatrix; `then` arrives."""

    def body(x: Any, o: Any, tile: Any, first: Any, second: Any) -> None:
        def scope(acc: Any) -> None:
            plgpu.wgmma(acc, tile, tile)
            own = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            then(x, first, second)
            plgpu.wgmma_wait(0)
            o[...] = acc[...] + own.astype(F)

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    scratch = [plgpu.SMEM((64, 64), BF, transforms=TILE), plgpu.Barrier(), plgpu.Barrier()]
    x = jax.ShapeDtypeStruct((4,), jnp.int32)
    return text(body, x, scratch=scratch, out=jax.ShapeDtypeStruct((64, 64), F), num_threads=1, thread_name="wg")


def test_every_branch_and_what_follows_waits_for_ldmatrix() -> None:
    def arrive(b: Any) -> None:
        plgpu.barrier_arrive(b)

    def both(x: Any, first: Any, second: Any) -> None:
        lax.cond(x[0] > 0, lambda: arrive(first), lambda: arrive(second))

    def later(x: Any, first: Any, second: Any) -> None:
        plgpu.when(x[0] > 0)(lambda: arrive(first))
        arrive(second)

    assert with_ldmatrix(both).count("order_after(") >= 2
    waits, *_ = with_ldmatrix(later).split("mbarrier_arrive(")  # of a branch that only arrives no branch is left
    assert waits.count("order_after(") == 1
    assert "order_after(" not in with_ldmatrix(lambda *_: None).split("wgmma_wait")[0]


def test_a_warp_map_before_does_not_forget_it() -> None:
    def body(o: Any, tile: Any, done: Any) -> None:
        @plgpu.warp_map
        def _(warp: Any) -> None:
            plgpu.when(warp == 0)(lambda: plgpu.barrier_arrive(done))

        def scope(acc: Any) -> None:
            plgpu.wgmma(acc, tile, tile)
            own = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(done)
            plgpu.wgmma_wait(0)
            o[...] = acc[...] + own.astype(F)

        plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    scratch = [plgpu.SMEM((64, 64), BF, transforms=TILE), plgpu.Barrier(num_arrivals=2)]
    found = text(body, scratch=scratch, out=jax.ShapeDtypeStruct((64, 64), F), num_threads=1, thread_name="wg")
    assert "ldmatrix_x4(" in found and "order_after(" in found


@pytest.mark.parametrize("add", [False, True])
def test_stores_by_index_arrays_meet_in_a_pallas_call(add: bool) -> None:
    def body(x: Any, o: Any) -> None:
        o[...] = jnp.zeros(o.shape, o.dtype)
        i = jnp.flip(lax.iota(jnp.int32, 128))
        if add:
            o[i] += x[...]
        else:
            o[i] = x[...]
        o[...] = o[...] + 1

    x = jnp.arange(128, dtype=F)
    found = plgpu.pallas_call(body, jax.ShapeDtypeStruct(x.shape, F), interpret=SimulatorParams())(x)
    np.testing.assert_array_equal(found, x[::-1] + 1)


def test_aliased_memory_is_one_place() -> None:
    """A block that reads the input Ref reads what its peer writes to the output."""

    def body(x: Any, o: Any, ready: Any) -> None:
        block = lax.axis_index("pair")
        o[block, 0:64] = jnp.full((64,), 1.0, F)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        o[block, 64:128] = plgpu.load(x.at[1 - block, plgpu.ds(0, 64)])

    found = text(
        body,
        jax.ShapeDtypeStruct((2, 128), F),
        scratch=[plgpu.ClusterBarrier(collective_axes="pair")],
        out=jax.ShapeDtypeStruct((2, 128), F),
        cluster=(2,),
        cluster_names=("pair",),
        input_output_aliases={0: 0},
    )
    assert "mbarrier_arrive_cluster_release(smem" in found and "mbarrier_wait_cluster(smem" in found


def test_a_sort_beside_launch_control_compiles() -> None:
    """Names of values and of temporaries are apart."""

    def body(x: Any, o: Any, answer: Any, asked: Any) -> None:
        plgpu.try_cluster_cancel(answer, asked)
        rows = jnp.sort(x[...], axis=1)
        for _ in range(4):
            o[...] = rows
        plgpu.barrier_wait(asked)
        _, (index,) = (lambda r: (r[-1], (r[0],)))(jax.tree.leaves(plgpu.query_cluster_cancel(answer, ("g",))))
        o[0, 0] = index

    x = jax.ShapeDtypeStruct((64, 16), jnp.int32)
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((64, 16), jnp.int32),
        scratch_types=[plgpu.TryClusterCancelResult(), plgpu.Barrier()],
        grid=(2,),
        grid_names=("g",),
        compiler_params=plgpu.CompilerParams(arch="sm_100a"),
    )
    compile_cuda(emit(build_plan(kernel.program(x), "sm_100a")), arch="sm_100a", name="/seams.cu")


@pytest.mark.parametrize("power", [False, True])
def test_squares_are_products(power: bool) -> None:
    """x^2 + y is one fma on the GPU, however it is written: -(x*x) rounded is not its opposite."""
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    y = -(x * x)

    def body(x: Any, y: Any, o: Any) -> None:
        a = x[...]
        o[...] = (a**2 if power else jnp.square(a)) + y[...]

    found = np.asarray(plgpu.kernel(body, jax.ShapeDtypeStruct(x.shape, F))(x, y))
    exact = (x.astype(np.float64) ** 2 + y).astype(np.float32)
    assert exact.any()
    np.testing.assert_array_equal(found, exact)


def test_floats_outside_of_64_bits() -> None:
    x = np.array([1e30, -1e30, np.nan, 5.5, 2.0**63, -(2.0**63)] * 32, np.float32).reshape(1, 192)[:, :128]
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():

        def body(x: Any, o: Any, u: Any) -> None:
            o[...], u[...] = x[...].astype(jnp.int64), x[...].astype(jnp.uint64)

        outs = [jax.ShapeDtypeStruct(x.shape, t) for t in (jnp.int64, jnp.uint64)]
        signed, unsigned = (np.asarray(r) for r in plgpu.kernel(body, outs)(x))
    ends = np.iinfo(np.int64)
    np.testing.assert_array_equal(signed[0, :6], [ends.max, ends.min, 0, 5, ends.max, ends.min])
    np.testing.assert_array_equal(unsigned[0, :5], [2**64 - 1, 0, 0, 5, 2**63])


def keys_in_a_loop(x: Any, o: Any) -> None:
    key = lax.fori_loop(0, 4, lambda i, k: jax.random.fold_in(k, i), jax.random.key(0))
    o[...] = x[...] + jax.random.uniform(key, x.shape)


def a_broken_format(x: Any, o: Any) -> None:
    plgpu.debug_print("{", x[0])


def a_layout_by_name(x: Any, o: Any) -> None:
    plgpu.print_layout("layout {x}", x[...])


@pytest.mark.parametrize("body", [keys_in_a_loop, a_broken_format, a_layout_by_name])
def test_refused_with_a_line(body: Any) -> None:
    x = jnp.zeros((128,), F)
    with pytest.raises(UnsupportedCall) as e:
        plgpu.kernel(body, jax.ShapeDtypeStruct(x.shape, F))(x)
    assert e.value.line is not None and e.value.line.file == __file__
