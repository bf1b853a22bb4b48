#include "kernel.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace mosaic_gpu {
namespace {

// cuLibraryLoadData is told no length: it trusts the offsets in the ELF header, so they are checked here first.
bool LooksLikeCubin(const std::string& image) {
  if (image.size() < 64 || image.compare(0, 4, "\x7f"
                                               "ELF") != 0) {
    return false;
  }
  uint64_t programs, sections;
  uint16_t program_size, program_count, section_size, section_count;
  std::memcpy(&programs, image.data() + 32, 8);
  std::memcpy(&sections, image.data() + 40, 8);
  std::memcpy(&program_size, image.data() + 54, 2);
  std::memcpy(&program_count, image.data() + 56, 2);
  std::memcpy(&section_size, image.data() + 58, 2);
  std::memcpy(&section_count, image.data() + 60, 2);
  auto fits = [&](uint64_t offset, uint64_t bytes) { return offset <= image.size() && bytes <= image.size() - offset; };
  return fits(programs, uint64_t{program_size} * program_count) && fits(sections, uint64_t{section_size} * section_count);
}

uint64_t ParameterBytes(const Parameter& parameter) {
  if (std::holds_alternative<TensorMapParameter>(parameter)) return sizeof(TensorMapImage);
  if (std::holds_alternative<ShapedMapParameter>(parameter)) return sizeof(TensorMapImage);
  if (std::holds_alternative<ExtentParameter>(parameter)) return sizeof(int32_t);
  if (const auto* scalar = std::get_if<ScalarParameter>(&parameter)) return scalar->size;
  return sizeof(void*);
}

Status CheckDevice(const Spec& spec, CUdevice device) {
  const Driver& driver = GetDriver();
  int major = 0, minor = 0;
  CUresult result = driver.DeviceGetAttribute(&major, kCapabilityMajor, device);
  if (result == kSuccess) result = driver.DeviceGetAttribute(&minor, kCapabilityMinor, device);
  if (result != kSuccess) return DriverFailure("cuDeviceGetAttribute", result, spec);
  if (RunsOn(spec.arch, spec.arch_suffix, major, minor)) return Status();
  std::string target = "sm_" + std::to_string(spec.arch);
  if (spec.arch_suffix != 0) target += spec.arch_suffix;
  return Status::Mismatch(DescribeKernel(spec) + " was compiled for " + target + ", but GPU " + std::to_string(device) +
                          " is sm_" + std::to_string(major * 10 + minor) +
                          ". Compile it for this GPU (compiler_params.arch, or a config of its generation), or run it on "
                          "one that matches");
}

}  // namespace

StreamContext::StreamContext(CUstream stream) {
  const Driver& driver = GetDriver();
  if (!driver.problem.empty()) {
    status_ = Status::Toolchain(driver.problem + ". Running kernels needs an NVIDIA GPU and its driver");
    return;
  }
  CUcontext current = nullptr;
  const char* call = "cuStreamGetCtx";
  CUresult result = driver.StreamGetCtx(stream, &context_);
  if (result == kSuccess) result = driver.CtxGetCurrent(&current);
  if (result == kSuccess && current != context_) {
    call = "cuCtxPushCurrent";
    result = driver.CtxPushCurrent(context_);
    pushed_ = result == kSuccess;
  }
  if (result == kSuccess) {
    call = "cuCtxGetDevice";
    result = driver.CtxGetDevice(&device_);
  }
  if (result != kSuccess) status_ = Status::Launch(std::string(call) + " failed: " + DescribeResult(result));
}

StreamContext::~StreamContext() {
  CUcontext popped = nullptr;
  if (pushed_) GetDriver().CtxPopCurrent(&popped);
}

std::shared_ptr<Kernel> Kernel::Shared(const Spec& spec) {
  // Leaked on purpose: at exit the driver may already be gone.
  static auto* mutex = new std::mutex;
  static auto* kernels = new std::map<std::pair<std::string, std::string>, std::shared_ptr<Kernel>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::shared_ptr<Kernel>& kernel = (*kernels)[{spec.entry, spec.cubin}];
  if (kernel == nullptr) kernel.reset(new Kernel(/*unload=*/false));
  return kernel;
}

Kernel::~Kernel() {
  if (unload_ && library_ != nullptr) GetDriver().LibraryUnload(library_);
}

Status Kernel::Load(const Spec& spec) {
  const Driver& driver = GetDriver();
  if (!LooksLikeCubin(spec.cubin)) {
    return Status::Toolchain(DescribeKernel(spec) + " is no cubin: its " + std::to_string(spec.cubin.size()) +
                             " bytes are no complete ELF image");
  }
  CUlibrary library = nullptr;
  CUresult result = driver.LibraryLoadData(&library, spec.cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result != kSuccess) return DriverFailure("cuLibraryLoadData", result, spec);
  CUkernel kernel = nullptr;
  result = driver.LibraryGetKernel(&kernel, library, spec.entry.c_str());
  if (result != kSuccess) {
    driver.LibraryUnload(library);  // nothing of it was ever launched
    return DriverFailure("cuLibraryGetKernel", result, spec);
  }
  library_ = library;
  kernel_ = kernel;
  return Status();
}

Status Kernel::CheckParameters(const Spec& spec) const {
  // The driver reads as many parameters as the kernel has, whatever it is given: a cubin that disagrees with its spec
  // would make it read past the end.
  const Driver& driver = GetDriver();
  if (driver.KernelGetParamInfo == nullptr) return Status();
  const size_t count = spec.parameters.size();
  for (size_t i = 0; i <= count; ++i) {
    size_t offset = 0, bytes = 0;
    const CUresult result = driver.KernelGetParamInfo(kernel_, i, &offset, &bytes);
    if (result != kSuccess && result != kInvalidValue) return Status();  // the driver cannot tell
    const bool exists = result == kSuccess;
    if (exists != (i < count)) {
      return Status::Launch(DescribeKernel(spec) + (exists ? " has more" : " has fewer") + " parameters than the " +
                            std::to_string(count) + " of its launch specification");
    }
    if (exists && bytes != ParameterBytes(spec.parameters[i])) {
      return Status::Launch(DescribeKernel(spec) + ": parameter " + std::to_string(i) + " has " + std::to_string(bytes) +
                            " bytes in the cubin and " + std::to_string(ParameterBytes(spec.parameters[i])) +
                            " in the launch specification");
    }
  }
  return Status();
}

Status Kernel::Prepare(const Spec& spec, const StreamContext& context) {
  const Driver& driver = GetDriver();
  std::lock_guard<std::mutex> lock(mutex_);
  auto known = allowed_.find(context.context());
  if (known != allowed_.end() && known->second.shared_bytes >= spec.shared_bytes &&
      known->second.cluster_size >= spec.cluster_size()) {
    return CheckParameters(spec);  // the same cubin, but perhaps another specification
  }
  if (Status status = CheckDevice(spec, context.device()); !status.ok()) return status;
  if (library_ == nullptr) {
    if (Status status = Load(spec); !status.ok()) return status;
  }
  if (Status status = CheckParameters(spec); !status.ok()) return status;
  auto set = [&](int attribute, int value) {
    return driver.KernelSetAttribute(attribute, value, kernel_, context.device());
  };
  // Allowances only grow: other launches of the same cubin may rely on the larger one.
  if (known == allowed_.end() ? spec.shared_bytes > 0 : spec.shared_bytes > known->second.shared_bytes) {
    if (CUresult result = set(kMaxDynamicShared, static_cast<int>(spec.shared_bytes)); result != kSuccess) {
      return DriverFailure("cuKernelSetAttribute", result, spec,
                           std::to_string(spec.shared_bytes) + " bytes of dynamic shared memory");
    }
  }
  if (spec.cluster_size() > 8) {
    if (CUresult result = set(kNonPortableCluster, 1); result != kSuccess) {
      return DriverFailure("cuKernelSetAttribute", result, spec,
                           "clusters of " + std::to_string(spec.cluster_size()) + " blocks");
    }
  }
  // Forces the code onto this device now, as it could not be loaded during a later graph capture.
  CUfunction function = nullptr;
  if (CUresult result = driver.KernelGetFunction(&function, kernel_); result != kSuccess) {
    return DriverFailure("cuKernelGetFunction", result, spec);
  }
  Allowance& allowed = allowed_[context.context()];
  allowed.shared_bytes = std::max(allowed.shared_bytes, spec.shared_bytes);
  allowed.cluster_size = std::max(allowed.cluster_size, spec.cluster_size());
  return Status();
}

bool RunsOn(uint32_t arch, char suffix, int major, int minor) {
  const int cubin_major = static_cast<int>(arch / 10), cubin_minor = static_cast<int>(arch % 10);
  // "a" code runs on exactly its own GPU; "f" and plain cubins also on later ones of the same major.
  if (suffix == 'a') return major == cubin_major && minor == cubin_minor;
  return major == cubin_major && minor >= cubin_minor;
}

std::string DescribeKernel(const Spec& spec) {
  return "kernel '" + spec.entry + "' (" + spec.toolchain + ")";
}

Status DriverFailure(const char* call, CUresult result, const Spec& spec, const std::string& detail) {
  std::string text = std::string(call) + " failed for " + DescribeKernel(spec);
  if (!detail.empty()) text += ", " + detail;
  text += ": " + DescribeResult(result) + "; " + DescribeDriver();
  switch (result) {
    case kInvalidImage:
    case kNoBinaryForGpu:
    case kInvalidPtx:
    case kJitCompilerNotFound:
    case kUnsupportedPtxVersion:
    case kJitCompilationDisabled:
    case kInvalidSource:
    case kNotSupported:
      return Status::Toolchain(text + ". A driver takes cubins of its own CUDA major version and older ones: update the "
                                      "driver, or compile with an NVRTC of that version");
    case kNotFound:
      return Status::Toolchain(text + ". The cubin has no such entry");
    default:
      break;
  }
  if (result >= kIllegalAddress && result <= kLaunchFailed) {
    text += ". The fault may be of an earlier kernel on this GPU, reported only now";
  }
  return Status::Launch(text);
}

}  // namespace mosaic_gpu
