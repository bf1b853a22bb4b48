// Cluster launch control: asks for the place of a block that has not been launched; 16 bytes of answer come to shared memory.
DI void try_cluster_cancel(u32 answer, u32 bar) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(answer),
      "r"(bar)
      : "memory");
}

// The same for the place of a whole cluster: the answer comes to each block of this one, and counts on its barrier.
DI void try_cluster_cancel_all(u32 answer, u32 bar) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 "
      "[%0], [%1];" ::"r"(answer),
      "r"(bar)
      : "memory");
}

// Whether an answer holds a place, and which: x, y and z of that block.  Fenced, so that the next answer may overwrite it once
// all who read it have arrived on a barrier.
DI bool query_cluster_cancel(u32 answer, int* block) {
  u32 found;
  asm volatile(
      "{\n.reg .pred p;\n.reg .b128 words;\nld.shared.b128 words, [%4];\n"
      "fence.proxy.async.shared::cta;\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, words;\nselp.u32 %0, 1, 0, p;\n"
      "mov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, %2, %3, _}, words;\n}"
      : "=r"(found), "=r"(block[0]), "=r"(block[1]), "=r"(block[2])
      : "r"(answer)
      : "memory");
  return found != 0;
}
