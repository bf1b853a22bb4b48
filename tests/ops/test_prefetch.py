"""`async_prefetch` and `commit_smem_to_gmem_group`, and `mma`: results are as without, machine code, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.errors import IllegalInstruction, Leak, UnsupportedCall
from mosaic_gpu.simulator import simulate

F = np.float32


def out(*shape, dtype=F):
    return jax.ShapeDtypeStruct(shape, dtype)


def numbers(*shape, dtype=F, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def prefetched(**options):
    def body(x, o, s, full):
        b = lax.axis_index("b")
        for i in range(2):
            plgpu.async_prefetch(x.at[b, i], **options)
        plgpu.async_prefetch(x.at[b, 0], predicate=b == 0)
        plgpu.copy_gmem_to_smem(x.at[b, 1], s, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(s, o.at[b], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    return body, dict(
        grid=(2,), grid_names=("b",), scratch_types=[plgpu.SMEM((64, 64), F), plgpu.Barrier()], out=out(2, 64, 64)
    )


def test_a_hint_changes_nothing(plan):
    body, options = prefetched()
    x = numbers(2, 2, 64, 64)
    np.testing.assert_array_equal(simulate(plan(body, x, **options), [x])[0], x[:, 1])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_machine_code(plan, compiled, arch):
    body, options = prefetched()
    report = compiled(plan(body, numbers(2, 2, 64, 64), arch=arch, **options))
    assert report.complaints() == [] and report.mnemonics["UTMAPF"] == 3, report.mnemonics


@pytest.mark.parametrize("leader", [None, plgpu.CopyPartition.PARTITIONED(0)])
def test_shared_by_a_cluster(plan, compiled, leader):
    """Each block prefetches a part: half of the rows in each of the two."""

    def body(x, o):
        c = lax.axis_index("c")
        plgpu.async_prefetch(x, collective_axes="c", leader_tracked=leader)
        o[c] = plgpu.load(x.at[plgpu.ds(c * 32, 32)])

    options = dict(cluster=(2,), cluster_names=("c",), out=out(2, 32, 64))
    x = numbers(64, 64)
    p = plan(body, x, **options)
    np.testing.assert_array_equal(simulate(p, [x])[0], x.reshape(2, 32, 64))
    assert [m.box for m in p.maps] == [(64, 32)]
    assert compiled(p).mnemonics["UTMAPF"] == (1 if leader else 2)


def test_large_views_are_pieces(plan, compiled):
    def body(x, o):
        plgpu.async_prefetch(x)
        o[...] = plgpu.load(x)

    x = numbers(600, 8)
    p = plan(body, x, out=out(600, 8))
    np.testing.assert_array_equal(simulate(p, [x])[0], x)
    assert compiled(p).mnemonics["UTMAPF"] == 3


def test_refusals(plan):
    def run(call, *shape, **options):
        plan(lambda x, o: (call(x), None)[1], numbers(*shape), out=out(128), **options)

    with pytest.raises(UnsupportedCall, match="strides of multiples of 16 bytes"):
        run(lambda x: plgpu.async_prefetch(x.at[:, plgpu.ds(0, 4)]), 8, 5)
    with pytest.raises(IllegalInstruction, match="rows of multiples of 16 bytes"):
        run(lambda x: plgpu.async_prefetch(x.at[:, plgpu.ds(0, 2)]), 8, 8)
    with pytest.raises(UnsupportedCall, match="'c' is not a cluster axis"):
        run(lambda x: plgpu.async_prefetch(x, collective_axes="c"), 8, 8)
    with pytest.raises(ValueError, match="needs one collective axis"):
        run(lambda x: plgpu.async_prefetch(x, leader_tracked=plgpu.CopyPartition.REPLICATED), 8, 8)
    with pytest.raises(TypeError, match="leader_tracked must be"):
        run(lambda x: plgpu.async_prefetch(x, collective_axes="c", leader_tracked=1), 8, 8)
    with pytest.raises(TypeError, match="ref must be a GMEM Ref"):
        plan(lambda o, s: plgpu.async_prefetch(s), out=out(128), scratch_types=[plgpu.SMEM((8, 8), F)])


def test_a_group_left_open_is_a_leak(plan):
    def body(x, o, s, full):
        plgpu.copy_gmem_to_smem(x, s, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(s, o, commit_group=False)
        plgpu.wait_smem_to_gmem(0)

    x = numbers(64, 64)
    p = plan(body, x, out=out(64, 64), scratch_types=[plgpu.SMEM((64, 64), F), plgpu.Barrier()])
    with pytest.raises(Leak):
        simulate(p, [x])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8"])
def test_mma(plan, compiled, dtype):
    """acc + a @ b, by mma.sync."""
    kind = getattr(ml_dtypes, dtype, dtype)
    whole = dtype in ("int8", "uint8")
    acc_type = np.int32 if whole else F

    def body(acc, a, b, o):
        o[...] = plgpu.mma(acc[...], a[...], b[...])

    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 7, s).astype(kind) for s in ((64, 64), (64, 24)))
    acc = rng.integers(-9, 9, (64, 24)).astype(acc_type)
    p = plan(body, acc, a, b, out=out(64, 24, dtype=acc_type))
    np.testing.assert_array_equal(simulate(p, [acc, a, b])[0], acc + a.astype(acc_type) @ b.astype(acc_type))
    names = compiled(p).mnemonics
    assert names.get("IMMA" if whole else "HMMA", 0) >= 1, names


def test_mma_refuses(plan):
    def run(acc, a, b):
        def body(o):
            plgpu.mma(*(jnp.zeros(s, d) for s, d in (acc, a, b)))

        plan(body, out=out(128))

    f16, f32 = jnp.float16, jnp.float32
    for types in [
        (((8, 8), f32), ((8, 16), f16), ((8, 8), f16)),
        (((8, 8), f16), ((8, 16), jnp.bfloat16), ((16, 8), jnp.bfloat16)),
        (((8, 8), f32), ((8, 16), f32), ((16, 8), f32)),
        (((8, 8), f32), ((8, 16), f16), ((16, 8), jnp.bfloat16)),
        (((8,), f32), ((8, 16), f16), ((16, 8), f16)),
    ]:
        with pytest.raises(TypeError, match="mma: acc"):
            run(*types)
