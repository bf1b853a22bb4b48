"""One kernel for each way in which what blocks share is refused: another one's shared memory, semaphores, atomic updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import mosaic_gpu as plgpu

from .cases import BAR, BF, I8, PAIR, case, load, o, smem, x


# ---- other blocks' shared memory ---------------------------------------------------------------------------------------------
def at_peer(tile: Any, index: Any = 0, axis: str = "c") -> Any:
    return plgpu.cluster_ref(tile, {axis: index})


def peer_of_peer(s: Any) -> None:
    at_peer(at_peer(s), 1)[0] = jnp.float32(1)


def store_to_peer(**where: Any) -> Callable[..., Any]:
    def body(s: Any) -> None:
        at_peer(s, **where)[0] = jnp.float32(1)

    return body


case("a copy to another block", load(to=at_peer), x(64, 32), scratch=[smem(64, 32), BAR], **PAIR)
case("an axis that the cluster lacks", store_to_peer(axis="d"), scratch=[smem(4)], **PAIR)
case("a block outside of the cluster", store_to_peer(index=2), scratch=[smem(4)], **PAIR)
case("a peer's peer", peer_of_peer, scratch=[smem(4)], **PAIR)


# ---- asynchronous stores to other blocks --------------------------------------------------------------------------------------
def send(index: Any = 0, axis: str = "c", **layout: Any) -> Callable[..., Any]:
    def body(a: Any, s: Any, b: Any) -> None:
        plgpu.async_store_smem(plgpu.load(a, **layout), s, b, cluster_idx=index, cluster_dim=axis)

    return body


SENT = [smem(64, 32), BAR]
case("sent along an axis that the cluster lacks", send(axis="d"), x(64, 32), scratch=SENT, **PAIR)
case("sent to a block outside of the cluster", send(2), x(64, 32), scratch=SENT, **PAIR)
case(
    "sent to a ClusterBarrier", send(), x(64, 32), scratch=[SENT[0], plgpu.ClusterBarrier(collective_axes="c")], **PAIR
)
case("sent to several barriers", send(), x(64, 32), scratch=[SENT[0], plgpu.Barrier(num_barriers=2)], **PAIR)
case("bytes sent", send(), x(64, 32, dtype=I8), scratch=[smem(64, 32, dtype=I8), BAR], **PAIR)
case(
    "single elements sent",
    send(layout=plgpu.Layout.WG_STRIDED),
    x(64, 32, dtype=BF),
    scratch=[smem(64, 32, dtype=BF), BAR],
    **PAIR,
)


# ---- semaphores, masks, atomic updates, prefetches ---------------------------------------------------------------------------
SEMAPHORE = plgpu.SemaphoreType.REGULAR


def _scoped_semaphore(c):
    plgpu.run_scoped(plgpu.semaphore_signal, SEMAPHORE)


def _masked_peer(c, s):
    c[...] = plgpu.load(at_peer(s), mask=True)


def _masked_scalar(c):
    plgpu.store(c.at[0], 1.0, mask=True)


def _atomic_by_warp(c):
    plgpu.warp_map(lambda w: plgpu.atomic_add(c, 1.0))


case("a semaphore of a scope", _scoped_semaphore, out=o(4))
case(
    "a semaphore of another device", lambda c, s: plgpu.semaphore_signal(s, device_id=1), out=o(4), scratch=[SEMAPHORE]
)
case("a wait for several semaphores", lambda c, s: plgpu.semaphore_wait(s), out=o(4), scratch=[SEMAPHORE((2,))])
case("a semaphore read as a buffer", lambda c, s: c.__setitem__(0, s[...] * 1.0), out=o(4), scratch=[SEMAPHORE])
case("a mask on a peer's memory", _masked_peer, out=o(4), scratch=[smem(4)], **PAIR)
case("a mask for a scalar", _masked_scalar, out=o(4))
case("an atomic maximum of floats", lambda c: plgpu.atomic_max(c, 1.0), out=o(4))
case("an atomic update of an array by a warp", _atomic_by_warp, out=o(4))
case(
    "a prefetch along an axis that is not there",
    lambda a, c: plgpu.async_prefetch(a, collective_axes="c"),
    x(8, 8),
    out=o(4),
)
case("code in MLIR", lambda c: plgpu.inline_mgpu(), out=o(4))


# ---- several devices at once --------------------------------------------------------------------------------------------------
def reduced(ref: Any, kind: str = "add") -> Any:
    return plgpu.multimem_load_reduce(ref, collective_axes="d", reduction_op=kind)


def to_all(source: Any, ref: Any) -> None:
    plgpu.multimem_store(source, ref, "d")


case("bytes of all devices", lambda a, c: to_all(reduced(a), c), x(256, dtype=I8), out=o(256, dtype=I8))
case("the maximum of float32 over devices", lambda a, c: to_all(reduced(a, "max"), c), x(256), out=o(256))
case("one float16 of all devices", lambda a, c: to_all(a[0], c.at[0]), x(2, dtype=BF), out=o(2, dtype=BF))
case(
    "stored to all devices and to one",
    lambda a, c: (to_all(a[...], c), c.__setitem__(..., a[...]))[0],
    x(256),
    out=o(256),
)
case("stored to all devices and read", lambda a, c: (to_all(a[...], c), to_all(reduced(c), c))[0], x(256), out=o(256))
case(
    "stored to all devices and copied",
    lambda a, c, s, b: (to_all(0.0, c), plgpu.copy_gmem_to_smem(c, s, b))[0],
    x(256),
    out=o(256),
    scratch=[smem(256), BAR],
)
case("an input stored to all devices", lambda a, c: to_all(1.0, a), x(256), out=o(256))
case(
    "single halves to all devices",
    lambda a, c: to_all(plgpu.load(a, layout=plgpu.Layout.WG_STRIDED), c),
    x(64, 64, dtype=BF),
    out=o(64, 64, dtype=BF),
)
case(
    "an alias stored to all devices and read",
    lambda a, c: to_all(a[...], c),
    x(256),
    out=o(256),
    input_output_aliases={0: 0},
)
