"""Who compiles a `pallas_call`: chosen by the type of its compiler_params and the platform, from a registry."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from .. import arguments
from ..errors import UnsupportedCall
from ..program import CompilerParams
from . import symbols

if TYPE_CHECKING:
    from .call import Call

Rule = Callable[..., Sequence[Any]]
PLATFORMS = ("cpu", "cuda", "rocm")
_RULES: dict[tuple[type, str], Rule] = {}
_default: list[Any] = []
VARIABLE = "MOSAIC_GPU_PALLAS_BACKEND"


def canonical(platform: str) -> str:
    """'cuda' for what JAX's devices call 'gpu'."""
    return "cuda" if platform == "gpu" else platform


def register_backend(params_type: type, platform: str, rule: Rule) -> None:
    """Let `rule(call, *operands)` run calls whose compiler_params are of `params_type`, on `platform` ('cpu', 'cuda', 'rocm').

    call: a `Call` (its jaxpr, mapping, aliases, params, ...); operands: dynamic grid bounds, scalar-prefetch operands, inputs,
    as JAX arrays or tracers; the rule returns the outputs.  It is asked before any backend of ours, and the last one that is
    registered for a pair holds.  A type that is only registered for other platforms is an error that names them.
    """
    if not isinstance(params_type, type):
        arguments.refuse("register_backend", "params_type", params_type, "a class")
    if canonical(platform) not in PLATFORMS:
        raise ValueError(f"register_backend: platform={platform!r} is one of {PLATFORMS}")
    _RULES[params_type, canonical(platform)] = arguments.function("register_backend", "rule", rule)


def set_default_params(params: Any) -> None:
    """What calls without compiler_params get; None: what $MOSAIC_GPU_PALLAS_BACKEND says ('mosaic_gpu', 'triton'), else ours."""
    _default[:] = [] if params is None else [params]


def default_params() -> Any:
    """The compiler_params of calls that give none."""
    if _default:
        return _default[0]
    chosen = os.environ.get(VARIABLE, "mosaic_gpu")
    if chosen == "triton":
        from .triton import TritonCompilerParams

        return TritonCompilerParams()
    if chosen != "mosaic_gpu":
        raise ValueError(f"{VARIABLE}={chosen!r}: 'mosaic_gpu' or 'triton'")
    return CompilerParams()


def rule_for(params: Any, platform: str) -> Rule:
    """The rule for parameters on a platform; ValueError where there is none."""
    for kind in type(params).__mro__:
        if (kind, platform) in _RULES:
            return _RULES[kind, platform]
    if isinstance(params, CompilerParams):
        if platform == "rocm":
            raise ValueError(
                "pallas_call: Mosaic GPU compiles for NVIDIA GPUs, not for ROCm; there pass "
                "compiler_params=plgpu.TritonCompilerParams()"
            )
        return _ours
    from .triton import is_triton, run_triton

    if is_triton(params):
        if platform == "cpu":
            raise ValueError(
                "pallas_call: Triton compiles for GPUs; on a CPU use interpret=True or plgpu.CompilerParams()"
            )
        return run_triton
    others = sorted(p for t, p in _RULES if isinstance(params, t))
    if others:
        raise ValueError(
            f"pallas_call: {type(params).__name__} is registered for {', '.join(others)}, and this is {platform}"
        )
    kind = type(params)
    raise ValueError(
        f"pallas_call: no backend is registered for compiler_params of type {kind.__module__}.{kind.__qualname__} on {platform}; "
        "have mosaic_gpu.CompilerParams, mosaic_gpu.TritonCompilerParams and what register_backend was given"
    )


def _ours(call: Call, *operands: Any) -> Sequence[Any]:
    from . import lowering

    return lowering.run(call, *operands)


@functools.cache
def hint() -> None:
    """Once: there is a better door for kernels that do everything themselves."""
    warnings.warn(
        "pallas_call whose arrays all stay in global memory: plgpu.kernel is the better door for a kernel that moves its data "
        "itself (shown once)",
        stacklevel=2,
    )


def run(call: Call, platform: str, operands: Sequence[Any], eager: bool) -> list[Any]:
    """Run a call, or (under a lowering) emit it."""
    if call.interpret is True:
        from .interpret import interpret

        if isinstance(call.params, CompilerParams):
            from . import lowering

            lowering.check(symbols.stand_in(call) if symbols.has_symbols(call.mapping) else call)
        if eager:
            return list(_jitted_interpreter(call)(*operands))
        return interpret(call, *operands)
    if call.interpret is not False and not isinstance(call.params, CompilerParams):
        raise UnsupportedCall(
            f"{call.name}: the simulator runs plans of plgpu.CompilerParams, not of {type(call.params).__name__}; use "
            "interpret=True",
            call.line,
        )
    rule = rule_for(call.params, platform)
    if rule is _ours and symbols.has_symbols(call.mapping):
        return symbols.run(call, platform, operands)
    results = rule(call, *operands)
    if rule in _RULES.values():
        _check_results(call, results)
    return list(results)


def _check_results(call: Call, results: Any) -> None:
    """Raises ValueError where what a registered rule returned is not a sequence of the call's outputs."""
    listed = isinstance(results, (list, tuple))
    found = [jax.typeof(x) if hasattr(x, "dtype") else x for x in results] if listed else results
    wanted = [(b.shape, b.dtype) for b in call.mapping.outputs]
    if not listed or [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in found] != wanted:
        raise ValueError(
            f"{call.name}: the rule that register_backend was given for {type(call.params).__name__} must return a sequence of "
            f"the outputs, {[str(a) for a in call.out_avals]}; it returned {arguments.shown(found)}"
        )


@functools.lru_cache(maxsize=256)
def _jitted_interpreter(call: Call) -> Any:
    from .interpret import interpret

    return jax.jit(lambda *a: interpret(call, *a))
