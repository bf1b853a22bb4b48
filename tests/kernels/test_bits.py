"""Products of bits: `plgpu.mma(bits=)` of arrays, and of shared memory with each swizzle, where `wgmma(bits=)` takes some, too.

`wgmma` by itself is in the matrix of `test_wgmma_matrix.py`.  `tests/gpu/test_mma_matrix.py` runs these on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu import ds
from mosaic_gpu.errors import IllegalInstruction, MosaicGpuError
from mosaic_gpu.ops.dot import Dot
from mosaic_gpu.plan.build import build_plan
from tests.kernels.test_mma_matrix import operands
from tests.support import out, program_of

M, N, K = 128, 64, 256  # of A and B in memory, K in bytes; a product takes the last rows, columns and bytes of K
SHAPES = ((16, 8, 32), (32, 24, 64), (64, 24, 128), (128, 64, 256))  # m, n, bytes along K; the last two wgmma takes
ODD = ((7, 5, 3), (24, 12, 33), (48, 24, 36))  # parts of tiles
OPERATIONS = {"and": np.bitwise_and, "xor": np.bitwise_xor}


@dataclasses.dataclass(frozen=True)
class Case:
    """swizzle: bytes, 0 for none, None for operands in arrays."""

    bits: str
    swizzle: int | None

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        return SHAPES if self.swizzle is not None else SHAPES[:2] + ODD

    def __str__(self) -> str:
        return f"{self.bits}-{'arrays' if self.swizzle is None else f'swizzle{self.swizzle}'}"


CASES = tuple(Case(bits, swizzle) for bits in OPERATIONS for swizzle in (None, 0, 32, 64, 128))


def kernel_of(case: Case) -> Any:
    def body(a: Any, b: Any, c: Any, *refs: Any) -> None:
        outs = refs[: len(case.shapes)]
        a, b = operands(a, b, refs[len(case.shapes) :])
        for o, (m, n, k) in zip(outs, case.shapes, strict=True):
            x, y = a[ds(M - m, m), ds(K - k, k)], b[ds(N - n, n), ds(K - k, k)].T
            o[...] = plgpu.mma(jnp.broadcast_to(c[ds(M - m, m)][:, None], (m, n)), x, y, bits=case.bits)

    def tile(lines: int) -> Any:
        transforms = (
            (plgpu.TilingTransform((8, case.swizzle)), plgpu.SwizzleTransform(case.swizzle)) if case.swizzle else ()
        )
        return plgpu.SMEM((lines, K), jnp.uint8, transforms=transforms)

    return plgpu.kernel(
        body,
        [out(m, n, dtype=np.int32) for m, n, _ in case.shapes],
        scratch_types=[tile(M), tile(N), plgpu.Barrier(num_arrivals=2)] if case.swizzle is not None else [],
    )


def arrays_of(seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, 256, (lines, K), np.uint8) for lines in (M, N))
    return a, b, rng.integers(-(2**31), 2**31, M).astype(np.int32)  # sums wrap


def check(case: Case, seed: int = 0) -> None:
    """The kernel, in the simulator or on a GPU, against NumPy's bits."""
    a, b, c = arrays_of(seed)
    for found, (m, n, k) in zip(kernel_of(case)(a, b, c), case.shapes, strict=True):
        words = OPERATIONS[case.bits](a[M - m :, None, K - k :], b[None, N - n :, K - k :])
        ones = np.bitwise_count(words) if hasattr(np, "bitwise_count") else np.unpackbits(words, axis=-1)
        exact = c[M - m :, None] + ones.sum(-1, dtype=np.int32)
        np.testing.assert_array_equal(np.asarray(found), exact, err_msg=f"{case}, m, n, k = {m}, {n}, {k}", strict=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: Case, arch: str, compiled: Any) -> None:
    """On the tensor cores; what ptxas makes of other instructions says so, and nothing else is complained of."""
    plan = build_plan(program_of(kernel_of(case), arrays_of()), arch)
    products = [s.data for s in plan.roles[0].body.steps if isinstance(s.data, Dot)]
    wide = case.bits == "and" and case.swizzle is not None and arch == "sm_90a"
    assert [d.kind for d in products] == [f"b1_{case.bits}"] * (len(case.shapes) - 2 * wide)
    report = compiled(plan)
    emulated = case.bits == "xor" or arch != "sm_90a"
    assert len(report.emulated) == emulated and report.complaints() == list(report.emulated)
    if not emulated:
        assert report.mnemonics["BMMA"] >= len(products)
        assert ("BGMMA" in report.mnemonics) == wide


def test_what_is_refused() -> None:
    x, y, acc = (jnp.zeros(s, t) for s, t in (((16, 4), np.uint8), ((4, 8), np.uint8), ((16, 8), np.int32)))
    with pytest.raises(TypeError, match=r"with bits= acc int32, a and b uint8; not int32\[16, 8\], int8\[16, 4\]"):
        plgpu.mma(acc, x.astype(np.int8), y, bits="and")
    with pytest.raises(TypeError, match='"and", "xor" or None'):
        plgpu.mma(acc, x, y, bits="or")

    def body(a: Any, o: Any, a_tile: Any, b_tile: Any) -> None:
        def compute(acc: Any) -> Any:
            plgpu.wgmma(acc, a_tile, b_tile.T, bits="xor" if o.shape == (64, 8) else "and")
            return acc[...]

        o[...] = plgpu.run_scoped(compute, plgpu.ACC((64, o.shape[1]), o.dtype))

    tiles = [
        plgpu.SMEM((m, 32), jnp.uint8, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(32)))
        for m in (64, 8)
    ]
    with pytest.raises(TypeError, match='of "xor" there is no wgmma: plgpu.mma has it'):
        plgpu.kernel(body, out(64, 8, dtype=np.int32), scratch_types=tiles).program(out(1, dtype=np.int32))
    tiles[1] = dataclasses.replace(tiles[1], shape=(16, 32))
    with pytest.raises(MosaicGpuError, match="no b1 x b1 -> float32") as e:
        build_plan(plgpu.kernel(body, out(64, 16), scratch_types=tiles).program(out(1, dtype=np.int32)), "sm_90a")
    assert isinstance(e.value, IllegalInstruction)


@pytest.mark.parametrize("axes", [(0, None), (None, 2), (1, 0)])
def test_under_vmap(axes: tuple[int | None, int | None]) -> None:
    """Inside of a kernel: one product after the other."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 256, s, np.uint8) for s in ((16, 32), (32, 8)))
    mapped = [x if d is None else np.stack([x, x[::-1], x ^ 7], axis=d) for x, d in zip((a, b), axes, strict=True)]

    def product(x: Any, y: Any) -> Any:
        return plgpu.mma(jnp.zeros((16, 8), jnp.int32), x, y, bits="and")

    def body(a: Any, b: Any, o: Any) -> None:
        o[...] = jax.vmap(product, axes)(a[...], b[...])

    found = plgpu.kernel(body, out(3, 16, 8, dtype=np.int32))(*mapped)
    for i in range(3):
        x, y = (m if d is None else np.take(m, i, d) for m, d in zip(mapped, axes, strict=True))
        np.testing.assert_array_equal(found[i], np.unpackbits(x[:, :, None] & y[None], axis=1).sum(1))
