// Indices from the end, arithmetic on the bits of numbers, and powers.

// An index into n elements; a negative one counts from their end.
DI int count_from_end(int index, int n) { return index < 0 ? index + n : index; }

// x to a power that is known and positive, by squares.
template <int N, class T>
DI T int_power(T x) {
  if constexpr (N == 1) {
    return x;
  } else if constexpr (N % 2) {
    return (T)(x * int_power<N - 1>(x));
  } else {
    T half = int_power<N / 2>(x);
    return (T)(half * half);
  }
}

// 4-bit numbers: integers in 32 bits, their sign extended, and floats (two bits of exponent, one of mantissa) by their bits.
DI int wrap_s4(int x) { return (int)((u32)x << 28) >> 28; }
DI int wrap_u4(int x) { return x & 15; }

// Exact, without the slow conversion: the low bits of 2^23 + x are x.
DI float float_of_s4(int x) { return __int_as_float(((x & 15) ^ 8) | 0x4b000000) - 8388616.f; }
DI float float_of_u4(int x) { return __int_as_float(x | 0x4b000000) - 8388608.f; }

DI float from_e2m1(u8 x) {
  float magnitude = __uint_as_float((x & 7u) << 22) * 0x1p126f;  // the exponents differ by 126, and both have denormals
  return __uint_as_float(__float_as_uint(magnitude) | (x & 8u) << 28);
}

// To the nearest, ties to even; what is too large, infinity too, becomes 6, and NaN, which the type has not, -0: as XLA has it.
DI u8 to_e2m1(float x) {
  float a = fabsf(x);
  u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.f);
  return (u8)(x == x ? code | (__float_as_uint(x) >> 28 & 8) : 8);
}

DI u32 as_bits(float x) { return __float_as_uint(x); }
DI u64 as_bits(double x) { return (u64)__double_as_longlong(x); }
DI float float_of_bits(u32 x) { return __uint_as_float(x); }
DI double float_of_bits(u64 x) { return __longlong_as_double((long long)x); }

// Integers in IEEE 754's total order of floats: -NaN, -inf ... -0, +0 ... +inf, NaN.
DI int order_keyf(float x) { return __float_as_int(x) ^ ((__float_as_int(x) >> 31) & 0x7fffffff); }
DI long long order_key(double x) {
  return __double_as_longlong(x) ^ ((__double_as_longlong(x) >> 63) & 0x7fffffffffffffffll);
}

// The bits of the 16-bit float after x in the direction of y, of which these are the bits; they count up with the magnitude.
DI u16 next_bits(u16 from, u16 to, float x, float y) {
  if (x != x || x == y) return x != x ? from : to;
  if (y != y) return to;
  if (x == 0.f) return y > 0.f ? 1 : 0x8001;
  return (x < y) == (x > 0.f) ? from + 1 : from - 1;
}
