// A cubin in the driver: loaded once, made ready for each context that launches it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "driver.h"
#include "spec.h"
#include "status.h"

namespace mosaic_gpu {

// Makes the context of a stream current for the duration of a block; XLA calls handlers with whatever was current.
class StreamContext {
 public:
  explicit StreamContext(CUstream stream);
  ~StreamContext();
  StreamContext(const StreamContext&) = delete;
  StreamContext& operator=(const StreamContext&) = delete;

  const Status& status() const { return status_; }
  CUcontext context() const { return context_; }
  CUdevice device() const { return device_; }

 private:
  CUcontext context_ = nullptr;
  CUdevice device_ = 0;
  bool pushed_ = false;
  Status status_;
};

class Kernel {
 public:
  // The one kernel of this process for the spec's cubin and entry.  It is never unloaded: XLA does not say when the last
  // launch of an executable has finished on the GPU, and a CUDA graph may outlive the executable.  So memory grows with
  // the number of different cubins, not with the number of executables.
  static std::shared_ptr<Kernel> Shared(const Spec& spec);

  // A kernel of the caller's own, unloaded with the last reference; the caller has waited for its launches by then.
  static std::shared_ptr<Kernel> Owned() { return std::shared_ptr<Kernel>(new Kernel(/*unload=*/true)); }

  ~Kernel();

  // Loads the cubin if need be and makes it launchable in `context`, which is current.  Not to be called while a graph is
  // being captured, where loading is not allowed; a second call for a context does nothing.
  Status Prepare(const Spec& spec, const StreamContext& context);

  // Valid once Prepare has succeeded.  cuLaunchKernelEx takes a CUkernel in place of a function.
  CUfunction handle() const { return kernel_; }

 private:
  explicit Kernel(bool unload) : unload_(unload) {}
  Status Load(const Spec& spec);
  Status CheckParameters(const Spec& spec) const;

  const bool unload_;
  std::mutex mutex_;
  CUlibrary library_ = nullptr;
  CUkernel kernel_ = nullptr;
  // What the driver has been told to allow, by prepared context.
  struct Allowance {
    uint32_t shared_bytes = 0;
    uint32_t cluster_size = 0;  // blocks
  };
  std::map<CUcontext, Allowance> allowed_;
};

// Whether code for `arch` (compute capability times ten) with `suffix` runs on a device.
bool RunsOn(uint32_t arch, char suffix, int major, int minor);

// "kernel 'attention' (NVRTC 13.0 sm_90a)"
std::string DescribeKernel(const Spec& spec);

// What a failed driver call means: the driver refusing the cubin is a matter of versions, the rest of the launch.
Status DriverFailure(const char* call, CUresult result, const Spec& spec, const std::string& detail = {});

}  // namespace mosaic_gpu
