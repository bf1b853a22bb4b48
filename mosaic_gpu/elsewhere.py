"""Names of `jax.experimental.pallas` and its Mosaic GPU part that are not here, each with what does the same, or why not.

Asking `mosaic_gpu` for one is an AttributeError with that text; a test compares with what the installed JAX has.
"""

from __future__ import annotations

ANOTHER_DEVICE = "memory of other devices is not reached from a kernel; use shard_map and collectives around it"
MULTICAST = "multicast addresses (NVLink SHARP) are not reached from a kernel; use jax.lax.psum around it"
JAXS_OWN = "an internal type of JAX's"
SEMAPHORES = "scratch_types=[SemaphoreType.REGULAR] of kernel(), or get_global(SemaphoreType.REGULAR)"
SIMULATE = "kernel(interpret=plgpu.SimulatorParams(...)), or simulator_params(...) around calls"
ELSEWHERE = {
    "BlockDim": "Blocked, Element, Squeezed, BoundedSlice or Indirect",
    "DeviceIdType": ANOTHER_DEVICE,
    "HOST": "kernels see global memory only: jax.device_put",
    "InterpretGPUParams": SIMULATE,
    "LoweringSemantics": "there is one lowering; leave it out of CompilerParams",
    "MemoryRef": JAXS_OWN,
    "MemorySpace": "GMEM, SMEM, TMEM, ACC or ANY",
    "Mesh": "kernel(grid=, grid_names=, cluster=, num_threads=)",
    "OOBFillMode": "what is outside of an array reads as zeros: jnp.where in the body",
    "PeerMemRef": JAXS_OWN,
    "REGS": "run_scoped(f, ACC(shape)) for accumulators; arrays in registers need no Ref",
    "RefType": "of inline_mgpu, which MLIR alone can have",
    "Replicated": "Layout, or no layout: the compiler finds one",
    "RevisitMode": "of TPUs: an output stays in shared memory as long as its index does",
    "ShapeDtypeStruct": "of inline_mgpu, which MLIR alone can have; for types of results jax.ShapeDtypeStruct",
    "Slice": "ds(start, size)",
    "Tiling": "TilingTransform and SwizzleTransform",
    "TraceScope": "jax.named_scope",
    "Transform": JAXS_OWN,
    "WGMMAAccumulatorRef": "run_scoped(f, ACC(shape))",
    "alloc_semaphore": SEMAPHORES,
    "as_torch_kernel": "`mosaic-gpu bundle` writes cubins with their launch data, which need no JAX; or jax.dlpack around a call",
    "broadcast_to": "jnp.broadcast_to",
    "empty": "jnp.empty",
    "empty_like": "jnp.empty_like",
    "empty_ref_like": "an output of the kernel, or jax.ref.new_ref outside of it",
    "enable_debug_checks": "debug_check is always compiled; leave it out where it costs too much",
    "enable_poison_buffers": "the simulator finds reads of what nobody has written: " + SIMULATE,
    "estimate_cost": "CostEstimate(flops, transcendentals, bytes_accessed)",
    "force_gpu_interpret_mode": SIMULATE,
    "im2col_ref": "a view for each shift, ref.at[...]: TMA's im2col mode is not used",
    "lower_as_mlir": "jax.jit(f).lower(...): kernels are no MLIR",
    "max": "jnp.max",
    "min": "jnp.min",
    "multicast_ref": MULTICAST,
    "pallas_call_p": JAXS_OWN,
    "pallas_export_experimental": "blocks have sizes that are numbers; arrays and grids may have symbols (jax.export)",
    "prod": "jnp.prod",
    "reciprocal": "1 / x",
    "remote_ref": ANOTHER_DEVICE,
    "select_ref": "when(index == i) around each copy, or one Ref with another dimension",
    "semaphore": SEMAPHORES,
    "set_gpu_interpret_mode": SIMULATE,
    "strides_from_shape": "views know their strides",
    "sum": "jnp.sum",
    "transform_ref": "ref.at[...], ref.transpose, or transforms= of the SMEM",
    "wait_gmem_to_smem": "barrier_wait(barrier): a copy has a barrier",
}
