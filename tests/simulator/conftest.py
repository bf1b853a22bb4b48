"""Running kernels in the simulator: what each order of events gives, and the error that every order finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from mosaic_gpu.errors import MosaicGpuError
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.simulator import SimulatorParams, simulate


def _plan_of(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a") -> Plan:
    return build_plan(kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)), arch)


def _run(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a", **options: Any) -> list[np.ndarray]:
    return simulate(_plan_of(kernel, *arrays, arch=arch), arrays, **options)


def _run_both(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a") -> list[np.ndarray]:
    late, early = (_run(kernel, *arrays, arch=arch, timing=t) for t in ("late", "early"))
    for a, b in zip(late, early, strict=True):
        assert a.tobytes() == b.tobytes()
    return late


WAYS: tuple[dict[str, Any], ...] = (
    dict(),
    dict(timing="early"),
    dict(shadow="bytes"),
    *(dict(seed=i) for i in (1, 2, 3)),
    dict(timing="early", seed=4),
)


def _found(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a", change: Any = None) -> MosaicGpuError:
    """The error of the fixed order.  Every other way to run the kernel finds an error, too: it is no matter of luck."""
    plan = _plan_of(kernel, *arrays, arch=arch)
    plan = change(plan) if change is not None else plan
    errors = []
    for way in WAYS:
        with pytest.raises(MosaicGpuError) as e:
            simulate(plan, arrays, SimulatorParams(**way))
        errors.append(e.value)
    late, _, fine = errors[:3]
    assert (type(late), late.line, vars(late)) == (type(fine), fine.line, vars(fine))
    return late


def _clean(kernel: Any, *arrays: np.ndarray, arch: str = "sm_90a", seeds: int = 5) -> list[np.ndarray]:
    """The results, the same bits in every order."""
    plan = _plan_of(kernel, *arrays, arch=arch)
    first = simulate(plan, arrays)
    for way in (*WAYS, *(dict(seed=i) for i in range(5, seeds + 1))):
        for a, b in zip(first, simulate(plan, arrays, SimulatorParams(**way)), strict=True):
            assert a.tobytes() == b.tobytes(), way
    return first


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
def found() -> Callable[..., MosaicGpuError]:
    """found(kernel, *arrays, arch=..., change=plan -> plan): the error, which every order of events gives in some form."""
    return _found


@pytest.fixture(scope="session")
def clean() -> Callable[..., list[np.ndarray]]:
    """clean(kernel, *arrays, arch=..., seeds=...): runs in every order of events without a report."""
    return _clean
