"""Matrix descriptors in kernels that CuTe DSL compiles, against ours, for buffers that hold the data in the same bytes.

CuTe's layouts map to our transforms so (chunk: the elements of a row of the swizzle):

======================================  ==============================  ================================
tile_to_shape(atom, (mn, k), order)     atom K-major (8, chunk)         atom MN-major (chunk, 8)
======================================  ==============================  ================================
order (0, 1): next atom along M/N       TilingTransform((mn, chunk))    TilingTransform((8, chunk))
order (1, 0): next atom along K         TilingTransform((8, chunk))     TilingTransform((k, chunk))
of a buffer of shape                    (mn, k)                         (k, mn)
======================================  ==============================  ================================
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from mosaic_gpu.codegen.encodings import Instruction
from mosaic_gpu.layouts.operands import (
    SharedOperand,
    decode_descriptor,
    descriptor_high,
    descriptor_low,
    shared_operand,
)
from mosaic_gpu.layouts.shared import SharedLayout, itemsize, shared_layout
from mosaic_gpu.memory import MemorySpace, SwizzleTransform, TilingTransform
from mosaic_gpu.ops.tcgen05_rules import TYPES as TCGEN05_TYPES
from mosaic_gpu.ops.wgmma import KINDS as WGMMA_KINDS
from mosaic_gpu.program import Affine, DimIndex, Value, View
from mosaic_gpu.simulator.tensor_core import instruction_addresses
from tests.wgmma_functions import wgmma_function

SHARED_MEMORY = 232448  # bytes of a block
LEADING, STRIDE = 0x3FFF << 16, 0x3FFF << 32  # the two offsets in a descriptor
BOOLS = (False, True)
FP8 = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Side:
    """How an operand lies in shared memory. small: TilingTransform((8, chunk)), else one tile of all rows per chunk."""

    mn_major: bool
    swizzle: int
    small: bool

    @property
    def for_cute(self) -> tuple[int, int, int]:
        return int(self.mn_major), self.swizzle, int(self.small)

    def __str__(self) -> str:
        return f"{'mn' if self.mn_major else 'k'}{self.swizzle}{'small' if self.small else 'tall'}"


@dataclasses.dataclass(frozen=True)
class Case:
    arch: str
    a_type: str
    b_type: str
    a: Side
    b: Side
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}"
        return f"{self.arch}-{self.a_type}-{self.b_type}-{self.a}-{self.b}-{shape}"


def _quick() -> list[Case]:
    """Every swizzle, major and tiling of both operands; each type; shapes at the ends of what is legal."""
    cases = []
    for arch in ("sm_90a", "sm_100a"):
        m = 128
        for swizzle, small, a_mn, b_mn in itertools.product((128, 64, 32), BOOLS, BOOLS, BOOLS):
            a, b = Side(a_mn, swizzle, small), Side(b_mn, swizzle, small)
            cases.append(Case(arch, "float16", "float16", a, b, m, 128, 128))
        for swizzle, small in itertools.product((128, 64, 32), BOOLS):
            a, b = Side(False, swizzle, small), Side(False, swizzle, not small)
            cases += [Case(arch, x, y, a, b, m, 64, 256) for x, y in itertools.product(FP8, FP8)][:: 1 if small else 2]
        k_major, mn_major = Side(False, 128, True), Side(True, 128, True)
        cases += [
            Case(arch, "bfloat16", "bfloat16", k_major, k_major, m, 8, 64),
            Case(arch, "bfloat16", "bfloat16", k_major, Side(False, 64, False), m, 24, 64),
            Case(arch, "bfloat16", "bfloat16", k_major, Side(True, 32, True), m, 16, 64),
            Case(arch, "bfloat16", "bfloat16", mn_major, mn_major, m, 64, 64),
            Case(arch, "bfloat16", "bfloat16", Side(True, 128, False), Side(True, 64, True), m, 256, 64),
            Case(arch, "bfloat16", "bfloat16", Side(True, 64, True), Side(False, 32, True), m, 256, 64),
            Case(arch, "bfloat16", "bfloat16", Side(False, 32, False), Side(True, 128, False), m, 192, 96),
        ]
    cases.append(Case("sm_90a", "float16", "float16", k_major, k_major, 256, 64, 64))
    for a_type, b_type in itertools.product(("int8", "uint8"), repeat=2):
        cases.append(Case("sm_90a", a_type, b_type, k_major, Side(False, 64, False), 64, 32, 128))
    return cases


def _more() -> list[Case]:
    """All pairs of sides, in shapes that take turns so that each side meets each shape; all N."""
    cases = []
    sides = [Side(*x) for x in itertools.product(BOOLS, (128, 64, 32), BOOLS)]
    shapes = ((128, 64, 64), (128, 128, 192), (128, 256, 64))
    pairs = tuple(itertools.product(FP8, FP8))
    for arch, (i, a), (j, b) in itertools.product(("sm_90a", "sm_100a"), enumerate(sides), enumerate(sides)):
        cases.append(Case(arch, "bfloat16", "bfloat16", a, b, *shapes[(i + j) % 3]))
        if not a.mn_major and not b.mn_major:
            cases.append(Case(arch, *pairs[(i + j) % 4], a, b, 128, 136, 128))
    for n in range(8, 257, 8):
        side = Side(False, 64, False)
        cases += [Case(arch, "float16", "float16", side, side, 128, n, 64) for arch in ("sm_90a", "sm_100a")]
    return cases


def _operand(
    dtype: str, side: Side, mn: int, k: int, k_axis: int, slot: int
) -> tuple[SharedOperand, SharedLayout, np.ndarray]:
    """The operand in slot `slot` of two, its buffer, and the byte offsets [mn, k, slot] of the buffer's elements."""
    rows, columns = (k, mn) if side.mn_major else (mn, k)
    tiling = TilingTransform((8 if side.small else rows, side.swizzle // itemsize(dtype)))
    space = MemorySpace("smem", (tiling, SwizzleTransform(side.swizzle)))
    layout = shared_layout((2, rows, columns), dtype, space, None)
    ref = Value(1, layout.shape, dtype, space)
    dims = (DimIndex(Affine(slot), None), DimIndex(Affine(0), rows), DimIndex(Affine(0), columns))
    transposed = side.mn_major == (k_axis == 1)
    view = View(ref, dims, (1, 0) if transposed else (0, 1))
    operand = shared_operand(view, layout, k_axis, "it", None, (1, 2))
    assert (operand.mn_major, operand.rows, operand.k) == (side.mn_major, mn, k)
    offsets = layout.byte_offsets()
    return operand, layout, offsets.transpose((2, 1, 0) if side.mn_major else (1, 2, 0))


def _bases(nbytes: int) -> tuple[int, int]:
    """The first and the last start of dynamic shared memory of `nbytes` that are tried."""
    assert nbytes <= SHARED_MEMORY - 1024
    return 1024, (SHARED_MEMORY - nbytes) // 1024 * 1024


def _cute_offsets(layout, mn: int, k: int, size: int) -> np.ndarray:
    """Byte offsets [mn, k, slot] in CuTe's layout."""
    elements = layout(np.arange(mn)[:, None, None], np.arange(k)[None, :, None], np.arange(2)[None, None])
    return layout.swizzled(elements * size)


def _check_word(
    theirs: object,
    operand: SharedOperand,
    base: int,
    row: int,
    rows: int,
    step: int,
    offsets: np.ndarray,
    tcgen05: bool,
) -> None:
    """The descriptor of CuTe's instruction of `rows` rows from `row` on and the step-th 32 bytes of K.

    A distance that separates no two elements of the instruction is not compared, CuTe writes 0 there: LBO of MN-major
    operands that are one chunk wide, SBO of K-major ones of 8 rows. LBO of swizzled K-major operands, which the hardware
    ignores, is: both write 1.
    """
    assert isinstance(theirs, int), f"an operand that the evaluator does not know: {theirs}"
    address = base + operand.start.const + operand.row_offset(row) + operand.k_offset(step)
    ours = descriptor_high(operand, tcgen05) << 32 | descriptor_low(operand, address)
    ignored = 0
    if operand.mn_major and rows <= operand.chunk:
        ignored |= LEADING
    if not operand.mn_major and rows <= 8:
        ignored |= STRIDE
    assert f"{theirs & ~ignored:#x}" == f"{ours & ~ignored:#x}"

    # Our reading of their word finds the elements where their layout has put them.
    found = instruction_addresses(decode_descriptor(theirs), rows, operand.itemsize, operand.mn_major)
    k = step * operand.k_per_instruction
    np.testing.assert_array_equal(found, base + offsets[row : row + rows, k : k + operand.k_per_instruction])


def _check(cute, ptx, case: Case) -> None:
    tcgen05 = case.arch == "sm_100a"
    a, a_layout, a_offsets = _operand(case.a_type, case.a, case.m, case.k, 1, cute.SLOT)
    b, b_layout, b_offsets = _operand(case.b_type, case.b, case.n, case.k, 0, cute.SLOT)
    shape = (case.m, case.n, case.k)
    compiled = cute.product(case.arch, case.a_type, case.b_type, case.a.for_cute, case.b.for_cute, shape)
    for name, mn, operand, offsets in (("a", case.m, a, a_offsets), ("b", case.n, b, b_offsets)):
        theirs = _cute_offsets(compiled.layouts[name], mn, case.k, operand.itemsize)
        np.testing.assert_array_equal(theirs, offsets, err_msg="not the same bytes: the case maps layouts wrongly")

    rows = case.m if tcgen05 else 64
    instructions = list(itertools.product(range(case.k // a.k_per_instruction), range(0, case.m, rows)))
    b_start = -(-a_layout.nbytes // 1024) * 1024
    for base in _bases(b_start + b_layout.nbytes):
        uses = ptx.Evaluator(base).run(compiled.ptx, r"wgmma\.mma_async|tcgen05\.mma")
        assert len(uses) == len(instructions)
        for use, (step, row) in zip(uses, instructions, strict=True):
            a_word, b_word = use.operands[1:3]
            _check_word(a_word, a, base, row, rows, step, a_offsets[:, :, cute.SLOT], tcgen05)
            _check_word(b_word, b, base + b_start, 0, case.n, step, b_offsets[:, :, cute.SLOT], tcgen05)
            _check_instruction(use, case)


def _check_instruction(use, case: Case) -> None:
    """The rest of it: tcgen05's instruction descriptor; wgmma's name and what it says of negation and majors."""
    majors = (case.a.mn_major, case.b.mn_major)
    if case.arch == "sm_100a":
        kind = TCGEN05_TYPES[case.a_type][0]
        instruction = Instruction(kind, case.a_type, case.b_type, "float32", case.m, case.n, *majors)
        assert use.operands[3] == instruction.encode()
        return
    acc = "s32" if "int8" in case.a_type else "f32"
    kinds = (WGMMA_KINDS[case.a_type], WGMMA_KINDS[case.b_type], acc)
    _, text = wgmma_function(case.n, *kinds, False, *majors, "dynamic")
    found = re.search(r"(wgmma\.mma_async\S+) .*accumulate([^;]*);", text)
    assert found is not None
    immediates = [int(x) for x in found[2].split(",") if x.strip()]
    name = use.name.replace(".satfinite", "")  # CuTe DSL saturates integer sums; ours wrap, as JAX's do
    assert (name, list(use.operands[4:])) == (found[1], immediates)


@pytest.mark.parametrize("case", _quick(), ids=str)
def test_words(cute, ptx, case):
    _check(cute, ptx, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", _more(), ids=str)
def test_words_of_all_pairs(cute, ptx, case):
    _check(cute, ptx, case)


@pytest.mark.parametrize("small", BOOLS)
@pytest.mark.parametrize("swizzle", [128, 64, 32])
def test_float32(cute, ptx, swizzle, small):
    """tf32, through tcgen05: CuTe DSL has no wgmma of it, and the two descriptors differ in the version only."""
    side = Side(False, swizzle, small)
    _check(cute, ptx, Case("sm_100a", "float32", "float32", side, side, 128, 64, 64))


@pytest.mark.parametrize("small", BOOLS)
@pytest.mark.parametrize("swizzle", [128, 64, 32])
@pytest.mark.parametrize("a_mn, b_mn", [(False, True), (True, False), (True, True)])
def test_fp8_across(cute, ptx, swizzle, small, a_mn, b_mn):
    """MN-major fp8: tcgen05 takes it, wgmma does not."""
    case = Case("sm_100a", *FP8, Side(a_mn, swizzle, small), Side(b_mn, swizzle, small), 128, 128, 128)
    _check(cute, ptx, case)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("swizzle", [128, 64, 32])
def test_stores(cute, ptx, arch, dtype, swizzle):
    """The swizzle of a thread's store, as CuTe DSL compiles it, is that of `SharedLayout.byte_offsets`."""
    places = ((0, 0, 0), (3, 17, 0), (5, 127, 1), (9, 20, 1), (37, 63, 0), (63, 5, 1), (62, 101, 1))
    for mn_major, small in itertools.product(BOOLS, BOOLS):
        mn = 128 if mn_major else 64
        rows, columns = (128, mn) if mn_major else (mn, 128)
        tile = (8 if small else rows, swizzle // itemsize(dtype))
        offsets = SharedLayout((2, rows, columns), dtype, tile, swizzle).byte_offsets()
        want = [int(offsets[(s, k, i) if mn_major else (s, i, k)]) for i, k, s in places]
        side = Side(mn_major, swizzle, small)
        compiled = cute.stores(arch, dtype, side.for_cute, mn, 128, places)
        for base in _bases(2 * offsets.size * itemsize(dtype)):
            uses = ptx.Evaluator(base).run(compiled.ptx, r"st\.shared")
            assert sorted(use.operands[0] for use in uses) == sorted(base + x for x in want), side
