"""Emitted kernels on the host: the C++ itself is run, thread by thread, with `kernel.h` in the place of CUDA."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.simulator import simulate

from . import host


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Any:
    try:
        return host.load_runtime(tmp_path_factory.mktemp("runtime"))
    except host.Unavailable as e:
        pytest.skip(str(e))


@pytest.fixture
def on_host(runtime: Any, tmp_path: pathlib.Path) -> Callable[..., list[np.ndarray]]:
    """on_host(plan, arrays): the outputs that the emitted C++ computes; what it leaves alone has bytes 0xAB."""
    return functools.partial(host.run, runtime, tmp_path)


@pytest.fixture
def agree(on_host: Callable[..., list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
    """agree(plan, arrays, ulps=0, atol=1e-7): C++ and simulator give the same, up to `ulps` units in the last place and, where
    sums cancel, `atol`; returns them."""

    def check(plan: Plan, arrays: list[np.ndarray], ulps: int = 0, atol: float = 1e-7) -> list[np.ndarray]:
        found, expected = on_host(plan, arrays), simulate(plan, arrays)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            if ulps and a.dtype.kind not in "iub":
                unit = {2: 2**-7 if "bfloat16" in a.dtype.name else 2**-10, 4: 2**-23, 8: 2**-52}[a.dtype.itemsize]
                x, y = a.astype(np.float64), b.astype(np.float64)
                np.testing.assert_allclose(x, y, rtol=ulps * unit, atol=atol, err_msg=f"output {i}")
            else:
                wide = np.float32 if a.dtype.name == "bfloat16" else a.dtype  # whose NaN is none to NumPy
                np.testing.assert_array_equal(a.astype(wide), b.astype(wide), err_msg=f"output {i}")
        return found

    return check


@pytest.fixture(scope="session")
def mnemonics() -> Callable[[Plan], set[str]]:
    """mnemonics(plan): what instructions its machine code has."""
    from mosaic_gpu.codegen import sass
    from mosaic_gpu.codegen.nvrtc import compile_cuda

    def of(plan: Plan) -> set[str]:
        (function,) = sass.read_cubin(compile_cuda(emit(plan), arch=plan.arch, name="/t.cu").cubin)
        return {i.mnemonic.split(".")[0] for i in function.instructions}

    return of
