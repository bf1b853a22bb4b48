"""One error for every call of a jitted function whose kernel the simulator finds fault with.

From its second call on a jitted function goes a way through C++ on which every error becomes a ValueError, unless it has effects.
So an operation that does nothing, and has the effect of `jax.debug.callback`, stands beside a kernel that is simulated.  Of the
kernel itself it would be an effect that keeps `jax.checkpoint` from running it again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import mlir

from ..runtime import device
from . import shard_map


@functools.cache
def _effects() -> frozenset[Any]:
    traced = shard_map.traced_outside(lambda: jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))())
    return frozenset(traced.effects)


may_fail_p = jex.Primitive("mosaic_gpu_may_fail")
may_fail_p.multiple_results = True
may_fail_p.def_impl(lambda: [])
may_fail_p.def_effectful_abstract_eval(lambda: ([], _effects()))
mlir.register_lowering(may_fail_p, lambda ctx: [])


def one_for_all_calls(simulated: bool) -> None:
    """To be called beside a kernel; simulated: whatever GPUs there are."""
    if simulated or not device.gpu_devices():
        may_fail_p.bind()
