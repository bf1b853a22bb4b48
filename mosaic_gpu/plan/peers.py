"""Which roles exchange ordinary accesses with the other blocks of their cluster; what a kernel may do with a peer's memory.

Arrivals and waits order a thread's accesses within its block only, unless they ask for the cluster's scope (PTX ISA
9.7.13.15.13).  Without it a load from shared memory may still be under way when the other block, told that the slot is
free, refills it: on an H200 one run in 70 of a kernel that reads so went wrong.  TMA and MMAs bring an order of their own,
and the cluster's scope waits for every access of the thread, so it is asked for only where something needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import OutOfBounds, UnsupportedCall
from ..program import SHAPE_ONLY, Equation, Program, View, refs_of, walk

ASYNCHRONOUS = frozenset(
    {
        "copy_gmem_to_smem",
        "copy_smem_to_gmem",
        "wgmma",
        "tcgen05_mma",
        "async_copy_scales_to_tmem",
        "async_prefetch",
        "async_copy_sparse_metadata_to_tmem",
        "async_copy_smem_to_tmem",
        "try_cluster_cancel",
    }
)
OF_PEERS = ("get", "swap", "load", "async_store_smem")  # what reaches another block's shared memory


STORES = ("swap", "put_indexed", "masked_store", "atomic_store", "multimem_store")  # that threads make themselves


def met_by_peers(program: Program, bodies: Iterable[Sequence[Equation]]) -> frozenset[int]:
    """Ids of the refs in which blocks of a cluster meet: filled by multicast or by answers of launch control, or both written
    and read in global memory, an aliased input being its output."""
    outputs = program.inputs[len(program.inputs) - program.num_outputs :]
    aliased = {program.inputs[i].id: outputs[o].id for i, o in program.aliases}
    filled: set[int] = set()
    read: set[int] = set()
    written: set[int] = set()
    for body in bodies:
        for e in walk(tuple(body)):
            if e.op == SHAPE_ONLY:
                continue
            for k, view in enumerate(refs_of(e)):
                if view.space.kind == "gmem":
                    stored = e.op in STORES or (e.op == "copy_smem_to_gmem" and k == 1)
                    (written if stored else read).add(aliased.get(view.ref.id, view.ref.id))
                    if e.op == "atomic_store":
                        read.add(aliased.get(view.ref.id, view.ref.id))
                elif e.op == "copy_gmem_to_smem" and k == 1 and e.param("collective_axes"):
                    filled.add(view.ref.id)
                elif e.op == "try_cluster_cancel" and k == 0:
                    filled.add(view.ref.id)
    met = filled | (read & written)
    return frozenset(met | {i for i, o in aliased.items() if o in met})


def reaches_peers(bodies: Iterable[Sequence[Equation]]) -> bool:
    """Whether a kernel loads from or stores to the shared memory of other blocks.

    All arrivals and waits on the cluster's barriers then have its scope: a role that only passes the word on, or whose
    products read what a peer has stored, must not lose the order.
    """
    return any(view.peer for body in bodies for e in walk(tuple(body)) for view in refs_of(e))


def filled_by_peers(bodies: Iterable[Sequence[Equation]]) -> frozenset[int]:
    """Ids of the barriers that count what other blocks store: waits take over what was written in the cluster's scope."""
    found = (e.operands[2] for body in bodies for e in walk(tuple(body)) if e.op == "async_store_smem")
    return frozenset(x.ref.id for x in found if isinstance(x, View))


def check_peer(program: Program, e: Equation, view: View) -> None:
    """Raise where an operation cannot take a view of another block's shared memory."""
    if e.op not in OF_PEERS:
        raise UnsupportedCall(
            f"{e.op} of {view}, which is another block's shared memory: only loads (ref[...], load) and stores (ref[...] = x) "
            "reach it; let that block do it, after a barrier",
            e.line,
        )
    what = e.op if e.op == "async_store_smem" else "cluster_ref"
    for name, index in view.peer:
        if name not in program.cluster_names:
            raise UnsupportedCall(f"{what}: the cluster has axes {program.cluster_names}, not {name}", e.line)
        size = program.cluster[program.cluster_names.index(name)]
        if index.static and not 0 <= index.const < size:
            raise OutOfBounds(f"{what}: block {index} along {name}, which has {size}", e.line)


def accesses(equations: Sequence[Equation], refs: frozenset[int], in_warps: bool = True) -> bool:
    """Whether a role's own threads load from or store to one of `refs`; in_warps: also those that one warp of it only runs."""
    for e in equations:
        if e.op not in ASYNCHRONOUS and any(view.ref.id in refs for view in refs_of(e)):
            return True
        inside = e.regions if in_warps or e.op != "warp_map" else ()
        if any(accesses(r.equations, refs, in_warps) for r in inside):
            return True
    return False
