"""Configs compiled ahead of a search are in the cache, and what the compiler refuses is told."""

from __future__ import annotations

import pytest

from mosaic_gpu.cli.ahead import compile_ahead
from mosaic_gpu.cli.targets import attention_call, program_of
from mosaic_gpu.codegen import cubin_cache
from mosaic_gpu.codegen.build import compile_plan
from mosaic_gpu.kernels.sm90.attention import AttentionConfig
from mosaic_gpu.runtime.execute import plan_of
from mosaic_gpu.tune.workload import Attention

WORK = Attention.parse("b1s256h1d64")
GOOD = AttentionConfig(block_kv=32, num_stages=1)
SPILLS = AttentionConfig(block_kv=256, num_stages=1, compute_registers=168, memory_registers=24)


def test_the_search_finds_its_cubins_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv(cubin_cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    cubin_cache.forget()
    seen: list[tuple[int, int]] = []
    refused = compile_ahead("attention", WORK, [GOOD, SPILLS], "sm_90a", processes=2, on_done=lambda *n: seen.append(n))
    assert list(refused) == [SPILLS] and "registers" in refused[SPILLS]
    assert seen == [(1, 2), (2, 2)]
    before = cubin_cache.compile_count()
    built = compile_plan(plan_of(program_of(*attention_call(WORK, "sm_90a", GOOD), "sm_90a"), "sm_90a"))
    assert built.hit and cubin_cache.compile_count() == before
    cubin_cache.forget()


def test_without_a_cache_nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cubin_cache.ENVIRONMENT_VARIABLE, "")
    assert compile_ahead("attention", WORK, [GOOD, SPILLS], "sm_90a", processes=2) == {}
