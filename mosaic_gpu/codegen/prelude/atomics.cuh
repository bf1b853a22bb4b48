// Atomic updates of global memory that return nothing, relaxed, at the scope of the GPU. PTX ISA 9.7.13.6, red.

#define MOSAIC_RED(name, type, letter, instruction)                                                      \
  DI void name(type* place, type x) {                                                                    \
    asm volatile("red.relaxed.gpu.global." instruction " [%0], %1;" ::"l"(place), letter(x) : "memory"); \
  }

MOSAIC_RED(red_add_int32, int, "r", "add.s32")
MOSAIC_RED(red_add_uint32, u32, "r", "add.u32")
MOSAIC_RED(red_add_int64, long long, "l", "add.u64")
MOSAIC_RED(red_add_uint64, u64, "l", "add.u64")
MOSAIC_RED(red_add_float32, float, "f", "add.f32")
MOSAIC_RED(red_add_float64, double, "d", "add.f64")
MOSAIC_RED(red_add_float16, u16, "h", "add.noftz.f16")
MOSAIC_RED(red_add_bfloat16, u16, "h", "add.noftz.bf16")
MOSAIC_RED(red_max_int32, int, "r", "max.s32")
MOSAIC_RED(red_max_uint32, u32, "r", "max.u32")
MOSAIC_RED(red_max_int64, long long, "l", "max.s64")
MOSAIC_RED(red_max_uint64, u64, "l", "max.u64")
MOSAIC_RED(red_min_int32, int, "r", "min.s32")
MOSAIC_RED(red_min_uint32, u32, "r", "min.u32")
MOSAIC_RED(red_min_int64, long long, "l", "min.s64")
MOSAIC_RED(red_min_uint64, u64, "l", "min.u64")
MOSAIC_RED(red_and_int32, int, "r", "and.b32")
MOSAIC_RED(red_and_uint32, u32, "r", "and.b32")
MOSAIC_RED(red_and_int64, long long, "l", "and.b64")
MOSAIC_RED(red_and_uint64, u64, "l", "and.b64")
MOSAIC_RED(red_or_int32, int, "r", "or.b32")
MOSAIC_RED(red_or_uint32, u32, "r", "or.b32")
MOSAIC_RED(red_or_int64, long long, "l", "or.b64")
MOSAIC_RED(red_or_uint64, u64, "l", "or.b64")
MOSAIC_RED(red_xor_int32, int, "r", "xor.b32")
MOSAIC_RED(red_xor_uint32, u32, "r", "xor.b32")
MOSAIC_RED(red_xor_int64, long long, "l", "xor.b64")
MOSAIC_RED(red_xor_uint64, u64, "l", "xor.b64")
