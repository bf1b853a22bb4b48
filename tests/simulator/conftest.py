"""Running kernels in the simulator, and finding the lines of the tests that errors should name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from mosaic_gpu.errors import MosaicGpuError
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.simulator import simulate


def _plan_of(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a") -> Plan:
    return build_plan(kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)), arch)


def _run(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a", **options: Any) -> list[np.ndarray]:
    return simulate(_plan_of(kernel, *arrays, arch=arch), arrays, **options)


def _run_both(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a") -> list[np.ndarray]:
    late, early = (_run(kernel, *arrays, arch=arch, timing=t) for t in ("late", "early"))
    for a, b in zip(late, early, strict=True):
        assert a.tobytes() == b.tobytes()
    return late


def _line_of(function: Callable[..., Any], mark: str) -> int:
    with open(function.__code__.co_filename) as f:
        lines = [i for i, text in enumerate(f, 1) if re.search(rf"# {mark}\b", text)]
    return min(i for i in lines if i >= function.__code__.co_firstlineno)


def _assert_at(error: MosaicGpuError, function: Callable[..., Any], mark: str) -> None:
    assert error.line is not None and error.line.file == function.__code__.co_filename
    assert error.line.number == _line_of(function, mark), str(error)


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    """plan_of(kernel, *arrays, arch=...)"""
    return _plan_of


@pytest.fixture(scope="session")
def run() -> Callable[..., list[np.ndarray]]:
    """run(kernel, *arrays, arch=..., **options of simulate)"""
    return _run


@pytest.fixture(scope="session")
def run_both() -> Callable[..., list[np.ndarray]]:
    """As `run`, with asynchronous work done early and late; asserts that both give the same bits."""
    return _run_both


@pytest.fixture(scope="session")
def line_of() -> Callable[..., int]:
    """line_of(function, mark): the first line from the function on that carries the comment `# mark`."""
    return _line_of


@pytest.fixture(scope="session")
def assert_at() -> Callable[..., None]:
    """assert_at(error, function, mark): the error names that line."""
    return _assert_at
