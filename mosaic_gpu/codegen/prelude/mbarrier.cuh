// Barriers in shared memory that count arrivals and bytes. `bar` is a shared address.

DI void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy and to the cluster.
DI void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DI void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }

DI void mbarrier_arrive_count(u32 bar, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

DI void mbarrier_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

DI void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// `count` arrivals on the barrier that has address `bar` in this block, in block `cta_rank` of the cluster. What they
// order is what wgmma and TMA have completed: ordinary accesses of this thread may still be under way.
DI void mbarrier_arrive_cluster(u32 bar, u32 cta_rank, u32 count) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote], %2;\n}" ::"r"(bar),
      "r"(cta_rank), "r"(count)
      : "memory");
}

// The same, after all that this thread has read and written; ptxas puts a membar over the whole GPU in front of it.
DI void mbarrier_arrive_cluster_release(u32 bar, u32 cta_rank, u32 count) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote], %2;\n}" ::"r"(bar),
      "r"(cta_rank), "r"(count)
      : "memory");
}

// `bar` is in another block (an address of the cluster): bytes it has to wait for, and arrivals.
DI void mbarrier_expect_cluster(u32 bar, u32 bytes, u32 count) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [%0], %2;" ::"r"(bar),
      "r"(bytes), "r"(count)
      : "memory");
}

// Stores to another block's shared memory, whose bytes the barrier `bar` there counts as they land.
DI void store_async_1(u32 to, u32 bar, u32 a) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(a), "r"(bar)
               : "memory");
}

DI void store_async_2(u32 to, u32 bar, u32 a, u32 b) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to), "r"(a),
               "r"(b), "r"(bar)
               : "memory");
}

DI void store_async_4(u32 to, u32 bar, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(a), "r"(b), "r"(c), "r"(d), "r"(bar)
               : "memory");
}

// Has the phase of this parity ended? Does not wait.
DI bool mbarrier_test(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// The same; if it has, this thread sees what other blocks of the cluster did before their arrivals.
DI bool mbarrier_test_cluster(u32 bar, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns when the phase of this parity has ended. The hardware suspends the thread between tries.
DI void mbarrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier_retry_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra mbarrier_retry_%=;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// The same; then this thread sees what other blocks of the cluster did before their arrivals.
DI void mbarrier_wait_cluster(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier_retry_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra mbarrier_retry_%=;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
