"""NVIDIA's own kernel language, CuTe DSL (nvidia-cutlass-dsl), as the oracle of encodings. It compiles without a GPU.

Descriptors are what no compiler checks: a wrong one is only a wrong result, on a GPU that may not be at hand. So the
words in kernels that CuTe DSL compiles are compared with ours, for the same data in the same bytes of shared memory.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str) -> ModuleType:
    """The module `name`.py beside this file (in importlib mode, files of tests cannot import each other)."""
    spec = importlib.util.spec_from_file_location(f"mosaic_gpu_oracle_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def cute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """cute_kernels.py. CuTe DSL reads its environment when it is first imported; all it writes goes to a temporary folder."""
    folder = tmp_path_factory.mktemp("cute_dsl")
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("CUTE_DSL_")]:
            patch.delenv(name)
        patch.setenv("CUTE_DSL_KEEP", "ptx")  # else the compiled function has no __ptx__
        patch.setenv("CUTE_DSL_DUMP_DIR", str(folder))
        patch.setenv("CUTE_DSL_CACHE_DIR", str(folder))
        patch.setenv("CUTE_DSL_NO_CACHE", "1")
        patch.setenv("CUTE_DSL_ARCH", "sm_100a")
        if importlib.util.find_spec("cutlass") is None:
            pytest.skip("nvidia-cutlass-dsl, the oracle, is not installed: `make install` does where it has a wheel")
        import cutlass.cute  # noqa: F401  # where it is installed and broken, that is an error

        yield _load("cute_kernels")


@pytest.fixture(scope="session")
def cute_blackwell(cute: ModuleType) -> ModuleType:
    """cute_blackwell.py."""
    return _load("cute_blackwell")


@pytest.fixture(scope="session")
def ptx() -> ModuleType:
    """ptx.py."""
    return _load("ptx")


@pytest.fixture(scope="session")
def plan_step() -> Callable[[Any, type], Any]:
    """(kernel, class) -> the one plan of this class in a Blackwell kernel of one role."""
    from mosaic_gpu.plan.build import build_plan

    def find(kernel: Any, wanted: type) -> Any:
        found = []

        def visit(block: Any) -> None:
            for step in block.steps:
                if isinstance(step.data, wanted):
                    found.append(step.data)
                for role in step.data if isinstance(step.data, tuple) else ():  # of warp_map
                    visit(role.body)
                for region in step.regions:
                    visit(region)

        visit(build_plan(kernel.program(), "sm_100a").roles[0].body)
        (plan,) = found
        return plan

    return find
