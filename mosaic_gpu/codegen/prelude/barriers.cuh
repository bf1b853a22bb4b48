// Barriers of the block (numbers 0 to 15) and of the cluster. All lanes of a warp execute them together.

DI void named_barrier_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DI void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; whether `condition` holds for one of the threads at least.
DI bool named_barrier_any(u32 id, u32 threads, bool condition) {
  u32 any;
  asm volatile(
      "{\n.reg .pred mine, any;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"((u32)condition)
      : "memory");
  return any != 0;
}

DI void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

DI void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// What `p` in this block's shared memory is in that of block `cta_rank`.
DI unsigned char* shared_of_block(unsigned char* p, u32 cta_rank) {
  unsigned char* remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(p), "r"(cta_rank));
  return remote;
}

// Shared address, in the cluster's window, of what `address` is in block `cta_rank`.
DI u32 cluster_address(u32 address, u32 cta_rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta_rank));
  return remote;
}
