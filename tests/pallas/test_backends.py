"""Who compiles a call: the type of compiler_params and the platform; a registry; stock Pallas in both directions."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
import types
import warnings

import jax
import jax.experimental.pallas as stock
import jax.experimental.pallas.mosaic_gpu as stock_gpu
import jax.experimental.pallas.triton as stock_triton
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.errors import UnsupportedCall
from mosaic_gpu.pallas import backends

F = jnp.float32
X = np.arange(128 * 256, dtype=np.float32).reshape(128, 256)
OUT = jax.ShapeDtypeStruct(X.shape, F)


def add(x, y, o):
    o[...] = x[...] + y[...] * plgpu.program_id(0).astype(F)


def call(params=None, **options):
    tiles = plgpu.BlockSpec((64, 128), lambda i, j: (i, j))
    return plgpu.pallas_call(
        add, OUT, grid=(2, 2), in_specs=[tiles] * 2, out_specs=tiles, compiler_params=params, **options
    )


def lowered(f, *args, platform="cuda"):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def targets(text):
    return set(re.findall(r"custom_call @([\w.$]+)", text))


def a_gpu():
    """What Triton asks (from JAX 0.11 on) a lowering without a GPU for: which GPU it would be."""
    if not hasattr(jax.sharding, "use_abstract_mesh") or jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    h200 = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=h200))


def test_ours_by_default():
    assert (
        targets(lowered(call(), X, X)) == targets(lowered(call(plgpu.CompilerParams()), X, X)) == {"mosaic_gpu_launch"}
    )


def test_an_aliased_output_is_the_inputs_buffer_on_a_gpu():
    text = lowered(call(input_output_aliases={1: 0}), X, X)
    assert re.search(r"output_operand_alias<output_tuple_indices = \[\],\s+operand_index = 1", text), text[:2000]


@pytest.mark.parametrize("params", [plgpu.TritonCompilerParams(num_warps=4), stock_triton.CompilerParams(num_warps=4)])
def test_triton_is_jaxs_own(params):
    with a_gpu(), pytest.warns(DeprecationWarning, match="through Triton is deprecated"):
        text = lowered(call(params), X, X)
    assert targets(text) == {"__gpu$xla.gpu.triton"}
    assert "num_warps = 4" in text and "grid_x = 2" in text


def test_triton_refuses_what_it_has_not():
    spec = plgpu.PrefetchScalarGridSpec(
        1, 2, [plgpu.BlockSpec((64, 256), lambda i, n: (i, 0))], plgpu.BlockSpec((64, 256))
    )
    f = plgpu.pallas_call(lambda n, x, o: None, OUT, grid_spec=spec, compiler_params=plgpu.TritonCompilerParams())
    with pytest.raises(UnsupportedCall, match="no scalar prefetch"), pytest.warns(DeprecationWarning):
        lowered(f, np.zeros(2, np.int32), X)
    f = plgpu.pallas_call(
        lambda x, o, s: None, OUT, scratch_shapes=[plgpu.SMEM((8,), F)], compiler_params=plgpu.TritonCompilerParams()
    )
    with pytest.raises(UnsupportedCall, match="no scratch"), pytest.warns(DeprecationWarning):
        lowered(f, X)
    with pytest.raises(ValueError, match="Triton compiles for GPUs"):
        call(plgpu.TritonCompilerParams())(X, X)
    with pytest.raises(
        UnsupportedCall, match="simulator runs plans of plgpu.CompilerParams, not of TritonCompilerParams"
    ):
        lowered(call(plgpu.TritonCompilerParams(), interpret=plgpu.SimulatorParams()), X, X)
    with pytest.raises(ValueError, match="num_warps"):
        plgpu.TritonCompilerParams(num_warps=0)


def test_triton_params_interpreted():
    y = call(plgpu.TritonCompilerParams(), interpret=True)(X, X)
    np.testing.assert_array_equal(y, X + X * (np.arange(128) // 64)[:, None].astype(np.float32))


def test_axes_that_are_not_there_interpreted():
    f = plgpu.pallas_call(
        lambda x, o: o.__setitem__(..., x[...] * plgpu.program_id(2).astype(F)),
        OUT,
        compiler_params=plgpu.TritonCompilerParams(),
        interpret=True,
    )
    with pytest.raises(plgpu_error("UnsupportedPrimitive"), match="axis 2 of this grid"):
        f(X)


def test_the_default_can_be_switched(monkeypatch):
    monkeypatch.setenv(backends.VARIABLE, "triton")
    assert isinstance(backends.default_params(), plgpu.TritonCompilerParams)
    backends.set_default_params(plgpu.CompilerParams(arch="sm_90a"))
    assert backends.default_params() == plgpu.CompilerParams(arch="sm_90a")
    backends.set_default_params(None)
    monkeypatch.setenv(backends.VARIABLE, "cutlass")
    with pytest.raises(ValueError, match="MOSAIC_GPU_PALLAS_BACKEND='cutlass'"):
        call()


def test_rocm_says_what_to_pass():
    with pytest.raises(ValueError, match="not for ROCm; there pass compiler_params=plgpu.TritonCompilerParams"):
        lowered(call(), X, X, platform="rocm")


@pytest.fixture
def package(monkeypatch):
    """A third party: a package with a class of parameters and a rule that it registers when it is imported."""
    monkeypatch.setattr(backends, "_RULES", {})
    source = """
import dataclasses
import jax.numpy as jnp
from mosaic_gpu import register_backend

@dataclasses.dataclass(frozen=True)
class SlowCompilerParams:
    factor: float = 1.0

def run(call, *operands):
    assert [b.block_shape for b in call.mapping.blocks] == [(64, 128)] * 3
    return [call.params.factor * (operands[0] + operands[1])]

register_backend(SlowCompilerParams, "cpu", run)
"""
    module = types.ModuleType("slow_backend")
    monkeypatch.setitem(sys.modules, "slow_backend", module)
    exec(compile(source, "slow_backend.py", "exec"), module.__dict__)
    return module


def test_a_package_brings_a_backend(package):
    params = package.SlowCompilerParams(3.0)
    for f in (call(params), jax.jit(call(params))):
        np.testing.assert_array_equal(f(X, X), 6 * X)
    with pytest.raises(ValueError, match="SlowCompilerParams is registered for cpu, and this is cuda"):
        lowered(call(params), X, X)


def test_a_package_takes_over_our_params(package):
    plgpu.register_backend(plgpu.CompilerParams, "cpu", lambda call, *operands: [operands[0] * 0])
    np.testing.assert_array_equal(call()(X, X), X * 0)
    assert targets(lowered(call(), X, X)) == {"mosaic_gpu_launch"}


@pytest.mark.parametrize("wrong", [lambda x, y: x, lambda x, y: [x[:1]], lambda x, y: None, lambda x, y: [x, y]])
def test_what_a_rule_returns_is_checked(package, wrong):
    plgpu.register_backend(package.SlowCompilerParams, "cpu", lambda call, x, y: wrong(x, y))
    for f in (call(package.SlowCompilerParams()), jax.jit(call(package.SlowCompilerParams()))):
        with pytest.raises(
            ValueError, match="the rule .* for SlowCompilerParams must return a sequence of the outputs"
        ):
            f(X, X)


def test_register_backend_checks():
    with pytest.raises(TypeError, match="params_type must be a class"):
        plgpu.register_backend("x", "cpu", print)
    with pytest.raises(ValueError, match="platform='tpu' is one of"):
        plgpu.register_backend(int, "tpu", print)
    with pytest.raises(TypeError, match="rule must be a function"):
        plgpu.register_backend(int, "cpu", 3)


def test_a_hint_at_the_better_door():
    backends.hint.cache_clear()
    left = plgpu.BlockSpec(memory_space=plgpu.ANY)
    f = plgpu.pallas_call(
        lambda x, o: o.__setitem__(..., x[...]), jax.ShapeDtypeStruct((64, 128), F), in_specs=[left], out_specs=left
    )
    x = X[:64, :128]
    with pytest.warns(UserWarning, match="plgpu.kernel is the better door"):
        f(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(f(x), x)


# ---- stock Pallas, compiled by us -----------------------------------------------------------------------------------------
def stock_call(params, index=lambda i, j: (i, j), body=None, **options):
    def kernel(x, o):
        o[...] = x[...] * 2 + stock.program_id(0).astype(F)

    return stock.pallas_call(
        body or kernel,
        OUT,
        grid=(2, 2),
        in_specs=[stock.BlockSpec((64, 128), index)],
        out_specs=stock.BlockSpec((64, 128), lambda i, j: (i, j)),
        compiler_params=params,
        **options,
    )


def test_stock_pallas_call_compiles_with_us():
    assert targets(lowered(stock_call(plgpu.CompilerParams()), X)) == {"mosaic_gpu_launch"}


def test_stock_scratch_that_is_not_ours(line_of):
    for scratch, words in (
        (stock_gpu.Barrier(), "scratch of barrier"),
        (stock_gpu.TMEM((128, 64), F), "scratch in tmem"),
    ):
        f = stock_call(plgpu.CompilerParams(), body=lambda x, o, s: None, scratch_shapes=[scratch])  # the body
        with pytest.raises(UnsupportedCall, match=words) as e:
            lowered(f, X)
        number = line_of(test_stock_scratch_that_is_not_ours, "the body")
        assert (e.value.line.file, e.value.line.number) == (__file__, number)


def test_importing_is_enough():
    """In a fresh process, in which nothing but the public names is touched."""
    code = """if True:
        import jax, jax.numpy as jnp, jax.experimental.pallas as pl
        import mosaic_gpu
        f = pl.pallas_call(lambda x, o: o.__setitem__(..., x[...]), jax.ShapeDtypeStruct((64, 128), jnp.float32),
                           compiler_params=mosaic_gpu.CompilerParams())
        text = jax.jit(f).trace(jnp.zeros((64, 128))).lower(lowering_platforms=("cuda",)).as_text()
        assert "@mosaic_gpu_launch" in text, text
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr


def test_a_stock_call_as_ours_gives_what_stock_gives():
    """The stock call's jaxpr and mapping, converted and simulated, against stock's own interpreter."""
    from mosaic_gpu.pallas import lowering
    from mosaic_gpu.pallas.stock import call_of

    f = stock_call(plgpu.CompilerParams(), index=lambda i, j: (1 - i, j))
    (eqn,) = _pallas_calls(jax.make_jaxpr(f)(X).jaxpr)
    ours = lowering.run(call_of(eqn.params), X)[0]
    np.testing.assert_array_equal(ours, stock_call(None, index=lambda i, j: (1 - i, j), interpret=True)(X))


def test_bounded_slices_of_a_stock_call():
    """Which no GPU backend of JAX's has: of sizes that are numbers and that depend on the step."""
    from mosaic_gpu.pallas import lowering
    from mosaic_gpu.pallas.stock import call_of

    def rows(size, **options):
        return stock.BlockSpec((stock.BoundedSlice(64), 128), lambda i, j: (stock.ds(60 * i, size(i)), j), **options)

    for size, ends in ((lambda i: 60, (60, 120)), (lambda i: 50 + 10 * i, (50, 120))):
        f = stock.pallas_call(
            lambda x, o: o.__setitem__(..., 2 * x[...]),
            OUT,
            grid=(2, 2),
            in_specs=[rows(size)],
            out_specs=rows(size),
            input_output_aliases={0: 0},
            compiler_params=plgpu.CompilerParams(),
        )
        (eqn,) = _pallas_calls(jax.make_jaxpr(f)(X).jaxpr)
        expected = np.array(X)
        expected[: ends[0]] *= 2
        expected[60 : ends[1]] *= 2
        np.testing.assert_array_equal(lowering.run(call_of(eqn.params), X)[0], expected)
    in_place = stock.pallas_call(
        lambda x, o: None,
        OUT,
        grid=(2, 2),
        in_specs=[rows(lambda i: 60, memory_space=stock.ANY)],
        out_specs=rows(lambda i: 60),
        compiler_params=plgpu.CompilerParams(),
    )
    with pytest.raises(
        UnsupportedCall, match="BoundedSlice block is copied to shared memory; leave memory_space=any out"
    ):
        lowered(in_place, X)


def test_a_stock_body_that_we_refuse_is_refused():
    def unknown(x, o):
        o[...] = jax.lax.betainc(x[...], x[...], x[...])

    with pytest.raises(plgpu_error("UnsupportedPrimitive"), match="regularized_incomplete_beta"):
        lowered(stock_call(plgpu.CompilerParams(), body=unknown), X)


def test_stock_dimensions_that_we_do_not_have():
    from mosaic_gpu.pallas.stock import _dim_of, _scratch_of, call_of

    named = types.SimpleNamespace(grid_names=("x",))
    with pytest.raises(UnsupportedCall, match="over a mesh or named axes"):
        call_of(dict(grid_mapping=named, name="f"))

    with pytest.raises(UnsupportedCall, match="Indirect.* of a call of JAX's; call plgpu.pallas_call"):
        _dim_of(stock.Indirect(8), "f")
    hbm = types.SimpleNamespace(shape=(8,), dtype=F, memory_space="hbm")
    with pytest.raises(UnsupportedCall, match="scratch in hbm"):
        _scratch_of(hbm, "f")


def plgpu_error(name):
    return getattr(__import__("mosaic_gpu.errors", fromlist=[name]), name)


def _pallas_calls(jaxpr):
    found = []
    for e in jaxpr.eqns:
        if e.primitive.name == "pallas_call":
            found.append(e)
        for v in e.params.values():
            if hasattr(v, "jaxpr") and e.primitive.name != "pallas_call":
                found += _pallas_calls(v.jaxpr)
    return found


def test_call_is_a_dataclass_that_rules_may_change():
    c, _, _ = call().traced(X, X)
    assert dataclasses.is_dataclass(c) and c.with_(name="other").name == "other"
