// Types, addresses and thread identity. Every other piece of the prelude builds on this one.

#define DI __device__ __forceinline__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A TMA descriptor, as the driver encodes it; a kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// Address of an object in shared memory, as PTX's shared window counts.
DI u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// A value that is the same in all lanes, told to the compiler, which may then keep it in a uniform register.
DI int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// What is computed from it is computed here, and not kept in registers through loops that have none to spare.  Unsigned, so that
// what is divided by powers of two are shifts.
DI u32 here(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// True in one lane of a converged warp, always the same lane.
DI bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred chosen;\nelect.sync _|chosen, 0xffffffff;\nselp.u32 %0, 1, 0, chosen;\n}" : "=r"(elected));
  return elected != 0;
}
