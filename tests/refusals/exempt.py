"""Refusals that no call of a kernel reaches: (file, part of "function: text") -> why.  They stand there as second checks."""

from __future__ import annotations

WGMMA = "ops/wgmma.py refuses first, with the line; `test_what_the_template_refuses` asks the template itself"
EXEMPT: dict[tuple[str, str], str] = {
    (
        "frontend/primitives.py",
        "literal: UnsupportedCall",
    ): "JAX hands such arrays over as constants, which Tracer.constant refuses",
    (
        "frontend/indexed.py",
        "_indexed: UnsupportedCall",
    ): "a check against what JAX says of the shape; it follows NumPy",
    ("layouts/operands.py", "of an MMA is 2-D"): "wgmma and tcgen05_mma compare shapes first (ValueError)",
    ("layouts/operands.py", "does not fit a descriptor"): "a block has less shared memory than that",
    ("ops/debug.py", "debug_check fails"): "what the kernel checks of its data; tests/ops/test_debug.py",
    ("ops/grid.py", "axis_index({name!r})"): "JAX knows the axes and raises NameError",
    ("codegen/text.py", "c_type:"): "plan/types.py refuses such values first, with the line",
    ("codegen/emit_values.py", "an iota needs a register layout"): "the planner gives every iota one",
    ("codegen/tcgen05_text.py", "has no x{missing[0]}"): "async_load_tmem asks for counts that exist",
    ("codegen/wgmma_text.py", "operands are one of"): WGMMA,
    ("codegen/wgmma_text.py", "the two operand types cannot be mixed"): WGMMA,
    ("codegen/wgmma_text.py", "the accumulator must be"): WGMMA,
    ("codegen/wgmma_text.py", "n is a multiple of 8 from 8 to 256"): WGMMA,
    ("codegen/wgmma_text.py", "for integers n is"): WGMMA,
    ("codegen/wgmma_text.py", "only 16-bit operands may be MN-major"): WGMMA,
    ("codegen/wgmma_text.py", "an A in registers has no MN-major form"): WGMMA,
    ("frontend/primitives.py", "outside:"): "outside of any kernel; tests/frontend/test_arguments.py",
    ("ops/multimem.py", "check_world:"): "of a call under jax.shard_map; tests/ops/test_multimem.py",
    ("frontend/random.py", "refuse_key_array:"): "of an argument, not of a body; tests/frontend/test_arguments.py",
    ("frontend/composed.py", ""): "tests/ops/test_composed.py",
    ("frontend/special.py", "call:"): "tests/ops/test_special.py",
    ("frontend/trace.py", "which is traced"): "of a call under jit, not of a kernel; tests/frontend",
    ("frontend/trace.py", "place_in_grid:"): "of a pallas_call, not of a kernel; tests/pallas",
    ("frontend/transforms.py", "differentiate:"): "of a call in a program, not of a kernel; tests/frontend",
    ("plan/build.py", "extents are 32-bit numbers"): "an array of 2 GiB; tests/plan",
}
