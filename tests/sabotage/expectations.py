"""What is known about mutants and sabotages: which change nothing, which only a wrong value can show, which are missed.

A mutant that is in none of these tables must be found as an error.  KNOWN_MISSES shrinks: what is found must leave it.
Keys are `str(mutant)` and `str(sabotage)`.
"""

from __future__ import annotations

_NOT_RUN = "no tile of this case has one key block (attention_short has)"
_LAST = "the last release of all, for which nobody waits; the planner puts a wait before the result is read"
_LAST_TILE = "the last tile's release, for which nobody waits"
_FIRST_TILE = "tile 0 comes first, so the next one is never 0"
_END = "D8: at the kernel's end the tile must have been read; the writes are done when the grid is"
_V_COVERS_K = (
    "E4: before this K is refilled the producer waits for a V that is released when both have ended; for the scores the "
    "planner waits itself"
)
_BIAS_COVERS_K = (
    "E4: before this K is refilled the producer waits for a bias that is read behind the scores; for those the planner waits "
    "itself"
)
_K_COVERS_V = (
    "E4: before this V is refilled the producer waits for a K whose scores began behind the last product with the V before, and "
    "which is released when both have ended"
)
_COUNTS = "no load here has the count that makes the difference: a tile has more key blocks"
_LATER = "C6: it waits for another slot, which is released later"
_TURNS = "G1: the turns share the tensor cores out; no data depend on their order"
_OTHER_TURN = "G1: the three take turns in another order, or another one gives the start"
_MANY_STEPS = "there are more steps than that"
_Q_COVERS_DO = "E4: Q, which is refilled before dO, is released after it, when dV's product has ended, too"
_BEFORE_READ = "the planner puts a wait before the result is read, and nothing is released in between"

_FIRST_OF_TILE = "what is counted starts at 0 and goes on at 5 or more in the next tile, or is never 0"
_LATER_WAIT = "F5, F6: the wait behind a later load covers it; registers are in order by themselves"

# Of Blackwell's attention with two query tiles.
_TWO_TILES = {
    "wait_smem_to_gmem#2: wait_read_only -> True": _END,
    **{f"when(barrier_wait k_empty#0): ge 2 -> ge {n}": _FIRST_OF_TILE for n in (1, 3)},
    **{f"when(barrier_wait row_empty#0): gt 0 -> gt {n}": _FIRST_OF_TILE for n in (1,)},
    **{f"when(barrier_wait row_empty#2): gt 0 -> gt {n}": _FIRST_OF_TILE for n in (1, -1)},
    "when(barrier_wait row_empty#1): gt 0 -> gt -1": _FIRST_OF_TILE,
    **{f"when(tcgen05_commit_arrive q_empty#{i}): eq 1 -> eq {n}": _NOT_RUN for i in (0, 1) for n in (0, 2)},
    **{f"delete tcgen05_commit_arrive q_empty#{i}": _NOT_RUN for i in (0, 1)},
    **{f"tcgen05_commit_arrive q_empty#{i}: slot of q_empty +1": _NOT_RUN for i in (0, 1)},
    **{
        f"accumulate of tcgen05_mma out probabilities v_tile#{i}: eq 1 -> eq {n}": _NOT_RUN
        for i in (2, 3)
        for n in (0, 2)
    },
    **{f"delete wait_load_tmem#{i}": _LATER_WAIT for i in (6, 7, 8)},
}

# Mutants that break nothing, with the ordering rule that still holds.
EQUIVALENT: dict[str, str] = {
    "pipeline: wait_smem_to_gmem#1: wait_read_only -> True": _END,
    "persistent: wait_smem_to_gmem#1: wait_read_only -> True": _END,
    "sm100_tiles: wait_smem_to_gmem#1: wait_read_only -> True": _END,
    "sm90_matmul: wait_smem_to_gmem#2: wait_read_only -> True": _END,
    "sm100_matmul: wait_smem_to_gmem#1: wait_read_only -> True": _END,
    "sm100_pair: wait_smem_to_gmem#2: wait_read_only -> True": _END,
    "sm100_pair: delete wait_load_tmem#0": _LATER_WAIT,
    "sm100_scaled: wait_smem_to_gmem#2: wait_read_only -> True": _END,
    "sm100_scaled: delete wait_load_tmem#0": _LATER_WAIT,
    "handoff: when(named_barrier_arrive free): lt 3 -> lt 4": "G2: one arrival more, for which nobody waits",
    "relay: when(barrier_arrive free): lt 3 -> lt 4": "C6: one phase more, for which nobody waits",
    "through_memory: when(barrier_wait free): lt 2 -> lt 3": "J: the last tile is handed back, too",
    "sm100_staged: when(barrier_arrive drained): lt 1 -> lt 2": "C6: one phase more, for which nobody waits",
    "through_memory: full: num_arrivals 1 -> 2": "nobody uses this barrier",
    "staged: for(barrier_wait empty): upper bound +1": "C6: one operand more is written, in its turn; nobody reads it",
    "sm90_matmul_pair: wait_smem_to_gmem#2: wait_read_only -> True": _END,
    **{
        f"{kernel}: {what}": why
        for kernel, changes in {
            "sm100_attention": _TWO_TILES,
            "sm100_attention_bias": _TWO_TILES,  # all that is about the bias is found
            "sm100_attention_pair": {
                "wait_smem_to_gmem#1: wait_read_only -> True": _END,
                **{f"when(barrier_wait k_empty#0): ge 2 -> ge {n}": _FIRST_OF_TILE for n in (1, 3)},
                "when(barrier_wait row_empty#0): gt 0 -> gt 1": _FIRST_OF_TILE,
                "when(barrier_wait row_empty#1): gt 0 -> gt -1": _FIRST_OF_TILE,
                **{f"when(barrier_wait row_empty#2): gt 0 -> gt {n}": _FIRST_OF_TILE for n in (1, -1)},
                **{f"when(tcgen05_commit_arrive q_empty#0): eq 1 -> eq {n}": _NOT_RUN for n in (0, 2)},
                "delete tcgen05_commit_arrive q_empty#0": _NOT_RUN,
                **{f"when(barrier_wait pv_done#1): gt 1 -> gt {n}": _NOT_RUN for n in (0, 2)},
                **{f"accumulate of tcgen05_mma out probabilities v_tile#2: eq 1 -> eq {n}": _NOT_RUN for n in (0, 2)},
                "delete wait_load_tmem#4": _LATER_WAIT,
            },
            "attention": {
                "wait_smem_to_gmem#1: wait_read_only -> True": _END,
                "when(barrier_arrive q_empty#0): eq 1 -> eq 2": _NOT_RUN,
                "when(barrier_arrive q_empty#0): eq 1 -> eq 0": _NOT_RUN,
                "delete barrier_arrive q_empty#0": _NOT_RUN,
                "when(barrier_arrive q_empty#2): eq 1 -> eq 2": _NOT_RUN,
                "when(barrier_arrive q_empty#2): eq 1 -> eq 0": _NOT_RUN,
                "delete barrier_arrive q_empty#2": _NOT_RUN,
                "when(wgmma_wait#3): ge 0 -> ge 1": _FIRST_TILE,
                "delete wgmma_wait#3": _LAST,
                "wgmma_wait#3: n 0 -> 1": _LAST,
                "delete wgmma_wait#4": _K_COVERS_V,
                "wgmma_wait#4: n 1 -> 2": _K_COVERS_V,
                "delete barrier_arrive v_empty#1": _LAST,
                "turns: num_warpgroups 2 -> 1": _TURNS,
                **{f"barrier_arrive q_empty#{i}: slot of q_empty +1": _NOT_RUN for i in (0, 2)},
                **{
                    f"when(barrier_wait {b}): ge 2 -> ge {n}": _COUNTS
                    for b in ("k_empty#0", "v_empty#1")
                    for n in (1, 3)
                },
            },
            "attention_bias": {
                "wait_smem_to_gmem#1: wait_read_only -> True": _END,
                **{f"when(barrier_arrive q_empty#{i}): eq 1 -> eq {n}": _NOT_RUN for i in (0, 2) for n in (0, 2)},
                **{f"delete barrier_arrive q_empty#{i}": _NOT_RUN for i in (0, 2)},
                **{f"barrier_arrive q_empty#{i}: slot of q_empty +1": _NOT_RUN for i in (0, 2)},
                "when(wgmma_wait#3): ge 0 -> ge 1": _FIRST_TILE,
                **{f"delete wgmma_wait#{i}": _BIAS_COVERS_K for i in (0, 5)},
                **{f"wgmma_wait#{i}: n 0 -> 1": _BIAS_COVERS_K for i in (0, 5)},
                "delete wgmma_wait#3": _LAST,
                "wgmma_wait#3: n 0 -> 1": _LAST,
                "delete wgmma_wait#4": _K_COVERS_V,
                "wgmma_wait#4: n 1 -> 2": _K_COVERS_V,
                "delete barrier_arrive v_empty#1": _LAST,
                "turns: num_warpgroups 2 -> 1": _TURNS,
                **{
                    f"when(barrier_wait {b}): ge 3 -> ge {n}": _COUNTS
                    for b in ("k_empty#0", "v_empty#1")
                    for n in (2, 4)
                },
                **{f"when(barrier_wait b_empty#{i}): ge 2 -> ge {n}": _COUNTS for i in (0, 1) for n in (1, 3)},
            },
            "attention_causal": {
                "wait_smem_to_gmem#1: wait_read_only -> True": _END,
                "when(barrier_arrive q_empty#0): eq 1 -> eq 2": _NOT_RUN,
                "when(barrier_arrive q_empty#0): eq 1 -> eq 0": _NOT_RUN,
                "delete barrier_arrive q_empty#0": _NOT_RUN,
                "delete barrier_arrive q_empty#1": _LAST_TILE,
                "when(barrier_arrive q_empty#3): eq 1 -> eq 0": _NOT_RUN,
                "delete barrier_arrive q_empty#3": _NOT_RUN,
                "delete wgmma_wait#5": _LAST,
                "wgmma_wait#5: n 0 -> 1": _LAST,
                "delete barrier_arrive v_empty#2": _LAST,
                "turns: num_warpgroups 2 -> 1": _TURNS,
                **{f"barrier_arrive q_empty#{i}: slot of q_empty +1": _NOT_RUN for i in (0, 3)},
                "barrier_arrive q_empty#1: slot of q_empty +1": _LAST_TILE,
                **{
                    f"when(barrier_wait {b}): ge 2 -> ge {n}": _COUNTS
                    for b in ("k_empty#0", "v_empty#1")
                    for n in (1, 3)
                },
            },
            "attention_registers": {
                "wait_smem_to_gmem#1: wait_read_only -> True": _END,
                "when(wgmma_wait#3): ge 0 -> ge 1": _FIRST_TILE,
                "delete wgmma_wait#1": _V_COVERS_K,
                "wgmma_wait#1: n 1 -> 2": _V_COVERS_K,
                "delete wgmma_wait#3": _LAST,
                "wgmma_wait#3: n 0 -> 1": _LAST,
                "delete wgmma_wait#4": _K_COVERS_V,
                "wgmma_wait#4: n 1 -> 2": _K_COVERS_V,
                "delete barrier_wait v_empty#0": _K_COVERS_V,
                "delete barrier_arrive v_empty#1": _LAST,
                "when(named_barrier_arrive turns#0): eq 2 -> eq 1": _OTHER_TURN,
                **{f"named_barrier_arrive turns#{i}: slot of turns +1": _OTHER_TURN for i in range(4)},
                "turns: num_warpgroups 2 -> 1": _TURNS,
                **{f"barrier_wait {x}_empty#{i}: slot of {x}_empty -1": _LATER for x in "kv" for i in (0, 1)},
                "delete barrier_wait k_empty#0": _V_COVERS_K,
                **{
                    f"when(barrier_wait {x}_empty#{i}): ge 3 -> ge {n}": _COUNTS
                    for x in "kv"
                    for i, n in ((0, 4), (1, 2))
                },
            },
            "attention_ones": {
                "wait_smem_to_gmem#1: wait_read_only -> True": _END,
                "when(wgmma_wait#3): ge 0 -> ge 1": _FIRST_TILE,
                "delete wgmma_wait#3": _LAST,
                "wgmma_wait#3: n 0 -> 1": _LAST,
                "delete wgmma_wait#4": _K_COVERS_V,
                "wgmma_wait#4: n 1 -> 2": _K_COVERS_V,
                "delete barrier_arrive v_empty#1": _LAST,
                **{f"delete barrier_arrive q_empty#{i}": _NOT_RUN for i in (0, 2)},
                **{f"barrier_arrive q_empty#{i}: slot of q_empty +1": _NOT_RUN for i in (0, 2)},
                **{f"when(barrier_arrive q_empty#{i}): eq 1 -> eq {n}": _NOT_RUN for i in (0, 2) for n in (0, 2)},
                **{f"when(barrier_wait k_empty#0): ge 2 -> ge {n}": _COUNTS for n in (1, 3)},
                "when(barrier_wait v_empty#0): ge 2 -> ge 3": _COUNTS,
                "when(barrier_wait v_empty#1): ge 2 -> ge 1": _COUNTS,
                "when(barrier_arrive ones): eq 0 -> eq 1": "the other warpgroup writes the ones",
            },
            "attention_backward": {
                **{
                    f"when(copy_gmem_to_smem {x}_tile#0): eq 0 -> eq 1": "all wait until the keys are there"
                    for x in "kv"
                },
                **{f"when(barrier_wait k_full#{i}): gt 0 -> gt {n}": _MANY_STEPS for i in (0, 1) for n in (1, -1)},
                **{f"when(barrier_wait ds_empty#2): ge 2 -> ge {n}": _MANY_STEPS for n in (1, 3)},
                "delete barrier_wait k_full#1": "dS, which it waits for, was made by those who had waited for all of K",
                "delete barrier_wait do_empty": _Q_COVERS_DO,
                **{f"delete wgmma_wait#{i}": _Q_COVERS_DO for i in (1, 4)},
                **{f"wgmma_wait#{i}: n 0 -> 1": _Q_COVERS_DO for i in (1, 4)},
                **{f"delete wgmma_wait#{i}": _BEFORE_READ for i in (0, 2, 5, 7, 8)},
                **{f"wgmma_wait#{i}: n 0 -> 1": _BEFORE_READ for i in (0, 7, 8)},
                "delete wgmma_wait#10": _LAST,
                "wgmma_wait#10: n 0 -> 1": _LAST,
                "delete barrier_arrive ds_empty#1": _LAST,
                **{f"wgmma_wait#{i}: n 1 -> 2": _BEFORE_READ for i in (2, 5)},
                "delete barrier_arrive do_empty#2": _LAST,
                "delete wait_smem_to_gmem#0": "dV is the first to be stored",
                "wait_smem_to_gmem#0: n 0 -> 1": "dV is the first to be stored",
                **{f"wait_smem_to_gmem#{i}: wait_read_only -> True": _END for i in (2, 5)},
            },
        }.items()
        for what, why in changes.items()
    },
}

_LEFT_OUT = "a step is left out, by all who take part in it"
_LAST_V = "the last product of a tile: here no V is refilled behind it"
_OTHER_Q = "all tiles of Q are there, and stay until all warpgroups have released them"
_OTHER_KEYS = "the other warpgroup's keys are there, too, and stay"
_HELD = "the other slot is there and stays: the last block, whose dK is open, or the next one, for which it has waited"

_OTHER_Q100 = "both tiles of Q are there, and stay until both have been multiplied for the last time"
_AHEAD = "a step is left out, and the steps behind it take the tile before theirs"
# Mutants that take other data or leave some out, with every access in order: only the result is wrong.
VALUE: dict[str, str] = {
    "pipeline: for(barrier_wait full): lower bound +1": _AHEAD,
    "handoff: for(named_barrier_sync ready): upper bound -1": _LEFT_OUT,
    "through_memory: for(barrier_wait ready): upper bound -1": _LEFT_OUT,
    "relay: for(barrier_wait free): upper bound -1": _LEFT_OUT,
    "staged: for(barrier_wait full): lower bound +1": _AHEAD,
    "exchange: for(barrier_wait ready): lower bound +1": "the rows go where those behind them belong",
    "exchange: for(barrier_wait ready): upper bound -1": _LEFT_OUT,
    "staged: for(barrier_wait full): upper bound -1": _LEFT_OUT,
    "sm100_tiles: accumulate of tcgen05_mma acc a_tile b_tile: gt 0 -> gt 1": "the second step overwrites the first",
    "sm100_matmul: accumulate of tcgen05_mma acc a_tile b_tile: gt 0 -> gt 1": "the second step overwrites the first",
    **{
        f"sm100_attention{bias}: tcgen05_mma scores q_tile k_tile#{i}: slot of q_tile +1": _OTHER_Q100
        for bias in ("", "_bias")
        for i in (1, 2)
    },
    "sm100_pair: accumulate of tcgen05_mma acc a_tile b_tile: gt 0 -> gt 1": "the second step overwrites the first",
    "sm100_scaled: accumulate of tcgen05_mma acc a_tile b_tile a_factors b_factors: gt 0 -> gt 1": (
        "the second step overwrites the first"
    ),
    "sm100_scaled: for(barrier_wait ready): lower bound +1": "the tiles go where those behind them belong",
    "sm100_matmul: for(barrier_wait ready): lower bound +1": "the tiles go where those behind them belong",
    "sm100_pair: for(barrier_wait ready): lower bound +1": "the tiles go where those behind them belong",
    "sm100_staged: for(barrier_wait full): upper bound -1": _AHEAD,
    "sm100_staged: for(barrier_wait empty): upper bound +1": "a step more is written; the next tile takes it for its first",
    "sm100_staged: accumulate of tcgen05_mma acc a_tile b_tile: gt 0 -> gt 1": "the second step overwrites the first",
    "attention: wgmma acc v_tile#1: slot of v_tile +1": _LAST_V,
    **{f"attention_bias: wgmma acc v_tile#1: slot of v_tile {by}": _LAST_V for by in ("+1", "-1")},
    "attention_causal: wgmma acc v_tile#2: slot of v_tile +1": _LAST_V,
    "attention_registers: wgmma acc v_tile#1: slot of v_tile -1": _LAST_V,
    "attention_causal: wgmma s_acc q_tile k_tile#1: slot of q_tile +1": _OTHER_Q,
    "attention_ones: wgmma acc v_tile#1: slot of v_tile +1": _LAST_V,
    **{f"attention_backward: wgmma s_acc k_tile q_tile#{i}: slot of k_tile +1": _OTHER_KEYS for i in (0, 1, 2)},
    **{f"attention_backward: wgmma s_acc k_tile q_tile#{i}: slot of q_tile +1": _HELD for i in (1, 2)},
    **{f"attention_backward: wgmma accs[0] q_tile#{i}: slot of q_tile +1": _HELD for i in (0, 1, 2)},
    **{f"attention_backward: load#{i}: slot of nlse_tile +1": _HELD for i in (2, 4)},
    "attention_backward: wgmma dp_acc v_tile do_tile#2: slot of do_tile +1": _HELD,
    "attention_backward: wgmma accs[1] do_tile#2: slot of do_tile +1": _HELD,
    "attention_backward: load#5: slot of ndelta_tile +1": _HELD,
    **{f"attention_backward: wgmma dq_acc ds_tile k_tile#{i}: slot of ds_tile +1": _OTHER_KEYS for i in (0, 2)},
    **{f"attention_backward: wgmma dq_acc ds_tile k_tile#{i}: slot of ds_tile -1": _OTHER_KEYS for i in (1, 3)},
    **{f"attention_backward: wgmma dq_acc ds_tile k_tile#{i}: slot of k_tile +1": _OTHER_KEYS for i in range(4)},
    "attention_backward: copy_smem_to_gmem dq_tile#1: slot of dq_tile +1": "the part before is there, too, and stays",
}

# Defects that the simulator does not report as it should, with the rule that should catch them.
KNOWN_MISSES: dict[str, str] = {}
