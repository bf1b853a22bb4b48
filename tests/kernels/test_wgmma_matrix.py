"""Every wgmma that our table allows, against exact sums: each pair of types, source of A, majors and swizzle with each N.

A kernel here has the products of one (types, source, majors, swizzle, tiling) with half of the legal N, one after the other: four
instructions along K that overwrite the accumulator, or add to one that was loaded, and four that add to what those left.  The
numbers are such that every sum is exact in the accumulator, in any order: what differs from float64 (int64) at all is wrong.

`tests/gpu/test_mma_matrix.py` runs all of it on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu import Layout, ds
from mosaic_gpu.codegen.wgmma_text import wgmma_product
from mosaic_gpu.errors import IllegalInstruction
from mosaic_gpu.layouts.operands import SharedOperand
from mosaic_gpu.layouts.shared import itemsize
from mosaic_gpu.ops.wgmma import KINDS, TYPES, WgmmaPlan
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Block, Plan
from tests.support import dtype_of, out, program_of

SWIZZLES = (128, 64, 32)
ACCUMULATORS = {"float32": "f32", "float16": "f16", "int32": "s32"}
STORED = {"b1": "uint8"}  # of which each byte has eight along K
M, N = 128, 256  # rows of A and columns of B in shared memory; products take the last of them
K_BYTES = 256  # of each row: eight instructions, four in each product


@dataclasses.dataclass(frozen=True)
class Class:
    """What is fixed in the name of an instruction but N.  registers: A is there."""

    a: str
    b: str
    acc: str
    registers: bool
    a_mn: bool
    b_mn: bool

    def legal(self, n: int) -> bool:
        """By the emitter's table of instructions."""
        majors = (self.registers, self.a_mn, self.b_mn)
        try:
            wgmma_product(n, KINDS[self.a], KINDS[self.b], ACCUMULATORS[self.acc], *majors, False)
        except IllegalInstruction:
            return False
        return True

    def __str__(self) -> str:
        source = "registers" if self.registers else "mn" if self.a_mn else "k"
        return f"{self.a}-{self.b}-{self.acc}-{source}-{'mn' if self.b_mn else 'k'}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel.  a_swizzle, b_swizzle: bytes; tall: a tile has all rows of its buffer, else 8; ns: N of its products."""

    kind: Class
    a_swizzle: int
    b_swizzle: int
    tall: bool
    ns: tuple[int, ...]

    @property
    def k(self) -> int:
        return K_BYTES // itemsize(stored(self.kind.a))

    def adds(self, i: int) -> bool:
        """Whether the i-th product starts from numbers in the accumulator."""
        return (i + SWIZZLES.index(self.b_swizzle)) % 2 == 0

    def __str__(self) -> str:
        return f"{self.kind}-{self.a_swizzle}-{self.b_swizzle}-{'tall' if self.tall else 'small'}"


def classes() -> Iterator[tuple[Class, tuple[int, ...]]]:
    """All that have a legal N, and which."""
    flags = itertools.product((False, True), repeat=3)
    for a, b, acc, majors in itertools.product(KINDS, KINDS, ACCUMULATORS, tuple(flags)):
        kind = Class(a, b, acc, *majors)
        ns = tuple(n for n in range(8, 257, 8) if kind.legal(n))
        if ns:
            yield kind, ns


def cases() -> Iterator[Case]:
    for i, (kind, ns) in enumerate(classes()):
        for j, tall in itertools.product(range(3), (False, True)):
            yield Case(kind, SWIZZLES[(i + j) % 3], SWIZZLES[j], tall, ns[tall::2])


CASES = tuple(cases())


def stored(kind: str) -> str:
    return STORED.get(kind, kind)


def fragment(kind: str) -> Layout:
    """In which layout an array is A."""
    return {1: Layout.WGMMA_8BIT, 2: Layout.WGMMA, 4: Layout.WGMMA_TF32}[itemsize(stored(kind))]


# ---- the numbers ----------------------------------------------------------------------------------------------------
def numbers(
    a_type: str, b_type: str, acc: str, m: int, n: int, k: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A (m, k), B (k, n) and what an accumulator starts from (m, n), in float64 or int64.

    Floats are whole numbers times a power of two that is each row's (of A), and each column's (of B), own: so all terms of a
    sum have one unit, and no sum has more units than its accumulator counts.  Of float8 the tensor core adds with few bits
    (on Hopper about 14), and a float16 accumulator has 11: there a row of A has one number in each eighth of K, another row
    at another place, and zeros.
    """
    rng = np.random.default_rng(seed)
    if acc == "int32":
        limits = {"int8": (-128, 128), "uint8": (0, 256), "b1": (0, 256)}
        a, b = rng.integers(*limits[a_type], (m, k)), rng.integers(*limits[b_type], (k, n))
        return a, b, rng.integers(-(2**31), 2**31, (m, n))  # sums wrap
    few = acc == "float16" or itemsize(a_type) == 1

    def whole(dtype: str, *shape: int) -> np.ndarray:
        most = 7 if dtype == "float8_e5m2" else 15 if few else 255
        return rng.integers(1, most + 1, shape) * rng.choice((-1, 1), shape)

    a, b, c = whole(a_type, m, k), whole(b_type, k, n), rng.integers(-25, 26, (m, n))
    if few:
        width = k // 8
        places = np.stack([rng.permutation(width) for _ in range(8)])[:, np.arange(m) % width]  # [eighth, row]
        a *= np.any(np.arange(k) == (places + width * np.arange(8)[:, None])[..., None], axis=0)
    most = np.abs(a) @ np.abs(b) + np.abs(c)
    assert most.max() <= (2**11 if few else 2**22)
    rows, columns = (np.exp2(rng.integers(-2, 2, shape)) for shape in ((m, 1), (1, n)))
    return a * rows, b * columns, c * rows * columns


def exactly(x: np.ndarray, dtype: str) -> np.ndarray:
    """x in a type that has all its values."""
    found = x.astype(dtype_of(stored(dtype)))
    np.testing.assert_array_equal(found.astype(x.dtype), x)
    return found


def arrays_of(case: Case, seed: int = 0) -> tuple[np.ndarray, ...]:
    """A and B as they lie in shared memory, and what accumulators start from."""
    kind = case.kind
    a, b, c = numbers(kind.a, kind.b, kind.acc, M, N, case.k, seed)
    x, y = exactly(a, kind.a), exactly(b, kind.b)
    return x.T.copy() if kind.a_mn else x, y if kind.b_mn else y.T.copy(), exactly(c, kind.acc)


def expected(case: Case, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    wide = np.int64 if case.kind.acc == "int32" else np.float64
    x = (a.T if case.kind.a_mn else a).astype(wide)
    y = (b if case.kind.b_mn else b.T).astype(wide)
    if case.kind.a == "b1":
        x, y = (np.unpackbits(z.astype(np.uint8), axis=axis).astype(wide) for z, axis in ((x, 1), (y, 0)))
    found = []
    for i, n in enumerate(case.ns):
        m, start = rows_of(case, i), start_of(case, n)
        total = x[M - m :] @ y[:, start : start + n] + (
            c[M - m :, start : start + n].astype(wide) if case.adds(i) else 0
        )
        found.append(total.astype(np.int32 if wide is np.int64 else case.kind.acc))
    return found


# ---- the kernel -----------------------------------------------------------------------------------------------------
def rows_of(case: Case, i: int) -> int:
    """Of a product: two instructions for each 32 bytes of K where registers are few, and none of them is set before."""
    return 64 if case.kind.registers or case.ns[i] > 64 or case.adds(i) else 128


def start_of(case: Case, n: int) -> int:
    """The first column of B that a product of n takes: near the end, where an operand may start."""
    unit = case.b_swizzle // itemsize(stored(case.kind.b)) if case.kind.b_mn else 8
    return (N - n) // unit * unit


def tile_of(case: Case, operand: str, k: int) -> Any:
    """A or B in shared memory."""
    if operand == "a":
        mn, mn_major, dtype, swizzle = M, case.kind.a_mn, stored(case.kind.a), case.a_swizzle
    else:
        mn, mn_major, dtype, swizzle = N, case.kind.b_mn, stored(case.kind.b), case.b_swizzle
    shape = (k, mn) if mn_major else (mn, k)
    tiling = plgpu.TilingTransform((shape[0] if case.tall else 8, swizzle // itemsize(dtype)))
    return plgpu.SMEM(shape, dtype_of(dtype), transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def part(tile: Any, mn_major: bool, first: int, size: int, along: Any, k_axis: int) -> Any:
    """`size` rows of A (k_axis 1) or columns of B (0) from `first` on, some of K."""
    lines = ds(first, size)
    ref = tile.at[along, lines] if mn_major else tile.at[lines, along]
    return ref.transpose((1, 0)) if mn_major == (k_axis == 1) else ref


def bits_of(kind: Class) -> str | None:
    return "and" if kind.a == "b1" else None


def kernel_of(case: Case) -> Any:
    kind = case.kind
    halves = [ds(step * case.k // 2, case.k // 2) for step in range(2)]

    def body(a: Any, b: Any, c: Any, *refs: Any) -> None:
        *outs, a_tile, b_tile, full = refs
        plgpu.copy_gmem_to_smem(a, a_tile, full)
        plgpu.copy_gmem_to_smem(b, b_tile, full)
        plgpu.barrier_wait(full)
        loaded = [plgpu.load(a_tile.at[ds(M - 64, 64), k], layout=fragment(kind.a)) for k in halves if kind.registers]
        for i, (n, o) in enumerate(zip(case.ns, outs, strict=True)):
            m = rows_of(case, i)

            def compute(acc: Any, i: int = i, m: int = m, n: int = n) -> Any:
                if case.adds(i):
                    acc[...] = c[ds(M - m, m), ds(start_of(case, n), n)]
                for step, k in enumerate(halves):
                    x = loaded[step] if kind.registers else part(a_tile, kind.a_mn, M - m, m, k, 1)
                    plgpu.wgmma(acc, x, part(b_tile, kind.b_mn, start_of(case, n), n, k, 0), bits=bits_of(kind))
                    plgpu.wgmma_wait(0)
                return acc[...]

            o[...] = plgpu.run_scoped(compute, plgpu.ACC((m, n), dtype_of(kind.acc)))

    tiles = [tile_of(case, operand, case.k) for operand in "ab"]
    return plgpu.kernel(
        body,
        [out(rows_of(case, i), n, dtype=dtype_of(kind.acc)) for i, n in enumerate(case.ns)],
        scratch_types=[*tiles, plgpu.Barrier(num_arrivals=2)],
        compiler_params=plgpu.CompilerParams(strict=True),  # which no spill and no serialised product passes
    )


def check(case: Case, seed: int = 0) -> None:
    """The kernel, in the simulator or on a GPU, against the exact sums."""
    arrays = arrays_of(case, seed)
    for n, found, exact in zip(case.ns, kernel_of(case)(*arrays), expected(case, *arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(found), exact, err_msg=f"{case}, n = {n}", strict=True)


# ---- tests ----------------------------------------------------------------------------------------------------------
SAMPLE = tuple(CASES[6 * i + i % 6] for i in range(len(CASES) // 6))  # each class, with swizzles and tilings in turn
MATRIX = [pytest.param(c, id=str(c), marks=[] if c in SAMPLE else [pytest.mark.slow]) for c in CASES]


def plan_of(case: Case) -> Plan:
    return build_plan(program_of(kernel_of(case), arrays_of(case)), "sm_90a")


def first_products(plan: Plan) -> set[tuple[Any, ...]]:
    """(class, N, swizzles of A and B, whether it adds) of the first product into each accumulator, and instructions along K."""
    found: dict[int, tuple[Any, ...]] = {}

    def visit(block: Block) -> None:
        for step in block.steps:
            p = step.data
            if isinstance(p, WgmmaPlan) and p.acc not in found:
                shared = isinstance(p.a, SharedOperand)
                kind = Class(p.a_type, p.b_type, p.acc_type, not shared, shared and p.a.mn_major, p.b.mn_major)
                found[p.acc] = kind, p.n, p.a.swizzle if shared else 0, p.b.swizzle, p.init == "add", p.k // p.k_step
            for region in step.regions:
                visit(region)

    visit(plan.roles[0].body)
    return set(found.values())


@pytest.mark.parametrize("case", MATRIX)
def test_exact(case):
    check(case)


def test_the_cases_are_the_whole_table():
    """Each class with each N, each swizzle of B and each of A; each class with each swizzle and tiling."""
    assert len(CASES) <= 300
    for kind, ns in classes():
        own = [c for c in CASES if c.kind == kind]
        assert {(c.b_swizzle, n) for c in own for n in c.ns} == set(itertools.product(SWIZZLES, ns))
        assert {(c.a_swizzle, n) for c in own for n in c.ns} == set(itertools.product(SWIZZLES, ns))
        assert {(c.b_swizzle, c.tall) for c in own} == set(itertools.product(SWIZZLES, (False, True)))
    assert {(k.a, k.b, k.acc) for k, _ in classes()} == {
        (a, b, acc) for a, (bs, accs) in TYPES.items() for b in bs for acc in accs
    }
    assert {c.kind for c in SAMPLE} == {kind for kind, _ in classes()}


@pytest.mark.parametrize("case", SAMPLE[::5], ids=str)
def test_the_plan_has_what_the_case_says(case):
    wanted = {
        (case.kind, n, 0 if case.kind.registers else case.a_swizzle, case.b_swizzle, case.adds(i), 4)
        for i, n in enumerate(case.ns)
    }
    assert first_products(plan_of(case)) == wanted


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if c in SAMPLE[4:5] else [pytest.mark.slow]) for c in CASES]
)
def test_compiles(case, compiled):
    """Nothing spilled, no product serialised; each is one instruction, none is emulated."""
    report = compiled(plan_of(case))
    assert report.complaints() == []
    instructions = sum(8 * rows_of(case, i) // 64 for i in range(len(case.ns)))
    assert sum(report.mnemonics.get(m, 0) for m in ("HGMMA", "QGMMA", "IGMMA", "BGMMA")) == instructions


def test_what_the_table_lacks_is_refused():
    """By the op: other pairs of types, majors of 8 and 32 bits, N in between."""
    legal = dict(classes())
    flags = itertools.product((False, True), repeat=3)
    kinds = [Class(a, b, acc, *f) for a, b, acc, f in itertools.product(KINDS, KINDS, ACCUMULATORS, tuple(flags))]
    of_bits = {k for k in kinds if (k.a == "b1") != (k.b == "b1")}  # an argument, not a type
    outside = [(k, 64) for k in kinds if k not in legal and k not in of_bits and not (k.registers and k.a_mn)]
    outside += [
        (k, n) for k, ns in legal.items() for n in range(8, 257, 8) if n not in ns and not (k.registers or k.b_mn)
    ]
    assert len(outside) > 400
    for kind, n in outside:
        case = Case(kind, 32, 32, False, (n,))
        with pytest.raises(IllegalInstruction, match="wgmma|contiguous along K"):
            one_product(case)


def one_product(case: Case) -> Plan:
    """Of 64 rows and 32 of K."""
    kind, k = case.kind, ds(0, 32)

    def body(a: Any, o: Any, a_tile: Any, b_tile: Any) -> None:
        x = plgpu.load(a, layout=fragment(kind.a)) if kind.registers else part(a_tile, kind.a_mn, 0, 64, k, 1)

        def compute(acc: Any) -> Any:
            plgpu.wgmma(acc, x, part(b_tile, kind.b_mn, 0, case.ns[0], k, 0), bits=bits_of(kind))
            return acc[...]

        o[...] = plgpu.run_scoped(compute, plgpu.ACC((64, case.ns[0]), dtype_of(kind.acc)))

    given, result = (
        out(64, 32, dtype=dtype_of(stored(kind.a))),
        out(64, case.ns[0], dtype=dtype_of(kind.acc)),
    )
    kernel = plgpu.kernel(body, result, scratch_types=[tile_of(case, "a", 32), tile_of(case, "b", 32)])
    return build_plan(kernel.program(given), "sm_90a")
