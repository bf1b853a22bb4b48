"""Emitted kernels on the host: the C++ itself is run, thread by thread, with `kernel.h` in the place of CUDA."""

from __future__ import annotations

import ctypes
import math
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mosaic_gpu.codegen.build import body_of
from mosaic_gpu.codegen.emitter import HELPERS, emit, launch_grid, parameters
from mosaic_gpu.codegen.text import stored_type
from mosaic_gpu.ops.elementwise import numpy_dtype
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.simulator import simulate

HERE = pathlib.Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++20", "-shared", "-fPIC", "-pthread", "-w", "-ffp-contract=off"]


def _build(source: pathlib.Path, *more: str) -> pathlib.Path:
    target = source.with_suffix(".so")
    subprocess.run([str(COMPILER), *FLAGS, "-I", str(HERE), "-o", str(target), str(source), *more], check=True)
    return target


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if COMPILER is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "probe.cpp").write_text("#include <barrier>\nstd::barrier<> probe(1);\n")
    try:
        _build(folder / "probe.cpp")
    except subprocess.CalledProcessError:
        pytest.skip("g++ without <barrier>, which is of C++20")
    source = folder / "runtime.cpp"
    shutil.copy(HERE / "runtime.cpp", source)
    return ctypes.CDLL(str(_build(source, "-O1")), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture
def on_host(runtime: Any, tmp_path: pathlib.Path) -> Callable[..., list[np.ndarray]]:
    """on_host(plan, arrays): the outputs that the emitted C++ computes; what it leaves alone has bytes 0xAB."""

    def run(plan: Plan, arrays: list[np.ndarray]) -> list[np.ndarray]:
        values = plan.program.inputs
        outputs = [
            np.full(math.prod(v.shape) * numpy_dtype(v.dtype).itemsize, 0xAB, np.uint8)
            .view(numpy_dtype(v.dtype))
            .reshape(v.shape)
            for v in values[len(arrays) :]
        ]
        memory = [np.ascontiguousarray(a) for a in arrays] + outputs
        given: list[Any] = []
        texts = []
        for i, p in enumerate(parameters(plan)):
            assert p.kind != "map", "no TMA here"
            if p.kind == "pointer":
                given.append(ctypes.c_void_p(memory[p.index].ctypes.data))
                texts.append(f"({stored_type(values[p.index].dtype)}*)a[{i}]")
            else:
                given.append(
                    ctypes.c_void_p(values[p.index].shape[p.axis] if p.kind == "dim" else plan.program.grid[p.index])
                )
                texts.append(f"(int)(long long)a[{i}]")
        helpers = "\n".join(t for t in HELPERS.splitlines() if "asm(" not in t)
        launch = f'extern "C" void launch(void** a) {{ kernel({", ".join(texts)}); }}'
        source = tmp_path / f"kernel{len(list(tmp_path.iterdir()))}.cpp"
        source.write_text(f'#include "kernel.h"\n{helpers}\n{body_of(emit(plan))}\n{launch}\n')
        library = ctypes.CDLL(str(_build(source)))
        argument = (ctypes.c_void_p * max(len(given), 1))(*given)
        stuck = runtime.run(library.launch, argument, *launch_grid(plan), plan.threads)
        assert not stuck, "a barrier was waited on for 10 seconds"
        return outputs

    return run


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
