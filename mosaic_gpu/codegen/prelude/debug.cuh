// What the CUDA driver provides for kernels that print or stop.

extern "C" __device__ int printf(const char* format, ...);
extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function,
                                        unsigned long size);

// Says where the thread is, with the message, and ends the launch with an error.
DI void failed_check(const char* message, const char* file, u32 line, const char* function) {
  __assertfail(message, file, line, function, 1);
}
