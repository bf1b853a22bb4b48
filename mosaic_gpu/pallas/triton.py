"""The opt-in to JAX's own Triton backend: its parameters, and handing a call over."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import arguments

if TYPE_CHECKING:
    from .call import Call


@dataclasses.dataclass(frozen=True)
class TritonCompilerParams:
    """Compile a `pallas_call` with JAX's Triton backend (deprecated by JAX): num_warps and num_stages as Triton has them."""

    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_warps", "num_stages"):
            if getattr(self, name) is not None:
                arguments.whole("TritonCompilerParams", name, getattr(self, name), 1)


def _stock_class() -> type | None:
    """JAX's own class, if the user has imported it (else no object can be of it)."""
    module = sys.modules.get("jax.experimental.pallas.triton")
    return getattr(module, "CompilerParams", None)


def is_triton(params: Any) -> bool:
    """Whether parameters ask for Triton: ours or JAX's own."""
    stock = _stock_class()
    return isinstance(params, TritonCompilerParams) or (stock is not None and isinstance(params, stock))


def run_triton(call: Call, *operands: Any) -> Sequence[Any]:
    """The rule of the registry."""
    from . import stock

    warnings.warn(
        "pallas_call through Triton is deprecated (by JAX, too): plgpu.CompilerParams() compiles the same call with Mosaic GPU",
        DeprecationWarning,
        stacklevel=2,
    )
    params = call.params
    if isinstance(params, TritonCompilerParams):
        import jax.experimental.pallas.triton as stock_triton

        params = stock_triton.CompilerParams(num_warps=params.num_warps, num_stages=params.num_stages)
    return stock.run_on_triton(call, params, *operands)
