// Stores to, and reductions over, the memory of several devices at once: a multimem address names it in all of them.
// PTX ISA 9.7.9.14, multimem. Relaxed, at the scope of the system; vectors are of floats only, and stores of 32-bit words.

DI void multimem_store(void* place, u32 a) {
  asm volatile("multimem.st.relaxed.sys.global.b32 [%0], %1;" ::"l"(place), "r"(a) : "memory");
}
DI void multimem_store(void* place, u32 a, u32 b) {
  asm volatile("multimem.st.relaxed.sys.global.v2.f32 [%0], {%1, %2};" ::"l"(place), "r"(a), "r"(b) : "memory");
}
DI void multimem_store(void* place, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
DI void multimem_store(void* place, u64 a) {
  asm volatile("multimem.st.relaxed.sys.global.b64 [%0], %1;" ::"l"(place), "l"(a) : "memory");
}

// Adds to a semaphore of each device; in order with a fence before it only.
DI void multimem_signal(int* place, int x) {
  asm volatile("multimem.red.relaxed.sys.global.add.s32 [%0], %1;" ::"l"(place), "r"(x) : "memory");
}

#define MOSAIC_MULTIMEM(name, type, letter, operation)                                                              \
  DI void name(type& a, const void* place) {                                                                        \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." operation " %0, [%1];" : "=" letter(a) : "l"(place) : "memory"); \
  }

// kind: what is done, and how precisely; packed: the type of a word.
#define MOSAIC_MULTIMEM_VECTORS(name, type, letter, kind, packed)                                                   \
  MOSAIC_MULTIMEM(name, type, letter, kind "." packed)                                                              \
  DI void name(type& a, type& b, const void* place) {                                                               \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." kind ".v2." packed " {%0, %1}, [%2];"                     \
                 : "=" letter(a), "=" letter(b)                                                                     \
                 : "l"(place)                                                                                       \
                 : "memory");                                                                                       \
  }                                                                                                                 \
  DI void name(type& a, type& b, type& c, type& d, const void* place) {                                             \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." kind ".v4." packed " {%0, %1, %2, %3}, [%4];"             \
                 : "=" letter(a), "=" letter(b), "=" letter(c), "=" letter(d)                                       \
                 : "l"(place)                                                                                       \
                 : "memory");                                                                                       \
  }

MOSAIC_MULTIMEM_VECTORS(multimem_add_float32, float, "f", "add", "f32")
MOSAIC_MULTIMEM_VECTORS(multimem_add_float16, u32, "r", "add.acc::f32", "f16x2")
MOSAIC_MULTIMEM_VECTORS(multimem_min_float16, u32, "r", "min", "f16x2")
MOSAIC_MULTIMEM_VECTORS(multimem_max_float16, u32, "r", "max", "f16x2")
MOSAIC_MULTIMEM_VECTORS(multimem_add_bfloat16, u32, "r", "add.acc::f32", "bf16x2")
MOSAIC_MULTIMEM_VECTORS(multimem_min_bfloat16, u32, "r", "min", "bf16x2")
MOSAIC_MULTIMEM_VECTORS(multimem_max_bfloat16, u32, "r", "max", "bf16x2")
MOSAIC_MULTIMEM(multimem_add_float64, double, "d", "add.f64")
MOSAIC_MULTIMEM(multimem_add_int32, int, "r", "add.s32")
MOSAIC_MULTIMEM(multimem_min_int32, int, "r", "min.s32")
MOSAIC_MULTIMEM(multimem_max_int32, int, "r", "max.s32")
MOSAIC_MULTIMEM(multimem_and_int32, int, "r", "and.b32")
MOSAIC_MULTIMEM(multimem_or_int32, int, "r", "or.b32")
MOSAIC_MULTIMEM(multimem_xor_int32, int, "r", "xor.b32")
MOSAIC_MULTIMEM(multimem_add_uint32, u32, "r", "add.u32")
MOSAIC_MULTIMEM(multimem_min_uint32, u32, "r", "min.u32")
MOSAIC_MULTIMEM(multimem_max_uint32, u32, "r", "max.u32")
MOSAIC_MULTIMEM(multimem_and_uint32, u32, "r", "and.b32")
MOSAIC_MULTIMEM(multimem_or_uint32, u32, "r", "or.b32")
MOSAIC_MULTIMEM(multimem_xor_uint32, u32, "r", "xor.b32")
MOSAIC_MULTIMEM(multimem_add_int64, long long, "l", "add.u64")
MOSAIC_MULTIMEM(multimem_min_int64, long long, "l", "min.s64")
MOSAIC_MULTIMEM(multimem_max_int64, long long, "l", "max.s64")
MOSAIC_MULTIMEM(multimem_and_int64, long long, "l", "and.b64")
MOSAIC_MULTIMEM(multimem_or_int64, long long, "l", "or.b64")
MOSAIC_MULTIMEM(multimem_xor_int64, long long, "l", "xor.b64")
MOSAIC_MULTIMEM(multimem_add_uint64, u64, "l", "add.u64")
MOSAIC_MULTIMEM(multimem_min_uint64, u64, "l", "min.u64")
MOSAIC_MULTIMEM(multimem_max_uint64, u64, "l", "max.u64")
MOSAIC_MULTIMEM(multimem_and_uint64, u64, "l", "and.b64")
MOSAIC_MULTIMEM(multimem_or_uint64, u64, "l", "or.b64")
MOSAIC_MULTIMEM(multimem_xor_uint64, u64, "l", "xor.b64")
