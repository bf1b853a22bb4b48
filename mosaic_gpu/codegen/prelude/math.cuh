// Conversions and arithmetic that C++ has no operator for. `_approx` functions flush denormals and round loosely;
// the others keep denormals.

// ---- pairs of 16-bit floats in one register, low half first

DI u32 pack_bf16x2(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DI u32 pack_f16x2(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DI float unpack_bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DI float unpack_bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DI float unpack_f16_low(u32 pair) {
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(value) : "r"(pair));
  return value;
}

DI float unpack_f16_high(u32 pair) {
  float value;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(value) : "r"(pair));
  return value;
}

// ---- single 16-bit floats, by their bits

DI u16 to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

DI float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

DI u16 to_f16(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

DI float from_f16(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Rounds to the 10-bit mantissa of tf32 (ties away from zero); the tensor cores would cut the rest off.
DI u32 to_tf32(float value) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// ---- pairs of 8-bit floats in 16 bits, low byte first; values too large become the largest finite one

DI u16 pack_e4m3x2(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

DI u16 pack_e5m2x2(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Both as f16, which holds every value of either type.
DI u32 unpack_e4m3x2(u16 pair) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

DI u32 unpack_e5m2x2(u16 pair) {
  u32 halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

// One 8-bit float. Values too large are none: NaN, and infinity where the type has it, as in JAX.
DI u8 to_e4m3(float x) {
  if (fabsf(x) <= 464.f) return (u8)pack_e4m3x2(x, 0.f);  // half way to 480 goes to the even neighbour, 448
  return (u8)(0x7f | (__float_as_uint(x) >> 24 & 0x80));
}

DI u8 to_e5m2(float x) {
  if (fabsf(x) < 61440.f) return (u8)pack_e5m2x2(x, 0.f);
  return (u8)((x == x ? 0x7c : 0x7e) | (__float_as_uint(x) >> 24 & 0x80));
}

DI float from_e4m3(u8 x) { return unpack_f16_low(unpack_e4m3x2(x)); }
DI float from_e5m2(u8 x) { return unpack_f16_low(unpack_e5m2x2(x)); }

// ---- transcendentals

DI float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x without the special function unit: the whole part goes into the exponent, the rest through a polynomial. Relative error
// at most 1.1e-4; x at most 127; below -125 it gives 2^-125.
DI float exp2_fma(float x) {
  x = fmaxf(x, -125.f);
  const float shifted = x + 12582912.f, f = x - (shifted - 12582912.f);
  const float p = fmaf(f, fmaf(f, fmaf(f, 0.05517109f, 0.24260999f), 0.69326097f), 0.99992814f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

DI float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DI float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- larger and smaller: NaN where one of the two is; +0 is larger than -0

DI float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

DI float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

DI double max_nan(double a, double b) {
  double y;
  asm("max.f64 %0, %1, %2;" : "=d"(y) : "d"(a), "d"(b));
  return a != a || b != b ? a + b : y;
}

DI double min_nan(double a, double b) {
  double y;
  asm("min.f64 %0, %1, %2;" : "=d"(y) : "d"(a), "d"(b));
  return a != a || b != b ? a + b : y;
}

// ---- integers

DI u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }
DI u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
DI int max_int(int a, int b) { return a > b ? a : b; }
DI int min_int(int a, int b) { return a < b ? a : b; }
