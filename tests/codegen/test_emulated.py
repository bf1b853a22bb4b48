"""An mma.sync that ptxas builds from other instructions says so in the resource report, and no other does."""

from __future__ import annotations

import pytest

from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.resources import ResourceReport, log_complaints, report_resources

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
# name, 32-bit registers of D, A and B
NATIVE = (
    ("m16n8k16.row.col.f32.f16.f16.f32", 4, 4, 2),
    ("m16n8k16.row.col.f32.bf16.bf16.f32", 4, 4, 2),
    ("m16n8k8.row.col.f32.tf32.tf32.f32", 4, 4, 2),
    ("m16n8k32.row.col.s32.s8.u8.s32", 4, 4, 2),
)
EMULATED = (
    ("m16n8k32.row.col.f32.e4m3.e5m2.f32", 4, 4, 2),
    ("m16n8k16.row.col.f32.e5m2.e5m2.f32", 4, 2, 1),
    ("m16n8k32.row.col.f16.e4m3.e4m3.f16", 2, 4, 2),
    ("m16n8k64.row.col.s32.s4.u4.s32", 4, 4, 2),
    ("m8n8k32.row.col.s32.s4.s4.s32", 2, 1, 1),
    ("m8n8k4.row.col.f32.f16.f16.f32", 8, 2, 2),
    ("m16n8k256.row.col.s32.b1.b1.s32.xor.popc", 4, 4, 2),
)
AND = ("m16n8k256.row.col.s32.b1.b1.s32.and.popc", 4, 4, 2)
CASES = [*((arch, x, False) for arch in ARCHS for x in NATIVE), *((arch, x, True) for arch in ARCHS for x in EMULATED)]
CASES += [("sm_90a", AND, False), ("sm_100a", AND, True), ("sm_103a", AND, True)]


def compiled(arch: str, name: str, d: int, a: int, b: int):
    """A kernel of one product."""
    kind, letter = ("float", "f") if ".row.col.f32." in name else ("unsigned", "r")
    operands = [f"{{{', '.join(f'%{i}' for i in r)}}}" for r in (range(d), range(d, d + a), range(d + a, d + a + b))]
    outs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(d))
    ins = ", ".join(f'"r"(x[{i}])' for i in range(a + b))
    source = f"""extern "C" __global__ void __launch_bounds__(32) k({kind}* p, unsigned* q) {{
  {kind} d[{d}];
  unsigned x[{a + b}];
  for (int i = 0; i < {d}; ++i) d[i] = p[threadIdx.x * {d} + i];
  for (int i = 0; i < {a + b}; ++i) x[i] = q[threadIdx.x * {a + b} + i];
  asm volatile("mma.sync.aligned.{name} {", ".join((*operands, operands[0]))};" : {outs} : {ins});
  for (int i = 0; i < {d}; ++i) p[threadIdx.x * {d} + i] = d[i];
}}"""
    return compile_cuda(source, arch=arch, name="/k.cu")


def native(report: ResourceReport) -> bool:
    """One tensor core instruction, no conversion and no call, by the disassembly."""
    products = sum(n for m, n in report.mnemonics.items() if m in ("HMMA", "IMMA", "BMMA"))
    return products == 1 and not {"F2FP", "CALL"} & set(report.mnemonics)


@pytest.mark.parametrize(
    ("arch", "product", "emulated"),
    [
        pytest.param(arch, p, e, id=f"{arch}-{p[0]}", marks=[pytest.mark.slow] if arch == "sm_103a" else [])
        for arch, p, e in CASES
    ],
)
def test_the_report_says_what_is_emulated(arch, product, emulated):
    built = compiled(arch, *product)
    report = report_resources(built)
    assert native(report) == (not emulated)
    said = [s for s in report.complaints() if f"{product[0]} is emulated on {arch}" in s]
    assert len(said) == emulated and list(report.emulated) == said == report.complaints()
    assert log_complaints(built)[0] == said
