"""Matmul: chooses the kernel by the type of its config, and has no kernel of its own."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from mosaic_gpu.frontend.tracebacks import located_at_its_call
from mosaic_gpu.kernels import dispatch, xla
from mosaic_gpu.kernels.operands import check_matmul
from mosaic_gpu.kernels.sm90 import matmul as sm90
from mosaic_gpu.kernels.sm100 import matmul as sm100
from mosaic_gpu.runtime.device import default_arch

MatmulConfig = sm90.MatmulConfig | sm100.MatmulConfig


@located_at_its_call
def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    config: MatmulConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """a @ b for (m, k) and (k, n) arrays of float16 or bfloat16; the result has their dtype, sums are float32.

    Any m; k and n multiples of 8 (TMA moves rows of 16 bytes).
    config: None takes the tuned one for this device and shape, else the default of the device's generation
    (`mosaic_gpu.explain_config("matmul", a, b)` says which).
    implementation: None, 'mosaic_gpu', 'xla', or a sequence of these, as for attention.

    Raises UnsupportedCall for shapes and dtypes it does not have, DeviceMismatch for a config of another generation.
    """
    check_matmul(a, b)
    arch = default_arch()

    def ours() -> jax.Array:
        c = config
        if c is None:
            dispatch.require_kernel("matmul", arch)
            c = dispatch.choose_config("matmul", arch, a, b)
        if isinstance(c, sm90.MatmulConfig):
            dispatch.match_generation(c, arch)
            return sm90.matmul(a, b, config=c)
        if isinstance(c, sm100.MatmulConfig):
            dispatch.match_generation(c, arch)
            return sm100.matmul(a, b, config=c)
        raise TypeError(f"config is a MatmulConfig of one of the generations, not {type(c).__name__}")

    calls = {"mosaic_gpu": ours, "xla": lambda: xla.matmul(a, b)}
    result: jax.Array = dispatch.run("matmul", implementation, config, arch, calls)
    return result
