"""`kernel` and the memory spaces: forms of the call, older spellings, errors of the arguments, programs as data."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.memory import BarrierInfo, MemorySpace
from mosaic_gpu.program import walk

F = jnp.float32
X = jax.ShapeDtypeStruct((8,), F)


def copy_first(x, o):
    o[0] = x[0]


def test_forms_give_the_same_program():
    """A call, a decorator with options, and the older spellings."""
    called = plgpu.kernel(copy_first, X, name="k").program(X)

    @plgpu.kernel(out_type=X, name="k")
    def decorated(x, o):
        o[0] = x[0]

    older = plgpu.kernel(copy_first, out_shape=X, scratch_shapes=(), kernel_name="k").program(X)
    assert [e.op for e in decorated.program(X).body] == [e.op for e in called.body]
    assert older == called


def test_imports_under_other_names():
    from mosaic_gpu import pl
    from mosaic_gpu import plgpu as same

    assert pl is same is plgpu and pl.kernel is plgpu.kernel
    assert set(plgpu.__all__) <= set(dir(plgpu))
    for name in plgpu.__all__:
        assert getattr(plgpu, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plgpu.nothing  # noqa: B018


def test_scratch_by_position_and_by_name():
    def by_position(x, o, s, b):
        assert s.shape == (8, 16) and b.shape == (2,)

    def by_name(x, o, *, b, s):
        by_position(x, o, s, b)

    s, b = plgpu.SMEM((8, 16), F), plgpu.Barrier(num_barriers=2)
    p = plgpu.kernel(by_position, X, scratch_types=[s, b]).program(X)
    q = plgpu.kernel(by_name, X, scratch_types={"s": s, "b": b}).program(X)
    assert [(v.shape, v.space.kind) for v in p.scratch] == [((8, 16), "smem"), ((2,), "barrier")]
    assert {v.name: v.space.kind for v in q.scratch} == {"s": "smem", "b": "barrier"}


def test_nested_scratch_and_pytree_inputs():
    def body(pair, o, nested):
        (a, b), (s, (t,)) = pair, nested
        assert a.shape == (8,) and b.shape == (4,) and s.shape == (2,) and t.shape == (3,)

    p = plgpu.kernel(body, X, scratch_types=[(plgpu.SMEM(2, F), (plgpu.SMEM((3,), F),))]).program(
        (X, jax.ShapeDtypeStruct((4,), F))
    )
    assert len(p.inputs) == 3 and p.num_outputs == 1 and len(p.scratch) == 2


def test_several_outputs():
    def body(x, a, b):
        pass

    p = plgpu.kernel(body, {"b": X, "a": jax.ShapeDtypeStruct((), jnp.int32)}).program(X)
    assert [v.dtype for v in p.inputs] == ["float32", "int32", "float32"] and p.num_outputs == 2


def test_what_a_program_records():
    p = plgpu.kernel(
        lambda x, o: None,
        X,
        grid=(2, np.int64(3)),
        grid_names=("a", "b"),
        cluster=(2,),
        cluster_names=("c",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        name="named",
    ).program(X)
    assert (p.name, p.grid, p.grid_names, p.cluster, p.cluster_names) == ("named", (2, 3), ("a", "b"), (2,), ("c",))
    assert (p.num_threads, p.thread_name, p.params.approx_math) == (3, "wg", True)


def test_the_kernel_keeps_the_name_of_its_body():
    k = plgpu.kernel(copy_first, X)
    assert k.__name__ == "copy_first" and k.program(X).name == "copy_first"


def every_kind_of_operation(x, o, s, b, n, *, wg="wg"):
    index = jax.lax.axis_index(wg)

    @plgpu.when(index == 0)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        plgpu.copy_gmem_to_smem(x.at[plgpu.ds(index * 64, 64)], s.at[0], b.at[0])

    @plgpu.when(index == 1)
    def _():
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_wait(b.at[0])

        def scope(acc):
            plgpu.wgmma(acc, s.at[0], s.at[0].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return jnp.where(acc[...] > 0, acc[...], 0.0)

        y = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))
        s[1] = plgpu.layout_cast(y, plgpu.Layout.WGMMA).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.named_barrier_sync(n)
        plgpu.copy_smem_to_gmem(s.at[1], o.at[plgpu.ds(0, 64)])
        plgpu.wait_smem_to_gmem(0)
        total = jax.lax.fori_loop(0, 3, lambda i, c: c + i, 0)
        o[0, 0] = total.astype(jnp.bfloat16)


def test_programs_pickle_and_hash():
    """A program is plain data: equal when traced again, hashable, and the same after a pickle, lines included."""
    tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    k = plgpu.kernel(
        every_kind_of_operation,
        jax.ShapeDtypeStruct((128, 64), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tile),
            plgpu.Barrier(num_barriers=2),
            plgpu.NamedBarrier(num_warpgroups=1),
        ],
        num_threads=2,
        thread_name="wg",
    )
    x = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
    p, again = k.program(x), k.program(x)
    copy = pickle.loads(pickle.dumps(p))
    assert p == again == copy and len({hash(p), hash(again), hash(copy)}) == 1
    assert [e.line for e in walk(copy.body)] == [e.line for e in walk(p.body)]
    assert copy.scratch[0].space.tiling == (8, 64) and copy.scratch[0].space.swizzle == 128


def test_the_shape_is_part_of_the_program():
    k = plgpu.kernel(copy_first, X)
    assert k.program(X) != k.program(jax.ShapeDtypeStruct((9,), F))


# ---- errors of the arguments --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(grid=(2,), grid_names=("a", "b")), ValueError, "has 1 axes, grid_names=.* has 2"),
        (dict(grid=(-1,)), ValueError, r"grid\[0\]=-1 must be a whole number of at least 0"),
        (dict(grid=(1.5,)), TypeError, r"grid\[0\] must be a whole number of at least 0, not 1.5"),
        (dict(cluster=(0,), cluster_names=("c",)), ValueError, r"cluster\[0\]=0 must be a whole number of at least 1"),
        (dict(cluster=(2,)), ValueError, "needs cluster_names"),
        (dict(num_threads=2), ValueError, "num_threads and thread_name go together"),
        (dict(thread_name="wg"), ValueError, "num_threads and thread_name go together"),
        (dict(cluster=(4, 8), cluster_names=("a", "b")), UnsupportedCall, "at most 16 blocks"),
        (dict(cluster=(1, 1, 2, 1), cluster_names=("a", "b", "c", "d")), UnsupportedCall, "at most 3 axes"),
        (dict(grid=(2,), grid_names=("a",), num_threads=2, thread_name="a"), ValueError, "names must differ"),
        (dict(out_type=X, out_shape=X), ValueError, "out_type or its older spelling out_shape"),
        (
            dict(scratch_types=[plgpu.Barrier()], scratch_shapes=[plgpu.Barrier()]),
            ValueError,
            "scratch_types or its older spelling scratch_shapes",
        ),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        plgpu.kernel(copy_first, **options)


@pytest.mark.parametrize(
    ("scratch", "error", "words"),
    [
        (X, TypeError, r"scratch_types must be a sequence or a mapping of memory spaces.*not ShapeDtypeStruct"),
        (plgpu.ACC((64, 64)), UnsupportedCall, "cannot hold ACC.*run_scoped"),
        (plgpu.GMEM((64, 64), F), UnsupportedCall, "cannot hold GMEM"),
    ],
)
def test_bad_scratch(scratch, error, words):
    with pytest.raises(error, match=words):
        plgpu.kernel(lambda *a: None, X, scratch_types=[scratch]).program(X)


def test_a_ref_is_no_argument():
    inner = plgpu.kernel(copy_first, X)

    def body(x, o):
        inner(x)

    with pytest.raises(TypeError, match="takes arrays, not Refs"):
        plgpu.kernel(body, X).program(X)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plgpu.SwizzleTransform(48), "32, 64 and 128 bytes"),
        (lambda: plgpu.Barrier(num_arrivals=0), "num_arrivals=0"),
        (lambda: plgpu.Barrier(num_barriers=0), "num_barriers=0 must be .* at least 1"),
        (lambda: plgpu.NamedBarrier(num_warpgroups=9), "num_warpgroups=9 must be .* from 1 to 8"),
        (
            lambda: plgpu.GMEM((8,), F, transforms=[plgpu.SwizzleTransform(128)]),
            "describe shared memory; GMEM has none",
        ),
        (lambda: plgpu.SMEM((8,), F, packed=True), "describe TMEM; SMEM has none"),
        (lambda: plgpu.set_max_registers(40, action="lower"), "'increase' or 'decrease'"),
        (lambda: plgpu.wgmma_wait(64), "0 to 63"),
        (lambda: plgpu.Layout.WGMMA(2), "takes no parameters"),
    ],
)
def test_bad_descriptions_of_memory(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_memory_spaces_are_data():
    b = plgpu.ClusterBarrier(collective_axes="c", num_arrivals=2, num_barriers=(2, 3), orders_tensor_core=True)
    assert b.shape == (2, 3) and b.space.barrier == BarrierInfo(2, True, ("c",))
    s = plgpu.SMEM(
        (8, 64), jnp.bfloat16, transforms=[plgpu.TilingTransform((np.int64(8), 64)), plgpu.SwizzleTransform(128)]
    )
    assert s.space == MemorySpace("smem", (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    assert s.space.tiling == (8, 64) and s.space.swizzle == 128 and hash(s.space) == hash(s.space)
    assert plgpu.SMEM(4, F, transforms=[plgpu.SwizzleTransform(16)]).space.swizzle == 0
    assert plgpu.ACC((64, 8)).dtype == np.float32


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda x, s, b: plgpu.copy_gmem_to_smem(s, s, b), "src must be a GMEM Ref, not an SMEM Ref"),
        (lambda x, s, b: plgpu.copy_gmem_to_smem(x, x, b), "dst must be an SMEM Ref, not a GMEM Ref"),
        (lambda x, s, b: plgpu.copy_gmem_to_smem(x, s, s), "barrier must be a Barrier Ref, not an SMEM Ref"),
        (lambda x, s, b: plgpu.copy_smem_to_gmem(s, x[...]), r"dst must be a GMEM Ref, not an array \(float32\[8\]\)"),
        (lambda x, s, b: plgpu.barrier_wait(x), "barrier must be a Barrier Ref, not a GMEM Ref"),
        (lambda x, s, b: plgpu.named_barrier_sync(b), "barrier must be a NamedBarrier Ref, not a Barrier Ref"),
        (lambda x, s, b: plgpu.wgmma(s, s, s), "acc must be an ACC Ref .*run_scoped.* not an SMEM Ref"),
        (lambda x, s, b: plgpu.load(x[...]), "ref must be an SMEM Ref or a GMEM Ref, not an array"),
        (lambda x, s, b: plgpu.tcgen05_mma(s, s, s), "acc must be a TMEM Ref"),
        (lambda x, s, b: plgpu.async_load_tmem(s), "src must be a TMEM Ref"),
        (lambda x, s, b: plgpu.tcgen05_commit_arrive(s), "barrier must be a Barrier Ref"),
    ],
)
def test_the_wrong_kind_of_memory(use, words):
    def body(x, o, s, b):
        use(x, s, b)

    with pytest.raises(TypeError, match=words):
        plgpu.kernel(body, X, scratch_types=[plgpu.SMEM(8, F), plgpu.Barrier()]).program(X)


def test_an_empty_grid_runs_nothing_and_gives_zeros():
    def body(x, o):
        o[plgpu.program_id(0)] = x[0]

    f = plgpu.kernel(body, jax.ShapeDtypeStruct((4,), jnp.float32), grid=(0,), num_threads=1, thread_name="wg")
    for call in (f, jax.jit(f)):
        np.testing.assert_array_equal(np.asarray(call(jnp.ones(4))), np.zeros(4))


def test_debug_prints_the_program(capsys):
    def body(x, o):
        o[0] = x[0]

    plgpu.kernel(body, jax.ShapeDtypeStruct((4,), jnp.float32), debug=True, name="shown").program(jnp.ones(4))
    assert "kernel shown" in capsys.readouterr().out
