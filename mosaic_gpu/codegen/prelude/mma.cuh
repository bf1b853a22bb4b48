// Products of tiles by one warp, d += a b: 16 rows, 8 columns, 32 bytes of K (PTX ISA 9.7.14.5). `a` and `b` lie in registers
// as ldmatrix leaves them, lines of K.

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
