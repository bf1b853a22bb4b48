// What surrounds wgmma on Hopper. The products themselves are generated, one function per variant.

// Orders earlier register accesses before the wgmma that follow; needed in the same basic block as each batch of them.
DI void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DI void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most N committed groups are still in flight.
template <int N>
DI void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// ptxas moves waits ahead of arithmetic, but not ahead of an access to a barrier. This one depends on `value`, the result of
// an addition, and never happens: an addition makes no NaN with these bits.
DI void order_after(float value, u32 bar) {
  asm volatile(
      "{\n.reg .pred never;\n"
      "setp.eq.u32 never, %0, 0x7fb5a5a5;\n"
      "@never mbarrier.arrive.shared::cta.b64 _, [%1];\n}" ::"r"(__float_as_uint(value)),
      "r"(bar)
      : "memory");
}

// A register of an 8-bit A: four elements along K, the first one lowest.
DI u32 bytes_of(u8 a, u8 b, u8 c, u8 d) { return (u32)a | (u32)b << 8 | (u32)c << 16 | (u32)d << 24; }
