"""Every mma.sync that our table has, against exact sums: each pair of types, and each way in which operands come into registers.

Through the warpgroup's scratch from arrays, or by ldmatrix from shared memory: lines of K or (16 bits) of M and N, each swizzle
and none.  A kernel has several shapes, so that one or more tiles of 16 x 8 fall to each warp, along rows or columns.  The numbers
are those of the wgmma matrix (`test_wgmma_matrix.py`): every sum is exact.  `tests/gpu/test_mma_matrix.py` runs all on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import ds
from mosaic_gpu.codegen.prelude import prelude_for
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.layouts.shared import itemsize
from mosaic_gpu.ops.dot import MMA_TYPES, TILES, Dot
from mosaic_gpu.ops.elementwise import FLOAT8
from mosaic_gpu.ops.wgmma import KINDS
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.program import View
from tests.kernels.test_wgmma_matrix import exactly, numbers
from tests.support import dtype_of, out, program_of

M, N, K_BYTES = 128, 64, 128  # of A and B; a product takes the last rows, columns and bytes of K
SHAPES = ((16, 8, 1), (16, 64, 4), (32, 24, 2), (48, 16, 4), (80, 40, 3), (96, 8, 2))  # m, n, instructions along K
IN_ARRAYS = (
    (16, 64, 1),
    (32, 8, 2),
    (64, 24, 2),
    (24, 12, 4),
    (7, 5, 1),
    (96, 8, 3),
)  # also where wgmma goes, and parts of tiles


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel.  swizzle: bytes, 0 for rows that are not swizzled, None for operands in arrays."""

    a: str
    b: str
    swizzle: int | None
    a_mn: bool = False
    b_mn: bool = False

    @property
    def acc(self) -> str:
        return "int32" if "int8" in self.a else "float32"

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        step = 32 // itemsize(self.a)
        shapes = SHAPES if self.swizzle is not None else IN_ARRAYS
        return tuple((m, n, k * step) for m, n, k in shapes)

    @property
    def k(self) -> int:
        return K_BYTES // itemsize(self.a)

    def __str__(self) -> str:
        where = "arrays" if self.swizzle is None else f"swizzle{self.swizzle}"
        return f"{self.a}-{self.b}-{'mn' if self.a_mn else 'k'}-{'mn' if self.b_mn else 'k'}-{where}"


def pairs() -> tuple[tuple[str, str], ...]:
    """Those for which there is an instruction."""
    known = set(re.findall(r"MOSAIC_MMA\(mma_(\w+),", prelude_for("mma_f16_f16(")))
    return tuple((a, b) for a, b in itertools.product(TILES, TILES) if f"{TILES[a]}_{TILES[b]}" in known)


def cases() -> Iterator[Case]:
    for a, b in pairs():
        majors = (False, True) if itemsize(a) == 2 else (False,)
        yield Case(a, b, None)
        for swizzle, a_mn, b_mn in itertools.product((0, 32, 64, 128), majors, majors):
            yield Case(a, b, swizzle, a_mn, b_mn)


CASES = tuple(cases())


def arrays_of(case: Case, seed: int = 0) -> tuple[np.ndarray, ...]:
    """A and B as they lie in memory, and what the rows of sums start from."""
    a, b, c = numbers(case.a, case.b, case.acc, M, N, case.k, seed)
    x, y = exactly(a, case.a), exactly(b, case.b)
    return x.T.copy() if case.a_mn else x, y if case.b_mn else y.T.copy(), exactly(c[:, 0], case.acc)


def expected(case: Case, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    wide = np.int64 if case.acc == "int32" else np.float64
    x, y = (a.T if case.a_mn else a).astype(wide), (b if case.b_mn else b.T).astype(wide)
    found = []
    for i, (m, n, k) in enumerate(case.shapes):
        total = x[M - m :, case.k - k :] @ y[case.k - k :, N - n :] + (c[M - m :, None].astype(wide) if i % 2 else 0)
        found.append(total.astype(case.acc))
    return found


def kernel_of(case: Case) -> Any:
    def part(ref: Any, mn_major: bool, lines: Any, along: Any) -> Any:
        return ref[along, lines] if mn_major else ref[lines, along]

    def body(a: Any, b: Any, c: Any, *refs: Any) -> None:
        outs, scratch = refs[: len(case.shapes)], refs[len(case.shapes) :]
        if scratch:
            *tiles, full = scratch
            plgpu.copy_gmem_to_smem(a, tiles[0], full)
            plgpu.copy_gmem_to_smem(b, tiles[1], full)
            plgpu.barrier_wait(full)
            a, b = tiles
        contracted = (((0 if case.a_mn else 1,), (0 if case.b_mn else 1,)), ((), ()))
        for i, (o, (m, n, k)) in enumerate(zip(outs, case.shapes, strict=True)):
            x = part(a, case.a_mn, ds(M - m, m), ds(case.k - k, k))
            y = part(b, case.b_mn, ds(N - n, n), ds(case.k - k, k))
            start = jnp.broadcast_to(c[ds(M - m, m)][:, None], (m, n)) if i % 2 else None
            if start is not None and case.a in MMA_TYPES and not case.a_mn and case.b_mn:
                o[...] = plgpu.mma(start, x, y)
                continue
            product = lax.dot_general(x, y, contracted, preferred_element_type=case.acc)
            o[...] = product if start is None else start + product

    def tile(mn: int, mn_major: bool, dtype: str) -> Any:
        columns = (case.swizzle or 0) // itemsize(dtype)
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(case.swizzle)) if columns else ()
        return plgpu.SMEM((case.k, mn) if mn_major else (mn, case.k), dtype_of(dtype), transforms=transforms)

    scratch = [tile(M, case.a_mn, case.a), tile(N, case.b_mn, case.b), plgpu.Barrier(num_arrivals=2)]
    return plgpu.kernel(
        body,
        [out(m, n, dtype=dtype_of(case.acc)) for m, n, _ in case.shapes],
        scratch_types=scratch if case.swizzle is not None else [],
        compiler_params=plgpu.CompilerParams(strict=True),
    )


def check(case: Case, seed: int = 0) -> None:
    """The kernel, in the simulator or on a GPU, against the exact sums."""
    arrays = arrays_of(case, seed)
    for shape, found, exact in zip(case.shapes, kernel_of(case)(*arrays), expected(case, *arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(found), exact, err_msg=f"{case}, m, n, k = {shape}", strict=True)


# ---- tests ----------------------------------------------------------------------------------------------------------
IN_SAMPLE = ((False, False, 128), (False, True, 64), (True, False, 0), (True, True, 32))  # majors of A and B, swizzle
SAMPLE = tuple(c for c in CASES if c.swizzle is None or (c.a_mn, c.b_mn, c.swizzle) in IN_SAMPLE)


def plan_of(case: Case) -> Plan:
    return build_plan(program_of(kernel_of(case), arrays_of(case)), "sm_90a")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if c in SAMPLE else [pytest.mark.slow]) for c in CASES]
)
def test_exact(case):
    check(case)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if c in SAMPLE[1::10] else [pytest.mark.slow]) for c in CASES]
)
def test_compiles(case, compiled):
    """On the tensor cores, every product with its operands where the case has them; nothing spilled."""
    plan = plan_of(case)
    steps = [s for s in plan.roles[0].body.steps if isinstance(s.data, Dot)]
    assert [(s.data.m, s.data.n, s.data.k) for s in steps] == list(case.shapes)
    assert {s.data.kind for s in steps} == {f"{TILES[case.a]}_{TILES[case.b]}"}
    assert {isinstance(o, View) for s in steps for o in s.equation.operands[:2]} == {case.swizzle is not None}
    report = compiled(plan)
    assert report.complaints() == [] and report.mnemonics["IMMA" if case.acc == "int32" else "HMMA"] >= len(steps)


def test_the_cases_are_the_whole_table():
    """The prelude has an instruction for each pair that `plgpu.mma` takes, and for tf32; there is no other."""

    def taken(a: str, b: str) -> bool:
        x, y = (jnp.zeros(s, dtype_of(t)) for s, t in (((16, 32), a), ((32, 8), b)))
        try:
            plgpu.mma(jnp.zeros((16, 8), np.int32 if "int8" in a else np.float32), x, y)
        except TypeError:
            return False
        return True

    assert set(pairs()) == {(a, b) for a, b in itertools.product(KINDS, KINDS) if taken(a, b)} | {
        ("float32", "float32")
    }
    assert {(c.a, c.b) for c in CASES} == {(c.a, c.b) for c in SAMPLE} == set(pairs())


@pytest.mark.parametrize(("a", "b"), [*itertools.product(FLOAT8, FLOAT8)])
def test_there_is_none_of_float8(a, b):
    """Which ptxas would make of conversions and float16: in registers it is refused, with the way out."""

    def body(x: Any, y: Any, o: Any) -> None:
        o[...] = lax.dot_general(x[...], y[...], (((1,), (0,)), ((), ())), preferred_element_type=np.float32)

    kernel = plgpu.kernel(body, out(16, 8))
    with pytest.raises(UnsupportedCall, match="convert with astype first"):
        build_plan(kernel.program(out(16, 32, dtype=dtype_of(a)), out(32, 8, dtype=dtype_of(b))), "sm_90a")
