"""The names under which JAX 0.11.2's two GPU backends register lowering rules, and what each of them is here.

Most are operations of the same name, or are taken apart by the front end (`INLINED`).  The rest are names of JAX's inside for
what a user writes otherwise: they count where the public construct that leads to them works (`CONSTRUCTS`);
tests/ops/test_jax_rules.py runs each of them.
"""

from __future__ import annotations

MOSAIC = """
    _copysign abs add and async_copy_scales_to_tmem async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem
    async_load async_prefetch async_store_smem async_store_tmem atan2 axis_index barrier_arrive barrier_test
    barrier_wait bitcast_convert_type broadcast_in_dim check clamp clz commit_group commit_smem commit_tmem
    concatenate cond convert_element_type copy_gmem_to_smem copy_smem_to_gmem cos debug_print delay div eq erf
    eval_jaxpr exp exp2 ge get get_global griddepcontrol_launch_dependents griddepcontrol_wait gt inline_mgpu_p
    integer_pow iota jit layout_cast le load log log2 logistic lt max mgpu_atomic_store min mma mpmd_map mul
    multimem_load_reduce multimem_store multiple_of ne neg not one_minus_square optimization_barrier or print_layout
    program_id query_cluster_cancel reduce_max reduce_min reduce_prod reduce_sum relayout rem reshape reshard round
    rsqrt run_scoped run_state scan select_n semaphore_read semaphore_signal semaphore_signal_multicast
    semaphore_signal_parallel semaphore_wait set_max_registers_p shift_left shift_right_arithmetic
    shift_right_logical sign sin slice sqrt square squeeze sub swap tanh tcgen05_commit_arrive tcgen05_mma
    try_cluster_cancel wait_gmem_to_smem wait_load_tmem wait_smem_to_gmem wgmma wgmma_accumulator_deref_p
    wgmma_accumulator_store_p wgmma_wait while xor
""".split()
TRITON = """
    abs acos acosh add add_any addupdate and argmax argmin asin asinh atan atan2 atanh axis_index
    bitcast_convert_type broadcast_in_dim broadcast_to cbrt ceil clamp clz concatenate cond convert_element_type cos
    cosh cumsum custom_jvp_call debug_print div dot_general eq erf_inv eval_jaxpr exp exp2 expm1 floor ge get gt
    integer_pow iota is_finite jit le log log1p log2 logistic lt masked_load masked_swap max min mul multiple_of ne
    neg nextafter not num_programs one_minus_square or population_count pow program_id reduce_max reduce_min
    reduce_sum rem remat2 reshape reshard rsqrt scan select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh split sqrt square squeeze stack stop_gradient sub swap tan tanh transpose unstack while xor
""".split()

# Primitives that the front end takes apart: nothing of them is left for the tables.
INLINED = """
    add_any addupdate call_hi_primitive checkpoint closed_call core_call custom_jvp_call custom_vjp_call eval_jaxpr jit
    multiple_of optimization_barrier pjit platform_index pvary random_bits random_fold_in random_seed random_split remat
    remat2 reshard scan stop_gradient
""".split()

# name of JAX's: (what a user writes, the operation here that it becomes)
CONSTRUCTS = {
    "async_load": ("async_load_tmem(ref)", "async_load_tmem"),
    "barrier_arrive_and_wait": ("barrier_arrive_and_wait(barrier)", "barrier_wait"),
    "broadcast_to": ("jnp.broadcast_to(x, shape)", "broadcast_in_dim"),
    "check": ("debug_check(condition, message)", "debug_check"),
    "core_map": ("core_map(WarpMesh(axis_name=...))", "warp_map"),
    "get_global": ("get_global(SemaphoreType.REGULAR)", "semaphore_signal"),
    "jaxpr_call": ("core_map(WarpMesh(axis_name=...))", "warp_map"),
    "masked_swap": ("store(ref, x, mask=m)", "masked_store"),
    "mgpu_atomic_store": ("atomic_add(ref, x) and the like", "atomic_store"),
    "mma": ("mma(acc, a, b)", "dot_general"),
    "mpmd_map": ("core_map(WarpMesh(axis_name=...))", "warp_map"),
    "relayout": ("layout_cast(x, layout)", "layout_cast"),
    "run_state": ("run_scoped(f, ACC(...)) with acc[...] = x first", "swap"),
    "semaphore_signal_multicast": ("semaphore_signal_multicast(s, collective_axes=...)", "semaphore_signal"),
    "semaphore_signal_parallel": ("semaphore_signal_parallel(*signals)", "semaphore_signal"),
    "set_max_registers_p": ("set_max_registers(n, action=...)", "set_max_registers"),
    "store": ("store(ref, x)", "swap"),
    "wait_gmem_to_smem": ("barrier_wait(barrier) of the copy's barrier", "barrier_wait"),
    "wgmma_accumulator_deref": ("acc[...]", "get"),
    "wgmma_accumulator_deref_p": ("acc[...]", "get"),
    "wgmma_accumulator_store": ("acc[...] = x", "swap"),
    "wgmma_accumulator_store_p": ("acc[...] = x", "swap"),
    "wgmma_ref": ("wgmma(acc, a, b)", "wgmma"),
}

# Refused, by a function of that name that says why and what to write.
REFUSED = {
    "inline_mgpu": "inline_mgpu: MLIR has no place here",
    "inline_mgpu_p": "inline_mgpu: MLIR has no place here",
}


def covered(name: str) -> bool:
    """Whether a name of JAX's is an operation here, is taken apart before, or stands for a public construct that works."""
    from .registry import OPS

    return name in OPS or name in INLINED or name in CONSTRUCTS


def union() -> dict[str, list[str]]:
    """The names of both backends, each once, by what becomes of them."""
    from .registry import OPS

    out: dict[str, list[str]] = {
        k: [] for k in ("same name", "taken apart", "by a public construct", "refused by name", "missing")
    }
    for name in sorted({*MOSAIC, *TRITON}):
        kinds = (
            ("same name", OPS),
            ("taken apart", INLINED),
            ("by a public construct", CONSTRUCTS),
            ("refused by name", REFUSED),
        )
        out[next((kind for kind, names in kinds if name in names), "missing")].append(name)
    return out


def there(found: dict[str, list[str]]) -> tuple[int, int]:
    """(how many of the names work, how many there are).  What is only refused does not count."""
    works = sum(len(found[k]) for k in ("same name", "taken apart", "by a public construct"))
    return works, sum(map(len, found.values()))


def markdown() -> str:
    """The generated part of docs/ops.md about these names."""
    found = union()
    works, total = there(found)
    counted = ", ".join(f"{len(names)} {kind}" for kind, names in found.items() if names)
    out = [f"**{works} of {total}** names of rules of JAX 0.11.2's two GPU backends work here: {counted}.", ""]
    out += ["| name of JAX's | what leads to it here | operation |", "|---|---|---|"]
    out += [f"| `{n}` | `{CONSTRUCTS[n][0]}` | `{CONSTRUCTS[n][1]}` |" for n in found["by a public construct"]]
    out += [f"| `{n}` | refused: {REFUSED[n]} | – |" for n in found["refused by name"]]
    out += [f"| `{n}` | not there | – |" for n in found["missing"]]
    taken = " ".join(f"`{n}`" for n in found["taken apart"])
    return "\n".join([*out, "", f"Taken apart by the front end: {taken}."])
