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
