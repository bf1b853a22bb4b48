// What an emitted kernel needs of CUDA C++ and of the prelude, for the host: every GPU thread is a thread of the host.
// Only kernels that neither multiply on tensor cores nor copy by TMA; their arithmetic, addresses and barriers are tried.
#include <math.h>
#include <string.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct Dim { int x, y, z; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };

extern thread_local Dim threadIdx, blockIdx;
extern Dim gridDim;
extern unsigned char shared[];
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
DI float __int_as_float(int x) { return bits<float>(x); }
DI double __longlong_as_double(long long x) { return bits<double>(x); }
DI u32 shared_address(const void*) { return 0; }
DI int own_lane() { return threadIdx.x % 32; }
DI int uniform(int x) { return (int)exchange((u32)x, 0); }
DI int here(int x) { return x; }
template <class T> DI T __shfl_xor_sync(u32, T x, int mask) {
  static_assert(sizeof(T) == 4, "the emitted reductions exchange 32 bits");
  return bits<T>(exchange(bits<u32>(x), own_lane() ^ mask));
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
DI float max_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
DI float min_nan(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
DI int max(int a, int b) { return a > b ? a : b; }
DI int min(int a, int b) { return a < b ? a : b; }
DI u32 max(u32 a, u32 b) { return a > b ? a : b; }
DI u32 min(u32 a, u32 b) { return a < b ? a : b; }

// Four 8x8 matrices: lane i has the address of row i % 8 of matrix i / 8; register j holds two elements of matrix j.
DI void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  u32 r[4] = {r0, r1, r2, r3};
  for (int j = 0; j < 4; j++) {
    u32 row = exchange(address, 8 * j + own_lane() / 4);
    memcpy(shared + row + 4 * (own_lane() % 4), &r[j], 4);
  }
}

DI void ldmatrix_x4(u32& r0, u32& r1, u32& r2, u32& r3, u32 address) {
  u32* r[4] = {&r0, &r1, &r2, &r3};
  for (int j = 0; j < 4; j++) {
    u32 row = exchange(address, 8 * j + own_lane() / 4);
    memcpy(r[j], shared + row + 4 * (own_lane() % 4), 4);
  }
}
