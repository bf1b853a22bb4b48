"""Elements of 4 bits: the emitted C++ on the host, every value, against the simulator and JAX."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import test_int4 as int4


@pytest.mark.parametrize("kind", int4.KINDS)
def test_every_value(kind, agree):
    functions = {n: f for n, f in int4.to_every(kind).items() if not (kind == "float4_e2m1fn" and "int" in n)}
    functions = {n: f for n, f in functions.items() if "float8" not in n}  # the host has no such conversions
    int4.right(functions, int4.PAIRS, agree(int4.compiled_plan(functions, int4.PAIRS), [int4.PAIRS]))


@pytest.mark.parametrize("kind", int4.INTEGERS)
def test_arithmetic(kind, agree):
    functions = int4.pairwise(kind)
    int4.right(functions, int4.PAIRS, agree(int4.compiled_plan(functions, int4.PAIRS), [int4.PAIRS]))


@pytest.mark.parametrize("kind", int4.KINDS)
def test_conversions_to(kind, agree):
    """Of numbers that the host's own conversion to int takes, which leaves NaN and large ones open."""
    x = np.concatenate([np.linspace(-9, 9, 244), [0.0, -0.0, 7.99, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.1, 1]])
    x = x.astype(np.float32)
    functions = {kind: lambda v: int4.packed(v.astype(int4.dtype_of(kind)))}
    int4.right(functions, x, agree(int4.compiled_plan(functions, x), [x]))


def test_moves(agree):
    x = np.random.default_rng(1).integers(0, 256, (64, 32)).astype(np.uint8)
    functions = {"moves": lambda b: int4.moves(b, "int4")}
    int4.right(functions, x, agree(int4.compiled_plan(functions, x), [x]))


@pytest.mark.parametrize("wide", ["int8", "bfloat16", "int32", "float32"])
def test_bits(wide, agree):
    for shape in ((16, 24), (3,)):
        x = int4.bits(wide, *shape)
        int4.right(int4.apart(wide), x, agree(int4.compiled_plan(int4.apart(wide), x), [x]))
