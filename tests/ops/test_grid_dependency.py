"""Programmatic dependent launch: where the wait must stand, what is emitted, and which kernels may begin early."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.runtime import execute

TILE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SMEM = [plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]


def double(a, o, tile, full):
    """A copying role and a computing one, both of which wait."""
    wg = lax.axis_index("wg")
    plgpu.griddepcontrol_launch_dependents()

    @plgpu.when(wg == 0)
    def _():
        plgpu.griddepcontrol_wait()
        plgpu.copy_gmem_to_smem(a, tile, full)

    @plgpu.when(wg == 1)
    def _():
        plgpu.griddepcontrol_wait()
        plgpu.barrier_wait(full)
        o[...] = tile[...] * 2


OPTIONS = dict(scratch_types=SMEM, num_threads=2, thread_name="wg")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_emitted_and_early(plan, arch):
    """Both instructions are in the machine code, the wait ahead of every access to global memory."""
    p = plan(double, TILE, out=TILE, arch=arch, **OPTIONS)
    assert p.early
    text = emit(p)
    assert text.count("griddepcontrol_wait();") == text.count("griddepcontrol_launch_dependents();") == 2, (
        "in each role"
    )
    (function,) = sass.read_cubin(compile_plan(p).compiled.cubin)
    ops = [i.opcode for i in function.instructions]
    waits = [n for n, op in enumerate(ops) if op.startswith("ACQBULK")]
    stores = [n for n, op in enumerate(ops) if op.startswith(("STG", "UTMALDG"))]
    assert waits and stores and any("PREEXIT" in op for op in ops)
    assert all(any(w < s for w in waits) for s in stores)


def test_launched_early_only_where_it_waits(plan):
    assert execute.launch_spec(plan(double, TILE, out=TILE, **OPTIONS)).early

    def hints_only(a, o):
        plgpu.griddepcontrol_launch_dependents()
        o[...] = a[...]

    p = plan(hints_only, TILE, out=TILE)
    assert not p.early and not execute.launch_spec(p).early


def test_simulated():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    f = plgpu.kernel(double, TILE, **OPTIONS)
    np.testing.assert_array_equal(np.asarray(f(x)), x * 2)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: f(f(x)))(x)), x * 4)


def test_roles_without_global_memory_need_no_wait(plan):
    """One that only computes on shared memory may go ahead; the shape of a Ref is no access, nor is a scope one."""

    def body(a, o, tile, full, done):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            n = plgpu.dim_size(a, 0)

            def scope(_):
                plgpu.griddepcontrol_wait()
                plgpu.copy_gmem_to_smem(a, tile, full)
                plgpu.barrier_wait(done)
                o[...] = tile[...] * n

            plgpu.run_scoped(scope, plgpu.Barrier())

        @plgpu.when(wg == 1)
        def _():
            plgpu.barrier_wait(full)
            tile[...] = tile[...] + 1
            plgpu.barrier_arrive(done)

    assert plan(body, TILE, out=TILE, scratch_types=[*SMEM, plgpu.Barrier()], num_threads=2, thread_name="wg").early


def test_an_access_before_the_wait(plan, assert_at):
    """In any role, inside a loop of it too; the error names the line."""

    def early(a, o):
        x = a[...]  # early
        plgpu.griddepcontrol_wait()
        o[...] = x

    def other_role(a, o):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            plgpu.griddepcontrol_wait()
            o[...] = a[...]

        @plgpu.when(wg == 1)
        def _():
            def step(i, _):
                o[i, 0] = jnp.float32(0)  # early

            lax.fori_loop(0, 2, step, None)

    for body, options in ((early, {}), (other_role, dict(num_threads=2, thread_name="wg"))):
        with pytest.raises(UnsupportedCall, match="before griddepcontrol_wait") as e:
            plan(body, TILE, out=TILE, **options)
        assert_at(e.value, body, "early")


def test_a_wait_on_some_paths_only(plan, assert_at):
    def body(a, o):
        @plgpu.when(plgpu.program_id(0) == 0)
        def _():
            plgpu.griddepcontrol_wait()  # wait

        o[...] = a[...]

    with pytest.raises(UnsupportedCall, match="every path") as e:
        plan(body, TILE, out=TILE, grid=(2,), grid_names=("x",))
    assert_at(e.value, body, "wait")


def test_not_for_one_warp(plan):
    def body(o):
        @plgpu.warp_map
        def _(warp):
            plgpu.griddepcontrol_wait()

    with pytest.raises((UnsupportedCall, NotImplementedError), match="outside warp_map"):
        plan(body, out=TILE)
