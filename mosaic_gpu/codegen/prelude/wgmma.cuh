// What surrounds wgmma on Hopper. The products themselves are generated, one function per variant.

// Orders earlier register accesses before the wgmma that follow; needed in the same basic block as each batch of them.
DI void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DI void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most N committed groups are still in flight.
template <int N>
DI void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Pins a value here for the C++ compiler, which then moves no use of it across. Costs no instruction.
DI void fence_register(float& value) { asm volatile("" : "+f"(value)::"memory"); }
DI void fence_register(u32& value) { asm volatile("" : "+r"(value)::"memory"); }
