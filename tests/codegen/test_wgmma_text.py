from __future__ import annotations

import itertools
from typing import Any

import pytest

from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.nvrtc import compile_cuda
from mosaic_gpu.codegen.prelude import generated, prelude
from mosaic_gpu.codegen.wgmma_text import DEPTH, accumulator_registers
from mosaic_gpu.errors import IllegalInstruction
from tests.wgmma_functions import wgmma_function

C_TYPE = {"f32": "float", "f16": "u32", "s32": "int"}
Variant = tuple[int, Any, Any, Any, bool, bool, bool, Any]


def kernel(number: int, variant: Variant) -> tuple[str, str]:
    """Text of the product, and of a kernel that calls it."""
    n, _, _, d_kind, a_in_registers, _, _, init = variant
    name, text = wgmma_function(*variant)
    count = accumulator_registers(n, d_kind)
    a = "x, x + 1, x + 2, x + 3" if a_in_registers else "a"
    fill = "" if init is True else f"for (int i = 0; i < {count}; i++) d[i] = out[i];"
    scale = ", x" if init == "dynamic" else ""
    return (
        text,
        f"""
extern "C" __global__ void __launch_bounds__(128, 1) k{number}({C_TYPE[d_kind]}* out, u64 a, u64 b, u32 x) {{
  {C_TYPE[d_kind]} d[{count}];
  {fill}
  wgmma_fence();
  {name}(d, {a}, b{scale});
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < {count}; i++) out[threadIdx.x * {count} + i] = d[i];
}}""",
    )


def compile_all(variants: list[Variant]) -> list[sass.Function]:
    texts = [kernel(number, variant) for number, variant in enumerate(variants)]
    products = generated("".join(dict.fromkeys(text for text, _ in texts)))
    source = prelude("wgmma") + products + '#line 1 "/test.cu"' + "".join(body for _, body in texts)
    functions = {
        function.name: function
        for function in sass.read_cubin(compile_cuda(source, arch="sm_90a", name="/test.cu").cubin)
    }
    return [functions[f"k{number}"] for number in range(len(variants))]


REPRESENTATIVE: list[tuple[Variant, str]] = [
    ((64, "bf16", "bf16", "f32", False, False, False, True), "HGMMA.64x64x16.F32.BF16"),
    ((64, "bf16", "bf16", "f32", True, False, True, False), "HGMMA.64x64x16.F32.BF16"),
    ((256, "f16", "f16", "f32", False, True, True, "dynamic"), "HGMMA.64x256x16.F32"),
    ((8, "f16", "f16", "f16", True, False, False, "dynamic"), "HGMMA.64x8x16.F16"),
    ((176, "f16", "f16", "f16", False, False, False, True), "HGMMA.64x176x16.F16"),
    ((72, "tf32", "tf32", "f32", True, False, False, True), "HGMMA.64x72x8.F32.TF32"),
    ((128, "e4m3", "e5m2", "f32", False, False, False, "dynamic"), "QGMMA.64x128x32.F32.E4M3.E5M2"),
    ((128, "e5m2", "e5m2", "f16", True, False, False, False), "QGMMA.64x128x32.F16.E5M2.E5M2"),
    ((24, "s8", "u8", "s32", False, False, False, True), "IGMMA.64x24x32.S8.U8"),
    ((240, "u8", "u8", "s32", True, False, False, "dynamic"), "IGMMA.64x240x32.U8.U8"),
]


def test_variants_become_the_right_instruction() -> None:
    functions = compile_all([variant for variant, _ in REPRESENTATIVE])
    for function, (variant, opcode) in zip(functions, REPRESENTATIVE, strict=True):
        products = [found for found in function.instructions if found.mnemonic.endswith("GMMA")]
        assert [found.opcode.replace(".tnspA", "").replace(".tnspB", "") for found in products] == [opcode], variant
        _, _, _, _, in_registers, a_mn_major, b_mn_major, init = variant
        operands = products[0].operands
        assert (".tnspA" in operands + products[0].opcode, ".tnspB" in operands + products[0].opcode) == (
            a_mn_major,
            b_mn_major,
        )
        assert operands.count("gdesc") == 1  # it stands for both operands in shared memory
        assert operands.split(", ")[1].startswith("R" if in_registers else "gdesc")
        assert ("!UPT" in operands) == (init is True), operands
        assert function.spills == 0


def test_names_differ_between_variants() -> None:
    names = {
        wgmma_function(64, "bf16", "bf16", "f32", rs, ta, tb, init)[0]
        for rs, ta, tb, init in itertools.product((False, True), (False, True), (False, True), (False, True, "dynamic"))
        if not (rs and ta)
    }
    assert len(names) == 18


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ((64, "bf16", "f16", "f32", False, False, False, True), "mixed"),
        ((64, "bf16", "bf16", "f16", False, False, False, True), "must be f32"),
        ((64, "e4m3", "s8", "f32", False, False, False, True), "mixed"),
        ((264, "bf16", "bf16", "f32", False, False, False, True), "multiple of 8"),
        ((12, "bf16", "bf16", "f32", False, False, False, True), "multiple of 8"),
        ((40, "s8", "s8", "s32", False, False, False, True), "multiple of 16"),
        ((64, "tf32", "tf32", "f32", False, False, True, True), "16-bit"),
        ((64, "f16", "f16", "f32", True, True, False, True), "in registers"),
        ((64, "f64", "f64", "f32", False, False, False, True), "one of"),
    ],
)
def test_what_does_not_exist_is_refused(variant: Variant, reason: str) -> None:
    with pytest.raises(IllegalInstruction, match=reason):
        wgmma_function(*variant)


@pytest.mark.slow
@pytest.mark.parametrize("n", range(8, 257, 8))
def test_the_whole_matrix_compiles(n: int) -> None:
    variants: list[Variant] = []
    for a_kind, b_kind, d_kind in itertools.product(DEPTH, DEPTH, C_TYPE):
        for rs, ta, tb, init in itertools.product(
            (False, True), (False, True), (False, True), (False, True, "dynamic")
        ):
            variant: Variant = (n, a_kind, b_kind, d_kind, rs, ta, tb, init)
            try:
                wgmma_function(*variant)
            except IllegalInstruction:
                continue
            variants.append(variant)
    for start in range(0, len(variants), 40):
        for function in compile_all(variants[start : start + 40]):
            assert sum(found.mnemonic.endswith("GMMA") for found in function.instructions) == 1
