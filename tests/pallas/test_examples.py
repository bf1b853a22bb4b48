"""The kernels of examples/pallas_kernels.py against float64, run as XLA operations, in the simulator, and under vmap."""

from __future__ import annotations

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.resources import SHARED_LIMIT
from tests.support import out

PATH = pathlib.Path(__file__).parents[2] / "examples" / "pallas_kernels.py"
spec = importlib.util.spec_from_file_location("pallas_kernels", PATH)
examples = importlib.util.module_from_spec(spec)
spec.loader.exec_module(examples)

BF16 = jnp.bfloat16


def integers(high):
    return lambda rng, shape: rng.integers(0, high, shape).astype(np.int32)


def normal(dtype=np.float32):
    return lambda rng, shape: rng.standard_normal(shape).astype(dtype)


def uniform(rng, shape):
    return rng.uniform(0, 1, shape).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, scale, shift):
    return (x - x.mean(1)[:, None]) / np.sqrt(x.var(1) + 1e-5)[:, None] * scale + shift


def linear_scan(a, x):
    h = [x[0]]
    for t in range(1, len(x)):
        h.append(a[t] * h[-1] + x[t])
    return np.stack(h)


def attention(q, k, v, causal=False):
    scores = np.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = np.where(np.tri(*scores.shape[1:], dtype=bool), scores, -np.inf)
    return np.einsum("hqk,hkd->hqd", softmax(scores), v)


# name: (how to make each argument, shapes for the simulator, shapes for a GPU, reference in float64, tolerance)
CASES = {
    "matmul": ([normal(BF16)] * 2, [(100, 192), (192, 200)], [(1000, 1024), (1024, 520)], np.matmul, 1e-2),
    "matmul_warpgroups": ([normal(BF16)] * 2, [(300, 192), (192, 264)], [(1000, 1024), (1024, 520)], np.matmul, 1e-2),
    "softmax": ([normal()], [(70, 100)], [(5000, 260)], softmax, 1e-6),
    "layer_norm": ([normal()] * 3, [(100, 128), (128,), (128,)], [(5000, 256), (256,), (256,)], layer_norm, 1e-5),
    "flash_attention": ([normal(BF16)] * 3, [(2, 100, 64), *[(2, 150, 64)] * 2], [(6, 1000, 128)] * 3, attention, 1e-2),
    "linear_scan": ([uniform, normal()], [(20, 160)] * 2, [(500, 1040)] * 2, linear_scan, 1e-5),
    "histogram": ([integers(128)], [(300,)], [(20000,)], lambda x: np.bincount(x.astype(int), minlength=128), 0),
    "embedding": (
        [integers(50), normal()],
        [(37,), (50, 128)],
        [(5001,), (50, 256)],
        lambda i, table: table[i.astype(int)],
        0,
    ),
}
ATTENTION = [(True, 200, 64, 64), (True, 70, 128, 32), (False, 256, 128, 128)]  # causal, keys, d, block_k
BATCHES = [(0, "all"), (1, "first"), (1, "all"), (2, "first"), (2, "all")]  # axes of vmap, arguments that have them


def arguments(name, rng=None, on_gpu=False):
    """Random ones, the same where no `rng` is given."""
    made, small, large = CASES[name][:3]
    rng = np.random.default_rng(0) if rng is None else rng
    return tuple(make(rng, shape) for make, shape in zip(made, large if on_gpu else small, strict=True))


def right(name, got, args):
    *_, reference, tolerance = CASES[name]
    expected = reference(*(x.astype(np.float64) for x in args))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)


def batched(name, args, axes, which):
    """(vmap over `axes` axes of `which` arguments, what to call it on, what a Python loop returns).

    which: 'first' or 'all', but not the tokens, whose index maps would differ: those take a loop over calls.
    axes: 0: over one axis that no argument has.
    """
    f, skipped = getattr(examples, name), 1 if name == "embedding" else 0
    last = skipped + 1 if which == "first" else len(args)
    chosen = range(skipped, last) if axes else ()

    def variant(i):
        return tuple(np.roll(x, i, 0) if k in chosen else x for k, x in enumerate(args))

    in_axes, loop, given = tuple(0 if k in chosen else None for k in range(len(args))), variant(0), args
    mapped = jax.vmap(f, in_axes=in_axes) if axes else jax.vmap(f, in_axes=in_axes, out_axes=None, axis_size=2)
    if axes:
        loop = [np.asarray(f(*variant(i))) for i in range(2)]
        given = tuple(np.stack([variant(i)[k] for i in range(2)]) if k in chosen else x for k, x in enumerate(args))
    else:
        loop = np.asarray(f(*args))
    if axes == 2:
        loop = [loop, loop[::-1]]
        given = tuple(np.stack([x, x[::-1]]) if k in chosen else x for k, x in enumerate(given))
        mapped = jax.vmap(mapped, in_axes=in_axes)
    return mapped, given, np.array(loop)


@pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, interpret):
    args = arguments(name)
    right(name, getattr(examples, name)(*args, interpret=interpret), args)


@pytest.mark.parametrize("interpret", [True, False], ids=["xla", "simulator"])
@pytest.mark.parametrize("causal,keys,d,block_k", ATTENTION)
def test_flash_attention(causal, keys, d, block_k, interpret):
    rng = np.random.default_rng(0)
    args = tuple(rng.standard_normal((2, n, d)).astype(np.float16) for n in (130, keys, keys))
    got = examples.flash_attention(*args, causal=causal, block_k=block_k, interpret=interpret)
    expected = attention(*(x.astype(np.float64) for x in args), causal)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("timing", ["early", "late"])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_any_order(name, seed, timing):
    """Random legal orders of threads and copies."""
    args, f = arguments(name), getattr(examples, name)
    np.testing.assert_array_equal(
        np.asarray(f(*args, interpret=plgpu.SimulatorParams(seed=seed, timing=timing))), np.asarray(f(*args))
    )


@pytest.mark.parametrize("axes,which", BATCHES)
@pytest.mark.parametrize("name", CASES)
def test_vmap_is_a_python_loop(name, axes, which):
    """The grid grows, bits stay."""
    mapped, given, expected = batched(name, arguments(name), axes, which)
    np.testing.assert_array_equal(np.asarray(mapped(*given)), expected)
    eqns = jax.make_jaxpr(mapped)(*given).jaxpr.eqns
    (eqn,) = [e for e in eqns if e.primitive.name == "pallas_call"]
    assert eqn.params["call"].mapping.vmapped == tuple(range(axes))
    assert not {"scan", "while"} & {e.primitive.name for e in eqns}


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper(name, compiled):
    report = compiled(build_plan(_program(getattr(examples, name), *arguments(name, on_gpu=True)), "sm_90a"))
    assert not report.complaints()


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "embedding"])
def test_several_blocks_share_a_multiprocessor(name, compiled):
    """What bounds them is how much is under way: 40 KiB a multiprocessor hide the latency of memory."""
    args = arguments(name, on_gpu=True)
    plan = build_plan(_program(getattr(examples, name), *args), "sm_90a")
    registers = -(-compiled(plan).entry_registers // 8) * 8
    blocks = min(SHARED_LIMIT // (plan.shared_bytes + 1024), 2**16 // (128 * registers))
    columns = args[-1].shape[-1]
    assert blocks * 16 * columns * 4 >= 40 << 10


def _program(f, *args):
    from mosaic_gpu.pallas import lowering

    eqns = jax.make_jaxpr(f)(*args).jaxpr.eqns
    (call,) = [(e.params["call"], e.invars) for e in eqns if e.primitive.name == "pallas_call"]
    return lowering.kernel_of(call[0]).program(*(out(*v.aval.shape, dtype=v.aval.dtype) for v in call[1]))
