"""Every mma.sync that our table has, against exact sums: each pair of types with each accumulator, and each way in which operands
come into registers.

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

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu import ds
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.codegen.prelude import prelude_for
from mosaic_gpu.errors import ToolchainError, UnsupportedCall
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
    """One kernel.  acc: what it adds in; swizzle: bytes, 0 for rows that are not swizzled, None for operands in arrays."""

    a: str
    b: str
    acc: str
    swizzle: int | None
    a_mn: bool = False
    b_mn: bool = False

    @property
    def emulated(self) -> bool:
        """Whether ptxas makes it of other instructions."""
        return self.a in FLOAT8

    @property
    def precision(self) -> lax.DotAlgorithmPreset | None:
        """What asks for this accumulator."""
        preset = lax.DotAlgorithmPreset
        return (preset.ANY_F8_ANY_F8_ANY if self.a in FLOAT8 else preset.F16_F16_F16) if self.acc == "float16" else None

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        step = 4 if self.a == "float64" else 32 // itemsize(self.a)  # of float64 a quarter of an instruction's
        shapes = SHAPES if self.swizzle is not None else IN_ARRAYS
        # One warp has all of 80 x 40, which leaves no registers for what float8 is converted to.
        return tuple((m, 24 if self.emulated and m == 80 else n, k * step) for m, n, k in shapes)

    @property
    def k(self) -> int:
        return K_BYTES // itemsize(self.a)

    def __str__(self) -> str:
        where = "arrays" if self.swizzle is None else f"swizzle{self.swizzle}"
        return f"{self.a}-{self.b}-{self.acc}-{'mn' if self.a_mn else 'k'}-{'mn' if self.b_mn else 'k'}-{where}"


def kinds() -> tuple[tuple[str, str, str], ...]:
    """(A, B, accumulator) for which there is an instruction, by its name in the prelude."""
    accumulators = {"f32": "float32", "f16": "float16", "s32": "int32", "f64": "float64"}
    text = prelude_for("mma_f16_f16(")
    names = re.findall(r"mma\.sync\.aligned\.m16n8k\d+\.row\.col\.(\w+)\.(\w+)\.(\w+)\.(\w+)", text)
    assert all(c == d for c, _, _, d in names)
    known = {(a, b, accumulators[c]) for c, a, b, _ in names}
    every = itertools.product(TILES, TILES, accumulators.values())
    return tuple((a, b, acc) for a, b, acc in every if (TILES[a], TILES[b], acc) in known)


def cases() -> Iterator[Case]:
    for a, b, acc in kinds():
        majors = (False, True) if itemsize(a) == 2 else (False,)
        yield Case(a, b, acc, None)
        if a == "float64":  # which always goes through the scratch
            continue
        for swizzle, a_mn, b_mn in itertools.product((0, 32, 64, 128), majors, majors):
            yield Case(a, b, acc, swizzle, a_mn, b_mn)


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


def operands(a: Any, b: Any, scratch: Any) -> tuple[Any, Any]:
    """A and B where a product reads them: in the two buffers of `scratch`, whose barrier counts both copies, if there are any."""
    if not scratch:
        return a, b
    *tiles, full = scratch
    for x, tile in zip((a, b), tiles, strict=True):
        plgpu.copy_gmem_to_smem(x, tile, full)
    plgpu.barrier_wait(full)
    return tiles[0], tiles[1]


def kernel_of(case: Case) -> Any:
    def part(ref: Any, mn_major: bool, lines: Any, along: Any) -> Any:
        return ref[along, lines] if mn_major else ref[lines, along]

    def body(a: Any, b: Any, c: Any, *refs: Any) -> None:
        outs = refs[: len(case.shapes)]
        a, b = operands(a, b, refs[len(case.shapes) :])
        contracted = (((0 if case.a_mn else 1,), (0 if case.b_mn else 1,)), ((), ()))
        for i, (o, (m, n, k)) in enumerate(zip(outs, case.shapes, strict=True)):
            x = part(a, case.a_mn, ds(M - m, m), ds(case.k - k, k))
            y = part(b, case.b_mn, ds(N - n, n), ds(case.k - k, k))
            start = jnp.broadcast_to(c[ds(M - m, m)][:, None], (m, n)) if i % 2 else None
            if start is not None and case.acc in MMA_TYPES.get(case.a, ()) and not case.a_mn and case.b_mn:
                o[...] = plgpu.mma(start, x, y)
                continue
            product = lax.dot_general(x, y, contracted, precision=case.precision, preferred_element_type=case.acc)
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
        compiler_params=plgpu.CompilerParams(strict=not case.emulated),
    )


def check(case: Case, seed: int = 0) -> None:
    """The kernel, in the simulator or on a GPU, against the exact sums."""
    arrays = arrays_of(case, seed)
    with types_of(case):
        results = kernel_of(case)(*arrays)
    for shape, found, exact in zip(case.shapes, results, expected(case, *arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(found), exact, err_msg=f"{case}, m, n, k = {shape}", strict=True)


def types_of(case: Case) -> Any:
    """The context in which JAX has the case's types."""
    return jax.enable_x64(case.a == "float64")


# ---- tests ----------------------------------------------------------------------------------------------------------
IN_SAMPLE = ((False, False, 128), (False, True, 64), (True, False, 0), (True, True, 32))  # majors of A and B, swizzle
SAMPLE = tuple(c for c in CASES if c.swizzle is None or (c.a_mn, c.b_mn, c.swizzle) in IN_SAMPLE)


def plan_of(case: Case, arch: str = "sm_90a") -> Plan:
    with types_of(case):
        return build_plan(program_of(kernel_of(case), arrays_of(case)), arch)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if c in SAMPLE else [pytest.mark.slow]) for c in CASES]
)
def test_exact(case):
    check(case)


def always_compiled(case: Case) -> bool:
    """Of those that are not slow, one in ten, and what is not like float16 and integers."""
    return case in SAMPLE[1::10] or (
        case.swizzle is None and (case.a in ("float64", "float8_e5m2") or case.acc == "float16")
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if always_compiled(c) else [pytest.mark.slow]) for c in CASES]
)
def test_compiles(case, arch, compiled):
    """On the tensor cores, every product with its operands where the case has them; nothing spilled, what is emulated says so."""
    plan = plan_of(case, arch)
    steps = [s for s in plan.roles[0].body.steps if isinstance(s.data, Dot)]
    if arch == "sm_90a":  # of the others tcgen05 takes some
        assert [(s.data.m, s.data.n, s.data.k) for s in steps] == list(case.shapes)
        assert {isinstance(o, View) for s in steps for o in s.equation.operands[:2]} == {case.swizzle is not None}
    assert {(s.data.kind, s.data.acc) for s in steps} == {(f"{TILES[case.a]}_{TILES[case.b]}", case.acc)}
    report = compiled(plan)
    said = report.complaints()
    assert said == list(report.emulated) and len(said) == case.emulated
    assert all(f".{TILES[case.a]}.{TILES[case.b]}." in s and f"is emulated on {arch}" in s for s in said)
    assert report.mnemonics[{"int32": "IMMA", "float64": "DMMA"}.get(case.acc, "HMMA")] >= len(steps)


def test_what_is_emulated_is_refused_under_strict():
    case = next(c for c in CASES if c.emulated and c.swizzle is None)
    plan = plan_of(case)
    strict = dataclasses.replace(plan.program.params, strict=True)
    with pytest.raises(ToolchainError, match="is emulated on sm_90a"):
        compile_plan(dataclasses.replace(plan, program=dataclasses.replace(plan.program, params=strict)))


def test_the_cases_are_the_whole_table():
    """The prelude has an instruction for each (A, B, accumulator) that `plgpu.mma` takes, and for tf32; there is no other."""

    def taken(a: str, b: str, acc: str) -> bool:
        with jax.enable_x64(True):
            x, y = (jnp.zeros(s, dtype_of(t)) for s, t in (((16, 32), a), ((32, 8), b)))
            try:
                jax.eval_shape(plgpu.mma, jnp.zeros((16, 8), acc), x, y)
            except TypeError:
                return False
            return True

    names = (*KINDS, "float64")
    every = itertools.product(names, names, ("float16", "bfloat16", "float32", "float64", "int32"))
    assert set(kinds()) == {k for k in every if taken(*k)} | {("float32", "float32", "float32")}
    assert {(c.a, c.b, c.acc) for c in CASES} == {(c.a, c.b, c.acc) for c in SAMPLE} == set(kinds())


@pytest.mark.parametrize("a", FLOAT8)
def test_float8_is_not_added_in_float64(a):
    def body(x: Any, y: Any, o: Any) -> None:
        o[...] = lax.dot_general(x[...], y[...], (((1,), (0,)), ((), ())), preferred_element_type=np.float64)

    with jax.enable_x64(True):
        kernel = plgpu.kernel(body, out(16, 8, dtype=np.float64))
        with pytest.raises(UnsupportedCall, match="its sums are in float32 or float16"):
            build_plan(kernel.program(out(16, 32, dtype=dtype_of(a)), out(32, 8, dtype=dtype_of(a))), "sm_90a")


def half_sums(a: np.ndarray, b: np.ndarray, step: int) -> np.ndarray:
    """a @ b, rounded to float16 after each `step` of K."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float16)
    for k in range(0, a.shape[1], step):
        total = (total + a[:, k : k + step].astype(np.float64) @ b[k : k + step].astype(np.float64)).astype(np.float16)
    return total


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_float16_sums_are_rounded_on_the_way(dtype):
    """Sums of so many whole numbers are exact in float32, whatever their order, and not in float16."""
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-15, 16, s).astype(dtype_of(dtype)) for s in ((32, 512), (512, 16)))
    case = next(c for c in CASES if c.a == c.b == dtype and c.acc == "float16")

    def product(precision: Any) -> np.ndarray:
        def body(x: Any, y: Any, o: Any) -> None:
            o[...] = jnp.dot(x[...], y[...], precision=precision, preferred_element_type=jnp.float16)

        return np.asarray(plgpu.kernel(body, out(32, 16, dtype=np.float16))(a, b))

    halves, floats = product(case.precision), product(None)
    np.testing.assert_array_equal(floats, (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16))
    np.testing.assert_array_equal(halves, half_sums(a, b, 32 // itemsize(dtype)))
    assert (halves != floats).mean() > 0.1
