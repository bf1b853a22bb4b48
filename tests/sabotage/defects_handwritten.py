"""Sabotages of the kernels that were written for this, of both generations."""

from __future__ import annotations

from mosaic_gpu.program import Equation

from .rewrite import Editor
from .sabotages import (
    accumulate_by_count,
    all_of,
    always_accumulate,
    arrive_instead_of_commit,
    barrier,
    copy,
    delete,
    double,
    first_slot,
    guard,
    loop,
    move,
    param,
    restart_guard,
    restart_ring,
    retarget,
    slot,
    unguard,
    variant,
)
from .tables import DEADLOCK, GROWS, LEAK, MISUSE, NEVER, OVERRUN, RACE, UNREAD, fine, of


def _commit_after_write(x: Editor) -> None:
    write = x.get(TILE)
    x.put(x.find(TILE), write, Equation("commit_smem", (), (), (), (), write.line))


# fmt: off
# ---- pipeline: one warpgroup, TMA both ways -------------------------------------------------------------------------
_ = of("pipeline")
IN0, IN1, REFILL = (f"copy_gmem_to_smem in_tile#{i}" for i in range(3))
OUT, WRITE = "copy_smem_to_gmem out_tile", "swap out_tile"
_("the tile is not waited for", "C15", delete("barrier_wait full"), UNREAD, "load")
_("the tile is read before the wait", "C15", move("load", before="barrier_wait full"), UNREAD, "load")
_("the wait is for the other slot", "C15", slot("barrier_wait full", "full"), UNREAD, "load", IN0, IN1, REFILL)
_("the read is of the other slot", "C15", slot("load", "in_tile"), UNREAD, "load", IN0, IN1, REFILL)
_("the copy signals the other slot", "C15", slot(REFILL, "full"), (*UNREAD, *DEADLOCK, *MISUSE), "load", REFILL,
  "barrier_wait full")
_("the copy fills the other slot", "C15", slot(REFILL, "in_tile"), RACE, "load", REFILL, IN1)
_("the tile is refilled before it is read", "D7", move(f"when({REFILL})", before="load"), RACE, "load", REFILL)
_("no wait before the output tile is reused", "D7", delete("wait_smem_to_gmem#0"), RACE, WRITE, OUT)
_("the wait leaves one store too many", "D1", param("wait_smem_to_gmem#0", n=2), RACE, WRITE, OUT)
_("the wait comes after the reuse", "D7", move("wait_smem_to_gmem#0", after=WRITE), RACE, WRITE, OUT)
_("no wait for the last stores", "D8", delete("wait_smem_to_gmem#1"), LEAK, OUT)
_("the wait leaves the last store", "D8", param("wait_smem_to_gmem#1", n=1), LEAK, OUT)
_("no commit_smem", "B4", delete("commit_smem"), RACE, OUT, WRITE)
_("commit_smem before the writes", "B4", move("commit_smem", before=WRITE), RACE, OUT, WRITE)
_("commit_smem after the store", "B4", move("commit_smem", after=OUT), RACE, OUT, WRITE)
_("the store reads the other slot", "D7", slot(OUT, "out_tile"), UNREAD, OUT, WRITE)
_("the write goes to the other slot", "D7", slot(WRITE, "out_tile"), UNREAD, OUT, WRITE)
_("stores without a group", "D6", param(OUT, commit_group=False), (*RACE, *LEAK), WRITE, OUT)
_("one arrival too many expected", "C8", barrier("full", num_arrivals=2), DEADLOCK, "barrier_wait full")
_("one copy too many", "C8", double(IN0), MISUSE, IN0)
_("a copy that nobody waits for", "D8", guard(f"when({REFILL})", 1), (*LEAK, "OutOfBounds"), REFILL)
_("the last refill is missing", "J", guard(f"when({REFILL})", -1), DEADLOCK, "barrier_wait full")
_("a copy of the start is missing", "J", delete(IN1), DEADLOCK, "barrier_wait full")
_("the wait is done twice", "C7", double("barrier_wait full"), DEADLOCK, "barrier_wait full")
_("the tile is written again right after its store's issue", "B1", copy(WRITE, after=OUT), RACE, WRITE, OUT)
fine("pipeline", "two waits for the stores", "D1: a wait for what is done is nothing", double("wait_smem_to_gmem#0"))
fine("pipeline", "two commit_smem", "B3: a fence more", double("commit_smem"))
fine("pipeline", "the last wait reads only", "D8: the kernel's end waits for the writes", param("wait_smem_to_gmem#1",
  wait_read_only=True))
fine("pipeline", "stores fully waited for", "D4: more than reading", param("wait_smem_to_gmem#0", wait_read_only=False))
fine("pipeline", "no store in flight", "D1: stricter", param("wait_smem_to_gmem#0", n=0))

# ---- cluster: multicast ---------------------------------------------------------------------------------------------
_ = of("cluster")
A, B = "copy_gmem_to_smem a_tile", "copy_gmem_to_smem b_tile"
FULL, EMPTY = "barrier_wait full", "barrier_wait empty"
RELEASE = "barrier_arrive empty"
_("a slot is refilled when the own block has released it", "D12", barrier("empty", collective_axes=()), OVERRUN, A, B, "wgmma")
_("the slot is not waited for", "C15", delete(FULL), UNREAD, "wgmma")
_("the product starts before the wait", "C15", move("wgmma", before=FULL), UNREAD, "wgmma", A, B)
_("the producer does not wait", "C6", delete(f"when({EMPTY})"), OVERRUN, A, B, "wgmma")
_("the first refill does not wait", "C6", guard(f"when({EMPTY})", 1), OVERRUN, A, B, "wgmma", EMPTY)
_("the producer waits for the first lap, too", "C4", guard(f"when({EMPTY})", -1), DEADLOCK, EMPTY, FULL)
_("the slot is never released", "J", delete(RELEASE), NEVER, EMPTY, FULL)
_("the slot is released by one arrival of two", "C8", barrier("empty", num_arrivals=2), DEADLOCK, EMPTY, FULL)
_("two copies, one arrival", "C11", barrier("full", num_arrivals=1), MISUSE, A, B)
_("two copies, three arrivals", "C11", barrier("full", num_arrivals=3), DEADLOCK, FULL, EMPTY)
_("released before the product has ended", "E4", move(RELEASE, before="wgmma_wait"), RACE, A, B, "wgmma")
_("released before the product starts", "C18", move(RELEASE, before="wgmma"), RACE, A, B, "wgmma")
_("the wait leaves the product in flight", "E4", param("wgmma_wait", n=1), RACE, A, B, "wgmma")
_("no wait for the product", "E4", delete("wgmma_wait"), GROWS, f"for({FULL})")
_("the producer waits for the other slot", "C6", slot(EMPTY, "empty"), MISUSE, EMPTY, RELEASE)
_("the other slot is released", "C6", slot(RELEASE, "empty"), MISUSE, EMPTY, RELEASE)
_("the product reads the other slot of B", "C15", slot("wgmma", "b_tile"), UNREAD, "wgmma", B)
_("a step is not consumed", "D8", loop(f"for({FULL})", upper=-1), LEAK, A, B)
_("a step is not produced", "J", loop(f"for({EMPTY})", upper=-1), DEADLOCK, FULL)
_("the producer waits for a slot that it fills itself", "J", retarget(EMPTY, "empty", "full"), (*DEADLOCK, *OVERRUN), A, B,
  FULL, EMPTY, "wgmma")
fine("cluster", "each block loads all of B", "D12 does not apply without multicast", param(B, collective_axes=()))
fine("cluster", "B before A", "C9: copies of one phase in any order", move(B, before=A))
fine("cluster", "the slot is released a little later", "C8", move(RELEASE, after="wgmma_wait"))

# ---- exchange: stores into the other block's shared memory, loads from it --------------------------------------------
_ = of("exchange")
FILL, TAKE, FULL, EMPTY = "swap tile", "copy_smem_to_gmem tile", "barrier_wait full", "barrier_wait empty"
WRITE, READ, READY, DONE = "swap row", "load#2", "barrier_wait ready", "barrier_wait read"
_("no commit_smem before the other block's TMA reads", "B4", delete("commit_smem"), RACE, FILL, TAKE)
_("commit_smem before the stores", "B4", move("commit_smem", before=FILL), RACE, FILL, TAKE)
_("told of before it is stored", "B2", move("barrier_arrive full", before=FILL), UNREAD, FILL, TAKE)
_("the other block's tile is not waited for", "B2", delete(FULL), UNREAD, FILL, TAKE)
_("only the own block is told", "J", barrier("full", collective_axes=()), (*UNREAD, *OVERRUN), FILL, TAKE)
_("a slot of the other block is refilled unasked", "C6", delete(f"when({EMPTY})"), OVERRUN, FILL, TAKE, "barrier_arrive full")
_("a slot is released while its store reads it", "D7", move("barrier_arrive empty", before="wait_smem_to_gmem"), RACE, FILL, TAKE)
_("the own block's word for a slot of the other", "C8", barrier("empty", collective_axes=()), RACE, FILL, TAKE)
_("the other slot is filled", "B2", slot(FILL, "tile"), UNREAD, FILL, TAKE)
_("the row is not waited for", "B2", delete(READY), UNREAD, WRITE, READ)
_("the row is overwritten unasked", "B2", delete(f"when({DONE})"), OVERRUN, WRITE, READ, "barrier_arrive ready")
_("the row is given back before it is read", "B2", move("barrier_arrive read", before=READ), RACE, WRITE, READ)
_("the row is told of before it is there", "B2", move("barrier_arrive ready", before=WRITE), UNREAD, WRITE, READ)
_("the own block's word for the other's row", "B2", barrier("ready", collective_axes=()), UNREAD, WRITE, READ)
_("nobody gives the row back", "J", delete("barrier_arrive read"), NEVER, DONE, READY, FULL, EMPTY)
fine("exchange", "slots are given back a little later", "C6", move("barrier_arrive empty", after="wait_smem_to_gmem"))
fine("exchange", "two commit_smem", "B3: a fence more", double("commit_smem"))

# ---- sent: asynchronous stores into the other block's shared memory --------------------------------------------------
_ = of("sent")
SEND = "async_store_smem tile"
_("what comes is not waited for", "C15", delete(FULL), UNREAD, SEND, TAKE)
_("a slot is filled unasked", "C6", delete(f"when({EMPTY})"), OVERRUN, SEND, TAKE)
_("no commit_smem before TMA reads", "B4", delete("commit_smem"), RACE, SEND, TAKE)
_("commit_smem before the wait", "B4", move("commit_smem", before=FULL), RACE, SEND, TAKE)
_("a slot is released while its store reads it", "D7", move("barrier_arrive empty", before="wait_smem_to_gmem"), RACE, SEND, TAKE)
_("the own block's word for a slot of the other", "C8", barrier("empty", collective_axes=()), (*RACE, *OVERRUN), SEND, TAKE)
_("the other slot is filled", "C15", slot(SEND, "tile"), UNREAD, SEND, TAKE)
_("the other slot's barrier counts", "C15", slot(SEND, "full"), (*MISUSE, *DEADLOCK, *UNREAD), SEND, TAKE, FULL, EMPTY)
_("one arrival too few", "C8", barrier("full", num_arrivals=2), DEADLOCK, FULL, EMPTY)
_("nobody gives a slot back", "J", delete("barrier_arrive empty"), NEVER, FULL, EMPTY)

# ---- persistent: the ring goes on from tile to tile -----------------------------------------------------------------
_ = of("persistent")
LAST_RELEASE, STORE, SWAP = "barrier_arrive empty#1", "copy_smem_to_gmem o_tile", "swap o_tile"
_("the consumer's ring starts anew with every tile", "C5", restart_ring(FULL), (*UNREAD, *MISUSE, *DEADLOCK), "wgmma", A, B,
  FULL, EMPTY)
_("the producer's guard starts anew with every tile", "C6", restart_guard(EMPTY), OVERRUN, A, B, "wgmma", EMPTY)
_("one product too many in flight", "E4", param("wgmma_wait#0", n=2), RACE, A, B, "wgmma")
_("no wait in the loop", "E4", delete("wgmma_wait#0"), GROWS, f"for({FULL})")
_("a tile's last slot is released in flight", "E4", delete("wgmma_wait#1"), RACE, A, B, "wgmma")
_("a tile's last slot is released before its wait", "E4", move(LAST_RELEASE, before="wgmma_wait#1"), RACE, A, B, "wgmma")
_("a tile's last slot is not released", "J", delete(LAST_RELEASE), DEADLOCK, EMPTY, FULL)
_("the slot of this step is released, not of the last", "E4", slot("barrier_arrive empty#0", "empty"), (*OVERRUN,
  *DEADLOCK), A, B, "wgmma", EMPTY, FULL, "barrier_arrive empty#0")
_("a slot is released that was not read", "E4", unguard("when(barrier_arrive empty#0)"), (*OVERRUN, *DEADLOCK), A, B,
  "wgmma", EMPTY, "barrier_arrive empty#0")
_("the first release is missing", "J", guard("when(barrier_arrive empty#0)", 1), DEADLOCK, EMPTY, FULL)
_("the slot is not waited for", "C15", delete(FULL), UNREAD, "wgmma")
_("the wait comes after the product", "C15", move(FULL, after="wgmma"), UNREAD, "wgmma", A, B)
_("the wait is done twice", "C7", double(FULL), DEADLOCK, FULL, EMPTY)
_("the producer does not wait", "C6", delete(f"when({EMPTY})"), OVERRUN, A, B, "wgmma")
_("the producer waits for the first lap, too", "C4", unguard(f"when({EMPTY})"), DEADLOCK, EMPTY, FULL)
_("B signals the wrong barrier", "C15", retarget(B, "full", "empty"), (*OVERRUN, *DEADLOCK), A, B, FULL, EMPTY, "wgmma",
  "barrier_arrive empty#0", LAST_RELEASE)
_("B is always filled into the first slot", "C15", first_slot([B], "b_tile"), UNREAD, B, "wgmma")
_("B has one slot for both", "D7", first_slot([B, "wgmma"], "b_tile"), RACE, B, "wgmma")
_("A is read from the other slot", "C15", slot("wgmma", "a_tile"), UNREAD, A, "wgmma")
_("two copies, one arrival", "C11", barrier("full", num_arrivals=1), MISUSE, A, B)
_("a release counts half", "C8", barrier("empty", num_arrivals=2), DEADLOCK, EMPTY, FULL)
_("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem#0"), RACE, SWAP, STORE)
_("the wait leaves the store in flight", "D1", param("wait_smem_to_gmem#0", n=1), RACE, SWAP, STORE)
_("the wait comes after the reuse", "D7", move("wait_smem_to_gmem#0", after=SWAP), RACE, SWAP, STORE)
_("no commit_smem", "B4", delete("commit_smem"), RACE, STORE, SWAP)
_("commit_smem before the writes", "B4", move("commit_smem", before=SWAP), RACE, STORE, SWAP)
_("no wait for the last store", "D8", delete("wait_smem_to_gmem#1"), LEAK, STORE)
_("stores without a group", "D6", param(STORE, commit_group=False), (*RACE, *LEAK), STORE, SWAP)
_("the consumer takes a tile too many", "J", loop(f"for(for({FULL}))", upper=1), DEADLOCK, FULL)
_("the consumer leaves out a tile", "D8", loop(f"for(for({FULL}))", upper=-1), (*LEAK, *DEADLOCK), A, B, EMPTY)
fine("persistent", "no product in flight", "E4: stricter", param("wgmma_wait#0", n=0))
fine("persistent", "a wait more before the release", "E4: stricter", copy("wgmma_wait#1", before=LAST_RELEASE))
fine("persistent", "stores fully waited for", "D4: more than reading", param("wait_smem_to_gmem#0", wait_read_only=False))
fine("persistent", "the wait before the tile is computed", "D7: earlier", move("wait_smem_to_gmem#0", before="run_scoped"))

# ---- handoff: named barriers ----------------------------------------------------------------------------------------
_ = of("handoff")
READY, FREE = "named_barrier_sync ready", "named_barrier_sync free"
TELL_READY, TELL_FREE, READ, TILE = "named_barrier_arrive ready", "named_barrier_arrive free", "load#1", "swap tile"
_("the reader does not wait", "G1", delete(READY), (*UNREAD, *MISUSE), READ, TILE, TELL_READY, TELL_FREE)
_("the writer does not wait", "G1", delete(f"when({FREE})"), OVERRUN, TILE, READ, TELL_READY, TELL_FREE)
_("the writer does not tell", "J", delete(TELL_READY), DEADLOCK, READY, FREE)
_("the reader does not tell", "J", delete(f"when({TELL_FREE})"), DEADLOCK, READY, FREE)
_("told before the write", "G1", move(TELL_READY, before=TILE), UNREAD, TILE, READ)
_("told before the read", "G1", move(f"when({TELL_FREE})", before=READ), RACE, TILE, READ)
_("read before the wait", "G1", move(READ, before=READY), UNREAD, TILE, READ)
_("written before the wait", "G1", move(TILE, before=f"when({FREE})"), RACE, TILE, READ)
_("one barrier both ways", "G1", all_of(retarget(FREE, "free", "ready"), retarget(TELL_FREE, "free", "ready")), (*OVERRUN,
  *DEADLOCK, *UNREAD), TILE, READ, TELL_READY, TELL_FREE, READY, FREE)
_("told twice", "G2", double(TELL_READY), MISUSE, TELL_READY)
_("a barrier for three in a block of two", "G1", barrier("ready", num_arrivals=3), ("IllegalInstruction", "Deadlock"),
  READY, TELL_READY)
_("a barrier for one", "G1", barrier("ready", num_arrivals=1), (*UNREAD, *MISUSE), TILE, READ, READY, TELL_READY, TELL_FREE)
_("the other barrier for one", "G1", barrier("free", num_arrivals=1), OVERRUN, TILE, READ, FREE, TELL_FREE, TELL_READY)
_("the writer waits at the first step, too", "J", unguard(f"when({FREE})"), DEADLOCK, READY, FREE)
_("the writer does not wait at the second step", "G1", guard(f"when({FREE})", 1), OVERRUN, TILE, READ, TELL_READY, TELL_FREE)
_("a step more is read than written", "J", loop(f"for({READY})", upper=1), (*DEADLOCK, "OutOfBounds"), READY)
fine("handoff", "the last tile is handed back", "G2: an arrival that nobody waits for", unguard(f"when({TELL_FREE})"))
fine("handoff", "the writer commits", "B3: a fence more", _commit_after_write)

# ---- staged: operands written by ordinary stores --------------------------------------------------------------------
_ = of("staged")
B_WRITE, TOLD = "swap b_tile", "barrier_arrive full"
_("no commit_smem", "E5", delete("commit_smem"), RACE, "wgmma", B_WRITE)
_("commit_smem before the writes", "B4", move("commit_smem", before=B_WRITE), RACE, "wgmma", B_WRITE)
_("commit_smem after the arrival", "B4", move("commit_smem", after=TOLD), RACE, "wgmma", B_WRITE)
_("commit_smem by the reader", "B4", move("commit_smem", before="wgmma"), RACE, "wgmma", B_WRITE)
_("told before the write", "C15", move(TOLD, before=B_WRITE), UNREAD, "wgmma", B_WRITE)
_("the writer does not wait", "C6", delete(f"when({EMPTY})"), OVERRUN, "wgmma", B_WRITE, TOLD, FULL)
_("written before the wait", "E4", move(B_WRITE, before=f"when({EMPTY})"), RACE, "wgmma", B_WRITE)
_("the reader does not wait", "C15", delete(FULL), UNREAD, "wgmma", B_WRITE)
_("the wait comes after the product", "C15", move(FULL, after="wgmma"), UNREAD, "wgmma", B_WRITE)
_("the wait leaves the product in flight", "E4", param("wgmma_wait", n=1), RACE, "wgmma", B_WRITE, "load#1")  # A is in registers
_("released right after the product's issue", "C18", move(RELEASE, before="wgmma_wait"), RACE, "wgmma", B_WRITE)
_("a signal counts half", "C8", barrier("full", num_arrivals=2), DEADLOCK, FULL, EMPTY)
_("told twice", "C8", double(TOLD), (*OVERRUN, *DEADLOCK), TOLD, FULL, EMPTY, "wgmma")
_("released twice", "C8", double(RELEASE), (*OVERRUN, *DEADLOCK), RELEASE, FULL, EMPTY, "wgmma", B_WRITE)
_("the writer writes the other slot", "C15", slot(B_WRITE, "b_tile"), UNREAD, "wgmma", B_WRITE)
_("the reader reads the other slot", "C15", slot("wgmma", "b_tile"), UNREAD, "wgmma", B_WRITE)
_("the writer tells of the other slot", "C15", slot(TOLD, "full"), (*MISUSE, *DEADLOCK), FULL, EMPTY, TOLD)
_("the writer waits for the other slot", "C6", slot(EMPTY, "empty"), MISUSE, EMPTY, RELEASE)
_("the guard leaves out a wait", "C6", guard(f"when({EMPTY})", 1), OVERRUN, "wgmma", B_WRITE, EMPTY, FULL, TOLD)
fine("staged", "a commit more in the reader", "B3: a fence more", copy("commit_smem", before="wgmma"))
fine("staged", "an operand more is written", "nobody reads it", loop(f"for({EMPTY})", upper=1))

# ---- through_memory: global memory between two warpgroups -----------------------------------------------------------
_ = of("through_memory")
T_STORE, T_LOAD, Y_WAIT, T_FREE = "copy_smem_to_gmem t", "load t", "barrier_wait ready", "barrier_wait free"
_("told when the tile has been read, not written", "D4", param("wait_smem_to_gmem", wait_read_only=True), RACE, T_STORE, T_LOAD)
_("told while the store is in flight", "D4", move("wait_smem_to_gmem", after="barrier_arrive ready"), UNREAD, T_STORE, T_LOAD)
_("the reader does not wait", "D4", delete(Y_WAIT), UNREAD, T_STORE, T_LOAD)
_("the reader waits too late", "D4", move(Y_WAIT, after=T_LOAD), UNREAD, T_STORE, T_LOAD)
_("the writer does not tell", "J", delete("barrier_arrive ready"), NEVER, Y_WAIT, T_FREE)
_("the writer runs ahead", "C6", delete(f"when({T_FREE})"), MISUSE, "barrier_arrive ready", Y_WAIT)
_("no commit_smem", "B4", delete("commit_smem"), RACE, T_STORE, "swap out_tile")
_("what ordinary stores wrote is copied", "D10", variant(writer="store", reader="copy"), RACE)
fine("through_memory", "stores and loads", "C15: the barrier orders generic accesses", variant(writer="store", reader="load"))
fine("through_memory", "copied both ways", "D4: the wait is for the writes", variant(writer="copy", reader="copy"))
fine("through_memory", "handed back before it is read", "t is not written twice", move("barrier_arrive free", before=T_LOAD))

# ---- relay: warps on their own ---------------------------------------------------------------------------------------
_ = of("relay")
COPY, LOADED, TOLD_READY, TILE_FREE = "copy_gmem_to_smem tile", "barrier_wait full", "barrier_wait ready", "barrier_wait free"
_("only one warp has waited for the copy", "C19", delete("barrier_arrive ready", TOLD_READY), UNREAD, "load", COPY)
_("the warp tells before the copy has landed", "C19", move("barrier_arrive ready", before=LOADED), UNREAD, "load", COPY)
_("the warp does not wait for the copy", "C15", delete(LOADED), (*UNREAD, *LEAK), "load", COPY)
_("the copying warp does not wait for the others", "C19", delete(f"when({TILE_FREE})"), OVERRUN, COPY, "load")
_("the tile is handed back before it is read", "D7", move("when(barrier_arrive free)", before="load"), RACE, COPY, "load")
_("the warp does not tell", "J", delete("barrier_arrive ready"), NEVER, TOLD_READY)
_("never handed back", "J", delete("when(barrier_arrive free)"), NEVER, TILE_FREE, LOADED, TOLD_READY)
_("one arrival too many expected", "C8", barrier("ready", num_arrivals=2), DEADLOCK, TOLD_READY, TILE_FREE)
_("the first step waits, too", "C4", unguard(f"when({TILE_FREE})"), DEADLOCK, TILE_FREE, LOADED, TOLD_READY)

# ---- sm100_tiles: tensor memory serves one tile after the other -----------------------------------------------------
_ = of("sm100_tiles")
MMA, LOAD, DONE, DRAINED = "tcgen05_mma", "async_load_tmem", "barrier_wait done", "barrier_wait drained"
COMMIT, HANDED = "tcgen05_commit_arrive done", "barrier_arrive drained"
_("the slot is released by an arrival, not a commit", "F11", arrive_instead_of_commit, RACE, MMA, A, B)
_("the commit comes before the products", "F12", move(COMMIT, before=f"for({MMA})"), UNREAD, LOAD, MMA, DONE)
_("no commit", "J", delete(COMMIT), NEVER, DONE, DRAINED, EMPTY)
_("the result is not waited for", "F4", delete(DONE), UNREAD, LOAD, MMA)
_("the wait comes after the load", "F4", move(DONE, after=LOAD), UNREAD, LOAD, MMA)
_("no fence after the wait for the result", "F4", barrier("done", orders_tensor_core=False), RACE, LOAD, MMA, DONE)
_("no fence around the hand-back", "F6", barrier("drained", orders_tensor_core=False), RACE, LOAD, MMA, DRAINED, HANDED)
_("no wait for the load", "F5", delete("wait_load_tmem"), RACE, LOAD, MMA, HANDED)
_("handed back before the load's wait", "F6", move("wait_load_tmem", after=HANDED), RACE, LOAD, MMA, HANDED)
_("handed back before the load", "F6", move(HANDED, before=LOAD), RACE, LOAD, MMA)
_("the accumulator is not waited for", "F6", delete(f"when({DRAINED})"), RACE, LOAD, MMA)
_("the second tile does not wait", "F6", guard(f"when({DRAINED})", 1), (*RACE, *MISUSE, *DEADLOCK), LOAD, MMA, DRAINED)
_("the first tile waits, too", "C4", unguard(f"when({DRAINED})"), DEADLOCK, DRAINED, DONE, EMPTY)
_("never handed back", "J", delete(HANDED), NEVER, DRAINED, DONE, EMPTY)
_("the first step accumulates", "F15", always_accumulate, ("UninitializedRead",), MMA)
_("only the first tile starts from zero", "F15", accumulate_by_count, ("wrong",))
_("the operands are not waited for", "C15", delete(FULL), UNREAD, MMA)
_("the wait comes after the product", "C15", move(FULL, after=MMA), UNREAD, MMA)
_("the producer does not wait", "C6", delete(f"when({EMPTY})"), OVERRUN, A, B, MMA)
_("the first refill does not wait", "C6", guard(f"when({EMPTY})", 1), OVERRUN, A, B, MMA, EMPTY)
_("the producer waits for the other slot", "C6", slot(EMPTY, "empty"), MISUSE, EMPTY, MMA)
_("the product releases the other slot", "C6", slot(MMA, "empty"), MISUSE, EMPTY, MMA)
_("the product reads the other slot", "C15", slot(MMA, "a_tile"), UNREAD, A, MMA)
_("the commit counts half", "F13", barrier("done", num_arrivals=2), DEADLOCK, DONE, DRAINED, EMPTY)
_("two copies, one arrival", "C11", barrier("full", num_arrivals=1), MISUSE, A, B)
_("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem#0"), RACE, SWAP, STORE)
_("no commit_smem", "B4", delete("commit_smem"), RACE, STORE, SWAP)
_("no wait for the last store", "D8", delete("wait_smem_to_gmem#1"), LEAK, STORE)
fine("sm100_tiles", "handed back after the store", "F6: later", move(HANDED, after=STORE))

# ---- sm100_staged: operands written by ordinary stores ------------------------------------------------------------------
_ = of("sm100_staged")
A_WRITE, TURN = "swap a_tile", "named_barrier_sync turn"
_("no commit_smem", "F10", delete("commit_smem"), RACE, MMA, A_WRITE, B_WRITE)
_("commit_smem before the writes", "F10", move("commit_smem", before=A_WRITE), RACE, MMA, A_WRITE, B_WRITE)
_("commit_smem between the writes", "F10", move("commit_smem", before=B_WRITE), RACE, MMA, B_WRITE)
_("commit_smem after the arrival", "F10", move("commit_smem", after="barrier_arrive full"), RACE, MMA, A_WRITE, B_WRITE)
_("a named barrier hands the accumulator back", "F9", variant(handback="named"), RACE)
_("no fence around the hand-back", "F9", barrier("drained", orders_tensor_core=False), RACE, LOAD, MMA)
_("handed back before the load's wait", "F6", move("wait_load_tmem", after="when(barrier_arrive drained)"), RACE, LOAD, MMA)
_("the accumulator is not waited for", "F6", delete(f"when({DRAINED})"), (*RACE, *MISUSE), LOAD, MMA, "barrier_arrive drained")
_("the operands are not waited for", "C15", delete(FULL), (*UNREAD, *MISUSE), MMA, A_WRITE, B_WRITE, "barrier_arrive full")
_("the writer does not wait", "F11", delete(f"when({EMPTY})"), (*OVERRUN, *DEADLOCK), MMA, A_WRITE, B_WRITE, FULL,
  "barrier_arrive full")
_("the result is not waited for", "F4", delete(DONE), UNREAD, LOAD, MMA)
_("never handed back", "J", delete("when(barrier_arrive drained)"), NEVER, DRAINED, DONE, EMPTY, FULL)
fine("sm100_staged", "a commit more in the reader", "B3: a fence more", copy("commit_smem", after="barrier_arrive full"))
# fmt: on
