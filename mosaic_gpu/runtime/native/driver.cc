#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>

namespace mosaic_gpu {
namespace {

Driver OpenDriver() {
  Driver driver;
  const char* chosen = std::getenv("MOSAIC_GPU_LIBCUDA");
  const char* path = chosen != nullptr && *chosen != '\0' ? chosen : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    driver.problem = std::string("the CUDA driver cannot be loaded: ") + (reason != nullptr ? reason : path);
    return driver;
  }
  auto find = [&](auto& entry, const char* symbol, bool required = true) {
    entry = reinterpret_cast<std::decay_t<decltype(entry)>>(dlsym(library, symbol));
    if (entry == nullptr && required && driver.problem.empty()) {
      driver.problem = std::string("the CUDA driver ") + path + " is too old: it has no " + symbol;
    }
  };
  find(driver.GetErrorName, "cuGetErrorName");
  find(driver.GetErrorString, "cuGetErrorString");
  find(driver.DriverGetVersion, "cuDriverGetVersion");
  find(driver.DeviceGetAttribute, "cuDeviceGetAttribute");
  find(driver.StreamGetCtx, "cuStreamGetCtx");
  find(driver.CtxGetCurrent, "cuCtxGetCurrent");
  find(driver.CtxPushCurrent, "cuCtxPushCurrent_v2");
  find(driver.CtxPopCurrent, "cuCtxPopCurrent_v2");
  find(driver.CtxGetDevice, "cuCtxGetDevice");
  find(driver.LibraryLoadData, "cuLibraryLoadData");
  find(driver.LibraryUnload, "cuLibraryUnload");
  find(driver.LibraryGetKernel, "cuLibraryGetKernel");
  find(driver.KernelGetFunction, "cuKernelGetFunction");
  find(driver.KernelSetAttribute, "cuKernelSetAttribute");
  find(driver.KernelGetParamInfo, "cuKernelGetParamInfo", /*required=*/false);
  find(driver.TensorMapEncodeTiled, "cuTensorMapEncodeTiled");
  find(driver.LaunchKernelEx, "cuLaunchKernelEx");
  return driver;
}

}  // namespace

const Driver& GetDriver() {
  // Leaked: launches of other threads may still run while static objects are destroyed.
  static const Driver* driver = new Driver(OpenDriver());
  return *driver;
}

std::string DescribeResult(CUresult result) {
  const Driver& driver = GetDriver();
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.GetErrorName != nullptr) driver.GetErrorName(result, &name);
  if (driver.GetErrorString != nullptr) driver.GetErrorString(result, &text);
  std::string out = (name != nullptr ? name : "CUDA error") + (" (" + std::to_string(result) + ")");
  if (text != nullptr) out += std::string(": ") + text;
  return out;
}

int DriverVersion() {
  const Driver& driver = GetDriver();
  int version = 0;
  if (driver.DriverGetVersion == nullptr || driver.DriverGetVersion(&version) != kSuccess) return 0;
  return version;
}

std::string DescribeDriver() {
  const int version = DriverVersion();
  if (version == 0) return "no driver";
  return "driver for CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace mosaic_gpu
