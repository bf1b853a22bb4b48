"""A kernel with arguments and what it must give; what the files that make such have in common."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mosaic_gpu as plgpu
from mosaic_gpu.program import Program

BF16 = ml_dtypes.bfloat16
Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A traced kernel, arguments and what it must give.  names: what selectors call Refs that have no name of their own."""

    name: str
    arch: str
    program: Program
    arrays: Arrays
    expected: Arrays
    tolerance: float
    names: dict[str, str]

    def right(self, outputs: list[np.ndarray]) -> bool:
        """Whether outputs are what the reference says, but for rounding."""
        return all(
            bool(np.all(np.abs(np.asarray(x, np.float32) - want) <= self.tolerance))
            for x, want in zip(outputs, self.expected, strict=True)
        )


MAKERS: dict[str, Callable[..., tuple[Any, str, Arrays, Arrays, dict[str, str]]]] = {}


def maker(f: Any) -> Any:
    MAKERS[f.__name__] = f
    return f


@functools.cache
def case(name: str, **options: Any) -> Case:
    """A kernel by name; options are those of its maker."""
    kernel, arch, arrays, expected, names = MAKERS[name](**options)
    if hasattr(kernel, "program"):
        program = kernel.program(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
    else:
        program, arrays = _recorded(kernel, arrays)
    return Case(name, arch, program, arrays, tuple(np.asarray(x, np.float32) for x in expected), 0.05, names)


def _recorded(function: Callable[..., Any], arrays: Arrays) -> tuple[Program, Arrays]:
    """The program and the arguments of the one kernel that a function of the project's interface calls."""
    calls: list[tuple[Program, Arrays]] = []

    def record(traced: Any, arguments: Any) -> list[Any]:
        calls.append((traced.program, tuple(np.asarray(x) for x in arguments)))
        return [jnp.zeros(a.shape, a.dtype) for a in traced.out_avals]

    with mock.patch("mosaic_gpu.runtime.execute.run", record):
        function(*map(jnp.asarray, arrays))
    (call,) = calls
    return call


def random(seed: int, *shape: int, dtype: Any = BF16) -> np.ndarray:
    # Small integers: sums are exact, so that one wrong tile cannot hide in the tolerance.
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def block_of(warpgroups: int = 1, arch: str = "sm_90a") -> dict[str, Any]:
    threads: dict[str, Any] = dict(num_threads=warpgroups, thread_name="wg") if warpgroups > 1 else {}
    return dict(compiler_params=plgpu.CompilerParams(arch=arch), **threads)
