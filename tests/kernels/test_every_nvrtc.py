"""Every kernel with every NVRTC that is installed (`make test-all` installs one of each CUDA major): clean, budgets kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mosaic_gpu.codegen import build, nvrtc
from mosaic_gpu.kernels.sm90 import attention as attention90
from mosaic_gpu.kernels.sm90 import matmul as matmul90
from mosaic_gpu.kernels.sm100 import attention as attention100
from mosaic_gpu.kernels.sm100 import matmul as matmul100
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from tests.kernels.variants import ATTENTION, BIASED, MATMUL

pytestmark = pytest.mark.slow
LIBRARIES = nvrtc.list_nvrtc()
DTYPES = (jnp.bfloat16, jnp.float16)


def name(fields: dict[str, Any]) -> str:
    return "".join(f"-{k}={v}" for k, v in fields.items())


def matrix(module: Any, dtype: Any, arch: str, fields: dict[str, Any] | None = None) -> Plan:
    x = jax.ShapeDtypeStruct((512, 512), dtype)
    types: Any = jnp.dtype(dtype)
    if module is matmul90:
        kernel = module._kernel(512, 512, types, module.MatmulConfig(**(fields or {})))
    else:
        kernel = module._kernel(512, 512, 4, (types, types, types), module.MatmulConfig(), None, arch)
    return build_plan(kernel.program(x, x), arch)


def attention(dtype: Any, d: int, causal: bool, fields: dict[str, Any], bias: bool = False) -> Plan:
    # The options are those of tests/gpu/test_kernels.py, beside that file's defaults.
    config = attention90.AttentionConfig(**{"block_kv": 64 if d > 128 else 128, **fields}) if fields else None
    config = config or attention90.default_config(d, bias=bias)
    q, k = (jax.ShapeDtypeStruct((1, 300, h, d), dtype) for h in (4, 2))
    table = jax.ShapeDtypeStruct((2, 12, 3), jnp.int32)
    more = [jax.ShapeDtypeStruct((1, 4, 300, 304), dtype)] * bias
    options = config, causal, True, d**-0.5, True, True, bias
    kernel = attention90._kernel(1, 300, 4, d, d, 12, jnp.dtype(dtype), *options)
    return build_plan(kernel.program(table, q, k, k, *more), "sm_90a")


def attention_100(dtype: Any, d: int, causal: bool, arch: str, fields: dict[str, Any]) -> Plan:
    q, k = (jax.ShapeDtypeStruct((1, 300, h, d), dtype) for h in (4, 2))
    table = jax.ShapeDtypeStruct((2, 12, 3), jnp.int32)
    config = dataclasses.replace(attention100.default_config(d, arch=arch), **fields)
    kernel = attention100._kernel(1, 300, 4, d, d, 12, jnp.dtype(dtype), config, causal, d**-0.5, True, arch)
    return build_plan(kernel.program(table, q, k, k), arch)


def scaled(packed: bool, arch: str) -> Plan:
    """mxfp8 or nvfp4, by a pair of blocks."""
    config = matmul100.MatmulConfig(tile_n=256, num_slots=3, pair=True)
    kind = (jnp.float8_e4m3fn, 16) if packed else (jnp.float8_e8m0fnu, 4)
    element = jnp.dtype(jnp.uint8 if packed else jnp.float8_e4m3fn)
    types = (element, element, jnp.dtype(jnp.bfloat16))
    kernel = matmul100._kernel(512, 512, 2, types, config, (jnp.dtype(kind[0]), kind[1]), arch)
    x = jax.ShapeDtypeStruct((512, 512), element)
    factors = jax.ShapeDtypeStruct((4, 512 // 128 * kind[1] // 4, 32, 16), kind[0])
    return build_plan(kernel.program(x, x, factors, factors), arch)


BLACKWELL = ("sm_100a", "sm_103a")
PLANS = {
    **{
        f"attention100-{jnp.dtype(t)}-{d}-{'causal' if c else 'full'}-{a}": (
            lambda t=t, d=d, c=c, a=a: attention_100(t, d, c, a, {})
        )
        for t in DTYPES
        for d in (64, 128, 256)
        for c in (False, True)
        for a in BLACKWELL
    },
    **{
        f"attention100{name(fields)}-{a}": lambda f=fields, a=a: attention_100(jnp.bfloat16, 128, True, a, f)
        for fields in (
            {"pair": True, "p_parts": 2},
            {"dynamic": True},
            {"dynamic": True, "pair": True},
            {"query_tiles": 1},
        )
        for a in BLACKWELL
    },
    **{
        f"scaled100-{'nvfp4' if p else 'mxfp8'}-{a}": lambda p=p, a=a: scaled(p, a)
        for p in (False, True)
        for a in BLACKWELL
    },
    **{
        f"matmul90-{jnp.dtype(t)}{name(fields)}": lambda t=t, f=fields: matrix(matmul90, t, "sm_90a", f)
        for t in DTYPES
        for fields in ({}, *(MATMUL if t == jnp.bfloat16 else ()))
    },
    **{
        f"matmul100-{jnp.dtype(t)}-{a}": lambda t=t, a=a: matrix(matmul100, t, a)
        for t in DTYPES
        for a in ("sm_100a", "sm_103a")
    },
    **{
        f"attention-{jnp.dtype(t)}-{d}-{'causal' if c else 'full'}{name(fields)}": (
            lambda t=t, d=d, c=c, f=fields: attention(t, d, c, f)
        )
        for t in DTYPES
        for c in (False, True)
        for d, fields in (*((d, {}) for d in (64, 96, 128, 256)), *(ATTENTION if t == jnp.bfloat16 else ()))
    },
    **{
        f"attention-bias-{jnp.dtype(t)}-{d}-{'causal' if c else 'full'}{name(fields)}": (
            lambda t=t, d=d, c=c, f=fields: attention(t, d, c, f, bias=True)
        )
        for t in DTYPES
        for c in (False, True)
        for d, fields in BIASED
        if not fields or t == jnp.bfloat16
    },
}


def test_an_nvrtc_is_installed() -> None:
    assert LIBRARIES


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda x: x.toolchain.replace(" ", ""))
@pytest.mark.parametrize("name", PLANS)
def test_compiles_clean(name: str, library: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOSAIC_GPU_NVRTC", library.path)
    monkeypatch.setenv("MOSAIC_GPU_CACHE_DIR", "")
    plan = PLANS[name]()
    built = build.compile_plan(
        plan
    )  # strict: a spill or a serialised product raises, as does a budget that is not kept
    assert built.compiled.toolchain == library.toolchain
    mnemonics = build.report(plan, built.compiled).mnemonics
    wanted = ("HGMMA", "USETMAXREG") if plan.arch == "sm_90a" else ("UTC", "LDTM")
    assert all(any(m.startswith(w) for m in mnemonics) for w in wanted)
