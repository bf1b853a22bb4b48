// Products of tiles by one warp, d += a b: 16 rows, 8 columns, 32 bytes of K, of float64 16 elements (PTX ISA 9.7.14.5). `a` and
// `b` lie in registers as ldmatrix leaves them, lines of K; float64 in lane 4 row + k % 4. Of float8 ptxas makes products of float16.

#define MOSAIC_MMA(name, type, letter, instruction)                                                                   \
  DI void name(type& d0, type& d1, type& d2, type& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {              \
    asm volatile(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                       \
                 : "+" letter(d0), "+" letter(d1), "+" letter(d2), "+" letter(d3)                                     \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                             \
  }

MOSAIC_MMA(mma_f16_f16, float, "f", "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
MOSAIC_MMA(mma_bf16_bf16, float, "f", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
MOSAIC_MMA(mma_tf32_tf32, float, "f", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
MOSAIC_MMA(mma_s8_s8, int, "r", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")
MOSAIC_MMA(mma_s8_u8, int, "r", "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32")
MOSAIC_MMA(mma_u8_s8, int, "r", "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32")
MOSAIC_MMA(mma_u8_u8, int, "r", "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32")
MOSAIC_MMA(mma_b1_and, int, "r", "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc")
MOSAIC_MMA(mma_b1_xor, int, "r", "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.xor.popc")
MOSAIC_MMA(mma_e4m3_e4m3, float, "f", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32")
MOSAIC_MMA(mma_e4m3_e5m2, float, "f", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32")
MOSAIC_MMA(mma_e5m2_e4m3, float, "f", "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32")
MOSAIC_MMA(mma_e5m2_e5m2, float, "f", "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32")

// The same with sums in float16: two registers of two.
#define MOSAIC_MMA_HALF(name, instruction)                                                                            \
  DI void name(u32& d0, u32& d1, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                                    \
    asm volatile(instruction " {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"                                       \
                 : "+r"(d0), "+r"(d1)                                                                                 \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                             \
  }

MOSAIC_MMA_HALF(mma_f16_f16_half, "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16")
MOSAIC_MMA_HALF(mma_e4m3_e4m3_half, "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16")
MOSAIC_MMA_HALF(mma_e4m3_e5m2_half, "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e5m2.f16")
MOSAIC_MMA_HALF(mma_e5m2_e4m3_half, "mma.sync.aligned.m16n8k32.row.col.f16.e5m2.e4m3.f16")
MOSAIC_MMA_HALF(mma_e5m2_e5m2_half, "mma.sync.aligned.m16n8k32.row.col.f16.e5m2.e5m2.f16")

DI void mma_f64_f64(double& d0, double& d1, double& d2, double& d3, double a0, double a1, double a2, double a3, double a4, double a5,
                    double a6, double a7, double b0, double b1, double b2, double b3) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(d0), "+d"(d1), "+d"(d2), "+d"(d3)
      : "d"(a0), "d"(a1), "d"(a2), "d"(a3), "d"(a4), "d"(a5), "d"(a6), "d"(a7), "d"(b0), "d"(b1), "d"(b2), "d"(b3));
}
