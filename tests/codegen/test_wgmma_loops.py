"""What ptxas makes of loops that keep a product in flight: the forms that the planner may emit are clean.

docs/toolchain.md tells what was found; these tests notice when a release of ptxas changes it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.resources import ResourceReport, report_resources

REST = "ADD(d, A(s, 1), B(s, 1)); ADD(d, A(s, 2), B(s, 2)); ADD(d, A(s, 3), B(s, 3)); wgmma_commit();"
FILL = """
#pragma unroll
for (int i = 0; i < N / 2; i++) d[i] = 0;
"""


def step(first: str) -> str:
    """Issues one group."""
    product = {"add": "ADD(d, A(s, 0), B(s, 0))", "set": "SET(d, A(s, 0), B(s, 0))"}.get(
        first, f"CHOOSE(d, A(s, 0), B(s, 0), {first})"
    )
    return f"int s = ready(k); wgmma_fence(); {product}; {REST}\n"


def in_flight(first: str, start: int = 0) -> str:
    """A loop with one group in flight over its back edge; a slot is released a step late."""
    late = "" if start else "if (k > 0) "
    return f"""
#pragma unroll 1
for (int k = {start}; k < steps; k++) {{ {step(first)} wgmma_wait<1>(); {late}{{ release(k - 1); }} }}
wgmma_wait<0>(); release(steps - 1);
"""


PEELED_SET = "{ const int k = 0; " + step("set") + "}"
PEELED_ADD = FILL + "{ const int k = 0; " + step("add") + "}"
CLEAN = {
    "scale-d chosen at run time, accumulator never set": in_flight("k > 0"),
    "the same, and no step at all": in_flight("k > 0") + "if (steps <= 0) {" + FILL + "}",
    "first step peeled, which overwrites": PEELED_SET + in_flight("add", 1),
    "first step peeled, accumulator filled": PEELED_ADD + in_flight("add", 1),
    "persistent, scale-d chosen": "for (int tile = blockIdx.x; tile < out[0]; tile += gridDim.x) {"
    + in_flight("k > 0")
    + "out[tile] = __float_as_uint(d[0] + d[1]); }",
}
SERIALIZED = {
    "accumulator filled, nothing peeled": FILL + in_flight("add"),
    "accumulator filled, scale-d chosen": FILL + in_flight("k > 0"),
}


def compile_body(consumer: Callable[..., str], body: str, n: int = 128) -> ResourceReport:
    text = f"constexpr int N = {n};" + body
    return report_resources(compile_cuda(consumer(text, n=n), arch="sm_90a", name="/k.cu"))


@pytest.mark.parametrize("form", CLEAN)
def test_clean(consumer: Callable[..., str], form: str) -> None:
    report = compile_body(consumer, CLEAN[form])
    assert report.complaints() == []
    assert [loop.products for loop in report.loops] == [4]
    # a fence and a wait in the loop, and the same around what is peeled
    assert report.mnemonics["WARPGROUP"] == (4 if "peeled" in form else 3)


@pytest.mark.parametrize("form", SERIALIZED)
def test_serialized(consumer: Callable[..., str], form: str) -> None:
    report = compile_body(consumer, SERIALIZED[form])
    assert {message.kind for message in report.messages} == {"serialized"}
    assert report.mnemonics["WARPGROUP"] >= 8  # a fence and a wait for each product


LOAD = """asm volatile("ld.shared.v4.u32 {%%0, %%1, %%2, %%3}, [%%4];"
  : "=r"(%s[0]), "=r"(%s[1]), "=r"(%s[2]), "=r"(%s[3])
  : "r"(shared + k * 2048 + threadIdx.x %% 128 * 16) : "memory");"""


def load(array: str) -> str:
    return LOAD % (array, array, array, array)


def loop_with_a_in_registers(in_flight_part: str, after_wait: str) -> str:
    return f"""{FILL} u32 a[4], b[4]; {{ const int k = 0; {load("a")} }}
#pragma unroll 1
for (int k = 0; k < steps; k++) {{
  int s = ready(k);
  wgmma_fence(); ADD_RS(d, a[0], a[1], a[2], a[3], B(s, 0)); wgmma_commit();
  {in_flight_part}
  wgmma_wait<0>(); release(k);
  {after_wait}
}}"""


PACK = "\n#pragma unroll\nfor (int i = 0; i < 4; i++) a[i] = pack_bf16x2(f[2 * i], f[2 * i + 1]);\n"
WIDE = "float f[8];\n#pragma unroll\nfor (int i = 0; i < 8; i++) f[i] = exp2_approx((float)(i * k + out[i]));\n"
COPY = "\n#pragma unroll\nfor (int i = 0; i < 4; i++) a[i] = b[i];\n"
A_CLEAN = {
    "written below the wait": loop_with_a_in_registers("", load("a")),
    "computed in flight, packed below the wait": loop_with_a_in_registers(WIDE, PACK),
}
A_SERIALIZED = {
    "next one loaded in flight, copied below the wait": loop_with_a_in_registers(load("b"), COPY),
    "next one packed in flight, copied below the wait": loop_with_a_in_registers(
        WIDE + PACK.replace("a[i]", "b[i]"), COPY
    ),
}


@pytest.mark.parametrize("form", A_CLEAN)
def test_a_in_registers_clean(consumer: Callable[..., str], form: str) -> None:
    assert compile_body(consumer, A_CLEAN[form]).complaints() == []


@pytest.mark.parametrize("form", A_SERIALIZED)
def test_a_in_registers_carried_by_a_copy_serializes(consumer: Callable[..., str], form: str) -> None:
    report = compile_body(consumer, A_SERIALIZED[form])
    assert [message.kind for message in report.messages] == ["serialized"]
    assert "loop carry" in report.messages[0].explanation
