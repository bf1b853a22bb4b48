"""Mosaic GPU: a kernel language in Python for NVIDIA Hopper (sm90) and Blackwell (sm100).

    import mosaic_gpu as plgpu                # or: from mosaic_gpu import plgpu, pl

The names, by topic (each is documented where it is defined):

- kernels: kernel, CompilerParams, run_scoped, with_scoped, run_state, when, inline_mgpu
- single warps: when_any_in_warp, warp_map, core_map, WarpMesh
- loops: loop, nd_loop
- numbers: program_id, num_programs, ds, dslice, cdiv, div, rem, align_to, next_power_of_2, multiple_of, dim_size, exp2_fma
- orders and layouts of tiles: planar_snake, find_swizzle
- memory: GMEM, SMEM, TMEM, ACC, RefUnion, Barrier, ClusterBarrier, NamedBarrier
- views: cluster_ref, transpose_ref, TilingTransform, SwizzleTransform
- copies: CopyPartition, copy_gmem_to_smem, copy_smem_to_gmem, commit_smem_to_gmem_group, wait_smem_to_gmem, commit_smem
- copies to another block: async_store_smem
- the cache: async_prefetch
- barriers: barrier_arrive, barrier_wait, barrier_arrive_and_wait, barrier_test, delay, named_barrier_arrive, named_barrier_sync
- semaphores: SemaphoreType, get_global, semaphore_signal, semaphore_wait, semaphore_read, semaphore_fetch_add
- several semaphores: SemaphoreSignal, semaphore_signal_parallel, semaphore_signal_multicast
- tensor cores: wgmma, wgmma_wait, wgmma_accumulator_load, mma, tcgen05_mma, tcgen05_commit_arrive
- tensor memory: async_load_tmem, wait_load_tmem, async_store_tmem, commit_tmem, async_copy_smem_to_tmem, TMEMLayout
- operands in tensor memory: async_copy_scales_to_tmem, async_copy_sparse_metadata_to_tmem, format_tcgen05_sparse_metadata
- cluster launch control: dynamic_scheduling_loop, NDLoopInfo, try_cluster_cancel, query_cluster_cancel, TryClusterCancelResult
- registers: set_max_registers, layout_cast, Layout, broadcasted_iota, load, store, to_fragments, from_fragments
- global memory by many threads at once: atomic_add, atomic_max, atomic_min, atomic_and, atomic_or, atomic_xor
- memory of several devices at once: multimem_load_reduce, multimem_store
- kernels one after the other: griddepcontrol_wait, griddepcontrol_launch_dependents
- looking inside: debug_print, debug_check, print_layout
- grids of blocks: pallas_call, GridSpec, PrefetchScalarGridSpec, CostEstimate
- pipelines of blocks in a kernel: emit_pipeline, emit_pipeline_warp_specialized, PipelinePipeline
- backends of pallas_call: register_backend, TritonCompilerParams
- blocks of arrays: BlockSpec, Blocked, Element, Squeezed, squeezed, BoundedSlice, Indirect, Buffered, ANY, no_block_spec
- simulator: SimulatorParams, simulator_params
- tuned configs: explain_config, override_config (mosaic_gpu.tune has the rest)
- errors: mosaic_gpu.errors; last_report

Importing this imports JAX only when one of the names that need it is used, so that compilation and simulation of a traced
program run in processes without it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

from .collecting import recoverable
from .elsewhere import ELSEWHERE

__version__ = "0.1.0"

_WHERE = {
    "frontend.dynamic": ("NDLoopInfo", "dynamic_scheduling_loop", "nd_loop"),
    "frontend.helpers": (
        "align_to",
        "dslice",
        "find_swizzle",
        "multiple_of",
        "next_power_of_2",
        "planar_snake",
        "transpose_ref",
        "wgmma_accumulator_load",
        "with_scoped",
    ),
    "frontend.kernel": ("kernel",),
    "frontend.loops": (
        "WarpMesh",
        "cdiv",
        "core_map",
        "div",
        "ds",
        "get_global",
        "inline_mgpu",
        "loop",
        "rem",
        "run_scoped",
        "run_state",
        "warp_map",
        "when",
    ),
    "frontend.peers": ("cluster_ref",),
    "frontend.memory": (
        "ACC",
        "Barrier",
        "ClusterBarrier",
        "GMEM",
        "NamedBarrier",
        "RefUnion",
        "SMEM",
        "SemaphoreType",
        "TMEM",
    ),
    "layouts.registers": ("Layout",),
    "memory": ("SwizzleTransform", "TilingTransform"),
    "ops.async_store": ("async_store_smem",),
    "ops.atomics": ("atomic_add", "atomic_and", "atomic_max", "atomic_min", "atomic_or", "atomic_xor"),
    "ops.barriers": (
        "barrier_arrive",
        "barrier_arrive_and_wait",
        "barrier_test",
        "barrier_wait",
        "named_barrier_arrive",
        "named_barrier_sync",
    ),
    "ops.copies": (
        "CopyPartition",
        "async_prefetch",
        "commit_smem",
        "commit_smem_to_gmem_group",
        "copy_gmem_to_smem",
        "copy_smem_to_gmem",
        "wait_smem_to_gmem",
    ),
    "ops.debug": ("debug_check", "debug_print", "print_layout"),
    "ops.delay": ("delay",),
    "ops.dot": ("mma",),
    "ops.exp2": ("exp2_fma",),
    "ops.fragments": ("from_fragments", "to_fragments"),
    "ops.grid_dependency": ("griddepcontrol_launch_dependents", "griddepcontrol_wait"),
    "ops.grid": ("dim_size", "num_programs", "program_id"),
    "ops.launch_control": ("TryClusterCancelResult", "query_cluster_cancel", "try_cluster_cancel"),
    "ops.multimem": ("multimem_load_reduce", "multimem_store"),
    "ops.refs": ("load", "store"),
    "ops.registers": ("layout_cast", "set_max_registers"),
    "ops.semaphores": (
        "SemaphoreSignal",
        "semaphore_read",
        "semaphore_fetch_add",
        "semaphore_signal",
        "semaphore_signal_multicast",
        "semaphore_signal_parallel",
        "semaphore_wait",
    ),
    "ops.shapes": ("broadcasted_iota",),
    "layouts.tmem": ("TMEMLayout",),
    "ops.tcgen05": ("tcgen05_commit_arrive", "tcgen05_mma"),
    "frontend.sparse": ("format_tcgen05_sparse_metadata",),
    "ops.tcgen05_copies": (
        "async_copy_scales_to_tmem",
        "async_copy_smem_to_tmem",
        "async_copy_sparse_metadata_to_tmem",
    ),
    "ops.tmem": ("async_load_tmem", "async_store_tmem", "commit_tmem", "wait_load_tmem"),
    "ops.warp_branch": ("when_any_in_warp",),
    "ops.wgmma": ("wgmma", "wgmma_wait"),
    "pallas.backends": ("register_backend",),
    "pallas.call": ("pallas_call",),
    "pallas.pipeline": ("emit_pipeline",),
    "pallas.specialized": ("PipelinePipeline", "emit_pipeline_warp_specialized"),
    "pallas.specs": (
        "ANY",
        "BlockSpec",
        "Blocked",
        "BoundedSlice",
        "Buffered",
        "CostEstimate",
        "Element",
        "GridSpec",
        "Indirect",
        "PrefetchScalarGridSpec",
        "Squeezed",
        "no_block_spec",
        "squeezed",
    ),
    "pallas.triton": ("TritonCompilerParams",),
    "program": ("CompilerParams",),
    "runtime.execute": ("last_report",),
    "simulator.params": ("SimulatorParams", "simulator_params"),
    "tune.lookup": ("explain_config", "override_config"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = sorted([*_MODULE_OF, "pl", "plgpu"])


def __getattr__(name: str) -> Any:
    if name in ("pl", "plgpu"):
        return sys.modules[__name__]
    if name in _MODULE_OF:
        importlib.import_module(f"{__name__}.ops")  # fills the rule tables
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        if _MODULE_OF[name].startswith("ops.") and inspect.isfunction(value):
            value = recoverable(value)
        globals()[name] = value
        if name == "CompilerParams":
            _tell_stock_pallas()
        return value
    if name in ELSEWHERE:
        raise AttributeError(f"{__name__} has no {name}: {ELSEWHERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _tell_stock_pallas() -> None:
    """Stock `pallas_call(..., compiler_params=mosaic_gpu.CompilerParams())` compiles with us, wherever JAX is there to do so."""
    try:
        stock = importlib.import_module(f"{__name__}.pallas.stock")
    except ImportError:  # no JAX
        return
    stock.register()


def __dir__() -> list[str]:
    return [*globals(), *__all__]


if TYPE_CHECKING:
    from .frontend.dynamic import NDLoopInfo as NDLoopInfo
    from .frontend.dynamic import dynamic_scheduling_loop as dynamic_scheduling_loop
    from .frontend.dynamic import nd_loop as nd_loop
    from .frontend.helpers import align_to as align_to
    from .frontend.helpers import dslice as dslice
    from .frontend.helpers import find_swizzle as find_swizzle
    from .frontend.helpers import multiple_of as multiple_of
    from .frontend.helpers import next_power_of_2 as next_power_of_2
    from .frontend.helpers import planar_snake as planar_snake
    from .frontend.helpers import transpose_ref as transpose_ref
    from .frontend.helpers import wgmma_accumulator_load as wgmma_accumulator_load
    from .frontend.helpers import with_scoped as with_scoped
    from .frontend.kernel import kernel as kernel
    from .frontend.loops import WarpMesh as WarpMesh
    from .frontend.loops import cdiv as cdiv
    from .frontend.loops import core_map as core_map
    from .frontend.loops import div as div
    from .frontend.loops import ds as ds
    from .frontend.loops import get_global as get_global
    from .frontend.loops import inline_mgpu as inline_mgpu
    from .frontend.loops import loop as loop
    from .frontend.loops import rem as rem
    from .frontend.loops import run_scoped as run_scoped
    from .frontend.loops import run_state as run_state
    from .frontend.loops import warp_map as warp_map
    from .frontend.loops import when as when
    from .frontend.memory import ACC as ACC
    from .frontend.memory import GMEM as GMEM
    from .frontend.memory import SMEM as SMEM
    from .frontend.memory import TMEM as TMEM
    from .frontend.memory import Barrier as Barrier
    from .frontend.memory import ClusterBarrier as ClusterBarrier
    from .frontend.memory import NamedBarrier as NamedBarrier
    from .frontend.memory import RefUnion as RefUnion
    from .frontend.memory import SemaphoreType as SemaphoreType
    from .frontend.peers import cluster_ref as cluster_ref
    from .frontend.sparse import format_tcgen05_sparse_metadata as format_tcgen05_sparse_metadata
    from .layouts.registers import Layout as Layout
    from .memory import SwizzleTransform as SwizzleTransform
    from .memory import TilingTransform as TilingTransform
    from .ops.async_store import async_store_smem as async_store_smem
    from .ops.atomics import atomic_add as atomic_add
    from .ops.atomics import atomic_and as atomic_and
    from .ops.atomics import atomic_max as atomic_max
    from .ops.atomics import atomic_min as atomic_min
    from .ops.atomics import atomic_or as atomic_or
    from .ops.atomics import atomic_xor as atomic_xor
    from .ops.barriers import barrier_arrive as barrier_arrive
    from .ops.barriers import barrier_arrive_and_wait as barrier_arrive_and_wait
    from .ops.barriers import barrier_test as barrier_test
    from .ops.barriers import barrier_wait as barrier_wait
    from .ops.barriers import named_barrier_arrive as named_barrier_arrive
    from .ops.barriers import named_barrier_sync as named_barrier_sync
    from .ops.copies import CopyPartition as CopyPartition
    from .ops.copies import async_prefetch as async_prefetch
    from .ops.copies import commit_smem as commit_smem
    from .ops.copies import commit_smem_to_gmem_group as commit_smem_to_gmem_group
    from .ops.copies import copy_gmem_to_smem as copy_gmem_to_smem
    from .ops.copies import copy_smem_to_gmem as copy_smem_to_gmem
    from .ops.copies import wait_smem_to_gmem as wait_smem_to_gmem
    from .ops.debug import debug_check as debug_check
    from .ops.debug import debug_print as debug_print
    from .ops.debug import print_layout as print_layout
    from .ops.delay import delay as delay
    from .ops.dot import mma as mma
    from .ops.exp2 import exp2_fma as exp2_fma
    from .ops.fragments import from_fragments as from_fragments
    from .ops.fragments import to_fragments as to_fragments
    from .ops.grid import dim_size as dim_size
    from .ops.grid import num_programs as num_programs
    from .ops.grid import program_id as program_id
    from .ops.grid_dependency import griddepcontrol_launch_dependents as griddepcontrol_launch_dependents
    from .ops.grid_dependency import griddepcontrol_wait as griddepcontrol_wait
    from .ops.launch_control import TryClusterCancelResult as TryClusterCancelResult
    from .ops.launch_control import query_cluster_cancel as query_cluster_cancel
    from .ops.launch_control import try_cluster_cancel as try_cluster_cancel
    from .ops.multimem import multimem_load_reduce as multimem_load_reduce
    from .ops.multimem import multimem_store as multimem_store
    from .ops.refs import load as load
    from .ops.refs import store as store
    from .ops.registers import layout_cast as layout_cast
    from .ops.registers import set_max_registers as set_max_registers
    from .ops.semaphores import SemaphoreSignal as SemaphoreSignal
    from .ops.semaphores import semaphore_fetch_add as semaphore_fetch_add
    from .ops.semaphores import semaphore_read as semaphore_read
    from .ops.semaphores import semaphore_signal as semaphore_signal
    from .ops.semaphores import semaphore_signal_multicast as semaphore_signal_multicast
    from .ops.semaphores import semaphore_signal_parallel as semaphore_signal_parallel
    from .ops.semaphores import semaphore_wait as semaphore_wait
    from .ops.shapes import broadcasted_iota as broadcasted_iota
    from .ops.tcgen05 import tcgen05_commit_arrive as tcgen05_commit_arrive
    from .ops.tcgen05 import tcgen05_mma as tcgen05_mma
    from .ops.tcgen05_copies import async_copy_scales_to_tmem as async_copy_scales_to_tmem
    from .ops.tcgen05_copies import async_copy_smem_to_tmem as async_copy_smem_to_tmem
    from .ops.tcgen05_copies import async_copy_sparse_metadata_to_tmem as async_copy_sparse_metadata_to_tmem
    from .ops.tmem import async_load_tmem as async_load_tmem
    from .ops.tmem import async_store_tmem as async_store_tmem
    from .ops.tmem import commit_tmem as commit_tmem
    from .ops.tmem import wait_load_tmem as wait_load_tmem
    from .ops.warp_branch import when_any_in_warp as when_any_in_warp
    from .ops.wgmma import wgmma as wgmma
    from .ops.wgmma import wgmma_wait as wgmma_wait
    from .pallas.backends import register_backend as register_backend
    from .pallas.call import pallas_call as pallas_call
    from .pallas.pipeline import emit_pipeline as emit_pipeline
    from .pallas.specialized import PipelinePipeline as PipelinePipeline
    from .pallas.specialized import emit_pipeline_warp_specialized as emit_pipeline_warp_specialized
    from .pallas.specs import ANY as ANY
    from .pallas.specs import Blocked as Blocked
    from .pallas.specs import BlockSpec as BlockSpec
    from .pallas.specs import BoundedSlice as BoundedSlice
    from .pallas.specs import Buffered as Buffered
    from .pallas.specs import CostEstimate as CostEstimate
    from .pallas.specs import Element as Element
    from .pallas.specs import GridSpec as GridSpec
    from .pallas.specs import Indirect as Indirect
    from .pallas.specs import PrefetchScalarGridSpec as PrefetchScalarGridSpec
    from .pallas.specs import Squeezed as Squeezed
    from .pallas.specs import no_block_spec as no_block_spec
    from .pallas.specs import squeezed as squeezed
    from .pallas.triton import TritonCompilerParams as TritonCompilerParams
    from .program import CompilerParams as CompilerParams
    from .runtime.execute import last_report as last_report
    from .simulator.params import SimulatorParams as SimulatorParams
    from .simulator.params import simulator_params as simulator_params
    from .tune.lookup import explain_config as explain_config
    from .tune.lookup import override_config as override_config
