"""Every argument of every public function, given what it is not: the error is of a class that callers expect and names it."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import MosaicGpuError
from mosaic_gpu.plan.build import build_plan

F = jnp.float32
S = jax.ShapeDtypeStruct((64, 64), F)
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


class Thing:
    """Nothing that anyone could want."""

    def __repr__(self) -> str:
        return "Thing()"


GARBAGE = [None, "x", -1, 1.5, Thing()]


class Operand(str):
    """Stands for a Ref or array of the kernel that calls the function."""

    def of(self, have):
        return have[str(self)]


# Arguments that are right, by function; those of the second table are called in a kernel.
OUTSIDE = {
    plgpu.kernel: dict(
        body=lambda *refs: None,
        out_type=S,
        scratch_types=[],
        compiler_params=None,
        grid=2,
        grid_names="g",
        cluster=(2,),
        cluster_names=("c",),
        num_threads=2,
        thread_name="wg",
        interpret=None,
        name="n",
        debug=False,
        input_output_aliases=None,
    ),
    plgpu.CompilerParams: dict(
        approx_math=False,
        strict_math=False,
        arch=None,
        strict=False,
        dimension_semantics=None,
        max_concurrent_steps=2,
        num_compute_wgs=None,
        memory_registers=40,
        wg_axis="wg",
    ),
    plgpu.GMEM: dict(shape=(8, 64), dtype=F),
    plgpu.SMEM: dict(shape=(8, 64), dtype=F, transforms=TILE),
    plgpu.TMEM: dict(shape=(128, 64), dtype=F, packed=None, collective=None, layout=None),
    plgpu.ACC: dict(shape=(64, 64), dtype=F),
    plgpu.Barrier: dict(num_arrivals=1, num_barriers=1, orders_tensor_core=False),
    plgpu.ClusterBarrier: dict(collective_axes="c", num_arrivals=1, num_barriers=1, orders_tensor_core=False),
    plgpu.NamedBarrier: dict(num_warpgroups=1, num_barriers=1),
    plgpu.TilingTransform: dict(tiling=(8, 64)),
    plgpu.SwizzleTransform: dict(swizzle=128),
    plgpu.TryClusterCancelResult: dict(num_buffers=None),
    plgpu.WarpMesh: dict(axis_name="warp"),
    plgpu.ds: dict(start=0, size=3),
    plgpu.cdiv: dict(a=1, b=2),
    plgpu.format_tcgen05_sparse_metadata: dict(meta=np.ones((128, 32, 2), np.int32), operand_dtype=jnp.bfloat16),
    plgpu.div: dict(a=1, b=2),
    plgpu.rem: dict(a=1, b=2),
    plgpu.Layout.WGMMA.reduce: dict(axes=1),
}
INSIDE = {
    "async_copy_scales_to_tmem": dict(
        smem_ref=Operand("scales"), tmem_ref=Operand("scales_in_tmem"), collective_axis=None
    ),
    "async_prefetch": dict(ref=Operand("x"), collective_axes=None, leader_tracked=None, predicate=None),
    "async_store_smem": dict(
        src=Operand("array"), ref=Operand("s"), barrier=Operand("barrier"), cluster_idx=0, cluster_dim="c"
    ),
    "async_copy_smem_to_tmem": dict(smem_ref=Operand("a"), tmem_ref=Operand("a_in_tmem"), collective_axis=None),
    "async_copy_sparse_metadata_to_tmem": dict(
        smem_ref=Operand("metadata"), tmem_ref=Operand("metadata_in_tmem"), collective_axis=None
    ),
    "async_load_tmem": dict(src=Operand("tmem"), layout=None, reduce=None),
    "async_store_tmem": dict(dst=Operand("tmem"), value=Operand("rows")),
    "atomic_add": dict(ref=Operand("o"), val=Operand("array")),
    "barrier_arrive": dict(barrier=Operand("barrier")),
    "barrier_wait": dict(barrier=Operand("barrier")),
    "barrier_test": dict(barrier=Operand("barrier")),
    "barrier_arrive_and_wait": dict(barrier=Operand("barrier")),
    "broadcasted_iota": dict(dtype=jnp.int32, shape=(64, 64), dimension=0, layout=None),
    "cluster_ref": dict(ref=Operand("s"), block_id={"c": 0}),
    "core_map": dict(mesh=plgpu.WarpMesh(axis_name="warp")),
    "copy_gmem_to_smem": dict(
        src=Operand("x"), dst=Operand("s"), barrier=Operand("barrier"), collective_axes=None, leader_tracked=None
    ),
    "copy_smem_to_gmem": dict(src=Operand("s"), dst=Operand("o"), commit_group=True, reduction_op=None),
    "debug_check": dict(condition=Operand("mask"), message="m"),
    "debug_print": dict(fmt="here"),
    "print_layout": dict(fmt="", x=Operand("array")),
    "exp2_fma": dict(x=Operand("array")),
    "query_cluster_cancel": dict(result_ref=Operand("answer"), grid_names="g"),
    "try_cluster_cancel": dict(result_ref=Operand("answer"), barrier=Operand("barrier")),
    "delay": dict(nanos=100),
    "get_global": dict(what=plgpu.SemaphoreType.REGULAR),
    "dim_size": dict(ref=Operand("x"), axis=0),
    "from_fragments": dict(x=Operand("fragments"), shape=(64, 64)),
    "layout_cast": dict(x=Operand("array"), layout=plgpu.Layout.WGMMA),
    "load": dict(ref=Operand("x"), layout=plgpu.Layout.WGMMA, mask=Operand("mask"), other=0),
    "multimem_load_reduce": dict(ref=Operand("x"), collective_axes="d", reduction_op="add"),
    "multimem_store": dict(source=Operand("array"), ref=Operand("o"), collective_axes="d"),
    "store": dict(ref=Operand("o"), value=Operand("array"), mask=None),
    "named_barrier_arrive": dict(barrier=Operand("named")),
    "named_barrier_sync": dict(barrier=Operand("named")),
    "num_programs": dict(axis=0),
    "program_id": dict(axis=0),
    "run_scoped": dict(f=lambda s: None, collective_axes="wg", s=plgpu.SMEM((8,), F)),
    "semaphore_read": dict(semaphore=Operand("semaphore")),
    "semaphore_fetch_add": dict(semaphore=Operand("semaphore"), inc=1),
    "semaphore_signal": dict(semaphore=Operand("semaphore"), inc=1, device_id=None, memory_scope="gpu"),
    "semaphore_wait": dict(semaphore=Operand("semaphore"), value=1, decrement=True, memory_scope="sys"),
    "set_max_registers": dict(n=40, action="decrease"),
    "tcgen05_commit_arrive": dict(barrier=Operand("barrier"), collective_axis=None),
    "tcgen05_mma": dict(
        acc=Operand("tmem"),
        a=Operand("a"),
        b=Operand("b"),
        barrier=Operand("barrier"),
        a_scale=None,
        b_scale=None,
        a_sparse_metadata=None,
        accumulate=True,
        collective_axis=None,
    ),
    "to_fragments": dict(x=Operand("array")),
    "wait_smem_to_gmem": dict(n=0, wait_read_only=False),
    "warp_map": dict(f=lambda w: None),
    "wgmma": dict(acc=Operand("acc"), a=Operand("a"), b=Operand("b"), bits=None),
    "wgmma_wait": dict(n=0, after=Operand("array"), first=False),
    "when": dict(condition=True),
    "when_any_in_warp": dict(condition=Operand("mask")),
}
NO_ARGUMENTS = {"commit_smem", "commit_tmem", "last_report", "wait_load_tmem"}
NO_ARGUMENTS |= {"commit_smem_to_gmem_group"}
NO_ARGUMENTS |= {"griddepcontrol_launch_dependents", "griddepcontrol_wait"}
# Elsewhere: classes of the simulator, and what takes any keyword.
NOT_HERE = {"SimulatorParams", "simulator_params", "Layout", "pl", "plgpu", "CopyPartition", "RefUnion", "TMEMLayout"}
NOT_HERE |= {"NDLoopInfo", "dynamic_scheduling_loop"}  # what a loop gives; tests/ops/test_launch_control.py
NOT_HERE |= {"atomic_max", "atomic_min", "atomic_and", "atomic_or", "atomic_xor"}  # as atomic_add, of integers
NOT_HERE |= {"mma", "inline_mgpu"}  # arguments by position; any
NOT_HERE |= {"SemaphoreType", "SemaphoreSignal", "semaphore_signal_parallel", "semaphore_signal_multicast"}  # tests/ops
NOT_HERE |= {"nd_loop", "run_state"}  # tests/frontend/test_loops_and_states.py
NOT_HERE |= {"explain_config", "override_config"}  # tests/tune
NOT_HERE |= {"align_to", "dslice", "find_swizzle", "multiple_of", "next_power_of_2", "planar_snake"}  # test_helpers.py
NOT_HERE |= {"transpose_ref", "wgmma_accumulator_load", "with_scoped"}
NOT_HERE |= {"PipelinePipeline"}  # an enum
# Checked when they meet arrays; tests/pallas.
NOT_HERE |= {
    "pallas_call",
    "loop",
    "emit_pipeline",
    "emit_pipeline_warp_specialized",
    "register_backend",
    "TritonCompilerParams",
    "PrefetchScalarGridSpec",
}
NOT_HERE |= {
    "ANY",
    "BlockSpec",
    "Blocked",
    "BoundedSlice",
    "Buffered",
    "CostEstimate",
    "Element",
    "GridSpec",
    "Indirect",
}
NOT_HERE |= {"Squeezed", "no_block_spec", "squeezed"}
# What looks like garbage and is none.  True: whatever it is given.
RIGHT = {
    ("wgmma", "bits"): (None,),
    ("CompilerParams", "dimension_semantics"): [None],
    ("CompilerParams", "num_compute_wgs"): [None],
    ("CompilerParams", "wg_axis"): ["x"],
    ("wgmma_wait", "after"): [None, 1.5],
    ("WarpMesh", "axis_name"): ["x"],
    ("kernel", "scratch_types"): [None],
    ("kernel", "compiler_params"): [None],
    ("kernel", "interpret"): [None],
    ("kernel", "input_output_aliases"): [None],
    ("copy_smem_to_gmem", "reduction_op"): [None],
    ("kernel", "name"): [None, "x"],
    ("kernel", "thread_name"): ["x"],
    ("kernel", "grid_names"): ["x"],
    ("kernel", "cluster_names"): ["x"],
    ("CompilerParams", "arch"): [None],
    ("TMEM", "packed"): [None],
    ("TMEM", "collective"): [None],
    ("TMEM", "layout"): [None],
    ("ClusterBarrier", "collective_axes"): ["x"],
    ("run_scoped", "collective_axes"): ["x"],
    ("copy_gmem_to_smem", "collective_axes"): [None],
    ("async_load_tmem", "layout"): [None],
    ("async_load_tmem", "reduce"): [None],
    ("broadcasted_iota", "layout"): [None],
    ("load", "layout"): [None],
    ("load", "other"): [None, -1, 1.5],
    ("store", "value"): [-1, 1.5],
    ("store", "mask"): [None],
    ("atomic_add", "val"): [-1, 1.5],
    ("multimem_store", "source"): [-1, 1.5],
    ("multimem_store", "collective_axes"): ["x"],
    ("multimem_load_reduce", "collective_axes"): ["x"],
    ("async_prefetch", "collective_axes"): [None],
    ("async_prefetch", "leader_tracked"): [None],
    ("async_prefetch", "predicate"): [None],
    ("delay", "nanos"): [-1],
    ("semaphore_signal", "inc"): [-1],
    ("semaphore_fetch_add", "inc"): [-1],
    ("semaphore_signal", "device_id"): [None],
    ("semaphore_wait", "value"): [-1],
    ("TryClusterCancelResult", "num_buffers"): [None],
    ("tcgen05_mma", "barrier"): [None],
    ("tcgen05_mma", "a_scale"): [None],
    ("tcgen05_mma", "b_scale"): [None],
    ("tcgen05_mma", "collective_axis"): [None],
    ("tcgen05_mma", "a_sparse_metadata"): [None],
    ("async_copy_scales_to_tmem", "collective_axis"): [None],
    ("async_copy_smem_to_tmem", "collective_axis"): [None],
    ("async_copy_sparse_metadata_to_tmem", "collective_axis"): [None],
    ("tcgen05_commit_arrive", "collective_axis"): [None],
    ("copy_gmem_to_smem", "leader_tracked"): [None],
    ("debug_check", "message"): ["x"],
    ("debug_print", "fmt"): ["x"],
    ("print_layout", "fmt"): ["x"],
    ("print_layout", "x"): [-1, 1.5],
    ("dim_size", "axis"): [-1],
    ("when", "condition"): [-1],
    ("ds", "start"): [-1],
    ("cdiv", "a"): [-1],
    ("cdiv", "b"): [-1],
    ("div", "a"): [-1, 1.5],
    ("div", "b"): [-1, 1.5],
    ("rem", "a"): [-1, 1.5],
    ("rem", "b"): [-1, 1.5],
}
# The error says it in other words than the argument's name.
WORDS = {
    ("set_max_registers", "n", -1): r"set_max_registers\(-1\)",
    ("copy_gmem_to_smem", "collective_axes", "x"): "'x' is not a cluster axis",
    ("async_prefetch", "collective_axes", "x"): "'x' is not a cluster axis",
    ("query_cluster_cancel", "grid_names", "x"): "the grid has axes",
    ("async_store_smem", "cluster_idx", -1): "block -1 along c",
    ("async_store_smem", "cluster_dim", "x"): "the cluster has axes",
    ("tcgen05_commit_arrive", "collective_axis", "x"): "'x' is not a cluster axis",
    ("kernel", "thread_name", None): "num_threads and thread_name",
}


def name_of(f):
    return {plgpu.GMEM: "GMEM", plgpu.SMEM: "SMEM", plgpu.TMEM: "TMEM", plgpu.ACC: "ACC"}.get(f) or f.__name__


def call_inside(name, args):
    """Trace and plan a kernel that calls the function."""
    blackwell = name.startswith("tcgen05") or "tmem" in name or "cluster_cancel" in name

    def body(x, o, s, a, b, barrier, named, answer, semaphore, tmem=None, *more):
        def scope(acc=None):
            array = x[...]
            have = dict(x=x, o=o, s=s, a=a, b=b, barrier=barrier, named=named, tmem=tmem, acc=acc, answer=answer)
            have |= dict(semaphore=semaphore, array=array, mask=array > 0, a_in_tmem=more and more[0])
            for what in ("scales", "metadata"):
                have |= dict(zip((what, f"{what}_in_tmem"), more, strict=False))
            if tmem is not None:
                have["rows"] = plgpu.async_load_tmem(tmem)
            if name == "from_fragments":
                have["fragments"] = plgpu.to_fragments(array)
            given = {k: v.of(have) if isinstance(v, Operand) else v for k, v in args.items()}
            if name == "run_scoped":
                plgpu.run_scoped(given.pop("f"), **given)
                return
            if name == "barrier_wait":  # else nothing would arrive, which is refused
                plgpu.barrier_arrive(barrier)
            result = getattr(plgpu, name)(**given)
            if name.startswith("when") or name == "core_map":
                result(lambda: None)

        scope() if blackwell else plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    m = 128 if blackwell else 64
    scratch = [plgpu.SMEM((64, 64), F), plgpu.SMEM((m, 64), jnp.bfloat16, transforms=TILE)]
    scratch += [plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILE), plgpu.Barrier()]
    scratch += [plgpu.NamedBarrier(num_warpgroups=1), plgpu.TryClusterCancelResult(), plgpu.SemaphoreType.REGULAR]
    scratch += [plgpu.TMEM((128, 64), F)] if blackwell else []
    if "scales" in name:
        e8 = jnp.float8_e8m0fnu
        scratch += [plgpu.SMEM((1, 1, 32, 16), e8), plgpu.TMEM((128, 4), e8, layout=plgpu.TMEMLayout.SCALES_LAYOUT)]
    if "metadata" in name:
        layout = plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT
        scratch += [plgpu.SMEM((1, 1, 128, 16), jnp.uint8), plgpu.TMEM((128, 16), jnp.uint8, layout=layout)]
    if name == "async_copy_smem_to_tmem":
        scratch += [plgpu.TMEM((128, 64), jnp.bfloat16, packed=True)]
    cluster = dict(cluster=(2,), cluster_names="c") if name == "async_store_smem" else {}
    k = plgpu.kernel(body, S, grid=2, grid_names="g", num_threads=1, thread_name="wg", scratch_types=scratch, **cluster)
    build_plan(k.program(S), "sm_100a" if blackwell else "sm_90a")


def call_outside(f, args):
    made = f(**args)
    if f is plgpu.kernel:
        made.program(S)


CALLS = {name_of(f): (functools.partial(call_outside, f), args) for f, args in OUTSIDE.items()}
CALLS |= {name: (functools.partial(call_inside, name), args) for name, args in INSIDE.items()}


def test_the_tables_have_every_function_and_argument():
    assert set(CALLS) - {"reduce"} | NO_ARGUMENTS | NOT_HERE == set(plgpu.__all__)
    older = {"out_shape", "scratch_shapes", "kernel_name"}
    for name, (_, args) in CALLS.items():
        f = plgpu.Layout.WGMMA.reduce if name == "reduce" else getattr(plgpu, name)
        parameters = inspect.signature(f).parameters.values()
        wanted = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if name not in ("GMEM", "SMEM", "TMEM", "run_scoped"):  # which have arguments of one another, or any
            assert set(args) == wanted - older, name


@pytest.mark.parametrize("name", CALLS)
def test_what_is_right(name):
    call, args = CALLS[name]
    call(args)


@pytest.mark.parametrize("name, argument", [(name, a) for name, (_, args) in CALLS.items() for a in args])
def test_garbage(name, argument):
    call, args = CALLS[name]
    for garbage in GARBAGE:
        if garbage in RIGHT.get((name, argument), ()):
            call({**args, argument: garbage} | ({"num_threads": 2} if argument == "thread_name" else {}))
            continue
        with pytest.raises(
            (TypeError, ValueError, MosaicGpuError), match=WORDS.get((name, argument, garbage), argument)
        ):
            call({**args, argument: garbage})
