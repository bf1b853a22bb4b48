"""Sabotages of the Hopper kernels."""

from __future__ import annotations

from .sabotages import (
    advance,
    all_of,
    barrier,
    delete,
    double,
    guard,
    loop,
    move,
    one_more_in_flight,
    param,
    retarget,
    slot,
    unguard,
)
from .tables import DEADLOCK, GROWS, LEAK, MISUSE, NEVER, OVERRUN, RACE, UNREAD, fine, of

A, B = "copy_gmem_to_smem a_tile", "copy_gmem_to_smem b_tile"
FULL, EMPTY, RELEASE = "barrier_wait full", "barrier_wait empty", "barrier_arrive empty"
STORE, SWAP = "copy_smem_to_gmem o_tile", "swap o_tile"

# fmt: off
# ---- the project's kernels ------------------------------------------------------------------------------------------
_ = of("sm90_matmul")
_("the slot is not waited for", "C15", delete(FULL), UNREAD, "wgmma")
_("the producer does not wait", "C6", delete(f"when({EMPTY})"), OVERRUN, A, B, "wgmma")
_("the first refill does not wait", "C6", guard(f"when({EMPTY})", 1), OVERRUN, A, B, "wgmma", EMPTY)
_("the producer waits for the first lap, too", "C4", guard(f"when({EMPTY})", -1), DEADLOCK, EMPTY, FULL)
_("one product too many in flight", "E4", param("wgmma_wait", n=2), RACE, A, B, "wgmma")
_("no wait for the product", "E4", delete("wgmma_wait"), GROWS, f"for({FULL})")
_("the slot of this step is released", "E4", all_of(unguard(f"when({RELEASE})"), slot(RELEASE, "empty")), RACE, A, B, "wgmma")
_("a slot is released that was not read", "E4", unguard(f"when({RELEASE})"), ("OutOfBounds",), RELEASE)
_("released before the wait", "E4", move(f"when({RELEASE})", before="wgmma_wait"), RACE, A, B, "wgmma")
_("never released", "J", delete(f"when({RELEASE})"), DEADLOCK, EMPTY, FULL)
_("one consumer's release is enough", "C8", barrier("empty", num_arrivals=1), OVERRUN, A, B, "wgmma", RELEASE, EMPTY)
_("three consumers expected", "C8", barrier("empty", num_arrivals=3), DEADLOCK, EMPTY, FULL)
_("two copies, one arrival", "C11", barrier("full", num_arrivals=1), MISUSE, A, B)
_("the product reads the next slot", "C15", slot("wgmma", "b_tile"), UNREAD, B, "wgmma")
_("the output tile is another's", "bounds", lambda x: x.shift_start(SWAP, "o_tile", 0, 2), ("OutOfBounds",), SWAP)
_("no commit_smem", "B4", delete("commit_smem"), RACE, STORE, SWAP)
_("no wait for the last stores", "D8", delete("wait_smem_to_gmem#2"), LEAK, STORE, f"{STORE}#1")
_("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem#0"), RACE, SWAP, STORE)
_("the wait leaves both stores in flight", "D1", param("wait_smem_to_gmem#1", n=2), RACE, f"{SWAP}#1", f"{STORE}#1")
_("a tile's last slot is released in flight", "E4", delete("wgmma_wait#1"), RACE, A, B, "wgmma")
_("a tile's last slot is not released", "J", delete(f"{RELEASE}#1"), DEADLOCK, EMPTY, FULL)
_("the budgets exceed the pool", "G8", param("set_max_registers#1", registers=240), ("RegisterBudgetError",),
  "set_max_registers#1")
_("the producer makes a step less", "J", loop(f"for({EMPTY})", upper=-1), DEADLOCK, FULL)
_("the consumers make a step less", "D8", loop(f"for({FULL})", upper=-1), (*LEAK, *DEADLOCK, *MISUSE), A, B, FULL, EMPTY,
  RELEASE, f"{RELEASE}#1")
fine("sm90_matmul", "no product in flight", "E4: stricter", param("wgmma_wait", n=0))

_ = of("sm90_matmul_pair")
_("a slot is refilled when the own block has released it", "D12", barrier("empty", collective_axes=()), (*OVERRUN, *DEADLOCK),
  A, B, "wgmma", RELEASE, EMPTY)
_("one consumer's release in each block is enough", "C8", barrier("empty", num_arrivals=1), OVERRUN, A, B, "wgmma", RELEASE,
  f"{RELEASE}#1", EMPTY)
_("the producer does not wait", "C6", delete(f"when({EMPTY})"), OVERRUN, A, B, "wgmma")
_("one product too many in flight", "E4", param("wgmma_wait", n=2), RACE, A, B, "wgmma")
_("a tile's last slot is released in flight", "E4", delete("wgmma_wait#1"), RACE, A, B, "wgmma")
_("a tile's last slot is not released", "J", delete(f"{RELEASE}#1"), DEADLOCK, EMPTY, FULL)
_("the slot is not waited for", "C15", delete(FULL), UNREAD, "wgmma", A, B)
_("the producer waits for the other slot", "C6", slot(EMPTY, "empty"), (*MISUSE, *DEADLOCK), EMPTY, FULL, RELEASE, f"{RELEASE}#1")
_("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem#0"), RACE, SWAP, STORE)
_("no commit_smem", "B4", delete("commit_smem"), RACE, STORE, SWAP)
_("no wait for the last stores", "D8", delete("wait_smem_to_gmem#2"), LEAK, STORE, f"{STORE}#1")
fine("sm90_matmul_pair", "each block loads all of B", "D12 does not apply without multicast", param(B, collective_axes=()))
fine("sm90_matmul_pair", "no product in flight", "E4: stricter", param("wgmma_wait", n=0))

for _kernel in ("attention", "attention_causal", "attention_registers"):
    _ = of(_kernel)
    Q, K, V = (f"copy_gmem_to_smem {x}_tile*" for x in "qkv")
    QREAD = "load*" if _kernel == "attention_registers" else "wgmma q_tile*"
    QK, PV = "wgmma k_tile*", "wgmma v_tile*"
    STUCK = (*(f"barrier_wait {x}_{y}*" for x in "qkv" for y in ("full", "empty")), "named_barrier_sync turns*")
    OWRITE, OSTORE = "swap o_tile*", "copy_smem_to_gmem o_tile*"
    TOLD_K, TOLD_V, PASS = "barrier_arrive k_empty", "barrier_arrive v_empty", "named_barrier_arrive turns"
    _("Q is not waited for", "C15", delete("barrier_wait q_full*"), UNREAD, QREAD, Q)
    _("K is not waited for", "C15", delete("barrier_wait k_full*"), UNREAD, QK, K)
    _("V is not waited for", "C15", delete("barrier_wait v_full*"), UNREAD, PV, V)
    _("K is refilled unasked", "C6", delete("when(barrier_wait k_empty#1)"), OVERRUN, QK, K)
    if _kernel == "attention_registers":
        fine(_kernel, "V is refilled unasked", "E4: with two blocks to a tile, Q or the K that is refilled before V is released "
          "behind V's product", delete("when(barrier_wait v_empty)"))
    else:
        _("V is refilled unasked", "C6", delete("when(barrier_wait v_empty)"), OVERRUN, PV, V)
    _("Q is refilled unasked", "C6", delete("when(barrier_wait q_empty)"), OVERRUN, QREAD, Q)
    _("K's wait leaves out a refill", "C6", guard("when(barrier_wait k_empty#1)", 1), OVERRUN, QK, K, *STUCK)
    _("the first lap waits, too", "C4", unguard("when(barrier_wait k_empty)"), DEADLOCK, *STUCK)
    _("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem"), RACE, OWRITE, OSTORE)
    _("no wait for the last stores", "D8", delete("wait_smem_to_gmem#-1"), LEAK, OSTORE)
    _("no waits for products", "E4", delete("wgmma_wait*"), ("Race", "InFlightError"), K, V, QK, PV)
    _("waits leave one product too many", "E4", one_more_in_flight, RACE, K, V, QK, PV)
    _("V is released before its product has ended", "E4", advance(TOLD_V, "wgmma_wait"), RACE, V, PV)
    _("K is released before the scores start", "E4", advance(TOLD_K, "wgmma"), (*RACE, *MISUSE), K, QK)
    _("K is never released", "J", delete(f"{TOLD_K}*"), NEVER, *STUCK)
    _("V is never released", "J", delete(f"{TOLD_V}*"), NEVER, *STUCK)
    _("Q is never released", "J", delete("barrier_arrive q_empty*"), NEVER, *STUCK)
    _("one release of K is enough", "C8", barrier("k_empty", num_arrivals=1), OVERRUN, K, QK, f"{TOLD_K}*",
      "barrier_wait k_empty")
    _("one release of V is enough", "C8", barrier("v_empty", num_arrivals=1), OVERRUN, V, PV, f"{TOLD_V}*",
      "barrier_wait v_empty")
    _("K signals V's barrier", "C15", retarget(K[:-1], "k_full", "v_full"), (*OVERRUN, *DEADLOCK), K, V, QK, *STUCK)
    _("products read K before it is there", "C15", slot(QK, "k_tile"), UNREAD, K, QK)
    _("products read V before it is there", "C15", slot(PV, "v_tile"), UNREAD, V, PV)
    _("the turn is not passed on", "J", delete(f"{PASS}*"), DEADLOCK, *STUCK)
    _("the turn is not awaited", "G2", delete("named_barrier_sync turns*"), MISUSE, f"{PASS}*")
    _("the turn is passed on twice", "G2", double(f"{PASS}#-1"), (*MISUSE, *DEADLOCK), *STUCK, f"{PASS}*")
    _("no commit_smem", "B4", delete("commit_smem*"), RACE, OSTORE, OWRITE)
    _("the output goes to the other warpgroup's tile", "B2", slot(OWRITE, "o_tile"), UNREAD, OWRITE, OSTORE)
    _("the store takes the other warpgroup's tile", "B2", slot(OSTORE, "o_tile"), UNREAD, OWRITE, OSTORE)
    fine(_kernel, "the turns order nothing that data need", "G1: they share the tensor cores out",
      barrier("turns", num_arrivals=1))
    fine(_kernel, "no products side by side", "E4: stricter", param("wgmma_wait*", n=0))
    if _kernel == "attention_registers":
        _("Q is released before it is in registers", "D7", advance("barrier_arrive q_empty", "load"), RACE, Q, QREAD)

_ = of("attention_bias")
BIAS, ADDED, TOLD_B, WAIT_B = "copy_gmem_to_smem bias_tile", "load bias_tile*", "barrier_arrive b_empty", "barrier_wait b_empty"
STUCK_B = (*STUCK, "barrier_wait b_full*", f"{WAIT_B}*")
_("the bias is not waited for", "C15", delete("barrier_wait b_full*"), UNREAD, f"{BIAS}*", ADDED)
_("the bias is refilled unasked", "C6", delete(*[f"when({WAIT_B})"] * 4), OVERRUN, f"{BIAS}*", ADDED)
_("the wait of one warpgroup is left out", "C6", delete(f"when({WAIT_B}#3)"), OVERRUN, f"{BIAS}*", ADDED, *STUCK_B)
_("the wait leaves out a refill", "C6", guard(f"when({WAIT_B}#2)", 1), OVERRUN, f"{BIAS}*", ADDED, *STUCK_B)
_("the first lap waits, too", "C4", unguard(f"when({WAIT_B})"), DEADLOCK, *STUCK_B)
_("the bias is never released", "J", delete(f"{TOLD_B}*"), NEVER, *STUCK_B)
_("the steady loop does not release the bias", "J", delete(f"{TOLD_B}#1"), DEADLOCK, *STUCK_B)
_("the bias is released before it is read", "D7", advance(TOLD_B, "load"), RACE, f"{BIAS}*", ADDED)
_("the bias is released twice", "C8", double(f"{TOLD_B}#1"), (*OVERRUN, *DEADLOCK), f"{BIAS}*", ADDED, f"{TOLD_B}*", *STUCK_B)
_("the other warpgroup's bias is released", "C8", slot(f"{TOLD_B}#1", "b_empty"), (*OVERRUN, *DEADLOCK, "OutOfBounds"),
  f"{BIAS}*", ADDED, f"{TOLD_B}*", *STUCK_B)
_("the other warpgroup's bias is added", "C15", slot(ADDED, "bias_tile", -1), (*UNREAD, "OutOfBounds"), f"{BIAS}*", ADDED)
_("the bias goes to the other warpgroup's tile", "C15", slot(BIAS, "bias_tile"), (*OVERRUN, *UNREAD), f"{BIAS}*", ADDED)
_("the bias signals K's barrier", "C15", retarget(BIAS, "b_full", "k_full"), (*OVERRUN, *DEADLOCK, *NEVER), f"{BIAS}*", *STUCK_B)
_("two copies, one barrier", "C11", slot(f"{BIAS}#2", "b_full"), (*OVERRUN, *DEADLOCK), f"{BIAS}*", ADDED, *STUCK_B)

_ = of("attention_short")
_("Q is not waited for", "C15", delete("barrier_wait q_full*"), UNREAD, "wgmma q_tile*", Q)
_("Q is refilled unasked", "C6", delete("when(barrier_wait q_empty)"), OVERRUN, "wgmma q_tile*", Q)
_("Q is never released", "J", delete("barrier_arrive q_empty*"), NEVER, *STUCK)
_("the first Q is not released", "J", guard("when(barrier_arrive q_empty)", 1), DEADLOCK, *STUCK)
fine("attention_short", "K is refilled unasked", "E4: Q, which is refilled before K, is released with K",
  delete("when(barrier_wait k_empty)"))
fine("attention_short", "V is refilled unasked", "E4: the K that is refilled before V is released behind V's product",
  delete("when(barrier_wait v_empty#-1)"))
fine("attention_short", "V is released before its product has ended", "E4: K, released behind that product, is awaited first",
  advance(TOLD_V, "wgmma_wait"))
_("the output tile is reused in flight", "D7", delete("wait_smem_to_gmem*"), (*RACE, *LEAK), OWRITE, OSTORE)


_ = of("attention_ones")
ONES, PRODUCT = "swap v_tile*", "wgmma v_tile*"
_("the ones are not committed", "B4", delete("commit_smem#0"), RACE, ONES, PRODUCT)
_("the ones are not waited for", "C15", delete("barrier_wait ones"), UNREAD, ONES, PRODUCT)
_("a slot has no ones", "B2", delete("swap v_tile#1"), UNREAD, PRODUCT)
_("nobody tells of the ones", "J", delete("barrier_arrive ones"), NEVER, "barrier_wait ones", *STUCK[:-1])
_("both warpgroups must tell of the ones", "C8", barrier("ones", num_arrivals=2), DEADLOCK, "barrier_wait ones", *STUCK[:-1])

_ = of("attention_backward")
Q, DO, K, V = (f"copy_gmem_to_smem {x}_tile*" for x in ("q", "do", "k", "v"))
NUMBERS = ("copy_gmem_to_smem nlse_tile*", "copy_gmem_to_smem ndelta_tile*", "load*")
READ_Q, READ_DO, READ_K, READ_V = (f"wgmma {x}_tile*" for x in ("q", "do", "k", "v"))
DS, READ_DS, DQ, ADD = "swap ds_tile*", "wgmma ds_tile*", "swap dq_tile*", "copy_smem_to_gmem dq_tile*"
RESULT, LEAVES = "swap v_tile*", "copy_smem_to_gmem v_tile*"
STUCK = tuple(f"barrier_wait {x}_{y}*" for x, y in (("q", "full"), ("q", "empty"), ("do", "full"), ("do", "empty"),
                                                    ("k", "full"), ("v", "full"), ("ds", "full"), ("ds", "empty")))
_("dQ is stored instead of added", "D9", param(ADD, reduction_op=None), RACE, ADD)
_("no commit_smem for dS", "B4", delete("commit_smem#0"), RACE, DS, READ_DS)
_("dS is not waited for", "C15", delete("barrier_wait ds_full*"), UNREAD, DS, READ_DS)
_("dS is overwritten unasked", "C6", delete("when(barrier_wait ds_empty#1)"), OVERRUN, DS, READ_DS)
_("dS is never released", "J", delete("when(barrier_arrive ds_empty)"), NEVER, *STUCK)
_("dS of one warpgroup is enough", "C8", barrier("ds_full", num_arrivals=1), (*OVERRUN, *UNREAD), DS, READ_DS,
  "barrier_arrive ds_full*", "barrier_wait ds_full*")
_("Q is not waited for", "C15", delete("barrier_wait q_full*"), UNREAD, READ_Q, Q, *NUMBERS)
_("dO is not waited for", "C15", delete("barrier_wait do_full*"), UNREAD, READ_DO, DO, *NUMBERS)
_("K is not waited for", "C15", delete("barrier_wait k_full*"), UNREAD, READ_K, K)
_("V is not waited for", "C15", delete("barrier_wait v_full*"), UNREAD, READ_V, V)
_("Q is refilled unasked", "C6", delete("when(barrier_wait q_empty)"), OVERRUN, READ_Q, Q, *NUMBERS)
_("Q is released before dK has it", "E4", advance("barrier_arrive q_empty", "wgmma_wait"), RACE, READ_Q, Q)
_("Q is never released", "J", delete("barrier_arrive q_empty*"), NEVER, *STUCK)
_("no waits for products", "E4", delete("wgmma_wait*"), ("Race", "InFlightError"), Q, DO, K, V, READ_Q, READ_DO, READ_K, READ_V)
_("no commit_smem for dQ", "B4", delete("commit_smem#-1"), RACE, DQ, ADD)
_("no wait for the last additions", "D8", delete("wait_smem_to_gmem#-1"), LEAK, ADD)
fine("attention_backward", "dO is refilled unasked", "E4: Q, which is refilled before dO, is released after it",
  delete("when(barrier_wait do_empty)"))
fine("attention_backward", "no products side by side", "E4: stricter", param("wgmma_wait*", n=0))


_ = of("attention_backward_one_by_one")
_("dS is not waited for", "C15", delete("barrier_wait ds_full*"), UNREAD, DS, READ_DS)
_("dS is never released", "J", delete("when(barrier_arrive ds_empty)"), NEVER, *STUCK)
_("no commit_smem for dQ", "B4", delete("commit_smem#-1"), RACE, DQ, ADD)
_("dQ's tile is reused in flight", "D7", delete("wait_smem_to_gmem#-2"), RACE, DQ, ADD)
_("dQ is read before its product has ended", "E4", delete("wgmma_wait#-1"), ("Race", "InFlightError"), READ_DS, DQ, DS)


_ = of("attention_backward_split")
P, READ_P, ALL_STUCK = "swap p_tile*", "load*", (*STUCK[:-2], "barrier_wait p_full*", "barrier_wait p_empty*")
_("P is not waited for", "C15", delete("barrier_wait p_full*"), UNREAD, P, READ_P)
_("P is overwritten unasked", "C6", delete("when(barrier_wait p_empty#1)", "when(barrier_wait p_empty#1)"), OVERRUN, P, READ_P,
  "barrier_arrive p_full*", "barrier_wait p_full*")
_("P is released before it is read", "C6", move("barrier_arrive p_empty#0", before="load p_tile#0"), RACE, P, READ_P)
_("P is never released", "J", delete("barrier_arrive p_empty*"), NEVER, *ALL_STUCK)
_("P is never handed on", "J", delete("barrier_arrive p_full*"), NEVER, *ALL_STUCK)
_("Q is released by one warpgroup for both", "C8", barrier("q_empty", num_arrivals=1), (*OVERRUN, *UNREAD), READ_Q, Q, *NUMBERS,
  "barrier_arrive q_empty*")
_("dO is released by one warpgroup for both", "C8", barrier("do_empty", num_arrivals=1), (*OVERRUN, *UNREAD), READ_DO, DO,
  *NUMBERS, "barrier_arrive do_empty*", "barrier_wait do_empty*")
_("no waits for products", "E4", delete("wgmma_wait*"), ("Race", "InFlightError"), Q, DO, K, V, READ_Q, READ_DO, READ_K, READ_V)
# fmt: on
