"""tcgen05's instruction descriptor: CuTe DSL's builder over all that may be asked for, and what it compiles."""

from __future__ import annotations

import itertools

import pytest

from mosaic_gpu.ops.tcgen05 import instruction_descriptor

FP8 = ("float8_e4m3fn", "float8_e5m2")
PAIRS = (("float16", "float16"), ("bfloat16", "bfloat16"), *itertools.product(FP8, FP8))
MAJORS = tuple(itertools.product((False, True), (False, True)))


@pytest.mark.parametrize("a_type, b_type", PAIRS)
def test_builder(cute, a_type, b_type):
    """Every M and N of one or two blocks, 384 descriptors each."""
    for m, n, (a_mn, b_mn) in itertools.product((64, 128, 256), range(8, 257, 8), MAJORS):
        theirs = cute.instruction_descriptor(a_type, b_type, m, n, a_mn, b_mn)
        assert instruction_descriptor(a_type, b_type, m, n, a_mn, b_mn) == theirs, (m, n, a_mn, b_mn)


def _check_compiled(cute, ptx, a_type, b_type, n, a_mn, b_mn):
    k = 128
    compiled = cute.product("sm_100a", a_type, b_type, (int(a_mn), 32, 0), (int(b_mn), 32, 0), (128, n, k))
    uses = ptx.Evaluator(1024).run(compiled.ptx, "tcgen05.mma")
    assert len(uses) == (4 if a_type in FP8 else 8)
    for use in uses:
        assert use.name.startswith(f"tcgen05.mma.cta_group::1.kind::{'f8f6f4' if a_type in FP8 else 'f16'}")
        ours = instruction_descriptor(a_type, b_type, 128, n, a_mn, b_mn)
        assert (use.operands[0], use.operands[3]) == (cute.TMEM_COLUMN, ours)
        assert cute.instruction_descriptor(a_type, b_type, 128, n, a_mn, b_mn) == ours


@pytest.mark.parametrize("a_type, b_type", PAIRS)
@pytest.mark.parametrize("n, a_mn, b_mn", [(8, False, False), (96, True, True), (256, False, True)])
def test_compiled(cute, ptx, a_type, b_type, n, a_mn, b_mn):
    """The builder is what is compiled."""
    _check_compiled(cute, ptx, a_type, b_type, n, a_mn, b_mn)


@pytest.mark.slow
@pytest.mark.parametrize("a_type, b_type", PAIRS)
def test_compiled_everything(cute, ptx, a_type, b_type):
    for n, (a_mn, b_mn) in itertools.product(range(8, 257, 8), MAJORS):
        if not b_mn or n % (32 if b_type in FP8 else 16) == 0:  # whole rows of a 32-byte swizzle
            _check_compiled(cute, ptx, a_type, b_type, n, a_mn, b_mn)
