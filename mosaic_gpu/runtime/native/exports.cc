// What the library offers, as plain C symbols: Python loads it with ctypes, so one build serves every Python version.
//
// Two ways in.  XLA FFI handlers, for JAX: state made once per call site of an executable, loading ahead of execution,
// launching on XLA's stream.  And mosaic_gpu_launcher_*, for PyTorch and stand-alone use.  Besides, the handler through which
// the simulator's reports leave a jitted function.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"
#include "launcher.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

#define MOSAIC_GPU_EXPORT extern "C" __attribute__((visibility("default")))

namespace mosaic_gpu {
namespace {

namespace ffi = xla::ffi;

// XLA writes the type id when it registers the type.  The CPU and the CUDA runtime are separate libraries, each with
// ids of its own, hence one type per platform.
struct CudaState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  std::unique_ptr<Launcher> launcher;
};
struct CpuTestState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  std::unique_ptr<Launcher> launcher;
};
ffi::TypeId CudaState::id = {};
ffi::TypeInfo CudaState::info = ffi::MakeTypeInfo<CudaState>();
ffi::TypeId CpuTestState::id = {};
ffi::TypeInfo CpuTestState::info = ffi::MakeTypeInfo<CpuTestState>();

// Runs `body`, which gives a Status; nothing thrown may reach XLA, which would end the process.
template <typename Body>
Status Guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return Status::Launch(std::string("unexpected ") + error.what());
  } catch (...) {
    return Status::Launch("unexpected exception");
  }
}

ffi::Error ToError(const Status& status) {
  return status.ok() ? ffi::Error::Success() : ffi::Error::Internal(status.message());
}

template <typename State>
ffi::ErrorOr<std::unique_ptr<State>> Instantiate(std::string_view spec) {
  auto state = std::make_unique<State>();
  const Status status = Guarded([&] { return Launcher::Create(spec, /*shared=*/true, &state->launcher); });
  if (!status.ok()) return ffi::Unexpected(ToError(status));
  return state;
}

ffi::Error Collect(ffi::RemainingArgs arguments, ffi::RemainingRets results, std::vector<Buffer>* out) {
  out->reserve(arguments.size() + results.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto buffer = arguments.get<ffi::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    auto shape = buffer->dimensions();
    out->push_back({buffer->untyped_data(), buffer->size_bytes(), {shape.begin(), shape.end()}});
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    auto shape = (*buffer)->dimensions();
    out->push_back({(*buffer)->untyped_data(), (*buffer)->size_bytes(), {shape.begin(), shape.end()}});
  }
  return ffi::Error::Success();
}

ffi::Error Launch(CUstream stream, Launcher* launcher, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  ffi::Error collected = ffi::Error::Success();
  const Status status = Guarded([&] {
    std::vector<Buffer> buffers;
    collected = Collect(arguments, results, &buffers);
    if (collected.failure()) return Status();
    return launcher->Launch(stream, buffers.data(), buffers.size());
  });
  return collected.failure() ? collected : ToError(status);
}

ffi::Error Initialize(CUstream stream, CudaState* state, ffi::Dictionary) {
  return ToError(Guarded([&] { return state->launcher->Prepare(stream); }));
}

ffi::Error Execute(CUstream stream, CudaState* state, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                   ffi::Dictionary) {
  return Launch(stream, state->launcher.get(), arguments, results);
}

ffi::Error ExecuteOnCpu(CpuTestState* state, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                        ffi::Dictionary) {
  return Launch(nullptr, state->launcher.get(), arguments, results);
}

// Ends an execution with the simulator's report, if there is one (bytes up to a zero); else passes the results on, which
// XLA has put in the arguments' place.
ffi::Error Simulated(ffi::Buffer<ffi::U8> report, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  const auto* text = reinterpret_cast<const char*>(report.typed_data());
  const size_t size = strnlen(text, report.element_count());
  if (size > 0) return ffi::Error(ffi::ErrorCode::kAborted, std::string(text, size));
  for (size_t i = 0; i < results.size(); ++i) {
    auto from = arguments.get<ffi::AnyBuffer>(i);
    auto to = results.get<ffi::AnyBuffer>(i);
    if (!from || !to) return ffi::Error::Internal("simulated: as many results as arguments");
    if (from->untyped_data() != (*to)->untyped_data()) {
      std::memcpy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
    }
  }
  return ffi::Error::Success();
}

// The simulator, for programs whose shapes are known only when they run: a function of Python's, by the number that the program
// has there.  `shapes` holds the extents of the arguments, then of the results, one after the other; ranks how many each has.
using LateSimulator = void (*)(int64_t call, void** buffers, const int64_t* ranks, const int64_t* shapes, int64_t count,
                               char* message, int64_t capacity);
LateSimulator late_simulator = nullptr;

ffi::Error SimulateLate(ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t call) {
  if (late_simulator == nullptr) {
    return ffi::Error(ffi::ErrorCode::kAborted,
                      "UnsupportedCall: a program for the simulator runs only in the process that made it; export for 'cuda'");
  }
  std::vector<Buffer> buffers;
  ffi::Error collected = ffi::Error::Success();
  std::vector<char> message(1 << 15, '\0');
  const Status status = Guarded([&] {
    collected = Collect(arguments, results, &buffers);
    if (collected.failure()) return Status();
    std::vector<void*> addresses;
    std::vector<int64_t> ranks, shapes;
    for (const Buffer& buffer : buffers) {
      addresses.push_back(buffer.address);
      ranks.push_back(static_cast<int64_t>(buffer.shape.size()));
      shapes.insert(shapes.end(), buffer.shape.begin(), buffer.shape.end());
    }
    late_simulator(call, addresses.data(), ranks.data(), shapes.data(), static_cast<int64_t>(buffers.size()), message.data(),
                   static_cast<int64_t>(message.size()));
    return Status();
  });
  if (collected.failure()) return collected;
  if (!status.ok()) return ToError(status);
  if (message[0] != '\0') return ffi::Error(ffi::ErrorCode::kAborted, std::string(message.data()));
  return ffi::Error::Success();
}

int Report(const Status& status, char* message, size_t capacity) {
  if (status.ok()) return 0;
  if (capacity > 0) {
    const size_t size = std::min(capacity - 1, status.message().size());
    std::memcpy(message, status.message().data(), size);
    message[size] = '\0';
  }
  return 1;
}

}  // namespace
}  // namespace mosaic_gpu

// XLA hands every attribute to every stage, so the stages that need none still bind the dictionary.
#define MOSAIC_GPU_HANDLER(symbol, function, binding, ...)                       \
  MOSAIC_GPU_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame* call_frame) {       \
    XLA_FFI_DEFINE_HANDLER(handler, function, binding, ##__VA_ARGS__);           \
    return handler(call_frame);                                                  \
  }

MOSAIC_GPU_HANDLER(mosaic_gpu_cuda_instantiate, mosaic_gpu::Instantiate<mosaic_gpu::CudaState>,
                   xla::ffi::Ffi::BindInstantiate().Attr<std::string_view>("spec"))
MOSAIC_GPU_HANDLER(mosaic_gpu_cuda_initialize, mosaic_gpu::Initialize,
                   xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
                       .Ctx<xla::ffi::PlatformStream<mosaic_gpu::CUstream>>()
                       .Ctx<xla::ffi::State<mosaic_gpu::CudaState>>()
                       .Attrs())
// Capturable: a call always makes the same one launch, or none for an empty grid.
MOSAIC_GPU_HANDLER(mosaic_gpu_cuda_execute, mosaic_gpu::Execute,
                   xla::ffi::Ffi::Bind()
                       .Ctx<xla::ffi::PlatformStream<mosaic_gpu::CUstream>>()
                       .Ctx<xla::ffi::State<mosaic_gpu::CudaState>>()
                       .RemainingArgs()
                       .RemainingRets()
                       .Attrs(),
                   {xla::ffi::Traits::kCmdBufferCompatible})
MOSAIC_GPU_HANDLER(mosaic_gpu_cpu_test_instantiate, mosaic_gpu::Instantiate<mosaic_gpu::CpuTestState>,
                   xla::ffi::Ffi::BindInstantiate().Attr<std::string_view>("spec"))
MOSAIC_GPU_HANDLER(mosaic_gpu_cpu_test_execute, mosaic_gpu::ExecuteOnCpu,
                   xla::ffi::Ffi::Bind()
                       .Ctx<xla::ffi::State<mosaic_gpu::CpuTestState>>()
                       .RemainingArgs()
                       .RemainingRets()
                       .Attrs())

MOSAIC_GPU_HANDLER(mosaic_gpu_simulated, mosaic_gpu::Simulated,
                   xla::ffi::Ffi::Bind()
                       .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                       .RemainingArgs()
                       .RemainingRets())

MOSAIC_GPU_HANDLER(mosaic_gpu_simulate_late, mosaic_gpu::SimulateLate,
                   xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("call"))

MOSAIC_GPU_EXPORT void mosaic_gpu_set_late_simulator(mosaic_gpu::LateSimulator simulator) {
  mosaic_gpu::late_simulator = simulator;
}

MOSAIC_GPU_EXPORT void* mosaic_gpu_cuda_type_id() { return &mosaic_gpu::CudaState::id; }
MOSAIC_GPU_EXPORT void* mosaic_gpu_cuda_type_info() { return &mosaic_gpu::CudaState::info; }
MOSAIC_GPU_EXPORT void* mosaic_gpu_cpu_test_type_id() { return &mosaic_gpu::CpuTestState::id; }
MOSAIC_GPU_EXPORT void* mosaic_gpu_cpu_test_type_info() { return &mosaic_gpu::CpuTestState::info; }

// The version of the bytes that this build reads; Python compares it with its own.
MOSAIC_GPU_EXPORT unsigned mosaic_gpu_spec_version() { return mosaic_gpu::kSpecVersion; }

// See DriverVersion in driver.h.
MOSAIC_GPU_EXPORT int mosaic_gpu_driver_version() { return mosaic_gpu::DriverVersion(); }

// Why there is no usable driver, or "".
MOSAIC_GPU_EXPORT const char* mosaic_gpu_driver_problem() { return mosaic_gpu::GetDriver().problem.c_str(); }

// A launcher for the specification, or null and a message.
MOSAIC_GPU_EXPORT void* mosaic_gpu_launcher_create(const char* spec, size_t size, char* message, size_t capacity) {
  std::unique_ptr<mosaic_gpu::Launcher> launcher;
  const mosaic_gpu::Status status = mosaic_gpu::Guarded(
      [&] { return mosaic_gpu::Launcher::Create({spec, size}, /*shared=*/false, &launcher); });
  return mosaic_gpu::Report(status, message, capacity) == 0 ? launcher.release() : nullptr;
}

// Enqueues a launch over `count` buffers, given by device address and size in bytes.  0, or 1 and a message.
MOSAIC_GPU_EXPORT int mosaic_gpu_launcher_launch(void* launcher, void* stream, const uint64_t* addresses,
                                                 const uint64_t* bytes, size_t count, char* message, size_t capacity) {
  const mosaic_gpu::Status status = mosaic_gpu::Guarded([&] {
    std::vector<mosaic_gpu::Buffer> buffers(count);
    for (size_t i = 0; i < count; ++i) buffers[i] = {reinterpret_cast<void*>(addresses[i]), bytes[i]};
    return static_cast<mosaic_gpu::Launcher*>(launcher)->Launch(stream, buffers.data(), count);
  });
  return mosaic_gpu::Report(status, message, capacity);
}

// Unloads the kernel.  Its launches must have finished, and no graph may hold it.
MOSAIC_GPU_EXPORT void mosaic_gpu_launcher_destroy(void* launcher) {
  delete static_cast<mosaic_gpu::Launcher*>(launcher);
}
