"""The training example, cut to a few steps of a tiny model: our gradients give XLA's losses, and wrong ones would be seen."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest

from mosaic_gpu.runtime.device import default_arch

ROOT = pathlib.Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("transformer_training", ROOT / "examples" / "transformer_training.py")
assert _spec is not None and _spec.loader is not None
example = importlib.util.module_from_spec(_spec)
sys.modules["transformer_training"] = example
_spec.loader.exec_module(example)


def test_tiny(capsys):
    """Through a scan over layers and a checkpoint policy, grouped heads; the first loss is that before any gradient."""
    two = dataclasses.replace(example.TINY, steps=2)
    found, expected = example.train(two, example.ours), example.train(two, example.xlas)
    np.testing.assert_allclose(found, expected, rtol=3e-3)
    assert abs(expected[1] - expected[0]) > 0.3, "a gradient that does nothing would be seen"


def test_wrong_gradients_are_seen(capsys, monkeypatch):
    """By the comparison that the example ends with: a dV of the wrong sign; nothing of ours runs here."""

    @jax.custom_vjp
    def reversed_gradient(x):
        return x

    reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-g,))
    m = dataclasses.replace(example.TINY, steps=12)
    monkeypatch.setattr(example, "ours", lambda q, k, v: example.xlas(q, k, reversed_gradient(v)))
    assert not example.compare(m)
    monkeypatch.setattr(example, "ours", example.xlas)
    assert example.compare(m)
    assert "from XLA's in the mean" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(default_arch() != "sm_90a", reason="needs a Hopper GPU")
def test_200_steps(capsys):
    assert example.compare(example.FULL), capsys.readouterr().out
