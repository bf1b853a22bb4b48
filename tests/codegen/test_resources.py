from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.resources import ResourceReport, check, check_sum, report_resources
from mosaic_gpu.errors import RegisterBudgetError

BUDGETS = [("load", 40), ("multiply", 232), ("multiply", 232)]


@pytest.fixture(scope="module")
def report(consumer: Callable[..., str], plain_loop: str) -> ResourceReport:
    compiled = compile_cuda(consumer(plain_loop, first_line=100), arch="sm_90a", name="/k.cu")
    return report_resources(compiled, dynamic_shared=200_000)


def test_report(report: ResourceReport) -> None:
    assert report.kernel == "kernel" and report.arch == "sm_90a" and report.toolchain.startswith("NVRTC ")
    assert report.entry_registers == 168
    assert {(budget.kind, budget.requested) for budget in report.budgets} == {("increase", 232), ("decrease", 40)}
    assert (report.spill_stores, report.spill_loads, report.local_accesses, report.stack) == (0, 0, 0, 0)
    assert report.dynamic_shared == 200_000 and report.static_shared == 0
    assert report.mnemonics["HGMMA"] == 4
    (loop,) = report.loops
    assert loop.products == 4 and loop.place is not None
    assert loop.place[0] == "/home/someone/kernel.py" and 102 <= loop.place[1] <= 112
    assert report.messages == () and report.complaints() == []
    assert report.cubin_bytes > 5000


def test_report_is_json(report: ResourceReport) -> None:
    assert json.loads(json.dumps(dataclasses.asdict(report)))["entry_registers"] == 168


def test_kept_budgets_pass(report: ResourceReport) -> None:
    check(report, BUDGETS, warpgroups=3)


def test_a_budget_that_nobody_asked_for(report: ResourceReport) -> None:
    with pytest.raises(RegisterBudgetError, match="sets 40 registers .*no role asked"):
        check(report, BUDGETS[1:], warpgroups=3)


def test_a_budget_that_differs(report: ResourceReport) -> None:
    with pytest.raises(RegisterBudgetError, match=r"lacks the register budget of load \(24\)"):
        check(report, [("load", 24), *BUDGETS[1:]], warpgroups=3)


def test_a_role_that_needs_more_than_its_budget(report: ResourceReport) -> None:
    budgets = tuple(dataclasses.replace(budget, needed=233) for budget in report.budgets if budget.kind == "increase")
    with pytest.raises(RegisterBudgetError, match=r"multiply \(232\) uses 233 .*Raise the budget to 240"):
        check(dataclasses.replace(report, budgets=budgets), BUDGETS[1:], warpgroups=3)


def test_an_increase_below_what_the_kernel_starts_with(report: ResourceReport) -> None:
    with pytest.raises(RegisterBudgetError, match="an increase to 232 .*launched with 240"):
        check(dataclasses.replace(report, entry_registers=240), BUDGETS, warpgroups=3)


def test_dropped_budgets_are_refused_with_the_reason(consumer: Callable[..., str], plain_loop: str) -> None:
    compiled = compile_cuda(consumer(plain_loop, n=64, bounds="384"), arch="sm_90a", name="/k.cu")
    dropped = report_resources(compiled)
    assert dropped.budgets == () and [message.code for message in dropped.messages] == ["C7508"]
    assert "second argument" in dropped.complaints()[0]
    with pytest.raises(RegisterBudgetError, match="lacks the register budget of .*second argument"):
        check(dropped, BUDGETS, warpgroups=3)


def test_budgets_that_add_up_to_more_than_the_launch_gives(consumer: Callable[..., str], plain_loop: str) -> None:
    # ptxas takes it without a word, though the third warpgroup to ask would wait for ever.
    compiled = compile_cuda(consumer(plain_loop, increase=240, decrease=32), arch="sm_90a", name="/k.cu")
    silent = report_resources(compiled)
    assert silent.messages == () and silent.entry_registers == 168
    asked = [("load", 32), ("multiply", 240), ("multiply", 240)]
    with pytest.raises(RegisterBudgetError, match=r"add up to 512, .* 504 together.*by 8"):
        check(silent, asked, warpgroups=3)


@pytest.mark.parametrize(
    ("entry", "budgets", "warpgroups", "fits"),
    [
        (168, [40, 232, 232], 3, True),
        (168, [24, 240, 240], 3, True),
        (168, [32, 240, 240], 3, False),
        (232, [40, 232], 2, True),
        (128, [32, 160, 160, 160], 4, True),
        (128, [24, 168, 168, 168], 4, False),
        (168, [40], 3, True),
        (168, [232], 3, False),
        (168, [], 3, True),
        (168, [40, 40, 40, 40], 3, False),
    ],
)
def test_sums(entry: int, budgets: list[int], warpgroups: int, fits: bool) -> None:
    named = [(f"role{number}", value) for number, value in enumerate(budgets)]
    if fits:
        check_sum(entry, named, warpgroups)
    else:
        with pytest.raises(RegisterBudgetError):
            check_sum(entry, named, warpgroups)


def test_spills_are_complained_about() -> None:
    source = """
extern "C" __global__ void __launch_bounds__(1024, 1) k(float* p) {
  float e[100];
  #pragma unroll
  for (int i = 0; i < 100; i++) e[i] = p[i * 7 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 100; i++) p[i * 9 + threadIdx.x] = e[i];
}"""
    found = report_resources(compile_cuda(source, arch="sm_90a", name="/k.cu"))
    assert found.spill_stores > 0 and found.local_accesses > 0
    assert "spill stores" in found.complaints()[0]


def test_blackwell() -> None:
    from mosaic_gpu.codegen.prelude import prelude_for

    body = """
extern "C" __global__ void __launch_bounds__(128, 1) k(u64 a, u64 b, u32 idesc, u32* out) {
  __shared__ u32 memory[4];
  if (threadIdx.x < 32) tmem_alloc<256>(shared_address(memory));
  __syncthreads();
  if (threadIdx.x == 0) for (int j = 0; j < 4; j++) tcgen05_mma_f16_ss(memory[0], a + 2 * j, b + 2 * j, idesc, j > 0);
  u32 r[32];
  tcgen05_load_32x32b<32>(r, memory[0]);
  tcgen05_wait_load();
  #pragma unroll
  for (int i = 0; i < 32; i++) out[threadIdx.x * 32 + i] = r[i];
}"""
    found = report_resources(compile_cuda(prelude_for(body) + body, arch="sm_100a", name="/k.cu"))
    assert found.mnemonics["UTCHMMA"] >= 1 and found.mnemonics["LDTM"] == 1 and found.budgets == ()
    check(found, [], warpgroups=1)
