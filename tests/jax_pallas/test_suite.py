"""The runner of JAX's tests on a test file of our own; JAX's are run by `python -m tests.jax_pallas` only."""

from __future__ import annotations

import importlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = """
import unittest
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl

if True:
  from jax.experimental.pallas import tpu as pltpu

def run(body, **options):
    return pl.pallas_call(body, jax.ShapeDtypeStruct((128,), jnp.float32), **options)(np.ones(128, np.float32))

class Some(unittest.TestCase):
    def test_right(self):
        np.testing.assert_array_equal(run(lambda x, o: o.__setitem__(..., x[...] + 1)), np.full(128, 2))
    def test_wrong(self):
        np.testing.assert_array_equal(run(lambda x, o: o.__setitem__(..., x[...])), np.full(128, 2))
    def test_refused(self):
        run(lambda x, o: o.__setitem__(..., jnp.fft.fft(x[...]).real))
    def test_skipped(self):
        self.skipTest("on " + pltpu.PrefetchScalarGridSpec.__name__)
"""


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tests.jax_pallas.suite")


def test_outcomes(suite, tmp_path):
    path = tmp_path / "some_test.py"
    path.write_text(TEXT)
    module = suite.load(path)
    try:
        assert module.pl.__name__ == "mosaic_gpu"
        found = {name: suite.run(name, test).kind for name, test in suite.cases(module)}
    finally:
        del sys.modules[module.__name__]
    assert found == {
        f"some_test::Some.test_{k}": v
        for k, v in zip(
            ("right", "wrong", "refused", "skipped"), ("passed", "failed", "refused", "skipped"), strict=True
        )
    }


def test_no_line_moves(suite):
    assert suite.with_our_imports(TEXT).count("\n") == TEXT.count("\n")


def test_verdicts(suite):
    expected = [suite.Expectation("refused", "not built", ("a::*.x*",))]
    assert suite.verdict(suite.Outcome("a::B.x1", "refused"), expected) is None
    assert suite.verdict(suite.Outcome("a::B.x1", "passed"), expected) == "passed, expected to be refused"
    assert "expected to be refused" in suite.verdict(suite.Outcome("a::B.x1", "failed"), expected)
    assert suite.verdict(suite.Outcome("a::B.y", "failed", "why"), expected) == "failed: why"
    assert suite.verdict(suite.Outcome("a::B.y", "passed"), expected) is None


def test_every_expectation_has_its_reason(suite):
    assert suite.expectations(pathlib.Path(__file__).with_name("expected.toml"))
