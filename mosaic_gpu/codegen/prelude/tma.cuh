// Copies by TMA, between global memory (a tensor map and coordinates, innermost first) and shared memory. One thread issues.
// A load ends by counting its bytes at an mbarrier; a store ends with its bulk group.

// ---- loads

DI void tma_load_1d(u32 destination, const TensorMap* map, u32 bar, int c0) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar),
      "r"(c0)
      : "memory");
}

DI void tma_load_2d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar),
      "r"(c0), "r"(c1)
      : "memory");
}

DI void tma_load_3d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar),
      "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DI void tma_load_4d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

DI void tma_load_5d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// ---- loads into the same place of every block of the cluster whose bit is set in `mask`, and at its barrier

DI void tma_load_multicast_1d(u32 destination, const TensorMap* map, u32 bar, int c0, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4}], [%2], %3;" ::"r"(destination), "l"((u64)map), "r"(bar), "h"(mask),
      "r"(c0)
      : "memory");
}

DI void tma_load_multicast_2d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(destination), "l"((u64)map), "r"(bar), "h"(mask),
      "r"(c0), "r"(c1)
      : "memory");
}

DI void tma_load_multicast_3d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(destination), "l"((u64)map), "r"(bar), "h"(mask),
      "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DI void tma_load_multicast_4d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination), "l"((u64)map), "r"(bar), "h"(mask),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

DI void tma_load_multicast_5d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(destination), "l"((u64)map), "r"(bar), "h"(mask),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// ---- stores

DI void tma_store_1d(const TensorMap* map, u32 source, int c0) {
  asm volatile(
      "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group "
      "[%0, {%2}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0)
      : "memory");
}

DI void tma_store_2d(const TensorMap* map, u32 source, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0), "r"(c1)
      : "memory");
}

DI void tma_store_3d(const TensorMap* map, u32 source, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DI void tma_store_4d(const TensorMap* map, u32 source, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

DI void tma_store_5d(const TensorMap* map, u32 source, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// ---- additions to global memory, of the map's element type

DI void tma_reduce_add_1d(const TensorMap* map, u32 source, int c0) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0)
      : "memory");
}

DI void tma_reduce_add_2d(const TensorMap* map, u32 source, int c0, int c1) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0), "r"(c1)
      : "memory");
}

DI void tma_reduce_add_3d(const TensorMap* map, u32 source, int c0, int c1, int c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DI void tma_reduce_add_4d(const TensorMap* map, u32 source, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

DI void tma_reduce_add_5d(const TensorMap* map, u32 source, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"((u64)map), "r"(source),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// ---- the same to a run of memory, without a map

DI void bulk_reduce_add(float* destination, u32 source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

DI void bulk_reduce_add(int* destination, u32 source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

DI void bulk_reduce_add(u32* destination, u32 source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

// ---- groups of stores

DI void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns when at most N groups have not yet read their shared memory, which may then be overwritten.
template <int N>
DI void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Returns when at most N groups have not yet written global memory.
template <int N>
DI void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// ---- into the L2 cache, of which nothing tells the end

DI void tma_prefetch_1d(const TensorMap* map, int c0) {
  asm volatile("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%0, {%1}];" ::"l"((u64)map), "r"(c0) : "memory");
}

DI void tma_prefetch_2d(const TensorMap* map, int c0, int c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"((u64)map), "r"(c0), "r"(c1) : "memory");
}

DI void tma_prefetch_3d(const TensorMap* map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"((u64)map), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

DI void tma_prefetch_4d(const TensorMap* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"((u64)map), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

DI void tma_prefetch_5d(const TensorMap* map, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"((u64)map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
