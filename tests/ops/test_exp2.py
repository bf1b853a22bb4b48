"""2^x on the FMA units: its error bound, in the simulator and as written for the compiler; no special function in the SASS."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mosaic_gpu as plgpu
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.sass import read_cubin
from mosaic_gpu.ops.exp2 import POLYNOMIAL
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.simulator import simulate


def body(x, o):
    def step(i, _):
        part = plgpu.ds(i * 1024, 1024)
        o[part] = plgpu.exp2_fma(x[part])

    jax.lax.fori_loop(0, plgpu.cdiv(plgpu.dim_size(x, 0), 1024), step, None)


def program(n):
    shape = jax.ShapeDtypeStruct((n,), np.float32)
    return plgpu.kernel(body, shape).program(shape)


def test_error():
    """Over the whole range, at whole numbers and between them; below -125 it stays there, -inf too."""
    x = np.concatenate([np.linspace(-125, 126.9, 60000), np.arange(-125, 127), np.linspace(-1, 1, 20000)])
    x = x.astype(np.float32)
    (got,) = simulate(build_plan(program(x.size), "sm_100a"), [x])
    assert np.abs(got / np.exp2(x.astype(np.float64)) - 1).max() < 1.1e-4
    low = np.full(128, -np.inf, np.float32)
    low[:64] = np.linspace(-1e30, -125, 64)
    (got,) = simulate(build_plan(program(128), "sm_100a"), [low])
    np.testing.assert_allclose(got, 2.0**-125, rtol=1.1e-4)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_machine_code(arch):
    source = emit(build_plan(program(1024), arch))
    for function in ("exp2_fma_pair" if arch == "sm_100a" else "exp2_fma",):
        text = source.split(f" {function}(")[1].split("\n}")[0]
        assert all(f"{c:.8g}f" in text for c in POLYNOMIAL), "the prelude and the simulator have one polynomial"
    (function,) = read_cubin(compile_cuda(source, arch=arch, name="/t.cu").cubin)
    counts = function.counts()
    assert not any(name.startswith("MUFU") for name in counts) and counts[
        "FFMA" if arch == "sm_90a" else "FFMA2"
    ] >= 3 * 8 // (1 if arch == "sm_90a" else 2)


def test_what_it_takes():
    shape = jax.ShapeDtypeStruct((8,), np.float32)
    with pytest.raises(TypeError, match="exp2_fma: x must be a float32 register array"):
        plgpu.kernel(lambda x, o: o.__setitem__(0, plgpu.exp2_fma(x[0])), shape).program(shape)
