"""Shared memory of the cluster's other blocks (distributed shared memory), as views of one's own Refs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .. import arguments
from .primitives import checked_operand, split_ref


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class PeerTransform:
    """What makes a view one of another block's memory; JAX asks it what becomes of shapes and types: nothing."""

    axes: tuple[str, ...]
    ids: tuple[Any, ...]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return self.ids, self.axes

    @classmethod
    def tree_unflatten(cls, axes: tuple[str, ...], ids: Any) -> PeerTransform:
        return cls(axes, tuple(ids))

    def transform_type(self, x: Any) -> Any:
        return x

    transform_shape = transform_dtype = transform_sharding = transform_type


def check_index(where: str, name: str, i: Any) -> None:
    """`i` must be the index of a block."""
    kind = jax.numpy.result_type(i) if isinstance(i, (int, np.generic)) or hasattr(i, "dtype") else None
    if kind is None or np.shape(i) or not np.issubdtype(kind, np.integer):
        arguments.refuse(where, name, i, "a whole number or an int32 scalar")


def cluster_ref(ref: Any, block_id: Mapping[str, Any]) -> Any:
    """The same shared memory in another block of the cluster, to be loaded from and stored to (PTX ISA: shared::cluster).

    ref: a Ref or view in shared memory.  block_id: for axes of the cluster, by name, the index of the other block along it (a
    number or an int32 scalar); along axes that are left out it is this block's.  The view can be indexed further; copies and
    products take this block's memory only.  Order: `barrier_arrive` on a `ClusterBarrier` hands over what was
    stored or loaded; what TMA or the tensor core of the other block is to read needs `commit_smem()` before it.
    Raises TypeError for other memories and indices that are no whole numbers, UnsupportedCall for axes that the cluster lacks.
    """
    arguments.memory("cluster_ref", "ref", checked_operand("cluster_ref", "ref", False, ref), "smem")
    if not isinstance(block_id, Mapping) or not block_id or not all(isinstance(n, str) for n in block_id):
        arguments.refuse("cluster_ref", "block_id", block_id, "a dict from names of the cluster's axes to indices")
    for name, i in block_id.items():
        check_index("cluster_ref", f"block_id[{name!r}]", i)
    base, transforms = split_ref(ref)
    return type(base.at[...])(base, (*transforms, PeerTransform(tuple(block_id), tuple(block_id.values()))))
