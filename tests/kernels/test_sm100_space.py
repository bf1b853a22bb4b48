"""Every config of the Blackwell kernels' search spaces, compiled for both chips: clean, budgets kept, instructions as the closed
forms say.

`make test-space`: 5,844 compilations, one to two seconds each.  A config that fits a head dim is compiled once for it, with a
mask or without one in turn.  What a config only tells the host (`persistent`) is in no source, which a test shows.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.errors import MosaicGpuError
from mosaic_gpu.kernels.sm100 import attention as attention100
from mosaic_gpu.kernels.sm100 import matmul as matmul100
from mosaic_gpu.kernels.sm100.attention_config import AttentionConfig
from mosaic_gpu.kernels.sm100.matmul import MatmulConfig
from mosaic_gpu.plan.build import build_plan
from mosaic_gpu.plan.model import Plan
from mosaic_gpu.tune.tunable import find_tunable
from tests.kernels import closed_forms

ARCHS = ("sm_100a", "sm_103a")
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
BF = jnp.dtype(jnp.bfloat16)
E4, F4 = jnp.dtype(ml_dtypes.float8_e4m3fn), jnp.dtype(ml_dtypes.float4_e2m1fn)
# Element type and product; of block-scaled ones also the type of the factors and how many elements share one.
MATMULS: dict[str, tuple[Any, str, Any, int]] = {
    "bfloat16": (BF, "UTCHMMA", None, 0),
    "float8": (E4, "UTCQMMA", None, 0),
    "mxfp8": (E4, "UTCQMMA", jnp.dtype(ml_dtypes.float8_e8m0fnu), 32),
    "nvfp4": (F4, "UTCOMMA", E4, 16),
}


@functools.cache
def space(kernel: str) -> list[Any]:
    """The configs that differ in what they compile to."""
    configs = find_tunable(kernel, "sm100").valid()[0]
    return list(dict.fromkeys(dataclasses.replace(c, persistent=True) for c in configs))


def fits(c: AttentionConfig, d: int, dv: int, arch: str) -> bool:
    try:
        c.check(d, dv)
    except MosaicGpuError:
        return False
    return arch == "sm_103a" or not c.load_reduces


def attention_cases() -> list[Any]:
    every = ((c, d, dv, arch) for d, dv in HEAD_DIMS for arch in ARCHS for c in space("attention"))
    return [
        pytest.param(*case, bool(zlib.crc32(str(case).encode()) % 2), id=_name(case[0], *map(str, case[1:])))
        for case in every
        if fits(*case)
    ]


def attention_plan(c: AttentionConfig, d: int, dv: int, arch: str, causal: bool) -> Plan:
    q, k, v = (jax.ShapeDtypeStruct((1, 300, h, n), BF) for h, n in ((4, d), (2, d), (2, dv)))
    table = jax.ShapeDtypeStruct((2, 12, 3), jnp.int32)
    kernel = attention100._kernel(1, 300, 4, d, dv, 12, BF, c, causal, d**-0.5, True, arch)
    return build_plan(kernel.program(table, q, k, v), arch)


def matmul_cases() -> list[Any]:
    every = ((c, kind, arch) for kind in MATMULS for arch in ARCHS for c in space("matmul"))
    return [pytest.param(*case, id=_name(case[0], *case[1:])) for case in every if matmul_fits(*case[:2])]


def matmul_fits(c: MatmulConfig, kind: str) -> bool:
    element, _, scale, block = MATMULS[kind]
    if not scale:
        return element == BF or c.columns % 128 == 0
    try:
        c.check_scaled((2 if element == F4 else 1) / block)
    except MosaicGpuError:
        return False
    return True


def matmul_plan(c: MatmulConfig, kind: str, arch: str) -> tuple[Plan, int]:
    """And the factors of a row and stage."""
    element, _, scale, block = MATMULS[kind]
    stored = jnp.dtype(jnp.uint8) if element == F4 else element
    per_row = c.tile_k * (2 if element == F4 else 1) // block if scale else 0
    kernel = matmul100._kernel(512, 512, 4, (stored, stored, BF), c, (scale, per_row) if scale else None, arch)
    operands = [jax.ShapeDtypeStruct((512, 512), stored)] * 2
    if scale:
        operands += [jax.ShapeDtypeStruct((4, 512 * (2 if element == F4 else 1) // block // 4, 32, 16), scale)] * 2
    return build_plan(kernel.program(*operands), arch), per_row


def _name(c: Any, *more: str) -> str:
    """What differs from the default, in letters that file names may have."""
    default = type(c)()
    changed = {n: v for n, v in c.to_json().items() if hasattr(default, n) and getattr(default, n) != v}
    return "-".join([*more, *(f"{name}={value}" for name, value in changed.items())])


@pytest.mark.space
@pytest.mark.parametrize(("config", "d", "dv", "arch", "causal"), attention_cases())
def test_attention(config: AttentionConfig, d: int, dv: int, arch: str, causal: bool) -> None:
    forms = closed_forms.Attention(config, d, dv, causal)
    closed_forms.check_code(attention_plan(config, d, dv, arch, causal), forms.whole(), forms.loops())


@pytest.mark.space
@pytest.mark.parametrize(("config", "kind", "arch"), matmul_cases())
def test_matmul(config: MatmulConfig, kind: str, arch: str) -> None:
    plan, factors = matmul_plan(config, kind, arch)
    closed_forms.check_code(plan, *closed_forms.matmul(config, MATMULS[kind][1], factors))


def test_persistent_is_in_no_source() -> None:
    """Nor anything else that a config of the space says to the host only."""
    for c in (AttentionConfig(), AttentionConfig(pair=True)):
        sources = {
            emit(attention_plan(dataclasses.replace(c, persistent=p), 128, 128, "sm_100a", True)) for p in (True, False)
        }
        assert len(sources) == 1
    sources = {emit(matmul_plan(MatmulConfig(persistent=p), "bfloat16", "sm_100a")[0]) for p in (True, False)}
    assert len(sources) == 1


def test_the_space_is_the_tuners() -> None:
    """Nothing fell out: every config that the tuner would try at a head dim is in the list, for both chips."""
    kept = {(case.values[0], *case.values[1:4]) for case in attention_cases()}
    tunable = find_tunable("attention", "sm100")
    for d, dv in HEAD_DIMS:
        w = tunable.parse(f"b1s300h4d{d}dv{dv}")
        for c in tunable.valid()[0]:
            if tunable._fits(w, c):  # here: of sm_100a
                assert (dataclasses.replace(c, persistent=True), d, dv, "sm_100a") in kept
    assert {case.values[0] for case in matmul_cases()} == set(space("matmul"))
