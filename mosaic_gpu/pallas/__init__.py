"""`pallas_call` and `emit_pipeline`: kernels over a grid of blocks, streamed through shared memory.

Everything here stands above the front end: specs (what a block is), pipeline (how blocks travel), mapping (specs held against
arrays), call (`pallas_call` itself), lowering (onto `kernel`), interpret (onto XLA), batching (vmap), backends (who compiles).
"""
