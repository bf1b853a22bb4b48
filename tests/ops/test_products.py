"""Products of what lies in shared memory: wgmma on sm_90a where it can read the operands, with its waits and fences."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import walk
from mosaic_gpu.simulator import simulate

F32, BF16 = jnp.float32, jnp.bfloat16
PLAIN = (((1,), (0,)), ((), ()))


def tile(dtype: Any, swizzle: int = 128) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


def smem(shape: tuple[int, ...], dtype: Any, transforms: Any = None) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=tile(dtype) if transforms is None else transforms)


def random(dtype: Any, *shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if jnp.dtype(dtype).kind in "iu":
        return rng.integers(0 if jnp.dtype(dtype).kind == "u" else -9, 9, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def plan_of(f: Any, a: np.ndarray, b: np.ndarray, arch: str = "sm_90a", out: Any = None, **options: Any) -> Any:
    """f of two tiles that TMA brings."""
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)]

    def body(a_gmem: Any, b_gmem: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        plgpu.copy_gmem_to_smem(a_gmem, a_tile, full)
        plgpu.copy_gmem_to_smem(b_gmem, b_tile, full)
        plgpu.barrier_wait(full)
        o[...] = f(a_tile, b_tile)

    if out is None:
        out = jax.eval_shape(f, *abstract)
    transforms = options.get("transforms")
    scratch = [smem(x.shape, x.dtype, transforms) for x in (a, b)]
    kernel = plgpu.kernel(body, out, scratch_types=[*scratch, plgpu.Barrier(num_arrivals=2)])
    return build_plan(kernel.program(*abstract), arch)


def operations(plan: Any) -> list[str]:
    def visit(block: Any) -> list[str]:
        return [n for s in block.steps for n in (s.equation.op, *(x for r in s.regions for x in visit(r)))]

    return [n for r in plan.roles for n in visit(r.body)]


def close(found: np.ndarray, a: np.ndarray, b: np.ndarray, tf32: bool = False) -> None:
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    size = np.abs(x) @ np.abs(y)
    rounding = (2**-8 if found.dtype == ml_dtypes.bfloat16 else 2**-11 if found.dtype == np.float16 else 2**-22) * size
    assert np.all(np.abs(found.astype(np.float64) - x @ y) <= rounding + (2**-9 if tf32 else 2**-20) * size)


def product(out: Any = None, precision: Any = None) -> Any:
    return lambda a, b: lax.dot_general(a[...], b[...], PLAIN, preferred_element_type=out, precision=precision)


@pytest.mark.parametrize("out", [None, F32])
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_tiles_become_wgmma(dtype, out, compiled):
    a, b = random(dtype, 128, 64), random(dtype, 64, 128, seed=1)
    plan = plan_of(product(out), a, b)
    assert [n for n in operations(plan) if n in ("dot_general", "wgmma", "commit_smem", "load", "get")] == [
        "wgmma",
        "get",
    ]
    for timing in ("late", "early"):
        close(simulate(plan, [a, b], timing=timing)[0], a, b)
    assert compiled(plan).complaints() == []


def test_on_sm100_they_are_read_where_they_lie(compiled):
    """By ldmatrix, where tcgen05 has no such shape."""
    a, b = random(BF16, 32, 64), random(BF16, 64, 64, seed=1)
    plan = plan_of(product(F32), a, b, "sm_100a")
    found = operations(plan)
    assert found[-3:] == ["dot_general", "commit_smem", "swap"] and not {"get", "load"} & set(found)
    assert plan.roles[0].scratch_bytes == 0
    close(simulate(plan, [a, b])[0], a, b)
    assert compiled(plan).complaints() == []


CASES = {
    "b_transposed": (lambda a, b: a[...] @ b[...].T, (64, 64), (128, 64), True),
    "a_transposed": (lambda a, b: a[...].T @ b[...], (64, 64), (64, 64), True),
    "by_dimension_numbers": (
        lambda a, b: lax.dot_general(a[...], b[...], (((0,), (1,)), ((), ()))),
        (64, 64),
        (128, 64),
        True,
    ),
    "a_changed": (lambda a, b: (a[...] * 2) @ b[...], (64, 64), (64, 64), True),  # from registers
    "b_changed": (lambda a, b: a[...] @ (b[...] * 2), (64, 64), (64, 64), False),
    "few_rows": (lambda a, b: a[:32] @ b[...], (64, 64), (64, 64), False),
    "slices": (lambda a, b: a[64:] @ b[:, 64:], (128, 64), (64, 128), True),
    "wide": (lambda a, b: a[...] @ b[...], (64, 64), (64, 320), False),
}


@pytest.mark.parametrize("name", CASES)
def test_which(name, compiled):
    f, left, right, expected = CASES[name]
    a, b = random(BF16, *left), random(BF16, *right, seed=1)
    out = jax.eval_shape(f, jnp.asarray(a), jnp.asarray(b))
    plan = plan_of(f, a, b, out=out)
    assert ("wgmma" in operations(plan)) == expected and ("dot_general" in operations(plan)) == (not expected)
    reference = np.asarray(f(jnp.asarray(a, F32), jnp.asarray(b, F32)))
    np.testing.assert_allclose(np.float64(simulate(plan, [a, b])[0]), reference, rtol=2**-7, atol=0.25)
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize(
    ("dtype", "b_dtype", "out"),
    [
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn, F32),
        (jnp.float8_e5m2, jnp.float8_e5m2, F32),
        (jnp.int8, jnp.int8, jnp.int32),
        (jnp.uint8, jnp.int8, jnp.int32),
        (F32, F32, F32),
    ],
)
def test_other_types(dtype, b_dtype, out, compiled):
    """Contiguous along K, as wgmma has them; float8 exists nowhere else."""
    a, b = random(dtype, 64, 128), random(b_dtype, 64, 128, seed=1)

    def f(x: Any, y: Any) -> Any:
        return lax.dot_general(x[...], y[...], (((1,), (1,)), ((), ())), preferred_element_type=out)

    plan = plan_of(f, a, b, out=jax.ShapeDtypeStruct((64, 64), out))
    assert "wgmma" in operations(plan)
    close(simulate(plan, [a, b])[0], a, np.asarray(b).T, tf32=dtype == F32)
    assert compiled(plan).complaints() == []


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_8_bit_arrays_are_fragments(dtype, compiled):
    """A from registers, where four elements along K make one."""
    out = F32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
    a, b = random(dtype, 128, 128), random(dtype, 32, 128, seed=1)

    def f(x: Any, y: Any) -> Any:
        chosen = jnp.where(lax.broadcasted_iota(jnp.int32, (128, 128), 1) < 40, x[...], jnp.zeros((), dtype))
        return lax.dot_general(chosen, y[...], (((1,), (1,)), ((), ())), preferred_element_type=out)

    plan = plan_of(f, a, b, out=jax.ShapeDtypeStruct((128, 32), out))
    assert "wgmma" in operations(plan)
    cut = np.where(np.arange(128) < 40, np.asarray(a, np.float32), 0)
    close(simulate(plan, [a, b])[0], cut, np.asarray(b).T)
    assert compiled(plan).complaints() == []


def test_exact_float32_is_no_wgmma():
    a, b = random(F32, 64, 64), random(F32, 64, 64, seed=1)
    plan = plan_of(product(F32, lax.Precision.HIGHEST), a, b)
    assert "wgmma" not in operations(plan)
    close(simulate(plan, [a, b])[0], a, b)


def test_without_a_swizzle_there_is_no_descriptor():
    a, b = random(BF16, 64, 64), random(BF16, 64, 64, seed=1)
    plan = plan_of(product(F32), a, b, transforms=(plgpu.SwizzleTransform(16),))
    assert "wgmma" not in operations(plan)
    close(simulate(plan, [a, b])[0], a, b)


@pytest.mark.parametrize(("arch", "rows"), [("sm_90a", 64), ("sm_100a", 32)])
def test_a_loop_over_k(arch, rows, compiled):
    """The plainest matmul: one slot, refilled after the product that read it; on Blackwell too small for tcgen05."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        def step(i: Any, acc: Any) -> Any:
            k = plgpu.ds(i * 64, 64)
            plgpu.copy_gmem_to_smem(a.at[:, k], a_tile, full)
            plgpu.copy_gmem_to_smem(b.at[k], b_tile, full)
            plgpu.barrier_wait(full)
            return acc + jnp.dot(a_tile[...], b_tile[...], preferred_element_type=F32)

        o[...] = lax.fori_loop(0, 4, step, jnp.zeros((rows, 128), F32))

    a, b = random(BF16, rows, 256), random(BF16, 256, 128, seed=1)
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)]
    kernel = plgpu.kernel(
        body,
        jax.ShapeDtypeStruct((rows, 128), F32),
        scratch_types=[smem((rows, 64), BF16), smem((64, 128), BF16), plgpu.Barrier(num_arrivals=2)],
    )
    plan = build_plan(kernel.program(*abstract), arch)
    assert ("wgmma" if arch == "sm_90a" else "dot_general") in operations(plan)
    for timing in ("late", "early"):
        close(simulate(plan, [a, b], timing=timing)[0], a, b)
    assert compiled(plan).complaints() == []
    if arch == "sm_100a":
        with pytest.raises(Race, match="copy_gmem_to_smem writes"):  # while other threads still read
            simulate(without(plan, "commit_smem"), [a, b])


def stored(fenced: bool) -> Any:
    """Tiles that the warpgroup itself writes."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any) -> None:
        a_tile[...] = a[...]
        b_tile[...] = b[...] * 2
        if fenced:
            plgpu.commit_smem()
        o[...] = a_tile[...] @ b_tile[...]

    t = jax.ShapeDtypeStruct((64, 64), BF16)
    return build_plan(plgpu.kernel(body, t, scratch_types=[smem((64, 64), BF16)] * 2).program(t, t), "sm_90a")


@pytest.mark.parametrize("fenced", [False, True])
def test_what_ordinary_stores_wrote_is_fenced(fenced, compiled):
    plan = stored(fenced)
    assert operations(plan).count("commit_smem") == 1 + fenced
    a, b = random(BF16, 64, 64), random(BF16, 64, 64, seed=1)
    close(simulate(plan, [a, b])[0], a, np.asarray(b) * 2)
    assert compiled(plan).complaints() == []


def test_a_load_is_not_moved_past_a_store():
    """b is read before it is overwritten, so wgmma may not read it afterwards."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any) -> None:
        a_tile[...] = a[...]
        b_tile[...] = b[...]
        plgpu.commit_smem()
        old = b_tile[...]
        plgpu.commit_smem()
        b_tile[...] = old * 3
        plgpu.commit_smem()
        o[...] = a_tile[...] @ old

    t = jax.ShapeDtypeStruct((64, 64), BF16)
    plan = build_plan(plgpu.kernel(body, t, scratch_types=[smem((64, 64), BF16)] * 2).program(t, t), "sm_90a")
    assert "wgmma" not in operations(plan)
    a, b = random(BF16, 64, 64), random(BF16, 64, 64, seed=1)
    close(simulate(plan, [a, b])[0], a, b)


def test_the_wait_is_needed():
    """Without it (taken out of the plan) the simulator reports the race with the copy that comes next."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        def step(i: Any, acc: Any) -> Any:
            plgpu.copy_gmem_to_smem(a, a_tile, full)
            plgpu.copy_gmem_to_smem(b, b_tile, full)
            plgpu.barrier_wait(full)
            return acc + jnp.dot(a_tile[...], b_tile[...], preferred_element_type=F32)

        o[...] = lax.fori_loop(0, 4, step, jnp.zeros((64, 64), F32))

    t = jax.ShapeDtypeStruct((64, 64), BF16)
    scratch = [smem((64, 64), BF16)] * 2 + [plgpu.Barrier(num_arrivals=2)]
    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct((64, 64), F32), scratch_types=scratch)
    plan = build_plan(kernel.program(t, t), "sm_90a")

    a = random(BF16, 64, 64)
    simulate(plan, [a, a])
    with pytest.raises(Race):
        simulate(without(plan, "wgmma_wait"), [a, a])


def without(plan: Any, op: str, which: Any = lambda equation: True) -> Any:
    """The plan with one operation taken out, or those of them of which `which` says so."""

    def block_of(block: Any) -> Any:
        kept = (s for s in block.steps if s.equation.op != op or not which(s.equation))
        steps = tuple(dataclasses.replace(s, regions=tuple(map(block_of, s.regions))) for s in kept)
        return dataclasses.replace(block, steps=steps)

    return dataclasses.replace(plan, roles=tuple(dataclasses.replace(r, body=block_of(r.body)) for r in plan.roles))


@pytest.mark.parametrize(("arch", "n", "fences"), [("sm_90a", 64, 1), ("sm_100a", 64, 1), ("sm_100a", 32, 2)])
def test_the_fences_are_needed(arch, n, fences):
    """wgmma, tcgen05, or ldmatrix of other threads, behind ordinary stores; and what is stored after it."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any) -> None:
        a_tile[...] = a[...]
        b_tile[...] = b[...]
        o[...] = a_tile[...] @ b_tile[...]
        a_tile[...] = b[...]

    t, tiled = jax.ShapeDtypeStruct((n, n), BF16), smem((n, n), BF16, tile(BF16, 2 * n))
    plan = build_plan(plgpu.kernel(body, t, scratch_types=[tiled] * 2).program(t, t), arch)
    assert operations(plan).count("commit_smem") == fences
    a, b = random(BF16, n, n), random(BF16, n, n, seed=1)
    close(simulate(plan, [a, b])[0], a, b)
    with pytest.raises(Race, match="commit_smem"):
        simulate(without(plan, "commit_smem"), [a, b])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("strict", [False, True])
def test_sums_are_taken_into_products(arch, strict, compiled):
    """acc + a @ b adds nothing afterwards, in either order, unless products must be rounded first; a product that somebody else
    reads stays."""

    def body(a: Any, b: Any, o: Any, p: Any, q: Any) -> None:
        x, y = a[...], b[...]
        acc = jnp.zeros((32, 32), F32) + 1
        o[...] = acc + jnp.dot(x, y, preferred_element_type=F32)
        both = jnp.dot(x, y, preferred_element_type=F32)
        p[...] = both + acc * 2
        q[...] = both

    t, out = jax.ShapeDtypeStruct((32, 32), BF16), jax.ShapeDtypeStruct((32, 32), F32)
    params = plgpu.CompilerParams(strict_math=strict)
    plan = build_plan(plgpu.kernel(body, [out] * 3, compiler_params=params).program(t, t), arch)
    products = [e for r in plan.roles for s in r.body.steps if (e := s.equation).op == "dot_general"]
    assert [len(e.operands) for e in products] == ([2, 2] if strict else [3, 2])
    a, b = random(BF16, 32, 32), random(BF16, 32, 32, seed=1)
    product = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    for found, start in zip(simulate(plan, [a, b]), (1, 2, 0), strict=True):
        np.testing.assert_allclose(found, product + start, rtol=1e-5, atol=1e-4)
    assert compiled(plan).complaints() == []


def test_every_equation_of_a_program_is_walked():
    assert "wgmma" not in {e.op for e in walk(plan_of(product(), *[random(BF16, 64, 64)] * 2).program.body)}


MIXED = [
    ("int8", "float8_e4m3fn"),
    ("float8_e5m2", "uint8"),
    ("int8", "bfloat16"),
    ("uint8", "float16"),
    ("int16", "bfloat16"),
    ("float16", "int32"),
    ("uint32", "float32"),
    ("float8_e4m3fn", "float16"),
    ("bfloat16", "float8_e5m2"),
    ("float32", "float8_e4m3fn"),
    ("float4_e2m1fn", "float16"),
    ("bfloat16", "float16"),
]


@pytest.mark.parametrize(("left", "right"), MIXED)
def test_products_of_two_types_are_of_their_values(left: str, right: str, compiled: Any) -> None:
    """No integer is rounded to the other operand's float: 17 and 257 are no float8 and no bfloat16, 70000 no float16."""

    def array(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
        whole = "int" in name
        most = {"int8": 100, "uint8": 255, "int16": 2000, "int32": 70000, "uint32": 70000}.get(name, 4)
        x = np.random.default_rng(seed).integers(0 if name[0] == "u" else -most, most + 1, shape)
        return x.astype(name) if whole else x.astype(np.float32).astype(jnp.dtype(name))

    a, b = array(left, (16, 32), 1), array(right, (32, 8), 2)
    packed = "float4" in left

    def body(a: Any, b: Any, o: Any) -> None:
        x = lax.bitcast_convert_type(a[...], jnp.dtype(left)).reshape(16, 32) if packed else a[...]
        o[...] = lax.dot_general(x, b[...], PLAIN, preferred_element_type=F32)

    wide = a.astype(np.float64) @ b.astype(np.float64)
    if packed:
        bits = a.view(np.uint8).reshape(16, 16, 2)
        a = bits[..., 0] | bits[..., 1] << 4
    kernel = plgpu.kernel(body, jax.ShapeDtypeStruct((16, 8), F32))
    for arch in ("sm_90a", "sm_100a"):
        plan = build_plan(kernel.program(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b))), arch)
        np.testing.assert_array_equal(simulate(plan, (a, b))[0], wide)  # all partial sums fit into 24 bits
        assert compiled(plan).complaints() == []
