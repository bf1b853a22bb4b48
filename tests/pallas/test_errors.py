"""What a pallas_call says that is wrong: nothing before arrays are seen, then the argument's path and the way out."""

from __future__ import annotations

import inspect

import jax
import jax.experimental.pallas as stock
import jax.experimental.pallas.mosaic_gpu as stock_gpu
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import IllegalInstruction, Race, UninitializedRead, UnsupportedCall
from mosaic_gpu.simulator import UnwrittenOutput
from tests.support import out

F = jnp.float32
X = np.ones((64, 128), np.float32)


def copy(x, o):
    o[...] = x[...]


SHAPE = out(64, 128)
GMEM = plgpu.BlockSpec(memory_space=plgpu.GMEM)


def spec(*block, index=None, **options):
    return plgpu.BlockSpec(block or None, index, **options)


@pytest.mark.parametrize(
    "what, given",
    [("grid", 2), ("in_specs", [spec()]), ("out_specs", spec()), ("scratch_shapes", [plgpu.SMEM((8,), F)])],
)
def test_grid_spec_excludes_the_rest(what, given):
    with pytest.raises(ValueError, match=f"If `grid_spec` is specified, then `{what}` must be"):
        plgpu.pallas_call(copy, out(64, 128), grid_spec=plgpu.GridSpec(), **{what: given})
    plgpu.pallas_call(copy, out(64, 128), grid_spec=plgpu.GridSpec(grid=1), grid=(), scratch_shapes=[])


def call(*args, shape=SHAPE, body=copy, **options):
    return lambda: plgpu.pallas_call(body, shape, **options)(*(args or (X,)))


CAPTURED = jnp.arange(4.0)
(N,) = jax.export.symbolic_shape("n")
WRONG = {
    "no tuple of specs": (call(in_specs=spec()), ValueError, "`in_specs` must be a tuple or a list"),
    "too few specs": (
        call(X, X, in_specs=[spec()], body=lambda x, y, o: None),
        ValueError,
        r"Pytree for `in_specs` and `inputs` do not match.*`in_specs` is a tuple of length 1 but `inputs` is a tuple of length 2",
    ),
    "a spec for a tree": (
        call({"w": X}, in_specs=[spec()]),
        ValueError,
        r"at \[0\], `in_specs` is a pytree leaf but `inputs` is a dict",
    ),
    "other keys": (
        call({"w": X}, in_specs=[{"v": spec()}]),
        ValueError,
        r"at \[0\], `in_specs` has the keys \['v'\] but `inputs` \['w'\]",
    ),
    "outputs' tree": (
        call(shape=[out(64, 128)] * 2, out_specs=[spec()]),
        ValueError,
        "Pytree for `out_specs` and `out_shape` do not match",
    ),
    "rank": (
        call({"w": X}, in_specs=[{"w": spec(64)}]),
        ValueError,
        r"Block shape for args\[0\]\['w'\] \(= \(64,\)\) must have the same number of dimensions as the array shape \(64, 128\)",
    ),
    "block_shape": (call(in_specs=[plgpu.BlockSpec(7)]), TypeError, r"block_shape of args\[0\]"),
    "block dim": (call(in_specs=[spec(64, 0)]), ValueError, r"block_shape\[1\] of args\[0\]=0"),
    "padding": (
        call(in_specs=[spec(plgpu.Element(64, (1, 2, 3)), 128)]),
        ValueError,
        r"padding of block_shape\[0\] of args\[0\] is \(low, high\)",
    ),
    "index map's length": (
        call(in_specs=[spec(64, 128, index=lambda: 0)]),
        ValueError,
        r"Index map function <lambda> at .*test_errors.py:\d+ for args\[0\] must return 2 values to match "
        r"block_shape=\(64, 128\). Currently returning 1 values",
    ),
    "index map's type": (
        call(in_specs=[spec(64, 128, index=lambda: (0, 1.5))]),
        ValueError,
        r"must return integer scalars. Output\[1\] has type float",
    ),
    "index map's arguments": (
        call(in_specs=[spec(64, 128, index=lambda i: (i, 0))]),
        TypeError,
        "missing 1 required positional argument",
    ),
    "index map's constants": (
        call(in_specs=[spec(64, 128, index=lambda i: (CAPTURED[i].astype(int), 0))], grid=1),
        ValueError,
        "must not capture constants",
    ),
    "a returned value": (
        call(body=lambda x, o: x[...]),
        ValueError,
        r"The kernel function of the pallas_call, <lambda> at .*, should return None. It returns a PyTree",
    ),
    "a captured array": (
        call(body=lambda x, o: o.__setitem__((0, plgpu.ds(0, 4)), CAPTURED)),
        ValueError,
        r"captures constants \[.*4.*\]. You should pass them as inputs. \(Python and NumPy scalars may be captured.\)",
    ),
    "number of Refs": (
        call(X, X, scratch_shapes=[plgpu.SMEM((8,), F)], body=lambda x, o, s: None),
        TypeError,
        r"pallas_call <lambda>\(x, o, s\) gets 2 inputs, 1 output \(out_shape\) and 1 scratch buffer \(scratch_shapes\): it "
        r"takes 3 positional arguments but 4 were given. Call it with 1 input \(x\)",
    ),
    "a type that JAX has not": (
        call(shape=out(64, 128, dtype=np.float64), body=lambda x, o: o.__setitem__(..., x[...].astype(o.dtype))),
        ValueError,
        "outputs is to be float64, which JAX has only with jax_enable_x64",
    ),
    "no array": (call("x"), TypeError, r"args\[0\] must be an array or a number"),
    "interpret": (call(interpret="yes"), TypeError, "interpret must be True, False or plgpu.SimulatorParams"),
    "name": (call(name=3), TypeError, "name must be a name or None"),
    "out_shape": (call(shape=(64, 128)), TypeError, "out_shape must be jax.ShapeDtypeStruct"),
    "grid": (call(grid="x"), TypeError, "grid must be an int or a tuple"),
    "grid's entry": (call(grid=(1.5,)), TypeError, r"grid\[0\] must be a whole number"),
    "padding in front of blocks in place": (
        call(in_specs=[spec(plgpu.Element(64, (1, 0)), 128, memory_space=plgpu.ANY)]),
        UnsupportedCall,
        "padding in front of an array .* the spec says so. Pad the array",
    ),
    "half a byte": (
        call(shape=out(64, 128, dtype=jnp.int4)),
        UnsupportedCall,
        "outputs: blocks of int4 cannot be read",
    ),
    "two axes of a name": (call(grid=(("i", 2), ("i", 1))), ValueError, "axes share a name"),
    "a named axis of unknown size": (call(grid=(("i", jnp.int32(2)),)), UnsupportedCall, "leave the name out"),
    "a symbolic block": (
        call(shape=out(N, 128)),
        ValueError,
        r"outputs, whole=n: shape polymorphism .* A block's sizes are numbers.* a grid of plgpu.cdiv\(n, 64\)",
    ),
    "a symbolic array in place": (
        call(shape=out(N, 128), out_specs=spec(memory_space=plgpu.ANY)),
        UnsupportedCall,
        r"outputs of shape \(n, 128\): only arrays that are cut into blocks of known sizes",
    ),
    "memory space": (call(in_specs=[spec(memory_space="vmem")]), TypeError, r"memory_space of args\[0\]"),
    "pipeline mode": (
        call(in_specs=[spec(pipeline_mode="x")]),
        TypeError,
        r"pipeline_mode of args\[0\] must be Buffered",
    ),
    "transforms": (call(in_specs=[spec(transforms=[3])]), TypeError, r"transforms of args\[0\]"),
    "collective": (call(in_specs=[spec(collective_axes=["c"])]), UnsupportedCall, "has no cluster for collective_axes"),
    "scratch": (call(scratch_shapes=[out(8)]), TypeError, "scratch_shapes must be a memory space"),
    "scratch's sequence": (call(scratch_shapes="x"), TypeError, "scratch_shapes must be a sequence"),
    "scratch in GMEM": (call(scratch_shapes=[plgpu.GMEM((8,), F)]), UnsupportedCall, "scratch in GMEM: pass an output"),
    "prefetch": (
        call(grid_spec=plgpu.GridSpec(num_scalar_prefetch=2)),
        ValueError,
        "num_scalar_prefetch=2 must be a whole number from 0 to 1",
    ),
    "alias of no input": (
        call(input_output_aliases={2: 0}),
        ValueError,
        r"input_output_aliases contains the mapping '2:0' with input index 2 outside the range \[0, 1\)",
    ),
    "alias of no output": (
        call(input_output_aliases={0: 1}),
        ValueError,
        r"'0:1' with output index 1 outside the range \[0, 1\)",
    ),
    "alias of another type": (
        call(shape=out(64, 128, dtype=jnp.int32), input_output_aliases={0: 0}),
        ValueError,
        "abstract value float32.* and to output.0. with a different abstract value int32",
    ),
    "two inputs in one output": (
        call(X, X, body=lambda x, y, o: None, input_output_aliases={0: 0, 1: 0}),
        ValueError,
        "one output cannot be the buffer of two inputs",
    ),
    "cost": (call(cost_estimate=3), TypeError, "cost_estimate must be CostEstimate"),
    "a cost's number": (
        call(cost_estimate=plgpu.CostEstimate("many", 0, 0)),
        TypeError,
        "cost_estimate.flops must be a number, not 'many'",
    ),
    "metadata": (call(metadata="x"), TypeError, "metadata must be a dictionary of what JSON can say"),
    "metadata that JSON has not": (
        call(metadata={"x": X}),
        TypeError,
        "metadata must be a dictionary of what JSON can say",
    ),
    "a key": (call(jax.random.key(0)), UnsupportedCall, r"args\[0\] is an array of PRNG keys .* fold it into a key"),
    "grid_spec": (call(grid_spec=3), TypeError, r"grid_spec must be GridSpec\(...\) or PrefetchScalarGridSpec"),
    "aliases": (call(input_output_aliases=3), TypeError, "input_output_aliases must be a mapping"),
    "a path to no spec": (call({"w": X}, in_specs=[{"w": 7}]), TypeError, r"in_specs\[0\]\['w'\] must be BlockSpec"),
    "a spec of JAX's": (
        call(in_specs=[stock.BlockSpec()]),
        TypeError,
        r"in_specs\[0\] must be BlockSpec .*\(mosaic_gpu's, not jax",
    ),
    "params of JAX's": (
        call(compiler_params=stock_gpu.CompilerParams()),
        ValueError,
        r"no backend is registered for compiler_params of type jax\..*CompilerParams on .*; have mosaic_gpu.CompilerParams",
    ),
    "a name in an index map": (
        call(in_specs=[spec(64, 128, index=lambda: ("i", 0))]),
        ValueError,
        r"for args\[0\] must return integer scalars. Output\[0\] has type str \('i'\)",
    ),
    "a float as a grid's size": (
        call(grid=(jnp.float32(2.7),)),
        TypeError,
        r"grid\[0\] must be a whole number or an int32",
    ),
    "2**31 points": (
        call(grid=(2**31,)),
        ValueError,
        r"grid\[0\]=2147483648 must be a whole number from 0 to 2147483647",
    ),
    "2**32 steps": (
        call(grid=(2**16, 2**16), in_specs=[spec(64, 128, index=lambda i, j: (i, 0))]),
        UnsupportedCall,
        "a pipeline of 4294967296 steps: they are counted in int32",
    ),
    "program_id of JAX's": (
        call(grid=1, body=lambda x, o: stock.program_id(0)),
        UnsupportedCall,
        "program_id of jax.experimental.pallas works in calls of JAX's only; here it is mosaic_gpu.program_id",
    ),
    "compiler_params": (
        call(compiler_params=3),
        ValueError,
        "no backend is registered for compiler_params of type builtins.int",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    f, kind, words = WRONG[wrong]
    with pytest.raises(kind, match="(?s)" + words) as e:
        f()
    assert e.value.line is not None and e.value.line.file == __file__


def test_lines(line_of):
    """Of a spec that is wrong it is where its index map stands, of another argument where the call stands."""
    wrong = plgpu.BlockSpec((64,), lambda i: i)  # the first
    many = plgpu.BlockSpec((64, 128), lambda i, j: (i, j))  # the second
    short = plgpu.BlockSpec((64, 128), lambda i: i)  # the third
    bare = plgpu.BlockSpec((64, 100, 2))
    for mark, call_of in (
        ("the first", lambda: plgpu.pallas_call(copy, SHAPE, grid=1, in_specs=[wrong])(X)),
        ("the second", lambda: plgpu.pallas_call(copy, SHAPE, grid=1, in_specs=[many])(X)),
        ("the third", lambda: plgpu.pallas_call(copy, SHAPE, grid=1, in_specs=[short])(X)),
        ("the fourth", lambda: plgpu.pallas_call(copy, SHAPE, grid=1, in_specs=[bare])(X)),  # the fourth
        ("the fifth", lambda: plgpu.pallas_call(copy, SHAPE, grid="x")(X)),  # the fifth
        ("the sixth", lambda: plgpu.pallas_call(copy, SHAPE, name=7)),  # the sixth
    ):
        with pytest.raises((TypeError, ValueError)) as e:
            call_of()
        assert (e.value.line.file, e.value.line.number) == (__file__, line_of(test_lines, mark)), mark


def test_copies_of_blocks_point_at_specs(line_of):
    """They are of no line of the body."""
    whole = plgpu.BlockSpec((64, 128), lambda i: (0, 0))  # the output
    unaligned = plgpu.BlockSpec((64, plgpu.Element(64)), lambda i: (0, 3))  # the start
    with pytest.raises(IllegalInstruction, match="TMA moves rows from multiples of 16 bytes on") as e:
        plgpu.pallas_call(
            lambda x, o: o.__setitem__((..., plgpu.ds(0, 64)), x[...]),
            SHAPE,
            grid=1,
            in_specs=[unaligned],
            out_specs=whole,
        )(X)
    assert (e.value.line.file, e.value.line.number) == (
        __file__,
        line_of(test_copies_of_blocks_point_at_specs, "the start"),
    )
    in_front = plgpu.BlockSpec((64, 128), lambda i: (i - 1, 0))
    with pytest.raises(IllegalInstruction, match="TMA does not store in front of an array") as e:
        plgpu.pallas_call(copy, SHAPE, grid=1, in_specs=[whole], out_specs=in_front)(X)
    number = line_of(test_copies_of_blocks_point_at_specs, "the output")
    assert [f":{number} " in n for n in e.value.__notes__ if "is copied in blocks of (64, 128)" in n] == [True, False]


@pytest.mark.parametrize("axes", [0, 1])
def test_axes_that_are_parallel_unasked(axes):
    """The output's block depends on the axis, but stays the same for two steps."""

    def pairs(x, o):
        @plgpu.when(plgpu.program_id(0) % 2 == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += x[...]

    def pairs_of(**params):
        f = plgpu.pallas_call(
            pairs,
            out(32, 128),
            grid=4,
            in_specs=[plgpu.BlockSpec((16, 128), lambda i: (i, 0))],
            out_specs=plgpu.BlockSpec((16, 128), lambda i: (i // 2, 0)),
            compiler_params=plgpu.CompilerParams(**params),
        )
        return jax.vmap(f) if axes else f

    x = np.stack([X] * 2) if axes else X
    with pytest.raises(UninitializedRead) as e:
        pairs_of()(x)
    assert any("parallel axes of the grid (0)" in n and "make the axis 'sequential'" in n for n in e.value.__notes__)
    y = pairs_of(dimension_semantics="sequential")(x)
    np.testing.assert_array_equal(y, x.reshape(*x.shape[:-2], 2, 2, 16, 128).sum(-3).reshape(*x.shape[:-2], 32, 128))


@pytest.mark.parametrize(
    ("kind", "what"), [("sequential", "with others between them"), ("parallel", "run at the same time")]
)
def test_a_block_of_an_output_that_comes_back(kind, what):
    """Its steps do not follow each other, or have blocks of CUDA of their own."""
    f = plgpu.pallas_call(
        copy,
        out(32, 128),
        grid=4,
        in_specs=[plgpu.BlockSpec((16, 128), lambda i: (i, 0))],
        out_specs=plgpu.BlockSpec((16, 128), lambda i: (i % 2, 0)),
        compiler_params=plgpu.CompilerParams(dimension_semantics=(kind,)),
    )
    with pytest.raises(Race) as e:
        f(X)
    assert any("two steps store the same block of an output" in n and what in n for n in e.value.__notes__)


def test_a_branch_in_an_index_map():
    chosen = plgpu.BlockSpec((64, 128), lambda i: (1 if i else 0, 0))
    with pytest.raises(UnsupportedCall, match=r"`if`, .* of a traced value \(int32\[\]\).*jnp.where or lax.cond") as e:
        plgpu.pallas_call(copy, SHAPE, grid=1, in_specs=[chosen])(X)
    assert isinstance(e.value.__cause__, jax.errors.TracerBoolConversionError)


def test_unwritten_outputs_are_named_as_in_errors():
    def half(x, o):
        o["a"][...] = x[...]
        o["b"][plgpu.ds(0, 32)] = x[plgpu.ds(0, 32)]

    f = plgpu.pallas_call(half, {"a": SHAPE, "b": SHAPE}, out_specs={"a": plgpu.BlockSpec(), "b": GMEM})
    with pytest.warns(UnwrittenOutput, match=r"half: unwritten: 4096 of 8192 elements of output 1 \(outputs\['b'\]\)"):
        f(X)


def test_operands_are_named_as_in_errors():
    def writes(i, x, o):
        x[0, 0] = 1.0

    one = plgpu.PrefetchScalarGridSpec(1, in_specs=[GMEM], out_specs=GMEM)
    with pytest.raises(UnsupportedCall, match=r"args\[1\]:gmem float32\[64, 128\] is an input"):
        plgpu.pallas_call(writes, SHAPE, grid_spec=one)(np.zeros(1, np.int32), X)


def test_nothing_is_checked_before_arrays_are_seen():
    plgpu.pallas_call(lambda: 3, out(8), grid=(2,), in_specs=[plgpu.BlockSpec((1, 2, 3), lambda: "x")])


def test_scalars_may_be_captured():
    two, three = 2, np.float32(3)
    f = plgpu.pallas_call(lambda x, o: o.__setitem__(..., x[...] * two + three), out(64, 128))
    np.testing.assert_array_equal(f(X), X * 2 + 3)
    np.testing.assert_array_equal(plgpu.pallas_call(f.body, out(64, 128), interpret=True)(X), X * 2 + 3)


def test_a_ref_is_no_argument():
    def outer(x, o):
        plgpu.pallas_call(copy, out(64, 128))(x)

    with pytest.raises(TypeError, match=r"a kernel takes arrays, not Refs; args\[0\] is one"):
        plgpu.kernel(outer, out(64, 128))(X)


def test_signature():
    """Of what is called, not of the body."""
    f = plgpu.pallas_call(lambda x, y, o, s: None, SHAPE, scratch_shapes=[plgpu.SMEM((8,), F)])
    assert list(inspect.signature(f).parameters) == ["x", "y"]
    f = plgpu.pallas_call(lambda x, o, p, *, s: None, (SHAPE, SHAPE), scratch_shapes={"s": plgpu.SMEM((8,), F)})
    assert list(inspect.signature(f).parameters) == ["x"]
    assert str(inspect.signature(plgpu.pallas_call(lambda *refs: None, SHAPE))) == "(*inputs)"
