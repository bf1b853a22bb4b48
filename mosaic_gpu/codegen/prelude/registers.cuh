// A warpgroup's register budget. N is a multiple of 8 from 24 to 256; all four warps must execute it.
// ptxas ignores both unless the kernel states threads *and* blocks per multiprocessor (`__launch_bounds__(threads, 1)`).

template <int N>
DI void set_max_registers_increase() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0, "register budgets are multiples of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
DI void set_max_registers_decrease() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0, "register budgets are multiples of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
