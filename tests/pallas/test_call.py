"""pallas_call: orders of arguments, specs, semantics of the grid, scalar prefetch, dynamic bounds, aliases.

Each runs as XLA operations and in the simulator (which is what a call does on a CPU), and must give what JAX's own Pallas gives
in its interpreter, or what NumPy says.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as stock
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import Race, UnsupportedCall, UnsupportedPrimitive
from mosaic_gpu.pallas import lowering
from tests.support import out

F = jnp.float32
BOTH = pytest.mark.parametrize("interpret", [True, plgpu.SimulatorParams()], ids=["xla", "simulator"])


def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(dtype)


X = numbers(128, 256)
TILES = plgpu.BlockSpec((64, 128), lambda i, j: (i, j))


def double(x, o):
    o[...] = x[...] * 2


@BOTH
@pytest.mark.parametrize("shape", [(128, 256), (100, 260), (40, 128)])
def test_blocks_and_masked_edges(shape, interpret):
    x = numbers(*shape)
    grid = (plgpu.cdiv(shape[0], 64), plgpu.cdiv(shape[1], 128))
    f = plgpu.pallas_call(double, out(*shape), grid=grid, in_specs=[TILES], out_specs=TILES, interpret=interpret)
    np.testing.assert_array_equal(f(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(f)(x), 2 * x)


def where_am_i(n, x, y, o, p, s):
    """The kernel's order: prefetch, inputs, outputs, scratch."""
    s[...] = x[...] + y[...]
    o[...] = s[...] + n[0].astype(F)
    p[...] = x[...] * 0 + (100 * plgpu.program_id(0) + 10 * plgpu.program_id(1) + plgpu.num_programs(1)).astype(F)


@BOTH
def test_the_three_orders(interpret):
    """Primitive: dynamic bounds, prefetch, inputs; kernel: prefetch, inputs, outputs, scratch; index map: ids, prefetch."""
    seen = []

    def index(i, j, n):
        seen.append((i.aval.shape, j.aval.shape, n.shape))
        return i + n[0] * 0, j

    def call(rows, n, x, y):
        spec = plgpu.BlockSpec((64, 128), index)
        return plgpu.pallas_call(
            where_am_i,
            [out(128, 256), out(128, 256)],
            grid_spec=plgpu.PrefetchScalarGridSpec(
                1, (rows, 2), [spec, spec], [spec, spec], [plgpu.SMEM((64, 128), F)]
            ),
            interpret=interpret,
        )(n, x, y)

    n = np.array([5], np.int32)
    o, p = jax.jit(call)(np.int32(2), n, X, X + 1)
    assert seen[0] == ((), (), (1,))
    np.testing.assert_array_equal(o, 2 * X + 6)
    i, j = np.indices(X.shape)
    np.testing.assert_array_equal(p, 100 * (i // 64) + 10 * (j // 128) + 2)
    (eqn,) = jax.make_jaxpr(call)(np.int32(2), n, X, X).jaxpr.eqns[-1:]
    assert [v.aval.shape for v in eqn.invars] == [(), (1,), (128, 256), (128, 256)]
    assert eqn.params["call"].mapping.num_dynamic == 1


@BOTH
def test_trees_of_arguments_and_results(interpret):
    def kernel(p, y, o):
        o["sum"][...] = p["a"][...] + y[...]
        o["difference"][...] = p["b"][...] - y[...]

    whole = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
    tree = {"sum": whole, "difference": whole}
    f = plgpu.pallas_call(
        kernel,
        {"sum": out(128, 128), "difference": out(128, 128)},
        grid=2,
        in_specs=({"a": whole, "b": whole}, whole),
        out_specs=tree,
        interpret=interpret,
    )
    a, b, y = (numbers(128, 128, seed=i) for i in range(3))
    got = f({"a": a, "b": b}, y)
    np.testing.assert_array_equal(got["sum"], a + y)
    np.testing.assert_array_equal(got["difference"], b - y)


@BOTH
def test_no_specs_is_whole_arrays_in_shared_memory(interpret):
    f = plgpu.pallas_call(double, out(64, 128), interpret=interpret)
    np.testing.assert_array_equal(f(X[:64, :128]), 2 * X[:64, :128])
    assert [b.staged for b in f.traced(X[:64, :128])[0].mapping.blocks] == [True, True]


SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def product(a, b, o):
    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)
        return acc[...]

    o[...] = plgpu.run_scoped(multiply, plgpu.ACC((64, 128)))


def test_no_block_spec_in_one_slot_leaves_the_array_where_it_is():
    """A kernel that works while every array comes in shared memory fails when one has no spec; the error says why."""
    a, b = numbers(64, 64, dtype=jnp.bfloat16), numbers(64, 128, dtype=jnp.bfloat16)
    spec = plgpu.BlockSpec(transforms=SWIZZLED)
    np.testing.assert_array_equal(
        plgpu.pallas_call(product, out(64, 128), in_specs=[spec, spec])(a, b), a.astype(F) @ b.astype(F)
    )
    with pytest.raises(TypeError, match="must be an SMEM Ref") as e:
        plgpu.pallas_call(product, out(64, 128), in_specs=[spec, plgpu.no_block_spec])(a, b)
    assert any(
        "args[1] has no BlockSpec while others have one, so it stays where it is" in n for n in e.value.__notes__
    )


@BOTH
def test_kinds_of_dimensions(interpret):
    """Squeezed, Element with padding, an index map that is left out, a place in GMEM."""
    x, row = numbers(3, 130, 128), numbers(1, 128)

    def kernel(a, r, g, o):
        o[...] = a[...] + r[0, :][None, :] + g[...]

    f = plgpu.pallas_call(
        kernel,
        out(3, 128, 128),
        grid=(3, 2),
        in_specs=[
            plgpu.BlockSpec((None, plgpu.Element(64, (2, 0)), 128), lambda i, j: (i, 64 * j, 0)),
            plgpu.BlockSpec((1, 128)),
            plgpu.BlockSpec((plgpu.squeezed, plgpu.Blocked(64), 128), lambda i, j: (i, j, 0), memory_space=plgpu.ANY),
        ],
        out_specs=plgpu.BlockSpec((None, 64, 128), lambda i, j: (i, j, 0)),
        interpret=interpret,
    )
    shifted = np.pad(x, ((0, 0), (2, 0), (0, 0)))[:, :128]
    np.testing.assert_array_equal(f(x, row, x), shifted + row + x[:, :128])


def accumulate(x, o):
    @plgpu.when(plgpu.program_id(1) == 0)
    def _():
        o[...] = jnp.zeros_like(x[...]) + x[...] * 0

    o[...] += x[...]


ROW_SUM = dict(grid=(2, 2), in_specs=[TILES], out_specs=plgpu.BlockSpec((64, 128), lambda i, j: (i, 0)))


@BOTH
def test_accumulation_over_a_sequential_axis(interpret):
    f = plgpu.pallas_call(accumulate, out(128, 128), interpret=interpret, **ROW_SUM)
    np.testing.assert_array_equal(f(X), X[:, :128] + X[:, 128:])
    assert lowering.semantics(f.traced(X)[0]) == ("parallel", "sequential")


def params(*semantics, steps=2):
    return plgpu.CompilerParams(dimension_semantics=semantics, max_concurrent_steps=steps)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("kinds", [("parallel", "sequential"), ("sequential", "arbitrary")])
def test_dimension_semantics(kinds, steps):
    f = plgpu.pallas_call(accumulate, out(128, 128), compiler_params=params(*kinds, steps=steps), **ROW_SUM)
    np.testing.assert_array_equal(f(X), X[:, :128] + X[:, 128:])
    program = lowering.kernel_of(f.traced(X)[0]).program(X)
    assert program.grid == ((2,) if kinds[0] == "parallel" else ())


def test_semantics_that_cannot_be():
    def call(*kinds, **options):
        return plgpu.pallas_call(accumulate, out(128, 128), compiler_params=params(*kinds), **(ROW_SUM | options))

    with pytest.raises(
        UnsupportedCall, match="axis 1 of the grid parallel, but the block of outputs does not depend on it"
    ):
        call("parallel", "parallel")(X)
    with pytest.raises(ValueError, match="has 1 entries, the grid of accumulate has 2 axes"):
        call("parallel")(X)
    back = plgpu.BlockSpec((64, 128), lambda i, j: (j, 0))
    with pytest.raises(UnsupportedCall, match="depends on sequential axis 1 but not on axis 0 outside of it"):
        call("sequential", "sequential", out_specs=back)(X)
    with pytest.raises(ValueError, match="'parallel', 'sequential' or 'arbitrary'"):
        params("serial")
    with pytest.raises(ValueError, match="kernel: compiler_params has dimension_semantics"):
        plgpu.kernel(double, out(8), compiler_params=params("parallel"))


def test_parallel_blocks_that_meet_in_global_memory_are_a_race():
    def kernel(x, o):
        o[...] = x[...]

    f = plgpu.pallas_call(
        kernel,
        out(64, 128),
        grid=2,
        in_specs=[plgpu.BlockSpec((64, 128), lambda i: (i, 0))],
        out_specs=plgpu.BlockSpec(memory_space=plgpu.GMEM),
        compiler_params=params("parallel"),
    )
    with pytest.raises(Race):
        f(X[:, :128])


@BOTH
def test_a_state_that_is_carried_along_the_grid(interpret):
    """Scratch lives as long as the block does: a running sum of rows."""

    def kernel(x, o, state):
        @plgpu.when(plgpu.program_id(0) == 0)
        def _():
            state[...] = x[...] * 0

        state[...] += x[...]
        o[...] = state[...]

    rows = plgpu.BlockSpec((1, 256), lambda i: (i, 0))
    f = plgpu.pallas_call(
        kernel,
        out(128, 256),
        grid=128,
        in_specs=[rows],
        out_specs=rows,
        scratch_shapes={"state": plgpu.SMEM((1, 256), F)},
        compiler_params=params("sequential"),
        interpret=interpret,
    )
    np.testing.assert_array_equal(f(X), X.cumsum(0))


@BOTH
@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_dynamic_bounds(rows, interpret):
    """A size that only the device knows; what no step reaches keeps the aliased input's values."""
    x = numbers(8, 128)
    row = plgpu.BlockSpec((1, 128), lambda i, j: (i, 0))

    @jax.jit
    def f(n, x):
        return plgpu.pallas_call(
            lambda x, o: o.__setitem__(..., x[...] + 1),
            out(8, 128),
            grid=(n, 1),
            in_specs=[row],
            out_specs=row,
            input_output_aliases={0: 0},
            interpret=interpret,
        )(x)

    np.testing.assert_array_equal(f(np.int32(rows), x), x + (np.arange(8) < rows)[:, None])


@BOTH
def test_scalar_prefetch(interpret):
    table, index = numbers(16, 128), np.array([3, 1, 1, 15], np.int32)
    f = plgpu.pallas_call(
        lambda i, x, o: o.__setitem__(..., x[...] + i[plgpu.program_id(0)].astype(F)),
        out(4, 128),
        grid_spec=plgpu.PrefetchScalarGridSpec(
            1,
            4,
            [plgpu.BlockSpec((1, 128), lambda i, index: (index[i], 0))],
            plgpu.BlockSpec((1, 128), lambda i, _: (i, 0)),
        ),
        interpret=interpret,
    )
    np.testing.assert_array_equal(f(index, table), table[index] + index[:, None])


def test_like_stock_pallas():
    """The same body and specs through JAX's own interpreter."""

    def make(pl, program_id, **options):
        def kernel(x, o):
            o[...] = x[...] * program_id(0).astype(F) + program_id(1).astype(F)

        spec = pl.BlockSpec((None, 32, 128), lambda i, j: (1 - i, j, 0))
        return pl.pallas_call(kernel, out(2, 80, 128), grid=(2, 3), in_specs=[spec], out_specs=spec, **options)

    x = numbers(2, 80, 128)
    theirs = make(stock, stock.program_id, interpret=True)(x)
    for interpret in (False, True):
        np.testing.assert_array_equal(make(plgpu, plgpu.program_id, interpret=interpret)(x), theirs)


def test_interpretation_holds_the_body_against_the_rules():
    """What the compiler has no rule for fails interpreted, too, with the class and the line of the compiler's error."""

    def unknown(x, o):
        o[...] = jax.lax.betainc(x[...], x[...], x[...])  # no rule

    for interpret in (True, plgpu.SimulatorParams(), False):
        with pytest.raises(UnsupportedPrimitive, match="regularized_incomplete_beta"):
            plgpu.pallas_call(unknown, out(64, 128), interpret=interpret)(X[:64, :128])

    def beyond(x, o):
        o[...] = x[...] + plgpu.program_id(1).astype(F)

    for interpret in (True, False):
        with pytest.raises(UnsupportedCall, match=r"program_id\(1\): the grid of this pallas_call has 0 axes"):
            plgpu.pallas_call(beyond, out(64, 128), interpret=interpret)(X[:64, :128])


def test_what_only_the_simulator_has():
    def kernel(x, o, bar):
        o[...] = x[...]

    call = dict(out_shape=out(64, 128), scratch_shapes=[plgpu.Barrier()])
    np.testing.assert_array_equal(plgpu.pallas_call(kernel, **call)(X[:64, :128]), X[:64, :128])
    with pytest.raises(UnsupportedPrimitive, match="interpret=plgpu.SimulatorParams"):
        plgpu.pallas_call(kernel, interpret=True, **call)(X[:64, :128])


def copies_itself(x, o):
    def scoped(tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        o[...] = tile[...]

    plgpu.run_scoped(scoped, plgpu.SMEM((64, 128), F), plgpu.Barrier())


def asks_its_warps(x, o):
    plgpu.warp_map(lambda warp: None)
    o[...] = x[...]


@pytest.mark.parametrize("body, what", [(copies_itself, "barrier buffers"), (asks_its_warps, "warp_map")])
def test_what_xla_has_not_says_where_to_run_it(body, what):
    left = plgpu.BlockSpec(memory_space=plgpu.ANY)
    call = dict(out_shape=out(64, 128), in_specs=[left])
    np.testing.assert_array_equal(plgpu.pallas_call(body, **call)(X[:64, :128]), X[:64, :128])
    with pytest.raises(UnsupportedPrimitive, match=f"which has no {what}; run it in the simulator") as e:
        plgpu.pallas_call(body, interpret=True, **call)(X[:64, :128])
    assert e.value.line.function in ("copies_itself", "asks_its_warps")


@pytest.mark.parametrize("interpret", [True, False])
def test_a_copy_from_shared_memory(interpret):
    """XLA has no such copies: there each has ended before the next operation."""

    def body(x, o, tile):
        tile[...] = x[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile.at[plgpu.ds(0, 32)], o.at[plgpu.ds(32, 32)])
        plgpu.copy_smem_to_gmem(tile.at[plgpu.ds(32, 32)], o.at[plgpu.ds(0, 32)])
        plgpu.wait_smem_to_gmem(0)

    left = plgpu.BlockSpec(memory_space=plgpu.ANY)
    f = plgpu.pallas_call(
        body,
        out(64, 128),
        in_specs=[left],
        out_specs=left,
        scratch_shapes=[plgpu.SMEM((64, 128), F)],
        interpret=interpret,
    )
    x = X[:64, :128]
    np.testing.assert_array_equal(f(x), 2 * np.concatenate([x[32:], x[:32]]))


def test_compiles_for_hopper(compiled):
    from mosaic_gpu.plan.build import build_plan

    f = plgpu.pallas_call(accumulate, out(128, 128), **ROW_SUM)
    report = compiled(build_plan(lowering.kernel_of(f.traced(X)[0]).program(X), "sm_90a"))
    assert not report.complaints() and {"UTMALDG", "UTMASTG"} <= set(report.mnemonics)
