"""From a plan to a cubin: emitted CUDA C++, its prelude, the compiler, and what is read back from its output."""
