// Tensor memory and matrix products of Blackwell. GROUP is 1, or 2 where two blocks of a cluster work together; one
// kernel uses one of them only. Loads and stores of tensor memory are generated, one function per shape and width.

// Reserves COLUMNS (a power of two from 32 to 512) and writes their address to shared memory. One converged warp.
template <int COLUMNS, int GROUP = 1>
DI void tmem_alloc(u32 shared_destination) {
  static_assert(COLUMNS >= 32 && COLUMNS <= 512 && (COLUMNS & (COLUMNS - 1)) == 0, "32, 64, 128, 256 or 512 columns");
  if constexpr (GROUP == 1)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_destination),
                 "n"(COLUMNS)
                 : "memory");
  else
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_destination),
                 "n"(COLUMNS)
                 : "memory");
}

// States that this block allocates no more, so that another block may.
template <int GROUP = 1>
DI void tmem_relinquish() {
  if constexpr (GROUP == 1)
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  else
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
}

template <int COLUMNS, int GROUP = 1>
DI void tmem_dealloc(u32 address) {
  if constexpr (GROUP == 1)
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(COLUMNS));
  else
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(COLUMNS));
}

// tcgen05_mma_<kind>_ss(d, a, b, idesc, accumulate): D (+)= A B, both operands in shared memory, by descriptors.
// tcgen05_mma_<kind>_ts(d, a, b, idesc, accumulate): A in tensor memory, by address.
// One thread issues; `idesc` is the instruction descriptor; D is overwritten where `accumulate` is 0.
#define MOSAIC_TCGEN05_MMA_GROUP(group, kind, a_type, a_constraint, a_operand)                                 \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.u32 accumulate, %4, 0;\n"                                   \
               "tcgen05.mma.cta_group::" group ".kind::" kind " [%0], " a_operand ", %2, %3, accumulate;\n}"   \
               ::"r"(d), a_constraint(a), "l"(b), "r"(idesc), "r"(accumulate)                                  \
               : "memory")
#define MOSAIC_TCGEN05_MMA(name, kind, a_type, a_constraint, a_operand)                                        \
  template <int GROUP = 1>                                                                                     \
  DI void name(u32 d, a_type a, u64 b, u32 idesc, u32 accumulate) {                                            \
    if constexpr (GROUP == 1)                                                                                  \
      MOSAIC_TCGEN05_MMA_GROUP("1", kind, a_type, a_constraint, a_operand);                                    \
    else                                                                                                       \
      MOSAIC_TCGEN05_MMA_GROUP("2", kind, a_type, a_constraint, a_operand);                                    \
  }
MOSAIC_TCGEN05_MMA(tcgen05_mma_f16_ss, "f16", u64, "l", "%1")
MOSAIC_TCGEN05_MMA(tcgen05_mma_f16_ts, "f16", u32, "r", "[%1]")
MOSAIC_TCGEN05_MMA(tcgen05_mma_tf32_ss, "tf32", u64, "l", "%1")
MOSAIC_TCGEN05_MMA(tcgen05_mma_tf32_ts, "tf32", u32, "r", "[%1]")
MOSAIC_TCGEN05_MMA(tcgen05_mma_f8_ss, "f8f6f4", u64, "l", "%1")
MOSAIC_TCGEN05_MMA(tcgen05_mma_f8_ts, "f8f6f4", u32, "r", "[%1]")
MOSAIC_TCGEN05_MMA(tcgen05_mma_i8_ss, "i8", u64, "l", "%1")
MOSAIC_TCGEN05_MMA(tcgen05_mma_i8_ts, "i8", u32, "r", "[%1]")
#undef MOSAIC_TCGEN05_MMA
#undef MOSAIC_TCGEN05_MMA_GROUP

// tcgen05_mma_<kind>_ss(d, a, b, idesc, accumulate, a_scale, b_scale): the same with scale factors in tensor memory, one for
// each 32 (mxf8, mxf4) or 16 (nvf4) elements of K.
#define MOSAIC_TCGEN05_SCALED_GROUP(group, kind)                                                               \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.u32 accumulate, %4, 0;\n"                                   \
               "tcgen05.mma.cta_group::" group ".kind::" kind " [%0], %1, %2, %3, [%5], [%6], accumulate;\n}" ::"r"(d), \
               "l"(a), "l"(b), "r"(idesc), "r"(accumulate), "r"(a_scale), "r"(b_scale)                         \
               : "memory")
#define MOSAIC_TCGEN05_SCALED(name, kind)                                                                      \
  template <int GROUP = 1>                                                                                     \
  DI void name(u32 d, u64 a, u64 b, u32 idesc, u32 accumulate, u32 a_scale, u32 b_scale) {                     \
    if constexpr (GROUP == 1)                                                                                  \
      MOSAIC_TCGEN05_SCALED_GROUP("1", kind);                                                                  \
    else                                                                                                       \
      MOSAIC_TCGEN05_SCALED_GROUP("2", kind);                                                                  \
  }
MOSAIC_TCGEN05_SCALED(tcgen05_mma_mxf8_ss, "mxf8f6f4.block_scale.block32")
MOSAIC_TCGEN05_SCALED(tcgen05_mma_mxf4_ss, "mxf4nvf4.block_scale.block32")
MOSAIC_TCGEN05_SCALED(tcgen05_mma_nvf4_ss, "mxf4nvf4.block_scale.block16")
#undef MOSAIC_TCGEN05_SCALED
#undef MOSAIC_TCGEN05_SCALED_GROUP

// tcgen05_mma_sparse_<kind>_ss(d, a, b, idesc, accumulate, metadata): the same of a 2:4 sparse A, whose metadata are in tensor
// memory: the address of an even column, of which `idesc` has the selector.
#define MOSAIC_TCGEN05_SPARSE_GROUP(group, kind)                                                               \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.u32 accumulate, %4, 0;\n"                                   \
               "tcgen05.mma.sp.cta_group::" group ".kind::" kind " [%0], %1, %2, [%5], %3, accumulate;\n}" ::"r"(d), \
               "l"(a), "l"(b), "r"(idesc), "r"(accumulate), "r"(metadata)                                      \
               : "memory")
#define MOSAIC_TCGEN05_SPARSE(name, kind)                                                                      \
  template <int GROUP = 1>                                                                                     \
  DI void name(u32 d, u64 a, u64 b, u32 idesc, u32 accumulate, u32 metadata) {                                 \
    if constexpr (GROUP == 1)                                                                                  \
      MOSAIC_TCGEN05_SPARSE_GROUP("1", kind);                                                                  \
    else                                                                                                       \
      MOSAIC_TCGEN05_SPARSE_GROUP("2", kind);                                                                  \
  }
MOSAIC_TCGEN05_SPARSE(tcgen05_mma_sparse_f16_ss, "f16")
MOSAIC_TCGEN05_SPARSE(tcgen05_mma_sparse_tf32_ss, "tf32")
MOSAIC_TCGEN05_SPARSE(tcgen05_mma_sparse_f8_ss, "f8f6f4")
MOSAIC_TCGEN05_SPARSE(tcgen05_mma_sparse_i8_ss, "i8")
#undef MOSAIC_TCGEN05_SPARSE
#undef MOSAIC_TCGEN05_SPARSE_GROUP

// tcgen05_copy_<form>(to, from): rows of shared memory, by a matrix descriptor, to lanes: 32 rows of 16 bytes to each quarter of
// the lanes, or 128 rows of 16 or 32 bytes.
#define MOSAIC_TCGEN05_COPY(name, form)                                                                        \
  template <int GROUP = 1>                                                                                     \
  DI void name(u32 to, u64 from) {                                                                             \
    if constexpr (GROUP == 1)                                                                                  \
      asm volatile("tcgen05.cp.cta_group::1." form " [%0], %1;" ::"r"(to), "l"(from) : "memory");              \
    else                                                                                                       \
      asm volatile("tcgen05.cp.cta_group::2." form " [%0], %1;" ::"r"(to), "l"(from) : "memory");              \
  }
MOSAIC_TCGEN05_COPY(tcgen05_copy_32x128b_warpx4, "32x128b.warpx4")
MOSAIC_TCGEN05_COPY(tcgen05_copy_128x128b, "128x128b")
MOSAIC_TCGEN05_COPY(tcgen05_copy_128x256b, "128x256b")
#undef MOSAIC_TCGEN05_COPY

// The barrier gets one arrival when everything this thread has issued so far is done. Includes the fence before it.
template <int GROUP = 1>
DI void tcgen05_commit(u32 bar) {
  if constexpr (GROUP == 1)
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar) : "memory");
  else
    asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar) : "memory");
}

// The same in every block of the cluster whose bit is set in `mask`.
template <int GROUP = 1>
DI void tcgen05_commit_multicast(u32 bar, u16 mask) {
  if constexpr (GROUP == 1)
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(bar),
        "h"(mask)
        : "memory");
  else
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(bar),
        "h"(mask)
        : "memory");
}

// Order tensor memory accesses against a barrier between threads: one before arriving, one after waiting.
DI void tcgen05_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
DI void tcgen05_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Loaded registers may be used, and stores are done, only after these.
DI void tcgen05_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
DI void tcgen05_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// Copies by TMA for a pair of blocks: into this block's shared memory, counted by the barrier at the same place in the pair's
// first block (bit 24 of an address says which block of a pair).

DI void tma_load_pair_1d(u32 destination, const TensorMap* map, u32 bar, int c0) {
  asm volatile(
      "cp.async.bulk.tensor.1d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar & 0xfeffffffu),
      "r"(c0)
      : "memory");
}

DI void tma_load_pair_2d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar & 0xfeffffffu),
      "r"(c0), "r"(c1)
      : "memory");
}

DI void tma_load_pair_3d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar & 0xfeffffffu),
      "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DI void tma_load_pair_4d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar & 0xfeffffffu),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

DI void tma_load_pair_5d(u32 destination, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination), "l"((u64)map), "r"(bar & 0xfeffffffu),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
