"""The names of JAX's rules that work here: the count, and each public construct that stands for a name."""

from __future__ import annotations

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from typer.testing import CliRunner

import mosaic_gpu as plgpu
from mosaic_gpu.cli.app import app
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import MosaicGpuError
from mosaic_gpu.ops import coverage, jax_rules
from mosaic_gpu.ops.jax_rules import CONSTRUCTS, INLINED, MOSAIC, REFUSED, TRITON
from mosaic_gpu.ops.registry import OPS
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.program import walk
from mosaic_gpu.simulator import simulate

F, BF = np.float32, jnp.bfloat16
WGMMA = plgpu.Layout.WGMMA
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
X = np.random.default_rng(0).standard_normal((64, 64)).astype(F)


def out(*shape, dtype=F):
    return jax.ShapeDtypeStruct(shape, dtype)


def accumulated(x, o):
    """run_state of an accumulator, its reads and its stores."""

    def f(acc):
        acc[...] = x[...] * 2
        return acc[...] + 1

    o[...] = plgpu.run_scoped(f, plgpu.ACC((64, 64)))


def multiplied(x, o, s):
    s[...] = x[...].astype(BF)
    plgpu.commit_smem()

    def f(acc):
        plgpu.wgmma(acc, s, s)
        plgpu.wgmma_wait(0)
        return acc[...]

    o[...] = plgpu.run_scoped(f, plgpu.ACC((64, 64)))


def by_warps(x, o, s):
    @plgpu.core_map(plgpu.WarpMesh(axis_name="warp"))
    def _():
        w = lax.axis_index("warp")
        s[w] = x[w, 0] * 2

    plgpu.commit_smem()
    o[...] = plgpu.load(s, layout=plgpu.Layout.WG_STRIDED)


def checked(x, o):
    plgpu.debug_check(jnp.all(x[...] < 100), "x is small")
    o[...] = x[...]


def signalled(x, o):
    s, t = plgpu.get_global(plgpu.SemaphoreType.REGULAR), plgpu.get_global(plgpu.SemaphoreType.REGULAR)
    plgpu.semaphore_signal_parallel(plgpu.SemaphoreSignal(s), plgpu.SemaphoreSignal(t))
    plgpu.semaphore_wait(s)
    o[...] = x[...]


def copied(x, o, s, full):
    plgpu.copy_gmem_to_smem(x, s, full)
    plgpu.barrier_arrive_and_wait(full)
    o[...] = plgpu.load(s)


def budgeted(x, o):
    plgpu.set_max_registers(240, action="increase")
    o[...] = x[...]


def from_tmem(x, o, t):
    plgpu.async_store_tmem(t, plgpu.load(x, layout=plgpu.Layout.TCGEN05))
    plgpu.commit_tmem()
    o[...] = plgpu.async_load_tmem(t)
    plgpu.wait_load_tmem()


def signalled_everywhere(x, o):
    s = plgpu.get_global(plgpu.SemaphoreType.REGULAR)
    plgpu.semaphore_signal_multicast(s, 2, collective_axes="d")
    plgpu.semaphore_wait(s, 2)
    o[...] = x[...]


SUM = (lambda x, o: plgpu.atomic_add(o, x[...]), dict(input_output_aliases={0: 0}), lambda x: 2 * x)
WARPS = (by_warps, dict(out=out(128), scratch_types=[plgpu.SMEM((128,), F)], arrays=[np.ones((4, 1), F)]), None)
ACCUMULATED = (accumulated, dict(), lambda x: 2 * x + 1)
SIGNALLED = (signalled, dict(), lambda x: x)
COPIED = (copied, dict(scratch_types=[plgpu.SMEM((64, 64), F), plgpu.Barrier(num_arrivals=2)]), lambda x: x)
STORED = (lambda x, o: plgpu.store(o, x[...]), dict(), lambda x: x)
MASKED = (
    lambda x, o: (plgpu.store(o, jnp.zeros((64, 64), F)), plgpu.store(o, x[...], mask=x[...] > 0), None)[-1],
    dict(),
    lambda x: np.maximum(x, 0),
)
# name of JAX's: (body over an input and an output, options, the result of the input; None: only that it runs)
RUNS = {
    "async_load": (
        from_tmem,
        dict(scratch_types=[plgpu.TMEM((128, 64), F)], arch="sm_100a", arrays=[X.repeat(2, 0)]),
        lambda x: x,
    ),
    "barrier_arrive_and_wait": COPIED,
    "broadcast_to": (
        lambda x, o: o.__setitem__(..., jnp.broadcast_to(x[0], (64, 64))),
        dict(),
        lambda x: x[:1] + 0 * x,
    ),
    "check": (checked, dict(), lambda x: x),
    "core_map": WARPS,
    "get_global": SIGNALLED,
    "jaxpr_call": WARPS,
    "masked_swap": MASKED,
    "mgpu_atomic_store": SUM,
    "mma": (lambda x, o: o.__setitem__(..., plgpu.mma(x[...], *[x[...].astype(BF)] * 2)), dict(), None),
    "mpmd_map": WARPS,
    "relayout": (lambda x, o: o.__setitem__(..., plgpu.layout_cast(x[...], WGMMA)), dict(), lambda x: x),
    "run_state": ACCUMULATED,
    "semaphore_signal_multicast": (signalled_everywhere, dict(), lambda x: x),
    "semaphore_signal_parallel": SIGNALLED,
    "set_max_registers_p": (budgeted, dict(), lambda x: x),
    "store": STORED,
    "wait_gmem_to_smem": COPIED,
    "wgmma_accumulator_deref": ACCUMULATED,
    "wgmma_accumulator_deref_p": ACCUMULATED,
    "wgmma_accumulator_store": ACCUMULATED,
    "wgmma_accumulator_store_p": ACCUMULATED,
    "wgmma_ref": (multiplied, dict(scratch_types=[plgpu.SMEM((64, 64), BF, transforms=TILED)]), None),
}


def test_the_count():
    """Of 153 names all but one work, which is refused by a function of its name."""
    found = jax_rules.union()
    assert jax_rules.there(found) == (152, 153) and not found["missing"]
    assert found["refused by name"] == ["inline_mgpu_p"]
    every = [n for names in found.values() for n in names]
    assert len(every) == len(set(every)) == len({*MOSAIC, *TRITON})
    assert not {*CONSTRUCTS} & {*OPS, *INLINED, *REFUSED} and all(
        operation in OPS for _, operation in CONSTRUCTS.values()
    )


@pytest.mark.parametrize("name", sorted(CONSTRUCTS))
def test_construct(name):
    """What a user writes for it becomes the operation that the table names, is compiled to C++, and gives its result."""
    body, options, want = RUNS[name]
    options = dict(options)
    arrays, arch = options.pop("arrays", [X]), options.pop("arch", "sm_90a")
    result = options.pop("out", out(*arrays[0].shape))
    program = plgpu.kernel(body, result, **options).program(*(out(*a.shape) for a in arrays))
    assert CONSTRUCTS[name][1] in {e.op for e in walk(program.body)}
    plan = build_plan(program, arch)
    assert emit(plan)
    (got,) = simulate(plan, arrays) if want is not None else [None]
    if want is not None:
        np.testing.assert_allclose(got, want(arrays[0]), rtol=1e-6)


def test_results_of_products_and_warps():
    """The constructs whose result is no function of every element."""
    product = np.asarray(plgpu.kernel(RUNS["mma"][0], out(64, 64), interpret=True)(X))
    half = X.astype(BF).astype(F)
    np.testing.assert_allclose(product, X + half @ half, rtol=1e-3, atol=1e-3)
    body, options, _ = RUNS["wgmma_ref"]
    np.testing.assert_allclose(
        np.asarray(plgpu.kernel(body, out(64, 64), interpret=True, **options)(X)), half @ half, atol=1e-3
    )


@pytest.mark.parametrize("name", sorted(n for n in REFUSED if n in dir(plgpu)))
def test_refused_by_name(name):
    calls = {
        "inline_mgpu": lambda s: plgpu.inline_mgpu(arg_types=()),
    }

    def body(o, s):
        calls[name](s)  # here

    kernel = plgpu.kernel(body, out(128), scratch_types=[plgpu.SemaphoreType.REGULAR])
    with pytest.raises(MosaicGpuError, match=name) as e:
        build_plan(kernel.program(), "sm_90a")
    assert e.value.line is not None and e.value.line.file == __file__


def test_command_line():
    """`ops --against` has the same count, and no name of the installed JAX is in both lists."""
    runner = CliRunner()
    found = runner.invoke(app, ["ops", "--json", "--against", "mosaic"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert data["names of JAX 0.11.2"] == jax_rules.union()
    works, total = jax_rules.there(jax_rules.union())
    shown = runner.invoke(app, ["ops", "--against", "mosaic"])
    assert f"{works} of {total} names of JAX 0.11.2" in shown.output


def test_the_lists_are_jaxs():
    """The lists are those of the JAX that is installed, where it is that version."""
    if jax.__version__ != "0.11.2":
        assert importlib.util.find_spec("jax") is not None
        return
    for backend, names in (("mosaic", MOSAIC), ("triton", TRITON)):
        mine = {n.removesuffix("_p") for n in names}
        theirs = set(coverage.backend_names(backend))
        assert len(mine & theirs) > 0.9 * len(mine)
