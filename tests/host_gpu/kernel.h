// What an emitted kernel needs of CUDA C++ and of the prelude, for the host: every GPU thread is a thread of the host.
// Only kernels without wgmma, tcgen05 and TMA; their arithmetic, addresses and barriers are tried.
#include <math.h>
#include <string.h>
#include <limits>
#include <type_traits>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct Dim { int x, y, z; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };

extern thread_local Dim threadIdx, blockIdx;
extern Dim gridDim;
extern unsigned char* inside;  // of the guards around it
static unsigned char* const shared = inside;
u32 exchange(u32 value, int lane);  // what `lane` of this warp gave
void named_barrier_sync(u32 id, u32 threads);
void named_barrier_arrive(u32 id, u32 threads);
void __syncthreads();
void __syncwarp();
void mbarrier_init(u32 address, u32 count);
void mbarrier_arrive_count(u32 address, u32 count);
void mbarrier_wait(u32 address, u32 parity);

#define DI static inline
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

DI void mbarrier_arrive(u32 address) { mbarrier_arrive_count(address, 1); }
DI void fence_mbarrier_init() {}
DI void fence_proxy_async_shared() {}
template <int N> DI void set_max_registers_increase() {}
template <int N> DI void set_max_registers_decrease() {}

template <class To, class From> DI To bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
DI u32 __float_as_uint(float x) { return bits<u32>(x); }
DI float __uint_as_float(u32 x) { return bits<float>(x); }
DI int __float_as_int(float x) { return bits<int>(x); }
DI long long __double_as_longlong(double x) { return bits<long long>(x); }
DI float __int_as_float(int x) { return bits<float>(x); }
DI double __longlong_as_double(long long x) { return bits<double>(x); }
#include "../../mosaic_gpu/codegen/prelude/numbers.cuh"

// Casts to integers, which host.py has written as `As<int>() ->* x`: of floats as CUDA has them, the nearest end of the range
// for what lies outside, zero for NaN; C++ leaves that open.
template <class... T> struct As {};
template <class T, class X>
  requires std::is_arithmetic_v<X>
DI T operator->*(As<T>, X x) {
  if constexpr (std::is_floating_point_v<X>) {
    typedef std::conditional_t<sizeof(T) < 4, std::conditional_t<std::is_signed_v<T>, int, u32>, T> Wide;
    const X low = (X)std::numeric_limits<Wide>::min(), end = ldexp((X)1, std::numeric_limits<Wide>::digits);
    return (T)(x != x ? 0 : x <= low ? std::numeric_limits<Wide>::min() : x >= end ? std::numeric_limits<Wide>::max() : (Wide)x);
  } else return (T)x;
}
template <class... A, class... B> DI As<A..., B...> operator->*(As<A...>, As<B...>) { return {}; }
template <class A, class B, class... C, class X>
  requires std::is_arithmetic_v<X>
DI A operator->*(As<A, B, C...>, X x) { return As<A>() ->* (As<B, C...>() ->* x); }

DI u32 shared_address(const void*) { return 0; }
DI int own_lane() { return threadIdx.x % 32; }
DI int uniform(int x) { return (int)exchange((u32)x, 0); }
DI u32 here(u32 x) { return x; }
template <class T> DI T __shfl_xor_sync(u32, T x, int mask) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 32 or 64 bits");
  if constexpr (sizeof(T) == 4) return bits<T>(exchange(bits<u32>(x), own_lane() ^ mask));
  else {
    u32 halves[2];
    memcpy(halves, &x, 8);
    for (u32& h : halves) h = exchange(h, own_lane() ^ mask);
    memcpy(&x, halves, 8);
    return x;
  }
}

DI u16 to_bf16(float x) {
  u32 u = bits<u32>(x);
  return x != x ? 0x7fff : (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
DI float from_bf16(u16 x) { return bits<float>((u32)x << 16); }
DI u16 to_f16(float x) { return bits<u16>((_Float16)x); }
DI float from_f16(u16 x) { return (float)bits<_Float16>(x); }
DI u32 pack_bf16x2(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
DI u32 pack_f16x2(float low, float high) { return to_f16(low) | (u32)to_f16(high) << 16; }
DI float unpack_bf16_low(u32 x) { return from_bf16((u16)x); }
DI float unpack_bf16_high(u32 x) { return from_bf16((u16)(x >> 16)); }
DI float unpack_f16_low(u32 x) { return from_f16((u16)x); }
DI float unpack_f16_high(u32 x) { return from_f16((u16)(x >> 16)); }
DI void add_pair(float& x, float& y, float a0, float a1, float b0, float b1) { x = a0 + b0, y = a1 + b1; }
DI void sub_pair(float& x, float& y, float a0, float a1, float b0, float b1) { x = a0 - b0, y = a1 - b1; }
DI void mul_pair(float& x, float& y, float a0, float a1, float b0, float b1) { x = a0 * b0, y = a1 * b1; }
DI void fma_pair(float& x, float& y, float a0, float a1, float b0, float b1, float c0, float c1) {
  x = __builtin_fmaf(a0, b0, c0), y = __builtin_fmaf(a1, b1, c1);
}
// As PTX has it: +0 is larger than -0, in whichever order they come.
template <class T> T max_nan(T a, T b) { return a != a ? a : b != b ? b : a > b || (a == b && !signbit(a)) ? a : b; }
template <class T> T min_nan(T a, T b) { return a != a ? a : b != b ? b : a < b || (a == b && signbit(a)) ? a : b; }
DI float fmaxf_of_ptx(float a, float b) { return a != a ? b : b != b ? a : max_nan(a, b); }
DI float fminf_of_ptx(float a, float b) { return a != a ? b : b != b ? a : min_nan(a, b); }
#define fmaxf fmaxf_of_ptx
#define fminf fminf_of_ptx
DI int max(int a, int b) { return a > b ? a : b; }
DI int min(int a, int b) { return a < b ? a : b; }
DI u32 max(u32 a, u32 b) { return a > b ? a : b; }
DI long long max(long long a, long long b) { return a > b ? a : b; }
DI long long min(long long a, long long b) { return a < b ? a : b; }
DI u32 min(u32 a, u32 b) { return a < b ? a : b; }

DI int __popcll(u64 x) { return __builtin_popcountll(x); }
DI int __clzll(u64 x) { return x ? __builtin_clzll(x) : 64; }
DI float erfinvf(float y) {  // by Newton's method, from a rough start
  double x = y, w = log1p(-x * x), a = 2 / (M_PI * 0.147) + w / 2, z = copysign(sqrt(sqrt(a * a - w / 0.147) - a), x);
  if (!(fabs(x) < 1)) return fabs(x) == 1 ? copysignf(INFINITY, y) : NAN;
  for (int i = 0; i < 4; i++) z -= (erf(z) - x) / (M_2_SQRTPI * exp(-z * z));
  return (float)(x == 0 ? x : z);
}
DI float exp2_fma(float x) {
  x = fmaxf(x, -125.f);
  const float shifted = x + 12582912.f, f = x - (shifted - 12582912.f);
  const float p = __builtin_fmaf(f, __builtin_fmaf(f, __builtin_fmaf(f, 0.05517109f, 0.24260999f), 0.69326097f), 0.99992814f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

// Atomic updates of global memory, one at a time.
struct OneAtATime {
  OneAtATime();
  ~OneAtATime();
};
#define RED(name, type, update)                                                  \
  DI void red_##name(type* place, type x) { OneAtATime lock; update; }
#define REDS(type, kind) RED(add_##type, kind, *place += x) RED(max_##type, kind, if (x > *place) *place = x) \
  RED(min_##type, kind, if (x < *place) *place = x) RED(and_##type, kind, *place &= x) RED(or_##type, kind, *place |= x) \
  RED(xor_##type, kind, *place ^= x)
REDS(int32, int)
REDS(uint32, u32)
REDS(int64, long long)
REDS(uint64, u64)
RED(add_float32, float, *place += x)
RED(add_float64, double, *place += x)
RED(add_float16, u16, *place = to_f16(from_f16(*place) + from_f16(x)))
RED(add_bfloat16, u16, *place = to_bf16(from_bf16(*place) + from_bf16(x)))

// Four 8x8 matrices: lane i has the address of row i % 8 of matrix i / 8; register j holds two elements of matrix j.
DI void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  u32 r[4] = {r0, r1, r2, r3};
  for (int j = 0; j < 4; j++) {
    u32 row = exchange(address, 8 * j + own_lane() / 4);
    memcpy(shared + row + 4 * (own_lane() % 4), &r[j], 4);
  }
}

// Each matrix transposed: a lane holds elements of rows 2 * (i % 4) and the next, of column i / 4.
DI void stmatrix_x4_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  u32 r[4] = {r0, r1, r2, r3};
  for (int j = 0; j < 4; j++)
    for (int half = 0; half < 2; half++) {
      u32 row = exchange(address, 8 * j + 2 * (own_lane() % 4) + half);
      u16 element = (u16)(r[j] >> 16 * half);
      memcpy(shared + row + 2 * (own_lane() / 4), &element, 2);
    }
}

// Lane i has the address of row i % 8 of matrix i / 8; register j of a lane holds 4 bytes of matrix j.
template <int N> DI void ldmatrix(u32 (&r)[N], u32 address) {
  for (int j = 0; j < N; j++) {
    u32 row = exchange(address, 8 * j + own_lane() / 4);
    memcpy(&r[j], shared + row + 4 * (own_lane() % 4), 4);
  }
}
DI void ldmatrix_x2(u32& r0, u32& r1, u32 address) {
  u32 r[2];
  ldmatrix(r, address);
  r0 = r[0], r1 = r[1];
}
DI void ldmatrix_x4(u32& r0, u32& r1, u32& r2, u32& r3, u32 address) {
  u32 r[4];
  ldmatrix(r, address);
  r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
// Each matrix transposed: a lane holds elements of rows 2 * (i % 4) and the next, of column i / 4.
template <int N> DI void ldmatrix_trans(u32 (&r)[N], u32 address) {
  for (int j = 0; j < N; j++) {
    u16 halves[2];
    for (int h = 0; h < 2; h++) {
      u32 row = exchange(address, 8 * j + own_lane() % 4 * 2 + h);
      memcpy(&halves[h], shared + row + 2 * (own_lane() / 4), 2);
    }
    r[j] = halves[0] | (u32)halves[1] << 16;
  }
}
DI void ldmatrix_x2_trans(u32& r0, u32& r1, u32 address) {
  u32 r[2];
  ldmatrix_trans(r, address);
  r0 = r[0], r1 = r[1];
}
DI void ldmatrix_x4_trans(u32& r0, u32& r1, u32& r2, u32& r3, u32 address) {
  u32 r[4];
  ldmatrix_trans(r, address);
  r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}

DI u32 to_tf32(float x) { u32 u = bits<u32>(x); return x - x != 0 ? u : (u + 0x1000) & 0xffffe000u; }

struct F16 { typedef u16 stored; static float of(u16 x) { return from_f16(x); } };
struct Bf16 { typedef u16 stored; static float of(u16 x) { return from_bf16(x); } };
struct Tf32 { typedef u32 stored; static float of(u32 x) { return bits<float>(x & 0xffffe000u); } };
struct S8 { typedef u8 stored; static int of(u8 x) { return (signed char)x; } };
struct U8 { typedef u8 stored; static int of(u8 x) { return x; } };
struct E5m2 { typedef u8 stored; static float of(u8 x) { return from_f16((u16)(x << 8)); } };
struct E4m3 {
  typedef u8 stored;
  static float of(u8 x) {  // its 7 exponent and mantissa bits as those of a float16, whose bias is 8 more
    return (x & 0x7f) == 0x7f ? NAN : from_f16((u16)((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.f;
  }
};

// Floats of 8 bits: the nearest of all codes, the even one of two; too large ones become the largest finite one.
template <class T> u8 to_float8(float x, int finite) {
  if (x != x) return 0x7f;
  int best = 0;
  for (int code = 1; code <= finite; code++) {
    double off = fabs(T::of((u8)code) - fabs((double)x)), before = fabs(T::of((u8)best) - fabs((double)x));
    if (off < before || (off == before && code % 2 == 0)) best = code;
  }
  return (u8)(best | (signbit(x) ? 0x80 : 0));
}
DI u8 to_e4m3(float x) { return fabsf(x) <= 464.f ? to_float8<E4m3>(x, 0x7e) : (u8)(0x7f | (signbit(x) ? 0x80 : 0)); }
DI u8 to_e5m2(float x) {
  return fabsf(x) < 61440.f ? to_float8<E5m2>(x, 0x7b) : (u8)((x == x ? 0x7c : 0x7e) | (signbit(x) ? 0x80 : 0));
}
DI float from_e4m3(u8 x) { return E4m3::of(x); }
DI float from_e5m2(u8 x) { return E5m2::of(x); }

// mma.sync m16n8, 32 bytes of K, by PTX's table of fragments: a line of K lies in the four lanes of a group, 4 bytes each.
static u32 tiles[32][32][6];
template <class A, class B, class T>
void mma(T& d0, T& d1, T& d2, T& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto& all = tiles[threadIdx.x / 32];
  u32 own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(all[own_lane()], own, sizeof own);
  __syncwarp();
  T* d[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 4; i++) {
    int row = own_lane() / 4, column = own_lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 8; k++) {  // 4 bytes of K
      u32 a = all[row * 4 + k % 4][i / 2 + k / 4 * 2], b = all[column * 4 + k % 4][4 + k / 4];
      for (unsigned s = 0; s < 4; s += sizeof(typename A::stored))
        *d[i] += A::of((typename A::stored)(a >> 8 * s)) * B::of((typename B::stored)(b >> 8 * s));
    }
  }
  __syncwarp();
}
#define MMA(name, A, B, T)                                                                                    \
  DI void name(T& d0, T& d1, T& d2, T& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                  \
    mma<A, B>(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1);                                                        \
  }
MMA(mma_f16_f16, F16, F16, float)
MMA(mma_bf16_bf16, Bf16, Bf16, float)
MMA(mma_tf32_tf32, Tf32, Tf32, float)
MMA(mma_s8_s8, S8, S8, int)
MMA(mma_s8_u8, S8, U8, int)
MMA(mma_u8_s8, U8, S8, int)
MMA(mma_u8_u8, U8, U8, int)
// Sums in float16: rounded after each instruction.
#define MMA_HALF(name, A, B)                                                                       \
  DI void name##_half(u32& d0, u32& d1, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {          \
    float d[4] = {0, 0, 0, 0};                                                                     \
    mma<A, B>(d[0], d[1], d[2], d[3], a0, a1, a2, a3, b0, b1);                                     \
    d0 = pack_f16x2(unpack_f16_low(d0) + d[0], unpack_f16_high(d0) + d[1]);                        \
    d1 = pack_f16x2(unpack_f16_low(d1) + d[2], unpack_f16_high(d1) + d[3]);                        \
  }
MMA_HALF(mma_f16_f16, F16, F16)
#define MMA_FLOAT8(name, A, B) \
  MMA(name, A, B, float)       \
  MMA_HALF(name, A, B)
MMA_FLOAT8(mma_e4m3_e4m3, E4m3, E4m3)
MMA_FLOAT8(mma_e4m3_e5m2, E4m3, E5m2)
MMA_FLOAT8(mma_e5m2_e4m3, E5m2, E4m3)
MMA_FLOAT8(mma_e5m2_e5m2, E5m2, E5m2)

// m16n8k16: of each four elements of K a lane of a group has one; A by rows (the second 8 lines in odd registers), B by columns.
static double wide_tiles[32][32][12];
DI void mma_f64_f64(double& d0, double& d1, double& d2, double& d3, double a0, double a1, double a2, double a3, double a4, double a5,
                    double a6, double a7, double b0, double b1, double b2, double b3) {
  auto& all = wide_tiles[threadIdx.x / 32];
  double own[12] = {a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3};
  memcpy(all[own_lane()], own, sizeof own);
  __syncwarp();
  double* d[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      int row = own_lane() / 4, column = own_lane() % 4 * 2 + i % 2;
      *d[i] = __builtin_fma(all[row * 4 + k % 4][k / 4 * 2 + i / 2], all[column * 4 + k % 4][8 + k / 4], *d[i]);
    }
  __syncwarp();
}
