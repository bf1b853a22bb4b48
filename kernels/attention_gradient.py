"""The derivative of attention: what the forward kernel leaves for the backward kernels, and what JAX must know of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.ad_checkpoint import checkpoint_name

from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.frontend.shard_map import alike
from mosaic_gpu.kernels import dispatch
from mosaic_gpu.kernels.masks import Causal
from mosaic_gpu.kernels.sm90 import attention as forward
from mosaic_gpu.kernels.sm90 import attention_backward as backward
from mosaic_gpu.kernels.sm90.attention_backward_config import AttentionBackwardConfig
from mosaic_gpu.runtime.device import default_arch

Arrays = tuple[jax.Array, ...]
NO_GRADIENTS = "there are no gradients on Blackwell yet; implementation='xla' has them"
NO_BIAS_GRADIENTS = "there are no gradients with a bias or a mask on Hopper yet; implementation='xla' has them"


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call of attention fixes besides its arrays.

    chosen: the config is no argument, but what dispatch found.  stable: the forward kernel subtracts each row's maximum; the
    backward kernels start from the log-sum-exp, which is the same either way.
    """

    config: forward.AttentionConfig
    backward_config: AttentionBackwardConfig | None
    causal: Causal
    scale: float
    return_lse: bool
    deterministic: bool
    chosen: bool = False
    stable: bool = True


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def without_gradients(call: Callable[..., Arrays], reason: str, *arrays: jax.Array) -> Arrays:
    """call(*arrays), of which a derivative is refused by name."""
    return call(*arrays)


def _refuse_gradients(_: Any, reason: str, *__: Any) -> NoReturn:
    raise UnsupportedCall(f"attention: {reason}")


without_gradients.defvjp(_refuse_gradients, _refuse_gradients)


def attend(call: Call, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None) -> Arrays:
    """(out,) or (out, lse), differentiable in q, k and v unless there is a bias: arrays of four dimensions that the dispatcher
    has checked."""
    if bias is not None:
        return without_gradients(functools.partial(_run, call), NO_BIAS_GRADIENTS, q, k, v, bias)
    try:
        # Made to vary alike before the derivative is taken: what that needs to sum over a mesh, JAX then knows.
        return _attend(call, *alike([q, k, v]))
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise UnsupportedCall(
            "attention has no forward-mode derivative (jvp, jacfwd, linearize of a jvp): its kernels make vector-Jacobian "
            "products; use grad or vjp (or jacrev, once), or implementation='xla'"
        ) from error


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
    return _run(call, q, k, v)


def _run(call: Call, *arrays: jax.Array) -> Arrays:
    config = call.config
    if call.chosen and call.return_lse:  # sums of rounded probabilities are for outputs, which are rounded as well
        config = dataclasses.replace(config, sum_by_product=False)
    options = {"causal": call.causal, "scale": call.scale, "return_lse": call.return_lse, "stable": call.stable}
    return forward.attention(*arrays, config=config, **options)


def _forward(call: Call, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Arrays, Arrays]:
    out, lse = _attend(dataclasses.replace(call, return_lse=True), q, k, v)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse) if call.return_lse else (out,), (q, k, v, out, lse)


def _backward(call: Call, kept: Arrays, cotangents: Arrays) -> Arrays:
    return _gradients(call, *alike([*kept, *cotangents]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(call: Call, *arrays: jax.Array) -> Arrays:
    """arrays: q, k, v, output and LSE, then the cotangents of what the call returned."""
    options = {"causal": call.causal, "scale": call.scale, "deterministic": call.deterministic}
    return gradients(*arrays, backward_config=call.backward_config, **options)


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None = None,
    *,
    causal: Causal,
    scale: float,
    deterministic: bool = False,
    backward_config: AttentionBackwardConfig | None = None,
) -> Arrays:
    """(dQ, dK, dV) by the backward kernels; arrays as `sm90.attention_backward` takes them.  None: the tuned config or the
    default."""
    config = backward_config
    if config is None:
        config = dispatch.choose_config("attention_backward", default_arch(), q, k, v, causal=causal)
    options = {"config": config, "causal": causal, "scale": scale, "deterministic": deterministic}
    return backward.attention_backward(q, k, v, out, lse, d_out, d_lse, **options)


def _second(call: Call, primals: Any, tangents: Any) -> NoReturn:
    raise UnsupportedCall(
        "attention has no second derivative: the kernels that make its gradients have none. For Hessians take "
        "implementation='xla', or stop the gradient (jax.lax.stop_gradient) of the first derivative"
    )


_attend.defvjp(_forward, _backward)
_gradients.defjvp(_second)
