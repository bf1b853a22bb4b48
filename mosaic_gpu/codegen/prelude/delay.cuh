// Letting time pass.

DI u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Returns after at least so many nanoseconds; the hardware sleeps for a millisecond at most.
DI void delay(int nanos) {
  const u64 end = nanoseconds() + (nanos > 0 ? nanos : 0);
  for (u64 now = nanoseconds(); now < end; now = nanoseconds()) {
    const u64 left = end - now;
    asm volatile("nanosleep.u32 %0;" ::"r"((u32)(left < 1000000 ? left : 1000000)) : "memory");
  }
}
