"""`explain-call` says what a call really does: its orders against a traced call with the same numbers."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mosaic_gpu as plgpu


@pytest.mark.parametrize("numbers", [(1, 0, 0, 1, 1, 0), (2, 1, 2, 3, 2, 1), (0, 0, 0, 0, 1, 0)])
def test_orders(verb, numbers):
    options = ("--grid", "--dynamic", "--prefetch", "--inputs", "--outputs", "--scratch")
    result = verb("explain-call", *(str(x) for pair in zip(options, numbers, strict=True) for x in pair), "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    grid, dynamic, prefetch, inputs, outputs, scratch = numbers
    seen = {}

    def index(*args):
        seen["index_map"] = [len(a.aval.shape) for a in args]
        return 0, 0

    def kernel(*refs):
        seen["kernel"] = [(tuple(r.shape), str(r.dtype)) for r in refs]

    spec = plgpu.BlockSpec((1, 128), index)
    shapes = {"prefetch": ((7,), "int32"), "input": ((1, 128), "float32"), "output": ((1, 128), "float32")}
    shapes |= {"scratch": ((5,), "float32")}

    def call(bounds, *args):
        sizes = (*bounds, *[1] * (grid - dynamic))
        own = [plgpu.SMEM((5,), jnp.float32)] * scratch
        out = [jax.ShapeDtypeStruct((1, 128), jnp.float32)] * outputs
        g = plgpu.PrefetchScalarGridSpec(prefetch, sizes, [spec] * inputs, [spec] * outputs, own)
        return plgpu.pallas_call(kernel, out, grid_spec=g)(*args)

    args = [np.zeros(7, np.int32)] * prefetch + [np.zeros((1, 128), np.float32)] * inputs
    jaxpr = jax.make_jaxpr(call)([np.int32(1)] * dynamic, *args).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    assert seen["kernel"] == [shapes[_kind(n)] for n in said["kernel"]]
    assert seen["index_map"] == [0 if n[0] == "i" else 1 for n in said["index_map"]]
    real = [v.aval.shape for v in eqn.invars]
    assert real == [() if n.startswith("bound") else shapes[_kind(n)][0] for n in said["primitive"]]
    assert len(said["call"]) == len(args) and len(said["in_specs"]) == inputs and len(said["out_specs"]) == outputs


def _kind(name):
    return next(k for k in ("prefetch", "input", "output", "scratch") if name.startswith(k))


def test_for_people(verb):
    result = verb("explain-call", "--grid", "2", "--prefetch", "1", "--inputs", "1", "--scratch", "1")
    assert result.exit_code == 0
    assert "kernel(prefetch0_ref, input0_ref, output0_ref, scratch0_ref)" in result.stdout
    assert "index_map(i0, i1, prefetch0_ref)" in result.stdout
    assert "num_scalar_prefetch=1" in result.stdout


def test_more_dynamic_sizes_than_axes(verb):
    result = verb("explain-call", "--grid", "1", "--dynamic", "2")
    assert result.exit_code == 2 and "the grid has 1 axes" in result.stderr
