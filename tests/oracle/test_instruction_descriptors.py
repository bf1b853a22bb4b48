"""tcgen05's instruction descriptor: CuTe DSL's builders over all that may be asked for, and what it compiles."""

from __future__ import annotations

import itertools

import pytest

from mosaic_gpu.codegen.encodings import Descriptor, Instruction, ScaledInstruction
from mosaic_gpu.layouts.tmem import ScalesPart
from mosaic_gpu.ops.tcgen05 import Scales
from mosaic_gpu.ops.tcgen05_copies import scales_copy
from mosaic_gpu.program import Affine

FP8 = ("float8_e4m3fn", "float8_e5m2")
INT8 = ("int8", "uint8")
BOOLS = (False, True)
MAJORS = tuple(itertools.product(BOOLS, BOOLS))
KINDS = {"float16": "f16", "bfloat16": "f16", "float32": "tf32", "int8": "i8", "uint8": "i8"}
TYPES = (
    ("float16", "float16", "float32"),
    ("float16", "float16", "float16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float32", "float32"),
    *((a, b, d) for a, b in itertools.product(FP8, FP8) for d in ("float32", "float16")),
    *((a, b, "int32") for a, b in itertools.product(INT8, INT8)),
)


def kind_of(a_type):
    return KINDS.get(a_type, "f8f6f4")


@pytest.mark.parametrize("a_type, b_type, acc_type", TYPES)
def test_builder(cute, a_type, b_type, acc_type):
    """Every M and N of one or two blocks, both majors of both operands, 384 words for each triple of types; read back, too."""
    kind = kind_of(a_type)
    for m, n, (a_mn, b_mn) in itertools.product((64, 128, 256), range(8, 257, 8), MAJORS):
        ours = Instruction(kind, a_type, b_type, acc_type, m, n, a_mn, b_mn)
        theirs = cute.instruction_descriptor(a_type, b_type, m, n, a_mn, b_mn, acc_type)
        assert ours.encode() == theirs, (m, n, a_mn, b_mn)
        assert Instruction.decode(theirs, kind) == ours


@pytest.mark.parametrize("a_type, b_type, acc_type", TYPES[::3])
def test_other_fields(cute, a_type, b_type, acc_type):
    """Signs, sparsity and its selector, saturation: 256 words for each triple of types."""
    kind = kind_of(a_type)
    for a_neg, b_neg, sparse, saturate, selector, m in itertools.product(
        BOOLS, BOOLS, BOOLS, BOOLS, range(4), (64, 128, 256)
    ):
        ours = Instruction(kind, a_type, b_type, acc_type, m, 96, False, True, a_neg, b_neg, sparse, selector, saturate)
        fields = dict(a_negate=int(a_neg), b_negate=int(b_neg), sparse_flag=int(sparse), sparse_id2=selector)
        theirs = cute.instruction_descriptor(
            a_type, b_type, m, 96, False, True, acc_type, saturate=int(saturate), **fields
        )
        assert ours.encode() == theirs
        assert Instruction.decode(theirs, kind) == ours


NARROW = (*FP8, "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")


@pytest.mark.parametrize("a_type, b_type", list(itertools.product(NARROW, NARROW)))
def test_scaled_8_bit_kind(cute, a_type, b_type):
    """kind::mxf8f6f4: all N of both M, the ids of both scales, majors: 512 words and more for each pair of types."""
    for m, n, a_id, b_id in itertools.product((128, 256), range(8, 257, 8), range(4), (0, 3)):
        a_mn, b_mn = bool(n & 8), bool(n & 16)
        ours = ScaledInstruction("mxf8f6f4", a_type, b_type, "float8_e8m0fnu", m, n, a_id, b_id, a_mn, b_mn)
        assert ours.encode() == cute.scaled_descriptor("mxf8f6f4", ours)
        assert ScaledInstruction.decode(ours.encode(), "mxf8f6f4") == ours


@pytest.mark.parametrize("kind, scale_type", [("mxf4", "float8_e8m0fnu"), ("mxf4nvf4", "float8_e4m3fn")])
def test_scaled_4_bit_kinds(cute, kind, scale_type):
    """All N of both M, the ids that exist, signs, K of 64 and 96, sparse A: 4096 words a kind."""
    e2m1 = "float4_e2m1fn"
    for m, n, a_id, b_id, wide, sparse, negate in itertools.product(
        (128, 256), range(8, 257, 8), (0, 2), (0, 2), BOOLS, BOOLS, MAJORS
    ):
        ours = ScaledInstruction(kind, e2m1, e2m1, scale_type, m, n, a_id, b_id, False, False, *negate, sparse, wide)
        assert ours.encode() == cute.scaled_descriptor(kind, ours)
        assert ScaledInstruction.decode(ours.encode(), kind) == ours


def _check_compiled(cute, ptx, a_type, b_type, n, a_mn, b_mn, m=128):
    k = 128
    compiled = cute.product("sm_100a", a_type, b_type, (int(a_mn), 32, 0), (int(b_mn), 32, 0), (m, n, k))
    uses = ptx.Evaluator(1024).run(compiled.ptx, "tcgen05.mma")
    assert len(uses) == (4 if a_type in FP8 else 8)
    for use in uses:
        assert use.name.startswith(f"tcgen05.mma.cta_group::1.kind::{kind_of(a_type)}")
        ours = Instruction(kind_of(a_type), a_type, b_type, "float32", m, n, a_mn, b_mn).encode()
        assert (use.operands[0], use.operands[3]) == (cute.TMEM_COLUMN, ours)


PAIRS = (("float16", "float16"), ("bfloat16", "bfloat16"), *itertools.product(FP8, FP8))


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


def test_words_that_mean_nothing():
    word = Instruction("f16", "float16", "float16", "float32", 128, 64).encode()
    for bad in (word | 1 << 23, word | 1 << 29, word | 1 << 6, word | 7 << 7, word | 3 << 4):
        with pytest.raises(ValueError, match="is no instruction descriptor of kind f16"):
            Instruction.decode(bad, "f16")


@pytest.mark.parametrize("a_type, b_type", [*PAIRS, ("float32", "float32")])
@pytest.mark.parametrize("m", [256, 128])
@pytest.mark.parametrize("n", [32, 64, 128, 256])
def test_pairs_of_blocks(cute, ptx, a_type, b_type, n, m):
    """cta_group::2, as compiled: the instruction's M and N are those of both blocks; operands and their distances are
    those of one block, whose rows of B are half of N."""
    majors = ((False, False),) if a_type == "float32" else MAJORS if n == 256 else ((False, False), (False, True))
    for a_mn, b_mn in majors:
        compiled = cute.pair_product(a_type, b_type, a_mn, b_mn, m, n)
        uses = ptx.Evaluator(1024).run(compiled.ptx, "tcgen05.mma")
        assert len(uses) == 4
        for use in uses:
            assert use.name.startswith(f"tcgen05.mma.cta_group::2.kind::{kind_of(a_type)}")
            ours = Instruction(kind_of(a_type), a_type, b_type, "float32", m, n, a_mn, b_mn).encode()
            assert (use.operands[0], use.operands[3]) == (cute.TMEM_COLUMN, ours)
            for word in use.operands[1:3]:
                d = Descriptor.decode(word)
                assert d.version == 1 and d.encode() == word


SCALED = (
    *(("mxf8f6f4", a, b, "float8_e8m0fnu", 32) for a, b in itertools.product(FP8, FP8)),
    ("mxf4nvf4", "float4_e2m1fn", "float4_e2m1fn", "float8_e8m0fnu", 32),
    ("mxf4nvf4", "float4_e2m1fn", "float4_e2m1fn", "float8_e8m0fnu", 16),
    ("mxf4nvf4", "float4_e2m1fn", "float4_e2m1fn", "float8_e4m3fn", 16),
)


@pytest.mark.parametrize("m, n, k", [(128, 128, 256), (128, 256, 512), (256, 256, 256), (256, 128, 256)])
@pytest.mark.parametrize("kind, a_type, b_type, scale_type, block", SCALED)
def test_scaled_products_as_compiled(cute, ptx, kind, a_type, b_type, scale_type, block, m, n, k):
    """Descriptors and addresses of every copy of factors and of every product, of one block and of a pair, as our plan has them
    for the same buffers: CuTe DSL's A, B and factors stand one behind the other, each at a multiple of 1024 bytes."""
    compiled = cute.scaled_product(a_type, b_type, scale_type, block, m, n, k)
    pair, share = m == 256, m // 128
    per_row, per_step = k // block, (32 if kind == "mxf8f6f4" else 64) // block
    width = k if kind == "mxf8f6f4" else k // 2  # bytes of a row
    rows = (128, -(-n // 128) * 128)
    sizes = (128 * width, n // share * width, rows[0] * per_row, rows[1] * per_row)
    starts, at = [], 1024
    for size in sizes:
        starts.append(at)
        at += -(-size // 1024) * 1024
    parts = [ScalesPart(0, Affine(0), r, per_row) for r in rows]
    scales = Scales(*parts, per_step)
    copied = {
        (column + cell, copy.descriptor(start + offset).encode())
        for part, column, start in zip(parts, cute.SCALE_COLUMNS, starts[2:], strict=True)
        for copy in [scales_copy(0, Affine(0), part, pair)]
        for offset, cell in copy.steps
    }
    evaluator = ptx.Evaluator(1024)
    uses = evaluator.run(compiled.ptx, "tcgen05.(mma|cp)")
    copies = [u for u in uses if u.name.startswith("tcgen05.cp")]
    assert {u.name for u in copies} == {f"tcgen05.cp.cta_group::{share}.32x128b.warpx4"}
    assert {u.operands for u in copies} == copied and len(copies) == len(copied)
    products = uses[len(copies) :]
    assert len(products) == width // 32
    for step, use in enumerate(products):
        assert use.name.startswith(f"tcgen05.mma.cta_group::{share}.kind::{kind}.block_scale.block{block}")
        id = scales.id(step)
        ours = ScaledInstruction(kind, a_type, b_type, scale_type, m, n, id, id)
        assert use.operands[3] == ours.encode() and ScaledInstruction.decode(ours.encode(), kind) == ours
        places = tuple(
            column + scales.cells(part, step) | id << 30 for part, column in zip(parts, cute.SCALE_COLUMNS, strict=True)
        )
        assert (use.operands[0], use.operands[4:6]) == (cute.TMEM_COLUMN, places)


def test_scaled_words_that_mean_nothing():
    good = ScaledInstruction("mxf8f6f4", *FP8, "float8_e8m0fnu", 128, 64).encode()
    for bad in (good | 1 << 3, good | 1 << 6, good | 1 << 24, good | 1 << 31, good | 7 << 7):
        with pytest.raises(ValueError, match="is no instruction descriptor of kind mxf8f6f4"):
            ScaledInstruction.decode(bad, "mxf8f6f4")
    e2m1 = "float4_e2m1fn"
    good = ScaledInstruction("mxf4nvf4", e2m1, e2m1, "float8_e4m3fn", 128, 64).encode()
    for bad in (good | 1 << 4, good | 1 << 29, good | 1 << 15):
        with pytest.raises(ValueError, match="has K contiguous, and its scale ids are 0 or 2"):
            ScaledInstruction.decode(bad, "mxf4nvf4")
