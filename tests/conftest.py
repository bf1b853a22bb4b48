"""What tests of all folders share: traced programs, plans, lines of errors, compiled sources."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import mosaic_gpu
from mosaic_gpu.errors import MosaicGpuError
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.program import Equation, Program

try:
    import mosaic_gpu.kernels  # noqa: F401
except ImportError:  # run from a source tree without installation: `kernels` stands beside the package
    mosaic_gpu.__path__.append(str(pathlib.Path(__file__).parents[1]))


def _avals(arguments: tuple[Any, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]


def _program(body: Callable[..., None], *arguments: Any, out: Any = (), **options: Any) -> Program:
    program: Program = mosaic_gpu.kernel(body, out, **options).program(*_avals(arguments))
    return program


def _plan(body: Callable[..., None], *arguments: Any, out: Any = (), arch: str = "sm_90a", **options: Any) -> Plan:
    from mosaic_gpu.plan.build import build_plan

    return build_plan(_program(body, *arguments, out=out, **options), arch)


def _kernel_programs(f: Callable[..., Any], *arguments: Any) -> list[Program]:
    """The programs of the kernels that a function on arrays calls."""

    def visit(jaxpr: Any) -> list[Program]:
        found = []
        for e in jaxpr.eqns:
            if e.primitive.name == "mosaic_gpu_kernel":
                found.append(e.params["traced"].program)
            for x in e.params.values():
                if hasattr(x, "jaxpr"):
                    found += visit(x.jaxpr)
        return found

    return visit(jax.make_jaxpr(f)(*arguments).jaxpr)


def _equations(program: Program | Plan | tuple[Equation, ...], op: str) -> list[Equation]:
    from mosaic_gpu.program import walk

    if isinstance(program, Program):
        program = program.body
    return [e for e in walk(program) if e.op == op]  # type: ignore[arg-type]


def _line_of(function: Callable[..., Any], mark: str) -> int:
    with open(function.__code__.co_filename) as f:
        lines = [i for i, text in enumerate(f, 1) if re.search(rf"# {mark}\b", text)]
    return min(i for i in lines if i >= function.__code__.co_firstlineno)


def _assert_at(error: MosaicGpuError, function: Callable[..., Any], mark: str) -> None:
    assert error.line is not None, error.message
    assert error.line.file == function.__code__.co_filename
    assert error.line.number == _line_of(function, mark), str(error)


@functools.lru_cache(maxsize=64)
def _compile(plan_text: str, arch: str) -> Any:
    from mosaic_gpu.codegen.nvrtc import compile_cuda
    from mosaic_gpu.codegen.resources import report_resources

    return report_resources(compile_cuda(plan_text, arch=arch, name="/test.cu"))


def _compiled(plan: Plan) -> Any:
    from mosaic_gpu.codegen.emitter import emit

    from .scratch_bounds import past_scratch

    source = emit(plan)
    assert past_scratch(plan, source)[1] == []
    return _compile(source, plan.arch)


def _shape(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(scope="session")
def program() -> Callable[..., Program]:
    """program(body, *arguments, out=..., **options of kernel): the traced program."""
    return _program


@pytest.fixture(scope="session")
def plan() -> Callable[..., Plan]:
    """plan(body, *arguments, out=..., arch="sm_90a", **options of kernel)"""
    return _plan


@pytest.fixture(scope="session")
def kernel_plan() -> Callable[..., Plan]:
    """kernel_plan(function on arrays, *abstract arguments, arch="sm_90a"): the plan of the one kernel that it calls."""

    def plan_of(f: Callable[..., Any], *arguments: Any, arch: str = "sm_90a") -> Plan:
        from mosaic_gpu.plan.build import build_plan

        (found,) = _kernel_programs(f, *arguments)
        return build_plan(found, arch)

    return plan_of


@pytest.fixture(scope="session")
def equations() -> Callable[..., list[Equation]]:
    """equations(program or equations, op): those of one name, in regions too."""
    return _equations


@pytest.fixture(scope="session")
def array() -> Callable[..., jax.ShapeDtypeStruct]:
    """array(*shape, dtype=float32): an abstract argument or output."""
    return _shape


@pytest.fixture(scope="session")
def compiled() -> Callable[[Plan], Any]:
    """compiled(plan): the ResourceReport of its cubin."""
    return _compiled


@pytest.fixture(scope="session")
def line_of() -> Callable[..., int]:
    """line_of(function, mark): the first line from the function on that carries the comment `# mark`."""
    return _line_of


@pytest.fixture(scope="session")
def assert_at() -> Callable[..., None]:
    """assert_at(error, function, mark): the error names that line."""
    return _assert_at
