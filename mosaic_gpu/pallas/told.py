"""What XLA is told of a `pallas_call`: its estimated cost and the user's metadata, as attributes of its instruction in HLO.

XLA's own cost analysis counts custom calls of a GPU as unknown and takes nobody's word for them; tools that read HLO, such as a
profiler or a roofline, find the attributes (`frontend_attributes`) in the optimized module.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from .. import arguments
from .mapping import WHERE
from .specs import CostEstimate

if TYPE_CHECKING:
    from .call import Call


def cost_of(x: Any) -> CostEstimate | None:
    """The argument `cost_estimate`, ours or JAX's.  TypeError for anything else."""
    if x is None:
        return None
    if not all(hasattr(x, n) for n in ("flops", "transcendentals", "bytes_accessed")):
        arguments.refuse(WHERE, "cost_estimate", x, "CostEstimate(flops=, transcendentals=, bytes_accessed=)")
    cost = CostEstimate(x.flops, x.transcendentals, x.bytes_accessed, getattr(x, "remote_bytes_transferred", 0))
    for name, value in _fields(cost).items():
        if isinstance(value, bool) or not (isinstance(value, numbers.Real) or jax.export.is_symbolic_dim(value)):
            arguments.refuse(WHERE, f"cost_estimate.{name}", value, "a number")
    return cost


def metadata_of(x: Any) -> str | None:
    """The argument `metadata`, a dictionary, as JSON.  TypeError for anything else."""
    if x is None:
        return None
    try:
        if isinstance(x, Mapping):
            return json.dumps(dict(x), sort_keys=True)
    except (TypeError, ValueError):  # something in it that JSON cannot say
        pass
    return arguments.refuse(WHERE, "metadata", x, "a dictionary of what JSON can say")


def attributes(call: Call) -> dict[str, str]:
    """By the names that they have in HLO: cost_flops and so on, and kernel_metadata, as JAX calls it elsewhere."""
    told = {} if call.cost is None else {f"cost_{name}": str(value) for name, value in _fields(call.cost).items()}
    return told | ({} if call.metadata is None else {"kernel_metadata": call.metadata})


def _fields(cost: CostEstimate) -> dict[str, Any]:
    return {f.name: getattr(cost, f.name) for f in dataclasses.fields(cost)}
