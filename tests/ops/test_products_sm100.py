"""`jnp.dot` on Blackwell: tcgen05 with tensor memory, barriers and waits of the compiler's own, or mma.sync."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.errors import Deadlock, MosaicGpuError, Race
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate
from tests.ops.test_products import BF16, F32, close, operations, plan_of, product, random, smem, without

ARCHS = ("sm_100a", "sm_103a")
ROWS = (((1,), (1,)), ((), ()))  # both operands contiguous along K
F8, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
PRESET = lax.DotAlgorithmPreset


def shape(*n: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(n, dtype)


def built(body: Any, arrays: Any, out: Any, scratch: Any = (), arch: str = "sm_100a", **options: Any) -> Any:
    kernel = plgpu.kernel(body, out, scratch_types=scratch, **options)
    return build_plan(kernel.program(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]), arch)


def on_tcgen05(plan: Any) -> bool:
    found = {"tcgen05_mma", "dot_general"} & set(operations(plan))
    assert len(found) == 1, "all products of these tests take one way"
    return "tcgen05_mma" in found


def counts(plan: Any) -> Any:
    (function,) = sass.read_cubin(compile_cuda(emit(plan), arch=plan.arch, name="/t.cu").cubin)
    assert function.spills == 0
    return function.counts()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "b_dtype", "out", "opcode"),
    [
        (BF16, BF16, F32, "UTCHMMA"),
        (jnp.float16, jnp.float16, None, "UTCHMMA"),
        (F32, F32, F32, "UTCHMMA"),
        (F8, F8, F32, "UTCQMMA"),
        (E5M2, F8, F32, "UTCQMMA"),
        (jnp.int8, jnp.uint8, jnp.int32, "UTCIMMA"),
    ],
)
def test_types(dtype, b_dtype, out, opcode, arch, compiled):
    """Contiguous along K.  sm_103a has no integers on tcgen05, but on mma.sync."""
    a, b = random(dtype, 128, 128), random(b_dtype, 64, 128, seed=1)

    def f(x: Any, y: Any) -> Any:
        return lax.dot_general(x[...], y[...], ROWS, preferred_element_type=out)

    plan = plan_of(f, a, b, arch, out=jax.ShapeDtypeStruct((128, 64), out or dtype))
    assert on_tcgen05(plan) == (dtype != jnp.int8 or arch == "sm_100a")
    for timing in ("late", "early"):
        close(simulate(plan, [a, b], timing=timing)[0], a, np.asarray(b).T, tf32=dtype == F32)
    assert compiled(plan).complaints() == []
    if on_tcgen05(plan):
        found = counts(plan)
        assert found[opcode] == 128 * np.dtype(dtype).itemsize // 32 and found["LDTM"] >= 1


SHAPES = {
    "64": (lambda a, b: a[...] @ b[...], (64, 64), (64, 128), True),
    "128": (lambda a, b: a[...] @ b[...], (128, 64), (64, 256), True),
    "192": (lambda a, b: a[...] @ b[...], (192, 64), (64, 64), True),
    "256": (lambda a, b: a[...] @ b[...], (256, 64), (64, 64), True),
    "narrow": (lambda a, b: a[...] @ b[:, :8], (128, 16), (16, 64), True),
    "b_transposed": (lambda a, b: a[...] @ b[...].T, (128, 64), (64, 64), True),
    "a_transposed": (lambda a, b: a[...].T @ b[...], (64, 128), (64, 64), True),
    "by_dimension_numbers": (
        lambda a, b: lax.dot_general(a[...], b[...], (((0,), (1,)), ((), ()))),
        (64, 64),
        (64, 64),
        True,
    ),
    "slices": (lambda a, b: a[64:] @ b[:, 64:], (192, 64), (64, 128), True),
    "a_changed": (lambda a, b: (a[...] * 2) @ b[...], (128, 64), (64, 64), True),
    "b_changed": (lambda a, b: a[...] @ (b[...] * 2), (128, 64), (64, 64), True),
    "both_changed": (lambda a, b: (a[...] + a[...]).T @ (b[...] * 2).T, (64, 128), (128, 64), True),
    "changed_and_small": (lambda a, b: (a[...] * 2) @ b[...], (64, 32), (32, 64), False),
    "few_rows": (lambda a, b: a[:32] @ b[...], (64, 64), (64, 64), False),
    "wide": (lambda a, b: a[...] @ b[...], (64, 64), (64, 320), False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_which(name, compiled):
    f, left, right, expected = SHAPES[name]
    narrow = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
    transforms = narrow if name in ("narrow", "changed_and_small") else None
    a, b = random(BF16, *left), random(BF16, *right, seed=1)
    out = jax.eval_shape(f, jnp.asarray(a), jnp.asarray(b))
    plan = plan_of(f, a, b, "sm_100a", out=out, transforms=transforms)
    assert on_tcgen05(plan) == expected
    reference = np.asarray(f(jnp.asarray(a, F32), jnp.asarray(b, F32)))
    for timing in ("late", "early"):
        found = simulate(plan, [a, b], timing=timing)[0]
        np.testing.assert_allclose(np.float64(found), reference, rtol=2**-7, atol=0.25)
    assert compiled(plan).complaints() == []
    if expected:
        assert {"UTCHMMA", "LDTM"} <= set(counts(plan))


def test_a_result_of_two_instructions_needs_no_exchange():
    """256 rows: the halves lie beside each other in a thread's registers."""
    a, b = random(BF16, 256, 64), random(BF16, 64, 64, seed=1)
    plan = plan_of(product(F32), a, b, "sm_100a")
    assert plan.tmem_columns == 128 and plan.roles[0].scratch_bytes == 0


@pytest.mark.parametrize("dtype", [jnp.float16, BF16, jnp.int8])
@pytest.mark.parametrize("turned", [False, True])
def test_arrays(dtype, turned, compiled):
    """Operands that come from global memory go through shared memory of the compiler's own, as they lie."""
    acc = jnp.int32 if dtype == jnp.int8 else F32

    def body(a: Any, b: Any, o: Any) -> None:
        x, y = (a[...].T, b[...].T) if turned else (a[...], b[...])
        o[...] = jnp.dot(x, y, preferred_element_type=acc)

    a, b = (
        random(dtype, *((k, 64) if t else (64, k)), seed=s)
        for s, (k, t) in enumerate([(128, turned), (128, not turned)])
    )
    plan = built(body, (a, b), shape(64, 64, dtype=acc))
    assert on_tcgen05(plan) and "transpose" not in operations(plan)
    close(simulate(plan, [a, b])[0], a.T if turned else a, b.T if turned else b)
    assert compiled(plan).complaints() == []
    with pytest.raises(Race, match="commit_smem"):
        simulate(without(plan, "commit_smem"), [a, b])


def test_float32_arrays_are_rounded_by_mma_sync():
    """tcgen05 would cut off what is below tf32."""

    def body(a: Any, b: Any, o: Any) -> None:
        o[...] = a[...] @ b[...]

    a, b = random(F32, 128, 64), random(F32, 64, 64, seed=1)
    plan = built(body, (a, b), shape(128, 64, dtype=F32))
    assert not on_tcgen05(plan)
    close(simulate(plan, [a, b])[0], a, b, tf32=True)


def test_exact_float32_is_no_tensor_core():
    a, b = random(F32, 64, 64), random(F32, 64, 64, seed=1)
    plan = plan_of(product(F32, lax.Precision.HIGHEST), a, b, "sm_100a")
    assert not on_tcgen05(plan)
    close(simulate(plan, [a, b])[0], a, b)


def looped(rows: int, arch: str = "sm_100a", start: float = 0.0, arrays: bool = False) -> Any:
    """The plainest matmul: one slot, refilled after the product that read it."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        def step(i: Any, acc: Any) -> Any:
            k = plgpu.ds(i * 64, 64)
            plgpu.copy_gmem_to_smem(a.at[:, k], a_tile, full)
            plgpu.copy_gmem_to_smem(b.at[k], b_tile, full)
            plgpu.barrier_wait(full)
            x = a_tile[...] + a_tile[...] if arrays else a_tile[...]
            return acc + jnp.dot(x, b_tile[...], preferred_element_type=F32)

        o[...] = lax.fori_loop(0, 4, step, jnp.full((rows, 128), start, F32))

    scratch = [smem((rows, 64), BF16), smem((64, 128), BF16), plgpu.Barrier(num_arrivals=2)]
    out = shape(rows, 128, dtype=F32)
    return built(body, (shape(rows, 256), shape(256, 128)), out, scratch, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
def test_a_loop_over_k(rows, arrays, arch, compiled):
    """One buffer and one pair of barriers, whose phases turn; sums start in tensor memory."""
    plan = looped(rows, arch, start=1.5, arrays=arrays)
    assert on_tcgen05(plan) and len(plan.tmem) == 1 and len(plan.barriers) == 3 and plan.tmem_columns == 128
    a, b = random(BF16, rows, 256), random(BF16, 256, 128, seed=1)
    exact = (1 + arrays) * (np.asarray(a, np.float64) @ np.asarray(b, np.float64)) + 1.5
    for timing in ("late", "early"):
        np.testing.assert_allclose(simulate(plan, [a, b], timing=timing)[0], exact, rtol=1e-5, atol=1e-3)
    assert compiled(plan).complaints() == []
    found = counts(plan)
    assert found["UTCHMMA"] and found["LDTM"] and found["STTM"]


@pytest.mark.parametrize(
    ("op", "error"),
    [
        ("barrier_wait", MosaicGpuError),  # also the wait for the copies
        ("wait_load_tmem", Race),
        ("commit_tmem", Race),
        ("barrier_arrive", Deadlock),
    ],
)
def test_what_the_compiler_puts_in_is_needed(op, error):
    plan, arrays = looped(128), [random(BF16, 128, 256), random(BF16, 256, 128, seed=1)]
    simulate(plan, arrays)
    with pytest.raises(error):
        simulate(without(plan, op), arrays)


@pytest.mark.parametrize("which", ["before products", "after products"])
def test_each_of_its_waits_is_needed(which):
    """Waits on one barrier of the compiler's, taken out of the plan, are a race, whatever the timing."""
    plan, arrays = looped(128), [random(BF16, 128, 256), random(BF16, 256, 128, seed=1)]
    (barrier,) = [i for i, b in plan.barriers.items() if b.value.name == which]
    broken = without(plan, "barrier_wait", lambda e: e.operands[0].ref.id == barrier)
    assert len(operations(broken)) == len(operations(plan)) - 1
    for timing in ("late", "early"):
        with pytest.raises(Race):
            simulate(broken, arrays, timing=timing)


def test_products_of_different_shapes_share_their_columns(compiled):
    """64 rows, 128 rows and integers, one after the other, each over the last one's cells."""

    def body(a: Any, b: Any, c: Any, o: Any, p: Any, q: Any) -> None:
        x, y = a[...], b[...]
        o[...] = jnp.dot(x, y, preferred_element_type=F32)
        p[...] = jnp.dot(x[:64], y, preferred_element_type=F32)
        z = c[...]
        q[...] = jnp.dot(z, z.T, preferred_element_type=jnp.int32)

    arrays = [random(BF16, 128, 64), random(BF16, 64, 64, seed=1), random(jnp.int8, 64, 128)]
    outs = [shape(128, 64, dtype=F32), shape(64, 64, dtype=F32), shape(64, 64, dtype=jnp.int32)]
    plan = built(body, arrays, outs)
    assert operations(plan).count("tcgen05_mma") == 3 and plan.tmem_columns == 64
    for timing in ("late", "early"):
        o, p, q = simulate(plan, arrays, timing=timing)
        close(o, *arrays[:2])
        close(p, arrays[0][:64], arrays[1])
        close(q, arrays[2], arrays[2].T)
    assert compiled(plan).complaints() == []


def two_roles(one_role: bool, arch: str = "sm_100a") -> Any:
    """Two warpgroups multiply each their rows, twice; in one role each has a slot, in two each role has its own."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, full: Any) -> None:
        wg = lax.axis_index("wg")

        def multiply(i: Any, scale: float) -> None:
            rows = plgpu.ds(i * 64, 64)
            plgpu.copy_gmem_to_smem(a.at[rows], a_tile.at[i], full.at[i])
            plgpu.copy_gmem_to_smem(b, b_tile.at[i], full.at[i])
            plgpu.barrier_wait(full.at[i])
            once = jnp.dot(a_tile[i], b_tile[i], preferred_element_type=F32)
            o[rows] = (once * scale) + jnp.dot(a_tile[i] + a_tile[i], b_tile[i], preferred_element_type=F32)

        if one_role:
            plgpu.when(wg < 2)(lambda: multiply(wg, 3.0))
        else:
            plgpu.when(wg == 0)(lambda: multiply(0, 3.0))
            plgpu.when(wg == 1)(lambda: multiply(1, 3.0))

    scratch = [smem((2, 64, 128), BF16), smem((2, 128, 128), BF16), plgpu.Barrier(num_arrivals=2, num_barriers=2)]
    options = dict(num_threads=3, thread_name="wg")
    return built(body, (shape(128, 128), shape(128, 128)), shape(128, 128, dtype=F32), scratch, arch, **options)


@pytest.mark.parametrize("one_role", [False, True])
def test_warpgroups_have_their_own(one_role, compiled):
    plan = two_roles(one_role)
    assert on_tcgen05(plan) and plan.tmem_columns == 256 and len(plan.tmem) == (1 if one_role else 2)
    a, b = random(BF16, 128, 128), random(BF16, 128, 128, seed=1)
    exact = 5 * (np.asarray(a, np.float64) @ np.asarray(b, np.float64))
    for timing in ("late", "early"):
        np.testing.assert_allclose(simulate(plan, [a, b], timing=timing)[0], exact, rtol=1e-5, atol=1e-3)
    for seed in (1, 2):
        np.testing.assert_allclose(simulate(plan, [a, b], seed=seed)[0], exact, rtol=1e-5, atol=1e-3)
    assert compiled(plan).complaints() == []


def test_a_branch_that_some_blocks_take(compiled):
    """Phases are right for blocks that multiply once and for those that multiply twice."""

    def body(a: Any, b: Any, o: Any) -> None:
        i, x, y = lax.axis_index("i"), a[...], b[...]
        more = lax.cond(
            i % 2 == 0,
            lambda: jnp.dot(x + x, y, preferred_element_type=F32),
            lambda: jnp.zeros((128, 64), F32),
        )
        o[i] = more + jnp.dot(x, y, preferred_element_type=F32)

    a, b = random(BF16, 128, 64), random(BF16, 64, 64, seed=1)
    plan = built(body, (a, b), shape(3, 128, 64, dtype=F32), grid=(3,), grid_names=("i",))
    assert operations(plan).count("tcgen05_mma") == 2
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    for timing in ("late", "early"):
        found = simulate(plan, [a, b], timing=timing)[0]
        np.testing.assert_allclose(found, np.stack([3 * exact, exact, 3 * exact]), rtol=1e-5, atol=1e-3)
    assert compiled(plan).complaints() == []


def beside(columns: int, dtype: Any = BF16, collective: bool = False, **options: Any) -> Any:
    """A product of 128 columns beside tensor memory of the user's."""

    def body(a: Any, b: Any, o: Any, a_tile: Any, b_tile: Any, mine: Any, full: Any) -> None:
        plgpu.copy_gmem_to_smem(a, a_tile, full)
        plgpu.copy_gmem_to_smem(b, b_tile, full)
        plgpu.barrier_wait(full)
        o[...] = lax.dot_general(a_tile[...], b_tile[...], ROWS, preferred_element_type=F32)  # product

    tmem = plgpu.TMEM((128, columns), F32, collective=collective)
    scratch = [smem((128, 128), dtype), smem((128, 128), dtype), tmem, plgpu.Barrier(num_arrivals=2)]
    operands = (shape(128, 128, dtype=dtype),) * 2
    return body, lambda: built(body, operands, shape(128, 128, dtype=F32), scratch, **options)


def test_what_the_user_leaves_of_tensor_memory(compiled):
    _, plan_of_it = beside(384)
    plan = plan_of_it()
    assert on_tcgen05(plan) and plan.tmem_columns == 512 and plan.notes == ()
    a, b = random(BF16, 128, 128), random(BF16, 128, 128, seed=1)
    close(simulate(plan, [a, b])[0], a, b.T)
    assert compiled(plan).complaints() == []


def test_without_room_it_stays_with_mma_sync(line_of):
    body, plan_of_it = beside(392)
    plan = plan_of_it()
    assert not on_tcgen05(plan)
    (note,) = plan.notes
    assert (
        f":{line_of(body, 'product')} in" in note
        and "on mma.sync" in note
        and "128 columns" in note
        and "120 of 512" in note
    )
    a, b = random(BF16, 128, 128), random(BF16, 128, 128, seed=1)
    close(simulate(plan, [a, b])[0], a, b.T)


def test_float8_elsewhere_is_emulated(compiled):
    """Without room, or of few rows, float8 goes to mma.sync like other types, and the report says what that is."""
    _, plan_of_it = beside(392, F8)
    few = plan_of(
        lambda a, b: lax.dot_general(a[:32], b[...], ROWS, preferred_element_type=F32),
        random(F8, 64, 128),
        random(F8, 64, 128),
        "sm_100a",
        out=shape(32, 64, dtype=F32),
    )
    for plan, rows, noted in ((plan_of_it(), (128, 128), True), (few, (64, 64), False)):
        assert not on_tcgen05(plan) and any("128 columns" in n for n in plan.notes) == noted
        assert any("is emulated on sm_100a" in s for s in compiled(plan).complaints())
        a, b = (random(F8, n, 128, seed=i) for i, n in enumerate(rows))
        found = simulate(plan, [a, b])[0]
        close(found, a[: len(found)], b.T)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("dtype", "precision"), [(jnp.float16, PRESET.F16_F16_F16), (F8, PRESET.ANY_F8_ANY_F8_ANY)])
def test_float16_sums(arch, dtype, precision, compiled):
    """Whole tensor core products, too, add in float16 if they are told to."""
    a, b = random(dtype, 128, 128), random(dtype, 64, 128, seed=1)
    plan = plan_of(
        lambda a, b: lax.dot_general(a[...], b[...], ROWS, precision=precision, preferred_element_type=jnp.float16),
        a,
        b,
        arch,
        out=shape(128, 64, dtype=jnp.float16),
    )

    def steps(block: Any) -> Any:
        for s in block.steps:
            yield s.equation
            for r in s.regions:
                yield from steps(r)

    products = [e for r in plan.roles for e in steps(r.body) if e.op in ("wgmma", "tcgen05_mma")]
    assert products and {e.operands[0].dtype for e in products} == {"float16"}
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    size = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64)).T
    assert np.all(np.abs(np.float64(simulate(plan, [a, b])[0]) - exact) <= 2**-9 * size)
    assert compiled(plan).complaints() == []


def test_kernels_of_pairs_keep_mma_sync():
    _, plan_of_it = beside(64, collective=True, cluster=(2,), cluster_names=("pair",))
    assert not on_tcgen05(plan_of_it())


def test_without_room_in_shared_memory_arrays_stay_with_mma_sync():
    """The operands take 64 KiB, the result 64 more at another time: only mma.sync's way lays them over each other."""

    def body(a: Any, o: Any, big: Any) -> None:
        x = a[...]
        o[...] = plgpu.layout_cast(jnp.dot(x, x, preferred_element_type=F32), plgpu.Layout.WG_STRIDED)

    a = random(BF16, 128, 128)
    for kilobytes, expected in ((4, True), (120, False)):
        plan = built(body, (a,), shape(128, 128, dtype=F32), [plgpu.SMEM((kilobytes, 256), F32)])
        assert on_tcgen05(plan) == expected
        close(simulate(plan, [a])[0], a, a)
