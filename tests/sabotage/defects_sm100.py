"""Sabotages of the Blackwell kernels."""

from __future__ import annotations

from .sabotages import (
    all_of,
    arrive_instead_of_commit,
    barrier,
    delete,
    double,
    guard,
    move,
    param,
    slot,
)
from .tables import DEADLOCK, LEAK, MISUSE, NEVER, OVERRUN, RACE, UNREAD, fine, of

A, B = "copy_gmem_to_smem a_tile", "copy_gmem_to_smem b_tile"
FULL, EMPTY = "barrier_wait full", "barrier_wait empty"
MMA, LOAD, DRAINED, HANDED = "tcgen05_mma", "async_load_tmem", "barrier_wait drained", "barrier_arrive drained"
STORE, SWAP = "copy_smem_to_gmem o_tile", "swap o_tile"

# fmt: off
# ---- sm100_scratch: loads and stores of tensor memory -------------------------------------------------------------------
_ = of("sm100_scratch")
TSTORE = "async_store_tmem*"
_("loaded before the store has ended", "F1", delete("commit_tmem#0"), RACE, "async_load_tmem*", TSTORE)
_("stored before the load has ended", "F6", delete("wait_load_tmem#0"), (*RACE, *LEAK), "async_load_tmem*", TSTORE)
_("the last load is not waited for", "F5", delete("wait_load_tmem#1"), LEAK, "async_load_tmem*")
fine("sm100_scratch", "two waits for a store", "F1: a wait for what is done is nothing", double("commit_tmem#0"))

_ = of("sm100_matmul")
READY, NEXT = "barrier_wait ready", "tcgen05_commit_arrive ready"
_("the result is not waited for", "F4", delete(READY), UNREAD, LOAD, MMA)
_("no fence after the wait for the result", "F4", barrier("ready", orders_tensor_core=False), RACE, LOAD, MMA, READY)
_("no commit", "J", delete(NEXT), NEVER, READY)
_("the commit comes before the products", "F12", move(NEXT, before=f"for({MMA})"), UNREAD, LOAD, MMA, READY)
_("the first step accumulates", "F15", guard(MMA, -1), ("UninitializedRead",), MMA)
_("the slot is released by an arrival, not a commit", "F11", arrive_instead_of_commit, RACE, MMA, A, B)
_("the operands are not waited for", "C15", delete(FULL), UNREAD, MMA)
_("the producer does not wait", "C6", delete(f"when({EMPTY})"), OVERRUN, A, B, MMA)
_("no commit_smem", "B4", delete("commit_smem"), RACE, STORE, SWAP)
_("no wait for the last stores", "D8", delete("wait_smem_to_gmem#1"), LEAK, STORE)
_("the accumulator is not waited for", "F6", delete(f"when({DRAINED})"), (*RACE, *MISUSE), LOAD, MMA, HANDED)
_("no fence around the hand-back", "F6", barrier("drained", orders_tensor_core=False), RACE, LOAD, MMA)
_("handed back before the load", "F6", move(HANDED, before=LOAD), RACE, LOAD, MMA)
_("no wait for the load", "F5", delete("wait_load_tmem"), RACE, LOAD, MMA, HANDED)
_("the product goes to the other accumulator", "F4", slot(MMA, "acc"), (*UNREAD, *MISUSE), LOAD, MMA)
_("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem#0"), RACE, SWAP, STORE)

# ---- sm100_pair: two blocks multiply together ---------------------------------------------------------------------------
_ = of("sm100_pair")
_("the other block's A is not waited for", "F14", param(A, leader=None), (*UNREAD, *MISUSE, *DEADLOCK), MMA, A, FULL)
_("the other block's B is not waited for", "F14", param(B, leader=None), (*UNREAD, *MISUSE, *DEADLOCK), MMA, B, FULL)
_("both halves are tracked by their own blocks", "D13", all_of(param(A, leader=None), param(B, leader=None)), UNREAD,
  MMA, A, B)
_("the operands are not waited for", "F14", delete(FULL), UNREAD, MMA)
_("the other block is not told of the result", "F13", param(NEXT, collective_axes=()), DEADLOCK, READY)
_("the other block's accumulator is not waited for", "F6", barrier("drained", collective_axes=()), (*RACE, *MISUSE), LOAD, MMA,
  HANDED)
_("the result is not waited for", "F4", delete(READY), UNREAD, LOAD, MMA)
_("the producers do not wait", "F13", delete(f"when({EMPTY})"), (*OVERRUN, *DEADLOCK), A, B, MMA)
_("no fence around the hand-back", "F6", barrier("drained", orders_tensor_core=False), RACE, LOAD, MMA)
_("handed back before the load", "F6", move(HANDED, before=LOAD), RACE, LOAD, MMA)
_("one arrival for two blocks", "C8", barrier("drained", num_arrivals=2), DEADLOCK, DRAINED, READY, EMPTY)

# ---- sm100_scaled: factors of block-scaled operands ---------------------------------------------------------------------
_ = of("sm100_scaled")
FACTORS = "async_copy_scales_to_tmem*"
_("factors are not copied", "F8", delete(f"{FACTORS[:-1]} b_factors"), UNREAD, MMA)
_("factors are copied behind the product", "F8", move(MMA, before=f"{FACTORS[:-1]} a_factors"), UNREAD, MMA, FACTORS)
_("factors are overwritten in use", "F2", delete(f"when({EMPTY}#1)"), (*RACE, *MISUSE), FACTORS, MMA)
_("no fence before factors are overwritten", "F2", barrier("empty", orders_tensor_core=False), RACE, FACTORS, MMA)
_("factors are not waited for", "F14", param("copy_gmem_to_smem b_scales", leader=None), (*UNREAD, *MISUSE, *DEADLOCK), FACTORS,
  FULL, "copy_gmem_to_smem b_scales")
_("operands are not waited for", "F14", delete(FULL), UNREAD, MMA, FACTORS)
_("the producers do not wait", "F13", delete(f"when({EMPTY}#0)"), (*OVERRUN, *DEADLOCK), A, B, "copy_gmem_to_smem*", MMA, FACTORS)
_("the first step accumulates", "F15", guard(MMA, -1), ("UninitializedRead",), MMA)
_("the result is not waited for", "F4", delete(READY), UNREAD, LOAD, MMA)

# ---- sm100_sparse: metadata of a sparse A, and a matrix that is copied into the accumulator -------------------------------
_ = of("sm100_sparse")
METADATA, START = "async_copy_sparse_metadata_to_tmem", "async_copy_smem_to_tmem"
_("metadata are not copied", "F8", delete(METADATA), UNREAD, MMA)
_("metadata are copied behind the product", "F8", move(MMA, before=METADATA), UNREAD, MMA, METADATA)
_("metadata are overwritten in use", "F2", delete(f"when({EMPTY}#1)"), (*RACE, *MISUSE), METADATA, MMA)
_("no fence before metadata are overwritten", "F2", barrier("empty", orders_tensor_core=False), RACE, METADATA, MMA)
_("metadata go to the other slot", "F8", slot(METADATA, "metadata"), (*RACE, *UNREAD), METADATA, MMA)
_("metadata are not waited for", "C15", delete(FULL), UNREAD, METADATA, MMA)
_("the producer does not wait", "C6", delete(f"when({EMPTY}#0)"), OVERRUN, A, B, "copy_gmem_to_smem m_tile", METADATA, MMA)
_("the matrix is not copied", "F15", delete(START), UNREAD, MMA)
_("the matrix is copied into the accumulator in use", "F2", move(START, after=f"for({MMA})"), (*RACE, *UNREAD), START, MMA)
_("the matrix is not waited for", "C15", delete("barrier_wait c_full"), (*UNREAD, *LEAK), START)
_("the result is not waited for", "F4", delete("barrier_wait done"), UNREAD, LOAD, MMA, START)

# ---- sm100_attention: scores, probabilities and output in tensor memory -------------------------------------------------
_ = of("sm100_attention")
SCORES, PV = "tcgen05_mma scores*", "tcgen05_mma out*"
TLOADS, TSTORES = "async_load_tmem*", "async_store_tmem*"
ANY = ("barrier_wait*", "barrier_arrive*")
_("P is multiplied before it is stored", "F7", delete("commit_tmem*"), RACE, PV, SCORES, TSTORES, TLOADS)
_("no fence around P", "F7", barrier("p_full", orders_tensor_core=False), RACE, PV, SCORES, TSTORES, TLOADS)
_("P is not waited for", "F7", delete("barrier_wait p_full*"), (*UNREAD, *MISUSE), PV, SCORES, *ANY)
_("scores are not waited for", "F4", delete("barrier_wait s_full"), (*UNREAD, *MISUSE), TLOADS, TSTORES, SCORES, *ANY)
_("no fence after the wait for scores", "F4", barrier("s_full", orders_tensor_core=False), RACE, TLOADS, TSTORES, SCORES)
_("the next scores overwrite P in use", "F3", delete("barrier_wait pv_done#0", "barrier_wait pv_done#1"), (*RACE, *MISUSE),
  SCORES, PV, *ANY)
_("no fence after products", "F3", barrier("pv_done", orders_tensor_core=False), RACE, SCORES, PV, TLOADS, TSTORES)
_("the output is multiplied while it is rescaled", "F6", delete("barrier_wait o_ready*"), (*RACE, *MISUSE), PV, TLOADS, TSTORES,
  *ANY)
_("no fence after the rescaling", "F6", barrier("o_ready", orders_tensor_core=False), RACE, PV, TLOADS, TSTORES)
_("the factor is not waited for", "B2", delete("barrier_wait row_full*"), (*UNREAD, *MISUSE), "load*", "swap row_values*", *ANY)
_("the factor is overwritten unread", "B2", delete("when(barrier_wait row_empty)"), (*RACE, *MISUSE), "load*",
  "swap row_values*", *ANY)
_("K is not waited for", "C15", delete("barrier_wait k_full*"), UNREAD, SCORES)
_("V is not waited for", "C15", delete("barrier_wait v_full*"), UNREAD, PV)
_("Q is not waited for", "C15", delete("barrier_wait q_full*"), UNREAD, SCORES)
_("K is refilled unasked", "C6", delete("when(barrier_wait k_empty)"), OVERRUN, SCORES, "copy_gmem_to_smem k_tile*")
_("V is refilled unasked", "C6", delete("when(barrier_wait v_empty)"), OVERRUN, PV, "copy_gmem_to_smem v_tile*")
_("K is never released", "J", delete("tcgen05_commit_arrive k_empty*"), NEVER, *ANY)
_("no commit_smem", "B4", delete("commit_smem*"), RACE, "copy_smem_to_gmem*", "swap o_tile*")
_("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem*"), (*RACE, *LEAK), "swap o_tile*",
  "copy_smem_to_gmem*")

# ---- sm100_attention_bias: and a bias ---------------------------------------------------------------------------------------
_ = of("sm100_attention_bias")
BIAS = "copy_gmem_to_smem bias_tile*"
_("the bias is not waited for", "C15", delete("barrier_wait b_full*"), (*UNREAD, *MISUSE), BIAS, "load*", *ANY)
_("the bias is refilled unasked", "C6", delete("when(barrier_wait b_empty#0)", "when(barrier_wait b_empty#0)"), OVERRUN, BIAS,
  "load*", *ANY)
_("the bias is never released", "J", delete("barrier_arrive b_empty*"), NEVER, *ANY)
_("the bias goes to the other tile", "C15", slot("copy_gmem_to_smem bias_tile#0", "bias_tile"), (*OVERRUN, *UNREAD), BIAS,
  "load*", *ANY)

# ---- sm100_attention_pair: two blocks, one query tile each, parts of P -----------------------------------------------------
_ = of("sm100_attention_pair")
_("the other block's P is not waited for", "F14", barrier("p_full", collective_axes=()), (*RACE, *UNREAD, *MISUSE), PV, SCORES,
  TSTORES, TLOADS, *ANY)
_("the other block's output is multiplied while it is rescaled", "F14", barrier("o_ready", collective_axes=()),
  (*RACE, *MISUSE), PV, TLOADS, TSTORES, *ANY)
_("the second part of P is not waited for", "F7", delete("barrier_wait p_full#3", "barrier_wait p_full#1"),
  (*RACE, *UNREAD, *MISUSE), PV, SCORES, TSTORES, TLOADS, *ANY)
_("a part is multiplied before it is stored", "F7", delete("commit_tmem*"), RACE, PV, SCORES, TSTORES, TLOADS)
_("the next scores overwrite P in use", "F3", delete("barrier_wait pv_done#1", "barrier_wait pv_done#0"), (*RACE, *MISUSE),
  SCORES, PV, *ANY)
_("the other block is not told that Q is free", "F13", param("tcgen05_commit_arrive q_empty*", collective_axes=()), DEADLOCK,
  *ANY)
_("the other block is not told that K is free", "F13", param("tcgen05_commit_arrive k_empty*", collective_axes=()), DEADLOCK,
  *ANY)
_("the other block's K is not waited for", "F14", param("copy_gmem_to_smem k_tile*", leader=None),
  (*UNREAD, *MISUSE, *DEADLOCK), SCORES, "copy_gmem_to_smem k_tile*", *ANY)
_("V is not waited for", "C15", delete("barrier_wait v_full*"), UNREAD, PV)
_("V is refilled unasked", "C6", delete("when(barrier_wait v_empty)"), (*OVERRUN, *DEADLOCK), PV, "copy_gmem_to_smem v_tile*")
_("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem*"), (*RACE, *LEAK), "swap o_tile*",
  "copy_smem_to_gmem*")

# ---- sm100_handed_out: launch control in a pair of blocks ------------------------------------------------------------------
_ = of("sm100_handed_out")
ASKS, SAYS, TELLS = "try_cluster_cancel", "query_cluster_cancel", "swap place_of"
TOLD = "get place_of"
_("the other block has not read the answer", "G7", barrier("free", collective_axes=()), (*RACE, *MISUSE), ASKS, SAYS, *ANY)
_("the answer is overwritten unread", "G7", delete("when(barrier_wait free)"), (*RACE, *MISUSE), ASKS, SAYS, *ANY)
_("asked for twice at once", "G7", double(ASKS), ("IllegalInstruction",), ASKS)
_("an arrival too many is counted", "C8", barrier("come", num_arrivals=2), DEADLOCK, *ANY)
_("the answer is not waited for", "C15", delete("barrier_wait come"), UNREAD, ASKS, SAYS)
_("said to be read before it is", "G7", move("barrier_arrive free", before=SAYS), RACE, ASKS, SAYS)
_("the place is not waited for", "B2", delete("barrier_wait there"), (*UNREAD, *MISUSE), TELLS, TOLD, *ANY)
_("the place is overwritten unread", "B2", delete("when(barrier_wait read)"), (*RACE, *MISUSE), TELLS, TOLD, *ANY)
_("told before it is written", "B2", move("barrier_arrive there", before=TELLS), (*UNREAD, *MISUSE), TELLS, TOLD, *ANY)

# The attention kernel is under way: here a defect is one of every place where something is done.
# fmt: on
