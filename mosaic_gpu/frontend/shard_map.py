"""Kernels under `jax.shard_map(..., check_vma=True)`, where the type of an array says along which mesh axes it varies.

A result varies along every axis along which some input does.  The body of a kernel knows nothing of the mesh: what it reads
is this device's part, and its own axes (grid, cluster, warpgroups) are none of the mesh's.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

T = TypeVar("T")


def inside_shard_map() -> bool:
    """Whether the code that runs is being mapped."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def world() -> dict[str, int]:
    """The axes of the mesh that a shard_map around maps over, with their sizes; empty without one."""
    return (
        {str(name): int(size) for name, size in jax.sharding.get_abstract_mesh().shape.items()}
        if inside_shard_map()
        else {}
    )


def varying(aval: Any) -> frozenset[Any]:
    """The mesh axes along which a value varies; empty where JAX does not keep account of that."""
    return frozenset(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each made to vary along all axes along which one of them does, as JAX's own operations do."""
    types = [varying(jax.typeof(x)) for x in arrays]
    union = frozenset[Any]().union(*types)
    missing = [tuple(sorted(union - t, key=str)) for t in types]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


def result_types(outs: Sequence[jax.core.ShapedArray], inputs: Sequence[Any]) -> list[jax.core.ShapedArray]:
    """The types of a kernel's results for inputs that `alike` has seen."""
    like = next((a for a in inputs if varying(a)), None)
    if like is None:
        return list(outs)
    return [
        jax.core.ShapedArray(
            o.shape,
            o.dtype,
            sharding=NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(o.shape))),
            manual_axis_type=like.manual_axis_type,
        )
        for o in outs
    ]


def traced_outside(trace: Callable[[], T]) -> T:
    """`trace()` as if there were no shard_map around it.

    JAX keeps that state by thread and has no public way to leave it, so a thread of its own traces; whether x64 is on, the
    one setting that decides types, goes with it.
    """
    if not inside_shard_map():
        return trace()
    x64, context = jax.dtypes.canonicalize_dtype(np.int64) == np.int64, contextvars.copy_context()

    def run() -> T:
        with jax.enable_x64(x64):
            return context.run(trace)

    with concurrent.futures.ThreadPoolExecutor(1, "mosaic_gpu trace") as thread:
        return thread.submit(run).result()
