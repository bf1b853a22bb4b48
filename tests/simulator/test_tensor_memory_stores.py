"""Stores to tensor memory, operands in it, and pairs of blocks: what must come between, and what is found when it does not."""

from __future__ import annotations

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import BarrierMisuse, Deadlock, IllegalInstruction, Leak, Race, UninitializedRead
from tests import support
from tests.support import tiled

BF16 = ml_dtypes.bfloat16
F32 = np.float32
randoms = functools.partial(support.randoms, dtype=BF16)


def there_and_back(*, commit=True, wait=True, last=True):
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((2, 128, 32), F32), scratch_types=dict(t=plgpu.TMEM((128, 32), F32)))
    def kernel(x, o, *, t):
        for i in range(2):
            plgpu.async_store_tmem(t, plgpu.load(x.at[i], layout=plgpu.Layout.TCGEN05_TMEM_NATIVE))
            if commit:
                plgpu.commit_tmem()
            back = plgpu.async_load_tmem(t)
            if wait and (last or not i):
                plgpu.wait_load_tmem()
            o[i] = back

    return kernel


def test_stores_and_loads(clean):
    x = randoms(2, 128, 32, dtype=F32)
    np.testing.assert_array_equal(clean(there_and_back(), x, arch="sm_100a")[0], x)


@pytest.mark.parametrize(
    "options, error", [(dict(commit=False), Race), (dict(wait=False), Race), (dict(last=False), Leak)], ids=str
)
def test_stores_and_loads_unordered(options, error, found):
    """F1: a load behind a store, a store behind a load; F20: what is in flight at the end."""
    e = found(there_and_back(**options), randoms(2, 128, 32, dtype=F32), arch="sm_100a")
    assert isinstance(e, error)


def chained(*, stored=True, handed=True, p_orders=True, drains=True, drain_orders=True):
    """Scores, a rounded copy over them, and its product: twice, as in attention."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((128, 64), F32),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((128, 64), BF16, transforms=tiled()),
            plgpu.SMEM((64, 64), BF16, transforms=tiled()),
            plgpu.RefUnion(plgpu.TMEM((128, 64), F32), plgpu.TMEM((128, 64), BF16, packed=True)),
            plgpu.TMEM((128, 64), F32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=p_orders),
            plgpu.Barrier(orders_tensor_core=drain_orders),
        ],
    )
    def kernel(x, y, o, a, b, union, acc, full, done, ready, drained):
        scores, rounded = union
        wg = jax.lax.axis_index("wg")

        def multiply(warp):
            @plgpu.when(warp == 0)
            def _():
                plgpu.copy_gmem_to_smem(x, a, full)
                plgpu.copy_gmem_to_smem(y, b, full)
                plgpu.barrier_wait(full)
                for i in range(2):
                    plgpu.tcgen05_mma(scores, a, b, done, accumulate=False)
                    if handed:
                        plgpu.barrier_wait(ready)
                    plgpu.tcgen05_mma(acc, rounded, b, drained, accumulate=bool(i))
                    if drains:
                        plgpu.barrier_wait(drained)

        @plgpu.when(wg == 0)
        def _():
            plgpu.warp_map(multiply)

        @plgpu.when(wg == 1)
        def _():
            for _ in range(2):
                plgpu.barrier_wait(done)
                value = plgpu.async_load_tmem(scores)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(rounded, value.astype(BF16))
                if stored:
                    plgpu.commit_tmem()
                plgpu.barrier_arrive(ready)
                plgpu.barrier_wait(drained)
            if not stored:
                plgpu.commit_tmem()
            value = plgpu.async_load_tmem(acc)
            plgpu.wait_load_tmem()
            o[...] = value

    return kernel


def test_a_product_of_what_was_stored(clean):
    x, y = randoms(128, 64), randoms(64, 64, seed=1)
    (got,) = clean(chained(), x, y, arch="sm_100a")
    p = (x.astype(F32) @ y.astype(F32)).astype(BF16).astype(F32)
    np.testing.assert_allclose(got, 2 * p @ y.astype(F32), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "options, kinds, rule",
    [
        (dict(stored=False), ("buffer in flight", "read/write", "write/write"), "F7"),
        (dict(p_orders=False), ("missing tcgen05 fence",), "F7, F9"),
        (dict(handed=False), ("buffer in flight", "read/write", "write/write"), "F7"),
        (dict(drains=False), ("buffer in flight", "read/write", "write/write"), "F3"),
        (dict(drain_orders=False), ("missing tcgen05 fence",), "F3, F9"),
    ],
    ids=str,
)
def test_a_product_too_early(options, kinds, rule, found):
    e = found(chained(**options), randoms(128, 64), randoms(64, 64, seed=1), arch="sm_100a")
    assert isinstance(e, (Race, BarrierMisuse)), (rule, str(e))
    if isinstance(e, Race):
        assert e.kind in kinds, (rule, e.kind, str(e))
        if "missing" not in e.kind and "commit_tmem() by" in e.remedy:
            assert "then its arrival on a Barrier(orders_tensor_core=True) for which" in e.remedy


def alone(*, stored=True, met=True, orders=True):
    """A warpgroup that stores an operand to tensor memory and multiplies it itself."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((128, 64), F32),
        scratch_types=[
            plgpu.SMEM((64, 64), BF16, transforms=tiled()),
            plgpu.TMEM((128, 64), BF16, packed=True),
            plgpu.TMEM((128, 64), F32),
            plgpu.Barrier(),
            plgpu.Barrier(orders_tensor_core=orders),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )
    def kernel(x, y, o, b, a, acc, full, ready, done):
        plgpu.copy_gmem_to_smem(y, b, full)
        plgpu.barrier_wait(full)
        plgpu.async_store_tmem(a, plgpu.load(x, layout=plgpu.Layout.TCGEN05_TMEM_NATIVE))
        if stored:
            plgpu.commit_tmem()
        if met:
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
        plgpu.tcgen05_mma(acc, a, b, done, accumulate=False)
        if not stored:
            plgpu.commit_tmem()
        plgpu.barrier_wait(done)
        o[...] = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()

    return kernel


def test_a_product_of_what_its_own_warpgroup_stored(clean, found):
    """F7: what orders the two is the wait for the stores and a barrier with fences; the report says both at once."""
    x, y = randoms(128, 64), randoms(64, 64, seed=1)
    (got,) = clean(alone(), x, y, arch="sm_100a")
    np.testing.assert_allclose(got, x.astype(F32) @ y.astype(F32), rtol=1e-4, atol=1e-3)
    for options in (dict(stored=False), dict(met=False), dict(stored=False, met=False)):
        e = found(alone(**options), x, y, arch="sm_100a")
        assert isinstance(e, Race) and e.between == "warpgroup", str(e)
        assert (
            "commit_tmem() by" in e.remedy
            and "its arrival and its wait on a Barrier(orders_tensor_core=True)" in e.remedy
        )
    e = found(alone(orders=False), x, y, arch="sm_100a")
    assert isinstance(e, Race) and e.kind == "missing tcgen05 fence" and "orders_tensor_core=True" in e.remedy


def pair(*, leader_only=True, tracked=True, told=True, waits=True):
    """256 rows by two blocks: each its rows of A and of the result, and half of B's columns."""
    halves = [
        dict(collective_axes="pair", leader_tracked=plgpu.CopyPartition.PARTITIONED(i)) if tracked else {}
        for i in (0, 1)
    ]

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((256, 128), F32),
        cluster=(2,),
        cluster_names=("pair",),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            a=plgpu.SMEM((128, 64), BF16, transforms=tiled()),
            b=plgpu.SMEM((64, 64), BF16, transforms=tiled()),
            acc=plgpu.TMEM((128, 128), F32, collective=True),
            full=plgpu.Barrier(num_arrivals=2),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    def kernel(x, y, o, *, a, b, acc, full, done):
        me, wg = jax.lax.axis_index("pair"), jax.lax.axis_index("wg")

        def issue(warp):
            @plgpu.when(warp == 0)
            def _():
                if tracked:
                    plgpu.copy_gmem_to_smem(x, a, full, **halves[0])
                    plgpu.copy_gmem_to_smem(y, b, full, **halves[1])
                else:
                    plgpu.copy_gmem_to_smem(x.at[plgpu.ds(me * 128, 128)], a, full)
                    plgpu.copy_gmem_to_smem(y.at[:, plgpu.ds(me * 64, 64)], b, full)

                def multiply():
                    if waits:
                        plgpu.barrier_wait(full)
                    plgpu.tcgen05_mma(acc, a, b, accumulate=False, collective_axis="pair")
                    plgpu.tcgen05_commit_arrive(done, collective_axis="pair" if told else None)

                if leader_only:
                    plgpu.when(me == 0)(multiply)
                else:
                    multiply()

        @plgpu.when(wg == 0)
        def _():
            plgpu.warp_map(issue)

        @plgpu.when(wg == 1)
        def _():
            plgpu.barrier_wait(done)
            value = plgpu.async_load_tmem(acc)
            plgpu.wait_load_tmem()
            o[plgpu.ds(me * 128, 128)] = value

    return kernel


def test_a_pair_of_blocks(clean):
    x, y = randoms(256, 64), randoms(64, 128, seed=1)
    (got,) = clean(pair(), x, y, arch="sm_100a")
    np.testing.assert_allclose(got, x.astype(F32) @ y.astype(F32), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "options, error, rule",
    [
        (dict(tracked=False), (Race, UninitializedRead), "F14, D13"),
        (dict(waits=False), (Race, UninitializedRead), "F14"),
        (dict(told=False), (Deadlock,), "F13"),
        (dict(leader_only=False), (IllegalInstruction, Deadlock), "F14"),
    ],
    ids=str,
)
def test_a_pair_of_blocks_in_disorder(options, error, rule, found):
    e = found(pair(**options), randoms(256, 64), randoms(64, 128, seed=1), arch="sm_100a")
    assert isinstance(e, error), (rule, str(e))


def multicast_commit(*, both=True):
    """Blocks that share A by multicast: a slot is free when the products of both have ended."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, 128, 64), F32),
        cluster=(2,),
        cluster_names=("c",),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            a=plgpu.SMEM((128, 64), BF16, transforms=(plgpu.TilingTransform((128, 64)), plgpu.SwizzleTransform(128))),
            b=plgpu.SMEM((64, 64), BF16, transforms=tiled()),
            acc=plgpu.TMEM((128, 64), F32),
            full=plgpu.Barrier(num_arrivals=2),
            empty=plgpu.Barrier(num_arrivals=2 if both else 1),
            done=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    def kernel(x, y, o, *, a, b, acc, full, empty, done):
        me, wg = jax.lax.axis_index("c"), jax.lax.axis_index("wg")

        def issue(warp):
            @plgpu.when(warp == 0)
            def _():
                for i in range(3):
                    if i:
                        plgpu.barrier_wait(empty)
                    plgpu.copy_gmem_to_smem(x.at[i], a, full, collective_axes="c")
                    plgpu.copy_gmem_to_smem(y.at[me, i], b, full)

            @plgpu.when(warp == 1)
            def _():
                for i in range(3):
                    plgpu.barrier_wait(full)
                    plgpu.tcgen05_mma(acc, a, b, accumulate=bool(i))
                    if i < 2:
                        plgpu.tcgen05_commit_arrive(empty, collective_axis="c" if both else None)
                plgpu.tcgen05_commit_arrive(done)

        @plgpu.when(wg == 0)
        def _():
            plgpu.warp_map(issue)

        @plgpu.when(wg == 1)
        def _():
            plgpu.barrier_wait(done)
            value = plgpu.async_load_tmem(acc)
            plgpu.wait_load_tmem()
            o[me] = value

    return kernel


def test_multicast_commits(clean, found):
    """F13, D12: an arrival in every block; a block's own commit alone does not free a slot that the other fills."""
    x, y = randoms(3, 128, 64), randoms(2, 3, 64, 64, seed=1)
    (got,) = clean(multicast_commit(), x, y, arch="sm_100a")
    want = functools.reduce(np.add, [x[i].astype(F32) @ y[:, i].astype(F32) for i in range(3)])
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)
    e = found(multicast_commit(both=False), x, y, arch="sm_100a")
    assert isinstance(e, (Race, BarrierMisuse))
