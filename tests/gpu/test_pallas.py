"""`pallas_call` on a GPU: examples/pallas_kernels.py against float64 and under vmap, and what JAX's chapters show."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from mosaic_gpu.runtime.device import default_arch
from tests.pallas import test_chapters as chapters
from tests.pallas import test_examples as examples
from tests.pallas import test_pieces as pieces

pytestmark = pytest.mark.gpu
if default_arch() != "sm_90a":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", examples.CASES)
def test_examples(poisoned: Callable[..., Any], name: str, on_gpu: bool) -> None:
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    args = examples.arguments(name, rng, on_gpu)
    examples.right(name, poisoned(getattr(examples.examples, name), *map(jax.numpy.asarray, args)), args)


@pytest.mark.parametrize("causal,keys,d,block_k", examples.ATTENTION)
def test_flash_attention(causal: bool, keys: int, d: int, block_k: int) -> None:
    examples.test_flash_attention(causal, keys, d, block_k, False)


@pytest.mark.parametrize("axes,which", examples.BATCHES)
@pytest.mark.parametrize("name", examples.CASES)
def test_vmap_is_a_python_loop(name: str, axes: int, which: str) -> None:
    mapped, given, expected = examples.batched(name, examples.arguments(name, on_gpu=True), axes, which)
    np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(*given)), expected)


@pytest.mark.parametrize("name", pieces.CASES)
@pytest.mark.filterwarnings("ignore:.*stays in global memory")
def test_arrays_that_no_warpgroup_can_hold(name: str) -> None:
    pieces.test_against_float64(name, False)


def of_chapters() -> Iterator[Any]:
    """Each with each of its arguments; `interpret` stays False, so that the GPU runs it."""
    for name, test in inspect.getmembers(chapters, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        given: list[dict[str, Any]] = [{}]
        for mark in getattr(test, "pytestmark", ()):
            if mark.name != "parametrize":
                continue
            names, values = mark.args
            values = [False] if names == "interpret" else values
            given = [g | {names: v} for g in given for v in values]
        yield from (pytest.param(test, g, id="-".join([name, *map(str, g.values())])) for g in given)


@pytest.mark.parametrize("test,given", list(of_chapters()))
def test_chapters(test: Callable[..., None], given: dict[str, Any]) -> None:
    test(**given)
