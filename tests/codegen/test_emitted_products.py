"""Products in the emitted C++: wgmma of every kind, copies that feed them, a Blackwell matmul; all of it through NVRTC."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest
from jax import lax

import mosaic_gpu as plgpu
from mosaic_gpu.codegen import sass
from mosaic_gpu.codegen.emitter import emit
from mosaic_gpu.codegen.nvrtc import compile_cuda
from tests.codegen.emitted import body_lines

F, BF = jnp.float32, jnp.bfloat16
TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def product(acc_type, a_type, b_type, n, k, a_in_registers=False, transposed=True):
    def transforms(t):
        return (plgpu.TilingTransform((8, 128 // jnp.dtype(t).itemsize)), plgpu.SwizzleTransform(128))

    def body(x, o, a, b):
        def scope(acc):
            left = plgpu.load(a, layout=plgpu.Layout.WGMMA) if a_in_registers else a
            plgpu.wgmma(acc, left, b.transpose((1, 0)) if transposed else b)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, n), acc_type)).astype(F)

    b_shape = (n, k) if transposed else (k, n)
    return body, [
        plgpu.SMEM((64, k), a_type, transforms=transforms(a_type)),
        plgpu.SMEM(b_shape, b_type, transforms=transforms(b_type)),
    ]


@pytest.mark.parametrize(
    ("acc_type", "a_type", "b_type", "n", "k", "in_registers", "transposed", "opcode"),
    [
        (F, BF, BF, 64, 64, False, True, "HGMMA.64x64x16.F32.BF16"),
        (F, BF, BF, 128, 64, True, False, "HGMMA.64x128x16.F32.BF16"),
        (jnp.float16, jnp.float16, jnp.float16, 64, 64, False, False, "HGMMA.64x64x16.F16"),
        (F, F, F, 64, 32, False, True, "HGMMA.64x64x8.F32.TF32"),
        (F, jnp.float8_e4m3fn, jnp.float8_e5m2, 64, 128, False, True, "QGMMA.64x64x32.F32.E4M3.E5M2"),
        (jnp.int32, jnp.int8, jnp.uint8, 64, 128, False, True, "IGMMA.64x64x32.S8.U8"),
    ],
)
def test_products(plan, array, acc_type, a_type, b_type, n, k, in_registers, transposed, opcode):
    """A type of each kind: the instruction, one for every 32 bytes of K, the first overwriting."""
    body, scratch = product(acc_type, a_type, b_type, n, k, in_registers, transposed)
    p = plan(body, array(8), out=array(64, n), scratch_types=scratch)
    (function,) = sass.read_cubin(compile_cuda(emit(p), arch="sm_90a", name="/t.cu").cubin)
    products = [i for i in function.instructions if i.mnemonic in sass.TENSOR_CORE]
    assert len(products) == k * jnp.dtype(b_type).itemsize // 32
    assert all(i.opcode.startswith(opcode) for i in products), products[0].opcode
    assert sum("!UPT" in i.operands or "!PT" in i.operands for i in products) == 1, (
        "scale-d is 0 in the first k-step only"
    )
    assert body_lines(p, "wgmma_wait<0>();") and body_lines(p, "wgmma_fence();") and body_lines(p, "wgmma_commit();")


def test_a_tall_product_has_one_instruction_for_64_rows(plan, array):
    def body(x, o, a, b):
        def scope(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((128, 64)))

    scratch = [plgpu.SMEM((128, 64), BF, transforms=TILE), plgpu.SMEM((64, 64), BF, transforms=TILE)]
    p = plan(body, array(8), out=array(128, 64), scratch_types=scratch)
    first, second = body_lines(p, "wgmma_m64n64", "(v")
    name = "wgmma_m64n64k16_f32_bf16_bf16_ss_tb_set_x4"
    acc = re.search(r"\((v\d+)_0\)", first)[1]

    def statement(start, a):
        registers = ", ".join(f'"=&f"({acc}_{start + i})' for i in range(32))
        return f'asm volatile({name} : {registers} : "r"({a}), "r"(b_low));'

    assert first == statement(0, "a_low")
    assert second == statement(32, f"a_low + {64 * 128 // 16}"), "the second 64 rows have registers of their own"
    (function,) = (t for t in emit(p).splitlines() if "wgmma.mma_async" in t)
    steps = [(f"%{x}", str(k * unit)) for k in (1, 2, 3) for x, unit in ((32, 2), (33, 128))]
    assert re.findall(r"add.u32 low, (%\d+), (\d+);", function) == steps
    assert re.findall(r", (\w+), 1, 1, 0, 1;", function) == ["0", "1", "1", "1"]


def test_a_product_with_a_in_registers_is_one_statement_however_wide(plan, array, compiled):
    def body(x, o, b):
        def scope(acc):
            plgpu.wgmma(acc, plgpu.layout_cast(x[...], plgpu.Layout.WGMMA), b)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 256)))

    p = plan(
        body, array(64, 64, dtype=BF), out=array(64, 256), scratch_types=[plgpu.SMEM((64, 256), BF, transforms=TILE)]
    )
    (product,) = body_lines(p, "wgmma_m64n256", "(v")
    assert product.count('"=&f"(') == 128 and product.count('"r"(') == 16 + 1, product
    (macro,) = (t for t in emit(p).splitlines() if "wgmma.mma_async" in t)
    assert re.findall(r"\{(%1\d\d, [^}]*)\}, b, (\d)", macro) == [
        (", ".join(f"%{128 + 4 * k + i}" for i in range(4)), str(int(k > 0))) for k in range(4)
    ]
    assert compiled(p).complaints() == []


def test_products_of_one_shape_and_other_offsets_have_macros_of_their_own(plan, array, compiled):
    def body(x, o, a, b, c, d):
        def scope(acc):
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma(acc, c, d)
            plgpu.wgmma(acc, a, b)
            return acc[...]

        o[...] = plgpu.run_scoped(scope, plgpu.ACC((64, 64)))

    narrow = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
    ones = [plgpu.SMEM((64, 64), BF, transforms=t) for t in (TILE, TILE, narrow, narrow)]
    p = plan(body, array(8), out=array(64, 64), scratch_types=ones)
    names = [re.match(r"asm volatile\((\w+) :", t)[1] for t in body_lines(p, "wgmma_m64n64", "(v")]
    assert len(names) == 3 and names[0][: names[0].index("_ss")] == names[1][: names[1].index("_ss")]
    texts = {n: emit(p).split(f"#define {n} ")[1].split("\n")[0] for n in names[1:]}
    offsets = {n: re.findall(r"add.u32 low, %32, (\d+);", t) for n, t in texts.items()}
    assert offsets == {names[1]: ["2", "32", "34"], names[2]: ["2", "4", "6"]}
    assert compiled(p).complaints() == []


def test_copies_expect_their_bytes(plan, array):
    """arrive.expect_tx with the bytes of the whole copy; a barrier counted warp by warp gets the rest of the unit."""

    def body(x, o, s, b):
        wg = lax.axis_index("wg")

        @plgpu.when(wg == 0)
        def _():
            plgpu.copy_gmem_to_smem(x, s, b)

        @plgpu.when(wg == 1)
        def _():
            o[...] = plgpu.load(s, layout=plgpu.Layout.WGMMA)
            plgpu.barrier_arrive(b)

    scratch = [plgpu.SMEM((64, 64), F), plgpu.Barrier(num_arrivals=2)]
    p = plan(body, array(64, 64), out=array(64, 64), scratch_types=scratch, num_threads=2, thread_name="wg")
    assert body_lines(p, "expect_tx(") == [f"mbarrier_expect_tx(bar, {64 * 64 * 4});"]
    assert body_lines(p, "mbarrier_arrive_count(") == ["mbarrier_arrive_count(bar, 4);"]


def test_blackwell(plan, array):
    """tcgen05: the instruction descriptor is a constant, allocation and release around the roles; compiled for sm_100a."""

    def body(x, o, a, b, t, done):
        plgpu.tcgen05_mma(t, a, b, done, accumulate=False)
        plgpu.barrier_wait(done)
        v = plgpu.async_load_tmem(t)
        plgpu.wait_load_tmem()
        o[...] = v

    scratch = [
        plgpu.SMEM((128, 64), BF, transforms=TILE),
        plgpu.SMEM((64, 64), BF, transforms=TILE),
        plgpu.TMEM((128, 64), F),
        plgpu.Barrier(orders_tensor_core=True),
    ]
    p = plan(body, array(8), out=array(128, 64), scratch_types=scratch, arch="sm_100a")
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 16 | (64 >> 3) << 17 | (128 >> 4) << 24
    products = body_lines(p, "tcgen05_mma_f16_ss(")
    assert len(products) == 4 and all(f"{idesc:#x}u" in t for t in products)
    assert "false) ? 1 : 0" in products[0] and all(t.endswith(", 1);") for t in products[1:])
    (function,) = sass.read_cubin(compile_cuda(emit(p), arch="sm_100a", name="/t.cu").cubin)
    counts = function.counts()
    assert counts["UTCHMMA"] == 4 and counts["LDTM"] >= 1 and function.spills == 0
