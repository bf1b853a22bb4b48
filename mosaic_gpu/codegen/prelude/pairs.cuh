// Arithmetic on two floats at once (Blackwell), each rounded as the plain instruction rounds it: what .rn says is not fused.

#define MOSAIC_PAIR(name, instruction)                                                      \
  DI void name(float& x, float& y, float a0, float a1, float b0, float b1) {                \
    asm("{\n.reg .b64 a, b, c;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\n" instruction \
        " c, a, b;\nmov.b64 {%0, %1}, c;\n}"                                                \
        : "=f"(x), "=f"(y)                                                                  \
        : "f"(a0), "f"(a1), "f"(b0), "f"(b1));                                              \
  }

MOSAIC_PAIR(add_pair, "add.rn.f32x2")
MOSAIC_PAIR(sub_pair, "sub.rn.f32x2")
MOSAIC_PAIR(mul_pair, "mul.rn.f32x2")

// a * b + c
DI void fma_pair(float& x, float& y, float a0, float a1, float b0, float b1, float c0, float c1) {
  asm("{\n.reg .b64 a, b, c, d;\nmov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\nmov.b64 c, {%6, %7};\n"
      "fma.rn.f32x2 d, a, b, c;\nmov.b64 {%0, %1}, d;\n}"
      : "=f"(x), "=f"(y)
      : "f"(a0), "f"(a1), "f"(b0), "f"(b1), "f"(c0), "f"(c1));
}

// The same bits as exp2_fma of math.cuh.
DI void exp2_fma_pair(float& x, float& y, float a, float b) {
  a = fmaxf(a, -125.f), b = fmaxf(b, -125.f);
  float s, t, f, g;
  add_pair(s, t, a, b, 12582912.f, 12582912.f);
  sub_pair(f, g, s, t, 12582912.f, 12582912.f);
  sub_pair(f, g, a, b, f, g);
  float p = 0.05517109f, q = 0.05517109f;
  fma_pair(p, q, f, g, p, q, 0.24260999f, 0.24260999f);
  fma_pair(p, q, f, g, p, q, 0.69326097f, 0.69326097f);
  fma_pair(p, q, f, g, p, q, 0.99992814f, 0.99992814f);
  x = __uint_as_float(__float_as_uint(p) + (__float_as_uint(s) << 23));
  y = __uint_as_float(__float_as_uint(q) + (__float_as_uint(t) << 23));
}
