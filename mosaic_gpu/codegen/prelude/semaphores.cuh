// Counters in global memory. The scope of what they order is the GPU, or (`_sys`) all devices and the host.
// PTX ISA 9.7.13.4 (membar, fence), 9.7.13.6 (red), 9.7.13.5 (atom), 9.7.9.8 (ld).

DI void semaphore_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DI void semaphore_fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Adds; in order with a fence before it only.
DI void semaphore_add(int* place, int x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(place), "r"(x) : "memory");
}
DI void semaphore_add_sys(int* place, int x) {
  asm volatile("red.relaxed.sys.global.add.s32 [%0], %1;" ::"l"(place), "r"(x) : "memory");
}

// Adds, and returns what the counter was; orders nothing.
DI int semaphore_fetch_add(int* place, int x) {
  int was;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(was) : "l"(place), "r"(x) : "memory");
  return was;
}

DI int semaphore_read(int* place) {
  int x;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(place) : "memory");
  return x;
}

// Exchanges for a counter that still is `old`; returns what it was.
DI int semaphore_exchange(int* place, int old, int x) {
  int was;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;" : "=r"(was) : "l"(place), "r"(old), "r"(x) : "memory");
  return was;
}

// Returns when the counter is at least `value`; a fence behind it takes over what its signals hand on.
DI void semaphore_wait(int* place, int value) {
  while (semaphore_read(place) < value) asm volatile("nanosleep.u32 32;" ::: "memory");
}

// The same, and takes `value` off it.
DI void semaphore_take(int* place, int value) {
  while (true) {
    const int x = semaphore_read(place);
    if (x >= value && semaphore_exchange(place, x, x - value) == x) return;
    if (x < value) asm volatile("nanosleep.u32 32;" ::: "memory");
  }
}
