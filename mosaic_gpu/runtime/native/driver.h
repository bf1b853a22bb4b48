// The part of the CUDA driver API that a launch needs, declared by hand: the library builds without a CUDA toolkit and
// loads on machines without a GPU.  The driver's ABI is stable; a test compares the numbers below with cuda-bindings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mosaic_gpu {

using CUresult = int;
using CUdevice = int;
using CUcontext = void*;
using CUstream = void*;
using CUlibrary = void*;
using CUkernel = void*;
using CUfunction = void*;

// Each constant carries the driver's name for it, which the test looks up.
inline constexpr CUresult kSuccess = 0;                     // CUDA_SUCCESS
inline constexpr CUresult kInvalidValue = 1;                // CUDA_ERROR_INVALID_VALUE
inline constexpr CUresult kInvalidImage = 200;              // CUDA_ERROR_INVALID_IMAGE
inline constexpr CUresult kNoBinaryForGpu = 209;            // CUDA_ERROR_NO_BINARY_FOR_GPU
inline constexpr CUresult kInvalidPtx = 218;                // CUDA_ERROR_INVALID_PTX
inline constexpr CUresult kJitCompilerNotFound = 221;       // CUDA_ERROR_JIT_COMPILER_NOT_FOUND
inline constexpr CUresult kUnsupportedPtxVersion = 222;     // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
inline constexpr CUresult kJitCompilationDisabled = 223;    // CUDA_ERROR_JIT_COMPILATION_DISABLED
inline constexpr CUresult kInvalidSource = 300;             // CUDA_ERROR_INVALID_SOURCE
inline constexpr CUresult kNotFound = 500;                  // CUDA_ERROR_NOT_FOUND
inline constexpr CUresult kIllegalAddress = 700;            // CUDA_ERROR_ILLEGAL_ADDRESS
inline constexpr CUresult kLaunchFailed = 719;              // CUDA_ERROR_LAUNCH_FAILED
inline constexpr CUresult kNotSupported = 801;              // CUDA_ERROR_NOT_SUPPORTED
inline constexpr int kCapabilityMajor = 75;                 // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
inline constexpr int kCapabilityMinor = 76;                 // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
inline constexpr int kMaxDynamicShared = 8;                 // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
inline constexpr int kNonPortableCluster = 14;              // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
inline constexpr int kClusterDimension = 4;                 // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
inline constexpr int kProgrammaticSerialization = 6;        // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
inline constexpr int kInterleaveNone = 0;                   // CU_TENSOR_MAP_INTERLEAVE_NONE
inline constexpr int kPromotion256 = 3;                     // CU_TENSOR_MAP_L2_PROMOTION_L2_256B
inline constexpr int kFillZeros = 0;                        // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE

// CUtensorMap.  The driver wants 64 bytes of alignment, its header gives host copies 128.
struct alignas(128) TensorMapImage {
  uint64_t words[16];
};
static_assert(sizeof(TensorMapImage) == 128 && alignof(TensorMapImage) == 128);

// CUlaunchAttribute, of which the cluster size and programmatic stream serialization are used.
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, shared_bytes) == 24);
static_assert(offsetof(LaunchConfig, stream) == 32 && offsetof(LaunchConfig, attributes) == 40);
static_assert(offsetof(LaunchConfig, attribute_count) == 48);

// Entry points of libcuda.  `problem` says why they cannot be used; it is empty when all required ones were found.
struct Driver {
  CUresult (*GetErrorName)(CUresult, const char**) = nullptr;
  CUresult (*GetErrorString)(CUresult, const char**) = nullptr;
  CUresult (*DriverGetVersion)(int*) = nullptr;
  CUresult (*DeviceGetAttribute)(int*, int, CUdevice) = nullptr;
  CUresult (*StreamGetCtx)(CUstream, CUcontext*) = nullptr;
  CUresult (*CtxGetCurrent)(CUcontext*) = nullptr;
  CUresult (*CtxPushCurrent)(CUcontext) = nullptr;
  CUresult (*CtxPopCurrent)(CUcontext*) = nullptr;
  CUresult (*CtxGetDevice)(CUdevice*) = nullptr;
  CUresult (*LibraryLoadData)(CUlibrary*, const void*, int*, void**, unsigned, int*, void**, unsigned) = nullptr;
  CUresult (*LibraryUnload)(CUlibrary) = nullptr;
  CUresult (*LibraryGetKernel)(CUkernel*, CUlibrary, const char*) = nullptr;
  CUresult (*KernelGetFunction)(CUfunction*, CUkernel) = nullptr;
  CUresult (*KernelSetAttribute)(int, int, CUkernel, CUdevice) = nullptr;
  CUresult (*KernelGetParamInfo)(CUkernel, size_t, size_t*, size_t*) = nullptr;  // since CUDA 12.4; may be null
  CUresult (*TensorMapEncodeTiled)(TensorMapImage*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                                   const uint32_t*, const uint32_t*, int, int, int, int) = nullptr;
  CUresult (*LaunchKernelEx)(const LaunchConfig*, CUfunction, void**, void**) = nullptr;
  std::string problem;
};

// The driver named by MOSAIC_GPU_LIBCUDA, else libcuda.so.1; opened on first use and never closed.
const Driver& GetDriver();

// "CUDA_ERROR_INVALID_IMAGE (200): device kernel image is invalid"
std::string DescribeResult(CUresult result);

// The CUDA version that the driver supports as 1000 * major + 10 * minor; 0 where there is no driver.
int DriverVersion();

// "driver for CUDA 13.0", or "no driver"
std::string DescribeDriver();

}  // namespace mosaic_gpu
