"""The text of a race: both accesses with their lines and roles, where they meet, and what would order them."""

from __future__ import annotations

from ..errors import Race
from .shadow import ASYNC, GENERIC, TENSOR, Access

PROXIES = {
    GENERIC: "ordinary (generic proxy)",
    ASYNC: "asynchronous",
    TENSOR: "in tensor memory",
}


def race(before: Access, after: Access, why: str, place: str) -> Race:
    """The error for two accesses; why: what `unordered` or the shadow of global memory said."""
    kind = _kind(before, after, why)
    between = _between(before, after, why)
    remedy = _remedy(before, after, why)
    verb_before = "writes" if before.write else "reads"
    verb_after = "writes" if after.write else "reads"
    reason = {
        "order": "nothing orders the two",
        "fence": "the write is not fenced for the asynchronous proxy, so old bytes may be seen",
        "tmem": "the two are synchronised, but no tcgen05 fence carries that over to tensor memory",
        "grid": "blocks of different clusters are ordered by semaphores only, and none does here",
        "global fence": "no operation fences global memory for the asynchronous proxy",
    }[why]
    message = (
        f"{kind}: {after.op} {verb_after} {place}, which {before.op} {verb_before}: {reason}.\n"
        f"  earlier: {before.op} at {before.line}, {PROXIES[before.proxy]}, by {before.who}\n"
        f"  later:   {after.op} at {after.line}, {PROXIES[after.proxy]}, by {after.who}\n"
        f"  to order them: {remedy}"
    )
    return Race(
        message,
        after.line,
        kind,
        between=between,
        other_line=before.line,
        who=after.who,
        other=before.who,
        place=place,
        remedy=remedy,
    )


def _kind(before: Access, after: Access, why: str) -> str:
    if why == "fence":
        return "missing commit_smem"
    if why == "tmem":
        return "missing tcgen05 fence"
    if after.write and not before.write and before.proxy != GENERIC:
        return "buffer in flight"
    return "write/write" if before.write and after.write else "read/write"


def _between(before: Access, after: Access, why: str) -> str:
    if why == "grid":
        return "grid"
    if before.warpgroup == after.warpgroup:
        return "warpgroup"
    same_block = isinstance(before.warpgroup, tuple) and isinstance(after.warpgroup, tuple)
    if same_block and before.warpgroup[:1] != after.warpgroup[:1]:  # type: ignore[index]
        return "cluster"
    return "roles"


def _remedy(before: Access, after: Access, why: str) -> str:
    """What to write, and where."""
    own = before.warpgroup == after.warpgroup
    if why == "grid":
        return (
            "let each block write a part of its own, make the blocks a cluster, or let a block semaphore_signal after its "
            "access and the other semaphore_wait for it"
        )
    if why == "global fence":
        return "write it with copy_smem_to_gmem, or read it with load"
    if why == "fence" and before.cleared_by:
        return f"commit_smem() by whoever waits ({before.cleared_by}), before {after.who} goes on"
    if why == "fence":
        when = "between the two" if own else f"after the write and before it releases the buffer to {after.who}"
        return f"commit_smem() by {before.who} {when}"
    if why == "tmem":
        return "Barrier(orders_tensor_core=True), so that arrivals and waits carry the fences"
    ends = before.cleared_by
    if before.moves_tmem and not after.moves_tmem and after.proxy == TENSOR:
        # Each thread has waited for its own lanes; the one that issues products speaks for none of the others.
        barrier = "Barrier(orders_tensor_core=True)"
        if own:
            return f"{ends} by {before.who}, then its arrival and its wait on a {barrier}, before one of its threads issues"
        return f"{ends} by {before.who}, then its arrival on a {barrier} for which {after.who} waits"
    if not ends:
        if own:
            return (
                "commit_smem(), or a barrier on which all warps of the warpgroup arrive and wait, between the two: its "
                "threads access each other's elements"
            )
        return f"a barrier: {before.who} arrives after its access, {after.who} waits before its own"
    waits = ends.startswith("barrier_wait")
    of_block = ends.removeprefix("barrier_wait(").removesuffix(")").partition(" of ")[2]
    if waits and of_block and not after.who.startswith(of_block):  # nobody waits on a peer's barrier
        return (
            f"{ends} by {of_block}, then its arrival on a ClusterBarrier (collective_axes: those that the blocks differ in), for "
            f"which {after.who} waits before it; on a Barrier each block hears of its own only"
        )
    if waits or before.who == after.who:
        return f"{ends} by {after.who} before it"
    if own:  # a warp of a `warp_map`, and another one or the warpgroup
        return (
            f"{ends} by {before.who}, then a meeting with {after.who}: behind the warp_map commit_smem(), in it a barrier on "
            "which the one arrives and for which the other waits (warps do not meet at the end of a warp_map)"
        )
    return f"{ends} by {before.who}, then its arrival on a barrier for which {after.who} waits"
